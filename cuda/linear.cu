// y = W x for small batches, straight from the codes. The same kernel serves one matrix, several matrices that share
// their input, and routed experts. transform.cu transforms and quantizes the activations first. Limits and choices:
// docs/experiments/runtime/gpu-product.md.
//
// Grid x: one block per row group (16 rows), of one part (CiuicPart) after the other. Grid y: without experts, blocks of
// Act::PAIRS rows of x. With experts there is one block per pair; the first of every Act::PAIRS pairs of one expert
// multiplies them all, and the others return. The warps of a block (up to 16) share the columns: a step is four tiles (64
// columns), and warp w takes steps w, w + warps, ... A lane decodes two rows of one tile (decode_lane.h). The loop over the
// columns is compiled for each number of bits.
//
// On sm_90 the block may start while the transform still runs: it fetches codes, and waits before it reads activations.
//
// Codes stream through a ring of shared memory, RING_STEPS steps deep. Every warp has its own ring, so that the loop has
// no block-wide barrier. Tensor cores multiply. With int8 activations, the four bytes of a weight's hash take four
// positions along k of an integer fragment, and the activation byte is repeated four times. So the fragment sums the
// bytes and multiplies, a weight needs no instruction beyond its hash, and eight columns of operand B take as long as
// one. Four columns hold the int8 values of the activations, four hold their residuals, in units of 1/254.
//
// Alignment: codes of a group at 16 bytes, x at 16 bytes. Dynamic shared memory: ciuic_cli/kernels/product_launch.py.
#include "one_kernel.h"
#include "parameters.h"
#include "decode_lane.h"

#define RING_STEPS 4
#define STEP_TILES 4
#if defined(CIUIC_EMULATE) || __CUDA_ARCH__ >= 900
#define INT8_STEPS 2  // steps of a warp per iteration with int8 activations; on older GPUs two would spill registers
#else
#define INT8_STEPS 1
#endif
#define SUM_ROWS 20  // 16 rows of a warp's sums in shared memory and four of padding, so that stores meet no bank conflicts
#define RESIDUAL_UNIT (1.0f / 254.0f)  // a residual is at most 1/2 in magnitude, and 127 units are 1/2
#define NO_ROW 0xFFFFFFFFu  // byte offset of a missing row of x; real offsets are multiples of 16

// Operand B from int8 activations: NT fragments of 8 columns, each with 4 pairs and their residuals.
template <int NT>
struct Int8Activations {
  static const int PAIRS = 4 * NT;
  typedef s32 Sum;
  static const int FRAGMENTS = NT;
  static const int STEPS = INT8_STEPS;
  uint4 bytes[NT];  // of the tile's 16 columns

  // Byte offset in x of row `row` for column n of a fragment: the int8 values for n < 4, the residuals for n >= 4.
  static CIUIC_DEVICE_MEMBER u32 row_offset(const CiuicLinear& p, u32 row, u32 n) {
    return (row * 2 + (n >> 2)) * p.x_width;
  }
  static const u32 COLUMN_BYTES = 1;

  // Loads 16 activations from byte `from` of x per fragment; zeros for NO_ROW.
  CIUIC_DEVICE_MEMBER void load(const void* base, const u32 (&from)[NT]) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      bytes[j] = make_uint4(0, 0, 0, 0);
      if (from[j] != NO_ROW) bytes[j] = *(const uint4*)((const u8*)base + from[j]);
    }
  }
  static CIUIC_DEVICE_MEMBER u32 pair_of(u32 fragment, u32 n) { return fragment * 4 + (n & 3); }

  // sum[i] += words[i] times x[i]. The steps alternate, so that no fragment waits for the one before it.
  template <int H>
  static CIUIC_DEVICE_MEMBER void multiply(s32 (&sum)[STEPS][NT][4], const LaneWords<H> (&words)[STEPS],
                                           const Int8Activations (&x)[STEPS]) {
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        const u32 a[4] = {lane_hash<H>(words[i], 0, 2 * m), lane_hash<H>(words[i], 1, 2 * m),
                          lane_hash<H>(words[i], 0, 2 * m + 1), lane_hash<H>(words[i], 1, 2 * m + 1)};
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          const uint4& bytes = x[i].bytes[j];
          const u32 word = m < 2 ? bytes.x : m < 4 ? bytes.y : m < 6 ? bytes.z : bytes.w;
          // The activation byte of two columns, four times each.
          mma_bytes(sum[i][j], a, permute(word, 0u, m & 1 ? 0x2222u : 0x0000u),
                    permute(word, 0u, m & 1 ? 0x3333u : 0x1111u));
        }
      }
  }
};

// Operand B from fp16 activations: NT fragments of 8 columns, one pair each.
template <int NT>
struct HalfActivations {
  static const int PAIRS = 8 * NT;
  typedef float Sum;
  static const int FRAGMENTS = NT;
  static const int STEPS = 1;
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
  static CIUIC_DEVICE_MEMBER void multiply(float (&sum)[STEPS][NT][4], const LaneWords<H> (&words)[STEPS],
                                           const HalfActivations (&activations)[STEPS]) {
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = 4 * m + 2 * (i / 2);
          a[i] = half_levels(lane_hash<H>(words[k], i & 1, column), lane_hash<H>(words[k], i & 1, column + 1));
        }
#pragma unroll
        for (int j = 0; j < NT; ++j) mma_halves(sum[k][j], a, activations[k].x[j][2 * m], activations[k].x[j][2 * m + 1]);
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

// Where a warp is in the columns of its block.
struct Columns {
  u32 tiles;    // of a row
  u32 first;    // tile with which the warp begins
  u32 advance;  // tiles from one step of the warp to its next
  u32 lane;
  u8* ring;     // of the warp
  u32 slot_bytes;
};

// The codes of a row group of H half bits on their way from global memory through the ring to this lane.
template <int H>
struct CodeStream {
  static const u32 STRIDE = CIUIC_UNIT_BYTES * (ciuic_units(H) | 1);  // tiles begin in different banks
  const u8* source;  // this lane's first 16 bytes of the next step to fetch
  u32 fetched;       // first tile of that step

  CIUIC_DEVICE_MEMBER void open(const u8* codes, const Columns& at) {
    source = codes + 16 * at.lane + (u64)at.first * CIUIC_TILE_BYTES(H);
    fetched = at.first;
  }
  // Starts to copy the next step into a slot, as far as its tiles exist, and advances. A tile is H vectors of 16 bytes; a
  // lane copies vectors `lane` and `lane + 32` of the step.
  CIUIC_DEVICE_MEMBER void fetch(u8* slot, const Columns& at) {
    const u32 left = fetched < at.tiles ? at.tiles - fetched : 0;
    const u32 vectors = (left < STEP_TILES ? left : STEP_TILES) * H;
#pragma unroll
    for (u32 half = 0; half < (STEP_TILES * H > 32 ? 2 : 1); ++half) {
      const u32 n = at.lane + 32 * half;
      if (n < vectors) copy16_async(slot + n / H * STRIDE + n % H * 16, source + 512 * half);
    }
    copy_commit();
    source += at.advance * CIUIC_TILE_BYTES(H);
    fetched += at.advance;
  }
};

// Loads the activations of a warp's next steps; zeros for steps beyond the last.
template <class Act>
CIUIC_DEVICE void load_steps(Act (&next)[Act::STEPS], const void* activations, u32 (&x)[Act::FRAGMENTS], u32 begin,
                             const Columns& at) {
#pragma unroll
  for (int i = 0; i < Act::STEPS; ++i) {
    u32 from[Act::FRAGMENTS];
#pragma unroll
    for (int j = 0; j < Act::FRAGMENTS; ++j) {
      from[j] = begin + i * at.advance < at.tiles ? x[j] : NO_ROW;
      if (x[j] != NO_ROW) x[j] += at.advance * CIUIC_TILE * Act::COLUMN_BYTES;
    }
    next[i].load(activations, from);
  }
}

// sum += the codes of a row group times the activations, over the columns of this warp. An iteration takes Act::STEPS
// steps, because one leaves too little to do between its waits.
template <int H, class Act>
CIUIC_DEVICE void multiply_columns(const u8* codes, const void* activations, u32 (&x)[Act::FRAGMENTS],
                                   const Columns& at, typename Act::Sum (&sum)[Act::FRAGMENTS][4]) {
  const int STEPS = Act::STEPS, NT = Act::FRAGMENTS;
  const u32 tile = at.lane % 4 * CodeStream<H>::STRIDE;
  CodeStream<H> stream;
  stream.open(codes, at);
#pragma unroll
  for (int s = 0; s < RING_STEPS; ++s) stream.fetch(at.ring + s * at.slot_bytes, at);

  grid_dependency_wait();  // what follows reads the activations
  typename Act::Sum part[STEPS][NT][4] = {};
  Act next[STEPS];
  load_steps<Act>(next, activations, x, at.first, at);
  u32 slot = 0;
  for (u32 begin = at.first; begin < at.tiles; begin += STEPS * at.advance) {
    // Tiles beyond the last one decode old bytes of the ring; their activations are zero.
    Act now[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) now[i] = next[i];
    load_steps<Act>(next, activations, x, begin + STEPS * at.advance, at);
    // The copies of these steps are complete for this lane, and after the barrier for all lanes of the warp.
    copy_wait<RING_STEPS - STEPS>();
    warp_sync();
    LaneWords<H> words[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
      words[i] = load_words<H>(at.ring + slot + i * at.slot_bytes + tile, at.lane / 4);
    warp_sync();  // all lanes have read the slots before they are filled again
#pragma unroll
    for (int i = 0; i < STEPS; ++i) stream.fetch(at.ring + slot + i * at.slot_bytes, at);
    Act::template multiply<H>(part, words, now);
    slot += STEPS * at.slot_bytes;
    if (slot == RING_STEPS * at.slot_bytes) slot = 0;
  }
#pragma unroll
  for (int i = 0; i < STEPS; ++i)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[j][k] += part[i][j][k];
}

// Adds the warps' sums of one output and converts them to sum(level * x) in units of the activations' scale. The order
// over warps is fixed, so that results are reproducible.
template <class Act>
struct Reduce;

template <int NT>
struct Reduce<Int8Activations<NT>> {
  static CIUIC_DEVICE_MEMBER float total(const s32* partial, u32 warps, u32 pair, u32 row, const s32* x_sum,
                                         u32 x_row) {
    // 64 bits, because the sums of a warp may already fill 32: a column adds up to 4 * 255 * 127.
    s64 value = 0, residual = 0;
    for (u32 w = 0; w < warps; ++w) {
      const s32* here = partial + (w * (8 * NT) + 8 * (pair / 4) + pair % 4) * SUM_ROWS + row;
      value += here[0];
      residual += here[4 * SUM_ROWS];
    }
    value -= (s64)CIUIC_LEVEL_CENTRE * x_sum[2 * x_row];
    residual -= (s64)CIUIC_LEVEL_CENTRE * x_sum[2 * x_row + 1];
    return (float)value + (float)residual * RESIDUAL_UNIT;
  }
};

template <int NT>
struct Reduce<HalfActivations<NT>> {
  static CIUIC_DEVICE_MEMBER float total(const float* partial, u32 warps, u32 pair, u32 row, const s32*, u32) {
    float value = 0.0f;
    for (u32 w = 0; w < warps; ++w)
      value += partial[(w * (8 * NT) + pair) * SUM_ROWS + row];
    return value;
  }
};

// Values that are needed again after the loop. They are kept in shared memory, because the loop needs the registers.
struct BlockWork {
  u32 part, group, first, count;
  float factor[CIUIC_TILE];  // of each row of the block, from level to weight; 0 for pruned rows
};

template <class Act>
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
    const bool is_missing = expert < 0 || (u32)expert >= p.experts;
    if (is_missing || (first - lower_bound(p.pair_expert, first, expert)) % Act::PAIRS) {
      grid_dependency_wait();  // every block waits: the kernel must not end before the transform does
      const u32 row = (block_x() - part.first_block) * CIUIC_TILE + thread_index();
      if (is_missing && thread_index() < CIUIC_TILE && row < part.rows)
        store_as(part.y, (u64)(p.pair_y ? (u32)p.pair_y[first] : first) * part.y_stride + row, 0.0f, part.y_type);
      return;
    }
    count = 1;
    while (count < Act::PAIRS && first + count < p.pairs && p.pair_expert[first + count] == expert) ++count;
    blob += ((const u64*)(part.blob + CIUIC_STACK_OFFSETS))[expert];
    group_offset += (u64)expert * part.groups;
  }
  if (count > Act::PAIRS) count = Act::PAIRS;

  u32 x[NT];  // byte offset in p.x of the warp's first activations
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const u32 pair = Act::pair_of(j, g);
    x[j] = NO_ROW;
    if (pair < count)
      x[j] = Act::row_offset(p, p.pair_x ? (u32)p.pair_x[first + pair] : first + pair, g) +
             (warp * STEP_TILES + t) * CIUIC_TILE * Act::COLUMN_BYTES;
  }

  const u32 group = block_x() - part.first_block, half_bits = group_half_bits(blob, group);
  const u8* codes = blob + 16 * (u64)group_offset[group];
  if (thread_index() == 0) {
    work.part = part_number;
    work.group = group;
    work.first = first;
    work.count = count;
  }
  if (thread_index() < CIUIC_TILE) {
    const u32 row = group * CIUIC_TILE + thread_index();
    work.factor[thread_index()] = row < part.rows && half_bits ? row_factor(blob, part.groups, row) : 0.0f;
  }

  Columns at;
  at.tiles = p.cols_padded / CIUIC_TILE;
  at.first = warp * STEP_TILES;
  at.advance = warps * STEP_TILES;
  at.lane = lane;
  at.ring = memory + warp * RING_STEPS * p.group_slot;
  at.slot_bytes = p.group_slot;
  Sum sum[NT][4] = {};
#define MULTIPLY(H) multiply_columns<H, Act>(codes, p.x, x, at, sum)
  CIUIC_FOR_HALF_BITS(half_bits, MULTIPLY)
#undef MULTIPLY

  // The sums of all warps, [warp][column n][row], overwrite the rings, so every warp must have left its loop first.
  copy_wait<0>();
  block_sync();
  Sum* partial = (Sum*)memory;
#pragma unroll
  for (int j = 0; j < NT; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      partial[(warp * (8 * NT) + 8 * j + 2 * t + (i & 1)) * SUM_ROWS + 2 * g + (i >> 1)] = sum[j][i];
  block_sync();

  grid_dependency_wait();  // a pruned group has not waited
  const CiuicPart& output = p.part[work.part];
  for (u32 o = thread_index(); o < CIUIC_TILE * work.count; o += thread_count()) {
    const u32 in_group = o % CIUIC_TILE, pair = work.first + o / CIUIC_TILE;
    const u32 row = work.group * CIUIC_TILE + in_group;
    if (row >= output.rows) continue;
    const u32 x_row = p.pair_x ? (u32)p.pair_x[pair] : pair;
    const u32 y_row = p.pair_y ? (u32)p.pair_y[pair] : pair;
    const float factor = work.factor[in_group];
    float y = 0.0f;
    if (factor != 0.0f)
      y = Reduce<Act>::total(partial, warps, pair - work.first, in_group, p.x_sum, x_row) * (factor * p.x_scale[x_row]);
    if (output.addend) y += output.addend[(u64)y_row * output.rows + row];
    store_as(output.y, (u64)y_row * output.y_stride + row, y, output.y_type);
  }
}

// Blocks of 512 threads that fit a multiprocessor: two at 64 registers per thread, one at 128. Names: n = Act::PAIRS.
#define LINEAR(name, Act, blocks) \
  CIUIC_IF_CHOSEN(name)( \
    CIUIC_KERNEL void CIUIC_BOUNDS(512, blocks) name(CIUIC_PARAM(CiuicLinear) p) { linear<Act>(p); })

LINEAR(linear_bytes_n4, Int8Activations<1>, 2)
LINEAR(linear_bytes_n8, Int8Activations<2>, 1)
LINEAR(linear_half_n16, HalfActivations<2>, 1)
LINEAR(linear_half_n32, HalfActivations<4>, 1)
