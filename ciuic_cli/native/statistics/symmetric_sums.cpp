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
  // Tokens that are packed together.
  long chunk() const { return static_cast<long>(kSteps) * kernel.tokens_per_step; }
  long chunks() const { return (tokens + chunk() - 1) / chunk(); }
  long groups() const { return (strips + kStripsTogether - 1) / kStripsTogether; }
  long width(long strip) const { return std::min<long>(kernel.strip, columns - kernel.strip * strip); }
  bool is_whole(long strip) const { return width(strip) == kernel.strip; }

  void pack(long number, long strip) const {
    const long first = number * chunk(), count = std::min(chunk(), tokens - first), at = first * columns + kernel.strip * strip;
    float *const to_left = packed_left + strip * strip_size(), *const to_right = packed_right + strip * strip_size();
    left.pack(kernel.left, at, columns, count, width(strip), to_left);
    if (packed_right != packed_left) right.pack(kernel.right, at, columns, count, width(strip), to_right);
  }

  // Rows of one group of strips, up to the diagonal.
  void multiply_group(long number, long group) const {
    const long begin = kStripsTogether * group, end = std::min(strips, begin + kStripsTogether);
    const long whole = is_whole(end - 1) ? end : end - 1;  // only the last strip of all may be narrower
    for (long other = 0; other < end; ++other) {
      const long first = std::max(begin, other);
      if (first < whole) multiply(number, first, whole - first, other, moment + kernel.strip * (first * columns + other), columns);
      if (whole < end) multiply_narrow(number, other);
    }
  }

  void multiply(long number, long strip, long count, long other, float* to, long stride) const {
    const long steps_of = kernel.tokens_per_step, added = std::min(chunk(), tokens - number * chunk());
    kernel.multiply(packed_left + strip * strip_size(), packed_right + other * strip_size(), count,
                    (added + steps_of - 1) / steps_of, left.bf16, to, stride);
  }

  // The last strip with another one.
  void multiply_narrow(long number, long other) const {
    const long last = strips - 1, size = kernel.strip;
    float block[kLongestStrip * kLongestStrip] = {};
    multiply(number, last, 1, other, block, size);
    for (long i = 0; i < width(last); ++i)
      for (long j = 0; j < width(other); ++j) moment[(size * last + i) * columns + size * other + j] += block[i * size + j];
  }

  void run(int threads) const {
    parallel_stages(
        static_cast<int>(2 * chunks()), threads, [&](int stage) { return stage % 2 == 0 ? strips : groups(); },
        [&](int stage, long item) {
          if (stage % 2 == 0) return pack(stage / 2, item);
          multiply_group(stage / 2, groups() - 1 - item);  // the longest rows first
        });
  }
};

int add_sums(float* moment, long columns, Factor left, Factor right, long tokens, bool rounded, int threads) {
  const SymmetricKernel* kernel = symmetric_kernel(rounded);
  if (moment == nullptr || left.numbers == nullptr || right.numbers == nullptr || columns < 1 || tokens < 0 || threads < 1 ||
      kernel == nullptr)
    return CIUIC_BAD_ARGUMENT;
  const long strips = (columns + kernel->strip - 1) / kernel->strip;
  const bool is_gram = left.numbers == right.numbers && kernel->packs_alike();
  const long size = strips * kSteps * kernel->strip;
  Scratch scratch((is_gram ? 1 : 2) * Scratch::bytes_of<float>(size));
  if (!scratch) return CIUIC_NO_MEMORY;
  float* const packed_left = scratch.take<float>(size);
  float* const packed_right = is_gram ? packed_left : scratch.take<float>(size);
  Sums{*kernel, left, right, moment, columns, tokens, strips, packed_left, packed_right}.run(threads);
  return CIUIC_OK;
}

}  // namespace
}  // namespace ciuic

int ciuic_has_symmetric_sums(int rounded) { return ciuic::symmetric_kernel(rounded != 0) != nullptr; }

int ciuic_symmetric_sums(float* moment, long columns, const void* left, int left_bf16, const void* right, int right_bf16,
                         long tokens, int rounded, int threads) {
  return ciuic::add_sums(moment, columns, {left, left_bf16 != 0}, {right, right_bf16 != 0}, tokens, rounded != 0, threads);
}
