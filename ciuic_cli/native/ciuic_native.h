// The C interface of libciuic_native; Python calls it through ctypes (ciuic_cli/codecs/native.py). No function throws. A
// function that can fail returns 0 or a negative code of CiuicStatus. Matrices are row-major and contiguous, float32 unless
// stated otherwise. `rows` and `cols` of a compressed matrix are padded to multiples of 16. Results do not depend on
// `threads`.
//
// A compressed matrix is described by these arguments:
//   row_bits      one byte per row group (16 rows): bits per weight, see ciuic_half_bits_of
//   group_offset  one byte offset into `codes` per row group
//   scale         one float per row
//   L             trellis state bits, 12 to 16
#ifndef CIUIC_NATIVE_H
#define CIUIC_NATIVE_H

#include <cstdint>

#define CIUIC_EXPORT extern "C" __attribute__((visibility("default")))

enum CiuicStatus {
  CIUIC_OK = 0,
  CIUIC_BAD_ARGUMENT = -1,   // null pointer, negative size, shape that is no multiple of 16
  CIUIC_BAD_BITS = -2,       // bits per weight that the format does not have, or L outside 12..16
  CIUIC_NO_MEMORY = -3,
  CIUIC_NOT_FINITE = -4,     // NaN or infinity in the matrix to round, or in its error feedback
  CIUIC_CANCELLED = -5,      // the caller made *progress negative
};

CIUIC_EXPORT int ciuic_abi_version();

// Instruction set of the kernels in use: "avx512vnni", "avx2" or "portable". The environment variable CIUIC_CPU_KERNELS
// selects one of them; a name that is unknown or that the machine does not support is ignored.
CIUIC_EXPORT const char* ciuic_cpu_kernels();

// Rounds W (rows x cols, in the transformed basis) to the trellis code with two-sided error feedback (YAQA, arXiv
// 2505.22988; LDLQ if B is null). A (cols x cols, or null) feeds errors back along inputs, B (rows x rows, or null)
// along outputs. Let E = W - What. Tile (I, J) is rounded to the path that is nearest to its target
//   T = W_IJ + sum_{J'>J} E_IJ' A_J'J + sum_{I'>I} B_I'I^T P_I'J,   P_I'J = E_I'J + sum_{J'>J} E_I'J' A_J'J.
// `direction` and `pull` (each rows x cols, or both null; they require A) add feedback of each row along one direction:
// row r of tile J also moves by pull_rJ d_r, where d_r = sum_{J'>J} P_rJ' . direction_rJ'.
//
// A row whose scale is 0 is padding: its error is ignored, and its row of What is 0. What (rows x cols) receives
// the decoded matrix and must not overlap W. `progress`, if not null, counts finished tiles. If another thread sets it
// far below 0, beyond what counting can undo, the call stops within the time of a few tiles; so it does at the first
// target that is NaN or infinite. After an error, `codes` and What mean nothing.
CIUIC_EXPORT int ciuic_round(const float* W, long rows, long cols, const float* A, const float* B,
                             const float* direction, const float* pull, const float* scale, const uint8_t* row_bits, int L,
                             int threads, uint8_t* codes, const int64_t* group_offset, float* What, long* progress);

// Decodes rows [row_begin, row_end) (any range) into out, (row_end - row_begin) x cols: bfloat16 if `bf16` is not 0.
CIUIC_EXPORT int ciuic_decode(const uint8_t* codes, const int64_t* group_offset, const uint8_t* row_bits,
                              const float* scale, long rows, long cols, int L, long row_begin, long row_end, void* out,
                              int bf16, int threads);

// Decodes the `count` rows listed in row_index, in any order, into out (count x cols). Fails if an index is out of range.
CIUIC_EXPORT int ciuic_decode_rows(const uint8_t* codes, const int64_t* group_offset, const uint8_t* row_bits,
                                   const float* scale, long rows, long cols, int L, const int64_t* row_index, long count,
                                   float* out, int threads);

// A compressed matrix as the factor of a product: y (rows_out <= rows) = W T(x * input_factors) + bias, where T pads x
// (cols_in <= cols) with zeros to `cols` and applies signs, then the block Hadamard transform of size 2^log2_block.
struct CiuicMatrix {
  const uint8_t* codes;
  const int64_t* group_offset;
  const uint8_t* row_bits;
  const float* scale;
  const int32_t* order;        // null, or the element of y of each stored row: a permutation of 0 .. rows_out - 1
  const float* input_factors;  // null, or cols_in floats
  const float* bias;           // null, or rows_out floats
  int64_t rows, cols, rows_out, cols_in;
  int32_t L, log2_block;
  uint32_t seed, unused;
};

// y (batch x rows_out) from x (batch x cols_in), each bfloat16 if x_bf16 or y_bf16 is not 0. The call quantizes T(x) per
// block of 256 columns and multiplies straight from the codes. If `exact` is not 0, the product is as exact as in float32.
// Otherwise fewer than 40 rows of x are quantized to int8 for row groups of up to 4 bits and to 15 bits for the others, and
// more rows to 15 bits, or to bfloat16 with AMX.
CIUIC_EXPORT int ciuic_matmul(const CiuicMatrix* matrix, const void* x, int x_bf16, long batch, void* y, int y_bf16,
                              int exact, int threads);

// A step of a program. Buffers are float32, one row per token; `in`, `second` and `out` are their numbers. Steps run in
// order, but neighbouring CIUIC_MULTIPLY steps run together, so none of them may read what another of them writes.
enum CiuicStepKind {
  CIUIC_LOAD = 0,      // out = argument `argument`, `size` values per row
  CIUIC_STORE = 1,     // argument `argument` = in
  CIUIC_NORM = 2,      // out = in / sqrt(mean(in^2) + number) * vector, for each run of `size` values (RMSNorm)
  CIUIC_MULTIPLY = 3,  // out = product of matrix `matrix` with in
  CIUIC_ROTATE = 4,    // rotary embedding of in, in place, for each run of `size` values: (a, b), the halves of a run, become
                       // (a cos - b sin, b cos + a sin); arguments `argument` and `argument` + 1 are the cosines and sines
  CIUIC_GATE = 5,      // out = activation(in) * second
  CIUIC_ADD = 6,       // out = in + second
  CIUIC_CACHE = 7,     // the last token of cache array `argument` = in: `heads` runs of `size` values
  CIUIC_ATTEND = 8,    // out = for each run of `size` values of in (a query head), softmax(number * in . keys) . values, over the
                       // cache arrays `argument` (keys) and `argument` + 1 (values), which have `heads` heads
};

enum CiuicActivation { CIUIC_SILU = 0, CIUIC_GELU_TANH = 1 };

struct CiuicStep {
  int32_t kind, in, second, out;
  int32_t matrix, argument, activation, heads;
  int64_t size;
  float number, unused_too;
  const float* vector;
};

// Checks and prepares a program. The arrays that `matrices` and `steps` point to must outlive it; the two lists themselves
// are copied. `buffer_sizes` holds the values per row of each buffer. Returns CIUIC_OK and the handle in *program.
CIUIC_EXPORT int ciuic_program_create(const CiuicMatrix* matrices, int matrix_count, const CiuicStep* steps, int step_count,
                                      const int64_t* buffer_sizes, int buffer_count, void** program);
CIUIC_EXPORT void ciuic_program_free(void* program);

// The caches of keys and values of a run, `count` arrays of the dtype of the arguments, all with the same strides in elements.
// Each holds `context` tokens of each sequence, of which a run writes the last. `bias` is null or rows x context floats: added
// to the scaled scores of all heads.
struct CiuicCaches {
  void* const* arrays;
  const float* bias;
  int64_t count, context;
  int64_t sequence_stride, head_stride, token_stride;
};

// Runs the steps for `rows` tokens, each of another sequence. `caches` may be null if no step reads them. `arguments` are arrays of the caller, each rows x size, bfloat16 if `bf16` is not 0 and
// float32 otherwise. `exact` is as for ciuic_matmul. Several threads may run one program at once.
CIUIC_EXPORT int ciuic_program_run(const void* program, void* const* arguments, int argument_count, const CiuicCaches* caches,
                                   long rows, int bf16, int exact, int threads);

// Scores of an indexer: for each query row and cached token, the weighted sum over heads of relu(query . key).
struct CiuicIndexScores {
  const float* queries;   // sequences x rows x heads x columns
  const float* weights;   // sequences x rows x heads
  const uint16_t* keys;   // bfloat16; per token, `columns` neighbouring values
  int64_t key_sequence, key_token;  // strides in elements
  int64_t sequences, rows, heads, columns, tokens;  // `columns` is even and at most 512
};

// scores: sequences x rows x tokens. If the queries are bfloat16 numbers, all kernels give the same bytes.
CIUIC_EXPORT int ciuic_index_scores(const CiuicIndexScores* call, float* scores, int threads);

// indices (rows x k): where the k largest numbers of each row of `numbers` (rows x count) are, in ascending order. Of equal
// numbers the first are taken; NaN counts as the largest.
CIUIC_EXPORT int ciuic_largest(const float* numbers, long rows, long count, long k, int32_t* indices, int threads);

// Attention of `rows` query rows per sequence over its cached latents, which are keys and values: MLA with absorbed queries, or
// DeepSeek V4's shared keys. All arrays are bfloat16 but `bias` and `sinks`. Strides are in elements.
struct CiuicLatentAttention {
  const uint16_t *query, *rotary_query;   // sequences x rows x rank; sequences x rows x rope
  const uint16_t *latents, *rotary_keys;  // per token, rank and rope neighbouring values
  const float* bias;                      // null, or sequences x rows x context: added to the scaled scores
  const float* sinks;                     // null, or per row the score of a token without latent
  int64_t latent_sequence, latent_token, rotary_sequence, rotary_token;  // strides
  int64_t sequences, rows, context;
  int64_t rank, rope;  // multiples of 32; rope may be 0
  float scaling, unused;
};

// Whether this machine has the kernel: AVX2 with fused multiply-add or newer, unless CIUIC_CPU_KERNELS selects older instructions.
CIUIC_EXPORT int ciuic_has_latent_attention();

// out (sequences x rows x rank) = softmax(scaling * (query . latents + rotary_query . rotary_keys) + bias) . latents, with float32
// sums. Where the kernel multiplies bfloat16, weights are rounded to it. The softmax is over the tokens and the sink.
CIUIC_EXPORT int ciuic_latent_attention(const CiuicLatentAttention* call, float* out, int threads);

// 1 if this machine has a kernel for ciuic_symmetric_sums (with this value of `rounded`), 0 if not.
CIUIC_EXPORT int ciuic_has_symmetric_sums(int rounded);

// moment (columns x columns, float32) += left^T right, which the caller knows to be symmetric; left and right are tokens x
// columns, bfloat16 or float32, and the same address for a Gram matrix. With `rounded`, both are rounded to bfloat16. Only the
// lower half of `moment` is right afterwards; above the diagonal, some numbers change. The bytes do not depend on `threads`.
CIUIC_EXPORT int ciuic_symmetric_sums(float* moment, long columns, const void* left, int left_bf16, const void* right,
                                      int right_bf16, long tokens, int rounded, int threads);

// Predictions p = softmax(logits) of a language model (ciuic_cli/statistics/head_fisher.py).
struct CiuicPredictions {
  const void* logits;    // tokens x vocabulary, bfloat16 if `bf16` is not 0 and float32 otherwise; finite
  const float* slopes;   // null, or tokens x vocabulary: the squared derivative of each logit in the head's output
  const float* draws;    // per token a number in [0, 1), from which its label is drawn
  const float* squares;  // per token |x|^2 of the head's input x
  int64_t tokens, vocabulary;
  int32_t bf16, weights_bf16;
};

// gradient (tokens x vocabulary, of the dtype of the logits) = p, less 1 at the token's label; it may be the logits. weights
// (bfloat16 if `weights_bf16` is not 0 and float32 otherwise) = w = (p - p^2) slope, and token_weights = the sum of w over the
// vocabulary. sums (4 x vocabulary) += the sums of p, w, w^2 and w |x|^2 over the tokens. The bytes depend neither on `threads`
// nor on the kernel.
CIUIC_EXPORT int ciuic_predictions(const CiuicPredictions* call, void* gradient, void* weights, float* token_weights, float* sums,
                                   int threads);

// Attention of a prompt's queries over keys and values. All arrays but `mask` are bfloat16 if `bf16` is not 0 and float32
// otherwise, with neighbouring numbers per token and head. Strides are in elements.
struct CiuicPromptAttention {
  const void *query, *keys, *values;
  const uint8_t* mask;  // null, or a byte per query and token: 0 hides the token
  int64_t query_sequence, query_head, query_token, key_sequence, key_head, key_token, value_sequence, value_head, value_token;
  int64_t mask_sequence, mask_query;  // neighbouring bytes per token of the context
  int64_t sequences, heads, kv_heads, queries, context;  // kv_heads divides heads
  int64_t size, value_size;  // numbers of a key and of a value, at most 1024
  float scaling;
  int32_t bf16, causal;  // causal: query i sees the first i + 1 tokens
  int32_t unused;
};

// out (sequences x queries x heads x value_size, of the dtype of the query) = softmax(scaling * query . keys) . values. Sums are
// float32, and all kernels give the same bytes. A query that sees no token gets zeros.
CIUIC_EXPORT int ciuic_prompt_attention(const CiuicPromptAttention* call, void* out, int threads);

// Attention of whole sequences, forward or, if `gradient` is not null, backward. `out` and `gradient` are sequences x queries x
// heads x value_size, `log_sums` sequences x heads x queries, float32: the logarithm of the sum of exp(scaling * query . key),
// infinity for a query that sees no token, whose result is zeros. Backward, both are read, and the gradients at query, keys and
// values are written: sequences x tokens x heads x size, heads or kv_heads, size or value_size. Other fields are as for
// CiuicPromptAttention; `causal` needs as many queries as tokens of the context.
struct CiuicSequenceAttention {
  const void *query, *keys, *values;
  const uint8_t* mask;
  void* out;
  float* log_sums;
  const void* gradient;
  void *query_gradient, *key_gradient, *value_gradient;
  int64_t query_sequence, query_head, query_token, key_sequence, key_head, key_token, value_sequence, value_head, value_token;
  int64_t mask_sequence, mask_query;
  int64_t sequences, heads, kv_heads, queries, context;
  int64_t size, value_size;
  float scaling;
  int32_t bf16, causal;
  int32_t unused;
};

// 1 if this machine has a kernel for it, otherwise 0: with AMX, and without AVX2 and FMA.
CIUIC_EXPORT int ciuic_has_sequence_attention(int bf16);
// The same bytes for any number of threads, but not on every instruction set.
CIUIC_EXPORT int ciuic_sequence_attention(const CiuicSequenceAttention* call, int threads);

// Transforms each row of x (n_rows x cols) in place: signs, then the orthonormal block Hadamard transform of size
// 2^log2_block, which must divide cols and be at most 1024. `inverse` applies the inverse. x is float32, or bfloat16 if
// `bf16` is not 0: the same float32 arithmetic, rounded at the end.
CIUIC_EXPORT int ciuic_hadamard(void* x, int bf16, long n_rows, long cols, int log2_block, uint32_t seed, int inverse,
                                int threads);

// The block code (ciuic_cli/codecs/blockcode): `count` numbers, bfloat16 if `bf16` is not 0 and float32 otherwise, in blocks of
// 2^log2_block (16 to 1024), the last one filled with zeros. Per block, 2^log2_block integers of `bits` (8 or 4; of 4, the
// first of two in the low half of a byte, plus 8) and a scale in bfloat16. `hadamard` transforms blocks as ciuic_hadamard
// does with seed 0. `stochastic` rounds up with the probability of the remainder, by numbers derived from `seed`.
CIUIC_EXPORT int ciuic_block_encode(const void* x, int bf16, long count, int bits, int log2_block, int hadamard,
                                    int stochastic, uint32_t seed, uint8_t* codes, uint16_t* scales, int threads);
CIUIC_EXPORT int ciuic_block_decode(const uint8_t* codes, const uint16_t* scales, long count, int bits, int log2_block,
                                    int hadamard, void* out, int bf16, int threads);

#endif
