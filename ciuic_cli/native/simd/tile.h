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

// Calls action(constant of H), the width in halves, as a compile-time constant.
template <int Value>
struct Constant {
  static constexpr int value = Value;
};

template <typename Action>
static inline void with_halves(int halves, Action action) {
  switch (halves) {
    case 2: return action(Constant<2>());
    case 3: return action(Constant<3>());
    case 4: return action(Constant<4>());
    case 5: return action(Constant<5>());
    case 6: return action(Constant<6>());
    case 7: return action(Constant<7>());
    case 8: return action(Constant<8>());
    case 9: return action(Constant<9>());
    case 10: return action(Constant<10>());
    case 11: return action(Constant<11>());
    case 12: return action(Constant<12>());
    case 14: return action(Constant<14>());
    default: return action(Constant<16>());
  }
}

}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
