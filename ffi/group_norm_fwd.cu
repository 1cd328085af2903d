// The forward of group_norm: y = activation((x - mean) rstd scale + bias + residual) over images
// [image, pixel, channel], with a mean and a variance for each group of neighbouring channels of an
// image.
//
// The first pass takes each slice's mean and sum of squared deviations of a group, the second
// merges them and writes y.

#include "group_norm.cuh"

namespace {

using namespace group_norm;

// The vectors of x that a thread loads together.
constexpr int kTogether = 4;

struct ForwardArgs {
  Images images;
  Plan plan;
  const void* x;
  const void* residual;  // or nullptr
  void* y;
  float* mean;  // [images, groups], or nullptr
  float* rstd;
  float* variance;
  Parameter scale, bias;
  int scale_rows, bias_rows;
  float2* partials;     // [images, slices, groups]: the mean and the sum of squared deviations
  const float2* parts;  // [images, plan.parts, groups], which the second pass merges
  float epsilon;
  Activation activation;
};

// The number of some values, their mean and the sum of their squared deviations from it.
struct Moments {
  float count;
  float mean;
  float squares;

  __device__ void add(const Moments& other) {
    if (other.count == 0.0f) return;
    const float total = count + other.count;
    const float weight = other.count / total;
    const float delta = other.mean - mean;
    mean += delta * weight;
    squares += other.squares + delta * delta * (count * weight);
    count = total;
  }
};

// Returns the moments of a part of an image's group.
__device__ __forceinline__ Moments part_of(const Images& images, const float2* parts, int count,
                                           int image, int group, int part) {
  const float2 values =
      __ldcg(parts + (static_cast<int64_t>(image) * count + part) * images.groups + group);
  const Slice slice(images.pixels, count, part);
  return {static_cast<float>(slice.count) * images.group_size, values.x, values.y};
}

// The first pass. A thread adds up differences from the first of its values. This is as good as
// their deviations from the mean would be: that value is one of those that the variance is of, so
// that its own deviation is a part of the sum, and little is lost where it is large.
template <typename T, int kVec>
__device__ void take_moments(const ForwardArgs& args, const Place& place, float2* items,
                             Moments* scratch) {
  const Images& images = args.images;
  const Plan& plan = args.plan;
  const int64_t stride = plan.stride;
  const T* x = static_cast<const T*>(args.x) + place.offset(images);
  float shift[kVec] = {}, mean[kVec] = {}, squares[kVec] = {};
  for (int step = 0; step < place.steps; step += kTogether, x += kTogether * stride) {
    Vector<T, kVec> loaded[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (step + i < place.steps) loaded[i] = load_vector<T, kVec>(x + i * stride);
    }
    if (step == 0) unpack(loaded[0], shift);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (step + i >= place.steps) break;
      float values[kVec];
      unpack(loaded[i], values);
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        const float difference = values[c] - shift[c];
        mean[c] += difference;
        squares[c] += difference * difference;
      }
    }
  }
  const float count = static_cast<float>(place.steps);
  const float inverse = 1.0f / fmaxf(count, 1.0f);
#pragma unroll
  for (int c = 0; c < kVec; ++c) {
    const float offset = mean[c] * inverse;
    squares[c] -= mean[c] * offset;
    mean[c] = shift[c] + offset;
  }
  // Neighbouring channels of a group are merged in pairs, and their pairs again.
  int width = 1;
#pragma unroll
  for (int half = 1; half < kVec; half *= 2) {
    if (images.group_size % (2 * half) != 0) continue;
    width = 2 * half;
#pragma unroll
    for (int c = 0; c < kVec; c += 2 * half) {
      const float delta = mean[c + half] - mean[c];
      mean[c] += 0.5f * delta;
      squares[c] += squares[c + half] + delta * delta * (0.5f * half * count);
    }
  }
  const int row_items = images.channels / width;
  if (place.row < plan.rows) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      if (c % width != 0) continue;
      items[place.row * row_items + (place.channel + c) / width] = make_float2(mean[c], squares[c]);
    }
  }
  __syncthreads();
  const int group_items = images.group_size / width;
  float2* partials =
      args.partials +
      (static_cast<int64_t>(place.image) * plan.slices + place.index) * images.groups;
  merge_parts(
      images.groups, plan.rows * group_items, scratch,
      [&](int group, int part) -> Moments {
        const int row = part / group_items;
        const float2 item = items[row * row_items + group * group_items + part % group_items];
        return {static_cast<float>(place.pixels_of_row(plan, row) * width), item.x, item.y};
      },
      [&](int group, const Moments& merged) {
        __stcg(partials + group, make_float2(merged.mean, merged.squares));
      });
}

// The second pass.
template <typename T, int kVec>
__device__ void write(const ForwardArgs& args, const Place& place, float2* stats,
                      Moments* scratch) {
  const Images& images = args.images;
  const Plan& plan = args.plan;
  const int64_t stride = plan.stride;
  const T* x = static_cast<const T*>(args.x);
  const T* residual = static_cast<const T*>(args.residual);
  T* y = static_cast<T*>(args.y);
  int last = place.steps - 1;
  int64_t from = place.offset(images) + last * stride;
  Vector<T, kVec> loaded[kTogether];
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (last >= i) loaded[i] = load_vector<T, kVec>(x + from - i * stride);
    }
  };
  load();  // on the way while the parts are merged

  merge_parts(
      images.groups, plan.parts, scratch,
      [&](int group, int part) {
        return part_of(images, args.parts, plan.parts, place.image, group, part);
      },
      [&](int group, const Moments& merged) {
        const float variance = merged.squares / merged.count;
        const float rstd = rsqrtf(variance + args.epsilon);
        stats[group] = make_float2(merged.mean, rstd);
        if (place.index != 0) return;
        const int at = place.image * images.groups + group;
        if (args.mean != nullptr) args.mean[at] = merged.mean;
        if (args.rstd != nullptr) args.rstd[at] = rstd;
        if (args.variance != nullptr) args.variance[at] = variance;
      });
  __syncthreads();
  if (place.steps == 0) return;

  float mean[kVec], factor[kVec], bias[kVec];
  load_channels(args.scale, args.scale_rows, place.image, images.channels, place.channel, 1.0f,
                factor);
  load_channels(args.bias, args.bias_rows, place.image, images.channels, place.channel, 0.0f, bias);
#pragma unroll
  for (int c = 0; c < kVec; ++c) {
    const float2 group = stats[(place.channel + c) / images.group_size];
    mean[c] = group.x;
    factor[c] *= group.y;
  }
  for (;;) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (last < i) break;
      const int64_t at = from - i * stride;
      float values[kVec];
      unpack(loaded[i], values);
#pragma unroll
      for (int c = 0; c < kVec; ++c) values[c] = (values[c] - mean[c]) * factor[c] + bias[c];
      if (residual != nullptr) {
        float added[kVec];
        unpack(load_vector<T, kVec>(residual + at), added);
#pragma unroll
        for (int c = 0; c < kVec; ++c) values[c] += added[c];
      }
      activate(args.activation, values);
      store_result(plan, y + at, values);
    }
    last -= kTogether;
    from -= kTogether * stride;
    if (last < 0) break;
    load();
  }
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kMaxThreads)
    group_norm_forward_kernel(const __grid_constant__ ForwardArgs args) {
  extern __shared__ __align__(16) char shared[];
  Moments* scratch = reinterpret_cast<Moments*>(shared);
  float2* items = reinterpret_cast<float2*>(scratch + blockDim.x);
  const Place place(args.images, args.plan, kVec);
  if (place.takes) take_moments<T, kVec>(args, place, items, scratch);
  if (place.takes && place.writes) __syncthreads();
  if (place.writes) write<T, kVec>(args, place, items, scratch);
}

struct MergeArgs {
  Images images;
  int first_image;
  int slices;
  const float2* partials;  // [images, slices, groups]
  float2* merged;          // [images, groups]
};

__global__ void __launch_bounds__(kThreads)
    group_norm_merge_kernel(const __grid_constant__ MergeArgs args) {
  __shared__ Moments scratch[kThreads];
  const Images& images = args.images;
  const int blocks = (images.groups + kMergedColumns - 1) / kMergedColumns;
  const int image = args.first_image + static_cast<int>(blockIdx.x) / blocks;
  const int first = static_cast<int>(blockIdx.x) % blocks * kMergedColumns;
  merge_parts(
      min(kMergedColumns, images.groups - first), args.slices, scratch,
      [&](int group, int part) {
        return part_of(images, args.partials, args.slices, image, first + group, part);
      },
      [&](int group, const Moments& merged) {
        args.merged[static_cast<int64_t>(image) * images.groups + first + group] =
            make_float2(merged.mean, merged.squares);
      });
}

ffi::Error forward(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer residual,
                   ffi::AnyBuffer scale, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y,
                   ffi::Result<ffi::AnyBuffer> mean, ffi::Result<ffi::AnyBuffer> rstd,
                   ffi::Result<ffi::AnyBuffer> variance, ffi::Result<ffi::AnyBuffer> partials,
                   ffi::Result<ffi::AnyBuffer> merged, int64_t groups, float epsilon,
                   std::string_view activation, int64_t slices, int64_t chunk) {
  ForwardArgs args = {};
  const Config config = {slices, chunk};
  RETURN_IF_ERROR(check_config(config));
  RETURN_IF_ERROR(parse_images(x, groups, &args.images));
  RETURN_IF_ERROR(check_like_images("y", *y, x));
  if (!is_absent(residual)) RETURN_IF_ERROR(check_like_images("residual", residual, x));
  RETURN_IF_ERROR(parse_channels("scale", scale, args.images, &args.scale, &args.scale_rows));
  RETURN_IF_ERROR(parse_channels("bias", bias, args.images, &args.bias, &args.bias_rows));
  const Images& images = args.images;
  for (const auto& [name, buffer] : {std::pair<std::string_view, ffi::AnyBuffer>{"mean", *mean},
                                     {"rstd", *rstd},
                                     {"variance", *variance}}) {
    if (!is_absent(buffer)) RETURN_IF_ERROR(check_float32(name, buffer, {images.count, groups}));
  }
  RETURN_IF_ERROR(check_float32("partials", *partials, {images.count, slices, groups, 2}));
  RETURN_IF_ERROR(check_float32("merged", *merged, {images.count, groups, 2}));
  if (!parse_activation(activation, &args.activation)) {
    return ffi::Error::InvalidArgument("group_norm: an activation is not known: " +
                                       std::string(activation));
  }
  if (is_absent(x)) return ffi::Error::Success();
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  args.x = x.untyped_data();
  args.residual = data_or_null(residual);
  args.y = y->untyped_data();
  args.mean = data_or_null<float>(*mean);
  args.rstd = data_or_null<float>(*rstd);
  args.variance = data_or_null<float>(*variance);
  args.partials = data_or_null<float2>(*partials);
  args.epsilon = epsilon;
  args.plan.slices = static_cast<int>(slices);
  args.plan.streams = 2 * x.size_bytes() > static_cast<size_t>(device.l2_bytes);
  const bool apart = merges_apart(args.plan, images.groups);
  args.plan.parts = apart ? 1 : args.plan.slices;
  args.parts = apart ? data_or_null<float2>(*merged) : args.partials;
  const bool whole = are_aligned({args.x, args.residual, args.y, args.scale.data, args.bias.data});

  const auto merge = [&](int first, int count) {
    if (!apart) return ffi::Error::Success();
    const unsigned blocks = (images.groups + kMergedColumns - 1) / kMergedColumns;
    const MergeArgs merge_args = {images, first, args.plan.slices, args.partials,
                                  data_or_null<float2>(*merged)};
    return launch_kernel(group_norm_merge_kernel, merge_args, {dim3(count * blocks), kThreads, 0},
                         stream);
  };
  const auto launch = [&](auto type, auto vec) {
    using T = decltype(type);
    constexpr int kVec = decltype(vec)::value;
    const auto shared_bytes = [&](int threads) {
      const size_t items = std::max(threads * kVec, images.groups);
      return static_cast<int>(threads * sizeof(Moments) + items * sizeof(float2));
    };
    return launch_passes<kVec>(group_norm_forward_kernel<T, kVec>, args, config, shared_bytes,
                               merge, stream);
  };
  return with_vectors<8>(*dtype_of(x), whole, images.channels, launch);
}

}  // namespace

DEFINE_HANDLER(jaxfused_group_norm_forward, forward,
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
                   .Ret<ffi::AnyBuffer>()  // merged
                   .Attr<int64_t>("groups")
                   .Attr<float>("epsilon")
                   .Attr<std::string_view>("activation")
                   .Attr<int64_t>("slices")
                   .Attr<int64_t>("chunk"));
