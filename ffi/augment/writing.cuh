// Writes pixels of a result.
#pragma once

#include "augment/steps.cuh"

__device__ __forceinline__ void convert(float value, uint8_t* out) {
  *out = static_cast<uint8_t>(level_of(value));
}
__device__ __forceinline__ void convert(float value, float* out) { *out = value; }
__device__ __forceinline__ void convert(float value, __nv_bfloat16* out) {
  *out = __float2bfloat16_rn(value);
}
__device__ __forceinline__ void convert(float value, __half* out) { *out = __float2half_rn(value); }

// Destination of a warp's pixels: rows of adjacent pixels, one row for each pixel of a thread.
struct Place {
  int64_t first;  // index of the first value in the result
  int64_t pitch;  // values between the starts of rows
  int rows, columns;
};

template <typename Out, int kPixels, int kChannels>
__device__ __forceinline__ void write(void* y, const Place& place,
                                      const float (&values)[kPixels][kChannels], uint4* stage) {
  const int lane = threadIdx.x % 32;
  Out* staged = reinterpret_cast<Out*>(stage);
  Out* out = static_cast<Out*>(y) + place.first;
  const int size = place.columns * kChannels;
  const int bytes = size * static_cast<int>(sizeof(Out));
  const bool are_vectors = bytes % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0 &&
                           place.pitch * sizeof(Out) % 16 == 0;
#pragma unroll
  for (int i = 0; i < kPixels; ++i, out += place.pitch) {
    if (i >= place.rows) break;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) convert(values[i][c], staged + lane * kChannels + c);
    __syncwarp();
    if (are_vectors) {
      for (int j = lane; j < bytes / 16; j += 32) reinterpret_cast<uint4*>(out)[j] = stage[j];
    } else {
      for (int j = lane; j < size; j += 32) out[j] = staged[j];
    }
    __syncwarp();
  }
}

// Writes a warp's pixels; its lanes hold adjacent pixels of a row, and `stage` holds one row.
template <int kPixels, int kChannels>
__device__ __forceinline__ void write(const Args& args, const Place& place,
                                      const float (&values)[kPixels][kChannels], uint4* stage) {
  switch (args.out_type) {
    case Type::kUint8:
      return write<uint8_t>(args.y, place, values, stage);
    case Type::kFloat32:
      return write<float>(args.y, place, values, stage);
    case Type::kBfloat16:
      return write<__nv_bfloat16>(args.y, place, values, stage);
    case Type::kFloat16:
      return write<__half>(args.y, place, values, stage);
  }
}
