// Reads a tile with the instruction set that is being compiled. Each tile_*.h defines:
//   Tile<H>          the windows of a tile, from its codes
//   Pair             values of two neighbouring columns for all 16 rows; P counts the 8 pairs of a tile
//   hash_of, byte_sums  windows of a pair -> level + 510
//   Sums             one int32 per row; add_products and add_scaled accumulate products of levels and activations
//   store_rows       8 pairs -> 16 rows of 16 values
//   kBatches         numbers of rows of activations for which a loop is compiled; the last fills the registers
//   kManyRows, kManyGroups  rows of activations and row groups that are multiplied together where there are more rows
//   kGroupsTogether  row groups that are multiplied and then stored together
//   kByteRows        the most rows of activations that add_byte_products serves, which multiplies hash bytes without summing
//                    them first; 0 without it
#ifndef CIUIC_TILE_H
#define CIUIC_TILE_H

#if defined(__AVX512VNNI__)
#include "tile_avx512.h"
#elif defined(__AVX2__)
#include "tile_avx2.h"
#else
#include "tile_portable.h"
#endif

namespace ciuic {
namespace CIUIC_ISA {

template <int Value>
struct Constant {
  static constexpr int value = Value;
};

// Calls action(Constant<H>()) for the run-time H. 13 and 15 are not in the format.
template <typename Action>
static inline void with_half_bits(int half_bits, Action action) {
  switch (half_bits) {
    case 2: return action(Constant<2>());
    case 3: return action(Constant<3>());
    case 4: return action(Constant<4>());
    case 5: return action(Constant<5>());
    case 6: return action(Constant<6>());
    case 7: return action(Constant<7>());
    case 8: return action(Constant<8>());
    case 9: return action(Constant<9>());
    case 10: return action(Constant<10>());
    case 11: return action(Constant<11>());
    case 12: return action(Constant<12>());
    case 14: return action(Constant<14>());
    default: return action(Constant<16>());
  }
}

}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
