// Multiplies quantized activations straight from the codes. Sums within a block of 256 columns are exact int32. They are
// scaled and added in float32, block after block in ascending order. So every instruction set and batch size gives the
// same result.
//
// There are two loops here, and one for many rows in many_rows_kernel.cpp. multiply_levels decodes pairs of columns to 16-bit byte sums and multiplies these by int16
// activations. multiply_bytes multiplies hash bytes by activation bytes, so that one instruction sums the bytes and
// multiplies. It takes fewer instructions per weight but more per row of activations, so it serves 1 or 2 rows
// (docs/experiments/runtime/cpu-product.md).
#include <cmath>

#include "activations.h"
#include "kernels_of_isa.h"
#include "tile.h"

namespace ciuic {
namespace CIUIC_ISA {

// The low byte of `value` in all four bytes.
static int32_t repeat_byte(int32_t value) { return static_cast<int32_t>((value & 0xFFu) * 0x01010101u); }

// Fills the bytes of the columns of one block from their values. `bytes`: those of the first tile.
static void fill_bytes(const int16_t* value, long count, int shift, uint8_t* bytes, long register_stride) {
  for (long tile = 0; tile * kTile < count; ++tile) {
    int32_t* repeated = reinterpret_cast<int32_t*>(bytes + tile * register_stride);
    // The high byte of a value whose low byte is negative is one more: value = low + 256 high.
    for (int j = 0; j < kTile; ++j) repeated[j] = repeat_byte((value[tile * kTile + j] + (shift == 8 ? 128 : 0)) >> shift);
  }
}

void quantize_row(const float* x, const Activations& activations, long row_number) {
  const float bound = largest_activation(activations.layout.precision);
  const long cols = activations.layout.cols;
  const QuantizedRow row = quantized_row(activations, row_number);
  for (long block = 0, begin = 0; begin < cols; ++block, begin += kActivationBlock) {
    const long end = begin + kActivationBlock < cols ? begin + kActivationBlock : cols;
    // The largest magnitude by bit pattern: magnitudes order like their bits, and a NaN exceeds all numbers.
    int32_t largest_bits = 0;
    for (long j = begin; j < end; ++j) {
      int32_t bits;
      __builtin_memcpy(&bits, x + j, sizeof bits);
      bits &= 0x7FFFFFFF;
      largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    float largest;
    __builtin_memcpy(&largest, &largest_bits, sizeof largest);
    const float scale = largest / bound;  // an infinity or NaN makes all products of this row infinite or NaN
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    int32_t sum = 0;
    for (long j = begin; j < end; ++j) {
      // Clamped because the reciprocal carries a rounding error, and is infinite if the scale is subnormal.
      const float exact = x[j] * inverse;
      const float bounded = exact < bound ? exact : bound;
      const int32_t value = static_cast<int32_t>(std::rint(bounded > -bound ? bounded : -bound));
      row.value[j] = static_cast<int16_t>(value);
      sum += value;
    }
    row.scale(block) = scale;
    row.offset(block) = -CIUIC_LEVEL_CENTRE * sum;
#ifdef CIUIC_FACTORED
    row.factored_offset(block) = static_cast<int32_t>(static_cast<uint32_t>(row.offset(block)) -
                                                      static_cast<uint32_t>(own_products(row.value + begin, end - begin)));
#endif
    for (int plane = 0; plane < activations.layout.planes; ++plane)
      fill_bytes(row.value + begin, end - begin, 8 * plane, register_row(activations, block, row_number, plane),
                 register_stride(activations));
  }
}

constexpr long kTilesPerBlock = kActivationBlock / kTile;

template <int H>
using Mask = decltype(Tile<H>::mask_of(0));

// Adds the products of pairs P .. 7 of a tile that begins at `column`.
template <int H, bool Masked, int Batch, int P>
static inline __attribute__((always_inline)) void add_pairs(Sums* sums, const Tile<H>& tile, const QuantizedRow* x,
                                                            Mask<H> mask, long column) {
  if constexpr (P < kTile / 2) {
    const Pair levels = byte_sums(hash_of(tile.template windows<P, Masked>(mask)));
    for (int b = 0; b < Batch; ++b) add_products(sums[b], levels, x[b].value + column + 2 * P);
    add_pairs<H, Masked, Batch, P + 1>(sums, tile, x, mask, column);
  }
}

// Adds the products of `tiles` tiles to total[b][row], b < Batch, from the levels of pairs of columns.
template <int H, bool Masked, int Batch>
static void multiply_levels(const uint8_t* codes, long tiles, int L, const QuantizedRow* x, float (*total)[kTile]) {
  const auto mask = Tile<H>::mask_of(L);
  for (long block = 0; block * kTilesPerBlock < tiles; ++block) {
    Sums sums[Batch];
    for (int b = 0; b < Batch; ++b) sums[b] = sums_of(x[b].offset(block));
    const long first = block * kTilesPerBlock, last = first + kTilesPerBlock < tiles ? first + kTilesPerBlock : tiles;
    for (long t = first; t < last; ++t)
      add_pairs<H, Masked, Batch, 0>(sums, Tile<H>(codes + t * CIUIC_TILE_BYTES(H)), x, mask, t * kTile);
    for (int b = 0; b < Batch; ++b) add_scaled(total[b], sums[b], x[b].scale(block));
  }
}

// Independent sums per row. Columns take turns among them, so that no product waits for the result of the one before.
// Measured: docs/experiments/runtime/cpu-product.md.
constexpr int kChains = 4;

// Adds the products of columns C .. 15 of a tile, whose bytes of activations begin `begin` bytes into the block.
template <int H, bool Masked, int Batch, int Planes, int C>
static inline __attribute__((always_inline)) void add_columns(Sums (*sums)[Planes][kChains], const Tile<H>& tile,
                                                              const uint8_t* (*bytes)[Planes], Mask<H> mask, long begin) {
  if constexpr (C < kTile) {
    const auto hash = hash_of_column(tile.template column<C, Masked>(mask));
    for (int b = 0; b < Batch; ++b)
      for (int plane = 0; plane < Planes; ++plane)
        add_byte_products(sums[b][plane][C % kChains], hash, bytes[b][plane] + begin + 4 * C);
    add_columns<H, Masked, Batch, Planes, C + 1>(sums, tile, bytes, mask, begin);
  }
}

// Prefetch distance in bytes. Measured: docs/experiments/runtime/cpu-product.md. The processor's own prefetcher stops
// at the end of a page. Addresses beyond the row group are usually the next group's, and a prefetch beyond the matrix
// is harmless.
constexpr long kPrefetchBytes = 8192;

// As multiply_levels, from the bytes of the hashes.
template <int H, bool Masked, int Batch, int Planes>
static void multiply_bytes(const uint8_t* codes, long tiles, int L, const QuantizedRow* x, const Activations& activations,
                           long first_row, float (*total)[kTile]) {
  constexpr long kTileBytes = CIUIC_TILE_BYTES(H);
  const auto mask = Tile<H>::mask_of(L);
  for (long block = 0; block * kTilesPerBlock < tiles; ++block) {
    Sums sums[Batch][Planes][kChains];
    const uint8_t* bytes[Batch][Planes];
    for (int b = 0; b < Batch; ++b)
      for (int plane = 0; plane < Planes; ++plane) {
        bytes[b][plane] = register_row(activations, block, first_row + b, plane);
        for (int chain = 0; chain < kChains; ++chain) sums[b][plane][chain] = sums_of(0);
      }
    const long first = block * kTilesPerBlock, last = first + kTilesPerBlock < tiles ? first + kTilesPerBlock : tiles;
    for (long t = first; t < last; ++t) {
      const uint8_t* tile = codes + t * kTileBytes;
      for (long i = 0; i < kTileBytes; i += 64) __builtin_prefetch(tile + kPrefetchBytes + i);
      add_columns<H, Masked, Batch, Planes, 0>(sums, Tile<H>(tile), bytes, mask, (t - first) * register_stride(activations));
    }
    for (int b = 0; b < Batch; ++b) {
      Sums sum = sums_of(x[b].offset(block));
      for (int plane = 0; plane < Planes; ++plane)
        for (int chain = 0; chain < kChains; ++chain) sum = combined(sum, sums[b][plane][chain], 8 * plane);
      add_scaled(total[b], sum, x[b].scale(block));
    }
  }
}

// Runs the loop for the smallest compiled batch size, kBatches[Choice] or a later one, that holds `batch` rows. It uses
// byte products where they take no more instructions than the 16-bit products and byte sums that they replace.
template <int H, bool Masked, int Choice>
static void multiply_batch(const uint8_t* codes, long tiles, int L, QuantizedRow* x, const Activations& activations,
                           long first_row, float (*total)[kTile], int batch) {
  constexpr int kChoices = sizeof(kBatches) / sizeof(kBatches[0]), kBatch = kBatches[Choice];
  if constexpr (Choice + 1 < kChoices) {
    if (batch > kBatch)
      return multiply_batch<H, Masked, Choice + 1>(codes, tiles, L, x, activations, first_row, total, batch);
  }
  for (int b = batch; b < kBatch; ++b) x[b] = x[batch - 1];  // unused rows repeat the last one; their totals are not used
  for (int b = 0; b < kBatch; ++b)
    for (int r = 0; r < kTile; ++r) total[b][r] = 0.0f;
  if constexpr (kBatch <= kByteRows) {
    if (activations.layout.planes == 1)
      return multiply_bytes<H, Masked, kBatch, 1>(codes, tiles, L, x, activations, first_row, total);
  }
  if constexpr (kBatch == 1 && kByteRows > 0) {
    if (activations.layout.planes == 2)
      return multiply_bytes<H, Masked, 1, 2>(codes, tiles, L, x, activations, first_row, total);
  }
  multiply_levels<H, Masked, kBatch>(codes, tiles, L, x, total);
}

constexpr int kLargestBatch = kBatches[sizeof(kBatches) / sizeof(kBatches[0]) - 1];

static void multiply_group(const RowGroup& group, int L, const Activations& activations, long first_row, int batch) {
  const long tiles = activations.layout.cols / kTile;
  QuantizedRow x[kLargestBatch];
  for (int b = 0; b < batch; ++b) x[b] = quantized_row(activations, first_row + b);
  float total[kLargestBatch][kTile];
  with_half_bits(group.half_bits, [&](auto constant) {
    constexpr int H = decltype(constant)::value;
    if (L == 16)
      multiply_batch<H, false, 0>(group.codes, tiles, L, x, activations, first_row, total, batch);
    else
      multiply_batch<H, true, 0>(group.codes, tiles, L, x, activations, first_row, total, batch);
  });
  for (int b = 0; b < batch; ++b)
    for (int r = 0; r < kTile; ++r) group.sums[b * kTile + r] = total[b][r];
}

void matmul_groups(const RowGroup* groups, int count, int L, const Activations& activations, long first_row, long batch) {
  if (batch > kLargestBatch) return multiply_many_rows(groups, count, L, activations, first_row, batch);
  for (int g = 0; g < count; ++g) multiply_group(groups[g], L, activations, first_row, static_cast<int>(batch));
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
