// The input transform: random signs, then an orthonormal block Hadamard matrix in Sylvester order.
//
// The stages of butterflies run from a stride of 1 to half the block, whatever the vector length. So every instruction
// set adds the same numbers in the same order and rounds alike.
#include <cmath>

#include "bfloat16.h"
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

static inline Floats& vector_at(float* values) { return *reinterpret_cast<Floats*>(values); }

// Butterflies between lanes i and i ^ Stride of one vector; nothing if the vector has only `Stride` lanes or fewer.
template <int Stride>
static inline __attribute__((always_inline)) Floats butterfly_lanes(Floats v) {
  if constexpr (Stride < kWidth) {
    Integers partner;
    Floats sign;
    for (int i = 0; i < kWidth; ++i) {
      partner[i] = i ^ Stride;
      sign[i] = (i & Stride) != 0 ? -1.0f : 1.0f;
    }
    return __builtin_shuffle(v, partner) + v * sign;
  }
  return v;
}

// The Hadamard transform of `size` values in place, without the normalisation.
static void butterflies(float* block, long size) {
  if (size < kWidth) {
    for (long stride = 1; stride < size; stride *= 2)
      for (long start = 0; start < size; start += 2 * stride)
        for (long i = start; i < start + stride; ++i) {
          const float a = block[i], b = block[i + stride];
          block[i] = a + b;
          block[i + stride] = a - b;
        }
    return;
  }
  for (long i = 0; i < size; i += kWidth)
    vector_at(block + i) =
        butterfly_lanes<8>(butterfly_lanes<4>(butterfly_lanes<2>(butterfly_lanes<1>(vector_at(block + i)))));
  long stride = kWidth;
  for (; 4 * stride <= size; stride *= 4)  // two stages per sweep over memory
    for (long start = 0; start < size; start += 4 * stride)
      for (long i = start; i < start + stride; i += kWidth) {
        const Floats a = vector_at(block + i), b = vector_at(block + i + stride);
        const Floats c = vector_at(block + i + 2 * stride), d = vector_at(block + i + 3 * stride);
        const Floats a_plus_b = a + b, c_plus_d = c + d, a_minus_b = a - b, c_minus_d = c - d;
        vector_at(block + i) = a_plus_b + c_plus_d;
        vector_at(block + i + stride) = a_minus_b + c_minus_d;
        vector_at(block + i + 2 * stride) = a_plus_b - c_plus_d;
        vector_at(block + i + 3 * stride) = a_minus_b - c_minus_d;
      }
  if (stride < size)
    for (long i = 0; i < stride; i += kWidth) {
      const Floats a = vector_at(block + i), b = vector_at(block + i + stride);
      vector_at(block + i) = a + b;
      vector_at(block + i + stride) = a - b;
    }
}

void fill_signs(float* signs, long cols, uint32_t seed) {
  for (long j = 0; j < cols; ++j)
    signs[j] = 1.0f - 2.0f * static_cast<float>(static_cast<int>(ciuic_sign_is_negative(seed, static_cast<unsigned>(j))));
}

// One block in place: signs and transform, or transform and signs.
static inline void transform_block(float* block, long size, const float* sign, int inverse) {
  const float norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
  if (!inverse)
    for (long i = 0; i < size; ++i) block[i] *= sign[i];
  butterflies(block, size);
  if (inverse)
    for (long i = 0; i < size; ++i) block[i] *= norm * sign[i];
  else
    for (long i = 0; i < size; ++i) block[i] *= norm;
}

void hadamard_row(float* row, long cols, int log2_block, const float* signs, int inverse) {
  const long size = 1L << log2_block;
  for (long begin = 0; begin < cols; begin += size) transform_block(row + begin, size, signs + begin, inverse);
}

void hadamard_row_bfloat16(uint16_t* row, long cols, int log2_block, const float* signs, int inverse) {
  const long size = 1L << log2_block;
  alignas(64) float block[1L << kMaxLog2Block];
  for (long begin = 0; begin < cols; begin += size) {
    for (long i = 0; i < size; ++i) block[i] = from_bfloat16(row[begin + i]);
    transform_block(block, size, signs + begin, inverse);
    for (long i = 0; i < size; ++i) row[begin + i] = to_bfloat16(block[i]);
  }
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
