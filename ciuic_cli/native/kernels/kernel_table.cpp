// The table of one instruction set's kernels.
#include "kernels_of_isa.h"
#include "tile.h"

#define CIUIC_STRING_(x) #x
#define CIUIC_STRING(x) CIUIC_STRING_(x)

namespace ciuic {
namespace CIUIC_ISA {

extern const Kernels table;
const Kernels table = {
    CIUIC_STRING(CIUIC_ISA),
    encode_workspace_bytes,
    encode_batch,
    encode_tiles,
    panel_product,
    decode_tiles,
    fill_signs,
    hadamard_row,
    hadamard_row_bfloat16,
    matmul_groups,
    kGroupsTogether,
    kMaxBatchTogether,  // batch_together
    false,              // bfloat16
    kByteRows,          // byte_rows
    quantize_row,
    store_groups,
    rms_norm,
    gate,
    attend,
    attend_rows,
    index_scores,
    encode_blocks,
    decode_blocks,
    predict,
    add_columns,
};

}  // namespace CIUIC_ISA
}  // namespace ciuic
