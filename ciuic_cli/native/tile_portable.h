// Reading a tile in plain C++: a lane is a row, a step is a pair of neighbouring columns.
#ifndef CIUIC_TILE_PORTABLE_H
#define CIUIC_TILE_PORTABLE_H

#include <cstdint>

#include "trellis_decode.h"

namespace ciuic {
namespace CIUIC_ISA {

// Interleaved: [2 * row] column 2p, [2 * row + 1] column 2p + 1.
struct Pair {
  int16_t level[2 * CIUIC_TILE];
};

struct Sums {
  int32_t row[CIUIC_TILE];
};

static inline Sums sums_of(int32_t value) {
  Sums sums;
  for (int row = 0; row < CIUIC_TILE; ++row) sums.row[row] = value;
  return sums;
}

static inline void add_products(Sums& sums, const Pair& levels, const int16_t* pair) {
  for (int row = 0; row < CIUIC_TILE; ++row)
    sums.row[row] += levels.level[2 * row] * pair[0] + levels.level[2 * row + 1] * pair[1];
}

// The 8 pairs of a tile as 16 rows of 16 values.
static inline void store_rows(const Pair* pairs, int16_t (*rows)[CIUIC_TILE]) {
  for (int row = 0; row < CIUIC_TILE; ++row)
    for (int p = 0; p < CIUIC_TILE / 2; ++p) __builtin_memcpy(rows[row] + 2 * p, pairs[p].level + 2 * row, 4);
}

static inline void add_scaled(float* total, const Sums& sums, float step) {
  for (int row = 0; row < CIUIC_TILE; ++row) total[row] += step * static_cast<float>(sums.row[row]);
}

constexpr int kBatches[] = {1, 2, 4};

template <int Bits>
struct Tile {
  uint32_t unit[Bits][CIUIC_TILE];

  explicit Tile(const uint8_t* codes) {
    for (int u = 0; u < Bits; ++u)
      for (int row = 0; row < CIUIC_TILE; ++row)
        unit[u][row] = ciuic_word(codes, row, u, Bits) | ciuic_word(codes, row, u - 1, Bits) << 16;
  }

  template <int P, bool Masked>
  Pair byte_sums(uint32_t mask) const {
    constexpr int u = ciuic_unit_of_column(2 * P, Bits), v = ciuic_unit_of_column(2 * P + 1, Bits);
    constexpr int first = ciuic_shift_of_column(2 * P, Bits), second = ciuic_shift_of_column(2 * P + 1, Bits);
    Pair pair;
    for (int row = 0; row < CIUIC_TILE; ++row) {
      pair.level[2 * row] = static_cast<int16_t>(ciuic_byte_sum(ciuic_hash(unit[u][row] >> first & mask)));
      pair.level[2 * row + 1] = static_cast<int16_t>(ciuic_byte_sum(ciuic_hash(unit[v][row] >> second & mask)));
    }
    return pair;
  }

  static uint32_t mask_of(int window) { return (1u << window) - 1u; }
};

}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
