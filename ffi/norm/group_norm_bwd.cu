// The backward of group_norm, and the gradients of scale and bias from the same sums.
//
// With xhat = (x - mean) rstd, z = xhat scale + bias + residual and dz = dy activation'(z), the
// sums over the pixels of an image
//
//     dbias = sum dz,   dscale = sum dz xhat        for each channel
//
// yield the sums over a group's channels that dx needs,
//
//     dx = rstd (scale dz - sum (scale dbias) / n - xhat sum (scale dscale) / n),
//
// where n values are in the group. If the mean and the variance are results of the operation too,
// dx has terms of their gradients: dmean / n + 2 (x - mean) dvariance / n. The first pass computes
// the sums of each slice. If there is a residual, it also writes dz, the residual's gradient, which
// the second pass reads instead of dy and the residual.

#include "group_norm.cuh"
#include "group_norm_single_pass.cuh"

namespace {

using namespace group_norm;

struct BackwardArgs {
  Images images;
  Plan plan;
  Ring ring;  // read by the single pass only
  const void* x;
  const void* dy;
  const void* residual;  // nullptr unless the activation's derivative depends on it
  void* dx;
  void* dresidual;    // nullptr without a residual
  const float* mean;  // [images, groups]
  const float* rstd;
  const float* dmean;  // [images, groups], or nullptr
  const float* dvariance;
  Parameter scale, bias;
  int scale_rows, bias_rows;
  // Partial sums of dscale and dbias, [images, slices, channels], or [blocks, channels] in a single
  // pass if images share parameters.
  float2* channel_partials;
  // Sums of dscale and dbias times scale: [images, slices, groups], or [images, groups, slices] in
  // a single pass; nullptr if each channel is a group.
  float2* group_partials;
  const float2* parts;  // sums that the second pass merges, [images, plan.parts, groups]
  Activation activation;
  bool shares;    // whether all images have the same parameters
  float* dscale;  // gradient of shared parameters in a single pass, or nullptr
  float* dbias;
};

__device__ __forceinline__ Sums sums_at(const float2* address) {
  const float2 values = __ldcg(address);
  return {values.x, values.y};
}

// A thread's channels in an image: mean, factor = rstd scale, and bias.
template <int kVec>
struct Channels {
  float mean[kVec], factor[kVec], bias[kVec];

  __device__ __forceinline__ Channels(const BackwardArgs& args, int image, int channel) {
    const Images& images = args.images;
    load_channels(args.scale, args.scale_rows, image, images.channels, channel, 1.0f, factor);
    load_channels(args.bias, args.bias_rows, image, images.channels, channel, 0.0f, bias);
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const int at = image * images.groups + args.plan.by_group.quotient(channel + c);
      mean[c] = args.mean[at];
      factor[c] *= args.rstd[at];
    }
  }

  // Turns x into x - mean, and the gradient into dz, its product with the activation's derivative.
  // Both passes subtract the mean from x instead of folding it into the bias: if a group's values
  // are nearly equal, rstd is large and dz would differ between the passes. add(z) adds a residual.
  template <typename A, typename Add>
  __device__ __forceinline__ void take(const A& activation, float (&centred)[kVec],
                                       float (&dz)[kVec], const Add& add) const {
#pragma unroll
    for (int c = 0; c < kVec; ++c) centred[c] -= mean[c];
    if constexpr (!kIsNone<A>) {
      float z[kVec];
#pragma unroll
      for (int c = 0; c < kVec; ++c) z[c] = centred[c] * factor[c] + bias[c];
      add(z);
      multiply_derivative(activation, z, dz);
    }
  }
};

// A thread's steps through x and the gradient; the second pass starts from the last step.
template <typename T, int kVec, bool kSecond>
class Steps {
 public:
  __device__ Steps(const BackwardArgs& args, const Place& place, const void* gradient)
      : load_{static_cast<const T*>(args.x), static_cast<const T*>(gradient)},
        stride_(kSecond ? -args.plan.stride : args.plan.stride),
        at_(place.offset(args.images) - (kSecond ? (place.steps - 1) * stride_ : 0)),
        stream_(place.steps, at_, stride_, load_) {}

  // Calls f(offset, x - mean, dz, whether there is a residual) for each step.
  template <typename F>
  __device__ __forceinline__ void for_each(const Channels<kVec>& own, Activation activation,
                                           const void* residual, const F& f) {
    with_constants(activation, !kSecond && residual != nullptr, [&](auto act, auto has_residual) {
      constexpr bool kResidual = decltype(has_residual)::value;
      stream_.for_each(load_, [&](const Pair& pair, const auto& reload) {
        float centred[kVec], dz[kVec];
        unpack(pair.x, centred);
        unpack(pair.gradient, dz);
        reload();
        own.take(act, centred, dz, [&](float (&z)[kVec]) {
          if constexpr (kResidual) {
            float added[kVec];
            unpack(load_vector<T, kVec>(static_cast<const T*>(residual) + at_), added);
#pragma unroll
            for (int c = 0; c < kVec; ++c) z[c] += added[c];
          }
        });
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

// Merges a slice's sums over a Crew's threads. One thread passes dscale and dbias of a channel to
// store_channel(channel, sums) and, if `has_groups`, a group's sums for dx to store_group(group,
// sums). The calling thread is in row `row` and has the channels from `channel` on.
template <int kVec, int kBarrier, typename StoreChannel, typename StoreGroup>
__device__ __forceinline__ void merge_sums(const Crew<kBarrier>& crew, const BackwardArgs& args,
                                           int image, int row, int channel,
                                           const float (&dot)[kVec], const float (&total)[kVec],
                                           bool has_groups, float2* items,
                                           const StoreChannel& store_channel,
                                           const StoreGroup& store_group) {
  const Images& images = args.images;
  const Plan& plan = args.plan;
  if (row < plan.rows) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      items[(channel + c) * plan.item_pitch + row] = make_float2(dot[c], total[c]);
    }
  }
  crew.sync();
  merge_parts(
      crew, images.channels, plan.item_parts, plan.item_lanes,
      [&](int of) {
        const float2* own = items + of * plan.item_pitch;
        return [own](int part) -> Sums { return {own[part].x, own[part].y}; };
      },
      [&](int of, const Sums& merged) {
        const int group = image * images.groups + plan.by_group.quotient(of);
        const float2 sums = make_float2(merged.first * args.rstd[group], merged.second);
        store_channel(of, sums);
        float scale[1];
        load_channels(args.scale, args.scale_rows, image, images.channels, of, 1.0f, scale);
        // All partial sums of the channel have been read, so its sums may overwrite the first of
        // them.
        items[of * plan.item_pitch] = make_float2(sums.x * scale[0], sums.y * scale[0]);
      });
  if (!has_groups) return;
  crew.sync();
  merge_parts(
      crew, images.groups, images.group_size, plan.channel_lanes,
      [&](int group) {
        const float2* own = items + group * images.group_size * plan.item_pitch;
        return [own, &plan](int part) -> Sums {
          const float2 item = own[part * plan.item_pitch];
          return {item.x, item.y};
        };
      },
      [&](int group, const Sums& merged) {
        store_group(group, make_float2(merged.first, merged.second));
      });
}

// First pass: computes the sums of a slice.
template <typename T, int kVec>
__device__ void take_sums(const BackwardArgs& args, const Place& place, float2* items) {
  const Images& images = args.images;
  float dot[kVec] = {}, total[kVec] = {};
  if (place.steps > 0) {
    Steps<T, kVec, false> steps(args, place, args.dy);
    const Channels<kVec> own(args, place.image, place.channel);
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
  const int64_t slice = static_cast<int64_t>(place.image) * args.plan.slices + place.index;
  merge_sums(
      whole_block(), args, place.image, place.row, place.channel, dot, total,
      args.group_partials != nullptr, items,
      [&](int channel, float2 sums) {
        __stcg(args.channel_partials + slice * images.channels + channel, sums);
      },
      [&](int group, float2 sums) {
        __stcg(args.group_partials + slice * images.groups + group, sums);
      });
}

// Returns slope and constant of dx = dz factor + slope (x - mean) + constant from a group's sums,
// which are still to be multiplied by `weight`: rstd, or rstd scale if each channel is a group.
__device__ __forceinline__ float2 line_of(const BackwardArgs& args, int image, int group,
                                          float weight, float2 sums) {
  const Images& images = args.images;
  const float inverse = 1.0f / (static_cast<float>(images.pixels) * images.group_size);
  const int at = image * images.groups + group;
  float slope = -inverse * weight * args.rstd[at] * sums.x;
  float constant = -inverse * weight * sums.y;
  if (args.dvariance != nullptr) slope += 2.0f * args.dvariance[at] * inverse;
  if (args.dmean != nullptr) constant += args.dmean[at] * inverse;
  return make_float2(slope, constant);
}

// Second pass: merges an image's sums and writes dx.
template <typename T, int kVec>
__device__ void write(const BackwardArgs& args, const Place& place, float2* groups) {
  const Images& images = args.images;
  const Plan& plan = args.plan;
  const bool has_dz = args.dresidual != nullptr;
  // These loads are in flight while the slices' sums are merged.
  Steps<T, kVec, true> steps(args, place, has_dz ? args.dresidual : args.dy);
  const float2* parts = args.parts + static_cast<int64_t>(place.image) * plan.parts * images.groups;
  merge_parts(
      whole_block(), images.groups, plan.parts, plan.slice_lanes,
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

  const Channels<kVec> own(args, place.image, place.channel);
  float slope[kVec], constant[kVec];
#pragma unroll
  for (int c = 0; c < kVec; ++c) {
    const int group = plan.by_group.quotient(place.channel + c);
    const float weight = args.group_partials == nullptr
                             ? own.factor[c]
                             : args.rstd[place.image * images.groups + group];
    const float2 line = line_of(args, place.image, group, weight, groups[group]);
    slope[c] = line.x;
    constant[c] = line.y;
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

// --- single pass ---------------------------------------------------------------------------------

using BackwardCrews = Crews<320, 256, 320, 2, 8 * 1024>;
// Number of slices whose sums, of one group, a thread loads at once.
constexpr int kSumsTogether = 22;

// Adds up the channels' sums of all blocks. Each block merges some of the channels, while the warps
// that write results are still busy.
__device__ __forceinline__ void merge_parameters_once(const BackwardArgs& args,
                                                      const Crew<kSumsBarrier>& crew) {
  if (args.dscale == nullptr && args.dbias == nullptr) return;
  const int channels = args.images.channels;
  const int blocks = static_cast<int>(gridDim.x);
  unsigned* counter = args.ring.counters + args.images.count;
  crew.sync();
  if (crew.thread == 0) {
    count_up(counter);
    wait_for_count(counter, blocks);
  }
  crew.sync();
  const int columns = (channels + blocks - 1) / blocks;
  const int first = static_cast<int>(blockIdx.x) * columns;
  merge_parts<8>(
      crew, min(columns, channels - first), blocks, 32,
      [&](int column) {
        return [own = args.channel_partials + first + column, channels](int part) {
          return sums_at(own + static_cast<int64_t>(part) * channels);
        };
      },
      [&](int column, const Sums& sums) {
        if (args.dscale != nullptr) args.dscale[first + column] = sums.first;
        if (args.dbias != nullptr) args.dbias[first + column] = sums.second;
      });
}

template <typename T, int kVec>
__device__ __forceinline__ void take_sums_once(const BackwardArgs& args,
                                               const Block<T, BackwardCrews>& block,
                                               const Crew<kSumsBarrier>& crew) {
  const Images& images = args.images;
  const Plan& plan = args.plan;
  const Slice& slice = block.slice;
  const Visits visits(images, plan, plan.rows, crew.thread, kVec);
  float2* kept = block.kept();
  Turn turn;
#pragma unroll 1
  for (int image = slice.first_image; image < images.count; image += args.ring.teams) {
    const Channels<kVec> own(args, image, visits.channel);
    float dot[kVec] = {}, total[kVec] = {};
    with_constants(args.activation, false, [&](auto activation, auto) {
      block.for_each_chunk(turn, [&](const auto& arrays, int, int pixels) {
        const T* x = arrays[0] + visits.own;
        const T* gradient = arrays[1] + visits.own;
#pragma unroll 2
        for (int p = visits.first; p < pixels;
             p += plan.rows, x += visits.stride, gradient += visits.stride) {
          float centred[kVec], dz[kVec];
          unpack(load_vector<T, kVec>(x), centred);
          unpack(load_vector<T, kVec>(gradient), dz);
          own.take(activation, centred, dz, [](float (&)[kVec]) {});
#pragma unroll
          for (int c = 0; c < kVec; ++c) {
            dot[c] += dz[c] * centred[c];
            total[c] += dz[c];
          }
        }
      });
    });
    const bool is_first = image == slice.first_image;
    const bool is_last = image + args.ring.teams >= images.count;
    const int64_t part = args.shares ? static_cast<int64_t>(blockIdx.x)
                                     : static_cast<int64_t>(image) * plan.slices + slice.rank;
    float2* group_partials = args.group_partials +
                             static_cast<int64_t>(image) * images.groups * plan.slices + slice.rank;
    merge_sums(
        crew, args, image, visits.row, visits.channel, dot, total, true, block.items(),
        [&](int of, float2 sums) {
          // The same thread merges a channel in every image, so `kept` needs no barrier.
          if (args.shares && !is_first) {
            sums.x += kept[of].x;
            sums.y += kept[of].y;
          }
          if (args.shares && !is_last) {
            kept[of] = sums;
          } else {
            __stcg(args.channel_partials + part * images.channels + of, sums);
          }
        },
        [&](int group, float2 sums) {
          __stcg(group_partials + static_cast<int64_t>(group) * plan.slices, sums);
        });
    block.publish(crew, image);
  }
  if (args.shares) merge_parameters_once(args, crew);
}

template <typename T, int kVec>
__device__ __forceinline__ void merge_sums_once(const BackwardArgs& args,
                                                const Block<T, BackwardCrews>& block,
                                                const Crew<kMergeBarrier>& crew) {
  const Images& images = args.images;
  const Plan& plan = args.plan;
  int turn = 0;
#pragma unroll 1
  for (int image = block.slice.first_image; image < images.count; image += args.ring.teams) {
    block.await_sums(crew, image);
    const float2* parts =
        args.group_partials + static_cast<int64_t>(image) * images.groups * plan.slices;
    float2* lines = block.merged(turn);
    merge_parts<kSumsTogether>(
        crew, images.groups, plan.slices, plan.slice_lanes,
        [&](int group) {
          return [own = parts + static_cast<int64_t>(group) * plan.slices](int part) {
            return sums_at(own + part);
          };
        },
        [&](int group, const Sums& merged) {
          lines[group] = line_of(args, image, group, args.rstd[image * images.groups + group],
                                 make_float2(merged.first, merged.second));
        });
    block.meet();
    turn ^= 1;
  }
}

template <typename T, int kVec>
__device__ __forceinline__ void write_once(const BackwardArgs& args,
                                           const Block<T, BackwardCrews>& block, int thread) {
  const Images& images = args.images;
  const Plan& plan = args.plan;
  const Slice& slice = block.slice;
  const int rows = args.ring.write_rows;
  const Visits visits(images, plan, rows, thread, kVec);
  T* dx = static_cast<T*>(args.dx);
  Turn turn;
  int merged = 0;
#pragma unroll 1
  for (int image = slice.first_image; image < images.count; image += args.ring.teams) {
    const Channels<kVec> own(args, image, visits.channel);
    block.meet();
    float slope[kVec], constant[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const float2 line = block.merged(merged)[plan.by_group.quotient(visits.channel + c)];
      slope[c] = line.x;
      constant[c] = line.y;
    }
    merged ^= 1;
    const int64_t start =
        (static_cast<int64_t>(image) * images.pixels + slice.start) * images.channels + visits.own;
    with_constants(args.activation, false, [&](auto activation, auto) {
      block.for_each_chunk(turn, [&](const auto& arrays, int pixel, int pixels) {
        const T* x = arrays[0] + visits.own;
        const T* gradient = arrays[1] + visits.own;
        int64_t at = start + static_cast<int64_t>(pixel) * images.channels;
#pragma unroll 2
        for (int p = visits.first; p < pixels;
             p += rows, x += visits.stride, gradient += visits.stride, at += visits.stride) {
          float values[kVec], dz[kVec];
          unpack(load_vector<T, kVec>(x), values);
          unpack(load_vector<T, kVec>(gradient), dz);
          own.take(activation, values, dz, [](float (&)[kVec]) {});
#pragma unroll
          for (int c = 0; c < kVec; ++c) {
            values[c] = dz[c] * own.factor[c] + (values[c] * slope[c] + constant[c]);
          }
          store_result(plan, dx + at, values);
        }
        block.release(turn);
      });
    });
  }
}

template <typename T, int kVec>
__global__ void __launch_bounds__(BackwardCrews::kThreads, 1)
    group_norm_backward_once_kernel(const __grid_constant__ BackwardArgs args) {
  if constexpr (kHasBulkCopies) {
    extern __shared__ __align__(128) unsigned char ring[];
    const Block<T, BackwardCrews> block(args.images, args.plan, args.ring, ring);
    block.begin();
    divide_work<BackwardCrews>(
        args.ring,
        [&] {
          const void* sources[] = {args.x, args.dy};
          block.load(sources);
        },
        [&](const auto& crew) { take_sums_once<T, kVec>(args, block, crew); },
        [&](const auto& crew) { merge_sums_once<T, kVec>(args, block, crew); },
        [&](int thread) { write_once<T, kVec>(args, block, thread); });
  }
}

// --- sums merged by launches of their own --------------------------------------------------------

// Adds up parts [count, parts, columns] over the parts, into `merged` [count, columns], dscale and
// dbias. Each of the results may be nullptr.
struct MergeArgs {
  int first;  // index along `count` of the launch's first result
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
      whole_block(), min(kMergedColumns, args.columns - first), args.parts, 32,
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

// Checks a parameter's gradient [1 or images, channels], and sets `rows` to its first axis.
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
                    ffi::Result<ffi::AnyBuffer> counters, int64_t groups,
                    std::string_view activation, int64_t slices, int64_t chunk, bool once) {
  BackwardArgs args = {};
  const Config config = {slices, chunk, once};
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
  args.shares = rows <= 1;
  // In a single pass, a block adds the sums of parameters that all images share over its images.
  const int64_t teams = std::min(chunk, count);
  const int64_t parts_of = once && args.shares ? teams : count;
  RETURN_IF_ERROR(
      check_float32("channel_partials", *channel_partials, {parts_of, slices, images.channels, 2}));
  if (once) {
    if (!is_absent(residual)) {
      return ffi::Error::InvalidArgument("group_norm: a residual is not read once");
    }
    RETURN_IF_ERROR(check_float32("group_partials", *group_partials, {count, groups, slices, 2}));
    RETURN_IF_ERROR(check_counters(*counters, images));
  } else {
    if (groups < images.channels) {
      RETURN_IF_ERROR(check_float32("group_partials", *group_partials, {count, slices, groups, 2}));
    }
    RETURN_IF_ERROR(check_float32("merged", *merged, {count, groups, 2}));
  }
  args.group_partials = data_or_null<float2>(*group_partials);
  RETURN_IF_ERROR(parse_activation(activation, &args.activation));
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
  if (once) {
    args.ring.counters = data_or_null<unsigned>(*counters);
    args.dscale = gradients.dscale;
    args.dbias = gradients.dbias;
    const auto launch = [&](auto type, auto vec) {
      using T = decltype(type);
      constexpr int kVec = decltype(vec)::value;
      return launch_once<kVec, BackwardCrews>(
          group_norm_backward_once_kernel<T, kVec>, args, config, device, images.channels, 1,
          images.channels * static_cast<int>(sizeof(float2)), sizeof(T), stream);
    };
    RETURN_IF_ERROR(with_whole_vectors<4>(*dtype_of(x), whole, images.channels, launch));
    return args.shares ? ffi::Error::Success() : launch_merge(gradients, rows, stream);
  }

  // If each channel is a group, the sums that dx needs are those of each image's dscale and dbias,
  // so they are merged once.
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
                   .Ret<ffi::AnyBuffer>()  // counters
                   .Attr<int64_t>("groups")
                   .Attr<std::string_view>("activation")
                   .Attr<int64_t>("slices")
                   .Attr<int64_t>("chunk")
                   .Attr<bool>("once"),
               {ffi::Traits::kCmdBufferCompatible});
