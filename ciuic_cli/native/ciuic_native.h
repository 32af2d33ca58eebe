// The C interface of libciuic_native; Python calls it through ctypes (ciuic_cli/codecs/native.py). No function throws. A
// function that can fail returns 0 or a negative code of CiuicStatus. Matrices are row-major and contiguous, float32 unless
// stated otherwise. `rows` and `cols` of compressed matrices are multiples of 16. Results do not depend on `threads`.
//
// A compressed matrix is described by these arguments:
//   row_bits      one byte per row group (16 rows): bits per weight, see ciuic_half_bits_of
//   group_offset  one byte offset into `codes` per row group
//   scale         one float per row
//   L             trellis state bits, 12 to 16
#ifndef CIUIC_NATIVE_H
#define CIUIC_NATIVE_H

#include <cstdint>

#define CIUIC_EXPORT extern "C" __attribute__((visibility("default")))

enum CiuicStatus {
  CIUIC_OK = 0,
  CIUIC_BAD_ARGUMENT = -1,   // null pointer, negative size, shape that is no multiple of 16
  CIUIC_BAD_BITS = -2,       // bits per weight that the format does not have, or L outside 12..16
  CIUIC_NO_MEMORY = -3,
  CIUIC_NOT_FINITE = -4,     // NaN or infinity in the matrix to round, or in its error feedback
  CIUIC_CANCELLED = -5,      // the caller made *progress negative
};

CIUIC_EXPORT int ciuic_abi_version();

// Instruction set of the kernels in use: "avx512vnni", "avx2" or "portable". The environment variable CIUIC_CPU_KERNELS
// selects one of them; a name that is unknown or that the machine does not support is ignored.
CIUIC_EXPORT const char* ciuic_cpu_kernels();

// Rounds W (rows x cols, in the transformed basis) to the trellis code with two-sided error feedback (YAQA, arXiv
// 2505.22988; LDLQ if Bf is null). A (cols x cols, or null) feeds errors back along inputs, Bf (rows x rows, or null)
// along outputs. Let E = W - What. Tile (I, J) is encoded from the target
//   T = W_IJ + sum_{J'>J} E_IJ' A_J'J + sum_{I'>I} Bf_I'I^T P_I'J,   P_I'J = E_I'J + sum_{J'>J} E_I'J' A_J'J.
// `direction` and `pull` (each rows x cols, or both null; they require A) add feedback of each row along one direction:
// row r of tile J also moves by pull_rJ d_r, where d_r = sum_{J'>J} P_rJ' . direction_rJ'.
//
// A row whose scale is 0 is padding: its weights cost nothing, and its rows of What are 0. What (rows x cols) receives
// the decoded matrix and must not overlap W. `progress`, if not null, counts finished tiles. If another thread sets it
// far below 0, beyond what counting can undo, the call stops within the time of a few tiles.
CIUIC_EXPORT int ciuic_round(const float* W, long rows, long cols, const float* A, const float* Bf,
                             const float* direction, const float* pull, const float* scale, const uint8_t* row_bits, int L,
                             int threads, uint8_t* codes, const int64_t* group_offset, float* What, long* progress);

// Decodes rows [row_begin, row_end) (any range) into out, (row_end - row_begin) x cols: bfloat16 if `bf16` is not 0.
CIUIC_EXPORT int ciuic_decode(const uint8_t* codes, const int64_t* group_offset, const uint8_t* row_bits,
                              const float* scale, long rows, long cols, int L, long row_begin, long row_end, void* out,
                              int bf16, int threads);

// Decodes the `count` rows listed in row_index, in any order, into out (count x cols). Fails if an index is out of range.
CIUIC_EXPORT int ciuic_decode_rows(const uint8_t* codes, const int64_t* group_offset, const uint8_t* row_bits,
                                   const float* scale, long rows, long cols, int L, const int64_t* row_index, long count,
                                   float* out, int threads);

// y (batch x rows_out, rows_out <= rows) = W T(x), where x (batch x cols_in) is not transformed yet. x and y are
// bfloat16 if x_bf16 and y_bf16 are not 0. The call pads x with zeros to `cols` and applies T: signs, then the block
// Hadamard transform of size 2^log2_block. It quantizes the result per block of 256 columns, to int8 for row groups of
// up to 4 bits unless `precise`, to 15 bits for the others, and multiplies straight from the codes. It suits small
// batches: the codes are decoded again for every 4 to 8 rows of x. `order`, if not null, maps each of the rows_out
// stored rows to its column of y; it must be a permutation of 0 .. rows_out - 1, and the call fails if a column is out
// of range.
CIUIC_EXPORT int ciuic_matmul(const uint8_t* codes, const int64_t* group_offset, const uint8_t* row_bits,
                              const float* scale, long rows, long cols, int L, int log2_block, uint32_t seed,
                              const void* x, int x_bf16, long batch, long cols_in, void* y, int y_bf16, long rows_out,
                              const int32_t* order, int precise, int threads);

// Transforms each row of x (n_rows x cols) in place: signs, then the orthonormal block Hadamard transform of size
// 2^log2_block, which must divide cols and be at most 1024. `inverse` applies the inverse. x is float32, or bfloat16 if
// `bf16` is not 0: the same float32 arithmetic, rounded at the end.
CIUIC_EXPORT int ciuic_hadamard(void* x, int bf16, long n_rows, long cols, int log2_block, uint32_t seed, int inverse,
                                int threads);

#endif
