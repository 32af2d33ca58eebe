// The arithmetic of the decoder, defined once. g++, nvcc and NVRTC all compile this header, so it includes nothing.
//
// A tile is 16 rows x 16 columns. Its codes are a circular string of 256*K bits; weight (r, c) is read from the window of
// L bits that ends at bit (16 r + c + 1) K. The string is stored in K units of 32 bytes: unit u holds, for each row r,
// bits [16u, 16u+16) of that row's 16K bits as a little-endian 16-bit word whose most significant bit comes first.
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

// Weights before a tile's first, its own last, that an encoder's search comes through before it enters the tile, to choose
// where the circle closes. At L = 16, 256 would gain 0.1 % of MSE more, 48 lose 0.4 %; short windows forget sooner.
#define CIUIC_LEAD_IN(window_bits) ((window_bits) <= 13 ? 32 : 128)

// Which unit holds the last bit of the window of column c, and how far the window lies from that unit's end.
CIUIC_HD constexpr int ciuic_unit_of_column(int column, int bits) { return ((column + 1) * bits + 15) / 16 - 1; }
CIUIC_HD constexpr int ciuic_shift_of_column(int column, int bits) {
  return 16 * (ciuic_unit_of_column(column, bits) + 1) - (column + 1) * bits;
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

// Word of (row, unit) in a tile of `bits` units; unit -1 of a row is the last unit of the row before, circularly.
CIUIC_HD unsigned ciuic_word(const unsigned char* tile, int row, int unit, int bits) {
  if (unit < 0) {
    unit = bits - 1;
    row = (row + CIUIC_TILE - 1) % CIUIC_TILE;
  }
  const unsigned char* word = tile + CIUIC_UNIT_BYTES * unit + 2 * row;
  return (unsigned)word[0] | ((unsigned)word[1] << 8);
}

// The level of weight (row, column) of one tile.
CIUIC_HD int ciuic_tile_level(const unsigned char* tile, int row, int column, int bits, int window_bits) {
  const int unit = ciuic_unit_of_column(column, bits);
  return ciuic_level(ciuic_window(ciuic_word(tile, row, unit - 1, bits), ciuic_word(tile, row, unit, bits),
                                  ciuic_shift_of_column(column, bits), window_bits));
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
