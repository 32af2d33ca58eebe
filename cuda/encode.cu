// The encoder: a tail-biting Viterbi search for every tile of 256 targets. A block of up to 512 threads encodes one tile
// at a time: tiles block, block + grid x, ...
//
// A weight has `in` new bits and the next weight `out`. Both are K, or K - 1/2 and K + 1/2 alternate if K is not whole.
// A window is w = (h << (L - out)) | p: the next step shifts out the bits h and keeps the prefix p. A path reaches w from
// the prefix w >> in, its predecessor. So
//   best[p] = min over h of best'[w >> in] + (level(w) - x)^2.
// Prefixes that share p >> in have the same 2^out predecessors. A thread takes up to eight neighbouring ones and reads
// each predecessor once. Levels are computed, not looked up: hash, byte sum, subtraction, multiply-add and minimum are
// five instructions.
//
// Costs are relative to the cost of prefix 0 one step before, which keeps them small. The costs of every step are saved as
// fp16, but no decisions: the traceback recomputes each minimum from the costs. So its path is the best one up to the
// rounding to fp16. Tail-biting: before its first weight the search runs through the tile's last CIUIC_LEAD_IN weights;
// see close_path().
//
// Dynamic shared memory: 2^(L - floor(H / 2)) floats.
#include "one_kernel.h"
#include "parameters.h"
#include "trellis_decode.h"

#ifndef CIUIC_L
#define CIUIC_L 16
#endif

#define WEIGHTS 256
#define ENCODE_THREADS 512
#define REPAIR 64  // weights that are searched again if no closed path is found; no measurement is on record
#define UNREACHABLE 60000.0f  // below the largest fp16 number, above costs that matter (see clamp_target)
#define RENORMALISE_BELOW 50000.0f  // costs of prefix 0 up to which it serves as the reference

// 8192 + byte sum / 16 as a float: the four bytes times 64 are added to the mantissa of 8192 (0x46000000), whose last
// place is 2^-10.
CIUIC_DEVICE float level_plus_8192(u32 window) { return bits_to_float(dot4(ciuic_hash(window), 0x40404040u, 0x46000000u)); }

// The same number for a target, so that their difference is (level - target) / 16. Targets are clamped to +-600, beyond
// which every path takes the outermost level. So a step costs at most 4820. From any prefix, every other one can be
// reached within seven steps at 2 bits and ten at 1.5 bits, at a cost below 49000. At 1 bit it takes fifteen steps; if all
// targets are outliers, the costs of a few prefixes then exceed UNREACHABLE and are cut to it. These prefixes are the
// worst ones, and no path of least cost goes through them.
CIUIC_DEVICE float clamp_target(float target) {
  const float level = fminf(fmaxf(target * CIUIC_SIGMA, -600.0f), 600.0f);
  return 8192.0f + ((float)CIUIC_LEVEL_CENTRE + level) / 16.0f;
}

// New bits of a weight. If K is not whole, even weights have K - 1/2 bits, as the first weight of a row.
template <int H>
CIUIC_DEVICE u32 bits_of(u32 weight) {
  return H / 2 + H % 2 * (weight & 1);
}

// Prefixes before an even weight; odd weights have as many or half as many.
template <int H>
CIUIC_DEVICE constexpr u32 most_prefixes() {
  return 1u << (CIUIC_L - H / 2);
}

// How a step's prefixes are distributed over the threads.
template <int In, int Out>
struct Trellis {
  static const u32 SHIFT = CIUIC_L - Out;
  static const u32 PREFIXES = 1u << SHIFT;  // after the step
  static const u32 HIGHS = 1u << Out;       // values of h
  static const u32 SIBLINGS = 1u << (In < 3 ? In : 3);  // prefixes with the same predecessors, at most eight
  static const u32 THREADS = PREFIXES < ENCODE_THREADS ? PREFIXES : ENCODE_THREADS;  // threads that work on a step
  static const u32 PER_THREAD = PREFIXES / THREADS;
  static const u32 NEIGHBOURS = PER_THREAD < SIBLINGS ? PER_THREAD : SIBLINGS;  // prefixes of a set, which are neighbours
  static const u32 SETS = PER_THREAD / NEIGHBOURS;
};

// Stores neighbouring fp16 numbers in one instruction; `to` is aligned to their total size.
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

// One step forward, from and to `best` in shared memory; the new costs also go to `history`. All threads of the block
// call it. The first barrier separates the reads of the old costs from the writes of the new ones, the second the
// writes from the next reads.
template <int In, int Out>
CIUIC_DEVICE void forward_step(float* best, u16* history, float target) {
  typedef Trellis<In, Out> T;
  // Equal to thread_index(), because targets are positive, but the compiler does not know that. If it did, it would keep
  // the hashes of the thread's windows, which are the same in every step, in registers and spill them.
  const u32 thread = thread_index() | float_to_bits(target) >> 31;
  // True at compile time if all threads work: with a branch, `result` would stay live from step to step and spill.
  const bool is_active = T::THREADS == ENCODE_THREADS || thread < T::THREADS;
  float result[T::PER_THREAD];
  if (is_active) {
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
        const float before = best[window >> In];
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
  if (is_active) {
    u16* const to = history + thread * T::NEIGHBOURS;  // one address for all sets; otherwise registers spill at 1 bit
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
      store_halves(to + T::THREADS * set * T::NEIGHBOURS, halves);
    }
  }
  block_sync();
}

// The steps of weights begin .. end - 1; begin and end are even. The costs after weight s go to history + (s + 1) * stride.
template <int H>
CIUIC_DEVICE void forward(float* best, u16* history, u32 stride, const float* target, u32 begin, u32 end) {
  const int even = H / 2, odd = H - even;
  if (H % 2) {
    for (u32 s = begin; s < end; s += 2) {
      forward_step<even, odd>(best, history + (u64)(s + 1) * stride, target[s]);
      forward_step<odd, even>(best, history + (u64)(s + 2) * stride, target[s + 1]);
    }
  } else {
    for (u32 s = begin; s < end; ++s) forward_step<even, even>(best, history + (u64)(s + 1) * stride, target[s]);
  }
}

// The smallest cost among the lanes and its index. Ties go to the smaller index, so that the path is deterministic.
CIUIC_DEVICE void warp_minimum(float& cost, s32& index) {
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

// The last window of the best path to `prefix` after a weight of `in` bits; the next weight has `out` bits and
// `history` holds the costs before the weight. All lanes of one warp call it; each tries every 32nd window.
CIUIC_DEVICE u32 best_window(const u16* history, float target, u32 prefix, u32 in, u32 out, u32 lane) {
  const u32 shift = CIUIC_L - out;
  float cost = 8.0f * UNREACHABLE;
  s32 high = 0;
  for (u32 h = lane; h < 1u << out; h += 32) {
    const u32 window = (h << shift) + prefix;
    const float error = level_plus_8192(window) - target;
    const float window_cost = fmaf(error, error, half_to_float(history[window >> in]));
    if (window_cost < cost) {
      cost = window_cost;
      high = (s32)h;
    }
  }
  warp_minimum(cost, high);
  return ((u32)high << shift) + prefix;
}

// The tile that a block encodes, in shared memory.
struct Tile {
  float target[WEIGHTS];
  u16 window[WEIGHTS];
  u16 trail[WEIGHTS + 1];  // trail[s]: prefix before weight s of the last path traced
  u32 start;   // the prefix that the path starts from
  u32 closed;  // whether it ends there too
};

// Traces the cheapest path to `prefix` before weight `steps` back to its beginning and returns the prefix that it
// starts from. With have_trail the trace ends where it meets the path traced before, because before that point the two
// are the same. All lanes of one warp call it.
template <int H>
CIUIC_DEVICE u32 trace(Tile& tile, const u16* history, u32 steps, u32 prefix, bool have_trail, u32 lane) {
  for (u32 s = steps; s > 0; --s) {
    const bool meets = have_trail && tile.trail[s] == prefix;
    warp_sync();  // all lanes have read the trail before lane 0 writes to it, here or in the next call
    if (meets) return tile.trail[0];
    const u32 in = bits_of<H>(s - 1), out = bits_of<H>(s);
    const u16* before = history + (u64)(s - 1) * most_prefixes<H>();
    const u32 window = best_window(before, tile.target[s - 1], prefix, in, out, lane);
    if (lane == 0) {
      tile.trail[s] = (u16)prefix;
      tile.window[s - 1] = (u16)window;
    }
    prefix = window >> in;
  }
  if (lane == 0) tile.trail[0] = (u16)prefix;
  warp_sync();
  return prefix;
}

// Finds a closed path, one that ends in the prefix that it starts from. Nearly all paths start from the same prefix. So
// the path that ends in the start of the best path is usually closed. If it is not, the next attempt is the path that
// ends in its start. After three failures, tile.closed is 0 and the path that ends in the best path's start is traced.
// All lanes of one warp call it.
template <int H>
CIUIC_DEVICE void close_path(Tile& tile, const float* best, const u16* history, u32 lane) {
  float cost = 8.0f * UNREACHABLE;
  s32 end = 0;
  for (u32 i = lane; i < most_prefixes<H>(); i += 32)
    if (best[i] < cost) {
      cost = best[i];
      end = (s32)i;
    }
  warp_minimum(cost, end);
  const u32 first_start = trace<H>(tile, history, WEIGHTS, (u32)end, false, lane);
  u32 start = first_start;
  bool closed = false;
  for (int attempt = 0; attempt < 3 && !closed; ++attempt) {
    const u32 new_start = trace<H>(tile, history, WEIGHTS, start, true, lane);
    closed = new_start == start;
    start = new_start;
  }
  if (!closed) trace<H>(tile, history, WEIGHTS, first_start, true, lane);
  if (lane == 0) {
    tile.start = closed ? start : first_start;
    tile.closed = closed;
  }
}

// Bits first .. first + count - 1 of a row of the tile, for the layout in trellis_decode.h.
template <int H>
CIUIC_DEVICE u32 bits_of_row(const Tile& tile, u32 row, u32 first, u32 count) {
  u32 bits = 0;
  for (u32 bit = first; bit < first + count; ++bit) {
    const u32 column = (2 * bit + 1) / H;
    const u32 after = (u32)ciuic_end_of_column((int)column, H) - 1 - bit;  // later bits of this weight
    bits = bits << 1 | (tile.window[row * CIUIC_TILE + column] >> after & 1u);
  }
  return bits;
}

template <int H>
CIUIC_DEVICE void encode(const CiuicEncode& p) {
  const u32 PREFIXES = most_prefixes<H>();
  CIUIC_DYNAMIC_SHARED(memory);
  float* best = (float*)memory;  // [PREFIXES]
  CIUIC_SHARED Tile tile;
  const u32 thread = thread_index(), lane = thread % 32, threads = thread_count();
  // history[s] holds the costs before weight s; it is half full if K is not whole and s is odd. Every block has its own
  // history.
  u16* history = p.scratch + (u64)block_x() * (WEIGHTS + 1) * PREFIXES;

  for (u32 index = block_x(); index < p.tiles; index += grid_x()) {
    for (u32 i = thread; i < WEIGHTS; i += threads) tile.target[i] = clamp_target(p.targets[(u64)index * WEIGHTS + i]);
    for (u32 i = thread; i < PREFIXES; i += threads) best[i] = 0.0f;
    block_sync();
    forward<H>(best, history, 0, tile.target, WEIGHTS - CIUIC_LEAD_IN(CIUIC_L), WEIGHTS);
    forward<H>(best, history, PREFIXES, tile.target, 0, WEIGHTS);
    if (thread < 32) close_path<H>(tile, best, history, lane);
    block_sync();

    if (!tile.closed) {
      // Search the first weights again, from the required start to the path's prefix after them.
      for (u32 i = thread; i < PREFIXES; i += threads) {
        const float cost = i == tile.start ? 0.0f : UNREACHABLE;
        best[i] = cost;
        history[i] = float_to_half(cost);
      }
      block_sync();
      forward<H>(best, history, PREFIXES, tile.target, 0, REPAIR);
      if (thread < 32) trace<H>(tile, history, REPAIR, tile.trail[REPAIR], false, lane);
      block_sync();
    }

    for (u32 i = thread; i < WEIGHTS; i += threads)
      p.decoded[(u64)index * WEIGHTS + i] = (float)ciuic_level(tile.window[i]) / CIUIC_SIGMA;
    u8* codes = p.codes + (u64)index * CIUIC_TILE_BYTES(H);
    for (u32 i = thread; i < CIUIC_TILE * (H / 2); i += threads)  // 16-bit words: unit i / 16, row i % 16
      ((u16*)codes)[i] = (u16)bits_of_row<H>(tile, i % CIUIC_TILE, 16 * (i / CIUIC_TILE), 16);
    if (H % 2 && thread < CIUIC_TILE)
      codes[CIUIC_UNIT_BYTES * (H / 2) + thread] = (u8)bits_of_row<H>(tile, thread, 8 * H - 8, 8);
    block_sync();
  }
}

// Two blocks per multiprocessor let one compute while the other traces back. At 1 to 3.5 bits a thread's minima need
// the registers of both, so only one block fits.
#define ENCODE(H, blocks) \
  CIUIC_IF_CHOSEN(encode_h##H)( \
    CIUIC_KERNEL void CIUIC_BOUNDS(ENCODE_THREADS, blocks) encode_h##H(CIUIC_PARAM(CiuicEncode) p) { encode<H>(p); })

ENCODE(2, 1)
ENCODE(3, 1)
ENCODE(4, 1)
ENCODE(5, 1)
ENCODE(6, 1)
ENCODE(7, 1)
ENCODE(8, 2)
ENCODE(9, 2)
ENCODE(10, 2)
ENCODE(11, 2)
ENCODE(12, 2)
ENCODE(14, 2)
ENCODE(16, 2)
