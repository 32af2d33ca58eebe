// Attention of whole sequences, forward and backward, as layers need it while they are differentiated.
#ifndef CIUIC_SEQUENCE_ATTENTION_H
#define CIUIC_SEQUENCE_ATTENTION_H

#include <cstddef>
#include <cstdint>

namespace ciuic {

// One key-value head of a sequence. Keys, values and all arrays of QueryHead but `log_sums` are bfloat16 if `bf16` and float32
// otherwise. Strides are in elements, between neighbouring tokens.
struct KeyHead {
  const void *keys, *values;
  long key_stride, value_stride;
  const uint8_t* mask;  // null, or a byte per query and token of the context: 0 hides the token
  long mask_stride;     // between queries
  long queries, context;
  int size, value_size;  // numbers of a key and of a value
  float scaling;
  bool bf16, causal;  // causal: query i sees the first i + 1 tokens
};

// A query head that attends to it: out = softmax(scaling query . keys) . values, log_sums = the logarithm of the sum of
// exp(scaling query . key) over the tokens that a query sees. Backward, `out` and `log_sums` are read.
struct QueryHead {
  const void* query;
  void* out;
  float* log_sums;
  long query_stride, out_stride;
  const void* gradient;  // at `out`, with its stride
  void* query_gradient;
  long query_gradient_stride;
};

struct KeyGradients {
  void *keys, *values;
  long key_stride, value_stride;
};

// The loops of one instruction set. Scratch memory starts on a 64-byte boundary.
struct SequenceKernel {
  size_t (*scratch_floats)(const KeyHead& head, bool backward);
  void (*forward)(const KeyHead& head, const QueryHead* queries, long count, float* scratch);
  void (*backward)(const KeyHead& head, const QueryHead* queries, long count, const KeyGradients& gradients, float* scratch);
};

// The kernel of this machine; null where torch's attention stays. bf16: of the arrays.
const SequenceKernel* sequence_kernel(bool bf16);

#ifdef CIUIC_X86_KERNELS
namespace sequence_avx2 { extern const SequenceKernel sequence_kernel; }
namespace sequence_avx512 { extern const SequenceKernel sequence_kernel; }
#ifdef CIUIC_BFLOAT16_KERNELS
namespace sequence_bfloat16 { extern const SequenceKernel sequence_kernel; }
#endif
#endif

}  // namespace ciuic

#endif
