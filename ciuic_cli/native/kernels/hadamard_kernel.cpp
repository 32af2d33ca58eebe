// The input transform: random signs and a block Hadamard matrix in Sylvester order, orthonormal.
//
// Sums are formed level by level, from neighbours to halves of the block, whatever the vector length: every instruction set
// rounds alike.
#include <cmath>

#include "kernels_of_isa.h"
#include "trellis_decode.h"

namespace ciuic {
namespace CIUIC_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kWidth), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * kWidth)));

static inline Floats& at(float* values) { return *reinterpret_cast<Floats*>(values); }

// Butterflies between lanes i and i ^ Half.
template <int Half>
static inline __attribute__((always_inline)) Floats within(Floats v) {
  if constexpr (Half < kWidth) {
    Integers partner;
    Floats sign;
    for (int i = 0; i < kWidth; ++i) {
      partner[i] = i ^ Half;
      sign[i] = (i & Half) != 0 ? -1.0f : 1.0f;
    }
    return __builtin_shuffle(v, partner) + v * sign;
  }
  return v;
}

static void butterflies(float* block, long size) {
  if (size < kWidth) {
    for (long half = 1; half < size; half *= 2)
      for (long start = 0; start < size; start += 2 * half)
        for (long i = start; i < start + half; ++i) {
          const float a = block[i], b = block[i + half];
          block[i] = a + b;
          block[i + half] = a - b;
        }
    return;
  }
  for (long i = 0; i < size; i += kWidth)
    at(block + i) = within<8>(within<4>(within<2>(within<1>(at(block + i)))));
  long half = kWidth;
  for (; 4 * half <= size; half *= 4)  // two levels at once
    for (long start = 0; start < size; start += 4 * half)
      for (long i = start; i < start + half; i += kWidth) {
        const Floats a = at(block + i), b = at(block + i + half), c = at(block + i + 2 * half), d = at(block + i + 3 * half);
        const Floats ab = a + b, cd = c + d, a_b = a - b, c_d = c - d;
        at(block + i) = ab + cd;
        at(block + i + half) = a_b + c_d;
        at(block + i + 2 * half) = ab - cd;
        at(block + i + 3 * half) = a_b - c_d;
      }
  if (half < size)
    for (long i = 0; i < half; i += kWidth) {
      const Floats a = at(block + i), b = at(block + i + half);
      at(block + i) = a + b;
      at(block + i + half) = a - b;
    }
}

void fill_signs(float* signs, long cols, uint32_t seed) {
  for (long j = 0; j < cols; ++j)
    signs[j] = 1.0f - 2.0f * static_cast<float>(static_cast<int>(ciuic_sign_is_negative(seed, static_cast<unsigned>(j))));
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
    if (inverse)
      for (long i = 0; i < size; ++i) block[i] *= norm * sign[i];
    else
      for (long i = 0; i < size; ++i) block[i] *= norm;
  }
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
