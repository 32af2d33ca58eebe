// The small steps around products: results with their bias, and RMS norm and gated activation of a decoder layer.
//
// Sums run over 16 interleaved partial sums whatever the vector length, and the exponential is a polynomial, so that
// every instruction set rounds alike.
#include <cmath>

#include "bfloat16.h"
#include "exponential.h"
#include "kernels_of_isa.h"

namespace ciuic {
namespace CIUIC_ISA {

constexpr int kLanes = 16;

// A tile's row as bfloat16. In two loops of branchless 32-bit operations, which compilers turn into vector instructions.
static inline __attribute__((always_inline)) void round_row(const float* value, uint16_t* out) {
  uint32_t rounded[kTile];
  for (int r = 0; r < kTile; ++r) {
    int32_t bits;
    __builtin_memcpy(&bits, value + r, sizeof bits);
    const uint32_t unsigned_bits = static_cast<uint32_t>(bits);
    const uint32_t nearest = unsigned_bits + 0x7FFFu + (unsigned_bits >> 16 & 1u);
    const uint32_t is_nan = (bits & 0x7FFFFFFF) > 0x7F800000 ? ~0u : 0u;
    rounded[r] = ((is_nan & (unsigned_bits | 0x400000u)) | (~is_nan & nearest)) >> 16;
  }
  for (int r = 0; r < kTile; ++r) out[r] = static_cast<uint16_t>(rounded[r]);
}

// Rows of y that are fetched ahead of their stores: rows lie far apart, so the processor's prefetcher does not find them. A
// prefetch beyond the array is harmless.
constexpr long kRowsAhead = 16;

// Row by row of y, so that the results of neighbouring groups fill whole cache lines.
void store_groups(const float* sums, const GroupColumns* groups, int count, long batch, void* y, long y_stride, bool bf16) {
  const long bytes = bf16 ? 2 : 4;
  for (long b = 0; b < batch; ++b)
    for (int g = 0; g < count; ++g) {
      __builtin_prefetch(static_cast<uint8_t*>(y) + bytes * (y_stride * (b + kRowsAhead) + groups[g].begin), 1);
      const float* sum = sums + (g * batch + b) * kTile;
      const GroupColumns& columns = groups[g];
      float value[kTile];
      for (int r = 0; r < kTile; ++r) value[r] = columns.row_factor[r] * sum[r];
      if (columns.bias != nullptr)
        for (long r = 0; r < columns.count; ++r) value[r] += columns.bias[r];
      const long begin = y_stride * b + columns.begin;
      if (!bf16) {
        for (long r = 0; r < columns.count; ++r) static_cast<float*>(y)[begin + r] = value[r];
      } else {
        uint16_t rounded[kTile];
        round_row(value, rounded);
        uint16_t* to = static_cast<uint16_t*>(y) + begin;
        if (columns.count == kTile)
          __builtin_memcpy(to, rounded, sizeof rounded);
        else
          for (long r = 0; r < columns.count; ++r) to[r] = rounded[r];
      }
    }
}

void rms_norm(const float* x, long count, float epsilon, const float* weight, float* out) {
  float lanes[kLanes] = {};
  long i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += x[i + lane] * x[i + lane];
  for (int lane = 0; i < count; ++i, ++lane) lanes[lane] += x[i] * x[i];
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  const float factor = 1.0f / std::sqrt(lanes[0] / static_cast<float>(count) + epsilon);
  for (long j = 0; j < count; ++j) out[j] = x[j] * factor * weight[j];
}

static inline __attribute__((always_inline)) float silu(float x) { return x / (1.0f + exponential(-x)); }

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u))
static inline __attribute__((always_inline)) float gelu_tanh(float x) {
  constexpr float kTwiceRootTwoOverPi = 1.59576912f, kCubic = 0.044715f;
  return x / (1.0f + exponential(-kTwiceRootTwoOverPi * (x + kCubic * x * x * x)));
}

void gate(CiuicActivation activation, const float* x, const float* other, long count, float* out) {
  if (activation == CIUIC_SILU)
    for (long i = 0; i < count; ++i) out[i] = silu(x[i]) * other[i];
  else
    for (long i = 0; i < count; ++i) out[i] = gelu_tanh(x[i]) * other[i];
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
