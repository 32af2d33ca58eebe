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

static inline __attribute__((always_inline)) Floats butterflies_in(Floats v) {
  return butterfly_lanes<8>(butterfly_lanes<4>(butterfly_lanes<2>(butterfly_lanes<1>(v))));
}

struct Four {
  Floats part[4];
};

// Two stages of butterflies between four vectors: first of neighbours, then of the others.
static inline __attribute__((always_inline)) Four butterflies_of(Floats a, Floats b, Floats c, Floats d) {
  const Floats a_plus_b = a + b, c_plus_d = c + d, a_minus_b = a - b, c_minus_d = c - d;
  return {{a_plus_b + c_plus_d, a_minus_b + c_minus_d, a_plus_b - c_plus_d, a_minus_b - c_minus_d}};
}

// One block in place: signs and transform, or transform and signs, with the norm. Signs and norm are applied while the first and
// the last stage have the values in registers.
template <bool Inverse>
struct Block {
  float* value;
  const float* sign;
  float norm;

  Floats signed_at(long i) const {
    const Floats v = vector_at(value + i);
    return Inverse ? v : v * vector_at(const_cast<float*>(sign) + i);
  }

  template <bool Last>
  void store(long i, Floats v) const {
    vector_at(value + i) = !Last ? v : Inverse ? v * (norm * vector_at(const_cast<float*>(sign) + i)) : v * norm;
  }

  template <bool Last>
  void store_four(long i, long stride, const Four& four) const {
    for (int k = 0; k < 4; ++k) store<Last>(i + k * stride, four.part[k]);
  }

  // The stages within vectors and between four neighbours.
  template <bool Last>
  void first_stages(long size) const {
    for (long i = 0; i < size; i += 4 * kWidth)
      store_four<Last>(i, kWidth, butterflies_of(butterflies_in(signed_at(i)), butterflies_in(signed_at(i + kWidth)),
                                                 butterflies_in(signed_at(i + 2 * kWidth)),
                                                 butterflies_in(signed_at(i + 3 * kWidth))));
  }

  // The stages of `stride` and twice that.
  template <bool Last>
  void two_stages(long size, long stride) const {
    for (long start = 0; start < size; start += 4 * stride)
      for (long i = start; i < start + stride; i += kWidth)
        store_four<Last>(i, stride, butterflies_of(vector_at(value + i), vector_at(value + i + stride),
                                                   vector_at(value + i + 2 * stride), vector_at(value + i + 3 * stride)));
  }

  void transform(long size) const {
    long stride = 4 * kWidth;
    if (stride == size) return first_stages<true>(size);
    first_stages<false>(size);
    for (; 4 * stride < size; stride *= 4) two_stages<false>(size, stride);
    if (4 * stride == size) return two_stages<true>(size, stride);
    for (long i = 0; i < stride; i += kWidth) {
      const Floats a = vector_at(value + i), b = vector_at(value + i + stride);
      store<true>(i, a + b);
      store<true>(i + stride, a - b);
    }
  }

  // The same for fewer than four vectors.
  void transform_few(long size) const {
    for (long i = 0; !Inverse && i < size; ++i) value[i] *= sign[i];
    for (long stride = 1; stride < size; stride *= 2)
      for (long start = 0; start < size; start += 2 * stride)
        for (long i = start; i < start + stride; ++i) {
          const float a = value[i], b = value[i + stride];
          value[i] = a + b;
          value[i + stride] = a - b;
        }
    for (long i = 0; i < size; ++i) value[i] *= Inverse ? norm * sign[i] : norm;
  }
};

template <bool Inverse>
static inline void transform_in(float* value, long size, const float* sign) {
  const Block<Inverse> block = {value, sign, static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)))};
  if (size < 4 * kWidth)
    block.transform_few(size);
  else
    block.transform(size);
}

static inline void transform_block(float* value, long size, const float* sign, int inverse) {
  if (inverse)
    transform_in<true>(value, size, sign);
  else
    transform_in<false>(value, size, sign);
}

void fill_signs(float* signs, long cols, uint32_t seed) {
  for (long j = 0; j < cols; ++j)
    signs[j] = 1.0f - 2.0f * static_cast<float>(static_cast<int>(ciuic_sign_is_negative(seed, static_cast<unsigned>(j))));
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
