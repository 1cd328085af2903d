// Quantises matrices to float8 and transposes them in one read. A product and its gradients need
// both forms, since they sum along the last axis of their operands. Zeros pad the rows of the
// results to a multiple of 16 bytes.
//
// A tile has 128 rows and 64 columns. A thread reads 8 adjacent values, writes them in float8 in
// the same order, and stores them in shared memory. It reads back 8 rows of a column as 8 adjacent
// bytes.
#include <cuda_fp8.h>

#include <cfloat>
#include <cstdint>
#include <string>

#include "common/activation.cuh"
#include "common/handler.h"
#include "common/operands.h"

namespace {

constexpr int kThreads = 256;
constexpr int kTileRows = 128;
constexpr int kTileColumns = 64;
constexpr int kVec = 8;                           // values that a thread reads at once
constexpr int kRowThreads = kTileColumns / kVec;  // threads along a tile's row
constexpr int kPassRows = kThreads / kRowThreads;
constexpr int kPasses = kTileRows / kPassRows;
constexpr int kWords = kTileColumns / 4;  // words of a tile's row in shared memory
constexpr int kGroups = kTileRows / 8;
constexpr int kMaxSources = 3;
static_assert(kThreads == kGroups * kWords);

struct Sources {
  const void* data[kMaxSources];
  int64_t sizes[kMaxSources];
};

struct QuantizeArgs {
  Sources sources;        // matrices to concatenate along columns, or a gate and its factor
  int ends[kMaxSources];  // end (exclusive) of each source's columns when concatenated
  const float* largest;   // magnitudes whose maximum sets the scale
  int largest_count;
  float reciprocal;     // 1 / the largest number of the results' dtype
  float slope_steps;    // int8 code that stands for a derivative of 1
  bool from_end;        // whether blocks start with the last rows, which L2 may still hold
  float* scale;         // scale of the results, [1], or nullptr
  uint8_t* values;      // quantised matrix, [rows, pitch], or nullptr
  uint8_t* transposed;  // its transpose, [columns, row_pitch], or nullptr
  float* sums;          // column sums of every 128 rows, or nullptr
  float* found;         // [tiles], each tile's largest magnitude before scaling, or nullptr
  int8_t* slope;        // codes of the activation's derivative, [rows, pitch], or nullptr
  int rows;
  int columns;
  int pitch;
  int row_pitch;
  int down;    // number of rows of tiles
  int across;  // number of columns of tiles
  Activation activation;
};

// Returns the largest `bits` of a block's threads. They are floats' bits without the sign, which
// compare as integers like the magnitudes, with NaN above all.
__device__ __forceinline__ uint32_t largest_of_block(uint32_t bits) {
  __shared__ uint32_t of_warps[32];
  bits = largest_of_warp(bits);
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = bits;
  __syncthreads();
  const int warps = blockDim.x / 32;
  for (int i = 0; i < warps; ++i) bits = max(bits, of_warps[i]);
  return bits;
}

// Returns the scale: at least FLT_MIN, so that it can be divided by, and NaN if a magnitude is not
// finite. Each warp computes it without a barrier, while its loads of the matrix are in flight.
__device__ __forceinline__ float scale_of(const QuantizeArgs& args) {
  uint32_t bits = 0;
  if (args.largest_count == 1) {
    bits = __float_as_uint(*args.largest) & 0x7fffffffu;
  } else {
    for (int i = threadIdx.x % 32; i < args.largest_count; i += 32) {
      bits = max(bits, __float_as_uint(args.largest[i]) & 0x7fffffffu);
    }
    bits = largest_of_warp(bits);
  }
  if (bits >= 0x7f800000u) return __uint_as_float(0x7fffffffu);
  return fmaxf(__uint_as_float(bits) * args.reciprocal, FLT_MIN);
}

// A block's tile. Consecutive blocks go down a column of tiles, or up if `from_end`.
struct Tile {
  int row;     // index of the tile's row of tiles
  int column;  // index of the tile's column of tiles

  __device__ __forceinline__ explicit Tile(const QuantizeArgs& args)
      : row(blockIdx.x % args.down), column(blockIdx.x / args.down) {
    if (args.from_end) {
      row = args.down - 1 - row;
      column = args.across - 1 - column;
    }
  }
};

// Offsets of a tile's words in shared memory. Word `word` of row `row` is at
//   (row ^ word % 2) * kWords + (word ^ row / 8 ^ row / 2 % 2),
// so that neither writes nor reads have bank conflicts. A warp writes every other word of four
// rows, and reads two adjacent words of one row of each group of 8. Terms that depend on neither
// the pass nor the row in a group are computed once.
struct Places {
  int written,
      written_swizzle;     // offset of the first written row, and its swizzled word
  int read[2], read_step;  // base offsets by row / 2 % 2, and the swap of odd and even rows

  __device__ __forceinline__ Places() {
    const int row = threadIdx.x / kRowThreads, word = threadIdx.x % kRowThreads * 2;
    written = row * kWords;
    written_swizzle = word ^ row / 8 ^ row / 2 % 2;
    const int group = threadIdx.x % kGroups, of_group = threadIdx.x / kGroups;
    read_step = of_group % 2 ? kWords : 0;
    read[0] = group * 8 * kWords + (of_group ^ group);
    read[1] = group * 8 * kWords + (of_group ^ group ^ 1);
  }

  // Return the offsets of the two words, an even and an odd one, that a thread writes in a pass.
  __device__ __forceinline__ int even(int pass) const {
    return written + pass * kPassRows * kWords + (written_swizzle ^ pass * (kPassRows / 8));
  }
  __device__ __forceinline__ int odd(int pass) const {
    const int other_row = written ^ kWords;
    return other_row + pass * kPassRows * kWords + (written_swizzle ^ pass * (kPassRows / 8) ^ 1);
  }

  // Returns the offset of the word that a thread reads in a row of its group.
  __device__ __forceinline__ int of_row(int row) const {
    return read[row / 2 % 2] + row * kWords + (row % 2 ? -read_step : read_step);
  }
};

// The part of a source matrix from one of its columns on.
template <typename T>
struct Columns {
  const T* data;
  int width;  // width of the source's rows
};

template <typename T>
__device__ __forceinline__ Columns<T> columns_from(const QuantizeArgs& args, int column) {
  // Selecting by comparisons keeps the arguments out of local memory; indexing by a variable would
  // copy them there.
  const bool after_first = column >= args.ends[0], after_second = column >= args.ends[1];
  const int start = after_second ? args.ends[1] : after_first ? args.ends[0] : 0;
  const int end = after_second ? args.ends[2] : after_first ? args.ends[1] : args.ends[0];
  const void* source = after_second  ? args.sources.data[2]
                       : after_first ? args.sources.data[1]
                                     : args.sources.data[0];
  return {static_cast<const T*>(source) + (column - start), end - start};
}

// Values that are being loaded: a thread waits for them only when it unpacks them.
template <typename T>
struct Raw {
  static constexpr int kPart = 16 / sizeof(T);
  Vector<T, kPart> parts[kVec / kPart] = {};

  __device__ __forceinline__ void load(const T* data) {
#pragma unroll
    for (int i = 0; i < kVec / kPart; ++i) parts[i] = load_vector<T, kPart>(data + i * kPart);
  }

  __device__ __forceinline__ void unpack_to(float (&out)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec / kPart; ++i) {
      float part[kPart];
      unpack(parts[i], part);
#pragma unroll
      for (int j = 0; j < kPart; ++j) out[i * kPart + j] = part[j];
    }
  }
};

// Terms of gelu_erf and its derivative, accurate enough for 8 bits. erfc is formula 7.1.26 of
// Abramowitz and Stegun, with an error of at most 1.5e-7; erfcf would take longer than reading and
// writing the values.
struct Erf {
  float bell;  // exp(-x^2 / 2)
  float tail;  // probability that a normal variable exceeds |x|

  __device__ __forceinline__ explicit Erf(float x) {
    using namespace activation_detail;
    const float t = quick_reciprocal(fmaf(0.3275911f * kSqrtHalf, fabsf(x), 1.0f));
    float polynomial = fmaf(1.061405429f, t, -1.453152027f);
    polynomial = fmaf(polynomial, t, 1.421413741f);
    polynomial = fmaf(polynomial, t, -0.284496736f);
    polynomial = fmaf(polynomial, t, 0.254829592f) * t;
    bell = quick_exp(-0.5f * x * x);
    tail = 0.5f * polynomial * bell;
  }

  __device__ __forceinline__ float gelu(float x) const { return fmaxf(x, 0.0f) - fabsf(x) * tail; }
};

__device__ __forceinline__ void activate_for_fp8(Activation activation, float (&values)[kVec]) {
  if (activation != Activation::kGeluErf) return activate(activation, values);
#pragma unroll
  for (float& x : values) x = Erf(x).gelu(x);
}

// Whether activate_with_slope supports the activation.
bool has_slope(Activation activation) {
  switch (activation) {
    case Activation::kRelu:
    case Activation::kGeluTanh:
    case Activation::kGeluErf:
    case Activation::kQuickGelu:
    case Activation::kSilu:
      return true;
    default:
      return false;
  }
}

// Applies the activation like activate_for_fp8, and sets `slope` to the derivative. The derivative
// is stored in steps of about 0.01, so cancellation in gate - gate^2 does not matter.
__device__ __forceinline__ void activate_with_slope(Activation activation, float (&values)[kVec],
                                                    float (&slope)[kVec]) {
  using namespace activation_detail;
  switch (activation) {
    case Activation::kGeluTanh: {
      // The gate is 1 / (1 + 2^(x (kPower + kPowerCubic x^2))).
      constexpr float kPower = -1.4426950408889634f * kGeluTwo;
      constexpr float kPowerCubic = kPower * kGeluCubic;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float x = values[i], square = x * x;
        const float gate =
            quick_reciprocal(1.0f + quick_exp2(x * fmaf(kPowerCubic, square, kPower)));
        const float growth = x * fmaf(3.0f * kGeluCubic * kGeluTwo, square, kGeluTwo);
        values[i] = x * gate;
        slope[i] = fmaf(fmaf(-gate, gate, gate), growth, gate);
      }
      break;
    }
    case Activation::kQuickGelu:
    case Activation::kSilu: {
      const float rate = activation == Activation::kSilu ? 1.0f : kQuickGelu;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float x = values[i], z = rate * x, gate = sigmoid(z);
        values[i] = x * gate;
        slope[i] = fmaf(fmaf(-gate, gate, gate), z, gate);
      }
      break;
    }
    case Activation::kGeluErf:
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float x = values[i];
        const Erf erf(x);
        values[i] = erf.gelu(x);
        slope[i] = fmaf(x * kInvSqrtTwoPi, erf.bell, x > 0.0f ? 1.0f - erf.tail : erf.tail);
      }
      break;
    default:
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        slope[i] = values[i] > 0.0f ? 1.0f : 0.0f;
        values[i] = relu(values[i]);
      }
      break;
  }
}

// Rounds values to int8 in units of 1 / steps. After adding 1.5 * 2^23 a float32 has the integer in
// its lowest bits, and a conversion instruction would be several times slower than this addition.
__device__ __forceinline__ uint2 to_int8(const float (&in)[kVec], float steps) {
  uint32_t bits[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) bits[i] = __float_as_uint(fmaf(in[i], steps, 12582912.0f));
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t low = __byte_perm(bits[4 * i], bits[4 * i + 1], 0x0040);
    const uint32_t high = __byte_perm(bits[4 * i + 2], bits[4 * i + 3], 0x0040);
    words[i] = __byte_perm(low, high, 0x5410);
  }
  return {words[0], words[1]};
}

// Rounds four values to float8, and clips them to the largest number.
template <__nv_fp8_interpretation_t kFormat>
__device__ __forceinline__ uint32_t to_fp8(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  uint32_t word;
  if constexpr (kFormat == __NV_E4M3) {
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(word)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  } else {
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(word)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  }
  return word;
#else
  const uint32_t low = __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, kFormat);
  const uint32_t high = __nv_cvt_float2_to_fp8x2({c, d}, __NV_SATFINITE, kFormat);
  return low | high << 16;
#endif
}

// Writes the transpose of the tile in shared memory; a thread has four columns of 8 rows.
__device__ __forceinline__ void store_transposed(const QuantizeArgs& args, const uint32_t* tile,
                                                 const Places& places, int row_start,
                                                 int column_start) {
  const int group = threadIdx.x % kGroups, word = threadIdx.x / kGroups;
  const int row = row_start + group * 8, column = column_start + word * 4;
  uint32_t words[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) words[i] = tile[places.of_row(i)];
  if (row >= args.row_pitch || column >= args.columns) return;
  uint8_t* to = args.transposed + static_cast<int64_t>(column) * args.row_pitch + row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Puts byte 2 half of two rows into the lower half of a word, byte 2 half + 1 into the upper.
    const uint32_t order = half ? 0x7362u : 0x5140u;
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = __byte_perm(words[2 * i], words[2 * i + 1], order);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t halves = i ? 0x7632u : 0x5410u;
      *reinterpret_cast<uint2*>(to) = {__byte_perm(pairs[0], pairs[1], halves),
                                       __byte_perm(pairs[2], pairs[3], halves)};
      to += args.row_pitch;
    }
  }
}

// Adds up the columns of a tile, always in the same order, and writes their sums.
__device__ __forceinline__ void store_sums(const QuantizeArgs& args, float (&sums)[kVec],
                                           int64_t row_block, int column_start) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float of_warps[kWarps][kTileColumns];
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
#pragma unroll
    for (int lanes = kRowThreads; lanes < 32; lanes *= 2) {
      sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], lanes);
    }
  }
  const int lane = threadIdx.x % 32;
  if (lane < kRowThreads) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) of_warps[threadIdx.x / 32][lane * kVec + i] = sums[i];
  }
  __syncthreads();
  const int column = column_start + static_cast<int>(threadIdx.x);
  if (threadIdx.x >= kTileColumns || column >= args.columns) return;
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) total += of_warps[warp][threadIdx.x];
  args.sums[row_block * args.columns + column] = total;
}

// What is quantised: plain matrices; the product of an activated gate and a factor; matrices whose
// column sums are stored too; an activation whose derivative is stored too.
enum class Form { kPlain, kGated, kSums, kSlope };

// A thread's values of a tile, while they are being loaded.
template <typename T, bool kGated>
struct Load {
  Raw<T> values[kPasses];
  Raw<T> factors[kGated ? kPasses : 1];

  __device__ __forceinline__ void start(const QuantizeArgs& args, const Tile& place) {
    const int column =
        place.column * kTileColumns + static_cast<int>(threadIdx.x % kRowThreads) * kVec;
    const int first_row = place.row * kTileRows + static_cast<int>(threadIdx.x) / kRowThreads;
    // Threads beyond the end read column 0 or the last row: a branch would wait for the loads.
    const int in_source = column < args.columns ? column : 0;
    const Columns<T> source = columns_from<T>(args, in_source);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = min(first_row + pass * kPassRows, args.rows - 1);
      values[pass].load(source.data + static_cast<int64_t>(row) * source.width);
      if constexpr (kGated) {
        factors[pass].load(static_cast<const T*>(args.sources.data[1]) +
                           static_cast<int64_t>(row) * source.width + in_source);
      }
    }
  }
};

template <typename T, __nv_fp8_interpretation_t kFormat, Form kForm>
__device__ __forceinline__ void quantize_tile(const QuantizeArgs& args, const Tile& place,
                                              const Load<T, kForm == Form::kGated>& load,
                                              float inverse, uint32_t* words) {
  constexpr bool kGated = kForm == Form::kGated;
  const int row_start = place.row * kTileRows, column_start = place.column * kTileColumns;
  const int column = column_start + static_cast<int>(threadIdx.x % kRowThreads) * kVec;
  const int first_row = threadIdx.x / kRowThreads;
  // Beyond the matrix, threads compute on repeated values, and store zeros or nothing.
  const int rows_left = args.rows - row_start - first_row;
  const int rows = column < args.columns ? rows_left : 0;
  const int rows_of_pitch = column < args.pitch ? rows_left : 0;
  const int stored_rows = args.values == nullptr ? 0 : rows_of_pitch;
  const int64_t row = row_start + first_row;
  uint8_t* stored = args.values + row * args.pitch + column;
  int8_t* stored_slope = args.slope + row * args.pitch + column;
  const Places places;
  float sums[kVec] = {};
  uint32_t found = 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    float values[kVec];
    load.values[pass].unpack_to(values);
    if constexpr (kForm == Form::kSums) {
      if (pass * kPassRows < rows) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) sums[i] += values[i];
      }
    }
    if constexpr (kForm == Form::kSlope) {
      float slope[kVec];
      activate_with_slope(args.activation, values, slope);
      const bool inside = pass * kPassRows < rows;
      const uint2 steps = inside ? to_int8(slope, args.slope_steps) : uint2{0, 0};
      if (pass * kPassRows < rows_of_pitch) *reinterpret_cast<uint2*>(stored_slope) = steps;
      stored_slope += int64_t{kPassRows} * args.pitch;
    } else {
      activate_for_fp8(args.activation, values);
    }
    if constexpr (kGated) {
      float factors[kVec];
      load.factors[pass].unpack_to(factors);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] *= factors[i];
    }
    if (args.found != nullptr) {
#pragma unroll
      for (const float value : values) found = max(found, __float_as_uint(value) & 0x7fffffffu);
    }
#pragma unroll
    for (float& value : values) value *= inverse;
    uint2 packed = {to_fp8<kFormat>(values[0], values[1], values[2], values[3]),
                    to_fp8<kFormat>(values[4], values[5], values[6], values[7])};
    if (pass * kPassRows >= rows) packed = {0, 0};
    if (pass * kPassRows < stored_rows) *reinterpret_cast<uint2*>(stored) = packed;
    stored += int64_t{kPassRows} * args.pitch;
    words[places.even(pass)] = packed.x;
    words[places.odd(pass)] = packed.y;
  }
  if (args.found != nullptr) {
    found = largest_of_block(found);
    args.found[place.column * args.down + place.row] = __uint_as_float(found);
  }
  if constexpr (kForm == Form::kSums) store_sums(args, sums, place.row, column_start);
  if (args.transposed == nullptr) return;
  __syncthreads();
  store_transposed(args, words, places, row_start, column_start);
}

constexpr int kUnroll = 4;

// Returns the bits of the largest magnitude among a thread's values of the sources. A thread reads
// from the end to the beginning, because L2 may still hold the values written last, and will hold
// those read last. With `kBounds`, negative values count as 0.
template <typename T, bool kBounds>
__device__ __forceinline__ uint32_t largest_of_thread(const Sources& sources) {
  constexpr int kSize = 16 / sizeof(T);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  uint32_t bits = 0;
  const auto see = [&](float value) {
    if constexpr (kBounds) value = activation_detail::relu(value);
    bits = max(bits, __float_as_uint(value) & 0x7fffffffu);
  };
#pragma unroll
  for (int source = kMaxSources - 1; source >= 0; --source) {
    const T* data = static_cast<const T*>(sources.data[source]);
    const int64_t size = sources.sizes[source], vectors = size / kSize;
    const auto see_vector = [&](int64_t vector) {
      float values[kSize];
      unpack(load_vector<T, kSize>(data + vector * kSize), values);
#pragma unroll
      for (const float value : values) see(value);
    };
    for (int64_t i = vectors * kSize + thread; i < size; i += threads) {
      see(static_cast<float>(data[i]));
    }
    int64_t end = vectors;
    for (; end >= kUnroll * threads; end -= kUnroll * threads) {
#pragma unroll
      for (int i = 1; i <= kUnroll; ++i) see_vector(end - i * threads + thread);
    }
    for (int64_t vector = end - 1 - thread; vector >= 0; vector -= threads) see_vector(vector);
  }
  return bits;
}

template <typename T, Form kForm>
constexpr int kBlocks =  // resident blocks of an SM
    sizeof(T) == 2 ? (kForm == Form::kGated ? 2 : 4) : (kForm == Form::kGated ? 1 : 2);

template <typename T, __nv_fp8_interpretation_t kFormat, Form kForm>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kForm>) quantize_kernel(QuantizeArgs args) {
  __shared__ uint32_t words[kTileRows * kWords];
  const Tile place(args);
  Load<T, kForm == Form::kGated> load;
  load.start(args, place);
  const float scale = scale_of(args), inverse = __frcp_rn(scale);
  if (args.scale != nullptr && blockIdx.x == 0) *args.scale = scale;
  quantize_tile<T, kFormat, kForm>(args, place, load, inverse, words);
}

using Kernel = void (*)(QuantizeArgs);

template <typename T, __nv_fp8_interpretation_t kFormat>
Kernel kernel_of(Form form) {
  switch (form) {
    case Form::kPlain:
      return quantize_kernel<T, kFormat, Form::kPlain>;
    case Form::kSums:
      return quantize_kernel<T, kFormat, Form::kSums>;
    case Form::kGated:
      return quantize_kernel<T, kFormat, Form::kGated>;
    case Form::kSlope:
      return quantize_kernel<T, kFormat, Form::kSlope>;
  }
  return nullptr;
}

template <__nv_fp8_interpretation_t kFormat>
Kernel kernel_of(Dtype dtype, Form form) {
  switch (dtype) {
    case Dtype::kFloat32:
      return kernel_of<float, kFormat>(form);
    case Dtype::kBfloat16:
      return kernel_of<__nv_bfloat16, kFormat>(form);
    case Dtype::kFloat16:
      return kernel_of<__half, kFormat>(form);
  }
  return nullptr;
}

// Returns the pitch of float8 rows of `length` numbers: TMA takes multiples of 16 bytes.
int64_t padded(int64_t length) { return (length + 15) / 16 * 16; }

// Checks the source matrices, and sets pointers, columns and pitches in `args`.
ffi::Error parse_sources(const ffi::AnyBuffer* const (&buffers)[kMaxSources], bool gated,
                         QuantizeArgs* args) {
  const ffi::AnyBuffer& first = *buffers[0];
  if (!dtype_of(first) || first.dimensions().size() != 2 || first.dimensions()[0] > kMaxRows) {
    return ffi::Error::InvalidArgument(
        "the matrix must be float32, bfloat16 or float16 of two axes, but has shape " +
        to_string(first.dimensions()));
  }
  args->rows = static_cast<int>(first.dimensions()[0]);
  int64_t columns = 0;
  for (int i = 0; i < kMaxSources; ++i) {
    const ffi::AnyBuffer& buffer = *buffers[i];
    if (!is_absent(buffer)) {
      RETURN_IF_ERROR(check_dtype("a matrix", buffer, first.element_type()));
      if (buffer.dimensions().size() != 2) {
        return ffi::Error::InvalidArgument("a matrix has other than two axes");
      }
      const int64_t width = buffer.dimensions()[1];
      RETURN_IF_ERROR(check_shape("a matrix", buffer, {args->rows, width}));
      if (width % kVec != 0) {
        return ffi::Error::InvalidArgument("a matrix has columns that are no multiple of 8");
      }
      if (i == 0 || !gated) columns += width;
      args->sources.data[i] = buffer.untyped_data();
      args->sources.sizes[i] = static_cast<int64_t>(buffer.element_count());
    }
    args->ends[i] = static_cast<int>(columns);
  }
  args->columns = static_cast<int>(columns);
  args->pitch = static_cast<int>(padded(columns));
  args->row_pitch = static_cast<int>(padded(args->rows));
  const void* const* data = args->sources.data;
  if (columns > kMaxRows || (gated && (data[1] == nullptr || data[2] != nullptr))) {
    return ffi::Error::InvalidArgument("too many columns, or not one gated matrix for one gate");
  }
  if (gated) RETURN_IF_ERROR(check_shape("the gated matrix", *buffers[1], {args->rows, columns}));
  return ffi::Error::Success();
}

ffi::Error quantize(cudaStream_t stream, ffi::AnyBuffer first, ffi::AnyBuffer second,
                    ffi::AnyBuffer third, ffi::AnyBuffer largest,
                    ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> transposed,
                    ffi::Result<ffi::AnyBuffer> scale, ffi::Result<ffi::AnyBuffer> sums,
                    ffi::Result<ffi::AnyBuffer> found, ffi::Result<ffi::AnyBuffer> slope,
                    std::string_view activation, bool gated, bool from_end, float slope_steps) {
  if (is_absent(first)) return ffi::Error::Success();
  QuantizeArgs args = {};
  RETURN_IF_ERROR(parse_activation(activation, &args.activation));
  RETURN_IF_ERROR(parse_sources({&first, &second, &third}, gated, &args));
  const int64_t rows = args.rows, columns = args.columns;
  const int64_t count = largest.element_count();
  if (count < 1 || count > kMaxRows) {
    return ffi::Error::InvalidArgument("there is no largest magnitude, or there are too many");
  }
  RETURN_IF_ERROR(check_float32("largest", largest, {count}));
  args.largest = static_cast<const float*>(largest.untyped_data());
  args.largest_count = static_cast<int>(count);
  args.from_end = from_end;
  if (!is_absent(*scale)) {
    RETURN_IF_ERROR(check_float32("scale", *scale, {1}));
    args.scale = static_cast<float*>(scale->untyped_data());
  }
  const ffi::DataType format =
      is_absent(*values) ? transposed->element_type() : values->element_type();
  if (format != ffi::DataType::F8E4M3FN && format != ffi::DataType::F8E5M2) {
    return ffi::Error::InvalidArgument("the results must be float8_e4m3fn or float8_e5m2");
  }
  args.reciprocal = 1.0f / (format == ffi::DataType::F8E4M3FN ? 448.0f : 57344.0f);
  if (!is_absent(*values)) {
    RETURN_IF_ERROR(check_shape("values", *values, {rows, padded(columns)}));
    args.values = static_cast<uint8_t*>(values->untyped_data());
  }
  if (!is_absent(*transposed)) {
    RETURN_IF_ERROR(check_shape("transposed", *transposed, {columns, padded(rows)}));
    RETURN_IF_ERROR(check_dtype("transposed", *transposed, format));
    args.transposed = static_cast<uint8_t*>(transposed->untyped_data());
  }
  Form form = gated ? Form::kGated : Form::kPlain;
  if (!is_absent(*slope)) {
    if (!has_slope(args.activation)) {
      return ffi::Error::InvalidArgument(
          "the derivative of this activation is not stored in 8 bits");
    }
    RETURN_IF_ERROR(check_shape("slope", *slope, {rows, padded(columns)}));
    RETURN_IF_ERROR(check_dtype("slope", *slope, ffi::DataType::S8));
    args.slope = static_cast<int8_t*>(slope->untyped_data());
    args.slope_steps = slope_steps;
    form = Form::kSlope;
  }
  args.down = static_cast<int>((rows + kTileRows - 1) / kTileRows);
  args.across = static_cast<int>((columns + kTileColumns - 1) / kTileColumns);
  const int64_t tiles = int64_t{args.down} * args.across;
  if (tiles >= int64_t{1} << 31) return ffi::Error::InvalidArgument("the matrix is too large");
  if (!is_absent(*sums)) {
    RETURN_IF_ERROR(check_float32("sums", *sums, {args.down, columns}));
    args.sums = static_cast<float*>(sums->untyped_data());
    form = Form::kSums;
  }
  if (gated + (args.slope != nullptr) + (args.sums != nullptr) > 1) {
    return ffi::Error::InvalidArgument(
        "only one of a gate, an activation's derivative and column sums can be given");
  }
  if (!is_absent(*found)) {
    RETURN_IF_ERROR(check_float32("found", *found, {tiles}));
    args.found = static_cast<float*>(found->untyped_data());
  }
  const void* const* data = args.sources.data;
  if (!are_aligned({data[0], data[1], data[2], args.values, args.transposed, args.slope})) {
    return ffi::Error::InvalidArgument("a matrix does not begin at a multiple of 16 bytes");
  }
  const Dtype dtype = *dtype_of(first);
  const Kernel kernel = format == ffi::DataType::F8E4M3FN ? kernel_of<__NV_E4M3>(dtype, form)
                                                          : kernel_of<__NV_E5M2>(dtype, form);
  return launch_kernel(kernel, args, {dim3(static_cast<unsigned>(tiles)), kThreads, 0}, stream);
}

constexpr int kLargestThreads = 1024;

struct LargestArgs {
  Sources sources;
  float* maxima;  // [blocks], each block's maximum
  Activation activation;
  float least;
};

// Finds the largest magnitude among each block's values of the sources. With `kBounds` it finds a
// bound on the activation's magnitude for inputs up to the sources' maximum: the activation grows
// above 0, and below 0 its magnitude is at most `least`.
template <typename T, bool kBounds>
__global__ void __launch_bounds__(kLargestThreads) largest_kernel(LargestArgs args) {
  const uint32_t bits = largest_of_block(largest_of_thread<T, kBounds>(args.sources));
  if (threadIdx.x != 0) return;
  float largest[1] = {__uint_as_float(bits)};
  if constexpr (kBounds) {
    activate(args.activation, largest);
    // The comparison is false for a NaN, which is kept.
    if (largest[0] < args.least) largest[0] = args.least;
  }
  args.maxima[blockIdx.x] = largest[0];
}

template <typename T>
void (*largest_kernel_of(bool bounds))(LargestArgs) {
  return bounds ? largest_kernel<T, true> : largest_kernel<T, false>;
}

ffi::Error largest(cudaStream_t stream, ffi::AnyBuffer first, ffi::AnyBuffer second,
                   ffi::AnyBuffer third, ffi::Result<ffi::AnyBuffer> maxima,
                   std::string_view activation, float least) {
  const auto dtype = dtype_of(first);
  if (!dtype) {
    return ffi::Error::InvalidArgument("the arrays must be float32, bfloat16 or float16");
  }
  const int64_t blocks = maxima->element_count();
  if (blocks < 1 || blocks > 65535) {
    return ffi::Error::InvalidArgument("there must be 1 to 65535 maxima");
  }
  RETURN_IF_ERROR(check_float32("maxima", *maxima, {blocks}));
  LargestArgs args = {};
  RETURN_IF_ERROR(parse_activation(activation, &args.activation));
  args.least = least;
  args.maxima = static_cast<float*>(maxima->untyped_data());
  const ffi::AnyBuffer* const sources[kMaxSources] = {&first, &second, &third};
  for (int i = 0; i < kMaxSources; ++i) {
    if (is_absent(*sources[i])) continue;
    RETURN_IF_ERROR(check_dtype("an array", *sources[i], first.element_type()));
    args.sources.data[i] = sources[i]->untyped_data();
    args.sources.sizes[i] = static_cast<int64_t>(sources[i]->element_count());
  }
  const void* const* data = args.sources.data;
  if (!are_aligned({data[0], data[1], data[2]})) {
    return ffi::Error::InvalidArgument("an array does not begin at a multiple of 16 bytes");
  }
  const Launch launch = {dim3(static_cast<unsigned>(blocks)), kLargestThreads, 0};
  const bool bounds = args.activation != Activation::kNone;
  switch (*dtype) {
    case Dtype::kFloat32:
      return launch_kernel(largest_kernel_of<float>(bounds), args, launch, stream);
    case Dtype::kBfloat16:
      return launch_kernel(largest_kernel_of<__nv_bfloat16>(bounds), args, launch, stream);
    case Dtype::kFloat16:
      return launch_kernel(largest_kernel_of<__half>(bounds), args, launch, stream);
  }
  return ffi::Error::Internal("unreachable");
}

}  // namespace

DEFINE_HANDLER(jaxfused_quantize, quantize,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // first
                   .Arg<ffi::AnyBuffer>()  // second
                   .Arg<ffi::AnyBuffer>()  // third
                   .Arg<ffi::AnyBuffer>()  // largest
                   .Ret<ffi::AnyBuffer>()  // values
                   .Ret<ffi::AnyBuffer>()  // transposed
                   .Ret<ffi::AnyBuffer>()  // scale
                   .Ret<ffi::AnyBuffer>()  // sums
                   .Ret<ffi::AnyBuffer>()  // found
                   .Ret<ffi::AnyBuffer>()  // slope
                   .Attr<std::string_view>("activation")
                   .Attr<bool>("gated")
                   .Attr<bool>("from_end")
                   .Attr<float>("slope_steps"));

DEFINE_HANDLER(jaxfused_largest, largest,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // first
                   .Arg<ffi::AnyBuffer>()  // second
                   .Arg<ffi::AnyBuffer>()  // third
                   .Ret<ffi::AnyBuffer>()  // maxima
                   .Attr<std::string_view>("activation")
                   .Attr<float>("least"));
