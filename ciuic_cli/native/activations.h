// How a row of activations lies in memory once it is rounded.
//
// Per block of 256 columns, x = step * value with |value| <= 16383: the largest for which the sum of 256 products with
// levels (|level| <= 510) fits an int32. The kernels multiply with byte sums, level + 510; `offset` is -510 times the sum of
// the block's values and is where their sums begin.
#ifndef CIUIC_ACTIVATIONS_H
#define CIUIC_ACTIVATIONS_H

#include <cstddef>
#include <cstdint>

namespace ciuic {

constexpr long kActivationBlock = 256;
constexpr float kLargestActivation = 16383.0f;

struct QuantizedRow {
  float* step;
  int32_t* offset;
  int16_t* value;
};

static inline size_t activation_blocks_padded(long cols) {
  // 16: keeps every part on a 64-byte boundary
  return static_cast<size_t>(((cols + kActivationBlock - 1) / kActivationBlock + 15) / 16 * 16);
}

// `cols` is a multiple of 16; the size is one of 32.
static inline size_t quantized_row_bytes(long cols) { return 8 * activation_blocks_padded(cols) + 2 * static_cast<size_t>(cols); }

static inline QuantizedRow quantized_row(uint8_t* memory, long cols) {
  const size_t blocks = activation_blocks_padded(cols);
  return {reinterpret_cast<float*>(memory), reinterpret_cast<int32_t*>(memory + 4 * blocks),
          reinterpret_cast<int16_t*>(memory + 8 * blocks)};
}

}  // namespace ciuic

#endif
