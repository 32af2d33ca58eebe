// Attention over latents in float32 with fused multiply-add, for AVX2 and AVX-512. All rows read the same latents, so what
// is widened from bfloat16 serves several rows. The method's cost: docs/experiments/runtime/latent-kernel.md.
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "exponential.h"
#include "latent_blocks.h"
#include "vector_sums.h"

namespace ciuic {
namespace CIUIC_ISA {
namespace {

// Rows and tokens whose scores are computed together, and rows whose sums are: their sums are half of the registers, or
// two thirds.
#if defined(__AVX512F__)
typedef __m512 Vector;
constexpr int kWidth = 16, kScoreRows = 8, kScoreTokens = 2, kSumRows = 16;
#else
typedef __m256 Vector;
constexpr int kWidth = 8, kScoreRows = 4, kScoreTokens = 2, kSumRows = 8;
#endif
static_assert(kScoreRows * kScoreTokens == kWidth, "sums_of adds up as many vectors as a vector has numbers");

#define CIUIC_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
CIUIC_INLINE Vector load(const float* from) { return _mm512_loadu_ps(from); }
CIUIC_INLINE Vector load(const uint16_t* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
CIUIC_INLINE void store(float* to, Vector v) { _mm512_storeu_ps(to, v); }
CIUIC_INLINE Vector broadcast(float value) { return _mm512_set1_ps(value); }
CIUIC_INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
#else
CIUIC_INLINE Vector load(const float* from) { return _mm256_loadu_ps(from); }
CIUIC_INLINE Vector load(const uint16_t* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
CIUIC_INLINE void store(float* to, Vector v) { _mm256_storeu_ps(to, v); }
CIUIC_INLINE Vector broadcast(float value) { return _mm256_set1_ps(value); }
CIUIC_INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
#endif

// Adds the products of `columns` columns of kScoreRows rows, `stride` numbers apart, and kScoreTokens tokens.
CIUIC_INLINE void add_scores(Vector* sums, const float* row, long stride, const uint16_t* const* token, long columns) {
  for (long k = 0; k < columns; k += kWidth) {
    Vector key[kScoreTokens];
#pragma GCC unroll 2
    for (int t = 0; t < kScoreTokens; ++t) key[t] = load(token[t] + k);
#pragma GCC unroll 8
    for (int r = 0; r < kScoreRows; ++r) {
      const Vector query = load(row + r * stride + k);
#pragma GCC unroll 2
      for (int t = 0; t < kScoreTokens; ++t)
        sums[kScoreTokens * r + t] = multiply_add(query, key[t], sums[kScoreTokens * r + t]);
    }
  }
}

// score[row][token] of `count` tokens from `first` on. Tokens beyond repeat the last one.
void scores_of(const float* query, const LatentTokens& tokens, long first, long count, float (*score)[kLatentBlock]) {
  const long width = tokens.rank + tokens.rope;
  for (long t0 = 0; t0 < count; t0 += kScoreTokens) {
    const uint16_t *latent[kScoreTokens], *rotary[kScoreTokens];
    for (int t = 0; t < kScoreTokens; ++t) {
      const long token = first + (t0 + t < count ? t0 + t : count - 1);
      latent[t] = tokens.latents + token * tokens.latent_stride;
      rotary[t] = tokens.rotary_keys + token * tokens.rotary_stride;
    }
    for (int r0 = 0; r0 < kQueryRows; r0 += kScoreRows) {
      Vector sums[kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) sums[i] = broadcast(0.0f);
      add_scores(sums, query + r0 * width, width, latent, tokens.rank);
      add_scores(sums, query + r0 * width + tokens.rank, width, rotary, tokens.rope);
      alignas(64) float found[kWidth];
      store(found, sums_of(sums));
      for (int r = 0; r < kScoreRows; ++r) std::memcpy(score[r0 + r] + t0, found + kScoreTokens * r, sizeof(float) * kScoreTokens);
    }
  }
}

// Scores of one row to weights, 0 beyond the last token; updates the row's maximum and total. Returns the factor of what was
// summed before.
float weights_of(float* score, long count, float scaling, const float* bias, float& maximum, float& total, float* weight) {
  for (int t = 0; t < kLatentBlock; ++t) score[t] *= scaling;
  if (bias != nullptr)
    for (long t = 0; t < count; ++t) score[t] += bias[t];
  for (long t = count; t < kLatentBlock; ++t) score[t] = -INFINITY;
  float largest[kWidth], sums[kWidth] = {};
  for (int i = 0; i < kWidth; ++i) largest[i] = maximum;
  for (int t = 0; t < kLatentBlock; t += kWidth)
    for (int i = 0; i < kWidth; ++i) largest[i] = largest[i] < score[t + i] ? score[t + i] : largest[i];
  float found = largest[0];
  for (int i = 1; i < kWidth; ++i) found = found < largest[i] ? largest[i] : found;
  for (int t = 0; t < kLatentBlock; ++t) weight[t] = exponential(score[t] - found);
  for (long t = count; t < kLatentBlock; ++t) weight[t] = 0.0f;
  for (int t = 0; t < kLatentBlock; t += kWidth)
    for (int i = 0; i < kWidth; ++i) sums[i] += weight[t + i];
  float sum = 0.0f;
  for (int i = 0; i < kWidth; ++i) sum += sums[i];
  const float factor = std::exp(maximum - found);
  total = total * factor + sum;
  maximum = found;
  return factor;
}

// sums += weights . latents, a vector of columns of kSumRows rows at a time.
void add_latents(const LatentTokens& tokens, long first, long count, const float (*weight)[kLatentBlock], float* sums) {
  for (long column = 0; column < tokens.rank; column += kWidth) {
    const uint16_t* const latent = tokens.latents + first * tokens.latent_stride + column;
    for (int r0 = 0; r0 < kQueryRows; r0 += kSumRows) {
      float* const begin = sums + r0 * tokens.rank + column;
      Vector row[kSumRows];
#pragma GCC unroll 16
      for (int r = 0; r < kSumRows; ++r) row[r] = load(begin + r * tokens.rank);
      for (long t = 0; t < count; ++t) {
        const Vector value = load(latent + t * tokens.latent_stride);
#pragma GCC unroll 16
        for (int r = 0; r < kSumRows; ++r) row[r] = multiply_add(broadcast(weight[r0 + r][t]), value, row[r]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kSumRows; ++r) store(begin + r * tokens.rank, row[r]);
    }
  }
}

struct Kernel {
  typedef float Number;
  static constexpr auto scores_of = ::ciuic::CIUIC_ISA::scores_of;
  static constexpr auto weights_of = ::ciuic::CIUIC_ISA::weights_of;
  static constexpr auto add_latents = ::ciuic::CIUIC_ISA::add_latents;
};

}  // namespace

extern const LatentKernel latent_kernel;
const LatentKernel latent_kernel = {attend_in_blocks<Kernel>, false};

}  // namespace CIUIC_ISA
}  // namespace ciuic
