// Vectors of float32 numbers of the instruction set that is being compiled, for kernels of attention.
#ifndef CIUIC_VECTORS_H
#define CIUIC_VECTORS_H

namespace ciuic {
namespace CIUIC_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vector __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef int Lanes __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));

#define CIUIC_INLINE inline __attribute__((always_inline))

CIUIC_INLINE Vector larger(Vector a, Vector b) { return a < b ? b : a; }

// exp(x) for x <= 0: `exponential` of exponential.h with the same roundings, on a vector.
CIUIC_INLINE Vector exponential_of(Vector x) {
  constexpr float kRound = 12582912.0f;
  const Vector bounded = larger(x, Vector{} - 87.0f), shifted = bounded * 1.44269504f + kRound, n = shifted - kRound;
  const Vector r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  Vector p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Lanes power = (reinterpret_cast<Lanes>(shifted) + 127) << 23;  // 2^n: the low bits of `shifted` are n
  return (p * r * r + r + 1.0f) * reinterpret_cast<Vector>(power);
}

}  // namespace
}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
