#include "parallel.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define CIUIC_PAUSE() _mm_pause()
#else
#define CIUIC_PAUSE() std::this_thread::yield()
#endif

namespace ciuic {
namespace {

constexpr int kMaxThreads = 256;
// A decode step of a model calls the pool hundreds of times with microseconds between; a sleeping thread takes longer than
// that to wake, so workers look for new work this many times before they sleep.
constexpr int kSpins = 4000;

struct Job {
  const std::function<void(long)>* work;
  long count;
  std::atomic<long> next{0};
  std::atomic<int> seats{0};    // workers that may still join
  std::atomic<int> working{0};  // workers that have joined and not left
};

void take(Job& job) {
  for (long i = job.next.fetch_add(1); i < job.count; i = job.next.fetch_add(1)) (*job.work)(i);
}

// For processes without OpenMP.
class Pool {
 public:
  void run(long count, int threads, const std::function<void(long)>& work) {
    grow(threads - 1);
    Job job;
    job.work = &work;
    job.count = count;
    job.seats = threads - 1;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      current_ = &job;
      generation_.fetch_add(1, std::memory_order_release);
    }
    if (sleeping_.load() > 0) wake_.notify_all();
    take(job);
    {
      std::lock_guard<std::mutex> guard(mutex_);
      current_ = nullptr;  // nobody joins from here on
    }
    while (job.working.load(std::memory_order_acquire) > 0) CIUIC_PAUSE();
  }

  std::mutex busy;

 private:
  void grow(int workers) {
    while (static_cast<int>(workers_.size()) < workers) {
      try {
        workers_.emplace_back([this] { serve(); });
        workers_.back().detach();
      } catch (const std::system_error&) {
        return;  // fewer threads than asked for: slower, same result
      }
    }
  }

  void serve() {
    unsigned long seen = 0;
    for (;;) {
      for (int spin = 0; spin < kSpins && generation_.load(std::memory_order_acquire) == seen; ++spin) CIUIC_PAUSE();
      Job* job = nullptr;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        if (generation_.load() == seen) {
          sleeping_.fetch_add(1);
          wake_.wait(lock, [&] { return generation_.load() != seen; });
          sleeping_.fetch_sub(1);
        }
        seen = generation_.load();
        if (current_ != nullptr && current_->seats > 0) {
          job = current_;
          job->seats.fetch_sub(1);
          job->working.fetch_add(1);
        }
      }
      if (job == nullptr) continue;
      take(*job);
      job->working.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<unsigned long> generation_{0};
  std::atomic<int> sleeping_{0};
  Job* current_ = nullptr;
  std::vector<std::thread> workers_;
};

// Threads do not survive fork(), so a child process gets a pool of its own. Pools are never destroyed: their detached
// threads may outlive the statics of this library.
Pool& pool() {
  static std::mutex mutex;
  static Pool* instance = nullptr;
  static pid_t owner = 0;
  std::lock_guard<std::mutex> guard(mutex);
  if (instance == nullptr || owner != getpid()) {
    instance = new Pool;
    owner = getpid();
  }
  return *instance;
}

// Torch's threads spin for milliseconds after each of its operations. Threads of our own would share the cores with them (tokens of
// a small model on two cores took a third longer), so work goes to the same threads where the process has an OpenMP runtime:
// found by name, since torch brings its own and this library is linked to none.
using OpenMpParallel = void (*)(void (*run)(void*), void* data, unsigned threads, unsigned flags);

const pid_t loaded_in = getpid();

OpenMpParallel openmp() {
  static const auto found = reinterpret_cast<OpenMpParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return getpid() == loaded_in ? found : nullptr;  // its threads do not survive fork() either, and it waits for them
}

void run_on(OpenMpParallel parallel, long count, int threads, const std::function<void(long)>& work) {
  Job job;
  job.work = &work;
  job.count = count;
  parallel([](void* shared) { take(*static_cast<Job*>(shared)); }, &job, static_cast<unsigned>(threads), 0);
}

}  // namespace

void parallel_for(long count, int threads, const std::function<void(long)>& work) {
  threads = std::min(threads, kMaxThreads);
  if (count > 1 && threads > 1) {
    if (const OpenMpParallel parallel = openmp()) {
      static std::mutex busy;
      std::unique_lock<std::mutex> mine(busy, std::try_to_lock);
      if (mine.owns_lock()) {
        // Not fewer threads for little work: a team that changes its size ends threads and starts others.
        run_on(parallel, count, threads, work);
        return;
      }
    } else {
      Pool& shared = pool();
      std::unique_lock<std::mutex> mine(shared.busy, std::try_to_lock);
      if (mine.owns_lock()) {
        shared.run(count, static_cast<int>(std::min<long>(count, threads)), work);
        return;
      }
    }
  }
  for (long i = 0; i < count; ++i) work(i);
}

}  // namespace ciuic
