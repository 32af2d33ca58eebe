#include "codebook.h"

#include <cstdlib>
#include <mutex>

namespace ciuic {
namespace {

// A weight of 1 bit: vector (block, high, j) holds the windows high << (L - out) | 2 q + j for neighbouring q.
void fill_pairs(int32_t* table, int out, int window, int quads) {
  const int predecessors = 1 << (window - 1 - out), lanes = 4 * quads;
  for (int block = 0; block < predecessors; block += lanes)
    for (int high = 0; high < 1 << out; ++high)
      for (int j = 0; j < 2; ++j)
        for (int q = block; q < block + lanes; ++q)
          *table++ = codebook_entry(static_cast<unsigned>(high << (window - out) | (2 * q + j)), false);
}

// 2 to 4 bits: blocks of 4 * quads neighbouring predecessors (low part q of s >> in). Vector (block, group, high, k) holds, in
// quad l and lane e, the window high << (L - out) | p with accumulator a = 4 group + k, j = a / (2^in / 4), c = a mod (2^in / 4),
// p = (block * 4 quads + 4 l + j) * 2^in + 4 c + e.
void fill_spread(int32_t* table, int in, int out, int window, int quads) {
  const int predecessors = 1 << (window - in - out), block_size = 4 * quads, per_predecessor = (1 << in) / 4;
  for (int block = 0; block < predecessors / block_size; ++block)
    for (int group = 0; group < (1 << in) / 4; ++group)
      for (int high = 0; high < 1 << out; ++high)
        for (int k = 0; k < 4; ++k)
          for (int quad = 0; quad < quads; ++quad)
            for (int e = 0; e < 4; ++e) {
              const int a = 4 * group + k, j = a / per_predecessor, c = a % per_predecessor;
              const int p = ((block * block_size + 4 * quad + j) << in) + 4 * c + e;
              *table++ = codebook_entry(static_cast<unsigned>(high << (window - out) | p), false);
            }
}

// Otherwise a whole vector has one predecessor. Vector (group, high, k) holds the windows high << (L - out) | p for
// neighbouring p; a group is up to 4 vectors.
void fill_broadcast(int32_t* table, int out, bool squared, int window, int quads) {
  const int prefixes = 1 << (window - out), lanes = 4 * quads;
  const int vectors = prefixes / lanes < 4 ? prefixes / lanes : 4;
  for (int group = 0; group < prefixes / (vectors * lanes); ++group)
    for (int high = 0; high < 1 << out; ++high)
      for (int i = 0; i < vectors * lanes; ++i)
        *table++ = codebook_entry(static_cast<unsigned>(high << (window - out) | (group * vectors * lanes + i)), squared);
}

}  // namespace

const int32_t* codebook(int in, int out, bool squared, int window, int quads) {
  static std::mutex mutex;
  static int32_t* tables[9][9][2][17][5] = {};
  std::lock_guard<std::mutex> guard(mutex);
  int32_t*& table = tables[in][out][squared][window][quads];
  if (table == nullptr) {
    int32_t* memory = static_cast<int32_t*>(std::aligned_alloc(64, sizeof(int32_t) << window));
    if (memory == nullptr) return nullptr;
    if (in == 1)
      fill_pairs(memory, out, window, quads);
    else if (spreads(in, out, window, 4 * quads))
      fill_spread(memory, in, out, window, quads);
    else
      fill_broadcast(memory, out, squared, window, quads);
    table = memory;
  }
  return table;
}

}  // namespace ciuic
