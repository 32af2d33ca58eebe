// Shares the predictions of a span of text among threads: first tokens, then columns of the vocabulary.
#include <algorithm>

#include "ciuic_native.h"
#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

int ciuic_predictions(const CiuicPredictions* call, void* gradient, void* weights, float* token_weights, float* sums,
                      int threads) {
  using namespace ciuic;
  if (call == nullptr || call->logits == nullptr || call->draws == nullptr || call->squares == nullptr || gradient == nullptr ||
      weights == nullptr || token_weights == nullptr || sums == nullptr || call->tokens < 1 || call->vocabulary < 1 || threads < 1)
    return CIUIC_BAD_ARGUMENT;
  const long tokens = call->tokens, vocabulary = call->vocabulary, size = call->bf16 ? 2 : 4;
  const long items = (vocabulary + kPredictionColumns - 1) / kPredictionColumns;
  Scratch scratch(Scratch::bytes_of<Prediction>(tokens) + Scratch::bytes_of<float>(items * tokens));
  if (!scratch) return CIUIC_NO_MEMORY;
  Prediction* const predictions = scratch.take<Prediction>(tokens);
  float* const parts = scratch.take<float>(items * tokens);
  std::fill_n(parts, items * tokens, 0.0f);
  const uint8_t* const logits = static_cast<const uint8_t*>(call->logits);
  parallel_stages(
      2, threads, [&](int stage) { return stage == 0 ? tokens : items; },
      [&](int stage, long item) {
        if (stage == 0) {
          predictions[item] =
              kernels().predict(logits + item * vocabulary * size, call->bf16 != 0, vocabulary, call->draws[item]);
          return;
        }
        const long first = item * kPredictionColumns, weight_size = call->weights_bf16 ? 2 : 4;
        PredictionColumns columns = {};
        columns.logits = logits + first * size;
        columns.slopes = call->slopes == nullptr ? nullptr : call->slopes + first;
        columns.squares = call->squares;
        columns.gradient = static_cast<uint8_t*>(gradient) + first * size;
        columns.weights = static_cast<uint8_t*>(weights) + first * weight_size;
        columns.sums = sums + first;
        columns.first = first;
        columns.count = std::min(kPredictionColumns, vocabulary - first);
        columns.tokens = tokens;
        columns.vocabulary = vocabulary;
        columns.bf16 = call->bf16 != 0;
        columns.weights_bf16 = call->weights_bf16 != 0;
        kernels().add_columns(columns, predictions, parts + item * tokens);
      });
  for (long t = 0; t < tokens; ++t) {
    token_weights[t] = 0.0f;
    for (long item = 0; item < items; ++item) token_weights[t] += parts[item * tokens + t];
  }
  return CIUIC_OK;
}
