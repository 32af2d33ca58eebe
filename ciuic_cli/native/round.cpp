// Rounds a matrix tile by tile with error feedback, on several threads. ciuic_round in ciuic_native.h states the
// formulas; E, P, d, I and J below are the symbols used there.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <queue>
#include <vector>

#include "check_matrix.h"
#include "ciuic_native.h"
#include "kernels.h"
#include "parallel.h"
#include "trellis_decode.h"

namespace ciuic {
namespace {

// Replaces the windows of a path by those that a decoder reads from the stored bits. The two are the same for a closed
// path. For any other path the error feedback must use what the decoder will see.
void recompute_windows(uint16_t* windows, int half_bits, int L) {
  uint32_t state = 0;
  const auto shift_in = [&](int i) {
    const int bits = ciuic_bits_of_column(i % kTile, half_bits);
    state = (state << bits) | (windows[i] & ((1u << bits) - 1u));
  };
  for (int i = kTileWeights - kTile; i < kTileWeights; ++i) shift_in(i);  // one row: at least L bits
  for (int i = 0; i < kTileWeights; ++i) {
    shift_in(i);
    windows[i] = static_cast<uint16_t>(state & ((1u << L) - 1u));
  }
}

// Writes the new bits of 256 windows in the layout of a tile (trellis_decode.h).
void store_tile(const uint16_t* windows, int half_bits, uint8_t* tile) {
  for (int row = 0; row < kTile; ++row) {
    uint64_t pending = 0;
    int available = 0, unit = 0;
    for (int column = 0; column < kTile; ++column) {
      const int bits = ciuic_bits_of_column(column, half_bits);
      pending = (pending << bits) | (windows[kTile * row + column] & ((1u << bits) - 1u));
      available += bits;
      if (available >= 16) {
        available -= 16;
        const unsigned word = static_cast<unsigned>(pending >> available) & 0xFFFFu;
        tile[CIUIC_UNIT_BYTES * unit + 2 * row] = static_cast<uint8_t>(word);
        tile[CIUIC_UNIT_BYTES * unit + 2 * row + 1] = static_cast<uint8_t>(word >> 8);
        ++unit;
      }
    }
    if (available != 0) tile[CIUIC_UNIT_BYTES * unit + row] = static_cast<uint8_t>(pending);  // the half unit's 8 bits
  }
}

// A feedback matrix (size x size, or null) as panels: the part below the diagonal of each block of 16 columns. A panel
// is copied to contiguous memory while it is in use. Read in place, its rows would lie on different pages and compete
// for the same few cache sets.
class Panels {
 public:
  // Each panel has `users` users: the tiles that read it.
  Panels(const float* matrix, long size, long users)
      : matrix_(matrix), size_(size), blocks_(matrix == nullptr ? 0 : size / kTile), once_(new std::once_flag[blocks_]),
        copies_(blocks_), users_left_(blocks_) {
    for (auto& count : users_left_) count = users;
  }

  bool present() const { return matrix_ != nullptr; }

  struct View {
    const float* first;  // row 16 (block + 1), column 16 block
    size_t stride;
    long rows;
  };

  // The panel of a block; the first user copies it. Reads in place if memory runs out.
  View panel(long block) {
    const long below = kTile * (block + 1);
    const float* from = matrix_ + below * size_ + kTile * block;
    const long rows = size_ - below;
    std::call_once(once_[block], [&] {
      float* to = new (std::nothrow) float[static_cast<size_t>(kTile) * rows];
      copies_[block].reset(to);
      if (to != nullptr)
        for (long k = 0; k < rows; ++k) std::memcpy(to + kTile * k, from + k * size_, sizeof(float) * kTile);
    });
    if (copies_[block] == nullptr) return {from, static_cast<size_t>(size_), rows};
    return {copies_[block].get(), kTile, rows};
  }

  // Every user of a panel calls this once, after its last read. The last call frees the copy.
  void release(long block) {
    if (present() && users_left_[block].fetch_sub(1) == 1) copies_[block].reset();
  }

 private:
  const float* matrix_;
  long size_;
  size_t blocks_;
  std::unique_ptr<std::once_flag[]> once_;
  std::vector<std::unique_ptr<float[]>> copies_;
  std::vector<std::atomic<long>> users_left_;
};

// The arguments of ciuic_round and the intermediate results that tiles share.
struct Rounding {
  Rounding(long rows, long cols, const float* A, const float* B)
      : rows(rows), cols(cols), A(A, cols, rows / kTile), B(B, rows, cols / kTile) {}

  const long rows, cols;
  mutable Panels A, B;  // they synchronise their users
  const float* W = nullptr;
  const float* direction = nullptr;
  const float* pull = nullptr;
  const float* scale = nullptr;
  const uint8_t* row_bits = nullptr;
  int L = 0;
  uint8_t* codes = nullptr;
  const int64_t* group_offset = nullptr;
  // Stored so that the feedback products read contiguous rows of 16 values. E lies in What until the matrix is decoded.
  float* E = nullptr;  // row group I: E[16 * cols * I + 16 * column + row in group]
  float* P = nullptr;  // column block J: P[16 * rows * J + 16 * row + column in block]; null without B
  float* d = nullptr;  // per row: the sum so far of P times direction

  int half_bits_of(long group) const { return ciuic_half_bits_of(row_bits[group]); }
};

struct Tile {
  int32_t I, J;
};

// Whether `a` is rounded after `b`. The order runs by anti-diagonal fronts of constant I + J, from the last row and
// column to the first.
struct RoundedLater {
  bool operator()(Tile a, Tile b) const { return a.I + a.J != b.I + b.J ? a.I + a.J < b.I + b.J : a.I > b.I; }
};

// Memory of one thread for one batch of tiles.
struct Scratch {
  std::unique_ptr<uint8_t[]> workspace;
  float input_feedback[kMaxEncodeBatch][kTileWeights];  // sum over J' > J of E_IJ' A_J'J
  float level_target[kMaxEncodeBatch][kTileWeights];    // T in units of the code's level; NaN for padding rows
  uint16_t windows[kMaxEncodeBatch][kTileWeights];
};

// Computes the input feedback of a tile and its target T in units of the code's level. False if T is not finite.
bool compute_target(const Rounding& m, Tile tile, float* input_feedback, float* level_target) {
  const Kernels& k = kernels();
  const long row0 = kTile * static_cast<long>(tile.I), col0 = kTile * static_cast<long>(tile.J);
  std::memset(input_feedback, 0, sizeof(float) * kTileWeights);
  const long right = col0 + kTile, below = row0 + kTile;
  if (m.A.present() && right < m.cols) {
    const Panels::View A = m.A.panel(tile.J);
    k.panel_product(m.E + row0 * m.cols + kTile * right, kTile, A.first, A.stride, A.rows, input_feedback);
  }
  float target[kTileWeights];  // T, in units of the weights
  std::memcpy(target, input_feedback, sizeof target);
  if (m.B.present() && below < m.rows) {
    const Panels::View B = m.B.panel(tile.I);
    k.panel_product(B.first, B.stride, m.P + col0 * m.rows + kTile * below, kTile, B.rows, target);
  }
  m.A.release(tile.J);
  m.B.release(tile.I);
  if (m.pull != nullptr)
    for (int r = 0; r < kTile; ++r)
      for (int c = 0; c < kTile; ++c)
        target[kTile * r + c] += m.d[row0 + r] * m.pull[(row0 + r) * m.cols + col0 + c];
  float sum = 0.0f;  // stays 0 unless a target is NaN or infinite
  for (int r = 0; r < kTile; ++r) {
    const float scale = m.scale[row0 + r];
    const float to_levels = CIUIC_SIGMA / scale;
    for (int c = 0; c < kTile; ++c) {
      const int i = kTile * r + c;
      target[i] += m.W[(row0 + r) * m.cols + col0 + c];
      sum += target[i] * 0.0f;
      level_target[i] = scale > 0.0f ? target[i] * to_levels : std::numeric_limits<float>::quiet_NaN();
    }
  }
  return sum == 0.0f;
}

// Stores a tile's codes and its parts of E, P and d.
void store_result(const Rounding& m, Tile tile, const float* input_feedback, const uint16_t* windows) {
  const long row0 = kTile * static_cast<long>(tile.I), col0 = kTile * static_cast<long>(tile.J);
  const int half_bits = m.half_bits_of(tile.I);
  if (half_bits != 0)
    store_tile(windows, half_bits,
               m.codes + m.group_offset[tile.I] + static_cast<int64_t>(tile.J) * CIUIC_TILE_BYTES(half_bits));
  for (int r = 0; r < kTile; ++r) {
    const float factor = ciuic_row_factor(m.scale[row0 + r]);
    for (int c = 0; c < kTile; ++c) {
      const int i = kTile * r + c;
      const float decoded = half_bits == 0 ? 0.0f : factor * static_cast<float>(ciuic_level(windows[i]));
      const bool counts = m.scale[row0 + r] > 0.0f || half_bits == 0;
      const float error = counts ? m.W[(row0 + r) * m.cols + col0 + c] - decoded : 0.0f;
      const float propagated = error + input_feedback[i];
      m.E[row0 * m.cols + kTile * (col0 + c) + r] = error;
      if (m.P != nullptr) m.P[col0 * m.rows + kTile * (row0 + r) + c] = propagated;
      if (m.pull != nullptr) m.d[row0 + r] += propagated * m.direction[(row0 + r) * m.cols + col0 + c];
    }
  }
}

// Hands out tiles whose feedback is complete: with A, a tile waits for its right neighbour, and with B for the one
// below. The result does not depend on the thread that takes a tile or on the other tiles of its batch.
class Schedule {
 public:
  Schedule(const Rounding& m, long* progress)
      : m_(m), groups_(m.rows / kTile), blocks_(m.cols / kTile), waiting_(groups_ * blocks_), progress_(progress) {
    remaining_ = groups_ * blocks_;
    for (long J = blocks_ - 1; J >= 0; --J)
      for (long I = groups_ - 1; I >= 0; --I) {
        const int needs = (m.A.present() && J + 1 < blocks_) + (m.B.present() && I + 1 < groups_);
        waiting_[I * blocks_ + J] = static_cast<uint8_t>(needs);
        if (needs == 0) push({static_cast<int32_t>(I), static_cast<int32_t>(J)});
      }
  }

  // Takes ready tiles of one number of bits, up to the batch size, and returns their number; waits until some are
  // ready. 0 means that all tiles are done, or that the call has failed or was cancelled.
  //
  // Full batches come first, because single tiles take a third longer each. Among them the earliest front comes first,
  // because other tiles wait for its tiles. If it lagged, few tiles would be ready at a time, and rarely two with the
  // same number of bits (docs/experiments/runtime/cpu-encoder.md).
  int take_batch(Tile* tiles) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (progress_ != nullptr && __atomic_load_n(progress_, __ATOMIC_RELAXED) < 0) set_status(CIUIC_CANCELLED);
      if (remaining_ == 0 || status_ != CIUIC_OK) {
        changed_.notify_all();
        return 0;
      }
      int chosen = -1;
      for (int half_bits = 0; half_bits <= kMaxHalfBits; ++half_bits)
        if (!ready_[half_bits].empty() && (chosen < 0 || comes_before(half_bits, chosen))) chosen = half_bits;
      if (chosen >= 0) {
        int count = 0;
        while (count < batch_of(chosen) && !ready_[chosen].empty()) {
          tiles[count++] = ready_[chosen].top();
          ready_[chosen].pop();
        }
        return count;
      }
      changed_.wait(lock);
    }
  }

  // Reports tiles as finished, which makes their neighbours ready.
  void done(const Tile* tiles, int count) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (int i = 0; i < count; ++i) {
      if (m_.A.present() && tiles[i].J > 0) satisfy_one({tiles[i].I, tiles[i].J - 1});
      if (m_.B.present() && tiles[i].I > 0) satisfy_one({tiles[i].I - 1, tiles[i].J});
    }
    remaining_ -= count;
    if (progress_ != nullptr) __atomic_fetch_add(progress_, static_cast<long>(count), __ATOMIC_RELAXED);
    changed_.notify_all();
  }

  // Ends the call with this error: from now on take_batch() hands out no tiles.
  void fail(CiuicStatus error) {
    std::lock_guard<std::mutex> guard(mutex_);
    set_status(error);
    changed_.notify_all();
  }

  // CIUIC_OK, or the first error. Call it only after all threads have left take_batch().
  CiuicStatus status() const { return status_; }

 private:
  void set_status(CiuicStatus error) {
    if (status_ == CIUIC_OK) status_ = error;
  }
  // One of the tiles that `tile` waits for is done.
  void satisfy_one(Tile tile) {
    if (--waiting_[tile.I * blocks_ + tile.J] == 0) push(tile);
  }
  void push(Tile tile) { ready_[m_.half_bits_of(tile.I)].push(tile); }

  int batch_of(int half_bits) const { return half_bits == 0 ? 1 : kernels().encode_batch(); }
  // Whether the ready tiles of `a` half bits are taken before those of `b`.
  bool comes_before(int a, int b) const {
    const bool full_a = ready_[a].size() >= static_cast<size_t>(batch_of(a));
    const bool full_b = ready_[b].size() >= static_cast<size_t>(batch_of(b));
    return full_a != full_b ? full_a : RoundedLater{}(ready_[b].top(), ready_[a].top());
  }

  const Rounding& m_;
  const long groups_, blocks_;
  std::vector<uint8_t> waiting_;  // per tile: neighbours that are not done yet
  // Ready tiles by half bits, the earliest front first.
  std::priority_queue<Tile, std::vector<Tile>, RoundedLater> ready_[kMaxHalfBits + 1];
  long remaining_ = 0;
  CiuicStatus status_ = CIUIC_OK;
  long* progress_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

// The loop of one thread. A batch that fails is not reported as done: its results would spread through the feedback.
void round_tiles(const Rounding& m, Schedule& schedule, Scratch& s) {
  const Kernels& k = kernels();
  Tile tiles[kMaxEncodeBatch];
  const float* targets[kMaxEncodeBatch];
  uint16_t* windows[kMaxEncodeBatch];
  for (int i = 0; i < kMaxEncodeBatch; ++i) {
    targets[i] = s.level_target[i];
    windows[i] = s.windows[i];
  }
  for (int count = schedule.take_batch(tiles); count > 0; count = schedule.take_batch(tiles)) {
    for (int i = 0; i < count; ++i)
      if (!compute_target(m, tiles[i], s.input_feedback[i], s.level_target[i]))
        return schedule.fail(CIUIC_NOT_FINITE);
    const int half_bits = m.half_bits_of(tiles[0].I);
    if (half_bits != 0 && k.encode_tiles(targets, count, half_bits, m.L, s.workspace.get(), windows) != 0)
      return schedule.fail(CIUIC_NO_MEMORY);
    for (int i = 0; i < count; ++i) {
      if (half_bits != 0) recompute_windows(s.windows[i], half_bits, m.L);
      store_result(m, tiles[i], s.input_feedback[i], s.windows[i]);
    }
    schedule.done(tiles, count);
  }
}

}  // namespace

int round_matrix(const float* W, long rows, long cols, const float* A, const float* B, const float* direction,
                 const float* pull, const float* scale, const uint8_t* row_bits, int L, int threads, uint8_t* codes,
                 const int64_t* group_offset, float* What, long* progress) {
  for (long i = 0; i < rows; ++i) {
    float sum = 0.0f;  // stays 0 unless a value is NaN or infinite
    for (long j = 0; j < cols; ++j) sum += W[i * cols + j] * 0.0f;
    if (!(sum == 0.0f) || !(scale[i] >= 0.0f) || std::isinf(scale[i])) return CIUIC_NOT_FINITE;
  }
  std::unique_ptr<float[]> P;
  std::vector<float> d(pull == nullptr ? 0 : rows, 0.0f);
  if (B != nullptr) P.reset(new float[static_cast<size_t>(rows) * cols]);
  Rounding m(rows, cols, A, B);
  m.W = W;
  m.direction = direction;
  m.pull = pull;
  m.scale = scale;
  m.row_bits = row_bits;
  m.L = L;
  m.codes = codes;
  m.group_offset = group_offset;
  m.E = What;
  m.P = P.get();
  m.d = d.data();
  size_t workspace = 0;
  for (long g = 0; g < rows / kTile; ++g)
    if (row_bits[g] != 0) workspace = std::max(workspace, kernels().encode_workspace_bytes(m.half_bits_of(g), L));
  threads = static_cast<int>(std::min<long>(threads, (rows / kTile) * (cols / kTile)));
  std::vector<std::unique_ptr<Scratch>> scratch(threads);
  for (auto& s : scratch) {
    s.reset(new Scratch);
    s->workspace.reset(new uint8_t[workspace]);
  }
  Schedule schedule(m, progress);
  parallel_for(threads, threads, [&](long i) { round_tiles(m, schedule, *scratch[i]); });
  if (schedule.status() != CIUIC_OK) return schedule.status();
  return ciuic_decode(codes, group_offset, row_bits, scale, rows, cols, L, 0, rows, What, 0, threads);
}

}  // namespace ciuic

int ciuic_round(const float* W, long rows, long cols, const float* A, const float* B, const float* direction,
                const float* pull, const float* scale, const uint8_t* row_bits, int L, int threads, uint8_t* codes,
                const int64_t* group_offset, float* What, long* progress) {
  using namespace ciuic;
  if (W == nullptr || What == nullptr || threads < 1) return CIUIC_BAD_ARGUMENT;
  if ((direction == nullptr) != (pull == nullptr) || (pull != nullptr && A == nullptr)) return CIUIC_BAD_ARGUMENT;
  const int status = check_matrix(codes, group_offset, row_bits, scale, rows, cols, L);
  if (status != CIUIC_OK) return status;
  try {
    return round_matrix(W, rows, cols, A, B, direction, pull, scale, row_bits, L, threads, codes, group_offset, What,
                        progress);
  } catch (const std::bad_alloc&) {
    return CIUIC_NO_MEMORY;
  }
}
