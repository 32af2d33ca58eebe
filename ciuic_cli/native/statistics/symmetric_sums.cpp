// Shares symmetric sums among threads: strips of columns are packed, then every strip is multiplied with those before it.
#include "symmetric_sums.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "ciuic_native.h"
#include "kernels.h"
#include "parallel.h"

namespace ciuic {

const SymmetricKernel* symmetric_kernel(bool rounded) {
#ifdef CIUIC_SYMMETRIC_KERNELS
  const char* isa = kernels().name;
  const bool amx = std::strcmp(isa, "amx") == 0, avx512 = amx || std::strcmp(isa, "avx512vnni") == 0;
#ifdef CIUIC_BFLOAT16_KERNELS
  // A matrix unit multiplies bfloat16 faster, which torch uses.
  if (rounded) return !amx && avx512 && __builtin_cpu_supports("avx512bf16") ? &symmetric_bfloat16::rounded : nullptr;
#endif
  if (!rounded && avx512) return &symmetric_avx512::exact;
  if (!rounded && std::strcmp(isa, "avx2") == 0 && __builtin_cpu_supports("fma")) return &symmetric_avx2::exact;
#endif
  (void)rounded;
  return nullptr;
}

namespace {

constexpr long kStripSize = static_cast<long>(kSteps) * kStrip;

struct Factor {
  const void* numbers;
  bool bf16;

  void pack(const SymmetricKernel& kernel, long at, long stride, long tokens, long columns, float* to) const {
    if (bf16)
      kernel.pack_bfloat16(static_cast<const uint16_t*>(numbers) + at, stride, tokens, columns, to);
    else
      kernel.pack(static_cast<const float*>(numbers) + at, stride, tokens, columns, to);
  }
};

struct Sums {
  const SymmetricKernel& kernel;
  Factor left, right;
  float* moment;
  long columns, tokens, strips;
  float *packed_left, *packed_right;  // the same for a Gram matrix

  long chunk() const { return static_cast<long>(kSteps) * kernel.tokens_per_step; }
  long chunks() const { return (tokens + chunk() - 1) / chunk(); }
  long width(long strip) const { return std::min<long>(kStrip, columns - kStrip * strip); }

  void pack(long number, long strip) const {
    const long first = number * chunk(), count = std::min(chunk(), tokens - first), at = first * columns + kStrip * strip;
    left.pack(kernel, at, columns, count, width(strip), packed_left + strip * kStripSize);
    if (packed_right != packed_left)
      right.pack(kernel, at, columns, count, width(strip), packed_right + strip * kStripSize);
  }

  // Rows of one strip, up to the diagonal.
  void multiply(long number, long strip) const {
    const long count = std::min(chunk(), tokens - number * chunk());
    const long steps = (count + kernel.tokens_per_step - 1) / kernel.tokens_per_step;
    float* row = moment + kStrip * strip * columns;
    for (long other = 0; other <= strip; ++other) {
      const float *a = packed_left + strip * kStripSize, *b = packed_right + other * kStripSize;
      if (width(strip) == kStrip && width(other) == kStrip) {
        kernel.multiply(a, b, steps, row + kStrip * other, columns);
        continue;
      }
      float block[kStrip * kStrip] = {};
      kernel.multiply(a, b, steps, block, kStrip);
      for (long i = 0; i < width(strip); ++i)
        for (long j = 0; j < width(other); ++j) row[i * columns + kStrip * other + j] += block[i * kStrip + j];
    }
  }

  // Copies the rows of one strip to the columns above the diagonal.
  void mirror(long strip) const {
    constexpr long kBlock = 16;
    const long begin = kStrip * strip, end = begin + width(strip);
    for (long first = 0; first < end; first += kBlock)
      for (long i = begin; i < end; ++i)
        for (long j = first; j < std::min(i, first + kBlock); ++j) moment[j * columns + i] = moment[i * columns + j];
  }
};

}  // namespace
}  // namespace ciuic

int ciuic_has_symmetric_sums(int rounded) { return ciuic::symmetric_kernel(rounded != 0) != nullptr; }

int ciuic_symmetric_sums(float* moment, long columns, const void* left, int left_bf16, const void* right, int right_bf16,
                         long tokens, int rounded, int threads) {
  using namespace ciuic;
  if (tokens == 0) return CIUIC_OK;
  const SymmetricKernel* kernel = symmetric_kernel(rounded != 0);
  if (moment == nullptr || left == nullptr || right == nullptr || columns < 1 || tokens < 0 || threads < 1 || kernel == nullptr)
    return CIUIC_BAD_ARGUMENT;
  const long strips = (columns + kStrip - 1) / kStrip;
  const long size = strips * kStripSize, factors = left == right ? 1 : 2;
  const std::unique_ptr<float[]> memory(new (std::nothrow) float[factors * size + 16]);
  if (!memory) return CIUIC_NO_MEMORY;
  float* packed = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~static_cast<uintptr_t>(63));
  const Sums sums = {*kernel, {left, left_bf16 != 0}, {right, right_bf16 != 0}, moment, columns, tokens, strips,
                     packed, packed + (factors - 1) * size};
  const int stages = static_cast<int>(2 * sums.chunks() + 1);
  parallel_stages(
      stages, threads, [&](int) { return strips; },
      [&](int stage, long item) {
        if (stage == stages - 1) return sums.mirror(item);
        if (stage % 2 == 0) return sums.pack(stage / 2, item);
        sums.multiply(stage / 2, strips - 1 - item);  // the longest row first
      });
  return CIUIC_OK;
}
