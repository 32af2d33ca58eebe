// The encoder: the best path through the trellis for every tile of 256 targets (Viterbi), one tile per block.
//
// A window is w = (h << (L-K)) | p: h the K bits that the next step drops, p the prefix that it keeps. The window before
// ends in w >> K. So best[p] = min over h of best'[w >> K] + (level(w) - x)^2, and the predecessors of all prefixes that
// share p >> K are the same 2^K: a thread takes up to eight neighbouring prefixes and reads each predecessor once.
// Levels are computed, not looked up: hash, byte sum, subtract, square-and-add, minimum are five instructions.
//
// Costs are relative to that of prefix 0, one step before (which keeps them small), and stored as halves for every step;
// the trace-back recomputes each minimum from them instead of storing 2^(L-K) decisions of K bits.
// Tail-biting: the search enters the tile through its own last weights (CIUIC_LEAD_IN of them), and see close().
#include "parameters.h"
#include "trellis_decode.h"

#ifndef CIUIC_L
#define CIUIC_L 16
#endif

#define WEIGHTS 256
#define ENCODE_THREADS 512
#define REPAIR 64  // weights searched again where no path closes
#define UNREACHABLE 60000.0f  // below the largest half; reachable costs stay below 45000 (see clamp_target)
#define RENORMALISE_BELOW 50000.0f

// (8192 + byte sum / 16) as a float: the four bytes times 64 are added to the mantissa, whose last place is 2^-10.
CIUIC_DEVICE float level_plus_8192(u32 window) { return bits_to_float(dot4(ciuic_hash(window), 0x40404040u, 0x46000000u)); }

// The same number for a target, so that their difference is (level - target) / 16. Beyond +-600 every path would take the
// outermost level, so the target may as well stop there; that bounds a step's cost by 4820 and keeps seven steps finite.
CIUIC_DEVICE float clamp_target(float target) {
  const float level = fminf(fmaxf(target * CIUIC_SIGMA, -600.0f), 600.0f);
  return 8192.0f + ((float)CIUIC_LEVEL_CENTRE + level) / 16.0f;
}

template <int K>
struct Trellis {
  static const u32 SHIFT = CIUIC_L - K;
  static const u32 PREFIXES = 1u << SHIFT;
  static const u32 HIGHS = 1u << K;
  static const u32 THREADS = PREFIXES < ENCODE_THREADS ? PREFIXES : ENCODE_THREADS;  // that work on a step
  static const u32 PER_THREAD = PREFIXES / THREADS;
  static const u32 NEIGHBOURS = PER_THREAD < HIGHS ? PER_THREAD : HIGHS;
  static const u32 SETS = PER_THREAD / NEIGHBOURS;
};

// Neighbouring halves in one store; `to` is aligned to all of them.
CIUIC_DEVICE u32 pair_of_halves(u16 low, u16 high) { return low | ((u32)high << 16); }
CIUIC_DEVICE void store_halves(u16* to, const u16 (&v)[1]) { to[0] = v[0]; }
CIUIC_DEVICE void store_halves(u16* to, const u16 (&v)[2]) { *(u32*)to = pair_of_halves(v[0], v[1]); }
CIUIC_DEVICE void store_halves(u16* to, const u16 (&v)[4]) {
  *(uint2*)to = make_uint2(pair_of_halves(v[0], v[1]), pair_of_halves(v[2], v[3]));
}
CIUIC_DEVICE void store_halves(u16* to, const u16 (&v)[8]) {
  *(uint4*)to = make_uint4(pair_of_halves(v[0], v[1]), pair_of_halves(v[2], v[3]), pair_of_halves(v[4], v[5]),
                           pair_of_halves(v[6], v[7]));
}

// One step forward, from and to `best` in shared memory; the new costs also go to `history`.
template <int K>
CIUIC_DEVICE void forward_step(float* best, u16* history, float target) {
  typedef Trellis<K> T;
  // Without this the hashes of all the thread's windows, which no step changes, would be kept in registers and spill.
  const u32 thread = opaque(thread_index());
  float result[T::PER_THREAD];
  if (thread < T::THREADS) {
    const float reference = best[0] < RENORMALISE_BELOW ? best[0] : 0.0f;
#pragma unroll
    for (u32 set = 0; set < T::SETS; ++set) {
      const u32 first = (thread + T::THREADS * set) * T::NEIGHBOURS;
      float least[T::NEIGHBOURS];
#pragma unroll
      for (u32 i = 0; i < T::NEIGHBOURS; ++i) least[i] = 4.0f * UNREACHABLE;
#pragma unroll 16
      for (u32 h = 0; h < T::HIGHS; ++h) {
        const u32 window = (h << T::SHIFT) + first;
        const float before = best[window >> K];
#pragma unroll
        for (u32 i = 0; i < T::NEIGHBOURS; ++i) {
          const float error = level_plus_8192(window + i) - target;
          least[i] = fminf(least[i], fmaf(error, error, before));
        }
      }
#pragma unroll
      for (u32 i = 0; i < T::NEIGHBOURS; ++i) result[set * T::NEIGHBOURS + i] = least[i] - reference;
    }
  }
  block_sync();
  if (thread < T::THREADS) {
#pragma unroll
    for (u32 set = 0; set < T::SETS; ++set) {
      const u32 first = (thread + T::THREADS * set) * T::NEIGHBOURS;
      u16 halves[T::NEIGHBOURS];
#pragma unroll
      for (u32 i = 0; i < T::NEIGHBOURS; ++i) {
        const float cost = fminf(result[set * T::NEIGHBOURS + i], UNREACHABLE);
        best[first + i] = cost;
        halves[i] = float_to_half(cost);
      }
      store_halves(history + first, halves);
    }
  }
  block_sync();
}

// (cost, index) of the smaller cost among the lanes; ties go to the smaller index, so the path is one and the same always.
CIUIC_DEVICE void warp_least(float& cost, s32& index) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
    const float other_cost = shuffle_xor(cost, mask);
    const s32 other_index = shuffle_xor(index, mask);
    if (other_cost < cost || (other_cost == cost && other_index < index)) {
      cost = other_cost;
      index = other_index;
    }
  }
}

// The window that the best path to `prefix` ends in; `history` holds the costs one step before. For one whole warp.
template <int K>
CIUIC_DEVICE u32 best_window(const u16* history, float target, u32 prefix, u32 lane) {
  typedef Trellis<K> T;
  float cost = 8.0f * UNREACHABLE;
  s32 high = 0;
  for (u32 h = lane; h < T::HIGHS; h += 32) {
    const u32 window = (h << T::SHIFT) + prefix;
    const float error = level_plus_8192(window) - target;
    const float here = fmaf(error, error, half_to_float(history[window >> K]));
    if (here < cost) {
      cost = here;
      high = (s32)h;
    }
  }
  warp_least(cost, high);
  return ((u32)high << T::SHIFT) + prefix;
}

// What one block knows about its tile.
struct Tile {
  float target[WEIGHTS];
  u16 window[WEIGHTS];
  u16 trail[WEIGHTS + 1];  // prefixes of the last path traced: trail[s] before weight s
  u32 start;
  u32 closed;
};

// The cheapest path into `prefix` before weight `steps`, back to the beginning; returns the prefix that it starts from.
// Where it meets the path traced before, the two are one from there on. For one whole warp.
template <int K>
CIUIC_DEVICE u32 trace(Tile& tile, const u16* history, u32 steps, u32 prefix, bool have_trail, u32 lane) {
  for (u32 s = steps; s > 0; --s) {
    const bool met = have_trail && tile.trail[s] == prefix;
    warp_sync();  // all lanes have read before any of them writes, here or in the next call
    if (met) return tile.trail[0];
    const u32 window = best_window<K>(history + (u64)(s - 1) * Trellis<K>::PREFIXES, tile.target[s - 1], prefix, lane);
    if (lane == 0) {
      tile.trail[s] = (u16)prefix;
      tile.window[s - 1] = (u16)window;
    }
    prefix = window >> K;
  }
  if (lane == 0) tile.trail[0] = (u16)prefix;
  warp_sync();
  return prefix;
}

// A path is closed when it ends in the prefix that it starts from. Nearly all paths share their start, so the path that
// ends in the start of the best one is mostly closed, or the path that ends in that one's start. For one whole warp.
template <int K>
CIUIC_DEVICE void close(Tile& tile, const float* best, const u16* history, u32 lane) {
  float cost = 8.0f * UNREACHABLE;
  s32 end = 0;
  for (u32 i = lane; i < Trellis<K>::PREFIXES; i += 32)
    if (best[i] < cost) {
      cost = best[i];
      end = (s32)i;
    }
  warp_least(cost, end);
  const u32 first = trace<K>(tile, history, WEIGHTS, (u32)end, false, lane);
  u32 start = first;
  bool closed = false;
  for (int attempt = 0; attempt < 3 && !closed; ++attempt) {
    const u32 found = trace<K>(tile, history, WEIGHTS, start, true, lane);
    closed = found == start;
    start = found;
  }
  if (!closed) trace<K>(tile, history, WEIGHTS, first, true, lane);
  if (lane == 0) {
    tile.start = closed ? start : first;
    tile.closed = closed;
  }
}

template <int K>
CIUIC_DEVICE void encode(const CiuicEncode& p) {
  typedef Trellis<K> T;
  CIUIC_DYNAMIC_SHARED(memory);
  float* best = (float*)memory;  // [PREFIXES]
  CIUIC_SHARED Tile tile;
  const u32 thread = thread_index(), lane = thread % 32, threads = thread_count();
  // history[s] holds the costs before weight s; each block has its own.
  u16* history = p.scratch + (u64)block_x() * (WEIGHTS + 1) * T::PREFIXES;

  for (u32 index = block_x(); index < p.tiles; index += grid_x()) {
    for (u32 i = thread; i < WEIGHTS; i += threads) tile.target[i] = clamp_target(p.targets[(u64)index * WEIGHTS + i]);
    for (u32 i = thread; i < T::PREFIXES; i += threads) best[i] = 0.0f;
    block_sync();
    for (u32 s = WEIGHTS - CIUIC_LEAD_IN(CIUIC_L); s < WEIGHTS; ++s) forward_step<K>(best, history, tile.target[s]);
    for (u32 s = 0; s < WEIGHTS; ++s) forward_step<K>(best, history + (u64)(s + 1) * T::PREFIXES, tile.target[s]);
    if (thread < 32) close<K>(tile, best, history, lane);
    block_sync();

    if (!tile.closed) {
      // The first weights again, from the right start to where the path is after them.
      for (u32 i = thread; i < T::PREFIXES; i += threads) {
        const float cost = i == tile.start ? 0.0f : UNREACHABLE;
        best[i] = cost;
        history[i] = float_to_half(cost);
      }
      block_sync();
      for (u32 s = 0; s < REPAIR; ++s) forward_step<K>(best, history + (u64)(s + 1) * T::PREFIXES, tile.target[s]);
      if (thread < 32) trace<K>(tile, history, REPAIR, tile.trail[REPAIR], false, lane);
      block_sync();
    }

    for (u32 i = thread; i < WEIGHTS; i += threads)
      p.decoded[(u64)index * WEIGHTS + i] = (float)ciuic_level(tile.window[i]) / CIUIC_SIGMA;
    for (u32 i = thread; i < CIUIC_TILE * K; i += threads) {  // 16-bit words: unit i / 16, row i % 16
      const u32 row = i % CIUIC_TILE, unit = i / CIUIC_TILE;
      u32 word = 0;
      for (u32 bit = 16 * unit; bit < 16 * unit + 16; ++bit)
        word = word << 1 | (tile.window[row * CIUIC_TILE + bit / K] >> (K - 1 - bit % K) & 1u);
      ((u16*)p.codes)[(u64)index * (CIUIC_UNIT_BYTES / 2) * K + i] = (u16)word;
    }
    block_sync();
  }
}

// Two blocks fit a multiprocessor, so that one computes while the other traces back; at 1 to 3 bits a thread's minima
// need the registers of both.
#define ENCODE(K, blocks) \
  CIUIC_KERNEL void CIUIC_BOUNDS(ENCODE_THREADS, blocks) encode_k##K(CIUIC_PARAM(CiuicEncode) p) { encode<K>(p); }

ENCODE(1, 1)
ENCODE(2, 1)
ENCODE(3, 1)
ENCODE(4, 2)
ENCODE(5, 2)
ENCODE(6, 2)
ENCODE(7, 2)
ENCODE(8, 2)
