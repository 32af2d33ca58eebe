// y = W x for small batches, straight from the codes. The same kernel serves one matrix, several matrices that share
// their input, and routed experts. transform.cu transforms and quantizes the activations first. Limits and choices:
// docs/experiments/runtime/gpu-product.md.
//
// Grid x: blocks of R row groups (16 R rows), of one part (CiuicPart) after the other. Grid y: without experts, blocks of
// Act::PAIRS rows of x. With experts there is one block per pair; the first of every Act::PAIRS pairs of one expert
// multiplies them all, and the others return. The warps of a block (up to 16) share the columns: a step is four tiles (64
// columns), and warp w takes steps w, w + warps, ... A lane decodes two rows of one tile (decode_lane.h).
//
// Codes stream through a ring of shared memory, RING_STEPS steps deep. Every warp has its own ring, so that the loop has
// no block-wide barrier. Tensor cores multiply. With int8 activations, the four bytes of a weight's hash take four
// positions along k of an integer fragment, and the activation byte is repeated four times. So the fragment sums the
// bytes and multiplies, a weight needs no instruction beyond its hash, and eight columns of operand B take as long as
// one. Four columns hold the int8 values of the activations, four hold their residuals, in units of 1/254.
//
// Alignment: codes of a group at 16 bytes, x at 16 bytes. Dynamic shared memory: ciuic_cli/kernels/product.py.
#include "parameters.h"
#include "decode_lane.h"

#define RING_STEPS 4
#define STEP_TILES 4
#define RESIDUAL_UNIT (1.0f / 254.0f)  // a residual is at most 1/2 in magnitude, and 127 units are 1/2
#define NO_ROW 0xFFFFFFFFu  // byte offset of a missing row of x; real offsets are multiples of 16

// Operand B from int8 activations: NT fragments of 8 columns, each with 4 pairs and their residuals.
template <int NT>
struct Int8Activations {
  static const int PAIRS = 4 * NT;
  typedef s32 Sum;
  static const int FRAGMENTS = NT;
  u32 x[NT][16];  // for each of the tile's 16 columns, the activation byte four times

  // Byte offset in x of row `row` for column n of a fragment: the int8 values for n < 4, the residuals for n >= 4.
  static CIUIC_DEVICE_MEMBER u32 row_offset(const CiuicLinear& p, u32 row, u32 n) {
    return (row * 2 + (n >> 2)) * p.x_width;
  }
  static const u32 COLUMN_BYTES = 1;

  // Loads 16 activations from byte `from` of x per fragment; zeros for NO_ROW.
  CIUIC_DEVICE_MEMBER void load(const void* base, const u32 (&from)[NT]) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      uint4 bytes = make_uint4(0, 0, 0, 0);
      if (from[j] != NO_ROW) bytes = *(const uint4*)((const u8*)base + from[j]);
      const u32 word[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
      for (int c = 0; c < 16; ++c) x[j][c] = permute(word[c / 4], 0u, 0x1111u * (c % 4));
    }
  }
  static CIUIC_DEVICE_MEMBER u32 pair_of(u32 fragment, u32 n) { return fragment * 4 + (n & 3); }

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

// Operand B from fp16 activations: NT fragments of 8 columns, one pair each.
template <int NT>
struct HalfActivations {
  static const int PAIRS = 8 * NT;
  typedef float Sum;
  static const int FRAGMENTS = NT;
  u32 x[NT][8];

  static CIUIC_DEVICE_MEMBER u32 row_offset(const CiuicLinear& p, u32 row, u32) { return row * 2 * p.x_width; }
  static const u32 COLUMN_BYTES = 2;

  CIUIC_DEVICE_MEMBER void load(const void* base, const u32 (&from)[NT]) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      uint4 low = make_uint4(0, 0, 0, 0), high = make_uint4(0, 0, 0, 0);
      if (from[j] != NO_ROW) {
        const uint4* row = (const uint4*)((const u8*)base + from[j]);
        low = row[0];
        high = row[1];
      }
      x[j][0] = low.x, x[j][1] = low.y, x[j][2] = low.z, x[j][3] = low.w;
      x[j][4] = high.x, x[j][5] = high.y, x[j][6] = high.z, x[j][7] = high.w;
    }
  }
  static CIUIC_DEVICE_MEMBER u32 pair_of(u32 fragment, u32 n) { return fragment * 8 + n; }

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

// The first index in the ascending list whose entry is not below `expert`, or `count`.
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

// The codes of one row group on their way from global memory through the ring to this lane. The loop is limited by its
// number of instructions, so offsets that are the same for every step are computed once.
struct CodeStream {
  const u8* source;  // this lane's first 16 bytes of the next step to fetch
  u32 half_bits;
  u32 slot_offsets;  // offsets in the slot for this lane's first (low 16 bits) and second (high 16 bits) 16 bytes of a step
  u32 tile;          // offset in the slot of this lane's tile

  // `slot`: offset of this group in a ring slot.
  CIUIC_DEVICE_MEMBER void open(const u8* codes, u32 h, u32 lane, u32 first_step, u32 slot) {
    half_bits = h;
    source = codes + 16 * lane + (u64)first_step * STEP_TILES * CIUIC_TILE_BYTES(h);
    // A tile is H vectors of 16 bytes. Tiles are an odd multiple of 32 bytes apart, so that the four tiles of a step begin
    // in different banks.
    const u32 vectors = h ? h : 1, stride = CIUIC_UNIT_BYTES * ((u32)ciuic_units((int)h) | 1);
    slot_offsets = slot + lane / vectors * stride + lane % vectors * 16;
    slot_offsets |= (slot + (lane + 32) / vectors * stride + (lane + 32) % vectors * 16) << 16;
    tile = slot + lane % 4 * stride;
  }
  // Starts to copy the next step, of which `tiles` tiles exist, and advances by `steps` steps.
  CIUIC_DEVICE_MEMBER void fetch(u8* slot, u32 tiles, u32 steps, u32 lane) {
    const u32 vectors = tiles * half_bits;
    if (lane < vectors) copy16_async(slot + (slot_offsets & 0xFFFFu), source);
    if (lane + 32 < vectors) copy16_async(slot + (slot_offsets >> 16), source + 512);
    source += steps * (STEP_TILES * CIUIC_TILE_BYTES(half_bits));
  }
};

// Adds the warps' sums of one output and converts them to sum(level * x) in units of the activations' scale. The order
// over warps is fixed, so that results are reproducible.
template <class Act>
struct Reduce;

template <int NT>
struct Reduce<Int8Activations<NT>> {
  static CIUIC_DEVICE_MEMBER float total(const s32* partial, u32 warps, u32 groups, u32 r, u32 pair, u32 row,
                                         const s32* x_sum, u32 x_row) {
    // 64 bits, because the sums of a warp may already fill 32: a column adds up to 4 * 255 * 127.
    s64 value = 0, residual = 0;
    for (u32 w = 0; w < warps; ++w) {
      const s32* here = partial + ((w * groups + r) * (8 * NT) + 8 * (pair / 4) + pair % 4) * CIUIC_TILE + row;
      value += here[0];
      residual += here[4 * CIUIC_TILE];
    }
    value -= (s64)CIUIC_LEVEL_CENTRE * x_sum[2 * x_row];
    residual -= (s64)CIUIC_LEVEL_CENTRE * x_sum[2 * x_row + 1];
    return (float)value + (float)residual * RESIDUAL_UNIT;
  }
};

template <int NT>
struct Reduce<HalfActivations<NT>> {
  static CIUIC_DEVICE_MEMBER float total(const float* partial, u32 warps, u32 groups, u32 r, u32 pair, u32 row, const s32*,
                                         u32) {
    float value = 0.0f;
    for (u32 w = 0; w < warps; ++w)
      value += partial[((w * groups + r) * (8 * NT) + pair) * CIUIC_TILE + row];
    return value;
  }
};

// Values that are needed again after the loop. They are kept in shared memory, because the loop needs the registers.
struct BlockWork {
  const u8* blob;
  u32 part, group, first, count;
};

template <int R, class Act>
CIUIC_DEVICE void linear(const CiuicLinear& p) {
  CIUIC_DYNAMIC_SHARED(memory);
  CIUIC_SHARED BlockWork work;
  typedef typename Act::Sum Sum;
  const int NT = Act::FRAGMENTS;
  const u32 lane = thread_index() % 32, warp = thread_index() / 32, warps = thread_count() / 32;
  const u32 g = lane / 4, t = lane % 4;

  u32 part_number = 0;
  while (part_number + 1 < p.parts && block_x() >= p.part[part_number + 1].first_block) ++part_number;
  const CiuicPart& part = p.part[part_number];

  // The pairs of this block. The pairs of one expert are adjacent and are cut into blocks of Act::PAIRS; a grid row whose
  // pair does not begin such a block returns.
  u32 first = block_y() * Act::PAIRS, count = p.pairs - first;
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
    if ((first - lower_bound(p.pair_expert, first, expert)) % Act::PAIRS) return;
    count = 1;
    while (count < Act::PAIRS && first + count < p.pairs && p.pair_expert[first + count] == expert) ++count;
    blob += ((const u64*)(part.blob + CIUIC_STACK_OFFSETS))[expert];
    group_offset += (u64)expert * part.groups;
  }
  if (count > Act::PAIRS) count = Act::PAIRS;

  const u32 tiles = p.cols_padded / CIUIC_TILE;
  u32 x[NT];  // byte offset in p.x of the next step's activations
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const u32 pair = Act::pair_of(j, g);
    x[j] = NO_ROW;
    if (pair < count)
      x[j] = Act::row_offset(p, p.pair_x ? (u32)p.pair_x[first + pair] : first + pair, g) +
             (warp * STEP_TILES + t) * CIUIC_TILE * Act::COLUMN_BYTES;
  }

  const u32 group = (block_x() - part.first_block) * R;
  if (thread_index() == 0) {
    work.blob = blob;
    work.part = part_number;
    work.group = group;
    work.first = first;
    work.count = count;
  }
  CodeStream stream[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const bool exists = group + r < part.groups;
    stream[r].open(blob + (exists ? 16 * (u64)group_offset[group + r] : 0),
                   exists ? group_half_bits(blob, group + r) : 0, lane, warp, r * p.group_slot);
  }

  const u32 slot_bytes = R * p.group_slot, ring = warp * RING_STEPS * slot_bytes;
  u32 fetched = warp * STEP_TILES;  // first tile of the next step to fetch
#pragma unroll
  for (int s = 0; s < RING_STEPS; ++s) {
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
    // Tiles beyond the last one decode old bytes of the ring; their activations are zero.
    Act activations;
    activations.load(p.x, x);
#pragma unroll
    for (int j = 0; j < NT; ++j)
      if (x[j] != NO_ROW) x[j] += warps * STEP_TILES * CIUIC_TILE * Act::COLUMN_BYTES;
    // This step's copies are complete for this lane, and after the barrier for all lanes of the warp.
    copy_wait<RING_STEPS - 1>();
    warp_sync();
#pragma unroll
    for (int r = 0; r < R; ++r) {
#define MULTIPLY(H) activations.template multiply<H>(sum[r], load_words<H>(memory + slot + stream[r].tile, g))
      CIUIC_FOR_HALF_BITS(stream[r].half_bits, MULTIPLY)
#undef MULTIPLY
    }
    warp_sync();  // all lanes have read the slot before it is filled again
    if (fetched < tiles) {
      const u32 here = tiles - fetched < STEP_TILES ? tiles - fetched : STEP_TILES;
#pragma unroll
      for (int r = 0; r < R; ++r) stream[r].fetch(memory + slot, here, warps, lane);
    }
    copy_commit();
    fetched += warps * STEP_TILES;
    slot += slot_bytes;
    if (slot == ring + RING_STEPS * slot_bytes) slot = ring;
  }

  // The sums of all warps, [warp][r][column n][row], overwrite the rings, so every warp must have left its loop first.
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

  const CiuicPart& output = p.part[work.part];
  for (u32 o = thread_index(); o < R * CIUIC_TILE * work.count; o += thread_count()) {
    const u32 row_in_block = o % (R * CIUIC_TILE), r = row_in_block / CIUIC_TILE;
    const u32 row = work.group * CIUIC_TILE + row_in_block, pair = work.first + o / (R * CIUIC_TILE);
    if (row >= output.rows) continue;
    const u32 x_row = p.pair_x ? (u32)p.pair_x[pair] : pair;
    const u32 y_row = p.pair_y ? (u32)p.pair_y[pair] : pair;
    const float factor = row_factor(work.blob, output.groups, row) * p.x_scale[x_row];
    float y = Reduce<Act>::total(partial, warps, R, r, pair - work.first, row % CIUIC_TILE, p.x_sum, x_row) * factor;
    if (!group_half_bits(work.blob, work.group + r)) y = 0.0f;
    if (output.addend) y += output.addend[(u64)y_row * output.rows + row];
    store_as(output.y, (u64)y_row * output.y_stride + row, y, output.y_type);
  }
}

// Two blocks of 512 threads fit a multiprocessor at 64 registers per thread, one at 128. Names: r = R, n = Act::PAIRS.
#define LINEAR(name, R, Act, blocks) \
  CIUIC_KERNEL void CIUIC_BOUNDS(512, blocks) name(CIUIC_PARAM(CiuicLinear) p) { linear<R, Act>(p); }

LINEAR(linear_bytes_r1_n4, 1, Int8Activations<1>, 2)
LINEAR(linear_bytes_r2_n4, 2, Int8Activations<1>, 2)
LINEAR(linear_bytes_r1_n8, 1, Int8Activations<2>, 1)
LINEAR(linear_bytes_r2_n8, 2, Int8Activations<2>, 1)
LINEAR(linear_half_r1_n16, 1, HalfActivations<2>, 1)
LINEAR(linear_half_r2_n16, 2, HalfActivations<2>, 1)
LINEAR(linear_half_r2_n32, 2, HalfActivations<4>, 1)
