// Weights of 8 and 4 bits as the left operand of tensor cores: a warp copies 16 rows and 128
// features to shared memory, and dequantises them to 16 bits in registers.
//
// A column of the weights is a row here, with contiguous features. The four threads of a row hold 8
// features each of a chunk of 32, as operands of two instructions of 16 features. A product's sum
// does not depend on the order of the features: with bytes a thread takes 8 adjacent ones, while
// int4 are packed in the order of the instruction.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/mma.cuh"

enum class Weights : int { kInt8, kInt4, kFloat8 };

constexpr int kWarpRows = 16;  // columns of the weights that a warp multiplies
constexpr int kStep = 128;     // features (along K) that one copy brings to shared memory
constexpr int kChunk = 32;

// Constants that turn a byte of float8 into a 16-bit float. The exponent and the mantissa are
// shifted to their bit positions, infinities and NaN get the matching exponent, and a power of two
// corrects the exponent's bias. All 256 bytes are exact. Fields with two halves hold a value twice.
struct Float8Code {
  int shift;          // right shift from the upper byte to the bits of the 16-bit float
  uint32_t above;     // added so that non-finite values carry into `special`
  uint32_t special;   // the bit that the carry sets
  int left, right;    // non-finite exponent: special << left minus special >> right
  uint32_t multiply;  // power of two that corrects the exponent's bias
};

// Two adjacent numbers of T in a register.
template <typename T>
using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

template <typename T>
__device__ __forceinline__ uint32_t subtract_pair(uint32_t a, uint32_t b) {
  const Pair<T> difference =
      __hsub2(reinterpret_cast<const Pair<T>&>(a), reinterpret_cast<const Pair<T>&>(b));
  return reinterpret_cast<const uint32_t&>(difference);
}

template <typename T>
__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b) {
  const Pair<T> product =
      __hmul2(reinterpret_cast<const Pair<T>&>(a), reinterpret_cast<const Pair<T>&>(b));
  return reinterpret_cast<const uint32_t&>(product);
}

// Converts a thread's 8 weights of a chunk to T, which represents each of them exactly.
//
// `Offset` is subtracted after the conversion: the zero point plus the number that the conversion
// by bits adds.
template <typename T, Weights kWeights>
struct Converter;

// Four bits in the mantissa of a power of two make a float (the power plus the bits) without a
// conversion instruction.
template <typename T>
struct Converter<T, Weights::kInt4> {
  static constexpr int kWords = 1;  // 32-bit words of weights that a thread has in a chunk
  static constexpr bool kIsHalf = std::is_same_v<T, __half>;
  using Offset = uint32_t;

  static __device__ __forceinline__ Offset offset(int zero_point) {
    const float value = static_cast<float>((kIsHalf ? 1024 : 128) + 8 + zero_point);
    return rounded_pair<T>(value, value);
  }

  // Converts to operands of the first 16 features, lower and upper half, then of the second 16.
  static __device__ __forceinline__ void convert(const uint32_t (&words)[kWords], Offset offset,
                                                 const Float8Code&, uint32_t (&out)[4]) {
    constexpr uint32_t kExponent = kIsHalf ? 0x64006400u : 0x43004300u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = subtract_pair<T>(((words[0] >> 4 * i) & 0x000f000fu) | kExponent, offset);
    }
  }
};

template <>
struct Converter<__half, Weights::kInt8> {
  static constexpr int kWords = 2;
  using Offset = uint32_t;

  static __device__ __forceinline__ Offset offset(int zero_point) {
    const float value = static_cast<float>(1024 + 128 + zero_point);
    return rounded_pair<__half>(value, value);
  }

  static __device__ __forceinline__ void convert(const uint32_t (&words)[kWords], Offset offset,
                                                 const Float8Code&, uint32_t (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t bytes = words[i / 2] ^ 0x80808080u;
      const uint32_t order = i % 2 == 0 ? 0x4140u : 0x4342u;
      out[i] = subtract_pair<__half>(__byte_perm(bytes, 0x64646464u, order), offset);
    }
  }
};

// A bfloat16's mantissa of 7 bits cannot hold a byte. But as the bits of a bfloat16, a byte is a
// subnormal number or one of the first normal ones, which are equally spaced: the byte times
// 2^-133.
template <>
struct Converter<__nv_bfloat16, Weights::kInt8> {
  static constexpr int kWords = 2;
  using Offset = uint32_t;

  static __device__ __forceinline__ Offset offset(int zero_point) {
    const float value = static_cast<float>(128 + zero_point);
    return rounded_pair<__nv_bfloat16>(value, value);
  }

  static __device__ __forceinline__ void convert(const uint32_t (&words)[kWords], Offset offset,
                                                 const Float8Code&, uint32_t (&out)[4]) {
    // The factor 2^133 in two: bfloat16's largest power of two, 2^127, and the rest, 2^6.
    constexpr uint32_t kLargest = 0x7f007f00u, kRest = 0x42804280u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t bytes = words[i / 2] ^ 0x80808080u;
      const uint32_t bits = __byte_perm(bytes, 0, i % 2 == 0 ? 0x4140u : 0x4342u);
      const uint32_t number = multiply_pair<__nv_bfloat16>(bits, kLargest);
      out[i] = subtract_pair<__nv_bfloat16>(multiply_pair<__nv_bfloat16>(number, kRest), offset);
    }
  }
};

template <typename T>
struct Converter<T, Weights::kFloat8> {
  static constexpr int kWords = 2;
  struct Offset {};

  static __device__ __forceinline__ Offset offset(int) { return {}; }

  static __device__ __forceinline__ void convert(const uint32_t (&words)[kWords], Offset,
                                                 const Float8Code& code, uint32_t (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t upper = __byte_perm(words[i / 2], 0, i % 2 == 0 ? 0x1404u : 0x3424u);
      // Only zeros are shifted from one half into the other.
      uint32_t bits = (upper & 0x7f007f00u) >> code.shift;
      const uint32_t special = (bits + code.above) & code.special;
      bits |= (special << code.left) - (special >> code.right);
      out[i] = multiply_pair<T>(bits | (upper & 0x80008000u), code.multiply);
    }
  }
};

// The weights that a warp copies and multiplies in a step of kStep features.
template <Weights kWeights>
struct WarpWeights {
  static constexpr int kRowBytes = kWeights == Weights::kInt4 ? kStep / 2 : kStep;
  static constexpr int kBytes = kWarpRows * kRowBytes;
  static constexpr int kRowCopies = kRowBytes / 16;      // 16-byte copies of a row
  static constexpr int kPassRows = 32 / kRowCopies;      // rows that a warp copies at a time
  static constexpr int kPasses = kWarpRows / kPassRows;  // copies of a thread

  // Returns the offset of 16 bytes of a row in shared memory. Rows of 128 bytes are swizzled by
  // units of 32 bytes, of which a thread reads 8; the 16 threads that read at a time use all banks.
  static __device__ __forceinline__ int place(int row, int copy) {
    if (kWeights == Weights::kInt4) return row * kRowBytes + copy * 16;
    return row * kRowBytes + ((copy / 2) ^ (row & 3)) * 32 + copy % 2 * 16;
  }

  // Starts to copy 16 rows from byte `start` on; values beyond the matrix are replaced by zeros.
  static __device__ __forceinline__ void copy(uint32_t shared, const uint8_t* values, int64_t rows,
                                              int64_t row_bytes, int64_t start, int lane) {
    const int copy = lane % kRowCopies;
    const int64_t from = start + copy * 16;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = pass * kPassRows + lane / kRowCopies;
      const bool exists = row < rows && from < row_bytes;
      const uint8_t* source = values + (exists ? row * row_bytes + from : 0);
      async_copy_or_zero<true>(shared + place(row, copy), source, exists);
    }
  }

  // A thread's weights of a row.
  class Row {
   public:
    __device__ __forceinline__ Row(uint32_t shared, int row, int lane)
        : shared_(shared), row_(row), q_(lane % 4) {
      if constexpr (kWeights == Weights::kInt4) {
        // One 16-byte load for the words of all chunks. Loads chunk by chunk would have bank
        // conflicts, as a warp's words of one chunk lie in only 8 of the 32 banks.
        const uint4 all = load_shared_16(shared + place(row, q_));
        words_[0] = all.x, words_[1] = all.y, words_[2] = all.z, words_[3] = all.w;
      }
    }

    template <int kWords>
    __device__ __forceinline__ void load(int chunk, uint32_t (&words)[kWords]) const {
      if constexpr (kWeights == Weights::kInt4) {
        words[0] = words_[chunk];
      } else {
        const uint2 pair = load_shared_8(shared_ + place(row_, 2 * chunk + q_ / 2) + q_ % 2 * 8);
        words[0] = pair.x;
        words[1] = pair.y;
      }
    }

   private:
    uint32_t shared_;
    int row_, q_;
    uint32_t words_[kStep / kChunk];
  };
};
