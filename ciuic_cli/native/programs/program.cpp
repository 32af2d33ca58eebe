// Checks programs, and plans which of their steps run together.
#include "program.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "kernels.h"

namespace ciuic {
namespace {

// Inputs of fewer values together are prepared by one thread: others wait as long at a barrier. Chosen.
constexpr int64_t kValuesOfOneThread = 8192;

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
      program.inputs.push_back({step.in, step.matrix, signs_for(program, sign_owners, step.matrix), {}});
    for (const Mode mode : {kFast, kExact}) program.inputs[input].precisions[mode].add(matrix, mode);
    program.products.push_back({step.matrix, input, step.out});
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
      program.longest_rotation = std::max(program.longest_rotation, step.size);
      return step.argument >= 0 && runs(step.in) && step.size % 2 == 0;
    case CIUIC_GATE:
    case CIUIC_ADD:
      return valid_buffer(program, step.in, -1) && is(step.second, program.buffer_sizes[step.in]) &&
             is(step.out, program.buffer_sizes[step.in]) &&
             (step.activation == CIUIC_SILU || step.activation == CIUIC_GELU_TANH);
    case CIUIC_CACHE:
      program.caches = std::max(program.caches, step.argument + 1);
      return step.argument >= 0 && step.heads > 0 && runs(step.in) && is(step.in, step.heads * step.size);
    case CIUIC_ATTEND:
      program.caches = std::max(program.caches, step.argument + 2);
      return step.argument >= 0 && step.heads > 0 && runs(step.in) && step.in != step.out && step.size % kHeadColumns == 0 &&
             step.size <= kMaxHeadSize && program.buffer_sizes[step.in] / step.size % step.heads == 0 &&
             is(step.out, program.buffer_sizes[step.in]);
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

// Whether one thread runs a stage of one token.
bool is_small(const Program& program, const Stage& stage) {
  if (stage.kind == Stage::kSerial || stage.kind == Stage::kMerge) return true;
  if (stage.kind != Stage::kPrepare) return false;
  int64_t values = 0;
  for (int i = stage.first; i < stage.last; ++i) values += program.matrices[program.inputs[i].matrix].cols;
  return stage.last - stage.first == 1 || values <= kValuesOfOneThread;
}

void plan_phases(Program& program) {
  const int count = static_cast<int>(program.stages.size());
  for (int first = 0, last; first < count; first = last) {
    last = first + 1;
    if (is_small(program, program.stages[first]))
      while (last < count && is_small(program, program.stages[last])) ++last;
    program.phases.push_back({first, last});
  }
}

int create(Program& program) {
  for (const CiuicMatrix& matrix : program.matrices) {
    const int status = check_product_matrix(matrix);
    if (status != CIUIC_OK) return status;
  }
  std::vector<int> sign_owners;
  const int count = static_cast<int>(program.steps.size());
  for (int first = 0, last; first < count; first = last) {
    const int kind = program.steps[first].kind;
    const auto follows = [&](int s) {
      const int other = program.steps[s].kind;
      if (kind == CIUIC_ATTEND) return false;  // a stage of its own
      return kind == CIUIC_MULTIPLY ? other == kind : other != CIUIC_MULTIPLY && other != CIUIC_ATTEND;
    };
    for (last = first + 1; last < count && follows(last);) ++last;
    for (int s = first; s < last; ++s)
      if (!valid_step(program, program.steps[s])) return CIUIC_BAD_ARGUMENT;
    if (kind == CIUIC_ATTEND) {
      program.stages.push_back({Stage::kAttend, first, last});
      program.stages.push_back({Stage::kMerge, first, last});
    } else if (kind != CIUIC_MULTIPLY)
      program.stages.push_back({Stage::kSerial, first, last});
    else if (independent(program, first, last))
      add_products(program, sign_owners, first, last);
    else
      return CIUIC_BAD_ARGUMENT;
  }
  plan_phases(program);
  return CIUIC_OK;
}

bool valid_caches(const Program& program, const CiuicCaches* caches) {
  if (program.caches == 0) return true;
  if (caches == nullptr || caches->count < program.caches || caches->arrays == nullptr || caches->context < 1) return false;
  for (int i = 0; i < program.caches; ++i)
    if (caches->arrays[i] == nullptr) return false;
  return true;
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

int ciuic_program_run(const void* program, void* const* arguments, int argument_count, const CiuicCaches* caches, long rows,
                      int bf16, int exact, int threads) {
  using namespace ciuic;
  if (program == nullptr || rows < 1 || threads < 1) return CIUIC_BAD_ARGUMENT;
  const Program& known = *static_cast<const Program*>(program);
  if (argument_count < known.argument_count || (known.argument_count > 0 && arguments == nullptr) ||
      !valid_caches(known, caches))
    return CIUIC_BAD_ARGUMENT;
  try {
    return run_program(known, arguments, caches, rows, bf16 != 0, exact != 0 ? kExact : kFast, threads);
  } catch (const std::bad_alloc&) {
    return CIUIC_NO_MEMORY;
  }
}
