// What this processor can do at most, for benchmarks/cpu.py: its clock and how fast one thread reads memory.
#include <cstddef>
#include <cstdint>
#include <ctime>

namespace {

double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);  // other work on the machine does not count
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

constexpr int kTrials = 8;

}  // namespace

// Cycles per second, from a chain of dependent additions at one cycle each.
extern "C" double clock_hz() {
  constexpr long kSteps = 1 << 22;
  double best = 0.0;
  for (int trial = 0; trial < kTrials; ++trial) {
    uint64_t x = 1;
    const double started = now();
    for (long i = 0; i < kSteps; i += 8) {
      for (int step = 0; step < 8; ++step) {
        x += 3;
        asm volatile("" : "+r"(x));  // the next addition has to wait for this one
      }
    }
    const double rate = kSteps / (now() - started);
    best = rate > best ? rate : best;
  }
  return best;
}

// Bytes per second of one thread that reads `bytes` of memory in order.
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
