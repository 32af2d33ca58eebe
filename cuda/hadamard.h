// The block Hadamard transform of a stripe of 1024 values by one warp: five stages of butterflies in registers, an exchange
// among the lanes through shared memory, five more stages in registers.
//
// Layout: position j = 256 c + 8 lane + e of the stripe is v[8 c + e] of that lane, so that a lane loads and stores eight
// neighbours at a time.
#ifndef CIUIC_HADAMARD_H
#define CIUIC_HADAMARD_H

#include "parameters.h"

#define EXCHANGE_FLOATS (CIUIC_STRIPE + 32)  // eight floats of padding per 256 values prevent bank conflicts

// The position of v[i].
CIUIC_DEVICE u32 stripe_position(u32 lane, u32 i) { return 256 * (i / 8) + 8 * lane + i % 8; }

// One stage of butterflies among a lane's values.
template <int stride>
CIUIC_DEVICE void butterflies(float (&v)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (i & stride) continue;
    const float a = v[i], b = v[i + stride];
    v[i] = a + b;
    v[i + stride] = a - b;
  }
}

// Orthonormal transform of every aligned block of 2^log2_block positions, 4 <= log2_block <= 10. All 32 lanes call it.
// `exchange` is shared memory of EXCHANGE_FLOATS floats that only this warp uses, aligned to 16 bytes.
CIUIC_DEVICE void hadamard(float (&v)[32], u32 lane, u32 log2_block, float* exchange) {
  butterflies<1>(v);
  butterflies<2>(v);
  butterflies<4>(v);
  if (log2_block > 8) butterflies<8>(v);
  if (log2_block > 9) butterflies<16>(v);

  // No barrier is needed before these stores: a lane overwrites only values that it alone read, at the end of the last
  // call.
#pragma unroll
  for (int c = 0; c < 4; ++c)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 8 * c + 4 * half;
      *(float4*)(exchange + 264 * c + 8 * lane + 4 * half) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
    }
  warp_sync();
  // Now lane 8 c + e takes the 32 positions 256 c + 8 r + e.
  float* column = exchange + 264 * (lane / 8) + lane % 8;
#pragma unroll
  for (int r = 0; r < 32; ++r) v[r] = column[8 * r];
  butterflies<1>(v);
  if (log2_block > 4) butterflies<2>(v);
  if (log2_block > 5) butterflies<4>(v);
  if (log2_block > 6) butterflies<8>(v);
  if (log2_block > 7) butterflies<16>(v);
#pragma unroll
  for (int r = 0; r < 32; ++r) column[8 * r] = v[r];
  warp_sync();
  // 2^(-log2_block / 2): a power of two, times sqrt(1/2) if log2_block is odd.
  const float scale = bits_to_float((127 - log2_block / 2) << 23) * (log2_block & 1 ? 0.70710678118654752f : 1.0f);
#pragma unroll
  for (int c = 0; c < 4; ++c)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 8 * c + 4 * half;
      const float4 four = *(const float4*)(exchange + 264 * c + 8 * lane + 4 * half);
      v[i] = four.x * scale, v[i + 1] = four.y * scale, v[i + 2] = four.z * scale, v[i + 3] = four.w * scale;
    }
}

// `value` times the sign of input j.
CIUIC_DEVICE float apply_sign(float value, u32 seed, u32 j) {
  return bits_to_float(float_to_bits(value) ^ (ciuic_sign_is_negative(seed, j) << 31));
}

#endif
