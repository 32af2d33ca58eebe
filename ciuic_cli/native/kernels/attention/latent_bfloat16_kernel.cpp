// Attention over latents with AVX-512's bfloat16 products, which AMD's processors compute at twice float32's rate. All rows
// read the same latents, so a latent is loaded once for 4 rows (scores) or 16 rows (sums). The method's cost:
// docs/experiments/runtime/latent-kernel.md.
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "latent_blocks.h"
#include "vector_sums.h"

namespace ciuic {
namespace avx512bf16 {
namespace {

constexpr int kTile = 4;         // rows and tokens whose scores are computed together: 16 sums in registers
constexpr int kFloats = 16;      // of a register

__m512i load(const uint16_t* from) { return _mm512_loadu_si512(from); }

// sum += a . b, pairs of bfloat16. Not the intrinsic: GCC 12 copies each sum to another register and back.
inline __attribute__((always_inline)) void add_products(__m512& sum, __m512i a, __m512i b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

// Adds the products of `columns` columns of kTile rows and kTile tokens. Columns of a row are neighbours.
inline __attribute__((always_inline)) void add_scores(__m512* sums, const uint16_t* const* row,
                                                      const uint16_t* const* token, long columns) {
  for (long k = 0; k < columns; k += kLatentColumns) {
    __m512i keys[kTile];
    for (int t = 0; t < kTile; ++t) keys[t] = load(token[t] + k);
#pragma GCC unroll 4
    for (int r = 0; r < kTile; ++r) {
      const __m512i query = load(row[r] + k);
#pragma GCC unroll 4
      for (int t = 0; t < kTile; ++t) add_products(sums[kTile * r + t], query, keys[t]);
    }
  }
}

// score[row][token] of `count` tokens from `first` on. Tokens beyond repeat the last one.
void scores_of(const uint16_t* query, const LatentTokens& tokens, long first, long count, float (*score)[kLatentBlock]) {
  const long width = tokens.rank + tokens.rope;
  for (long t0 = 0; t0 < count; t0 += kTile) {
    const uint16_t *latent[kTile], *rotary[kTile];
    for (int t = 0; t < kTile; ++t) {
      const long token = first + (t0 + t < count ? t0 + t : count - 1);
      latent[t] = tokens.latents + token * tokens.latent_stride;
      rotary[t] = tokens.rotary_keys + token * tokens.rotary_stride;
    }
    for (int r0 = 0; r0 < kQueryRows; r0 += kTile) {
      const uint16_t *absorbed[kTile], *rotated[kTile];
      for (int r = 0; r < kTile; ++r) {
        absorbed[r] = query + (r0 + r) * width;
        rotated[r] = absorbed[r] + tokens.rank;
      }
      __m512 sums[kTile * kTile];
#pragma GCC unroll 16
      for (int i = 0; i < kTile * kTile; ++i) sums[i] = _mm512_setzero_ps();
      add_scores(sums, absorbed, latent, tokens.rank);
      add_scores(sums, rotated, rotary, tokens.rope);
      alignas(64) float found[kFloats];
      _mm512_store_ps(found, sums_of(sums));
      for (int r = 0; r < kTile; ++r) std::memcpy(score[r0 + r] + t0, found + kTile * r, sizeof(float) * kTile);
    }
  }
}

// exp(x) for x <= 0, with a relative error of 1e-7: 2^n exp(r), |r| <= ln(2) / 2, and a polynomial of degree 6 (Cephes,
// Moshier 1989).
__m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);  // its exponential is 0 already; a NaN stays one
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  constexpr float kCoefficients[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (const float c : kCoefficients) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// Scores of one row to weights in bfloat16; updates the row's maximum and total. Returns the factor of what was summed before.
float weights_of(float* score, long count, float scaling, const float* bias, float& maximum, float& total, uint16_t* weight) {
  __m512 x[kLatentBlock / kFloats];
  __m512 largest = _mm512_set1_ps(maximum);
  for (int i = 0; i < kLatentBlock / kFloats; ++i) {
    const long rest = count - kFloats * i;
    const __mmask16 valid = rest >= kFloats ? 0xFFFF : rest <= 0 ? 0 : static_cast<__mmask16>((1u << rest) - 1u);
    x[i] = _mm512_mul_ps(_mm512_loadu_ps(score + kFloats * i), _mm512_set1_ps(scaling));
    if (bias != nullptr) x[i] = _mm512_add_ps(x[i], _mm512_maskz_loadu_ps(valid, bias + kFloats * i));
    x[i] = _mm512_mask_blend_ps(valid, _mm512_set1_ps(-INFINITY), x[i]);
    largest = _mm512_max_ps(largest, x[i]);
  }
  const float found = _mm512_reduce_max_ps(largest);
  const float factor = _mm512_cvtss_f32(exponential(_mm512_set1_ps(maximum - found)));
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < kLatentBlock / kFloats; ++i) {
    const __m512 p = exponential(_mm512_sub_ps(x[i], _mm512_set1_ps(found)));
    sum = _mm512_add_ps(sum, p);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weight + kFloats * i),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(p)));
  }
  total = total * factor + _mm512_reduce_add_ps(sum);
  maximum = found;
  return factor;
}

// sums += weights . latents, 16 columns of all rows at a time. Weights beyond the last token are 0.
void add_latents(const LatentTokens& tokens, long first, long count, const uint16_t (*weight)[kLatentBlock], float* sums) {
  // Element 2 i is column i of a token, and element 2 i + 1 that of the next.
  const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                              20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (long column = 0; column < tokens.rank; column += kFloats) {
    __m512 row[kQueryRows];
#pragma GCC unroll 16
    for (int r = 0; r < kQueryRows; ++r) row[r] = _mm512_loadu_ps(sums + r * tokens.rank + column);
    const uint16_t* latent = tokens.latents + first * tokens.latent_stride + column;
    for (long t = 0; t < count; t += 2) {
      const uint16_t* next = latent + (t + 1 < count ? t + 1 : t) * tokens.latent_stride;
      const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(latent + t * tokens.latent_stride));
      const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(next));
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
      const __m512i pairs = _mm512_permutexvar_epi16(interleave, both);
#pragma GCC unroll 16
      for (int r = 0; r < kQueryRows; ++r) {
        int32_t factors;
        std::memcpy(&factors, weight[r] + t, sizeof factors);
        add_products(row[r], pairs, _mm512_set1_epi32(factors));
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kQueryRows; ++r) _mm512_storeu_ps(sums + r * tokens.rank + column, row[r]);
  }
}

struct Kernel {
  typedef uint16_t Number;
  static constexpr auto scores_of = ::ciuic::avx512bf16::scores_of;
  static constexpr auto weights_of = ::ciuic::avx512bf16::weights_of;
  static constexpr auto add_latents = ::ciuic::avx512bf16::add_latents;
};

}  // namespace

extern const LatentKernel latent_kernel;
const LatentKernel latent_kernel = {attend_in_blocks<Kernel>, true};

}  // namespace avx512bf16
}  // namespace ciuic
