// Reading a tile with AVX2: a lane is a row, a step is a pair of neighbouring columns. Unpacking works within 128-bit halves,
// so the two vectors of a pair hold rows 0-3, 8-11 and rows 4-7, 12-15.
#ifndef CIUIC_TILE_AVX2_H
#define CIUIC_TILE_AVX2_H

#include <immintrin.h>

#include <cstdint>

#include "trellis_decode.h"

namespace ciuic {
namespace CIUIC_ISA {

struct Pair {
  __m256i part[2];
};

typedef Pair Sums;

static inline Sums sums_of(int32_t value) { return {{_mm256_set1_epi32(value), _mm256_set1_epi32(value)}}; }

static inline void add_products(Sums& sums, const Pair& levels, const int16_t* pair) {
  int32_t both;
  __builtin_memcpy(&both, pair, sizeof both);
  const __m256i factors = _mm256_set1_epi32(both);
  for (int i = 0; i < 2; ++i)
    sums.part[i] = _mm256_add_epi32(sums.part[i], _mm256_madd_epi16(levels.part[i], factors));
}

static inline void store_pair(int32_t* rows, const Pair& pair) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows), _mm256_permute2x128_si256(pair.part[0], pair.part[1], 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows + 8), _mm256_permute2x128_si256(pair.part[0], pair.part[1], 0x31));
}

static inline void add_scaled(float* total, const Sums& sums, float step) {
  alignas(32) int32_t rows[CIUIC_TILE];
  store_pair(rows, sums);
  for (int row = 0; row < CIUIC_TILE; ++row) total[row] += step * static_cast<float>(rows[row]);
}

constexpr int kBatches[] = {1, 2, 3, 4};

template <int Bits>
struct Tile {
  __m256i unit[Bits][2];

  explicit Tile(const uint8_t* codes) {
    __m256i words[Bits];
    for (int u = 0; u < Bits; ++u)
      words[u] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + CIUIC_UNIT_BYTES * u));
    // The last unit, one row further down: its rows -1 .. 14 are contiguous but for the circle.
    uint16_t last_row;
    __builtin_memcpy(&last_row, codes + CIUIC_UNIT_BYTES * Bits - 2, sizeof last_row);
    const __m256i shifted = _mm256_loadu_si256(
        reinterpret_cast<const __m256i*>(codes + CIUIC_UNIT_BYTES * (Bits - 1) - 2));
    const __m256i above = _mm256_insert_epi16(shifted, static_cast<short>(last_row), 0);
    for (int u = 0; u < Bits; ++u) {
      const __m256i before = u == 0 ? above : words[u - 1];
      unit[u][0] = _mm256_unpacklo_epi16(words[u], before);
      unit[u][1] = _mm256_unpackhi_epi16(words[u], before);
    }
  }

  template <int P, bool Masked>
  Pair byte_sums(__m256i mask) const {
    constexpr int u = ciuic_unit_of_column(2 * P, Bits), v = ciuic_unit_of_column(2 * P + 1, Bits);
    constexpr int first = ciuic_shift_of_column(2 * P, Bits), second = ciuic_shift_of_column(2 * P + 1, Bits);
    const __m256i low_factor = _mm256_set1_epi16(static_cast<short>(CIUIC_MULTIPLIER & 0xFFFFu));
    const __m256i high_factor = _mm256_set1_epi16(static_cast<short>(CIUIC_MULTIPLIER >> 16));
    const __m256i ones = _mm256_set1_epi8(1);
    Pair sums;
    for (int i = 0; i < 2; ++i) {
      __m256i window = _mm256_blend_epi16(_mm256_srli_epi32(unit[u][i], first),
                                          _mm256_slli_epi32(unit[v][i], 16 - second), 0xAA);
      if (Masked) window = _mm256_and_si256(window, mask);
      const __m256i low = _mm256_mullo_epi16(window, low_factor);
      const __m256i high =
          _mm256_add_epi16(_mm256_mulhi_epu16(window, low_factor), _mm256_mullo_epi16(window, high_factor));
      sums.part[i] = _mm256_add_epi16(_mm256_maddubs_epi16(low, ones), _mm256_maddubs_epi16(high, ones));
    }
    return sums;
  }

  static __m256i mask_of(int window) { return _mm256_set1_epi16(static_cast<short>((1u << window) - 1u)); }
};

}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
