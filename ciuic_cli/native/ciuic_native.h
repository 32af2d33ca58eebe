// The C interface of libciuic_native, reached from Python through ctypes. Nothing here throws; every function that can fail
// returns 0 or one of the codes below. Matrices are float32, row-major and contiguous; rows and columns are multiples of 16.
#ifndef CIUIC_NATIVE_H
#define CIUIC_NATIVE_H

#include <cstdint>

#define CIUIC_EXPORT extern "C" __attribute__((visibility("default")))

enum CiuicStatus {
  CIUIC_OK = 0,
  CIUIC_BAD_ARGUMENT = -1,   // null pointer, negative size, shape that is no multiple of 16
  CIUIC_BAD_BITS = -2,       // bits per weight that are none of the format's or window length outside 12..16
  CIUIC_NO_MEMORY = -3,
  CIUIC_NOT_FINITE = -4,     // NaN or infinity in the matrix to be rounded, or in what is fed back
  CIUIC_CANCELLED = -5,      // the caller made *progress negative
};

CIUIC_EXPORT int ciuic_abi_version();

// Name of the kernels in use: "avx512vnni", "avx2" or "portable". CIUIC_CPU_KERNELS in the environment forces one that the
// machine has; an unknown or unsupported name is ignored.
CIUIC_EXPORT const char* ciuic_cpu_kernels();

// Rounds W (rows x cols, already transformed) to the trellis code, with error feedback along inputs (A, cols x cols or
// null) and along outputs (Bf, rows x rows or null). With E = W - What, tile (I, J) is encoded from the target
//   T = W_IJ + sum_{J'>J} E_IJ' A_J'J + sum_{I'>I} Bf_I'I^T P_I'J,   P_I'J = E_I'J + sum_{J'>J} E_I'J' A_J'J
// (YAQA's two-sided rounding; LDLQ when Bf is null). With direction and pull (each rows x cols, or both null; they need A),
// row r of tile J moves by pull_rJ d_r as well, d_r = sum_{J'>J} P_rJ' . direction_rJ': feedback of each row along one
// direction. `scale` holds one value per row, `row_bits` one per 16 rows; a row whose scale is 0 is padding: its weights cost
// nothing and What is 0 there. What (rows x cols) receives the decoded matrix and must not overlap W. `progress`, if not null,
// counts finished tiles; made very negative by another thread, it stops the call within the time of a few tiles. The result
// does not depend on `threads`.
CIUIC_EXPORT int ciuic_round(const float* W, long rows, long cols, const float* A, const float* Bf,
                             const float* direction, const float* pull, const float* scale, const uint8_t* row_bits, int L,
                             int threads, uint8_t* codes, const int64_t* group_offset, float* What, long* progress);

// Decodes rows [row_begin, row_end) (any range) into out ((row_end - row_begin) x cols): float32, or bfloat16 if `half` is not 0.
CIUIC_EXPORT int ciuic_decode(const uint8_t* codes, const int64_t* group_offset, const uint8_t* row_bits,
                              const float* scale, long rows, long cols, int L, long row_begin, long row_end, void* out,
                              int half, int threads);

// Decodes the `count` rows named by row_index, in any order, into out (count x cols). Negative status for a row outside.
CIUIC_EXPORT int ciuic_decode_rows(const uint8_t* codes, const int64_t* group_offset, const uint8_t* row_bits,
                                   const float* scale, long rows, long cols, int L, const int64_t* row_index, long count,
                                   float* out, int threads);

// y (batch x rows_out, rows_out <= rows) = W T(x): x is batch x cols_in, untransformed; each is float32, or bfloat16 if its
// `half` is not 0. The call pads x to `cols`, applies the
// signs and the block Hadamard transform of size 2^log2_block, rounds it per block of 256 columns - to int8 for row groups of up
// to 4 bits unless `precise`, to 15 bits for the others - and multiplies straight from the codes. Meant for small batches: every
// 4 to 8 rows of x the codes are decoded anew. `order`, if not null, holds for each of the rows_out stored rows the column of y
// that it makes, a permutation of 0 .. rows_out - 1; negative status for a column outside. No result depends on `threads`.
CIUIC_EXPORT int ciuic_matmul(const uint8_t* codes, const int64_t* group_offset, const uint8_t* row_bits,
                              const float* scale, long rows, long cols, int L, int log2_block, uint32_t seed,
                              const void* x, int x_half, long batch, long cols_in, void* y, int y_half, long rows_out,
                              const int32_t* order, int precise, int threads);

// In place, per row of x (n_rows x cols): signs then block Hadamard (orthonormal), or the inverse.
CIUIC_EXPORT int ciuic_hadamard(float* x, long n_rows, long cols, int log2_block, uint32_t seed, int inverse, int threads);

#endif
