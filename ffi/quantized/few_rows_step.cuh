// A step of a warp in few_rows.cu: 16 columns of 256 weights of 4 bits each, multiplied by one, two
// or four rows of x.
//
// The weights are the left operand of the tensor cores, 16 columns, and x is the right one, which
// has eight columns for one, two or four rows of x. Each row fills a column of this operand for
// every group of features, with zeros at features of other groups, so that the sums of several
// groups stay apart in one accumulator, and each sum is multiplied by its scale once.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/mma.cuh"
#include "common/ptx.cuh"

constexpr int kUnit = 16, kSlice = 256;   // columns and features of a step
constexpr int kRowBytes = kSlice / 2;     // bytes of a column's weights in a slice
constexpr int kWords = 8;                 // a lane's words of a column in a slice, 8 weights each
constexpr int kXPitch = kSlice * 2 + 16;  // bytes from a row of a slice of x to the next
// Bytes of the table: 256 for each byte of two codes. The first 128 hold the byte's two numbers, of
// 16 bits each, once for every lane, so that lanes read different banks.
constexpr int kTableBytes = 65536;

// Integers without and with zero points; codes of a table with scales in float32 and in E8M0.
enum class FourBits : int { kInt4, kZeroPoints, kCodes, kExponents };

__host__ __device__ constexpr bool has_table(FourBits format) {
  return format == FourBits::kCodes || format == FourBits::kExponents;
}

// Sizes and byte offsets of a step. kOfGroups: number of groups among 256 features, or 2 where a
// group has 128 features or more.
template <FourBits kFormat, int kOfGroups, int kRows>
struct Shape {
  static constexpr int kGroups = kOfGroups;
  static constexpr bool kInt4 = !has_table(kFormat);
  static constexpr bool kExponents = kFormat == FourBits::kExponents;
  static constexpr bool kZeroPoints = kFormat == FourBits::kZeroPoints;
  static constexpr int kGroup = kSlice / kGroups;
  static constexpr int kSlots = 8 / kRows;  // groups that an accumulator sums apart
  static constexpr int kSums =
      kGroups > kSlots ? kGroups / kSlots : 1;  // accumulators for all groups
  static constexpr int kChains =
      kSums == 1 ? 2 : 1;  // accumulators of the same groups, for latency
  // Bytes of a column that a lane loads at once. The features of a product's 16 weights of a column
  // then are of no more groups than the accumulator has slots.
  static constexpr int kLoad = !kInt4 && kGroups == 8 && kRows == 4 ? 8 : 16;
  static constexpr int kScaleBytes = kExponents ? 1 : 4;
  static constexpr int kScales = kUnit * kRowBytes;
  static constexpr int kScaleRow = kUnit * kScaleBytes;
  static constexpr int kZeros = kScales + kGroups * kScaleRow;
  static constexpr int kStage = kZeros + (kZeroPoints ? kGroups * kUnit : 0);

  // Returns the offset of 16 bytes, `chunk`, of a column in a stage. Copies, and loads of kLoad
  // bytes of eight or four columns, then have no bank conflicts.
  static __device__ __forceinline__ int place(int column, int chunk) {
    if constexpr (kLoad == 16) return column * kRowBytes + ((chunk ^ ((column & 1) << 2)) << 4);
    return column * kRowBytes + ((chunk ^ ((column & 3) << 1)) << 4);
  }

  // Returns the first feature in its slice of a word of lane 4 g + q. A word of codes has 8
  // features in turn; one of int4 has pairs, 8 features apart (`pack_words` in
  // jaxfused/runtime/packing.py).
  static __device__ __forceinline__ int feature(int word, int q) {
    if constexpr (kInt4) return word * 32 + 2 * q;
    if constexpr (kLoad == 16) return word / 4 * 128 + q * 32 + word % 4 * 8;
    return word / 2 * 64 + q * 16 + word % 2 * 8;
  }
  static __host__ __device__ constexpr int group_of_word(int word) {  // of lane q = 0
    return (kInt4         ? word * 32
            : kLoad == 16 ? word / 4 * 128 + word % 4 * 8
                          : word / 2 * 64) /
           kGroup;
  }
  static __host__ __device__ constexpr int sum_of_word(int word) {
    return group_of_word(word) / kSlots;
  }
};

template <typename T>
__device__ __forceinline__ uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d = 0;
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
#endif
  return d;
}

__device__ __forceinline__ uint32_t load_word(uint32_t shared) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(shared) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_byte(uint32_t shared) {
  uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(shared) : "memory");
  return value;
}

// A nibble's bits at bit 0 or 4 of a 16-bit float are a subnormal number, v or 16 v of the smallest
// one. A multiply-add with these pairs gives (v - zero point) / kUnits, without rounding.
template <typename T>
struct Nibbles {
  static constexpr bool kIsHalf = std::is_same_v<T, __half>;
  static constexpr float kUnits = kIsHalf ? 1024.0f : 64.0f;
  static constexpr uint32_t kLow = kIsHalf ? 0x74007400u : 0x7f007f00u;
  static constexpr uint32_t kHigh = kIsHalf ? 0x64006400u : 0x7d007d00u;
  static constexpr uint32_t kMinusEight = kIsHalf ? 0xa000a000u : 0xbe00be00u;  // -8 / kUnits
  static constexpr uint32_t kPlus120 = kIsHalf ? 0x2f802f80u : 0x3ff03ff0u;     // 120 / kUnits

  // Returns pairs of the nibbles i and i + 4 of a word; `offset` is -(zero point + 8) / kUnits.
  static __device__ __forceinline__ void convert(uint32_t w, uint32_t offset, uint32_t (&out)[4]) {
    const uint32_t upper = w >> 8;
    out[0] = multiply_add_pairs<T>(w & 0x000f000fu, kLow, offset);
    out[1] = multiply_add_pairs<T>(w & 0x00f000f0u, kHigh, offset);
    out[2] = multiply_add_pairs<T>(upper & 0x000f000fu, kLow, offset);
    out[3] = multiply_add_pairs<T>(upper & 0x00f000f0u, kHigh, offset);
  }

  // Returns -(zero point + 8) / kUnits twice, of the byte of a zero point:
  // -(zero point + 128) / kUnits + 120 / kUnits.
  static __device__ __forceinline__ uint32_t offset(uint32_t byte) {
    return multiply_add_pairs<T>((byte ^ 0x80u) * 0x00010001u, kLow | 0x80008000u, kPlus120);
  }
};

// Returns the pairs of numbers of a word's four bytes of codes. An address is one byte permute, of
// 0x10000, where the table begins, the byte times 256, and the lane times 4.
__device__ __forceinline__ void look_up(uint32_t w, uint32_t lane_bytes, uint32_t (&out)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = load_word(__byte_perm(w, lane_bytes, 0x5604u + 16u * i));
}

// Returns a byte of E8M0 as float32: 0 is the subnormal 2^-127, 255 is NaN.
__device__ __forceinline__ float power_of_two(uint32_t exponent) {
  return __uint_as_float(exponent << 23 | (exponent - 1u >= 254u ? 0x00400000u : 0u));
}

// Returns the value, in a register: the compiler cannot see how to compute it again at each use.
__device__ __forceinline__ uint32_t kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Loads x of a slice, for each of the weights' words both registers of two instructions.
template <typename Of, int kRows>
__device__ __forceinline__ void load_x(uint32_t slice, int rows, int lane,
                                       uint32_t (&x)[kWords][4]) {
  const int n = lane / 4, q = lane % 4, row = n % kRows, slot = n / kRows;
  const uint32_t from = slice + row * kXPitch;
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    const int feature = Of::feature(word, q);
    const int group = feature / Of::kGroup - Of::sum_of_word(word) * Of::kSlots;
    const bool exists = row < rows && group == slot;
    if constexpr (Of::kInt4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = load_word(from + 2 * feature + 16 * i);
        x[word][i] = exists ? pair : 0u;
      }
    } else {
      const uint4 a = load_shared_16(from + 2 * feature);
      x[word][0] = exists ? a.x : 0u, x[word][1] = exists ? a.y : 0u;
      x[word][2] = exists ? a.z : 0u, x[word][3] = exists ? a.w : 0u;
    }
  }
}

// A lane's weights of columns g and g + 8 (`upper` and `lower`), and their scales and zero points.
template <typename T, typename Of, int kRows>
struct Step {
  uint32_t upper[kWords], lower[kWords];
  static constexpr int kOfSum = kRows == 1 ? 2 : 1;  // groups of a lane's two sums of a column
  float scale[Of::kSums][kOfSum][2];
  uint32_t zero[Of::kZeroPoints ? Of::kGroups : 1][2];

  // Places of a lane's words and scales in the first stage.
  struct Places {
    uint32_t words[4], scale[Of::kSums][kOfSum], zeros;

    __device__ Places(uint32_t ring, int lane) {
      const int g = lane / 4, q = lane % 4;
      for (int i = 0; i < (Of::kLoad == 16 ? 2 : 4); ++i) {
        words[i] =
            Of::kLoad == 16 ? Of::place(g, i * 4 + q) : Of::place(g, i * 2 + q / 2) + q % 2 * 8;
        words[i] = kept(ring + words[i]);
      }
      for (int sum = 0; sum < Of::kSums; ++sum) {
        for (int i = 0; i < kOfSum; ++i) {
          const int group = min(sum * Of::kSlots + (2 * q + i) / kRows, Of::kGroups - 1);
          scale[sum][i] = kept(ring + Of::kScales + group * Of::kScaleRow + g * Of::kScaleBytes);
        }
      }
      zeros = kept(ring + Of::kZeros + g);
    }
  };

  __device__ __forceinline__ void load(const Places& places, uint32_t offset) {
    if constexpr (Of::kLoad == 16) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 a = load_shared_16(places.words[i] + offset);
        const uint4 b = load_shared_16(places.words[i] + offset + 8 * kRowBytes);
        upper[4 * i] = a.x, upper[4 * i + 1] = a.y, upper[4 * i + 2] = a.z, upper[4 * i + 3] = a.w;
        lower[4 * i] = b.x, lower[4 * i + 1] = b.y, lower[4 * i + 2] = b.z, lower[4 * i + 3] = b.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint2 a = load_shared_8(places.words[i] + offset);
        const uint2 b = load_shared_8(places.words[i] + offset + 8 * kRowBytes);
        upper[2 * i] = a.x, upper[2 * i + 1] = a.y;
        lower[2 * i] = b.x, lower[2 * i + 1] = b.y;
      }
    }
#pragma unroll
    for (int sum = 0; sum < Of::kSums; ++sum) {
#pragma unroll
      for (int i = 0; i < kOfSum; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t from = places.scale[sum][i] + offset + 8 * half * Of::kScaleBytes;
          scale[sum][i][half] =
              Of::kExponents ? power_of_two(load_byte(from)) : __uint_as_float(load_word(from));
        }
      }
    }
    if constexpr (Of::kZeroPoints) {
#pragma unroll
      for (int group = 0; group < Of::kGroups; ++group) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          zero[group][half] =
              Nibbles<T>::offset(load_byte(places.zeros + offset + group * kUnit + 8 * half));
        }
      }
    } else {
      zero[0][0] = zero[0][1] = Nibbles<T>::kMinusEight;
    }
  }
};

// Returns the offset, in a step's sums [rows, most] in shared memory, of the sums that a lane
// writes.
template <int kRows>
__device__ __forceinline__ int place_of_sums(int lane, int most) {
  const int g = lane / 4, q = lane % 4;
  if (kRows == 1) return g + q % 2 * 8;
  if (kRows == 2) return g + q % 2 * 8 + q / 2 * most;
  return g + q / 2 * 8 + q % 2 * 2 * most;
}

// Multiplies a step, and writes a lane's sums of its columns, or adds them to those of earlier
// slices.
template <typename T, typename Of, int kRows>
__device__ __forceinline__ void multiply(const Step<T, Of, kRows>& step,
                                         const uint32_t (&x)[kWords][4], int lane, bool adds,
                                         float* to, int most) {
  const int q = lane % 4;
  float sums[Of::kSums][Of::kChains][4] = {};
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    uint32_t upper[4], lower[4];
    if constexpr (Of::kInt4) {
      const int group = Of::kZeroPoints ? Of::group_of_word(word) : 0;
      Nibbles<T>::convert(step.upper[word], step.zero[group][0], upper);
      Nibbles<T>::convert(step.lower[word], step.zero[group][1], lower);
    } else {
      look_up(step.upper[word], kTableBytes + lane * 4, upper);
      look_up(step.lower[word], kTableBytes + lane * 4, lower);
    }
    const uint32_t first[4] = {upper[0], lower[0], upper[1], lower[1]};
    const uint32_t last[4] = {upper[2], lower[2], upper[3], lower[3]};
    float (&sum)[Of::kChains][4] = sums[Of::sum_of_word(word)];
    multiply_add<T>(sum[0], first, x[word][0], x[word][1]);
    multiply_add<T>(sum[Of::kChains - 1], last, x[word][2], x[word][3]);
  }
  float total[kRows == 1 ? 1 : 2][2] = {};  // of rows, of columns g and g + 8
#pragma unroll
  for (int sum = 0; sum < Of::kSums; ++sum) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float value = sums[sum][0][i];
      if constexpr (Of::kChains == 2) value += sums[sum][1][i];
      float& to = total[kRows == 1 ? 0 : i % 2][i / 2];
      to = fmaf(step.scale[sum][kRows == 1 ? i % 2 : 0][i / 2], value, to);
    }
  }
  constexpr uint32_t kAll = 0xffffffffu;
  // Of two lanes with sums of both columns, one receives all of column g, the other all of g + 8.
  const int by = kRows == 4 ? 2 : 1;
  const bool odd = (q & by) != 0;
  float half[kRows == 1 ? 1 : 2];
#pragma unroll
  for (int i = 0; i < (kRows == 1 ? 1 : 2); ++i) {
    const float gives = odd ? total[i][0] : total[i][1], keeps = odd ? total[i][1] : total[i][0];
    half[i] = keeps + __shfl_xor_sync(kAll, gives, by);
  }
  if constexpr (kRows == 1) {
    half[0] += __shfl_xor_sync(kAll, half[0], 2);
    if (q < 2) to[0] = adds ? to[0] + half[0] : half[0];
  } else if constexpr (kRows == 2) {
    const bool second = q >= 2;
    const float value =
        (second ? half[1] : half[0]) + __shfl_xor_sync(kAll, second ? half[0] : half[1], 2);
    to[0] = adds ? to[0] + value : value;
  } else {
    to[0] = adds ? to[0] + half[0] : half[0];
    to[most] = adds ? to[most] + half[1] : half[1];
  }
}
