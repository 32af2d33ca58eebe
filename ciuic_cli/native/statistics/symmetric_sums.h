// Sums of symmetric products, moment += left^T right, of which only the lower half is computed.
//
// Columns are cut into strips. A strip is packed in steps, one 4-byte element per column and step. An element is a float32
// number of one token, or two bfloat16 numbers of two neighbouring tokens.
#ifndef CIUIC_SYMMETRIC_SUMS_H
#define CIUIC_SYMMETRIC_SUMS_H

#include <cstdint>

namespace ciuic {

// Most columns of a strip.
constexpr int kLongestStrip = 64;
// Steps that are packed together. More take less reading and writing of sums, fewer less memory: 3 KB per four columns.
// Measured: docs/experiments/statistics/native-sums.md.
constexpr int kSteps = 384;
// Numbers of a packed strip of `Strip` columns.
template <long Strip>
constexpr long kStripSize = kSteps * Strip;
// Strips of the left factor that stay in the second-level cache while each strip of the right one is read once.
constexpr int kStripsTogether = 4;

// Packs `tokens` rows of `columns` (at most a strip) numbers, `stride` apart. What is missing of the last step and of the
// strip becomes 0.
struct StripPacking {
  void (*exact)(const float* from, long stride, long tokens, long columns, float* to);
  void (*bfloat16)(const uint16_t* from, long stride, long tokens, long columns, float* to);
};

// The inner loops of one instruction set.
struct SymmetricKernel {
  int strip, tokens_per_step;
  StripPacking left, right;
  // sums[a * stride + b] += sum over steps of left[a] * right[b] for a and b below `strip`, `left` and `right` packed; then
  // the same for the next strips of `left`, kStripSize numbers apart, and their sums, `strip` rows apart.
  // left_bf16: whether `left` was packed from bfloat16.
  void (*multiply)(const float* left, const float* right, long strips, long steps, bool left_bf16, float* sums, long stride);

  bool packs_alike() const { return left.exact == right.exact; }
};

// The kernel of this machine for float32 or, if `rounded`, bfloat16 numbers; null where torch's products are as fast.
const SymmetricKernel* symmetric_kernel(bool rounded);

#ifdef CIUIC_SYMMETRIC_KERNELS
namespace symmetric_avx2 { extern const SymmetricKernel exact; }
namespace symmetric_avx512 { extern const SymmetricKernel exact; }
#ifdef CIUIC_BFLOAT16_KERNELS
namespace symmetric_bfloat16 { extern const SymmetricKernel rounded; }
#endif
#ifdef CIUIC_AMX_KERNELS
namespace symmetric_amx { extern const SymmetricKernel rounded, exact; }
#endif
#endif

}  // namespace ciuic

#endif
