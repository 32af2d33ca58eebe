// The C functions for decoding, multiplication, the input transform and the block code: they check arguments and share work among threads.
#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <new>

#include "check_matrix.h"
#include "ciuic_native.h"
#include "kernels.h"
#include "parallel.h"
#include "product.h"
#include "scratch.h"
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

// Memory for results that are put in order afterwards, or more where it does not hold kBandRows rows. Chosen.
constexpr long kReorderedBytes = 16 << 20;

// Rows of the transform per work item, so that a thread fetches items rarely. No measurement is on record.
constexpr long kRowsPerItem = 4;

// Numbers of the block code per work item. Chosen: 128 KB of float32.
constexpr long kNumbersPerItem = 32768;

// Calls work(code, begin, end) for ranges of blocks that cover `count` numbers.
int for_blocks(long count, int bits, int log2_block, int hadamard, int stochastic, uint32_t seed, int threads,
               const std::function<void(const BlockCode&, long, long)>& work) {
  if ((bits != 8 && bits != 4) || log2_block < 4 || log2_block > kMaxLog2Block || threads < 1) return CIUIC_BAD_ARGUMENT;
  float signs[1L << kMaxLog2Block];
  if (hadamard != 0) kernels().fill_signs(signs, 1L << log2_block, 0);
  const BlockCode code = {bits, log2_block, stochastic != 0, seed, hadamard != 0 ? signs : nullptr};
  const long blocks = ((count - 1) >> log2_block) + 1, per_item = kNumbersPerItem >> log2_block;
  parallel_for((blocks + per_item - 1) / per_item, threads, [&](long item) {
    work(code, per_item * item, std::min(blocks, per_item * (item + 1)));
  });
  return CIUIC_OK;
}

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

int ciuic_matmul(const CiuicMatrix* matrix, const void* x, int x_bf16, long batch, void* y, int y_bf16, int exact,
                 int threads) {
  using namespace ciuic;
  if (matrix == nullptr || x == nullptr || y == nullptr || batch < 1 || threads < 1) return CIUIC_BAD_ARGUMENT;
  const int status = check_product_matrix(*matrix);
  if (status != CIUIC_OK) return status;
  const long groups = output_groups(*matrix), cols = matrix->cols, cols_in = matrix->cols_in;
  const Mode in_more_bits = kernels().bfloat16 ? kInBfloat16 : kIn15Bits;
  const Mode mode = exact != 0 ? kExact : batch >= kFewestRowsInMoreBits ? in_more_bits : kFast;
  Precisions precisions;
  precisions.add(*matrix, mode);
  const int threads_used = groups * kTile * cols < kWeightsWorthThreads ? 1 : threads;
  // With few rows each result is put in its place. Many rows would touch as many places far apart, so they are stored as they
  // come and put in order afterwards.
  const bool reorder = matrix->order != nullptr && batch > kFewRows;
  const long reordered = reorder ? matrix->rows_out : 0;
  const long row_bytes = (y_bf16 != 0 ? 2 : 4) * reordered;
  const long most = reorder ? std::max(kReorderedBytes / row_bytes, kBandRows) : batch;
  const long together = std::min({batch, most, kMaxBatchTogether});
  const int preparers = static_cast<int>(std::min<long>(threads_used, together));
  const PreparedLayout layout(precisions, mode, cols, together);
  const long floats = (1 + preparers) * cols;  // the signs, rows of x
  Scratch scratch(Scratch::bytes_of<float>(floats) + Scratch::bytes_of<uint8_t>(layout.bytes) +
                  Scratch::bytes_of<uint8_t>(row_bytes * together) + Scratch::bytes_of<int32_t>(reordered) +
                  Scratch::bytes_of<float>(reordered));
  if (!scratch) return CIUIC_NO_MEMORY;
  float* const signs = scratch.take<float>(floats);
  uint8_t* const prepared = scratch.take<uint8_t>(layout.bytes);
  uint8_t* const unordered = scratch.take<uint8_t>(row_bytes * together);
  int32_t* const position = scratch.take<int32_t>(reordered);
  float* const biases = scratch.take<float>(reordered);
  CiuicMatrix stored = *matrix;
  if (reorder) {
    stored.order = nullptr;
    for (long i = 0; i < matrix->rows_out; ++i) position[matrix->order[i]] = static_cast<int32_t>(i);
    if (matrix->bias != nullptr) {
      for (long i = 0; i < matrix->rows_out; ++i) biases[i] = matrix->bias[matrix->order[i]];
      stored.bias = biases;
    }
  }
  kernels().fill_signs(signs, cols, matrix->seed);
  const long per_item = groups_per_item(groups, threads_used, quantized_rows(mode) * batch);
  for (long begin = 0; begin < batch; begin += together) {
    const long count = std::min(batch - begin, together);
    parallel_for(preparers, preparers, [&](long item) {
      float* row = signs + (1 + item) * cols;
      for (long b = count * item / preparers; b < count * (item + 1) / preparers; ++b) {
        load_floats(x, x_bf16 != 0, (begin + b) * cols_in, cols_in, row);
        prepare_row(*matrix, signs, row, layout, b, prepared);
      }
    });
    const Output ordered = {y, y_bf16 != 0, begin};
    const Output output = reorder ? Output{unordered, y_bf16 != 0, 0} : ordered;
    parallel_for((groups + per_item - 1) / per_item, threads_used, [&](long item) {
      multiply_groups(stored, mode, layout, prepared, count, per_item * item,
                      std::min(groups, per_item * (item + 1)), output);
    });
    if (reorder)
      parallel_for(preparers, preparers, [&](long item) {
        for (long b = count * item / preparers; b < count * (item + 1) / preparers; ++b)
          put_in_order(position, matrix->rows_out, unordered, b, ordered);
      });
  }
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

int ciuic_block_encode(const void* x, int bf16, long count, int bits, int log2_block, int hadamard, int stochastic,
                       uint32_t seed, uint8_t* codes, uint16_t* scales, int threads) {
  using namespace ciuic;
  if (count == 0) return CIUIC_OK;
  if (x == nullptr || codes == nullptr || scales == nullptr || count < 0) return CIUIC_BAD_ARGUMENT;
  return for_blocks(count, bits, log2_block, hadamard, stochastic, seed, threads,
                    [&](const BlockCode& code, long begin, long end) {
                      kernels().encode_blocks(code, x, bf16 != 0, count, begin, end, codes, scales);
                    });
}

int ciuic_block_decode(const uint8_t* codes, const uint16_t* scales, long count, int bits, int log2_block, int hadamard,
                       void* out, int bf16, int threads) {
  using namespace ciuic;
  if (count == 0) return CIUIC_OK;
  if (codes == nullptr || scales == nullptr || out == nullptr || count < 0) return CIUIC_BAD_ARGUMENT;
  return for_blocks(count, bits, log2_block, hadamard, 0, 0, threads, [&](const BlockCode& code, long begin, long end) {
    kernels().decode_blocks(code, codes, scales, count, begin, end, out, bf16 != 0);
  });
}
