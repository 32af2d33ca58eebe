// Reads a tile with AVX2. A 32-bit lane is a row, and its two 16-bit words are two neighbouring columns. Unpacking
// works within 128-bit halves, so the two vectors of a pair hold rows 0-3, 8-11 and rows 4-7, 12-15.
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

// The low and the high 16 bits of window * MULTIPLIER.
struct Hash {
  __m256i low[2], high[2];
};

static inline Hash hash_of(const Pair& windows) {
  const __m256i low_factor = _mm256_set1_epi16(static_cast<short>(CIUIC_MULTIPLIER & 0xFFFFu));
  const __m256i high_factor = _mm256_set1_epi16(static_cast<short>(CIUIC_MULTIPLIER >> 16));
  Hash hash;
  for (int i = 0; i < 2; ++i) {
    hash.low[i] = _mm256_mullo_epi16(windows.part[i], low_factor);
    hash.high[i] = _mm256_add_epi16(_mm256_mulhi_epu16(windows.part[i], low_factor),
                                    _mm256_mullo_epi16(windows.part[i], high_factor));
  }
  return hash;
}

static inline Pair byte_sums(const Hash& hash) {
  const __m256i ones = _mm256_set1_epi8(1);
  Pair sums;
  for (int i = 0; i < 2; ++i)
    sums.part[i] = _mm256_add_epi16(_mm256_maddubs_epi16(hash.low[i], ones), _mm256_maddubs_epi16(hash.high[i], ones));
  return sums;
}

constexpr int kByteRows = 0;  // AVX2's sums of two byte products saturate at 16 bits

typedef Pair Sums;

static inline Sums sums_of(int32_t value) { return {{_mm256_set1_epi32(value), _mm256_set1_epi32(value)}}; }

static inline void add_products(Sums& sums, const Pair& levels, const int16_t* pair) {
  int32_t both;
  __builtin_memcpy(&both, pair, sizeof both);
  const __m256i factors = _mm256_set1_epi32(both);
  for (int i = 0; i < 2; ++i)
    sums.part[i] = _mm256_add_epi32(sums.part[i], _mm256_madd_epi16(levels.part[i], factors));
}

// The 8 pairs of a tile as 16 rows of 16 values.
static inline void store_rows(const Pair* pairs, int16_t (*rows)[CIUIC_TILE]) {
  for (int part = 0; part < 2; ++part) {
    // A transpose of four rows by four pairs per 128-bit half. half[h][i] holds pairs 4 h .. 4 h + 3 of rows 4 part + i and
    // 4 part + i + 8.
    __m256i half[2][4];
    for (int h = 0; h < 2; ++h) {
      const Pair* p = pairs + 4 * h;
      const __m256i a = _mm256_unpacklo_epi32(p[0].part[part], p[1].part[part]);
      const __m256i b = _mm256_unpackhi_epi32(p[0].part[part], p[1].part[part]);
      const __m256i c = _mm256_unpacklo_epi32(p[2].part[part], p[3].part[part]);
      const __m256i d = _mm256_unpackhi_epi32(p[2].part[part], p[3].part[part]);
      half[h][0] = _mm256_unpacklo_epi64(a, c);
      half[h][1] = _mm256_unpackhi_epi64(a, c);
      half[h][2] = _mm256_unpacklo_epi64(b, d);
      half[h][3] = _mm256_unpackhi_epi64(b, d);
    }
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows[4 * part + i]),
                          _mm256_permute2x128_si256(half[0][i], half[1][i], 0x20));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows[8 + 4 * part + i]),
                          _mm256_permute2x128_si256(half[0][i], half[1][i], 0x31));
    }
  }
}

static inline void add_scaled(float* total, const Sums& sums, float scale) {
  for (int part = 0; part < 2; ++part) {
    const __m256i rows = _mm256_permute2x128_si256(sums.part[0], sums.part[1], part == 0 ? 0x20 : 0x31);
    const __m256 scaled = _mm256_mul_ps(_mm256_set1_ps(scale), _mm256_cvtepi32_ps(rows));
    _mm256_storeu_ps(total + 8 * part, _mm256_add_ps(_mm256_loadu_ps(total + 8 * part), scaled));
  }
}

constexpr int kBatches[] = {1, 2, 3, 4};
constexpr int kGroupsTogether = 4;  // a multiple of kManyGroups; even, so that their results fill cache lines
constexpr int kManyRows = 6, kManyGroups = 1;  // 12 sums, the 2 halves of a pair and an activation in 16 registers

template <int H>
struct Tile {
  static constexpr int kWhole = H / 2, kUnits = ciuic_units(H);
  // Per row, unit u in the low and unit u - 1 in the high 16 bits: the 32 bits of the string that end with unit u.
  __m256i unit[kUnits][2];

  explicit Tile(const uint8_t* codes) {
    __m256i words[kUnits];
    for (int u = 0; u < kWhole; ++u)
      words[u] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + CIUIC_UNIT_BYTES * u));
    // The last 16 bits of each row; `above` holds those of the row before.
    __m256i last = words[kWhole - 1];
    if constexpr (H % 2 == 1) {
      const __m256i bytes = _mm256_cvtepu8_epi16(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + CIUIC_UNIT_BYTES * kWhole)));
      words[kWhole] = _mm256_slli_epi16(bytes, 8);
      last = _mm256_or_si256(_mm256_slli_epi16(last, 8), bytes);
    }
    const __m256i above = _mm256_alignr_epi8(last, _mm256_permute2x128_si256(last, last, 0x01), 14);
    for (int u = 0; u < kUnits; ++u) {
      const __m256i before = u == 0 ? above : words[u - 1];
      unit[u][0] = _mm256_unpacklo_epi16(words[u], before);
      unit[u][1] = _mm256_unpackhi_epi16(words[u], before);
    }
  }

  // Windows of pair P. `mask` comes from mask_of(L); without Masked, L must be 16.
  template <int P, bool Masked>
  Pair windows(__m256i mask) const {
    constexpr int u = ciuic_unit_of_column(2 * P, H), v = ciuic_unit_of_column(2 * P + 1, H);
    constexpr int first = ciuic_shift_of_column(2 * P, H), second = ciuic_shift_of_column(2 * P + 1, H);
    Pair both;
    for (int i = 0; i < 2; ++i) {
      both.part[i] = _mm256_blend_epi16(_mm256_srli_epi32(unit[u][i], first),
                                        _mm256_slli_epi32(unit[v][i], 16 - second), 0xAA);
      if (Masked) both.part[i] = _mm256_and_si256(both.part[i], mask);
    }
    return both;
  }

  static __m256i mask_of(int L) { return _mm256_set1_epi16(static_cast<short>((1u << L) - 1u)); }
};

}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
