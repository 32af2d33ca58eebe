// The kernels that one instruction set provides, and the table through which the library calls them.
//
// Every file in kernels/ is compiled once per instruction set, inside a namespace of that name, and each namespace
// exports one table. Kernel sources use no templates of the standard library: the linker keeps one copy of an instance,
// and the portable code could get a copy that was compiled for a newer instruction set.
#ifndef CIUIC_KERNELS_H
#define CIUIC_KERNELS_H

#include <cstddef>
#include <cstdint>

#include "activations.h"
#include "ciuic_native.h"

namespace ciuic {

constexpr int kTile = 16;
constexpr int kTileWeights = kTile * kTile;
constexpr int kMaxEncodeBatch = 4;
constexpr int kMaxHalfBits = 16;
constexpr int kMaxLog2Block = 10;  // of the Hadamard transform; part of the format

static constexpr bool valid_L(int L) { return L >= 12 && L <= 16; }

// Bounds of one call of matmul_groups: 128 KB of sums. Measured: docs/experiments/runtime/matrix-units.md (256 rows are faster
// than 512); 8 groups are chosen.
constexpr int kMaxGroupsTogether = 8;
constexpr long kMaxBatchTogether = 512;

// A row group of a product: its codes and its sums, batch x 16, before the row factors.
struct RowGroup {
  const uint8_t* codes;
  int half_bits;
  float* sums;
};

// Where the results of a row group go: `count` columns of y from `begin` on. `row_factor` holds 16 values of
// ciuic_row_factor. `bias` is null or holds a value per column.
struct GroupColumns {
  long begin, count;
  const float *row_factor, *bias;
};

// Attention heads have a multiple of kHeadColumns numbers, at most kMaxHeadSize (chosen: the largest of the models known).
constexpr int kHeadColumns = 16, kMaxHeadSize = 256;
// Most query heads that one call of `attend` computes. Chosen; programs take the heads of a key-value head in several calls.
constexpr int kMaxHeadsTogether = 16;

// Some cached tokens of one key-value head: `size` keys and as many values each, bfloat16 if `bf16` and float32 otherwise.
// `stride` elements lie between neighbouring tokens. `bias` is null or holds a number per token, added to its scores.
struct CachedTokens {
  const void *keys, *values;
  const float* bias;
  long count, stride;
  int size;
  bool bf16;
};

// A softmax over some tokens, for each query head h: w_t = exp(score_t - maximum[h]), total[h] = the sum of w_t, and
// sums[h * size ..] = the sum of w_t values_t.
struct HeadSums {
  float* sums;
  float maximum[kMaxHeadsTogether], total[kMaxHeadsTogether];
};

// Tokens of a prompt that one key-value head attends to at a time; a row's scores of them are four vectors of AVX-512.
constexpr int kPromptTokens = 64;
// Most query rows that share what is unpacked of those tokens. Chosen: unpacking takes about a tenth of the time, and the
// rows' scores fit a second-level cache.
constexpr int kPromptRows = 192, kPromptRowsAtOnce = 6;

// Rows of queries of one key-value head: `heads` query heads of each of `count / heads` neighbouring tokens, head by head
// within a token. `query` (count x size) is scaled already. Row r sees the tokens 0 .. limit[r] - 1, and of them, if `mask`
// is not null, those whose byte mask[r][token] is not 0. The limits ascend.
struct PromptRows {
  const float* query;
  const long* limit;
  const uint8_t* const* mask;
  long count;
  float* out;  // count x value_columns: the mean of the values; zeros where a row sees no token, and beyond the values
};

// Keys (size numbers) and values (value_size numbers) of a prompt's tokens, bfloat16 if `bf16` and
// float32 otherwise. Strides are in elements.
struct PromptTokens {
  const void *keys, *values;
  long key_stride, value_stride, count;
  int size, value_size;
  bool bf16;
};

// The width of values, filled with zeros to a multiple of kHeadColumns.
inline int value_columns(const PromptTokens& tokens) {
  return (tokens.value_size + kHeadColumns - 1) / kHeadColumns * kHeadColumns;
}

// Floats of scratch memory for attend_rows: unpacked keys and values, scores, maxima and totals.
inline size_t prompt_scratch(const PromptTokens& tokens) {
  return static_cast<size_t>(kPromptTokens) * (tokens.size + value_columns(tokens) + kPromptRowsAtOnce) + 2 * kPromptRows;
}

// The block code: `bits` is 8 or 4, blocks have 2^log2_block numbers (log2_block is 1 to kMaxLog2Block). `signs` is null, or
// holds a sign per number of a block: then blocks are transformed as by hadamard_row.
struct BlockCode {
  int bits;
  int log2_block;
  bool stochastic;
  uint32_t seed;
  const float* signs;
};

// A token's prediction softmax(logits): p = exp(logit - maximum) * inverse_total. `label` is drawn from it.
struct Prediction {
  float maximum, inverse_total;
  long label;
};

// Most columns of a call of add_columns. Chosen: a row's part is a page, and all sums fit a first-level cache.
constexpr long kPredictionColumns = 2048;

// `count` columns of the predictions of some tokens, from column `first` on; CiuicPredictions says what they are. Rows are
// `vocabulary` elements apart, and so are the four rows of `sums`. All pointers but `squares` are to the first column.
struct PredictionColumns {
  const void* logits;
  const float *slopes, *squares;
  void *gradient, *weights;
  float* sums;
  long first, count, tokens, vocabulary;
  bool bf16, weights_bf16;
};

// `half_bits` is H = 2 K, twice the bits per weight, and not 0. `codes` points to the codes of a row group.
// `row_factor` holds 16 values of ciuic_row_factor.
struct Kernels {
  const char* name;

  // Encoder. `targets` are in levels (target / row_scale * SIGMA), 256 per tile, row by row; a NaN marks padding, which
  // may take any level. `windows` receives the 256 windows of a closed (tail-biting) path per tile. encode_tiles returns
  // 0, or -1 if memory runs out.
  size_t (*encode_workspace_bytes)(int half_bits, int L);
  int (*encode_batch)();  // tiles that encode_tiles searches together, so that they share loads; 1 to kMaxEncodeBatch
  int (*encode_tiles)(const float* const* targets, int tiles, int half_bits, int L, void* workspace,
                       uint16_t* const* windows);

  // out[a][lane] += sum_k left[k * left_stride + a] * right[k * right_stride + lane] for a and lane in 0..15. Sums run in
  // ascending k, so that every instruction set rounds alike.
  void (*panel_product)(const float* left, size_t left_stride, const float* right, size_t right_stride, long count,
                        float out[kTileWeights]);

  // Decodes `tiles` neighbouring tiles of one row group: rows row_begin .. row_end - 1 of the group to
  // out[r - row_begin][column], with out_stride elements per row, bfloat16 if `bf16` and float32 otherwise.
  void (*decode_tiles)(const uint8_t* codes, long tiles, int half_bits, int L, const float* row_factor, int row_begin,
                       int row_end, void* out, size_t out_stride, bool bf16);

  // signs[j] = +1 or -1 for `cols` columns.
  void (*fill_signs)(float* signs, long cols, uint32_t seed);
  // In place on one row of `cols` values, a multiple of 2^log2_block.
  void (*hadamard_row)(float* row, long cols, int log2_block, const float* signs, int inverse);
  // The same for bfloat16 values: computed in float32 and rounded once. Blocks have at most 2^kMaxLog2Block values.
  void (*hadamard_row_bfloat16)(uint16_t* row, long cols, int log2_block, const float* signs, int inverse);

  // sums[b][r] = levels of row r of the group . activations of batch row b, for each of `count` row groups. All of them
  // read rows first_row .. first_row + batch - 1 of the same activations; first_row is a multiple of kBandRows. The results
  // do not depend on `count` or `batch` and, unless the activations are in bfloat16, on the instruction set.
  void (*matmul_groups)(const RowGroup* groups, int count, int L, const Activations& activations, long first_row,
                        long batch);
  int groups_together;  // best `count`, at most kMaxGroupsTogether
  long batch_together;  // best `batch` for products with more rows, at most kMaxBatchTogether
  bool bfloat16;        // whether there are products in bfloat16
  long byte_rows;       // products with more rows need no bytes beside the integers
  // Writes x, one value per column, as row `row` of the activations.
  void (*quantize_row)(const float* x, const Activations& activations, long row);

  // y[b][begin + r] = row_factor[r] * sums[(group * batch + b) * 16 + r] + bias[r], with y_stride elements per row of y,
  // which is bfloat16 if `bf16` and float32 otherwise.
  void (*store_groups)(const float* sums, const GroupColumns* groups, int count, long batch, void* y, long y_stride,
                       bool bf16);

  // out = x / sqrt(mean(x^2) + epsilon) * weight. out may be x.
  void (*rms_norm)(const float* x, long count, float epsilon, const float* weight, float* out);
  // out = activation(x) * other. out may be x or other.
  void (*gate)(CiuicActivation activation, const float* x, const float* other, long count, float* out);

  // Scores are query_h . key_t + bias_t; `query` (heads x tokens.size) is scaled already.
  void (*attend)(const float* query, int heads, const CachedTokens& tokens, HeadSums& found);

  // Attention of at most kPromptRows rows over a prompt. `scratch` has prompt_scratch(tokens) floats on a 64-byte boundary.
  void (*attend_rows)(const PromptRows& rows, const PromptTokens& tokens, float* scratch);

  // scores[row * score_stride + token] = sum over heads of weight * relu(query . key). `queries` is rows x heads x columns, `weights`
  // rows x heads, both float32; keys have `columns` neighbouring bfloat16 numbers, an even count of at most kMaxIndexColumns.
  void (*index_scores)(const float* queries, const float* weights, long rows, long heads, long columns, const uint16_t* keys,
                       long key_stride, long tokens, float* scores, long score_stride);

  // Blocks begin .. end - 1 of x, which has `count` numbers, bfloat16 if `bf16` and float32 otherwise; the last block is
  // filled with zeros. A block takes size * bits / 8 bytes of `codes` and one of `scales` (bfloat16).
  void (*encode_blocks)(const BlockCode& code, const void* x, bool bf16, long count, long begin, long end, uint8_t* codes,
                        uint16_t* scales);
  void (*decode_blocks)(const BlockCode& code, const uint8_t* codes, const uint16_t* scales, long count, long begin,
                        long end, void* out, bool bf16);

  // The prediction of one token, from `count` logits. draw: in [0, 1); the label is where the running sum of the probabilities
  // exceeds it.
  Prediction (*predict)(const void* logits, bool bf16, long count, float draw);
  // Writes gradient and weights of some columns, and adds to their sums and to `token_weights`, one per token.
  void (*add_columns)(const PredictionColumns& call, const Prediction* predictions, float* token_weights);
};

// The kernels in use: the newest instruction set of this machine, or the one that CIUIC_CPU_KERNELS selects.
const Kernels& kernels();

namespace portable { extern const Kernels table; }
#ifdef CIUIC_X86_KERNELS
namespace avx2 { extern const Kernels table; }
namespace avx512vnni { extern const Kernels table; }
#ifdef CIUIC_AMX_KERNELS
namespace amx { const Kernels* table_if_usable(); }  // avx512vnni with other products; null without the unit
#endif
#endif

}  // namespace ciuic

#endif
