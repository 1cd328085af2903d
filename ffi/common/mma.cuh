// Matrix products of a warp on tensor cores: wrappers of the instructions.
//
// An instruction gives D[16, 8] += A[16, 16] B[16, 8]. With g = lane / 4 and q = lane % 4, a lane
// has
//     A[g, 2q]  A[g + 8, 2q]  A[g, 2q + 8]  A[g + 8, 2q + 8]     a register each: the value and the
//     B[2q, g]  B[2q + 8, g]                                     next one along k
//     D[g, 2q]  D[g, 2q + 1]  D[g + 8, 2q]  D[g + 8, 2q + 1]     in float32
// so two adjacent tiles of D, rounded, have the layout of A.
//
// For float32 it gives D[16, 8] += A[16, 8] B[8, 8] of values rounded to tf32, and a lane has
//     A[g, q]  A[g + 8, q]  A[g, q + 4]  A[g + 8, q + 4]
//     B[q, g]  B[q + 4, g]
// so one tile of D, rounded, has the layout of A with its columns in the order 0, 2, 4, 6, 1, 3, 5,
// 7. The rows of B must be in this order too.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx.cuh"

// Whether the GPU that this is compiled for multiplies values of type T on tensor cores.
template <typename T>
constexpr bool kHasProducts =
#if __CUDA_ARCH__ >= 800
    true;
#else
    std::is_same_v<T, __half>;
#endif

// Length of the summed axis in one instruction: columns of A and rows of B.
template <typename T>
constexpr int kDepth = 32 / sizeof(T);

// Whether the blocks of the GPU that this is compiled for have at most 64 KB of shared memory.
constexpr bool kHasLittleSharedMemory =
#if __CUDA_ARCH__ >= 800
    false;
#else
    true;
#endif

template <typename T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else if constexpr (std::is_same_v<T, float>) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#else
  static_assert(std::is_same_v<T, __half>);
  asm("{\n"
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%8}, {%0, %1, %2, %3};\n"
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%6, %7}, {%9}, {%0, %1, %2, %3};\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Rounds a float32 to the nearest tf32, ties away from zero. The mma instruction itself would
// truncate the excess bits, with twice the error and always towards zero.
__device__ __forceinline__ uint32_t rounded_to_tf32(uint32_t x) {
  uint32_t y = x;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "r"(x));
#endif
  return y;
}

// Loads four matrices of 8 rows of 16 bytes. Lane 8 i + r holds the address of row r of matrix i,
// and lane 4 r + q receives bytes 4 q to 4 q + 3 of row r of each matrix.
__device__ __forceinline__ void load_matrices(uint32_t (&matrices)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row)
               : "memory");
}

// Loads four matrices transposed: lane 4 r + q receives values 2q and 2q + 1 of column r of each.
__device__ __forceinline__ void load_transposed(uint32_t (&matrices)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row)
               : "memory");
}

// Transposes a matrix of 8 rows of 8 values of 16 bits, of which lane 4 r + q has values 2 q and
// 2 q + 1 of row r.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t of_column;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(of_column) : "r"(pair));
  return of_column;
}

__device__ __forceinline__ void store_shared(uint32_t shared, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t shared, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t shared) {
  uint2 value;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(shared)
               : "memory");
  return value;
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t shared) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(shared)
               : "memory");
  return value;
}

// Computes exp2 with an error of at most 2 units in the last place; subnormal results become 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rounds two values to T, packed in one register.
template <typename T>
__device__ __forceinline__ uint32_t rounded_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}
