// Every CUDA intrinsic and PTX instruction that the kernels use, under plain names.
//
// With CIUIC_EMULATE the same names come from tests/cuda/emulator/emulate.h, and g++ compiles the kernels for the host.
// No CUDA header is included, so NVRTC needs no include path and no toolkit.
#ifndef CIUIC_DEVICE_H
#define CIUIC_DEVICE_H

typedef unsigned char u8;
typedef signed char s8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int s32;
typedef unsigned long long u64;
typedef long long s64;

#ifdef CIUIC_EMULATE
#include "emulate.h"
#else

#define CIUIC_DEVICE static __device__ __forceinline__
#define CIUIC_DEVICE_MEMBER __device__ __forceinline__
#define CIUIC_KERNEL extern "C" __global__
#define CIUIC_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define CIUIC_PARAM(type) const __grid_constant__ type
#define CIUIC_DYNAMIC_SHARED(name) extern __shared__ __align__(16) u8 name[]
#define CIUIC_SHARED __shared__

CIUIC_DEVICE u32 thread_index() { return threadIdx.x; }
CIUIC_DEVICE u32 thread_count() { return blockDim.x; }
CIUIC_DEVICE u32 block_x() { return blockIdx.x; }
CIUIC_DEVICE u32 block_y() { return blockIdx.y; }
CIUIC_DEVICE u32 grid_x() { return gridDim.x; }
CIUIC_DEVICE void block_sync() { __syncthreads(); }
CIUIC_DEVICE void warp_sync() { __syncwarp(); }
CIUIC_DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, value, mask); }
CIUIC_DEVICE s32 shuffle_xor(s32 value, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, value, mask); }
CIUIC_DEVICE u32 shuffle_xor(u32 value, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, value, mask); }

// Byte i of the result is byte n of the eight bytes of a (0 to 3) and b (4 to 7), where n is nibble i of `selector`.
CIUIC_DEVICE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// accumulator + sum over four bytes of a_i * b_i, all unsigned.
CIUIC_DEVICE u32 dot4(u32 a, u32 b, u32 accumulator) { return __dp4a(a, b, accumulator); }

CIUIC_DEVICE float bits_to_float(u32 bits) { return __uint_as_float(bits); }
CIUIC_DEVICE u32 float_to_bits(float value) { return __float_as_uint(value); }

CIUIC_DEVICE u16 float_to_half(float value) {
  u16 out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
}
CIUIC_DEVICE float half_to_float(u16 value) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value));
  return out;
}
// Two numbers rounded to nearest even, the first in the low 16 bits. sm_75 lacks these instructions.
#if __CUDA_ARCH__ >= 800
#define CIUIC_PAIR_CONVERSION
CIUIC_DEVICE u32 floats_to_halves(float low, float high) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
CIUIC_DEVICE u32 floats_to_bfloats(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
#endif

// a - b for two fp16 numbers at once, rounded to nearest even.
CIUIC_DEVICE u32 half2_subtract(u32 a, u32 b) {
  u32 out;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// Tensor core: D (16x8, int32) += A (16x32, unsigned bytes) B (32x8, signed bytes). All 32 lanes call it. Lane l holds,
// with g = l / 4 and t = l % 4:
//   a0 = A[g][4t..4t+3], a1 = A[g+8][4t..], a2 = A[g][16+4t..], a3 = A[g+8][16+4t..],
//   b0 = B[4t..][g], b1 = B[16+4t..][g],
//   d0, d1 = D[g][2t], D[g][2t+1], d2, d3 = D[g+8][2t], D[g+8][2t+1].
// sm_75 has only m8n8k16, four of which make up the product.
CIUIC_DEVICE void mma_bytes(s32 d[4], const u32 a[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
#define CIUIC_MMA_8816(lo, hi, a, b)                                                                \
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};" \
               : "+r"(lo), "+r"(hi)                                                                 \
               : "r"(a), "r"(b))
  CIUIC_MMA_8816(d[0], d[1], a[0], b0);
  CIUIC_MMA_8816(d[2], d[3], a[1], b0);
  CIUIC_MMA_8816(d[0], d[1], a[2], b1);
  CIUIC_MMA_8816(d[2], d[3], a[3], b1);
#endif
}

// Tensor core: D (16x8, float32) += A (16x16, fp16) B (16x8, fp16). Lanes as above:
//   a0 = A[g][2t,2t+1], a1 = A[g+8][2t..], a2 = A[g][8+2t..], a3 = A[g+8][8+2t..], b0 = B[2t,2t+1][g], b1 = B[8+2t..][g],
//   d0 to d3 as above.
CIUIC_DEVICE void mma_halves(float d[4], const u32 a[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
#define CIUIC_MMA_1688(x, y, b)                                                                              \
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                              \
               : "r"(x), "r"(y), "r"(b))
  CIUIC_MMA_1688(a[0], a[1], b0);
  CIUIC_MMA_1688(a[2], a[3], b1);
#endif
}

// Starts to copy 16 bytes from global to shared memory, both 16-byte aligned. The data is visible after copy_wait and a
// barrier among the readers. sm_75 copies at once.
CIUIC_DEVICE void copy16_async(u8* shared, const u8* global) {
#if __CUDA_ARCH__ >= 800
  const u32 address = (u32)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#else
  *(uint4*)shared = *(const uint4*)global;
#endif
}
// Ends a group of copies.
CIUIC_DEVICE void copy_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Programmatic dependent launch (sm_90): the next kernel of the stream, if it was launched so, may begin once every block
// of this one has called this.
CIUIC_DEVICE void grid_dependents_may_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the kernel before this one has ended and what it wrote is visible.
CIUIC_DEVICE void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Waits until at most `pending` of the groups that this thread committed are unfinished.
template <int pending>
CIUIC_DEVICE void copy_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}
#endif  // CIUIC_EMULATE

enum CiuicType { CIUIC_FLOAT = 0, CIUIC_HALF = 1, CIUIC_BFLOAT = 2 };

// Rounds to nearest even; a NaN becomes quiet. In integer arithmetic, because sm_75 has no conversion to bfloat16.
CIUIC_DEVICE u16 float_to_bfloat(float value) {
  const u32 bits = float_to_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (u16)((bits >> 16) | 0x40u);
  return (u16)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// `type` is CIUIC_HALF or CIUIC_BFLOAT.
CIUIC_DEVICE u16 float_to_16(float value, u32 type) {
  return type == CIUIC_HALF ? float_to_half(value) : float_to_bfloat(value);
}

// Two neighbouring elements in one word, the first in the low 16 bits.
CIUIC_DEVICE u32 floats_to_16(float low, float high, u32 type) {
#ifdef CIUIC_PAIR_CONVERSION
  return type == CIUIC_HALF ? floats_to_halves(low, high) : floats_to_bfloats(low, high);
#else
  return float_to_16(low, type) | ((u32)float_to_16(high, type) << 16);
#endif
}

// Element `index` of an array of `type`.
CIUIC_DEVICE void store_as(void* base, u64 index, float value, u32 type) {
  if (type == CIUIC_FLOAT)
    ((float*)base)[index] = value;
  else
    ((u16*)base)[index] = float_to_16(value, type);
}

CIUIC_DEVICE float load_as(const void* base, u64 index, u32 type) {
  if (type == CIUIC_FLOAT) return ((const float*)base)[index];
  const u16 bits = ((const u16*)base)[index];
  return type == CIUIC_HALF ? half_to_float(bits) : bits_to_float((u32)bits << 16);
}

#endif
