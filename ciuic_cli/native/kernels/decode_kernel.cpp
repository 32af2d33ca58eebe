// Decodes tiles to float32 or bfloat16.
#include "bfloat16.h"
#include "kernels_of_isa.h"
#include "tile.h"

namespace ciuic {
namespace CIUIC_ISA {

template <int Halves, bool Masked, int P>
static inline __attribute__((always_inline)) void read_pairs(const Tile<Halves>& tile,
                                                             decltype(Tile<Halves>::mask_of(0)) mask, Pair* pairs) {
  if constexpr (P < kTile / 2) {
    pairs[P] = byte_sums(hash_of(tile.template windows<P, Masked>(mask)));
    read_pairs<Halves, Masked, P + 1>(tile, mask, pairs);
  }
}

// Rows of a wide matrix lie a multiple of the page size apart and compete for the same cache sets: a row is written in runs
// of this many tiles.
constexpr long kRun = 16;

static inline void store_value(float* to, float value) { *to = value; }

static inline void store_value(uint16_t* to, float value) { *to = to_bfloat16(value); }

template <int Halves, bool Masked, typename Out>
static void decode(const uint8_t* codes, long tiles, int window, const float* row_factor, int row_begin, int row_end,
                   Out* out, size_t out_stride) {
  const auto mask = Tile<Halves>::mask_of(window);
  alignas(64) int16_t sums[kRun][kTile][kTile];
  for (long first = 0; first < tiles; first += kRun) {
    const long count = tiles - first < kRun ? tiles - first : kRun;
    for (long t = 0; t < count; ++t) {
      Pair pairs[kTile / 2];
      read_pairs<Halves, Masked, 0>(Tile<Halves>(codes + (first + t) * CIUIC_TILE_BYTES(Halves)), mask, pairs);
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
static void decode_to(Out* out, const uint8_t* codes, long tiles, int halves, int window, const float* row_factor,
                      int row_begin, int row_end, size_t out_stride) {
  with_halves(halves, [&](auto constant) {
    constexpr int kHalves = decltype(constant)::value;
    if (window == 16)
      decode<kHalves, false>(codes, tiles, window, row_factor, row_begin, row_end, out, out_stride);
    else
      decode<kHalves, true>(codes, tiles, window, row_factor, row_begin, row_end, out, out_stride);
  });
}

void decode_tiles(const uint8_t* codes, long tiles, int halves, int window, const float* row_factor, int row_begin,
                  int row_end, void* out, size_t out_stride, bool half) {
  if (half)
    decode_to(static_cast<uint16_t*>(out), codes, tiles, halves, window, row_factor, row_begin, row_end, out_stride);
  else
    decode_to(static_cast<float*>(out), codes, tiles, halves, window, row_factor, row_begin, row_end, out_stride);
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
