// What a window costs, as the encoder's tables hold it.
//
// A path's cost is a sum of (level - x)^2 over its windows. Two forms, both in exact integer arithmetic on pairs of int16:
// - up to 5 bits per weight, level^2 - 2 x level (the same up to x^2) in quarters: entry (square, level), step (16, -8 x).
//   square = (level^2 - 130050) / 4 rounded down after adding a half fits an int16; the rounding is at most 1 in level^2,
//   where the mean squared error is 18 or more.
// - beyond that rounding would show: entry (16 level, 0), step (16 x, 0), and the squared difference.
#ifndef CIUIC_CODEBOOK_H
#define CIUIC_CODEBOOK_H

#include <cstdint>

#include "trellis_decode.h"

namespace ciuic {

static constexpr bool squared_form(int halves) { return halves > 10; }

// Whether enough predecessors lie side by side to fill vectors of that many lanes with them.
static constexpr bool spreads(int in, int out, int window, int lanes) {
  return in <= 4 && 1 << (window - in - out) >= lanes;
}

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

// Entries of all 2^window windows, in the order in which a step of the forward pass with `quads` groups of four lanes reads
// them (see viterbi_kernel.cpp), whose weight has `in` bits and the next one `out`. 64-byte aligned, made once per process; null
// when memory runs out.
const int32_t* codebook(int in, int out, bool squared, int window, int quads);

}  // namespace ciuic

#endif
