#include "pool.h"

#include <algorithm>
#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxllm {
namespace {

constexpr auto kSpin = std::chrono::microseconds(200);
constexpr int kPatience = 2000;
constexpr long kMostAhead = 1 << 20;  // bytes: a second-level cache
constexpr long kPiece = 1024, kLine = 64;
constexpr size_t kMostRanges = 1 << 14;  // of models that are no longer there, too

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

Pool& Pool::instance() {
  // Never destroyed: its threads run until the process ends.
  static Pool* pool = new Pool(static_cast<int>(std::thread::hardware_concurrency()) - 1);
  return *pool;
}

Pool::Pool(int workers) : threads_(workers + 1) {
  for (int i = 0; i < workers; ++i) std::thread([this] { serve(); }).detach();
}

void Pool::run(Work& work) {
  std::unique_lock<std::mutex> in_use(in_use_, std::try_to_lock);
  if (!in_use.owns_lock()) return work.run_all();
  foresee(work.weights);
  work_.store(&work);
  calls_.fetch_add(1);
  if (asleep_.load() > 0) {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  work.run_all();
  work_.store(nullptr);
  // A worker that counts itself as busy from here on sees no work.
  for (int i = 0; busy_.load() > 0; ++i) {
    if (i < kPatience)
      pause();
    else
      std::this_thread::yield();  // the system may have given a worker's core to another program
  }
}

void Pool::serve() {
  for (long seen = 0;;) {
    wait_for_work(seen);
    seen = calls_.load();
    busy_.fetch_add(1);
    if (Work* work = work_.load()) work->run_all();
    busy_.fetch_sub(1);
  }
}

void Pool::wait_for_work(long seen) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (calls_.load() != seen) return;
      fetch_ahead();
    }
  } while (std::chrono::steady_clock::now() < end);
  std::unique_lock<std::mutex> lock(sleep_);
  asleep_.fetch_add(1);
  wake_.wait(lock, [&] { return calls_.load() != seen; });
  asleep_.fetch_sub(1);
}

void Pool::foresee(Range weights) {
  if (!weights.begin) return;
  if (next_.size() > kMostRanges) next_.clear();
  next_[last_] = weights;
  last_ = weights.begin;
  const auto next = next_.find(last_);
  const Range range = next == next_.end() ? Range{} : next->second;
  ahead_.store(range.begin);
  ahead_bytes_.store(std::min(range.bytes, kMostAhead));
  fetched_.store(0);
}

void Pool::fetch_ahead() {
  if (fetched_.load() >= ahead_bytes_.load()) return pause();
  // Weights that are no longer there are no error: a fetch into the cache never is.
  const char* piece = ahead_.load() + fetched_.fetch_add(kPiece);
  for (long i = 0; i < kPiece; i += kLine) __builtin_prefetch(piece + i, 0, 2);
}

}  // namespace jaxllm
