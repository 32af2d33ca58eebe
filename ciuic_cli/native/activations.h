// Memory layout of a quantized row of activations.
//
// A row is quantized in blocks of 256 columns: x = scale * value. There are two precisions. int8 serves row groups of up
// to 4 bits per weight, whose own error is ten times larger. 15-bit values serve the others: up to 16383 in magnitude, a
// sum of 256 products with levels fits an int32.
//
// The kernels multiply values by sums of hash bytes, which are levels + 510. So their integer sums start from `offset`,
// -510 times the sum of the block's values.
#ifndef CIUIC_ACTIVATIONS_H
#define CIUIC_ACTIVATIONS_H

#include <cstddef>
#include <cstdint>

namespace ciuic {

constexpr long kActivationBlock = 256;

enum Precision { kInt8 = 0, kInt15 = 1 };
static constexpr float largest_activation(Precision precision) { return precision == kInt8 ? 127.0f : 16383.0f; }
static constexpr Precision precision_for(int half_bits, bool precise) {
  return precise || half_bits > 8 ? kInt15 : kInt8;
}

// Signed bytes per value: value = low + 256 high, and int8 has no high byte.
static constexpr int byte_planes(Precision precision) { return precision == kInt8 ? 1 : 2; }

struct QuantizedRow {
  float* scale;     // one per block
  int32_t* offset;  // one per block
  int16_t* value;   // one per column
  int8_t* bytes;    // per column and byte plane: the byte four times, to be multiplied by the four bytes of a hash
};

// Blocks of a row, rounded up to 16, so that every array begins on a 64-byte boundary.
static inline size_t activation_blocks_padded(long cols) {
  return static_cast<size_t>(((cols + kActivationBlock - 1) / kActivationBlock + 15) / 16 * 16);
}

// Bytes of one row. `cols` is a multiple of 16; the result is a multiple of 32.
static inline size_t quantized_row_bytes(long cols, Precision precision) {
  return 8 * activation_blocks_padded(cols) + (2 + 4 * byte_planes(precision)) * static_cast<size_t>(cols);
}

// The arrays of a row that is stored at `memory`.
static inline QuantizedRow quantized_row(uint8_t* memory, long cols) {
  const size_t blocks = activation_blocks_padded(cols);
  uint8_t* values = memory + 8 * blocks;
  return {reinterpret_cast<float*>(memory), reinterpret_cast<int32_t*>(memory + 4 * blocks),
          reinterpret_cast<int16_t*>(values), reinterpret_cast<int8_t*>(values + 2 * cols)};
}

}  // namespace ciuic

#endif
