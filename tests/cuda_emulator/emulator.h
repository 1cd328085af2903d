// CUDA C on a CPU: the parts of CUDA's language that the kernels of ffi/ use, in plain C++.
//
// build.py turns a kernel's source into C++ that includes this header. Each thread of a block, or
// of a cluster of blocks, is a fiber, which runs until it waits for others. So a launch is
// deterministic, and these mistakes end it with an error: threads that wait for ever, lanes of a
// warp that meet at different instructions, an access beyond the requested dynamic shared memory.
// Copies to shared memory arrive only when a thread waits for them, and shared memory starts as
// NaN.
//
// The PTX instructions that the kernels use are in ptx.cc. This machine has 4 SMs and the compute
// capability for which it is compiled, so that kernels take that GPU's paths.
#pragma once

#include <cuda_runtime.h>
// These headers of the toolkit have host functions too.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#ifndef EMULATED_CUDA_ARCH
#error "build.py says which architecture this is: 750, 800, 890 or 900"
#endif

namespace cuda_emulator {

// --- threads -------------------------------------------------------------------------------------

struct Block;

struct Thread {
  uint3 index;
  int number;  // index in its block
  Block* block;
};

// Returns the running thread.
Thread& thread();

// build.py replaces gridDim, blockDim, blockIdx and threadIdx by these.
const dim3& grid_dim();
const dim3& block_dim();
const uint3& block_index();
inline const uint3& thread_index() { return thread().index; }

// Runs `call(body)` in every thread of a grid. Returns false, with the reason on the standard
// error, if the kernel makes an error.
bool run(dim3 grid, dim3 block, size_t shared_bytes, int cluster, void (*call)(void*), void* body);

template <typename... Parameters, typename... Arguments>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                   Arguments&&... arguments) {
  int cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      cluster = config->attrs[i].val.clusterDim.x;
    }
    // All blocks of a cooperative launch run at the same time, as those of a cluster do.
    if (config->attrs[i].id == cudaLaunchAttributeCooperative) cluster = config->gridDim.x;
  }
  auto body = [&] { kernel(static_cast<Parameters>(arguments)...); };
  using Body = decltype(body);
  const bool right = run(config->gridDim, config->blockDim, config->dynamicSmemBytes, cluster,
                         [](void* body) { (*static_cast<Body*>(body))(); }, &body);
  return right ? cudaSuccess : cudaErrorLaunchFailure;
}

// build.py writes kernel<<<grid, block, shared_bytes, stream>>>(arguments...) as a call of this.
template <typename... Parameters>
auto launcher(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
              cudaStream_t) {
  return [=](auto&&... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    launch(&config, kernel, arguments...);
  };
}

// --- shared memory -------------------------------------------------------------------------------

void* dynamic_shared();
// Returns the block's array for the declaration that `declaration` identifies.
void* static_shared(const void* declaration, size_t bytes, size_t alignment);

uint32_t shared_offset(const void* pointer);  // a shared address as in PTX
void* shared_pointer(uint32_t address);

// --- waiting -------------------------------------------------------------------------------------

// Waits until `threads` threads of the block have arrived at barrier `id`; -1 means all living
// ones.
void barrier(int id, int threads);

// Operands of an instruction that all lanes of a mask execute together. The last lane to arrive
// executes it for all of them.
struct Lanes {
  void* of[32];      // each lane's operands, nullptr for a lane that takes no part
  uint32_t present;  // the lanes that take part
};
void together(const void* instruction, uint32_t mask, void (*execute)(const Lanes&), void* mine);

// --- inline PTX ----------------------------------------------------------------------------------

// An operand of an instruction: the value that it reads, and the place of its result.
struct Operand {
  uint64_t value = 0;
  void* result = nullptr;
  int bytes = 0;
};

template <typename T>
Operand input(const T& value) {
  Operand operand;
  if constexpr (std::is_pointer_v<T>) {
    operand.value = reinterpret_cast<uint64_t>(value);
  } else {
    static_assert(sizeof(T) <= 8);
    std::memcpy(&operand.value, &value, sizeof(T));
    if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) {
      operand.value = static_cast<uint64_t>(static_cast<int64_t>(value));
    }
  }
  return operand;
}

template <typename T>
Operand output(T& place) {
  Operand operand = input(place);
  operand.result = &place;
  operand.bytes = sizeof(T);
  return operand;
}

using Instruction = void (*)(Operand*);
// Returns what an asm statement does; ends the process if ptx.cc lacks it.
Instruction instruction(const char* ptx);

template <typename... Operands>
void execute(Instruction instruction, Operands... operands) {
  Operand all[sizeof...(operands) + 1] = {operands...};
  instruction(all);
}

}  // namespace cuda_emulator

#define EMULATED_PTX(text, ...)                                                                 \
  do {                                                                                          \
    static const cuda_emulator::Instruction emulated_ = cuda_emulator::instruction(text);       \
    cuda_emulator::execute(emulated_ __VA_OPT__(, ) __VA_ARGS__);                               \
  } while (false)

#define EMULATED_SHARED(name, ...)                                                              \
  static const char name##_declaration = 0;                                                     \
  auto& name = *static_cast<std::add_pointer_t<__VA_ARGS__>>(cuda_emulator::static_shared(      \
      &name##_declaration, sizeof(__VA_ARGS__), alignof(__VA_ARGS__)))

// --- CUDA's names --------------------------------------------------------------------------------

#undef __launch_bounds__
#undef __noinline__
#define __launch_bounds__(...)
#define __noinline__

using std::isfinite;

inline void __syncthreads() { cuda_emulator::barrier(0, -1); }
int __syncthreads_or(int predicate);
void __syncwarp(uint32_t mask = 0xffffffffu);

namespace cuda_emulator {
struct Shuffle {
  uint32_t value[2];
  int from;
};
void shuffle(uint32_t mask, Shuffle& mine);

template <typename T>
T shuffled(uint32_t mask, T value, int from) {
  static_assert(sizeof(T) <= 8);
  Shuffle mine = {{0, 0}, from};
  std::memcpy(mine.value, &value, sizeof(T));
  shuffle(mask, mine);
  std::memcpy(&value, mine.value, sizeof(T));
  return value;
}
}  // namespace cuda_emulator

template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int lanes) {
  return cuda_emulator::shuffled(mask, value, (cuda_emulator::thread().number % 32) ^ lanes);
}
template <typename T>
T __shfl_sync(uint32_t mask, T value, int from) {
  return cuda_emulator::shuffled(mask, value, from % 32);
}
uint32_t __reduce_max_sync(uint32_t mask, uint32_t value);
int __any_sync(uint32_t mask, int predicate);
uint32_t __ballot_sync(uint32_t mask, int predicate);

template <typename T>
T __ldg(const T* place) { return *place; }
template <typename T>
T __ldcg(const T* place) { return *place; }
template <typename T>
T __ldcs(const T* place) { return *place; }
template <typename T>
void __stcg(T* place, T value) { *place = value; }
template <typename T>
void __stcs(T* place, T value) { *place = value; }
template <typename T>
void __stwb(T* place, T value) { *place = value; }

inline size_t __cvta_generic_to_shared(const void* pointer) {
  return cuda_emulator::shared_offset(pointer);
}

namespace cuda_emulator {
template <typename To, typename From>
To bits(const From& from) {
  To to;
  static_assert(sizeof(to) == sizeof(from));
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
}  // namespace cuda_emulator

inline float __uint_as_float(uint32_t x) { return cuda_emulator::bits<float>(x); }
inline uint32_t __float_as_uint(float x) { return cuda_emulator::bits<uint32_t>(x); }
inline float __int_as_float(int x) { return cuda_emulator::bits<float>(x); }
inline int __float_as_int(float x) { return cuda_emulator::bits<int>(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
// Sums of products of both halves of `a` with two bytes of `b`.
inline uint32_t __dp2a_lo(uint32_t a, uint32_t b, uint32_t c) {
  return c + (a & 0xffff) * (b & 0xff) + (a >> 16) * (b >> 8 & 0xff);
}
inline uint32_t __dp2a_hi(uint32_t a, uint32_t b, uint32_t c) {
  return __dp2a_lo(a, b >> 16, c);
}
inline int atomicAdd(int* place, int value) {
  return __atomic_fetch_add(place, value, __ATOMIC_RELAXED);
}
uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector);

// These are exact where the GPU's are approximate; ftz is left out.
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / std::sqrt(double{x})); }
inline float __log2f(float x) { return std::log2(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
float __fmaf_rd(float x, float y, float z);
inline float rsqrtf(float x) { return __frsqrt_rn(x); }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline uint32_t max(uint32_t a, uint32_t b) { return a < b ? b : a; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a < b ? b : a; }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
