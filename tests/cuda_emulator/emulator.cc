// Fibers, barriers and shared memory of emulator.h, and the part of CUDA's runtime that handlers call.
#include "emulator.h"

#include <sys/mman.h>
#include <xmmintrin.h>

#include <algorithm>
#include <cfenv>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "emulator_internal.h"

// Switches from the running fiber, whose stack pointer goes to *from, to the one suspended at `to`.
// Only the registers that a callee must preserve are on the stack (x86-64, System V).
extern "C" void cuda_emulator_switch(void** from, void* to);
asm(R"(
.text
.globl cuda_emulator_switch
.hidden cuda_emulator_switch
.type cuda_emulator_switch, @function
cuda_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_emulator_switch, .-cuda_emulator_switch
)");

namespace cuda_emulator {
namespace {

constexpr int kMaxCluster = 16;
// Bytes of shared memory that a block may have, by architecture.
constexpr size_t kSharedOptin = 1024 * (EMULATED_CUDA_ARCH >= 900   ? 227
                                        : EMULATED_CUDA_ARCH >= 860 ? 99
                                        : EMULATED_CUDA_ARCH >= 800 ? 163
                                                                    : 64);
constexpr size_t kStatic = 64 * 1024;
constexpr size_t kGuard = 1024;  // bytes behind the dynamic shared memory that must stay unwritten
constexpr size_t kArena = 320 * 1024;
constexpr size_t kStack = 128 * 1024;
constexpr unsigned char kUnwritten = 0xff;  // shared memory starts as NaN
static_assert(kSharedOptin + kGuard + kStatic <= kArena);

alignas(1024) char arenas[kMaxCluster * kArena];

// Launches run one at a time: the state below belongs to one launch.
std::mutex launches;
dim3 grid_size, block_size;
std::vector<Block> blocks;    // blocks of the running cluster
std::vector<Fiber> fibers;    // fibers of all its threads
size_t running;               // index of the running fiber
size_t living;                // fibers that have not ended
size_t dynamic_bytes;
std::map<const void*, size_t> statics;  // offsets of the kernel's declared arrays
size_t static_end;
uint64_t steps;               // grows whenever a thread advances past a wait or ends
int cluster_arrived;
uint64_t cluster_phase;
std::string failure;
void* main_stack;
void (*entry)(void*);
void* entry_body;

std::vector<char*> stacks;

char* stack_of(size_t fiber) {
  while (stacks.size() <= fiber) {
    void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    stacks.push_back(static_cast<char*>(memory));
  }
  return stacks[fiber];
}

void leave_for(size_t next) {
  Fiber& from = fibers[running];
  running = next;
  cuda_emulator_switch(&from.stack, fibers[next].stack);
}

[[noreturn]] void end() {
  void* nowhere;
  cuda_emulator_switch(&nowhere, main_stack);
  std::abort();
}

size_t next_living() {
  size_t next = running;
  do next = next + 1 == fibers.size() ? 0 : next + 1;
  while (!fibers[next].lives);
  return next;
}

void start() {
  entry(entry_body);
  Fiber& fiber = fibers[running];
  copy_all(fiber);
  fiber.lives = false;
  fiber.thread.block->living--;
  living--;
  steps++;
  if (living == 0) end();
  leave_for(next_living());
  std::abort();
}

void prepare(Fiber& fiber, size_t number) {
  auto* top = reinterpret_cast<void**>(stack_of(number) + kStack);
  *--top = nullptr;  // the stack is aligned as at a function's start
  *--top = reinterpret_cast<void*>(start);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack = top;
}

void run_cluster(dim3 first, int cluster, dim3 block) {
  const int threads = block.x * block.y * block.z;
  blocks.assign(cluster, {});
  fibers.assign(static_cast<size_t>(cluster) * threads, {});
  running = 0;
  living = fibers.size();
  cluster_arrived = 0;
  cluster_phase = 0;
  for (int rank = 0; rank < cluster; ++rank) {
    char* arena = arenas + rank * kArena;
    std::memset(arena, kUnwritten, dynamic_bytes + kGuard);
    std::memset(arena + kSharedOptin + kGuard, kUnwritten, kStatic);
  }
  for (int rank = 0; rank < cluster; ++rank) {
    Block& of = blocks[rank];
    of.index = {first.x + rank, first.y, first.z};
    of.rank = rank;
    of.living = threads;
    of.warps.resize((threads + 31) / 32);
    for (int i = 0; i < threads; ++i) {
      const size_t number = static_cast<size_t>(rank) * threads + i;
      Fiber& fiber = fibers[number];
      fiber.lives = true;
      fiber.thread.block = &of;
      fiber.thread.number = i;
      fiber.thread.index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
      prepare(fiber, number);
    }
  }
  cuda_emulator_switch(&main_stack, fibers[0].stack);
  for (int rank = 0; rank < cluster && failure.empty(); ++rank) {
    const char* behind = arenas + rank * kArena + dynamic_bytes;
    if (std::any_of(behind, behind + kGuard,
                    [](char byte) { return static_cast<unsigned char>(byte) != kUnwritten; })) {
      failure = "a block wrote beyond its dynamic shared memory";
    }
  }
}

}  // namespace

Fiber& fiber() { return fibers[running]; }
Block& block_of_cluster(uint32_t rank) {
  if (rank >= blocks.size()) fail("a block of a cluster has a rank that the cluster has not");
  return blocks[rank];
}
Thread& thread() { return fibers[running].thread; }
const dim3& grid_dim() { return grid_size; }
const dim3& block_dim() { return block_size; }
const uint3& block_index() { return thread().block->index; }

void fail(const std::string& why) {
  if (failure.empty()) {
    const Thread& at = thread();
    failure = why + " (thread " + std::to_string(at.number) + " of block " +
              std::to_string(at.block->index.x) + ", " + std::to_string(at.block->index.y) + ", " +
              std::to_string(at.block->index.z) + ")";
  }
  end();
}

void wait_until(const char* what, bool (*done)(void*), void* argument) {
  uint64_t seen = steps;
  size_t turns = 0;
  while (!done(argument)) {
    if (steps != seen) {
      seen = steps;
      turns = 0;
    } else if (++turns > 2) {
      // Every thread had a turn since, and none advanced.
      fail(std::string("all threads wait for ever, this one at ") + what);
    }
    const size_t next = next_living();
    if (next != running) leave_for(next);
  }
  steps++;
}

// Enables subnormal numbers while it lives; XLA's threads flush them to zero.
class WithSubnormals {
 public:
  WithSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~WithSubnormals() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kDefault = 0x1f80;
  unsigned before_;
};

bool run(dim3 grid, dim3 block, size_t shared_bytes, int cluster, void (*call)(void*), void* body) {
  const std::lock_guard<std::mutex> lock(launches);
  const WithSubnormals subnormals;
  grid_size = grid;
  block_size = block;
  dynamic_bytes = shared_bytes;
  statics.clear();
  static_end = kSharedOptin + kGuard;
  failure.clear();
  entry = call;
  entry_body = body;
  if (shared_bytes > kSharedOptin || cluster > kMaxCluster || grid.x % cluster != 0 ||
      block.x * block.y * block.z > 1024 || grid.x * grid.y * grid.z == 0 ||
      block.x * block.y * block.z == 0) {
    failure = "no GPU launches such a grid";
  }
  for (unsigned z = 0; z < grid.z && failure.empty(); ++z) {
    for (unsigned y = 0; y < grid.y && failure.empty(); ++y) {
      for (unsigned x = 0; x < grid.x && failure.empty(); x += cluster) {
        run_cluster({x, y, z}, cluster, block);
      }
    }
  }
  if (!failure.empty()) std::fprintf(stderr, "cuda_emulator: %s\n", failure.c_str());
  return failure.empty();
}

// --- shared memory -------------------------------------------------------------------------------

void* dynamic_shared() { return arenas + thread().block->rank * kArena; }

void* static_shared(const void* declaration, size_t bytes, size_t alignment) {
  auto found = statics.find(declaration);
  if (found == statics.end()) {
    static_end = (static_end + alignment - 1) / alignment * alignment;
    found = statics.emplace(declaration, static_end).first;
    static_end += bytes;
    if (static_end > kArena) fail("there is more static shared memory than a block can have");
  }
  return arenas + thread().block->rank * kArena + found->second;
}

uint32_t shared_offset(const void* pointer) {
  const ptrdiff_t offset = static_cast<const char*>(pointer) - arenas;
  if (offset < 0 || offset >= static_cast<ptrdiff_t>(sizeof arenas)) {
    fail("an address of shared memory lies elsewhere");
  }
  return static_cast<uint32_t>(offset);
}

void* shared_pointer(uint32_t address) {
  if (address >= sizeof arenas) fail("an address lies beyond shared memory");
  return arenas + address;
}

uint32_t address_in_block(uint32_t address, uint32_t rank) {
  block_of_cluster(rank);
  return address % kArena + rank * kArena;
}

// --- waiting -------------------------------------------------------------------------------------

void barrier(int id, int threads) {
  Block& block = *thread().block;
  Barrier& mine = block.barriers[id];
  struct Waiting {
    Block* block;
    Barrier* barrier;
    int threads;
    uint64_t phase;
  } waiting = {&block, &mine, threads, mine.phase};
  mine.arrived++;
  // Threads that have ended count as arrived.
  const auto done = [](void* argument) {
    Waiting& at = *static_cast<Waiting*>(argument);
    if (at.barrier->phase != at.phase) return true;
    if (at.barrier->arrived < (at.threads < 0 ? at.block->living : at.threads)) return false;
    at.barrier->arrived = 0;
    at.barrier->phase++;
    return true;
  };
  wait_until("a barrier of its block", done, &waiting);
}

void cluster_arrive() {
  fiber().cluster_phase = cluster_phase;
  cluster_arrived++;
}

void cluster_wait() {
  const auto done = [](void*) {
    if (cluster_phase != fiber().cluster_phase) return true;
    if (cluster_arrived < static_cast<int>(living)) return false;
    cluster_arrived = 0;
    cluster_phase++;
    return true;
  };
  wait_until("a barrier of its cluster", done, nullptr);
}

void together(const void* instruction, uint32_t mask, void (*execute)(const Lanes&), void* mine) {
  Thread& at = thread();
  Warp& warp = at.block->warps[at.number / 32];
  const uint32_t lane = at.number % 32;
  if (!(mask >> lane & 1)) fail("a lane is not in the mask of its own instruction");
  Meeting& meeting = mask == 0xffffffffu ? warp.of_all : warp.of_some[mask];
  if (meeting.lanes.present == 0) meeting.instruction = instruction;
  if (meeting.instruction != instruction) fail("lanes of a warp meet at different instructions");
  meeting.lanes.of[lane] = mine;
  meeting.lanes.present |= 1u << lane;
  if (meeting.lanes.present == mask) {
    execute(meeting.lanes);
    meeting.lanes = {};
    meeting.phase++;
    steps++;
    return;
  }
  struct Waiting {
    Meeting* meeting;
    uint64_t phase;
  } waiting = {&meeting, meeting.phase};
  const auto done = [](void* argument) {
    const Waiting& at = *static_cast<Waiting*>(argument);
    return at.meeting->phase != at.phase;
  };
  wait_until("an instruction of its whole warp", done, &waiting);
}

void shuffle(uint32_t mask, Shuffle& mine) {
  static const char here = 0;
  const auto exchange = [](const Lanes& lanes) {
    uint32_t values[32][2] = {};
    for (int lane = 0; lane < 32; ++lane) {
      if (lanes.of[lane]) std::memcpy(values[lane], static_cast<Shuffle*>(lanes.of[lane])->value, 8);
    }
    for (int lane = 0; lane < 32; ++lane) {
      if (!lanes.of[lane]) continue;
      Shuffle& to = *static_cast<Shuffle*>(lanes.of[lane]);
      if (!(lanes.present >> to.from & 1)) fail("a lane reads one that takes no part");
      std::memcpy(to.value, values[to.from], 8);
    }
  };
  together(&here, mask, exchange, &mine);
}

}  // namespace cuda_emulator

// --- CUDA's names --------------------------------------------------------------------------------

using namespace cuda_emulator;

void __syncwarp(uint32_t mask) {
  static const char here = 0;
  together(&here, mask, [](const Lanes&) {}, nullptr);
}

uint32_t __reduce_max_sync(uint32_t mask, uint32_t value) {
  static const char here = 0;
  const auto reduce = [](const Lanes& lanes) {
    uint32_t most = 0;
    for (void* of : lanes.of) {
      if (of) most = std::max(most, *static_cast<uint32_t*>(of));
    }
    for (void* of : lanes.of) {
      if (of) *static_cast<uint32_t*>(of) = most;
    }
  };
  together(&here, mask, reduce, &value);
  return value;
}

int __any_sync(uint32_t mask, int predicate) {
  return __reduce_max_sync(mask, predicate != 0) != 0;
}

uint32_t __ballot_sync(uint32_t mask, int predicate) {
  static const char here = 0;
  const auto vote = [](const Lanes& lanes) {
    uint32_t votes = 0;
    for (int i = 0; i < 32; ++i) {
      if (lanes.of[i] && *static_cast<uint32_t*>(lanes.of[i])) votes |= 1u << i;
    }
    for (void* of : lanes.of) {
      if (of) *static_cast<uint32_t*>(of) = votes;
    }
  };
  uint32_t value = predicate != 0;
  together(&here, mask, vote, &value);
  return value;
}

int __syncthreads_or(int predicate) {
  Block& block = *thread().block;
  __syncthreads();
  block.vote = 0;
  __syncthreads();
  block.vote |= predicate != 0;
  __syncthreads();
  return block.vote;
}

uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = selector >> 4 * i & 0xf;
    uint32_t byte = bytes >> 8 * (pick & 7) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << 8 * i;
  }
  return result;
}

float __fmaf_rd(float x, float y, float z) {
  const int mode = std::fegetround();
  std::fesetround(FE_DOWNWARD);
  volatile float a = x, b = y, c = z;
  const float result = std::fma(a, b, c);
  std::fesetround(mode);
  return result;
}

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 4; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = kSharedOptin; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    case cudaDevAttrClusterLaunch: *value = EMULATED_CUDA_ARCH >= 900; break;
    case cudaDevAttrComputeCapabilityMajor: *value = EMULATED_CUDA_ARCH / 100; break;
    case cudaDevAttrComputeCapabilityMinor: *value = EMULATED_CUDA_ARCH / 10 % 10; break;
    default: return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads,
                                                          size_t shared_bytes) {
  const size_t fitting = (kSharedOptin + 1024) / (shared_bytes + 1024);
  *blocks = std::max<int>(1, std::min<size_t>(2048 / threads, fitting));
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
  *clusters = 2;
  return cudaSuccess;
}

// There is no TMA here, which would need descriptions of matrices.
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  *function = nullptr;
  return cudaErrorNotSupported;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

const char* cudaGetErrorString(cudaError_t) { return "the emulated kernel made an error, see stderr"; }

}  // extern "C"
