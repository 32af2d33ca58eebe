// What each kernel is told: one structure per kernel, passed by value. ciuic_cli/kernels/parameters.py mirrors them, and
// a test compares every offset. Members are ordered so that no compiler pads.
//
// Pointers into a blob follow its layout (see ciuic_cli/codecs/packing.py): row_bits at byte 32, then the row scales.
#ifndef CIUIC_PARAMETERS_H
#define CIUIC_PARAMETERS_H

#include "device.h"

#define CIUIC_MAX_PARTS 4
#define CIUIC_BLOB_STEPS 7      // byte offset of the scale steps per octave in a blob, less 16
#define CIUIC_BLOB_BASE 20      // byte offset of the scale base in a blob
#define CIUIC_BLOB_ROW_BITS 32  // byte offset of row_bits in a blob
#define CIUIC_STACK_OFFSETS 16  // byte offset of the experts' offsets in a stack
#define CIUIC_CHUNK 1024        // inputs that one warp transforms at a time; the largest Hadamard block

// One matrix, or one stack of experts, of a launch that shares its input.
struct CiuicPart {
  const u8* blob;
  const u32* group_offset;  // [experts][groups], where a group's codes begin: 16-byte units from its matrix's blob
  void* y;                  // [rows of y][y_stride]
  const float* addend;      // null, or float [rows of y][rows]: added before rounding (the low-rank part)
  u64 y_stride;             // elements
  u32 rows;
  u32 groups;
  u32 first_block;  // of this part along the grid's x
  u32 y_type;
};

struct CiuicLinear {
  CiuicPart part[CIUIC_MAX_PARTS];
  const void* x;              // transformed activations: s8 [x rows][2][x_width] or half [x rows][x_width]
  const float* x_scale;       // [x rows]
  const s32* x_sum;           // [x rows][2], sums of the bytes; not read by the half kernels
  const s32* pair_expert;     // null, or [pairs] ascending: which expert each pair wants; none such: y is zero
  const s32* pair_x;          // null (pair i reads x row i), or [pairs]
  const s32* pair_y;          // null (pair i writes y row i), or [pairs]
  u32 parts;
  u32 cols_padded;
  u32 pairs;
  u32 experts;
  u32 group_slot;  // bytes of one group's share of a ring slot: 128 * (largest number of units of the launch | 1)
  u32 x_width;     // cols_padded, rounded up to whole steps of 64; zeros beyond cols_padded. x is below 4 GiB
};

struct CiuicTransform {
  const void* x;      // [rows][x_stride] of x_type
  const float* input_factor;  // null, or [cols]; forward: multiplies x before the transform
  void* out;          // see CiuicTransformMode
  float* out_scale;   // [rows]
  s32* out_sum;       // [rows][2]
  u64 x_stride;       // elements
  u64 out_stride;     // elements; forward: also the width that is written, at least cols_padded, zeros beyond it
  u32 cols;           // of x (forward) or of out (inverse)
  u32 cols_padded;
  u32 log2_block;
  u32 seed;
  u32 x_type;
  u32 mode;
};
enum CiuicTransformMode {
  CIUIC_TO_BYTES = 0,    // s8 [rows][2][out_stride]: rounded, and the residual in 1/254 of a step; scale and sums
  CIUIC_TO_HALF = 1,     // half [rows][out_stride], each row divided by a power of two that is its scale
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
  const float* input_factor;  // null, or [cols]: multiplies rows in the original basis
  void* out;          // [grid x][cols] of out_type
  u32 rows;
  u32 cols;
  u32 cols_padded;
  u32 log2_block;  // 0: rows stay in the transformed basis
  u32 seed;
  u32 out_type;
};

struct CiuicLowRank {
  const u8* blob;  // of L transposed: rank x rows of the product
  const u32* group_offset;
  const float* z;  // [grid y][rank]
  float* out;      // [grid y][cols_padded], in the transformed basis
  u32 rank;
  u32 cols_padded;
};

struct CiuicEncode {
  const float* targets;  // [tiles][256], weight / row scale
  u8* codes;             // [tiles][CIUIC_TILE_BYTES(H)]
  float* decoded;        // [tiles][256], in the units of targets
  u16* scratch;          // [grid x][256 + 1][2^(L - H/2)] halves, H/2 rounded down
  u32 tiles;
};

#endif
