// See threads.h.
#include "threads.h"

#include <immintrin.h>
#include <sched.h>

namespace octavo {

// About 100 us of pauses: longer than the gaps between the loops of one step, much shorter than the gap
// that an idle server has.
static constexpr int kSpins = 2000;

ThreadPool::ThreadPool(int num_threads) {
  for (int t = 1; t < num_threads; ++t) workers_.emplace_back([this, t] { work(t); });
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& t : workers_) t.join();
}

void ThreadPool::take_items(int thread) {
  for (int64_t i = next_.fetch_add(1, std::memory_order_relaxed); i < num_items_;
       i = next_.fetch_add(1, std::memory_order_relaxed))
    call_(context_, i, thread);
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; ++i) _mm_pause();
    generation_.wait(seen, std::memory_order_acquire);
    ++seen;  // run_job waits for every worker, so no generation is ever skipped
    if (stopping_.load()) return;
    take_items(thread);
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

void ThreadPool::run_job(int64_t num_items, Call call, const void* context) {
  call_ = call;
  context_ = context;
  num_items_ = num_items;
  next_.store(0, std::memory_order_relaxed);
  busy_.store((int)workers_.size(), std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  take_items(0);
  for (int i = 0; busy_.load(std::memory_order_acquire) != 0; ++i) {
    if (i < kSpins) {
      _mm_pause();
    } else {
      sched_yield();  // a worker lost its core; give it ours
    }
  }
}

}  // namespace octavo
