// Kernels that decode without tensor cores: a range of rows for torch's product (decode_rows), single rows of an embedding
// (embedding_rows), and the product with the transposed left factor of a low-rank part (lowrank_columns).
#include "one_kernel.h"
#include "parameters.h"
#include "decode_lane.h"
#include "hadamard.h"

// The 16 levels of row 2g + row as floats.
template <int H>
CIUIC_DEVICE void lane_levels(float (&level)[16], const LaneWords<H>& words, int row) {
#pragma unroll
  for (int c = 0; c < 16; ++c)
    level[c] = (float)(s32)dot4(lane_hash<H>(words, row, c), 0x01010101u, 0u - CIUIC_LEVEL_CENTRE);
}

// Stores 16 neighbouring elements of `type` at out[index ..]; the address is 16-byte aligned.
CIUIC_DEVICE void store16(void* out, u64 index, const float (&value)[16], u32 type) {
  if (type == CIUIC_FLOAT) {
    float4* to = (float4*)((float*)out + index);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
    return;
  }
  u32 pairs[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    pairs[i] = floats_to_16(value[2 * i], value[2 * i + 1], type);
  uint4* to = (uint4*)((u16*)out + index);
  to[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  to[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

// One lane: 16 columns from `column` on of rows `row` and row + 1, as far as they are below row_end.
template <int H>
CIUIC_DEVICE void decode_two_rows(const CiuicDecode& p, const u8* tile, u32 g, u32 row, u32 column) {
  const LaneWords<H> words = load_words<H>(tile, g);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (row + i >= p.row_end) return;
    float level[16];
    lane_levels<H>(level, words, i);
    const float factor = row_factor(p.blob, (p.rows + CIUIC_TILE - 1) / CIUIC_TILE, row + i);
#pragma unroll
    for (int c = 0; c < 16; ++c) level[c] *= factor;
    store16(p.out, (u64)(row + i - p.row_begin) * p.cols_padded + column, level, p.out_type);
  }
}

// out[r - row_begin][j] = weight (r, j) in the transformed basis. A block decodes one row group (grid y) and 4 tiles
// per warp (grid x covers cols_padded); a lane decodes two rows of one tile (decode_lane.h) and writes 16 neighbouring
// elements per row. out is 16-byte aligned. No shared memory, no barrier.
#if !defined(CIUIC_ONE) || defined(CIUIC_ONE_decode_rows)
CIUIC_KERNEL void CIUIC_BOUNDS(256, 1) decode_rows(CIUIC_PARAM(CiuicDecode) p) {
  const u32 lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  const u32 tile = (block_x() * (thread_count() / 32) + thread_index() / 32) * 4 + t;
  if (tile >= p.cols_padded / CIUIC_TILE) return;
  const u32 group = p.row_begin / CIUIC_TILE + block_y(), row = group * CIUIC_TILE + 2 * g, column = tile * CIUIC_TILE;
  const u32 half_bits = group_half_bits(p.blob, group);
  const u8* codes = p.blob + 16 * (u64)p.group_offset[group] + (u64)tile * CIUIC_TILE_BYTES(half_bits);
  if (half_bits == 0) {
    const float zero[16] = {};
    for (u32 i = 0; i < 2; ++i)
      if (row + i < p.row_end) store16(p.out, (u64)(row + i - p.row_begin) * p.cols_padded + column, zero, p.out_type);
    return;
  }
#define DECODE(H) decode_two_rows<H>(p, codes, g, row, column)
  CIUIC_FOR_HALF_BITS(half_bits, DECODE)
#undef DECODE
}
#endif

// out[i] = row tokens[i] of the table, zeros for a token outside the table (a kernel cannot raise an error). A block
// decodes one row (grid x: tokens). Its warps share the stripes of 1024 columns; a lane decodes the 32 positions of
// hadamard.h. If log2_block is not 0, the row is transformed back and multiplied by signs and input factors. Dynamic
// shared memory: EXCHANGE_FLOATS floats per warp.
#if !defined(CIUIC_ONE) || defined(CIUIC_ONE_embedding_rows)
CIUIC_KERNEL void CIUIC_BOUNDS(256, 1) embedding_rows(CIUIC_PARAM(CiuicEmbedding) p) {
  CIUIC_DYNAMIC_SHARED(memory);
  const u32 lane = thread_index() % 32, warp = thread_index() / 32, warps = thread_count() / 32;
  float* exchange = (float*)memory + warp * EXCHANGE_FLOATS;
  const s64 token = p.tokens[block_x()];
  const bool exists = token >= 0 && token < (s64)p.rows;
  const u32 row = exists ? (u32)token : 0, group = row / CIUIC_TILE, groups = (p.rows + CIUIC_TILE - 1) / CIUIC_TILE;
  const u32 half_bits = exists ? group_half_bits(p.blob, group) : 0;
  const float factor = row_factor(p.blob, groups, row);
  const u8* codes = p.blob + 16 * (u64)p.group_offset[group];

  for (u32 base = warp * CIUIC_STRIPE; base < p.cols_padded; base += warps * CIUIC_STRIPE) {
    float v[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const u32 j = base + stripe_position(lane, i);
      const u8* tile = codes + (u64)(j / CIUIC_TILE) * CIUIC_TILE_BYTES(half_bits);
      v[i] = 0.0f;
      if (half_bits && j < p.cols_padded)
        v[i] = factor * (float)ciuic_tile_level(tile, row % CIUIC_TILE, j % CIUIC_TILE, (int)half_bits, CIUIC_L);
    }
    if (p.log2_block) {
      hadamard(v, lane, p.log2_block, exchange);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const u32 j = base + stripe_position(lane, i);
        v[i] = apply_sign(v[i], p.seed, j);
        if (p.input_factor && j < p.cols) v[i] *= p.input_factor[j];
      }
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const u32 j = base + stripe_position(lane, i);
      if (j < p.cols) store_as(p.out, (u64)block_x() * p.cols + j, v[i], p.out_type);
    }
  }
}
#endif

// sum[c] += z of two rows times their levels in column c of a tile.
template <int H>
CIUIC_DEVICE void add_two_rows(float (&sum)[16], const LaneWords<H>& words, const float (&z)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float level[16];
    lane_levels<H>(level, words, i);
#pragma unroll
    for (int c = 0; c < 16; ++c) sum[c] += z[i] * level[c];
  }
}

// out[b][column] = sum over k < rank of z[b][k] * weight(k, column), in the transformed basis. Grid x: blocks of warps
// over cols_padded, four tiles per warp; grid y: b. A lane sums over rows 2g and 2g + 1 of every row group for the 16
// columns of its tile. Then the eight lanes of a tile add their sums by shuffles in a fixed order, so results are
// reproducible.
#if !defined(CIUIC_ONE) || defined(CIUIC_ONE_lowrank_columns)
CIUIC_KERNEL void CIUIC_BOUNDS(128, 1) lowrank_columns(CIUIC_PARAM(CiuicLowRank) p) {
  const u32 lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  const u32 tile = (block_x() * (thread_count() / 32) + thread_index() / 32) * 4 + t;
  const u32 groups = (p.rank + CIUIC_TILE - 1) / CIUIC_TILE;
  const bool exists = tile < p.cols_padded / CIUIC_TILE;
  float sum[16] = {};
  for (u32 group = 0; group < groups; ++group) {
    const u32 half_bits = exists ? group_half_bits(p.blob, group) : 0;
    const u8* codes = p.blob + 16 * (u64)p.group_offset[group] + (u64)tile * CIUIC_TILE_BYTES(half_bits);
    float z[2];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const u32 k = group * CIUIC_TILE + 2 * g + i;
      z[i] = k < p.rank ? p.z[(u64)block_y() * p.rank + k] * row_factor(p.blob, groups, k) : 0.0f;
    }
#define ADD(H) add_two_rows<H>(sum, load_words<H>(codes, g), z)
    CIUIC_FOR_HALF_BITS(half_bits, ADD)
#undef ADD
  }
  // Sums over the eight lanes of a tile, which hold eight pairs of rows.
#pragma unroll
  for (int c = 0; c < 16; ++c)
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) sum[c] += shuffle_xor(sum[c], mask);
  if (exists && g == 0) store16(p.out, (u64)block_y() * p.cols_padded + (u64)tile * CIUIC_TILE, sum, CIUIC_FLOAT);
}
#endif
