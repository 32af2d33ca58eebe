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

// Most threads of one call (chosen, not tuned).
constexpr int kMaxThreads = 256;
// Polls for new work before a worker sleeps. While a model generates a token it calls the pool hundreds of times,
// microseconds apart, and a sleeping thread takes longer than that to wake. No measurement is on record.
constexpr int kSpins = 4000;

struct Job {
  const std::function<void(long)>* work;
  long count;
  std::atomic<long> next{0};
  std::atomic<int> open_slots{0};  // workers that may still join
  std::atomic<int> active{0};      // workers that have joined and not yet left
};

// Takes indices until none is left.
void run_items(Job& job) {
  for (long i = job.next.fetch_add(1); i < job.count; i = job.next.fetch_add(1)) (*job.work)(i);
}

// The thread pool of a process without OpenMP.
class Pool {
 public:
  void run(long count, int threads, const std::function<void(long)>& work) {
    start_workers(threads - 1);
    Job job;
    job.work = &work;
    job.count = count;
    job.open_slots = threads - 1;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      current_ = &job;
      generation_.fetch_add(1, std::memory_order_release);
    }
    if (sleeping_.load() > 0) wake_.notify_all();
    run_items(job);
    {
      std::lock_guard<std::mutex> guard(mutex_);
      current_ = nullptr;  // no worker joins after this, so `job` may leave scope once active is 0
    }
    while (job.active.load(std::memory_order_acquire) > 0) CIUIC_PAUSE();
  }

  std::mutex busy;  // held by the caller whose job runs

 private:
  void start_workers(int workers) {
    while (static_cast<int>(workers_.size()) < workers) {
      try {
        workers_.emplace_back([this] { worker_loop(); });
        workers_.back().detach();
      } catch (const std::system_error&) {
        return;  // fewer threads than asked for: slower, same result
      }
    }
  }

  void worker_loop() {
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
        if (current_ != nullptr && current_->open_slots > 0) {
          job = current_;
          job->open_slots.fetch_sub(1);
          job->active.fetch_add(1);
        }
      }
      if (job == nullptr) continue;
      run_items(*job);
      job->active.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<unsigned long> generation_{0};  // counts jobs
  std::atomic<int> sleeping_{0};
  Job* current_ = nullptr;
  std::vector<std::thread> workers_;
};

// The pool of this process. Threads do not survive fork(), so a child process makes a new pool. Pools are never destroyed,
// because their detached threads may outlive the static objects of this library.
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

// Torch's OpenMP threads spin for milliseconds after each torch operation. A second set of threads would compete with
// them for the cores: a small model on two cores took a third longer per token. So the work goes to the OpenMP threads if
// the process has that runtime. It is looked up by name, because torch brings its own copy and this library links none.
using OpenMpParallel = void (*)(void (*run)(void*), void* data, unsigned threads, unsigned flags);

const pid_t loading_process = getpid();

OpenMpParallel openmp() {
  static const auto parallel = reinterpret_cast<OpenMpParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  // Not after fork(): the runtime's threads do not survive it, and the runtime would wait for them forever.
  return getpid() == loading_process ? parallel : nullptr;
}

void run_on_openmp(OpenMpParallel parallel, long count, int threads, const std::function<void(long)>& work) {
  Job job;
  job.work = &work;
  job.count = count;
  parallel([](void* shared) { run_items(*static_cast<Job*>(shared)); }, &job, static_cast<unsigned>(threads), 0);
}

// The items of several stages, each taken in ascending order.
struct StagedJob {
  int stages;
  const std::function<long(int)>* items;
  const std::function<void(int, long)>* work;
  std::atomic<long>* next;  // one per stage
  void (*barrier)();
};

void run_stages(void* shared) {
  const StagedJob& job = *static_cast<StagedJob*>(shared);
  for (int stage = 0; stage < job.stages; ++stage) {
    const long count = (*job.items)(stage);
    for (long i = job.next[stage].fetch_add(1); i < count; i = job.next[stage].fetch_add(1)) (*job.work)(stage, i);
    if (stage + 1 < job.stages) job.barrier();
  }
}

// One caller at a time uses the OpenMP threads.
std::mutex openmp_busy;

}  // namespace

void parallel_stages(int stages, int threads, const std::function<long(int)>& items,
                     const std::function<void(int, long)>& work) {
  threads = std::min(threads, kMaxThreads);
  static const auto barrier = reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "GOMP_barrier"));
  const OpenMpParallel parallel = openmp();
  if (threads > 1 && parallel != nullptr && barrier != nullptr) {
    std::unique_lock<std::mutex> lock(openmp_busy, std::try_to_lock);
    if (lock.owns_lock()) {
      const std::unique_ptr<std::atomic<long>[]> next(new std::atomic<long>[stages]);
      for (int stage = 0; stage < stages; ++stage) next[stage].store(0, std::memory_order_relaxed);
      StagedJob job = {stages, &items, &work, next.get(), barrier};
      parallel(run_stages, &job, static_cast<unsigned>(threads), 0);
      return;
    }
  }
  for (int stage = 0; stage < stages; ++stage)
    parallel_for(items(stage), threads, [&](long item) { work(stage, item); });
}

void parallel_for(long count, int threads, const std::function<void(long)>& work) {
  threads = std::min(threads, kMaxThreads);
  if (count > 1 && threads > 1) {
    if (const OpenMpParallel parallel = openmp()) {
      std::unique_lock<std::mutex> lock(openmp_busy, std::try_to_lock);
      if (lock.owns_lock()) {
        // All `threads`, even for few items: the runtime ends and starts threads whenever the team changes its size.
        run_on_openmp(parallel, count, threads, work);
        return;
      }
    } else {
      Pool& shared = pool();
      std::unique_lock<std::mutex> lock(shared.busy, std::try_to_lock);
      if (lock.owns_lock()) {
        shared.run(count, static_cast<int>(std::min<long>(count, threads)), work);
        return;
      }
    }
  }
  for (long i = 0; i < count; ++i) work(i);
}

}  // namespace ciuic
