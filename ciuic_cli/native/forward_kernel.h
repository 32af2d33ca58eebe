// One step of the encoder's forward pass: best_t from best_{t-1}, for several tiles at once.
//
//   best_t[p] = min over high of best_{t-1}[s >> K] + cost(s, x_t),   s = high << (L - K) | p
//
// The table of costs (256 KB at L = 16) streams through the cache; encoding `Tiles` tiles together shares those loads.
#ifndef CIUIC_FORWARD_KERNEL_H
#define CIUIC_FORWARD_KERNEL_H

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

template <int Bits, int Tiles, int Group>
static inline __attribute__((always_inline)) const int32_t* spread_group(
    const int32_t* table, const int32_t* const* before, int32_t* const* after, const Lanes* steps, int window, int block) {
  constexpr int kPerPredecessor = (1 << Bits) / 4;
  constexpr int kFirst = 4 * Group / kPerPredecessor;  // lane of the quad that holds the first accumulator's predecessor
  Lanes best[Tiles][4];
  for (int t = 0; t < Tiles; ++t)
    for (int k = 0; k < 4; ++k) best[t][k] = all(INT32_MAX);
  const int predecessors = 1 << (window - 2 * Bits);
  const int at = block * kLanes;
#pragma GCC unroll 2
  for (int high = 0; high < 1 << Bits; ++high) {
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
    store_quads(best[t], after[t] + ((block * kLanes) << Bits) + 16 * Group, size_t{4} << Bits);
  return table;
}

// 1 bit: a vector of predecessors q leads to the two of prefixes 2 q + j.
template <int Tiles>
static void forward_pairs(const int32_t* table, const int32_t* const* before, int32_t* const* after, const int32_t* step,
                          int window) {
  Lanes steps[Tiles];
  for (int t = 0; t < Tiles; ++t) steps[t] = all(step[t]);
  const int predecessors = 1 << (window - 2);
  for (int q = 0; q < predecessors; q += kLanes, table += 4 * kLanes)
    for (int t = 0; t < Tiles; ++t) {
      const Lanes low = load(before[t] + q), high = load(before[t] + predecessors + q);
      Lanes best[2];
      for (int j = 0; j < 2; ++j)
        best[j] = least(reach<false>(low, load(table + kLanes * j), steps[t]),
                        reach<false>(high, load(table + kLanes * (2 + j)), steps[t]));
      store_in_turn(best[0], best[1], after[t] + 2 * q);
    }
}

// 2 to 4 bits: several predecessors per vector.
template <int Bits, int Tiles>
static void forward_spread(const int32_t* table, const int32_t* const* before, int32_t* const* after,
                           const int32_t* step, int window) {
  Lanes steps[Tiles];
  for (int t = 0; t < Tiles; ++t) steps[t] = all(step[t]);
  const int blocks = (1 << (window - 2 * Bits)) / kLanes;
  for (int block = 0; block < blocks; ++block) {
    table = spread_group<Bits, Tiles, 0>(table, before, after, steps, window, block);
    if constexpr (Bits >= 3) table = spread_group<Bits, Tiles, 1>(table, before, after, steps, window, block);
    if constexpr (Bits >= 4) {
      table = spread_group<Bits, Tiles, 2>(table, before, after, steps, window, block);
      table = spread_group<Bits, Tiles, 3>(table, before, after, steps, window, block);
    }
  }
}

// 5 bits and more: `Shared` of the `Vectors` vectors have the same predecessor.
template <bool Squared, int Vectors, int Shared, int Tiles>
static void forward_broadcast(const int32_t* table, const int32_t* const* before, int32_t* const* after,
                              const int32_t* step, int window, int bits) {
  Lanes steps[Tiles];
  for (int t = 0; t < Tiles; ++t) steps[t] = all(step[t]);
  const int prefixes = 1 << (window - bits);
  for (int start = 0; start < prefixes; start += Vectors * kLanes) {
    Lanes best[Tiles][Vectors];
    for (int t = 0; t < Tiles; ++t)
      for (int k = 0; k < Vectors; ++k) best[t][k] = all(INT32_MAX);
#pragma GCC unroll 2
    for (int high = 0; high < 1 << bits; ++high) {
      const int state = high << (window - bits) | start;
      Lanes base[Tiles];
      for (int k = 0; k < Vectors; ++k) {
        if (k % Shared == 0)
          for (int t = 0; t < Tiles; ++t) base[t] = all(before[t][(state + k * kLanes) >> bits]);
        const Lanes entry = load(table + kLanes * k);
        for (int t = 0; t < Tiles; ++t) best[t][k] = least(best[t][k], reach<Squared>(base[t], entry, steps[t]));
      }
      table += Vectors * kLanes;
    }
    for (int t = 0; t < Tiles; ++t)
      for (int k = 0; k < Vectors; ++k) store(after[t] + start + kLanes * k, best[t][k]);
  }
}

template <int Tiles>
static void forward_step(const int32_t* table, const int32_t* const* before, int32_t* const* after, const int32_t* step,
                         int bits, int window) {
  const int vectors = (1 << (window - bits)) / kLanes;
  constexpr int kSharedBy5 = 32 / kLanes < 4 ? 32 / kLanes : 4;
  switch (bits) {
    case 1: return forward_pairs<Tiles>(table, before, after, step, window);
    case 2: return forward_spread<2, Tiles>(table, before, after, step, window);
    case 3: return forward_spread<3, Tiles>(table, before, after, step, window);
    case 4: return forward_spread<4, Tiles>(table, before, after, step, window);
    case 5: return forward_broadcast<false, 4, kSharedBy5, Tiles>(table, before, after, step, window, bits);
    default:
      if (vectors >= 4) return forward_broadcast<true, 4, 4, Tiles>(table, before, after, step, window, bits);
      if (vectors == 2) return forward_broadcast<true, 2, 2, Tiles>(table, before, after, step, window, bits);
      return forward_broadcast<true, 1, 1, Tiles>(table, before, after, step, window, bits);
  }
}

}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
