// Matrices in float8, and their transposes, from one read: what a product and its gradients take,
// whose operands have the sums along their last axis.
//
// A block owns 128 rows and 64 columns. Its threads read 8 neighbouring values each, write them in
// float8 as they lie, and leave them in shared memory, from which 8 rows of a column are put into
// one word of 8 bytes.
#include <cuda_fp8.h>

#include <cfloat>
#include <cstdint>
#include <string>

#include "activation.cuh"
#include "handler.h"
#include "operands.h"

namespace {

constexpr int kThreads = 256;
constexpr int kTileRows = 128;
constexpr int kTileColumns = 64;
constexpr int kVec = 8;                           // values of a read
constexpr int kRowThreads = kTileColumns / kVec;  // threads side by side
constexpr int kPassRows = kThreads / kRowThreads;
constexpr int kPasses = kTileRows / kPassRows;
constexpr int kWords = kTileColumns / 4;  // of a tile's row in shared memory
constexpr int kMaxSources = 3;

struct QuantizeArgs {
  const void* sources[kMaxSources];  // side by side, or a gate and what it multiplies
  int ends[kMaxSources];             // the column after the last one of each source
  const float* largest;              // magnitudes, of whose largest the scale is made
  int largest_count;
  float limit;          // the largest number of the results' dtype
  bool from_end;        // blocks take the last rows first, which the caches may still hold
  float* scale;         // [1], or nullptr
  uint8_t* values;      // [rows, columns], or nullptr
  uint8_t* transposed;  // [columns, rows], or nullptr
  float* sums;          // of 128 rows each [row blocks, columns], or nullptr
  float* found;         // a block's largest magnitude before it is scaled, or nullptr
  int rows;
  int columns;
  Activation activation;
};

// Returns the largest of every thread's value, given as the bits of a float without its sign: as an
// integer, a NaN is larger than all others.
__device__ __forceinline__ uint32_t largest_of_block(uint32_t bits) {
  __shared__ uint32_t of_warps[32];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, lanes));
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = bits;
  __syncthreads();
  const int warps = blockDim.x / 32;
  for (int i = 0; i < warps; ++i) bits = max(bits, of_warps[i]);
  return bits;
}

// Returns the scale. That of zeros can be divided by, and that of what is not finite is NaN. Each
// warp finds it by itself, so that none waits while its values are on their way.
__device__ __forceinline__ float scale_of(const QuantizeArgs& args) {
  uint32_t bits = 0;
  if (args.largest_count == 1) {
    bits = __float_as_uint(*args.largest) & 0x7fffffffu;
  } else {
    for (int i = threadIdx.x % 32; i < args.largest_count; i += 32) {
      bits = max(bits, __float_as_uint(args.largest[i]) & 0x7fffffffu);
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, lanes));
    }
  }
  if (bits >= 0x7f800000u) return __uint_as_float(0x7fffffffu);
  return fmaxf(__fdiv_rn(__uint_as_float(bits), args.limit), FLT_MIN);
}

// Returns the place of a word in shared memory, such that neither writes of neighbouring columns
// nor reads of rows 8 apart meet in one bank more often than they have to.
__device__ __forceinline__ int place_of(int row, int word) {
  return row * kWords + (word ^ ((row >> 3) & (kWords - 1)));
}

template <typename T>
__device__ __forceinline__ void load_values(const QuantizeArgs& args, int64_t row, int column,
                                            float (&out)[kVec]) {
  // Selects in place of an index keep the arguments out of local memory.
  const bool after_first = column >= args.ends[0], after_second = column >= args.ends[1];
  const int start = after_second ? args.ends[1] : after_first ? args.ends[0] : 0;
  const int end = after_second ? args.ends[2] : after_first ? args.ends[1] : args.ends[0];
  const void* source = after_second  ? args.sources[2]
                       : after_first ? args.sources[1]
                                     : args.sources[0];
  const T* data = static_cast<const T*>(source) + row * (end - start);
  load_as_float<T>(data, column - start, out);
}

// The activation, as exact as a float8 shows it. erfc is the formula 7.1.26 of Abramowitz and
// Stegun, wrong by 1.5e-7, where erfcf would take longer than to read and write the values.
__device__ __forceinline__ void activate_for_fp8(Activation activation, float (&values)[kVec]) {
  using namespace activation_detail;
  if (activation != Activation::kGeluErf) return activate(activation, values);
#pragma unroll
  for (float& x : values) {
    const float distance = fabsf(x);
    const float t = quick_reciprocal(fmaf(0.3275911f * 0.70710678f, distance, 1.0f));
    float polynomial = fmaf(1.061405429f, t, -1.453152027f);
    polynomial = fmaf(polynomial, t, 1.421413741f);
    polynomial = fmaf(polynomial, t, -0.284496736f);
    polynomial = fmaf(polynomial, t, 0.254829592f) * t;
    const float tail = 0.5f * polynomial * quick_exp(-0.5f * x * x);
    x = fmaxf(x, 0.0f) - distance * tail;
  }
}

template <__nv_fp8_interpretation_t kFormat>
__device__ __forceinline__ uint2 to_fp8(const float (&in)[kVec]) {
  uint32_t pairs[kVec / 2];
#pragma unroll
  for (int i = 0; i < kVec / 2; ++i) {
    pairs[i] = __nv_cvt_float2_to_fp8x2({in[2 * i], in[2 * i + 1]}, __NV_SATFINITE, kFormat);
  }
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

// Writes the tile in shared memory column by column.
__device__ __forceinline__ void store_transposed(const QuantizeArgs& args, const uint32_t* tile,
                                                 int64_t row_start, int column_start) {
  constexpr int kGroups = kTileRows / 8;
  const int group = threadIdx.x % kGroups, word = threadIdx.x / kGroups;
  const int64_t row = row_start + group * 8;
  const int column = column_start + word * 4;
  // Half-warps read rows of different parity at a time, which are in different banks.
  const int parity = word & 1;
  uint32_t words[8];
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const uint32_t first = tile[place_of(group * 8 + i + parity, word)];
    const uint32_t second = tile[place_of(group * 8 + i + (parity ^ 1), word)];
    words[i] = parity ? second : first;
    words[i + 1] = parity ? first : second;
  }
  if (row >= args.rows || column >= args.columns) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Bytes 2 half and 2 half + 1 of every row, in the lower and the upper half of a word.
    const uint32_t order = half ? 0x7362u : 0x5140u;
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = __byte_perm(words[2 * i], words[2 * i + 1], order);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t halves = i ? 0x7632u : 0x5410u;
      const uint2 packed = {__byte_perm(pairs[0], pairs[1], halves),
                            __byte_perm(pairs[2], pairs[3], halves)};
      uint8_t* to = args.transposed + static_cast<int64_t>(column + 2 * half + i) * args.rows + row;
      *reinterpret_cast<uint2*>(to) = packed;
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

template <typename T, __nv_fp8_interpretation_t kFormat, bool kGated, bool kSums>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 && !kGated ? 4 : 2)
    quantize_kernel(QuantizeArgs args) {
  __shared__ uint32_t tile[kTileRows * kWords];
  const int64_t row_block = args.from_end ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t row_start = row_block * kTileRows;
  const int column_start = blockIdx.y * kTileColumns;
  const int column = column_start + static_cast<int>(threadIdx.x % kRowThreads) * kVec;
  const int first_row = threadIdx.x / kRowThreads;
  float values[kPasses][kVec] = {};
  float factors[kGated ? kPasses : 1][kVec];
  float sums[kVec] = {};
  uint32_t found = 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int64_t row = row_start + first_row + pass * kPassRows;
    if (row >= args.rows || column >= args.columns) continue;
    if constexpr (kGated) {
      const int64_t offset = row * args.columns;
      load_as_float<T>(static_cast<const T*>(args.sources[0]) + offset, column, values[pass]);
      load_as_float<T>(static_cast<const T*>(args.sources[1]) + offset, column, factors[pass]);
    } else {
      load_values<T>(args, row, column, values[pass]);
    }
  }
  const float scale = scale_of(args), inverse = __frcp_rn(scale);
  if (args.scale != nullptr && blockIdx.x + blockIdx.y == 0) *args.scale = scale;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int tile_row = first_row + pass * kPassRows;
    const int64_t row = row_start + tile_row;
    if (row < args.rows && column < args.columns) {
      if constexpr (kSums) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) sums[i] += values[pass][i];
      }
      activate_for_fp8(args.activation, values[pass]);
      if constexpr (kGated) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[pass][i] *= factors[pass][i];
      }
      if (args.found != nullptr) {
#pragma unroll
        for (const float value : values[pass]) {
          found = max(found, __float_as_uint(value) & 0x7fffffffu);
        }
      }
#pragma unroll
      for (float& value : values[pass]) value *= inverse;
    }
    const uint2 packed = to_fp8<kFormat>(values[pass]);
    if (args.values != nullptr && row < args.rows && column < args.columns) {
      *reinterpret_cast<uint2*>(args.values + row * args.columns + column) = packed;
    }
    if (args.transposed != nullptr) {
      const int word = (threadIdx.x % kRowThreads) * 2;
      tile[place_of(tile_row, word)] = packed.x;
      tile[place_of(tile_row, word + 1)] = packed.y;
    }
  }
  if (args.found != nullptr) {
    found = largest_of_block(found);
    args.found[blockIdx.y * gridDim.x + blockIdx.x] = __uint_as_float(found);
  }
  if constexpr (kSums) store_sums(args, sums, row_block, column_start);
  if (args.transposed == nullptr) return;
  __syncthreads();
  store_transposed(args, tile, row_start, column_start);
}

using Kernel = void (*)(QuantizeArgs);

template <typename T, __nv_fp8_interpretation_t kFormat>
Kernel kernel_of(bool gated, bool sums) {
  if (gated) return quantize_kernel<T, kFormat, true, false>;
  return sums ? quantize_kernel<T, kFormat, false, true>
              : quantize_kernel<T, kFormat, false, false>;
}

template <__nv_fp8_interpretation_t kFormat>
Kernel kernel_of(Dtype dtype, bool gated, bool sums) {
  switch (dtype) {
    case Dtype::kFloat32:
      return kernel_of<float, kFormat>(gated, sums);
    case Dtype::kBfloat16:
      return kernel_of<__nv_bfloat16, kFormat>(gated, sums);
    case Dtype::kFloat16:
      return kernel_of<__half, kFormat>(gated, sums);
  }
  return nullptr;
}

ffi::Error quantize(cudaStream_t stream, ffi::AnyBuffer first, ffi::AnyBuffer second,
                    ffi::AnyBuffer third, ffi::AnyBuffer largest,
                    ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> transposed,
                    ffi::Result<ffi::AnyBuffer> scale, ffi::Result<ffi::AnyBuffer> sums,
                    ffi::Result<ffi::AnyBuffer> found, std::string_view activation, bool gated,
                    bool from_end) {
  if (is_absent(first)) return ffi::Error::Success();
  QuantizeArgs args = {};
  if (!parse_activation(activation, &args.activation)) {
    return ffi::Error::InvalidArgument("the activation is not known: " + std::string(activation));
  }
  const auto dtype = dtype_of(first);
  if (!dtype || first.dimensions().size() != 2 || first.dimensions()[0] > kMaxRows) {
    return ffi::Error::InvalidArgument(
        "the matrix must be float32, bfloat16 or float16 of two axes, but has shape " +
        to_string(first.dimensions()));
  }
  args.rows = static_cast<int>(first.dimensions()[0]);
  const ffi::AnyBuffer* const sources[kMaxSources] = {&first, &second, &third};
  int64_t columns = 0;
  for (int i = 0; i < kMaxSources; ++i) {
    if (!is_absent(*sources[i])) {
      RETURN_IF_ERROR(check_dtype("a matrix", *sources[i], first.element_type()));
      if (sources[i]->dimensions().size() != 2) {
        return ffi::Error::InvalidArgument("a matrix has other than two axes");
      }
      const int64_t width = sources[i]->dimensions()[1];
      RETURN_IF_ERROR(check_shape("a matrix", *sources[i], {args.rows, width}));
      if (width % kVec != 0) {
        return ffi::Error::InvalidArgument("a matrix has columns that are no multiple of 8");
      }
      if (i == 0 || !gated) columns += width;
      args.sources[i] = sources[i]->untyped_data();
    }
    args.ends[i] = static_cast<int>(columns);
  }
  args.columns = static_cast<int>(columns);
  if (columns > kMaxRows || (gated && (args.sources[1] == nullptr || args.sources[2] != nullptr))) {
    return ffi::Error::InvalidArgument("there are too many columns, or a gate without its matrix");
  }
  if (gated) RETURN_IF_ERROR(check_shape("the gated matrix", second, {args.rows, columns}));
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
  args.limit = format == ffi::DataType::F8E4M3FN ? 448.0f : 57344.0f;
  if (!is_absent(*values)) {
    RETURN_IF_ERROR(check_shape("values", *values, {args.rows, columns}));
    args.values = static_cast<uint8_t*>(values->untyped_data());
  }
  if (!is_absent(*transposed)) {
    RETURN_IF_ERROR(check_shape("transposed", *transposed, {columns, args.rows}));
    RETURN_IF_ERROR(check_dtype("transposed", *transposed, format));
    if (args.rows % 8 != 0) {
      return ffi::Error::InvalidArgument("the transpose takes rows that are a multiple of 8");
    }
    args.transposed = static_cast<uint8_t*>(transposed->untyped_data());
  }
  if (!are_aligned(
          {args.sources[0], args.sources[1], args.sources[2], args.values, args.transposed})) {
    return ffi::Error::InvalidArgument("a matrix does not begin at a multiple of 16 bytes");
  }
  const dim3 grid((args.rows + kTileRows - 1) / kTileRows,
                  (args.columns + kTileColumns - 1) / kTileColumns);
  if (!is_absent(*sums)) {
    RETURN_IF_ERROR(check_float32("sums", *sums, {int64_t{grid.x}, columns}));
    if (gated) return ffi::Error::InvalidArgument("of a gated matrix there are no sums");
    args.sums = static_cast<float*>(sums->untyped_data());
  }
  if (!is_absent(*found)) {
    RETURN_IF_ERROR(check_float32("found", *found, {int64_t{grid.x} * grid.y}));
    args.found = static_cast<float*>(found->untyped_data());
  }
  if (grid.y > 65535) return ffi::Error::InvalidArgument("there are too many columns");
  const bool sums_rows = args.sums != nullptr;
  const Kernel kernel = format == ffi::DataType::F8E4M3FN
                            ? kernel_of<__NV_E4M3>(*dtype, gated, sums_rows)
                            : kernel_of<__NV_E5M2>(*dtype, gated, sums_rows);
  return launch_kernel(kernel, args, {grid, kThreads, 0}, stream);
}

constexpr int kLargestThreads = 1024;
constexpr int kUnroll = 4;

struct LargestArgs {
  const void* sources[kMaxSources];
  int64_t sizes[kMaxSources];
  float* maxima;  // of each block
};

// Finds the largest magnitudes of the sources. It goes from the end to the beginning: what was
// written last may still be in the cache, and what is read last will be there for the next kernel.
template <typename T>
__global__ void __launch_bounds__(kLargestThreads) largest_kernel(LargestArgs args) {
  constexpr int kSize = 16 / sizeof(T);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kLargestThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kLargestThreads;
  uint32_t bits = 0;
#pragma unroll
  for (int source = kMaxSources - 1; source >= 0; --source) {
    const T* data = static_cast<const T*>(args.sources[source]);
    const int64_t size = args.sizes[source], vectors = size / kSize;
    const auto see = [&](int64_t vector) {
      float values[kSize];
      unpack(load_vector<T, kSize>(data + vector * kSize), values);
#pragma unroll
      for (const float value : values) bits = max(bits, __float_as_uint(value) & 0x7fffffffu);
    };
    for (int64_t i = vectors * kSize + thread; i < size; i += threads) {
      const float value = static_cast<float>(data[i]);
      bits = max(bits, __float_as_uint(value) & 0x7fffffffu);
    }
    int64_t end = vectors;
    for (; end >= kUnroll * threads; end -= kUnroll * threads) {
#pragma unroll
      for (int i = 1; i <= kUnroll; ++i) see(end - i * threads + thread);
    }
    for (int64_t vector = end - 1 - thread; vector >= 0; vector -= threads) see(vector);
  }
  bits = largest_of_block(bits);
  if (threadIdx.x == 0) args.maxima[blockIdx.x] = __uint_as_float(bits);
}

ffi::Error largest(cudaStream_t stream, ffi::AnyBuffer first, ffi::AnyBuffer second,
                   ffi::AnyBuffer third, ffi::Result<ffi::AnyBuffer> maxima) {
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
  args.maxima = static_cast<float*>(maxima->untyped_data());
  const ffi::AnyBuffer* const sources[kMaxSources] = {&first, &second, &third};
  for (int i = 0; i < kMaxSources; ++i) {
    if (is_absent(*sources[i])) continue;
    RETURN_IF_ERROR(check_dtype("an array", *sources[i], first.element_type()));
    args.sources[i] = sources[i]->untyped_data();
    args.sizes[i] = static_cast<int64_t>(sources[i]->element_count());
  }
  if (!are_aligned({args.sources[0], args.sources[1], args.sources[2]})) {
    return ffi::Error::InvalidArgument("an array does not begin at a multiple of 16 bytes");
  }
  const Launch launch = {dim3(static_cast<unsigned>(blocks)), kLargestThreads, 0};
  switch (*dtype) {
    case Dtype::kFloat32:
      return launch_kernel(largest_kernel<float>, args, launch, stream);
    case Dtype::kBfloat16:
      return launch_kernel(largest_kernel<__nv_bfloat16>, args, launch, stream);
    case Dtype::kFloat16:
      return launch_kernel(largest_kernel<__half>, args, launch, stream);
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
                   .Attr<std::string_view>("activation")
                   .Attr<bool>("gated")
                   .Attr<bool>("from_end"));

DEFINE_HANDLER(jaxfused_largest, largest,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()    // first
                   .Arg<ffi::AnyBuffer>()    // second
                   .Arg<ffi::AnyBuffer>()    // third
                   .Ret<ffi::AnyBuffer>());  // maxima
