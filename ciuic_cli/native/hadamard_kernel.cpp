// The input transform: random signs and a block Hadamard matrix in Sylvester order, orthonormal.
#include <cmath>

#include "kernels_of_isa.h"

namespace ciuic {
namespace CIUIC_ISA {

static void butterflies(float* block, long size) {
  for (long half = 1; half < size; half *= 2)
    for (long start = 0; start < size; start += 2 * half)
      for (long i = start; i < start + half; ++i) {
        const float a = block[i], b = block[i + half];
        block[i] = a + b;
        block[i + half] = a - b;
      }
}

void hadamard_row(float* row, long cols, int log2_block, const float* signs, int inverse) {
  const long size = 1L << log2_block;
  const float norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
  for (long begin = 0; begin < cols; begin += size) {
    float* block = row + begin;
    const float* sign = signs + begin;
    if (!inverse)
      for (long i = 0; i < size; ++i) block[i] *= sign[i];
    butterflies(block, size);
    for (long i = 0; i < size; ++i) block[i] *= inverse ? norm * sign[i] : norm;
  }
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
