// Decoding, multiplication and the input transform: argument checks and distribution over threads.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "activations.h"
#include "bfloat16.h"
#include "ciuic_native.h"
#include "kernels.h"
#include "parallel.h"
#include "trellis_decode.h"

namespace ciuic {
namespace {

int check_matrix(const uint8_t* codes, const int64_t* group_offset, const uint8_t* row_bits, const float* scale,
                 long rows, long cols, int window) {
  if (group_offset == nullptr || row_bits == nullptr || scale == nullptr || rows <= 0 ||
      cols <= 0 || rows % kTile != 0 || cols % kTile != 0)
    return CIUIC_BAD_ARGUMENT;
  if (!valid_window(window)) return CIUIC_BAD_BITS;
  for (long g = 0; g < rows / kTile; ++g)
    if (row_bits[g] != 0) {
      if (ciuic_halves_of(row_bits[g]) < 0) return CIUIC_BAD_BITS;
      if (codes == nullptr) return CIUIC_BAD_ARGUMENT;
    }
  return CIUIC_OK;
}

void row_factors(const float* scale, float factors[kTile]) {
  for (int r = 0; r < kTile; ++r) factors[r] = ciuic_row_factor(scale[r]);
}

struct Packed {
  const uint8_t* codes;
  const int64_t* group_offset;
  const uint8_t* row_bits;
  const float* scale;
  long cols;
  int window;
};

// Rows begin .. end - 1 of a row group, written as rows `first`, first + 1, .. of out.
void decode_group_rows(const Packed& packed, long group, int begin, int end, void* out, bool half, long first) {
  const int halves = ciuic_halves_of(packed.row_bits[group]);
  const size_t row_bytes = (half ? 2 : 4) * static_cast<size_t>(packed.cols);
  uint8_t* to = static_cast<uint8_t*>(out) + row_bytes * first;
  if (halves == 0) {
    std::memset(to, 0, row_bytes * (end - begin));
    return;
  }
  float factors[kTile];
  row_factors(packed.scale + kTile * group, factors);
  kernels().decode_tiles(packed.codes + packed.group_offset[group], packed.cols / kTile, halves, packed.window, factors,
                         begin, end, to, static_cast<size_t>(packed.cols), half);
}

void load_row(const void* x, bool half, long first, long count, float* row) {
  if (half)
    for (long j = 0; j < count; ++j) row[j] = from_bfloat16(static_cast<const uint16_t*>(x)[first + j]);
  else
    std::memcpy(row, static_cast<const float*>(x) + first, sizeof(float) * count);
}

bool all_below(const int32_t* index, long limit) {
  bool inside = true;
  for (long i = 0; i < limit; ++i) inside &= index[i] >= 0 && index[i] < limit;
  return inside;
}

// Where the results of a product go.
struct Products {
  void* y;  // batch x rows
  bool half;
  long rows;
  const int32_t* order;

  void store(const float (*sums)[kTile], long first, long count, long group) const {
    const int present = static_cast<int>(std::min<long>(kTile, rows - kTile * group));
    long to[kTile];
    for (int r = 0; r < present; ++r) to[r] = order != nullptr ? order[kTile * group + r] : kTile * group + r;
    for (long b = 0; b < count; ++b) {
      const long begin = (first + b) * rows;
      for (int r = 0; r < present; ++r)
        if (half)
          static_cast<uint16_t*>(y)[begin + to[r]] = to_bfloat16(sums[b][r]);
        else
          static_cast<float*>(y)[begin + to[r]] = sums[b][r];
    }
  }
};

// Rows of the transform per work item: enough of them that a thread amortises fetching the next.
constexpr long kRowsPerItem = 4;
// Handing work to other threads takes as long as one thread needs for about this many weights.
constexpr long kWeightsWorthThreads = 65536;
// A product's row groups are handed out in runs, short enough that threads finish together. Runs also keep threads from writing
// to the same cache lines where rows are sorted: what lies side by side in y is then a few groups apart.
constexpr long kItemsPerThread = 8, kMostGroupsPerItem = 16;
// Rows of x whose sums are kept before they are stored: a multiple of what every kernel takes at once.
constexpr long kBatchAtOnce = 48;

}  // namespace
}  // namespace ciuic

int ciuic_decode(const uint8_t* codes, const int64_t* group_offset, const uint8_t* row_bits, const float* scale,
                 long rows, long cols, int L, long row_begin, long row_end, void* out, int half, int threads) {
  using namespace ciuic;
  if (row_begin < 0 || row_end < row_begin || row_end > rows || threads < 1) return CIUIC_BAD_ARGUMENT;
  const int status = check_matrix(codes, group_offset, row_bits, scale, rows, cols, L);
  if (status != CIUIC_OK || row_begin == row_end) return status;
  if (out == nullptr) return CIUIC_BAD_ARGUMENT;
  const Packed packed = {codes, group_offset, row_bits, scale, cols, L};
  const long first = row_begin / kTile, last = (row_end - 1) / kTile;
  parallel_for(last - first + 1, threads, [&](long item) {
    const long group = first + item;
    const int begin = static_cast<int>(std::max<long>(row_begin - kTile * group, 0));
    const int end = static_cast<int>(std::min<long>(row_end - kTile * group, kTile));
    decode_group_rows(packed, group, begin, end, out, half != 0, kTile * group + begin - row_begin);
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
  const Packed packed = {codes, group_offset, row_bits, scale, cols, L};
  parallel_for(count, threads, [&](long i) {
    const int row = static_cast<int>(row_index[i] % kTile);
    decode_group_rows(packed, row_index[i] / kTile, row, row + 1, out, false, i);
  });
  return CIUIC_OK;
}

int ciuic_matmul(const uint8_t* codes, const int64_t* group_offset, const uint8_t* row_bits, const float* scale,
                 long rows, long cols, int L, int log2_block, uint32_t seed, const void* x, int x_half, long batch,
                 long cols_in, void* y, int y_half, long rows_out, const int32_t* order, int precise, int threads) {
  using namespace ciuic;
  if (x == nullptr || y == nullptr || batch < 1 || cols_in < 1 || cols_in > cols || rows_out < 1 || rows_out > rows ||
      log2_block < 0 || log2_block > 30 || cols % (1L << log2_block) != 0 || threads < 1)
    return CIUIC_BAD_ARGUMENT;
  const int status = check_matrix(codes, group_offset, row_bits, scale, rows, cols, L);
  if (status != CIUIC_OK) return status;
  if (order != nullptr && !all_below(order, rows_out)) return CIUIC_BAD_ARGUMENT;
  const long groups = (rows_out + kTile - 1) / kTile;
  bool needed[2] = {false, false};
  for (long g = 0; g < groups; ++g)
    if (row_bits[g] != 0) needed[precision_for(ciuic_halves_of(row_bits[g]), precise != 0)] = true;
  const size_t row_bytes[2] = {quantized_row_bytes(cols, kInt8), quantized_row_bytes(cols, kInt15)};
  const size_t bytes = (needed[0] ? row_bytes[0] * batch : 0) + (needed[1] ? row_bytes[1] * batch : 0);
  const std::unique_ptr<float[]> floats(new (std::nothrow) float[2 * cols]);  // signs, a row of x
  const std::unique_ptr<uint8_t[]> memory(new (std::nothrow) uint8_t[bytes + 64]);
  if (!floats || !memory) return CIUIC_NO_MEMORY;
  float *signs = floats.get(), *transformed = signs + cols;
  uint8_t* activations[2];
  activations[0] = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64;
  activations[1] = activations[0] + (needed[0] ? row_bytes[0] * batch : 0);
  kernels().fill_signs(signs, cols, seed);
  for (long b = 0; b < batch; ++b) {
    load_row(x, x_half != 0, b * cols_in, cols_in, transformed);
    std::memset(transformed + cols_in, 0, sizeof(float) * (cols - cols_in));
    kernels().hadamard_row(transformed, cols, log2_block, signs, 0);
    for (const Precision precision : {kInt8, kInt15})
      if (needed[precision])
        kernels().quantize_row(transformed, cols, precision, activations[precision] + b * row_bytes[precision]);
  }
  const Products products = {y, y_half != 0, rows_out, order};
  const int used = groups * kTile * cols < kWeightsWorthThreads ? 1 : threads;
  const long step = std::min<long>(1 + groups / (kItemsPerThread * used), kMostGroupsPerItem);
  parallel_for((groups + step - 1) / step, used, [&](long item) {
    for (long group = step * item; group < std::min(groups, step * (item + 1)); ++group) {
      const int halves = ciuic_halves_of(row_bits[group]);
      const Precision precision = precision_for(halves, precise != 0);
      float factors[kTile];
      row_factors(scale + kTile * group, factors);
      for (long first = 0; first < batch; first += kBatchAtOnce) {
        const long count = std::min(batch - first, kBatchAtOnce);
        float sums[kBatchAtOnce][kTile];
        if (halves == 0)
          std::memset(sums, 0, sizeof sums[0] * count);
        else
          kernels().matmul_group(codes + group_offset[group], cols / kTile, halves, L, factors, precision,
                                 activations[precision] + first * row_bytes[precision], count, sums[0], kTile, kTile);
        products.store(sums, first, count, group);
      }
    }
  });
  return CIUIC_OK;
}

int ciuic_hadamard(float* x, long n_rows, long cols, int log2_block, uint32_t seed, int inverse, int threads) {
  using namespace ciuic;
  if (n_rows == 0) return CIUIC_OK;
  if (x == nullptr || n_rows < 0 || cols < 1 || log2_block < 0 || log2_block > 30 || cols % (1L << log2_block) != 0 ||
      threads < 1)
    return CIUIC_BAD_ARGUMENT;
  const std::unique_ptr<float[]> signs(new (std::nothrow) float[cols]);
  if (!signs) return CIUIC_NO_MEMORY;
  kernels().fill_signs(signs.get(), cols, seed);
  parallel_for((n_rows + kRowsPerItem - 1) / kRowsPerItem, threads, [&](long item) {
    for (long row = kRowsPerItem * item; row < std::min(n_rows, kRowsPerItem * (item + 1)); ++row)
      kernels().hadamard_row(x + row * cols, cols, log2_block, signs.get(), inverse);
  });
  return CIUIC_OK;
}
