// The encoder: a tail-biting Viterbi search over the bit-shift trellis.
//
// Step t chooses the window s_t, the L bits from which weight t is decoded. It shifts in that weight's new bits: K of
// them, or alternately K - 1/2 and K + 1/2. Later steps depend only on the low bits p of a window, the prefix of the
// next window. So the forward pass computes best_t[p], the least cost of all paths to p (forward_kernel.h). It saves
// best_t every `stride` steps and stores no decisions. The traceback recomputes the windows between two saved steps. It
// drops partial paths that a lower bound of the costs before them rules out, because reading a saved cost is a cache miss
// (docs/experiments/runtime/cpu-encoder.md).
//
// All costs are integers (codebook.h), so every instruction set and batch size gives the same path.
#include <cmath>
#include <cstring>

#include "codebook.h"
#include "forward_kernel.h"
#include "kernels_of_isa.h"

namespace ciuic {
namespace CIUIC_ISA {

// Cost of a prefix that no path has reached yet. Every prefix can be reached within a few steps; until then no path costs
// as much. Sums with it do not overflow an int32.
static const int32_t kUnreachable = 1 << 30;

// Targets, in levels, are clipped to this magnitude. It bounds the costs and exceeds the largest level, 510 (chosen, not
// tuned).
static const float kLargestTarget = 576.0f;

// Tiles that are encoded together.
#if defined(__AVX512VNNI__)
static const int kBatch = 3;  // 12 minima, 3 terms and 3 bases fill the registers
#else
static const int kBatch = 2;
#endif
static_assert(kBatch <= kMaxEncodeBatch, "callers size their arrays by kMaxEncodeBatch");

// Steps from one saved step to the next. A longer stride keeps the saved costs in the cache but makes the traceback slower.
// With few states, of which the traceback takes a third of the time, it is one or two steps
// (docs/experiments/runtime/cpu-encoder.md). From 14 state bits on it is even if K is not whole, so that all saved steps
// have the same number of prefixes.
static int save_stride(int half_bits, int L) {
  if (L <= 13 && half_bits >= 4) return half_bits >= 6 ? 1 : 2;
  return half_bits == 2 ? 8 : half_bits <= 4 ? 4 : half_bits <= 8 || half_bits % 2 == 1 ? 2 : 1;
}

struct Search {
  int half_bits, L, stride;
  int prefixes;             // the most that a step has; a saved step takes so much room
  bool squared;
  const int32_t* table[2];  // cost tables of even and odd weights
  int32_t terms[kBatch][kTileWeights];  // terms of the targets (codebook.h)
  int32_t* saved[kBatch];               // best_t for t + 1 = 0, stride, 2 stride .. 256
  int32_t* scratch[kBatch][2];          // best_t of the other steps, alternating
  int32_t least[kBatch];                // lower bound of the present best_t, over all prefixes
  int32_t least_saved[kBatch][kTileWeights + 1];      // that of each saved step
  int32_t rebased_by[kBatch][kTileWeights / 16 + 1];  // what rebase() subtracted after 16, 32 .. steps
};

static int saved_count(int half_bits, int L) { return kTileWeights / save_stride(half_bits, L) + 1; }

size_t encode_workspace_bytes(int half_bits, int L) {
  return 64 + sizeof(int32_t) * kBatch * (saved_count(half_bits, L) + 2) * ((size_t{1} << (L - half_bits / 2)) + 64);
}

int encode_batch() { return kBatch; }

// Bits of a weight, and of the next one. Rows have an even number of weights, so the parity of the index decides.
static int bits_of(int weight, int half_bits) { return ciuic_bits_of_column(weight & 1, half_bits); }
static int bits_after(int weight, int half_bits) { return bits_of(weight + 1, half_bits); }

// The term of target x (codebook.h).
static int32_t target_term(float x, bool squared) {
  // NaN: the weight is padding and may take any level. Term 0 makes all costs 0 up to 5 bits; from 5.5 bits on it is a
  // target of 0.
  if (x != x) return 0;
  const float clipped = x > kLargestTarget ? kLargestTarget : (x < -kLargestTarget ? -kLargestTarget : x);
  if (squared) return pair_of(static_cast<int>(std::rint(16.0f * clipped)), 0);
  return pair_of(16, static_cast<int>(std::rint(-8.0f * clipped)));
}

// Lower bound of a window's cost for this term. With e = term.high, a cost is at least 4 level^2 + e level - 12 and a
// constant, because codebook_square rounds a quarter of level^2 down. Over all levels, that is least at level = -e / 8.
static int32_t least_cost(int32_t term, bool squared) {
  if (squared || term == 0) return 0;
  const int32_t e = term >> 16;
  return 16 * codebook_square(0) - e * e / 16 - 16;
}

// Subtracts the cost of prefix 0 from all costs, because only their differences matter. Done every 16 steps, it prevents
// overflow however far the targets lie beyond the code's range. Returns what was subtracted; `least` receives the lowest
// of the remaining costs.
static int32_t rebase(int32_t* costs, int prefixes, int32_t& least) {
  const int32_t base = costs[0];
  int32_t lowest = INT32_MAX;
  for (int p = 0; p < prefixes; ++p) {
    costs[p] -= base;
    lowest = costs[p] < lowest ? costs[p] : lowest;
  }
  least = lowest;
  return base;
}

// Runs steps first .. first + count - 1 (modulo 256) for the given tiles of the batch, from the costs in `from`, of which
// search.least is a lower bound. With `save`, saves the costs of every stride-th step; otherwise only the final costs, in
// slot 0.
template <int Tiles>
static void forward(Search& search, const int* tiles, int first, int count, const int32_t* const* from, bool save) {
  const int32_t* before[Tiles];
  int32_t* after[Tiles];
  int32_t term[Tiles];
  for (int t = 0; t < Tiles; ++t) {
    before[t] = from[t];
    search.least_saved[tiles[t]][0] = search.least[tiles[t]];
  }
  for (int i = 0; i < count; ++i) {
    const int weight = (first + i) & (kTileWeights - 1);
    const int in = bits_of(weight, search.half_bits), out = bits_after(weight, search.half_bits);
    const bool is_saved = save ? (i + 1) % search.stride == 0 : i + 1 == count;
    const size_t slot = save ? static_cast<size_t>((i + 1) / search.stride) : 0;
    for (int t = 0; t < Tiles; ++t) {
      term[t] = search.terms[tiles[t]][weight];
      after[t] = is_saved ? search.saved[tiles[t]] + slot * search.prefixes : search.scratch[tiles[t]][i & 1];
    }
    forward_step<Tiles>(search.table[weight & 1], before, after, term, in, out, search.squared, search.L);
    for (int t = 0; t < Tiles; ++t) {
      int32_t& least = search.least[tiles[t]];
      least += least_cost(term[t], search.squared);
      if ((i & 15) == 15)
        search.rebased_by[tiles[t]][(i + 1) / 16] = rebase(after[t], 1 << (search.L - out), least);
      if (is_saved) search.least_saved[tiles[t]][slot] = least;
      before[t] = after[t];
    }
  }
}

// Most paths backwards over one stride: 2^11 at 5.5 bits, whose stride is 2.
static const int kMaxCandidates = 2048;
static const int kMaxBranches = 256;  // of one weight, at 8 bits

// Partial paths of a traceback: the cost of each so far, the prefix that it has reached, and the bits that lead there, the
// newest on top. There is room for one path more, because a path is written before it is known whether it counts.
struct Candidates {
  int32_t cost[kMaxCandidates + 1], prefix[kMaxCandidates + 1], choice[kMaxCandidates + 1];
};

// Extends every candidate by one weight backwards in all 2^out ways, of which those with costs of at most `most` are kept.
// Returns their number. bits: of the choices so far.
template <bool Squared>
static inline int expand(const Candidates& from, int count, int32_t term, int in, int out, int L, int bits, int32_t most,
                         Candidates& to) {
  const int32_t first = static_cast<int16_t>(term), second = term >> 16;
  int kept = 0;
  for (int i = 0; i < count; ++i) {
    const unsigned prefix = static_cast<unsigned>(from.prefix[i]);
    int32_t cost[kMaxBranches];
    for (int high = 0; high < 1 << out; ++high) {
      const int32_t level = ciuic_level(static_cast<unsigned>(high) << (L - out) | prefix);
      const int32_t difference = 16 * level - first;
      cost[high] =
          from.cost[i] + (Squared ? difference * difference : codebook_square(level) * first + level * second);
    }
    for (int high = 0; high < 1 << out; ++high) {
      to.cost[kept] = cost[high];
      to.prefix[kept] = static_cast<int32_t>((static_cast<unsigned>(high) << (L - out) | prefix) >> in);
      to.choice[kept] = high << bits | from.choice[i];
      kept += cost[high] <= most;
    }
  }
  return kept;
}

// Most bits of a stride whose paths backwards are all compared: for so few paths, looking for those that a bound rules out
// takes longer than reading the saved costs of all while these are in the cache.
static const int kMostBits = 6;

// Strides between the one that is traced and the one whose saved costs are brought from the second-level cache, and the most
// prefixes for which that pays (chosen).
static const int kPrefetchedStrides = 4, kPrefetchedPrefixes = 1024;

// The choices of the cheapest path backwards from `prefix` over the weights first .. end - 1, `bits` of them in all, to the
// costs in `before`; of equally cheap paths, those of the least number.
template <bool Squared>
static inline int cheapest(const Search& search, const int32_t* terms, int first, int end, int prefix, int bits,
                           const int32_t* before) {
  Numbers lane;
  for (int j = 0; j < kLanes; ++j) lane[j] = j;
  Numbers least = Numbers{} + INT32_MAX, best = least;
  for (int begin = 0; begin < 1 << bits; begin += kLanes) {
    const Numbers choice = lane + begin;
    Numbers rest = choice, reached = Numbers{} + prefix;
    Lanes cost = broadcast(0);
    for (int weight = end - 1; weight >= first; --weight) {
      const int in = bits_of(weight, search.half_bits), out = bits_after(weight, search.half_bits);
      const Numbers window = (rest & ((1 << out) - 1)) << (search.L - out) | reached;
      const Numbers level = (Numbers)byte_sums((Lanes)((Bits)window * CIUIC_MULTIPLIER)) - CIUIC_LEVEL_CENTRE;
      const Lanes term = broadcast(terms[weight]);
      if (Squared) {
        cost = add_squares(cost, (Lanes)((Bits)level << 4 & 0xFFFF), term);
      } else {
        const Lanes low = (Lanes)(level & 0xFFFF);
        const Numbers square = (Numbers)add_product(broadcast(2 - CIUIC_LEVEL_CENTRE * CIUIC_LEVEL_CENTRE / 2), low, low);
        cost = add_product(cost, (Lanes)((Bits)(square >> 2 & 0xFFFF) | (Bits)level << 16), term);
      }
      reached = window >> in;
      rest >>= out;
    }
    const Numbers total = (Numbers)cost + (Numbers)gather(before, (Lanes)reached);
    const Numbers is_less = (total < least) & (choice < 1 << bits);
    least = is_less ? total : least;
    best = is_less ? choice : best;
  }
  return lowest((Lanes)(least == lowest((Lanes)least) ? best : Numbers{} + INT32_MAX));
}

// As `cheapest`, but paths that cannot be the cheapest are dropped on the way.
static int cheapest_of_many(const Search& search, int tile, int slot, int prefix) {
  const int L = search.L, stride = search.stride, end = (slot + 1) * stride;
  const int32_t* before = search.saved[tile] + static_cast<size_t>(slot) * search.prefixes;
  // The cost of the whole path. A partial path is dropped if it costs more with the least of what may come before it.
  int32_t most = before[search.prefixes + prefix] - search.least_saved[tile][slot];
  if (end % 16 == 0) most += search.rebased_by[tile][end / 16];
  for (int weight = slot * stride; weight < end; ++weight)
    most -= least_cost(search.terms[tile][weight], search.squared);
  Candidates candidates[2];
  candidates[0].cost[0] = candidates[0].choice[0] = 0;
  candidates[0].prefix[0] = prefix;
  int count = 1, current = 0, bits = 0;
  for (int weight = end - 1; weight >= slot * stride; --weight) {
    const int32_t term = search.terms[tile][weight];
    const int in = bits_of(weight, search.half_bits), out = bits_after(weight, search.half_bits);
    const Candidates& from = candidates[current];
    Candidates& to = candidates[1 - current];
    most += least_cost(term, search.squared);
    count = search.squared ? expand<true>(from, count, term, in, out, L, bits, most, to)
                           : expand<false>(from, count, term, in, out, L, bits, most, to);
    bits += out;
    current = 1 - current;
  }
  const Candidates& reached = candidates[current];
  int32_t least = INT32_MAX;
  int best = INT32_MAX;  // of equally cheap paths, the one with the least choice
  for (int i = 0; i < count; ++i) {
    const int32_t cost = reached.cost[i] + before[reached.prefix[i]];
    if (cost < least || (cost == least && reached.choice[i] < best)) {
      least = cost;
      best = reached.choice[i];
    }
  }
  return best;
}

// Traces the cheapest path back over one stride: from `prefix` after weight (slot + 1) * stride - 1 to the saved step
// `slot`. Writes the windows of these weights and returns the path's prefix at the saved step.
static int trace_stride(const Search& search, int tile, int slot, int prefix, uint16_t* windows) {
  const int L = search.L, stride = search.stride, end = (slot + 1) * stride;
  const int32_t *before = search.saved[tile] + static_cast<size_t>(slot) * search.prefixes, *terms = search.terms[tile];
  if (search.prefixes <= kPrefetchedPrefixes && slot >= kPrefetchedStrides)
    for (int i = 0; i < search.prefixes; i += 16)
      __builtin_prefetch(before - kPrefetchedStrides * search.prefixes + i);
  int bits = 0, best;
  for (int weight = slot * stride; weight < end; ++weight) bits += bits_after(weight, search.half_bits);
  if (bits > kMostBits)
    best = cheapest_of_many(search, tile, slot, prefix);
  else
    best = search.squared ? cheapest<true>(search, terms, slot * stride, end, prefix, bits, before)
                          : cheapest<false>(search, terms, slot * stride, end, prefix, bits, before);
  for (int weight = end - 1; weight >= slot * stride; --weight) {
    const int out = bits_after(weight, search.half_bits);
    const int state = (best & ((1 << out) - 1)) << (L - out) | prefix;
    best >>= out;
    windows[weight] = static_cast<uint16_t>(state);
    prefix = state >> bits_of(weight, search.half_bits);
  }
  return prefix;
}

// Traces the cheapest path to `prefix` at the saved step `slots` back to its beginning and returns the prefix that it
// starts from. `trail` receives the path's prefix at every saved step. With have_trail it holds those of the path traced
// before: where the two paths meet the trace ends, because before that point they are the same.
static int trace(const Search& search, int tile, int slots, int prefix, uint16_t* windows, uint16_t* trail,
                 bool have_trail) {
  for (int slot = slots - 1; slot >= 0; --slot) {
    if (have_trail && trail[slot + 1] == prefix) return trail[0];
    trail[slot + 1] = static_cast<uint16_t>(prefix);
    prefix = trace_stride(search, tile, slot, prefix, windows);
  }
  trail[0] = static_cast<uint16_t>(prefix);
  return prefix;
}

// Weights that are searched again if no closed path is found. No measurement is on record.
static const int kRepair = 64;

// Finds a closed path, one that ends in the prefix that it starts from. Nearly all paths start from the same prefix. So
// the path that ends in the start of the best path is usually closed. If it is not, the next attempt is the path that
// ends in its start. After three failures the path that ends in the best path's start is closed by force: its first
// kRepair weights are searched again, from that prefix to the path's prefix after them.
static void close_path(Search& search, int tile, uint16_t* windows) {
  const int prefixes = search.prefixes, slots = kTileWeights / search.stride;
  const int32_t* last = search.saved[tile] + static_cast<size_t>(slots) * prefixes;
  int end = 0;
  for (int p = 1; p < prefixes; ++p)
    if (last[p] < last[end]) end = p;
  uint16_t trail[kTileWeights + 1];
  const int first_start = trace(search, tile, slots, end, windows, trail, false);
  int start = first_start;
  for (int attempt = 0; attempt < 3; ++attempt) {
    const int new_start = trace(search, tile, slots, start, windows, trail, true);
    if (new_start == start) return;
    start = new_start;
  }
  start = first_start;
  trace(search, tile, slots, start, windows, trail, false);
  int32_t* start_costs = search.saved[tile];
  for (int p = 0; p < prefixes; ++p) start_costs[p] = p == start ? 0 : kUnreachable;
  search.least[tile] = 0;
  const int tiles[1] = {tile};
  const int32_t* from[1] = {start_costs};
  forward<1>(search, tiles, 0, kRepair, from, true);
  trace(search, tile, kRepair / search.stride, trail[kRepair / search.stride], windows, trail, false);
}

template <int Tiles>
static void encode_together(const float* const* targets, Search& search, uint16_t* const* windows) {
  static const int tiles[] = {0, 1, 2, 3};
  const int32_t* start[Tiles];
  for (int t = 0; t < Tiles; ++t) {
    for (int i = 0; i < kTileWeights; ++i) search.terms[t][i] = target_term(targets[t][i], search.squared);
    std::memset(search.scratch[t][1], 0, sizeof(int32_t) * search.prefixes);
    start[t] = search.scratch[t][1];
    search.least[t] = 0;
  }
  const int lead = CIUIC_LEAD_IN(search.L);
  forward<Tiles>(search, tiles, kTileWeights - lead, lead, start, false);
  for (int t = 0; t < Tiles; ++t) start[t] = search.saved[t];
  forward<Tiles>(search, tiles, 0, kTileWeights, start, true);
  for (int t = 0; t < Tiles; ++t) close_path(search, t, windows[t]);
}

int encode_tiles(const float* const* targets, int tiles, int half_bits, int L, void* workspace,
                 uint16_t* const* windows) {
  Search search;
  search.half_bits = half_bits;
  search.L = L;
  search.stride = save_stride(half_bits, L);
  search.prefixes = 1 << (L - half_bits / 2);
  search.squared = uses_squares(half_bits);
  for (int i = 0; i < 2; ++i) {
    search.table[i] = codebook(bits_of(i, half_bits), bits_after(i, half_bits), search.squared, L, kQuads);
    if (search.table[i] == nullptr) return -1;
  }
  // The padding by 64 lets the arrays of different tiles begin at different offsets within a page. Otherwise they would
  // compete for the same cache sets.
  const size_t padded = static_cast<size_t>(search.prefixes) + 64;
  int32_t* memory = reinterpret_cast<int32_t*>((reinterpret_cast<uintptr_t>(workspace) + 63) / 64 * 64);
  for (int t = 0; t < kBatch; ++t) {
    search.saved[t] = memory;
    memory += static_cast<size_t>(saved_count(half_bits, L)) * search.prefixes + 64;
    for (int i = 0; i < 2; ++i, memory += padded) search.scratch[t][i] = memory;
  }
  for (int done = 0; done < tiles;) {
    const int left = tiles - done;
    if (left >= kBatch) {
      encode_together<kBatch>(targets + done, search, windows + done);
      done += kBatch;
    } else if (left >= 2) {
      encode_together<2>(targets + done, search, windows + done);
      done += 2;
    } else {
      encode_together<1>(targets + done, search, windows + done);
      done += 1;
    }
  }
  return 0;
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
