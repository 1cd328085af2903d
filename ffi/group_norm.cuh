// What the forward and the backward of group_norm share: how images spread over blocks, how a block
// keeps its part of an image on chip, and how the blocks of an image exchange their sums.
//
// A team of blocks owns an image, the teams of the grid take images in turn, and each block of a
// team has a slice: a run of neighbouring pixels with all their channels. The normalisation has to
// see the whole image before it can write anything, so a block keeps its slice in shared memory,
// and the image is read once. The blocks of a team exchange sums through global memory, so all
// blocks of the grid run at the same time: the launch is cooperative where a team has several.
//
// A thread owns the same channels (one vector) in every image, and of a slice every `rows`-th
// pixel:
//
//     channel = column * kVec,   pixel = start + step * rows + row,   step = 0 .. steps - 1
//
// It alone copies, reads and overwrites these values, so a ring of steps in shared memory needs no
// barriers: what a thread has used makes room for what the same thread reads next, which is often
// part of the next image.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>
#include <cstdint>

#include "activation.cuh"
#include "handler.h"
#include "operands.h"
#include "ptx.cuh"
#include "rows.cuh"
#include "team.cuh"
#include "vector.cuh"

namespace group_norm {

constexpr int kMaxThreads = 512;
// The steps that a thread computes together, so that their loads are in flight together.
constexpr int kTogether = 4;
constexpr int kMaxLag = 3;

struct Images {
  int count;
  int pixels;
  int channels;
  int groups;
  int group_size;
};

struct Plan {
  int team;           // blocks of a team
  int teams;          // teams of the grid
  int columns;        // vectors of a pixel
  int rows;           // pixels of a step
  int steps;          // steps of the longest slice
  int ring;           // steps that shared memory holds
  int lag;            // images whose sums are on their way while the next image is summed
  int resident;       // whether a slice stays in shared memory; elsewhere it is read twice
  int lanes;          // threads that add up a group, a power of two up to 32
  int channel_lanes;  // the same for a channel
};

struct Arrays {
  const void* data[3];
  int count;
};

// The slice of a member of a team.
struct Slice {
  int start;
  int count;

  __host__ __device__ Slice(int pixels, int team, int member) {
    const int least = pixels / team, longer = pixels % team;
    start = member * least + (member < longer ? member : longer);
    count = least + (member < longer ? 1 : 0);
  }
};

// The largest power of two up to 32 of which `groups` fit into `threads`, at least 1.
inline int lanes_for(int threads, int groups) {
  int lanes = 1;
  while (lanes < 32 && 2 * lanes * groups <= threads) lanes *= 2;
  return lanes;
}

// Where a thread stands.
struct Place {
  int member;
  int first_image;
  Slice slice;
  int column;  // in vectors
  int row;
  int steps;  // of this thread; 0 for a thread without a column

  __device__ Place(const Images& images, const Plan& plan)
      : member(blockIdx.x % plan.team),
        first_image(blockIdx.x / plan.team),
        slice(images.pixels, plan.team, member),
        column(threadIdx.x % plan.columns),
        row(threadIdx.x / plan.columns) {
    const bool works = row < plan.rows && row < slice.count;
    steps = works ? (slice.count - row + plan.rows - 1) / plan.rows : 0;
  }
};

// Says where in a ring a thread stands that uses one step after the other.
struct Cursor {
  uint32_t index = 0;
  int slot = 0;

  __device__ void advance(int ring) {
    ++index;
    if (++slot == ring) slot = 0;
  }
};

// A thread's part of the ring: steps of one or more arrays, copied in the order of their use.
template <typename T, int kVec>
class Ring {
 public:
  __device__ Ring(const Images& images, const Plan& plan, const Place& place, const Arrays& arrays,
                  char* shared)
      : images_(images),
        plan_(plan),
        place_(place),
        arrays_(arrays),
        shared_(reinterpret_cast<T*>(shared) + threadIdx.x * kVec),
        image_(place.first_image),
        stride_(static_cast<int64_t>(plan.rows) * images.channels) {
    start_image();
  }

  // Returns the offset in an array of the thread's vector in the first step of an image.
  __device__ int64_t offset(int image) const {
    const int64_t pixel = static_cast<int64_t>(image) * images_.pixels + place_.slice.start;
    return (pixel + place_.row) * images_.channels + place_.column * kVec;
  }

  __device__ int64_t stride() const { return stride_; }

  // Returns the step that is used as number `turn` of an image, when the image is read again: the
  // last comes first, since L2 may still hold it.
  __device__ int step_again(int turn) const {
    return plan_.resident ? turn : plan_.steps - 1 - turn;
  }

  // Starts the copies of the next step, if there is one.
  __device__ void issue() {
    if (image_ >= images_.count) return;
    const int step = again_ ? step_again(turn_) : turn_;
    if (step < place_.steps) {
      for (int i = 0; i < arrays_.count; ++i) {
        async_copy<sizeof(T) * kVec>(at(head_.slot, i),
                                     static_cast<const T*>(arrays_.data[i]) + from_);
      }
    }
    async_copies_commit();
    head_.advance(plan_.ring);
    from_ += again_ ? -stride_ : stride_;
    if (++turn_ < plan_.steps) return;
    turn_ = 0;
    again_ = !plan_.resident && !again_;
    if (!again_) image_ += plan_.teams;
    start_image();
  }

  // Waits until the copies of the step with this index, and all before it, are complete.
  __device__ void wait(uint32_t index) const {
    async_copies_wait_for(static_cast<int>(head_.index - index) - 1);
  }

  __device__ T* at(int slot, int array) const {
    return shared_ + (slot * arrays_.count + array) * (blockDim.x * kVec);
  }

 private:
  const Images& images_;
  const Plan& plan_;
  Place place_;
  const Arrays& arrays_;
  T* shared_;
  __device__ void start_image() {
    from_ = offset(image_) + (again_ ? plan_.steps - 1 : 0) * stride_;
  }

  int image_;
  int64_t stride_;
  int64_t from_;  // the offset of the next step in an array
  int turn_ = 0;
  bool again_ = false;
  Cursor head_;
};

// Adds over `lanes` neighbouring threads, a power of two up to 32.
__device__ __forceinline__ float sum_of_lanes(int lanes, float value) {
  float values[1] = {value};
  add_over_lanes(lanes, values);
  return values[0];
}

// Sets up the counters of a grid whose blocks exchange sums; the copies that are on their way
// hide what the barrier takes.
__device__ __forceinline__ void start_exchange(const Images& images, const Plan& plan,
                                               int* counters) {
  if (plan.team == 1) return;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < images.count;
       i += gridDim.x * blockDim.x) {
    counters[i] = 0;
  }
  cooperative_groups::this_grid().sync();
}

// Announces that this block's sums of an image are written. All threads of the block call it.
__device__ __forceinline__ void announce(int* counter) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counter, 1);
  }
}

// Waits until `team` blocks have announced their sums. All threads of the block call it.
__device__ __forceinline__ void await(const int* counter, int team) {
  if (threadIdx.x == 0) {
    while (load_acquire(counter) < team) {
    }
  }
  __syncthreads();
}

// Calls f(group, lane) with `lanes` neighbouring threads for each group; where groups do not fill
// the block, `group` is beyond them, so that all lanes of a warp take part in shuffles.
template <typename F>
__device__ __forceinline__ void for_each_group(int groups, int lanes, const F& f) {
  const int together = blockDim.x / lanes;
  for (int first = 0; first < groups; first += together) {
    f(first + static_cast<int>(threadIdx.x) / lanes, static_cast<int>(threadIdx.x) % lanes);
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

// --- the host's part -----------------------------------------------------------------------------

struct Config {
  int64_t team;
  int64_t threads;
  int64_t blocks;
};

inline ffi::Error check_config(const Config& config) {
  if (config.threads < 32 || config.threads > kMaxThreads || config.threads % 32 != 0 ||
      config.team < 1 || config.blocks < 1 || config.blocks > 16) {
    return ffi::Error::InvalidArgument(
        "group_norm: the launch needs 32 to 512 threads in whole warps, a team of 1 or more blocks"
        " and 1 to 16 blocks for each multiprocessor");
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

// Plans and launches `kernel`, whose `args` have the members images, arrays and plan.
// `fixed_bytes(threads)` is the shared memory that a block needs beside its ring.
template <int kVec, typename Args, typename FixedBytes>
ffi::Error launch(void (*kernel)(Args), Args args, const Config& config, int vector_bytes,
                  const FixedBytes& fixed_bytes, cudaStream_t stream) {
  const Images& images = args.images;
  if (images.channels / kVec > config.threads) {
    return ffi::Error::InvalidArgument("group_norm: " + std::to_string(images.channels) +
                                       " channels are more than " + std::to_string(config.threads) +
                                       " threads hold in vectors of " + std::to_string(kVec));
  }
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  RETURN_IF_ERROR(allow_shared_memory(kernel, device));
  // A block has a kilobyte that the driver keeps for itself. Where a GPU has little shared memory,
  // blocks are smaller than was asked for, so that a ring holds the steps that are computed
  // together.
  const int shared = std::min(
      device.shared_bytes, (device.shared_bytes + 1024) / static_cast<int>(config.blocks) - 1024);
  int threads = static_cast<int>(config.threads), fixed = 0, step_bytes = 0, fitting = 0;
  for (;; threads -= 32) {
    fixed = fixed_bytes(threads);
    step_bytes = args.arrays.count * threads * vector_bytes;
    fitting = (shared - fixed) / step_bytes;
    if (fitting >= kTogether) break;
    if (threads - 32 < std::max(32, images.channels / kVec)) {
      return ffi::Error::InvalidArgument("group_norm: " + std::to_string(images.channels) +
                                         " channels do not fit into shared memory");
    }
  }
  Plan& plan = args.plan;
  plan.columns = images.channels / kVec;
  plan.rows = threads / plan.columns;
  plan.lanes = lanes_for(threads, images.groups);
  plan.channel_lanes = lanes_for(threads, images.channels);
  const auto steps_of = [&](int64_t team) {
    const int64_t longest = (images.pixels + team - 1) / team;
    return static_cast<int>((longest + plan.rows - 1) / plan.rows);
  };

  Launch shape = {dim3(1), threads, fixed + fitting * step_bytes};
  int resident = 1;
  RETURN_IF_ERROR(resident_blocks(kernel, shape, &resident));
  const int most = resident * device.multiprocessors;
  plan.team = static_cast<int>(std::min<int64_t>({config.team, images.pixels, most}));
  plan.teams = std::min(images.count, most / plan.team);
  plan.steps = steps_of(plan.team);
  plan.resident = plan.steps <= fitting;
  plan.ring = fitting;
  plan.lag = 0;
  if (plan.team > 1 && plan.resident) {
    while (plan.lag < kMaxLag && 2 * (plan.lag + 2) * plan.steps + plan.steps <= 2 * plan.ring) {
      ++plan.lag;
    }
  }
  shape.grid = dim3(plan.team * plan.teams);
  shape.cooperative = plan.team > 1;
  return launch_kernel(kernel, args, shape, stream);
}

// Calls `f` with a value of x's type and the size of its vectors: 16 bytes where pixels start at
// multiples of 16 bytes, else 4 bytes.
template <typename F>
ffi::Error with_vectors(Dtype dtype, bool whole, const F& f) {
  using std::integral_constant;
  switch (dtype) {
    case Dtype::kFloat32:
      return whole ? f(float{}, integral_constant<int, 4>{})
                   : f(float{}, integral_constant<int, 1>{});
    case Dtype::kBfloat16:
      return whole ? f(__nv_bfloat16{}, integral_constant<int, 8>{})
                   : f(__nv_bfloat16{}, integral_constant<int, 2>{});
    default:
      return whole ? f(__half{}, integral_constant<int, 8>{})
                   : f(__half{}, integral_constant<int, 2>{});
  }
}

inline ffi::Error check_even(const ffi::AnyBuffer& x) {
  if (*dtype_of(x) != Dtype::kFloat32 && x.dimensions()[2] % 2 != 0) {
    return ffi::Error::InvalidArgument(
        "group_norm: the number of channels must be even in 16 bits");
  }
  return ffi::Error::Success();
}

}  // namespace group_norm
