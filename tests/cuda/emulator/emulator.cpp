// Runs the kernels of cuda/ on the host. Every lane is a fiber, and blocks run one after the other.
//
// The emulator finds errors that a GPU may hide: the order of the lanes is shuffled with the launch's seed; shared
// memory starts as poison; the destination of an asynchronous copy is poison until its wait; a barrier that not all
// lanes reach is an error; global buffers lie between inaccessible pages.
#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

#include "linear.cu"
#include "transform.cu"
#include "decode.cu"
#include "encode.cu"

namespace emu {
namespace {

const size_t STACK = 256 * 1024, MAX_THREADS = 1024, MAX_SHARED = 232448;
const u8 POISON = 0xCD;

struct Copy { u8* to; const u8* from; };

struct Fiber {
  jmp_buf resume;
  bool started, finished;
  u32 parity;  // which of the warp's two exchange buffers comes next
  std::vector<std::vector<Copy>> groups;  // committed and unfinished, oldest first
  std::vector<Copy> open;  // issued, not yet committed
};
struct Barrier { u32 arrived, generation; };
struct Warp { Barrier barrier; u32 words[2][32][8]; };

struct Launch {
  u32 grid[2], threads, at[2];
  const void* parameters;
  void (*kernel)(const void*);
} launch;

std::vector<Fiber> fibers;
std::vector<Warp> warps;
Barrier block_wide;
u32 alive, current, progress;  // lanes not finished, the running lane, a counter of barrier events
u8* stacks = nullptr;
alignas(16) u8 shared_memory[MAX_SHARED];
jmp_buf scheduler;
sigjmp_buf fault_exit;
ucontext_t fiber_context;

// Returns to the scheduler; the lane goes on at its next turn.
__attribute__((noinline)) void yield() {
  if (_setjmp(fibers[current].resume) == 0) _longjmp(scheduler, 1);
}

void wait_at(Barrier& barrier, u32 expected) {
  const u32 generation = barrier.generation;
  ++progress;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) yield();
  ++progress;
}

// The body of a fiber: the kernel for one lane.
void run_fiber() {
  launch.kernel(launch.parameters);
  Fiber& self = fibers[current];
  self.finished = true;
  ++progress;
  --alive;
  _longjmp(scheduler, 1);
}

// Switches to a lane's own stack for the first time. Later switches use _longjmp, which makes no system call.
void start(u32 index) {
  getcontext(&fiber_context);
  fiber_context.uc_stack.ss_sp = stacks + index * STACK;
  fiber_context.uc_stack.ss_size = STACK;
  fiber_context.uc_link = nullptr;
  makecontext(&fiber_context, run_fiber, 0);
  setcontext(&fiber_context);
}

// Runs one block. 0, or 2 if no lane can advance: some lanes wait at a barrier that the others never reach.
int run_block(std::mt19937& random) {
  std::memset(shared_memory, POISON, sizeof shared_memory);
  fibers.assign(launch.threads, Fiber{});
  warps.assign(launch.threads / 32, Warp{});
  block_wide = Barrier{};
  alive = launch.threads;
  static std::vector<u32> order;
  order.resize(launch.threads);
  for (u32 i = 0; i < launch.threads; ++i) order[i] = i;
  for (u32 i = launch.threads - 1; i > 0; --i) std::swap(order[i], order[random() % (i + 1)]);
  while (alive) {
    const u32 before = progress;
    for (volatile u32 i = 0; i < launch.threads; ++i) {
      if (fibers[order[i]].finished) continue;
      current = order[i];
      if (_setjmp(scheduler) == 0) {
        if (fibers[current].started) _longjmp(fibers[current].resume, 1);
        fibers[current].started = true;
        start(current);
      }
    }
    if (progress == before) return 2;
  }
  return 0;
}

void on_fault(int) { siglongjmp(fault_exit, 1); }

}  // namespace

u32 thread() { return current; }
u32 threads() { return launch.threads; }
u32 block(int axis) { return launch.at[axis]; }
u32 blocks() { return launch.grid[0]; }
u8* dynamic_shared() { return shared_memory; }
void block_barrier() { wait_at(block_wide, launch.threads); }
void warp_barrier() { wait_at(warps[current / 32].barrier, 32); }

const u32 (*exchange(const u32* own_words, int words))[8] {
  Warp& warp = warps[current / 32];
  Fiber& self = fibers[current];
  u32(*buffer)[8] = warp.words[self.parity];
  self.parity ^= 1;  // two buffers, because a lane can be one exchange ahead of the slowest reader, but not two
  std::memcpy(buffer[current % 32], own_words, 4 * words);
  warp_barrier();
  return buffer;
}

void copy_issue(u8* shared, const u8* global) {
  std::memset(shared, POISON, 16);
  fibers[current].open.push_back({shared, global});
}
void copy_commit() {
  fibers[current].groups.push_back(fibers[current].open);
  fibers[current].open.clear();
}
void copy_wait(int pending) {
  auto& groups = fibers[current].groups;
  while ((int)groups.size() > pending) {
    for (const Copy& copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
    groups.erase(groups.begin());
  }
}
}  // namespace emu

namespace {
template <class P, void (*kernel)(const P&)>
void call(const void* parameters) { kernel(*(const P*)parameters); }

struct Entry { const char* name; void (*call)(const void*); size_t bytes; };
#define ENTRY(P, name) {#name, call<P, name>, sizeof(P)}
const Entry entries[] = {
    ENTRY(CiuicLinear, linear_bytes_n4), ENTRY(CiuicLinear, linear_bytes_n8),
    ENTRY(CiuicLinear, linear_half_n16), ENTRY(CiuicLinear, linear_half_n32),
    ENTRY(CiuicTransform, transform),
    ENTRY(CiuicDecode, decode_rows),         ENTRY(CiuicEmbedding, embedding_rows),
    ENTRY(CiuicLowRank, lowrank_columns),    ENTRY(CiuicEncode, encode_h2),
    ENTRY(CiuicEncode, encode_h3),           ENTRY(CiuicEncode, encode_h4),
    ENTRY(CiuicEncode, encode_h5),           ENTRY(CiuicEncode, encode_h6),
    ENTRY(CiuicEncode, encode_h7),           ENTRY(CiuicEncode, encode_h8),
    ENTRY(CiuicEncode, encode_h9),           ENTRY(CiuicEncode, encode_h10),
    ENTRY(CiuicEncode, encode_h11),          ENTRY(CiuicEncode, encode_h12),
    ENTRY(CiuicEncode, encode_h14),          ENTRY(CiuicEncode, encode_h16)};
}  // namespace

extern "C" {

// Launches a kernel. Returns 0; 1 for an unknown kernel or a parameter block of another size; 2 if some lanes never
// reached a barrier; 3 if memory outside every buffer was touched; 4 for an impossible launch.
int emu_launch(const char* name, u32 grid_x, u32 grid_y, u32 threads, u32 shared_bytes, const void* parameters,
               size_t parameter_bytes, u32 seed) {
  if (threads == 0 || threads % 32 || threads > emu::MAX_THREADS || shared_bytes > emu::MAX_SHARED || !grid_x || !grid_y)
    return 4;
  const Entry* entry = nullptr;
  for (const Entry& candidate : entries)
    if (!std::strcmp(candidate.name, name)) entry = &candidate;
  if (!entry || entry->bytes != parameter_bytes) return 1;
  if (!emu::stacks)
    emu::stacks = (u8*)mmap(nullptr, emu::STACK * emu::MAX_THREADS, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  static u8 signal_stack[65536];
  stack_t stack = {signal_stack, 0, sizeof signal_stack}, old_stack;
  sigaltstack(&stack, &old_stack);
  struct sigaction action = {}, old_segv, old_bus;
  action.sa_handler = emu::on_fault;
  action.sa_flags = SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);

  std::mt19937 random(seed);
  volatile int status = 0;
  if (sigsetjmp(emu::fault_exit, 1) == 0) {
    emu::launch = {{grid_x, grid_y}, threads, {0, 0}, parameters, entry->call};
    for (u32 i = 0; i < grid_x * grid_y && !status; ++i) {
      // Blocks run in a scattered order, because no result may depend on their order.
      const u32 index = (u32)(((u64)i * 7919 + seed) % (grid_x * grid_y));
      const u32 at = (grid_x * grid_y) % 7919 ? index : i;
      emu::launch.at[0] = at % grid_x;
      emu::launch.at[1] = at / grid_x;
      status = emu::run_block(random);
    }
  } else {
    status = 3;
  }
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  sigaltstack(&old_stack, nullptr);
  return status;
}

// `bytes` of memory that ends (rounded up to 16 bytes) at an inaccessible page; the page before the mapping is
// inaccessible too.
void* emu_alloc(size_t bytes) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), rounded = (bytes + 15) / 16 * 16;
  const size_t body = (rounded + page - 1) / page * page;
  u8* base = (u8*)mmap(nullptr, body + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == (u8*)MAP_FAILED) return nullptr;
  mprotect(base, page, PROT_NONE);
  mprotect(base + page + body, page, PROT_NONE);
  return base + page + body - rounded;
}
void emu_free(void* memory, size_t bytes) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), rounded = (bytes + 15) / 16 * 16;
  const size_t body = (rounded + page - 1) / page * page;
  munmap((u8*)memory + rounded - body - page, body + 2 * page);
}

size_t emu_parameter_bytes(const char* name) {
  for (const Entry& entry : entries)
    if (!std::strcmp(entry.name, name)) return entry.bytes;
  return 0;
}

// The offset of a member, by "Struct.member", for the comparison with the Python mirrors; -1 if there is none.
long emu_offset(const char* name) {
#define MEMBER(S, m) if (!std::strcmp(name, #S "." #m)) return (long)__builtin_offsetof(S, m)
  MEMBER(CiuicPart, blob); MEMBER(CiuicPart, group_offset); MEMBER(CiuicPart, y); MEMBER(CiuicPart, addend);
  MEMBER(CiuicPart, y_stride); MEMBER(CiuicPart, rows); MEMBER(CiuicPart, groups); MEMBER(CiuicPart, first_block);
  MEMBER(CiuicPart, y_type);
  MEMBER(CiuicLinear, part); MEMBER(CiuicLinear, x); MEMBER(CiuicLinear, x_scale); MEMBER(CiuicLinear, x_sum);
  MEMBER(CiuicLinear, pair_expert); MEMBER(CiuicLinear, pair_x); MEMBER(CiuicLinear, pair_y); MEMBER(CiuicLinear, parts);
  MEMBER(CiuicLinear, cols_padded); MEMBER(CiuicLinear, pairs); MEMBER(CiuicLinear, experts);
  MEMBER(CiuicLinear, group_slot); MEMBER(CiuicLinear, x_width);
  MEMBER(CiuicTransform, x); MEMBER(CiuicTransform, input_factor);
  MEMBER(CiuicTransform, out); MEMBER(CiuicTransform, out_scale);
  MEMBER(CiuicTransform, out_sum); MEMBER(CiuicTransform, x_stride); MEMBER(CiuicTransform, out_stride);
  MEMBER(CiuicTransform, cols); MEMBER(CiuicTransform, cols_padded); MEMBER(CiuicTransform, log2_block);
  MEMBER(CiuicTransform, seed); MEMBER(CiuicTransform, x_type); MEMBER(CiuicTransform, mode);
  MEMBER(CiuicDecode, blob); MEMBER(CiuicDecode, group_offset); MEMBER(CiuicDecode, out); MEMBER(CiuicDecode, rows);
  MEMBER(CiuicDecode, cols_padded); MEMBER(CiuicDecode, row_begin); MEMBER(CiuicDecode, row_end);
  MEMBER(CiuicDecode, out_type); MEMBER(CiuicDecode, reserved);
  MEMBER(CiuicEmbedding, blob); MEMBER(CiuicEmbedding, group_offset); MEMBER(CiuicEmbedding, tokens);
  MEMBER(CiuicEmbedding, input_factor); MEMBER(CiuicEmbedding, out);
  MEMBER(CiuicEmbedding, rows); MEMBER(CiuicEmbedding, cols);
  MEMBER(CiuicEmbedding, cols_padded); MEMBER(CiuicEmbedding, log2_block); MEMBER(CiuicEmbedding, seed);
  MEMBER(CiuicEmbedding, out_type);
  MEMBER(CiuicLowRank, blob); MEMBER(CiuicLowRank, group_offset); MEMBER(CiuicLowRank, z); MEMBER(CiuicLowRank, out);
  MEMBER(CiuicLowRank, rank); MEMBER(CiuicLowRank, cols_padded);
  MEMBER(CiuicEncode, targets); MEMBER(CiuicEncode, codes); MEMBER(CiuicEncode, decoded); MEMBER(CiuicEncode, scratch);
  MEMBER(CiuicEncode, tiles);
  return -1;
}

// Compares the kernels' ways to compute a level with the header's, over all windows. Returns the number of differences.
int emu_wrong_levels() {
  int wrong = 0;
  for (u32 window = 0; window < 65536; ++window) {
    const int level = ciuic_level(window);
    const u32 hash = ciuic_hash(window);
    const float shifted = (level_plus_8192(window) - clamp_target(0.0f)) * 16.0f;
    wrong += half_to_float((u16)half_levels(hash, 0)) != (float)level || shifted != (float)level;
  }
  return wrong;
}
}
