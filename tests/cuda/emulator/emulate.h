// Defines the names of cuda/device.h for g++. Lanes are fibers that one OS thread runs in turn, so the kernels' source runs
// unchanged, warp and block collectives included. emulator.cpp has the scheduler.
#ifndef CIUIC_EMULATE_H
#define CIUIC_EMULATE_H

#include <cmath>
#include <cstdint>
#include <cstring>

#define CIUIC_DEVICE static inline
#define CIUIC_DEVICE_MEMBER inline
#define CIUIC_KERNEL static
#define CIUIC_BOUNDS(threads, blocks)
#define CIUIC_PARAM(type) const type&
#define CIUIC_SHARED static
#define CIUIC_DYNAMIC_SHARED(name) u8* const name = emu::dynamic_shared()

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emu {
u32 thread();
u32 threads();
u32 block(int axis);
u32 blocks();
u8* dynamic_shared();
void block_barrier();
void warp_barrier();
// All-gather among the lanes of a warp: every lane passes `words` words (at most 8) and gets those of all lanes, [32][8].
const u32 (*exchange(const u32* own_words, int words))[8];
void copy_issue(u8* shared, const u8* global);
void copy_commit();
void copy_wait(int pending);
}  // namespace emu

inline u32 thread_index() { return emu::thread(); }
inline u32 thread_count() { return emu::threads(); }
inline u32 block_x() { return emu::block(0); }
inline u32 block_y() { return emu::block(1); }
inline u32 grid_x() { return emu::blocks(); }
inline void block_sync() { emu::block_barrier(); }
inline void warp_sync() { emu::warp_barrier(); }

inline float bits_to_float(u32 bits) { float out; std::memcpy(&out, &bits, 4); return out; }
inline u32 float_to_bits(float value) { u32 out; std::memcpy(&out, &value, 4); return out; }

inline s32 shuffle_xor(s32 value, int mask) {
  const u32 word = (u32)value;
  return (s32)emu::exchange(&word, 1)[(emu::thread() % 32) ^ mask][0];
}
inline u32 shuffle_xor(u32 value, int mask) { return (u32)shuffle_xor((s32)value, mask); }
inline float shuffle_xor(float value, int mask) { return bits_to_float((u32)shuffle_xor((s32)float_to_bits(value), mask)); }

inline u32 permute(u32 a, u32 b, u32 selector) {
  const u64 both = ((u64)b << 32) | a;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) out |= (u32)((both >> (8 * ((selector >> (4 * i)) & 7))) & 0xFF) << (8 * i);
  return out;
}
inline u32 dot4(u32 a, u32 b, u32 accumulator) {
  for (int i = 0; i < 4; ++i) accumulator += ((a >> (8 * i)) & 0xFF) * ((b >> (8 * i)) & 0xFF);
  return accumulator;
}

inline u16 float_to_half(float value) { _Float16 half = (_Float16)value; u16 out; std::memcpy(&out, &half, 2); return out; }
inline float half_to_float(u16 bits) { _Float16 half; std::memcpy(&half, &bits, 2); return (float)half; }
inline u32 half2_subtract(u32 a, u32 b) {
  const u16 low = float_to_half(half_to_float((u16)a) - half_to_float((u16)b));
  const u16 high = float_to_half(half_to_float((u16)(a >> 16)) - half_to_float((u16)(b >> 16)));
  return low | ((u32)high << 16);
}

// The fragment layouts are those in device.h (PTX ISA, "Matrix fragments for mma.m16n8k32" and "m16n8k16").
inline void mma_bytes(s32 d[4], const u32 a[4], u32 b0, u32 b1) {
  const u32 operands[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const u32(*all)[8] = emu::exchange(operands, 6);
  const u32 lane = emu::thread() % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const u32 row = g + (i >= 2 ? 8 : 0), column = 2 * t + (i & 1);
    for (u32 k = 0; k < 32; ++k) {
      const u32 byte_a = all[row % 8 * 4 + k % 16 / 4][(row / 8) + 2 * (k / 16)] >> (8 * (k % 4)) & 0xFF;
      const u32 byte_b = all[column * 4 + k % 16 / 4][4 + k / 16] >> (8 * (k % 4)) & 0xFF;
      d[i] = (s32)((u32)d[i] + (u32)((s32)byte_a * (s32)(s8)byte_b));
    }
  }
}
inline void mma_halves(float d[4], const u32 a[4], u32 b0, u32 b1) {
  const u32 operands[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const u32(*all)[8] = emu::exchange(operands, 6);
  const u32 lane = emu::thread() % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const u32 row = g + (i >= 2 ? 8 : 0), column = 2 * t + (i & 1);
    for (u32 k = 0; k < 16; ++k) {
      const u32 pair_a = all[row % 8 * 4 + k % 8 / 2][(row / 8) + 2 * (k / 8)];
      const u32 pair_b = all[column * 4 + k % 8 / 2][4 + k / 8];
      d[i] += half_to_float((u16)(pair_a >> (16 * (k % 2)))) * half_to_float((u16)(pair_b >> (16 * (k % 2))));
    }
  }
}

inline void copy16_async(u8* shared, const u8* global) { emu::copy_issue(shared, global); }
inline void grid_dependents_may_start() {}
inline void grid_dependency_wait() {}
inline void copy_commit() { emu::copy_commit(); }
template <int pending>
inline void copy_wait() { emu::copy_wait(pending); }

#endif
