// PTX instructions without a C++ name: asynchronous copies, and barriers over a part of a block.
#pragma once

#include <cstdint>

// Copies kBytes from global to shared memory. On sm_80 and later, copies of 4 bytes or more are
// asynchronous, and complete after async_copies_wait. Others are complete on return.
template <int kBytes>
__device__ __forceinline__ void async_copy(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global)
                 : "memory");
    return;
  } else if constexpr (kBytes == 4) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(global) : "memory");
    return;
  }
#endif
  if constexpr (kBytes == 16) {
    *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
  } else if constexpr (kBytes == 4) {
    *static_cast<uint32_t*>(shared) = *static_cast<const uint32_t*>(global);
  } else {
    static_assert(kBytes == 2);
    *static_cast<uint16_t*>(shared) = *static_cast<const uint16_t*>(global);
  }
}

// Copies 16 bytes from global memory to a shared address, or writes zeros there unless `exists`,
// asynchronously like async_copy. With kWholeLine, L2 prefetches the 128 bytes around them.
template <bool kWholeLine = false>
__device__ __forceinline__ void async_copy_or_zero(uint32_t shared, const void* global,
                                                   bool exists) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kWholeLine) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared),
                 "l"(global), "r"(exists ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(exists ? 16 : 0)
                 : "memory");
  }
#else
  const uint4 value = exists ? *static_cast<const uint4*>(global) : uint4{};
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
#endif
}

// Ends a group of this thread's copies; an empty group counts as a group too.
__device__ __forceinline__ void async_copies_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the `pending` newest groups of this thread (0 to 3) are still in flight.
__device__ __forceinline__ void async_copies_wait(int pending) {
#if __CUDA_ARCH__ >= 800
  switch (pending) {  // the instruction takes only a constant
    case 0:
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      break;
    case 1:
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      break;
    case 2:
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      break;
    default:
      asm volatile("cp.async.wait_group 3;" ::: "memory");
  }
#endif
}

__device__ __forceinline__ void async_copies_wait_all() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Waits at a barrier of `threads` threads, in whole warps. `id` is 1 to 15; 0 is __syncthreads.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- blocks that wait for each other -------------------------------------------------------------

// Increments a counter in global memory, once for each block. A block that has waited for the count
// sees what this block's threads wrote before the barrier that precedes the call.
__device__ __forceinline__ void count_up(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Waits until the counter has reached `count`. All blocks that increment it must be resident.
__device__ __forceinline__ void wait_for_count(const unsigned* counter, unsigned count) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      ".reg .u32 seen;\n"
      "again:\n"
      "ld.acquire.gpu.global.u32 seen, [%0];\n"
      "setp.ge.u32 done, seen, %1;\n"
      "@!done bra again;\n"
      "}\n" ::"l"(counter),
      "r"(count)
      : "memory");
}

// --- sm_90 and later: bulk copies ----------------------------------------------------------------

#if __CUDA_ARCH__ >= 900
#define JAXFUSED_SM90(...) __VA_ARGS__
#else
#define JAXFUSED_SM90(...)  // empty, because older GPUs never call it
#endif

// Whether the GPU that this is compiled for has bulk copies and clusters.
#if __CUDA_ARCH__ >= 900
constexpr bool kHasBulkCopies = true;
#else
constexpr bool kHasBulkCopies = false;
#endif

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Initialises a barrier. Its phase ends when `arrivals` threads have arrived and the bytes that
// they announced have been copied.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals = 1) {
  JAXFUSED_SM90(
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                   "r"(arrivals) : "memory"));
}

// Orders this thread's earlier accesses to shared memory before bulk copies into it that this
// thread starts, or another one after a barrier.
__device__ __forceinline__ void bulk_copies_fence() {
  JAXFUSED_SM90(asm volatile("fence.proxy.async.shared::cta;" :: : "memory"));
}

// Makes the barriers that this thread has initialised visible to bulk copies.
__device__ __forceinline__ void mbarrier_init_fence() {
  JAXFUSED_SM90(asm volatile("fence.mbarrier_init.release.cluster;" :: : "memory"));
  bulk_copies_fence();
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  JAXFUSED_SM90(asm volatile(
      "mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory"));
}

__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  JAXFUSED_SM90(asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes) : "memory"));
}

// Waits until the phase of this parity has ended.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  JAXFUSED_SM90(
      asm volatile("{\n"
                   ".reg .pred done;\n"
                   "again:\n"
                   "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                   "@!done bra again;\n"
                   "}\n" ::"r"(shared_address(barrier)),
                   "r"(parity) : "memory"));
}

// Returns a cache policy for a copy: L2 evicts the lines read by it after all others.
__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy = 0;
  JAXFUSED_SM90(asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy)));
  return policy;
}

// Copies `bytes` bytes; `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier, uint64_t policy) {
  JAXFUSED_SM90(asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy) : "memory"));
}

__device__ __forceinline__ void bulk_copy(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier) {
  JAXFUSED_SM90(asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)) : "memory"));
}

// --- sm_90 and later: clusters of blocks ---------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank = 0;
  JAXFUSED_SM90(asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank)));
  return rank;
}

// Returns the address in block `rank` of the cluster that corresponds to `shared` in this block.
__device__ __forceinline__ uint32_t cluster_address(const void* shared, uint32_t rank) {
  uint32_t address = 0;
  JAXFUSED_SM90(
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)),
          "r"(rank)));
  return address;
}

// Arrives at the cluster's barrier, without making writes visible; cluster_wait must follow.
__device__ __forceinline__ void cluster_arrive() {
  JAXFUSED_SM90(asm volatile("barrier.cluster.arrive.relaxed.aligned;" :: : "memory"));
}

__device__ __forceinline__ void cluster_wait() {
  JAXFUSED_SM90(asm volatile("barrier.cluster.wait.acquire.aligned;" :: : "memory"));
}

// Waits for all threads of the cluster.
__device__ __forceinline__ void cluster_sync() {
  JAXFUSED_SM90(asm volatile("barrier.cluster.arrive.release.aligned;" :: : "memory");
                asm volatile("barrier.cluster.wait.acquire.aligned;" :: : "memory"));
}

// Stores a float to a cluster address and reports its 4 bytes to an mbarrier of the same block.
__device__ __forceinline__ void cluster_store(uint32_t address, float value, uint32_t barrier) {
  JAXFUSED_SM90(asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
          address),
      "f"(value), "r"(barrier) : "memory"));
}

__device__ __forceinline__ float cluster_load(uint32_t address) {
  float value = 0.0f;
  JAXFUSED_SM90(asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address)));
  return value;
}
