// Keys and values of a cache, stored in 16 or 8 bits, as operands of products on tensor cores.
//
// Values of 8 bits are widened to float16, exactly: float16 has all values of int8 and of both
// float8 formats.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "common/mma.cuh"
#include "common/mma_bytes.cuh"

// Bytes of a cached value of type V: a type of 16 bits, int8_t, E4m3 or E5m2.
template <typename V>
constexpr int kKeptBytes = std::is_same_v<V, __half> || std::is_same_v<V, __nv_bfloat16> ? 2 : 1;

// Whether tensor cores multiply cached keys as they are, by queries in two bytes. Values, whose
// weights have a wider range, are widened.
template <typename V>
constexpr bool kKeysStayBytes = std::is_same_v<V, int8_t>;

// The type to which cached values are widened and that tensor cores multiply.
template <typename V>
using Multiplied = std::conditional_t<kKeptBytes<V> == 2, V, __half>;

// Widens the four bytes of a word to float16, two in each register.
template <typename V>
__device__ __forceinline__ uint2 widened(uint32_t word) {
  if constexpr (std::is_same_v<V, int8_t>) {
    // A float16 of upper byte 0x64 and lower byte u is 1024 + u, and u - 128 is the number.
    const uint32_t biased = word ^ 0x80808080u, bias = 0x64806480u;
    uint32_t pairs[2] = {__byte_perm(biased, 0x64646464u, 0x4140u),
                         __byte_perm(biased, 0x64646464u, 0x4342u)};
#pragma unroll
    for (uint32_t& pair : pairs) {
      const __half2 numbers =
          __hsub2(reinterpret_cast<const __half2&>(pair), reinterpret_cast<const __half2&>(bias));
      pair = reinterpret_cast<const uint32_t&>(numbers);
    }
    return {pairs[0], pairs[1]};
  } else if constexpr (std::is_same_v<V, E5m2>) {
    return {__byte_perm(word, 0u, 0x1404u), __byte_perm(word, 0u, 0x3424u)};
  } else {
    uint2 pairs;
#if __CUDA_ARCH__ >= 890
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}\n"
        : "=r"(pairs.x), "=r"(pairs.y)
        : "r"(word));
#else
    const auto low = __nv_cvt_fp8x2_to_halfraw2(word & 0xffffu, __NV_E4M3);
    const auto high = __nv_cvt_fp8x2_to_halfraw2(word >> 16, __NV_E4M3);
    pairs.x = static_cast<uint32_t>(low.x) | static_cast<uint32_t>(low.y) << 16;
    pairs.y = static_cast<uint32_t>(high.x) | static_cast<uint32_t>(high.y) << 16;
#endif
    return pairs;
  }
}

// Loads kBytes, 8 or 16, that are used only once. With kMaybe, they are zeros unless `exists`.
template <int kBytes, bool kMaybe>
__device__ __forceinline__ void load_words(const uint8_t* from, uint32_t* to, bool exists) {
  using Words = std::conditional_t<kBytes == 16, uint4, uint2>;
  Words words = {};
  if (!kMaybe || exists) words = __ldcs(reinterpret_cast<const Words*>(from));
  to[0] = words.x;
  to[1] = words.y;
  if constexpr (kBytes == 16) {
    to[2] = words.z;
    to[3] = words.w;
  }
}

// A lane's part of a tile of 16 keys of one head: row g of each group of 8 keys. A row is cut into
// chunks of 16 bytes, and the lane has chunks q, q + 4, ... (g = lane / 4 and q = lane % 4.)
template <typename V, int kHead>
struct KeyTile {
  static constexpr int kChunks = kHead * kKeptBytes<V> / 64;
  static constexpr int kValues = 16 / kKeptBytes<V>;  // values of a chunk
  // Columns that the lane has in a step, which is a product over four times as many columns, and
  // steps that read a chunk.
  static constexpr int kStepValues = kKeysStayBytes<V> ? 8 : 4;
  static constexpr int kSteps = kValues / kStepValues;

  uint32_t rows[2][kChunks * 4];

  // The first column that the lane has in a step.
  static __device__ __forceinline__ int column(int chunk, int step, int q) {
    return chunk * 4 * kValues + q * kValues + kStepValues * step;
  }

  // Loads the lane's chunks of a row of a group of keys; `from` is the first chunk.
  template <bool kMaybe>
  __device__ __forceinline__ void load(int group, const uint8_t* from, bool exists) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      load_words<16, kMaybe>(from + c * 64, &rows[group][c * 4], exists);
    }
  }

  // Returns the keys of a group as operand B of a step.
  __device__ __forceinline__ uint2 operand(int group, int chunk, int step) const {
    if constexpr (kKeptBytes<V> == 2 || kKeysStayBytes<V>) {
      return {rows[group][chunk * 4 + 2 * step], rows[group][chunk * 4 + 2 * step + 1]};
    } else {
      return widened<V>(rows[group][chunk * 4 + step]);
    }
  }
};

// A lane's part of V's rows of 16 keys: rows 2 q and 2 q + 1 of each group of 8 keys. A row is cut
// into chunks of kChunkBytes, and the lane has chunks g, g + 8, g + 16, ...
template <typename V, int kHead>
struct ValueTile {
  static constexpr int kChunkBytes = kHead * kKeptBytes<V> / 8 < 16 ? 8 : 16;
  static constexpr int kChunks = kHead * kKeptBytes<V> / 8 / kChunkBytes;
  static constexpr int kWords = kChunkBytes / 4;
  static constexpr int kValues = kChunkBytes / kKeptBytes<V>;  // values of a chunk

  uint32_t rows[2][2][kChunks * kWords];

  // Returns the first of the kValues adjacent columns that lanes with this g have of a chunk. In
  // product i of `for_each`, rows g and g + 8 of A are columns 2 i and 2 i + 1 of a lane's columns.
  static __device__ __forceinline__ int column(int chunk, int g) {
    return (chunk * 8 + g) * kValues;
  }

  template <bool kMaybe>
  __device__ __forceinline__ void load(int group, int which, const uint8_t* from, bool exists) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      load_words<kChunkBytes, kMaybe>(from + c * 8 * kChunkBytes, &rows[group][which][c * kWords],
                                      exists);
    }
  }

  // Calls use(number, transposed values as operand A) for the products over the 16 keys.
  template <typename Use>
  __device__ __forceinline__ void for_each(const Use& use) const {
    // A register gets two adjacent keys' values of one 16-bit column, or of two 8-bit columns.
    constexpr uint32_t kLow = kKeptBytes<V> == 2 ? 0x5410u : 0x5140u;
    constexpr uint32_t kHigh = kKeptBytes<V> == 2 ? 0x7632u : 0x7362u;
#pragma unroll
    for (int w = 0; w < kChunks * kWords; ++w) {
      uint32_t low[2], high[2];
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        low[group] = __byte_perm(rows[group][0][w], rows[group][1][w], kLow);
        high[group] = __byte_perm(rows[group][0][w], rows[group][1][w], kHigh);
      }
      if constexpr (kKeptBytes<V> == 2) {
        use(w, {low[0], high[0], low[1], high[1]});
      } else {
        const uint2 a = widened<V>(low[0]), b = widened<V>(low[1]);
        use(2 * w, {a.x, a.y, b.x, b.y});
        const uint2 c = widened<V>(high[0]), d = widened<V>(high[1]);
        use(2 * w + 1, {c.x, c.y, d.x, d.y});
      }
    }
  }
};
