// Products of float32 matrices, out = x w^T, by a matrix unit that multiplies bfloat16 and adds in float32.
//
// A float32 number is the sum of two bfloat16 numbers, its rounded value ("high") and the rest ("low"), and about 2^-17 of it. The
// product of two numbers is the sum of high high, low high and high low; that of two lows is left out. Numbers that are bfloat16
// already have no low part: original weights mostly are.
#ifndef CIUIC_DENSE_PRODUCT_H
#define CIUIC_DENSE_PRODUCT_H

#include <cstdint>

namespace ciuic {

// Rows that are multiplied together, and columns of `out` whose weights are packed together: two rows of tile registers, and
// what the second-level cache holds beside the rows.
constexpr long kDenseRows = 32, kDenseColumns = 128;
// Numbers of a row that are multiplied by one instruction; rows are padded with zeros to a multiple of it.
constexpr long kDenseDepth = 32;

// High and low parts of x: whole blocks of kDenseRows rows of `depth` numbers each, a multiple of kDenseDepth.
struct DenseRows {
  const uint16_t *high, *low;
  long depth;
};

struct DenseKernel {
  // Splits `count` numbers; those up to `depth` become 0.
  void (*split)(const float* from, long count, long depth, uint16_t* high, uint16_t* low);
  // Packs `columns` (at most kDenseColumns) rows of `count` weights, `count` apart, and returns whether any has a low part.
  bool (*pack)(const float* weights, long columns, long count, long depth, float* high, float* low);
  // out (rows x columns, `stride` apart) = x times packed weights. low: null if they have none.
  void (*multiply)(const DenseRows& x, const float* high, const float* low, long rows, long columns, float* out, long stride);
};

// The kernel of this machine; null without one.
const DenseKernel* dense_kernel();

#ifdef CIUIC_AMX_KERNELS
namespace dense_amx { extern const DenseKernel dense; }
#endif

}  // namespace ciuic

#endif
