// Blocks of two by two tile registers of sums, and the transposition of what a tile register holds, in vector registers.
//
// Registers 0 to 3 hold the sums, 4 and 5 the left factors, 6 and 7 the right ones. For files that are compiled with AMX's options.
#ifndef CIUIC_TILE_BLOCKS_H
#define CIUIC_TILE_BLOCKS_H

#include <immintrin.h>

namespace ciuic {
namespace CIUIC_ISA {
namespace {

inline __attribute__((always_inline)) void add_tile_products() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

inline __attribute__((always_inline)) void clear_tile_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// 32 x 32 sums, whose rows lie `stride` apart.
inline __attribute__((always_inline)) void store_tile_sums(float* sums, long stride) {
  float* const lower = sums + 16 * stride;
  _tile_stored(0, sums, 4 * stride);
  _tile_stored(1, sums + 16, 4 * stride);
  _tile_stored(2, lower, 4 * stride);
  _tile_stored(3, lower + 16, 4 * stride);
}

// Rows become columns: 16 rows of 16 elements of 4 bytes.
inline __attribute__((always_inline)) void transpose_tile(__m512i (&row)[16]) {
  __m512i half[16];
  for (int i = 0; i < 16; i += 2) {
    half[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    half[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int k = 0; k < 2; ++k) {
      row[i + 2 * k] = _mm512_unpacklo_epi64(half[i + k], half[i + k + 2]);
      row[i + 2 * k + 1] = _mm512_unpackhi_epi64(half[i + k], half[i + k + 2]);
    }
  // row[4 i + k] holds columns k, 4 + k, 8 + k and 12 + k of rows 4 i .. 4 i + 3.
  for (int k = 0; k < 4; ++k) {
    const __m512i low = _mm512_shuffle_i32x4(row[k], row[4 + k], 0x88), high = _mm512_shuffle_i32x4(row[k], row[4 + k], 0xDD);
    const __m512i low2 = _mm512_shuffle_i32x4(row[8 + k], row[12 + k], 0x88);
    const __m512i high2 = _mm512_shuffle_i32x4(row[8 + k], row[12 + k], 0xDD);
    half[k] = _mm512_shuffle_i32x4(low, low2, 0x88);
    half[4 + k] = _mm512_shuffle_i32x4(high, high2, 0x88);
    half[8 + k] = _mm512_shuffle_i32x4(low, low2, 0xDD);
    half[12 + k] = _mm512_shuffle_i32x4(high, high2, 0xDD);
  }
  for (int i = 0; i < 16; ++i) row[i] = half[i];
}

}  // namespace
}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
