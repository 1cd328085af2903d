// The backward of group_norm: one read of x and dy and one write of dx, and the gradients of scale
// and bias for each image from the same sums.
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
// their gradients: dmean / n + 2 (x - mean) dvariance / n. dz, rounded to the dtype of x, takes the
// place of dy on chip.

#include "group_norm.cuh"

namespace {

using namespace group_norm;

struct BackwardArgs {
  Images images;
  Plan plan;
  Arrays arrays;  // x, dy, and the residual where the activation's derivative depends on it
  void* dx;
  void* dresidual;    // or nullptr
  const float* mean;  // [images, groups]
  const float* rstd;
  const float* dmean;  // [images, groups], or nullptr
  const float* dvariance;
  Parameter scale, bias;
  int scale_rows, bias_rows;
  float* dscale;  // [images, channels], or nullptr
  float* dbias;
  float2* channel_partials;  // [images, team, channels]
  float2* group_partials;    // [images, groups, team]
  int* counters;             // [images]
  Activation activation;
};

template <typename T, int kVec>
struct Block {
  const BackwardArgs& args;
  const Images& images;
  const Plan& plan;
  Place place;
  Ring<T, kVec> ring;
  float* dots;       // sums of dz (x - mean) by row and channel
  float* sums;       // sums of dz
  float2* channels;  // (dscale, dbias) scale of each channel
  float2* groups;    // their sums over each group

  __device__ Block(const BackwardArgs& a, char* shared)
      : args(a),
        images(a.images),
        plan(a.plan),
        place(a.images, a.plan),
        ring(a.images, a.plan, place, a.arrays, shared) {
    const int ring_values = plan.ring * args.arrays.count * static_cast<int>(blockDim.x) * kVec;
    dots = reinterpret_cast<float*>(reinterpret_cast<T*>(shared) + ring_values);
    sums = dots + blockDim.x * kVec;
    channels = reinterpret_cast<float2*>(sums + blockDim.x * kVec);
    groups = channels + images.channels;
  }

  // What a thread knows about its channels in an image: mean, factor = rstd scale, and bias.
  struct Channels {
    float mean[kVec], factor[kVec], bias[kVec];
  };

  __device__ Channels channels_of(int image) const {
    Channels own;
    const int channel = place.column * kVec;
    load_channels(args.scale, args.scale_rows, image, images.channels, channel, 1.0f, own.factor);
    load_channels(args.bias, args.bias_rows, image, images.channels, channel, 0.0f, own.bias);
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const int group = image * images.groups + (channel + c) / images.group_size;
      own.mean[c] = args.mean[group];
      own.factor[c] *= args.rstd[group];
    }
    return own;
  }

  // Sets dz = dy activation'(z) as x's dtype rounds it, and `centred` = x - mean.
  __device__ void gradient(const Channels& own, int slot, float (&centred)[kVec],
                           Vector<T, kVec>* dz) const {
    unpack(load_vector<T, kVec>(ring.at(slot, 0)), centred);
#pragma unroll
    for (int c = 0; c < kVec; ++c) centred[c] -= own.mean[c];
    *dz = load_vector<T, kVec>(ring.at(slot, 1));
    if (args.activation == Activation::kNone) return;
    float z[kVec], values[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) z[c] = centred[c] * own.factor[c] + own.bias[c];
    if (args.arrays.count > 2) {
      unpack(load_vector<T, kVec>(ring.at(slot, 2)), values);
#pragma unroll
      for (int c = 0; c < kVec; ++c) z[c] += values[c];
    }
    unpack(*dz, values);
    multiply_derivative(args.activation, z, values);
    pack(values, *dz);
  }

  // Sums over the thread's part of an image, and leaves dz on chip.
  __device__ void sum(int image, Cursor* cursor) {
    const Channels own = channels_of(image);
    float dot[kVec] = {}, total[kVec] = {};
    T* dresidual = static_cast<T*>(args.dresidual);
    if (dresidual != nullptr) dresidual += ring.offset(image);
    const bool keeps = plan.resident && args.activation != Activation::kNone;
    for (int first = 0; first < plan.steps; first += kTogether) {
      const int steps = min(kTogether, plan.steps - first);
      ring.wait(cursor->index + steps - 1);
#pragma unroll 2
      for (int i = 0; i < steps; ++i) {
        if (first + i < place.steps) {
          float centred[kVec], values[kVec];
          Vector<T, kVec> dz;
          gradient(own, cursor->slot, centred, &dz);
          if (keeps) store_vector(ring.at(cursor->slot, 1), dz);
          if (dresidual != nullptr) {
            store_vector(dresidual, dz);
            dresidual += ring.stride();
          }
          unpack(dz, values);
#pragma unroll
          for (int c = 0; c < kVec; ++c) {
            dot[c] += values[c] * centred[c];
            total[c] += values[c];
          }
        }
        cursor->advance(plan.ring);
      }
      if (!plan.resident) {
        for (int i = 0; i < steps; ++i) ring.issue();
      }
    }
    if (place.row < plan.rows) {
      const int at = place.row * images.channels + place.column * kVec;
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        dots[at + c] = dot[c];
        sums[at + c] = total[c];
      }
    }
  }

  // Adds up the threads' sums to those of the slice, and hands them to the team.
  __device__ void reduce(int image) {
    __syncthreads();
    for_each_group(images.channels, plan.channel_lanes, [&](int channel, int lane) {
      float values[2] = {0.0f, 0.0f};
      if (channel < images.channels) {
        for (int row = lane; row < plan.rows; row += plan.channel_lanes) {
          values[0] += dots[row * images.channels + channel];
          values[1] += sums[row * images.channels + channel];
        }
      }
      add_over_lanes(plan.channel_lanes, values);
      if (lane != 0 || channel >= images.channels) return;
      values[0] *= args.rstd[image * images.groups + channel / images.group_size];
      if (plan.team == 1) {
        store_channel(image, channel, values[0], values[1]);
      } else {
        const int64_t at = static_cast<int64_t>(image) * plan.team + place.member;
        __stcg(args.channel_partials + at * images.channels + channel,
               make_float2(values[0], values[1]));
      }
      float scale[1];
      load_channels(args.scale, args.scale_rows, image, images.channels, channel, 1.0f, scale);
      channels[channel] = make_float2(values[0] * scale[0], values[1] * scale[0]);
    });
    __syncthreads();
    for_each_group(images.groups, plan.lanes, [&](int group, int lane) {
      float values[2] = {0.0f, 0.0f};
      if (group < images.groups) {
        for (int i = lane; i < images.group_size; i += plan.lanes) {
          const float2 channel = channels[group * images.group_size + i];
          values[0] += channel.x;
          values[1] += channel.y;
        }
      }
      add_over_lanes(plan.lanes, values);
      if (lane != 0 || group >= images.groups) return;
      const float2 all = make_float2(values[0], values[1]);
      if (plan.team == 1) {
        groups[group] = all;
      } else {
        const int64_t at = static_cast<int64_t>(image) * images.groups + group;
        __stcg(args.group_partials + at * plan.team + place.member, all);
      }
    });
    if (plan.team == 1) {
      __syncthreads();
    } else {
      announce(args.counters + image);
    }
  }

  __device__ void store_channel(int image, int channel, float dscale, float dbias) {
    const int at = image * images.channels + channel;
    if (args.dscale != nullptr) args.dscale[at] = dscale;
    if (args.dbias != nullptr) args.dbias[at] = dbias;
  }

  // Adds the sums of one place in every slice of an image, with the same order in every lane's
  // part.
  __device__ float2 sum_of_team(const float2* partials, int stride, int lane, int lanes,
                                bool valid) {
    float values[2] = {0.0f, 0.0f};
    if (valid) {
      constexpr int kLoads = 8;
      for (int first = lane; first < plan.team; first += kLoads * lanes) {
        float2 parts[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int member = first + i * lanes;
          parts[i] = member < plan.team ? __ldcg(partials + static_cast<int64_t>(member) * stride)
                                        : make_float2(0.0f, 0.0f);
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          values[0] += parts[i].x;
          values[1] += parts[i].y;
        }
      }
    }
    add_over_lanes(lanes, values);
    return make_float2(values[0], values[1]);
  }

  // Adds up what dx needs of the team's slices.
  __device__ void exchange(int image) {
    if (plan.team == 1) return;
    await(args.counters + image, plan.team);
    for_each_group(images.groups, plan.lanes, [&](int group, int lane) {
      const int64_t at = static_cast<int64_t>(image) * images.groups + group;
      const float2 all = sum_of_team(args.group_partials + at * plan.team, 1, lane, plan.lanes,
                                     group < images.groups);
      if (lane == 0 && group < images.groups) groups[group] = all;
    });
    __syncthreads();
  }

  // Writes the gradients of the channels that are this block's share, each by a warp.
  __device__ void store_channels(int image) {
    if (plan.team == 1 || (args.dscale == nullptr && args.dbias == nullptr)) return;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int warps = blockDim.x / kWarpSize;
    for (int channel = place.member + warp * plan.team; channel < images.channels;
         channel += warps * plan.team) {
      const int64_t at = static_cast<int64_t>(image) * plan.team * images.channels + channel;
      const float2 all =
          sum_of_team(args.channel_partials + at, images.channels, lane, kWarpSize, true);
      if (lane == 0) store_channel(image, channel, all.x, all.y);
    }
  }

  // Writes the thread's part of dx, and makes room for what comes next.
  __device__ void write(int image, Cursor* cursor) {
    const Channels own = channels_of(image);
    float slope[kVec], constant[kVec];
    const float inverse = 1.0f / (static_cast<float>(images.pixels) * images.group_size);
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const int group = (place.column * kVec + c) / images.group_size;
      const float rstd = args.rstd[image * images.groups + group];
      const float2 all = groups[group];
      slope[c] = -rstd * rstd * all.x * inverse;
      constant[c] = -rstd * all.y * inverse;
      const int at = image * images.groups + group;
      if (args.dvariance != nullptr) slope[c] += 2.0f * args.dvariance[at] * inverse;
      if (args.dmean != nullptr) constant[c] += args.dmean[at] * inverse;
    }
    T* dx = static_cast<T*>(args.dx) + ring.offset(image);
    const int64_t stride = ring.stride();
    for (int first = 0; first < plan.steps; first += kTogether) {
      const int steps = min(kTogether, plan.steps - first);
      if (!plan.resident) ring.wait(cursor->index + steps - 1);
#pragma unroll 2
      for (int i = 0; i < steps; ++i) {
        const int step = ring.step_again(first + i);
        if (step < place.steps) {
          float centred[kVec], values[kVec];
          Vector<T, kVec> vector;
          if (plan.resident) {
            unpack(load_vector<T, kVec>(ring.at(cursor->slot, 0)), centred);
#pragma unroll
            for (int c = 0; c < kVec; ++c) centred[c] -= own.mean[c];
            vector = load_vector<T, kVec>(ring.at(cursor->slot, 1));
          } else {
            gradient(own, cursor->slot, centred, &vector);
          }
          unpack(vector, values);
#pragma unroll
          for (int c = 0; c < kVec; ++c) {
            values[c] = values[c] * own.factor[c] + (centred[c] * slope[c] + constant[c]);
          }
          pack(values, vector);
          store_vector(dx + step * stride, vector);
        }
        cursor->advance(plan.ring);
      }
      for (int i = 0; i < steps; ++i) ring.issue();
    }
  }
};

template <typename T, int kVec>
__global__ void __launch_bounds__(kMaxThreads)
    group_norm_backward_kernel(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(16) char shared[];
  Block<T, kVec> block(args, shared);
  const Plan& plan = args.plan;
  for (int i = 0; i < plan.ring; ++i) block.ring.issue();
  start_exchange(args.images, plan, args.counters);
  Cursor read, written;
  int reading = block.place.first_image, writing = reading;
  for (int turn = 0; writing < args.images.count; ++turn) {
    if (reading < args.images.count) {
      block.sum(reading, &read);
      block.reduce(reading);
      reading += plan.teams;
    }
    if (turn < plan.lag) continue;
    block.exchange(writing);
    if (!plan.resident) written = read;
    block.write(writing, &written);
    if (!plan.resident) read = written;
    block.store_channels(writing);
    writing += plan.teams;
  }
}

ffi::Error backward(cudaStream_t stream, ffi::AnyBuffer dy, ffi::AnyBuffer x,
                    ffi::AnyBuffer residual, ffi::AnyBuffer mean, ffi::AnyBuffer rstd,
                    ffi::AnyBuffer dmean, ffi::AnyBuffer dvariance, ffi::AnyBuffer scale,
                    ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> dx,
                    ffi::Result<ffi::AnyBuffer> dresidual, ffi::Result<ffi::AnyBuffer> dscale,
                    ffi::Result<ffi::AnyBuffer> dbias, ffi::Result<ffi::AnyBuffer> channel_partials,
                    ffi::Result<ffi::AnyBuffer> group_partials,
                    ffi::Result<ffi::AnyBuffer> counters, int64_t groups,
                    std::string_view activation, int64_t team, int64_t threads, int64_t blocks) {
  BackwardArgs args = {};
  const Config config = {team, threads, blocks};
  RETURN_IF_ERROR(check_config(config));
  RETURN_IF_ERROR(parse_images(x, groups, &args.images));
  RETURN_IF_ERROR(check_even(x));
  RETURN_IF_ERROR(check_like_images("dy", dy, x));
  RETURN_IF_ERROR(check_like_images("dx", *dx, x));
  if (!is_absent(residual)) RETURN_IF_ERROR(check_like_images("residual", residual, x));
  if (!is_absent(*dresidual)) RETURN_IF_ERROR(check_like_images("dresidual", *dresidual, x));
  RETURN_IF_ERROR(parse_channels("scale", scale, args.images, &args.scale, &args.scale_rows));
  RETURN_IF_ERROR(parse_channels("bias", bias, args.images, &args.bias, &args.bias_rows));
  const int64_t images = args.images.count, channels = args.images.channels;
  RETURN_IF_ERROR(check_float32("mean", mean, {images, groups}));
  RETURN_IF_ERROR(check_float32("rstd", rstd, {images, groups}));
  if (!is_absent(dmean)) RETURN_IF_ERROR(check_float32("dmean", dmean, {images, groups}));
  if (!is_absent(dvariance)) {
    RETURN_IF_ERROR(check_float32("dvariance", dvariance, {images, groups}));
  }
  if (!is_absent(*dscale)) RETURN_IF_ERROR(check_float32("dscale", *dscale, {images, channels}));
  if (!is_absent(*dbias)) RETURN_IF_ERROR(check_float32("dbias", *dbias, {images, channels}));
  if (team > 1) {
    RETURN_IF_ERROR(
        check_float32("channel_partials", *channel_partials, {images, team, channels, 2}));
    RETURN_IF_ERROR(check_float32("group_partials", *group_partials, {images, groups, team, 2}));
    RETURN_IF_ERROR(check_shape("counters", *counters, {images}));
    RETURN_IF_ERROR(check_dtype("counters", *counters, ffi::DataType::S32));
  }
  if (!parse_activation(activation, &args.activation)) {
    return ffi::Error::InvalidArgument("group_norm: an activation is not known: " +
                                       std::string(activation));
  }
  if (is_absent(x)) return ffi::Error::Success();
  const bool reads_residual = !is_absent(residual) && args.activation != Activation::kNone;
  args.arrays = {
      {x.untyped_data(), dy.untyped_data(), reads_residual ? residual.untyped_data() : nullptr},
      reads_residual ? 3 : 2};
  args.dx = dx->untyped_data();
  args.dresidual = data_or_null(*dresidual);
  args.mean = static_cast<const float*>(mean.untyped_data());
  args.rstd = static_cast<const float*>(rstd.untyped_data());
  args.dmean = data_or_null<const float>(dmean);
  args.dvariance = data_or_null<const float>(dvariance);
  args.dscale = data_or_null<float>(*dscale);
  args.dbias = data_or_null<float>(*dbias);
  args.channel_partials = data_or_null<float2>(*channel_partials);
  args.group_partials = data_or_null<float2>(*group_partials);
  args.counters = data_or_null<int>(*counters);
  const Dtype dtype = *dtype_of(x);
  const int64_t pixel_bytes = channels * (dtype == Dtype::kFloat32 ? 4 : 2);
  const bool whole = pixel_bytes % 16 == 0 &&
                     are_aligned({x.untyped_data(), dy.untyped_data(), args.arrays.data[2], args.dx,
                                  args.dresidual, args.scale.data, args.bias.data});
  return with_vectors(dtype, whole, [&](auto type, auto vec) {
    using T = decltype(type);
    constexpr int kVec = decltype(vec)::value;
    const auto fixed_bytes = [&](int threads) {
      return (threads * kVec + args.images.channels + args.images.groups) * 8;
    };
    return launch<kVec>(group_norm_backward_kernel<T, kVec>, args, config, sizeof(T) * kVec,
                        fixed_bytes, stream);
  });
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
                   .Ret<ffi::AnyBuffer>()  // counters
                   .Attr<int64_t>("groups")
                   .Attr<std::string_view>("activation")
                   .Attr<int64_t>("team")
                   .Attr<int64_t>("threads")
                   .Attr<int64_t>("blocks"));
