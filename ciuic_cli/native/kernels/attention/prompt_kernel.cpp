// Attention of a prompt: rows of queries of one key-value head over its keys and values, kPromptTokens tokens at a time with a
// running maximum of the scores (flash attention, Dao et al. 2022). The tokens of a block are unpacked to float32 once for all
// rows; scores and sums are then products of small matrices whose results stay in registers.
//
// Every sum runs over its terms in ascending order, whatever the vector length, so that every instruction set rounds alike.
#include <cfloat>
#include <cstring>

#include "bfloat16.h"
#include "exponential.h"
#include "kernels_of_isa.h"
#include "vectors.h"

namespace ciuic {
namespace CIUIC_ISA {
namespace {

// Rows, and vectors of a row, whose sums are in registers: 24 of 32, or 10 of 16.
#if defined(__AVX512F__)
constexpr int kRows = kPromptRowsAtOnce, kVectors = 4;
#else
constexpr int kRows = 5, kVectors = 2;
#endif
constexpr int kParts = 16 / kWidth;    // vectors of 16 partial sums
constexpr float kHidden = -FLT_MAX;    // the score of a token that a row does not see

// c[r][..] = c[r][..] + the sum over i < count of a[r][i] * b[i][..], for Rows rows and V vectors. `fresh`: c is 0 before.
template <int Rows, int V>
CIUIC_INLINE void add_product(const float* a, long a_stride, const float* b, long b_stride, long count, float* c, long c_stride,
                              bool fresh) {
  Vector sum[Rows][V];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      sum[r][v] = fresh ? Vector{} : *reinterpret_cast<const Vector*>(c + r * c_stride + kWidth * v);
  for (long i = 0; i < count; ++i) {
    Vector part[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) part[v] = *reinterpret_cast<const Vector*>(b + i * b_stride + kWidth * v);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] += a[r * a_stride + i] * part[v];
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) *reinterpret_cast<Vector*>(c + r * c_stride + kWidth * v) = sum[r][v];
}

// The same for `columns` columns, a multiple of 16.
template <int Rows>
void multiply_rows(const float* a, long a_stride, const float* b, long b_stride, long count, float* c, long c_stride, int columns,
                   bool fresh) {
  int j = 0;
  for (; j + kVectors * kWidth <= columns; j += kVectors * kWidth)
    add_product<Rows, kVectors>(a, a_stride, b + j, b_stride, count, c + j, c_stride, fresh);
  for (; j < columns; j += kWidth) add_product<Rows, 1>(a, a_stride, b + j, b_stride, count, c + j, c_stride, fresh);
}

// The same for any number of rows up to kRows.
void multiply(long rows, const float* a, long a_stride, const float* b, long b_stride, long count, float* c, long c_stride,
              int columns, bool fresh) {
  switch (rows) {
    case kRows: return multiply_rows<kRows>(a, a_stride, b, b_stride, count, c, c_stride, columns, fresh);
    case kRows - 1: return multiply_rows<kRows - 1>(a, a_stride, b, b_stride, count, c, c_stride, columns, fresh);
    case kRows - 2: return multiply_rows<kRows - 2>(a, a_stride, b, b_stride, count, c, c_stride, columns, fresh);
    case kRows - 3: return multiply_rows<kRows - 3>(a, a_stride, b, b_stride, count, c, c_stride, columns, fresh);
    default: break;
  }
  for (long r = 0; r < rows; ++r)
    multiply_rows<1>(a + r * a_stride, a_stride, b, b_stride, count, c + r * c_stride, c_stride, columns, fresh);
}

CIUIC_INLINE float number(uint16_t bits) { return from_bfloat16(bits); }
CIUIC_INLINE float number(float value) { return value; }

// keys[j][t] and values[t][j] of `count` tokens from `first` on, as float32. Keys beyond the last token are 0.
template <typename Value>
void unpack(const PromptTokens& tokens, long first, long count, float* keys, float* values) {
  for (int t = 0; t < kPromptTokens; ++t) {
    const Value* key = static_cast<const Value*>(tokens.keys) + (first + t) * tokens.key_stride;
    for (int j = 0; j < tokens.size; ++j) keys[j * kPromptTokens + t] = t < count ? number(key[j]) : 0.0f;
  }
  for (long t = 0; t < count; ++t) {
    const Value* value = static_cast<const Value*>(tokens.values) + (first + t) * tokens.value_stride;
    float* const row = values + t * value_columns(tokens);
    for (int j = 0; j < tokens.value_size; ++j) row[j] = number(value[j]);
    for (int j = tokens.value_size; j < value_columns(tokens); ++j) row[j] = 0.0f;
  }
}

alignas(64) const int kSequence[2 * kWidth] = {0,  1,  2,  3,  4,  5,  6,  7,
#if defined(__AVX2__)
                                               8,  9,  10, 11, 12, 13, 14, 15,
#endif
#if defined(__AVX512F__)
                                               16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31
#endif
};

// v[(i + by) % kWidth] in lane i.
CIUIC_INLINE Vector rotated(Vector v, int by) {
  return __builtin_shuffle(v, *reinterpret_cast<const Lanes*>(kSequence + by));  // takes indices modulo kWidth
}

// The largest of 16 numbers, and their sum, added in the same order everywhere.
CIUIC_INLINE float largest_of(Vector (&v)[kParts]) {
#pragma GCC unroll 4
  for (int half = kParts / 2; half > 0; half /= 2)
#pragma GCC unroll 4
    for (int i = 0; i < half; ++i) v[i] = larger(v[i], v[i + half]);
#pragma GCC unroll 4
  for (int by = kWidth / 2; by > 0; by /= 2) v[0] = larger(v[0], rotated(v[0], by));
  return v[0][0];
}
CIUIC_INLINE float sum_of(Vector (&v)[kParts]) {
#pragma GCC unroll 4
  for (int half = kParts / 2; half > 0; half /= 2)
#pragma GCC unroll 4
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
#pragma GCC unroll 4
  for (int by = kWidth / 2; by > 0; by /= 2) v[0] += rotated(v[0], by);
  return v[0][0];
}

// Some rows of scores; of row r the first seen[r] tokens count, and of them those that its mask does not hide.
struct Scores {
  float* score;
  long rows;
  long seen[kRows];
  const uint8_t* const* mask;  // null, or per row
};

// Sets the scores that do not count.
void hide(const Scores& scores, float to) {
  for (long r = 0; r < scores.rows; ++r) {
    float* const score = scores.score + r * kPromptTokens;
    for (long t = scores.seen[r]; t < kPromptTokens; ++t) score[t] = to;
    if (scores.mask != nullptr)
      for (long t = 0; t < scores.seen[r]; ++t) score[t] = scores.mask[r][t] != 0 ? score[t] : to;
  }
}

// Scores to weights, with factor[r] for what was summed before. Each loop is over all rows, because a row's maximum, weights
// and total are chains of operations that wait for each other.
void to_weights(const Scores& scores, float* maximum, float* total, float* factor) {
  constexpr int kVectorsOfRow = kPromptTokens / kWidth;
  Vector* const x = reinterpret_cast<Vector*>(scores.score);
  float subtracted[kRows];
  hide(scores, kHidden);
  for (long r = 0; r < scores.rows; ++r) {
    const Vector* const row = x + r * kVectorsOfRow;
    Vector parts[kParts];
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) parts[i] = row[i];
#pragma GCC unroll 16
    for (int i = kParts; i < kVectorsOfRow; ++i) parts[i % kParts] = larger(parts[i % kParts], row[i]);
    const float here = largest_of(parts), found = here < maximum[r] ? maximum[r] : here;
    factor[r] = maximum[r] - found;
    maximum[r] = found;
    subtracted[r] = found == kHidden ? 0.0f : found;  // a row that has seen no token yet
  }
  for (long r = 0; r < scores.rows; ++r)
    for (int i = 0; i < kVectorsOfRow; ++i)
      x[r * kVectorsOfRow + i] = exponential_of(x[r * kVectorsOfRow + i] - subtracted[r]);
  hide(scores, 0.0f);  // the exponential is not quite 0
  for (long r = 0; r < scores.rows; ++r) {
    const Vector* const row = x + r * kVectorsOfRow;
    Vector parts[kParts];
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) parts[i] = row[i];
#pragma GCC unroll 16
    for (int i = kParts; i < kVectorsOfRow; ++i) parts[i % kParts] += row[i];
    factor[r] = factor[r] == 0.0f ? 1.0f : exponential(factor[r]);
    total[r] = total[r] * factor[r] + sum_of(parts);
  }
}

void attend_to_block(const PromptRows& rows, const PromptTokens& tokens, long first, const float* keys, const float* values,
                     float* score, float* maximum, float* total) {
  const int size = tokens.size, columns = value_columns(tokens);
  long begin = 0;
  while (begin < rows.count && rows.limit[begin] <= first) ++begin;  // rows that see nothing of this block
  for (long row = begin; row < rows.count; row += kRows) {
    const long here = rows.count - row < kRows ? rows.count - row : kRows;
    multiply(here, rows.query + row * size, size, keys, kPromptTokens, size, score, kPromptTokens, kPromptTokens, true);
    Scores scores = {score, here, {}, nullptr};
    const uint8_t* mask[kRows];
    long most = 0;
    for (long r = 0; r < here; ++r) {
      const long left = rows.limit[row + r] - first;
      scores.seen[r] = left < kPromptTokens ? left : kPromptTokens;
      most = most < scores.seen[r] ? scores.seen[r] : most;
      if (rows.mask != nullptr) mask[r] = rows.mask[row + r] + first;
    }
    if (rows.mask != nullptr) scores.mask = mask;
    float factor[kRows];
    to_weights(scores, maximum + row, total + row, factor);
    for (long r = 0; r < here; ++r)
      if (factor[r] != 1.0f)
        for (int j = 0; j < columns; ++j) rows.out[(row + r) * columns + j] *= factor[r];
    multiply(here, score, kPromptTokens, values, columns, most, rows.out + row * columns, columns, columns, false);
  }
}

}  // namespace

void attend_rows(const PromptRows& rows, const PromptTokens& tokens, float* scratch) {
  const int columns = value_columns(tokens);
  float *keys = scratch, *values = keys + kPromptTokens * tokens.size, *score = values + kPromptTokens * columns;
  float *maximum = score + kPromptTokens * kPromptRowsAtOnce, *total = maximum + kPromptRows;
  std::memset(rows.out, 0, sizeof(float) * rows.count * columns);
  for (long r = 0; r < rows.count; ++r) {
    maximum[r] = kHidden;
    total[r] = 0.0f;
  }
  const long end = rows.limit[rows.count - 1];
  for (long first = 0; first < end; first += kPromptTokens) {
    const long count = tokens.count - first < kPromptTokens ? tokens.count - first : kPromptTokens;
    if (tokens.bf16)
      unpack<uint16_t>(tokens, first, count, keys, values);
    else
      unpack<float>(tokens, first, count, keys, values);
    attend_to_block(rows, tokens, first, keys, values, score, maximum, total);
  }
  for (long r = 0; r < rows.count; ++r) {
    const float factor = total[r] == 0.0f ? 0.0f : 1.0f / total[r];
    for (int j = 0; j < columns; ++j) rows.out[r * columns + j] *= factor;
  }
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
