// Reads a tile in plain C++ with 128-bit vectors of 16-bit words, which every 64-bit processor has. A word is a row; a
// column takes two vectors, rows 0-7 and rows 8-15.
#ifndef CIUIC_TILE_PORTABLE_H
#define CIUIC_TILE_PORTABLE_H

#include <cstdint>

#if defined(__SSSE3__)
#include <tmmintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "trellis_decode.h"

namespace ciuic {
namespace CIUIC_ISA {

typedef uint16_t Words __attribute__((vector_size(16)));
typedef int32_t Quad __attribute__((vector_size(16)));

// part[column of the pair][0: rows 0-7, 1: rows 8-15].
struct Pair {
  Words part[2][2];
};

// The high 16 bits of the unsigned 32-bit products.
static inline Words high_product(Words a, Words b) {
#if defined(__SSE2__)
  return reinterpret_cast<Words>(_mm_mulhi_epu16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  Words out;
  for (int i = 0; i < 8; ++i) out[i] = static_cast<uint16_t>(static_cast<uint32_t>(a[i]) * b[i] >> 16);
  return out;
#endif
}

static inline Words all_words(unsigned value) {
  const uint16_t v = static_cast<uint16_t>(value);
  return Words{v, v, v, v, v, v, v, v};
}

// Hashing happens inside byte_sums, column by column, because there are few registers.
typedef Pair Hash;
static inline const Hash& hash_of(const Pair& windows) { return windows; }

// Per word, the sum of both bytes of `a` and both bytes of `b`.
static inline Words byte_sum(Words a, Words b) {
#if defined(__SSSE3__)
  const __m128i ones = _mm_set1_epi8(1);
  return reinterpret_cast<Words>(_mm_maddubs_epi16(reinterpret_cast<__m128i>(a), ones)) +
         reinterpret_cast<Words>(_mm_maddubs_epi16(reinterpret_cast<__m128i>(b), ones));
#else
  const Words low_byte = all_words(0xFF);
  return ((a & low_byte) + (b & low_byte)) + ((a >> 8) + (b >> 8));
#endif
}

static inline Pair byte_sums(const Hash& windows) {
  const Words low_factor = all_words(CIUIC_MULTIPLIER & 0xFFFFu), high_factor = all_words(CIUIC_MULTIPLIER >> 16);
  Pair sums;
  for (int c = 0; c < 2; ++c)
    for (int i = 0; i < 2; ++i) {
      const Words window = windows.part[c][i];
      const Words low = window * low_factor, high = high_product(window, low_factor) + window * high_factor;
      sums.part[c][i] = byte_sum(low, high);
    }
  return sums;
}

constexpr int kByteRows = 0;

struct Sums {
  Quad part[4];  // rows 4 i .. 4 i + 3
};

static inline Sums sums_of(int32_t value) {
  const Quad v = {value, value, value, value};
  return {{v, v, v, v}};
}

// The words of both columns of a pair, interleaved, for the four rows from 8 half + 4 quarter on.
static inline Words interleaved(const Pair& pair, int half, int quarter) {
  const Words a = pair.part[0][half], b = pair.part[1][half];
  return quarter == 0 ? __builtin_shuffle(a, b, Words{0, 8, 1, 9, 2, 10, 3, 11})
                      : __builtin_shuffle(a, b, Words{4, 12, 5, 13, 6, 14, 7, 15});
}

static inline void add_products(Sums& sums, const Pair& levels, const int16_t* pair) {
  int32_t both;
  __builtin_memcpy(&both, pair, sizeof both);
  for (int i = 0; i < 4; ++i) {
    const Words words = interleaved(levels, i / 2, i % 2);
#if defined(__SSE2__)
    sums.part[i] += reinterpret_cast<Quad>(_mm_madd_epi16(reinterpret_cast<__m128i>(words), _mm_set1_epi32(both)));
#else
    const Quad quad = reinterpret_cast<Quad>(words);
    sums.part[i] += (quad & 0xFFFF) * pair[0] + (quad >> 16) * pair[1];
#endif
  }
}

static inline void add_scaled(float* total, const Sums& sums, float scale) {
  for (int row = 0; row < CIUIC_TILE; ++row) total[row] += scale * static_cast<float>(sums.part[row / 4][row % 4]);
}

// The 8 pairs of a tile as 16 rows of 16 values.
static inline void store_rows(const Pair* pairs, int16_t (*rows)[CIUIC_TILE]) {
  for (int p = 0; p < CIUIC_TILE / 2; ++p)
    for (int i = 0; i < 4; ++i) {
      const Quad quad = reinterpret_cast<Quad>(interleaved(pairs[p], i / 2, i % 2));
      for (int row = 0; row < 4; ++row) {
        const int32_t both = quad[row];
        __builtin_memcpy(rows[4 * i + row] + 2 * p, &both, sizeof both);
      }
    }
}

constexpr int kBatches[] = {1, 2, 4};
constexpr int kGroupsTogether = 4;  // a multiple of kManyGroups; even, so that their results fill cache lines
constexpr int kManyRows = 2, kManyGroups = 1;

template <int H>
struct Tile {
  static constexpr int kWhole = H / 2;
  Words unit[ciuic_units(H)][2];
  Words above[2];  // unit -1: the last 16 bits of the row before

  explicit Tile(const uint8_t* codes) {
    for (int u = 0; u < kWhole; ++u)
      for (int i = 0; i < 2; ++i) unit[u][i] = words_at(codes + CIUIC_UNIT_BYTES * u + 16 * i);
    Words last[2] = {unit[kWhole - 1][0], unit[kWhole - 1][1]};
    if constexpr (H % 2 == 1)
      for (int i = 0; i < 2; ++i) {
        unit[kWhole][i] = upper_bytes_at(codes + CIUIC_UNIT_BYTES * kWhole + 8 * i);
        last[i] = last[i] << 8 | unit[kWhole][i] >> 8;
      }
    above[0] = __builtin_shuffle(last[1], last[0], Words{7, 8, 9, 10, 11, 12, 13, 14});
    above[1] = __builtin_shuffle(last[0], last[1], Words{7, 8, 9, 10, 11, 12, 13, 14});
  }

  static Words words_at(const uint8_t* from) {
    Words words;
    __builtin_memcpy(&words, from, sizeof words);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    words = words << 8 | words >> 8;
#endif
    return words;
  }

  // Eight bytes, each in the upper half of a word.
  static Words upper_bytes_at(const uint8_t* from) {
    typedef uint8_t Bytes __attribute__((vector_size(8)));
    Bytes bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Words) << 8;
  }

  // Windows of one column for eight rows, before the mask.
  template <int Column>
  Words window(int half) const {
    constexpr int u = ciuic_unit_of_column(Column, H), shift = ciuic_shift_of_column(Column, H);
    const Words before = u == 0 ? above[half] : unit[u == 0 ? 0 : u - 1][half];
    return shift == 0 ? unit[u][half] : before << (16 - shift) | unit[u][half] >> shift;
  }

  // Windows of pair P. `mask` comes from mask_of(L); without Masked, L must be 16.
  template <int P, bool Masked>
  Pair windows(Words mask) const {
    Pair both = {{{window<2 * P>(0), window<2 * P>(1)}, {window<2 * P + 1>(0), window<2 * P + 1>(1)}}};
    if (Masked)
      for (int c = 0; c < 2; ++c)
        for (int i = 0; i < 2; ++i) both.part[c][i] &= mask;
    return both;
  }

  static Words mask_of(int L) { return all_words((1u << L) - 1u); }
};

}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
