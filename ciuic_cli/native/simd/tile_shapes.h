// Shapes of the tile registers of AMX, the matrix unit of Intel processors.
//
// For files that are compiled with AMX's options.
#ifndef CIUIC_TILE_SHAPES_H
#define CIUIC_TILE_SHAPES_H

#include <immintrin.h>

#include <cstdint>

#include "activations.h"

namespace ciuic {
namespace CIUIC_ISA {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Sets the shapes of the tile registers for as long as it lives: the first six have `first_rows` rows, the others 16.
// Other users of the unit on this thread find their own shapes again afterwards.
class TileShapes {
 public:
  explicit TileShapes(long first_rows) {
    _tile_storeconfig(&before_);
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = kRegisterRowBytes;
      config.rows[i] = static_cast<uint8_t>(i < 6 ? first_rows : 16);
    }
    _tile_loadconfig(&config);
  }
  ~TileShapes() {
    if (before_.palette != 0)
      _tile_loadconfig(&before_);
    else
      _tile_release();
  }

 private:
  TileConfig before_;
};

}  // namespace
}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
