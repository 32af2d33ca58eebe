// Shares a product of float32 matrices among threads.
#include "dense_product.h"

#include <algorithm>
#include <cstring>

#include "ciuic_native.h"
#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

namespace ciuic {

const DenseKernel* dense_kernel() {
#ifdef CIUIC_AMX_KERNELS
  if (std::strcmp(kernels().name, "amx") == 0) return &dense_amx::dense;
#endif
  return nullptr;
}

namespace {

// Most bytes of weights that are packed before they are multiplied. Chosen.
constexpr long kPackedBytes = 8 << 20;

long round_up(long value, long step) { return (value + step - 1) / step * step; }

struct DenseProduct {
  const DenseKernel& kernel;
  const float *x, *weights;
  float* out;
  long rows, depth, columns;
  uint16_t *x_high, *x_low;  // both parts of x, padded
  long padded_rows, padded_depth;
  long together;      // groups of columns that are packed before they are multiplied
  float *high, *low;  // packed weights
  bool* has_low;      // per packed group

  long group_size() const { return kDenseColumns * padded_depth / 2; }
  long groups() const { return (columns + kDenseColumns - 1) / kDenseColumns; }
  long width(long group) const { return std::min(kDenseColumns, columns - kDenseColumns * group); }

  void split_rows(long block) const {
    for (long row = block * kDenseRows; row < (block + 1) * kDenseRows; ++row) {
      const long at = row * padded_depth;
      kernel.split(x + std::min(row, rows - 1) * depth, row < rows ? depth : 0, padded_depth, x_high + at, x_low + at);
    }
  }

  void pack(long group, long place) const {
    const long at = place * group_size();
    has_low[place] = kernel.pack(weights + kDenseColumns * group * depth, width(group), depth, padded_depth, high + at, low + at);
  }

  void multiply(long group, long place) const {
    const long at = place * group_size();
    kernel.multiply({x_high, x_low, padded_depth}, high + at, has_low[place] ? low + at : nullptr, rows, width(group),
                    out + kDenseColumns * group, columns);
  }

  void run(int threads) const {
    const long batches = (groups() + together - 1) / together;
    parallel_stages(
        static_cast<int>(1 + 2 * batches), threads,
        [&](int stage) {
          return stage == 0 ? padded_rows / kDenseRows : std::min(together, groups() - (stage - 1) / 2 * together);
        },
        [&](int stage, long item) {
          if (stage == 0) return split_rows(item);
          const long group = (stage - 1) / 2 * together + item;
          if (stage % 2 == 1) return pack(group, item);
          multiply(group, item);
        });
  }
};

}  // namespace
}  // namespace ciuic

int ciuic_has_dense_product() { return ciuic::dense_kernel() != nullptr; }

int ciuic_dense_product(const float* x, const float* weights, float* out, long rows, long depth, long columns, int threads) {
  using namespace ciuic;
  const DenseKernel* kernel = dense_kernel();
  if (kernel == nullptr || x == nullptr || weights == nullptr || out == nullptr || rows < 1 || depth < 1 || columns < 1 ||
      threads < 1)
    return CIUIC_BAD_ARGUMENT;
  const long padded_rows = round_up(rows, kDenseRows), padded_depth = round_up(depth, kDenseDepth);
  const long group_size = kDenseColumns * padded_depth / 2, groups = (columns + kDenseColumns - 1) / kDenseColumns;
  const long together = std::min(groups, std::max(static_cast<long>(threads), kPackedBytes / (8 * group_size)));
  Scratch scratch(2 * Scratch::bytes_of<uint16_t>(padded_rows * padded_depth) +
                  2 * Scratch::bytes_of<float>(together * group_size) + Scratch::bytes_of<bool>(together));
  if (!scratch) return CIUIC_NO_MEMORY;
  uint16_t* const x_high = scratch.take<uint16_t>(padded_rows * padded_depth);
  uint16_t* const x_low = scratch.take<uint16_t>(padded_rows * padded_depth);
  float* const packed_high = scratch.take<float>(together * group_size);
  float* const packed_low = scratch.take<float>(together * group_size);
  bool* const has_low = scratch.take<bool>(together);
  DenseProduct{*kernel, x, weights, out, rows, depth, columns, x_high, x_low, padded_rows, padded_depth, together,
               packed_high, packed_low, has_low}.run(threads);
  return CIUIC_OK;
}
