// The inner loops of symmetric sums: outer products of packed strips, whose sums stay in registers for kSteps steps.
//
// This file is compiled once per instruction set, with fused multiply-add: the sums of statistics differ in their last bits
// between processors, as those of torch do.
#include <cstdint>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "bfloat16.h"
#include "symmetric_sums.h"

namespace ciuic {
namespace CIUIC_ISA {

// Rows and vectors of sums that stay in registers.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 8, kVectors = 3;
#else
constexpr int kLanes = 8, kRows = 6, kVectors = 2;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
static_assert(kStrip % kRows == 0 && kStrip % (kLanes * kVectors) == 0, "blocks must fill a strip");

static inline __attribute__((always_inline)) Floats load(const float* from) {
  Floats value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

static inline __attribute__((always_inline)) void store(const Floats& value, float* to) {
  __builtin_memcpy(to, &value, sizeof value);
}

#if defined(__AVX512BF16__)

static inline __attribute__((always_inline)) Floats add_product(Floats sum, const float* left, const Floats& right) {
  int32_t pair;
  __builtin_memcpy(&pair, left, sizeof pair);
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)right);
}

static inline __attribute__((always_inline)) __m256i rounded_at(const float* from, __mmask16 valid) {
  return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(valid, from));
}

static inline __attribute__((always_inline)) __m256i rounded_at(const uint16_t* from, __mmask16 valid) {
  return _mm256_maskz_loadu_epi16(valid, from);
}

// Two neighbouring tokens per element, the first in the low half; a token beyond the last is 0.
template <typename Number>
static void pack_numbers(const Number* from, long stride, long tokens, long columns, float* to) {
  for (long t = 0; t < tokens; t += 2)
    for (int j = 0; j < kStrip; j += kLanes, to += kLanes) {
      const long left = columns - j;
      const __mmask16 valid = static_cast<__mmask16>(left >= kLanes ? 0xFFFF : left > 0 ? (1 << left) - 1 : 0);
      const Number* first = from + t * stride + j;
      const __m512i low = _mm512_cvtepu16_epi32(rounded_at(first, valid));
      const __m512i high =
          t + 1 < tokens ? _mm512_cvtepu16_epi32(rounded_at(first + stride, valid)) : _mm512_setzero_si512();
      _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

#else

static inline __attribute__((always_inline)) Floats add_product(const Floats& sum, const float* left, const Floats& right) {
  return sum + *left * right;
}

static inline float number_of(float value) { return value; }
static inline float number_of(uint16_t bits) { return from_bfloat16(bits); }

template <typename Number>
static void pack_numbers(const Number* from, long stride, long tokens, long columns, float* to) {
  for (long t = 0; t < tokens; ++t, from += stride, to += kStrip) {
    for (long j = 0; j < columns; ++j) to[j] = number_of(from[j]);
    for (long j = columns; j < kStrip; ++j) to[j] = 0.0f;
  }
}

#endif

static inline __attribute__((always_inline)) void multiply_block(const float* left, const float* right, long steps, float* sums,
                                                                 long stride) {
  Floats sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int a = 0; a < kRows; ++a)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[a][v] = Floats{};
  for (long step = 0; step < steps; ++step, left += kStrip, right += kStrip) {
    Floats factor[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) factor[v] = load(right + kLanes * v);
#pragma GCC unroll 8
    for (int a = 0; a < kRows; ++a)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[a][v] = add_product(sum[a][v], left + a, factor[v]);
  }
#pragma GCC unroll 8
  for (int a = 0; a < kRows; ++a)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* to = sums + a * stride + kLanes * v;
      store(load(to) + sum[a][v], to);
    }
}

static void pack(const float* from, long stride, long tokens, long columns, float* to) {
  pack_numbers(from, stride, tokens, columns, to);
}

static void pack_bfloat16(const uint16_t* from, long stride, long tokens, long columns, float* to) {
  pack_numbers(from, stride, tokens, columns, to);
}

static void multiply(const float* left, const float* right, long steps, float* sums, long stride) {
  for (int a = 0; a < kStrip; a += kRows)
    for (int b = 0; b < kStrip; b += kLanes * kVectors)
      multiply_block(left + a, right + b, steps, sums + a * stride + b, stride);
}

#if defined(__AVX512BF16__)
extern const SymmetricKernel rounded;
const SymmetricKernel rounded = {2, pack, pack_bfloat16, multiply};
#else
extern const SymmetricKernel exact;
const SymmetricKernel exact = {1, pack, pack_bfloat16, multiply};
#endif

}  // namespace CIUIC_ISA
}  // namespace ciuic
