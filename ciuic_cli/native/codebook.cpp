#include "codebook.h"

#include <cstdlib>
#include <mutex>

namespace ciuic {
namespace {

// 1 bit: vector (block, high, j) holds the windows high << (L - 1) | 2 q + j for neighbouring q.
void fill_pairs(int32_t* table, int window, int quads) {
  const int predecessors = 1 << (window - 2), lanes = 4 * quads;
  for (int block = 0; block < predecessors; block += lanes)
    for (int high = 0; high < 2; ++high)
      for (int j = 0; j < 2; ++j)
        for (int q = block; q < block + lanes; ++q)
          *table++ = codebook_entry(static_cast<unsigned>(high << (window - 1) | (2 * q + j)), 1);
}

// 2 to 4 bits: blocks of 4 * quads neighbouring predecessors (low part q of s >> K). Vector (block, group, high, k)
// holds, in quad l and lane e, the window high << (L - K) | p with accumulator a = 4 group + k, j = a / (2^K / 4),
// c = a mod (2^K / 4), p = (block * 4 quads + 4 l + j) * 2^K + 4 c + e.
void fill_spread(int32_t* table, int bits, int window, int quads) {
  const int predecessors = 1 << (window - 2 * bits), block_size = 4 * quads, per_predecessor = (1 << bits) / 4;
  for (int block = 0; block < predecessors / block_size; ++block)
    for (int group = 0; group < (1 << bits) / 4; ++group)
      for (int high = 0; high < 1 << bits; ++high)
        for (int k = 0; k < 4; ++k)
          for (int quad = 0; quad < quads; ++quad)
            for (int e = 0; e < 4; ++e) {
              const int a = 4 * group + k, j = a / per_predecessor, c = a % per_predecessor;
              const int p = ((block * block_size + 4 * quad + j) << bits) + 4 * c + e;
              *table++ = codebook_entry(static_cast<unsigned>(high << (window - bits) | p), bits);
            }
}

// From 5 bits on a whole vector has one predecessor. Vector (group, high, k) holds the windows high << (L - K) | p for
// neighbouring p; a group is up to 4 vectors.
void fill_broadcast(int32_t* table, int bits, int window, int quads) {
  const int prefixes = 1 << (window - bits), lanes = 4 * quads;
  const int vectors = prefixes / lanes < 4 ? prefixes / lanes : 4;
  for (int group = 0; group < prefixes / (vectors * lanes); ++group)
    for (int high = 0; high < 1 << bits; ++high)
      for (int i = 0; i < vectors * lanes; ++i)
        *table++ = codebook_entry(static_cast<unsigned>(high << (window - bits) | (group * vectors * lanes + i)), bits);
}

}  // namespace

const int32_t* codebook(int bits, int window, int quads) {
  static std::mutex mutex;
  static int32_t* tables[9][17][5] = {};
  std::lock_guard<std::mutex> guard(mutex);
  int32_t*& table = tables[bits][window][quads];
  if (table == nullptr) {
    int32_t* memory = static_cast<int32_t*>(std::aligned_alloc(64, sizeof(int32_t) << window));
    if (memory == nullptr) return nullptr;
    if (bits == 1)
      fill_pairs(memory, window, quads);
    else if (bits <= 4)
      fill_spread(memory, bits, window, quads);
    else
      fill_broadcast(memory, bits, window, quads);
    table = memory;
  }
  return table;
}

}  // namespace ciuic
