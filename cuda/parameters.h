// Kernel parameters: one structure per kernel, passed by value. ciuic_cli/kernels/parameters.py mirrors them, and a test
// compares every offset. Members are ordered so that no compiler inserts padding.
//
// A blob is a compressed matrix as stored (docs/FORMAT.md): header, row_bits at byte 32 (one byte per row group), one
// byte of scale per row, codes. Codes of a group begin at a multiple of 16 bytes. `groups` are groups of 16 rows.
// Arrays are contiguous and 16-byte aligned; [a][b] gives their shape.
#ifndef CIUIC_PARAMETERS_H
#define CIUIC_PARAMETERS_H

#include "device.h"

#define CIUIC_MAX_PARTS 4
#define CIUIC_BLOB_STEPS 7      // byte offset of the scale steps per octave in a blob; the byte is 16 less
#define CIUIC_BLOB_BASE 20      // byte offset of the scale base (float32) in a blob
#define CIUIC_BLOB_ROW_BITS 32  // byte offset of row_bits in a blob
#define CIUIC_STACK_OFFSETS 16  // byte offset in a stack of its table: the byte offset (u64) of each expert's blob
#define CIUIC_STRIPE 1024        // values that one warp transforms at a time; the largest Hadamard block

// One matrix, or one stack of experts, of a launch in which all parts share the input.
struct CiuicPart {
  const u8* blob;
  const u32* group_offset;  // [experts][groups]: where a group's codes begin in its matrix's blob, in units of 16 bytes
  void* y;                  // [rows of y][y_stride]
  const float* addend;      // null, or [rows of y][rows]: added before y is rounded (the low-rank part)
  u64 y_stride;             // elements
  u32 rows;
  u32 groups;
  u32 first_block;  // first block of this part along the grid's x
  u32 y_type;
};

// A pair is one row of x times one matrix, and makes one row of y. With experts, pairs are sorted by expert.
struct CiuicLinear {
  CiuicPart part[CIUIC_MAX_PARTS];
  const void* x;              // transformed: s8 [x rows][2][x_width] (int8 values, residuals) or half [x rows][x_width]
  const float* x_scale;       // [x rows]
  const s32* x_sum;           // [x rows][2]: sums of the int8 values and of the residuals; unused by half kernels
  const s32* pair_expert;     // null, or [pairs] ascending: the expert of each pair; outside 0 .. experts - 1, y is zero
  const s32* pair_x;          // null (pair i reads x row i), or [pairs]
  const s32* pair_y;          // null (pair i writes y row i), or [pairs]
  u32 parts;
  u32 cols_padded;
  u32 pairs;
  u32 experts;
  u32 group_slot;  // bytes of one group in a ring slot: 128 * (largest number of units per tile in the launch | 1)
  u32 x_width;     // cols_padded rounded up to a multiple of 64, zeros beyond cols_padded; x takes less than 4 GiB
};

struct CiuicTransform {
  const void* x;      // [rows][x_stride] of x_type
  const float* input_factor;  // null, or [cols]: multiplies x before the forward transform
  void* out;          // see CiuicTransformMode
  float* out_scale;   // [rows]
  s32* out_sum;       // [rows][2]
  u64 x_stride;       // elements
  u64 out_stride;     // elements; forward: also the columns written, at least cols_padded, zeros beyond cols_padded
  u32 cols;           // of x (forward) or of out (inverse)
  u32 cols_padded;
  u32 log2_block;
  u32 seed;
  u32 x_type;
  u32 mode;
};
enum CiuicTransformMode {
  CIUIC_TO_BYTES = 0,    // s8 [rows][2][out_stride]: values in units of out_scale, residuals in 1/254 of it; also out_sum
  CIUIC_TO_HALF = 1,     // half [rows][out_stride]: each row divided by its scale, a power of two
  CIUIC_TO_BFLOAT = 2,   // bfloat16 [rows][out_stride]
  CIUIC_INVERSE = 3      // float [rows][cols_padded] in, float [rows][out_stride] out
};

struct CiuicDecode {
  const u8* blob;
  const u32* group_offset;  // [groups]
  void* out;                // [row_end - row_begin][cols_padded] of out_type
  u32 rows;
  u32 cols_padded;
  u32 row_begin;  // multiple of 16
  u32 row_end;
  u32 out_type;
  u32 reserved;
};

struct CiuicEmbedding {
  const u8* blob;
  const u32* group_offset;
  const s64* tokens;  // [grid x]
  const float* input_factor;  // null, or [cols]: multiplies the rows in the original basis
  void* out;          // [grid x][cols] of out_type
  u32 rows;
  u32 cols;
  u32 cols_padded;
  u32 log2_block;  // 0: the rows stay in the transformed basis
  u32 seed;
  u32 out_type;
};

struct CiuicLowRank {
  const u8* blob;  // the left factor, transposed: [rank][rows of the product]
  const u32* group_offset;
  const float* z;  // [grid y][rank]
  float* out;      // [grid y][cols_padded] in the transformed basis
  u32 rank;
  u32 cols_padded;
};

struct CiuicEncode {
  const float* targets;  // [tiles][256], weight / row scale
  u8* codes;             // [tiles][CIUIC_TILE_BYTES(H)]
  float* decoded;        // [tiles][256], in the same units as targets
  u16* scratch;          // fp16 [grid x][256 + 1][2^(L - floor(H / 2))]: the costs of each block's search
  u32 tiles;
};

#endif
