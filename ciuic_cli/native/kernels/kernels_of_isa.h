// Declares the kernels inside the namespace of the instruction set that is being compiled; kernels.h says what they do.
#ifndef CIUIC_KERNELS_OF_ISA_H
#define CIUIC_KERNELS_OF_ISA_H

#include "kernels.h"

namespace ciuic {
namespace CIUIC_ISA {

size_t encode_workspace_bytes(int half_bits, int L);
int encode_batch();
int encode_tiles(const float* const* targets, int tiles, int half_bits, int L, void* workspace,
                  uint16_t* const* windows);
void panel_product(const float* left, size_t left_stride, const float* right, size_t right_stride, long count,
                   float out[kTileWeights]);
void decode_tiles(const uint8_t* codes, long tiles, int half_bits, int L, const float* row_factor, int row_begin,
                  int row_end, void* out, size_t out_stride, bool bf16);
void fill_signs(float* signs, long cols, uint32_t seed);
void hadamard_row(float* row, long cols, int log2_block, const float* signs, int inverse);
void hadamard_row_bfloat16(uint16_t* row, long cols, int log2_block, const float* signs, int inverse);
void matmul_groups(const RowGroup* groups, int count, int L, const Activations& activations, long first_row, long batch);
void multiply_many_rows(const RowGroup* groups, int count, int L, const Activations& activations, long first_row,
                        long batch);
void quantize_row(const float* x, const Activations& activations, long row);
void store_groups(const float* sums, const GroupColumns* groups, int count, long batch, void* y, long y_stride, bool bf16);
void rms_norm(const float* x, long count, float epsilon, const float* weight, float* out);
void gate(CiuicActivation activation, const float* x, const float* other, long count, float* out);
void attend(const float* query, int heads, const CachedTokens& tokens, HeadSums& found);
void attend_rows(const PromptRows& rows, const PromptTokens& tokens, float* scratch);
void index_scores(const float* queries, const float* weights, long rows, long heads, long columns, const uint16_t* keys,
                  long key_stride, long tokens, float* scores, long score_stride);
void encode_blocks(const BlockCode& code, const void* x, bool bf16, long count, long begin, long end, uint8_t* codes,
                   uint16_t* scales);
void decode_blocks(const BlockCode& code, const uint8_t* codes, const uint16_t* scales, long count, long begin, long end,
                   void* out, bool bf16);
Prediction predict(const void* logits, bool bf16, long count, float draw);
void add_columns(const PredictionColumns& call, const Prediction* predictions, float* token_weights);

}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
