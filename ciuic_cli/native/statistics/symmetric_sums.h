// Sums of symmetric products, moment += left^T right, of which only the lower half is computed.
//
// Columns are cut into strips of kStrip. A strip is packed: step by step, one 4-byte element per column. An element is a
// float32 number of one token, or two bfloat16 numbers of two neighbouring tokens.
#ifndef CIUIC_SYMMETRIC_SUMS_H
#define CIUIC_SYMMETRIC_SUMS_H

#include <cstdint>

namespace ciuic {

// Columns of a strip: 3 vectors of AVX-512, so that 8 rows of sums fill 24 of 32 registers.
constexpr int kStrip = 48;
// Steps that are packed together. More take less reading and writing of sums, fewer less memory: 3 KB per four columns.
// Measured: docs/experiments/statistics/native-sums.md.
constexpr int kSteps = 384;

// The inner loops of one instruction set.
struct SymmetricKernel {
  int tokens_per_step;
  // Packs `tokens` rows of `columns` (at most kStrip) numbers, `stride` apart; the rest of the last step and of the strip
  // becomes 0.
  void (*pack)(const float* from, long stride, long tokens, long columns, float* to);
  void (*pack_bfloat16)(const uint16_t* from, long stride, long tokens, long columns, float* to);
  // sums[a * stride + b] += sum over steps of left[a] * right[b] for a and b below kStrip, `left` and `right` packed.
  void (*multiply)(const float* left, const float* right, long steps, float* sums, long stride);
};

// The kernel of this machine for float32 or, if `rounded`, bfloat16 numbers; null where torch's products are as fast.
const SymmetricKernel* symmetric_kernel(bool rounded);

#ifdef CIUIC_SYMMETRIC_KERNELS
namespace symmetric_avx2 { extern const SymmetricKernel exact; }
namespace symmetric_avx512 { extern const SymmetricKernel exact; }
#ifdef CIUIC_BFLOAT16_KERNELS
namespace symmetric_bfloat16 { extern const SymmetricKernel rounded; }
#endif
#endif

}  // namespace ciuic

#endif
