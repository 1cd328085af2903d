// What the forward and the backward of group_norm share: how images spread over blocks and threads,
// and how sums of many parts are merged in a fixed order.
//
// Each direction takes two passes over an image. The first leaves sums of every slice in global
// memory, the second merges them and writes. A slice is a run of neighbouring pixels with all their
// channels, and a block has one slice of one image. The images are taken in chunks that a second
// read finds in L2: a launch does the second pass over a chunk, and then the first pass over the
// next one. The second pass walks through a slice from its end, since what was read last is likely
// to be in L2. Where an image is one slice, its block does both passes at once.
//
// A thread owns the same channels (one vector) in every `rows`-th pixel of its slice:
//
//     channel = column * kVec,   pixel = start + step * rows + row,   step = 0 .. steps - 1
#pragma once

#include <algorithm>
#include <cstdint>

#include "activation.cuh"
#include "handler.h"
#include "operands.h"
#include "rows.cuh"
#include "vector.cuh"

namespace group_norm {

// The threads of a block, unless a pixel alone has more vectors.
constexpr int kThreads = 512;
constexpr int kMaxThreads = 1024;
// More sums than these in all slices of an image are merged by a launch of their own, so that not
// every block of the second pass reads them all.
constexpr int kMostSums = 4096;
// The columns that a block of such a launch takes: 64 bytes of each part.
constexpr int kMergedColumns = 8;

struct Images {
  int count;
  int pixels;
  int channels;
  int groups;
  int group_size;
};

struct Plan {
  int slices;        // of an image
  int columns;       // vectors of a pixel
  int rows;          // pixels that a block takes together
  int64_t stride;    // values from a thread's pixel to its next
  int parts;         // sums of an image that the second pass merges: the slices', or one
  int second_image;  // from which on the first blocks do the second pass
  int second_blocks;
  int first_image;  // from which on the other blocks do the first pass
  bool streams;     // whether what is written should leave L2 first

  // Whether blocks do both passes, and there are no other blocks.
  __host__ __device__ bool is_whole() const { return slices == 1; }
};

// A slice of an image.
struct Slice {
  int start;
  int count;

  __host__ __device__ Slice(int pixels, int slices, int index) {
    const int least = pixels / slices, longer = pixels % slices;
    start = index * least + (index < longer ? index : longer);
    count = least + (index < longer ? 1 : 0);
  }
};

// Where a thread stands.
struct Place {
  bool takes;   // whether its block does the first pass
  bool writes;  // whether it does the second
  int image;
  int index;  // of the slice
  Slice slice;
  int row;
  int channel;  // the first of the thread's
  int steps;    // of this thread; 0 for a thread without a column or a pixel

  __device__ Place(const Images& images, const Plan& plan, int vec)
      : Place(images, plan, vec, static_cast<int>(blockIdx.x) < plan.second_blocks) {}

  // Returns how many pixels of the slice a row of threads has.
  __device__ int pixels_of_row(const Plan& plan, int of_row) const {
    return of_row < slice.count ? (slice.count - of_row + plan.rows - 1) / plan.rows : 0;
  }

  // Returns the offset in an array of the thread's vector in its first step.
  __device__ int64_t offset(const Images& images) const {
    const int64_t pixel = static_cast<int64_t>(image) * images.pixels + slice.start + row;
    return pixel * images.channels + channel;
  }

 private:
  __device__ Place(const Images& images, const Plan& plan, int vec, bool second)
      : Place(images, plan, vec, second, second ? plan.second_image : plan.first_image,
              static_cast<int>(blockIdx.x) - (second ? 0 : plan.second_blocks)) {}

  __device__ Place(const Images& images, const Plan& plan, int vec, bool second, int base,
                   int block)
      : takes(!second),
        writes(second || plan.is_whole()),
        image(base + block / plan.slices),
        index(block % plan.slices),
        slice(images.pixels, plan.slices, index),
        row(static_cast<int>(threadIdx.x) / plan.columns),
        channel(static_cast<int>(threadIdx.x) % plan.columns * vec),
        steps(row < plan.rows ? pixels_of_row(plan, row) : 0) {}
};

// Merges, for each of `sums` sums, what load(sum, part) returns for all parts, and hands the result
// to store(sum, merged) of one thread. Neighbouring threads take neighbouring sums, and several
// threads the parts of a sum; the order of merging depends on the sizes alone. All threads of the
// block call it. `scratch` has room for a Part of each thread, and nobody uses it before and after
// without a barrier of the block in between.
template <typename Part, typename Load, typename Store>
__device__ __forceinline__ void merge_parts(int sums, int parts, Part* scratch, const Load& load,
                                            const Store& store) {
  constexpr int kLoads = 4;
  const int thread = threadIdx.x;
  const int width = min(sums, static_cast<int>(blockDim.x));
  const int lanes = 1 << (31 - __clz(blockDim.x / width));
  const int lane = thread / width;
  for (int first = 0; first < sums; first += width) {
    const int sum = first + thread % width;
    const bool works = lane < lanes && sum < sums;
    Part own = {};
    for (int part = lane; works && part < parts; part += kLoads * lanes) {
      Part loaded[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        loaded[i] = part + i * lanes < parts ? load(sum, part + i * lanes) : Part{};
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) own.add(loaded[i]);
    }
    // There are several lanes only where one turn takes all sums.
    for (int half = lanes / 2; half > 0; half /= 2) {
      if (lane >= half && lane < 2 * half) scratch[thread] = own;
      __syncthreads();
      if (lane < half) own.add(scratch[thread + half * width]);
    }
    if (works && lane == 0) store(sum, own);
  }
}

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
  int64_t slices;  // of an image
  int64_t chunk;   // images of a pass
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

// Checks a parameter of [1 or images, channels]; it may be absent.
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

// Whether the sums of an image's slices are merged by a launch of their own.
inline bool merges_apart(const Plan& plan, int sums) {
  return plan.slices > 1 && static_cast<int64_t>(plan.slices) * sums > kMostSums;
}

// Launches both passes of `kernel` over all images. `args` has the members images and plan;
// merge(first image, images) launches what lies between the passes, and shared_bytes(threads) is
// the shared memory of a block.
template <int kVec, typename Args, typename SharedBytes, typename Merge>
ffi::Error launch_passes(void (*kernel)(Args), Args args, const Config& config,
                         const SharedBytes& shared_bytes, const Merge& merge, cudaStream_t stream) {
  const Images& images = args.images;
  Plan& plan = args.plan;
  plan.columns = images.channels / kVec;
  if (plan.columns > kMaxThreads) {
    return ffi::Error::InvalidArgument("group_norm: " + std::to_string(images.channels) +
                                       " channels are more than " + std::to_string(kMaxThreads) +
                                       " threads hold in vectors of " + std::to_string(kVec));
  }
  if (2 * std::min<int64_t>(config.chunk, images.count) * config.slices > INT32_MAX) {
    return ffi::Error::InvalidArgument(
        "group_norm: the slices of a chunk are more than a grid has");
  }
  const int longest = (images.pixels + plan.slices - 1) / plan.slices;
  plan.rows = std::max(1, std::min(kThreads / plan.columns, longest));
  plan.stride = static_cast<int64_t>(plan.rows) * images.channels;
  const int threads = (plan.rows * plan.columns + 31) / 32 * 32;
  int waiting = 0;  // images of the chunk whose second pass is due
  for (int first = 0; first < images.count || waiting > 0;) {
    const int count = static_cast<int>(std::min<int64_t>(config.chunk, images.count - first));
    plan.second_image = first - waiting;
    plan.second_blocks = waiting * plan.slices;
    plan.first_image = first;
    const unsigned blocks = static_cast<unsigned>(waiting + count) * plan.slices;
    RETURN_IF_ERROR(
        launch_kernel(kernel, args, {dim3(blocks), threads, shared_bytes(threads)}, stream));
    if (count > 0) RETURN_IF_ERROR(merge(first, count));
    first += count;
    waiting = plan.is_whole() ? 0 : count;
  }
  return ffi::Error::Success();
}

// Calls `f` with a value of x's type and the size of its vectors: `k16Bits` values of 16 bits or
// four of float32 where pixels are whole 16 bytes, else 4 bytes.
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
