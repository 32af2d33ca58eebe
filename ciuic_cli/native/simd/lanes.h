// Vectors of int32 as the encoder needs them, one definition per instruction set. Every operation is exact, so all of them
// give the same results.
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
static inline Lanes all(int32_t value) { return _mm512_set1_epi32(value); }
static inline Lanes least(Lanes a, Lanes b) { return _mm512_min_epi32(a, b); }
// base + entry.low * weight.low + entry.high * weight.high, on the int16 halves of each lane
static inline Lanes add_product(Lanes base, Lanes entry, Lanes weight) { return _mm512_dpwssd_epi32(base, entry, weight); }
static inline Lanes add_squares(Lanes base, Lanes entry, Lanes target) {
  const Lanes difference = _mm512_sub_epi16(entry, target);
  return _mm512_dpwssd_epi32(base, difference, difference);
}
// Copies lane J of each quad to the whole quad.
template <int J>
static inline Lanes spread(Lanes v) { return _mm512_shuffle_epi32(v, static_cast<_MM_PERM_ENUM>(J * 0x55)); }
// Quad q of vector k goes to to[q * step + 4 k].
static inline void store_quads(const Lanes* v, int32_t* to, size_t step) {
  const Lanes a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[0], v[1], 0xEE);
  const Lanes c = _mm512_shuffle_i32x4(v[2], v[3], 0x44), d = _mm512_shuffle_i32x4(v[2], v[3], 0xEE);
  store(to, _mm512_shuffle_i32x4(a, c, 0x88));
  store(to + step, _mm512_shuffle_i32x4(a, c, 0xDD));
  store(to + 2 * step, _mm512_shuffle_i32x4(b, d, 0x88));
  store(to + 3 * step, _mm512_shuffle_i32x4(b, d, 0xDD));
}
// Lanes of a and b in turn.
static inline void store_in_turn(Lanes a, Lanes b, int32_t* to) {
  const Lanes first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  store(to, _mm512_permutex2var_epi32(a, first, b));
  store(to + 16, _mm512_permutex2var_epi32(a, _mm512_add_epi32(first, all(8)), b));
}

#elif defined(__AVX2__)

constexpr int kQuads = 2;
typedef __m256i Lanes;

static inline Lanes load(const int32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const Lanes*>(from)); }
static inline void store(int32_t* to, Lanes v) { _mm256_storeu_si256(reinterpret_cast<Lanes*>(to), v); }
static inline Lanes all(int32_t value) { return _mm256_set1_epi32(value); }
static inline Lanes least(Lanes a, Lanes b) { return _mm256_min_epi32(a, b); }
static inline Lanes add_product(Lanes base, Lanes entry, Lanes weight) {
  return _mm256_add_epi32(base, _mm256_madd_epi16(entry, weight));
}
static inline Lanes add_squares(Lanes base, Lanes entry, Lanes target) {
  const Lanes difference = _mm256_sub_epi16(entry, target);
  return _mm256_add_epi32(base, _mm256_madd_epi16(difference, difference));
}
template <int J>
static inline Lanes spread(Lanes v) { return _mm256_shuffle_epi32(v, J * 0x55); }
static inline void store_quads(const Lanes* v, int32_t* to, size_t step) {
  for (int k = 0; k < 4; k += 2) {
    store(to + 4 * k, _mm256_permute2x128_si256(v[k], v[k + 1], 0x20));
    store(to + 4 * k + step, _mm256_permute2x128_si256(v[k], v[k + 1], 0x31));
  }
}
static inline void store_in_turn(Lanes a, Lanes b, int32_t* to) {
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
static inline Lanes all(int32_t value) { return Lanes{value, value, value, value}; }
static inline Lanes least(Lanes a, Lanes b) { return a < b ? a : b; }
static inline Lanes products(Lanes a, Lanes b) {
#if defined(__SSE2__)
  return reinterpret_cast<Lanes>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}
static inline Lanes add_product(Lanes base, Lanes entry, Lanes weight) { return base + products(entry, weight); }
static inline Lanes add_squares(Lanes base, Lanes entry, Lanes target) {
  typedef int16_t Halves __attribute__((vector_size(16)));
  const Lanes difference = reinterpret_cast<Lanes>(reinterpret_cast<Halves>(entry) - reinterpret_cast<Halves>(target));
  return base + products(difference, difference);
}
template <int J>
static inline Lanes spread(Lanes v) { return all(v[J]); }
static inline void store_quads(const Lanes* v, int32_t* to, size_t) {
  for (int k = 0; k < 4; ++k) store(to + 4 * k, v[k]);
}
static inline void store_in_turn(Lanes a, Lanes b, int32_t* to) {
  store(to, __builtin_shuffle(a, b, Lanes{0, 4, 1, 5}));
  store(to + 4, __builtin_shuffle(a, b, Lanes{2, 6, 3, 7}));
}

#endif

constexpr int kLanes = 4 * kQuads;

}  // namespace CIUIC_ISA
}  // namespace ciuic

#endif
