// The input transform: random signs, then an orthonormal block Hadamard matrix in Sylvester order.
//
// The stages of butterflies run from a stride of 1 to half the block, whatever the vector length. So every instruction
// set adds the same numbers in the same order and rounds alike.
#include <cmath>

#include "bfloat16.h"
#include "kernels_of_isa.h"
#include "trellis_decode.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

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
typedef uint32_t Bits __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth), aligned(2), may_alias));

static inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
static inline void store(float* to, Floats values) { *reinterpret_cast<Floats*>(to) = values; }

static inline Floats load(const uint16_t* from) {
  return reinterpret_cast<Floats>(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Bits) << 16);
}
// Rounds as finite_to_bfloat16 does. A NaN stays a NaN: it comes from an input in bfloat16 or from the processor, and its lower 16
// bits are 0.
static inline void store(uint16_t* to, Floats values) {
  const Bits bits = reinterpret_cast<Bits>(values);
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16, Halves);
}

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
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(v, sign, __builtin_shuffle(v, partner));  // the product is exact, so the sum has the same bits
#else
    return __builtin_shuffle(v, partner) + v * sign;
#endif
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

// One block of float32 or bfloat16 numbers in place: signs and transform, or transform and signs, with the norm. Signs and norm are
// applied while the first and the last stage have the values in registers. Between the stages they are in `value`, which may be
// the block itself.
template <bool Inverse, typename Number>
struct Block {
  Number* block;
  float* value;
  const float* sign;
  float norm;

  Floats signed_at(long i) const {
    const Floats v = load(block + i);
    return Inverse ? v : v * load(sign + i);
  }

  template <bool Last>
  void store_at(long i, Floats v) const {
    if constexpr (Last)
      store(block + i, Inverse ? v * (norm * load(sign + i)) : v * norm);
    else
      store(value + i, v);
  }

  template <bool Last>
  void store_four(long i, long stride, const Four& four) const {
    for (int k = 0; k < 4; ++k) store_at<Last>(i + k * stride, four.part[k]);
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
        store_four<Last>(i, stride, butterflies_of(load(value + i), load(value + i + stride), load(value + i + 2 * stride),
                                                   load(value + i + 3 * stride)));
  }

  void transform(long size) const {
    long stride = 4 * kWidth;
    if (stride == size) return first_stages<true>(size);
    first_stages<false>(size);
    for (; 4 * stride < size; stride *= 4) two_stages<false>(size, stride);
    if (4 * stride == size) return two_stages<true>(size, stride);
    for (long i = 0; i < stride; i += kWidth) {
      const Floats a = load(value + i), b = load(value + i + stride);
      store_at<true>(i, a + b);
      store_at<true>(i + stride, a - b);
    }
  }
};

// The same for fewer than four vectors.
template <bool Inverse>
static inline void transform_few(float* value, long size, const float* sign, float norm) {
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

static inline float norm_of(long size) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(size))); }

template <bool Inverse>
static inline void transform_block(float* block, long size, const float* sign) {
  if (size < 4 * kWidth)
    transform_few<Inverse>(block, size, sign, norm_of(size));
  else
    Block<Inverse, float>{block, block, sign, norm_of(size)}.transform(size);
}

template <bool Inverse>
static inline void transform_block(uint16_t* block, long size, const float* sign) {
  alignas(64) float value[1L << kMaxLog2Block];
  if (size >= 4 * kWidth) return Block<Inverse, uint16_t>{block, value, sign, norm_of(size)}.transform(size);
  for (long i = 0; i < size; ++i) value[i] = from_bfloat16(block[i]);
  transform_few<Inverse>(value, size, sign, norm_of(size));
  for (long i = 0; i < size; ++i) block[i] = finite_to_bfloat16(value[i]);
}

template <typename Number>
static inline void transform_row(Number* row, long cols, int log2_block, const float* signs, int inverse) {
  const long size = 1L << log2_block;
  for (long begin = 0; begin < cols; begin += size) {
    if (inverse)
      transform_block<true>(row + begin, size, signs + begin);
    else
      transform_block<false>(row + begin, size, signs + begin);
  }
}

void fill_signs(float* signs, long cols, uint32_t seed) {
  for (long j = 0; j < cols; ++j)
    signs[j] = 1.0f - 2.0f * static_cast<float>(static_cast<int>(ciuic_sign_is_negative(seed, static_cast<unsigned>(j))));
}

void hadamard_row(float* row, long cols, int log2_block, const float* signs, int inverse) {
  transform_row(row, cols, log2_block, signs, inverse);
}

void hadamard_row_bfloat16(uint16_t* row, long cols, int log2_block, const float* signs, int inverse) {
  transform_row(row, cols, log2_block, signs, inverse);
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
