// Error feedback: the products of stored errors with the feedback matrices.
#include "kernels_of_isa.h"

namespace ciuic {
namespace CIUIC_ISA {

typedef float Lanes __attribute__((vector_size(64), aligned(4)));

void panel_product(const float* left, size_t left_stride, const float* right, size_t right_stride, long count,
                   float out[kTileWeights]) {
  Lanes sum[kTile];
  for (int a = 0; a < kTile; ++a) sum[a] = *reinterpret_cast<const Lanes*>(out + kTile * a);
  for (long k = 0; k < count; ++k) {
    const Lanes row = *reinterpret_cast<const Lanes*>(right + right_stride * k);
    const float* factors = left + left_stride * k;
    for (int a = 0; a < kTile; ++a) sum[a] += row * factors[a];
  }
  for (int a = 0; a < kTile; ++a) *reinterpret_cast<Lanes*>(out + kTile * a) = sum[a];
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
