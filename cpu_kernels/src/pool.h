// Threads that share the work of one call: the caller and workers that wait for the next call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace jaxllm {

// A call's work: `run(task)` for each task of [0, count), each by one thread.
class Work {
 public:
  virtual ~Work() = default;
  virtual void run(long task) = 0;

  explicit Work(long count) : count_(count) {}

  void run_all() {
    for (long task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) run(task);
  }

 private:
  const long count_;
  std::atomic<long> next_{0};
};

// Operations of a decode step follow each other within microseconds, while waking a thread takes
// tens of them. A worker therefore looks for the next call for a while before it sleeps. The caller
// never waits for a worker that has not begun.
class Pool {
 public:
  static Pool& instance();

  // Runs all tasks. A second call at the same time is run by its caller alone.
  void run(Work& work);

 private:
  explicit Pool(int workers);
  void serve();
  void wait_for_work(long seen);

  std::atomic<Work*> work_{nullptr};
  std::atomic<long> calls_{0};
  std::atomic<int> busy_{0};
  std::atomic<int> asleep_{0};
  std::mutex in_use_, sleep_;
  std::condition_variable wake_;
};

}  // namespace jaxllm
