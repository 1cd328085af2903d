// Short vectors of float32, bfloat16 or float16 values, and conversions to float32 registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

// A vector of kSize values. 16-bit values are stored in pairs, so that a pair takes one register.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) Vector {
  using Value = std::conditional_t<sizeof(T) == 2 && kSize % 2 == 0, uint32_t, T>;
  Value values[sizeof(T) * kSize / sizeof(Value)];
};

// Loads a vector of up to 16 bytes with one memory instruction, which nvcc does not guarantee for a
// struct of 8 or 16.
template <typename T, int kSize>
__device__ __forceinline__ Vector<T, kSize> load_vector(const void* address) {
  using V = Vector<T, kSize>;
  V vector;
  if constexpr (sizeof(V) == 16) {
    *reinterpret_cast<uint4*>(&vector) = *static_cast<const uint4*>(address);
  } else if constexpr (sizeof(V) == 8) {
    *reinterpret_cast<uint2*>(&vector) = *static_cast<const uint2*>(address);
  } else {
    vector = *static_cast<const V*>(address);
  }
  return vector;
}

template <typename T, int kSize>
__device__ __forceinline__ void store_vector(void* address, const Vector<T, kSize>& vector) {
  if constexpr (sizeof(vector) == 16) {
    *static_cast<uint4*>(address) = *reinterpret_cast<const uint4*>(&vector);
  } else if constexpr (sizeof(vector) == 8) {
    *static_cast<uint2*>(address) = *reinterpret_cast<const uint2*>(&vector);
  } else {
    *static_cast<Vector<T, kSize>*>(address) = vector;
  }
}

// Load and store values that are used only once, so that the caches evict them first.
template <typename T, int kSize>
__device__ __forceinline__ Vector<T, kSize> load_streaming(const void* address) {
  using V = Vector<T, kSize>;
  if constexpr (sizeof(V) == 16) {
    V vector;
    *reinterpret_cast<uint4*>(&vector) = __ldcs(static_cast<const uint4*>(address));
    return vector;
  } else {
    return load_vector<T, kSize>(address);
  }
}

template <typename T, int kSize>
__device__ __forceinline__ void store_streaming(void* address, const Vector<T, kSize>& vector) {
  if constexpr (sizeof(vector) == 16) {
    __stcs(static_cast<uint4*>(address), *reinterpret_cast<const uint4*>(&vector));
  } else if constexpr (sizeof(vector) == 8) {
    __stcs(static_cast<uint2*>(address), *reinterpret_cast<const uint2*>(&vector));
  } else {
    store_vector(address, vector);
  }
}

template <int kSize>
__device__ __forceinline__ void unpack(const Vector<float, kSize>& vector, float (&out)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) out[i] = vector.values[i];
}

template <int kSize>
__device__ __forceinline__ void unpack(const Vector<__nv_bfloat16, kSize>& vector,
                                       float (&out)[kSize]) {
  if constexpr (kSize == 1) {
    out[0] = __bfloat162float(vector.values[0]);
  } else {
    // A bfloat16 is the upper half of a float32.
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      out[i] = __uint_as_float(vector.values[i / 2] << 16);
      out[i + 1] = __uint_as_float(vector.values[i / 2] & 0xffff0000u);
    }
  }
}

template <int kSize>
__device__ __forceinline__ void unpack(const Vector<__half, kSize>& vector, float (&out)[kSize]) {
  if constexpr (kSize == 1) {
    out[0] = __half2float(vector.values[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(vector.values[i / 2]));
      out[i] = pair.x;
      out[i + 1] = pair.y;
    }
  }
}

template <int kSize>
__device__ __forceinline__ void pack(const float (&in)[kSize], Vector<float, kSize>& vector) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) vector.values[i] = in[i];
}

// Converts two values at a time, with one instruction if the GPU has it.
template <int kSize>
__device__ __forceinline__ void pack(const float (&in)[kSize],
                                     Vector<__nv_bfloat16, kSize>& vector) {
  if constexpr (kSize == 1) {
    vector.values[0] = __float2bfloat16_rn(in[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(in[i], in[i + 1]);
      vector.values[i / 2] = reinterpret_cast<const uint32_t&>(pair);
    }
  }
}

template <int kSize>
__device__ __forceinline__ void pack(const float (&in)[kSize], Vector<__half, kSize>& vector) {
  if constexpr (kSize == 1) {
    vector.values[0] = __float2half_rn(in[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      const __half2 pair = __floats2half2_rn(in[i], in[i + 1]);
      vector.values[i / 2] = reinterpret_cast<const uint32_t&>(pair);
    }
  }
}
