// Multiplies straight from the codes with rounded activations: exact int32 sums per block of 256 columns, scaled and added in
// float32 block after block. Every instruction set and batch size gives the same result.
#include <cmath>

#include "activations.h"
#include "kernels_of_isa.h"
#include "tile.h"

namespace ciuic {
namespace CIUIC_ISA {

// One byte in all four places.
static int32_t fourfold(int32_t value) { return static_cast<int32_t>((value & 0xFFu) * 0x01010101u); }

static void fill_bytes(const QuantizedRow& row, long begin, long end, Precision precision) {
  int32_t* four = reinterpret_cast<int32_t*>(row.bytes);
  for (long j = begin; j < end; ++j) {
    const int32_t low = static_cast<int8_t>(row.value[j]), high = (row.value[j] - low) >> 8;
    if (precision == kInt8) {
      four[j] = fourfold(low);
    } else {
      four[2 * j] = fourfold(low);
      four[2 * j + 1] = fourfold(high);
    }
  }
}

void quantize_row(const float* x, long cols, Precision precision, uint8_t* activations) {
  const float bound = largest_activation(precision);
  const QuantizedRow row = quantized_row(activations, cols);
  for (long block = 0, begin = 0; begin < cols; ++block, begin += kActivationBlock) {
    const long end = begin + kActivationBlock < cols ? begin + kActivationBlock : cols;
    // Magnitudes order like their bits, and a NaN exceeds them all.
    int32_t largest_bits = 0;
    for (long j = begin; j < end; ++j) {
      int32_t bits;
      __builtin_memcpy(&bits, x + j, sizeof bits);
      bits &= 0x7FFFFFFF;
      largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    float largest;
    __builtin_memcpy(&largest, &largest_bits, sizeof largest);
    const float step = largest / bound;  // an infinity or NaN spreads to all of the row's products
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
    if constexpr (kByteProducts) fill_bytes(row, begin, end, precision);
  }
}

constexpr long kTilesPerBlock = kActivationBlock / kTile;

template <int Halves>
using Mask = decltype(Tile<Halves>::mask_of(0));

// Adds the products of pair P and those after it.
template <int Halves, bool Masked, int Batch, int P>
static inline __attribute__((always_inline)) void add_pairs(Sums* sums, const Tile<Halves>& tile, const QuantizedRow* x,
                                                            Mask<Halves> mask, long column) {
  if constexpr (P < kTile / 2) {
    const Pair levels = byte_sums(hash_of(tile.template windows<P, Masked>(mask)));
    for (int b = 0; b < Batch; ++b) add_products(sums[b], levels, x[b].value + column + 2 * P);
    add_pairs<Halves, Masked, Batch, P + 1>(sums, tile, x, mask, column);
  }
}

// total[b][row], b < Batch, from the levels of pairs of columns.
template <int Halves, bool Masked, int Batch>
static void multiply_levels(const uint8_t* codes, long tiles, int window, const QuantizedRow* x, float (*total)[kTile]) {
  const auto mask = Tile<Halves>::mask_of(window);
  for (long block = 0; block * kTilesPerBlock < tiles; ++block) {
    Sums sums[Batch];
    for (int b = 0; b < Batch; ++b) sums[b] = sums_of(x[b].offset[block]);
    const long first = block * kTilesPerBlock, last = first + kTilesPerBlock < tiles ? first + kTilesPerBlock : tiles;
    for (long t = first; t < last; ++t)
      add_pairs<Halves, Masked, Batch, 0>(sums, Tile<Halves>(codes + t * CIUIC_TILE_BYTES(Halves)), x, mask, t * kTile);
    for (int b = 0; b < Batch; ++b) add_scaled(total[b], sums[b], x[b].step[block]);
  }
}

// Neighbouring columns have sums of their own, so that no product waits for the one before.
constexpr int kChains = 4;

// Adds the products of column C and those after it.
template <int Halves, bool Masked, int Batch, int Planes, int C>
static inline __attribute__((always_inline)) void add_columns(Sums (*sums)[Planes][kChains], const Tile<Halves>& tile,
                                                              const QuantizedRow* x, Mask<Halves> mask, long column) {
  if constexpr (C < kTile) {
    const auto hash = hash_of_column(tile.template column<C, Masked>(mask));
    for (int b = 0; b < Batch; ++b)
      for (int plane = 0; plane < Planes; ++plane)
        add_byte_products(sums[b][plane][C % kChains], hash, x[b].bytes + 4 * (Planes * (column + C) + plane));
    add_columns<Halves, Masked, Batch, Planes, C + 1>(sums, tile, x, mask, column);
  }
}

// How far ahead codes are asked for, in bytes. The processor's own prefetching stops at the end of a page; what is asked for
// beyond the row group is mostly the next one, and beyond the matrix it does no harm.
constexpr long kAhead = 8192;

// The same from the bytes of the hashes: fewer instructions per weight, more per product.
template <int Halves, bool Masked, int Batch, int Planes>
static void multiply_bytes(const uint8_t* codes, long tiles, int window, const QuantizedRow* x, float (*total)[kTile]) {
  constexpr long kTileBytes = CIUIC_TILE_BYTES(Halves);
  const auto mask = Tile<Halves>::mask_of(window);
  for (long block = 0; block * kTilesPerBlock < tiles; ++block) {
    Sums sums[Batch][Planes][kChains];
    for (int b = 0; b < Batch; ++b)
      for (int plane = 0; plane < Planes; ++plane)
        for (int chain = 0; chain < kChains; ++chain) sums[b][plane][chain] = sums_of(0);
    const long first = block * kTilesPerBlock, last = first + kTilesPerBlock < tiles ? first + kTilesPerBlock : tiles;
    for (long t = first; t < last; ++t) {
      const uint8_t* tile = codes + t * kTileBytes;
      for (long i = 0; i < kTileBytes; i += 64) __builtin_prefetch(tile + kAhead + i);
      add_columns<Halves, Masked, Batch, Planes, 0>(sums, Tile<Halves>(tile), x, mask, t * kTile);
    }
    for (int b = 0; b < Batch; ++b) {
      Sums sum = sums_of(x[b].offset[block]);
      for (int plane = 0; plane < Planes; ++plane)
        for (int chain = 0; chain < kChains; ++chain) sum = combined(sum, sums[b][plane][chain], 8 * plane);
      add_scaled(total[b], sum, x[b].step[block]);
    }
  }
}

// With the code for the smallest number of rows that holds `batch`. Byte products pay while they are no more than the 16-bit
// products and sums of bytes that they replace.
template <int Halves, bool Masked, int Choice>
static void multiply_some(const uint8_t* codes, long tiles, int window, QuantizedRow* x, float (*total)[kTile], int batch,
                          Precision precision) {
  constexpr int kChoices = sizeof(kBatches) / sizeof(kBatches[0]), kBatch = kBatches[Choice];
  if constexpr (Choice + 1 < kChoices) {
    if (batch > kBatch) return multiply_some<Halves, Masked, Choice + 1>(codes, tiles, window, x, total, batch, precision);
  }
  for (int b = batch; b < kBatch; ++b) x[b] = x[batch - 1];  // a batch size without code of its own repeats the last row
  for (int b = 0; b < kBatch; ++b)
    for (int r = 0; r < kTile; ++r) total[b][r] = 0.0f;
  if constexpr (kByteProducts && kBatch <= 2) {
    if (precision == kInt8) return multiply_bytes<Halves, Masked, kBatch, 1>(codes, tiles, window, x, total);
  }
  if constexpr (kByteProducts && kBatch == 1) return multiply_bytes<Halves, Masked, 1, 2>(codes, tiles, window, x, total);
  multiply_levels<Halves, Masked, kBatch>(codes, tiles, window, x, total);
}

void matmul_group(const uint8_t* codes, long tiles, int halves, int window, const float* row_factor, Precision precision,
                  const uint8_t* activations, long batch, float* y, long y_stride, int rows) {
  constexpr int kLargestBatch = kBatches[sizeof(kBatches) / sizeof(kBatches[0]) - 1];
  const size_t row_bytes = quantized_row_bytes(tiles * kTile, precision);
  for (long done = 0; done < batch; done += kLargestBatch) {
    const int now = static_cast<int>(batch - done < kLargestBatch ? batch - done : kLargestBatch);
    QuantizedRow x[kLargestBatch];
    for (int b = 0; b < now; ++b)
      x[b] = quantized_row(const_cast<uint8_t*>(activations) + (done + b) * row_bytes, tiles * kTile);
    float total[kLargestBatch][kTile];
    with_halves(halves, [&](auto constant) {
      constexpr int kHalves = decltype(constant)::value;
      if (window == 16)
        multiply_some<kHalves, false, 0>(codes, tiles, window, x, total, now, precision);
      else
        multiply_some<kHalves, true, 0>(codes, tiles, window, x, total, now, precision);
    });
    for (int b = 0; b < now; ++b)
      for (int r = 0; r < rows; ++r) y[(done + b) * y_stride + r] = row_factor[r] * total[b][r];
  }
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
