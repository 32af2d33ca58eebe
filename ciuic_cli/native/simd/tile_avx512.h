// Reads a tile with AVX-512 (BW, VNNI). A 32-bit lane is a row, and its two 16-bit words are two neighbouring columns.
#ifndef CIUIC_TILE_AVX512_H
#define CIUIC_TILE_AVX512_H

#include <immintrin.h>

#include <cstdint>

#include "trellis_decode.h"

namespace ciuic {
namespace CIUIC_ISA {

// Column 2 P (low 16 bits of a lane) and column 2 P + 1 (high) of all 16 rows.
struct Pair {
  __m512i words;
};

// The low and the high 16 bits of window * MULTIPLIER.
struct Hash {
  __m512i low, high;
};

static inline Hash hash_of(__m512i windows) {
  const __m512i low_factor = _mm512_set1_epi16(static_cast<short>(CIUIC_MULTIPLIER & 0xFFFFu));
  const __m512i high_factor = _mm512_set1_epi16(static_cast<short>(CIUIC_MULTIPLIER >> 16));
  return {_mm512_mullo_epi16(windows, low_factor),
          _mm512_add_epi16(_mm512_mulhi_epu16(windows, low_factor), _mm512_mullo_epi16(windows, high_factor))};
}

// Level + 510.
static inline Pair byte_sums(const Hash& hash) {
  const __m512i ones = _mm512_set1_epi8(1);
  return {_mm512_add_epi16(_mm512_maddubs_epi16(hash.low, ones), _mm512_maddubs_epi16(hash.high, ones))};
}

// One int32 per row.
struct Sums {
  __m512i part;
};

static inline Sums sums_of(int32_t value) { return {_mm512_set1_epi32(value)}; }

// One instruction sums the hash bytes and multiplies: the dot product of the four bytes with four copies of an activation.
constexpr int kByteRows = 2;
static inline __m512i hash_of_column(__m512i windows) {
  __m512i hash = _mm512_mullo_epi32(windows, _mm512_set1_epi32(static_cast<int>(CIUIC_MULTIPLIER)));
  // The empty asm statements make multiplications and dot products alternate. Zen 4 runs both on the same two pipes and
  // assigns instructions to pipes in program order. In the compiler's order one pipe was idle for a quarter of the time
  // (docs/experiments/runtime/cpu-product.md).
  asm volatile("" : "+v"(hash));
  return hash;
}
static inline void add_byte_products(Sums& sums, __m512i hash, const uint8_t* four) {
  int32_t bytes;
  __builtin_memcpy(&bytes, four, sizeof bytes);
  sums.part = _mm512_dpbusd_epi32(sums.part, hash, _mm512_set1_epi32(bytes));
  asm volatile("" : "+v"(sums.part));
}
// a + (b << shift)
static inline Sums combined(const Sums& a, const Sums& b, int shift) {
  return {_mm512_add_epi32(a.part, _mm512_slli_epi32(b.part, shift))};
}

// sums += levels . activations, for both columns; `pair` points to the two int16 activations.
static inline void add_products(Sums& sums, const Pair& levels, const int16_t* pair) {
  int32_t both;
  __builtin_memcpy(&both, pair, sizeof both);
  // Not the intrinsic: GCC 12 copies each sum to another register and back, which takes as long as the product.
  asm("vpdpwssd %2, %1, %0" : "+v"(sums.part) : "v"(levels.words), "v"(_mm512_set1_epi32(both)));
}

// For the loop of many rows with half as many multiplications (Factored in kernels/many_rows_kernel.cpp).
#define CIUIC_FACTORED 1
// 24 sums, 4 pairs, 2 pairs of activations and 2 sums of both in 32 registers. kGroupsTogether is a multiple of the groups.
constexpr int kFactoredRows = 12, kFactoredGroups = 2;

// Whether two 16-bit additions take less time than a multiplication. AMD's processors have two vector pipes for additions besides
// the two that multiply; Intel's add and multiply on the same pipes (docs/experiments/runtime/many-rows.md).
static inline bool additions_are_cheap() {
  static const bool cheap = __builtin_cpu_is("amd") != 0;
  return cheap;
}

// Two int16 activations, for all rows.
static inline Pair repeated(const int16_t* pair) {
  int32_t both;
  __builtin_memcpy(&both, pair, sizeof both);
  return {_mm512_set1_epi32(both)};
}
static inline Pair pair_sum(const Pair& a, const Pair& b) { return {_mm512_add_epi16(a.words, b.words)}; }
static inline Sums sum_with(int32_t value, const Sums& b) { return {_mm512_add_epi32(_mm512_set1_epi32(value), b.part)}; }
static inline Sums minus(const Sums& a) { return {_mm512_sub_epi32(_mm512_setzero_si512(), a.part)}; }
static inline void add_pair_products(Sums& sums, const Pair& a, const Pair& b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sums.part) : "v"(a.words), "v"(b.words));
}

// The sum, modulo 2^32, of value[i] * value[i + 2] and value[i + 1] * value[i + 3] over i = 0, 4, .. ; `count` is a multiple of 16.
static inline int32_t own_products(const int16_t* value, long count) {
  __m512i sum = _mm512_setzero_si512();
  for (long i = 0; i < count; i += 32) {
    const __m512i four = _mm512_maskz_loadu_epi16(count - i < 32 ? 0xFFFFu : 0xFFFFFFFFu, value + i);
    sum = _mm512_dpwssd_epi32(sum, four, _mm512_srli_epi64(four, 32));
  }
  // Not _mm512_reduce_add_epi32, whose additions are signed: their overflow is undefined.
  const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
  const __m128i four_sums = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four_sums, _mm_shuffle_epi32(four_sums, _MM_SHUFFLE(1, 0, 3, 2)));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1))));
}

// total[row] += scale * sums[row]
static inline void add_scaled(float* total, const Sums& sums, float scale) {
  const __m512 sum = _mm512_cvtepi32_ps(sums.part);
  _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), _mm512_mul_ps(_mm512_set1_ps(scale), sum)));
}

// The 8 pairs of a tile as 16 rows of 16 values.
static inline void store_rows(const Pair* pairs, int16_t (*rows)[CIUIC_TILE]) {
  // A transpose of four rows by four pairs per quad of lanes. half[h][i] holds pairs 4 h .. 4 h + 3 of rows i, 4 + i, 8 + i
  // and 12 + i.
  __m512i half[2][4];
  for (int h = 0; h < 2; ++h) {
    const Pair* p = pairs + 4 * h;
    const __m512i a = _mm512_unpacklo_epi32(p[0].words, p[1].words), b = _mm512_unpackhi_epi32(p[0].words, p[1].words);
    const __m512i c = _mm512_unpacklo_epi32(p[2].words, p[3].words), d = _mm512_unpackhi_epi32(p[2].words, p[3].words);
    half[h][0] = _mm512_unpacklo_epi64(a, c);
    half[h][1] = _mm512_unpackhi_epi64(a, c);
    half[h][2] = _mm512_unpacklo_epi64(b, d);
    half[h][3] = _mm512_unpackhi_epi64(b, d);
  }
  const __m512i upper = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), lower = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  for (int i = 0; i < 4; ++i) {
    const __m512i first = _mm512_permutex2var_epi64(half[0][i], upper, half[1][i]);
    const __m512i second = _mm512_permutex2var_epi64(half[0][i], lower, half[1][i]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows[i]), _mm512_castsi512_si256(first));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows[4 + i]), _mm512_extracti64x4_epi64(first, 1));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows[8 + i]), _mm512_castsi512_si256(second));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows[12 + i]), _mm512_extracti64x4_epi64(second, 1));
  }
}

constexpr int kBatches[] = {1, 2, 3, 4, 6, 8};
constexpr int kGroupsTogether = 6;  // a multiple of kManyGroups; even, so that their results fill cache lines
constexpr int kManyRows = 8, kManyGroups = 3;  // 24 sums, 3 pairs and an activation in 32 registers

template <int H>
struct Tile {
  static constexpr int kWhole = H / 2, kUnits = ciuic_units(H);
  // Per row, unit u in the low and unit u - 1 in the high 16 bits: the 32 bits of the string that end with unit u.
  __m512i unit[kUnits];

  explicit Tile(const uint8_t* codes) {
    __m512i words[(kUnits + 1) / 2];
    for (int i = 0; i < kWhole / 2; ++i) words[i] = _mm512_loadu_si512(codes + 64 * i);
    if (kWhole % 2 == 1)
      words[kWhole / 2] = _mm512_zextsi256_si512(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + CIUIC_UNIT_BYTES * (kWhole - 1))));
    // `last` holds the last 16 bits of each row, from word kLastWord on.
    __m512i last = words[(kWhole - 1) / 2];
    constexpr int kLastWord = H % 2 == 0 ? 16 * ((kWhole - 1) % 2) : 0;
    if constexpr (H % 2 == 1) {
      const __m256i bytes = _mm256_cvtepu8_epi16(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + CIUIC_UNIT_BYTES * kWhole)));
      const __m256i whole = (kWhole - 1) % 2 == 0 ? _mm512_castsi512_si256(last) : _mm512_extracti64x4_epi64(last, 1);
      last = _mm512_zextsi256_si512(_mm256_or_si256(_mm256_slli_epi16(whole, 8), bytes));
      const __m256i upper = _mm256_slli_epi16(bytes, 8);
      words[kWhole / 2] = kWhole % 2 == 0 ? _mm512_zextsi256_si512(upper) : _mm512_inserti64x4(words[kWhole / 2], upper, 1);
    }
    // Indices of 16-bit words for lane r. `rows`: word r in both halves. `row_above`: word r low, word r - 1 (circular)
    // high.
    const __m512i rows = _mm512_set_epi32(0x000F000F, 0x000E000E, 0x000D000D, 0x000C000C, 0x000B000B, 0x000A000A,
                                          0x00090009, 0x00080008, 0x00070007, 0x00060006, 0x00050005, 0x00040004,
                                          0x00030003, 0x00020002, 0x00010001, 0x00000000);
    const __m512i row_above = _mm512_set_epi32(0x000E000F, 0x000D000E, 0x000C000D, 0x000B000C, 0x000A000B, 0x0009000A,
                                               0x00080009, 0x00070008, 0x00060007, 0x00050006, 0x00040005, 0x00030004,
                                               0x00020003, 0x00010002, 0x00000001, 0x000F0000);
    for (int u = 0; u < kUnits; ++u) {
      const __m512i current = words[u / 2];
      if (u == 0)  // unit -1 is the end of the row before
        unit[0] = _mm512_permutex2var_epi16(
            current, _mm512_add_epi32(row_above, _mm512_set1_epi32((32 + kLastWord) << 16)), last);
      else if (u % 2 == 0)
        unit[u] = _mm512_permutex2var_epi16(current, _mm512_add_epi32(rows, _mm512_set1_epi32((32 + 16) << 16)),
                                            words[u / 2 - 1]);
      else
        unit[u] = _mm512_permutexvar_epi16(_mm512_add_epi32(rows, _mm512_set1_epi32(16)), current);
    }
  }

  // Windows of pair P as 16-bit words. `mask` comes from mask_of(L); without Masked, L must be 16.
  template <int P, bool Masked>
  __m512i windows(__m512i mask) const {
    constexpr int u = ciuic_unit_of_column(2 * P, H), v = ciuic_unit_of_column(2 * P + 1, H);
    constexpr int first = ciuic_shift_of_column(2 * P, H), second = ciuic_shift_of_column(2 * P + 1, H);
    // vpmultishiftqb would replace two shifts and a blend, but it runs on fewer ports of Zen 4 (14 % slower).
    const __m512i both = _mm512_mask_blend_epi16(0xAAAAAAAAu, _mm512_srli_epi32(unit[u], first),
                                                 _mm512_slli_epi32(unit[v], 16 - second));
    return Masked ? _mm512_and_si512(both, mask) : both;
  }

  static __m512i mask_of(int L) { return _mm512_set1_epi16(static_cast<short>((1u << L) - 1u)); }

  // Windows of one column in 32-bit lanes. The multiplication and the dot product that follow occupy two of Zen 4's
  // four vector pipes. Shifts, masks and byte shuffles run on the other two, and a column needs at most two of these
  // instructions.
  template <int Column, bool Masked>
  __m512i column(__m512i mask) const {
    constexpr int u = ciuic_unit_of_column(Column, H), shift = ciuic_shift_of_column(Column, H);
    if constexpr (shift >= 8 && 32 % H == 0 && !Masked) {
      // A byte shuffle replaces the shift by `shift`: the compiler reuses another column's shift by shift - 8.
      const int zeros = static_cast<int>(0x80800000u);
      const __m512i middle = _mm512_set4_epi32(zeros | 0x0E0D, zeros | 0x0A09, zeros | 0x0605, zeros | 0x0201);
      return _mm512_shuffle_epi8(_mm512_srli_epi32(unit[u], shift - 8), middle);
    } else {
      const __m512i low = Masked ? _mm512_srli_epi32(mask, 16) : _mm512_set1_epi32(0xFFFF);
      return _mm512_and_si512(_mm512_srli_epi32(unit[u], shift), low);
    }
  }
};

}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
