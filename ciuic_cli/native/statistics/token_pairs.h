// Numbers of two neighbouring tokens, rounded to bfloat16, as one 4-byte element per column.
//
// For files that are compiled with AVX512_BF16.
#ifndef CIUIC_TOKEN_PAIRS_H
#define CIUIC_TOKEN_PAIRS_H

#include <immintrin.h>

#include <cstdint>

namespace ciuic {
namespace CIUIC_ISA {
namespace {

inline __attribute__((always_inline)) __m256i rounded_at(const float* from, __mmask16 valid) {
  return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(valid, from));
}

inline __attribute__((always_inline)) __m256i rounded_at(const uint16_t* from, __mmask16 valid) {
  return _mm256_maskz_loadu_epi16(valid, from);
}

// The rest of each float32 number: the number minus its value in bfloat16. The rest is rounded to bfloat16, too. Both values
// together keep at least 16 significant bits.
inline __attribute__((always_inline)) __m256i rest_at(const float* from, __mmask16 valid) {
  const __m512 value = _mm512_maskz_loadu_ps(valid, from);
  const __m512i kept = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value)), 16);
  return (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(value, _mm512_castsi512_ps(kept)));
}

inline __attribute__((always_inline)) __m256i rest_at(const uint16_t*, __mmask16) { return _mm256_setzero_si256(); }

enum class Part { kRounded, kRest };

template <Part part, typename Number>
inline __attribute__((always_inline)) __m512i part_at(const Number* from, __mmask16 valid) {
  return _mm512_cvtepu16_epi32(part == Part::kRounded ? rounded_at(from, valid) : rest_at(from, valid));
}

// One element for each of at most 16 columns. The low half holds the number of the first token, the high half that of the
// second, which lies `stride` numbers behind the first. `columns` and `tokens` say how many are left; missing numbers are 0.
template <Part part = Part::kRounded, typename Number>
inline __attribute__((always_inline)) __m512i token_pairs(const Number* from, long stride, long tokens, long columns) {
  const __mmask16 valid = static_cast<__mmask16>(columns >= 16 ? 0xFFFF : columns > 0 ? (1 << columns) - 1 : 0);
  const __m512i low = tokens > 0 ? part_at<part>(from, valid) : _mm512_setzero_si512();
  const __m512i high = tokens > 1 ? part_at<part>(from + stride, valid) : _mm512_setzero_si512();
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

}  // namespace
}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
