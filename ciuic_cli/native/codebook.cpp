#include "codebook.h"

#include <mutex>
#include <new>

#include "trellis_decode.h"

namespace ciuic {

const int16_t* codebook(int, int window) {
  static std::mutex mutex;
  static int16_t* tables[17] = {};
  std::lock_guard<std::mutex> guard(mutex);
  int16_t*& table = tables[window];
  if (table == nullptr) {
    const unsigned windows = 1u << window;
    table = new int16_t[2 * windows];
    for (unsigned s = 0; s < windows; ++s) {
      const int level = ciuic_level(s);
      const int square = level * level - CIUIC_LEVEL_CENTRE * CIUIC_LEVEL_CENTRE / 2;
      table[2 * s] = static_cast<int16_t>((square + (square >= 0 ? 2 : -2)) / 4);
      table[2 * s + 1] = static_cast<int16_t>(level);
    }
  }
  return table;
}

}  // namespace ciuic
