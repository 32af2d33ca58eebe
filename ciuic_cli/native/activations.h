// How a row of activations lies in memory once it is rounded to int8.
//
// Per block of 256 columns, x = step * (main + residual / 254). Each int8 is stored four times in an int32, because the
// dot product of the four bytes of a hash with (a, a, a, a) is a times their sum. `offset` is -510 times the sum of the
// block's int8 values: it turns byte sums into levels.
#ifndef CIUIC_ACTIVATIONS_H
#define CIUIC_ACTIVATIONS_H

#include <cstddef>
#include <cstdint>

namespace ciuic {

constexpr long kActivationBlock = 256;
constexpr float kResidualSteps = 254.0f;  // what rounding to int8 leaves is at most half a step, 127/254

struct QuantizedRow {
  float* step;
  int32_t* offset;
  int32_t* residual_offset;
  int32_t* main;
  int32_t* residual;
};

static inline long activation_blocks_padded(long cols) {
  return ((cols + kActivationBlock - 1) / kActivationBlock + 15) / 16 * 16;  // keeps every part on a 64-byte boundary
}

static inline size_t quantized_row_size(long cols, int residual) {
  const size_t padded_cols = static_cast<size_t>((cols + 15) / 16 * 16);
  return 4 * (3 * static_cast<size_t>(activation_blocks_padded(cols)) + padded_cols * (residual ? 2 : 1));
}

static inline QuantizedRow quantized_row(uint8_t* memory, long cols, int residual) {
  const long blocks = activation_blocks_padded(cols);
  const long padded_cols = (cols + 15) / 16 * 16;
  int32_t* words = reinterpret_cast<int32_t*>(memory);
  return {reinterpret_cast<float*>(words), words + blocks, words + 2 * blocks, words + 3 * blocks,
          residual ? words + 3 * blocks + padded_cols : nullptr};
}

}  // namespace ciuic

#endif
