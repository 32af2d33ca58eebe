// Decodes the tiles of a row group to float32 or bfloat16.
#include "bfloat16.h"
#include "kernels_of_isa.h"
#include "tile.h"

namespace ciuic {
namespace CIUIC_ISA {

// Byte sums (level + 510) of column pairs P .. 7 of a tile. Masked: L is below 16, so windows need the mask.
template <int H, bool Masked, int P>
static inline __attribute__((always_inline)) void read_pairs(const Tile<H>& tile,
                                                             decltype(Tile<H>::mask_of(0)) mask, Pair* pairs) {
  if constexpr (P < kTile / 2) {
    pairs[P] = byte_sums(hash_of(tile.template windows<P, Masked>(mask)));
    read_pairs<H, Masked, P + 1>(tile, mask, pairs);
  }
}

// Tiles that are decoded before their rows are written. The rows of a wide matrix lie a multiple of the page size apart and
// compete for the same cache sets, so each row is written many values at a time. No measurement is on record.
constexpr long kTilesPerWrite = 16;

#ifdef __AVX512BW__
// 16 weights of a row: its factor times level, from byte sums.
static inline __m512 weights_of(const int16_t* sums, float factor) {
  const __m512i wide = _mm512_cvtepi16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(sums)));
  const __m512 levels = _mm512_cvtepi32_ps(_mm512_sub_epi32(wide, _mm512_set1_epi32(CIUIC_LEVEL_CENTRE)));
  return _mm512_mul_ps(_mm512_set1_ps(factor), levels);
}

// The upper half of each lane is the number in bfloat16, rounded as by finite_to_bfloat16.
static inline __m512i rounded_bits(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
}

// One shuffle takes the upper halves of 32 numbers; the compiler's narrowing takes five times as many instructions.
static inline void store_bfloat16(uint16_t* to, __m512 first, __m512 second) {
  alignas(64) static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(rounded_bits(first), _mm512_load_si512(kUpper), rounded_bits(second)));
}
#endif

// A row of `count` tiles, from their byte sums.
static inline void store_row(const int16_t (*sums)[kTile][kTile], long count, int row, float factor, float* to) {
  for (long t = 0; t < count; ++t)
    for (int column = 0; column < kTile; ++column)
      to[t * kTile + column] = factor * static_cast<float>(sums[t][row][column] - CIUIC_LEVEL_CENTRE);
}

static inline void store_row(const int16_t (*sums)[kTile][kTile], long count, int row, float factor, uint16_t* to) {
  long t = 0;
#ifdef __AVX512BW__
  for (; t + 2 <= count; t += 2)
    store_bfloat16(to + t * kTile, weights_of(sums[t][row], factor), weights_of(sums[t + 1][row], factor));
#endif
  for (; t < count; ++t)
    for (int column = 0; column < kTile; ++column)
      to[t * kTile + column] = finite_to_bfloat16(factor * static_cast<float>(sums[t][row][column] - CIUIC_LEVEL_CENTRE));
}

template <int H, bool Masked, typename Out>
static void decode(const uint8_t* codes, long tiles, int L, const float* row_factor, int row_begin, int row_end,
                   Out* out, size_t out_stride) {
  const auto mask = Tile<H>::mask_of(L);
  alignas(64) int16_t sums[kTilesPerWrite][kTile][kTile];
  for (long first = 0; first < tiles; first += kTilesPerWrite) {
    const long count = tiles - first < kTilesPerWrite ? tiles - first : kTilesPerWrite;
    for (long t = 0; t < count; ++t) {
      Pair pairs[kTile / 2];
      read_pairs<H, Masked, 0>(Tile<H>(codes + (first + t) * CIUIC_TILE_BYTES(H)), mask, pairs);
      store_rows(pairs, sums[t]);
    }
    for (int row = row_begin; row < row_end; ++row)
      store_row(sums, count, row, row_factor[row], out + (row - row_begin) * out_stride + first * kTile);
  }
}

template <typename Out>
static void decode_to(Out* out, const uint8_t* codes, long tiles, int half_bits, int L, const float* row_factor,
                      int row_begin, int row_end, size_t out_stride) {
  with_half_bits(half_bits, [&](auto constant) {
    constexpr int H = decltype(constant)::value;
    if (L == 16)
      decode<H, false>(codes, tiles, L, row_factor, row_begin, row_end, out, out_stride);
    else
      decode<H, true>(codes, tiles, L, row_factor, row_begin, row_end, out, out_stride);
  });
}

void decode_tiles(const uint8_t* codes, long tiles, int half_bits, int L, const float* row_factor, int row_begin,
                  int row_end, void* out, size_t out_stride, bool bf16) {
  if (bf16)
    decode_to(static_cast<uint16_t*>(out), codes, tiles, half_bits, L, row_factor, row_begin, row_end, out_stride);
  else
    decode_to(static_cast<float*>(out), codes, tiles, half_bits, L, row_factor, row_begin, row_end, out_stride);
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
