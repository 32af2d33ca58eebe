// Conversions of bfloat16, which is the upper half of a float32.
#ifndef CIUIC_BFLOAT16_H
#define CIUIC_BFLOAT16_H

#include <cstdint>

namespace ciuic {

// static: this header is compiled for several instruction sets into one library, and the linker must not merge the copies.
static inline float from_bfloat16(uint16_t bits16) {
  const uint32_t bits = static_cast<uint32_t>(bits16) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// Rounds to nearest even, as torch does. A NaN stays a (quiet) NaN.
static inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? bits >> 16 | 0x40u : rounded);
}

// The same for a number that is not NaN. Compilers turn loops of it into vector instructions.
static inline uint16_t finite_to_bfloat16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace ciuic

#endif
