// The inner loops of symmetric sums on AMX, the matrix unit of Intel processors.
//
// A tile register holds 16 rows of 16 elements. An element holds the numbers of two tokens in bfloat16. One instruction adds
// the products of two registers to 16 x 16 sums. Each row of the left register must hold a column of the strip, and each row
// of the right one a pair of tokens. Strips are packed in registers: 16 pairs of tokens by 16 columns, and beside them in
// memory the other columns of the same pairs.
//
// A float32 number is stored as two bfloat16 numbers, its rounded value and the rest. The product of two such numbers is
// computed as the sum of three products; that of the two rests is left out. The error is at most 2^-16 of the product.
#include <immintrin.h>

#include <algorithm>
#include <type_traits>

#include "symmetric_sums.h"
#include "tile_shapes.h"
#include "token_pairs.h"

namespace ciuic {
namespace CIUIC_ISA {
namespace {

// Two by two registers of sums and their factors take all eight registers; a strip has two such blocks in each direction.
constexpr long kStrip = 64, kSide = 16, kRegister = kSide * kSide;
static_assert(kStrip == 4 * kSide && kStrip <= kLongestStrip && kSteps % (2 * kSide) == 0, "strips are packed in whole registers");
// Rows of the next sums that are fetched for each register of pairs; 11 registers fetch all 32 rows. Chosen.
constexpr long kFetchedRows = 3;

// Pairs of tokens, in whole registers.
inline long pairs_of(long tokens) { return (tokens + 2 * kSide - 1) / (2 * kSide) * kSide; }

// Calls pack(pairs_at, packed) for every register of a strip, in the order in which they lie in memory. pairs_at(row) is a pair of
// tokens for 16 columns.
template <Part part, typename Number, typename Pack>
inline __attribute__((always_inline)) void pack_registers(const Number* from, long stride, long tokens, long columns, float* to,
                                                          Pack pack) {
  for (long pair = 0; pair < pairs_of(tokens); pair += kSide)
    for (long j = 0; j < kStrip; j += kSide, to += kRegister)
      pack(
          [&](long row) {
            const long token = 2 * (pair + row);
            return token_pairs<part>(from + token * stride + j, stride, tokens - token, columns - j);
          },
          to);
}

template <Part part, typename Number>
void pack_right_part(const Number* from, long stride, long tokens, long columns, float* to) {
  pack_registers<part>(from, stride, tokens, columns, to, [](auto pairs_at, float* packed) {
    for (long row = 0; row < kSide; ++row) _mm512_storeu_si512(packed + row * kSide, pairs_at(row));
  });
}

// Rows become columns.
inline __attribute__((always_inline)) void transpose(__m512i (&row)[kSide]) {
  __m512i half[kSide];
  for (int i = 0; i < kSide; i += 2) {
    half[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    half[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < kSide; i += 4)
    for (int k = 0; k < 2; ++k) {
      row[i + 2 * k] = _mm512_unpacklo_epi64(half[i + k], half[i + k + 2]);
      row[i + 2 * k + 1] = _mm512_unpackhi_epi64(half[i + k], half[i + k + 2]);
    }
  // row[4 i + k] holds columns k, 4 + k, 8 + k and 12 + k of rows 4 i .. 4 i + 3.
  for (int k = 0; k < 4; ++k) {
    const __m512i low = _mm512_shuffle_i32x4(row[k], row[4 + k], 0x88), high = _mm512_shuffle_i32x4(row[k], row[4 + k], 0xDD);
    const __m512i low2 = _mm512_shuffle_i32x4(row[8 + k], row[12 + k], 0x88);
    const __m512i high2 = _mm512_shuffle_i32x4(row[8 + k], row[12 + k], 0xDD);
    half[k] = _mm512_shuffle_i32x4(low, low2, 0x88);
    half[4 + k] = _mm512_shuffle_i32x4(high, high2, 0x88);
    half[8 + k] = _mm512_shuffle_i32x4(low, low2, 0xDD);
    half[12 + k] = _mm512_shuffle_i32x4(high, high2, 0xDD);
  }
  for (int i = 0; i < kSide; ++i) row[i] = half[i];
}

template <Part part, typename Number>
void pack_left_part(const Number* from, long stride, long tokens, long columns, float* to) {
  pack_registers<part>(from, stride, tokens, columns, to, [](auto pairs_at, float* packed) {
    __m512i row[kSide];
    for (long i = 0; i < kSide; ++i) row[i] = pairs_at(i);
    transpose(row);
    for (long i = 0; i < kSide; ++i) _mm512_storeu_si512(packed + i * kSide, row[i]);
  });
}

// Only float32 numbers have rests.
template <bool Exact, typename Number>
constexpr bool kHasRests = Exact && std::is_same<Number, float>::value;

// With `Exact`, the rests follow the rounded numbers. Those of the left factor are not read if it was packed from bfloat16.
template <bool Exact, typename Number>
void pack_left(const Number* from, long stride, long tokens, long columns, float* to) {
  pack_left_part<Part::kRounded>(from, stride, tokens, columns, to);
  if (kHasRests<Exact, Number>) pack_left_part<Part::kRest>(from, stride, tokens, columns, to + kStrip * pairs_of(tokens));
}

template <bool Exact, typename Number>
void pack_right(const Number* from, long stride, long tokens, long columns, float* to) {
  pack_right_part<Part::kRounded>(from, stride, tokens, columns, to);
  if (Exact) pack_right_part<Part::kRest>(from, stride, tokens, columns, to + kStrip * pairs_of(tokens));
}

// Adds the products of two left registers and two right ones.
inline __attribute__((always_inline)) void add_products(const float* left, const float* right) {
  _tile_loadd(4, left, 4 * kSide);
  _tile_loadd(5, left + kRegister, 4 * kSide);
  _tile_loadd(6, right, 4 * kSide);
  _tile_loadd(7, right + kRegister, 4 * kSide);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

inline __attribute__((always_inline)) void load_sums(const float* sums, long stride) {
  const float* const lower = sums + kSide * stride;
  _tile_loadd(0, sums, 4 * stride);
  _tile_loadd(1, sums + kSide, 4 * stride);
  _tile_loadd(2, lower, 4 * stride);
  _tile_loadd(3, lower + kSide, 4 * stride);
}

inline __attribute__((always_inline)) void store_sums(float* sums, long stride) {
  float* const lower = sums + kSide * stride;
  _tile_stored(0, sums, 4 * stride);
  _tile_stored(1, sums + kSide, 4 * stride);
  _tile_stored(2, lower, 4 * stride);
  _tile_stored(3, lower + kSide, 4 * stride);
}

// 32 x 32 sums, which stay in registers for all pairs. Meanwhile the sums at `next` are fetched, since each of their rows lies in another page.
template <bool RestOfLeft, bool RestOfRight>
inline void multiply_block(const float* left, const float* right, long pairs, float* sums, const float* next, long stride) {
  const long rest = kStrip * pairs;
  load_sums(sums, stride);
  for (long pair = 0; pair < pairs; pair += kSide, left += kSide * kStrip, right += kSide * kStrip) {
    for (long row = pair / kSide * kFetchedRows; row < std::min(2 * kSide, (pair / kSide + 1) * kFetchedRows); ++row) {
      _mm_prefetch(next + row * stride, _MM_HINT_T0);
      _mm_prefetch(next + row * stride + kSide, _MM_HINT_T0);
    }
    if (RestOfRight) add_products(left, right + rest);
    add_products(left, right);
    if (RestOfLeft) add_products(left + rest, right);
  }
  store_sums(sums, stride);
}

template <bool RestOfLeft, bool RestOfRight>
void multiply(const float* left, const float* right, long strips, long pairs, float* sums, long stride) {
  const TileShapes shapes(kSide);
  constexpr long kBlock = 2 * kSide;
  const long blocks = strips * (kStrip / kBlock) * (kStrip / kBlock);
  const auto sums_of = [&](long block) { return sums + block / 2 * kBlock * stride + block % 2 * kBlock; };
  for (long block = 0; block < blocks; ++block) {
    const long strip = block / 4, rows = block / 2 % 2 * kBlock, columns = block % 2 * kBlock;
    multiply_block<RestOfLeft, RestOfRight>(left + strip * kStripSize<kStrip> + rows * kSide, right + columns * kSide, pairs,
                                            sums_of(block), sums_of(block + 1 < blocks ? block + 1 : 0), stride);
  }
}

void multiply_rounded(const float* left, const float* right, long strips, long steps, bool, float* sums, long stride) {
  multiply<false, false>(left, right, strips, pairs_of(2 * steps), sums, stride);
}

void multiply_exact(const float* left, const float* right, long strips, long steps, bool left_bf16, float* sums, long stride) {
  const auto chosen = left_bf16 ? multiply<false, true> : multiply<true, true>;
  chosen(left, right, strips, pairs_of(steps), sums, stride);
}

}  // namespace

extern const SymmetricKernel rounded, exact;
const SymmetricKernel rounded = {
    kStrip, 2, {pack_left<false>, pack_left<false>}, {pack_right<false>, pack_right<false>}, multiply_rounded};
const SymmetricKernel exact = {
    kStrip, 1, {pack_left<true>, pack_left<true>}, {pack_right<true>, pack_right<true>}, multiply_exact};

}  // namespace CIUIC_ISA
}  // namespace ciuic
