// Functions of a few instructions that are accurate to about two units in the last place, for
// results that are stored in 8 or 16 bits.
#pragma once

// Returns the square root of a normal number, and 0 for a subnormal one.
__device__ __forceinline__ float sqrt_of_normal(float x) {
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// Returns 1 / x for a normal number, and infinity for a subnormal one.
__device__ __forceinline__ float fast_reciprocal(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

// Returns log2(x) for a normal number, with an absolute error of 2^-22 near 1.
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
