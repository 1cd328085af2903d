// Moments in 8 bits, in blocks of 256 values that share a float32 scale, the largest magnitude of
// the block; jaxfused/optim/eight_bit.py states the codes. A warp owns a block.
//
// With so few bytes, instructions would take longer than memory. So codes and floats are converted
// by adding 2^23, whose float has an integer in its lower bits: conversion instructions have a
// quarter of an addition's throughput.
#pragma once

#include <cfloat>
#include <cstdint>

#include "common/approximate.cuh"
#include "common/stochastic_rounding.cuh"
#include "multi_tensor.cuh"

constexpr float kTwo23 = 8388608.0f;

__device__ __forceinline__ float square(float x) { return x * x; }

// Returns 2^23 + byte `i` of a word.
__device__ __forceinline__ float byte_above_two23(uint32_t word, int i) {
  return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440u | i));
}

// Returns a word of the lowest bytes of four words.
__device__ __forceinline__ uint32_t lowest_bytes(const uint32_t (&words)[kLeafVec]) {
  static_assert(kLeafVec == 4);
  const uint32_t low = __byte_perm(words[0], words[1], 0x0040);
  return __byte_perm(low, __byte_perm(words[2], words[3], 0x0040), 0x5410);
}

// Decodes signed codes: scale * sign(code) * (code / 127)^2, multiplied by `factor`.
__device__ __forceinline__ void decode_signed(uint32_t codes, float scale, float factor,
                                              float (&out)[kLeafVec]) {
  const float unit = factor * (scale * (1.0f / (127.0f * 127.0f)));
  const uint32_t above_minus128 = codes ^ 0x80808080u;
#pragma unroll
  for (int i = 0; i < kLeafVec; ++i) {
    const float code = byte_above_two23(above_minus128, i) - (kTwo23 + 128.0f);
    out[i] = unit * (code * fabsf(code));
  }
}

// Decodes unsigned codes: scale * (code / 255)^4, multiplied by `factor`.
__device__ __forceinline__ void decode_unsigned(uint32_t codes, float scale, float factor,
                                                float (&out)[kLeafVec]) {
  const float unit = factor * (scale * (1.0f / (255.0f * 255.0f * 255.0f * 255.0f)));
#pragma unroll
  for (int i = 0; i < kLeafVec; ++i) {
    out[i] = unit * square(square(byte_above_two23(codes, i) - kTwo23));
  }
}

// Returns the largest magnitude of a warp's values, or NaN if any is NaN: as an integer, a NaN is
// larger than all other values.
template <int kVectors>
__device__ __forceinline__ float largest(const float (&values)[kVectors][kLeafVec]) {
#if __CUDA_ARCH__ >= 800
  float most_here = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kLeafVec; ++i) {
      asm("max.NaN.f32 %0, %1, %2;" : "=f"(most_here) : "f"(most_here), "f"(fabsf(values[v][i])));
    }
  }
  const uint32_t most = __reduce_max_sync(0xffffffffu, __float_as_uint(most_here));
#else
  uint32_t most = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kLeafVec; ++i) {
      most = max(most, __float_as_uint(values[v][i]) & 0x7FFFFFFFu);
    }
  }
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
  }
#endif
  return __uint_as_float(most);
}

// Returns the factor that scales a block's values to at most 1. It is 0, and so are all codes, if
// the scale is 0 or so small that its inverse may overflow. If the scale is not finite, the values
// become 0, whose code then decodes to NaN.
template <int kVectors>
__device__ __forceinline__ float inverse_scale_of(float scale,
                                                  float (&values)[kVectors][kLeafVec]) {
  if (!(scale <= FLT_MAX)) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kLeafVec; ++i) values[v][i] = 0.0f;
    }
  }
  return scale >= FLT_MIN && scale <= FLT_MAX ? fast_reciprocal(scale) : 0.0f;
}

// Moments are rounded at random to one of the two adjacent codes, so that the decoded values have
// the mean `values`: a step may change a moment by less than the distance between codes.
//
// A code is a root of the value's ratio to the scale, times 126.9999 or 254.9998. This factor is
// slightly less than the largest code, so that the lower of the two codes stays below the largest
// even if the root is rounded up. A value just above a code may then be rounded to that code or the
// one below.

// Returns 2^23 + a code: `low_above_two23` or the next one. Decoded, these are 2^16 `gap` apart,
// and the value lies `-below` above the lower one.
__device__ __forceinline__ uint32_t round_up_at_random(float low_above_two23, float gap,
                                                       float below, uint32_t half) {
  // The middle of the interval for these 16 bits, so that the mean has no bias and 0 stays 0.
  const float random = __uint_as_float(0x4B000000u | half) - (kTwo23 - 0.5f);
  // The sum is negative, and its sign bit adds 1, if the value rounds to the upper code.
  return __float_as_uint(low_above_two23) + (__float_as_uint(fmaf(random, gap, below)) >> 31);
}

constexpr float kRandomUnit = 1.0f / 65536.0f;

__device__ __forceinline__ uint32_t encode_signed(const float (&values)[kLeafVec],
                                                  float inverse_scale,
                                                  const uint32_t (&halves)[kLeafVec]) {
  uint32_t codes[kLeafVec];
#pragma unroll
  for (int i = 0; i < kLeafVec; ++i) {
    const float ratio = fabsf(values[i]) * inverse_scale;
    const float low_above_two23 = __fmaf_rd(126.9999f, sqrt_of_normal(ratio), kTwo23);
    const float low = low_above_two23 - kTwo23;
    // Distance between the decoded codes, (low + 1)^2 - low^2.
    const float gap = fmaf(2 * kRandomUnit, low, kRandomUnit);
    const float below = fmaf(low, low, ratio * -(127.0f * 127.0f));
    const uint32_t code = round_up_at_random(low_above_two23, gap, below, halves[i]);
    const uint32_t sign = static_cast<uint32_t>(__float_as_int(values[i]) >> 31);
    codes[i] = (code ^ sign) - sign;
  }
  return lowest_bytes(codes);
}

// Encodes values; one above 0 gets a code above 0: see jaxfused/optim/eight_bit.py.
__device__ __forceinline__ uint32_t encode_unsigned(const float (&values)[kLeafVec],
                                                    float inverse_scale,
                                                    const uint32_t (&halves)[kLeafVec]) {
  uint32_t codes[kLeafVec];
#pragma unroll
  for (int i = 0; i < kLeafVec; ++i) {
    const float ratio = values[i] * inverse_scale;
    const float root = sqrt_of_normal(sqrt_of_normal(ratio));
    const float low_above_two23 = __fmaf_rd(254.9998f, root, kTwo23);
    const float low = low_above_two23 - kTwo23;
    // Distance between the decoded codes, (low + 1)^4 - low^4.
    const float gap = fmaf(fmaf(fmaf(4 * kRandomUnit, low, 6 * kRandomUnit), low, 4 * kRandomUnit),
                           low, kRandomUnit);
    const float below =
        fmaf(square(low), square(low), ratio * -(255.0f * 255.0f * 255.0f * 255.0f));
    const uint32_t code = round_up_at_random(low_above_two23, gap, below, halves[i]);
    codes[i] = max(code, 0x4B000000u + (ratio > 0.0f ? 1u : 0u));
  }
  return lowest_bytes(codes);
}
