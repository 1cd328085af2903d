// The backward of group_norm, and the gradients of scale and bias from the same sums.
//
// With xhat = (x - mean) rstd, z = xhat scale + bias + residual and dz = dy activation'(z), the
// sums over the pixels of an image
//
//     dbias = sum dz,   dscale = sum dz xhat        for each channel
//
// give those over the channels of a group that dx needs,
//
//     dx = rstd (scale dz - sum (scale dbias) / n - xhat sum (scale dscale) / n),
//
// where n values are in the group. Where the mean and the variance are results too, dx has terms of
// their gradients: dmean / n + 2 (x - mean) dvariance / n. The first pass takes the sums of each
// slice, and writes dz where it is the residual's gradient, which the second pass then reads in
// place of dy and the residual.

#include "group_norm.cuh"

namespace {

using namespace group_norm;

struct BackwardArgs {
  Images images;
  Plan plan;
  const void* x;
  const void* dy;
  const void* residual;  // or nullptr where the activation's derivative does not depend on it
  void* dx;
  void* dresidual;    // where there is a residual
  const float* mean;  // [images, groups]
  const float* rstd;
  const float* dmean;  // [images, groups], or nullptr
  const float* dvariance;
  Parameter scale, bias;
  int scale_rows, bias_rows;
  float2* channel_partials;  // [images, slices, channels]: dscale and dbias
  float2* group_partials;    // [images, slices, groups]: sums of these times scale, or nullptr
                             // where each channel is a group
  const float2* parts;       // [images, plan.parts, groups], which the second pass merges
  Activation activation;
};

__device__ __forceinline__ Sums sums_at(const float2* address) {
  const float2 values = __ldcg(address);
  return {values.x, values.y};
}

// What a thread knows about its channels in an image: mean, factor = rstd scale, and bias.
template <int kVec>
struct Channels {
  float mean[kVec], factor[kVec], bias[kVec];

  __device__ Channels(const BackwardArgs& args, const Place& place) {
    const Images& images = args.images;
    load_channels(args.scale, args.scale_rows, place.image, images.channels, place.channel, 1.0f,
                  factor);
    load_channels(args.bias, args.bias_rows, place.image, images.channels, place.channel, 0.0f,
                  bias);
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const int at = place.image * images.groups + args.plan.by_group.quotient(place.channel + c);
      mean[c] = args.mean[at];
      factor[c] *= args.rstd[at];
    }
  }
};

// A thread's steps through x and what dz comes from: in the second pass from the last one on.
template <typename T, int kVec, bool kSecond>
class Steps {
 public:
  __device__ Steps(const BackwardArgs& args, const Place& place, const void* gradient)
      : load_{static_cast<const T*>(args.x), static_cast<const T*>(gradient)},
        stride_(kSecond ? -args.plan.stride : args.plan.stride),
        at_(place.offset(args.images) - (kSecond ? (place.steps - 1) * stride_ : 0)),
        stream_(place.steps, at_, stride_, load_) {}

  // Calls f(offset, x - mean, dz, whether there is a residual) for each step, with the gradient
  // times the activation's derivative as dz. Both passes subtract the mean from x, and not from the
  // constants: of nearly equal values, which rstd makes large, dz would not be the same in both.
  template <typename F>
  __device__ __forceinline__ void for_each(const Channels<kVec>& own, Activation activation,
                                           const void* residual, const F& f) {
    with_constants(activation, !kSecond && residual != nullptr, [&](auto act, auto has_residual) {
      constexpr Activation kActivation = decltype(act)::value;
      constexpr bool kResidual = decltype(has_residual)::value;
      stream_.for_each(load_, [&](const Pair& pair, const auto& reload) {
        float centred[kVec], dz[kVec];
        unpack(pair.x, centred);
        unpack(pair.gradient, dz);
        reload();
#pragma unroll
        for (int c = 0; c < kVec; ++c) centred[c] -= own.mean[c];
        if constexpr (kActivation != Activation::kNone) {
          float z[kVec];
#pragma unroll
          for (int c = 0; c < kVec; ++c) z[c] = centred[c] * own.factor[c] + own.bias[c];
          if constexpr (kResidual) {
            float added[kVec];
            unpack(load_vector<T, kVec>(static_cast<const T*>(residual) + at_), added);
#pragma unroll
            for (int c = 0; c < kVec; ++c) z[c] += added[c];
          }
          multiply_derivative(kActivation, z, dz);
        }
        f(at_, centred, dz, has_residual);
        advance(at_, stride_);
      });
    });
  }

 private:
  struct Pair {
    Vector<T, kVec> x, gradient;
  };
  struct Load {
    const T* x;
    const T* gradient;

    __device__ Pair operator()(int64_t at) const {
      return {load_vector<T, kVec>(x + at), load_vector<T, kVec>(gradient + at)};
    }
  };

  Load load_;
  int64_t stride_;
  int64_t at_;
  Stream<Pair> stream_;
};

// The first pass.
template <typename T, int kVec>
__device__ void take_sums(const BackwardArgs& args, const Place& place, float2* items) {
  const Images& images = args.images;
  const Plan& plan = args.plan;
  float dot[kVec] = {}, total[kVec] = {};
  if (place.steps > 0) {
    Steps<T, kVec, false> steps(args, place, args.dy);
    const Channels<kVec> own(args, place);
    steps.for_each(
        own, args.activation, args.residual,
        [&](int64_t at, const float (&centred)[kVec], const float (&dz)[kVec], auto has_residual) {
          if constexpr (decltype(has_residual)::value) {
            Vector<T, kVec> vector;
            pack(dz, vector);
            store_vector(static_cast<T*>(args.dresidual) + at, vector);
          }
#pragma unroll
          for (int c = 0; c < kVec; ++c) {
            dot[c] += dz[c] * centred[c];
            total[c] += dz[c];
          }
        });
  }
  if (place.row < plan.rows) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      items[(place.channel + c) * plan.item_pitch + place.row] = make_float2(dot[c], total[c]);
    }
  }
  __syncthreads();
  const int64_t slice = static_cast<int64_t>(place.image) * plan.slices + place.index;
  merge_parts(
      images.channels, plan.item_parts, plan.item_lanes,
      [&](int channel) {
        const float2* own = items + channel * plan.item_pitch;
        return [own](int row) -> Sums { return {own[row].x, own[row].y}; };
      },
      [&](int channel, const Sums& merged) {
        const int group = place.image * images.groups + plan.by_group.quotient(channel);
        const float2 sums = make_float2(merged.first * args.rstd[group], merged.second);
        __stcg(args.channel_partials + slice * images.channels + channel, sums);
        float scale[1];
        load_channels(args.scale, args.scale_rows, place.image, images.channels, channel, 1.0f,
                      scale);
        // The threads that merge this channel have read its items.
        items[channel * plan.item_pitch] = make_float2(sums.x * scale[0], sums.y * scale[0]);
      });
  if (args.group_partials == nullptr) return;
  __syncthreads();
  merge_parts(
      images.groups, images.group_size, plan.channel_lanes,
      [&](int group) {
        const float2* own = items + group * images.group_size * plan.item_pitch;
        return [own, &plan](int part) -> Sums {
          const float2 item = own[part * plan.item_pitch];
          return {item.x, item.y};
        };
      },
      [&](int group, const Sums& merged) {
        __stcg(args.group_partials + slice * images.groups + group,
               make_float2(merged.first, merged.second));
      });
}

// The second pass.
template <typename T, int kVec>
__device__ void write(const BackwardArgs& args, const Place& place, float2* groups) {
  const Images& images = args.images;
  const Plan& plan = args.plan;
  const bool has_dz = args.dresidual != nullptr;
  // On the way while the parts are merged:
  Steps<T, kVec, true> steps(args, place, has_dz ? args.dresidual : args.dy);
  const float2* parts = args.parts + static_cast<int64_t>(place.image) * plan.parts * images.groups;
  merge_parts(
      images.groups, plan.parts, plan.slice_lanes,
      [&](int group) {
        return [own = parts + group, &images](int part) {
          return sums_at(own + static_cast<int64_t>(part) * images.groups);
        };
      },
      [&](int group, const Sums& merged) {
        groups[group] = make_float2(merged.first, merged.second);
      });
  __syncthreads();
  if (place.steps == 0) return;

  const Channels<kVec> own(args, place);
  float slope[kVec], constant[kVec];
  const float inverse = 1.0f / (static_cast<float>(images.pixels) * images.group_size);
#pragma unroll
  for (int c = 0; c < kVec; ++c) {
    const int group = plan.by_group.quotient(place.channel + c);
    const int at = place.image * images.groups + group;
    const float rstd = args.rstd[at];
    const float weight = -inverse * (args.group_partials == nullptr ? own.factor[c] : rstd);
    slope[c] = weight * rstd * groups[group].x;
    constant[c] = weight * groups[group].y;
    if (args.dvariance != nullptr) slope[c] += 2.0f * args.dvariance[at] * inverse;
    if (args.dmean != nullptr) constant[c] += args.dmean[at] * inverse;
  }
  T* dx = static_cast<T*>(args.dx);
  steps.for_each(own, has_dz ? Activation::kNone : args.activation, nullptr,
                 [&](int64_t at, const float (&centred)[kVec], const float (&dz)[kVec], auto) {
                   float values[kVec];
#pragma unroll
                   for (int c = 0; c < kVec; ++c) {
                     values[c] = dz[c] * own.factor[c] + (centred[c] * slope[c] + constant[c]);
                   }
                   store_result(plan, dx + at, values);
                 });
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kMaxThreads)
    group_norm_backward_kernel(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(16) float2 items[];
  const Place place(args.images, args.plan, kVec);
  if (place.takes) take_sums<T, kVec>(args, place, items);
  if (place.takes && place.writes) __syncthreads();
  if (place.writes) write<T, kVec>(args, place, items);
}

// Adds up parts [count, parts, columns] over the parts: to `merged` [count, columns], and to dscale
// and dbias, each where it is not nullptr.
struct MergeArgs {
  int first;  // of the `count`
  int parts;
  int columns;
  const float2* partials;
  float2* merged;
  float* dscale;
  float* dbias;
};

__global__ void __launch_bounds__(32 * kMergedColumns)
    group_norm_gradient_kernel(const __grid_constant__ MergeArgs args) {
  const int blocks = (args.columns + kMergedColumns - 1) / kMergedColumns;
  const int64_t index = args.first + static_cast<int>(blockIdx.x) / blocks;
  const int first = static_cast<int>(blockIdx.x) % blocks * kMergedColumns;
  merge_parts<8>(
      min(kMergedColumns, args.columns - first), args.parts, 32,
      [&](int column) {
        const float2* own = args.partials + index * args.parts * args.columns + first + column;
        return [own, &args](int part) {
          return sums_at(own + static_cast<int64_t>(part) * args.columns);
        };
      },
      [&](int column, const Sums& sums) {
        const int64_t at = index * args.columns + first + column;
        if (args.merged != nullptr) args.merged[at] = make_float2(sums.first, sums.second);
        if (args.dscale != nullptr) args.dscale[at] = sums.first;
        if (args.dbias != nullptr) args.dbias[at] = sums.second;
      });
}

ffi::Error launch_merge(const MergeArgs& args, int count, cudaStream_t stream) {
  const unsigned blocks = (args.columns + kMergedColumns - 1) / kMergedColumns;
  return launch_kernel(group_norm_gradient_kernel, args,
                       {dim3(count * blocks), 32 * kMergedColumns, 0}, stream);
}

// Checks the gradient of a parameter, [1 or images, channels]; `rows` becomes the former.
ffi::Error check_gradient(std::string_view name, const ffi::AnyBuffer& buffer, const Images& images,
                          int* rows) {
  if (is_absent(buffer)) return ffi::Error::Success();
  if (*rows == 0) *rows = buffer.dimensions()[0] == 1 ? 1 : images.count;
  return check_float32(name, buffer, {*rows, images.channels});
}

ffi::Error backward(cudaStream_t stream, ffi::AnyBuffer dy, ffi::AnyBuffer x,
                    ffi::AnyBuffer residual, ffi::AnyBuffer mean, ffi::AnyBuffer rstd,
                    ffi::AnyBuffer dmean, ffi::AnyBuffer dvariance, ffi::AnyBuffer scale,
                    ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> dx,
                    ffi::Result<ffi::AnyBuffer> dresidual, ffi::Result<ffi::AnyBuffer> dscale,
                    ffi::Result<ffi::AnyBuffer> dbias, ffi::Result<ffi::AnyBuffer> channel_partials,
                    ffi::Result<ffi::AnyBuffer> group_partials, ffi::Result<ffi::AnyBuffer> merged,
                    int64_t groups, std::string_view activation, int64_t slices, int64_t chunk) {
  BackwardArgs args = {};
  const Config config = {slices, chunk};
  RETURN_IF_ERROR(check_config(config));
  RETURN_IF_ERROR(parse_images(x, groups, &args.images));
  RETURN_IF_ERROR(check_like_images("dy", dy, x));
  RETURN_IF_ERROR(check_like_images("dx", *dx, x));
  if (!is_absent(residual)) {
    RETURN_IF_ERROR(check_like_images("residual", residual, x));
    RETURN_IF_ERROR(check_like_images("dresidual", *dresidual, x));
  }
  RETURN_IF_ERROR(parse_channels("scale", scale, args.images, &args.scale, &args.scale_rows));
  RETURN_IF_ERROR(parse_channels("bias", bias, args.images, &args.bias, &args.bias_rows));
  const Images& images = args.images;
  const int64_t count = images.count;
  RETURN_IF_ERROR(check_float32("mean", mean, {count, groups}));
  RETURN_IF_ERROR(check_float32("rstd", rstd, {count, groups}));
  if (!is_absent(dmean)) RETURN_IF_ERROR(check_float32("dmean", dmean, {count, groups}));
  if (!is_absent(dvariance)) {
    RETURN_IF_ERROR(check_float32("dvariance", dvariance, {count, groups}));
  }
  int rows = 0;
  RETURN_IF_ERROR(check_gradient("dscale", *dscale, images, &rows));
  RETURN_IF_ERROR(check_gradient("dbias", *dbias, images, &rows));
  RETURN_IF_ERROR(
      check_float32("channel_partials", *channel_partials, {count, slices, images.channels, 2}));
  if (groups < images.channels) {
    RETURN_IF_ERROR(check_float32("group_partials", *group_partials, {count, slices, groups, 2}));
    args.group_partials = data_or_null<float2>(*group_partials);
  }
  RETURN_IF_ERROR(check_float32("merged", *merged, {count, groups, 2}));
  if (!parse_activation(activation, &args.activation)) {
    return ffi::Error::InvalidArgument("group_norm: an activation is not known: " +
                                       std::string(activation));
  }
  if (is_absent(x)) return ffi::Error::Success();
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  args.x = x.untyped_data();
  args.dy = dy.untyped_data();
  args.residual = data_or_null(residual);
  args.dx = dx->untyped_data();
  args.dresidual = is_absent(residual) ? nullptr : data_or_null(*dresidual);
  args.mean = data_or_null<const float>(mean);
  args.rstd = data_or_null<const float>(rstd);
  args.dmean = data_or_null<const float>(dmean);
  args.dvariance = data_or_null<const float>(dvariance);
  args.channel_partials = data_or_null<float2>(*channel_partials);
  args.plan.slices = static_cast<int>(slices);
  args.plan.streams = 3 * x.size_bytes() > static_cast<size_t>(device.l2_bytes);
  const bool apart = merges_apart(args.plan, images.groups);
  const float2* group_parts =
      args.group_partials == nullptr ? args.channel_partials : args.group_partials;
  args.plan.parts = apart ? 1 : args.plan.slices;
  args.parts = apart ? data_or_null<float2>(*merged) : group_parts;
  const bool whole = are_aligned(
      {args.x, args.dy, args.residual, args.dx, args.dresidual, args.scale.data, args.bias.data});

  MergeArgs gradients = {};
  gradients.parts = args.plan.slices;
  gradients.columns = images.channels;
  gradients.partials = args.channel_partials;
  gradients.dscale = data_or_null<float>(*dscale);
  gradients.dbias = data_or_null<float>(*dbias);
  // Where each channel is a group, one merge serves dx and the gradients of an image.
  const bool merges_once = apart && args.group_partials == nullptr && rows == images.count;
  const auto merge = [&](int first, int images_of_launch) {
    if (!apart) return ffi::Error::Success();
    MergeArgs groups_of_images = {};
    if (merges_once) groups_of_images = gradients;
    groups_of_images.first = first;
    groups_of_images.parts = args.plan.slices;
    groups_of_images.columns = images.groups;
    groups_of_images.partials = group_parts;
    groups_of_images.merged = data_or_null<float2>(*merged);
    return launch_merge(groups_of_images, images_of_launch, stream);
  };
  const auto launch = [&](auto type, auto vec) {
    using T = decltype(type);
    constexpr int kVec = decltype(vec)::value;
    return launch_passes<kVec>(group_norm_backward_kernel<T, kVec>, args, config, images.channels,
                               1, merge, stream);
  };
  RETURN_IF_ERROR(with_vectors<4>(*dtype_of(x), whole, images.channels, launch));
  if (rows == 0 || merges_once) return ffi::Error::Success();
  if (rows == 1) gradients.parts *= images.count;
  return launch_merge(gradients, rows, stream);
}

}  // namespace

DEFINE_HANDLER(jaxfused_group_norm_backward, backward,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // dy
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // residual
                   .Arg<ffi::AnyBuffer>()  // mean
                   .Arg<ffi::AnyBuffer>()  // rstd
                   .Arg<ffi::AnyBuffer>()  // dmean
                   .Arg<ffi::AnyBuffer>()  // dvariance
                   .Arg<ffi::AnyBuffer>()  // scale
                   .Arg<ffi::AnyBuffer>()  // bias
                   .Ret<ffi::AnyBuffer>()  // dx
                   .Ret<ffi::AnyBuffer>()  // dresidual
                   .Ret<ffi::AnyBuffer>()  // dscale
                   .Ret<ffi::AnyBuffer>()  // dbias
                   .Ret<ffi::AnyBuffer>()  // channel_partials
                   .Ret<ffi::AnyBuffer>()  // group_partials
                   .Ret<ffi::AnyBuffer>()  // merged
                   .Attr<int64_t>("groups")
                   .Attr<std::string_view>("activation")
                   .Attr<int64_t>("slices")
                   .Attr<int64_t>("chunk"));
