// Scores of an indexer (DeepSeek V3.2, V4): for every token, the weighted sum over index heads of relu(query . key).
//
// Keys are bfloat16 and lie in memory token by token. 16 tokens at a time are brought into the lanes of a vector, so that a
// query's number is multiplied by 16 keys at once and every sum runs over ascending columns. Results are the same bytes
// whatever the vector length, with and without fused multiply-add if queries are bfloat16 numbers: then products are exact.
#include "index_scores.h"
#include "kernels_of_isa.h"

namespace ciuic {
namespace CIUIC_ISA {

typedef float Floats __attribute__((vector_size(4 * kIndexTokens)));
typedef int32_t Ints __attribute__((vector_size(4 * kIndexTokens)));

// Heads that are computed together: their sums stay in registers.
#if defined(__AVX512F__)
constexpr int kHeads = 8;
#elif defined(__AVX2__)
constexpr int kHeads = 4;
#else
constexpr int kHeads = 2;
#endif

static inline __attribute__((always_inline)) void as_floats(const Ints& bits, Floats& value) {
  __builtin_memcpy(&value, &bits, sizeof value);
}

// Adds the weighted scores of HEADS heads to `total`. pairs[j] holds columns 2 j (low half) and 2 j + 1 of 16 tokens.
template <int HEADS>
static inline __attribute__((always_inline)) void add_heads(const float* query, const float* weight, const Ints* pairs,
                                                            long columns, Floats& total) {
  Floats sum[HEADS];
  for (int h = 0; h < HEADS; ++h) sum[h] = Floats{};
  for (long j = 0; j < columns; j += 2) {
    Floats even, odd;
    as_floats(pairs[j / 2] << 16, even);
    as_floats(pairs[j / 2] & static_cast<int32_t>(0xFFFF0000), odd);
#pragma GCC unroll 8
    for (int h = 0; h < HEADS; ++h) {
      sum[h] = sum[h] + query[h * columns + j] * even;
      sum[h] = sum[h] + query[h * columns + j + 1] * odd;
    }
  }
  for (int h = 0; h < HEADS; ++h) {
    const Floats positive = sum[h] > 0.0f ? sum[h] : Floats{};
    total = total + weight[h] * positive;
  }
}

void index_scores(const float* queries, const float* weights, long rows, long heads, long columns, const uint16_t* keys,
                  long key_stride, long tokens, float* scores, long score_stride) {
  Ints pairs[kMaxIndexColumns / 2];
  for (long first = 0; first < tokens; first += kIndexTokens) {
    const long count = tokens - first < kIndexTokens ? tokens - first : kIndexTokens;
    int32_t* to = reinterpret_cast<int32_t*>(pairs);
    for (long t = 0; t < kIndexTokens; ++t) {
      const uint16_t* key = keys + (first + (t < count ? t : count - 1)) * key_stride;
      for (long j = 0; j < columns / 2; ++j) __builtin_memcpy(to + j * kIndexTokens + t, key + 2 * j, sizeof(int32_t));
    }
    for (long row = 0; row < rows; ++row) {
      const float *query = queries + row * heads * columns, *weight = weights + row * heads;
      Floats total = {};
      long h = 0;
      for (; h + kHeads <= heads; h += kHeads) add_heads<kHeads>(query + h * columns, weight + h, pairs, columns, total);
      for (; h < heads; ++h) add_heads<1>(query + h * columns, weight + h, pairs, columns, total);
      float found[kIndexTokens];
      __builtin_memcpy(found, &total, sizeof found);
      __builtin_memcpy(scores + row * score_stride + first, found, sizeof(float) * count);
    }
  }
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
