// A fixed pool of threads that share out the items of one loop at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace octavo {

// run() calls f(item, thread) once for every item in [0, num_items), the calling thread taking part as
// thread 0. Items are handed out one by one, so which thread runs which is open: f must not depend on it.
// Workers wait for the next loop spinning briefly, then asleep: an idle pool uses no CPU. Not reentrant.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return (int)workers_.size() + 1; }

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
  int64_t num_items_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> busy_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};  // bumped once per job; also when stopping
  std::atomic<bool> stopping_{false};
};

}  // namespace octavo
