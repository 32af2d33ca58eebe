// The inner loops of symmetric sums on AMX, the matrix unit of Intel processors.
//
// A tile register holds 16 rows of 16 elements. An element holds the numbers of two tokens in bfloat16. One instruction adds
// the products of two registers to 16 x 16 sums. Each row of the left register must hold a column of the strip, and each row
// of the right one a pair of tokens. So `right` is packed pair by pair, and `left` in blocks of 16 columns by 16 pairs, which
// are packed column by column.
//
// A float32 number is stored as two bfloat16 numbers, its rounded value and the rest. The product of two such numbers is
// computed as the sum of three products; that of the two rests is left out. The error is at most 2^-16 of the product.
#include <immintrin.h>

#include "symmetric_sums.h"
#include "tile_shapes.h"
#include "token_pairs.h"

namespace ciuic {
namespace CIUIC_ISA {
namespace {

// Two by two registers of sums and their factors take all eight registers; a strip has two such blocks in each direction.
constexpr long kStrip = 64, kSide = 16;
static_assert(kStrip <= kLongestStrip && kSteps % (2 * kSide) == 0, "strips are packed in whole registers");

// Pairs of tokens, in whole registers.
inline long pairs_of(long tokens) { return (tokens + 2 * kSide - 1) / (2 * kSide) * kSide; }

template <Part part, typename Number>
void pack_right_part(const Number* from, long stride, long tokens, long columns, float* to) {
  const long pairs = pairs_of(tokens);
  for (long pair = 0; pair < pairs; ++pair)
    for (long j = 0; j < kStrip; j += kSide, to += kSide)
      _mm512_storeu_si512(to, token_pairs<part>(from + 2 * pair * stride + j, stride, tokens - 2 * pair, columns - j));
}

template <Part part, typename Number>
void pack_left_part(const Number* from, long stride, long tokens, long columns, float* to) {
  const long pairs = pairs_of(tokens);
  const __m512i rows = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                          _mm512_set1_epi32(kSide));
  for (long j = 0; j < kStrip; j += kSide)
    for (long pair = 0; pair < pairs; ++pair) {
      float* const block = to + j * pairs + pair / kSide * kSide * kSide;
      _mm512_i32scatter_epi32(block + pair % kSide, rows,
                              token_pairs<part>(from + 2 * pair * stride + j, stride, tokens - 2 * pair, columns - j), 4);
    }
}

// With `Exact`, the rests follow the rounded numbers.
template <bool Exact, typename Number>
void pack_left(const Number* from, long stride, long tokens, long columns, float* to) {
  pack_left_part<Part::kRounded>(from, stride, tokens, columns, to);
  if (Exact) pack_left_part<Part::kRest>(from, stride, tokens, columns, to + kStrip * pairs_of(tokens));
}

template <bool Exact, typename Number>
void pack_right(const Number* from, long stride, long tokens, long columns, float* to) {
  pack_right_part<Part::kRounded>(from, stride, tokens, columns, to);
  if (Exact) pack_right_part<Part::kRest>(from, stride, tokens, columns, to + kStrip * pairs_of(tokens));
}

// Two registers of `left`, 16 columns apart, to registers 4 and 5, and two of `right` to 6 and 7.
inline __attribute__((always_inline)) void load_left(const float* left, long pairs) {
  _tile_loadd(4, left, 4 * kSide);
  _tile_loadd(5, left + kSide * pairs, 4 * kSide);
}

inline __attribute__((always_inline)) void load_right(const float* right) {
  _tile_loadd(6, right, 4 * kStrip);
  _tile_loadd(7, right + kSide, 4 * kStrip);
}

inline __attribute__((always_inline)) void add_products() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// 32 x 32 sums, which stay in registers for all pairs.
template <bool RestOfLeft, bool RestOfRight>
inline void multiply_block(const float* left, const float* right, long pairs, float* sums, long stride) {
  const long bytes = 4 * stride, rest = kStrip * pairs;
  float* const lower = sums + kSide * stride;
  _tile_loadd(0, sums, bytes);
  _tile_loadd(1, sums + kSide, bytes);
  _tile_loadd(2, lower, bytes);
  _tile_loadd(3, lower + kSide, bytes);
  for (long pair = 0; pair < pairs; pair += kSide) {
    const float *const a = left + kSide * pair, *const b = right + kStrip * pair;
    load_left(a, pairs);
    if (RestOfRight) {
      load_right(b + rest);
      add_products();
    }
    load_right(b);
    add_products();
    if (RestOfLeft) {
      load_left(a + rest, pairs);
      add_products();
    }
  }
  _tile_stored(0, sums, bytes);
  _tile_stored(1, sums + kSide, bytes);
  _tile_stored(2, lower, bytes);
  _tile_stored(3, lower + kSide, bytes);
}

template <bool RestOfLeft, bool RestOfRight>
void multiply(const float* left, const float* right, long pairs, float* sums, long stride) {
  const TileShapes shapes(kSide);
  for (long a = 0; a < kStrip; a += 2 * kSide)
    for (long b = 0; b < kStrip; b += 2 * kSide)
      multiply_block<RestOfLeft, RestOfRight>(left + a * pairs, right + b, pairs, sums + a * stride + b, stride);
}

void multiply_rounded(const float* left, const float* right, long steps, bool, float* sums, long stride) {
  multiply<false, false>(left, right, pairs_of(2 * steps), sums, stride);
}

void multiply_exact(const float* left, const float* right, long steps, bool left_bf16, float* sums, long stride) {
  const auto chosen = left_bf16 ? multiply<false, true> : multiply<true, true>;
  chosen(left, right, pairs_of(steps), sums, stride);
}

}  // namespace

extern const SymmetricKernel rounded, exact;
const SymmetricKernel rounded = {
    kStrip, 2, {pack_left<false>, pack_left<false>}, {pack_right<false>, pack_right<false>}, multiply_rounded};
const SymmetricKernel exact = {
    kStrip, 1, {pack_left<true>, pack_left<true>}, {pack_right<true>, pack_right<true>}, multiply_exact};

}  // namespace CIUIC_ISA
}  // namespace ciuic
