// Quantises rows to int8 or float8, with a scale for each: the largest magnitude of a row becomes
// the largest number of the dtype. A warp quantises a short row, a block a long one, and reads it
// again from the cache once the scale is known.
#include <cstdint>
#include <string>

#include "common/handler.h"
#include "common/operands.h"
#include "common/rounded_bytes.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kVec = 8;
constexpr int kWarpFeatures = 1024;  // longest row that one warp quantises

struct RowsArgs {
  const void* x;    // [rows, features]
  uint8_t* values;  // [rows, features]
  float* scale;     // [rows]
  int rows;
  int features;
  int row_threads;  // threads that share a row: a warp or the whole block
  float limit;      // the largest number of the dtype
  float unit;       // 1 / limit
  Format format;
};

// Quantises rows; a thread reads and writes kSize adjacent values at a time.
template <typename T, int kSize>
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(RowsArgs args) {
  __shared__ uint32_t of_warps[kThreads / 32];
  const int rank = threadIdx.x % args.row_threads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / args.row_threads) +
                      threadIdx.x / args.row_threads;
  const int64_t offset = row * args.features;
  const int end = row < args.rows ? args.features : 0;
  const int first = rank * kSize, stride = args.row_threads * kSize;
  const T* x = static_cast<const T*>(args.x) + (end > 0 ? offset : 0);

  // Bits of a float without its sign: as an integer, a NaN is larger than all numbers.
  uint32_t largest = 0;
  for (int column = first; column < end; column += stride) {
    float values[kSize];
    load_as_float<T>(x, column, values);
#pragma unroll
    for (const float value : values) largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
  }
  if (args.row_threads > 32) {
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (const uint32_t other : of_warps) largest = max(largest, other);
  }
  const float scale = scale_of(largest, args.unit);
  if (rank == 0 && end > 0) args.scale[row] = scale;

  for (int column = first; column < end; column += stride) {
    float values[kSize];
    load_as_float<T>(x, column, values);
    uint8_t bytes[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) bytes[i] = rounded(values[i], scale, args.limit, args.format);
    uint8_t* to = args.values + offset + column;
    if constexpr (kSize == kVec) {
      uint32_t words[2] = {};
#pragma unroll
      for (int i = 0; i < kVec; ++i) words[i / 4] |= static_cast<uint32_t>(bytes[i]) << i % 4 * 8;
      *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    } else {
      *to = bytes[0];
    }
  }
}

template <typename T>
ffi::Error launch(const RowsArgs& args, cudaStream_t stream) {
  const int of_block = kThreads / args.row_threads;
  const Launch launch = {dim3(static_cast<unsigned>((args.rows + of_block - 1) / of_block)),
                         kThreads, 0};
  if (args.features % kVec == 0 && are_aligned({args.x, args.values})) {
    return launch_kernel(quantize_rows_kernel<T, kVec>, args, launch, stream);
  }
  return launch_kernel(quantize_rows_kernel<T, 1>, args, launch, stream);
}

ffi::Error quantize_rows(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                         ffi::Result<ffi::AnyBuffer> scale) {
  const auto dtype = dtype_of(x);
  if (!dtype || x.dimensions().size() != 2) {
    return ffi::Error::InvalidArgument("x must be a matrix of float32, bfloat16 or float16");
  }
  const int64_t rows = x.dimensions()[0], features = x.dimensions()[1];
  if (rows < 1 || features < 1 || rows > kMaxRows || features > kMaxRows) {
    return ffi::Error::InvalidArgument("x has shape " + to_string(x.dimensions()) +
                                       ", which is empty or too large");
  }
  RETURN_IF_ERROR(check_shape("values", *values, {rows, features}));
  RETURN_IF_ERROR(check_float32("scale", *scale, {rows}));
  RowsArgs args = {};
  switch (values->element_type()) {
    case ffi::DataType::S8:
      args.format = Format::kInt8;
      break;
    case ffi::DataType::F8E4M3FN:
      args.format = Format::kE4m3;
      break;
    case ffi::DataType::F8E5M2:
      args.format = Format::kE5m2;
      break;
    default:
      return ffi::Error::InvalidArgument("values must be int8, float8_e4m3fn or float8_e5m2");
  }
  args.limit = largest_of(args.format);
  args.unit = 1.0f / args.limit;
  args.x = x.untyped_data();
  args.values = static_cast<uint8_t*>(values->untyped_data());
  args.scale = static_cast<float*>(scale->untyped_data());
  args.rows = static_cast<int>(rows);
  args.features = static_cast<int>(features);
  args.row_threads = features <= kWarpFeatures ? 32 : kThreads;
  switch (*dtype) {
    case Dtype::kFloat32:
      return launch<float>(args, stream);
    case Dtype::kBfloat16:
      return launch<__nv_bfloat16>(args, stream);
    case Dtype::kFloat16:
      return launch<__half>(args, stream);
  }
  return ffi::Error::Internal("unreachable");
}

}  // namespace

DEFINE_HANDLER(jaxfused_quantize_rows, quantize_rows,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()   // x
                   .Ret<ffi::AnyBuffer>()   // values
                   .Ret<ffi::AnyBuffer>(),  // scale
               {ffi::Traits::kCmdBufferCompatible});
