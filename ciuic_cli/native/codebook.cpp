// Fills the tables of entries (codebook.h). There are three layouts, one per loop of the forward pass (forward_kernel.h).
// A window is high << (L - out) | p: the next step shifts out the `out` bits `high` and keeps the prefix p. The window's
// predecessor is the prefix window >> in, from which a path reaches it. A vector has 4 * quads lanes.
#include "codebook.h"

#include <cstdlib>
#include <mutex>

namespace ciuic {
namespace {

// Pair layout, for a weight of 1 bit: predecessor q leads to the prefixes 2 q and 2 q + 1. Vector (block, high, j) holds
// the windows with prefixes 2 q + j of the block's neighbouring predecessors q.
void fill_pairs(int32_t* table, int out, int L, int quads) {
  const int predecessors = 1 << (L - 1 - out), lanes = 4 * quads;
  for (int block = 0; block < predecessors; block += lanes)
    for (int high = 0; high < 1 << out; ++high)
      for (int j = 0; j < 2; ++j)
        for (int q = block; q < block + lanes; ++q)
          *table++ = codebook_entry(static_cast<unsigned>(high << (L - out) | (2 * q + j)), false);
}

// Quad layout, for 2 to 4 bits. A block is 4 * quads neighbouring predecessors; quad l of a vector serves predecessors
// 4 l to 4 l + 3 of the block, one at a time. Vector (block, group, high, k) holds, in lane e of quad l, the window with
// prefix
//   p = (block * 4 quads + 4 l + j) * 2^in + 4 c + e,   a = 4 group + k,   j = a / (2^in / 4),   c = a mod (2^in / 4).
void fill_quads(int32_t* table, int in, int out, int L, int quads) {
  const int predecessors = 1 << (L - in - out), block_size = 4 * quads, per_predecessor = (1 << in) / 4;
  for (int block = 0; block < predecessors / block_size; ++block)
    for (int group = 0; group < (1 << in) / 4; ++group)
      for (int high = 0; high < 1 << out; ++high)
        for (int k = 0; k < 4; ++k)
          for (int quad = 0; quad < quads; ++quad)
            for (int e = 0; e < 4; ++e) {
              const int a = 4 * group + k, j = a / per_predecessor, c = a % per_predecessor;
              const int p = ((block * block_size + 4 * quad + j) << in) + 4 * c + e;
              *table++ = codebook_entry(static_cast<unsigned>(high << (L - out) | p), false);
            }
}

// Broadcast layout, for all other weights: all lanes of a vector have the same predecessor. Vector (group, high, k)
// holds windows with neighbouring prefixes; a group is up to 4 vectors.
void fill_broadcast(int32_t* table, int out, bool squared, int L, int quads) {
  const int prefixes = 1 << (L - out), lanes = 4 * quads;
  const int vectors = prefixes / lanes < 4 ? prefixes / lanes : 4;
  for (int group = 0; group < prefixes / (vectors * lanes); ++group)
    for (int high = 0; high < 1 << out; ++high)
      for (int i = 0; i < vectors * lanes; ++i)
        *table++ = codebook_entry(static_cast<unsigned>(high << (L - out) | (group * vectors * lanes + i)), squared);
}

}  // namespace

const int32_t* codebook(int in, int out, bool squared, int L, int quads) {
  static std::mutex mutex;
  static int32_t* tables[9][9][2][17][5] = {};
  std::lock_guard<std::mutex> guard(mutex);
  int32_t*& table = tables[in][out][squared][L][quads];
  if (table == nullptr) {
    int32_t* memory = static_cast<int32_t*>(std::aligned_alloc(64, sizeof(int32_t) << L));
    if (memory == nullptr) return nullptr;
    if (in == 1)
      fill_pairs(memory, out, L, quads);
    else if (uses_quads(in, out, L, 4 * quads))
      fill_quads(memory, in, out, L, quads);
    else
      fill_broadcast(memory, out, squared, L, quads);
    table = memory;
  }
  return table;
}

}  // namespace ciuic
