// Products with many rows of activations. A block of 256 columns of a few row groups is decoded once, to 16-bit byte sums that
// fit the first-level cache, and multiplied by all rows: kManyRows at a time, whose sums stay in registers. AVX-512 multiplies
// 16-bit integers as fast as bfloat16 values. Integer sums and the order of the blocks are those of
// multiply_levels in matmul_kernel.cpp, so the results are the same (docs/experiments/runtime/many-rows.md).
#include "activations.h"
#include "kernels_of_isa.h"
#include "tile.h"

namespace ciuic {
namespace CIUIC_ISA {

constexpr long kPairsPerTile = kTile / 2, kPairsPerBlock = kActivationBlock / 2;

// Byte sums of column pairs P .. 7 of a tile, kManyGroups apart.
template <int H, bool Masked, int P>
static inline __attribute__((always_inline)) void write_pairs(const Tile<H>& tile, decltype(Tile<H>::mask_of(0)) mask,
                                                              Pair* to) {
  if constexpr (P < kPairsPerTile) {
    to[P * kManyGroups] = byte_sums(hash_of(tile.template windows<P, Masked>(mask)));
    write_pairs<H, Masked, P + 1>(tile, mask, to);
  }
}

template <int H, bool Masked>
static void write_tiles(const uint8_t* codes, long tiles, int L, Pair* to) {
  const auto mask = Tile<H>::mask_of(L);
  for (long t = 0; t < tiles; ++t)
    write_pairs<H, Masked, 0>(Tile<H>(codes + t * CIUIC_TILE_BYTES(H)), mask, to + t * kPairsPerTile * kManyGroups);
}

// Byte sums of `tiles` neighbouring tiles of a row group: the first at `to`, the next kManyGroups later. The next block's codes
// are fetched to the second-level cache, because they are needed long after the processor's prefetcher has forgotten this one.
// A prefetch beyond the matrix is harmless.
static void decode_block(const RowGroup& group, long first_tile, long tiles, int L, Pair* to) {
  with_half_bits(group.half_bits, [&](auto constant) {
    constexpr int H = decltype(constant)::value;
    const long bytes = tiles * CIUIC_TILE_BYTES(H);
    const uint8_t* codes = group.codes + first_tile * CIUIC_TILE_BYTES(H);
    for (long i = bytes; i < 2 * bytes; i += 64) __builtin_prefetch(codes + i, 0, 2);
    if (L == 16)
      write_tiles<H, false>(codes, tiles, L, to);
    else
      write_tiles<H, true>(codes, tiles, L, to);
  });
}

// Rows of activations of one block.
struct RowsOfBlock {
  const int16_t* value[kManyRows];
  float scale[kManyRows];
  int32_t offset[kManyRows];
};

// Unused rows repeat the last one; their sums are not used.
static inline RowsOfBlock rows_of_block(const Activations& activations, long first, long rows, long block) {
  const QuantizedRow row = quantized_row(activations, first);
  const long stride = static_cast<long>(activations.layout.row_bytes);
  RowsOfBlock x;
  for (int r = 0; r < kManyRows; ++r) {
    const long bytes = stride * (r < rows ? r : rows - 1);
    x.value[r] = row.value + block * kActivationBlock + bytes / 2;
    x.scale[r] = row.scale[block + bytes / 4];
    x.offset[r] = row.offset[block + bytes / 4];
  }
  return x;
}

// Fetches what rows_of_block reads of the next rows, and the first of their values. A prefetch beyond the rows is harmless.
static inline void prefetch_rows(const Activations& activations, long first, long block) {
  const QuantizedRow row = quantized_row(activations, first);
  const long stride = static_cast<long>(activations.layout.row_bytes);
  for (int r = 0; r < kManyRows; ++r) {
    __builtin_prefetch(reinterpret_cast<const uint8_t*>(row.scale + block) + stride * r);
    __builtin_prefetch(reinterpret_cast<const uint8_t*>(row.offset + block) + stride * r);
    __builtin_prefetch(reinterpret_cast<const uint8_t*>(row.value + block * kActivationBlock) + stride * r);
  }
}

// Recursions instead of loops over sums, so that each sum has a constant index and the compiler keeps it in a register.
#define CIUIC_INLINE static inline __attribute__((always_inline))

template <int Groups, int I>
CIUIC_INLINE void begin_sums(Sums* sums, const int32_t* offset) {
  if constexpr (I < Groups * kManyRows) {
    sums[I] = sums_of(offset[I / Groups]);
    begin_sums<Groups, I + 1>(sums, offset);
  }
}

template <int Groups, int I>
CIUIC_INLINE void add_pair(Sums* sums, const Pair* levels, const int16_t* const* value, long column) {
  if constexpr (I < Groups * kManyRows) {
    add_products(sums[I], levels[I % Groups], value[I / Groups] + column);
    add_pair<Groups, I + 1>(sums, levels, value, column);
  }
}

template <int Groups, int I>
CIUIC_INLINE void end_sums(const Sums* sums, const float* scale, long rows, float* const* y) {
  if constexpr (I < Groups * kManyRows) {
    if (I / Groups < rows) add_scaled(y[I % Groups] + kTile * (I / Groups), sums[I], scale[I / Groups]);
    end_sums<Groups, I + 1>(sums, scale, rows, y);
  }
}

// Adds the products of `pairs` column pairs of Groups row groups to the first `rows` rows of y[group].
template <int Groups>
static void multiply_block(const Pair* levels, long pairs, const RowsOfBlock& x, long rows, float* const* y) {
  Sums sums[Groups * kManyRows];  // of each row of activations and, within it, each row group
  begin_sums<Groups, 0>(sums, x.offset);
  for (long p = 0; p < pairs; ++p) add_pair<Groups, 0>(sums, levels + p * kManyGroups, x.value, 2 * p);
  end_sums<Groups, 0>(sums, x.scale, rows, y);
}

// Calls multiply_block for the number of groups, which is known only at run time.
template <int Groups>
static void multiply_groups_of_block(int groups, const Pair* levels, long pairs, const RowsOfBlock& x, long rows,
                                     float* const* y) {
  if constexpr (Groups > 1) {
    if (groups < Groups) return multiply_groups_of_block<Groups - 1>(groups, levels, pairs, x, rows, y);
  }
  multiply_block<Groups>(levels, pairs, x, rows, y);
}

static void multiply_together(const RowGroup* groups, int count, int L, const Activations& activations, long first_row,
                              long batch) {
  alignas(64) Pair levels[kPairsPerBlock * kManyGroups];
  constexpr long kTilesPerBlock = kActivationBlock / kTile;
  const long tiles = activations.layout.cols / kTile;
  for (int g = 0; g < count; ++g) __builtin_memset(groups[g].sums, 0, sizeof(float) * kTile * batch);
  for (long block = 0; block * kTilesPerBlock < tiles; ++block) {
    const long first = block * kTilesPerBlock, here = tiles - first < kTilesPerBlock ? tiles - first : kTilesPerBlock;
    for (int g = 0; g < count; ++g) decode_block(groups[g], first, here, L, levels + g);
    for (long begin = 0; begin < batch; begin += kManyRows) {
      const long rows = batch - begin < kManyRows ? batch - begin : kManyRows;
      prefetch_rows(activations, first_row + begin + kManyRows, block);
      float* y[kManyGroups];
      for (int g = 0; g < count; ++g) y[g] = groups[g].sums + kTile * begin;
      multiply_groups_of_block<kManyGroups>(count, levels, here * kPairsPerTile,
                                            rows_of_block(activations, first_row + begin, rows, block), rows, y);
    }
  }
}

void multiply_many_rows(const RowGroup* groups, int count, int L, const Activations& activations, long first_row,
                        long batch) {
  for (int g = 0; g < count; g += kManyGroups)
    multiply_together(groups + g, count - g < kManyGroups ? count - g : kManyGroups, L, activations, first_row, batch);
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
