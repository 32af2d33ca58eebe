// The encoder: a Viterbi search over the bit-shift trellis.
//
// After step t the state is the window s_t of L bits that weight t is decoded from; the next step shifts K bits in. Only
// the low L-K bits p of a window (the prefix that the next window starts with) matter for the future, so the search keeps
//   best_t[p] = min over windows s with low bits p of  best_{t-1}[s >> K] + (level(s) - x_t)^2
// for every t, and the way back finds the minimising s again instead of storing it.
//
// All metrics are integers, so every instruction set and every order of evaluation gives the same path:
//   (level - x)^2 - x^2 = level^2 - 2 x level  ~  [16 * square(s) + linear_t * level(s)] / 4 + constant
// with square = (level^2 - 130050) / 4 rounded to int16 and linear_t = round(-8 x_t).
#include <cmath>
#include <cstring>

#include "codebook.h"
#include "kernels_of_isa.h"
#include "trellis_decode.h"

namespace ciuic {
namespace CIUIC_ISA {

static const int32_t kUnreachable = 1 << 30;

struct Trellis {
  int bits, window;
  const int16_t* codebook;
  int prefixes;
  int32_t* history;  // best_t[p] for t = -1 .. 255
};

static inline int32_t metric(const int16_t* entry, const int16_t* weight) { return entry[0] * weight[0] + entry[1] * weight[1]; }

static void forward_step(const Trellis& trellis, const int32_t* before, int32_t* after, const int16_t weight[2]) {
  const int bits = trellis.bits, prefix_bits = trellis.window - bits;
  const int prefixes = trellis.prefixes;
  const int run = 1 << (bits < prefix_bits ? bits : prefix_bits);
  const int32_t w0 = weight[0], w1 = weight[1];
  for (int start = 0; start < prefixes; start += run) {
    for (int high = 0; high < 1 << bits; ++high) {
      const int state = (high << prefix_bits) | start;
      const int32_t base = before[state >> bits];
      const int16_t* entry = trellis.codebook + 2 * state;
      int32_t* out = after + start;
      if (high == 0)
        for (int i = 0; i < run; ++i) out[i] = base + entry[2 * i] * w0 + entry[2 * i + 1] * w1;
      else
        for (int i = 0; i < run; ++i) {
          const int32_t cost = base + entry[2 * i] * w0 + entry[2 * i + 1] * w1;
          out[i] = cost < out[i] ? cost : out[i];
        }
    }
  }
}

// The window that reaches prefix p after step t at the least cost (the smallest such window).
static int step_back(const Trellis& trellis, const int32_t* before, int prefix, const int16_t weight[2]) {
  int best_state = 0;
  int32_t best_cost = INT32_MAX;
  for (int high = 0; high < 1 << trellis.bits; ++high) {
    const int state = (high << (trellis.window - trellis.bits)) | prefix;
    const int32_t cost = before[state >> trellis.bits] + metric(trellis.codebook + 2 * state, weight);
    if (cost < best_cost) {
      best_cost = cost;
      best_state = state;
    }
  }
  return best_state;
}

static void step_weight(float x, int16_t weight[2]) {
  if (x != x) {  // costs nothing
    weight[0] = weight[1] = 0;
    return;
  }
  const float bound = 640.0f;
  const float clipped = x > bound ? bound : (x < -bound ? -bound : x);
  weight[0] = 16;
  weight[1] = static_cast<int16_t>(std::rint(-8.0f * clipped));
}

size_t encode_workspace_bytes(int bits, int window) {
  return sizeof(int32_t) * (kTileWeights + 1) * (size_t{1} << (window - bits));
}

int encode_batch(int, int) { return 1; }

static void forward(const Trellis& trellis, const int16_t (*weights)[2], int first, int count) {
  for (int i = 0; i < count; ++i)
    forward_step(trellis, trellis.history + static_cast<size_t>(i) * trellis.prefixes,
                 trellis.history + static_cast<size_t>(i + 1) * trellis.prefixes,
                 weights[(first + i) & (kTileWeights - 1)]);
}

static void encode_tile(const float* target, const Trellis& trellis, uint16_t* windows) {
  int16_t weights[kTileWeights][2];
  for (int i = 0; i < kTileWeights; ++i) step_weight(target[i], weights[i]);
  const int prefixes = trellis.prefixes;

  // Where does a good path cross the boundary of the circular string? A short open-ended search around it tells.
  const int reach = 32;
  for (int p = 0; p < prefixes; ++p) trellis.history[p] = 0;
  forward(trellis, weights, kTileWeights - reach, 2 * reach);
  const int32_t* last = trellis.history + static_cast<size_t>(2 * reach) * prefixes;
  int prefix = 0;
  for (int p = 1; p < prefixes; ++p)
    if (last[p] < last[prefix]) prefix = p;
  for (int i = 2 * reach; i > reach; --i)
    prefix = step_back(trellis, trellis.history + static_cast<size_t>(i - 1) * prefixes, prefix,
                       weights[(kTileWeights - reach + i - 1) & (kTileWeights - 1)]) >> trellis.bits;

  for (int p = 0; p < prefixes; ++p) trellis.history[p] = p == prefix ? 0 : kUnreachable;
  forward(trellis, weights, 0, kTileWeights);
  for (int i = kTileWeights; i > 0; --i) {
    const int state = step_back(trellis, trellis.history + static_cast<size_t>(i - 1) * prefixes, prefix, weights[i - 1]);
    windows[i - 1] = static_cast<uint16_t>(state);
    prefix = state >> trellis.bits;
  }
}

void encode_tiles(const float* const* targets, int tiles, int bits, int window, void* workspace,
                  uint16_t* const* windows) {
  const Trellis trellis = {bits, window, codebook(bits, window), 1 << (window - bits), static_cast<int32_t*>(workspace)};
  for (int i = 0; i < tiles; ++i) encode_tile(targets[i], trellis, windows[i]);
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
