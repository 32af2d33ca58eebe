// The arithmetic of the decoder, defined once. g++, nvcc and NVRTC all compile this header, so it includes nothing.
//
// A tile is 16 rows x 16 columns. Its codes are a circular string of 256 K bits; weight (r, c) is read from the window of L
// bits that ends at bit 16 K r + floor((c + 1) K). K is counted in halves, H = 2 K. The string is stored in units of 32
// bytes: unit u holds, for each row r, bits [16u, 16u+16) of that row's 16 K bits as a little-endian 16-bit word whose most
// significant bit comes first. Where H is odd, half a unit follows: the last 8 bits of each row, one byte per row.
//
//   window -> hash = window * MULTIPLIER mod 2^32 -> level = sum of the four bytes of hash - 510
//   weight = (row_scale / SIGMA) * level
//
// The level is close to Gaussian over all windows, with standard deviation SIGMA.
#ifndef CIUIC_TRELLIS_DECODE_H
#define CIUIC_TRELLIS_DECODE_H

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define CIUIC_HD static __host__ __device__ __forceinline__
#else
// static: the header is compiled under several instruction sets into one library, and the linker must not merge them.
#define CIUIC_HD static inline
#endif

#define CIUIC_TILE 16            // rows and columns of a tile
#define CIUIC_MULTIPLIER 0x83DCD12Du
#define CIUIC_LEVEL_CENTRE 510   // half of the largest byte sum
#define CIUIC_SIGMA 147.8f       // standard deviation of the byte sum, sqrt(4 (256^2 - 1) / 12)
#define CIUIC_UNIT_BYTES 32      // bytes of one unit of a tile: 16 rows x 16 bits
#define CIUIC_TILE_BYTES(halves) (16 * (halves))

// Weights before a tile's first, its own last, that an encoder's search comes through before it enters the tile, to choose
// where the circle closes. At L = 16, 256 would gain 0.1 % of MSE more, 48 lose 0.4 %; short windows forget sooner.
#define CIUIC_LEAD_IN(window_bits) ((window_bits) <= 13 ? 32 : 128)

// What a row group's byte in `row_bits` says: bits 0-3 whole bits per weight, bit 7 half a bit more. Its H, or -1.
CIUIC_HD constexpr int ciuic_halves_of(unsigned width) {
  return width <= 8 ? 2 * (int)width : width >= 0x81 && width <= 0x85 ? 2 * (int)(width & 15u) + 1 : -1;
}

// Units of a tile, the last of which may be half a unit.
CIUIC_HD constexpr int ciuic_units(int halves) { return (halves + 1) / 2; }

// Where in its row's bits the window of a column ends, and how many bits further that is than the column before.
CIUIC_HD constexpr int ciuic_end_of_column(int column, int halves) { return (column + 1) * halves / 2; }
CIUIC_HD constexpr int ciuic_bits_of_column(int column, int halves) {
  return ciuic_end_of_column(column, halves) - ciuic_end_of_column(column - 1, halves);
}

// Which unit holds the last bit of the window of column c, and how far the window lies from that unit's end.
CIUIC_HD constexpr int ciuic_unit_of_column(int column, int halves) {
  return (ciuic_end_of_column(column, halves) + 15) / 16 - 1;
}
CIUIC_HD constexpr int ciuic_shift_of_column(int column, int halves) {
  return 16 * (ciuic_unit_of_column(column, halves) + 1) - ciuic_end_of_column(column, halves);
}

// The window that ends `shift` bits before the end of `unit`; `previous` is the unit before it in the string.
CIUIC_HD unsigned ciuic_window(unsigned previous, unsigned unit, int shift, int window_bits) {
  return (((previous << 16) | unit) >> shift) & ((1u << window_bits) - 1u);
}

CIUIC_HD unsigned ciuic_hash(unsigned window) { return window * CIUIC_MULTIPLIER; }

CIUIC_HD unsigned ciuic_byte_sum(unsigned hash) {
  return (hash & 0xFFu) + ((hash >> 8) & 0xFFu) + ((hash >> 16) & 0xFFu) + (hash >> 24);
}

// The integer that a window stands for, -510 .. 510.
CIUIC_HD int ciuic_level(unsigned window) { return (int)ciuic_byte_sum(ciuic_hash(window)) - CIUIC_LEVEL_CENTRE; }

// What a level is multiplied by. Every decoder divides once per row and multiplies once per weight, so that all agree.
CIUIC_HD float ciuic_row_factor(float row_scale) { return row_scale / CIUIC_SIGMA; }

// Word of (row, unit); that of half a unit has its 8 bits above 8 zeros. Unit -1 are the last 16 bits of the row before,
// circularly.
CIUIC_HD unsigned ciuic_word(const unsigned char* tile, int row, int unit, int halves) {
  const int whole = halves / 2;
  const unsigned char* rest = tile + CIUIC_UNIT_BYTES * whole;
  if (unit < 0) row = (row + CIUIC_TILE - 1) % CIUIC_TILE;
  if (unit == whole) return (unsigned)rest[row] << 8;
  const unsigned char* word = tile + CIUIC_UNIT_BYTES * (unit < 0 ? whole - 1 : unit) + 2 * row;
  const unsigned value = (unsigned)word[0] | ((unsigned)word[1] << 8);
  return unit < 0 && halves % 2 ? (value << 8 & 0xFF00u) | rest[row] : value;
}

// The level of weight (row, column) of one tile.
CIUIC_HD int ciuic_tile_level(const unsigned char* tile, int row, int column, int halves, int window_bits) {
  const int unit = ciuic_unit_of_column(column, halves);
  return ciuic_level(ciuic_window(ciuic_word(tile, row, unit - 1, halves), ciuic_word(tile, row, unit, halves),
                                  ciuic_shift_of_column(column, halves), window_bits));
}

// Sign of input j of a matrix with the given seed (murmur3 finalizer): nonzero means -1.
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
