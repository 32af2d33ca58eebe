// A straightforward encoder, the baseline of benchmarks/codec.py: one tile at a time, float costs, all 2^L windows at
// every step, two full passes to close the circular path. Only the compiler vectorises it. It supports whole K from 2
// on.
#include <cstddef>
#include <cstdint>
#include <vector>

using std::size_t;

namespace {

float level(uint32_t window) {
  const uint32_t h = window * 0x83DCD12Du;
  return static_cast<float>((h & 255) + (h >> 8 & 255) + (h >> 16 & 255) + (h >> 24)) - 510.0f;
}

// One step: after[p] = min over windows with low bits p. `Run` neighbouring prefixes have the same predecessor.
template <int Run>
void step(const float* level_of, const float* before, float* after, float target, int bits, int prefixes) {
  for (int start = 0; start < prefixes; start += Run) {
    float best[Run];
    for (int i = 0; i < Run; ++i) best[i] = 1e30f;
    for (int high = 0; high < 1 << bits; ++high) {
      const int state = high * prefixes + start;
      const float base = before[state >> bits];
      for (int i = 0; i < Run; ++i) {
        const float d = level_of[state + i] - target, cost = base + d * d;
        best[i] = cost < best[i] ? cost : best[i];
      }
    }
    for (int i = 0; i < Run; ++i) after[start + i] = best[i];
  }
}

struct Plain {
  int bits, L, prefixes;
  std::vector<float> level_of;  // by window
  std::vector<float> cost;      // [257][prefixes]: minimal cost per prefix before every step and after the last

  Plain(int bits, int L)
      : bits(bits), L(L), prefixes(1 << (L - bits)), level_of(size_t{1} << L),
        cost(size_t{257} * prefixes) {
    for (size_t s = 0; s < level_of.size(); ++s) level_of[s] = level(static_cast<uint32_t>(s));
  }

  // The forward pass over all 256 targets, from target `first` on (modulo 256).
  void pass(const float* x, int first) {
    for (int t = 0; t < 256; ++t) {
      const float* before = &cost[static_cast<size_t>(t) * prefixes];
      float* after = &cost[static_cast<size_t>(t + 1) * prefixes];
      const float target = x[(first + t) & 255];
      if (bits == 2) step<4>(level_of.data(), before, after, target, bits, prefixes);
      else if (bits == 3) step<8>(level_of.data(), before, after, target, bits, prefixes);
      else step<16>(level_of.data(), before, after, target, bits, prefixes);
    }
  }

  // Traces the best path to `prefix` back over `steps` steps and returns the prefix before them. `windows` may be null.
  int back(const float* x, int first, int prefix, int steps, int32_t* windows) const {
    for (int t = 255; t >= 256 - steps; --t) {
      int best = 0;
      float least = 1e30f;
      for (int high = 0; high < 1 << bits; ++high) {
        const int state = high * prefixes + prefix;
        const float d = level_of[state] - x[(first + t) & 255];
        const float c = cost[static_cast<size_t>(t) * prefixes + (state >> bits)] + d * d;
        if (c < least) {
          least = c;
          best = state;
        }
      }
      if (windows != nullptr) windows[t] = best;
      prefix = best >> bits;
    }
    return prefix;
  }

  void encode(const float* x, int32_t* windows) {
    for (int p = 0; p < prefixes; ++p) cost[p] = 0.0f;
    pass(x, 128);
    const float* last = &cost[static_cast<size_t>(256) * prefixes];
    int best = 0;
    for (int p = 1; p < prefixes; ++p)
      if (last[p] < last[best]) best = p;
    const int overlap = back(x, 128, best, 128, nullptr);
    for (int p = 0; p < prefixes; ++p) cost[p] = p == overlap ? 0.0f : 1e20f;
    pass(x, 0);
    back(x, 0, overlap, 256, windows);
  }
};

}  // namespace

// x: targets, tiles x 256, in units of the level. windows: tiles x 256.
extern "C" void plain_encode(const float* x, long tiles, int bits, int L, int32_t* windows) {
  Plain plain(bits, L);
  for (long i = 0; i < tiles; ++i) plain.encode(x + 256 * i, windows + 256 * i);
}
