// Matrix products of a warp on tensor cores whose operands are bytes: int8 and float8.
//
// An instruction gives D[16, 8] += A[16, 32] B[32, 8]. A lane holds the same parts of A, B and D as
// in mma.cuh, with four adjacent bytes along k in place of two values of 16 bits, so that
// load_matrices serves both.
#pragma once

#include <cstdint>
#include <type_traits>

#include "mma.cuh"

struct E4m3 {};
struct E5m2 {};

// Whether the GPU that this is compiled for multiplies bytes of type V on tensor cores.
template <typename V>
constexpr bool kHasByteProducts =
#if __CUDA_ARCH__ >= 890
    true;
#else
    std::is_same_v<V, int8_t>;
#endif

// Multiplies int8; the sums are exact.
__device__ __forceinline__ void multiply_add_bytes(int8_t, int (&d)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm("{\n"
      "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%4}, {%8}, {%0, %1};\n"
      "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%2, %3}, {%5}, {%8}, {%2, %3};\n"
      "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%6}, {%9}, {%0, %1};\n"
      "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%2, %3}, {%7}, {%9}, {%2, %3};\n"
      "}\n"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

#if __CUDA_ARCH__ >= 890
#define JAXFUSED_SM89(...) __VA_ARGS__
#else
#define JAXFUSED_SM89(...)  // empty, because older GPUs never call it
#endif

__device__ __forceinline__ void multiply_add_bytes(E4m3, float (&d)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  JAXFUSED_SM89(
      asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" : "+f"(d[0]),
          "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0),
          "r"(b1)));
}

__device__ __forceinline__ void multiply_add_bytes(E5m2, float (&d)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  JAXFUSED_SM89(
      asm("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" : "+f"(d[0]),
          "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0),
          "r"(b1)));
}
