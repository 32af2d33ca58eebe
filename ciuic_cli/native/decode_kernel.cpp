// Decodes tiles to float32.
#include "kernels_of_isa.h"
#include "trellis_decode.h"

namespace ciuic {
namespace CIUIC_ISA {

void decode_tiles(const uint8_t* codes, long tiles, int bits, int window, const float* row_factor, int row_begin,
                  int row_end, float* out, size_t out_stride) {
  for (long tile = 0; tile < tiles; ++tile) {
    const uint8_t* tile_codes = codes + tile * CIUIC_UNIT_BYTES * bits;
    for (int row = row_begin; row < row_end; ++row) {
      float* values = out + (row - row_begin) * out_stride + tile * kTile;
      for (int column = 0; column < kTile; ++column)
        values[column] =
            row_factor[row] * static_cast<float>(ciuic_tile_level(tile_codes, row, column, bits, window));
    }
  }
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
