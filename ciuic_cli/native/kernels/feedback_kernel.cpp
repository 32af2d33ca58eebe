// Error feedback: products of rounding errors with panels of the feedback matrices (Panels in round.cpp).
#include "kernels_of_isa.h"

namespace ciuic {
namespace CIUIC_ISA {

// Floats of a register, and rows of sums that stay in registers. GCC keeps an array of longer vectors in memory
// (docs/experiments/runtime/cpu-encoder.md).
#if defined(__AVX512F__)
static const int kFloats = 16, kRows = 16;
#elif defined(__AVX2__)
static const int kFloats = 8, kRows = 4;
#else
static const int kFloats = 4, kRows = 2;
#endif
static const int kVectors = kTile / kFloats;
typedef float Floats __attribute__((vector_size(4 * kFloats), aligned(4), may_alias));

static inline Floats& floats_at(float* memory) { return *reinterpret_cast<Floats*>(memory); }
static inline Floats floats_at(const float* memory) { return *reinterpret_cast<const Floats*>(memory); }

void panel_product(const float* left, size_t left_stride, const float* right, size_t right_stride, long count,
                   float out[kTileWeights]) {
  for (int first = 0; first < kTile; first += kRows) {
    Floats sum[kRows][kVectors];
#pragma GCC unroll 16
    for (int a = 0; a < kRows; ++a)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[a][v] = floats_at(out + kTile * (first + a) + kFloats * v);
    for (long k = 0; k < count; ++k) {
      const float* factors = left + left_stride * k + first;
      const float* row = right + right_stride * k;
#pragma GCC unroll 16
      for (int a = 0; a < kRows; ++a)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[a][v] += floats_at(row + kFloats * v) * factors[a];
    }
#pragma GCC unroll 16
    for (int a = 0; a < kRows; ++a)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) floats_at(out + kTile * (first + a) + kFloats * v) = sum[a][v];
  }
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
