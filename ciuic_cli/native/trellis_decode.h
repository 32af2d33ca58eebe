// The arithmetic of the decoder, defined once. g++, nvcc and NVRTC all compile this header, so it includes nothing.
// docs/FORMAT.md states the same rules in words.
//
// K is the number of bits per weight, a multiple of 1/2. Code counts it in half bits: H = 2 K, `half_bits` at run time.
// L is the number of trellis state bits, 12 to 16.
//
// A tile is 16 rows x 16 columns. Its codes are a circular string of 256 K bits. Weight (r, c) is decoded from a window:
// the L bits of the string that end at bit 16 K r + floor((c + 1) K). A window is one state of a bit-shift trellis (QTIP,
// arXiv 2406.11235), and its level is computed, not looked up:
//
//   hash   = window * MULTIPLIER mod 2^32
//   level  = sum of the four bytes of hash - 510     close to Gaussian over all windows, standard deviation SIGMA
//   weight = (row_scale / SIGMA) * level
//
// Memory layout of a tile: units of 32 bytes. Unit u holds, for each row r, bits [16 u, 16 u + 16) of that row's 16 K
// bits, as a little-endian 16-bit word at byte 32 u + 2 r. The first bit of the string is the most significant bit of
// its word. If H is odd, half a unit follows: the last 8 bits of each row, one byte per row.
#ifndef CIUIC_TRELLIS_DECODE_H
#define CIUIC_TRELLIS_DECODE_H

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define CIUIC_HD static __host__ __device__ __forceinline__
#else
// static: this header is compiled for several instruction sets into one library, and the linker must not merge the copies.
#define CIUIC_HD static inline
#endif

#define CIUIC_TILE 16            // rows and columns of a tile
#define CIUIC_MULTIPLIER 0x83DCD12Du  // docs/experiments/codes/hash-multiplier.md
#define CIUIC_LEVEL_CENTRE 510   // half of the largest sum of four bytes
#define CIUIC_SIGMA 147.8f       // standard deviation of that sum, sqrt(4 (256^2 - 1) / 12)
#define CIUIC_UNIT_BYTES 32      // bytes of one unit of a tile: 16 rows x 16 bits
#define CIUIC_TILE_BYTES(half_bits) (16 * (half_bits))

// Weights of the encoder's lead-in: before the first weight of a tile, the search runs through this many of the tile's last
// weights, so that the path is likely to close. Measured: docs/experiments/codes/lead-in.md. At L = 16, 128 would lower the
// MSE by 0.4 % and take a quarter more time. A smaller L needs fewer.
#define CIUIC_LEAD_IN(L) ((L) <= 13 ? 32 : 48)

// H of a row group from its byte in `row_bits`: bits 0-3 hold floor(K), bit 7 adds half a bit. -1 for an invalid byte.
CIUIC_HD constexpr int ciuic_half_bits_of(unsigned code) {
  return code <= 8 ? 2 * (int)code : code >= 0x81 && code <= 0x85 ? 2 * (int)(code & 15u) + 1 : -1;
}

// Units of a tile, a final half unit included.
CIUIC_HD constexpr int ciuic_units(int half_bits) { return (half_bits + 1) / 2; }

// End of a column's window, as a bit position in its row.
CIUIC_HD constexpr int ciuic_end_of_column(int column, int half_bits) { return (column + 1) * half_bits / 2; }

// Bits by which a column's window ends after that of the column before: the new bits of that weight.
CIUIC_HD constexpr int ciuic_bits_of_column(int column, int half_bits) {
  return ciuic_end_of_column(column, half_bits) - ciuic_end_of_column(column - 1, half_bits);
}

// The unit that holds the last bit of a column's window.
CIUIC_HD constexpr int ciuic_unit_of_column(int column, int half_bits) {
  return (ciuic_end_of_column(column, half_bits) + 15) / 16 - 1;
}

// Bits between the end of a column's window and the end of that unit.
CIUIC_HD constexpr int ciuic_shift_of_column(int column, int half_bits) {
  return 16 * (ciuic_unit_of_column(column, half_bits) + 1) - ciuic_end_of_column(column, half_bits);
}

// The window of L bits that ends `shift` bits before the end of the word `unit`. `previous` is the 16-bit word before it in
// the string.
CIUIC_HD unsigned ciuic_window(unsigned previous, unsigned unit, int shift, int L) {
  return (((previous << 16) | unit) >> shift) & ((1u << L) - 1u);
}

CIUIC_HD unsigned ciuic_hash(unsigned window) { return window * CIUIC_MULTIPLIER; }

CIUIC_HD unsigned ciuic_byte_sum(unsigned hash) {
  return (hash & 0xFFu) + ((hash >> 8) & 0xFFu) + ((hash >> 16) & 0xFFu) + (hash >> 24);
}

// The integer level of a window, -510 to 510.
CIUIC_HD int ciuic_level(unsigned window) { return (int)ciuic_byte_sum(ciuic_hash(window)) - CIUIC_LEVEL_CENTRE; }

// The factor from level to weight. Every decoder divides once per row and multiplies once per weight, so all of them round
// alike.
CIUIC_HD float ciuic_row_factor(float row_scale) { return row_scale / CIUIC_SIGMA; }

// The 16-bit word of (row, unit). Half a unit yields its 8 bits above 8 zero bits. Unit -1 is the last 16 bits of the row
// before; row 15 is the row before row 0.
CIUIC_HD unsigned ciuic_word(const unsigned char* tile, int row, int unit, int half_bits) {
  const int whole = half_bits / 2;
  const unsigned char* half_unit = tile + CIUIC_UNIT_BYTES * whole;
  if (unit < 0) row = (row + CIUIC_TILE - 1) % CIUIC_TILE;
  if (unit == whole) return (unsigned)half_unit[row] << 8;
  const unsigned char* word = tile + CIUIC_UNIT_BYTES * (unit < 0 ? whole - 1 : unit) + 2 * row;
  const unsigned value = (unsigned)word[0] | ((unsigned)word[1] << 8);
  return unit < 0 && half_bits % 2 ? (value << 8 & 0xFF00u) | half_unit[row] : value;
}

// The level of weight (row, column) of one tile.
CIUIC_HD int ciuic_tile_level(const unsigned char* tile, int row, int column, int half_bits, int L) {
  const int unit = ciuic_unit_of_column(column, half_bits);
  return ciuic_level(ciuic_window(ciuic_word(tile, row, unit - 1, half_bits), ciuic_word(tile, row, unit, half_bits),
                                  ciuic_shift_of_column(column, half_bits), L));
}

// Sign of input j of a matrix with the given seed: 1 means -1, 0 means +1. The mixing steps are murmur3's finalizer.
CIUIC_HD unsigned ciuic_sign_is_negative(unsigned seed, unsigned j) {
  unsigned h = seed * 0x9E3779B1u + j;
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  h ^= h >> 16;
  return h >> 31;
}

#endif
