// The instructions that C++ has no name for: asynchronous copies and barriers over part of a block.
#pragma once

#include <cstdint>

// Copies kBytes from global to shared memory, behind the thread's back where the GPU can (sm_80 and
// later, 4 bytes or more): the copy is complete once async_copies_wait says so. Elsewhere it is
// complete on return.
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

// Ends a group of this thread's copies; an empty group is a group too.
__device__ __forceinline__ void async_copies_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `pending` of this thread's newest groups (0 to 3) are still under way.
__device__ __forceinline__ void async_copies_wait(int pending) {
#if __CUDA_ARCH__ >= 800
  switch (pending) {  // the instruction takes a constant
    case 3:
      asm volatile("cp.async.wait_group 3;" ::: "memory");
      break;
    case 2:
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      break;
    case 1:
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      break;
    default:
      asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
#endif
}

// A barrier of its own (id 1 to 15; 0 is __syncthreads) for `threads` threads, whole warps.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
