// Vectors of int32 for the encoder, one definition per instruction set. Every operation is exact, so all instruction
// sets give the same results. The first definition carries the comments.
#ifndef CIUIC_LANES_H
#define CIUIC_LANES_H

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(__SSE2__)
#include <immintrin.h>
#endif

namespace ciuic {
namespace CIUIC_ISA {

#if defined(__AVX512VNNI__)

constexpr int kQuads = 4;  // groups of four lanes in a vector
typedef __m512i Lanes;

static inline Lanes load(const int32_t* from) { return _mm512_loadu_si512(from); }
static inline void store(int32_t* to, Lanes v) { _mm512_storeu_si512(to, v); }
static inline Lanes broadcast(int32_t value) { return _mm512_set1_epi32(value); }
static inline Lanes minimum(Lanes a, Lanes b) { return _mm512_min_epi32(a, b); }
// from[v] of each lane.
static inline Lanes gather(const int32_t* from, Lanes v) { return _mm512_i32gather_epi32(v, from, 4); }
static inline int32_t lowest(Lanes v) { return _mm512_reduce_min_epi32(v); }
// The sum of the four bytes of each lane.
static inline Lanes byte_sums(Lanes v) {
  return _mm512_madd_epi16(_mm512_maddubs_epi16(v, _mm512_set1_epi8(1)), _mm512_set1_epi16(1));
}
// base + entry.low * term.low + entry.high * term.high, on the two int16 of each lane.
static inline Lanes add_product(Lanes base, Lanes entry, Lanes term) { return _mm512_dpwssd_epi32(base, entry, term); }
// base + (entry.low - term.low)^2 + (entry.high - term.high)^2.
static inline Lanes add_squares(Lanes base, Lanes entry, Lanes term) {
  const Lanes difference = _mm512_sub_epi16(entry, term);
  return _mm512_dpwssd_epi32(base, difference, difference);
}
// Copies lane J of each quad to the whole quad.
template <int J>
static inline Lanes copy_lane(Lanes v) { return _mm512_shuffle_epi32(v, static_cast<_MM_PERM_ENUM>(J * 0x55)); }
// Stores quad q of vector k at to[q * stride + 4 k].
static inline void store_quads(const Lanes* v, int32_t* to, size_t stride) {
  const Lanes a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[0], v[1], 0xEE);
  const Lanes c = _mm512_shuffle_i32x4(v[2], v[3], 0x44), d = _mm512_shuffle_i32x4(v[2], v[3], 0xEE);
  store(to, _mm512_shuffle_i32x4(a, c, 0x88));
  store(to + stride, _mm512_shuffle_i32x4(a, c, 0xDD));
  store(to + 2 * stride, _mm512_shuffle_i32x4(b, d, 0x88));
  store(to + 3 * stride, _mm512_shuffle_i32x4(b, d, 0xDD));
}
// Stores a0, b0, a1, b1, ..
static inline void store_interleaved(Lanes a, Lanes b, int32_t* to) {
  const Lanes first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  store(to, _mm512_permutex2var_epi32(a, first, b));
  store(to + 16, _mm512_permutex2var_epi32(a, _mm512_add_epi32(first, broadcast(8)), b));
}

#elif defined(__AVX2__)

constexpr int kQuads = 2;
typedef __m256i Lanes;

static inline Lanes load(const int32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const Lanes*>(from)); }
static inline void store(int32_t* to, Lanes v) { _mm256_storeu_si256(reinterpret_cast<Lanes*>(to), v); }
static inline Lanes broadcast(int32_t value) { return _mm256_set1_epi32(value); }
static inline Lanes minimum(Lanes a, Lanes b) { return _mm256_min_epi32(a, b); }
static inline Lanes gather(const int32_t* from, Lanes v) { return _mm256_i32gather_epi32(from, v, 4); }
static inline int32_t lowest(Lanes v) {
  v = minimum(v, _mm256_permute2x128_si256(v, v, 1));
  v = minimum(v, _mm256_shuffle_epi32(v, 0x4E));
  return _mm256_cvtsi256_si32(minimum(v, _mm256_shuffle_epi32(v, 0xB1)));
}
static inline Lanes byte_sums(Lanes v) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(v, _mm256_set1_epi8(1)), _mm256_set1_epi16(1));
}
static inline Lanes add_product(Lanes base, Lanes entry, Lanes term) {
  return _mm256_add_epi32(base, _mm256_madd_epi16(entry, term));
}
static inline Lanes add_squares(Lanes base, Lanes entry, Lanes term) {
  const Lanes difference = _mm256_sub_epi16(entry, term);
  return _mm256_add_epi32(base, _mm256_madd_epi16(difference, difference));
}
template <int J>
static inline Lanes copy_lane(Lanes v) { return _mm256_shuffle_epi32(v, J * 0x55); }
static inline void store_quads(const Lanes* v, int32_t* to, size_t stride) {
  for (int k = 0; k < 4; k += 2) {
    store(to + 4 * k, _mm256_permute2x128_si256(v[k], v[k + 1], 0x20));
    store(to + 4 * k + stride, _mm256_permute2x128_si256(v[k], v[k + 1], 0x31));
  }
}
static inline void store_interleaved(Lanes a, Lanes b, int32_t* to) {
  const Lanes low = _mm256_unpacklo_epi32(a, b), high = _mm256_unpackhi_epi32(a, b);
  store(to, _mm256_permute2x128_si256(low, high, 0x20));
  store(to + 8, _mm256_permute2x128_si256(low, high, 0x31));
}

#else

constexpr int kQuads = 1;
typedef int32_t Lanes __attribute__((vector_size(16)));

static inline Lanes load(const int32_t* from) {
  Lanes v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
static inline void store(int32_t* to, Lanes v) { std::memcpy(to, &v, sizeof v); }
static inline Lanes broadcast(int32_t value) { return Lanes{value, value, value, value}; }
static inline Lanes minimum(Lanes a, Lanes b) { return a < b ? a : b; }
static inline Lanes gather(const int32_t* from, Lanes v) { return Lanes{from[v[0]], from[v[1]], from[v[2]], from[v[3]]}; }
static inline int32_t lowest(Lanes v) {
  v = minimum(v, __builtin_shuffle(v, Lanes{2, 3, 0, 1}));
  return v[0] < v[1] ? v[0] : v[1];
}
static inline Lanes byte_sums(Lanes v) {
  return (v & 0xFF) + (v >> 8 & 0xFF) + (v >> 16 & 0xFF) + (v >> 24 & 0xFF);
}
static inline Lanes products(Lanes a, Lanes b) {
#if defined(__SSE2__)
  return reinterpret_cast<Lanes>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}
static inline Lanes add_product(Lanes base, Lanes entry, Lanes term) { return base + products(entry, term); }
static inline Lanes add_squares(Lanes base, Lanes entry, Lanes term) {
  typedef int16_t Int16s __attribute__((vector_size(16)));
  const Lanes difference = reinterpret_cast<Lanes>(reinterpret_cast<Int16s>(entry) - reinterpret_cast<Int16s>(term));
  return base + products(difference, difference);
}
template <int J>
static inline Lanes copy_lane(Lanes v) { return broadcast(v[J]); }
static inline void store_quads(const Lanes* v, int32_t* to, size_t) {
  for (int k = 0; k < 4; ++k) store(to + 4 * k, v[k]);
}
static inline void store_interleaved(Lanes a, Lanes b, int32_t* to) {
  store(to, __builtin_shuffle(a, b, Lanes{0, 4, 1, 5}));
  store(to + 4, __builtin_shuffle(a, b, Lanes{2, 6, 3, 7}));
}

#endif

constexpr int kLanes = 4 * kQuads;
// The same vectors for the operators of C++.
typedef int32_t Numbers __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));

}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
