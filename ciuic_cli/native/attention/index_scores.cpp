// Shares the scores of an indexer among threads, and finds the largest numbers of a row.
#include "index_scores.h"

#include <algorithm>
#include <cstring>

#include "ciuic_native.h"
#include "kernels.h"
#include "parallel.h"

namespace ciuic {
namespace {

// Work of an item: tokens, so that two threads share 256 of them, and rows that use a token's key while it is in the cache.
// Chosen.
constexpr long kTokensPerItem = 128, kRowsPerItem = 16;

// Numbers in the order of their floats: the sign bit is turned, and negative numbers are turned around.
uint32_t ordered(float value) {
  value += 0.0f;  // -0 is as large as 0
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits, kRounds = 3;

// The indices of the k largest of `count` numbers in ascending order. Of equal numbers the first are taken. NaN is largest.
// Method: radix selection, which finds 11 bits of the k-th largest number at a time.
void largest(const float* numbers, long count, long k, int32_t* indices) {
  uint32_t prefix = 0, known = 0;
  long wanted = k;  // of the numbers that agree with `prefix` in the bits of `known`
  for (int round = 0; round < kRounds; ++round) {
    const int shift = std::max(0, 32 - kDigitBits * (round + 1));
    int32_t histogram[kDigits] = {};
    for (long i = 0; i < count; ++i) {
      const uint32_t bits = ordered(numbers[i]);
      if ((bits & known) == prefix) ++histogram[bits >> shift & (kDigits - 1)];
    }
    uint32_t digit = kDigits - 1;
    for (; histogram[digit] < wanted; --digit) wanted -= histogram[digit];
    // The last round's digit overlaps the one before: those bits agree already.
    prefix |= digit << shift;
    known |= static_cast<uint32_t>(kDigits - 1) << shift;
  }
  for (long i = 0; i < count; ++i) {
    const uint32_t bits = ordered(numbers[i]);
    if (bits > prefix || (bits == prefix && wanted-- > 0)) *indices++ = static_cast<int32_t>(i);
  }
}

}  // namespace
}  // namespace ciuic

int ciuic_index_scores(const CiuicIndexScores* call, float* scores, int threads) {
  using namespace ciuic;
  if (call == nullptr || scores == nullptr || call->queries == nullptr || call->weights == nullptr ||
      call->keys == nullptr || threads < 1)
    return CIUIC_BAD_ARGUMENT;
  if (call->sequences < 1 || call->rows < 1 || call->heads < 1 || call->tokens < 1 || call->columns < 2 ||
      call->columns % 2 != 0 || call->columns > kMaxIndexColumns)
    return CIUIC_BAD_ARGUMENT;
  const long row_blocks = (call->rows + kRowsPerItem - 1) / kRowsPerItem;
  const long token_blocks = (call->tokens + kTokensPerItem - 1) / kTokensPerItem;
  parallel_for(call->sequences * row_blocks * token_blocks, threads, [&](long item) {
    const long token = kTokensPerItem * (item % token_blocks);
    const long row = kRowsPerItem * (item / token_blocks % row_blocks), sequence = item / (token_blocks * row_blocks);
    const long first = sequence * call->rows + row;
    kernels().index_scores(call->queries + first * call->heads * call->columns, call->weights + first * call->heads,
                           std::min(kRowsPerItem, call->rows - row), call->heads, call->columns,
                           call->keys + sequence * call->key_sequence + token * call->key_token, call->key_token,
                           std::min(kTokensPerItem, call->tokens - token), scores + first * call->tokens + token,
                           call->tokens);
  });
  return CIUIC_OK;
}

int ciuic_largest(const float* numbers, long rows, long count, long k, int32_t* indices, int threads) {
  using namespace ciuic;
  if (numbers == nullptr || indices == nullptr || rows < 1 || count < 1 || k < 1 || k > count || count > INT32_MAX ||
      threads < 1)
    return CIUIC_BAD_ARGUMENT;
  parallel_for(rows, threads, [&](long row) { largest(numbers + row * count, count, k, indices + row * k); });
  return CIUIC_OK;
}
