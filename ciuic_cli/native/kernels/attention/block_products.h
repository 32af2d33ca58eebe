// Products of small blocks whose sums stay in registers: a left factor whose rows lie in memory as they are read, and a right
// factor with neighbouring columns. With AVX512_BF16 both are rounded to bfloat16, two terms of a sum side by side, and sums
// are float32.
#ifndef CIUIC_BLOCK_PRODUCTS_H
#define CIUIC_BLOCK_PRODUCTS_H

#include <cstring>

#include "bfloat16.h"
#include "vectors.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace ciuic {
namespace CIUIC_ISA {
namespace {

constexpr int kBlock = 64;  // keys, and queries, of a block. Chosen: a block of scores and its factors fit the first-level cache
constexpr int kRowsAhead = 16;  // that are fetched before they are packed. Chosen
constexpr int kVectorsOfBlock = kBlock / kWidth;
// Rows, and vectors of a row, whose sums are in registers: 24 of 32, or 10 of 16.
#if defined(__AVX512F__)
constexpr int kRows = 6, kVectors = 4;
#else
constexpr int kRows = 5, kVectors = 2;
#endif

// A factor's number, and how many of them, neighbours in a sum, lie side by side in a right factor.
#ifdef __AVX512BF16__
typedef uint16_t Number;
constexpr int kPair = 2;
typedef __m512bh Pairs;
CIUIC_INLINE Pairs pairs_at(const Number* from) { return (Pairs)_mm512_loadu_si512(from); }
CIUIC_INLINE Pairs pair_everywhere(const Number* from) {
  int pair;
  std::memcpy(&pair, from, sizeof pair);
  return (Pairs)_mm512_set1_epi32(pair);
}
CIUIC_INLINE Vector add_products(Vector sum, Pairs a, Pairs b) { return (Vector)_mm512_dpbf16_ps((__m512)sum, a, b); }
CIUIC_INLINE Number number(uint16_t bits) { return bits; }
CIUIC_INLINE Number number(float value) { return finite_to_bfloat16(value); }
#else
typedef float Number;
constexpr int kPair = 1;
typedef Vector Pairs;
CIUIC_INLINE Pairs pairs_at(const Number* from) { return *reinterpret_cast<const Vector*>(from); }
CIUIC_INLINE Pairs pair_everywhere(const Number* from) { return Vector{} + *from; }
CIUIC_INLINE Vector add_products(Vector sum, Pairs a, Pairs b) { return sum + a * b; }
CIUIC_INLINE Number number(uint16_t bits) { return from_bfloat16(bits); }
CIUIC_INLINE Number number(float value) { return value; }
#endif

CIUIC_INLINE float exact(uint16_t bits) { return from_bfloat16(bits); }
CIUIC_INLINE float exact(float value) { return value; }
inline long padded(long count, long to) { return (count + to - 1) / to * to; }

// c[r][..] = c[r][..] + the sum over i < count of a[r][i] * b[i][..], for Rows rows and V vectors. `fresh`: c is 0 before.
template <int Rows, int V>
CIUIC_INLINE void add_product(const Number* a, long a_stride, const Number* b, long b_columns, long count, float* c, long c_stride,
                              bool fresh) {
  Vector sum[Rows][V];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[r][v] = fresh ? Vector{} : *reinterpret_cast<const Vector*>(c + r * c_stride + kWidth * v);
  for (long i = 0; i < count; i += kPair) {
    Pairs part[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) part[v] = pairs_at(b + i * b_columns + kPair * kWidth * v);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Pairs left = pair_everywhere(a + r * a_stride + i);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = add_products(sum[r][v], left, part[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) *reinterpret_cast<Vector*>(c + r * c_stride + kWidth * v) = sum[r][v];
}

// Left and right factors of a product of `count` terms per sum.
struct Left {
  const Number* numbers;
  long stride, rows;
};
struct Right {
  const Number* numbers;
  long columns;  // a multiple of 16
};

template <int Rows>
void multiply_rows(const Number* a, long a_stride, const Right& b, long count, float* c, bool fresh) {
  long j = 0;
  for (; j + kVectors * kWidth <= b.columns; j += kVectors * kWidth)
    add_product<Rows, kVectors>(a, a_stride, b.numbers + kPair * j, b.columns, count, c + j, b.columns, fresh);
  for (; j < b.columns; j += kWidth)
    add_product<Rows, 1>(a, a_stride, b.numbers + kPair * j, b.columns, count, c + j, b.columns, fresh);
}

// c (a.rows x b.columns) = a b, or c + a b.
void multiply(const Left& a, const Right& b, long count, float* c, bool fresh) {
  long r = 0;
  for (; r + kRows <= a.rows; r += kRows)
    multiply_rows<kRows>(a.numbers + r * a.stride, a.stride, b, count, c + r * b.columns, fresh);
  switch (a.rows - r) {
    case 5: return multiply_rows<5>(a.numbers + r * a.stride, a.stride, b, count, c + r * b.columns, fresh);
    case 4: return multiply_rows<4>(a.numbers + r * a.stride, a.stride, b, count, c + r * b.columns, fresh);
    case 3: return multiply_rows<3>(a.numbers + r * a.stride, a.stride, b, count, c + r * b.columns, fresh);
    case 2: return multiply_rows<2>(a.numbers + r * a.stride, a.stride, b, count, c + r * b.columns, fresh);
    case 1: return multiply_rows<1>(a.numbers + r * a.stride, a.stride, b, count, c + r * b.columns, fresh);
    default: return;
  }
}

// kPair neighbouring numbers of a token, or one number of kPair tokens.
struct Pair {
  Number numbers[kPair];
};
CIUIC_INLINE void store_pair(const Pair& pair, Number* to) { std::memcpy(to, &pair, sizeof pair); }

// `count` rows (tokens) of `width` numbers, `stride` apart.
template <typename Value>
struct TokenRows {
  const Value* from;
  long stride, count, width;

  TokenRows(const void* array, long stride, long count, long width)
      : from(static_cast<const Value*>(array)), stride(stride), count(count), width(width) {}

  // Fetches a row that is read soon: rows are short and far apart, which the processor does not foresee.
  CIUIC_INLINE void fetch(long i) const {
    if (i >= count) return;
    for (long j = 0; j < width; j += 64 / sizeof(Value)) __builtin_prefetch(from + i * stride + j);
  }

  CIUIC_INLINE Pair along_row(long i, long j) const {
    Pair pair = {};
    if (j + kPair > width)
      pair.numbers[0] = number(from[i * stride + j]);
    else if (sizeof(Value) == sizeof(Number))
      std::memcpy(&pair, from + i * stride + j, sizeof pair);
    else
      for (int p = 0; p < kPair; ++p) pair.numbers[p] = number(from[i * stride + j + p]);
    return pair;
  }
  CIUIC_INLINE Pair along_column(long i, long j) const {
    Pair pair = {};
    pair.numbers[0] = number(from[i * stride + j]);
    if (kPair > 1 && i + 1 < count) pair.numbers[kPair - 1] = number(from[(i + 1) * stride + j]);
    return pair;
  }
};

CIUIC_INLINE void clear(Number* to, long count) { std::memset(to, 0, sizeof(Number) * count); }

// Left factors: a row of `columns` numbers for each of `rows` tokens, or `columns` rows, `rows` apart, with a number of each token.
template <typename Value>
void pack_left(TokenRows<Value> x, long rows, long columns, Number* to) {
  clear(to, rows * columns);
  for (long i = 0; i < x.count; ++i) {
    x.fetch(i + kRowsAhead);
    for (long j = 0; j < x.width; ++j) to[i * columns + j] = number(x.from[i * x.stride + j]);
  }
}
template <typename Value>
void pack_left_transposed(TokenRows<Value> x, long rows, long columns, Number* to) {
  clear(to, rows * columns);
  for (long i = 0; i < x.count; i += kPair) {
    for (int p = 0; p < kPair; ++p) x.fetch(i + p + kRowsAhead);
    for (long j = 0; j < x.width; ++j) store_pair(x.along_column(i, j), to + j * rows + i);
  }
}

// Right factors of rows x columns numbers: sums run over tokens; or over a token's numbers, with kBlock tokens side by side.
template <typename Value>
void pack_right(TokenRows<Value> x, long rows, long columns, Number* to) {
  clear(to, rows * columns);
  for (long i = 0; i < x.count; i += kPair) {
    for (int p = 0; p < kPair; ++p) x.fetch(i + p + kRowsAhead);
    for (long j = 0; j < x.width; ++j) store_pair(x.along_column(i, j), to + i * columns + j * kPair);
  }
}
template <typename Value>
void pack_right_blocks(TokenRows<Value> x, long rows, long columns, Number* to) {
  clear(to, rows * columns);
  for (long i = 0; i < x.count; ++i) {
    Number* const at = to + i / kBlock * kBlock * columns + i % kBlock * kPair;
    x.fetch(i + kRowsAhead);
    for (long j = 0; j < x.width; j += kPair) store_pair(x.along_row(i, j), at + j * kBlock);
  }
}

// Sum of products of two rows; 16 partial sums make vectors of it.
template <typename Value>
float dot(const Value* a, const Value* b, long count) {
  float sums[16] = {};
  long j = 0;
  for (; j + 16 <= count; j += 16)
    for (int i = 0; i < 16; ++i) sums[i] += exact(a[j + i]) * exact(b[j + i]);
  for (int i = 0; j + i < count; ++i) sums[i] += exact(a[j + i]) * exact(b[j + i]);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

// Stores a row of float32 numbers.
inline void store_row(const float* row, long count, float* to) { std::memcpy(to, row, sizeof(float) * count); }
inline void store_row(const float* row, long count, uint16_t* to) {
  long j = 0;
#ifdef __AVX512BF16__
  for (; j + 16 <= count; j += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(row + j)));
#endif
  for (; j < count; ++j) to[j] = to_bfloat16(row[j]);
}

// Stores vectors of neighbouring rows k .. k + kPair - 1 and 16 columns as a right factor whose sums run over rows.
CIUIC_INLINE void store_right(const Vector* rows, long k, long column, Number* to) {
  Number* const at = to + (k * kBlock + column * kPair);
#ifdef __AVX512BF16__
  alignas(64) static const uint16_t kInterleaved[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)rows[1], (__m512)rows[0]);
  _mm512_storeu_si512(at, _mm512_permutexvar_epi16(_mm512_load_si512(kInterleaved), both));
#else
  *reinterpret_cast<Vector*>(at) = rows[0];
#endif
}

// Stores a vector of row k as a left factor whose sums run over columns.
CIUIC_INLINE void store_left(Vector row, long k, long column, Number* to) {
  Number* const at = to + k * kBlock + column;
#ifdef __AVX512BF16__
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), (__m256i)_mm512_cvtneps_pbh((__m512)row));
#else
  *reinterpret_cast<Vector*>(at) = row;
#endif
}

}  // namespace
}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
