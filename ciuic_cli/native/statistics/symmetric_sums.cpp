// Shares symmetric sums among threads: strips of columns are packed, then every strip is multiplied with those before it.
#include "symmetric_sums.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ciuic_native.h"
#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

namespace ciuic {

const SymmetricKernel* symmetric_kernel(bool rounded) {
#ifdef CIUIC_SYMMETRIC_KERNELS
  const char* isa = kernels().name;
  const bool amx = std::strcmp(isa, "amx") == 0, avx512 = amx || std::strcmp(isa, "avx512vnni") == 0;
#ifdef CIUIC_AMX_KERNELS
  if (amx) return rounded ? &symmetric_amx::rounded : &symmetric_amx::exact;
#endif
#ifdef CIUIC_BFLOAT16_KERNELS
  if (rounded && avx512 && __builtin_cpu_supports("avx512bf16")) return &symmetric_bfloat16::rounded;
#endif
  if (!rounded && avx512) return &symmetric_avx512::exact;
  if (!rounded && std::strcmp(isa, "avx2") == 0 && __builtin_cpu_supports("fma")) return &symmetric_avx2::exact;
#endif
  (void)rounded;
  return nullptr;
}

namespace {

struct Factor {
  const void* numbers;
  bool bf16;

  void pack(const StripPacking& packing, long at, long stride, long tokens, long columns, float* to) const {
    if (bf16)
      packing.bfloat16(static_cast<const uint16_t*>(numbers) + at, stride, tokens, columns, to);
    else
      packing.exact(static_cast<const float*>(numbers) + at, stride, tokens, columns, to);
  }
};

struct Sums {
  const SymmetricKernel& kernel;
  Factor left, right;
  float* moment;
  long columns, tokens, strips;
  float *packed_left, *packed_right;  // may be the same for a Gram matrix

  long strip_size() const { return static_cast<long>(kSteps) * kernel.strip; }
  long chunk() const { return static_cast<long>(kSteps) * kernel.tokens_per_step; }
  long chunks() const { return (tokens + chunk() - 1) / chunk(); }
  long width(long strip) const { return std::min<long>(kernel.strip, columns - kernel.strip * strip); }

  void pack(long number, long strip) const {
    const long first = number * chunk(), count = std::min(chunk(), tokens - first), at = first * columns + kernel.strip * strip;
    left.pack(kernel.left, at, columns, count, width(strip), packed_left + strip * strip_size());
    if (packed_right != packed_left)
      right.pack(kernel.right, at, columns, count, width(strip), packed_right + strip * strip_size());
  }

  // Rows of one strip, up to the diagonal.
  void multiply(long number, long strip) const {
    const long count = std::min(chunk(), tokens - number * chunk());
    const long steps = (count + kernel.tokens_per_step - 1) / kernel.tokens_per_step;
    const long size = kernel.strip;
    float* row = moment + size * strip * columns;
    for (long other = 0; other <= strip; ++other) {
      const float *a = packed_left + strip * strip_size(), *b = packed_right + other * strip_size();
      if (width(strip) == size && width(other) == size) {
        kernel.multiply(a, b, steps, left.bf16, row + size * other, columns);
        continue;
      }
      float block[kLongestStrip * kLongestStrip] = {};
      kernel.multiply(a, b, steps, left.bf16, block, size);
      for (long i = 0; i < width(strip); ++i)
        for (long j = 0; j < width(other); ++j) row[i * columns + size * other + j] += block[i * size + j];
    }
  }

  // Copies the rows of one strip to the columns above the diagonal.
  void mirror(long strip) const {
    constexpr long kBlock = 16;
    const long begin = kernel.strip * strip, end = begin + width(strip);
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
  const long strips = (columns + kernel->strip - 1) / kernel->strip;
  const long size = strips * kSteps * kernel->strip, factors = left == right && kernel->packs_alike() ? 1 : 2;
  Scratch scratch(factors * Scratch::bytes_of<float>(size));
  if (!scratch) return CIUIC_NO_MEMORY;
  float* const packed_left = scratch.take<float>(size);
  float* const packed_right = factors == 2 ? scratch.take<float>(size) : packed_left;
  const Sums sums = {*kernel, {left, left_bf16 != 0}, {right, right_bf16 != 0}, moment, columns, tokens, strips,
                     packed_left, packed_right};
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
