// Memory layout of a quantized row of activations.
//
// A row is quantized in blocks of 256 columns: x = scale * value. There are two integer precisions. int8 serves row groups
// of up to 4 bits per weight, whose own error is ten times larger. 15-bit values serve the others: up to 16383 in
// magnitude, a sum of 256 products with levels fits an int32. Activations in float32 are two rows of 15 bits: the second has
// what the first one's rounding left. Matrix units multiply many rows faster in bfloat16, for any number of bits.
//
// The integer kernels multiply values by sums of hash bytes, which are levels + 510. So their integer sums start from `offset`,
// -510 times the sum of the block's values.
#ifndef CIUIC_ACTIVATIONS_H
#define CIUIC_ACTIVATIONS_H

#include <cstddef>
#include <cstdint>

namespace ciuic {

constexpr long kActivationBlock = 256;

enum Precision { kInt8 = 0, kInt15 = 1, kBfloat16 = 2 };
constexpr Precision kPrecisions[] = {kInt8, kInt15, kBfloat16};
static constexpr float largest_activation(Precision precision) { return precision == kInt8 ? 127.0f : 16383.0f; }

// How a product is computed: from the fewest bits per activation, as exactly as in float32, from 15 bits for all row groups,
// or in bfloat16.
enum Mode { kFast, kExact, kIn15Bits, kInBfloat16 };
static constexpr Precision precision_for(int half_bits, Mode mode) {
  return mode == kInBfloat16 ? kBfloat16 : mode != kFast || half_bits > 8 ? kInt15 : kInt8;
}

// Quantized rows per row of activations.
static constexpr long quantized_rows(Mode mode) { return mode == kExact ? 2 : 1; }

// Signed bytes per value: value = low + 256 high, and int8 has no high byte.
static constexpr int byte_planes(Precision precision) { return precision == kInt15 ? 2 : 1; }

// Columns whose activations fill a row of a tile register, 64 bytes: four copies of a byte, or a bfloat16 value, each.
static constexpr long register_columns(Precision precision) { return precision == kBfloat16 ? 32 : 16; }
constexpr long kRegistersPerBlock = 16, kRegisterRowBytes = 64;

// A row of activations. The numbers of a block stand beside those of the other rows, `rows` apart.
struct QuantizedRow {
  float* scales;
  int32_t* offsets;
  int32_t* factored_offsets;
  int16_t* value;  // one per column
  long rows;

  float& scale(long block) const { return scales[rows * block]; }
  int32_t& offset(long block) const { return offsets[rows * block]; }
  // The offset minus own_products of the block's values. Only kernels with a loop that reads it set it (Factored in
  // many_rows_kernel.cpp).
  int32_t& factored_offset(long block) const { return factored_offsets[rows * block]; }
};

// Rows of activations of a band, the content of a tile register of the AMX kernel.
constexpr long kBandRows = 16;

// Where the arrays of `batch` rows lie: first the scales, the offsets and the factored offsets of all rows, then the values of each
// row, then what matrix units read.
//
// That is, per byte plane and column, the byte four times, to be multiplied by the four bytes of a hash; or a bfloat16 value
// per column. The order is by block of 16 registers, band of 16 rows, byte plane, register, row and column. So the 16 rows
// of a register are 1 KB of neighbouring memory. A single band has as many rows as there are; otherwise the last one has
// unused rows.
struct ActivationLayout {
  Precision precision;
  long cols, rows, registers, planes, band_rows, padded_rows;
  // array_bytes: of the scales, and of either offsets. row_bytes: of a row of values. size: of the whole.
  size_t array_bytes, row_bytes, registers_begin, size;
};

// `bytes`: whether matrix units or byte products read the integers.
static inline ActivationLayout activation_layout(long cols, Precision precision, long batch, bool bytes) {
  ActivationLayout layout;
  layout.precision = precision;
  layout.cols = cols;
  layout.registers = (cols + register_columns(precision) - 1) / register_columns(precision);
  layout.planes = precision == kBfloat16 || bytes ? byte_planes(precision) : 0;
  layout.band_rows = batch < kBandRows ? batch : kBandRows;
  layout.padded_rows = (batch + layout.band_rows - 1) / layout.band_rows * layout.band_rows;
  const size_t blocks = static_cast<size_t>((cols + kActivationBlock - 1) / kActivationBlock);
  layout.rows = batch;
  // Rounded up, so that every array begins on a 64-byte boundary. A row of values takes an odd number of cache lines: so the same
  // columns of neighbouring rows are in different sets of the cache.
  layout.array_bytes = precision == kBfloat16 ? 0 : (4 * blocks * batch + 63) / 64 * 64;
  layout.row_bytes = precision == kBfloat16 ? 0 : ((2 * static_cast<size_t>(cols) + 63) / 64 | 1) * 64;
  layout.registers_begin = 3 * layout.array_bytes + layout.row_bytes * batch;
  const long register_rows = layout.planes * layout.padded_rows * layout.registers;
  layout.size = layout.registers_begin + static_cast<size_t>(kRegisterRowBytes * register_rows);
  return layout;
}

struct Activations {
  ActivationLayout layout;
  uint8_t* memory;  // on a 64-byte boundary
};

static inline QuantizedRow quantized_row(const Activations& x, long row) {
  const ActivationLayout& layout = x.layout;
  uint8_t *values = x.memory + 3 * layout.array_bytes, *scales = x.memory + 4 * row;
  return {reinterpret_cast<float*>(scales), reinterpret_cast<int32_t*>(scales + layout.array_bytes),
          reinterpret_cast<int32_t*>(scales + 2 * layout.array_bytes),
          reinterpret_cast<int16_t*>(values + layout.row_bytes * row), layout.rows};
}

// The registers of a block, or as many as there are.
static inline long registers_of_block(const ActivationLayout& layout, long block) {
  const long rest = layout.registers - kRegistersPerBlock * block;
  return rest < kRegistersPerBlock ? rest : kRegistersPerBlock;
}

// A row of the first register of a block. The next register begins register_stride bytes later.
static inline uint8_t* register_row(const Activations& x, long block, long row, int plane) {
  const ActivationLayout& layout = x.layout;
  const long registers = registers_of_block(layout, block), in_band = row % layout.band_rows;
  const long before = layout.planes * (layout.padded_rows * kRegistersPerBlock * block + (row - in_band) * registers) +
                      plane * layout.band_rows * registers + in_band;
  return x.memory + layout.registers_begin + kRegisterRowBytes * before;
}

static inline long register_stride(const Activations& x) { return kRegisterRowBytes * x.layout.band_rows; }

}  // namespace ciuic

#endif
