// The forward of group_norm: y = activation((x - mean) rstd scale + bias + residual) over images
// [image, pixel, channel], with a mean and a variance for each group of neighbouring channels of an
// image.
//
// The first pass takes each slice's mean and sum of squared deviations of a group, the second
// merges them and writes y.

#include "group_norm.cuh"

namespace {

using namespace group_norm;

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

// Means and sums of squared deviations of several parts make those of all values together by plain
// sums about `base`, the mean of one part that is not empty: with d = mean - base, n values and
// squared deviations m of a part,
//
//     mean = base + sum n d / sum n,   deviations = sum (m + n d^2) - (sum n d)^2 / sum n.
//
// The difference loses digits where `base` lies far from the mean of all values, so that `base`
// should be a mean of many of them.
__device__ __forceinline__ Sums moments_about(float base, float count, float2 moments) {
  const float delta = moments.x - base;
  const float first = count * delta;
  return {first, moments.y + first * delta};
}

__device__ __forceinline__ float2 moments_of(float base, float count, const Sums& sums) {
  const float delta = sums.first / fmaxf(count, 1.0f);
  const float deviations = sums.second - sums.first * delta;
  return make_float2(base + delta, deviations < 0.0f ? 0.0f : deviations);
}

// A mean of more values than these lies near that of all.
constexpr float kFewestValues = 31.0f;

// Merges the moments of an image's slices, [slices, groups], and hands those of a group to
// store(group, moments) of one thread. `parts` is the number of slices, or 1 if they are merged.
template <int kLoads, typename Store>
__device__ __forceinline__ void merge_slices(const Images& images, const float2* moments,
                                             int first_group, int groups, int parts, int lanes,
                                             int pixels, int longer, const Store& store) {
  const float size = static_cast<float>(images.group_size);
  const float shorter = static_cast<float>(pixels) * size;
  moments += first_group;
  const auto mean_of = [=, &images](int group, int part) {
    return __ldcg(moments + group + static_cast<int64_t>(part) * images.groups).x;
  };
  // Slices of few values have a mean far from that of all: then `base` is a mean of several.
  const int near = min(parts, static_cast<int>(kFewestValues / fmaxf(shorter, 1.0f)) + 1);
  const auto base_of = [=](int group) {
    float base = mean_of(group, 0);
    for (int part = 1; part < near; ++part) {
      base += (mean_of(group, part) - base) / static_cast<float>(part + 1);
    }
    return base;
  };
  merge_parts<kLoads>(
      groups, parts, lanes,
      [&](int group) {
        const float2* own = moments + group;
        const float base = base_of(group);
        return [=, &images](int part) {
          const float count = part < longer ? shorter + size : shorter;
          return moments_about(base, count,
                               __ldcg(own + static_cast<int64_t>(part) * images.groups));
        };
      },
      [&](int group, const Sums& sums) {
        const float count = static_cast<float>(images.pixels) * size;
        store(first_group + group, moments_of(base_of(group), count, sums));
      });
}

// The first pass. A thread adds up differences from the first of its values. This is as good as
// their deviations from the mean would be: that value is one of those that the variance is of, so
// that its own deviation is a part of the sum, and little is lost where it is large.
template <typename T, int kVec>
__device__ void take_moments(const ForwardArgs& args, const Place& place, float2* items) {
  const Images& images = args.images;
  const Plan& plan = args.plan;
  const T* x = static_cast<const T*>(args.x);
  const auto load = [x](int64_t at) { return load_vector<T, kVec>(x + at); };
  Stream<Vector<T, kVec>> stream(place.steps, place.offset(images), plan.stride, load);
  float shift[kVec], mean[kVec] = {}, squares[kVec] = {};
  unpack(stream.first(), shift);
  stream.for_each(load, [&](const Vector<T, kVec>& vector, const auto& reload) {
    float values[kVec];
    unpack(vector, values);
    reload();
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const float difference = values[c] - shift[c];
      mean[c] += difference;
      squares[c] += difference * difference;
    }
  });
  const float count = static_cast<float>(place.steps);
  // A rounding of it is in the variance of every thread with so many values: none but the nearest.
  const float inverse = 1.0f / fmaxf(count, 1.0f);
#pragma unroll
  for (int c = 0; c < kVec; ++c) {
    const float offset = mean[c] * inverse;
    squares[c] -= mean[c] * offset;
    mean[c] = shift[c] + offset;
  }
  // Neighbouring channels of a group are merged in pairs, and their pairs again.
  int width_bits = 0;
#pragma unroll
  for (int half = 1; half < kVec; half *= 2) {
    if ((images.group_size & (2 * half - 1)) != 0) continue;
    ++width_bits;
#pragma unroll
    for (int c = 0; c < kVec; c += 2 * half) {
      const float delta = mean[c + half] - mean[c];
      mean[c] += 0.5f * delta;
      squares[c] += squares[c + half] + delta * delta * (0.5f * half * count);
    }
  }
  const int width = 1 << width_bits;
  const int row_parts = images.group_size >> width_bits;
  if (place.row < plan.rows) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      if ((c & (width - 1)) != 0) continue;
      const int group = plan.by_group.quotient(place.channel + c);
      const int part = (place.channel + c - group * images.group_size) >> width_bits;
      items[group * plan.item_pitch + place.row * row_parts + part] =
          make_float2(mean[c], squares[c]);
    }
  }
  __syncthreads();
  float2* partials =
      args.partials +
      (static_cast<int64_t>(place.image) * plan.slices + place.index) * images.groups;
  const int longer = place.extra * row_parts;  // the parts with a pixel more
  const float shorter_count = static_cast<float>(plan.full * width);
  const float longer_count = shorter_count + static_cast<float>(width);
  merge_parts(
      images.groups, plan.item_parts, plan.item_lanes,
      [&](int group) {
        const float2* own = items + group * plan.item_pitch;
        const float base = own->x;
        return [=](int part) {
          return moments_about(base, part < longer ? longer_count : shorter_count, own[part]);
        };
      },
      [&](int group, const Sums& sums) {
        const float values = static_cast<float>(place.count) * images.group_size;
        __stcg(partials + group, moments_of(items[group * plan.item_pitch].x, values, sums));
      });
}

// The second pass.
template <typename T, int kVec>
__device__ void write(const ForwardArgs& args, const Place& place, float2* stats) {
  // Values of 16 bits have so few digits that x factor + (bias - mean factor) loses none of them.
  constexpr bool kFolds = sizeof(T) == 2;
  const Images& images = args.images;
  const Plan& plan = args.plan;
  const int64_t stride = -plan.stride;
  const T* x = static_cast<const T*>(args.x);
  const T* residual = static_cast<const T*>(args.residual);
  T* y = static_cast<T*>(args.y);
  int64_t at = place.offset(images) - (place.steps - 1) * stride;
  const auto load = [x](int64_t offset) { return load_vector<T, kVec>(x + offset); };
  // On the way while the parts are merged:
  Stream<Vector<T, kVec>> stream(place.steps, at, stride, load);
  float factor[kVec], bias[kVec];
  if (place.steps > 0) {
    load_channels(args.scale, args.scale_rows, place.image, images.channels, place.channel, 1.0f,
                  factor);
    load_channels(args.bias, args.bias_rows, place.image, images.channels, place.channel, 0.0f,
                  bias);
  }

  const bool merged = plan.parts == 1;
  merge_slices<4>(images,
                  args.parts + static_cast<int64_t>(place.image) * plan.parts * images.groups, 0,
                  images.groups, plan.parts, plan.slice_lanes, merged ? images.pixels : plan.pixels,
                  merged ? 0 : plan.longer, [&](int group, float2 moments) {
                    const float values = static_cast<float>(images.pixels) * images.group_size;
                    const float variance = moments.y / values;
                    const float rstd = rsqrtf(variance + args.epsilon);
                    stats[group] = make_float2(moments.x, rstd);
                    if (place.index != 0) return;
                    const int of_group = place.image * images.groups + group;
                    if (args.mean != nullptr) args.mean[of_group] = moments.x;
                    if (args.rstd != nullptr) args.rstd[of_group] = rstd;
                    if (args.variance != nullptr) args.variance[of_group] = variance;
                  });
  __syncthreads();
  if (place.steps == 0) return;

  float mean[kVec];
#pragma unroll
  for (int c = 0; c < kVec; ++c) {
    const float2 group = stats[plan.by_group.quotient(place.channel + c)];
    mean[c] = group.x;
    factor[c] *= group.y;
    if (kFolds) bias[c] -= mean[c] * factor[c];
  }
  with_constants(args.activation, residual != nullptr, [&](auto activation, auto has_residual) {
    constexpr Activation kActivation = decltype(activation)::value;
    constexpr bool kResidual = decltype(has_residual)::value;
    stream.for_each(load, [&](const Vector<T, kVec>& vector, const auto& reload) {
      float values[kVec];
      unpack(vector, values);
      reload();
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        values[c] = (kFolds ? values[c] : values[c] - mean[c]) * factor[c] + bias[c];
      }
      if constexpr (kResidual) {
        float added[kVec];
        unpack(load_vector<T, kVec>(residual + at), added);
#pragma unroll
        for (int c = 0; c < kVec; ++c) values[c] += added[c];
      }
      activate(kActivation, values);
      store_result(plan, y + at, values);
      advance(at, stride);
    });
  });
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kMaxThreads)
    group_norm_forward_kernel(const __grid_constant__ ForwardArgs args) {
  extern __shared__ __align__(16) float2 items[];
  const Place place(args.images, args.plan, kVec);
  if (place.takes) take_moments<T, kVec>(args, place, items);
  if (place.takes && place.writes) __syncthreads();
  if (place.writes) write<T, kVec>(args, place, items);
}

struct MergeArgs {
  Images images;
  int first_image;
  int slices;
  const float2* partials;  // [images, slices, groups]
  float2* merged;          // [images, groups]
};

__global__ void __launch_bounds__(32 * kMergedColumns)
    group_norm_merge_kernel(const __grid_constant__ MergeArgs args) {
  const Images& images = args.images;
  const int blocks = (images.groups + kMergedColumns - 1) / kMergedColumns;
  const int image = args.first_image + static_cast<int>(blockIdx.x) / blocks;
  const int first = static_cast<int>(blockIdx.x) % blocks * kMergedColumns;
  merge_slices<8>(images, args.partials + static_cast<int64_t>(image) * args.slices * images.groups,
                  first, min(kMergedColumns, images.groups - first), args.slices, 32,
                  images.pixels / args.slices, images.pixels % args.slices,
                  [&](int group, float2 moments) {
                    args.merged[static_cast<int64_t>(image) * images.groups + group] = moments;
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
    return launch_kernel(group_norm_merge_kernel, merge_args,
                         {dim3(count * blocks), 32 * kMergedColumns, 0}, stream);
  };
  const auto launch = [&](auto type, auto vec) {
    using T = decltype(type);
    constexpr int kVec = decltype(vec)::value;
    int width = 1;  // the channels that a thread merges
    while (width < kVec && images.group_size % (2 * width) == 0) width *= 2;
    return launch_passes<kVec>(group_norm_forward_kernel<T, kVec>, args, config, images.groups,
                               images.group_size / width, merge, stream);
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
