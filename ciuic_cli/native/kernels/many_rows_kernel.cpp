// Products with many rows of activations. A block of 256 columns of a few row groups is decoded once, to 16-bit byte sums that
// fit the first-level cache, and multiplied by all rows: as many at a time as have their sums in registers. AVX-512 multiplies
// 16-bit integers as fast as bfloat16 values. Integer sums and the order of the blocks are those of
// multiply_levels in matmul_kernel.cpp, so the results are the same (docs/experiments/runtime/many-rows.md).
//
// There are two loops: Direct, and Factored, which needs half as many multiplications.
#include "activations.h"
#include "kernels_of_isa.h"
#include "tile.h"

namespace ciuic {
namespace CIUIC_ISA {

constexpr long kPairsPerTile = kTile / 2, kPairsPerBlock = kActivationBlock / 2;

// Recursions instead of loops over sums, so that each sum has a constant index and the compiler keeps it in a register.
#define CIUIC_INLINE static inline __attribute__((always_inline))

// Byte sums of column pairs P .. 7 of a tile, Stride apart.
template <int Stride, int H, bool Masked, int P>
CIUIC_INLINE void write_pairs(const Tile<H>& tile, decltype(Tile<H>::mask_of(0)) mask, Pair* to) {
  if constexpr (P < kPairsPerTile) {
    to[P * Stride] = byte_sums(hash_of(tile.template windows<P, Masked>(mask)));
    write_pairs<Stride, H, Masked, P + 1>(tile, mask, to);
  }
}

template <int Stride, int H, bool Masked>
static void write_tiles(const uint8_t* codes, long tiles, int L, Pair* to) {
  const auto mask = Tile<H>::mask_of(L);
  for (long t = 0; t < tiles; ++t)
    write_pairs<Stride, H, Masked, 0>(Tile<H>(codes + t * CIUIC_TILE_BYTES(H)), mask, to + t * kPairsPerTile * Stride);
}

// Byte sums of `tiles` neighbouring tiles of a row group: the first at `to`, the next Stride later. The next block's codes
// are fetched to the second-level cache, because they are needed long after the processor's prefetcher has forgotten this one.
// A prefetch beyond the matrix is harmless.
template <int Stride>
static void decode_block(const RowGroup& group, long first_tile, long tiles, int L, Pair* to) {
  with_half_bits(group.half_bits, [&](auto constant) {
    constexpr int H = decltype(constant)::value;
    const long bytes = tiles * CIUIC_TILE_BYTES(H);
    const uint8_t* codes = group.codes + first_tile * CIUIC_TILE_BYTES(H);
    for (long i = bytes; i < 2 * bytes; i += 64) __builtin_prefetch(codes + i, 0, 2);
    if (L == 16)
      write_tiles<Stride, H, false>(codes, tiles, L, to);
    else
      write_tiles<Stride, H, true>(codes, tiles, L, to);
  });
}

// Multiplies a pair of columns after the other.
struct Direct {
  static constexpr int kRows = kManyRows, kRowStep = kManyRows, kGroups = kManyGroups, kPairs = 1;

  // The part of a sum that depends on the levels of a row group alone: nothing, where levels and values are multiplied directly.
  struct Own {};
  static Own own_of(const Pair*, long) { return {}; }

  static const int32_t* starts(const QuantizedRow& row, long block) { return &row.offset(block); }
  CIUIC_INLINE Sums begin(int32_t start, const Own&) { return sums_of(start); }

  template <int Rows, int Groups, int I = 0>
  CIUIC_INLINE void add(Sums* sums, const Pair* levels, const int16_t* const* value, long column) {
    if constexpr (I < Groups * Rows) {
      add_products(sums[I], levels[I % Groups], value[I / Groups] + column);
      add<Rows, Groups, I + 1>(sums, levels, value, column);
    }
  }
};

#ifdef CIUIC_FACTORED
// Multiplies four columns at a time with half as many multiplications, by Winograd's identity (1968):
//   w0 x0 + w2 x2 = (w0 + x2) (w2 + x0) - w0 w2 - x0 x2
// The last two products depend on the levels or on the activations alone. They are summed once, and the sums start from them.
// All sums are modulo 2^32, and the whole one fits, so the result is exact. The factors fit 16 bits: 16383 + 1020.
struct Factored {
  static constexpr int kRows = kFactoredRows, kRowStep = 4, kGroups = kFactoredGroups, kPairs = 2;

  typedef Sums Own;  // minus the sum of w0 w2
  static Own own_of(const Pair* levels, long pairs) {
    Sums sums = sums_of(0);
    for (long p = 0; p < pairs; p += kPairs) add_pair_products(sums, levels[p * kGroups], levels[(p + 1) * kGroups]);
    return minus(sums);
  }

  static const int32_t* starts(const QuantizedRow& row, long block) { return &row.factored_offset(block); }
  CIUIC_INLINE Sums begin(int32_t start, const Own& own) { return sum_with(start, own); }

  template <int Rows, int Groups, int I = 0>
  CIUIC_INLINE void add(Sums* sums, const Pair* levels, const int16_t* const* value, long column,
                        Pair x0 = Pair(), Pair x2 = Pair()) {
    if constexpr (I < Groups * Rows) {
      constexpr int g = I % Groups;
      if constexpr (g == 0) {
        x0 = repeated(value[I / Groups] + column);
        x2 = repeated(value[I / Groups] + column + 2);
      }
      add_pair_products(sums[I], pair_sum(levels[g], x2), pair_sum(levels[g + kGroups], x0));
      add<Rows, Groups, I + 1>(sums, levels, value, column, x0, x2);
    }
  }
};
#endif

// A decoded block of up to Loop::kGroups row groups: pair p of group g is at pair[p * kGroups + g].
template <typename Loop>
struct Levels {
  alignas(64) Pair pair[kPairsPerBlock * Loop::kGroups];
  typename Loop::Own own[Loop::kGroups];
};

// Rows of activations of one block.
struct RowsOfBlock {
  const int16_t* value;  // of the first row; the next row's are `stride` further
  long stride;
  const float* scale;
  const int32_t* start;  // what the sums start from
};

template <typename Loop>
static inline RowsOfBlock rows_of_block(const Activations& activations, long first, long block) {
  const QuantizedRow row = quantized_row(activations, first);
  return {row.value + block * kActivationBlock, static_cast<long>(activations.layout.row_bytes / 2), &row.scale(block),
          Loop::starts(row, block)};
}

template <typename Loop, int Rows, int Groups, int I = 0>
CIUIC_INLINE void begin_sums(Sums* sums, const int32_t* start, const typename Loop::Own* own) {
  if constexpr (I < Groups * Rows) {
    sums[I] = Loop::begin(start[I / Groups], own[I % Groups]);
    begin_sums<Loop, Rows, Groups, I + 1>(sums, start, own);
  }
}

template <int Rows, int Groups, int I = 0>
CIUIC_INLINE void end_sums(const Sums* sums, const float* scale, long rows, float* const* y) {
  if constexpr (I < Groups * Rows) {
    if (I / Groups < rows) add_scaled(y[I % Groups] + kTile * (I / Groups), sums[I], scale[I / Groups]);
    end_sums<Rows, Groups, I + 1>(sums, scale, rows, y);
  }
}

// Adds the products of `pairs` column pairs of Groups row groups to the first `rows` rows of y[group]; rows <= Rows.
template <typename Loop, int Rows, int Groups>
static void multiply_block(const Levels<Loop>& levels, long pairs, const RowsOfBlock& x, long rows, float* const* y) {
  // Missing rows repeat the last one; their sums are not used.
  const int16_t* value[Rows];
  int32_t start[Rows];
  float scale[Rows];
  for (int r = 0; r < Rows; ++r) {
    const long row = r < rows ? r : rows - 1;
    value[r] = x.value + x.stride * row;
    start[r] = x.start[row];
    scale[r] = x.scale[row];
    __builtin_prefetch(x.value + x.stride * (Rows + r));  // harmless beyond the rows
  }
  Sums sums[Groups * Rows];  // of each row of activations and, within it, each row group
  begin_sums<Loop, Rows, Groups>(sums, start, levels.own);
  for (long p = 0; p < pairs; p += Loop::kPairs)
    Loop::template add<Rows, Groups>(sums, levels.pair + p * Loop::kGroups, value, 2 * p);
  end_sums<Rows, Groups>(sums, scale, rows, y);
}

// Calls multiply_block for the numbers of groups and rows, which are known only at run time.
template <typename Loop, int Rows, int Groups>
static void multiply_groups_of_block(int groups, const Levels<Loop>& levels, long pairs, const RowsOfBlock& x, long rows,
                                     float* const* y) {
  if constexpr (Rows > Loop::kRowStep) {
    if (rows <= Rows - Loop::kRowStep)
      return multiply_groups_of_block<Loop, Rows - Loop::kRowStep, Groups>(groups, levels, pairs, x, rows, y);
  }
  if constexpr (Groups > 1) {
    if (groups < Groups) return multiply_groups_of_block<Loop, Rows, Groups - 1>(groups, levels, pairs, x, rows, y);
  }
  multiply_block<Loop, Rows, Groups>(levels, pairs, x, rows, y);
}

// Blocks of columns one after the other, so that a block of the activations stays in the second-level cache for all groups.
template <typename Loop>
static void multiply_blocks(const RowGroup* groups, int count, int L, const Activations& activations, long first_row, long batch) {
  Levels<Loop> levels;
  constexpr long kTilesPerBlock = kActivationBlock / kTile;
  const long tiles = activations.layout.cols / kTile;
  for (int g = 0; g < count; ++g) __builtin_memset(groups[g].sums, 0, sizeof(float) * kTile * batch);
  for (long block = 0; block * kTilesPerBlock < tiles; ++block) {
    const long first = block * kTilesPerBlock, here = tiles - first < kTilesPerBlock ? tiles - first : kTilesPerBlock;
    for (int done = 0; done < count; done += Loop::kGroups) {
      const int together = count - done < Loop::kGroups ? count - done : Loop::kGroups;
      for (int g = 0; g < together; ++g) {
        decode_block<Loop::kGroups>(groups[done + g], first, here, L, levels.pair + g);
        levels.own[g] = Loop::own_of(levels.pair + g, here * kPairsPerTile);
      }
      for (long begin = 0; begin < batch; begin += Loop::kRows) {
        const long rows = batch - begin < Loop::kRows ? batch - begin : Loop::kRows;
        float* y[Loop::kGroups];
        for (int g = 0; g < together; ++g) y[g] = groups[done + g].sums + kTile * begin;
        multiply_groups_of_block<Loop, Loop::kRows, Loop::kGroups>(
            together, levels, here * kPairsPerTile, rows_of_block<Loop>(activations, first_row + begin, block), rows, y);
      }
    }
  }
}

void multiply_many_rows(const RowGroup* groups, int count, int L, const Activations& activations, long first_row,
                        long batch) {
#ifdef CIUIC_FACTORED
  if (additions_are_cheap()) return multiply_blocks<Factored>(groups, count, L, activations, first_row, batch);
#endif
  multiply_blocks<Direct>(groups, count, L, activations, first_row, batch);
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
