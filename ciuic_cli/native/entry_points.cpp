// The C functions for decoding, multiplication and the input transform: they check arguments and share work among threads.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "activations.h"
#include "bfloat16.h"
#include "check_matrix.h"
#include "ciuic_native.h"
#include "kernels.h"
#include "parallel.h"
#include "trellis_decode.h"

namespace ciuic {
namespace {

void row_factors(const float* scale, float factors[kTile]) {
  for (int r = 0; r < kTile; ++r) factors[r] = ciuic_row_factor(scale[r]);
}

struct PackedMatrix {
  const uint8_t* codes;
  const int64_t* group_offset;
  const uint8_t* row_bits;
  const float* scale;
  long cols;
  int L;
};

// Decodes rows begin .. end - 1 of a row group into rows out_row, out_row + 1, .. of out.
void decode_group_rows(const PackedMatrix& packed, long group, int begin, int end, void* out, bool bf16, long out_row) {
  const int half_bits = ciuic_half_bits_of(packed.row_bits[group]);
  const size_t row_bytes = (bf16 ? 2 : 4) * static_cast<size_t>(packed.cols);
  uint8_t* to = static_cast<uint8_t*>(out) + row_bytes * out_row;
  if (half_bits == 0) {
    std::memset(to, 0, row_bytes * (end - begin));
    return;
  }
  float factors[kTile];
  row_factors(packed.scale + kTile * group, factors);
  kernels().decode_tiles(packed.codes + packed.group_offset[group], packed.cols / kTile, half_bits, packed.L, factors,
                         begin, end, to, static_cast<size_t>(packed.cols), bf16);
}

// Elements first .. first + count - 1 of x as float32.
void load_row(const void* x, bool bf16, long first, long count, float* row) {
  if (bf16)
    for (long j = 0; j < count; ++j) row[j] = from_bfloat16(static_cast<const uint16_t*>(x)[first + j]);
  else
    std::memcpy(row, static_cast<const float*>(x) + first, sizeof(float) * count);
}

// Whether the `count` indices are all in [0, count).
bool all_in_range(const int32_t* index, long count) {
  bool in_range = true;
  for (long i = 0; i < count; ++i) in_range &= index[i] >= 0 && index[i] < count;
  return in_range;
}

// The output matrix of a product.
struct Output {
  void* y;  // batch x rows
  bool bf16;
  long rows;
  const int32_t* order;  // stored row -> column of y, or null

  // Stores the results of a row group for `count` batch rows from `first` on.
  void store(const float (*sums)[kTile], long first, long count, long group) const {
    const int group_rows = static_cast<int>(std::min<long>(kTile, rows - kTile * group));
    long column[kTile];
    for (int r = 0; r < group_rows; ++r) column[r] = order != nullptr ? order[kTile * group + r] : kTile * group + r;
    for (long b = 0; b < count; ++b) {
      const long begin = (first + b) * rows;
      for (int r = 0; r < group_rows; ++r)
        if (bf16)
          static_cast<uint16_t*>(y)[begin + column[r]] = to_bfloat16(sums[b][r]);
        else
          static_cast<float*>(y)[begin + column[r]] = sums[b][r];
    }
  }
};

// Rows of the transform per work item, so that a thread fetches items rarely.
constexpr long kRowsPerItem = 4;
// A product of fewer weights runs on one thread: waking other threads takes about as long as multiplying this many weights.
constexpr long kWeightsWorthThreads = 65536;
// A work item of a product is a run of row groups, short enough that threads finish at about the same time. Runs also avoid
// false sharing: if the stored rows are sorted, neighbouring elements of y come from groups that are near each other.
constexpr long kItemsPerThread = 8, kMaxGroupsPerItem = 16;
// Batch rows that are multiplied before their results are stored: a multiple of every kernel's largest batch.
constexpr long kStoredBatch = 48;

}  // namespace
}  // namespace ciuic

int ciuic_decode(const uint8_t* codes, const int64_t* group_offset, const uint8_t* row_bits, const float* scale,
                 long rows, long cols, int L, long row_begin, long row_end, void* out, int bf16, int threads) {
  using namespace ciuic;
  if (row_begin < 0 || row_end < row_begin || row_end > rows || threads < 1) return CIUIC_BAD_ARGUMENT;
  const int status = check_matrix(codes, group_offset, row_bits, scale, rows, cols, L);
  if (status != CIUIC_OK || row_begin == row_end) return status;
  if (out == nullptr) return CIUIC_BAD_ARGUMENT;
  const PackedMatrix packed = {codes, group_offset, row_bits, scale, cols, L};
  const long first = row_begin / kTile, last = (row_end - 1) / kTile;
  parallel_for(last - first + 1, threads, [&](long item) {
    const long group = first + item;
    const int begin = static_cast<int>(std::max<long>(row_begin - kTile * group, 0));
    const int end = static_cast<int>(std::min<long>(row_end - kTile * group, kTile));
    decode_group_rows(packed, group, begin, end, out, bf16 != 0, kTile * group + begin - row_begin);
  });
  return CIUIC_OK;
}

int ciuic_decode_rows(const uint8_t* codes, const int64_t* group_offset, const uint8_t* row_bits, const float* scale,
                      long rows, long cols, int L, const int64_t* row_index, long count, float* out, int threads) {
  using namespace ciuic;
  if (count < 0 || threads < 1) return CIUIC_BAD_ARGUMENT;
  const int status = check_matrix(codes, group_offset, row_bits, scale, rows, cols, L);
  if (status != CIUIC_OK || count == 0) return status;
  if (out == nullptr || row_index == nullptr) return CIUIC_BAD_ARGUMENT;
  for (long i = 0; i < count; ++i)
    if (row_index[i] < 0 || row_index[i] >= rows) return CIUIC_BAD_ARGUMENT;
  const PackedMatrix packed = {codes, group_offset, row_bits, scale, cols, L};
  parallel_for(count, threads, [&](long i) {
    const int row = static_cast<int>(row_index[i] % kTile);
    decode_group_rows(packed, row_index[i] / kTile, row, row + 1, out, false, i);
  });
  return CIUIC_OK;
}

int ciuic_matmul(const uint8_t* codes, const int64_t* group_offset, const uint8_t* row_bits, const float* scale,
                 long rows, long cols, int L, int log2_block, uint32_t seed, const void* x, int x_bf16, long batch,
                 long cols_in, void* y, int y_bf16, long rows_out, const int32_t* order, int precise, int threads) {
  using namespace ciuic;
  if (x == nullptr || y == nullptr || batch < 1 || cols_in < 1 || cols_in > cols || rows_out < 1 || rows_out > rows ||
      log2_block < 0 || log2_block > 30 || cols % (1L << log2_block) != 0 || threads < 1)
    return CIUIC_BAD_ARGUMENT;
  const int status = check_matrix(codes, group_offset, row_bits, scale, rows, cols, L);
  if (status != CIUIC_OK) return status;
  if (order != nullptr && !all_in_range(order, rows_out)) return CIUIC_BAD_ARGUMENT;
  const long groups = (rows_out + kTile - 1) / kTile;
  bool needed[2] = {false, false};
  for (long g = 0; g < groups; ++g)
    if (row_bits[g] != 0) needed[precision_for(ciuic_half_bits_of(row_bits[g]), precise != 0)] = true;
  const size_t row_bytes[2] = {quantized_row_bytes(cols, kInt8), quantized_row_bytes(cols, kInt15)};
  const size_t bytes = (needed[0] ? row_bytes[0] * batch : 0) + (needed[1] ? row_bytes[1] * batch : 0);
  const std::unique_ptr<float[]> floats(new (std::nothrow) float[2 * cols]);  // the signs and one row of x
  const std::unique_ptr<uint8_t[]> memory(new (std::nothrow) uint8_t[bytes + 64]);
  if (!floats || !memory) return CIUIC_NO_MEMORY;
  float *signs = floats.get(), *transformed = signs + cols;
  uint8_t* activations[2];
  activations[0] = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64;
  activations[1] = activations[0] + (needed[0] ? row_bytes[0] * batch : 0);
  kernels().fill_signs(signs, cols, seed);
  for (long b = 0; b < batch; ++b) {
    load_row(x, x_bf16 != 0, b * cols_in, cols_in, transformed);
    std::memset(transformed + cols_in, 0, sizeof(float) * (cols - cols_in));
    kernels().hadamard_row(transformed, cols, log2_block, signs, 0);
    for (const Precision precision : {kInt8, kInt15})
      if (needed[precision])
        kernels().quantize_row(transformed, cols, precision, activations[precision] + b * row_bytes[precision]);
  }
  const Output output = {y, y_bf16 != 0, rows_out, order};
  const int threads_used = groups * kTile * cols < kWeightsWorthThreads ? 1 : threads;
  const long groups_per_item = std::min<long>(1 + groups / (kItemsPerThread * threads_used), kMaxGroupsPerItem);
  parallel_for((groups + groups_per_item - 1) / groups_per_item, threads_used, [&](long item) {
    for (long group = groups_per_item * item; group < std::min(groups, groups_per_item * (item + 1)); ++group) {
      const int half_bits = ciuic_half_bits_of(row_bits[group]);
      const Precision precision = precision_for(half_bits, precise != 0);
      float factors[kTile];
      row_factors(scale + kTile * group, factors);
      for (long first = 0; first < batch; first += kStoredBatch) {
        const long count = std::min(batch - first, kStoredBatch);
        float sums[kStoredBatch][kTile];
        if (half_bits == 0)
          std::memset(sums, 0, sizeof sums[0] * count);
        else
          kernels().matmul_group(codes + group_offset[group], cols / kTile, half_bits, L, factors, precision,
                                 activations[precision] + first * row_bytes[precision], count, sums[0], kTile, kTile);
        output.store(sums, first, count, group);
      }
    }
  });
  return CIUIC_OK;
}

int ciuic_hadamard(void* x, int bf16, long n_rows, long cols, int log2_block, uint32_t seed, int inverse, int threads) {
  using namespace ciuic;
  if (n_rows == 0) return CIUIC_OK;
  if (x == nullptr || n_rows < 0 || cols < 1 || log2_block < 0 || log2_block > kMaxLog2Block ||
      cols % (1L << log2_block) != 0 || threads < 1)
    return CIUIC_BAD_ARGUMENT;
  const std::unique_ptr<float[]> signs(new (std::nothrow) float[cols]);
  if (!signs) return CIUIC_NO_MEMORY;
  kernels().fill_signs(signs.get(), cols, seed);
  parallel_for((n_rows + kRowsPerItem - 1) / kRowsPerItem, threads, [&](long item) {
    for (long row = kRowsPerItem * item; row < std::min(n_rows, kRowsPerItem * (item + 1)); ++row)
      if (bf16)
        kernels().hadamard_row_bfloat16(static_cast<uint16_t*>(x) + row * cols, cols, log2_block, signs.get(), inverse);
      else
        kernels().hadamard_row(static_cast<float*>(x) + row * cols, cols, log2_block, signs.get(), inverse);
  });
  return CIUIC_OK;
}
