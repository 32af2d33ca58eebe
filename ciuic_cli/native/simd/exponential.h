// The exponential function, the same on every instruction set. Compilers turn loops of it into vector instructions.
#ifndef CIUIC_EXPONENTIAL_H
#define CIUIC_EXPONENTIAL_H

#include <cstdint>

namespace ciuic {

// exp(x) with a relative error of 1e-7; x is clamped to where the result is a normal number. A NaN stays a NaN.
// Method: exp(x) = 2^n exp(r), |r| <= ln(2) / 2, and a polynomial of degree 6 (Cephes, Moshier 1989).
static inline __attribute__((always_inline)) float exponential(float x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float low = x < -87.0f ? -87.0f : x;
  const float bounded = low > 88.0f ? 88.0f : low;
  const float shifted = bounded * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = (bounded - n * kLn2High) - n * kLn2Low;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float value = p * r * r + r + 1.0f;
  uint32_t shifted_bits;
  __builtin_memcpy(&shifted_bits, &shifted, sizeof shifted_bits);
  const uint32_t power_bits = (shifted_bits + 127u) << 23;  // 2^n: the low bits of `shifted` are n
  float power;
  __builtin_memcpy(&power, &power_bits, sizeof power);
  return value * power;
}

}  // namespace ciuic

#endif
