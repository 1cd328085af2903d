// The forward of batch_norm that reads its batch once: y = activation((x - mean) rstd scale + bias
// + residual) of rows [pixel of the batch, channel], with a mean and a variance for each channel.
//
// The grid is cooperative, a block to a multiprocessor. A block has neighbouring channels, a slab,
// of a run of neighbouring rows, a part, and copies it into shared memory. It takes the mean and
// the squared deviations of its part, leaves them in global memory, waits for the other parts of
// its slab, merges what they left, and writes the result from shared memory. So memory is read once
// and written once.
//
// A thread owns the same vector of channels in every `lines`-th row of the part:
//
//     channel = (slab * vectors + thread % vectors) * kVec,   row = start + thread / vectors + step
//     * lines

#include "activation.cuh"
#include "handler.h"
#include "operands.h"
#include "ptx.cuh"
#include "vector.cuh"

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

struct BatchNormArgs {
  const void* x;
  const void* residual;  // or nullptr
  void* y;
  float* mean;  // [channels], as the two below
  float* rstd;
  float* variance;
  Parameter scale, bias;
  float2* partials;    // [slabs, parts, channels of a slab]: the mean and the squared deviations
  unsigned* counters;  // [slabs], of the parts that are there
  int rows;
  int channels;
  int vectors;  // of a slab's row, a power of two up to a warp
  int parts;
  int part_rows;  // of a part; the first `longer` have one more
  int longer;
  float epsilon;
  Activation activation;
};

// Adds up what the threads with the same channels have, and leaves the sums of the block in
// `sums` [vectors * kVec]; a block has as many threads or more. The order of adding depends on the
// sizes alone.
template <int kVec>
__device__ __forceinline__ void sum_over_lines(int vectors, float (&values)[kVec], float* of_warps,
                                               float* sums) {
  for (int lane = vectors; lane < 32; lane *= 2) {
#pragma unroll
    for (float& value : values) value += __shfl_xor_sync(~0u, value, lane);
  }
  const int columns = vectors * kVec;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (lane < vectors) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) of_warps[warp * columns + lane * kVec + c] = values[c];
  }
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x);
  if (column < columns) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += of_warps[w * columns + column];
    sums[column] = sum;
  }
  __syncthreads();
}

// Merges the parts of a slab, and leaves the mean and the variance of each channel in `merged`.
// Parts p of n_p rows with means m_p and squared deviations d_p have together
//
//     m = base + sum n_p (m_p - base) / n,   d = sum (d_p + n_p (m_p - base)^2) - n (m - base)^2,
//
// where `base`, the mean of one part, has to lie near m.
__device__ __forceinline__ void merge_parts(const BatchNormArgs& args, int columns,
                                            const float2* partials, float2* of_threads,
                                            float2* merged) {
  const int thread = static_cast<int>(threadIdx.x);
  const int together = kThreads / columns;  // threads that merge a channel
  const int share = thread / columns, column = thread % columns;
  const float base = __ldcg(partials + column).x;
  if (share < together) {
    float2 own = {};
#pragma unroll 4
    for (int part = share; part < args.parts; part += together) {
      const float2 moments = __ldcg(partials + static_cast<int64_t>(part) * columns + column);
      const float count = static_cast<float>(args.part_rows + (part < args.longer ? 1 : 0));
      const float delta = moments.x - base;
      own.x += count * delta;
      own.y += moments.y + count * delta * delta;
    }
    of_threads[thread] = own;
  }
  __syncthreads();
  if (share == 0) {
    float2 sums = {};
    for (int i = 0; i < together; ++i) {
      const float2 other = of_threads[i * columns + column];
      sums.x += other.x;
      sums.y += other.y;
    }
    const float delta = sums.x / static_cast<float>(args.rows);
    const float deviations = sums.y - sums.x * delta;
    merged[column] = make_float2(
        base + delta, (deviations < 0.0f ? 0.0f : deviations) / static_cast<float>(args.rows));
  }
  __syncthreads();
}

template <typename T, int kVec, Activation kActivation, bool kResidual>
__device__ __forceinline__ void write_rows(const BatchNormArgs& args, const Vector<T, kVec>* kept,
                                           int steps, int64_t at, int64_t stride,
                                           const float (&mean)[kVec], const float (&factor)[kVec],
                                           const float (&bias)[kVec]) {
  const T* residual = static_cast<const T*>(args.residual);
  T* y = static_cast<T*>(args.y);
#pragma unroll 2
  for (int step = 0; step < steps; ++step, at += stride) {
    [[maybe_unused]] Vector<T, kVec> from_memory;
    if constexpr (kResidual) from_memory = load_streaming<T, kVec>(residual + at);
    float values[kVec];
    unpack(kept[step * kThreads], values);
#pragma unroll
    for (int c = 0; c < kVec; ++c) values[c] = (values[c] - mean[c]) * factor[c] + bias[c];
    if constexpr (kResidual) {
      float added[kVec];
      unpack(from_memory, added);
#pragma unroll
      for (int c = 0; c < kVec; ++c) values[c] += added[c];
    }
    activate(kActivation, values);
    Vector<T, kVec> vector;
    pack(values, vector);
    store_vector(y + at, vector);
  }
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads, 1)
    batch_norm_forward_kernel(const __grid_constant__ BatchNormArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int thread = static_cast<int>(threadIdx.x);
  const int slab = static_cast<int>(blockIdx.x) / args.parts;
  const int part = static_cast<int>(blockIdx.x) - slab * args.parts;
  const int columns = args.vectors * kVec;
  const int lines = kThreads / args.vectors;
  const int rows = args.part_rows + (part < args.longer ? 1 : 0);
  const int start = part * args.part_rows + min(part, args.longer);
  const int line = thread / args.vectors;
  const int column = (thread & (args.vectors - 1)) * kVec;
  const int channel = slab * columns + column;
  const int steps = line < rows ? (rows - line + lines - 1) / lines : 0;
  const int64_t stride = static_cast<int64_t>(lines) * args.channels;
  const int64_t first = static_cast<int64_t>(start + line) * args.channels + channel;

  // [warps, columns] sums of warps, as many float2 of merged parts, then the vectors of each step.
  float* of_warps = reinterpret_cast<float*>(shared);
  float* sums = of_warps + kWarps * columns;
  auto* merged = reinterpret_cast<float2*>(sums + columns);
  auto* of_threads = merged + columns;
  auto* kept = reinterpret_cast<Vector<T, kVec>*>(of_threads + kThreads) + thread;

  const T* x = static_cast<const T*>(args.x) + first;
  const int half = steps / 2;
  for (int step = 0; step < steps; ++step) {
    if (step == half) async_copies_commit();
    async_copy<sizeof(Vector<T, kVec>)>(kept + step * kThreads, x + step * stride);
  }
  async_copies_commit();
  float scale[kVec], bias[kVec];
  load_scale(args.scale, 0.0f, channel, scale);
  load_or_zero(args.bias, channel, bias);

  float own[kVec] = {};
  const auto add = [&](int from, int to) {
#pragma unroll 4
    for (int step = from; step < to; ++step) {
      float values[kVec];
      unpack(kept[step * kThreads], values);
#pragma unroll
      for (int c = 0; c < kVec; ++c) own[c] += values[c];
    }
  };
  async_copies_wait(1);  // for the first half
  add(0, half);
  async_copies_wait(0);
  add(half, steps);
  sum_over_lines(args.vectors, own, of_warps, sums);
  const float count = static_cast<float>(rows);
  float mean[kVec], deviations[kVec] = {};
#pragma unroll
  for (int c = 0; c < kVec; ++c) mean[c] = sums[column + c] / count;
#pragma unroll 4
  for (int step = 0; step < steps; ++step) {
    float values[kVec];
    unpack(kept[step * kThreads], values);
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const float difference = values[c] - mean[c];
      deviations[c] += difference * difference;
    }
  }
  const float part_mean = thread < columns ? sums[thread] / count : 0.0f;
  __syncthreads();  // before `sums` is written again
  sum_over_lines(args.vectors, deviations, of_warps, sums);

  float2* partials = args.partials + static_cast<int64_t>(slab) * args.parts * columns;
  if (thread < columns) {
    __stcg(partials + static_cast<int64_t>(part) * columns + thread,
           make_float2(part_mean, sums[thread]));
  }
  __syncthreads();
  if (thread == 0) {
    count_up(args.counters + slab);
    wait_for_count(args.counters + slab, args.parts);
  }
  __syncthreads();
  merge_parts(args, columns, partials, of_threads, merged);

  float factor[kVec];
#pragma unroll
  for (int c = 0; c < kVec; ++c) {
    const float2 of_channel = merged[column + c];
    mean[c] = of_channel.x;
    factor[c] = rsqrtf(of_channel.y + args.epsilon);
  }
  if (part == 0 && line == 0) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      args.mean[channel + c] = mean[c];
      args.rstd[channel + c] = factor[c];
      args.variance[channel + c] = merged[column + c].y;
    }
  }
#pragma unroll
  for (int c = 0; c < kVec; ++c) factor[c] *= scale[c];
  with_constants(args.activation, args.residual != nullptr, [&](auto activation, auto residual) {
    write_rows<T, kVec, decltype(activation)::value, decltype(residual)::value>(
        args, kept, steps, first, stride, mean, factor, bias);
  });
}

ffi::Error forward(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer residual,
                   ffi::AnyBuffer scale, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y,
                   ffi::Result<ffi::AnyBuffer> mean, ffi::Result<ffi::AnyBuffer> rstd,
                   ffi::Result<ffi::AnyBuffer> variance, ffi::Result<ffi::AnyBuffer> partials,
                   ffi::Result<ffi::AnyBuffer> counters, float epsilon, std::string_view activation,
                   int64_t vectors, int64_t parts) {
  const auto shape = x.dimensions();
  if (shape.size() != 2 || !dtype_of(x)) {
    return ffi::Error::InvalidArgument(
        "batch_norm: x must be float32, bfloat16 or float16 with axes row, channel");
  }
  const int64_t rows = shape[0], channels = shape[1];
  const int vec = *dtype_of(x) == Dtype::kFloat32 ? 4 : 8;
  const bool power = vectors == 1 || vectors == 2 || vectors == 4 || vectors == 8 ||
                     vectors == 16 || vectors == 32;
  if (!power || parts < 1 || parts > rows || rows > kMaxRows || channels > INT32_MAX ||
      channels % (vectors * vec) != 0) {
    return ffi::Error::InvalidArgument(
        "batch_norm: a launch needs a power of two of vectors, up to 32, that divide the channels, "
        "and "
        "at most as many parts as there are rows");
  }
  BatchNormArgs args = {};
  RETURN_IF_ERROR(check_like("y", *y, x));
  RETURN_IF_ERROR(check_like_or_absent("residual", residual, x));
  RETURN_IF_ERROR(parse_parameter("scale", scale, channels, &args.scale));
  RETURN_IF_ERROR(parse_parameter("bias", bias, channels, &args.bias));
  RETURN_IF_ERROR(check_float32("mean", *mean, {channels}));
  RETURN_IF_ERROR(check_float32("rstd", *rstd, {channels}));
  RETURN_IF_ERROR(check_float32("variance", *variance, {channels}));
  const int64_t columns = vectors * vec, slabs = channels / columns;
  RETURN_IF_ERROR(check_float32("partials", *partials, {slabs, parts, columns, 2}));
  RETURN_IF_ERROR(check_shape("counters", *counters, {slabs}));
  RETURN_IF_ERROR(check_dtype("counters", *counters, ffi::DataType::S32));
  if (!parse_activation(activation, &args.activation)) {
    return ffi::Error::InvalidArgument("batch_norm: an activation is not known: " +
                                       std::string(activation));
  }
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  args.x = x.untyped_data();
  args.residual = data_or_null(residual);
  args.y = y->untyped_data();
  if (!are_aligned({args.x, args.residual, args.y})) {
    return ffi::Error::InvalidArgument("batch_norm: arrays must begin at a multiple of 16 bytes");
  }
  args.mean = data_or_null<float>(*mean);
  args.rstd = data_or_null<float>(*rstd);
  args.variance = data_or_null<float>(*variance);
  args.partials = data_or_null<float2>(*partials);
  args.counters = data_or_null<unsigned>(*counters);
  args.rows = static_cast<int>(rows);
  args.channels = static_cast<int>(channels);
  args.vectors = static_cast<int>(vectors);
  args.parts = static_cast<int>(parts);
  args.part_rows = static_cast<int>(rows / parts);
  args.longer = static_cast<int>(rows % parts);
  args.epsilon = epsilon;

  const int64_t longest = args.part_rows + (args.longer > 0 ? 1 : 0);
  const int64_t lines = kThreads / vectors;
  const int64_t kept_bytes = (longest + lines - 1) / lines * kThreads * 16;
  const int64_t shared_bytes =
      (kWarps + 1) * columns * sizeof(float) + (columns + kThreads) * sizeof(float2) + kept_bytes;
  if (slabs * parts > device.multiprocessors || shared_bytes > device.shared_bytes) {
    return ffi::Error::InvalidArgument("batch_norm: " + std::to_string(slabs * parts) +
                                       " blocks with " + std::to_string(shared_bytes) +
                                       " bytes of shared memory do not run at the same time");
  }
  RETURN_IF_ERROR(check_cuda(cudaMemsetAsync(args.counters, 0, slabs * sizeof(unsigned), stream),
                             "cudaMemsetAsync"));
  const auto launch = [&](auto type, auto values) {
    const auto kernel = batch_norm_forward_kernel<decltype(type), decltype(values)::value>;
    RETURN_IF_ERROR(allow_shared_memory(kernel, device));
    Launch launch = {dim3(static_cast<unsigned>(slabs * parts)), kThreads,
                     static_cast<int>(shared_bytes)};
    launch.cooperative = true;
    return launch_kernel(kernel, args, launch, stream);
  };
  using std::integral_constant;
  switch (*dtype_of(x)) {
    case Dtype::kFloat32:
      return launch(float{}, integral_constant<int, 4>{});
    case Dtype::kBfloat16:
      return launch(__nv_bfloat16{}, integral_constant<int, 8>{});
    default:
      return launch(__half{}, integral_constant<int, 8>{});
  }
}

}  // namespace

DEFINE_HANDLER(jaxfused_batch_norm_forward, forward,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // residual
                   .Arg<ffi::AnyBuffer>()  // scale
                   .Arg<ffi::AnyBuffer>()  // bias
                   .Ret<ffi::AnyBuffer>()  // y
                   .Ret<ffi::AnyBuffer>()  // mean
                   .Ret<ffi::AnyBuffer>()  // rstd
                   .Ret<ffi::AnyBuffer>()  // variance
                   .Ret<ffi::AnyBuffer>()  // partials
                   .Ret<ffi::AnyBuffer>()  // counters
                   .Attr<float>("epsilon")
                   .Attr<std::string_view>("activation")
                   .Attr<int64_t>("vectors")
                   .Attr<int64_t>("parts"));
