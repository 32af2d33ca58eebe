// How a row of activations lies in memory once it is rounded.
//
// Per block of 256 columns, x = step * value. Two precisions: int8 values for row groups of up to 4 bits per weight, whose own
// error is ten times larger, and 15-bit values (|value| <= 16383: the largest for which the sum of 256 products with levels
// fits an int32) for the others. The kernels multiply with byte sums, level + 510; `offset` is -510 times the sum of the
// block's values and is where their sums begin.
#ifndef CIUIC_ACTIVATIONS_H
#define CIUIC_ACTIVATIONS_H

#include <cstddef>
#include <cstdint>

namespace ciuic {

constexpr long kActivationBlock = 256;

enum Precision { kInt8 = 0, kInt15 = 1 };
static constexpr float largest_activation(Precision precision) { return precision == kInt8 ? 127.0f : 16383.0f; }
static constexpr Precision precision_for(int halves, bool precise) { return precise || halves > 8 ? kInt15 : kInt8; }

// A value is the sum of its planes, signed bytes: low + 256 high.
static constexpr int byte_planes(Precision precision) { return precision == kInt8 ? 1 : 2; }

struct QuantizedRow {
  float* step;
  int32_t* offset;
  int16_t* value;  // one per column
  int8_t* bytes;   // per column, for dot products of four bytes: four times each of the value's byte_planes()
};

static inline size_t activation_blocks_padded(long cols) {
  // 16: keeps every part on a 64-byte boundary
  return static_cast<size_t>(((cols + kActivationBlock - 1) / kActivationBlock + 15) / 16 * 16);
}

// `cols` is a multiple of 16; the size is one of 32.
static inline size_t quantized_row_bytes(long cols, Precision precision) {
  return 8 * activation_blocks_padded(cols) + (2 + 4 * byte_planes(precision)) * static_cast<size_t>(cols);
}

static inline QuantizedRow quantized_row(uint8_t* memory, long cols) {
  const size_t blocks = activation_blocks_padded(cols);
  uint8_t* values = memory + 8 * blocks;
  return {reinterpret_cast<float*>(memory), reinterpret_cast<int32_t*>(memory + 4 * blocks),
          reinterpret_cast<int16_t*>(values), reinterpret_cast<int8_t*>(values + 2 * cols)};
}

}  // namespace ciuic

#endif
