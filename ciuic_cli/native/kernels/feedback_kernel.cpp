// Error feedback: products of rounding errors with panels of the feedback matrices (Panels in round.cpp).
#include "kernels_of_isa.h"

namespace ciuic {
namespace CIUIC_ISA {

// 16 floats; the compiler splits them into the registers of the instruction set.
typedef float Floats16 __attribute__((vector_size(64), aligned(4)));

void panel_product(const float* left, size_t left_stride, const float* right, size_t right_stride, long count,
                   float out[kTileWeights]) {
  Floats16 sum[kTile];
  for (int a = 0; a < kTile; ++a) sum[a] = *reinterpret_cast<const Floats16*>(out + kTile * a);
  for (long k = 0; k < count; ++k) {
    const Floats16 row = *reinterpret_cast<const Floats16*>(right + right_stride * k);
    const float* factors = left + left_stride * k;
    for (int a = 0; a < kTile; ++a) sum[a] += row * factors[a];
  }
  for (int a = 0; a < kTile; ++a) *reinterpret_cast<Floats16*>(out + kTile * a) = sum[a];
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
