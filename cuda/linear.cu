// y = W x for small batches, decoded inside the product; the same kernel for one matrix, several that share their input,
// and routed experts. Activations come transformed (transform.cu).
//
// A block owns R groups of 16 rows; its warps share the columns, four tiles (a "step") at a time. Codes stream through a
// ring of shared memory, one ring per warp, so that no block-wide barrier stands in the loop. The multiplication is the
// tensor cores': the four bytes of a weight's hash are four k of an integer fragment whose activations are the same byte
// four times, so hashing, summing the bytes and multiplying need no instruction per weight beyond the hash itself, and
// eight columns cost what one costs. Four of them are activations rounded to int8, four are the residuals.
#include "parameters.h"
#include "decode_lane.h"

#define STAGES 4
#define STEP_TILES 4
#define RESIDUAL_STEP (1.0f / 254.0f)
#define NOTHING 0xFFFFFFFFu  // no offset: every one is a multiple of 16

// Integer activations: NT fragments of 8 columns, that is 4 NT pairs, each with its residual.
template <int NT>
struct ByteFeed {
  static const int PAIRS = 4 * NT;
  typedef s32 Sum;
  static const int TILES = NT;
  u32 x[NT][16];  // one byte of each of the 16 columns, four times

  // Where column 0 of this lane's n is: activation row `row`, rounded values for n < 4, residuals after.
  static CIUIC_DEVICE_MEMBER u32 source(const CiuicLinear& p, u32 row, u32 n) {
    return (row * 2 + (n >> 2)) * p.x_width;
  }
  static const u32 COLUMN_BYTES = 1;

  // The 16 columns at byte `from` of x, per fragment; zeros for NOTHING.
  CIUIC_DEVICE_MEMBER void load(const void* base, const u32 (&from)[NT]) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      uint4 bytes = make_uint4(0, 0, 0, 0);
      if (from[j] != NOTHING) bytes = *(const uint4*)((const u8*)base + from[j]);
      const u32 word[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
      for (int c = 0; c < 16; ++c) x[j][c] = permute(word[c / 4], 0u, 0x1111u * (c % 4));
    }
  }
  static CIUIC_DEVICE_MEMBER u32 pair_of(u32 tile, u32 n) { return tile * 4 + (n & 3); }

  template <int H>
  CIUIC_DEVICE_MEMBER void multiply(s32 (&sum)[NT][4], const LaneWords<H>& words) const {
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      const u32 a[4] = {lane_hash<H>(words, 0, 2 * m), lane_hash<H>(words, 1, 2 * m), lane_hash<H>(words, 0, 2 * m + 1),
                        lane_hash<H>(words, 1, 2 * m + 1)};
#pragma unroll
      for (int j = 0; j < NT; ++j) mma_bytes(sum[j], a, x[j][2 * m], x[j][2 * m + 1]);
    }
  }
};

// Half activations: NT fragments of 8 pairs.
template <int NT>
struct HalfFeed {
  static const int PAIRS = 8 * NT;
  typedef float Sum;
  static const int TILES = NT;
  u32 x[NT][8];

  static CIUIC_DEVICE_MEMBER u32 source(const CiuicLinear& p, u32 row, u32) { return row * 2 * p.x_width; }
  static const u32 COLUMN_BYTES = 2;

  CIUIC_DEVICE_MEMBER void load(const void* base, const u32 (&from)[NT]) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      uint4 low = make_uint4(0, 0, 0, 0), high = make_uint4(0, 0, 0, 0);
      if (from[j] != NOTHING) {
        const uint4* source = (const uint4*)((const u8*)base + from[j]);
        low = source[0];
        high = source[1];
      }
      x[j][0] = low.x, x[j][1] = low.y, x[j][2] = low.z, x[j][3] = low.w;
      x[j][4] = high.x, x[j][5] = high.y, x[j][6] = high.z, x[j][7] = high.w;
    }
  }
  static CIUIC_DEVICE_MEMBER u32 pair_of(u32 tile, u32 n) { return tile * 8 + n; }

  template <int H>
  CIUIC_DEVICE_MEMBER void multiply(float (&sum)[NT][4], const LaneWords<H>& words) const {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 4 * m + 2 * (i / 2);
        a[i] = half_levels(lane_hash<H>(words, i & 1, column), lane_hash<H>(words, i & 1, column + 1));
      }
#pragma unroll
      for (int j = 0; j < NT; ++j) mma_halves(sum[j], a, x[j][2 * m], x[j][2 * m + 1]);
    }
  }
};

// First index in the ascending list whose expert is not below `expert`.
CIUIC_DEVICE u32 lower_bound(const s32* list, u32 count, s32 expert) {
  u32 low = 0;
  while (low < count) {
    const u32 middle = (low + count) / 2;
    if (list[middle] < expert)
      low = middle + 1;
    else
      count = middle;
  }
  return low;
}

// One group's codes on their way from global memory through the ring to this lane. Everything that does not change from step
// to step is computed once: the loop has few instructions to spare beside the decoding.
struct Stream {
  const u8* source;  // of this lane's first 16 bytes of the next step to be fetched
  u32 halves;
  u32 targets;  // where in the slot this lane's first (low half) and second (high half) 16 bytes of a step go
  u32 tile;     // where in the slot this lane's tile is

  CIUIC_DEVICE_MEMBER void open(const u8* codes, u32 h, u32 lane, u32 first_step, u32 slot) {
    halves = h;
    source = codes + 16 * lane + (u64)first_step * STEP_TILES * CIUIC_TILE_BYTES(h);
    // A tile is H pieces of 16 bytes; an odd number of units from each to the next, so that the four start in four banks.
    const u32 pieces = h ? h : 1, stride = CIUIC_UNIT_BYTES * ((u32)ciuic_units((int)h) | 1);
    targets = slot + lane / pieces * stride + lane % pieces * 16;
    targets |= (slot + (lane + 32) / pieces * stride + (lane + 32) % pieces * 16) << 16;
    tile = slot + lane % 4 * stride;
  }
  // `tiles` of the step exist; the next fetch is `steps` steps on.
  CIUIC_DEVICE_MEMBER void fetch(u8* slot, u32 tiles, u32 steps, u32 lane) {
    const u32 pieces = tiles * halves;
    if (lane < pieces) copy16_async(slot + (targets & 0xFFFFu), source);
    if (lane + 32 < pieces) copy16_async(slot + (targets >> 16), source + 512);
    source += steps * (STEP_TILES * CIUIC_TILE_BYTES(halves));
  }
};

// Adds the warps' sums of one output, in a fixed order, and turns them into sum(level * x) in steps of the activations.
template <class Feed>
struct Reduce;

template <int NT>
struct Reduce<ByteFeed<NT>> {
  static CIUIC_DEVICE_MEMBER float total(const s32* partial, u32 warps, u32 groups, u32 r, u32 pair, u32 row,
                                         const s32* x_sum, u32 from) {
    // 64 bits: with 255 * 127 per byte, 16384 columns would fill 32.
    s64 value = 0, residual = 0;
    for (u32 w = 0; w < warps; ++w) {
      const s32* here = partial + ((w * groups + r) * (8 * NT) + 8 * (pair / 4) + pair % 4) * CIUIC_TILE + row;
      value += here[0];
      residual += here[4 * CIUIC_TILE];
    }
    value -= (s64)CIUIC_LEVEL_CENTRE * x_sum[2 * from];
    residual -= (s64)CIUIC_LEVEL_CENTRE * x_sum[2 * from + 1];
    return (float)value + (float)residual * RESIDUAL_STEP;
  }
};

template <int NT>
struct Reduce<HalfFeed<NT>> {
  static CIUIC_DEVICE_MEMBER float total(const float* partial, u32 warps, u32 groups, u32 r, u32 pair, u32 row, const s32*,
                                         u32) {
    float value = 0.0f;
    for (u32 w = 0; w < warps; ++w)
      value += partial[((w * groups + r) * (8 * NT) + pair) * CIUIC_TILE + row];
    return value;
  }
};

// What the end of a block needs again: kept in shared memory, for the loop needs the registers.
struct Work {
  const u8* blob;
  u32 part, group, first, count;
};

template <int R, class Feed>
CIUIC_DEVICE void linear(const CiuicLinear& p) {
  CIUIC_DYNAMIC_SHARED(memory);
  CIUIC_SHARED Work work;
  typedef typename Feed::Sum Sum;
  const int NT = Feed::TILES;
  const u32 lane = thread_index() % 32, warp = thread_index() / 32, warps = thread_count() / 32;
  const u32 g = lane / 4, t = lane % 4;

  u32 part_index = 0;
  while (part_index + 1 < p.parts && block_x() >= p.part[part_index + 1].first_block) ++part_index;
  const CiuicPart& part = p.part[part_index];

  // Which pairs: a run of equal experts is cut into blocks of Feed::PAIRS; a y that begins none of them has nothing to do.
  u32 first = block_y() * Feed::PAIRS, count = p.pairs - first;
  const u8* blob = part.blob;
  const u32* group_offset = part.group_offset;
  if (p.pair_expert) {
    first = block_y();
    const s32 expert = p.pair_expert[first];
    if (expert < 0 || (u32)expert >= p.experts) {
      const u32 row = (block_x() - part.first_block) * (R * CIUIC_TILE) + thread_index();
      if (thread_index() < R * CIUIC_TILE && row < part.rows)
        store_as(part.y, (u64)(p.pair_y ? (u32)p.pair_y[first] : first) * part.y_stride + row, 0.0f, part.y_type);
      return;
    }
    if ((first - lower_bound(p.pair_expert, first, expert)) % Feed::PAIRS) return;
    count = 1;
    while (count < Feed::PAIRS && first + count < p.pairs && p.pair_expert[first + count] == expert) ++count;
    blob += ((const u64*)(part.blob + CIUIC_STACK_OFFSETS))[expert];
    group_offset += (u64)expert * part.groups;
  }
  if (count > Feed::PAIRS) count = Feed::PAIRS;

  const u32 tiles = p.cols_padded / CIUIC_TILE;
  u32 x[NT];  // byte offset of the next step's activations
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const u32 pair = Feed::pair_of(j, g);
    x[j] = NOTHING;
    if (pair < count)
      x[j] = Feed::source(p, p.pair_x ? (u32)p.pair_x[first + pair] : first + pair, g) +
             (warp * STEP_TILES + t) * CIUIC_TILE * Feed::COLUMN_BYTES;
  }

  const u32 group = (block_x() - part.first_block) * R;
  if (thread_index() == 0) {
    work.blob = blob;
    work.part = part_index;
    work.group = group;
    work.first = first;
    work.count = count;
  }
  Stream stream[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const bool exists = group + r < part.groups;
    stream[r].open(blob + (exists ? 16 * (u64)group_offset[group + r] : 0),
                   exists ? group_halves(blob, group + r) : 0, lane, warp, r * p.group_slot);
  }

  const u32 slot_bytes = R * p.group_slot, ring = warp * STAGES * slot_bytes;
  u32 fetched = warp * STEP_TILES;  // first tile of the next step to be fetched
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {
    if (fetched < tiles) {
      const u32 here = tiles - fetched < STEP_TILES ? tiles - fetched : STEP_TILES;
#pragma unroll
      for (int r = 0; r < R; ++r) stream[r].fetch(memory + ring + s * slot_bytes, here, warps, lane);
    }
    copy_commit();
    fetched += warps * STEP_TILES;
  }

  Sum sum[R][NT][4] = {};
  u32 slot = ring;
  for (u32 begin = warp * STEP_TILES; begin < tiles; begin += warps * STEP_TILES) {
    // A tile beyond the last one is whatever the ring held; its activations are zero.
    Feed feed;
    feed.load(p.x, x);
#pragma unroll
    for (int j = 0; j < NT; ++j)
      if (x[j] != NOTHING) x[j] += warps * STEP_TILES * CIUIC_TILE * Feed::COLUMN_BYTES;
    copy_wait<STAGES - 1>();
    warp_sync();
#pragma unroll
    for (int r = 0; r < R; ++r) {
#define MULTIPLY(H) feed.template multiply<H>(sum[r], load_words<H>(memory + slot + stream[r].tile, g))
      CIUIC_FOR_WIDTH(stream[r].halves, MULTIPLY)
#undef MULTIPLY
    }
    warp_sync();
    if (fetched < tiles) {
      const u32 here = tiles - fetched < STEP_TILES ? tiles - fetched : STEP_TILES;
#pragma unroll
      for (int r = 0; r < R; ++r) stream[r].fetch(memory + slot, here, warps, lane);
    }
    copy_commit();
    fetched += warps * STEP_TILES;
    slot += slot_bytes;
    if (slot == ring + STAGES * slot_bytes) slot = ring;
  }

  // Sums of the warps: [warp][r][column n][row], in the memory of the rings.
  copy_wait<0>();
  block_sync();
  Sum* partial = (Sum*)memory;
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        partial[((warp * R + r) * (8 * NT) + 8 * j + 2 * t + (i & 1)) * CIUIC_TILE + 2 * g + (i >> 1)] = sum[r][j][i];
  block_sync();

  const CiuicPart& own = p.part[work.part];
  for (u32 o = thread_index(); o < R * CIUIC_TILE * work.count; o += thread_count()) {
    const u32 row_in_block = o % (R * CIUIC_TILE), r = row_in_block / CIUIC_TILE;
    const u32 row = work.group * CIUIC_TILE + row_in_block, pair = work.first + o / (R * CIUIC_TILE);
    if (row >= own.rows) continue;
    const u32 from = p.pair_x ? (u32)p.pair_x[pair] : pair;
    const u32 to = p.pair_y ? (u32)p.pair_y[pair] : pair;
    const float factor = row_factor(work.blob, own.groups, row) * p.x_scale[from];
    float y = Reduce<Feed>::total(partial, warps, R, r, pair - work.first, row % CIUIC_TILE, p.x_sum, from) * factor;
    if (!group_halves(work.blob, work.group + r)) y = 0.0f;
    if (own.addend) y += own.addend[(u64)to * own.rows + row];
    store_as(own.y, (u64)to * own.y_stride + row, y, own.y_type);
  }
}

// Two blocks of 512 threads fit a multiprocessor where a thread has 64 registers, one where it has 128.
#define LINEAR(name, R, Feed, blocks) \
  CIUIC_KERNEL void CIUIC_BOUNDS(512, blocks) name(CIUIC_PARAM(CiuicLinear) p) { linear<R, Feed>(p); }

LINEAR(linear_bytes_r1_n4, 1, ByteFeed<1>, 2)
LINEAR(linear_bytes_r2_n4, 2, ByteFeed<1>, 2)
LINEAR(linear_bytes_r1_n8, 1, ByteFeed<2>, 1)
LINEAR(linear_bytes_r2_n8, 2, ByteFeed<2>, 1)
LINEAR(linear_half_r1_n16, 1, HalfFeed<2>, 1)
LINEAR(linear_half_r2_n16, 2, HalfFeed<2>, 1)
LINEAR(linear_half_r2_n32, 2, HalfFeed<4>, 1)
