// Handlers of csr_matmul.cuh: a sparse matrix in CSR format times a dense one, its first entries of
// rows, and a dense copy of it.
#include <algorithm>

#include "common/handler.h"
#include "sparse/csr_matmul.cuh"

namespace {

constexpr int kSliceBytes = 256;  // of a row of b, read by one team of threads

template <typename T, int kVec>
ffi::Error launch(CsrArgs args, cudaStream_t stream) {
  constexpr int kMostLanes = std::min<int>(32, kSliceBytes / (kVec * sizeof(T)));
  int lanes = 1;
  while (lanes < kMostLanes && lanes * kVec < args.width) lanes *= 2, ++args.log_lanes;
  const int teams = kCsrThreads / lanes, columns = lanes * kVec;
  const dim3 grid((args.rows + teams - 1) / teams, (args.width + columns - 1) / columns);
  const Launch launch = {grid, kCsrThreads, 0};
  // Rows of few entries would fill groups of 8 with zeros.
  const bool many = args.entries / 16 >= args.rows;
  if (many) return launch_kernel(csr_rows<T, kVec, 8>, args, launch, stream);
  return launch_kernel(csr_rows<T, kVec, 4>, args, launch, stream);
}

template <typename T, int kVec>
ffi::Error launch_dense(const CsrArgs& args, cudaStream_t stream) {
  constexpr int kPart = kDenseBytes / sizeof(T);
  const dim3 grid(args.rows, (args.depth + kPart - 1) / kPart);
  return launch_kernel(dense_rows<T, kVec>, args, {grid, kDenseThreads, 0}, stream);
}

// Checks the entries of a matrix of `rows` rows, of dtype `type`, and puts them into `args`.
ffi::Error read_entries(int64_t rows, ffi::DataType type, const ffi::AnyBuffer& starts,
                        const ffi::AnyBuffer& columns, const ffi::AnyBuffer& values,
                        CsrArgs& args) {
  const int64_t entries = values.element_count();
  RETURN_IF_ERROR(check_shape("starts", starts, {rows + 1}));
  RETURN_IF_ERROR(check_dtype("starts", starts, ffi::DataType::S32));
  RETURN_IF_ERROR(check_shape("columns", columns, {entries}));
  RETURN_IF_ERROR(check_dtype("columns", columns, ffi::DataType::S32));
  RETURN_IF_ERROR(check_shape("values", values, {entries}));
  RETURN_IF_ERROR(check_dtype("values", values, type));
  args.starts = static_cast<const int*>(starts.untyped_data());
  args.columns = static_cast<const int*>(columns.untyped_data());
  args.values = values.untyped_data();
  args.entries = static_cast<int>(entries);
  args.rows = static_cast<int>(rows);
  args.is_aligned = are_aligned({args.columns, args.values});
  return ffi::Error::Success();
}

ffi::Error csr_matmul(cudaStream_t stream, ffi::AnyBuffer starts, ffi::AnyBuffer columns,
                      ffi::AnyBuffer values, ffi::AnyBuffer b, ffi::Result<ffi::AnyBuffer> y) {
  if (b.dimensions().size() != 2 || y->dimensions().size() != 2) {
    return ffi::Error::InvalidArgument("b and y must be matrices");
  }
  const int64_t rows = y->dimensions()[0], depth = b.dimensions()[0], width = b.dimensions()[1];
  const auto dtype = dtype_of(b);
  if (!dtype) {
    return ffi::Error::InvalidArgument("b must be float32, bfloat16 or float16");
  }
  if (std::max({rows, depth, width, int64_t(values.element_count())}) > INT_MAX - 1024) {
    return ffi::Error::InvalidArgument("the matrices are too large for indices of 32 bits");
  }
  CsrArgs args = {};
  RETURN_IF_ERROR(read_entries(rows, b.element_type(), starts, columns, values, args));
  RETURN_IF_ERROR(check_shape("y", *y, {rows, width}));
  RETURN_IF_ERROR(check_dtype("y", *y, b.element_type()));
  args.b = b.untyped_data();
  args.y = y->untyped_data();
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

ffi::Error csr_dense(cudaStream_t stream, ffi::AnyBuffer starts, ffi::AnyBuffer columns,
                     ffi::AnyBuffer values, ffi::Result<ffi::AnyBuffer> dense) {
  if (dense->dimensions().size() != 2) {
    return ffi::Error::InvalidArgument("the dense copy must be a matrix");
  }
  const int64_t rows = dense->dimensions()[0], depth = dense->dimensions()[1];
  const auto dtype = dtype_of(values);
  if (!dtype) {
    return ffi::Error::InvalidArgument("values must be float32, bfloat16 or float16");
  }
  if (std::max({rows, depth, int64_t(values.element_count())}) > INT_MAX - 1024) {
    return ffi::Error::InvalidArgument("the matrix is too large for indices of 32 bits");
  }
  CsrArgs args = {};
  RETURN_IF_ERROR(read_entries(rows, values.element_type(), starts, columns, values, args));
  RETURN_IF_ERROR(check_dtype("the dense copy", *dense, values.element_type()));
  args.y = dense->untyped_data();
  args.depth = static_cast<int>(depth);
  return with_dtype(*dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kVec = 16 / sizeof(T);
    if (are_aligned({args.y}) && depth % kVec == 0) return launch_dense<T, kVec>(args, stream);
    return launch_dense<T, 1>(args, stream);
  });
}

ffi::Error csr_starts(cudaStream_t stream, ffi::AnyBuffer rows, ffi::Result<ffi::AnyBuffer> starts,
                      ffi::Result<ffi::AnyBuffer> columns, int64_t depth) {
  const int stride = rows.dimensions().size() == 2 ? 2 : 1;
  const int64_t entries = rows.element_count() / stride, count = starts->element_count();
  if (std::max({entries, count, depth}) > INT_MAX - 1024) {
    return ffi::Error::InvalidArgument("the matrix is too large for indices of 32 bits");
  }
  if (stride == 2) RETURN_IF_ERROR(check_shape("rows", rows, {entries, 2}));
  RETURN_IF_ERROR(check_dtype("rows", rows, ffi::DataType::S32));
  RETURN_IF_ERROR(check_dtype("starts", *starts, ffi::DataType::S32));
  RETURN_IF_ERROR(check_shape("columns", *columns, {stride == 2 ? entries : 0}));
  RETURN_IF_ERROR(check_dtype("columns", *columns, ffi::DataType::S32));
  StartsArgs args = {};
  args.rows = static_cast<const int*>(rows.untyped_data());
  args.starts = static_cast<int*>(starts->untyped_data());
  args.columns = stride == 2 ? static_cast<int*>(columns->untyped_data()) : nullptr;
  args.entries = static_cast<int>(entries);
  args.count = static_cast<int>(count);
  args.stride = stride;
  args.depth = static_cast<int>(depth);
  const int in_block = kCsrThreads / 32;
  const int64_t searching = (count + in_block - 1) / in_block;
  const int64_t copying = stride == 2 ? entries / (4 * kCsrThreads) : 0;
  const dim3 grid(static_cast<unsigned>(std::max(searching, copying)));
  return launch_kernel(row_starts, args, {grid, kCsrThreads, 0}, stream);
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

DEFINE_HANDLER(jaxfused_csr_dense, csr_dense,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()   // starts
                   .Arg<ffi::AnyBuffer>()   // columns
                   .Arg<ffi::AnyBuffer>()   // values
                   .Ret<ffi::AnyBuffer>(),  // the matrix with its zeros
               {ffi::Traits::kCmdBufferCompatible});

DEFINE_HANDLER(jaxfused_csr_starts, csr_starts,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // rows
                   .Ret<ffi::AnyBuffer>()  // starts
                   .Ret<ffi::AnyBuffer>()  // columns
                   .Attr<int64_t>("depth"),
               {ffi::Traits::kCmdBufferCompatible});
