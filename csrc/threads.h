// A fixed pool of threads that share out the items of one loop at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace octavo {

// run() calls f(item, thread) once for every item in [0, num_items), the calling thread taking part as
// thread 0. Every thread has a range of consecutive items, so that it reads memory in order; one that is done claims
// from the ranges of others. Which thread runs which item is open: f must not depend on it. run() waits for
// items, not for threads: a worker that lost its core to another process holds up only the item it had claimed.
// Workers wait for the next loop spinning briefly, then asleep: an idle pool uses no CPU. Not reentrant.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return (int)workers_.size() + 1; }

  // From now on worker i, thread i + 1, runs on the CPUs of cpus[i] only. Thread 0 stays free, since threads that it
  // starts would have to stay where it is; the workers leave it its core. Without effect where the system refuses.
  void pin_workers(const std::vector<std::vector<int>>& cpus);

  template <class F>
  void run(int64_t num_items, const F& f) {
    if (num_items <= 1 || workers_.empty()) {
      for (int64_t i = 0; i < num_items; ++i) f(i, 0);
      return;
    }
    run_job(num_items, [](const void* context, int64_t item, int thread) { (*(const F*)context)(item, thread); }, &f);
  }

 private:
  using Call = void (*)(const void* context, int64_t item, int thread);

  void run_job(int64_t num_items, Call call, const void* context);
  void work(int thread);
  void take_items(int thread);

  std::vector<std::thread> workers_;
  Call call_ = nullptr;
  const void* context_ = nullptr;
  // A thread's range in the current job: where it ends (upper half) and the next item to claim (lower half). A claim is
  // one exchange of both, so a thread that slept through a change of jobs cannot claim what does not exist; and a job
  // cannot end, nor call_ and context_ change, before every claimed item is done.
  struct alignas(64) Range {
    std::atomic<uint64_t> claims{0};
  };
  std::vector<Range> ranges_;
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};  // bumped once per job; also when stopping
  std::atomic<bool> stopping_{false};
};

}  // namespace octavo
