// One step of the encoder's forward pass: best_t from best_{t-1}, for several tiles at once.
//
//   best_t[p] = min over high of best_{t-1}[s >> in] + cost(s, x_t),   s = high << (L - out) | p
//
// The weight has `in` bits and the next one `out`; they differ where half a bit takes turns.
// The table of costs (256 KB at L = 16) streams through the cache; encoding `Tiles` tiles together shares those loads.
#ifndef CIUIC_FORWARD_KERNEL_H
#define CIUIC_FORWARD_KERNEL_H

#include "codebook.h"
#include "lanes.h"

namespace ciuic {
namespace CIUIC_ISA {

template <bool Squared>
static inline __attribute__((always_inline)) Lanes reach(Lanes base, Lanes entry, Lanes step) {
  return Squared ? add_squares(base, entry, step) : add_product(base, entry, step);
}

// Accumulator k of a group.
template <int K, int PerPredecessor, int First, int Tiles>
static inline __attribute__((always_inline)) void accumulate(Lanes (*best)[4], const Lanes* bases, const int32_t* table,
                                                             const Lanes* steps) {
  const Lanes entry = load(table + kLanes * K);
  for (int t = 0; t < Tiles; ++t) {
    const Lanes base = PerPredecessor >= 4 ? bases[t] : spread<(First + K / PerPredecessor) & 3>(bases[t]);
    best[t][K] = least(best[t][K], reach<false>(base, entry, steps[t]));
  }
}

template <int In, int Tiles, int Group>
static inline __attribute__((always_inline)) const int32_t* spread_group(const int32_t* table, const int32_t* const* before,
                                                                         int32_t* const* after, const Lanes* steps, int out,
                                                                         int window, int block) {
  constexpr int kPerPredecessor = (1 << In) / 4;
  constexpr int kFirst = 4 * Group / kPerPredecessor;  // lane of the quad that holds the first accumulator's predecessor
  Lanes best[Tiles][4];
  for (int t = 0; t < Tiles; ++t)
    for (int k = 0; k < 4; ++k) best[t][k] = all(INT32_MAX);
  const int predecessors = 1 << (window - In - out);
  const int at = block * kLanes;
#pragma GCC unroll 2
  for (int high = 0; high < 1 << out; ++high) {
    Lanes bases[Tiles];
    for (int t = 0; t < Tiles; ++t) bases[t] = load(before[t] + high * predecessors + at);
    if (kPerPredecessor >= 4)
      for (int t = 0; t < Tiles; ++t) bases[t] = spread<kFirst>(bases[t]);
    accumulate<0, kPerPredecessor, kFirst, Tiles>(best, bases, table, steps);
    accumulate<1, kPerPredecessor, kFirst, Tiles>(best, bases, table, steps);
    accumulate<2, kPerPredecessor, kFirst, Tiles>(best, bases, table, steps);
    accumulate<3, kPerPredecessor, kFirst, Tiles>(best, bases, table, steps);
    table += 4 * kLanes;
  }
  for (int t = 0; t < Tiles; ++t)
    store_quads(best[t], after[t] + ((block * kLanes) << In) + 16 * Group, size_t{4} << In);
  return table;
}

// 1 bit: a vector of predecessors q leads to the two of prefixes 2 q + j.
template <int Out, int Tiles>
static void forward_pairs(const int32_t* table, const int32_t* const* before, int32_t* const* after, const int32_t* step,
                          int window) {
  Lanes steps[Tiles];
  for (int t = 0; t < Tiles; ++t) steps[t] = all(step[t]);
  const int predecessors = 1 << (window - 1 - Out);
  for (int q = 0; q < predecessors; q += kLanes) {
    Lanes best[Tiles][2];
    for (int t = 0; t < Tiles; ++t) best[t][0] = best[t][1] = all(INT32_MAX);
#pragma GCC unroll 4
    for (int high = 0; high < 1 << Out; ++high, table += 2 * kLanes)
      for (int t = 0; t < Tiles; ++t) {
        const Lanes base = load(before[t] + high * predecessors + q);
        best[t][0] = least(best[t][0], reach<false>(base, load(table), steps[t]));
        best[t][1] = least(best[t][1], reach<false>(base, load(table + kLanes), steps[t]));
      }
    for (int t = 0; t < Tiles; ++t) store_in_turn(best[t][0], best[t][1], after[t] + 2 * q);
  }
}

// 2 to 4 bits: several predecessors per vector.
template <int In, int Tiles>
static void forward_spread(const int32_t* table, const int32_t* const* before, int32_t* const* after,
                           const int32_t* step, int out, int window) {
  Lanes steps[Tiles];
  for (int t = 0; t < Tiles; ++t) steps[t] = all(step[t]);
  const int blocks = (1 << (window - In - out)) / kLanes;
  for (int block = 0; block < blocks; ++block) {
    table = spread_group<In, Tiles, 0>(table, before, after, steps, out, window, block);
    if constexpr (In >= 3) table = spread_group<In, Tiles, 1>(table, before, after, steps, out, window, block);
    if constexpr (In >= 4) {
      table = spread_group<In, Tiles, 2>(table, before, after, steps, out, window, block);
      table = spread_group<In, Tiles, 3>(table, before, after, steps, out, window, block);
    }
  }
}

// Vectors with one predecessor each: `Shared` of the `Vectors` vectors have the same one.
template <bool Squared, int Vectors, int Shared, int Tiles>
static void forward_broadcast(const int32_t* table, const int32_t* const* before, int32_t* const* after,
                              const int32_t* step, int in, int out, int window) {
  Lanes steps[Tiles];
  for (int t = 0; t < Tiles; ++t) steps[t] = all(step[t]);
  const int prefixes = 1 << (window - out);
  for (int start = 0; start < prefixes; start += Vectors * kLanes) {
    Lanes best[Tiles][Vectors];
    for (int t = 0; t < Tiles; ++t)
      for (int k = 0; k < Vectors; ++k) best[t][k] = all(INT32_MAX);
#pragma GCC unroll 2
    for (int high = 0; high < 1 << out; ++high) {
      const int state = high << (window - out) | start;
      Lanes base[Tiles];
      for (int k = 0; k < Vectors; ++k) {
        if (k % Shared == 0)
          for (int t = 0; t < Tiles; ++t) base[t] = all(before[t][(state + k * kLanes) >> in]);
        const Lanes entry = load(table + kLanes * k);
        for (int t = 0; t < Tiles; ++t) best[t][k] = least(best[t][k], reach<Squared>(base[t], entry, steps[t]));
      }
      table += Vectors * kLanes;
    }
    for (int t = 0; t < Tiles; ++t)
      for (int k = 0; k < Vectors; ++k) store(after[t] + start + kLanes * k, best[t][k]);
  }
}

template <bool Squared, int Tiles>
static void forward_wide(const int32_t* table, const int32_t* const* before, int32_t* const* after, const int32_t* step,
                         int in, int out, int window) {
  const int vectors = (1 << (window - out)) / kLanes;
  constexpr int kSharedBy4 = 16 / kLanes, kSharedBy5 = 32 / kLanes < 4 ? 32 / kLanes : 4;
  if (in == 4) return forward_broadcast<Squared, 4, kSharedBy4, Tiles>(table, before, after, step, in, out, window);
  if (in == 5) return forward_broadcast<Squared, 4, kSharedBy5, Tiles>(table, before, after, step, in, out, window);
  if (vectors >= 4) return forward_broadcast<Squared, 4, 4, Tiles>(table, before, after, step, in, out, window);
  if (vectors == 2) return forward_broadcast<Squared, 2, 2, Tiles>(table, before, after, step, in, out, window);
  return forward_broadcast<Squared, 1, 1, Tiles>(table, before, after, step, in, out, window);
}

template <int Tiles>
static void forward_step(const int32_t* table, const int32_t* const* before, int32_t* const* after, const int32_t* step,
                         int in, int out, bool squared, int window) {
  if (in == 1 && out == 1) return forward_pairs<1, Tiles>(table, before, after, step, window);
  if (in == 1) return forward_pairs<2, Tiles>(table, before, after, step, window);
  if (!spreads(in, out, window, kLanes)) {
    if (squared) return forward_wide<true, Tiles>(table, before, after, step, in, out, window);
    return forward_wide<false, Tiles>(table, before, after, step, in, out, window);
  }
  if (in == 2) return forward_spread<2, Tiles>(table, before, after, step, out, window);
  if (in == 3) return forward_spread<3, Tiles>(table, before, after, step, out, window);
  return forward_spread<4, Tiles>(table, before, after, step, out, window);
}

}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
