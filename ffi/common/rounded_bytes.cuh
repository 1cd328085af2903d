// Rounding of numbers to 8 bits under a scale.
#pragma once

#include <cuda_fp8.h>

#include <cfloat>
#include <cstdint>

enum class Format : int { kInt8, kE4m3, kE5m2 };

// Returns the largest number of a format.
__host__ __device__ constexpr float largest_of(Format format) {
  return format == Format::kInt8 ? 127.0f : format == Format::kE4m3 ? 448.0f : 57344.0f;
}

// Returns the scale of numbers: their largest magnitude, given by its bits, times `unit`, which is
// 1 / the format's largest number. It is FLT_MIN if all numbers are 0, because the numbers are
// divided by it, and NaN if a number is not finite.
__device__ __forceinline__ float scale_of(uint32_t largest, float unit) {
  return largest >= 0x7f800000u ? __uint_as_float(0x7fffffffu)
                                : fmaxf(__uint_as_float(largest) * unit, FLT_MIN);
}

// Rounds x / scale, half to even. Values beyond the range are clipped, and NaN becomes 0 in int8.
__device__ __forceinline__ uint8_t rounded(float x, float scale, float limit, Format format) {
  const float units = __fdiv_rn(x, scale);
  // A NaN fails both conditions and stays a NaN.
  const float clipped = units > limit ? limit : units < -limit ? -limit : units;
  switch (format) {
    case Format::kInt8: {
      const int number = clipped == clipped ? __float2int_rn(clipped) : 0;
      return static_cast<uint8_t>(number & 255);
    }
    case Format::kE4m3:
      return __nv_cvt_float_to_fp8(clipped, __NV_SATFINITE, __NV_E4M3);
    default:
      return __nv_cvt_float_to_fp8(clipped, __NV_SATFINITE, __NV_E5M2);
  }
}
