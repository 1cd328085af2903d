// Functions that take a few instructions and are right to about two units in the last place, for
// results that are kept in 8 or 16 bits.
#pragma once

// The square root of a number that is not subnormal, or 0 of one that is.
__device__ __forceinline__ float sqrt_of_normal(float x) {
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// 1 / x of a number that is not subnormal, or infinity of one that is.
__device__ __forceinline__ float fast_reciprocal(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}
