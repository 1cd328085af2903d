// Computes selected elements of x @ y^T, each the dot product of a row of x and a row of y.
//
// A team of threads computes several elements, whose loads are in flight together. Elements with a
// row or column index outside of the product are set to 0.
#include <climits>

#include "common/handler.h"
#include "common/rows.cuh"

namespace {

constexpr int kThreads = 128;
constexpr int kTogether = 4;

struct SampledArgs {
  const int* rows;     // row of x of each element, [entries]
  const int* columns;  // row of y of each element, [entries]
  const void* x;       // [x_rows, depth]
  const void* y;       // [y_rows, depth]
  void* out;           // [entries]
  int entries;
  int x_rows;
  int y_rows;
  int depth;
  int lanes;  // threads of a team: a power of 2 up to 32
};

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) sampled_products(SampledArgs args) {
  const int teams = kThreads / args.lanes;
  const int team = blockIdx.x * teams + threadIdx.x / args.lanes;
  const int rank = threadIdx.x % args.lanes;
  const T *x[kTogether], *y[kTogether];
  bool exists[kTogether];
  float sums[kTogether] = {};
#pragma unroll
  for (int n = 0; n < kTogether; ++n) {
    const int64_t entry = int64_t{team} * kTogether + n;
    const int row = entry < args.entries ? args.rows[entry] : -1;
    const int column = entry < args.entries ? args.columns[entry] : -1;
    exists[n] = row >= 0 && row < args.x_rows && column >= 0 && column < args.y_rows;
    x[n] = static_cast<const T*>(args.x) + int64_t{exists[n] ? row : 0} * args.depth;
    y[n] = static_cast<const T*>(args.y) + int64_t{exists[n] ? column : 0} * args.depth;
  }
  for (int at = rank * kVec; at < args.depth; at += args.lanes * kVec) {
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      float of_x[kVec], of_y[kVec];
      load_as_float<T, kVec>(x[n], at, of_x);
      load_as_float<T, kVec>(y[n], at, of_y);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sums[n] = fmaf(of_x[i], of_y[i], sums[n]);
    }
  }
#pragma unroll
  for (int n = 0; n < kTogether; ++n) {
    for (int step = args.lanes / 2; step > 0; step /= 2) {
      sums[n] += __shfl_xor_sync(0xffffffffu, sums[n], step);
    }
    const int64_t entry = int64_t{team} * kTogether + n;
    if (rank == 0 && entry < args.entries) {
      Vector<T, 1> out;
      const float sum[1] = {exists[n] ? sums[n] : 0.0f};
      pack(sum, out);
      store_vector(static_cast<T*>(args.out) + entry, out);
    }
  }
}

template <typename T, int kVec>
ffi::Error launch(SampledArgs args, cudaStream_t stream) {
  args.lanes = 1;
  while (args.lanes < 32 && args.lanes * kVec < args.depth) args.lanes *= 2;
  const int in_block = kThreads / args.lanes * kTogether;
  const dim3 grid(static_cast<unsigned>((int64_t{args.entries} + in_block - 1) / in_block));
  return launch_kernel(sampled_products<T, kVec>, args, {grid, kThreads, 0}, stream);
}

ffi::Error sampled_matmul(cudaStream_t stream, ffi::AnyBuffer rows, ffi::AnyBuffer columns,
                          ffi::AnyBuffer x, ffi::AnyBuffer y, ffi::Result<ffi::AnyBuffer> out) {
  if (x.dimensions().size() != 2 || y.dimensions().size() != 2) {
    return ffi::Error::InvalidArgument("x and y must be matrices");
  }
  const int64_t entries = rows.element_count(), depth = x.dimensions()[1];
  const int64_t x_rows = x.dimensions()[0], y_rows = y.dimensions()[0];
  const auto dtype = dtype_of(x);
  if (!dtype) {
    return ffi::Error::InvalidArgument("x must be float32, bfloat16 or float16");
  }
  if (std::max({entries, depth, x_rows, y_rows}) > INT_MAX - 1024) {
    return ffi::Error::InvalidArgument("the matrices are too large for indices of 32 bits");
  }
  RETURN_IF_ERROR(check_shape("rows", rows, {entries}));
  RETURN_IF_ERROR(check_dtype("rows", rows, ffi::DataType::S32));
  RETURN_IF_ERROR(check_shape("columns", columns, {entries}));
  RETURN_IF_ERROR(check_dtype("columns", columns, ffi::DataType::S32));
  RETURN_IF_ERROR(check_shape("y", y, {y_rows, depth}));
  RETURN_IF_ERROR(check_dtype("y", y, x.element_type()));
  RETURN_IF_ERROR(check_shape("out", *out, {entries}));
  RETURN_IF_ERROR(check_dtype("out", *out, x.element_type()));
  SampledArgs args = {};
  args.rows = static_cast<const int*>(rows.untyped_data());
  args.columns = static_cast<const int*>(columns.untyped_data());
  args.x = x.untyped_data();
  args.y = y.untyped_data();
  args.out = out->untyped_data();
  args.entries = static_cast<int>(entries);
  args.x_rows = static_cast<int>(x_rows);
  args.y_rows = static_cast<int>(y_rows);
  args.depth = static_cast<int>(depth);
  return with_dtype(*dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kVec = 16 / sizeof(T);
    if (are_aligned({args.x, args.y}) && depth % kVec == 0) return launch<T, kVec>(args, stream);
    return launch<T, 1>(args, stream);
  });
}

}  // namespace

DEFINE_HANDLER(jaxfused_sampled_matmul, sampled_matmul,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()   // rows
                   .Arg<ffi::AnyBuffer>()   // columns
                   .Arg<ffi::AnyBuffer>()   // x
                   .Arg<ffi::AnyBuffer>()   // y
                   .Ret<ffi::AnyBuffer>(),  // out
               {ffi::Traits::kCmdBufferCompatible});
