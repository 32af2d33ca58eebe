// A product with a compressed matrix, in the parts that threads share: prepare the input, then multiply row groups.
#ifndef CIUIC_PRODUCT_H
#define CIUIC_PRODUCT_H

#include <cstddef>
#include <cstdint>

#include "activations.h"
#include "ciuic_native.h"
#include "kernels.h"

namespace ciuic {

// CIUIC_OK, or what is wrong with the matrix.
int check_product_matrix(const CiuicMatrix& matrix);

// Which precisions of the prepared input the row groups of a matrix read.
struct Precisions {
  bool needed[3] = {false, false, false};

  void add(const CiuicMatrix& matrix, Mode mode);
};

// Where the prepared rows of one input of `batch` rows lie: all rows at one precision after another.
struct PreparedLayout {
  Precisions precisions;
  long rows_each;  // quantized rows per row of the input
  ActivationLayout layout[3];
  size_t offset[3], bytes;

  PreparedLayout(const Precisions& wanted, Mode mode, long cols, long batch);

  Activations at(Precision precision, uint8_t* prepared) const { return {layout[precision], prepared + offset[precision]}; }
};

// Prepares row b: `row` (cols floats, of which the first cols_in are set) is multiplied by the matrix's input factors,
// transformed and quantized. `row` is overwritten. `signs` holds the `cols` signs of the matrix's seed.
void prepare_row(const CiuicMatrix& matrix, const float* signs, float* row, const PreparedLayout& layout, long b,
                 uint8_t* prepared);

// `count` elements of an array from `first` on, as float32.
void load_floats(const void* from, bool bf16, int64_t first, int64_t count, float* to);

// The output of a product: rows first_row, first_row + 1, .. of an array with rows_out columns, bfloat16 or float32.
struct Output {
  void* y;
  bool bf16;
  long first_row;
};

// y of the row groups first .. last - 1, for the first `batch` rows of the input; the bias is added.
void multiply_groups(const CiuicMatrix& matrix, Mode mode, const PreparedLayout& layout, uint8_t* prepared,
                     long batch, long first, long last, const Output& output);

// Copies row `row` of `stored`, whose columns are in the order of the stored rows, to the output's row first_row + row.
// position[i] is the stored column of the output's column i.
void put_in_order(const int32_t* position, long columns, const uint8_t* stored, long row, const Output& output);

// From as many rows on a product is computed in bfloat16, or from 15 bits: neither takes longer than 8 bits. Measured:
// docs/experiments/runtime/matrix-units.md (bfloat16) and docs/experiments/runtime/many-rows.md (15 bits).
constexpr long kFewestRowsInMoreBits = 40;

// The most rows that are multiplied without decoding blocks first. The results of more rows are put in order together.
// Chosen: AVX-512 keeps the sums of as many rows in registers.
constexpr long kFewRows = 8;

inline long output_groups(const CiuicMatrix& matrix) { return (matrix.rows_out + kTile - 1) / kTile; }

// Row groups per work item, so that threads finish at about the same time. Neighbouring groups stay together to avoid
// false sharing: if the stored rows are sorted, neighbouring elements of y come from groups that are near each other.
// With several quantized rows, an item fills the kernel's calls: it is even, or a multiple of `groups_together`.
long groups_per_item(long groups, int threads, long quantized);

// A stage of fewer weights runs on one thread: waking other threads takes about as long as multiplying this many. No
// measurement is on record.
constexpr long kWeightsWorthThreads = 65536;

// 64-byte alignment for prepared rows.
inline uint8_t* aligned(uint8_t* memory) { return memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64; }

}  // namespace ciuic

#endif
