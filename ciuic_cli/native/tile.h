// Reading a tile with the instruction set at hand.
#ifndef CIUIC_TILE_H
#define CIUIC_TILE_H

#if defined(__AVX512VNNI__)
#include "tile_avx512.h"
#elif defined(__AVX2__)
#include "tile_avx2.h"
#else
#include "tile_portable.h"
#endif

namespace ciuic {
namespace CIUIC_ISA {

// Calls action(constant of K) with K as a compile-time constant.
template <int Value>
struct Constant {
  static constexpr int value = Value;
};

template <typename Action>
static inline void with_bits(int bits, Action action) {
  switch (bits) {
    case 1: return action(Constant<1>());
    case 2: return action(Constant<2>());
    case 3: return action(Constant<3>());
    case 4: return action(Constant<4>());
    case 5: return action(Constant<5>());
    case 6: return action(Constant<6>());
    case 7: return action(Constant<7>());
    default: return action(Constant<8>());
  }
}

}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
