// The loop of attention over latents, which its kernels share: tokens are taken kLatentBlock at a time, with a running maximum
// of the scores (flash attention, Dao et al. 2022).
#ifndef CIUIC_LATENT_BLOCKS_H
#define CIUIC_LATENT_BLOCKS_H

#include <cfloat>
#include <cstring>

#include "latent_attention.h"

namespace ciuic {

constexpr int kLatentBlock = 64;

// The function of LatentKernel. Kernel is a type of an unnamed namespace, so that each instruction set has its own copy:
//   Number: of queries and weights.
//   scores_of(query, tokens, first, count, score): score[row][token] of `count` tokens from `first` on.
//   weights_of(score, count, scaling, bias, maximum, total, weight): scores of one row to weights, 0 beyond the last token;
//     updates the row's maximum and total, and returns the factor of what was summed before.
//   add_latents(tokens, first, count, weight, sums): sums += weights . latents.
template <typename Kernel>
void attend_in_blocks(const void* query, const LatentTokens& tokens, float scaling, const float* const* bias,
                      PartialAttention& partial) {
  typedef typename Kernel::Number Number;
  std::memset(partial.sums, 0, sizeof(float) * kQueryRows * tokens.rank);
  for (int r = 0; r < kQueryRows; ++r) {
    partial.maximum[r] = -FLT_MAX;
    partial.total[r] = 0.0f;
  }
  alignas(64) float score[kQueryRows][kLatentBlock];
  alignas(64) Number weight[kQueryRows][kLatentBlock];
  for (long first = 0; first < tokens.count; first += kLatentBlock) {
    const long count = tokens.count - first < kLatentBlock ? tokens.count - first : kLatentBlock;
    Kernel::scores_of(static_cast<const Number*>(query), tokens, first, count, score);
    for (int r = 0; r < kQueryRows; ++r) {
      const float factor = Kernel::weights_of(score[r], count, scaling, bias == nullptr ? nullptr : bias[r] + first,
                                              partial.maximum[r], partial.total[r], weight[r]);
      float* const sums = partial.sums + r * tokens.rank;
      if (first != 0 && factor != 1.0f)
        for (long j = 0; j < tokens.rank; ++j) sums[j] *= factor;
    }
    Kernel::add_latents(tokens, first, count, weight, partial.sums);
  }
}

}  // namespace ciuic

#endif
