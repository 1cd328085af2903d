// Handler of csr_matmul.cuh: a sparse matrix in CSR format times a dense one.
#include <algorithm>

#include "common/handler.h"
#include "sparse/csr_matmul.cuh"

namespace {

// Returns how many threads share a row of the result: as many as its columns need, up to a warp.
int lanes_of(int width, int vec) {
  int lanes = 1;
  while (lanes < 32 && lanes * vec < width) lanes *= 2;
  return lanes;
}

template <typename T, int kVec>
ffi::Error launch(CsrArgs args, cudaStream_t stream) {
  args.lanes = lanes_of(args.width, kVec);
  const int teams = kCsrThreads / args.lanes, columns = args.lanes * kVec;
  const dim3 grid((args.rows + teams - 1) / teams, (args.width + columns - 1) / columns);
  return launch_kernel(csr_rows<T, kVec>, args, {grid, kCsrThreads, 0}, stream);
}

ffi::Error csr_matmul(cudaStream_t stream, ffi::AnyBuffer starts, ffi::AnyBuffer columns,
                      ffi::AnyBuffer values, ffi::AnyBuffer b, ffi::Result<ffi::AnyBuffer> y) {
  if (b.dimensions().size() != 2 || y->dimensions().size() != 2) {
    return ffi::Error::InvalidArgument("b and y must be matrices");
  }
  const int64_t rows = y->dimensions()[0], depth = b.dimensions()[0], width = b.dimensions()[1];
  const int64_t entries = values.element_count();
  const auto dtype = dtype_of(b);
  if (!dtype) {
    return ffi::Error::InvalidArgument("b must be float32, bfloat16 or float16");
  }
  if (std::max({rows, depth, width, entries}) > INT_MAX - 1024) {
    return ffi::Error::InvalidArgument("the matrices are too large for indices of 32 bits");
  }
  RETURN_IF_ERROR(check_shape("starts", starts, {rows + 1}));
  RETURN_IF_ERROR(check_dtype("starts", starts, ffi::DataType::S32));
  RETURN_IF_ERROR(check_shape("columns", columns, {entries}));
  RETURN_IF_ERROR(check_dtype("columns", columns, ffi::DataType::S32));
  RETURN_IF_ERROR(check_shape("values", values, {entries}));
  RETURN_IF_ERROR(check_dtype("values", values, b.element_type()));
  RETURN_IF_ERROR(check_shape("y", *y, {rows, width}));
  RETURN_IF_ERROR(check_dtype("y", *y, b.element_type()));
  CsrArgs args = {};
  args.starts = static_cast<const int*>(starts.untyped_data());
  args.columns = static_cast<const int*>(columns.untyped_data());
  args.values = values.untyped_data();
  args.b = b.untyped_data();
  args.y = y->untyped_data();
  args.rows = static_cast<int>(rows);
  args.depth = static_cast<int>(depth);
  args.width = static_cast<int>(width);
  return with_dtype(*dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kVec = 16 / sizeof(T);
    const bool aligned = are_aligned({args.b, args.y}) && width % kVec == 0;
    if (aligned) return launch<T, kVec>(args, stream);
    return launch<T, 1>(args, stream);
  });
}

}  // namespace

DEFINE_HANDLER(jaxfused_csr_matmul, csr_matmul,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()   // starts
                   .Arg<ffi::AnyBuffer>()   // columns
                   .Arg<ffi::AnyBuffer>()   // values
                   .Arg<ffi::AnyBuffer>()   // b
                   .Ret<ffi::AnyBuffer>(),  // y
               {ffi::Traits::kCmdBufferCompatible});
