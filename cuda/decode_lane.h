// How a lane decodes its share of four neighbouring tiles.
//
// Lane l of a warp, g = l / 4, t = l % 4, takes rows 2g and 2g + 1 of tile t, all 16 columns: both rows of a unit are one
// 32-bit word, and a tensor-core fragment needs exactly two rows per lane. Which column meets which k of a fragment is
// free, as long as weights and activations agree.
#ifndef CIUIC_DECODE_LANE_H
#define CIUIC_DECODE_LANE_H

#include "device.h"
#include "trellis_decode.h"

#ifndef CIUIC_L
#define CIUIC_L 16
#endif

// The 16-bit words of rows 2g (low half) and 2g + 1 (high half), unit by unit, and what comes before them in the string.
template <int H>
struct LaneWords {
  u32 unit[ciuic_units(H)];
  u32 end;     // low half: the last 16 bits of row 2g
  u32 before;  // high half: the last 16 bits of row 2g - 1
};

template <int H>
CIUIC_DEVICE LaneWords<H> load_words(const u8* tile, u32 g) {
  const int whole = H / 2;
  const u32 above = (g + 7) & 7;
  LaneWords<H> words;
#pragma unroll
  for (int u = 0; u < whole; ++u) words.unit[u] = *(const u32*)(tile + CIUIC_UNIT_BYTES * u + 4 * g);
  words.end = words.unit[whole - 1];
  words.before = *(const u32*)(tile + CIUIC_UNIT_BYTES * (whole - 1) + 4 * above);
  if (H % 2) {
    const u8* rest = tile + CIUIC_UNIT_BYTES * whole;
    const u32 bytes = *(const u16*)(rest + 2 * g);
    words.unit[ciuic_units(H) - 1] = permute(bytes, 0u, 0x1404u);
    words.end = permute(words.end, bytes, 0x0004u);
    words.before = permute(words.before, rest[2 * above + 1], 0x2400u);
  }
  return words;
}

// (previous unit << 16) | unit, of row 2g + row.
template <int H>
CIUIC_DEVICE u32 joined(const LaneWords<H>& words, int row, int u) {
  if (ciuic_units(H) > 1 && u > 0) return permute(words.unit[u], words.unit[u - 1], row ? 0x7632u : 0x5410u);
  return row ? permute(words.unit[0], words.end, 0x5432u) : permute(words.unit[0], words.before, 0x7610u);
}

// Hash of weight (2g + row, column). ciuic_window in its two-instruction form: shifts by less than a byte are shared by
// the windows of a unit, and at L = 16 the byte shift and the mask are one permutation.
template <int H>
CIUIC_DEVICE u32 lane_hash(const LaneWords<H>& words, int row, int column) {
  const u32 both = joined<H>(words, row, ciuic_unit_of_column(column, H));
  const int shift = ciuic_shift_of_column(column, H);
  if (CIUIC_L == 16) return ciuic_hash(permute(both >> (shift & 7), 0u, shift & 8 ? 0x4421u : 0x4410u));
  return ciuic_hash(ciuic_window(both >> 16, both & 0xFFFFu, shift, CIUIC_L));
}

// byte sum + 1024 as a half: the sum is the mantissa of 1024 (0x6400), whose last place is 1.
CIUIC_DEVICE u32 half_of_byte_sum(u32 hash) { return dot4(hash, 0x01010101u, 0x6400u); }

// The levels of two weights as halves, exact: (byte sum + 1024) - (1024 + 510).
CIUIC_DEVICE u32 half_levels(u32 hash_low, u32 hash_high) {
  const u32 pair = permute(half_of_byte_sum(hash_low), half_of_byte_sum(hash_high), 0x5410u);
  return half2_subtract(pair, 0x65FE65FEu);
}

CIUIC_DEVICE float row_factor(const u8* blob, u32 groups, u32 row) {
  const float base = *(const float*)(blob + CIUIC_BLOB_BASE);
  const float step = 1.0f / (float)(16 + blob[CIUIC_BLOB_STEPS]);
  return ciuic_row_factor(base * exp2f((float)blob[CIUIC_BLOB_ROW_BITS + groups + row] * step));
}

// H of a row group. What is no width counts as no bits: blobs are checked where they are read.
CIUIC_DEVICE u32 group_halves(const u8* blob, u32 group) {
  const int halves = ciuic_halves_of(blob[CIUIC_BLOB_ROW_BITS + group]);
  return halves < 0 ? 0u : (u32)halves;
}

// Calls call(H) for the run-time H; 0 and anything unknown call nothing. Two switches: with one over all widths the product
// spills registers on sm_80.
#define CIUIC_FOR_WIDTH(halves, call) \
  if ((halves) % 2 == 0) {            \
    switch ((halves) / 2) {           \
      case 1: call(2); break;         \
      case 2: call(4); break;         \
      case 3: call(6); break;         \
      case 4: call(8); break;         \
      case 5: call(10); break;        \
      case 6: call(12); break;        \
      case 7: call(14); break;        \
      case 8: call(16); break;        \
      default: break;                 \
    }                                 \
  } else {                            \
    switch ((halves) / 2) {           \
      case 1: call(3); break;         \
      case 2: call(5); break;         \
      case 3: call(7); break;         \
      case 4: call(9); break;         \
      case 5: call(11); break;        \
      default: break;                 \
    }                                 \
  }

#endif
