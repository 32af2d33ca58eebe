// The input transform of activations and their quantization, and the inverse transform.
//
// A block transforms one row (grid x: rows, up to 16 warps). Its warps share the stripes of 1024 values; a lane holds
// the 32 positions of hadamard.h. Dynamic shared memory: EXCHANGE_FLOATS floats per warp. cols_padded is a multiple of
// 2^log2_block, 16 <= 2^log2_block <= 1024.
#include "parameters.h"
#include "trellis_decode.h"
#include "hadamard.h"

// Elements index .. index + 7 of an array of `type`; zeros from element index + count on. One or two loads of 16 bytes if
// all eight exist and are aligned.
CIUIC_DEVICE void load_eight(float (&out)[8], const void* array, u64 index, u32 count, u32 type) {
  const u8* address = (const u8*)array + index * (type == CIUIC_FLOAT ? 4 : 2);
  if (count >= 8 && (u64)address % 16 == 0) {
    const uint4 first = *(const uint4*)address;
    const u32 word[4] = {first.x, first.y, first.z, first.w};
    if (type == CIUIC_FLOAT) {
      const uint4 second = *(const uint4*)(address + 16);
      const u32 more[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = bits_to_float(word[i]), out[4 + i] = bits_to_float(more[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool half = type == CIUIC_HALF;
        out[2 * i] = half ? half_to_float((u16)word[i]) : bits_to_float(word[i] << 16);
        out[2 * i + 1] = half ? half_to_float((u16)(word[i] >> 16)) : bits_to_float(word[i] & 0xFFFF0000u);
      }
    }
  } else {
#pragma unroll
    for (u32 i = 0; i < 8; ++i) out[i] = i < count ? load_as(array, index + i, type) : 0.0f;
  }
}

// Loads the stripe that begins at `base` and transforms it. Forward: input factors and signs are applied first, and v
// receives values in the transformed basis. Inverse: the caller has to apply the signs to v.
CIUIC_DEVICE void load_stripe(float (&v)[32], const CiuicTransform& p, u32 row, u32 base, u32 lane, float* exchange) {
  const bool inverse = p.mode == CIUIC_INVERSE;
  const u32 limit = inverse ? p.cols_padded : p.cols;
  const u64 start = (u64)row * p.x_stride;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const u32 j = base + stripe_position(lane, 8 * c);
    float eight[8];
    load_eight(eight, p.x, start + j, j < limit ? limit - j : 0, p.x_type);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (p.input_factor && j + e < limit) eight[e] *= p.input_factor[j + e];
      v[8 * c + e] = inverse ? eight[e] : apply_sign(eight[e], p.seed, j + e);
    }
  }
  hadamard(v, lane, p.log2_block, exchange);
}

CIUIC_DEVICE u32 larger(u32 a, u32 b) { return a > b ? a : b; }

// The nearest integer, clamped to -127 .. 127.
CIUIC_DEVICE s32 round_to_byte(float value) { return (s32)rintf(fminf(fmaxf(value, -127.0f), 127.0f)); }

// TO_BYTES and TO_HALF need the row's largest magnitude before they can quantize. A first loop over the stripes computes it,
// and a block-wide maximum combines the warps. If every warp has one stripe, v is still in registers for the second loop;
// otherwise each stripe is loaded and transformed again.
CIUIC_KERNEL void CIUIC_BOUNDS(512, 1) transform(CIUIC_PARAM(CiuicTransform) p) {
  CIUIC_DYNAMIC_SHARED(memory);
  CIUIC_SHARED u32 shared_peak[16];
  CIUIC_SHARED s32 shared_sum[16][2];
  grid_dependents_may_start();
  const u32 lane = thread_index() % 32, warp = thread_index() / 32, warps = thread_count() / 32, row = block_x();
  float* exchange = (float*)memory + warp * EXCHANGE_FLOATS;
  // The values beyond cols_padded are zeros in both bases, because the Hadamard block size divides cols_padded.
  const u32 width = p.mode == CIUIC_INVERSE ? p.cols_padded : (u32)p.out_stride;
  const u32 stripes = (width + CIUIC_STRIPE - 1) / CIUIC_STRIPE;
  const bool scaled = p.mode == CIUIC_TO_BYTES || p.mode == CIUIC_TO_HALF;

  float v[32];
  float scale = 1.0f, inverse_scale = 1.0f;
  u32 peak = 0;  // bit pattern of the largest magnitude; a NaN exceeds all numbers and so reaches the result
  s32 sum = 0, residual_sum = 0;
  // One copy of the code for both passes: instructions that are not in the cache take longer to fetch than to execute.
#pragma unroll 1
  for (u32 pass = scaled ? 0 : 1; pass < 2; ++pass) {
#pragma unroll 1
    for (u32 stripe = warp; stripe < stripes; stripe += warps) {
      const u32 base = stripe * CIUIC_STRIPE;
      if (pass == 0 || !scaled || stripes > warps) load_stripe(v, p, row, base, lane, exchange);
      if (pass == 0) {
#pragma unroll
        for (int i = 0; i < 32; ++i) peak = larger(peak, float_to_bits(v[i]) & 0x7FFFFFFFu);
        continue;
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const u32 j = base + stripe_position(lane, 8 * c);  // eight neighbours; width is a multiple of 16
        if (j >= width) continue;
        if (p.mode == CIUIC_TO_BYTES) {
          u32 bytes[2] = {0, 0}, residuals[2] = {0, 0};
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const float exact = v[8 * c + e] * inverse_scale;
            const s32 q = round_to_byte(exact), r = round_to_byte((exact - (float)q) * 254.0f);
            bytes[e / 4] |= ((u32)q & 0xFFu) << (8 * (e % 4));
            residuals[e / 4] |= ((u32)r & 0xFFu) << (8 * (e % 4));
            sum += q;
            residual_sum += r;
          }
          s8* out = (s8*)p.out + (u64)row * 2 * width + j;
          *(uint2*)out = make_uint2(bytes[0], bytes[1]);
          *(uint2*)(out + width) = make_uint2(residuals[0], residuals[1]);
        } else if (p.mode == CIUIC_INVERSE) {
          for (int e = 0; e < 8; ++e)
            if (j + e < p.cols)
              ((float*)p.out)[(u64)row * p.out_stride + j + e] = apply_sign(v[8 * c + e], p.seed, j + e);
        } else {
          const u32 type = p.mode == CIUIC_TO_HALF ? CIUIC_HALF : CIUIC_BFLOAT;
          u32 pairs[4];
#pragma unroll
          for (int e = 0; e < 4; ++e)
            pairs[e] = floats_to_16(v[8 * c + 2 * e] * inverse_scale, v[8 * c + 2 * e + 1] * inverse_scale, type);
          *(uint4*)((u16*)p.out + (u64)row * width + j) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
      }
    }
    if (pass == 0) {
#pragma unroll
      for (int mask = 16; mask; mask >>= 1) peak = larger(peak, shuffle_xor(peak, mask));
      if (lane == 0) shared_peak[warp] = peak;
      block_sync();
      for (u32 w = 0; w < warps; ++w) peak = larger(peak, shared_peak[w]);
      if (peak && p.mode == CIUIC_TO_BYTES) scale = bits_to_float(peak) / 127.0f;
      // The power of two that brings the largest magnitude to [64, 128). Dividing by it is exact, and fp16 has room on
      // both sides.
      if (peak && p.mode == CIUIC_TO_HALF) scale = bits_to_float(((peak >> 23) > 7 ? (peak >> 23) - 6 : 1) << 23);
      inverse_scale = 1.0f / scale;
    }
  }

  if (p.mode == CIUIC_TO_BYTES) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
      sum += shuffle_xor(sum, mask);
      residual_sum += shuffle_xor(residual_sum, mask);
    }
    if (lane == 0) {
      shared_sum[warp][0] = sum;
      shared_sum[warp][1] = residual_sum;
    }
    block_sync();
    if (thread_index() < 2) {
      s32 total = 0;
      for (u32 w = 0; w < warps; ++w) total += shared_sum[w][thread_index()];
      p.out_sum[2 * row + thread_index()] = total;
    }
  }
  if (scaled && thread_index() == 0) p.out_scale[row] = scale;
}
