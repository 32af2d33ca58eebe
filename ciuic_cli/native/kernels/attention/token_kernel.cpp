// Attention of the query heads that share a key-value head, for one token of a sequence. Tokens are taken kBlock at a time
// with a running maximum of the scores (flash attention, Dao et al. 2022), so that a block's keys and values are read once.
//
// Sums run over 16 interleaved partial sums whatever the vector length, so that every instruction set rounds alike.
#include <cfloat>
#include <cstring>

#include "exponential.h"
#include "kernels_of_isa.h"
#include "vector_sums.h"

namespace ciuic {
namespace CIUIC_ISA {
namespace {

constexpr int kLanes = 16;
constexpr int kBlock = 64;   // tokens; a block of 128 bfloat16 columns takes half of a first-level cache. Chosen.
constexpr int kTogether = 4;  // heads, and vectors of columns, whose sums stay in registers

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));

#define CIUIC_INLINE inline __attribute__((always_inline))

CIUIC_INLINE void load(const float* from, Floats& to) { to = *reinterpret_cast<const Floats*>(from); }
CIUIC_INLINE void load(const uint16_t* from, Floats& to) {
  const Bits bits = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Bits) << 16;
  to = reinterpret_cast<Floats>(bits);
}

// out[i] = the sum of the 16 numbers of v[i], added in the same order everywhere.
CIUIC_INLINE void lane_sums(const float (*v)[kLanes], float* out) {
#if defined(__AVX512F__)
  __m512 vectors[kLanes];
  for (int i = 0; i < kLanes; ++i) vectors[i] = _mm512_load_ps(v[i]);
  _mm512_storeu_ps(out, sums_of(vectors));
#else
  for (int i = 0; i < kLanes; ++i) {
    float quad[4];
    for (int q = 0; q < 4; ++q) quad[q] = (v[i][4 * q] + v[i][4 * q + 2]) + (v[i][4 * q + 1] + v[i][4 * q + 3]);
    out[i] = (quad[0] + quad[2]) + (quad[1] + quad[3]);
  }
#endif
}

// score[h][t] of H heads and `count` <= kBlock tokens. Scores of the tokens up to the next multiple of 16 are written, too.
template <int H, typename Value>
void scores_of(const float* query, const Value* keys, long count, long stride, int size, float (*score)[kBlock]) {
  alignas(64) float partial[H][kLanes][kLanes];
  for (long first = 0; first < count; first += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      const Value* key = keys + (first + i < count ? first + i : count - 1) * stride;
      Floats sums[H] = {};
      for (int j = 0; j < size; j += kLanes) {
        Floats part, of_query;
        load(key + j, part);
        for (int h = 0; h < H; ++h) {
          load(query + h * size + j, of_query);
          sums[h] += of_query * part;
        }
      }
      for (int h = 0; h < H; ++h) *reinterpret_cast<Floats*>(partial[h][i]) = sums[h];
    }
    for (int h = 0; h < H; ++h) lane_sums(partial[h], score[h] + first);
  }
}

// sums[h * size + j] += weight[h][t] values[t][j] over `count` tokens, for H heads and V vectors of columns.
template <int H, int V, typename Value>
CIUIC_INLINE void add_columns(const float (*weight)[kBlock], const Value* values, long count, long stride, int size, float* sums) {
  Floats sum[H][V];
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < V; ++i) load(sums + h * size + kLanes * i, sum[h][i]);
  for (long t = 0; t < count; ++t) {
    Floats part[V];
    for (int i = 0; i < V; ++i) load(values + t * stride + kLanes * i, part[i]);
    for (int h = 0; h < H; ++h)
      for (int i = 0; i < V; ++i) sum[h][i] += weight[h][t] * part[i];
  }
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < V; ++i) *reinterpret_cast<Floats*>(sums + h * size + kLanes * i) = sum[h][i];
}

template <int H, typename Value>
void add_values(const float (*weight)[kBlock], const Value* values, long count, long stride, int size, float* sums) {
  int j = 0;
  for (; j + kTogether * kLanes <= size; j += kTogether * kLanes)
    add_columns<H, kTogether>(weight, values + j, count, stride, size, sums + j);
  for (; j < size; j += kLanes) add_columns<H, 1>(weight, values + j, count, stride, size, sums + j);
}

// Scores of one head to weights; updates its maximum, total and sums.
void weights_of(float* score, const float* bias, long count, int size, float& maximum, float& total, float* sums) {
  float largest[kLanes];
  for (int i = 0; i < kLanes; ++i) largest[i] = maximum;
  if (bias != nullptr)
    for (long t = 0; t < count; ++t) score[t] += bias[t];
  for (long t = count; t < kBlock; ++t) score[t] = -FLT_MAX;
  for (long t = 0; t < kBlock; t += kLanes)
    for (int i = 0; i < kLanes; ++i) largest[i] = largest[i] < score[t + i] ? score[t + i] : largest[i];
  float found = largest[0];
  for (int i = 1; i < kLanes; ++i) found = found < largest[i] ? largest[i] : found;
  float parts[kLanes] = {};
  for (long t = 0; t < kBlock; t += kLanes)
    for (int i = 0; i < kLanes; ++i) score[t + i] = t + i < count ? exponential(score[t + i] - found) : 0.0f;
  for (long t = 0; t < kBlock; t += kLanes)
    for (int i = 0; i < kLanes; ++i) parts[i] += score[t + i];
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
  if (found != maximum) {
    const float factor = exponential(maximum - found);
    total *= factor;
    for (int j = 0; j < size; ++j) sums[j] *= factor;
    maximum = found;
  }
  total += parts[0];
}

// A number that a template can take.
template <int N>
struct Number {
  static constexpr int value = N;
};

// Calls part(Number<n>, first head) for `heads` heads, at most kTogether at a time.
template <typename Part>
CIUIC_INLINE void in_parts(int heads, const Part& part) {
  int h = 0;
  for (; h + kTogether <= heads; h += kTogether) part(Number<kTogether>(), h);
  switch (heads - h) {
    case 3: return part(Number<3>(), h);
    case 2: return part(Number<2>(), h);
    case 1: return part(Number<1>(), h);
    default: return;
  }
}

template <typename Value>
void attend_to(const float* query, int heads, const CachedTokens& tokens, HeadSums& found) {
  const int size = tokens.size;
  std::memset(found.sums, 0, sizeof(float) * heads * size);
  for (int h = 0; h < heads; ++h) {
    found.maximum[h] = -FLT_MAX;
    found.total[h] = 0.0f;
  }
  alignas(64) float score[kMaxHeadsTogether][kBlock];
  for (long first = 0; first < tokens.count; first += kBlock) {
    const long count = tokens.count - first < kBlock ? tokens.count - first : kBlock;
    const Value* keys = static_cast<const Value*>(tokens.keys) + first * tokens.stride;
    const Value* values = static_cast<const Value*>(tokens.values) + first * tokens.stride;
    const auto scores = [&](auto number, int h) {
      scores_of<decltype(number)::value>(query + h * size, keys, count, tokens.stride, size, score + h);
    };
    const auto sums = [&](auto number, int h) {
      add_values<decltype(number)::value>(score + h, values, count, tokens.stride, size, found.sums + h * size);
    };
    in_parts(heads, scores);
    for (int h = 0; h < heads; ++h)
      weights_of(score[h], tokens.bias == nullptr ? nullptr : tokens.bias + first, count, size, found.maximum[h], found.total[h],
                 found.sums + h * size);
    in_parts(heads, sums);
  }
}

}  // namespace

void attend(const float* query, int heads, const CachedTokens& tokens, HeadSums& found) {
  if (tokens.bf16)
    attend_to<uint16_t>(query, heads, tokens, found);
  else
    attend_to<float>(query, heads, tokens, found);
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
