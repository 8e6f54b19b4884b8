// Threads that share the work of one call: the caller and workers that wait for the next call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace jaxllm {

// Memory that a call reads.
struct Range {
  const char* begin = nullptr;
  long bytes = 0;
};

// A call's work: `run(task)` for each task of [0, count), each by one thread.
class Work {
 public:
  virtual ~Work() = default;
  virtual void run(long task) = 0;

  explicit Work(long count, Range weights = {}) : weights(weights), count_(count) {}

  void run_all() {
    for (long task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) run(task);
  }

  const Range weights;  // if they are as a rule followed by the same ones

 private:
  const long count_;
  std::atomic<long> next_{0};
};

// Operations of a decode step follow each other within microseconds, while waking a thread takes
// tens of them. A worker therefore looks for the next call for a while before it sleeps. The caller
// never waits for a worker that has not begun. While a worker looks, it fetches the weights into the
// cache that followed the current ones last time: between products memory would stand idle.
class Pool {
 public:
  static Pool& instance();

  int threads() const { return threads_; }

  // Runs all tasks. A second call at the same time is run by its caller alone.
  void run(Work& work);

 private:
  explicit Pool(int workers);
  void serve();
  void wait_for_work(long seen);
  void foresee(Range weights);
  void fetch_ahead();

  const int threads_;
  std::atomic<Work*> work_{nullptr};
  std::atomic<long> calls_{0};
  std::atomic<int> busy_{0};
  std::atomic<int> asleep_{0};
  // Only hints: a thread may see the beginning of one range with the size of another.
  std::atomic<const char*> ahead_{nullptr};
  std::atomic<long> ahead_bytes_{0}, fetched_{0};
  std::unordered_map<const char*, Range> next_;  // by the beginning of what was read before
  const char* last_ = nullptr;
  std::mutex in_use_, sleep_;
  std::condition_variable wake_;
};

}  // namespace jaxllm
