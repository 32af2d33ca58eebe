// Multiplies straight from the codes: int8 activations, exact int32 sums per block of columns.
#include <cmath>

#include "activations.h"
#include "kernels_of_isa.h"
#include "trellis_decode.h"

namespace ciuic {
namespace CIUIC_ISA {

void quantize_row(const float* x, long cols, int residual, uint8_t* activations) {
  const QuantizedRow row = quantized_row(activations, cols, residual);
  for (long block = 0, begin = 0; begin < cols; ++block, begin += kActivationBlock) {
    const long end = begin + kActivationBlock < cols ? begin + kActivationBlock : cols;
    float largest = 0.0f;
    for (long j = begin; j < end; ++j) largest = std::fabs(x[j]) > largest ? std::fabs(x[j]) : largest;
    const float step = largest / 127.0f;
    const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
    int32_t sum = 0, residual_sum = 0;
    for (long j = begin; j < end; ++j) {
      const float position = x[j] * inverse;
      const float nearest = std::rint(position);
      const int32_t q = static_cast<int32_t>(nearest);
      row.main[j] = static_cast<int32_t>((static_cast<uint32_t>(q) & 0xFFu) * 0x01010101u);
      sum += q;
      if (residual) {
        const int32_t r = static_cast<int32_t>(std::rint((position - nearest) * kResidualSteps));
        row.residual[j] = static_cast<int32_t>((static_cast<uint32_t>(r) & 0xFFu) * 0x01010101u);
        residual_sum += r;
      }
    }
    row.step[block] = step;
    row.offset[block] = -CIUIC_LEVEL_CENTRE * sum;
    if (residual) row.residual_offset[block] = -CIUIC_LEVEL_CENTRE * residual_sum;
  }
}

void matmul_group(const uint8_t* codes, long tiles, int bits, int window, const float* row_factor,
                  const uint8_t* activations, long batch, int residual, float* y, long y_stride, int rows) {
  const long cols = tiles * kTile;
  const size_t row_bytes = quantized_row_size(cols, residual);
  for (long b = 0; b < batch; ++b) {
    const QuantizedRow x = quantized_row(const_cast<uint8_t*>(activations) + b * row_bytes, cols, residual);
    for (int row = 0; row < rows; ++row) {
      float total = 0.0f;
      for (long block = 0, begin = 0; begin < cols; ++block, begin += kActivationBlock) {
        const long end = begin + kActivationBlock < cols ? begin + kActivationBlock : cols;
        int32_t sum = x.offset[block], residual_sum = residual ? x.residual_offset[block] : 0;
        for (long j = begin; j < end; ++j) {
          const int32_t level =
              ciuic_tile_level(codes + j / kTile * CIUIC_UNIT_BYTES * bits, row, j % kTile, bits, window) +
              CIUIC_LEVEL_CENTRE;
          sum += level * static_cast<int8_t>(x.main[j]);
          if (residual) residual_sum += level * static_cast<int8_t>(x.residual[j]);
        }
        total += x.step[block] * (static_cast<float>(sum) + static_cast<float>(residual_sum) / kResidualSteps);
      }
      y[b * y_stride + row] = row_factor[row] * total;
    }
  }
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
