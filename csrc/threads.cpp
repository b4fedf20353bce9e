// See threads.h.
#include "threads.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

namespace octavo {

// About 100 us of pauses: longer than the gaps between the loops of one step, much shorter than the gap
// that an idle server has.
static constexpr int kSpins = 2000;

ThreadPool::ThreadPool(int num_threads) : ranges_((size_t)num_threads) {
  for (int t = 1; t < num_threads; ++t) workers_.emplace_back([this, t] { work(t); });
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& t : workers_) t.join();
}

void ThreadPool::pin_workers(const std::vector<std::vector<int>>& cpus) {
  for (size_t i = 0; i < workers_.size() && i < cpus.size(); ++i) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus[i])
      if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
    pthread_setaffinity_np(workers_[i].native_handle(), sizeof set, &set);
  }
}

void ThreadPool::take_items(int thread) {
  const int num = size();
  for (int i = 0; i < num; ++i) {
    std::atomic<uint64_t>& claims = ranges_[(size_t)((thread + i) % num)].claims;
    uint64_t claim = claims.load(std::memory_order_acquire);
    while ((uint32_t)claim < (uint32_t)(claim >> 32)) {
      if (!claims.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      call_(context_, (int64_t)(uint32_t)claim, thread);
      done_.fetch_add(1, std::memory_order_release);
      claim = claims.load(std::memory_order_acquire);
    }
  }
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; ++i) _mm_pause();
    generation_.wait(seen, std::memory_order_acquire);
    seen = generation_.load(std::memory_order_acquire);
    if (stopping_.load()) return;
    take_items(thread);
  }
}

void ThreadPool::run_job(int64_t num_items, Call call, const void* context) {
  call_ = call;
  context_ = context;
  done_.store(0, std::memory_order_relaxed);
  const int64_t num = size();
  for (int64_t t = 0; t < num; ++t) {
    const uint64_t begin = (uint64_t)(num_items * t / num), end = (uint64_t)(num_items * (t + 1) / num);
    ranges_[(size_t)t].claims.store(end << 32 | begin, std::memory_order_release);
  }
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  take_items(0);
  for (int i = 0; done_.load(std::memory_order_acquire) != num_items; ++i) {
    if (i < kSpins) {
      _mm_pause();
    } else {
      sched_yield();  // the thread with the last item lost its core; give it ours
    }
  }
}

}  // namespace octavo
