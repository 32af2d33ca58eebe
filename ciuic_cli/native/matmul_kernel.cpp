// Multiplies straight from the codes with rounded activations: exact int32 sums per block of 256 columns, scaled and added in
// float32 block after block. Every instruction set and batch size gives the same result.
#include <cmath>

#include "activations.h"
#include "kernels_of_isa.h"
#include "tile.h"

namespace ciuic {
namespace CIUIC_ISA {

void quantize_row(const float* x, long cols, Precision precision, uint8_t* activations) {
  const float bound = largest_activation(precision);
  const QuantizedRow row = quantized_row(activations, cols);
  for (long block = 0, begin = 0; begin < cols; ++block, begin += kActivationBlock) {
    const long end = begin + kActivationBlock < cols ? begin + kActivationBlock : cols;
    float largest = 0.0f;
    for (long j = begin; j < end; ++j) {
      const float size = std::fabs(x[j]);
      largest = size > largest ? size : largest;
    }
    const float step = largest / bound;
    const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
    int32_t sum = 0;
    for (long j = begin; j < end; ++j) {
      // The reciprocal may be off by a rounding, and infinite for a subnormal step.
      const float position = x[j] * inverse;
      const float bounded = position < bound ? position : bound;
      const int32_t value = static_cast<int32_t>(std::rint(bounded > -bound ? bounded : -bound));
      row.value[j] = static_cast<int16_t>(value);
      sum += value;
    }
    row.step[block] = step;
    row.offset[block] = -CIUIC_LEVEL_CENTRE * sum;
    if (precision == kInt8)
      for (long j = begin; j < end; ++j)
        row.bytes[2 * j] = row.bytes[2 * j + 1] = static_cast<int8_t>(row.value[j]);
  }
}

template <int Bits>
using Mask = decltype(Tile<Bits>::mask_of(0));

// Adds the products of pair P and those after it.
template <int Bits, bool Masked, bool Bytes, int Batch, int P>
static inline __attribute__((always_inline)) void add_pairs(Sums* sums, const Tile<Bits>& tile, const QuantizedRow* x,
                                                            Mask<Bits> mask, long column) {
  if constexpr (P < CIUIC_TILE / 2) {
    const Hash hash = hash_of(tile.template windows<P, Masked>(mask));
    if constexpr (Bytes) {
      for (int b = 0; b < Batch; ++b) add_byte_products(sums[b], hash, x[b].bytes + 2 * column + 4 * P);
    } else {
      const Pair levels = byte_sums(hash);
      for (int b = 0; b < Batch; ++b) add_products(sums[b], levels, x[b].value + column + 2 * P);
    }
    add_pairs<Bits, Masked, Bytes, Batch, P + 1>(sums, tile, x, mask, column);
  }
}

// total[b][row], b < Batch.
template <int Bits, bool Masked, bool Bytes, int Batch>
static void multiply(const uint8_t* codes, long tiles, int window, const QuantizedRow* x, float (*total)[kTile]) {
  constexpr long kTilesPerBlock = kActivationBlock / kTile;
  const auto mask = Tile<Bits>::mask_of(window);
  for (int b = 0; b < Batch; ++b)
    for (int r = 0; r < kTile; ++r) total[b][r] = 0.0f;
  for (long block = 0; block * kTilesPerBlock < tiles; ++block) {
    Sums sums[Batch];
    for (int b = 0; b < Batch; ++b) sums[b] = sums_of(x[b].offset[block]);
    const long first = block * kTilesPerBlock, last = first + kTilesPerBlock < tiles ? first + kTilesPerBlock : tiles;
    for (long t = first; t < last; ++t)
      add_pairs<Bits, Masked, Bytes, Batch, 0>(sums, Tile<Bits>(codes + t * CIUIC_UNIT_BYTES * Bits), x, mask, t * kTile);
    for (int b = 0; b < Batch; ++b) add_scaled(total[b], sums[b], x[b].step[block]);
  }
}

template <int Bits, bool Masked, int Choice>
static void multiply_some(const uint8_t* codes, long tiles, int window, const QuantizedRow* x, float (*total)[kTile],
                          int batch) {
  constexpr int kChoices = sizeof(kBatches) / sizeof(kBatches[0]);
  if constexpr (Choice + 1 < kChoices) {
    if (batch > kBatches[Choice]) return multiply_some<Bits, Masked, Choice + 1>(codes, tiles, window, x, total, batch);
  }
  multiply<Bits, Masked, false, kBatches[Choice]>(codes, tiles, window, x, total);
}

void matmul_group(const uint8_t* codes, long tiles, int bits, int window, const float* row_factor, Precision precision,
                  const uint8_t* activations, long batch, float* y, long y_stride, int rows) {
  constexpr int kLargestBatch = kBatches[sizeof(kBatches) / sizeof(kBatches[0]) - 1];
  const size_t row_bytes = quantized_row_bytes(tiles * kTile, precision);
  for (long done = 0; done < batch; done += kLargestBatch) {
    const int now = static_cast<int>(batch - done < kLargestBatch ? batch - done : kLargestBatch);
    QuantizedRow x[kLargestBatch];
    for (int b = 0; b < kLargestBatch; ++b)  // a batch size without code of its own repeats the last row
      x[b] = quantized_row(const_cast<uint8_t*>(activations) + (done + (b < now ? b : now - 1)) * row_bytes, tiles * kTile);
    float total[kLargestBatch][kTile];
    with_bits(bits, [&](auto constant) {
      constexpr int kBits = decltype(constant)::value;
      if constexpr (kByteProducts)
        if (now == 1 && precision == kInt8) {  // from two rows on one product of 16-bit levels each is as fast
          if (window == 16)
            multiply<kBits, false, true, 1>(codes, tiles, window, x, total);
          else
            multiply<kBits, true, true, 1>(codes, tiles, window, x, total);
          return;
        }
      if (window == 16)
        multiply_some<kBits, false, 0>(codes, tiles, window, x, total, now);
      else
        multiply_some<kBits, true, 0>(codes, tiles, window, x, total, now);
    });
    for (int b = 0; b < now; ++b)
      for (int r = 0; r < rows; ++r) y[(done + b) * y_stride + r] = row_factor[r] * total[b][r];
  }
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
