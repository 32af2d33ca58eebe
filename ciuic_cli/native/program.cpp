// Programs: the steps of a decoder layer in one call, so that a token pays neither for Python between the products nor for
// waking threads at each of them.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "bfloat16.h"
#include "ciuic_native.h"
#include "kernels.h"
#include "parallel.h"
#include "product.h"

namespace ciuic {
namespace {

// An input of products: a buffer as some matrices want it transformed.
struct Input {
  int buffer;
  int matrix;  // one of the matrices that want it so
  int signs;   // number of the sign array
};

// The work of the team of threads between two barriers.
struct Stage {
  enum Kind { kSerial, kPrepare, kMultiply } kind;
  int first, last;  // steps (kSerial), inputs (kPrepare) or products (kMultiply)
};

struct Product {
  int matrix, input, out;
  Precisions precisions[2];  // by mode
};

struct Program {
  std::vector<CiuicMatrix> matrices;
  std::vector<CiuicStep> steps;
  std::vector<int64_t> buffer_sizes;
  std::vector<Input> inputs;
  std::vector<Product> products;
  std::vector<Stage> stages;
  std::vector<std::vector<float>> signs;
  int argument_count = 0;
};

bool same_treatment(const CiuicMatrix& a, const CiuicMatrix& b) {
  return a.seed == b.seed && a.log2_block == b.log2_block && a.cols == b.cols && a.cols_in == b.cols_in &&
         (a.input_factors == b.input_factors ||
          (a.input_factors != nullptr && b.input_factors != nullptr &&
           std::memcmp(a.input_factors, b.input_factors, sizeof(float) * a.cols_in) == 0));
}

// The number of the signs for a matrix; they depend on its seed and its columns.
int signs_for(Program& program, std::vector<int>& owners, int matrix) {
  const CiuicMatrix& wanted = program.matrices[matrix];
  for (size_t i = 0; i < owners.size(); ++i) {
    const CiuicMatrix& owner = program.matrices[owners[i]];
    if (owner.seed == wanted.seed && owner.cols == wanted.cols) return static_cast<int>(i);
  }
  owners.push_back(matrix);
  program.signs.emplace_back(wanted.cols);
  kernels().fill_signs(program.signs.back().data(), wanted.cols, wanted.seed);
  return static_cast<int>(owners.size()) - 1;
}

// Appends the two stages of the products of steps first .. last - 1.
void add_products(Program& program, std::vector<int>& sign_owners, int first, int last) {
  const int first_input = static_cast<int>(program.inputs.size()), first_product = static_cast<int>(program.products.size());
  for (int s = first; s < last; ++s) {
    const CiuicStep& step = program.steps[s];
    const CiuicMatrix& matrix = program.matrices[step.matrix];
    int input = first_input;
    while (input < static_cast<int>(program.inputs.size()) &&
           !(program.inputs[input].buffer == step.in &&
             same_treatment(program.matrices[program.inputs[input].matrix], matrix)))
      ++input;
    if (input == static_cast<int>(program.inputs.size()))
      program.inputs.push_back({step.in, step.matrix, signs_for(program, sign_owners, step.matrix)});
    Product product = {step.matrix, input, step.out, {}};
    for (const Mode mode : {kFast, kPrecise}) product.precisions[mode].add(matrix, mode);
    program.products.push_back(product);
  }
  program.stages.push_back({Stage::kPrepare, first_input, static_cast<int>(program.inputs.size())});
  program.stages.push_back({Stage::kMultiply, first_product, static_cast<int>(program.products.size())});
}

bool valid_buffer(const Program& program, int buffer, int64_t size) {
  return buffer >= 0 && buffer < static_cast<int>(program.buffer_sizes.size()) &&
         (size < 0 || (size > 0 && size <= program.buffer_sizes[buffer]));
}

// Whether a step's buffers, sizes and arrays fit together. Buffers of a product are exactly as long as its vectors.
bool valid_step(Program& program, const CiuicStep& step) {
  const auto is = [&](int buffer, int64_t size) {
    return valid_buffer(program, buffer, size) && program.buffer_sizes[buffer] == size;
  };
  const auto runs = [&](int buffer) {
    return step.size > 0 && valid_buffer(program, buffer, step.size) && program.buffer_sizes[buffer] % step.size == 0;
  };
  switch (step.kind) {
    case CIUIC_LOAD:
    case CIUIC_STORE:
      program.argument_count = std::max(program.argument_count, step.argument + 1);
      return step.argument >= 0 && is(step.kind == CIUIC_LOAD ? step.out : step.in, step.size);
    case CIUIC_NORM:
      return step.vector != nullptr && runs(step.in) && is(step.out, program.buffer_sizes[step.in]);
    case CIUIC_MULTIPLY:
      return step.matrix >= 0 && step.matrix < static_cast<int>(program.matrices.size()) && step.in != step.out &&
             is(step.in, program.matrices[step.matrix].cols_in) && is(step.out, program.matrices[step.matrix].rows_out);
    case CIUIC_ROTATE:
      program.argument_count = std::max(program.argument_count, step.argument + 2);
      return step.argument >= 0 && runs(step.in) && step.size % 2 == 0;
    case CIUIC_GATE:
    case CIUIC_ADD:
      return valid_buffer(program, step.in, -1) && is(step.second, program.buffer_sizes[step.in]) &&
             is(step.out, program.buffer_sizes[step.in]) &&
             (step.activation == CIUIC_SILU || step.activation == CIUIC_GELU_TANH);
    default:
      return false;
  }
}

// Whether no product of the steps first .. last - 1 reads or writes what another one writes.
bool independent(const Program& program, int first, int last) {
  for (int a = first; a < last; ++a)
    for (int b = first; b < last; ++b)
      if (a != b && (program.steps[a].out == program.steps[b].in || program.steps[a].out == program.steps[b].out))
        return false;
  return true;
}

// Float32 values to an array of the caller.
void save(const float* from, bool bf16, int64_t count, void* to) {
  if (bf16)
    for (int64_t i = 0; i < count; ++i) static_cast<uint16_t*>(to)[i] = to_bfloat16(from[i]);
  else
    std::memcpy(to, from, sizeof(float) * count);
}

// One run of a program: its arguments and its scratch memory.
class Run {
 public:
  Run(const Program& program, void* const* arguments, long rows, bool bf16, Mode mode, int threads)
      : program_(program), arguments_(arguments), rows_(rows), bf16_(bf16), mode_(mode), threads_(threads) {}

  int execute() {
    size_t floats = 0;
    for (const int64_t size : program_.buffer_sizes) {
      buffer_begin_.push_back(floats);
      floats += (size * rows_ + 15) / 16 * 16;
    }
    size_t bytes = 0;
    // A row of scratch for each input, because threads prepare inputs at the same time.
    for (const Input& input : program_.inputs) {
      row_begin_.push_back(floats);
      floats += program_.matrices[input.matrix].cols;
    }
    for (size_t i = 0; i < program_.inputs.size(); ++i) {
      Precisions wanted;
      for (const Product& product : program_.products)
        if (product.input == static_cast<int>(i))
          for (const Precision p : kPrecisions) wanted.needed[p] |= product.precisions[mode_].needed[p];
      layouts_.emplace_back(wanted, program_.matrices[program_.inputs[i].matrix].cols, rows_);
      prepared_begin_.push_back(bytes);
      bytes += (layouts_.back().bytes + 63) / 64 * 64;
    }
    angles_begin_ = floats;
    int64_t longest = 0;
    for (const CiuicStep& step : program_.steps)
      if (step.kind == CIUIC_ROTATE) longest = std::max(longest, step.size);
    floats += 2 * longest;
    memory_.reset(new (std::nothrow) uint8_t[sizeof(float) * floats + bytes + 64]);
    if (!memory_) return CIUIC_NO_MEMORY;
    prepared_ = aligned(memory_.get());
    floats_ = reinterpret_cast<float*>(prepared_ + bytes);
    parallel_stages(
        static_cast<int>(program_.stages.size()), threads_, [this](int stage) { return items(program_.stages[stage]); },
        [this](int stage, long item) { work(program_.stages[stage], item); });
    return CIUIC_OK;
  }

 private:
  float* buffer(int number) const { return floats_ + buffer_begin_[number]; }

  long items(const Stage& stage) const {
    if (stage.kind == Stage::kSerial) return 1;
    if (stage.kind == Stage::kPrepare) return stage.last - stage.first;
    long total = 0;
    const long per_item = groups_per_item(stage_groups(stage), threads_, rows_);
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

  void work(const Stage& stage, long item) {
    if (stage.kind == Stage::kSerial) {
      for (int s = stage.first; s < stage.last; ++s) step(program_.steps[s]);
    } else if (stage.kind == Stage::kPrepare) {
      prepare(stage.first + static_cast<int>(item));
    } else {
      const long per_item = groups_per_item(stage_groups(stage), threads_, rows_);
      int product = stage.first;
      while (item >= product_items(product, per_item)) item -= product_items(product++, per_item);
      multiply(program_.products[product], per_item * item, per_item * (item + 1));
    }
  }

  void prepare(int number) {
    const Input& input = program_.inputs[number];
    const CiuicMatrix& matrix = program_.matrices[input.matrix];
    float* row = floats_ + row_begin_[number];
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

  const Program& program_;
  void* const* arguments_;
  const long rows_;
  const bool bf16_;
  const Mode mode_;
  const int threads_;
  std::vector<size_t> buffer_begin_, row_begin_, prepared_begin_;
  std::vector<PreparedLayout> layouts_;
  std::unique_ptr<uint8_t[]> memory_;
  size_t angles_begin_ = 0;
  uint8_t* prepared_ = nullptr;
  float* floats_ = nullptr;
};

int create(Program& program) {
  for (const CiuicMatrix& matrix : program.matrices) {
    const int status = check_product_matrix(matrix);
    if (status != CIUIC_OK) return status;
  }
  std::vector<int> sign_owners;
  const int count = static_cast<int>(program.steps.size());
  for (int first = 0, last; first < count; first = last) {
    const bool multiplies = program.steps[first].kind == CIUIC_MULTIPLY;
    for (last = first; last < count && (program.steps[last].kind == CIUIC_MULTIPLY) == multiplies; ++last)
      if (!valid_step(program, program.steps[last])) return CIUIC_BAD_ARGUMENT;
    if (!multiplies)
      program.stages.push_back({Stage::kSerial, first, last});
    else if (independent(program, first, last))
      add_products(program, sign_owners, first, last);
    else
      return CIUIC_BAD_ARGUMENT;
  }
  return CIUIC_OK;
}

}  // namespace
}  // namespace ciuic

int ciuic_program_create(const CiuicMatrix* matrices, int matrix_count, const CiuicStep* steps, int step_count,
                         const int64_t* buffer_sizes, int buffer_count, void** program) {
  using namespace ciuic;
  if (matrix_count < 0 || step_count < 0 || buffer_count < 0 || program == nullptr ||
      (matrix_count > 0 && matrices == nullptr) || (step_count > 0 && steps == nullptr) ||
      (buffer_count > 0 && buffer_sizes == nullptr))
    return CIUIC_BAD_ARGUMENT;
  try {
    std::unique_ptr<Program> made(new Program);
    made->matrices.assign(matrices, matrices + matrix_count);
    made->steps.assign(steps, steps + step_count);
    made->buffer_sizes.assign(buffer_sizes, buffer_sizes + buffer_count);
    const int status = create(*made);
    if (status == CIUIC_OK) *program = made.release();
    return status;
  } catch (const std::bad_alloc&) {
    return CIUIC_NO_MEMORY;
  }
}

void ciuic_program_free(void* program) { delete static_cast<ciuic::Program*>(program); }

int ciuic_program_run(const void* program, void* const* arguments, int argument_count, long rows, int bf16, int precise,
                      int threads) {
  using namespace ciuic;
  if (program == nullptr || rows < 1 || threads < 1) return CIUIC_BAD_ARGUMENT;
  const Program& known = *static_cast<const Program*>(program);
  if (argument_count < known.argument_count || (known.argument_count > 0 && arguments == nullptr))
    return CIUIC_BAD_ARGUMENT;
  try {
    return Run(known, arguments, rows, bf16 != 0, precise != 0 ? kPrecise : kFast, threads).execute();
  } catch (const std::bad_alloc&) {
    return CIUIC_NO_MEMORY;
  }
}
