// The parts of a product of float32 matrices on AMX, the matrix unit of Intel processors.
//
// A row of the left register holds 32 numbers of a row of x as they lie in memory. A row of the right register holds a pair of
// these numbers' weights for each of 16 columns of the result.
#include <immintrin.h>

#include <algorithm>

#include "dense_product.h"
#include "tile_blocks.h"
#include "tile_shapes.h"

namespace ciuic {
namespace CIUIC_ISA {
namespace {

constexpr long kSide = 16, kRegister = kSide * kSide;
static_assert(kDenseRows == 2 * kSide && kDenseColumns % (2 * kSide) == 0 && kDenseDepth == 2 * kSide, "whole registers");

struct Halves {
  __m256i high, low;
};

inline __attribute__((always_inline)) __m512 widened(__m256i bfloat16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bfloat16), 16));
}

inline __attribute__((always_inline)) Halves halves_of(__m512 value) {
  const __m256i high = (__m256i)_mm512_cvtneps_pbh(value);
  return {high, (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(value, widened(high)))};
}

inline __attribute__((always_inline)) __mmask16 first(long count) {
  return static_cast<__mmask16>(count >= kSide ? 0xFFFF : count > 0 ? (1 << count) - 1 : 0);
}

void split(const float* from, long count, long depth, uint16_t* high, uint16_t* low) {
  for (long i = 0; i < depth; i += kSide) {
    const Halves halves = halves_of(_mm512_maskz_loadu_ps(first(count - i), from + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + i), halves.high);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + i), halves.low);
  }
}

bool pack(const float* weights, long columns, long count, long depth, float* high, float* low) {
  __m512i lows = _mm512_setzero_si512();
  for (long k = 0; k < depth; k += kDenseDepth)
    for (long column = 0; column < kDenseColumns; column += kSide, high += kRegister, low += kRegister) {
      __m512i high_rows[kSide], low_rows[kSide];
      for (long i = 0; i < kSide; ++i) {
        const bool exists = column + i < columns;
        const float* const from = weights + (exists ? column + i : 0) * count + k;
        const long left = exists ? count - k : 0;
        const Halves even = halves_of(_mm512_maskz_loadu_ps(first(left), from));
        const Halves odd = halves_of(_mm512_maskz_loadu_ps(first(left - kSide), from + kSide));
        high_rows[i] = _mm512_inserti64x4(_mm512_castsi256_si512(even.high), odd.high, 1);
        low_rows[i] = _mm512_inserti64x4(_mm512_castsi256_si512(even.low), odd.low, 1);
        lows = _mm512_or_si512(lows, low_rows[i]);
      }
      transpose_tile(high_rows);
      transpose_tile(low_rows);
      for (long i = 0; i < kSide; ++i) {
        _mm512_storeu_si512(high + i * kSide, high_rows[i]);
        _mm512_storeu_si512(low + i * kSide, low_rows[i]);
      }
    }
  return _mm512_test_epi16_mask(lows, _mm512_set1_epi16(0x7FFF)) != 0;  // not -0
}

inline __attribute__((always_inline)) void load_rows(const uint16_t* rows, long depth) {
  _tile_loadd(4, rows, 2 * depth);
  _tile_loadd(5, rows + kSide * depth, 2 * depth);
}

inline __attribute__((always_inline)) void load_weights(const float* weights) {
  _tile_loadd(6, weights, 4 * kSide);
  _tile_loadd(7, weights + kRegister, 4 * kSide);
}

// 32 x 32 results in the registers 0 to 3.
inline void multiply_block(const uint16_t* high, const uint16_t* low, long depth, const float* weights_high,
                           const float* weights_low) {
  constexpr long kStep = kDenseColumns / kSide * kRegister;
  clear_tile_sums();
  for (long k = 0, at = 0; k < depth; k += kDenseDepth, at += kStep) {
    load_weights(weights_high + at);
    load_rows(low + k, depth);
    add_tile_products();
    load_rows(high + k, depth);
    add_tile_products();
    if (weights_low == nullptr) continue;
    load_weights(weights_low + at);
    add_tile_products();
  }
}

void multiply(const DenseRows& x, const float* high, const float* low, long rows, long columns, float* out, long stride) {
  const TileShapes shapes(kSide);
  for (long row = 0; row < rows; row += kDenseRows)
    for (long column = 0; column < columns; column += 2 * kSide) {
      const long at = row * x.depth, weights = column * kSide;
      multiply_block(x.high + at, x.low + at, x.depth, high + weights, low == nullptr ? nullptr : low + weights);
      float* const to = out + row * stride + column;
      const long some_rows = std::min(kDenseRows, rows - row), some_columns = std::min(2 * kSide, columns - column);
      if (some_rows == kDenseRows && some_columns == 2 * kSide) {
        store_tile_sums(to, stride);
        continue;
      }
      alignas(64) float block[kDenseRows * 2 * kSide];
      store_tile_sums(block, 2 * kSide);
      for (long i = 0; i < some_rows; ++i) std::copy_n(block + i * 2 * kSide, some_columns, to + i * stride);
    }
}

}  // namespace

extern const DenseKernel dense;
const DenseKernel dense = {split, pack, multiply};

}  // namespace CIUIC_ISA
}  // namespace ciuic
