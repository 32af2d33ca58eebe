// The block code: integers of 8 or 4 bits with one bfloat16 scale per block of numbers.
//
// Every step rounds as the reference in ciuic_cli/codecs/blockcode/reference.py does, so all instruction sets and torch
// give the same bytes.
#include "bfloat16.h"
#include "kernels_of_isa.h"

namespace ciuic {
namespace CIUIC_ISA {

constexpr uint32_t kInfinity = 0x7F800000u, kNan = 0x7FC00000u, kSmallestNormal = 0x00800000u;
constexpr float kNearest = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds |v| < 2^22 to an integer, half to even

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// A uniform number of [0, 1) for number `index`: the upper 24 bits of murmur3's finalizer.
static inline __attribute__((always_inline)) float uniform(uint32_t seed, uint32_t index) {
  uint32_t h = seed * 0x9E3779B1u + index;
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  h ^= h >> 16;
  return static_cast<float>(static_cast<int32_t>(h >> 8)) * (1.0f / 16777216.0f);
}

// The scale of a block: its largest magnitude / most, rounded up to bfloat16. NaN if a number is not finite; 0 if the scale
// would not be a normal number.
static uint32_t scale_of(const float* block, long size, int most) {
  uint32_t largest = 0;
  for (long i = 0; i < size; ++i) {
    const uint32_t magnitude = bits_of(block[i]) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (largest >= kInfinity) return kNan;
  const uint32_t rounded_up = (bits_of(float_of(largest) / static_cast<float>(most)) + 0xFFFFu) & 0xFFFF0000u;
  return rounded_up < kSmallestNormal ? 0u : rounded_up;
}

static void quantize(const float* block, long size, float inverse, int32_t most, const BlockCode& code, uint32_t first,
                     int8_t* out) {
  if (code.stochastic)
    for (long i = 0; i < size; ++i) {
      const float value = block[i] * inverse + uniform(code.seed, first + static_cast<uint32_t>(i));
      const int32_t truncated = static_cast<int32_t>(value);
      const int32_t floor = truncated - static_cast<int32_t>(static_cast<float>(truncated) > value);
      const int32_t low = floor < -most ? -most : floor;
      out[i] = static_cast<int8_t>(low > most ? most : low);
    }
  else
    for (long i = 0; i < size; ++i) {
      const int32_t nearest = static_cast<int32_t>((block[i] * inverse + kNearest) - kNearest);
      const int32_t low = nearest < -most ? -most : nearest;
      out[i] = static_cast<int8_t>(low > most ? most : low);
    }
}

void encode_blocks(const BlockCode& code, const void* x, bool bf16, long count, long begin, long end, uint8_t* codes,
                   uint16_t* scales) {
  const long size = 1L << code.log2_block;
  const int most = code.bits == 8 ? 127 : 7;
  alignas(64) float values[1L << kMaxLog2Block];
  alignas(64) int8_t rounded[1L << kMaxLog2Block];
  for (long block = begin; block < end; ++block) {
    const long first = block * size, filled = count - first < size ? count - first : size;
    if (bf16)
      for (long i = 0; i < filled; ++i) values[i] = from_bfloat16(static_cast<const uint16_t*>(x)[first + i]);
    else
      __builtin_memcpy(values, static_cast<const float*>(x) + first, filled * sizeof(float));
    for (long i = filled; i < size; ++i) values[i] = 0.0f;
    if (code.signs != nullptr) hadamard_row(values, size, code.log2_block, code.signs, 0);
    const uint32_t scale = scale_of(values, size, most);
    scales[block] = static_cast<uint16_t>(scale >> 16);
    uint8_t* to = codes + first * code.bits / 8;
    if (scale == 0 || scale == kNan)
      __builtin_memset(rounded, 0, size);
    else
      quantize(values, size, 1.0f / float_of(scale), most, code, static_cast<uint32_t>(first), rounded);
    if (code.bits == 8)
      __builtin_memcpy(to, rounded, size);
    else
      for (long i = 0; i < size / 2; ++i)
        to[i] = static_cast<uint8_t>((rounded[2 * i] + 8) | (rounded[2 * i + 1] + 8) << 4);
  }
}

void decode_blocks(const BlockCode& code, const uint8_t* codes, const uint16_t* scales, long count, long begin, long end,
                   void* out, bool bf16) {
  const long size = 1L << code.log2_block;
  alignas(64) float values[1L << kMaxLog2Block];
  for (long block = begin; block < end; ++block) {
    const long first = block * size, filled = count - first < size ? count - first : size;
    const float scale = from_bfloat16(scales[block]);
    const uint8_t* from = codes + first * code.bits / 8;
    if (code.bits == 8)
      for (long i = 0; i < size; ++i) values[i] = static_cast<float>(static_cast<int8_t>(from[i])) * scale;
    else
      for (long i = 0; i < size / 2; ++i) {
        values[2 * i] = static_cast<float>((from[i] & 15) - 8) * scale;
        values[2 * i + 1] = static_cast<float>((from[i] >> 4) - 8) * scale;
      }
    if (code.signs != nullptr) hadamard_row(values, size, code.log2_block, code.signs, 1);
    if (bf16)
      for (long i = 0; i < filled; ++i) static_cast<uint16_t*>(out)[first + i] = to_bfloat16(values[i]);
    else
      __builtin_memcpy(static_cast<float*>(out) + first, values, filled * sizeof(float));
  }
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
