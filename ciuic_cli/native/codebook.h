// The table that the encoder searches.
#ifndef CIUIC_CODEBOOK_H
#define CIUIC_CODEBOOK_H

#include <cstdint>

namespace ciuic {

// Per window of L bits two int16: (level^2 - 130050) / 4, rounded, and level. Made once per process.
const int16_t* codebook(int bits, int window);

}  // namespace ciuic

#endif
