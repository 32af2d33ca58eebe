// One step of the encoder's forward pass, for several tiles at once. It computes best_t[p], the least cost of all paths
// that end in prefix p after weight t:
//
//   best_t[p] = min over high of best_{t-1}[s >> in] + cost(s, x_t),   s = high << (L - out) | p
//
// The weight has `in` bits and the next one has `out` bits. The two differ if K is not whole: then K - 1/2 and K + 1/2
// alternate.
//
// Arguments of the functions below: before[i] is best_{t-1} of tile i, after[i] receives its best_t, and terms[i] is the
// term of its target (codebook.h). `table` is read once, from front to back. At L = 16 it has 256 KB and streams through
// the cache; the `Tiles` tiles share its loads. codebook.cpp describes its three layouts.
#ifndef CIUIC_FORWARD_KERNEL_H
#define CIUIC_FORWARD_KERNEL_H

#include "codebook.h"
#include "lanes.h"

namespace ciuic {
namespace CIUIC_ISA {

// base + cost of the entries.
template <bool Squared>
static inline __attribute__((always_inline)) Lanes add_cost(Lanes base, Lanes entry, Lanes term) {
  return Squared ? add_squares(base, entry, term) : add_product(base, entry, term);
}

// Updates accumulator K of a group (quad layout). First: lane of each quad that holds the predecessor of accumulator 0.
template <int K, int PerPredecessor, int First, int Tiles>
static inline __attribute__((always_inline)) void accumulate(Lanes (*best)[4], const Lanes* bases, const int32_t* table,
                                                             const Lanes* term_vectors) {
  const Lanes entry = load(table + kLanes * K);
  for (int t = 0; t < Tiles; ++t) {
    const Lanes base = PerPredecessor >= 4 ? bases[t] : copy_lane<(First + K / PerPredecessor) & 3>(bases[t]);
    best[t][K] = minimum(best[t][K], add_cost<false>(base, entry, term_vectors[t]));
  }
}

// One group of the quad layout for one block of predecessors. Returns the end of the group in the table.
template <int In, int Tiles, int Group>
static inline __attribute__((always_inline)) const int32_t* quad_group(const int32_t* table, const int32_t* const* before,
                                                                       int32_t* const* after, const Lanes* term_vectors,
                                                                       int out, int L, int block) {
  constexpr int kPerPredecessor = (1 << In) / 4;
  constexpr int kFirst = 4 * Group / kPerPredecessor;
  Lanes best[Tiles][4];
  for (int t = 0; t < Tiles; ++t)
    for (int k = 0; k < 4; ++k) best[t][k] = broadcast(INT32_MAX);
  const int predecessors = 1 << (L - In - out);
  const int at = block * kLanes;
#pragma GCC unroll 2
  for (int high = 0; high < 1 << out; ++high) {
    Lanes bases[Tiles];
    for (int t = 0; t < Tiles; ++t) bases[t] = load(before[t] + high * predecessors + at);
    if (kPerPredecessor >= 4)
      for (int t = 0; t < Tiles; ++t) bases[t] = copy_lane<kFirst>(bases[t]);
    accumulate<0, kPerPredecessor, kFirst, Tiles>(best, bases, table, term_vectors);
    accumulate<1, kPerPredecessor, kFirst, Tiles>(best, bases, table, term_vectors);
    accumulate<2, kPerPredecessor, kFirst, Tiles>(best, bases, table, term_vectors);
    accumulate<3, kPerPredecessor, kFirst, Tiles>(best, bases, table, term_vectors);
    table += 4 * kLanes;
  }
  for (int t = 0; t < Tiles; ++t)
    store_quads(best[t], after[t] + ((block * kLanes) << In) + 16 * Group, size_t{4} << In);
  return table;
}

// Pair layout, 1 bit: a vector of predecessors q leads to two vectors of prefixes, 2 q and 2 q + 1.
template <int Out, int Tiles>
static void forward_pairs(const int32_t* table, const int32_t* const* before, int32_t* const* after, const int32_t* terms,
                          int L) {
  Lanes term_vectors[Tiles];
  for (int t = 0; t < Tiles; ++t) term_vectors[t] = broadcast(terms[t]);
  const int predecessors = 1 << (L - 1 - Out);
  for (int q = 0; q < predecessors; q += kLanes) {
    Lanes best[Tiles][2];
    for (int t = 0; t < Tiles; ++t) best[t][0] = best[t][1] = broadcast(INT32_MAX);
#pragma GCC unroll 4
    for (int high = 0; high < 1 << Out; ++high, table += 2 * kLanes)
      for (int t = 0; t < Tiles; ++t) {
        const Lanes base = load(before[t] + high * predecessors + q);
        best[t][0] = minimum(best[t][0], add_cost<false>(base, load(table), term_vectors[t]));
        best[t][1] = minimum(best[t][1], add_cost<false>(base, load(table + kLanes), term_vectors[t]));
      }
    for (int t = 0; t < Tiles; ++t) store_interleaved(best[t][0], best[t][1], after[t] + 2 * q);
  }
}

// Quad layout, 2 to 4 bits: several predecessors per vector.
template <int In, int Tiles>
static void forward_quads(const int32_t* table, const int32_t* const* before, int32_t* const* after, const int32_t* terms,
                          int out, int L) {
  Lanes term_vectors[Tiles];
  for (int t = 0; t < Tiles; ++t) term_vectors[t] = broadcast(terms[t]);
  const int blocks = (1 << (L - In - out)) / kLanes;
  for (int block = 0; block < blocks; ++block) {
    table = quad_group<In, Tiles, 0>(table, before, after, term_vectors, out, L, block);
    if constexpr (In >= 3) table = quad_group<In, Tiles, 1>(table, before, after, term_vectors, out, L, block);
    if constexpr (In >= 4) {
      table = quad_group<In, Tiles, 2>(table, before, after, term_vectors, out, L, block);
      table = quad_group<In, Tiles, 3>(table, before, after, term_vectors, out, L, block);
    }
  }
}

// Broadcast layout: all lanes of a vector have one predecessor, and `Shared` of the `Vectors` vectors share it.
template <bool Squared, int Vectors, int Shared, int Tiles>
static void forward_broadcast(const int32_t* table, const int32_t* const* before, int32_t* const* after,
                              const int32_t* terms, int in, int out, int L) {
  Lanes term_vectors[Tiles];
  for (int t = 0; t < Tiles; ++t) term_vectors[t] = broadcast(terms[t]);
  const int prefixes = 1 << (L - out);
  for (int start = 0; start < prefixes; start += Vectors * kLanes) {
    Lanes best[Tiles][Vectors];
    for (int t = 0; t < Tiles; ++t)
      for (int k = 0; k < Vectors; ++k) best[t][k] = broadcast(INT32_MAX);
#pragma GCC unroll 2
    for (int high = 0; high < 1 << out; ++high) {
      const int state = high << (L - out) | start;
      Lanes base[Tiles];
      for (int k = 0; k < Vectors; ++k) {
        if (k % Shared == 0)
          for (int t = 0; t < Tiles; ++t) base[t] = broadcast(before[t][(state + k * kLanes) >> in]);
        const Lanes entry = load(table + kLanes * k);
        for (int t = 0; t < Tiles; ++t)
          best[t][k] = minimum(best[t][k], add_cost<Squared>(base[t], entry, term_vectors[t]));
      }
      table += Vectors * kLanes;
    }
    for (int t = 0; t < Tiles; ++t)
      for (int k = 0; k < Vectors; ++k) store(after[t] + start + kLanes * k, best[t][k]);
  }
}

// Broadcast layout with the numbers of vectors that fit `in` and `out`.
template <bool Squared, int Tiles>
static void forward_any_broadcast(const int32_t* table, const int32_t* const* before, int32_t* const* after,
                                  const int32_t* terms, int in, int out, int L) {
  const int vectors = (1 << (L - out)) / kLanes;
  constexpr int kSharedBy4 = 16 / kLanes, kSharedBy5 = 32 / kLanes < 4 ? 32 / kLanes : 4;
  if (in == 4) return forward_broadcast<Squared, 4, kSharedBy4, Tiles>(table, before, after, terms, in, out, L);
  if (in == 5) return forward_broadcast<Squared, 4, kSharedBy5, Tiles>(table, before, after, terms, in, out, L);
  if (vectors >= 4) return forward_broadcast<Squared, 4, 4, Tiles>(table, before, after, terms, in, out, L);
  if (vectors == 2) return forward_broadcast<Squared, 2, 2, Tiles>(table, before, after, terms, in, out, L);
  return forward_broadcast<Squared, 1, 1, Tiles>(table, before, after, terms, in, out, L);
}

// One step with the loop that fits `in` and `out`; the same choice of layout as in codebook().
template <int Tiles>
static void forward_step(const int32_t* table, const int32_t* const* before, int32_t* const* after, const int32_t* terms,
                         int in, int out, bool squared, int L) {
  if (in == 1 && out == 1) return forward_pairs<1, Tiles>(table, before, after, terms, L);
  if (in == 1) return forward_pairs<2, Tiles>(table, before, after, terms, L);
  if (!uses_quads(in, out, L, kLanes)) {
    if (squared) return forward_any_broadcast<true, Tiles>(table, before, after, terms, in, out, L);
    return forward_any_broadcast<false, Tiles>(table, before, after, terms, in, out, L);
  }
  if (in == 2) return forward_quads<2, Tiles>(table, before, after, terms, out, L);
  if (in == 3) return forward_quads<3, Tiles>(table, before, after, terms, out, L);
  return forward_quads<4, Tiles>(table, before, after, terms, out, L);
}

}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
