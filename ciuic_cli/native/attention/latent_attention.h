// Attention of a few query rows over cached latents (MLA), whose keys and values are the latents themselves.
#ifndef CIUIC_LATENT_ATTENTION_H
#define CIUIC_LATENT_ATTENTION_H

#include <cstdint>

namespace ciuic {

// Query rows that are computed together: their sums for a strip of 16 latent columns are 16 registers.
constexpr int kQueryRows = 16;
// Columns of latents and of rotary keys are multiples of it: the values of a register.
constexpr int kLatentColumns = 32;

// Some tokens of one sequence. Strides are in elements, from one token to the next.
struct LatentTokens {
  const uint16_t *latents, *rotary_keys;  // bfloat16
  int64_t latent_stride, rotary_stride;
  int64_t count, rank, rope;
};

// The state of a softmax over some tokens, for kQueryRows rows.
struct PartialAttention {
  float maximum[kQueryRows];  // of the scores
  float total[kQueryRows];    // sum of exp(score - maximum)
  float* sums;                // kQueryRows x rank: sum of exp(score - maximum) * latent
};

// How a machine attends. `attend` fills `partial` for the tokens. `query`: kQueryRows x (rank + rope) numbers on a 64-byte
// boundary, absorbed part first; bfloat16 if `bf16` and float32 otherwise. `bias`: null, or per row the address of
// `count` floats that are added to the scaled scores.
struct LatentKernel {
  void (*attend)(const void* query, const LatentTokens& tokens, float scaling, const float* const* bias, PartialAttention& partial);
  bool bf16;
};

// The kernel of this machine, or null: it needs AVX2 with fused multiply-add.
const LatentKernel* latent_kernel();

#ifdef CIUIC_X86_KERNELS
namespace latent_avx2 { extern const LatentKernel latent_kernel; }
namespace latent_avx512 { extern const LatentKernel latent_kernel; }
#ifdef CIUIC_BFLOAT16_KERNELS
namespace avx512bf16 { extern const LatentKernel latent_kernel; }
#endif
#endif

}  // namespace ciuic

#endif
