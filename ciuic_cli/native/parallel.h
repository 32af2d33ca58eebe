// Runs work on the threads of the process's OpenMP runtime or, if it has none, on a pool that lives as long as the process.
#ifndef CIUIC_PARALLEL_H
#define CIUIC_PARALLEL_H

#include <functional>

namespace ciuic {

// Calls work(index) for every index in 0 .. count - 1 on up to `threads` threads, the caller's among them, and returns
// when all calls have returned. Threads take indices in ascending order. If the threads are busy with another caller's
// work, everything runs on the caller's thread, so results must not depend on the thread that computes them.
void parallel_for(long count, int threads, const std::function<void(long)>& work);

// Runs `stages` stages one after another in one team of threads. Stage s has items(s) items; work(s, item) is called for each
// of them, and every call of a stage returns before the next stage begins. `items` must be cheap: each thread calls it.
void parallel_stages(int stages, int threads, const std::function<long(int)>& items,
                     const std::function<void(int, long)>& work);

}  // namespace ciuic

#endif
