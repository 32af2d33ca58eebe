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

// Bounds of a work item's size. No measurement is on record.
constexpr long kItemsPerThread = 8, kMaxGroupsPerItem = 16;

// Takes the row groups first .. last - 1 that read activations of one precision, a few at a time.
class Groups {
 public:
  Groups(const CiuicMatrix& matrix, Mode mode, Precision precision, long first, long last)
      : matrix_(matrix), mode_(mode), precision_(precision), group_(first), last_(last) {}

  // Takes up to `most` groups. False if none is left.
  bool next(int most) {
    for (count_ = 0; count_ < most && group_ < last_; ++group_) {
      const int half_bits = ciuic_half_bits_of(matrix_.row_bits[group_]);
      if (precision_for(half_bits, mode_) != precision_) continue;
      float* factors = factors_[count_];
      for (int r = 0; r < kTile; ++r) factors[r] = ciuic_row_factor(matrix_.scale[kTile * group_ + r]);
      number_[count_] = group_;
      coded_[count_++] = {matrix_.codes + matrix_.group_offset[group_], half_bits, nullptr};
    }
    return count_ != 0;
  }

  int count() const { return count_; }

  // The sums of the groups' rows for `batch` quantized rows: per group, batch x 16.
  void multiply(const Activations& activations, long first_row, long batch, float* sums) {
    RowGroup coded[kMaxGroupsTogether];
    int count = 0;
    for (int i = 0; i < count_; ++i) {
      float* of_group = sums + kTile * batch * i;
      if (coded_[i].half_bits == 0) {
        std::memset(of_group, 0, sizeof(float) * kTile * batch);
      } else {
        coded[count] = coded_[i];
        coded[count++].sums = of_group;
      }
    }
    if (count != 0) kernels().matmul_groups(coded, count, matrix_.L, activations, first_row, batch);
  }

  // Writes the sums, with the bias added, to the columns of the output that the groups' rows belong to.
  void store(const Output& output, long first_row, long batch, const float* sums) const {
    const long begin = (output.first_row + first_row) * matrix_.rows_out;
    void* y = static_cast<uint8_t*>(output.y) + (output.bf16 ? 2 : 4) * begin;
    if (matrix_.order != nullptr) return scatter(y, output.bf16, batch, sums);
    GroupColumns columns[kMaxGroupsTogether];
    for (int i = 0; i < count_; ++i) {
      const long first = kTile * number_[i];
      columns[i] = {first, std::min<long>(kTile, matrix_.rows_out - first), factors_[i],
                    matrix_.bias != nullptr ? matrix_.bias + first : nullptr};
    }
    kernels().store_groups(sums, columns, count_, batch, y, matrix_.rows_out, output.bf16);
  }

 private:
  // store() for a matrix whose rows are sorted.
  void scatter(void* y, bool bf16, long batch, const float* sums) const {
    for (int i = 0; i < count_; ++i)
      for (long b = 0; b < batch; ++b)
        for (long r = 0; r < kTile && kTile * number_[i] + r < matrix_.rows_out; ++r) {
          const long column = matrix_.order[kTile * number_[i] + r];
          const float sum = factors_[i][r] * sums[kTile * (batch * i + b) + r];
          const float value = matrix_.bias != nullptr ? sum + matrix_.bias[column] : sum;
          if (bf16)
            static_cast<uint16_t*>(y)[matrix_.rows_out * b + column] = to_bfloat16(value);
          else
            static_cast<float*>(y)[matrix_.rows_out * b + column] = value;
        }
  }

  const CiuicMatrix& matrix_;
  const Mode mode_;
  const Precision precision_;
  long group_, last_;
  int count_ = 0;
  long number_[kMaxGroupsTogether];
  RowGroup coded_[kMaxGroupsTogether];
  float factors_[kMaxGroupsTogether][kTile];
};

// Leaves in `row` what its quantization lost.
void subtract_quantized(const QuantizedRow& quantized, long cols, float* row) {
  for (long j = 0; j < cols; ++j) row[j] -= quantized.scale(j / kActivationBlock) * quantized.value[j];
}

// Adds each row's second sums to its first, for `groups` groups of 2 x batch sums of kTile; they become batch x kTile each.
void add_remainders(float* sums, long groups, long batch) {
  for (long row = 0; row < groups * batch; ++row)
    for (long r = 0; r < kTile; ++r) sums[kTile * row + r] = sums[kTile * 2 * row + r] + sums[kTile * (2 * row + 1) + r];
}

// One row in the order of the results. Reads from any place and writes eight bytes at a time: processors load from more
// places per cycle than they store to.
template <typename Value>
void put_row_in_order(const int32_t* position, long columns, const Value* from, Value* to) {
  constexpr long kTogether = 8 / sizeof(Value);
  long i = 0;
  for (; i + kTogether <= columns; i += kTogether) {
    Value values[kTogether];
    for (long k = 0; k < kTogether; ++k) values[k] = from[position[i + k]];
    std::memcpy(to + i, values, sizeof values);
  }
  for (; i < columns; ++i) to[i] = from[position[i]];
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

void Precisions::add(const CiuicMatrix& matrix, Mode mode) {
  for (long g = 0; g < output_groups(matrix); ++g)
    if (matrix.row_bits[g] != 0) needed[precision_for(ciuic_half_bits_of(matrix.row_bits[g]), mode)] = true;
}

PreparedLayout::PreparedLayout(const Precisions& wanted, Mode mode, long cols, long batch)
    : precisions(wanted), rows_each(quantized_rows(mode)), bytes(0) {
  const long rows = rows_each * batch;
  for (const Precision precision : kPrecisions) {
    layout[precision] = activation_layout(cols, precision, rows, rows <= kernels().byte_rows);
    offset[precision] = bytes;
    if (precisions.needed[precision]) bytes += layout[precision].size;
  }
}

void prepare_row(const CiuicMatrix& matrix, const float* signs, float* row, const PreparedLayout& layout, long b,
                 uint8_t* prepared) {
  if (matrix.input_factors != nullptr)
    for (long j = 0; j < matrix.cols_in; ++j) row[j] *= matrix.input_factors[j];
  std::memset(row + matrix.cols_in, 0, sizeof(float) * (matrix.cols - matrix.cols_in));
  kernels().hadamard_row(row, matrix.cols, matrix.log2_block, signs, 0);
  for (const Precision precision : kPrecisions) {
    if (!layout.precisions.needed[precision]) continue;
    const Activations activations = layout.at(precision, prepared);
    for (long r = layout.rows_each * b; r < layout.rows_each * (b + 1); ++r) {
      kernels().quantize_row(row, activations, r);
      if (layout.rows_each > 1) subtract_quantized(quantized_row(activations, r), matrix.cols, row);
    }
  }
}

void multiply_groups(const CiuicMatrix& matrix, Mode mode, const PreparedLayout& layout, uint8_t* prepared, long batch,
                     long first, long last, const Output& output) {
  const Kernels& k = kernels();
  alignas(64) float sums[kMaxGroupsTogether * kMaxBatchTogether * kTile];
  for (const Precision precision : kPrecisions)
    for (Groups groups(matrix, mode, precision, first, last); groups.next(k.groups_together);)
      for (long begin = 0, each = layout.rows_each; begin < batch; begin += k.batch_together / each) {
        const long count = std::min(batch - begin, k.batch_together / each);
        groups.multiply(layout.at(precision, prepared), each * begin, each * count, sums);
        if (each > 1) add_remainders(sums, groups.count(), count);
        groups.store(output, begin, count, sums);
      }
}

void put_in_order(const int32_t* position, long columns, const uint8_t* stored, long row, const Output& output) {
  const long from = row * columns, to = (output.first_row + row) * columns;
  if (output.bf16)
    put_row_in_order(position, columns, reinterpret_cast<const uint16_t*>(stored) + from,
                     static_cast<uint16_t*>(output.y) + to);
  else
    put_row_in_order(position, columns, reinterpret_cast<const uint32_t*>(stored) + from,
                     static_cast<uint32_t*>(output.y) + to);
}

long groups_per_item(long groups, int threads, long quantized) {
  const long evenly = std::min<long>(1 + groups / (kItemsPerThread * threads), kMaxGroupsPerItem);
  const long together = kernels().groups_together, items = (groups + together - 1) / together;
  if (together == 1 || quantized <= 2) return evenly;
  if (quantized > kFewRows && items % threads == 0) return together;
  if (evenly > together) return evenly - evenly % together;
  return quantized <= kFewRows ? evenly + evenly % 2 : evenly <= together / 2 ? together / 2 : together;
}

}  // namespace ciuic
