// Attention of whole sequences, forward and backward, in blocks of 64 keys and 64 queries (flash attention, Dao et al. 2022).
//
// Scores are computed with a row per key and a column per query, so that maxima, sums and gradients of the softmax are plain
// operations on vectors of queries.
#include <cmath>
#include <cstring>

#include "block_products.h"
#include "sequence_attention.h"

namespace ciuic {
namespace CIUIC_ISA {
namespace {

// Scratch memory, taken in parts.
class Memory {
 public:
  explicit Memory(float* from) : at_(reinterpret_cast<uintptr_t>(from)) {}
  template <typename Value>
  Value* take(long count) {
    Value* const taken = reinterpret_cast<Value*>(at_);
    at_ += padded(sizeof(Value) * count, 64);
    return taken;
  }
  size_t bytes() const { return at_; }  // of what was taken from null

 private:
  uintptr_t at_;
};

// The sizes of a head, filled to whole blocks and vectors.
struct Sizes {
  long size, value_size, queries, context;
  long column_stride;  // of a number of all tokens. Not a power of two: a cache has few places for lines that far apart
  explicit Sizes(const KeyHead& head)
      : size(padded(head.size, 16)), value_size(padded(head.value_size, 16)), queries(padded(head.queries, kBlock)),
        context(padded(head.context, kBlock)), column_stride(context + kBlock / 2) {}
};

template <typename Value>
TokenRows<Value> keys_of(const KeyHead& head) {
  return {head.keys, head.key_stride, head.context, head.size};
}
template <typename Value>
TokenRows<Value> values_of(const KeyHead& head) {
  return {head.values, head.value_stride, head.context, head.value_size};
}

// Sets what queries do not see of a block of scores to minus infinity.
void hide(const KeyHead& head, long first_key, long first_query, float* scores) {
  const bool diagonal = head.causal && first_key + kBlock > first_query + 1;
  for (long k = 0; k < kBlock; ++k) {
    const long key = first_key + k;
    float* const row = scores + k * kBlock;
    if (key >= head.context) {
      for (long q = 0; q < kBlock; ++q) row[q] = -INFINITY;
      continue;
    }
    if (diagonal)
      for (long q = 0; q < kBlock && first_query + q < key; ++q) row[q] = -INFINITY;
    if (head.mask != nullptr)
      for (long q = 0; q < kBlock && first_query + q < head.queries; ++q)
        if (head.mask[(first_query + q) * head.mask_stride + key] == 0) row[q] = -INFINITY;
  }
}

CIUIC_INLINE Vector& vector_at(float* from) { return *reinterpret_cast<Vector*>(from); }
CIUIC_INLINE Vector scores_to_weights(Vector score, Vector subtracted) {
  const Vector weight = exponential_of(score - subtracted);
  return score == -INFINITY ? Vector{} : weight;
}

// --- forward

struct ForwardMemory {
  Number *keys, *values, *query, *weights;
  float *scores, *out, *row, *maximum, *total;

  ForwardMemory(const Sizes& sizes, Memory& memory)
      : keys(memory.take<Number>(sizes.context * sizes.size)), values(memory.take<Number>(sizes.column_stride * sizes.value_size)),
        query(memory.take<Number>(kBlock * sizes.size)), weights(memory.take<Number>(kBlock * kBlock)),
        scores(memory.take<float>(kBlock * kBlock)), out(memory.take<float>(kBlock * sizes.value_size)),
        row(memory.take<float>(sizes.value_size)), maximum(memory.take<float>(kBlock)), total(memory.take<float>(kBlock)) {}
};

// Scores to weights of the softmax so far; the sums before are rescaled.
void add_weights(const KeyHead& head, const Sizes& sizes, const ForwardMemory& memory) {
  for (int v = 0; v < kVectorsOfBlock; ++v) {
    float* const column = memory.scores + kWidth * v;
    Vector& maximum = vector_at(memory.maximum + kWidth * v);
    Vector largest = maximum;
    for (int k = 0; k < kBlock; ++k) {
      Vector& score = vector_at(column + k * kBlock);
      score *= head.scaling;
      largest = larger(largest, score);
    }
    const Vector subtracted = largest == -INFINITY ? Vector{} : largest;  // a query that has seen no token yet
    const Vector factor = exponential_of(maximum - subtracted);
    maximum = largest;
    Vector total = vector_at(memory.total + kWidth * v) * factor;
    for (int k = 0; k < kBlock; k += kPair) {
      Vector weight[kPair];
#pragma GCC unroll 2
      for (int i = 0; i < kPair; ++i) {
        weight[i] = scores_to_weights(vector_at(column + (k + i) * kBlock), subtracted);
        total += weight[i];
      }
      store_right(weight, k, kWidth * v, memory.weights);
    }
    vector_at(memory.total + kWidth * v) = total;
    for (long j = 0; j < sizes.value_size; ++j) vector_at(memory.out + j * kBlock + kWidth * v) *= factor;
  }
}

template <typename Value>
void attend(const KeyHead& head, const QueryHead& queries, const Sizes& sizes, const ForwardMemory& memory) {
  for (long first = 0; first < head.queries; first += kBlock) {
    const long count = head.queries - first < kBlock ? head.queries - first : kBlock;
    const Value* const query = static_cast<const Value*>(queries.query) + first * queries.query_stride;
    pack_right_blocks(TokenRows<Value>(query, queries.query_stride, count, head.size), kBlock, sizes.size, memory.query);
    std::memset(memory.out, 0, sizeof(float) * kBlock * sizes.value_size);
    for (int q = 0; q < kBlock; ++q) {
      memory.maximum[q] = -INFINITY;
      memory.total[q] = 0.0f;
    }
    for (long key = 0; key < (head.causal ? first + kBlock : head.context) && key < head.context; key += kBlock) {
      multiply({memory.keys + key * sizes.size, sizes.size, kBlock}, {memory.query, kBlock}, sizes.size, memory.scores, true);
      hide(head, key, first, memory.scores);
      add_weights(head, sizes, memory);
      multiply({memory.values + key, sizes.column_stride, sizes.value_size}, {memory.weights, kBlock}, kBlock, memory.out, false);
    }
    for (long q = 0; q < count; ++q) {
      const float total = memory.total[q], factor = total == 0.0f ? 0.0f : 1.0f / total;
      queries.log_sums[first + q] = total == 0.0f ? INFINITY : memory.maximum[q] + std::log(total);
      for (int j = 0; j < head.value_size; ++j) memory.row[j] = memory.out[j * kBlock + q] * factor;
      store_row(memory.row, head.value_size, static_cast<Value*>(queries.out) + (first + q) * queries.out_stride);
    }
  }
}

template <typename Value>
void forward_of(const KeyHead& head, const QueryHead* queries, long count, const Sizes& sizes, const ForwardMemory& memory) {
  pack_left(keys_of<Value>(head), sizes.context, sizes.size, memory.keys);
  pack_left_transposed(values_of<Value>(head), sizes.column_stride, sizes.value_size, memory.values);
  for (long i = 0; i < count; ++i) attend<Value>(head, queries[i], sizes, memory);
}

void forward(const KeyHead& head, const QueryHead* queries, long count, float* scratch) {
  const Sizes sizes(head);
  Memory memory(scratch);
  const ForwardMemory parts(sizes, memory);
  (head.bf16 ? forward_of<uint16_t> : forward_of<float>)(head, queries, count, sizes, parts);
}

// --- backward

struct BackwardMemory {
  Number *keys, *keys_by_column, *values;                          // left factors, by token, by number, by token
  Number *query, *gradient, *query_by_token, *gradient_by_token;  // right factors, two by block and two by token
  Number *weights, *scores_left, *scores_right;                   // of a block; gradients of scores as both factors
  float *scores, *weight_gradients, *row, *log_sums, *products;
  float *query_gradients, *key_gradients, *value_gradients;

  BackwardMemory(const Sizes& sizes, Memory& memory)
      : keys(memory.take<Number>(sizes.context * sizes.size)), keys_by_column(memory.take<Number>(sizes.column_stride * sizes.size)),
        values(memory.take<Number>(sizes.context * sizes.value_size)), query(memory.take<Number>(sizes.queries * sizes.size)),
        gradient(memory.take<Number>(sizes.queries * sizes.value_size)),
        query_by_token(memory.take<Number>(sizes.queries * sizes.size)),
        gradient_by_token(memory.take<Number>(sizes.queries * sizes.value_size)), weights(memory.take<Number>(kBlock * kBlock)),
        scores_left(memory.take<Number>(kBlock * kBlock)), scores_right(memory.take<Number>(kBlock * kBlock)),
        scores(memory.take<float>(kBlock * kBlock)), weight_gradients(memory.take<float>(kBlock * kBlock)),
        row(memory.take<float>(sizes.size)),
        log_sums(memory.take<float>(sizes.queries)), products(memory.take<float>(sizes.queries)),
        query_gradients(memory.take<float>(sizes.queries * sizes.size)),
        key_gradients(memory.take<float>(sizes.context * sizes.size)),
        value_gradients(memory.take<float>(sizes.context * sizes.value_size)) {}
};

// Weights of the softmax, and gradients of the scores, weight * (its gradient - the sum of both) * scaling.
void differentiate(const KeyHead& head, long first, const BackwardMemory& memory) {
  for (int v = 0; v < kVectorsOfBlock; ++v) {
    const long column = kWidth * v;
    const Vector subtracted = vector_at(memory.log_sums + first + column), product = vector_at(memory.products + first + column);
    for (int k = 0; k < kBlock; k += kPair) {
      Vector gradient[kPair];
#pragma GCC unroll 2
      for (int i = 0; i < kPair; ++i) {
        const long at = (k + i) * kBlock + column;
        const Vector weight = scores_to_weights(vector_at(memory.scores + at) * head.scaling, subtracted);
        gradient[i] = weight * (vector_at(memory.weight_gradients + at) - product) * head.scaling;
        store_left(weight, k + i, column, memory.weights);
        store_left(gradient[i], k + i, column, memory.scores_left);
      }
      store_right(gradient, k, column, memory.scores_right);
    }
  }
}

template <typename Value>
void prepare_query(const KeyHead& head, const QueryHead& queries, const Sizes& sizes, const BackwardMemory& memory) {
  const TokenRows<Value> query(queries.query, queries.query_stride, head.queries, head.size);
  const TokenRows<Value> gradient(queries.gradient, queries.out_stride, head.queries, head.value_size);
  pack_right_blocks(query, sizes.queries, sizes.size, memory.query);
  pack_right(query, sizes.queries, sizes.size, memory.query_by_token);
  pack_right_blocks(gradient, sizes.queries, sizes.value_size, memory.gradient);
  pack_right(gradient, sizes.queries, sizes.value_size, memory.gradient_by_token);
  for (long q = 0; q < sizes.queries; ++q) {
    memory.products[q] = q < head.queries ? dot(static_cast<const Value*>(queries.out) + q * queries.out_stride,
                                                gradient.from + q * gradient.stride, head.value_size)
                                          : 0.0f;
    memory.log_sums[q] = q < head.queries ? queries.log_sums[q] : INFINITY;
  }
  std::memset(memory.query_gradients, 0, sizeof(float) * sizes.queries * sizes.size);
}

void add_gradients(const KeyHead& head, const Sizes& sizes, const BackwardMemory& memory) {
  for (long key = 0; key < head.context; key += kBlock) {
    const Left keys = {memory.keys + key * sizes.size, sizes.size, kBlock};
    const Left values = {memory.values + key * sizes.value_size, sizes.value_size, kBlock};
    for (long first = head.causal ? key : 0; first < head.queries; first += kBlock) {
      multiply(keys, {memory.query + first * sizes.size, kBlock}, sizes.size, memory.scores, true);
      hide(head, key, first, memory.scores);
      multiply(values, {memory.gradient + first * sizes.value_size, kBlock}, sizes.value_size, memory.weight_gradients, true);
      differentiate(head, first, memory);
      multiply({memory.weights, kBlock, kBlock}, {memory.gradient_by_token + first * sizes.value_size, sizes.value_size}, kBlock,
               memory.value_gradients + key * sizes.value_size, false);
      multiply({memory.scores_left, kBlock, kBlock}, {memory.query_by_token + first * sizes.size, sizes.size}, kBlock,
               memory.key_gradients + key * sizes.size, false);
      multiply({memory.keys_by_column + key, sizes.column_stride, sizes.size}, {memory.scores_right, kBlock}, kBlock,
               memory.query_gradients + first * sizes.size, false);
    }
  }
}

template <typename Value>
void store_rows(const float* from, long columns, long count, long width, void* to, long stride) {
  for (long i = 0; i < count; ++i) store_row(from + i * columns, width, static_cast<Value*>(to) + i * stride);
}

template <typename Value>
void backward_of(const KeyHead& head, const QueryHead* queries, long count, const KeyGradients& gradients, const Sizes& sizes,
                 const BackwardMemory& memory) {
  pack_left(keys_of<Value>(head), sizes.context, sizes.size, memory.keys);
  pack_left_transposed(keys_of<Value>(head), sizes.column_stride, sizes.size, memory.keys_by_column);
  pack_left(values_of<Value>(head), sizes.context, sizes.value_size, memory.values);
  std::memset(memory.key_gradients, 0, sizeof(float) * sizes.context * sizes.size);
  std::memset(memory.value_gradients, 0, sizeof(float) * sizes.context * sizes.value_size);
  for (long i = 0; i < count; ++i) {
    prepare_query<Value>(head, queries[i], sizes, memory);
    add_gradients(head, sizes, memory);
    Value* const to = static_cast<Value*>(queries[i].query_gradient);
    for (long q = 0; q < head.queries; ++q) {
      const float* const column = memory.query_gradients + q / kBlock * kBlock * sizes.size + q % kBlock;
      for (int j = 0; j < head.size; ++j) memory.row[j] = column[j * kBlock];
      store_row(memory.row, head.size, to + q * queries[i].query_gradient_stride);
    }
  }
  store_rows<Value>(memory.key_gradients, sizes.size, head.context, head.size, gradients.keys, gradients.key_stride);
  store_rows<Value>(memory.value_gradients, sizes.value_size, head.context, head.value_size, gradients.values,
                    gradients.value_stride);
}

void backward(const KeyHead& head, const QueryHead* queries, long count, const KeyGradients& gradients, float* scratch) {
  const Sizes sizes(head);
  Memory memory(scratch);
  const BackwardMemory parts(sizes, memory);
  (head.bf16 ? backward_of<uint16_t> : backward_of<float>)(head, queries, count, gradients, sizes, parts);
}

size_t scratch_floats(const KeyHead& head, bool is_backward) {
  const Sizes sizes(head);
  Memory memory(nullptr);
  if (is_backward)
    BackwardMemory(sizes, memory);
  else
    ForwardMemory(sizes, memory);
  return memory.bytes() / sizeof(float);
}

}  // namespace

extern const SequenceKernel sequence_kernel;
const SequenceKernel sequence_kernel = {scratch_floats, forward, backward};

}  // namespace CIUIC_ISA
}  // namespace ciuic
