// Decodes tiles to float32.
#include "kernels_of_isa.h"
#include "tile.h"

namespace ciuic {
namespace CIUIC_ISA {

template <int Bits, bool Masked, int P>
static inline __attribute__((always_inline)) void store_pairs(const Tile<Bits>& tile,
                                                              decltype(Tile<Bits>::mask_of(0)) mask,
                                                              int32_t (*pairs)[kTile]) {
  if constexpr (P < kTile / 2) {
    store_pair(pairs[P], tile.template byte_sums<P, Masked>(mask));
    store_pairs<Bits, Masked, P + 1>(tile, mask, pairs);
  }
}

template <int Bits, bool Masked>
static void decode(const uint8_t* codes, long tiles, int window, const float* row_factor, int row_begin, int row_end,
                   float* out, size_t out_stride) {
  const auto mask = Tile<Bits>::mask_of(window);
  for (long t = 0; t < tiles; ++t) {
    alignas(64) int32_t pairs[kTile / 2][kTile];
    store_pairs<Bits, Masked, 0>(Tile<Bits>(codes + t * CIUIC_UNIT_BYTES * Bits), mask, pairs);
    for (int row = row_begin; row < row_end; ++row) {
      float* values = out + (row - row_begin) * out_stride + t * kTile;
      const float factor = row_factor[row];
      for (int p = 0; p < kTile / 2; ++p) {
        values[2 * p] = factor * static_cast<float>((pairs[p][row] & 0xFFFF) - CIUIC_LEVEL_CENTRE);
        values[2 * p + 1] = factor * static_cast<float>((pairs[p][row] >> 16) - CIUIC_LEVEL_CENTRE);
      }
    }
  }
}

void decode_tiles(const uint8_t* codes, long tiles, int bits, int window, const float* row_factor, int row_begin,
                  int row_end, float* out, size_t out_stride) {
  with_bits(bits, [&](auto constant) {
    constexpr int kBits = decltype(constant)::value;
    if (window == 16)
      decode<kBits, false>(codes, tiles, window, row_factor, row_begin, row_end, out, out_stride);
    else
      decode<kBits, true>(codes, tiles, window, row_factor, row_begin, row_end, out, out_stride);
  });
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
