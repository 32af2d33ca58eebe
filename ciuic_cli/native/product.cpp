#include "product.h"

#include <algorithm>
#include <cstring>

#include "bfloat16.h"
#include "check_matrix.h"
#include "trellis_decode.h"

namespace ciuic {
namespace {

// True if the `count` indices are all in [0, count).
bool all_in_range(const int32_t* index, long count) {
  bool in_range = true;
  for (long i = 0; i < count; ++i) in_range &= index[i] >= 0 && index[i] < count;
  return in_range;
}

// Batch rows that are multiplied before their results are stored: a multiple of every kernel's largest batch.
constexpr long kStoredBatch = 48;
// Bounds of a work item's size. No measurement is on record.
constexpr long kItemsPerThread = 8, kMaxGroupsPerItem = 16;

// Stores the results of a row group for `count` batch rows from `first` on.
void store(const CiuicMatrix& matrix, const Output& output, const float (*sums)[kTile], long first, long count,
           long group) {
  const int group_rows = static_cast<int>(std::min<long>(kTile, matrix.rows_out - kTile * group));
  long column[kTile];
  float bias[kTile];
  for (int r = 0; r < group_rows; ++r) {
    column[r] = matrix.order != nullptr ? matrix.order[kTile * group + r] : kTile * group + r;
    bias[r] = matrix.bias != nullptr ? matrix.bias[column[r]] : 0.0f;
  }
  for (long b = 0; b < count; ++b) {
    const long begin = (first + b) * matrix.rows_out;
    for (int r = 0; r < group_rows; ++r) {
      const float value = sums[b][r] + bias[r];
      if (output.bf16)
        static_cast<uint16_t*>(output.y)[begin + column[r]] = to_bfloat16(value);
      else
        static_cast<float*>(output.y)[begin + column[r]] = value;
    }
  }
}

}  // namespace

int check_product_matrix(const CiuicMatrix& matrix) {
  const int status =
      check_matrix(matrix.codes, matrix.group_offset, matrix.row_bits, matrix.scale, matrix.rows, matrix.cols, matrix.L);
  if (status != CIUIC_OK) return status;
  if (matrix.cols_in < 1 || matrix.cols_in > matrix.cols || matrix.rows_out < 1 || matrix.rows_out > matrix.rows ||
      matrix.log2_block < 0 || matrix.log2_block > kMaxLog2Block || matrix.cols % (1L << matrix.log2_block) != 0)
    return CIUIC_BAD_ARGUMENT;
  if (matrix.order != nullptr && !all_in_range(matrix.order, matrix.rows_out)) return CIUIC_BAD_ARGUMENT;
  return CIUIC_OK;
}

void load_floats(const void* from, bool bf16, int64_t first, int64_t count, float* to) {
  if (bf16)
    for (int64_t i = 0; i < count; ++i) to[i] = from_bfloat16(static_cast<const uint16_t*>(from)[first + i]);
  else
    std::memcpy(to, static_cast<const float*>(from) + first, sizeof(float) * count);
}

void Precisions::add(const CiuicMatrix& matrix, bool precise) {
  for (long g = 0; g < output_groups(matrix); ++g)
    if (matrix.row_bits[g] != 0) needed[precision_for(ciuic_half_bits_of(matrix.row_bits[g]), precise)] = true;
}

PreparedLayout::PreparedLayout(const Precisions& wanted, long cols, long batch) : precisions(wanted), bytes(0) {
  for (const Precision precision : {kInt8, kInt15}) {
    row_bytes[precision] = quantized_row_bytes(cols, precision);
    offset[precision] = bytes;
    if (precisions.needed[precision]) bytes += row_bytes[precision] * batch;
  }
}

void prepare_row(const CiuicMatrix& matrix, const float* signs, float* row, const PreparedLayout& layout, long b,
                 uint8_t* prepared) {
  if (matrix.input_factors != nullptr)
    for (long j = 0; j < matrix.cols_in; ++j) row[j] *= matrix.input_factors[j];
  std::memset(row + matrix.cols_in, 0, sizeof(float) * (matrix.cols - matrix.cols_in));
  kernels().hadamard_row(row, matrix.cols, matrix.log2_block, signs, 0);
  for (const Precision precision : {kInt8, kInt15})
    if (layout.precisions.needed[precision])
      kernels().quantize_row(row, matrix.cols, precision,
                             prepared + layout.offset[precision] + b * layout.row_bytes[precision]);
}

void multiply_groups(const CiuicMatrix& matrix, bool precise, const PreparedLayout& layout, const uint8_t* prepared,
                     long batch, long first, long last, const Output& output) {
  for (long group = first; group < last; ++group) {
    const int half_bits = ciuic_half_bits_of(matrix.row_bits[group]);
    const Precision precision = precision_for(half_bits, precise);
    float factors[kTile];
    for (int r = 0; r < kTile; ++r) factors[r] = ciuic_row_factor(matrix.scale[kTile * group + r]);
    for (long begin = 0; begin < batch; begin += kStoredBatch) {
      const long count = std::min(batch - begin, kStoredBatch);
      float sums[kStoredBatch][kTile];
      if (half_bits == 0)
        std::memset(sums, 0, sizeof sums[0] * count);
      else
        kernels().matmul_group(matrix.codes + matrix.group_offset[group], matrix.cols / kTile, half_bits, matrix.L,
                               factors, precision,
                               prepared + layout.offset[precision] + begin * layout.row_bytes[precision], count, sums[0],
                               kTile, kTile);
      store(matrix, output, sums, begin, count, group);
    }
  }
}

long groups_per_item(long groups, int threads) {
  return std::min<long>(1 + groups / (kItemsPerThread * threads), kMaxGroupsPerItem);
}

}  // namespace ciuic
