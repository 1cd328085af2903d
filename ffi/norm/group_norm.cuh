// Shared by the forward and the backward of group_norm: how images are spread over blocks and
// threads, and how partial sums are merged in a fixed order.
//
// Each direction reads an image in two passes. The first writes sums of every slice to global
// memory, the second merges them and writes the result. A slice is a run of adjacent pixels with
// all their channels, and a block has one slice of one image. Images are computed in chunks, small
// enough for the second read to hit L2: a launch runs the second pass over a chunk and the first
// over the next one, in alternating blocks, so that both run at the same time. The second pass
// starts at a slice's end, since what was read last is likely to be in L2. If an image is one
// slice, its block does both passes.
//
// A thread owns the same channels (one vector) in every `rows`-th pixel of its slice:
//
//     channel = column * kVec,   pixel = start + step * rows + row,   step = 0 .. steps - 1
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/activation.cuh"
#include "common/handler.h"
#include "common/operands.h"
#include "common/ptx.cuh"
#include "common/rows.cuh"
#include "common/vector.cuh"

namespace group_norm {

// Threads of a block, unless a single pixel has more vectors.
constexpr int kThreads = 512;
constexpr int kMaxThreads = 1024;
// Largest number of sums, over all slices of an image, that each block of the second pass merges
// itself. More are merged by a separate launch, so that not every block reads all of them.
constexpr int kMostSums = 4096;
// Groups or channels that a block of the merging launch merges, one per warp.
constexpr int kMergedColumns = 8;
// Division by a multiplication with the inverse. Dividend times divisor must be less than 2^32.
struct Divider {
  unsigned divisor;
  unsigned inverse;  // 2^32 / divisor, rounded up

  void set(int by) {
    divisor = by;
    inverse = static_cast<unsigned>(((int64_t{1} << 32) + by - 1) / by);
  }
  __device__ int quotient(int value) const {
    return divisor == 1 ? value : static_cast<int>(__umulhi(value, inverse));
  }
};

struct Images {
  int count;
  int pixels;
  int channels;
  int groups;
  int group_size;
};

struct Plan {
  int slices;  // slices of an image
  int pixels;  // pixels of a slice; the first `longer` slices have one more
  int longer;
  int columns;        // vectors of a pixel
  int rows;           // pixels that a block reads at a time
  int full;           // steps that every thread takes: pixels / rows
  int extra;          // rows of threads with one more step; a longer slice has one more such row
  int64_t stride;     // values between a thread's successive pixels
  int item_parts;     // partial sums of each sum in shared memory, from a block's threads
  int item_pitch;     // float2 from sum to sum in shared memory; odd, to avoid bank conflicts
  int item_lanes;     // adjacent threads that add the partial sums of one sum
  int channel_lanes;  // adjacent threads that merge the channels of a group
  int slice_lanes;    // adjacent threads that merge a group's slices in the second pass
  int parts;          // partial sums of an image for the second pass: one per slice, or 1 if merged
  int second_image;   // first image of the blocks that do the second pass
  int second_blocks;
  int first_image;  // first image of the blocks that do the first pass
  int first_blocks;
  bool streams;  // whether results are stored such that L2 evicts them first
  Divider by_columns;
  Divider by_group;  // divides a channel by group_size

  // Whether an image is one slice, so that each block does both passes.
  __host__ __device__ bool is_whole() const { return slices == 1; }
};

// A thread's image, slice and channels, and the passes that its block does.
struct Place {
  bool takes;   // whether the block does the first pass
  bool writes;  // whether the block does the second pass
  int image;
  int index;  // index of the slice in its image
  int start;  // first pixel of the slice
  int count;  // pixels of the slice
  int extra;  // rows of threads with one more step than `full`
  int row;
  int channel;  // first channel of the thread
  int steps;    // steps of the thread; 0 if it has no column or no pixel

  __device__ Place(const Images& images, const Plan& plan, int vec) {
    // The blocks of the two passes alternate until one pass has no blocks left.
    const int block = blockIdx.x;
    const int turns = min(plan.first_blocks, plan.second_blocks);
    const bool in_turn = block < 2 * turns;
    const bool second = in_turn ? block % 2 == 0 : plan.second_blocks > turns;
    const int unit = in_turn ? block / 2 : block - turns;
    const int image_of_pass = unit / plan.slices;
    takes = !second;
    writes = second || plan.is_whole();
    image = (second ? plan.second_image : plan.first_image) + image_of_pass;
    index = unit - image_of_pass * plan.slices;
    const int more = index < plan.longer ? 1 : 0;
    start = index * plan.pixels + min(index, plan.longer);
    count = plan.pixels + more;
    extra = plan.extra + more;
    row = plan.by_columns.quotient(threadIdx.x);
    channel = (static_cast<int>(threadIdx.x) - row * plan.columns) * vec;
    steps = row < plan.rows ? plan.full + (row < extra ? 1 : 0) : 0;
  }

  // Returns the offset in an array of the thread's vector in its first step.
  __device__ int64_t offset(const Images& images) const {
    const int64_t pixel = static_cast<int64_t>(image) * images.pixels + start + row;
    return pixel * images.channels + channel;
  }
};

// A crew: the warps of one role of a block. With kBarrier 0, a crew is the whole block.
template <int kBarrier>
struct Crew {
  int thread;  // index of the thread in its crew
  int threads;

  __device__ __forceinline__ void sync() const {
    if constexpr (kBarrier == 0) {
      __syncthreads();
    } else {
      barrier_sync(kBarrier, threads);
    }
  }
};

__device__ __forceinline__ Crew<0> whole_block() {
  return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
}

struct Sums {
  float first;
  float second;

  __device__ void add(const Sums& other) {
    first += other.first;
    second += other.second;
  }
};

// Adds up of(sum)(part) over all parts, for each of `sums` sums. One thread passes each result to
// store(sum, merged). `lanes` adjacent threads, a power of two up to a warp, divide a sum's parts
// among them; the order of adding depends on the sizes alone. All threads of the crew must call it.
template <int kLoads = 4, int kBarrier, typename Of, typename Store>
__device__ __forceinline__ void merge_parts(const Crew<kBarrier>& crew, int sums, int parts,
                                            int lanes, const Of& of, const Store& store) {
  const int thread = crew.thread;
  const int shift = __ffs(lanes) - 1;
  const int lane = thread & (lanes - 1);
  const int last_of_warp = (thread & 31) >> shift;  // index of the thread's sum in its warp
  for (int sum = thread >> shift; sum - last_of_warp < sums; sum += crew.threads >> shift) {
    Sums own = {};
    if (sum < sums) {
      const auto load = of(sum);
      for (int part = lane; part < parts; part += kLoads * lanes) {
        Sums loaded[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          loaded[i] = part + i * lanes < parts ? load(part + i * lanes) : Sums{};
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) own.add(loaded[i]);
      }
    }
    for (int half = lanes >> 1; half > 0; half >>= 1) {
      own.first += __shfl_xor_sync(~0u, own.first, half);
      own.second += __shfl_xor_sync(~0u, own.second, half);
    }
    if (sum < sums && lane == 0) store(sum, own);
  }
}

// Adds `by` to an offset, hidden from the compiler, which would otherwise hold a separate offset in
// registers for each load of an unrolled loop.
__device__ __forceinline__ void advance(int64_t& offset, int64_t by) {
  offset += by;
  asm("" : "+l"(offset));
}

// A thread's vectors of one or several arrays, step by step. A thread has up to 64 bytes in flight;
// the next load replaces each vector that is consumed. load(offset) returns the vectors of a step.
template <typename Vectors>
class Stream {
  static constexpr int kTogether = sizeof(Vectors) < 32 ? 4 : 2;

 public:
  template <typename Load>
  __device__ Stream(int steps, int64_t offset, int64_t stride, const Load& load)
      : left_(steps), next_(offset), stride_(stride) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (i < left_) ring_[i] = load(next_);
      advance(next_, stride_);
    }
  }

  __device__ const Vectors& first() const { return ring_[0]; }

  // Calls take(vectors, reload) with the vectors of each step. Once `take` has unpacked them it
  // calls reload(), which starts the load that replaces them.
  template <typename Load, typename Take>
  __device__ __forceinline__ void for_each(const Load& load, const Take& take) {
    for (; left_ >= kTogether; left_ -= kTogether) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        take(ring_[i], [&] {
          if (i + kTogether < left_) ring_[i] = load(next_);
          advance(next_, stride_);
        });
      }
    }
#pragma unroll 1
    for (; left_ > 0; --left_) {
      take(ring_[0], [&] {
#pragma unroll
        for (int i = 0; i + 1 < kTogether; ++i) ring_[i] = ring_[i + 1];
      });
    }
  }

 private:
  Vectors ring_[kTogether] = {};
  int left_;
  int64_t next_;
  int64_t stride_;
};

// Loads the parameters of a thread's channels, or `otherwise` where there are none. A parameter
// has one row for all images or one for each.
template <int kVec>
__device__ __forceinline__ void load_channels(const Parameter& parameter, int rows, int image,
                                              int channels, int channel, float otherwise,
                                              float (&out)[kVec]) {
  if (parameter.data != nullptr) {
    load_parameter(parameter, (rows == 1 ? 0 : image) * channels + channel, out);
  } else {
#pragma unroll
    for (float& value : out) value = otherwise;
  }
}

template <typename T, int kVec>
__device__ __forceinline__ void store_result(const Plan& plan, T* address,
                                             const float (&values)[kVec]) {
  Vector<T, kVec> vector;
  pack(values, vector);
  if (plan.streams) {
    store_streaming(address, vector);
  } else {
    store_vector(address, vector);
  }
}

// --- the host's part -----------------------------------------------------------------------------

struct Config {
  int64_t slices;  // slices of an image
  int64_t chunk;   // images of a launch; in a single pass, images that run at a time
  bool once;       // whether images are read once: see group_norm_single_pass.cuh
};

inline ffi::Error check_config(const Config& config) {
  if (config.slices < 1 || config.slices > 65536 || config.chunk < 1) {
    return ffi::Error::InvalidArgument(
        "group_norm: the launch needs 1 to 65536 slices and a chunk of 1 or more images");
  }
  return ffi::Error::Success();
}

inline ffi::Error parse_images(const ffi::AnyBuffer& x, int64_t groups, Images* images) {
  const auto shape = x.dimensions();
  if (shape.size() != 3 || !dtype_of(x)) {
    return ffi::Error::InvalidArgument(
        "x must be float32, bfloat16 or float16 with axes image, pixel, channel");
  }
  if (groups < 1 || shape[2] < 1 || shape[2] % groups != 0) {
    return ffi::Error::InvalidArgument(std::to_string(groups) + " groups do not divide the " +
                                       std::to_string(shape[2]) + " channels of x");
  }
  if (shape[0] > INT32_MAX || shape[1] > INT32_MAX / 2 || shape[0] * shape[2] > INT32_MAX) {
    return ffi::Error::InvalidArgument("x of shape " + to_string(shape) + " is too large");
  }
  if (dtype_of(x) != Dtype::kFloat32 && shape[2] % 2 != 0) {
    return ffi::Error::InvalidArgument(
        "group_norm: the number of channels must be even in 16 bits");
  }
  *images = {static_cast<int>(shape[0]), static_cast<int>(shape[1]), static_cast<int>(shape[2]),
             static_cast<int>(groups), static_cast<int>(shape[2] / groups)};
  return ffi::Error::Success();
}

// Checks an optional parameter [1 or images, channels].
inline ffi::Error parse_channels(std::string_view name, const ffi::AnyBuffer& buffer,
                                 const Images& images, Parameter* parameter, int* rows) {
  *parameter = {nullptr, Dtype::kFloat32};
  *rows = 1;
  if (is_absent(buffer)) return ffi::Error::Success();
  const auto shape = buffer.dimensions();
  const int64_t first = shape.size() == 2 && shape[0] == 1 ? 1 : images.count;
  RETURN_IF_ERROR(check_shape(name, buffer, {first, images.channels}));
  const auto dtype = dtype_of(buffer);
  if (!dtype) {
    return ffi::Error::InvalidArgument(std::string(name) + " must be float32, bfloat16 or float16");
  }
  *parameter = {buffer.untyped_data(), *dtype};
  *rows = static_cast<int>(first);
  return ffi::Error::Success();
}

inline ffi::Error check_like_images(std::string_view name, const ffi::AnyBuffer& buffer,
                                    const ffi::AnyBuffer& x) {
  const auto shape = x.dimensions();
  RETURN_IF_ERROR(check_shape(name, buffer, {shape[0], shape[1], shape[2]}));
  return check_dtype(name, buffer, x.element_type());
}

// Checks the operands and statistics of a forward, and sets the members of `args` that they and the
// options determine.
template <typename Args>
ffi::Error parse_forward(const ffi::AnyBuffer& x, const ffi::AnyBuffer& residual,
                         const ffi::AnyBuffer& scale, const ffi::AnyBuffer& bias, ffi::AnyBuffer& y,
                         ffi::AnyBuffer& mean, ffi::AnyBuffer& rstd, ffi::AnyBuffer& variance,
                         int64_t groups, float epsilon, std::string_view activation, Args* args) {
  RETURN_IF_ERROR(parse_images(x, groups, &args->images));
  RETURN_IF_ERROR(check_like_images("y", y, x));
  if (!is_absent(residual)) RETURN_IF_ERROR(check_like_images("residual", residual, x));
  RETURN_IF_ERROR(parse_channels("scale", scale, args->images, &args->scale, &args->scale_rows));
  RETURN_IF_ERROR(parse_channels("bias", bias, args->images, &args->bias, &args->bias_rows));
  for (const auto& [name, buffer] : {std::pair<std::string_view, ffi::AnyBuffer>{"mean", mean},
                                     {"rstd", rstd},
                                     {"variance", variance}}) {
    if (is_absent(buffer)) continue;
    RETURN_IF_ERROR(check_float32(name, buffer, {args->images.count, groups}));
  }
  RETURN_IF_ERROR(parse_activation(activation, &args->activation));
  args->x = x.untyped_data();
  args->residual = data_or_null(residual);
  args->y = y.untyped_data();
  args->mean = data_or_null<float>(mean);
  args->rstd = data_or_null<float>(rstd);
  args->variance = data_or_null<float>(variance);
  args->epsilon = epsilon;
  return ffi::Error::Success();
}

// Whether a separate launch merges the sums of an image's slices.
inline bool merges_apart(const Plan& plan, int sums) {
  return plan.slices > 1 && static_cast<int64_t>(plan.slices) * sums > kMostSums;
}

// Returns how many threads of a block merge one sum, so that each adds a few of its partial sums.
inline int lanes_of(int threads, int sums, int parts) {
  int lanes = 1;
  while (lanes < 32 && 2 * lanes * sums <= threads && 4 * lanes < parts) lanes *= 2;
  return lanes;
}

// Spreads a slice over at most `most` threads. A pixel with more vectors gets one thread for each
// vector, up to `limit`; beyond that is an error. The threads write `item_sums` sums to shared
// memory, each as `row_parts` partial sums from every row of threads.
template <int kVec>
ffi::Error spread(const Images& images, int most, int limit, int item_sums, int row_parts,
                  Plan* plan, int* threads) {
  plan->columns = images.channels / kVec;
  if (plan->columns > limit) {
    return ffi::Error::InvalidArgument("group_norm: " + std::to_string(images.channels) +
                                       " channels are more than " + std::to_string(limit) +
                                       " threads hold in vectors of " + std::to_string(kVec));
  }
  plan->pixels = images.pixels / plan->slices;
  plan->longer = images.pixels % plan->slices;
  const int longest = plan->pixels + (plan->longer > 0 ? 1 : 0);
  plan->rows = std::max(1, std::min(most / plan->columns, longest));
  plan->full = plan->pixels / plan->rows;
  plan->extra = plan->pixels % plan->rows;
  plan->stride = static_cast<int64_t>(plan->rows) * images.channels;
  plan->by_columns.set(plan->columns);
  plan->by_group.set(images.group_size);
  *threads = (plan->rows * plan->columns + 31) / 32 * 32;
  plan->item_parts = plan->rows * row_parts;
  plan->item_pitch = plan->item_parts | 1;
  plan->item_lanes = lanes_of(*threads, item_sums, plan->item_parts);
  plan->channel_lanes = lanes_of(*threads, images.groups, images.group_size);
  return ffi::Error::Success();
}

// Launches both passes of `kernel` over all images. `args` has the members images and plan, and
// `item_sums` and `row_parts` are passed to spread(). merge(first image, images) runs between
// passes.
template <int kVec, typename Args, typename Merge>
ffi::Error launch_passes(void (*kernel)(Args), Args args, const Config& config, int item_sums,
                         int row_parts, const Merge& merge, cudaStream_t stream) {
  const Images& images = args.images;
  Plan& plan = args.plan;
  if (2 * std::min<int64_t>(config.chunk, images.count) * config.slices > INT32_MAX) {
    return ffi::Error::InvalidArgument(
        "group_norm: the slices of a chunk are more than a grid has");
  }
  int threads = 0;
  RETURN_IF_ERROR(
      spread<kVec>(images, kThreads, kMaxThreads, item_sums, row_parts, &plan, &threads));
  plan.slice_lanes = lanes_of(threads, images.groups, plan.parts);
  const int shared_bytes =
      static_cast<int>(std::max(item_sums * plan.item_pitch, images.groups) * sizeof(float2));
  int waiting = 0;  // images of the chunk whose second pass is still to come
  for (int first = 0; first < images.count || waiting > 0;) {
    const int count = static_cast<int>(std::min<int64_t>(config.chunk, images.count - first));
    plan.second_image = first - waiting;
    plan.second_blocks = waiting * plan.slices;
    plan.first_image = first;
    plan.first_blocks = count * plan.slices;
    const unsigned blocks = static_cast<unsigned>(waiting + count) * plan.slices;
    RETURN_IF_ERROR(launch_kernel(kernel, args, {dim3(blocks), threads, shared_bytes}, stream));
    if (count > 0) RETURN_IF_ERROR(merge(first, count));
    first += count;
    waiting = plan.is_whole() ? 0 : count;
  }
  return ffi::Error::Success();
}

// Calls `f` with a value of x's type and the size of its vectors. If pixels are multiples of 16
// bytes, that is `k16Bits` for 16-bit values and 4 for float32; otherwise a vector has 4 bytes.
template <int k16Bits, typename F>
ffi::Error with_vectors(Dtype dtype, bool aligned, int channels, const F& f) {
  using std::integral_constant;
  const bool whole = aligned && channels % (dtype == Dtype::kFloat32 ? 4 : 8) == 0;
  switch (dtype) {
    case Dtype::kFloat32:
      return whole ? f(float{}, integral_constant<int, 4>{})
                   : f(float{}, integral_constant<int, 1>{});
    case Dtype::kBfloat16:
      return whole ? f(__nv_bfloat16{}, integral_constant<int, k16Bits>{})
                   : f(__nv_bfloat16{}, integral_constant<int, 2>{});
    default:
      return whole ? f(__half{}, integral_constant<int, k16Bits>{})
                   : f(__half{}, integral_constant<int, 2>{});
  }
}

}  // namespace group_norm
