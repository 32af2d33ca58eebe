// Measures limits of the processor for benchmarks/cpu.py: its clock and the memory bandwidth of one thread.
#include <cstddef>
#include <cstdint>
#include <ctime>

namespace {

double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);  // CPU time of this thread, so that other processes do not count
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

constexpr int kTrials = 8;

}  // namespace

// Cycles per second, from a chain of dependent additions that take one cycle each.
extern "C" double clock_hz() {
  constexpr long kSteps = 1 << 22;
  double best = 0.0;
  for (int trial = 0; trial < kTrials; ++trial) {
    uint64_t x = 1;
    const double started = now();
    for (long i = 0; i < kSteps; i += 8) {
      for (int step = 0; step < 8; ++step) {
        x += 3;
        asm volatile("" : "+r"(x));  // keeps the additions, each of which depends on the one before
      }
    }
    const double rate = kSteps / (now() - started);
    best = rate > best ? rate : best;
  }
  return best;
}

// Bytes per second at which one thread reads `bytes` bytes of memory in order.
extern "C" double read_bytes_per_second(const uint64_t* memory, size_t bytes) {
  typedef uint64_t Vector __attribute__((vector_size(64), aligned(8)));
  double best = 0.0;
  for (int trial = 0; trial < kTrials; ++trial) {
    Vector a = {}, b = {};
    const double started = now();
    for (size_t i = 0; i + 16 <= bytes / 8; i += 16) {
      a ^= *reinterpret_cast<const Vector*>(memory + i);
      b ^= *reinterpret_cast<const Vector*>(memory + i + 8);
    }
    asm volatile("" : : "x"(a[0] ^ b[0]));
    const double rate = static_cast<double>(bytes) / (now() - started);
    best = rate > best ? rate : best;
  }
  return best;
}
