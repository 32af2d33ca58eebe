// The encoder: a Viterbi search over the bit-shift trellis, closed to a circle.
//
// After step t the state is the window s_t of L bits that weight t is decoded from; the next step shifts that weight's bits in:
// K of them, or K - 1/2 and K + 1/2 in turn. Only the low bits p of a window (the prefix that the next window begins with)
// matter for the future, so the forward pass keeps best_t[p] alone. The way back finds the minimising windows again from
// every few of these arrays, instead of storing a decision per state and step.
//
// All costs are integers (codebook.h), so every instruction set and batch size gives the same path.
#include <cmath>
#include <cstring>

#include "codebook.h"
#include "forward_kernel.h"
#include "kernels_of_isa.h"

namespace ciuic {
namespace CIUIC_ISA {

// Above the cost of any path over the few weights until every prefix can be reached, and far enough below 2^31.
static const int32_t kUnreachable = 1 << 30;

static const float kLargestTarget = 576.0f;  // beyond the largest level, 510; bounds the costs

#if defined(__AVX512VNNI__)
static const int kBatch = 3;  // 12 minima, 3 steps and 3 bases fill the registers
#else
static const int kBatch = 2;
#endif
static_assert(kBatch <= kMaxEncodeBatch, "the caller's arrays");

// Steps from one kept best_t to the next: fewer kept arrays stay in the cache, more steps cost more on the way back.
// Even where half a bit takes turns, so that all kept arrays have as many prefixes.
static int history_stride(int halves) { return halves == 2 ? 8 : halves <= 4 ? 4 : halves <= 8 || halves % 2 == 1 ? 2 : 1; }

struct Search {
  int halves, window, stride;
  int prefixes;             // of the kept arrays, the most
  bool squared;
  const int32_t* table[2];  // of even and odd weights
  int32_t steps[kBatch][kTileWeights];  // what codebook.h calls the step, per weight
  int32_t* history[kBatch];             // best_t for t + 1 = 0, stride, 2 stride .. 256
  int32_t* spare[kBatch][2];            // best_t in between
};

static int kept(int halves) { return kTileWeights / history_stride(halves) + 1; }

size_t encode_workspace_bytes(int halves, int window) {
  return 64 + sizeof(int32_t) * kBatch * (kept(halves) + 2) * ((size_t{1} << (window - halves / 2)) + 64);
}

int encode_batch(int, int) { return kBatch; }

// Bits of a weight, and of the one after it: rows have an even number of weights.
static int bits_of(int weight, int halves) { return ciuic_bits_of_column(weight & 1, halves); }
static int bits_after(int weight, int halves) { return bits_of(weight + 1, halves); }

static int32_t step_of(float x, bool squared) {
  if (x != x) return 0;  // costs nothing up to 5 bits; from 6 on 0 is as good a target as any
  const float clipped = x > kLargestTarget ? kLargestTarget : (x < -kLargestTarget ? -kLargestTarget : x);
  if (squared) return pair_of(static_cast<int>(std::rint(16.0f * clipped)), 0);
  return pair_of(16, static_cast<int>(std::rint(-8.0f * clipped)));
}

// Only differences of costs matter: every 16 steps the sums begin anew, so that none overflows however far the targets lie
// beyond the code's range. (16 is a multiple of every stride: what is rebased is kept, not needed again in between.)
static void rebase(int32_t* costs, int prefixes) {
  const int32_t base = costs[0];
  for (int p = 0; p < prefixes; ++p) costs[p] -= base;
}

// Steps first .. first + count - 1 (circular) for the given tiles of the batch.
template <int Tiles>
static void forward(Search& search, const int* tiles, int first, int count, const int32_t* const* from, bool keep) {
  const int32_t* before[Tiles];
  int32_t* after[Tiles];
  int32_t step[Tiles];
  for (int t = 0; t < Tiles; ++t) before[t] = from[t];
  for (int i = 0; i < count; ++i) {
    const int weight = (first + i) & (kTileWeights - 1);
    const int in = bits_of(weight, search.halves), out = bits_after(weight, search.halves);
    for (int t = 0; t < Tiles; ++t) {
      step[t] = search.steps[tiles[t]][weight];
      const bool kept_here = keep ? (i + 1) % search.stride == 0 : i + 1 == count;
      const size_t slot = keep ? static_cast<size_t>((i + 1) / search.stride) : 0;
      after[t] = kept_here ? search.history[tiles[t]] + slot * search.prefixes : search.spare[tiles[t]][i & 1];
    }
    forward_step<Tiles>(search.table[weight & 1], before, after, step, in, out, search.squared, search.window);
    for (int t = 0; t < Tiles; ++t) {
      if ((i & 15) == 15) rebase(after[t], 1 << (search.window - out));
      before[t] = after[t];
    }
  }
}

static const int kMostCandidates = 2048;

// Candidates for the way back: their cost so far and the prefix they are at.
struct Candidates {
  int32_t cost[kMostCandidates], at[kMostCandidates];
};

// Every candidate goes one weight back in all 2^out ways: candidate i by `high` becomes candidate high * count + i.
template <bool Squared>
static inline void expand(const Candidates& from, int count, int32_t step, int in, int out, int window, Candidates& to) {
  const int32_t first = static_cast<int16_t>(step), second = step >> 16;
  const auto go = [&](int i, int high, int n) __attribute__((always_inline)) {
    const unsigned state = static_cast<unsigned>(high) << (window - out) | static_cast<unsigned>(from.at[i]);
    const int32_t level = ciuic_level(state);
    const int32_t difference = 16 * level - first;
    to.cost[n] = from.cost[i] + (Squared ? difference * difference : codebook_square(level) * first + level * second);
    to.at[n] = static_cast<int32_t>(state >> in);
  };
  if (count == 1)
    for (int high = 0; high < 1 << out; ++high) go(0, high, high);
  else
    for (int high = 0; high < 1 << out; ++high)
      for (int i = 0; i < count; ++i) go(i, high, high * count + i);
}

// From prefix `prefix` after weight (slot + 1) * stride - 1 back to the kept array of `slot`: writes the windows of the stride
// on the cheapest path and returns its prefix there.
static int step_back(const Search& search, int tile, int slot, int prefix, uint16_t* windows) {
  const int window = search.window, stride = search.stride;
  Candidates candidates[2];
  candidates[0].cost[0] = 0;
  candidates[0].at[0] = prefix;
  int count = 1, now = 0;
  for (int d = 0; d < stride; ++d) {
    const int weight = (slot + 1) * stride - 1 - d;
    const int32_t step = search.steps[tile][weight];
    const int in = bits_of(weight, search.halves), out = bits_after(weight, search.halves);
    if (search.squared)
      expand<true>(candidates[now], count, step, in, out, window, candidates[1 - now]);
    else
      expand<false>(candidates[now], count, step, in, out, window, candidates[1 - now]);
    count <<= out;
    now = 1 - now;
  }
  int32_t* cost = candidates[now].cost;
  const int32_t* at = candidates[now].at;
  const int32_t* before = search.history[tile] + static_cast<size_t>(slot) * search.prefixes;
  int32_t least_cost = INT32_MAX;
  for (int i = 0; i < count; ++i) cost[i] += before[at[i]];
  for (int i = 0; i < count; ++i) least_cost = cost[i] < least_cost ? cost[i] : least_cost;
  int best = 0;
  while (cost[best] != least_cost) ++best;
  for (int d = 0; d < stride; ++d) {
    const int weight = (slot + 1) * stride - 1 - d, out = bits_after(weight, search.halves);
    const int state = (best & ((1 << out) - 1)) << (window - out) | prefix;
    best >>= out;
    windows[weight] = static_cast<uint16_t>(state);
    prefix = state >> bits_of(weight, search.halves);
  }
  return prefix;
}

// The cheapest path into `prefix` at kept array `slots`; returns the prefix that it starts from. `trail` holds the prefixes of
// an earlier path at the kept arrays and is updated; once both paths meet they are the same.
static int trace(const Search& search, int tile, int slots, int prefix, uint16_t* windows, uint16_t* trail,
                 bool have_trail) {
  for (int slot = slots - 1; slot >= 0; --slot) {
    if (have_trail && trail[slot + 1] == prefix) return trail[0];
    trail[slot + 1] = static_cast<uint16_t>(prefix);
    prefix = step_back(search, tile, slot, prefix, windows);
  }
  trail[0] = static_cast<uint16_t>(prefix);
  return prefix;
}

// A path is closed when it ends in the prefix that it starts from. Nearly all paths share their start, so the path that ends
// in the start of the best one is mostly closed, or the path that ends in that one's start. Where none is, the first
// kRepair weights are searched again, from the right start to where the path is after them.
static const int kRepair = 64;

static void close(Search& search, int tile, uint16_t* windows) {
  const int prefixes = search.prefixes, slots = kTileWeights / search.stride;
  const int32_t* last = search.history[tile] + static_cast<size_t>(slots) * prefixes;
  int end = 0;
  for (int p = 1; p < prefixes; ++p)
    if (last[p] < last[end]) end = p;
  uint16_t trail[kTileWeights + 1];
  const int first_start = trace(search, tile, slots, end, windows, trail, false);
  int start = first_start;
  for (int attempt = 0; attempt < 3; ++attempt) {
    const int found = trace(search, tile, slots, start, windows, trail, true);
    if (found == start) return;
    start = found;
  }
  start = first_start;
  trace(search, tile, slots, start, windows, trail, false);
  int32_t* history = search.history[tile];
  for (int p = 0; p < prefixes; ++p) history[p] = p == start ? 0 : kUnreachable;
  const int tiles[1] = {tile};
  const int32_t* from[1] = {history};
  forward<1>(search, tiles, 0, kRepair, from, true);
  trace(search, tile, kRepair / search.stride, trail[kRepair / search.stride], windows, trail, false);
}

template <int Tiles>
static void encode_batch_of(const float* const* targets, Search& search, uint16_t* const* windows) {
  static const int tiles[] = {0, 1, 2, 3};
  const int32_t* start[Tiles];
  for (int t = 0; t < Tiles; ++t) {
    for (int i = 0; i < kTileWeights; ++i) search.steps[t][i] = step_of(targets[t][i], search.squared);
    std::memset(search.spare[t][1], 0, sizeof(int32_t) * search.prefixes);
    start[t] = search.spare[t][1];
  }
  const int lead = CIUIC_LEAD_IN(search.window);
  forward<Tiles>(search, tiles, kTileWeights - lead, lead, start, false);
  for (int t = 0; t < Tiles; ++t) start[t] = search.history[t];
  forward<Tiles>(search, tiles, 0, kTileWeights, start, true);
  for (int t = 0; t < Tiles; ++t) close(search, t, windows[t]);
}

int encode_tiles(const float* const* targets, int tiles, int halves, int window, void* workspace,
                 uint16_t* const* windows) {
  Search search;
  search.halves = halves;
  search.window = window;
  search.stride = history_stride(halves);
  search.prefixes = 1 << (window - halves / 2);
  search.squared = squared_form(halves);
  for (int i = 0; i < 2; ++i) {
    search.table[i] = codebook(bits_of(i, halves), bits_after(i, halves), search.squared, window, kQuads);
    if (search.table[i] == nullptr) return -1;
  }
  // Arrays of different tiles begin at different places within a page, or they would compete for the same cache sets.
  const size_t padded = static_cast<size_t>(search.prefixes) + 64;
  int32_t* memory = reinterpret_cast<int32_t*>((reinterpret_cast<uintptr_t>(workspace) + 63) / 64 * 64);
  for (int t = 0; t < kBatch; ++t) {
    search.history[t] = memory;
    memory += static_cast<size_t>(kept(halves)) * search.prefixes + 64;
    for (int i = 0; i < 2; ++i, memory += padded) search.spare[t][i] = memory;
  }
  for (int done = 0; done < tiles;) {
    const int left = tiles - done;
    if (left >= kBatch) {
      encode_batch_of<kBatch>(targets + done, search, windows + done);
      done += kBatch;
    } else if (left >= 2) {
      encode_batch_of<2>(targets + done, search, windows + done);
      done += 2;
    } else {
      encode_batch_of<1>(targets + done, search, windows + done);
      done += 1;
    }
  }
  return 0;
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
