// A language model's predictions, softmax(logits): a row's maximum, sum and drawn label, and what its columns add to sums over
// tokens. Sums run over 16 interleaved partial sums, so that every instruction set rounds alike.
#include <cfloat>

#include "bfloat16.h"
#include "exponential.h"
#include "kernels_of_isa.h"

namespace ciuic {
namespace CIUIC_ISA {
namespace {

constexpr int kLanes = 16;
constexpr int kBlock = 256;  // logits that are handled together; in float32 they stay in a first-level cache. Chosen.
constexpr int kParts = 128;  // parts of a row whose sums are kept until the label's part is known. Chosen.

inline float as_float(float value) { return value; }
inline float as_float(uint16_t value) { return from_bfloat16(value); }
inline void store(float value, float* to) { *to = value; }
inline void store(float value, uint16_t* to) { *to = finite_to_bfloat16(value); }

// Results of `exponential` below this, where it is clamped, count as 0: no draw finds such a label.
constexpr float kLeastExponential = 2e-38f;

// exp(logit - maximum) of `count` <= kBlock logits, and zeros up to the next multiple of 16.
template <typename Number>
void exponentials(const Number* logits, long count, float maximum, float* out) {
  for (long j = 0; j < count; ++j) {
    const float value = exponential(as_float(logits[j]) - maximum);
    out[j] = value > kLeastExponential ? value : 0.0f;
  }
  for (long j = count; j % kLanes != 0; ++j) out[j] = 0.0f;
}

// The sum of `count` numbers, with zeros up to the next multiple of 16.
float sum_of(const float* numbers, long count) {
  float lanes[kLanes] = {};
  for (long first = 0; first < count; first += kLanes)
    for (int i = 0; i < kLanes; ++i) lanes[i] += numbers[first + i];
  float total = 0.0f;
  for (int i = 0; i < kLanes; ++i) total += lanes[i];
  return total;
}

// Integers in the order of the numbers that are not NaN. Compilers turn a maximum of integers into vector instructions.
inline int32_t ordered(float value) {
  int32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits ^ (bits >> 31 & 0x7FFFFFFF);
}

inline float number_of(int32_t order) {
  const int32_t bits = order ^ (order >> 31 & 0x7FFFFFFF);
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename Number>
float maximum_of(const Number* logits, long count) {
  int32_t maximum = ordered(-FLT_MAX);
  for (long j = 0; j < count; ++j) {
    const int32_t order = ordered(as_float(logits[j]));
    maximum = order > maximum ? order : maximum;
  }
  return number_of(maximum);
}

template <typename Number>
Prediction prediction_of(const Number* logits, long count, float draw) {
  const float maximum = maximum_of(logits, count);
  float block[kBlock], sums[kParts] = {}, total = 0.0f;
  const long blocks = (count + kBlock - 1) / kBlock, together = (blocks + kParts - 1) / kParts;
  for (long number = 0; number < blocks; ++number) {
    const long first = number * kBlock, size = count - first < kBlock ? count - first : kBlock;
    exponentials(logits + first, size, maximum, block);
    sums[number / together] += sum_of(block, size);
  }
  for (int i = 0; i < kParts; ++i) total += sums[i];

  // The first label at which the running sum exceeds the drawn share; the last of its part if rounding leaves none.
  float left = draw * total;
  const long last = (blocks - 1) / together;
  long part = 0;
  for (; part < last && left >= sums[part]; ++part) left -= sums[part];
  const long length = together * kBlock, end = (part + 1) * length < count ? (part + 1) * length : count;
  long label = end - 1;
  for (long first = part * length; first < end; first += kBlock) {
    const long size = end - first < kBlock ? end - first : kBlock;
    exponentials(logits + first, size, maximum, block);
    long j = 0;
    for (; j < size && left >= block[j]; ++j) left -= block[j];
    if (j < size) {
      label = first + j;
      break;
    }
  }
  return {maximum, 1.0f / total, label};
}

template <typename Number, typename Weight>
void columns_of(const PredictionColumns& call, const Prediction* predictions, float* token_weights) {
  const Number* logits = static_cast<const Number*>(call.logits);
  Number* gradient = static_cast<Number*>(call.gradient);
  Weight* weights = static_cast<Weight*>(call.weights);
  // The four sums of a block lie side by side, in a first-level cache.
  float blocks[kPredictionColumns / kBlock][4][kBlock] = {};
  for (long t = 0; t < call.tokens; ++t) {
    const Prediction& found = predictions[t];
    const float inverse = found.inverse_total, square = call.squares[t];
    for (long begin = 0; begin < call.count; begin += kBlock) {
      const long size = call.count - begin < kBlock ? call.count - begin : kBlock, at = t * call.vocabulary + begin;
      float p[kBlock], w[kBlock], (*sums)[kBlock] = blocks[begin / kBlock];
      exponentials(logits + at, size, found.maximum, p);
      for (long j = 0; j < size; ++j) {
        p[j] *= inverse;
        w[j] = p[j] - p[j] * p[j];
      }
      if (call.slopes != nullptr)
        for (long j = 0; j < size; ++j) w[j] *= call.slopes[at + j];
      for (long j = size; j % kLanes != 0; ++j) w[j] = 0.0f;
      token_weights[t] += sum_of(w, size);
      for (long j = 0; j < size; ++j) {
        sums[0][j] += p[j];
        sums[1][j] += w[j];
        sums[2][j] += w[j] * w[j];
        sums[3][j] += w[j] * square;
        store(w[j], weights + at + j);
      }
      const long label = found.label - call.first - begin;
      if (label >= 0 && label < size) p[label] -= 1.0f;
      for (long j = 0; j < size; ++j) store(p[j], gradient + at + j);
    }
  }
  for (int i = 0; i < 4; ++i)
    for (long j = 0; j < call.count; ++j) call.sums[i * call.vocabulary + j] += blocks[j / kBlock][i][j % kBlock];
}

}  // namespace

Prediction predict(const void* logits, bool bf16, long count, float draw) {
  return bf16 ? prediction_of(static_cast<const uint16_t*>(logits), count, draw)
              : prediction_of(static_cast<const float*>(logits), count, draw);
}

void add_columns(const PredictionColumns& call, const Prediction* predictions, float* token_weights) {
  if (call.bf16)
    call.weights_bf16 ? columns_of<uint16_t, uint16_t>(call, predictions, token_weights)
                      : columns_of<uint16_t, float>(call, predictions, token_weights);
  else
    call.weights_bf16 ? columns_of<float, uint16_t>(call, predictions, token_weights)
                      : columns_of<float, float>(call, predictions, token_weights);
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
