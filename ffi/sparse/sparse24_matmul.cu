// Handler of sparse24_kernel.cuh: x @ w^T, where two of each four numbers in a row of w are zero.
#include <algorithm>
#include <climits>

#include "common/handler.h"
#include "sparse/sparse24_kernel.cuh"

namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Finds the driver's function that encodes tensor maps for TMA. It is looked up, because the
// library is not linked to the driver.
ffi::Error find_encoder(EncodeTiled* encode) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  RETURN_IF_ERROR(check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                              12000, cudaEnableDefault, &found),
                             "cudaGetDriverEntryPointByVersion"));
#else
  RETURN_IF_ERROR(check_cuda(
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found),
      "cudaGetDriverEntryPoint"));
#endif
  if (function == nullptr) {
    return ffi::Error::Internal("the CUDA driver has no cuTensorMapEncodeTiled");
  }
  *encode = reinterpret_cast<EncodeTiled>(function);
  return ffi::Error::Success();
}

// Encodes the tensor map of a bfloat16 matrix [rows, columns] that is copied in boxes.
ffi::Error describe(EncodeTiled encode, void* data, int64_t rows, int64_t columns, int box_rows,
                    int box_columns, CUtensorMap* map) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns),
                            static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const auto swizzle =
      box_columns * 2 == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return ffi::Error::Success();
  return ffi::Error::Internal("cuTensorMapEncodeTiled: error " + std::to_string(result));
}

// Launches the kernel without clusters: clusters of two blocks that share x were slower
// (benchmarks/LAB.md).
ffi::Error launch(const sparse24::Args& args, const Device& device, cudaStream_t stream) {
  const auto kernel = sparse24::matmul;
  RETURN_IF_ERROR(allow_shared_memory(kernel, device));
  const int blocks = std::min(device.multiprocessors, args.feature_tiles * args.row_tiles);
  return launch_kernel(kernel, args, {dim3(blocks), sparse24::kThreads, sparse24::kSharedBytes},
                       stream);
}

ffi::Error sparse24_matmul(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer values,
                           ffi::AnyBuffer metadata, ffi::Result<ffi::AnyBuffer> y) {
  if (x.dimensions().size() != 2 || values.dimensions().size() != 2) {
    return ffi::Error::InvalidArgument("x and values must be matrices");
  }
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1];
  const int64_t features = values.dimensions()[0];
  if (depth % 16 != 0 || features % 8 != 0 || depth == 0 || features == 0 || rows == 0) {
    return ffi::Error::InvalidArgument("depth must be a multiple of 16, features one of 8");
  }
  if (std::max({rows, depth, features}) > INT_MAX / 2) {
    return ffi::Error::InvalidArgument("the matrices are too large for indices of 32 bits");
  }
  const int64_t steps = (depth + sparse24::kStep - 1) / sparse24::kStep;
  const int64_t feature_tiles = (features + sparse24::kFeatures - 1) / sparse24::kFeatures;
  RETURN_IF_ERROR(check_dtype("x", x, ffi::DataType::BF16));
  RETURN_IF_ERROR(check_shape("values", values, {features, depth / 2}));
  RETURN_IF_ERROR(check_dtype("values", values, ffi::DataType::BF16));
  RETURN_IF_ERROR(check_shape("metadata", metadata,
                              {steps, feature_tiles * sparse24::kConsumers, sparse24::kWords}));
  RETURN_IF_ERROR(check_dtype("metadata", metadata, ffi::DataType::U32));
  RETURN_IF_ERROR(check_shape("y", *y, {rows, features}));
  RETURN_IF_ERROR(check_dtype("y", *y, ffi::DataType::BF16));
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  EncodeTiled encode = nullptr;
  RETURN_IF_ERROR(find_encoder(&encode));
  sparse24::Args args = {};
  RETURN_IF_ERROR(describe(encode, values.untyped_data(), features, depth / 2, sparse24::kFeatures,
                           sparse24::kStep / 2, &args.weights));
  RETURN_IF_ERROR(
      describe(encode, x.untyped_data(), rows, depth, sparse24::kRows, sparse24::kStep, &args.x));
  RETURN_IF_ERROR(
      describe(encode, y->untyped_data(), rows, features, sparse24::kStoredRows, 64, &args.y));
  args.metadata = static_cast<const uint32_t*>(metadata.untyped_data());
  args.feature_tiles = static_cast<int>(feature_tiles);
  args.row_tiles = static_cast<int>((rows + sparse24::kRows - 1) / sparse24::kRows);
  args.steps = static_cast<int>(steps);
  return launch(args, device, stream);
}

}  // namespace

DEFINE_HANDLER(jaxfused_sparse24_matmul, sparse24_matmul,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()   // x
                   .Arg<ffi::AnyBuffer>()   // values
                   .Arg<ffi::AnyBuffer>()   // metadata
                   .Ret<ffi::AnyBuffer>(),  // y
               {ffi::Traits::kCmdBufferCompatible});
