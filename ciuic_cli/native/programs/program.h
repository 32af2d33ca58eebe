// A checked program, as program.cpp makes it and run.cpp runs it.
#ifndef CIUIC_PROGRAM_H
#define CIUIC_PROGRAM_H

#include <cstdint>
#include <vector>

#include "ciuic_native.h"
#include "product.h"

namespace ciuic {

// An input of products: a buffer as some matrices want it transformed.
struct Input {
  int buffer;
  int matrix;  // one of the matrices that want it so
  int signs;   // number of the sign array
  Precisions precisions[2];  // in kFast and kExact: what its products read
};

// The work of the team of threads between two barriers.
struct Stage {
  enum Kind { kSerial, kPrepare, kMultiply, kAttend, kMerge } kind;
  int first, last;  // inputs (kPrepare), products (kMultiply) or steps (the others)
};

// Stages that run without a barrier between them. If there are several, one thread runs them.
struct Phase {
  int first, last;  // stages
};

struct Product {
  int matrix, input, out;
};

struct Program {
  std::vector<CiuicMatrix> matrices;
  std::vector<CiuicStep> steps;
  std::vector<int64_t> buffer_sizes;
  std::vector<Input> inputs;
  std::vector<Product> products;
  std::vector<Stage> stages;
  std::vector<Phase> phases;
  std::vector<std::vector<float>> signs;
  int argument_count = 0;
  int caches = 0;  // keys and values that the program reads, counted apart
  int64_t longest_rotation = 0;
};

// The query heads of an attention step, and how many of them share a key-value head.
inline int64_t query_heads(const Program& program, const CiuicStep& step) { return program.buffer_sizes[step.in] / step.size; }
inline int64_t shared_heads(const Program& program, const CiuicStep& step) { return query_heads(program, step) / step.heads; }

// Runs the program for `rows` tokens. Returns CIUIC_OK or CIUIC_NO_MEMORY.
int run_program(const Program& program, void* const* arguments, const CiuicCaches* caches, long rows, bool bf16, Mode mode,
                int threads);

}  // namespace ciuic

#endif
