// Rounding of a matrix: tile after tile with error feedback, scheduled over threads.
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

#include "ciuic_native.h"
#include "kernels.h"
#include "parallel.h"
#include "trellis_decode.h"

namespace ciuic {
namespace {

// Replaces the windows of a path by those that a decoder reads from its stored bits. They are the same for a closed path;
// for any other, the error feedback must see what the decoder will see.
void close_windows(uint16_t* windows, int halves, int window) {
  uint32_t state = 0;
  const auto add = [&](int i) {
    const int bits = ciuic_bits_of_column(i % kTile, halves);
    state = (state << bits) | (windows[i] & ((1u << bits) - 1u));
  };
  for (int i = kTileWeights - kTile; i < kTileWeights; ++i) add(i);  // a row has no fewer bits than a window
  for (int i = 0; i < kTileWeights; ++i) {
    add(i);
    windows[i] = static_cast<uint16_t>(state & ((1u << window) - 1u));
  }
}

// Gathers the new bits of 256 windows into the storage order of a tile.
void store_tile(const uint16_t* windows, int halves, uint8_t* tile) {
  for (int row = 0; row < kTile; ++row) {
    uint64_t pending = 0;
    int available = 0, unit = 0;
    for (int column = 0; column < kTile; ++column) {
      const int bits = ciuic_bits_of_column(column, halves);
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
    if (available != 0) tile[CIUIC_UNIT_BYTES * unit + row] = static_cast<uint8_t>(pending);  // 8 bits: half a unit
  }
}

// The parts of a feedback matrix that lie below the diagonal, one panel per block of 16 columns, each copied to contiguous
// memory while it is in use: read in place, a column of a wide matrix touches another page and the same few cache sets in
// every row.
class Panels {
 public:
  Panels(const float* matrix, long size)
      : matrix_(matrix), size_(size), blocks_(matrix == nullptr ? 0 : size / kTile), once_(new std::once_flag[blocks_]),
        copies_(blocks_), users_(blocks_) {}

  bool present() const { return matrix_ != nullptr; }
  void expect_users(long users_per_block) {
    for (auto& count : users_) count = users_per_block;
  }

  struct View {
    const float* first;  // row 16 (block + 1), column 16 block
    size_t stride;
    long rows;
  };

  View of(long block) {
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

  // To be called once by every user of a block.
  void release(long block) {
    if (present() && users_[block].fetch_sub(1) == 1) copies_[block].reset();
  }

 private:
  const float* matrix_;
  long size_;
  size_t blocks_;
  std::unique_ptr<std::once_flag[]> once_;
  std::vector<std::unique_ptr<float[]>> copies_;
  std::vector<std::atomic<long>> users_;
};

struct Matrix {
  const float* W;
  long rows, cols;
  Panels& A;
  Panels& Bf;
  const float* direction;
  const float* pull;
  const float* scale;
  const uint8_t* row_bits;
  int window;
  uint8_t* codes;
  const int64_t* group_offset;
  // Panels that the feedback reads. E of row group I: errors[16 * cols * I + 16 * column + row in group];
  // P of column block J: mixed[16 * rows * J + 16 * row + column in block].
  float* errors;
  float* mixed;
  float* drift;  // of each row: the sum so far of P times direction

  int halves_of(long group) const { return ciuic_halves_of(row_bits[group]); }
};

struct Tile {
  int32_t I, J;
};

// Whether `a` is to be encoded after `b`: it lies on a later front of the sweep from the last row and column to the first.
struct Later {
  bool operator()(Tile a, Tile b) const { return a.I + a.J != b.I + b.J ? a.I + a.J < b.I + b.J : a.I > b.I; }
};

// What a thread needs to encode a batch.
struct Scratch {
  std::unique_ptr<uint8_t[]> workspace;
  float target[kMaxEncodeBatch][kTileWeights];    // T, in weight units
  float feedback[kMaxEncodeBatch][kTileWeights];  // U = sum E A
  float normalised[kMaxEncodeBatch][kTileWeights];
  uint16_t windows[kMaxEncodeBatch][kTileWeights];
};

// The tile's target; false where feedback has made it NaN or infinite.
bool prepare(const Matrix& m, Tile tile, float* target, float* feedback, float* normalised) {
  const Kernels& k = kernels();
  const long row0 = kTile * static_cast<long>(tile.I), col0 = kTile * static_cast<long>(tile.J);
  std::memset(feedback, 0, sizeof(float) * kTileWeights);
  const long right = col0 + kTile, below = row0 + kTile;
  if (m.A.present() && right < m.cols) {
    const Panels::View A = m.A.of(tile.J);
    k.panel_product(m.errors + row0 * m.cols + kTile * right, kTile, A.first, A.stride, A.rows, feedback);
  }
  std::memcpy(target, feedback, sizeof(float) * kTileWeights);
  if (m.Bf.present() && below < m.rows) {
    const Panels::View Bf = m.Bf.of(tile.I);
    k.panel_product(Bf.first, Bf.stride, m.mixed + col0 * m.rows + kTile * below, kTile, Bf.rows, target);
  }
  m.A.release(tile.J);
  m.Bf.release(tile.I);
  if (m.pull != nullptr)
    for (int r = 0; r < kTile; ++r)
      for (int c = 0; c < kTile; ++c)
        target[kTile * r + c] += m.drift[row0 + r] * m.pull[(row0 + r) * m.cols + col0 + c];
  float sum = 0.0f;  // 0 unless a target is NaN or infinite
  for (int r = 0; r < kTile; ++r) {
    const float scale = m.scale[row0 + r];
    const float to_levels = CIUIC_SIGMA / scale;
    for (int c = 0; c < kTile; ++c) {
      const int i = kTile * r + c;
      target[i] += m.W[(row0 + r) * m.cols + col0 + c];
      sum += target[i] * 0.0f;
      normalised[i] = scale > 0.0f ? target[i] * to_levels : std::numeric_limits<float>::quiet_NaN();
    }
  }
  return sum == 0.0f;
}

void finish(const Matrix& m, Tile tile, const float* feedback, const uint16_t* windows) {
  const long row0 = kTile * static_cast<long>(tile.I), col0 = kTile * static_cast<long>(tile.J);
  const int halves = m.halves_of(tile.I);
  if (halves != 0)
    store_tile(windows, halves, m.codes + m.group_offset[tile.I] + static_cast<int64_t>(tile.J) * CIUIC_TILE_BYTES(halves));
  for (int r = 0; r < kTile; ++r) {
    const float factor = ciuic_row_factor(m.scale[row0 + r]);
    for (int c = 0; c < kTile; ++c) {
      const int i = kTile * r + c;
      const float decoded = halves == 0 ? 0.0f : factor * static_cast<float>(ciuic_level(windows[i]));
      const float error = m.scale[row0 + r] > 0.0f || halves == 0 ? m.W[(row0 + r) * m.cols + col0 + c] - decoded : 0.0f;
      m.errors[row0 * m.cols + kTile * (col0 + c) + r] = error;
      if (m.mixed != nullptr) m.mixed[col0 * m.rows + kTile * (row0 + r) + c] = error + feedback[i];
      if (m.pull != nullptr) m.drift[row0 + r] += (error + feedback[i]) * m.direction[(row0 + r) * m.cols + col0 + c];
    }
  }
}

// Hands out tiles whose feedback is complete. Which thread takes a tile, and with which others in a batch, changes no result.
class Schedule {
 public:
  Schedule(const Matrix& m, long* progress)
      : m_(m), groups_(m.rows / kTile), blocks_(m.cols / kTile), waiting_(groups_ * blocks_), progress_(progress) {
    remaining_ = groups_ * blocks_;
    for (long J = blocks_ - 1; J >= 0; --J)
      for (long I = groups_ - 1; I >= 0; --I) {
        const int needs = (m.A.present() && J + 1 < blocks_) + (m.Bf.present() && I + 1 < groups_);
        waiting_[I * blocks_ + J] = static_cast<uint8_t>(needs);
        if (needs == 0) push({static_cast<int32_t>(I), static_cast<int32_t>(J)});
      }
  }

  // Takes up to the batch size of ready tiles of one bit width; 0 when everything is done. Whole batches come first, because
  // tiles by themselves take a third longer each; then the earliest front, because its tiles are those that others wait for:
  // where it lagged, few tiles would be ready at a time, and hardly ever two of a width.
  int take(Tile* tiles) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (progress_ != nullptr && __atomic_load_n(progress_, __ATOMIC_RELAXED) < 0) cancelled_ = true;
      if (remaining_ == 0 || cancelled_) {
        changed_.notify_all();
        return 0;
      }
      int chosen = -1;
      for (int halves = 0; halves <= kMostHalves; ++halves)
        if (!ready_[halves].empty() && (chosen < 0 || comes_before(halves, chosen))) chosen = halves;
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

  bool cancelled() const { return cancelled_; }  // asked after all threads have left
  void fail() { failed_ = true; }
  bool failed() const { return failed_; }
  void overflow() { overflown_ = true; }
  bool overflown() const { return overflown_; }

  void done(const Tile* tiles, int count) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (int i = 0; i < count; ++i) {
      if (m_.A.present() && tiles[i].J > 0) release({tiles[i].I, tiles[i].J - 1});
      if (m_.Bf.present() && tiles[i].I > 0) release({tiles[i].I - 1, tiles[i].J});
    }
    remaining_ -= count;
    if (progress_ != nullptr) __atomic_fetch_add(progress_, static_cast<long>(count), __ATOMIC_RELAXED);
    changed_.notify_all();
  }

 private:
  void release(Tile tile) {
    if (--waiting_[tile.I * blocks_ + tile.J] == 0) push(tile);
  }
  void push(Tile tile) { ready_[m_.halves_of(tile.I)].push(tile); }

  int batch_of(int halves) const { return halves == 0 ? 1 : kernels().encode_batch(halves, m_.window); }
  bool comes_before(int a, int b) const {
    const bool whole_a = ready_[a].size() >= static_cast<size_t>(batch_of(a));
    const bool whole_b = ready_[b].size() >= static_cast<size_t>(batch_of(b));
    return whole_a != whole_b ? whole_a : Later{}(ready_[b].top(), ready_[a].top());
  }

  const Matrix& m_;
  const long groups_, blocks_;
  std::vector<uint8_t> waiting_;
  std::priority_queue<Tile, std::vector<Tile>, Later> ready_[kMostHalves + 1];  // by width, the earliest front first
  long remaining_ = 0;
  std::atomic<bool> failed_{false}, overflown_{false};
  bool cancelled_ = false;
  long* progress_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

void work(const Matrix& m, Schedule& schedule, Scratch& s) {
  const Kernels& k = kernels();
  Tile tiles[kMaxEncodeBatch];
  const float* targets[kMaxEncodeBatch];
  uint16_t* windows[kMaxEncodeBatch];
  for (int i = 0; i < kMaxEncodeBatch; ++i) {
    targets[i] = s.normalised[i];
    windows[i] = s.windows[i];
  }
  for (int count = schedule.take(tiles); count > 0; count = schedule.take(tiles)) {
    for (int i = 0; i < count; ++i)
      if (!prepare(m, tiles[i], s.target[i], s.feedback[i], s.normalised[i])) schedule.overflow();
    const int halves = m.halves_of(tiles[0].I);
    if (halves != 0 && k.encode_tiles(targets, count, halves, m.window, s.workspace.get(), windows) != 0) schedule.fail();
    for (int i = 0; i < count; ++i) {
      if (halves != 0) close_windows(s.windows[i], halves, m.window);
      finish(m, tiles[i], s.feedback[i], s.windows[i]);
    }
    schedule.done(tiles, count);
  }
}

}  // namespace

int round_matrix(const float* W, long rows, long cols, const float* A, const float* Bf, const float* direction,
                 const float* pull, const float* scale, const uint8_t* row_bits, int window, int threads, uint8_t* codes,
                 const int64_t* group_offset, float* What, long* progress) {
  for (long i = 0; i < rows; ++i) {
    float sum = 0.0f;  // 0 unless a value is NaN or infinite
    for (long j = 0; j < cols; ++j) sum += W[i * cols + j] * 0.0f;
    if (!(sum == 0.0f) || !(scale[i] >= 0.0f) || std::isinf(scale[i])) return CIUIC_NOT_FINITE;
  }
  std::unique_ptr<float[]> mixed;
  std::vector<float> drift(pull == nullptr ? 0 : rows, 0.0f);
  if (Bf != nullptr) mixed.reset(new float[static_cast<size_t>(rows) * cols]);
  Panels inputs(A, cols), outputs(Bf, rows);
  inputs.expect_users(rows / kTile);
  outputs.expect_users(cols / kTile);
  const Matrix m = {W,        rows,   cols,  inputs,       outputs, direction,   pull,        scale,
                    row_bits, window, codes, group_offset, What,    mixed.get(), drift.data()};
  size_t workspace = 0;
  for (long g = 0; g < rows / kTile; ++g)
    if (row_bits[g] != 0) workspace = std::max(workspace, kernels().encode_workspace_bytes(m.halves_of(g), window));
  threads = static_cast<int>(std::min<long>(threads, (rows / kTile) * (cols / kTile)));
  std::vector<std::unique_ptr<Scratch>> scratch(threads);
  for (auto& s : scratch) {
    s.reset(new Scratch);
    s->workspace.reset(new uint8_t[workspace]);
  }
  Schedule schedule(m, progress);
  parallel_for(threads, threads, [&](long i) { work(m, schedule, *scratch[i]); });
  if (schedule.cancelled()) return CIUIC_CANCELLED;
  if (schedule.failed()) return CIUIC_NO_MEMORY;
  if (schedule.overflown()) return CIUIC_NOT_FINITE;
  return ciuic_decode(codes, group_offset, row_bits, scale, rows, cols, window, 0, rows, What, 0, threads);
}

}  // namespace ciuic

int ciuic_round(const float* W, long rows, long cols, const float* A, const float* Bf, const float* direction,
                const float* pull, const float* scale, const uint8_t* row_bits, int L, int threads, uint8_t* codes,
                const int64_t* group_offset, float* What, long* progress) {
  using namespace ciuic;
  if (W == nullptr || scale == nullptr || row_bits == nullptr || group_offset == nullptr ||
      What == nullptr || rows <= 0 || cols <= 0 || rows % kTile != 0 || cols % kTile != 0 || threads < 1)
    return CIUIC_BAD_ARGUMENT;
  if ((direction == nullptr) != (pull == nullptr) || (pull != nullptr && A == nullptr)) return CIUIC_BAD_ARGUMENT;
  if (!valid_window(L)) return CIUIC_BAD_BITS;
  for (long g = 0; g < rows / kTile; ++g)
    if (row_bits[g] != 0) {
      if (ciuic_halves_of(row_bits[g]) < 0) return CIUIC_BAD_BITS;
      if (codes == nullptr) return CIUIC_BAD_ARGUMENT;
    }
  try {
    return round_matrix(W, rows, cols, A, Bf, direction, pull, scale, row_bits, L, threads, codes, group_offset, What,
                        progress);
  } catch (const std::bad_alloc&) {
    return CIUIC_NO_MEMORY;
  }
}
