// Shares the attention of sequences among threads: a sequence and key-value head at a time.
#include "sequence_attention.h"

#include <atomic>
#include <cstring>
#include <vector>

#include "ciuic_native.h"
#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

namespace ciuic {

const SequenceKernel* sequence_kernel(bool bf16) {
#ifdef CIUIC_X86_KERNELS
  const char* const isa = kernels().name;
  // With AMX torch's attention multiplies on the matrix unit; the kernels were not compared with that.
  if (std::strcmp(isa, "amx") == 0 || std::strcmp(isa, "portable") == 0 || !__builtin_cpu_supports("fma")) return nullptr;
  if (std::strcmp(isa, "avx2") == 0) return &sequence_avx2::sequence_kernel;
#ifdef CIUIC_BFLOAT16_KERNELS
  // Intel's vector units multiply bfloat16 at half of float32's rate (measured: docs/experiments/runtime/latent-kernel.md).
  if (bf16 && __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel")) return &sequence_bfloat16::sequence_kernel;
#endif
  (void)bf16;
  return &sequence_avx512::sequence_kernel;
#else
  (void)bf16;
  return nullptr;
#endif
}

namespace {

constexpr int64_t kMaxSize = 1024;  // of a key or value. Chosen: beyond all known models; bounds scratch memory

bool is_valid(const CiuicSequenceAttention& call) {
  return call.query != nullptr && call.keys != nullptr && call.values != nullptr && call.out != nullptr &&
         call.log_sums != nullptr && call.sequences > 0 && call.kv_heads > 0 && call.heads > 0 && call.heads % call.kv_heads == 0 &&
         call.queries > 0 && call.context > 0 && call.size > 0 && call.size <= kMaxSize && call.value_size > 0 &&
         call.value_size <= kMaxSize && (call.causal == 0 || call.queries == call.context) &&
         (call.gradient == nullptr ||
          (call.query_gradient != nullptr && call.key_gradient != nullptr && call.value_gradient != nullptr));
}

// Arrays of one call; all that are written have neighbouring heads per token.
class Arrays {
 public:
  explicit Arrays(const CiuicSequenceAttention& call) : call_(call) {}

  KeyHead keys(int64_t sequence, int64_t head) const {
    return {at(call_.keys, sequence * call_.key_sequence + head * call_.key_head),
            at(call_.values, sequence * call_.value_sequence + head * call_.value_head),
            static_cast<long>(call_.key_token),
            static_cast<long>(call_.value_token),
            call_.mask == nullptr ? nullptr : call_.mask + sequence * call_.mask_sequence,
            static_cast<long>(call_.mask_query),
            static_cast<long>(call_.queries),
            static_cast<long>(call_.context),
            static_cast<int>(call_.size),
            static_cast<int>(call_.value_size),
            call_.scaling,
            call_.bf16 != 0,
            call_.causal != 0};
  }

  QueryHead query(int64_t sequence, int64_t head) const {
    const int64_t out = (sequence * call_.queries * call_.heads + head) * call_.value_size;
    return {at(call_.query, sequence * call_.query_sequence + head * call_.query_head),
            at(call_.out, out),
            call_.log_sums + (sequence * call_.heads + head) * call_.queries,
            static_cast<long>(call_.query_token),
            static_cast<long>(call_.heads * call_.value_size),
            at(call_.gradient, out),
            at(call_.query_gradient, (sequence * call_.queries * call_.heads + head) * call_.size),
            static_cast<long>(call_.heads * call_.size)};
  }

  KeyGradients gradients(int64_t sequence, int64_t head) const {
    const int64_t first = sequence * call_.context * call_.kv_heads + head;
    return {at(call_.key_gradient, first * call_.size), at(call_.value_gradient, first * call_.value_size),
            static_cast<long>(call_.kv_heads * call_.size), static_cast<long>(call_.kv_heads * call_.value_size)};
  }

 private:
  template <typename Byte>
  Byte* bytes_at(Byte* array, int64_t element) const {
    return array == nullptr ? nullptr : array + (call_.bf16 != 0 ? 2 : 4) * element;
  }
  const void* at(const void* array, int64_t element) const { return bytes_at(static_cast<const uint8_t*>(array), element); }
  void* at(void* array, int64_t element) const { return bytes_at(static_cast<uint8_t*>(array), element); }

  const CiuicSequenceAttention& call_;
};

}  // namespace
}  // namespace ciuic

int ciuic_has_sequence_attention(int bf16) { return ciuic::sequence_kernel(bf16 != 0) != nullptr; }

int ciuic_sequence_attention(const CiuicSequenceAttention* call, int threads) {
  using namespace ciuic;
  if (call == nullptr || threads < 1 || !is_valid(*call)) return CIUIC_BAD_ARGUMENT;
  const SequenceKernel* const kernel = sequence_kernel(call->bf16 != 0);
  if (kernel == nullptr) return CIUIC_BAD_ARGUMENT;
  const Arrays arrays(*call);
  const bool is_backward = call->gradient != nullptr;
  const int64_t shared = call->heads / call->kv_heads;
  const long items = static_cast<long>(call->sequences * call->kv_heads);
  const size_t floats = kernel->scratch_floats(arrays.keys(0, 0), is_backward);
  std::atomic<bool> no_memory{false};
  parallel_for(items, threads, [&](long item) {
    const int64_t sequence = item / call->kv_heads, head = item % call->kv_heads;
    Scratch scratch(Scratch::bytes_of<float>(floats));
    if (!scratch) {
      no_memory = true;
      return;
    }
    float* const memory = scratch.take<float>(floats);
    std::vector<QueryHead> queries;
    for (int64_t i = 0; i < shared; ++i) queries.push_back(arrays.query(sequence, head * shared + i));
    const KeyHead keys = arrays.keys(sequence, head);
    if (is_backward)
      kernel->backward(keys, queries.data(), static_cast<long>(shared), arrays.gradients(sequence, head), memory);
    else
      kernel->forward(keys, queries.data(), static_cast<long>(shared), memory);
  });
  return no_memory ? CIUIC_NO_MEMORY : CIUIC_OK;
}
