// Shares a prompt's attention among threads: blocks of queries of each sequence and key-value head.
#include <algorithm>
#include <atomic>

#include "bfloat16.h"
#include "ciuic_native.h"
#include "kernels.h"
#include "parallel.h"
#include "product.h"
#include "scratch.h"

namespace ciuic {
namespace {

constexpr int64_t kMaxPromptSize = 1024;  // of a key or value. Chosen: beyond all known models; bounds scratch memory

struct Blocks {
  int64_t shared, tokens, per_sequence;  // query heads of a key-value head; queries of a block; blocks of a sequence
};

Blocks blocks_of(const CiuicPromptAttention& call) {
  const int64_t shared = call.heads / call.kv_heads;
  const int64_t tokens = std::max<int64_t>(1, kPromptRows / shared);
  return {shared, tokens, (call.queries + tokens - 1) / tokens};
}

bool is_valid(const CiuicPromptAttention& call) {
  return call.query != nullptr && call.keys != nullptr && call.values != nullptr && call.sequences > 0 && call.kv_heads > 0 &&
         call.heads > 0 && call.heads % call.kv_heads == 0 && call.heads / call.kv_heads <= kPromptRows && call.queries > 0 &&
         call.context > 0 && call.size > 0 && call.size <= kMaxPromptSize && call.value_size > 0 &&
         call.value_size <= kMaxPromptSize;
}

// One thread's work on the blocks.
class Worker {
 public:
  Worker(const CiuicPromptAttention& call, const Blocks& blocks, void* out, float* memory)
      : call_(call), blocks_(blocks), out_(out), query_(memory), found_(query_ + kPromptRows * call.size),
        scratch_(found_ + kPromptRows * columns(call)) {}

  // Floats of memory, a multiple of 16.
  static size_t floats(const CiuicPromptAttention& call) {
    return (kPromptRows * (call.size + columns(call)) + prompt_scratch(sizes(call)) + 15) / 16 * 16;
  }

  void attend(int64_t sequence, int64_t head, int64_t block) {
    const int64_t first = block * blocks_.tokens, last = std::min(first + blocks_.tokens, call_.queries);
    const int64_t sequence_query = sequence * call_.query_sequence;
    long limit[kPromptRows];
    const uint8_t* mask[kPromptRows];
    long count = 0;
    for (int64_t token = first; token < last; ++token)
      for (int64_t i = 0; i < blocks_.shared; ++i, ++count) {
        const int64_t at = sequence_query + (head * blocks_.shared + i) * call_.query_head + token * call_.query_token;
        float* row = query_ + count * call_.size;
        load_floats(call_.query, call_.bf16 != 0, at, call_.size, row);
        for (int64_t j = 0; j < call_.size; ++j) row[j] *= call_.scaling;
        limit[count] = static_cast<long>(call_.causal != 0 ? std::min(token + 1, call_.context) : call_.context);
        mask[count] = call_.mask == nullptr ? nullptr : call_.mask + sequence * call_.mask_sequence + token * call_.mask_query;
      }
    const PromptRows rows = {query_, limit, call_.mask == nullptr ? nullptr : mask, count, found_};
    const PromptTokens tokens = {array(call_.keys, sequence * call_.key_sequence + head * call_.key_head),
                                 array(call_.values, sequence * call_.value_sequence + head * call_.value_head),
                                 static_cast<long>(call_.key_token),
                                 static_cast<long>(call_.value_token),
                                 static_cast<long>(call_.context),
                                 static_cast<int>(call_.size),
                                 static_cast<int>(call_.value_size),
                                 call_.bf16 != 0};
    kernels().attend_rows(rows, tokens, scratch_);
    const float* row = found_;
    for (int64_t token = first; token < last; ++token)
      for (int64_t i = 0; i < blocks_.shared; ++i, row += columns(call_))
        save(row, ((sequence * call_.queries + token) * call_.heads + head * blocks_.shared + i) * call_.value_size);
  }

 private:
  static PromptTokens sizes(const CiuicPromptAttention& call) {
    PromptTokens tokens = {};
    tokens.size = static_cast<int>(call.size);
    tokens.value_size = static_cast<int>(call.value_size);
    return tokens;
  }
  static int64_t columns(const CiuicPromptAttention& call) { return value_columns(sizes(call)); }

  const void* array(const void* from, int64_t elements) const {
    return static_cast<const uint8_t*>(from) + (call_.bf16 != 0 ? 2 : 4) * elements;
  }

  void save(const float* row, int64_t at) const {
    if (call_.bf16 == 0)
      std::copy(row, row + call_.value_size, static_cast<float*>(out_) + at);
    else
      for (int64_t j = 0; j < call_.value_size; ++j) static_cast<uint16_t*>(out_)[at + j] = to_bfloat16(row[j]);
  }

  const CiuicPromptAttention& call_;
  const Blocks& blocks_;
  void* const out_;
  float *const query_, *const found_, *const scratch_;
};

}  // namespace
}  // namespace ciuic

int ciuic_prompt_attention(const CiuicPromptAttention* call, void* out, int threads) {
  using namespace ciuic;
  if (call == nullptr || out == nullptr || threads < 1 || !is_valid(*call)) return CIUIC_BAD_ARGUMENT;
  const Blocks blocks = blocks_of(*call);
  const long items = static_cast<long>(call->sequences * call->kv_heads * blocks.per_sequence);
  const int workers = static_cast<int>(std::min<long>(threads, items));
  const size_t floats = Worker::floats(*call);
  Scratch scratch(Scratch::bytes_of<float>(floats * workers));
  if (!scratch) return CIUIC_NO_MEMORY;
  float* const of_workers = scratch.take<float>(floats * workers);
  std::atomic<long> next{0};
  parallel_for(workers, workers, [&](long number) {
    Worker worker(*call, blocks, out, of_workers + floats * number);
    for (long item; (item = next++) < items;) {
      // The last queries first: causal ones see the most tokens, so that no thread is left with a long item at the end.
      const long block = static_cast<long>(blocks.per_sequence) - 1 - item / (call->sequences * call->kv_heads);
      const long rest = item % (call->sequences * call->kv_heads);
      worker.attend(rest / call->kv_heads, rest % call->kv_heads, block);
    }
  });
  return CIUIC_OK;
}
