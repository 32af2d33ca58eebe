// What one instruction set provides. Every kernel source is compiled once per instruction set, inside a namespace of that
// name, and exports exactly one table. Kernel sources use no templates of the standard library: the linker could merge
// an instance compiled for a newer machine into the portable code.
#ifndef CIUIC_KERNELS_H
#define CIUIC_KERNELS_H

#include <cstddef>
#include <cstdint>

#include "activations.h"

namespace ciuic {

constexpr int kTile = 16;
constexpr int kTileWeights = kTile * kTile;
constexpr int kMaxEncodeBatch = 4;
constexpr int kMostHalves = 16;

static constexpr bool valid_window(int window) { return window >= 12 && window <= 16; }

// Widths are in halves of a bit per weight everywhere here.
struct Kernels {
  const char* name;

  // Encoder. Targets are in units of the code's level (target / row_scale * SIGMA), 256 per tile; a NaN marks a weight
  // whose error costs nothing. `windows` receives the 256 windows of a closed (tail-biting) path per tile. 0, or -1 without memory.
  size_t (*encode_workspace_bytes)(int halves, int window);
  int (*encode_batch)(int halves, int window);  // tiles that share one pass; 1..kMaxEncodeBatch
  int (*encode_tiles)(const float* const* targets, int tiles, int halves, int window, void* workspace,
                       uint16_t* const* windows);

  // out[a][lane] += sum_k left[k * left_stride + a] * right[k * right_stride + lane], a and lane 0..15, in order of k.
  void (*panel_product)(const float* left, size_t left_stride, const float* right, size_t right_stride, long count,
                        float out[kTileWeights]);

  // Decodes `tiles` neighbouring tiles of one row group: rows row_begin..row_end-1 of the group, out[r - row_begin][column], float32
  // or, if `half`, bfloat16.
  void (*decode_tiles)(const uint8_t* codes, long tiles, int halves, int window, const float* row_factor, int row_begin,
                       int row_end, void* out, size_t out_stride, bool half);

  void (*fill_signs)(float* signs, long cols, uint32_t seed);
  // In place on one row of `cols` values; `signs` holds +1 or -1 per column.
  void (*hadamard_row)(float* row, long cols, int log2_block, const float* signs, int inverse);

  // y[b * y_stride + r] = row_factor[r] * (row group . activations of batch row b). The rows of activations, laid out by
  // quantize_row, follow each other.
  void (*matmul_group)(const uint8_t* codes, long tiles, int halves, int window, const float* row_factor,
                       Precision precision, const uint8_t* activations, long batch, float* y, long y_stride, int rows);
  void (*quantize_row)(const float* x, long cols, Precision precision, uint8_t* activations);
};

const Kernels& kernels();  // the ones in use

namespace portable { extern const Kernels table; }
#ifdef CIUIC_X86_KERNELS
namespace avx2 { extern const Kernels table; }
namespace avx512vnni { extern const Kernels table; }
#endif

}  // namespace ciuic

#endif
