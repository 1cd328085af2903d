// The forward of group_norm: y = activation((x - mean) rstd scale + bias + residual) over images
// [image, pixel, channel], with a mean and a variance for each group of adjacent channels of an
// image.
//
// The first pass computes the mean and the sum of squared deviations of each group in each slice of
// an image, the second merges them and writes y.

#include "group_norm.cuh"
#include "group_norm_single_pass.cuh"

namespace {

using namespace group_norm;

struct ForwardArgs {
  Images images;
  Plan plan;
  Ring ring;  // read by the single pass only
  const void* x;
  const void* residual;  // may be nullptr
  void* y;
  float* mean;  // [images, groups]; mean, rstd and variance may be nullptr
  float* rstd;
  float* variance;
  Parameter scale, bias;
  int scale_rows, bias_rows;
  // Means and squared deviations, [images, slices, groups], or [images, groups, slices] in a single
  // pass.
  float2* partials;
  const float2* parts;  // moments that the second pass merges, [images, plan.parts, groups]
  float epsilon;
  Activation activation;
};

// The means and the sums of squared deviations of several parts are merged by plain sums about
// `base`, the mean of one part that is not empty: with n values, d = mean - base and squared
// deviations m of a part,
//
//     mean = base + sum n d / sum n,   deviations = sum (m + n d^2) - (sum n d)^2 / sum n.
//
// The difference cancels unless `base` is near the mean of all values, as a mean of many of them
// is.
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

// Fewest values of a slice whose mean is assumed to be near the mean of all values of the group.
constexpr float kFewestValues = 31.0f;

// Moments (mean and sum of squared deviations) of the groups, in an image's slices or merged.
struct Moments {
  const float2* data;
  int count;
  int of_group;  // values between successive groups
  int of_slice;

  __device__ __forceinline__ float2 at(int group, int slice) const {
    return __ldcg(data + static_cast<int64_t>(group) * of_group +
                  static_cast<int64_t>(slice) * of_slice);
  }
};

// Merges the moments of an image's slices; one thread passes those of a group to store(group,
// moments). The first `longer` slices have pixels + 1 pixels, the others `pixels`.
template <int kLoads, int kBarrier, typename Store>
__device__ __forceinline__ void merge_slices(const Crew<kBarrier>& crew, const Images& images,
                                             const Moments& moments, int first_group, int groups,
                                             int lanes, int pixels, int longer,
                                             const Store& store) {
  const float size = static_cast<float>(images.group_size);
  const float shorter = static_cast<float>(pixels) * size;
  // The mean of a slice of few values may be far from that of all values: then `base` averages the
  // means of several slices.
  const int near = min(moments.count, static_cast<int>(kFewestValues / fmaxf(shorter, 1.0f)) + 1);
  const auto base_of = [=](int group) {
    float base = moments.at(group, 0).x;
    for (int part = 1; part < near; ++part) {
      base += (moments.at(group, part).x - base) / static_cast<float>(part + 1);
    }
    return base;
  };
  merge_parts<kLoads>(
      crew, groups, moments.count, lanes,
      [&](int index) {
        const int group = first_group + index;
        const float base = base_of(group);
        return [=](int part) {
          const float count = part < longer ? shorter + size : shorter;
          return moments_about(base, count, moments.at(group, part));
        };
      },
      [&](int index, const Sums& sums) {
        const int group = first_group + index;
        const float count = static_cast<float>(images.pixels) * size;
        store(group, moments_of(base_of(group), count, sums));
      });
}

// A thread's shifted sums for each of its channels, of the differences from its first value and of
// their squares, so that a mean far from 0 costs no accuracy. A first value that is an outlier
// multiplies the rounding error by at most about the number of values.
template <int kVec>
struct Differences {
  float shift[kVec] = {}, sums[kVec] = {}, squares[kVec] = {};

  template <typename T>
  __device__ __forceinline__ void begin(const Vector<T, kVec>& vector) {
    unpack(vector, shift);
  }

  __device__ __forceinline__ void add(const float (&values)[kVec]) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const float difference = values[c] - shift[c];
      sums[c] += difference;
      squares[c] += difference * difference;
    }
  }
};

// Merges the Differences of a crew's threads over a slice. One thread passes the moments of each
// group to store(group, moments). The calling thread has `steps` pixels of row `row`, in the
// channels from `channel` on. The first `extra` rows have one step more than the others.
template <int kVec, int kBarrier, typename Store>
__device__ __forceinline__ void merge_differences(const Crew<kBarrier>& crew, const Images& images,
                                                  const Plan& plan, int row, int channel, int steps,
                                                  int extra, int pixels, Differences<kVec>& of,
                                                  float2* items, const Store& store) {
  auto& mean = of.sums;
  auto& squares = of.squares;
  const float count = static_cast<float>(steps);
  // The division is exact: the error of an approximate one would be the same in all threads and so
  // add up.
  const float inverse = 1.0f / fmaxf(count, 1.0f);
#pragma unroll
  for (int c = 0; c < kVec; ++c) {
    const float offset = mean[c] * inverse;
    squares[c] -= mean[c] * offset;
    mean[c] = of.shift[c] + offset;
  }
  // Adjacent channels of a group are merged in pairs, then the pairs in pairs, within the vector.
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
  if (row < plan.rows) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      if ((c & (width - 1)) != 0) continue;
      const int group = plan.by_group.quotient(channel + c);
      const int part = (channel + c - group * images.group_size) >> width_bits;
      items[group * plan.item_pitch + row * row_parts + part] = make_float2(mean[c], squares[c]);
    }
  }
  crew.sync();
  const int longer = extra * row_parts;  // parts with one more pixel
  const float shorter_count = static_cast<float>(plan.full * width);
  const float longer_count = shorter_count + static_cast<float>(width);
  merge_parts(
      crew, images.groups, plan.item_parts, plan.item_lanes,
      [&](int group) {
        const float2* own = items + group * plan.item_pitch;
        const float base = own->x;
        return [=](int part) {
          return moments_about(base, part < longer ? longer_count : shorter_count, own[part]);
        };
      },
      [&](int group, const Sums& merged) {
        const float values = static_cast<float>(pixels) * images.group_size;
        store(group, moments_of(items[group * plan.item_pitch].x, values, merged));
      });
}

// First pass: computes the moments of a slice.
template <typename T, int kVec>
__device__ void take_moments(const ForwardArgs& args, const Place& place, float2* items) {
  const Images& images = args.images;
  const Plan& plan = args.plan;
  const T* x = static_cast<const T*>(args.x);
  const auto load = [x](int64_t at) { return load_vector<T, kVec>(x + at); };
  Stream<Vector<T, kVec>> stream(place.steps, place.offset(images), plan.stride, load);
  Differences<kVec> differences;
  differences.begin(stream.first());
  stream.for_each(load, [&](const Vector<T, kVec>& vector, const auto& reload) {
    float values[kVec];
    unpack(vector, values);
    reload();
    differences.add(values);
  });
  float2* partials =
      args.partials +
      (static_cast<int64_t>(place.image) * plan.slices + place.index) * images.groups;
  merge_differences(whole_block(), images, plan, place.row, place.channel, place.steps, place.extra,
                    place.count, differences, items,
                    [&](int group, float2 moments) { __stcg(partials + group, moments); });
}

// Merges the moments of an image into each group's mean and rstd in `stats`. Of the blocks of an
// image, the one with `writes` also stores the statistics that are results.
template <int kLoads, int kBarrier>
__device__ __forceinline__ void take_statistics(const ForwardArgs& args, const Crew<kBarrier>& crew,
                                                const Moments& moments, int image, int pixels,
                                                int longer, bool writes, float2* stats) {
  const Images& images = args.images;
  merge_slices<kLoads>(crew, images, moments, 0, images.groups, args.plan.slice_lanes, pixels,
                       longer, [&](int group, float2 merged) {
                         const float values = static_cast<float>(images.pixels) * images.group_size;
                         const float variance = merged.y / values;
                         const float rstd = rsqrtf(variance + args.epsilon);
                         // If all values of a group are equal, a factor of 0 normalises them to
                         // exactly 0 even if the mean is rounded.
                         const bool constant = variance == 0.0f && args.epsilon > 0.0f;
                         stats[group] = make_float2(merged.x, constant ? 0.0f : rstd);
                         if (!writes) return;
                         const int of_group = image * images.groups + group;
                         if (args.mean != nullptr) args.mean[of_group] = merged.x;
                         if (args.rstd != nullptr) args.rstd[of_group] = rstd;
                         if (args.variance != nullptr) args.variance[of_group] = variance;
                       });
}

// Factor and bias of a thread's channels, and the mean if it is not folded into the bias.
template <typename T, int kVec>
struct Line {
  // 16-bit values have so few bits that x factor + (bias - mean factor), one FMA, is exact enough.
  static constexpr bool kFolds = sizeof(T) == 2;
  float mean[kVec], factor[kVec], bias[kVec];

  __device__ __forceinline__ void begin(const ForwardArgs& args, int image, int channel) {
    const int channels = args.images.channels;
    load_channels(args.scale, args.scale_rows, image, channels, channel, 1.0f, factor);
    load_channels(args.bias, args.bias_rows, image, channels, channel, 0.0f, bias);
  }

  __device__ __forceinline__ void normalise(const Plan& plan, const float2* stats, int channel) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const float2 group = stats[plan.by_group.quotient(channel + c)];
      mean[c] = group.x;
      factor[c] *= group.y;
      if (kFolds) bias[c] -= mean[c] * factor[c];
    }
  }

  __device__ __forceinline__ void apply(float (&values)[kVec]) const {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      values[c] = (kFolds ? values[c] : values[c] - mean[c]) * factor[c] + bias[c];
    }
  }
};

// Second pass: merges an image's moments and writes y.
template <typename T, int kVec>
__device__ void write(const ForwardArgs& args, const Place& place, float2* stats) {
  const Images& images = args.images;
  const Plan& plan = args.plan;
  const int64_t stride = -plan.stride;
  const T* x = static_cast<const T*>(args.x);
  const T* residual = static_cast<const T*>(args.residual);
  T* y = static_cast<T*>(args.y);
  int64_t at = place.offset(images) - (place.steps - 1) * stride;
  const auto load = [x](int64_t offset) { return load_vector<T, kVec>(x + offset); };
  // These loads are in flight while the slices' moments are merged.
  Stream<Vector<T, kVec>> stream(place.steps, at, stride, load);
  Line<T, kVec> line;
  if (place.steps > 0) line.begin(args, place.image, place.channel);

  const bool merged = plan.parts == 1;
  const Moments moments = {
      args.parts + static_cast<int64_t>(place.image) * plan.parts * images.groups, plan.parts, 1,
      images.groups};
  take_statistics<4>(args, whole_block(), moments, place.image,
                     merged ? images.pixels : plan.pixels, merged ? 0 : plan.longer,
                     place.index == 0, stats);
  __syncthreads();
  if (place.steps == 0) return;

  line.normalise(plan, stats, place.channel);
  with_constants(args.activation, residual != nullptr, [&](auto activation, auto has_residual) {
    constexpr bool kResidual = decltype(has_residual)::value;
    stream.for_each(load, [&](const Vector<T, kVec>& vector, const auto& reload) {
      float values[kVec];
      unpack(vector, values);
      reload();
      line.apply(values);
      if constexpr (kResidual) {
        float added[kVec];
        unpack(load_vector<T, kVec>(residual + at), added);
#pragma unroll
        for (int c = 0; c < kVec; ++c) values[c] += added[c];
      }
      activate(activation, values);
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

// --- single pass ---------------------------------------------------------------------------------

using ForwardCrews = Crews<128, 256, 512, 1, 16 * 1024>;
// Number of slices whose moments, of one group, a thread loads at once; 4 threads load 132 slices
// in two batches.
constexpr int kMomentsTogether = 17;

template <typename T, int kVec>
__device__ __forceinline__ void take_moments_once(const ForwardArgs& args,
                                                  const Block<T, ForwardCrews>& block,
                                                  const Crew<kSumsBarrier>& crew) {
  const Images& images = args.images;
  const Plan& plan = args.plan;
  const Slice& slice = block.slice;
  const Visits visits(images, plan, plan.rows, crew.thread, kVec);
  const int steps = visits.row < plan.rows ? plan.full + (visits.row < slice.extra ? 1 : 0) : 0;
  Turn turn;
#pragma unroll 1
  for (int image = slice.first_image; image < images.count; image += args.ring.teams) {
    Differences<kVec> differences;
    block.for_each_chunk(turn, [&](const auto& arrays, int pixel, int pixels) {
      const T* x = arrays[0] + visits.own;
      if (pixel == 0 && visits.first < pixels) differences.begin(load_vector<T, kVec>(x));
#pragma unroll 4
      for (int p = visits.first; p < pixels; p += plan.rows, x += visits.stride) {
        float values[kVec];
        unpack(load_vector<T, kVec>(x), values);
        differences.add(values);
      }
    });
    float2* partials =
        args.partials + static_cast<int64_t>(image) * images.groups * plan.slices + slice.rank;
    merge_differences(crew, images, plan, visits.row, visits.channel, steps, slice.extra,
                      slice.count, differences, block.items(), [&](int group, float2 moments) {
                        __stcg(partials + static_cast<int64_t>(group) * plan.slices, moments);
                      });
    block.publish(crew, image);
  }
}

template <typename T, int kVec>
__device__ __forceinline__ void merge_moments_once(const ForwardArgs& args,
                                                   const Block<T, ForwardCrews>& block,
                                                   const Crew<kMergeBarrier>& crew) {
  const Images& images = args.images;
  const Plan& plan = args.plan;
  int turn = 0;
#pragma unroll 1
  for (int image = block.slice.first_image; image < images.count; image += args.ring.teams) {
    block.await_sums(crew, image);
    const Moments moments = {
        args.partials + static_cast<int64_t>(image) * images.groups * plan.slices, plan.slices,
        plan.slices, 1};
    take_statistics<kMomentsTogether>(args, crew, moments, image, plan.pixels, plan.longer,
                                      block.slice.rank == 0, block.merged(turn));
    block.meet();
    turn ^= 1;
  }
}

template <typename T, int kVec>
__device__ __forceinline__ void write_once(const ForwardArgs& args,
                                           const Block<T, ForwardCrews>& block, int thread) {
  const Images& images = args.images;
  const Plan& plan = args.plan;
  const Slice& slice = block.slice;
  const int rows = args.ring.write_rows;
  const Visits visits(images, plan, rows, thread, kVec);
  const T* residual = static_cast<const T*>(args.residual);
  T* y = static_cast<T*>(args.y);
  Turn turn;
  int merged = 0;
#pragma unroll 1
  for (int image = slice.first_image; image < images.count; image += args.ring.teams) {
    Line<T, kVec> line;
    line.begin(args, image, visits.channel);
    block.meet();
    line.normalise(plan, block.merged(merged), visits.channel);
    merged ^= 1;
    const int64_t start =
        (static_cast<int64_t>(image) * images.pixels + slice.start) * images.channels + visits.own;
    with_constants(args.activation, residual != nullptr, [&](auto activation, auto has_residual) {
      constexpr bool kResidual = decltype(has_residual)::value;
      block.for_each_chunk(turn, [&](const auto& arrays, int pixel, int pixels) {
        const T* x = arrays[0] + visits.own;
        int64_t at = start + static_cast<int64_t>(pixel) * images.channels;
#pragma unroll 2
        for (int p = visits.first; p < pixels; p += rows, x += visits.stride, at += visits.stride) {
          [[maybe_unused]] Vector<T, kVec> from_memory;
          if constexpr (kResidual) from_memory = load_streaming<T, kVec>(residual + at);
          float values[kVec];
          unpack(load_vector<T, kVec>(x), values);
          line.apply(values);
          if constexpr (kResidual) {
            float added[kVec];
            unpack(from_memory, added);
#pragma unroll
            for (int c = 0; c < kVec; ++c) values[c] += added[c];
          }
          activate(activation, values);
          store_result(plan, y + at, values);
        }
        block.release(turn);
      });
    });
  }
}

template <typename T, int kVec>
__global__ void __launch_bounds__(ForwardCrews::kThreads, 1)
    group_norm_forward_once_kernel(const __grid_constant__ ForwardArgs args) {
  if constexpr (kHasBulkCopies) {
    extern __shared__ __align__(128) unsigned char ring[];
    const Block<T, ForwardCrews> block(args.images, args.plan, args.ring, ring);
    block.begin();
    divide_work<ForwardCrews>(
        args.ring,
        [&] {
          const void* sources[] = {args.x};
          block.load(sources);
        },
        [&](const auto& crew) { take_moments_once<T, kVec>(args, block, crew); },
        [&](const auto& crew) { merge_moments_once<T, kVec>(args, block, crew); },
        [&](int thread) { write_once<T, kVec>(args, block, thread); });
  }
}

// --- moments merged by a launch of their own -----------------------------------------------------

struct MergeArgs {
  Images images;
  int first_image;
  int slices;
  const float2* partials;  // moments of slices, [images, slices, groups]
  float2* merged;          // [images, groups]
};

__global__ void __launch_bounds__(32 * kMergedColumns)
    group_norm_merge_kernel(const __grid_constant__ MergeArgs args) {
  const Images& images = args.images;
  const int blocks = (images.groups + kMergedColumns - 1) / kMergedColumns;
  const int image = args.first_image + static_cast<int>(blockIdx.x) / blocks;
  const int first = static_cast<int>(blockIdx.x) % blocks * kMergedColumns;
  const Moments moments = {
      args.partials + static_cast<int64_t>(image) * args.slices * images.groups, args.slices, 1,
      images.groups};
  merge_slices<8>(whole_block(), images, moments, first, min(kMergedColumns, images.groups - first),
                  32, images.pixels / args.slices, images.pixels % args.slices,
                  [&](int group, float2 merged) {
                    args.merged[static_cast<int64_t>(image) * images.groups + group] = merged;
                  });
}

ffi::Error forward(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer residual,
                   ffi::AnyBuffer scale, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y,
                   ffi::Result<ffi::AnyBuffer> mean, ffi::Result<ffi::AnyBuffer> rstd,
                   ffi::Result<ffi::AnyBuffer> variance, ffi::Result<ffi::AnyBuffer> partials,
                   ffi::Result<ffi::AnyBuffer> merged, ffi::Result<ffi::AnyBuffer> counters,
                   int64_t groups, float epsilon, std::string_view activation, int64_t slices,
                   int64_t chunk, bool once) {
  ForwardArgs args = {};
  const Config config = {slices, chunk, once};
  RETURN_IF_ERROR(check_config(config));
  RETURN_IF_ERROR(parse_forward(x, residual, scale, bias, *y, *mean, *rstd, *variance, groups,
                                epsilon, activation, &args));
  const Images& images = args.images;
  if (once) {
    RETURN_IF_ERROR(check_float32("partials", *partials, {images.count, groups, slices, 2}));
    RETURN_IF_ERROR(check_counters(*counters, images));
  } else {
    RETURN_IF_ERROR(check_float32("partials", *partials, {images.count, slices, groups, 2}));
    RETURN_IF_ERROR(check_float32("merged", *merged, {images.count, groups, 2}));
  }
  if (is_absent(x)) return ffi::Error::Success();
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  args.partials = data_or_null<float2>(*partials);
  args.plan.slices = static_cast<int>(slices);
  args.plan.streams = 2 * x.size_bytes() > static_cast<size_t>(device.l2_bytes);
  const bool apart = merges_apart(args.plan, images.groups);
  args.plan.parts = apart ? 1 : args.plan.slices;
  args.parts = apart ? data_or_null<float2>(*merged) : args.partials;
  const bool whole = are_aligned({args.x, args.residual, args.y, args.scale.data, args.bias.data});
  const auto width_of = [&](int vec) {  // channels of a vector that a thread merges
    int width = 1;
    while (width < vec && images.group_size % (2 * width) == 0) width *= 2;
    return width;
  };
  if (once) {
    args.ring.counters = data_or_null<unsigned>(*counters);
    const auto launch = [&](auto type, auto vec) {
      using T = decltype(type);
      constexpr int kVec = decltype(vec)::value;
      return launch_once<kVec, ForwardCrews>(
          group_norm_forward_once_kernel<T, kVec>, args, config, device, images.groups,
          images.group_size / width_of(kVec), 0, sizeof(T), stream);
    };
    return with_whole_vectors<8>(*dtype_of(x), whole, images.channels, launch);
  }

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
    return launch_passes<kVec>(group_norm_forward_kernel<T, kVec>, args, config, images.groups,
                               images.group_size / width_of(kVec), merge, stream);
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
                   .Ret<ffi::AnyBuffer>()  // counters
                   .Attr<int64_t>("groups")
                   .Attr<float>("epsilon")
                   .Attr<std::string_view>("activation")
                   .Attr<int64_t>("slices")
                   .Attr<int64_t>("chunk")
                   .Attr<bool>("once"),
               {ffi::Traits::kCmdBufferCompatible});
