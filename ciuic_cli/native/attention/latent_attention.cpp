// Shares attention over latents among threads: blocks of query rows and ranges of tokens, whose softmaxes are merged at the end.
#include "latent_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>

#include "bfloat16.h"
#include "ciuic_native.h"
#include "parallel.h"
#include "product.h"

namespace ciuic {
namespace {

// Tokens of a work item: at least as many as amortise copying the queries, and few enough for threads to share a context.
// Chosen. At most kMaxRanges items share a block of rows, which bounds the memory of partial sums.
constexpr long kTokensPerItem = 512, kMaxRanges = 32;

struct Shape {
  long blocks, ranges, tokens;  // of query rows per sequence; of tokens per block; tokens per range
  long rank, width;
};

Shape shape_of(const CiuicLatentAttention& call) {
  const long most = (call.context + kMaxRanges - 1) / kMaxRanges;
  const long tokens = std::max(kTokensPerItem, most);
  return {(call.rows + kQueryRows - 1) / kQueryRows, (call.context + tokens - 1) / tokens, tokens, call.rank,
          call.rank + call.rope};
}

void copy(const uint16_t* from, int64_t count, uint16_t* to) { std::copy_n(from, count, to); }
void copy(const uint16_t* from, int64_t count, float* to) { std::transform(from, from + count, to, from_bfloat16); }

// The rows of one block, each absorbed part beside its rotary part. Rows beyond the last repeat it.
template <typename Value>
void copy_queries(const CiuicLatentAttention& call, const Shape& shape, long sequence, long block, Value* to) {
  for (int r = 0; r < kQueryRows; ++r) {
    const long row = sequence * call.rows + std::min<long>(kQueryRows * block + r, call.rows - 1);
    copy(call.query + row * call.rank, call.rank, to + r * shape.width);
    if (call.rope > 0) copy(call.rotary_query + row * call.rope, call.rope, to + r * shape.width + call.rank);
  }
}

void attend_to_range(const CiuicLatentAttention& call, const Shape& shape, const LatentKernel& kernel, long sequence, long block,
                     long range, const void* query, PartialAttention& partial) {
  const long begin = range * shape.tokens;
  const LatentTokens tokens = {call.latents + sequence * call.latent_sequence + begin * call.latent_token,
                               call.rope == 0 ? call.latents
                                              : call.rotary_keys + sequence * call.rotary_sequence + begin * call.rotary_token,
                               call.latent_token,
                               call.rope == 0 ? 0 : call.rotary_token,
                               std::min(shape.tokens, call.context - begin),
                               call.rank,
                               call.rope};
  const float* bias[kQueryRows];
  if (call.bias != nullptr)
    for (int r = 0; r < kQueryRows; ++r) {
      const long row = sequence * call.rows + std::min<long>(kQueryRows * block + r, call.rows - 1);
      bias[r] = call.bias + row * call.context + begin;
    }
  kernel.attend(query, tokens, call.scaling, call.bias == nullptr ? nullptr : bias, partial);
}

// out = the softmax's mean of the latents, from the partial sums of all ranges. `sink`: null, or one more score.
void merge(const PartialAttention* partial, long ranges, int row, const float* sink, long rank, float* out) {
  float maximum = partial[0].maximum[row];
  if (sink != nullptr) maximum = std::max(maximum, *sink);
  for (long i = 1; i < ranges; ++i) maximum = std::max(maximum, partial[i].maximum[row]);
  float total = sink == nullptr ? 0.0f : std::exp(*sink - maximum);
  std::memset(out, 0, sizeof(float) * rank);
  for (long i = 0; i < ranges; ++i) {
    const float factor = std::exp(partial[i].maximum[row] - maximum);
    total += factor * partial[i].total[row];
    const float* sums = partial[i].sums + row * rank;
    for (long j = 0; j < rank; ++j) out[j] += factor * sums[j];
  }
  for (long j = 0; j < rank; ++j) out[j] /= total;
}

}  // namespace
}  // namespace ciuic

int ciuic_has_latent_attention() { return ciuic::latent_kernel() != nullptr; }

int ciuic_latent_attention(const CiuicLatentAttention* call, float* out, int threads) {
  using namespace ciuic;
  if (call == nullptr || out == nullptr || call->query == nullptr || call->latents == nullptr || threads < 1)
    return CIUIC_BAD_ARGUMENT;
  if (call->sequences < 1 || call->rows < 1 || call->context < 1 || call->rank < 1 || call->rope < 0 ||
      call->rank % kLatentColumns != 0 || call->rope % kLatentColumns != 0)
    return CIUIC_BAD_ARGUMENT;
  if (call->rope > 0 && (call->rotary_query == nullptr || call->rotary_keys == nullptr)) return CIUIC_BAD_ARGUMENT;
  const LatentKernel* const kernel = latent_kernel();
  if (kernel == nullptr) return CIUIC_BAD_ARGUMENT;
  const Shape shape = shape_of(*call);
  const long items = call->sequences * shape.blocks * shape.ranges;
  const std::unique_ptr<PartialAttention[]> partial(new (std::nothrow) PartialAttention[items]);
  const std::unique_ptr<float[]> sums(new (std::nothrow) float[items * kQueryRows * shape.rank]);
  const long query_bytes = kQueryRows * shape.width * static_cast<long>(kernel->bf16 ? sizeof(uint16_t) : sizeof(float));
  const std::unique_ptr<uint8_t[]> memory(new (std::nothrow) uint8_t[call->sequences * shape.blocks * query_bytes + 64]);
  if (!partial || !sums || !memory) return CIUIC_NO_MEMORY;
  uint8_t* const queries = aligned(memory.get());
  for (long i = 0; i < call->sequences * shape.blocks; ++i) {
    void* const to = queries + i * query_bytes;
    if (kernel->bf16)
      copy_queries(*call, shape, i / shape.blocks, i % shape.blocks, static_cast<uint16_t*>(to));
    else
      copy_queries(*call, shape, i / shape.blocks, i % shape.blocks, static_cast<float*>(to));
  }
  // Blocks of rows alternate fastest, so that neighbouring items read the same tokens.
  parallel_for(items, threads, [&](long item) {
    const long block = item % shape.blocks, range = item / shape.blocks % shape.ranges;
    const long sequence = item / (shape.blocks * shape.ranges);
    const long number = (sequence * shape.blocks + block) * shape.ranges + range;
    partial[number].sums = sums.get() + number * kQueryRows * shape.rank;
    attend_to_range(*call, shape, *kernel, sequence, block, range, queries + (sequence * shape.blocks + block) * query_bytes,
                    partial[number]);
  });
  for (long row = 0; row < call->sequences * call->rows; ++row) {
    const long sequence = row / call->rows, in_sequence = row % call->rows;
    const long first = (sequence * shape.blocks + in_sequence / kQueryRows) * shape.ranges;
    merge(partial.get() + first, shape.ranges, static_cast<int>(in_sequence % kQueryRows),
          call->sinks == nullptr ? nullptr : call->sinks + in_sequence, shape.rank, out + row * shape.rank);
  }
  return CIUIC_OK;
}
