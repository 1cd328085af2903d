// A product of one to four rows of bfloat16 with weights of four bits: every warp has its own 256
// features for good, with x's of them in registers, and walks over columns, 16 at a time, by a ring of
// copies of its own. No warp waits for another one until all columns are done; then the warps' sums, and
// those of the blocks of a cluster, are added up in a fixed order.
//
// The weights are the left operand of the tensor cores, 16 columns, and x is the right one, which has
// eight columns for one, two or four rows. The others hold the same rows for other groups of features:
// where a group's column meets features of another group x is 0. So one accumulator has the sums of
// several groups, and a scale multiplies each of them once.

#include <cstdint>
#include <string>

#include "common/handler.h"
#include "common/mma.cuh"
#include "common/operands.h"

namespace {

constexpr int kUnit = 16, kSlice = 256, kRowBytes = kSlice / 2;  // columns, features of a warp's step
constexpr int kWords = 8;                                        // of a column that a lane has
constexpr int kMaxWarps = 16;
constexpr int kTableBytes = 65536, kSharedBytes = 227 * 1024;
constexpr int kVector = 4;  // adjacent columns that a thread finishes at a time

enum class Codes : int { kInt4, kZeroPoints, kBits, kMixed, kTable };

__host__ __device__ constexpr bool has_table(Codes codes) { return codes == Codes::kMixed || codes == Codes::kTable; }

struct FewRowsArgs {
  const __nv_bfloat16* x;    // [rows, features]
  const uint8_t* values;     // [columns, features / 2]
  const uint8_t* scale;      // [groups, columns], float32 or bytes of E8M0
  const int8_t* zero_point;  // [groups, columns], or nullptr
  int features, groups, group;
  int blocks;      // of 16 columns
  int cluster;     // blocks that share columns
  int most;        // columns of a block, at most
  __nv_bfloat16 codebook[16];
  void* y;  // [rows, columns], float32 or bfloat16
  int rows, columns;
  bool in_float32;
};

// Where things lie. kGroups: groups of a warp's 256 features, or 2 where a group has 128 or more.
template <Codes kCodes, int kOfGroups, int kRows, int kStages>
struct Shape {
  static constexpr int kGroups = kOfGroups;
  static constexpr bool kInt4 = kCodes == Codes::kInt4 || kCodes == Codes::kZeroPoints;
  static constexpr bool kExponents = kCodes == Codes::kBits || kCodes == Codes::kMixed || (kCodes == Codes::kTable && kGroups == 8);
  static constexpr int kGroup = kSlice / kGroups;
  static constexpr int kSlots = 8 / kRows;  // groups of an accumulator
  static constexpr int kSums = kGroups > kSlots ? kGroups / kSlots : 1;
  static constexpr int kChains = kSums == 1 ? 2 : 1;  // accumulators whose sums are added
  // Adjacent bytes of a column that a lane has, so that the groups of one product fit the accumulator.
  static constexpr int kLoad = !kInt4 && kGroups == 8 && kRows == 4 ? 8 : 16;
  static constexpr int kScales = kUnit * kRowBytes;
  static constexpr int kScaleRow = kUnit * (kExponents ? 1 : 4);
  static constexpr int kZeros = kScales + kGroups * kScaleRow;
  static constexpr int kStage = kZeros + (kCodes == Codes::kZeroPoints ? kGroups * kUnit : 0);
  static constexpr int kRing = kStages * kStage;  // of a warp
  // With a table, which has 64 KB from 64 KB on, the first warps' rings lie behind it, those of the
  // others and the sums before it.
  static constexpr int kBehind = has_table(kCodes) ? (kSharedBytes - 2 * kTableBytes) / kRing : 0;

  static __host__ __device__ int before(int warps) { return (warps > kBehind ? warps - kBehind : 0) * kRing; }
  // Returns the bytes of shared memory, or more than there are.
  static __host__ __device__ int bytes(int warps, int most) {
    const int first = before(warps) + warps * kRows * most * 4;
    if (!has_table(kCodes)) return first;
    if (first > kTableBytes - 1024) return kSharedBytes + 1;
    return 2 * kTableBytes + (warps < kBehind ? warps : kBehind) * kRing;
  }

  // Returns the byte of 16 bytes of a column in a stage, so that loads of kLoad bytes of eight or
  // four columns, and copies, use all banks.
  static __device__ __forceinline__ int place(int column, int chunk) {
    if constexpr (kLoad == 16) return column * kRowBytes + ((chunk ^ ((column & 1) << 2)) << 4);
    return column * kRowBytes + ((chunk ^ ((column & 3) << 1)) << 4);
  }

  // Returns the first of the 8 features of a lane's word (of int4, of the four pairs), in its slice.
  static __device__ __forceinline__ int feature(int word, int q) {
    if constexpr (kInt4) return word * 32 + 2 * q;
    if constexpr (kLoad == 16) return word / 4 * 128 + q * 32 + word % 4 * 8;
    return word / 2 * 64 + q * 16 + word % 2 * 8;
  }
  static __host__ __device__ constexpr int group_of_word(int word) {  // of lane q = 0
    return (kInt4 ? word * 32 : kLoad == 16 ? word / 4 * 128 + word % 4 * 8 : word / 2 * 64) / kGroup;
  }
  static __host__ __device__ constexpr int sum_of_word(int word) { return group_of_word(word) / kSlots; }
};

template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  if constexpr (kPending == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
  if constexpr (kPending == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
  if constexpr (kPending == 3) asm volatile("cp.async.wait_group 3;" ::: "memory");
  if constexpr (kPending == 5) asm volatile("cp.async.wait_group 5;" ::: "memory");
#endif
}

__device__ __forceinline__ uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d = 0;
#if __CUDA_ARCH__ >= 800
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#endif
  return d;
}

__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  const __nv_bfloat162 d =
      __hmul2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(d);
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

// Returns (v - zero point) / 64 of the nibbles v of a word: pairs of nibbles i and i + 4. As a bfloat16
// the bits of a nibble, at bit 0 or 4, are v or 16 v times 2^-133.
__device__ __forceinline__ void convert_int4(uint32_t w, uint32_t offset, uint32_t (&out)[4]) {
  const uint32_t upper = w >> 8;
  out[0] = multiply_add_pairs(w & 0x000f000fu, 0x7f007f00u, offset);
  out[1] = multiply_add_pairs(w & 0x00f000f0u, 0x7d007d00u, offset);
  out[2] = multiply_add_pairs(upper & 0x000f000fu, 0x7f007f00u, offset);
  out[3] = multiply_add_pairs(upper & 0x00f000f0u, 0x7d007d00u, offset);
}

// Returns the numbers of E2M1 codes: pairs of codes i and i + 4. A code's three bits as the last ones of
// a bfloat16's exponent and the first of its mantissa are the number times 2^-126.
__device__ __forceinline__ void convert_e2m1(uint32_t w, uint32_t (&out)[4]) {
  // A product puts the code at bits 6 and 12, where its three lower bits and its sign are at their places.
  constexpr uint32_t kPlaces = 0x81c081c0u, kFactor = 0x7e807e80u;
  const uint32_t upper = w >> 8;
  out[0] = multiply_pairs(((w & 0x000f000fu) * 0x1040u) & kPlaces, kFactor);
  out[1] = multiply_pairs(((w & 0x00f000f0u) * 0x0104u) & kPlaces, kFactor);
  out[2] = multiply_pairs(((upper & 0x000f000fu) * 0x1040u) & kPlaces, kFactor);
  out[3] = multiply_pairs(((upper & 0x00f000f0u) * 0x0104u) & kPlaces, kFactor);
}

// Returns the numbers of a word's four bytes of two codes. The table lies at 64 KB of shared memory, so
// that one byte permute makes an address: 1, the byte, the lane's place.
__device__ __forceinline__ void look_up(uint32_t w, uint32_t lane_bytes, uint32_t (&out)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = load_word(__byte_perm(w, lane_bytes, 0x5604u + 16u * i));
}

// Returns a byte of E8M0 as float32: 0 is the subnormal 2^-127, 255 is NaN.
__device__ __forceinline__ float power_of_two(uint32_t exponent) {
  return __uint_as_float(exponent << 23 | (exponent - 1u >= 254u ? 0x00400000u : 0u));
}

// The slices and columns of a warp, in the order in which it takes them.
struct Walk {
  int lane, warp, warps;
  int first, count;  // blocks of 16 columns
  int rank;          // in the cluster
  int slices;

  __device__ explicit Walk(const FewRowsArgs& args)
      : lane(threadIdx.x % 32), warp(threadIdx.x / 32), warps(blockDim.x / 32) {
    const unsigned clusters = gridDim.x / args.cluster, index = blockIdx.x / args.cluster;
    first = static_cast<int>(index * static_cast<unsigned>(args.blocks) / clusters);
    count = static_cast<int>((index + 1) * static_cast<unsigned>(args.blocks) / clusters) - first;
    rank = blockIdx.x % args.cluster;
    slices = (args.features + kSlice - 1) / kSlice;
  }
  __device__ __forceinline__ int first_slice() const { return rank * warps + warp; }
  __device__ __forceinline__ int slice_step(const FewRowsArgs& args) const {
    return args.cluster * warps;
  }
};

// Hides where a number comes from, so that it stays in a register.
__device__ __forceinline__ uint32_t kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// A lane's copies of a warp: 16 columns by 256 features a step, one step after the other. Features
// beyond the last are copies of others, which meet zeros of x. Where the last 16 columns are fewer, the
// 16 before the end are taken, so that some are computed twice.
template <typename Of>
class Copies {
  static constexpr bool kZeroPoints = Of::kStage > Of::kZeros;
  static constexpr int kLanes = Of::kScaleRow / 16;  // lanes that copy a group's scales

 public:
  __device__ Copies(const FewRowsArgs& args, const Walk& walk, uint32_t ring)
      : args_(args), walk_(walk), slice_(walk.first_slice()), left_(0) {
    to_ = kept(ring + Of::place(walk.lane / 8, walk.lane % 8));
    to_scale_ = kept(ring + Of::kScales + walk.lane * 16);
    stride_ = kUnit * (args.features / 2);
    const bool has_last = walk.first + walk.count == args.blocks;
    shift_ = has_last ? args.blocks * kUnit - args.columns : 0;
    begin();
  }

  // Starts the copies of the next step into the stage at `offset`; of none beyond the last.
  __device__ __forceinline__ void next(uint32_t offset) {
    if (left_ > 0) {
      if (left_ == 1 && shift_ != 0) move(-shift_);
#pragma unroll
      for (int pass = 0; pass < 4; ++pass) {
        // Columns 4 pass + column: the same bits of the column choose the place.
        async_copy_or_zero<true>(to_ + offset + pass * 4 * kRowBytes, values_[pass], true);
        values_[pass] += stride_;
      }
      if (walk_.lane < Of::kGroups * kLanes) async_copy_or_zero(to_scale_ + offset, scale_, true);
      scale_ += Of::kScaleRow;
      if constexpr (kZeroPoints) {
        if (walk_.lane < Of::kGroups) {
          async_copy_or_zero(to_scale_ + (Of::kZeros - Of::kScales) + offset, zero_, true);
        }
        zero_ += kUnit;
      }
      if (--left_ == 0) {
        slice_ += walk_.slice_step(args_);
        begin();
      }
    }
    async_copies_commit();
  }

 private:
  __device__ __forceinline__ void begin() {
    if (slice_ >= walk_.slices) return;
    left_ = walk_.count;
    const int row_bytes = args_.features / 2, column = walk_.first * kUnit;
    const int byte = min(slice_ * kRowBytes + walk_.lane % 8 * 16, row_bytes - 16);
#pragma unroll
    for (int pass = 0; pass < 4; ++pass) {
      values_[pass] = args_.values + int64_t{column + pass * 4 + walk_.lane / 8} * row_bytes + byte;
    }
    scale_ = args_.scale + (group_start(walk_.lane / kLanes) + column) * (kLanes == 4 ? 4 : 1) + walk_.lane % kLanes * 16;
    if constexpr (kZeroPoints) zero_ = args_.zero_point + group_start(walk_.lane) + column;
  }

  // Returns the place of a group of the slice in the arrays of scales.
  __device__ __forceinline__ int64_t group_start(int group) const {
    const int feature = min(slice_ * kSlice + group * Of::kGroup, args_.features - 1);
    return static_cast<int64_t>(feature / args_.group) * args_.columns;
  }

  __device__ __forceinline__ void move(int columns) {
#pragma unroll
    for (int pass = 0; pass < 4; ++pass) values_[pass] += int64_t{columns} * (args_.features / 2);
    scale_ += columns * (kLanes == 4 ? 4 : 1);
    if constexpr (kZeroPoints) zero_ += columns;
  }

  const FewRowsArgs& args_;
  const Walk& walk_;
  uint32_t to_, to_scale_;
  int slice_, left_, stride_, shift_;
  const uint8_t *values_[4], *scale_;
  const int8_t* zero_;
};

// Loads x of a slice in the order of the weights' words: for each word, two operands of two registers.
template <typename Of, Codes kCodes, int kRows>
__device__ __forceinline__ void load_x(const FewRowsArgs& args, int slice, int lane,
                                       uint32_t (&x)[kWords][4]) {
  const int n = lane / 4, q = lane % 4, row = n % kRows, slot = n / kRows;
  const __nv_bfloat16* from = args.x + static_cast<int64_t>(row) * args.features + slice * kSlice;
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    const int feature = Of::feature(word, q);
    const int group = feature / Of::kGroup - Of::sum_of_word(word) * Of::kSlots;
    const bool exists = row < args.rows && group == slot && slice * kSlice + feature < args.features;
    if constexpr (Of::kInt4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[word][i] = exists ? __ldg(reinterpret_cast<const uint32_t*>(from + feature + 8 * i)) : 0u;
      }
    } else {
      const uint4 a = exists ? __ldg(reinterpret_cast<const uint4*>(from + feature)) : uint4{0, 0, 0, 0};
      const bool by_bits = kCodes == Codes::kBits || (kCodes == Codes::kMixed && word % 2 == 1);
      if (by_bits) {
        x[word][0] = __byte_perm(a.x, a.z, 0x5410), x[word][1] = __byte_perm(a.x, a.z, 0x7632);
        x[word][2] = __byte_perm(a.y, a.w, 0x5410), x[word][3] = __byte_perm(a.y, a.w, 0x7632);
      } else {
        x[word][0] = a.x, x[word][1] = a.y, x[word][2] = a.z, x[word][3] = a.w;
      }
    }
  }
}

// A lane's words of its columns g and g + 8, and their scales.
template <typename Of, int kRows>
struct Step {
  uint32_t upper[kWords], lower[kWords];
  static constexpr int kOfSum = kRows == 1 ? 2 : 1;  // groups of a lane's two sums of a column
  float scale[Of::kSums][kOfSum][2];
  uint32_t zero[Of::kStage > Of::kZeros ? Of::kGroups : 1][2];

  // Places of a lane's words and scales in the first stage.
  struct Places {
    uint32_t words[4], scale[Of::kSums][kOfSum], zeros;

    __device__ Places(uint32_t ring, int lane) {
      const int g = lane / 4, q = lane % 4;
      for (int i = 0; i < (Of::kLoad == 16 ? 2 : 4); ++i) {
        words[i] = Of::kLoad == 16 ? Of::place(g, i * 4 + q) : Of::place(g, i * 2 + q / 2) + q % 2 * 8;
        words[i] = kept(ring + words[i]);
      }
      for (int sum = 0; sum < Of::kSums; ++sum) {
        for (int i = 0; i < kOfSum; ++i) {
          const int group = min(sum * Of::kSlots + (2 * q + i) / kRows, Of::kGroups - 1);
          scale[sum][i] = kept(ring + Of::kScales + group * Of::kScaleRow + g * (Of::kExponents ? 1 : 4));
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
          const uint32_t from = places.scale[sum][i] + offset + 8 * half * (Of::kExponents ? 1 : 4);
          scale[sum][i][half] = Of::kExponents ? power_of_two(load_byte(from)) : __uint_as_float(load_word(from));
        }
      }
    }
    if constexpr (Of::kStage > Of::kZeros) {
#pragma unroll
      for (int group = 0; group < Of::kGroups; ++group) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // -(zero point + 8) / 64 = -(zero point + 128) / 64 + 120 / 64
          const uint32_t byte = load_byte(places.zeros + offset + group * kUnit + 8 * half);
          zero[group][half] = multiply_add_pairs((byte ^ 0x80u) * 0x00010001u, 0xff00ff00u, 0x3ff03ff0u);
        }
      }
    } else {
      zero[0][0] = zero[0][1] = 0xbe00be00u;  // -8 / 64
    }
  }
};

// Returns a lane's place in the warp's sums [rows, most] of a step.
template <int kRows>
__device__ __forceinline__ int place_of_sums(int lane, int most) {
  const int g = lane / 4, q = lane % 4;
  if (kRows == 1) return g + q % 2 * 8;
  if (kRows == 2) return g + q % 2 * 8 + q / 2 * most;
  return g + q / 2 * 8 + q % 2 * 2 * most;
}

// Multiplies a step, and writes or adds a lane's sums of its columns.
template <Codes kCodes, typename Of, int kRows>
__device__ __forceinline__ void multiply(const Step<Of, kRows>& step, const uint32_t (&x)[kWords][4],
                                         int lane, bool adds, float* to, int most) {
  const int q = lane % 4;
  float sums[Of::kSums][Of::kChains][4] = {};
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    uint32_t upper[4], lower[4];
    if constexpr (Of::kInt4) {
      const int group = Of::kStage > Of::kZeros ? Of::group_of_word(word) : 0;
      convert_int4(step.upper[word], step.zero[group][0], upper);
      convert_int4(step.lower[word], step.zero[group][1], lower);
    } else if (kCodes == Codes::kBits || (kCodes == Codes::kMixed && word % 2 == 1)) {
      convert_e2m1(step.upper[word], upper);
      convert_e2m1(step.lower[word], lower);
    } else {
      look_up(step.upper[word], kTableBytes + lane * 4, upper);
      look_up(step.lower[word], kTableBytes + lane * 4, lower);
    }
    const uint32_t first[4] = {upper[0], lower[0], upper[1], lower[1]};
    const uint32_t last[4] = {upper[2], lower[2], upper[3], lower[3]};
    float(&sum)[Of::kChains][4] = sums[Of::sum_of_word(word)];
    multiply_add<__nv_bfloat16>(sum[0], first, x[word][0], x[word][1]);
    multiply_add<__nv_bfloat16>(sum[Of::kChains - 1], last, x[word][2], x[word][3]);
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
  // Lanes of a column exchange what they have of each other's half of the columns.
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
    const float value = (second ? half[1] : half[0]) + __shfl_xor_sync(kAll, second ? half[0] : half[1], 2);
    to[0] = adds ? to[0] + value : value;
  } else {
    to[0] = adds ? to[0] + half[0] : half[0];
    to[most] = adds ? to[most] + half[1] : half[1];
  }
}

__device__ __forceinline__ void write_table(const FewRowsArgs& args, uint8_t* table, int lane, int warp, int warps) {
  for (int high = warp; high < 16; high += warps) {
    __nv_bfloat162 pair;
    pair.y = args.codebook[high];
#pragma unroll
    for (int low = 0; low < 16; ++low) {
      pair.x = args.codebook[low];
      reinterpret_cast<__nv_bfloat162*>(table + (high * 16 + low) * 256)[lane] = pair;
    }
  }
}

__device__ __forceinline__ void store(const FewRowsArgs& args, int row, int column, const float (&z)[kVector]) {
  const int64_t at = int64_t{row} * args.columns + column;
  if (args.in_float32) {
    *reinterpret_cast<float4*>(static_cast<float*>(args.y) + at) = {z[0], z[1], z[2], z[3]};
  } else {
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(args.y) + at) = {rounded_pair<__nv_bfloat16>(z[0], z[1]), rounded_pair<__nv_bfloat16>(z[2], z[3])};
  }
}

template <Codes kCodes, int kGroups, int kRows, int kStages>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) few_rows_kernel(const __grid_constant__ FewRowsArgs args) {
  if constexpr (kHasBulkCopies) {
    using Of = Shape<kCodes, kGroups, kRows, kStages>;
    extern __shared__ __align__(1024) uint8_t memory[];
    const Walk walk(args);
    uint8_t* const behind = memory + (2 * kTableBytes - shared_address(memory));
    uint8_t* const ring = walk.warp < Of::kBehind ? behind + walk.warp * Of::kRing : memory + (walk.warp - Of::kBehind) * Of::kRing;
    float* const all_sums = reinterpret_cast<float*>(memory + Of::before(walk.warps));
    float* const own = all_sums + walk.warp * kRows * args.most;
    Copies<Of> copies(args, walk, shared_address(ring));
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) copies.next(stage * Of::kStage);
    uint32_t x[kWords][4];
    if constexpr (has_table(kCodes)) {
      write_table(args, memory + (kTableBytes - shared_address(memory)), walk.lane, walk.warp, walk.warps);
      load_x<Of, kCodes, kRows>(args, walk.first_slice(), walk.lane, x);
      __syncthreads();
    } else {
      load_x<Of, kCodes, kRows>(args, walk.first_slice(), walk.lane, x);
    }
    using OfStep = Step<Of, kRows>;
    const typename OfStep::Places places(shared_address(ring), walk.lane);
    float* const own_sums = own + place_of_sums<kRows>(walk.lane, args.most);
    uint32_t offset = 0;
    bool adds = false;
    for (int slice = walk.first_slice(); slice < walk.slices; slice += walk.slice_step(args)) {
      if (adds) load_x<Of, kCodes, kRows>(args, slice, walk.lane, x);
      float* to = own_sums;
#pragma unroll 1
      for (int left = walk.count; left > 0; --left) {
        wait_for_copies<kStages - 1>();
        __syncwarp();
        OfStep step;
        step.load(places, offset);
        __syncwarp();
        copies.next(offset);
        multiply<kCodes, Of, kRows>(step, x, walk.lane, adds, to, args.most);
        to += kUnit;
        offset = offset == (kStages - 1) * Of::kStage ? 0 : offset + Of::kStage;
      }
      adds = true;
    }
    if (!adds) {  // a warp without a slice
      for (int i = walk.lane; i < kRows * args.most; i += 32) own[i] = 0.0f;
    }
    __syncthreads();
    const int vectors = walk.count * kUnit / kVector, rows = args.rows;
    const int last = args.columns - kUnit;
    const auto column_of = [&](int place) {
      return min(walk.first * kUnit + place / kUnit * kUnit, last) + place % kUnit;
    };
    constexpr float kBack = Of::kInt4 ? 64.0f : 1.0f;
    for (int i = threadIdx.x; i < rows * vectors; i += blockDim.x) {
      const int row = i / vectors, column = i % vectors * kVector;
      float z[kVector] = {};
      for (int warp = 0; warp < walk.warps; ++warp) {
        const float4 part = *reinterpret_cast<const float4*>(all_sums + (warp * kRows + row) * args.most + column);
        z[0] += part.x, z[1] += part.y, z[2] += part.z, z[3] += part.w;
      }
#pragma unroll
      for (int k = 0; k < kVector; ++k) z[k] *= kBack;
      if (args.cluster == 1) {
        store(args, row, column_of(column), z);
      } else {
        // The first warp's sums are read no more by others than this thread.
        *reinterpret_cast<float4*>(all_sums + row * args.most + column) = {z[0], z[1], z[2], z[3]};
      }
    }
    if (args.cluster > 1) {
      cluster_sync();
      for (int i = threadIdx.x; i < rows * vectors; i += blockDim.x) {
        if (i % args.cluster != walk.rank) continue;
        const int row = i / vectors, column = i % vectors * kVector;
        float z[kVector] = {};
        for (int rank = 0; rank < args.cluster; ++rank) {
          const uint32_t from = cluster_address(all_sums + row * args.most + column, rank);
#pragma unroll
          for (int k = 0; k < kVector; ++k) {
            float part = 0.0f;
            asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(part) : "r"(from + 4 * k) : "memory");
            z[k] += part;
          }
        }
        store(args, row, column_of(column), z);
      }
      cluster_sync();
    }
  }
}

// --- the handler ---------------------------------------------------------------------------------

struct Choice {
  void (*kernel)(FewRowsArgs) = nullptr;
  int (*bytes)(int, int) = nullptr;
};

template <Codes kCodes, int kGroups, int kRows>
Choice choose(int stages) {
  switch (stages) {
#define CASE(n) \
  case n:       \
    return {few_rows_kernel<kCodes, kGroups, kRows, n>, Shape<kCodes, kGroups, kRows, n>::bytes};
    STAGES
#undef CASE
    default:
      return {};
  }
}

template <Codes kCodes, int kGroups>
Choice choose(int rows, int stages) {
  if (rows == 1) return choose<kCodes, kGroups, 1>(stages);
  if (rows == 2) return choose<kCodes, kGroups, 2>(stages);
  return choose<kCodes, kGroups, 4>(stages);
}

ffi::Error few_rows(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer scale,
                    ffi::AnyBuffer zero_point, ffi::Result<ffi::AnyBuffer> y,
                    ffi::Span<const float> codebook, int64_t how, int64_t warps, int64_t cluster,
                    int64_t blocks, int64_t stages) {
  FewRowsArgs args = {};
  const int64_t rows = x.dimensions()[0], features = x.dimensions()[1];
  const int64_t columns = values.dimensions()[0], groups = scale.dimensions()[0];
  const bool in_words = values.element_type() == ffi::DataType::S32;
  const bool exponents = scale.element_type() == ffi::DataType::U8;
  if (rows < 1 || rows > 4 || features % 32 != 0 || values.dimensions()[1] * (in_words ? 8 : 2) != features) {
    return ffi::Error::InvalidArgument("shapes");
  }
  const bool has_zeros = !is_absent(zero_point);
  if (columns < kUnit || columns % (exponents || has_zeros ? 16 : 4) != 0) return ffi::Error::InvalidArgument("columns");
  RETURN_IF_ERROR(check_shape("scale", scale, {groups, columns}));
  if (has_zeros) RETURN_IF_ERROR(check_shape("zero_point", zero_point, {groups, columns}));
  args.rows = static_cast<int>(rows);
  args.columns = static_cast<int>(columns);
  args.y = y->untyped_data();
  args.in_float32 = y->element_type() == ffi::DataType::F32;
  if (!args.in_float32) RETURN_IF_ERROR(check_dtype("y", *y, ffi::DataType::BF16));
  RETURN_IF_ERROR(check_shape("y", *y, {rows, columns}));
  args.x = static_cast<const __nv_bfloat16*>(x.untyped_data());
  args.values = static_cast<const uint8_t*>(values.untyped_data());
  args.scale = static_cast<const uint8_t*>(scale.untyped_data());
  args.zero_point = data_or_null<const int8_t>(zero_point);
  args.features = static_cast<int>(features);
  args.groups = static_cast<int>(groups);
  args.group = groups == 1 ? 1 << 30 : static_cast<int>(features / groups);
  if (codebook.size() == 16) {
    for (int i = 0; i < 16; ++i) args.codebook[i] = __float2bfloat16_rn(codebook[i]);
  }
  const int r = static_cast<int>(rows), s = static_cast<int>(stages);
  Choice chosen = {};
  const int of_slice = args.group == 32 ? 8 : args.group == 64 ? 4 : 2;
  Codes codes = in_words ? has_zeros ? Codes::kZeroPoints : Codes::kInt4
                : how == 0 ? Codes::kBits : how == 1 ? Codes::kMixed : Codes::kTable;
  const auto find = [&](Choice (*choose)(int, int), Codes of, int groups) {
    if (codes == of && of_slice == groups) chosen = choose(r, s);
  };
  if (has_table(codes) && cluster > 1) return ffi::Error::InvalidArgument("a table's place is a block's own");
#define BUILT(codes, groups) find(choose<Codes::codes, groups>, Codes::codes, groups);
  KERNELS
#undef BUILT
  if (chosen.kernel == nullptr) return ffi::Error::InvalidArgument("not built");
  if (args.group < 128 ? args.group != 32 && args.group != 64 : groups > 1 && args.group % 128 != 0) {
    return ffi::Error::InvalidArgument("groups");
  }
  if (warps < 1 || warps > kMaxWarps || cluster < 1 || cluster > 8 || blocks % cluster != 0) {
    return ffi::Error::InvalidArgument("warps, cluster or blocks");
  }
  args.blocks = static_cast<int>((columns + kUnit - 1) / kUnit);
  args.cluster = static_cast<int>(cluster);
  const int clusters = static_cast<int>(blocks / cluster);
  args.most = (args.blocks + clusters - 1) / clusters * kUnit;
  Device device = {};
  RETURN_IF_ERROR(current_device(&device));
  const int bytes = chosen.bytes(static_cast<int>(warps), args.most);
  if (bytes > device.shared_bytes) return ffi::Error::InvalidArgument("too much shared memory: " + std::to_string(bytes));
  const Launch launch = {dim3(static_cast<unsigned>(blocks)), static_cast<int>(warps) * 32, bytes, args.cluster};
  RETURN_IF_ERROR(allow_shared_memory(chosen.kernel, device));
  return launch_kernel(chosen.kernel, args, launch, stream);
}

}  // namespace

DEFINE_HANDLER(jaxfused_few_rows, few_rows,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // values
                   .Arg<ffi::AnyBuffer>()  // scale
                   .Arg<ffi::AnyBuffer>()  // zero_point
                   .Ret<ffi::AnyBuffer>()  // y
                   .Attr<ffi::Span<const float>>("codebook")
                   .Attr<int64_t>("how")
                   .Attr<int64_t>("warps")
                   .Attr<int64_t>("cluster")
                   .Attr<int64_t>("blocks")
                   .Attr<int64_t>("stages"),
               {ffi::Traits::kCmdBufferCompatible});
