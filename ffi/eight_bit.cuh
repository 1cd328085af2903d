// Moments in 8 bits, in blocks of 256 values that share a float32 scale, the largest magnitude of
// the block; jaxfused/optim/eight_bit.py states the codes. A warp owns a block.
#pragma once

#include <cstdint>

#include "leaves.cuh"
#include "stochastic_rounding.cuh"

__device__ __forceinline__ float square(float x) { return x * x; }

// A signed code: scale * sign(code) * (code / 127)^2.
__device__ __forceinline__ void decode_signed(uint32_t codes, float scale, float (&out)[kLeafVec]) {
  const float unit = scale * (1.0f / (127.0f * 127.0f));
#pragma unroll
  for (int i = 0; i < kLeafVec; ++i) {
    const float code = static_cast<float>(static_cast<int8_t>(codes >> 8 * i));
    out[i] = unit * (code * fabsf(code));
  }
}

// An unsigned code: scale * (code / 255)^4.
__device__ __forceinline__ void decode_unsigned(uint32_t codes, float scale,
                                                float (&out)[kLeafVec]) {
  const float unit = scale * (1.0f / (255.0f * 255.0f * 255.0f * 255.0f));
#pragma unroll
  for (int i = 0; i < kLeafVec; ++i) {
    const float code = static_cast<float>(static_cast<uint8_t>(codes >> 8 * i));
    out[i] = unit * square(square(code));
  }
}

__device__ __forceinline__ float fast_sqrt(float x) {
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// Returns the largest magnitude of a warp's values, or NaN if there is one: as an integer, a NaN
// is larger than all others.
template <int kVectors>
__device__ __forceinline__ float largest(const float (&values)[kVectors][kLeafVec]) {
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
  return __uint_as_float(most);
}

// Rounds to the nearest code.
__device__ __forceinline__ uint32_t encode_signed(const float (&values)[kLeafVec],
                                                  float inverse_scale) {
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kLeafVec; ++i) {
    const float root = 127.0f * fast_sqrt(fabsf(values[i]) * inverse_scale);
    const int code = __float2int_rn(copysignf(root, values[i]));
    codes |= (static_cast<uint32_t>(code) & 0xFFu) << 8 * i;
  }
  return codes;
}

// Rounds to one of the two neighbouring codes at random, so that the decoded values have the mean
// `values`: a second moment changes by less than the distance of two codes in a step.
__device__ __forceinline__ uint32_t encode_unsigned(const float (&values)[kLeafVec],
                                                    float inverse_scale,
                                                    const uint32_t (&halves)[kLeafVec]) {
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kLeafVec; ++i) {
    const float ratio = values[i] * inverse_scale;
    const float low = fminf(floorf(255.0f * fast_sqrt(fast_sqrt(ratio))), 254.0f);
    const float below = square(square(low)), above = square(square(low + 1.0f));
    const float part = ratio * (255.0f * 255.0f * 255.0f * 255.0f) - below;
    const bool up = static_cast<float>(halves[i]) * (above - below) < part * 65536.0f;
    codes |= static_cast<uint32_t>(static_cast<int>(low) + up) << 8 * i;
  }
  return codes;
}
