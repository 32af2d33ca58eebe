// The table from which the encoder computes the cost of each window.
//
// The cost of a path is the sum of (level - x)^2 over its windows, for targets x in levels. It is computed from an entry
// of the window and a term of the target (target_term in viterbi_kernel.cpp). Both are pairs of int16; the arithmetic on
// them is exact. There are two forms:
// - Up to 5 bits per weight: entry = (square, level), term = (16, -8 x), cost = entry . term. This is 4 (level - x)^2 up
//   to a constant per target. square = floor(level^2 / 4) - 32512 fits an int16. Rounding it down changes level^2 by at
//   most 1, while the mean of (level - x)^2 is 18 or more.
// - From 5.5 bits on that change would show: entry = (16 level, 0), term = (16 x, 0), cost = |entry - term|^2.
#ifndef CIUIC_CODEBOOK_H
#define CIUIC_CODEBOOK_H

#include <cstdint>

#include "trellis_decode.h"

namespace ciuic {

static constexpr bool uses_squares(int half_bits) { return half_bits > 10; }

// Whether the quad layout applies (see codebook.cpp): enough neighbouring predecessors to fill vectors of `lanes` lanes.
static constexpr bool uses_quads(int in, int out, int L, int lanes) {
  return in <= 4 && 1 << (L - in - out) >= lanes;
}

// Two int16 in one int32; `low` is the first of the pair.
static inline int32_t pair_of(int low, int high) {
  return static_cast<int32_t>(static_cast<uint32_t>(low & 0xFFFF) | static_cast<uint32_t>(high) << 16);
}

static inline int codebook_square(int level) {
  return (level * level - CIUIC_LEVEL_CENTRE * CIUIC_LEVEL_CENTRE / 2 + 2) >> 2;
}

static inline int32_t codebook_entry(unsigned window, bool squared) {
  const int level = ciuic_level(window);
  return squared ? pair_of(16 * level, 0) : pair_of(codebook_square(level), level);
}

// The entries of all 2^L windows, in the order in which one step of the forward pass reads them (forward_kernel.h).
// `in`: bits of the step's weight. `out`: bits of the next weight. `quads`: vector length in quads, groups of four lanes.
// The table is 64-byte aligned and made once per process. Null if memory runs out.
const int32_t* codebook(int in, int out, bool squared, int L, int quads);

}  // namespace ciuic

#endif
