// Sums of the numbers of several vectors. static: this header is compiled for several instruction sets into one library.
#ifndef CIUIC_VECTOR_SUMS_H
#define CIUIC_VECTOR_SUMS_H

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ciuic {

#if defined(__AVX512F__)
// The sums of 16 vectors, in their order. Numbers are added as (v0 + v2) + (v1 + v3) in each quarter, quarters likewise.
static inline __m512 sums_of(const __m512* v) {
  __m512 four[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 *a = v + 4 * i, *c = a + 2;
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c[0], c[1]), _mm512_unpackhi_ps(c[0], c[1]));
    const __m512d ab2 = _mm512_castps_pd(ab), cd2 = _mm512_castps_pd(cd);
    four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2)));
  }
  __m512 two[2];
  for (int i = 0; i < 2; ++i)
    two[i] = _mm512_add_ps(_mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x44),
                           _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xEE));
  return _mm512_add_ps(_mm512_shuffle_f32x4(two[0], two[1], 0x88), _mm512_shuffle_f32x4(two[0], two[1], 0xDD));
}
#elif defined(__AVX2__)
// The sums of 8 vectors, in their order.
static inline __m256 sums_of(const __m256* v) {
  const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}
#endif

}  // namespace ciuic

#endif
