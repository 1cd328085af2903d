// The forward of group_norm that reads images once: y = activation((x - mean) rstd scale + bias +
// residual) over images [image, pixel, channel], with a mean and a variance for each group of
// adjacent channels of an image. batch_norm is the case of one image and a group for each channel.
//
// A slab is the adjacent channels of some groups, and a part is a run of consecutive pixels of an
// image. A block copies one slab of one part into shared memory, computes the mean and the squared
// deviations of each group, and writes the result from shared memory, so that memory is read once
// and written once. If an image has several parts the grid is cooperative: a block writes its
// moments to global memory, waits for the other parts of its slab, and merges their moments.
//
// A thread owns the same vector of channels in every `lines`-th pixel of the part:
//
//     channel = (slab * vectors + thread % vectors) * kVec
//     pixel = start + thread / vectors + step * lines

#include "group_norm.cuh"
#include "group_norm_single_pass.cuh"

namespace {

using group_norm::Divider;
using group_norm::Images;
using group_norm::kThreads;

constexpr int kWarps = kThreads / 32;
constexpr int kMostVectors = 64;

struct SlabArgs {
  Images images;
  const void* x;
  const void* residual;  // may be nullptr
  void* y;
  float* mean;  // [images, groups]; mean, rstd and variance may be nullptr
  float* rstd;
  float* variance;
  Parameter scale, bias;
  int scale_rows, bias_rows;  // rows: 1, or one for each image
  float2* partials;    // means and squared deviations, [images, slabs, groups of a slab, parts]
  unsigned* counters;  // numbers of parts whose moments are stored, [images, slabs]
  int vectors;         // vectors of a pixel in a slab
  int slabs;
  int parts;
  int part_pixels;  // pixels of a part; the first `longer` parts have one more
  int longer;
  int slab_groups;
  int line_sums;  // number of partial sums of a channel in shared memory
  int lanes;      // adjacent threads that add the partial sums of a group: 2^lane_bits
  int lane_bits;
  float of_part, of_longer_part, of_all;  // 1 / a group's values in a part, a longer part, an image
  Divider by_vectors, by_lines, by_parts, by_group;
  float epsilon;
  Activation activation;
};

// Sums the threads' values of each group into `sums` [groups of a slab], in an order that depends
// on the sizes alone. `of_lines` holds the threads' partial sums, contiguous for each channel.
template <int kVec>
__device__ __forceinline__ void sum_over_groups(const SlabArgs& args, float (&values)[kVec],
                                                float* of_lines, float* sums) {
  const int thread = static_cast<int>(threadIdx.x);
  const int vectors = args.vectors, pitch = args.line_sums | 1;
  int line = args.by_vectors.quotient(thread);
  const int vector = thread - line * vectors;
  bool writes = line < args.line_sums;
  if (32 % vectors == 0) {
    // Lanes with the same channels add up first; the first `vectors` lanes then write the sums.
    for (int lane = vectors; lane < 32; lane *= 2) {
#pragma unroll
      for (float& value : values) value += __shfl_xor_sync(~0u, value, lane);
    }
    line = thread / 32;
    writes = thread % 32 < vectors;
  }
  if (writes) {
    float* own = of_lines + vector * kVec * pitch + line;
#pragma unroll
    for (int c = 0; c < kVec; ++c) own[c * pitch] = values[c];
  }
  if (pitch > args.line_sums && thread < vectors * kVec)
    of_lines[thread * pitch + args.line_sums] = 0.0f;
  __syncthreads();
  const int group = thread >> args.lane_bits, lane = thread & (args.lanes - 1);
  const bool has_group = group < args.slab_groups;
  float sum = 0.0f;
  if (has_group) {
    const int count = args.images.group_size * pitch;
    const float* of_group = of_lines + group * count;
#pragma unroll 1
    for (int i = lane; i < count; i += args.lanes) sum += of_group[i];
  }
  for (int half = args.lanes / 2; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
  if (has_group && lane == 0) sums[group] = sum;
  __syncthreads();
}

// Merges the parts of a slab; the first lane of each group returns its mean and squared deviations.
// Parts p with n_p values, means m_p and squared deviations d_p are merged as
//
//     m = base + sum n_p (m_p - base) / n,   d = sum (d_p + n_p (m_p - base)^2) - n (m - base)^2,
//
// where `base`, the mean of one part, must be near m.
__device__ __forceinline__ float2 merge_parts(const SlabArgs& args, const float2* partials) {
  const int thread = static_cast<int>(threadIdx.x);
  const int group = min(thread >> args.lane_bits, args.slab_groups - 1);
  const int lane = thread & (args.lanes - 1);
  const float2* of_group = partials + group * args.parts;
  const float base = __ldcg(of_group).x;
  const float size = static_cast<float>(args.images.group_size);
  float first = 0.0f, second = 0.0f;
#pragma unroll 4
  for (int part = lane; part < args.parts; part += args.lanes) {
    const float2 moments = __ldcg(of_group + part);
    const float count = size * static_cast<float>(args.part_pixels + (part < args.longer ? 1 : 0));
    const float delta = moments.x - base;
    first += count * delta;
    second += moments.y + count * delta * delta;
  }
  for (int half = args.lanes / 2; half > 0; half /= 2) {
    first += __shfl_xor_sync(~0u, first, half);
    second += __shfl_xor_sync(~0u, second, half);
  }
  const float delta = first * args.of_all;
  const float deviations = second - first * delta;
  return make_float2(base + delta, deviations < 0.0f ? 0.0f : deviations);
}

// Prefetches an address into L2, because it is needed once the statistics are known.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ __forceinline__ void prefetch(const Parameter& parameter, int64_t at) {
  if (parameter.data == nullptr) return;
  const int size = parameter.dtype == Dtype::kFloat32 ? 4 : 2;
  prefetch(static_cast<const char*>(parameter.data) + at * size);
}

template <typename T, int kVec, bool kResidual, typename A>
__device__ __forceinline__ void write_pixels(A activation, const SlabArgs& args,
                                             const Vector<T, kVec>* kept, int steps, int64_t at,
                                             int64_t stride, const float (&mean)[kVec],
                                             const float (&factor)[kVec],
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
    activate(activation, values);
    Vector<T, kVec> vector;
    pack(values, vector);
    store_vector(y + at, vector);
  }
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads, 2)
    group_norm_slab_kernel(const __grid_constant__ SlabArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int thread = static_cast<int>(threadIdx.x);
  const int unit = args.by_parts.quotient(blockIdx.x);  // index among the slabs of all images
  const int part = static_cast<int>(blockIdx.x) - unit * args.parts;
  const int image = unit / args.slabs;
  const int slab = unit - image * args.slabs;
  const int columns = args.vectors * kVec;
  const int lines = args.by_lines.divisor;
  const int pixels = args.part_pixels + (part < args.longer ? 1 : 0);
  const int start = part * args.part_pixels + min(part, args.longer);
  const int line = args.by_vectors.quotient(thread);
  const int column = (thread - line * args.vectors) * kVec;
  const int channel = slab * columns + column;
  const int steps = line < min(lines, pixels) ? args.by_lines.quotient(pixels - line - 1) + 1 : 0;
  const int64_t stride = static_cast<int64_t>(lines) * args.images.channels;
  const int64_t first =
      (static_cast<int64_t>(image) * args.images.pixels + start + line) * args.images.channels +
      channel;

  // The part's vectors, which are read again once the statistics are known, follow the sums: see
  // the handler's shared_bytes.
  float* of_lines = reinterpret_cast<float*>(shared);
  float* sums = of_lines + columns * (args.line_sums | 1);
  auto* moments = reinterpret_cast<float2*>(sums + columns);
  auto* kept = reinterpret_cast<Vector<T, kVec>*>(moments + columns) + thread;

  const T* x = static_cast<const T*>(args.x) + first;
  const T* residual = static_cast<const T*>(args.residual) + first;
  const int half = steps / 2;
  for (int step = 0; step < steps; ++step) {
    if (step == half) async_copies_commit();
    async_copy<sizeof(Vector<T, kVec>)>(kept + step * kThreads, x + step * stride);
    if (args.residual != nullptr) prefetch(residual + step * stride);
  }
  async_copies_commit();

  const int64_t of_image = static_cast<int64_t>(image) * args.images.channels;
  prefetch(args.scale, (args.scale_rows == 1 ? 0 : of_image) + channel);
  prefetch(args.bias, (args.bias_rows == 1 ? 0 : of_image) + channel);

  float own[kVec] = {};
  const auto add = [&](int from, int to) {
#pragma unroll 2
    for (int step = from; step < to; ++step) {
      float values[kVec];
      unpack(kept[step * kThreads], values);
#pragma unroll
      for (int c = 0; c < kVec; ++c) own[c] += values[c];
    }
  };
  async_copies_wait(1);  // wait for the first half only
  add(0, half);
  async_copies_wait(0);
  add(half, steps);
  sum_over_groups(args, own, of_lines, sums);
  const float inverse = part < args.longer ? args.of_longer_part : args.of_part;
  float mean[kVec], deviations[kVec] = {};
#pragma unroll
  for (int c = 0; c < kVec; ++c) mean[c] = sums[args.by_group.quotient(column + c)] * inverse;
#pragma unroll 2
  for (int step = 0; step < steps; ++step) {
    float values[kVec];
    unpack(kept[step * kThreads], values);
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const float difference = values[c] - mean[c];
      deviations[c] += difference * difference;
    }
  }
  const int own_group = thread >> args.lane_bits;
  const bool has_group = own_group < args.slab_groups && (thread & (args.lanes - 1)) == 0;
  const float own_mean = has_group ? sums[own_group] * inverse : 0.0f;
  __syncthreads();  // all threads have read `sums`, which is written again
  sum_over_groups(args, deviations, of_lines, sums);

  float2 of_group = make_float2(own_mean, has_group ? sums[own_group] : 0.0f);
  if (args.parts > 1) {
    float2* partials = args.partials + static_cast<int64_t>(unit) * args.parts * args.slab_groups;
    if (has_group) __stcg(partials + own_group * args.parts + part, of_group);
    __syncthreads();
    if (thread == 0) {
      count_up(args.counters + unit);
      wait_for_count(args.counters + unit, args.parts);
    }
    __syncthreads();
    of_group = merge_parts(args, partials);
  }
  if (has_group) {
    const float variance = of_group.y * args.of_all;
    const float rstd = rsqrtf(variance + args.epsilon);
    moments[own_group] = make_float2(of_group.x, rstd);
    if (part == 0) {
      const int64_t group = static_cast<int64_t>(unit) * args.slab_groups + own_group;
      if (args.mean != nullptr) args.mean[group] = of_group.x;
      if (args.rstd != nullptr) args.rstd[group] = rstd;
      if (args.variance != nullptr) args.variance[group] = variance;
    }
  }
  __syncthreads();
  if (steps == 0) return;

  float factor[kVec], bias[kVec];
  const int all = args.images.channels;
  group_norm::load_channels(args.scale, args.scale_rows, image, all, channel, 1.0f, factor);
  group_norm::load_channels(args.bias, args.bias_rows, image, all, channel, 0.0f, bias);
#pragma unroll
  for (int c = 0; c < kVec; ++c) {
    const float2 of_channel = moments[args.by_group.quotient(column + c)];
    mean[c] = of_channel.x;
    factor[c] *= of_channel.y;
  }
  with_constants(args.activation, args.residual != nullptr, [&](auto activation, auto residual) {
    write_pixels<T, kVec, decltype(residual)::value>(activation, args, kept, steps, first, stride,
                                                     mean, factor, bias);
  });
}

// --- the host's part -----------------------------------------------------------------------------

ffi::Error forward(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer residual,
                   ffi::AnyBuffer scale, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y,
                   ffi::Result<ffi::AnyBuffer> mean, ffi::Result<ffi::AnyBuffer> rstd,
                   ffi::Result<ffi::AnyBuffer> variance, ffi::Result<ffi::AnyBuffer> partials,
                   ffi::Result<ffi::AnyBuffer> counters, int64_t groups, float epsilon,
                   std::string_view activation, int64_t vectors, int64_t parts) {
  SlabArgs args = {};
  RETURN_IF_ERROR(group_norm::parse_forward(x, residual, scale, bias, *y, *mean, *rstd, *variance,
                                            groups, epsilon, activation, &args));
  const Images& images = args.images;
  const int64_t columns = vectors * (*dtype_of(x) == Dtype::kFloat32 ? 4 : 8);
  if (vectors < 1 || vectors > kMostVectors || parts < 1 || parts > std::max(images.pixels, 1) ||
      images.channels % columns != 0 || columns % images.group_size != 0) {
    return ffi::Error::InvalidArgument(
        "group_norm: a slab has up to 64 vectors of 16 bytes and whole groups, slabs divide the "
        "channels, and an image has no more parts than pixels");
  }
  const int64_t slabs = images.channels / columns, slab_groups = columns / images.group_size;
  if (parts > 1) {
    RETURN_IF_ERROR(
        check_float32("partials", *partials, {images.count, slabs, slab_groups, parts, 2}));
    RETURN_IF_ERROR(check_shape("counters", *counters, {images.count, slabs}));
    RETURN_IF_ERROR(check_dtype("counters", *counters, ffi::DataType::S32));
  }
  if (is_absent(x)) return ffi::Error::Success();
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  args.partials = data_or_null<float2>(*partials);
  args.counters = data_or_null<unsigned>(*counters);
  args.vectors = static_cast<int>(vectors);
  args.slabs = static_cast<int>(slabs);
  args.parts = static_cast<int>(parts);
  args.part_pixels = static_cast<int>(images.pixels / parts);
  args.longer = static_cast<int>(images.pixels % parts);
  args.slab_groups = static_cast<int>(slab_groups);
  args.line_sums = 32 % vectors == 0 ? kWarps : static_cast<int>(kThreads / vectors);
  args.lanes = 1;
  while (args.lanes < 32 && 2 * args.lanes * slab_groups <= kThreads) {
    args.lanes *= 2;
    ++args.lane_bits;
  }
  const double size = images.group_size;
  args.of_part = static_cast<float>(1.0 / (size * std::max(args.part_pixels, 1)));
  args.of_longer_part = static_cast<float>(1.0 / (size * (args.part_pixels + 1)));
  args.of_all = static_cast<float>(1.0 / (size * images.pixels));
  args.by_vectors.set(args.vectors);
  args.by_lines.set(static_cast<int>(kThreads / vectors));
  args.by_parts.set(args.parts);
  args.by_group.set(images.group_size);

  const int64_t longest = args.part_pixels + (args.longer > 0 ? 1 : 0);
  const int64_t lines = kThreads / vectors;
  const int64_t sums_bytes = columns * ((args.line_sums | 1) + 3) * sizeof(float);
  const int64_t shared_bytes = sums_bytes + (longest + lines - 1) / lines * kThreads * 16;
  const int64_t blocks = images.count * slabs * parts;
  if (shared_bytes > device.shared_bytes || blocks > INT32_MAX ||
      (parts > 1 && blocks > device.multiprocessors)) {
    return ffi::Error::InvalidArgument("group_norm: " + std::to_string(blocks) + " blocks with " +
                                       std::to_string(shared_bytes) +
                                       " bytes of shared memory do not fit, or wait for each other "
                                       "and do not run at the same time");
  }
  if (parts > 1) {
    RETURN_IF_ERROR(check_cuda(
        cudaMemsetAsync(args.counters, 0, images.count * slabs * sizeof(unsigned), stream),
        "cudaMemsetAsync"));
  }
  const auto launch = [&](auto type, auto values) {
    const auto kernel = group_norm_slab_kernel<decltype(type), decltype(values)::value>;
    RETURN_IF_ERROR(allow_shared_memory(kernel, device));
    Launch launch = {dim3(static_cast<unsigned>(blocks)), kThreads, static_cast<int>(shared_bytes)};
    launch.cooperative = parts > 1;
    return launch_kernel(kernel, args, launch, stream);
  };
  const bool whole = are_aligned({args.x, args.residual, args.y});
  return group_norm::with_whole_vectors<8>(*dtype_of(x), whole, images.channels, launch);
}

}  // namespace

DEFINE_HANDLER(jaxfused_group_norm_slab, forward,
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
                   .Attr<int64_t>("groups")
                   .Attr<float>("epsilon")
                   .Attr<std::string_view>("activation")
                   .Attr<int64_t>("vectors")
                   .Attr<int64_t>("parts"),
               {ffi::Traits::kCmdBufferCompatible});
