// Checks the arguments that describe a compressed matrix (ciuic_native.h).
#ifndef CIUIC_CHECK_MATRIX_H
#define CIUIC_CHECK_MATRIX_H

#include "ciuic_native.h"
#include "kernels.h"
#include "trellis_decode.h"

namespace ciuic {

// CIUIC_OK, CIUIC_BAD_ARGUMENT or CIUIC_BAD_BITS. `codes` may be null if every row group has 0 bits.
static inline int check_matrix(const uint8_t* codes, const int64_t* group_offset, const uint8_t* row_bits,
                               const float* scale, long rows, long cols, int L) {
  if (group_offset == nullptr || row_bits == nullptr || scale == nullptr || rows <= 0 ||
      cols <= 0 || rows % kTile != 0 || cols % kTile != 0)
    return CIUIC_BAD_ARGUMENT;
  if (!valid_L(L)) return CIUIC_BAD_BITS;
  for (long g = 0; g < rows / kTile; ++g)
    if (row_bits[g] != 0) {
      if (ciuic_half_bits_of(row_bits[g]) < 0) return CIUIC_BAD_BITS;
      if (codes == nullptr) return CIUIC_BAD_ARGUMENT;
    }
  return CIUIC_OK;
}

}  // namespace ciuic

#endif
