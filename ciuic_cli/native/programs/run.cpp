// Runs programs: the steps of one decoder layer or of all of them in one call, so that a token pays neither for Python between
// the products nor for waking threads at each of them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>

#include "bfloat16.h"
#include "kernels.h"
#include "parallel.h"
#include "program.h"

namespace ciuic {
namespace {

// Cached tokens of a work item: enough to pay for merging the ranges' softmaxes, few enough for threads to share a head.
// Chosen. At most kMaxRanges items share a head, which bounds the memory of partial sums.
constexpr int64_t kTokensPerItem = 256, kMaxRanges = 32;

// Float32 values to an array of the caller, from its element `first` on.
void save(const float* from, bool bf16, int64_t count, void* to, int64_t first = 0) {
  if (bf16)
    for (int64_t i = 0; i < count; ++i) static_cast<uint16_t*>(to)[first + i] = to_bfloat16(from[i]);
  else
    std::memcpy(static_cast<float*>(to) + first, from, sizeof(float) * count);
}

// One run of a program: its arguments and its scratch memory.
class Run {
 public:
  Run(const Program& program, void* const* arguments, const CiuicCaches* caches, long rows, bool bf16, Mode mode, int threads)
      : program_(program),
        arguments_(arguments),
        caches_(caches),
        rows_(rows),
        bf16_(bf16),
        mode_(mode),
        threads_(threads) {}

  int execute() {
    const size_t bytes = plan_prepared();
    const size_t floats = plan_floats();
    memory_.reset(new (std::nothrow) uint8_t[sizeof(float) * floats + bytes + 64]);
    if (!memory_) return CIUIC_NO_MEMORY;
    prepared_ = aligned(memory_.get());
    floats_ = reinterpret_cast<float*>(prepared_ + bytes);
    parallel_stages(
        static_cast<int>(program_.phases.size()), threads_, [this](int phase) { return items(program_.phases[phase]); },
        [this](int phase, long item) { work(program_.phases[phase], item); });
    return CIUIC_OK;
  }

 private:
  // The layout of every input's prepared rows. Inputs of different stages share memory, because each of them is read in
  // the stage after its own only. Returns the bytes.
  size_t plan_prepared() {
    size_t most = 0;
    for (const Stage& stage : program_.stages) {
      if (stage.kind != Stage::kPrepare) continue;
      size_t bytes = 0;
      for (int i = stage.first; i < stage.last; ++i) {
        const Input& input = program_.inputs[i];
        layouts_.emplace_back(input.precisions[mode_], mode_, program_.matrices[input.matrix].cols, rows_);
        prepared_begin_.push_back(bytes);
        bytes += (layouts_.back().bytes + 63) / 64 * 64;
      }
      most = std::max(most, bytes);
    }
    return most;
  }

  // Where buffers, rows that are being prepared, angles and partial softmaxes begin. Returns the floats of all.
  size_t plan_floats() {
    size_t floats = 0;
    const auto take = [&](int64_t count) {
      const size_t begin = floats;
      floats += (count + 15) / 16 * 16;
      return begin;
    };
    for (const int64_t size : program_.buffer_sizes) buffer_begin_.push_back(take(size * rows_));
    int64_t row_floats = 0, partial_floats = 0;
    for (const Stage& stage : program_.stages) {
      // A row of scratch for each input, because threads prepare inputs at the same time.
      int64_t of_stage = 0;
      for (int i = stage.first; stage.kind == Stage::kPrepare && i < stage.last; ++i) {
        row_begin_.push_back(of_stage);
        of_stage += program_.matrices[program_.inputs[i].matrix].cols;
      }
      row_floats = std::max(row_floats, of_stage);
      if (stage.kind == Stage::kAttend) {
        const CiuicStep& step = program_.steps[stage.first];
        partial_floats = std::max(partial_floats, rows_ * ranges() * query_heads(program_, step) * (step.size + 2));
      }
    }
    rows_begin_ = take(row_floats);
    partial_begin_ = take(partial_floats);
    angles_begin_ = take(2 * program_.longest_rotation);
    return floats;
  }

  float* buffer(int number) const { return floats_ + buffer_begin_[number]; }

  long items(const Phase& phase) const { return phase.last - phase.first > 1 ? 1 : items(program_.stages[phase.first]); }

  long items(const Stage& stage) const {
    if (stage.kind == Stage::kSerial || stage.kind == Stage::kMerge) return 1;
    if (stage.kind == Stage::kPrepare) return stage.last - stage.first;
    if (stage.kind == Stage::kAttend) return rows_ * ranges() * program_.steps[stage.first].heads;
    long total = 0;
    const long per_item = groups_per_item(stage_groups(stage), threads_, quantized_rows(mode_) * rows_);
    for (int p = stage.first; p < stage.last; ++p) total += product_items(p, per_item);
    return total;
  }

  long stage_groups(const Stage& stage) const {
    long groups = 0;
    for (int p = stage.first; p < stage.last; ++p) groups += output_groups(program_.matrices[program_.products[p].matrix]);
    return groups;
  }

  long product_items(int product, long per_item) const {
    return (output_groups(program_.matrices[program_.products[product].matrix]) + per_item - 1) / per_item;
  }

  void work(const Phase& phase, long item) {
    if (phase.last - phase.first == 1) return work(program_.stages[phase.first], item);
    for (int s = phase.first; s < phase.last; ++s)
      for (long i = 0; i < items(program_.stages[s]); ++i) work(program_.stages[s], i);
  }

  void work(const Stage& stage, long item) {
    switch (stage.kind) {
      case Stage::kSerial:
        for (int s = stage.first; s < stage.last; ++s) step(program_.steps[s]);
        break;
      case Stage::kPrepare:
        prepare(stage.first + static_cast<int>(item));
        break;
      case Stage::kAttend:
        attend(program_.steps[stage.first], item);
        break;
      case Stage::kMerge:
        merge(program_.steps[stage.first]);
        break;
      case Stage::kMultiply: {
        const long per_item = groups_per_item(stage_groups(stage), threads_, quantized_rows(mode_) * rows_);
        int product = stage.first;
        while (item >= product_items(product, per_item)) item -= product_items(product++, per_item);
        multiply(program_.products[product], per_item * item, per_item * (item + 1));
      }
    }
  }

  void prepare(int number) {
    const Input& input = program_.inputs[number];
    const CiuicMatrix& matrix = program_.matrices[input.matrix];
    float* row = floats_ + rows_begin_ + row_begin_[number];
    for (long b = 0; b < rows_; ++b) {
      std::memcpy(row, buffer(input.buffer) + b * matrix.cols_in, sizeof(float) * matrix.cols_in);
      prepare_row(matrix, program_.signs[input.signs].data(), row, layouts_[number], b, prepared_ + prepared_begin_[number]);
    }
  }

  void multiply(const Product& product, long first, long last) {
    const CiuicMatrix& matrix = program_.matrices[product.matrix];
    const Output output = {buffer(product.out), false, 0};
    multiply_groups(matrix, mode_, layouts_[product.input], prepared_ + prepared_begin_[product.input], rows_, first,
                    std::min(last, output_groups(matrix)), output);
  }

  void step(const CiuicStep& step) {
    const int64_t count = rows_ * program_.buffer_sizes[step.kind == CIUIC_LOAD ? step.out : step.in];
    switch (step.kind) {
      case CIUIC_LOAD:
        load_floats(arguments_[step.argument], bf16_, 0, count, buffer(step.out));
        break;
      case CIUIC_STORE:
        save(buffer(step.in), bf16_, count, arguments_[step.argument]);
        break;
      case CIUIC_NORM:
        for (int64_t begin = 0; begin < count; begin += step.size)
          kernels().rms_norm(buffer(step.in) + begin, step.size, step.number, step.vector, buffer(step.out) + begin);
        break;
      case CIUIC_ROTATE:
        rotate(step, count);
        break;
      case CIUIC_GATE:
        kernels().gate(static_cast<CiuicActivation>(step.activation), buffer(step.in), buffer(step.second), count,
                       buffer(step.out));
        break;
      case CIUIC_ADD:
        for (int64_t i = 0; i < count; ++i) buffer(step.out)[i] = buffer(step.in)[i] + buffer(step.second)[i];
        break;
      case CIUIC_CACHE:
        cache(step);
        break;
      default:
        break;
    }
  }

  // The cosines and sines of a token serve all its runs.
  void rotate(const CiuicStep& step, int64_t count) {
    const int64_t size = step.size, half = size / 2, per_row = count / rows_;
    float *cosine = floats_ + angles_begin_, *sine = cosine + size;
    for (long row = 0; row < rows_; ++row) {
      load_floats(arguments_[step.argument], bf16_, row * size, size, cosine);
      load_floats(arguments_[step.argument + 1], bf16_, row * size, size, sine);
      for (int64_t begin = 0; begin < per_row; begin += size) {
        float* values = buffer(step.in) + row * per_row + begin;
        for (int64_t i = 0; i < half; ++i) {
          const float a = values[i], b = values[half + i];
          values[i] = a * cosine[i] - b * sine[i];
          values[half + i] = b * cosine[half + i] + a * sine[half + i];
        }
      }
    }
  }

  int64_t cached(long row, int64_t head, int64_t token) const {
    return row * caches_->sequence_stride + head * caches_->head_stride + token * caches_->token_stride;
  }

  void cache(const CiuicStep& step) {
    for (long row = 0; row < rows_; ++row)
      for (int64_t head = 0; head < step.heads; ++head)
        save(buffer(step.in) + (row * step.heads + head) * step.size, bf16_, step.size, caches_->arrays[step.argument],
             cached(row, head, caches_->context - 1));
  }

  int64_t tokens_per_range() const {
    return caches_ == nullptr ? kTokensPerItem : std::max(kTokensPerItem, (caches_->context + kMaxRanges - 1) / kMaxRanges);
  }

  int64_t ranges() const { return caches_ == nullptr ? 1 : (caches_->context + tokens_per_range() - 1) / tokens_per_range(); }

  // Partial softmaxes: per query head and range the sums, the maximum and the total.
  float* partial(const CiuicStep& step, int64_t head, int64_t range) const {
    return floats_ + partial_begin_ + (head * ranges() + range) * (step.size + 2);
  }

  // One range of tokens, for the query heads of one key-value head and sequence.
  void attend(const CiuicStep& step, long item) {
    const int64_t count = ranges(), per_range = tokens_per_range(), shared = shared_heads(program_, step);
    const int64_t range = item % count, head = item / count % step.heads, row = item / (count * step.heads);
    const int64_t first = range * per_range, width = bf16_ ? 2 : 4;
    const auto at = [&](int array) {
      return static_cast<const uint8_t*>(caches_->arrays[step.argument + array]) + width * cached(row, head, first);
    };
    const CachedTokens tokens = {at(0),
                                 at(1),
                                 caches_->bias == nullptr ? nullptr : caches_->bias + row * caches_->context + first,
                                 static_cast<long>(std::min(per_range, caches_->context - first)),
                                 static_cast<long>(caches_->token_stride),
                                 static_cast<int>(step.size),
                                 bf16_};
    alignas(64) float query[kMaxHeadsTogether * kMaxHeadSize], sums[kMaxHeadsTogether * kMaxHeadSize];
    for (int64_t h = 0; h < shared; h += kMaxHeadsTogether) {
      const int heads = static_cast<int>(std::min<int64_t>(kMaxHeadsTogether, shared - h));
      const int64_t first_head = (row * step.heads + head) * shared + h;
      const float* from = buffer(step.in) + first_head * step.size;
      for (int64_t i = 0; i < heads * step.size; ++i) query[i] = step.number * from[i];
      HeadSums found;
      found.sums = sums;
      kernels().attend(query, heads, tokens, found);
      for (int i = 0; i < heads; ++i) {
        float* to = partial(step, first_head + i, range);
        std::memcpy(to, sums + i * step.size, sizeof(float) * step.size);
        to[step.size] = found.maximum[i];
        to[step.size + 1] = found.total[i];
      }
    }
  }

  // The softmax's mean of the values, from the partial sums of all ranges.
  void merge(const CiuicStep& step) {
    for (int64_t head = 0; head < rows_ * query_heads(program_, step); ++head) {
      float maximum = partial(step, head, 0)[step.size], total = 0.0f;
      for (int64_t range = 1; range < ranges(); ++range) maximum = std::max(maximum, partial(step, head, range)[step.size]);
      float* out = buffer(step.out) + head * step.size;
      std::memset(out, 0, sizeof(float) * step.size);
      for (int64_t range = 0; range < ranges(); ++range) {
        const float* part = partial(step, head, range);
        const float factor = std::exp(part[step.size] - maximum);
        total += factor * part[step.size + 1];
        for (int64_t j = 0; j < step.size; ++j) out[j] += factor * part[j];
      }
      for (int64_t j = 0; j < step.size; ++j) out[j] /= total;
    }
  }

  const Program& program_;
  void* const* arguments_;
  const CiuicCaches* caches_;
  const long rows_;
  const bool bf16_;
  const Mode mode_;
  const int threads_;
  std::vector<size_t> buffer_begin_, row_begin_, prepared_begin_;
  std::vector<PreparedLayout> layouts_;
  std::unique_ptr<uint8_t[]> memory_;
  size_t rows_begin_ = 0, partial_begin_ = 0, angles_begin_ = 0;
  uint8_t* prepared_ = nullptr;
  float* floats_ = nullptr;
};

}  // namespace

int run_program(const Program& program, void* const* arguments, const CiuicCaches* caches, long rows, bool bf16, Mode mode,
                int threads) {
  return Run(program, arguments, caches, rows, bf16, mode, threads).execute();
}

}  // namespace ciuic
