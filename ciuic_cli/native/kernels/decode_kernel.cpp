// Decodes the tiles of a row group to float32 or bfloat16.
#include "bfloat16.h"
#include "kernels_of_isa.h"
#include "tile.h"

namespace ciuic {
namespace CIUIC_ISA {

// Byte sums (level + 510) of column pairs P .. 7 of a tile. Masked: L is below 16, so windows need the mask.
template <int H, bool Masked, int P>
static inline __attribute__((always_inline)) void read_pairs(const Tile<H>& tile,
                                                             decltype(Tile<H>::mask_of(0)) mask, Pair* pairs) {
  if constexpr (P < kTile / 2) {
    pairs[P] = byte_sums(hash_of(tile.template windows<P, Masked>(mask)));
    read_pairs<H, Masked, P + 1>(tile, mask, pairs);
  }
}

// Tiles that are decoded before their rows are written. The rows of a wide matrix lie a multiple of the page size apart and
// compete for the same cache sets, so each row is written many values at a time. No measurement is on record.
constexpr long kTilesPerWrite = 16;

static inline void store_value(float* to, float value) { *to = value; }

static inline void store_value(uint16_t* to, float value) { *to = finite_to_bfloat16(value); }

template <int H, bool Masked, typename Out>
static void decode(const uint8_t* codes, long tiles, int L, const float* row_factor, int row_begin, int row_end,
                   Out* out, size_t out_stride) {
  const auto mask = Tile<H>::mask_of(L);
  alignas(64) int16_t sums[kTilesPerWrite][kTile][kTile];
  for (long first = 0; first < tiles; first += kTilesPerWrite) {
    const long count = tiles - first < kTilesPerWrite ? tiles - first : kTilesPerWrite;
    for (long t = 0; t < count; ++t) {
      Pair pairs[kTile / 2];
      read_pairs<H, Masked, 0>(Tile<H>(codes + (first + t) * CIUIC_TILE_BYTES(H)), mask, pairs);
      store_rows(pairs, sums[t]);
    }
    for (int row = row_begin; row < row_end; ++row) {
      Out* values = out + (row - row_begin) * out_stride + first * kTile;
      const float factor = row_factor[row];
      for (long t = 0; t < count; ++t)
        for (int column = 0; column < kTile; ++column)
          store_value(values + t * kTile + column,
                      factor * static_cast<float>(sums[t][row][column] - CIUIC_LEVEL_CENTRE));
    }
  }
}

template <typename Out>
static void decode_to(Out* out, const uint8_t* codes, long tiles, int half_bits, int L, const float* row_factor,
                      int row_begin, int row_end, size_t out_stride) {
  with_half_bits(half_bits, [&](auto constant) {
    constexpr int H = decltype(constant)::value;
    if (L == 16)
      decode<H, false>(codes, tiles, L, row_factor, row_begin, row_end, out, out_stride);
    else
      decode<H, true>(codes, tiles, L, row_factor, row_begin, row_end, out, out_stride);
  });
}

void decode_tiles(const uint8_t* codes, long tiles, int half_bits, int L, const float* row_factor, int row_begin,
                  int row_end, void* out, size_t out_stride, bool bf16) {
  if (bf16)
    decode_to(static_cast<uint16_t*>(out), codes, tiles, half_bits, L, row_factor, row_begin, row_end, out_stride);
  else
    decode_to(static_cast<float*>(out), codes, tiles, half_bits, L, row_factor, row_begin, row_end, out_stride);
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
