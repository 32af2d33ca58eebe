// Work for several threads: those of the process's OpenMP runtime, or else a pool that lives as long as the process.
#ifndef CIUIC_PARALLEL_H
#define CIUIC_PARALLEL_H

#include <functional>

namespace ciuic {

// Calls work(index) for index 0..count-1 on up to `threads` threads, the caller's among them, and returns when all calls
// have. Indices are handed out in ascending order. While the threads are busy with another caller's
// work, everything runs on the caller's thread: results must not depend on who computes them.
void parallel_for(long count, int threads, const std::function<void(long)>& work);

}  // namespace ciuic

#endif
