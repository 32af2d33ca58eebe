// Decodes four neighbouring tiles of a row group with one warp.
//
// Lane l takes all 16 columns of rows 2g and 2g + 1 of tile t, with g = l / 4 and t = l % 4. In a unit both rows lie in one
// 32-bit word, and a tensor-core fragment needs exactly two rows per lane. Columns may have any order along k of a
// fragment if weights and activations have the same one. Tiles are 4-byte aligned.
//
// H is twice the bits per weight (trellis_decode.h) and a template argument, so that all shifts are constants. CIUIC_L
// is L.
#ifndef CIUIC_DECODE_LANE_H
#define CIUIC_DECODE_LANE_H

#include "device.h"
#include "trellis_decode.h"

#ifndef CIUIC_L
#define CIUIC_L 16
#endif

// The words of rows 2g (low 16 bits) and 2g + 1 (high 16 bits), unit by unit, and the bits before them in the string.
template <int H>
struct LaneWords {
  u32 unit[ciuic_units(H)];
  u32 end;     // low 16 bits: the last 16 bits of row 2g, which precede row 2g + 1
  u32 before;  // high 16 bits: the last 16 bits of row 2g - 1 (row 15 if g is 0), which precede row 2g
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
    const u8* half_unit = tile + CIUIC_UNIT_BYTES * whole;
    const u32 bytes = *(const u16*)(half_unit + 2 * g);
    words.unit[ciuic_units(H) - 1] = permute(bytes, 0u, 0x1404u);
    words.end = permute(words.end, bytes, 0x0004u);
    words.before = permute(words.before, half_unit[2 * above + 1], 0x2400u);
  }
  return words;
}

// (unit u - 1) << 16 | unit u of row 2g + row; unit -1 is the end of the row before.
template <int H>
CIUIC_DEVICE u32 joined(const LaneWords<H>& words, int row, int u) {
  if (ciuic_units(H) > 1 && u > 0) return permute(words.unit[u], words.unit[u - 1], row ? 0x7632u : 0x5410u);
  return row ? permute(words.unit[0], words.end, 0x5432u) : permute(words.unit[0], words.before, 0x7610u);
}

// Hash of weight (2g + row, column). At L = 16 the window takes two instructions instead of ciuic_window's: a shift by
// less than a byte, which windows of the same unit share, and a permutation that shifts by whole bytes and masks.
template <int H>
CIUIC_DEVICE u32 lane_hash(const LaneWords<H>& words, int row, int column) {
  const u32 both = joined<H>(words, row, ciuic_unit_of_column(column, H));
  const int shift = ciuic_shift_of_column(column, H);
  if (CIUIC_L == 16) return ciuic_hash(permute(both >> (shift & 7), 0u, shift & 8 ? 0x4421u : 0x4410u));
  return ciuic_hash(ciuic_window(both >> 16, both & 0xFFFFu, shift, CIUIC_L));
}

// Byte sum + 1024 as fp16: the sum is added to the bits of 1024 (0x6400), whose last place has the value 1.
CIUIC_DEVICE u32 half_of_byte_sum(u32 hash) { return dot4(hash, 0x01010101u, 0x6400u); }

// The levels of two weights as fp16: (byte sum + 1024) - (1024 + 510), which is exact.
CIUIC_DEVICE u32 half_levels(u32 hash_low, u32 hash_high) {
  const u32 pair = permute(half_of_byte_sum(hash_low), half_of_byte_sum(hash_high), 0x5410u);
  return half2_subtract(pair, 0x65FE65FEu);
}

// The factor from level to weight for a row, from its scale byte: base * 2^(byte / steps per octave) / SIGMA.
CIUIC_DEVICE float row_factor(const u8* blob, u32 groups, u32 row) {
  const float base = *(const float*)(blob + CIUIC_BLOB_BASE);
  const float octaves_per_step = 1.0f / (float)(16 + blob[CIUIC_BLOB_STEPS]);
  return ciuic_row_factor(base * exp2f((float)blob[CIUIC_BLOB_ROW_BITS + groups + row] * octaves_per_step));
}

// H of a row group. An invalid byte counts as 0 bits; the host checks blobs when it reads them.
CIUIC_DEVICE u32 group_half_bits(const u8* blob, u32 group) {
  const int half_bits = ciuic_half_bits_of(blob[CIUIC_BLOB_ROW_BITS + group]);
  return half_bits < 0 ? 0u : (u32)half_bits;
}

// Expands to call(H) for the run-time H, or to nothing for 0 and invalid values. With one switch over all values linear.cu
// would spill registers on sm_80, so there are two.
#define CIUIC_FOR_HALF_BITS(half_bits, call) \
  if ((half_bits) % 2 == 0) {         \
    switch ((half_bits) / 2) {        \
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
    switch ((half_bits) / 2) {        \
      case 1: call(3); break;         \
      case 2: call(5); break;         \
      case 3: call(7); break;         \
      case 4: call(9); break;         \
      case 5: call(11); break;        \
      default: break;                 \
    }                                 \
  }

#endif
