// The forward of group_norm, with what follows it: one read of x and one write of y.
//
// A block takes the mean and the sum of squared deviations of its slice, channel by channel and a
// few pixels at a time, and merges them in a fixed order: over a thread's pixels, over the threads
// of a group, and over the blocks of an image (Chan, Golub, LeVeque, "Updating formulae and a
// pairwise algorithm for computing sample variances", 1979).

#include "group_norm.cuh"

namespace {

using namespace group_norm;

struct ForwardArgs {
  Images images;
  Plan plan;
  Arrays arrays;  // x, and the residual if there is one
  void* y;
  Parameter scale, bias;
  int scale_rows, bias_rows;
  float* mean;  // [images, groups], or nullptr
  float* rstd;
  float* variance;
  float2* partials;  // [images, groups, team]
  int* counters;     // [images]
  float epsilon;
  Activation activation;
};

// The moments of as many values of each channel: their mean, and the sum of their squared
// deviations from it.
template <int kVec>
struct Moments {
  float count = 0.0f;
  float mean[kVec] = {};
  float squares[kVec] = {};

  // Merges the moments of `size` values of each channel.
  __device__ void merge(const float (&values)[kTogether][kVec], int size) {
    if (size >= kTogether) {
      merge_if(values, kTogether, [](int) { return true; });
    } else if (size > 0) {
      merge_if(values, size, [size](int i) { return i < size; });
    }
  }

  // Merges those of the values for which `is_there` is true, which are `size` for each channel.
  template <typename F>
  __device__ void merge_if(const float (&values)[kTogether][kVec], int size, const F& is_there) {
    const float inverse = 1.0f / static_cast<float>(size);
    const float merged = count + static_cast<float>(size);
    const float weight = static_cast<float>(size) / merged;
    const float spread = count * weight;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      float sum = 0.0f, sum_squares = 0.0f;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) sum += is_there(i) ? values[i][c] : 0.0f;
      const float mean_of_values = sum * inverse;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const float deviation = is_there(i) ? values[i][c] - mean_of_values : 0.0f;
        sum_squares += deviation * deviation;
      }
      const float delta = mean_of_values - mean[c];
      mean[c] += delta * weight;
      squares[c] += sum_squares + delta * delta * spread;
    }
    count = merged;
  }

  // Merges the channels into the first.
  __device__ void merge_channels() {
    float sum = 0.0f, sum_squares = 0.0f;
#pragma unroll
    for (int c = 0; c < kVec; ++c) sum += mean[c];
    sum *= 1.0f / kVec;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      sum_squares += squares[c] + count * (mean[c] - sum) * (mean[c] - sum);
    }
    mean[0] = sum;
    squares[0] = sum_squares;
  }
};

template <typename T, int kVec>
struct Block {
  const ForwardArgs& args;
  const Images& images;
  const Plan& plan;
  Place place;
  Ring<T, kVec> ring;
  float* means;  // of each thread: one for each channel, or one for all where a group has all
  float* squares;
  float2* stats;  // (mean, rstd) of each group

  __device__ Block(const ForwardArgs& a, char* shared)
      : args(a),
        images(a.images),
        plan(a.plan),
        place(a.images, a.plan),
        ring(a.images, a.plan, place, a.arrays, shared) {
    const int ring_values = plan.ring * args.arrays.count * static_cast<int>(blockDim.x) * kVec;
    means = reinterpret_cast<float*>(reinterpret_cast<T*>(shared) + ring_values);
    squares = means + blockDim.x * kVec;
    stats = reinterpret_cast<float2*>(squares + blockDim.x * kVec);
  }

  // Takes the moments of the thread's part of an image.
  __device__ Moments<kVec> moments(Cursor* cursor) {
    Moments<kVec> own;
    for (int first = 0; first < plan.steps; first += kTogether) {
      const int steps = min(kTogether, plan.steps - first);
      ring.wait(cursor->index + steps - 1);
      float values[kTogether][kVec];
      const int size = min(kTogether, place.steps - first);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (i < size) unpack(load_vector<T, kVec>(ring.at(cursor->slot, 0)), values[i]);
        if (i < steps) cursor->advance(plan.ring);
      }
      own.merge(values, size);
      if (!plan.resident) {
        for (int i = 0; i < steps; ++i) ring.issue();
      }
    }
    return own;
  }

  // Merges the threads' moments to those of the slice, and hands them to the team.
  __device__ void reduce(int image, Moments<kVec>& own) {
    const bool whole = images.group_size % kVec == 0;
    if (place.row < plan.rows) {
      if (whole) {
        own.merge_channels();
        means[threadIdx.x] = own.mean[0];
        squares[threadIdx.x] = own.squares[0];
      } else {
        const int at = place.row * images.channels + place.column * kVec;
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          means[at + c] = own.mean[c];
          squares[at + c] = own.squares[c];
        }
      }
    }
    __syncthreads();
    const int row_items = whole ? plan.columns : images.channels;
    const int group_items = whole ? images.group_size / kVec : images.group_size;
    const int least = place.slice.count / plan.rows, longer = place.slice.count % plan.rows;
    const float values = static_cast<float>(whole ? kVec : 1);
    const float total = static_cast<float>(place.slice.count) * images.group_size;
    for_each_group(images.groups, plan.lanes, [&](int group, int lane) {
      // Calls f(item, values of the item) for this lane's items of the group.
      const auto for_each_item = [&](const auto& f) {
        if (group >= images.groups) return;
        int row = lane / group_items, item = lane % group_items;
        const int rows_on = plan.lanes / group_items, items_on = plan.lanes % group_items;
        while (row < plan.rows) {
          f(row * row_items + group * group_items + item,
            static_cast<float>(least + (row < longer ? 1 : 0)) * values);
          row += rows_on;
          item += items_on;
          if (item >= group_items) {
            item -= group_items;
            ++row;
          }
        }
      };
      float mean = 0.0f, sum_squares = 0.0f;
      for_each_item([&](int item, float count) { mean += means[item] * count; });
      mean = sum_of_lanes(plan.lanes, mean) / fmaxf(total, 1.0f);
      for_each_item([&](int item, float count) {
        const float delta = means[item] - mean;
        sum_squares += squares[item] + delta * delta * count;
      });
      sum_squares = sum_of_lanes(plan.lanes, sum_squares);
      if (lane != 0 || group >= images.groups) return;
      if (plan.team == 1) {
        finish(image, group, mean, sum_squares);
      } else {
        const int64_t at = static_cast<int64_t>(image) * images.groups + group;
        __stcg(args.partials + at * plan.team + place.member, make_float2(mean, sum_squares));
      }
    });
    if (plan.team == 1) {
      __syncthreads();
    } else {
      announce(args.counters + image);
    }
  }

  __device__ void finish(int image, int group, float mean, float sum_squares) {
    const float size = static_cast<float>(images.pixels) * images.group_size;
    const float variance = sum_squares / size;
    const float rstd = rsqrtf(variance + args.epsilon);
    stats[group] = make_float2(mean, rstd);
    if (place.member != 0) return;
    const int at = image * images.groups + group;
    if (args.mean != nullptr) args.mean[at] = mean;
    if (args.rstd != nullptr) args.rstd[at] = rstd;
    if (args.variance != nullptr) args.variance[at] = variance;
  }

  // Merges the moments of the team's slices.
  __device__ void exchange(int image) {
    if (plan.team == 1) return;
    await(args.counters + image, plan.team);
    for_each_group(images.groups, plan.lanes, [&](int group, int lane) {
      float count = 0.0f, mean = 0.0f, sum_squares = 0.0f;
      if (group < images.groups) {
        const int64_t at = static_cast<int64_t>(image) * images.groups + group;
        const float2* partials = args.partials + at * plan.team;
        constexpr int kLoads = 8;
        for (int first = lane; first < plan.team; first += kLoads * plan.lanes) {
          float2 parts[kLoads];
#pragma unroll
          for (int i = 0; i < kLoads; ++i) {
            const int member = first + i * plan.lanes;
            if (member < plan.team) parts[i] = __ldcg(partials + member);
          }
#pragma unroll
          for (int i = 0; i < kLoads; ++i) {
            const int member = first + i * plan.lanes;
            if (member >= plan.team) break;
            const Slice slice(images.pixels, plan.team, member);
            const float size = static_cast<float>(slice.count) * images.group_size;
            const float weight = size / (count + size);
            const float delta = parts[i].x - mean;
            mean += delta * weight;
            sum_squares += parts[i].y + delta * delta * count * weight;
            count += size;
          }
        }
      }
      const float size = static_cast<float>(images.pixels) * images.group_size;
      const float all = sum_of_lanes(plan.lanes, mean * count) / size;
      sum_squares = sum_of_lanes(plan.lanes, sum_squares + (mean - all) * (mean - all) * count);
      if (lane == 0 && group < images.groups) finish(image, group, all, sum_squares);
    });
    __syncthreads();
  }

  // Writes the thread's part of an image, and makes room for what comes next.
  __device__ void write(int image, Cursor* cursor) {
    float mean[kVec], factor[kVec], bias[kVec];
    const int channel = place.column * kVec;
    load_channels(args.scale, args.scale_rows, image, images.channels, channel, 1.0f, factor);
    load_channels(args.bias, args.bias_rows, image, images.channels, channel, 0.0f, bias);
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const float2 group = stats[(channel + c) / images.group_size];
      mean[c] = group.x;
      factor[c] *= group.y;
    }
    const bool has_residual = args.arrays.count > 1;
    T* y = static_cast<T*>(args.y) + ring.offset(image);
    const int64_t stride = ring.stride();
    for (int first = 0; first < plan.steps; first += kTogether) {
      const int steps = min(kTogether, plan.steps - first);
      if (!plan.resident) ring.wait(cursor->index + steps - 1);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (i >= steps) break;
        const int step = ring.step_again(first + i);
        if (step < place.steps) {
          float values[kVec];
          unpack(load_vector<T, kVec>(ring.at(cursor->slot, 0)), values);
#pragma unroll
          for (int c = 0; c < kVec; ++c) values[c] = (values[c] - mean[c]) * factor[c] + bias[c];
          if (has_residual) {
            float residual[kVec];
            unpack(load_vector<T, kVec>(ring.at(cursor->slot, 1)), residual);
#pragma unroll
            for (int c = 0; c < kVec; ++c) values[c] += residual[c];
          }
          activate(args.activation, values);
          Vector<T, kVec> out;
          pack(values, out);
          store_vector(y + step * stride, out);
        }
        cursor->advance(plan.ring);
      }
      for (int i = 0; i < steps; ++i) ring.issue();
    }
  }
};

template <typename T, int kVec>
__global__ void __launch_bounds__(kMaxThreads)
    group_norm_forward_kernel(const __grid_constant__ ForwardArgs args) {
  extern __shared__ __align__(16) char shared[];
  Block<T, kVec> block(args, shared);
  const Plan& plan = args.plan;
  for (int i = 0; i < plan.ring; ++i) block.ring.issue();
  start_exchange(args.images, plan, args.counters);
  Cursor read, written;
  int reading = block.place.first_image, writing = reading;
  for (int turn = 0; writing < args.images.count; ++turn) {
    if (reading < args.images.count) {
      Moments<kVec> own = block.moments(&read);
      block.reduce(reading, own);
      reading += plan.teams;
    }
    if (turn < plan.lag) continue;
    block.exchange(writing);
    if (!plan.resident) written = read;
    block.write(writing, &written);
    if (!plan.resident) read = written;
    writing += plan.teams;
  }
}

ffi::Error forward(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer residual,
                   ffi::AnyBuffer scale, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y,
                   ffi::Result<ffi::AnyBuffer> mean, ffi::Result<ffi::AnyBuffer> rstd,
                   ffi::Result<ffi::AnyBuffer> variance, ffi::Result<ffi::AnyBuffer> partials,
                   ffi::Result<ffi::AnyBuffer> counters, int64_t groups, float epsilon,
                   std::string_view activation, int64_t team, int64_t threads, int64_t blocks) {
  ForwardArgs args = {};
  const Config config = {team, threads, blocks};
  RETURN_IF_ERROR(check_config(config));
  RETURN_IF_ERROR(parse_images(x, groups, &args.images));
  RETURN_IF_ERROR(check_even(x));
  RETURN_IF_ERROR(check_like_images("y", *y, x));
  if (!is_absent(residual)) RETURN_IF_ERROR(check_like_images("residual", residual, x));
  RETURN_IF_ERROR(parse_channels("scale", scale, args.images, &args.scale, &args.scale_rows));
  RETURN_IF_ERROR(parse_channels("bias", bias, args.images, &args.bias, &args.bias_rows));
  const int64_t images = args.images.count;
  for (const auto& [name, buffer] : {std::pair<std::string_view, ffi::AnyBuffer>{"mean", *mean},
                                     {"rstd", *rstd},
                                     {"variance", *variance}}) {
    if (!is_absent(buffer)) RETURN_IF_ERROR(check_float32(name, buffer, {images, groups}));
  }
  if (team > 1) {
    RETURN_IF_ERROR(check_float32("partials", *partials, {images, groups, team, 2}));
    RETURN_IF_ERROR(check_shape("counters", *counters, {images}));
    RETURN_IF_ERROR(check_dtype("counters", *counters, ffi::DataType::S32));
  }
  if (!parse_activation(activation, &args.activation)) {
    return ffi::Error::InvalidArgument("group_norm: an activation is not known: " +
                                       std::string(activation));
  }
  if (is_absent(x)) return ffi::Error::Success();
  args.arrays = {{x.untyped_data(), data_or_null(residual)}, is_absent(residual) ? 1 : 2};
  args.y = y->untyped_data();
  args.mean = data_or_null<float>(*mean);
  args.rstd = data_or_null<float>(*rstd);
  args.variance = data_or_null<float>(*variance);
  args.partials = data_or_null<float2>(*partials);
  args.counters = data_or_null<int>(*counters);
  args.epsilon = epsilon;
  const Dtype dtype = *dtype_of(x);
  const int64_t pixel_bytes = args.images.channels * (dtype == Dtype::kFloat32 ? 4 : 2);
  const bool whole =
      pixel_bytes % 16 == 0 &&
      are_aligned({x.untyped_data(), args.y, args.arrays.data[1], args.scale.data, args.bias.data});
  return with_vectors(dtype, whole, [&](auto type, auto vec) {
    using T = decltype(type);
    constexpr int kVec = decltype(vec)::value;
    const auto fixed_bytes = [&](int threads) {
      return threads * kVec * 8 + args.images.groups * 8;
    };
    return launch<kVec>(group_norm_forward_kernel<T, kVec>, args, config, sizeof(T) * kVec,
                        fixed_bytes, stream);
  });
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
                   .Ret<ffi::AnyBuffer>()  // counters
                   .Attr<int64_t>("groups")
                   .Attr<float>("epsilon")
                   .Attr<std::string_view>("activation")
                   .Attr<int64_t>("team")
                   .Attr<int64_t>("threads")
                   .Attr<int64_t>("blocks"));
