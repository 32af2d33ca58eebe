// The inner loops of symmetric sums: outer products of packed strips, whose sums stay in registers for kSteps steps.
//
// This file is compiled once per instruction set, with fused multiply-add: the sums of statistics differ in their last bits
// between processors, as those of torch do.
#include <algorithm>
#include <cstdint>

#include "bfloat16.h"
#if defined(__AVX512BF16__)
#include "token_pairs.h"
#endif
#include "symmetric_sums.h"

namespace ciuic {
namespace CIUIC_ISA {

// kRows x kVectors sums stay in registers. A strip is packed in panels, one after another: each has so many columns of all
// steps. With AVX2, blocks of sums are narrower than a strip, and panels as wide as a block: then a panel of the right factor
// stays in the first-level cache, and no other columns are read with it.
#if defined(__AVX512F__)
constexpr int kStrip = 48, kLanes = 16, kRows = 8, kVectors = 3;  // sums fill 24 of 32 registers
constexpr int kLeftPanel = kStrip, kRightPanel = kStrip;
#else
constexpr int kStrip = 48, kLanes = 8, kRows = 6, kVectors = 2;  // 12 of 16
constexpr int kLeftPanel = kRows, kRightPanel = kLanes * kVectors;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
static_assert(kStrip % kRows == 0 && kStrip % (kLanes * kVectors) == 0, "blocks must fill a strip");
static_assert(kStrip % kLeftPanel == 0 && kStrip % kRightPanel == 0, "panels must fill a strip");

static inline __attribute__((always_inline)) Floats load(const float* from) {
  Floats value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

static inline __attribute__((always_inline)) void store(const Floats& value, float* to) {
  __builtin_memcpy(to, &value, sizeof value);
}

#if defined(__AVX512BF16__)

static inline __attribute__((always_inline)) Floats add_product(Floats sum, const float* left, const Floats& right) {
  int32_t pair;
  __builtin_memcpy(&pair, left, sizeof pair);
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)right);
}

template <int kPanel, typename Number>
static void pack_numbers(const Number* from, long stride, long tokens, long columns, float* to) {
  static_assert(kPanel == kStrip, "a strip is one panel");
  for (long t = 0; t < tokens; t += 2)
    for (int j = 0; j < kStrip; j += kLanes, to += kLanes)
      _mm512_storeu_si512(to, token_pairs(from + t * stride + j, stride, tokens - t, columns - j));
}

#else

static inline __attribute__((always_inline)) Floats add_product(const Floats& sum, const float* left, const Floats& right) {
  return sum + *left * right;
}

static inline float number_of(float value) { return value; }
static inline float number_of(uint16_t bits) { return from_bfloat16(bits); }

template <int kPanel, typename Number>
static void pack_numbers(const Number* from, long stride, long tokens, long columns, float* to) {
  for (long begin = 0; begin < kStrip; begin += kPanel, to += kStripSize<kPanel>) {
    const long valid = std::clamp<long>(columns - begin, 0, kPanel);
    for (long t = 0; t < tokens; ++t) {
      const Number* row = from + t * stride + begin;
      float* packed = to + t * kPanel;
      if (valid == kPanel) {
#pragma GCC unroll 16
        for (int j = 0; j < kPanel; ++j) packed[j] = number_of(row[j]);
      } else {
        for (int j = 0; j < kPanel; ++j) packed[j] = j < valid ? number_of(row[j]) : 0.0f;
      }
    }
  }
}

#endif

static inline __attribute__((always_inline)) void multiply_block(const float* left, const float* right, long steps, float* sums,
                                                                 long stride) {
  Floats sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int a = 0; a < kRows; ++a)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[a][v] = Floats{};
  for (long step = 0; step < steps; ++step, left += kLeftPanel, right += kRightPanel) {
    Floats factor[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) factor[v] = load(right + kLanes * v);
#pragma GCC unroll 8
    for (int a = 0; a < kRows; ++a)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[a][v] = add_product(sum[a][v], left + a, factor[v]);
  }
#pragma GCC unroll 8
  for (int a = 0; a < kRows; ++a)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* to = sums + a * stride + kLanes * v;
      store(load(to) + sum[a][v], to);
    }
}

// Where a column of a strip begins that is packed in panels.
template <int kPanel>
static constexpr long panel_at(int column) {
  return column / kPanel * kStripSize<kPanel> + column % kPanel;
}

static void multiply(const float* left, const float* right, long strips, long steps, bool, float* sums, long stride) {
  for (int b = 0; b < kStrip; b += kLanes * kVectors)
    for (long strip = 0; strip < strips; ++strip)
      for (int a = 0; a < kStrip; a += kRows)
        multiply_block(left + strip * kStripSize<kStrip> + panel_at<kLeftPanel>(a), right + panel_at<kRightPanel>(b), steps,
                       sums + (strip * kStrip + a) * stride + b, stride);
}

constexpr StripPacking kLeft = {pack_numbers<kLeftPanel>, pack_numbers<kLeftPanel>};
constexpr StripPacking kRight = {pack_numbers<kRightPanel>, pack_numbers<kRightPanel>};
#if defined(__AVX512BF16__)
extern const SymmetricKernel rounded;
const SymmetricKernel rounded = {kStrip, 2, kLeft, kRight, multiply};
#else
extern const SymmetricKernel exact;
const SymmetricKernel exact = {kStrip, 1, kLeft, kRight, multiply};
#endif

}  // namespace CIUIC_ISA
}  // namespace ciuic
