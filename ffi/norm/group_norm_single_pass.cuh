// The single pass of group_norm (sm_90 and later): images are read once, since they stay in shared
// memory between the sums and the results.
//
// The grid is cooperative, with one block per SM. Blocks form teams; a team computes one image
// after the other, and a block has the same slice of each. Bulk copies load chunks of the slices,
// of the next images too, into a ring of pipeline stages (slots) in shared memory. The crews (warps
// of one role) of a block work on different images at the same time, so that none waits for data
// that was only just requested:
//
//   - the loader, a single thread, fills slots as they become free;
//   - the first crew computes the sums of a slice, stores them in global memory and increments the
//     image's counter;
//   - the second waits until all blocks of the team have incremented it, and merges their sums;
//   - the third reads the slice from the slots again, writes the results and frees the slots.
#pragma once

#include "group_norm.cuh"

namespace group_norm {

// Sizes of the crews (warps of one role) of a block, in the forward or the backward.
template <int kFirst, int kSecond, int kThird, int kSlotArrays, int kChunk>
struct Crews {
  static constexpr int kLoader = 32;
  static constexpr int kSums = kFirst;    // limit on the threads that compute sums
  static constexpr int kMerge = kSecond;  // threads that merge sums
  static constexpr int kWrite = kThird;   // limit on the threads that write results
  static constexpr int kArrays = kSlotArrays;
  static constexpr int kChunkBytes = kChunk;  // approximate bytes of a chunk of one array
  static constexpr int kThreads = kLoader + kSums + kMerge + kWrite;
  static_assert(kThreads <= kMaxThreads);
};

// Ids of the barriers of warps of one role, and of the one between merging and writing warps.
enum CrewBarrier : int { kSumsBarrier = 1, kMergeBarrier, kMergedBarrier };

struct Ring {
  int teams;       // teams of plan.slices blocks, each of which computes one image at a time
  int chunk;       // pixels of a slot (a pipeline stage)
  int slots;       // slots of the ring
  int slot_bytes;  // bytes of one array in a slot
  int items_at;    // offset in shared memory of a slice's sums
  int merged_at;   // offset of the merged sums, with two buffers that images alternate between
  int kept_at;     // offset of sums that a block accumulates over all its images
  int barriers_at;
  int sum_threads, write_threads;
  int write_rows;  // pixels that the writing warps read at a time
  // Counters of blocks, [images + 1]: for each image those that have stored their sums of it, and
  // last those that have stored their sums over all their images
  unsigned* counters;
};

// Position of the warps of one role in the ring of slots (pipeline stages).
struct Turn {
  int slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void next(int slots) {
    if (++slot == slots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// The slice that a block has in each image of its team.
struct Slice {
  int first_image;
  int rank;   // rank of the block in its team
  int start;  // first pixel of the slice
  int count;
  int extra;  // rows of threads that take one more step

  __device__ explicit Slice(const Plan& plan) {
    first_image = static_cast<int>(blockIdx.x) / plan.slices;
    rank = static_cast<int>(blockIdx.x) - first_image * plan.slices;
    const int more = rank < plan.longer ? 1 : 0;
    start = rank * plan.pixels + min(rank, plan.longer);
    count = plan.pixels + more;
    extra = plan.extra + more;
  }
};

// The vectors of a chunk of pixels that a thread reads: one in every `rows`-th pixel.
struct Visits {
  int row;
  int channel;  // first channel of the vector
  int first;    // first pixel; beyond every chunk for a thread without a column
  int own;      // offset of the thread's first vector in a chunk, in values
  int stride;   // values between a thread's successive vectors

  __device__ Visits(const Images& images, const Plan& plan, int rows, int thread, int vec) {
    row = plan.by_columns.quotient(thread);
    channel = (thread - row * plan.columns) * vec;
    first = row < rows ? row : INT32_MAX / 2;
    own = row * images.channels + channel;
    stride = rows * images.channels;
  }
};

template <typename T, typename Crews>
class Block {
 public:
  __device__ Block(const Images& images, const Plan& plan, const Ring& ring, unsigned char* shared)
      : images(images), plan(plan), ring(ring), slice(plan), shared_(shared) {}

  // Initialises the barriers. All threads of the block must call it first.
  __device__ void begin() const {
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int slot = 0; slot < ring.slots; ++slot) {
        mbarrier_init(full(slot));
        mbarrier_init(free(slot), ring.write_threads / 32);
      }
      mbarrier_init_fence();
    }
    __syncthreads();
  }

  __device__ __forceinline__ float2* items() const {
    return reinterpret_cast<float2*>(shared_ + ring.items_at);
  }
  __device__ __forceinline__ float2* merged(int turn) const {
    return reinterpret_cast<float2*>(shared_ + ring.merged_at) + turn * images.groups;
  }
  __device__ __forceinline__ float2* kept() const {
    return reinterpret_cast<float2*>(shared_ + ring.kept_at);
  }

  // Copies the slices into the ring; called by the loader thread alone.
  __device__ void load(const void* const (&sources)[Crews::kArrays]) const {
    Turn turn;
    const uint64_t policy = evict_last_policy();
    const int64_t pixel_bytes = images.channels * static_cast<int64_t>(sizeof(T));
#pragma unroll 1
    for (int image = slice.first_image; image < images.count; image += ring.teams) {
#pragma unroll 1
      for (int pixel = 0; pixel < slice.count; pixel += ring.chunk) {
        const int64_t from =
            (static_cast<int64_t>(image) * images.pixels + slice.start + pixel) * pixel_bytes;
        const auto bytes =
            static_cast<uint32_t>(min(ring.chunk, slice.count - pixel) * pixel_bytes);
        mbarrier_wait(free(turn.slot), turn.phase ^ 1);  // no wait until the ring is full
        mbarrier_arrive_expect(full(turn.slot), Crews::kArrays * bytes);
#pragma unroll
        for (int array = 0; array < Crews::kArrays; ++array) {
          bulk_copy(slot(turn.slot, array), static_cast<const char*>(sources[array]) + from, bytes,
                    full(turn.slot), policy);
        }
        turn.next(ring.slots);
      }
    }
  }

  // Calls f(pointers to the arrays' values, first pixel in the slice, pixels) for each chunk.
  template <typename F>
  __device__ __forceinline__ void for_each_chunk(Turn& turn, const F& f) const {
#pragma unroll 1
    for (int pixel = 0; pixel < slice.count; pixel += ring.chunk) {
      mbarrier_wait(full(turn.slot), turn.phase);
      const T* arrays[Crews::kArrays];
#pragma unroll
      for (int array = 0; array < Crews::kArrays; ++array) arrays[array] = slot(turn.slot, array);
      f(arrays, pixel, min(ring.chunk, slice.count - pixel));
      turn.next(ring.slots);
    }
  }

  // Frees a slot: each writing warp reports that it has read the slot, before turn.next().
  __device__ __forceinline__ void release(const Turn& turn) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(free(turn.slot));
  }

  // Increments the image's counter for this block, after its sums are stored in global memory.
  __device__ __forceinline__ void publish(const Crew<kSumsBarrier>& crew, int image) const {
    crew.sync();
    if (crew.thread == 0) count_up(ring.counters + image);
  }

  // Waits, in the merging warps, until all blocks of the team have stored the sums of an image.
  __device__ __forceinline__ void await_sums(const Crew<kMergeBarrier>& crew, int image) const {
    if (crew.thread == 0) wait_for_count(ring.counters + image, plan.slices);
    crew.sync();
  }

  // Barrier between the warps that have merged an image's sums and those that write its results.
  // The latter have then finished the previous image, so two buffers of merged sums suffice.
  __device__ __forceinline__ void meet() const {
    barrier_sync(kMergedBarrier, Crews::kMerge + ring.write_threads);
  }

  const Images& images;
  const Plan& plan;
  const Ring& ring;
  const Slice slice;

 private:
  __device__ __forceinline__ uint64_t* full(int slot) const {
    return reinterpret_cast<uint64_t*>(shared_ + ring.barriers_at) + slot;
  }
  __device__ __forceinline__ uint64_t* free(int slot) const { return full(ring.slots + slot); }
  __device__ __forceinline__ T* slot(int slot, int array) const {
    return reinterpret_cast<T*>(shared_ + (slot * Crews::kArrays + array) * ring.slot_bytes);
  }

  unsigned char* shared_;
};

// Calls load(), take(crew), merge(crew) or write(thread of the crew), by the role of the thread.
template <typename Crews, typename Load, typename Take, typename Merge, typename Write>
__device__ __forceinline__ void divide_work(const Ring& ring, const Load& load, const Take& take,
                                            const Merge& merge, const Write& write) {
  int thread = static_cast<int>(threadIdx.x) - Crews::kLoader;
  if (thread < 0) {
    if (threadIdx.x == 0) load();
    return;
  }
  if (thread < Crews::kMerge) return merge(Crew<kMergeBarrier>{thread, Crews::kMerge});
  thread -= Crews::kMerge;
  if (thread < ring.sum_threads) return take(Crew<kSumsBarrier>{thread, ring.sum_threads});
  write(thread - ring.sum_threads);
}

// --- the host's part -----------------------------------------------------------------------------

inline ffi::Error check_counters(const ffi::AnyBuffer& counters, const Images& images) {
  RETURN_IF_ERROR(check_shape("counters", counters, {images.count + 1}));
  return check_dtype("counters", counters, ffi::DataType::S32);
}

// Launches `kernel`. `args` has the members images, plan and ring, whose counters are set.
// `item_sums` and `row_parts` are the arguments of `spread`, and `kept_bytes` are the bytes of sums
// that a block accumulates over its images.
template <int kVec, typename Crews, typename Args>
ffi::Error launch_once(void (*kernel)(Args), Args args, const Config& config, const Device& device,
                       int item_sums, int row_parts, int kept_bytes, int item_bytes,
                       cudaStream_t stream) {
  const Images& images = args.images;
  Plan& plan = args.plan;
  Ring& ring = args.ring;
  ring.teams = static_cast<int>(std::min<int64_t>(config.chunk, images.count));
  if (!device.clusters || plan.slices > images.pixels ||
      static_cast<int64_t>(plan.slices) * ring.teams > device.multiprocessors) {
    return ffi::Error::InvalidArgument(
        "group_norm: images are read once by compute capability 9.0 or later, in slices of at "
        "least a pixel, and not more slices at a time than there are multiprocessors");
  }
  RETURN_IF_ERROR(spread<kVec>(images, Crews::kSums, Crews::kSums, item_sums, row_parts, &plan,
                               &ring.sum_threads));
  plan.slice_lanes = lanes_of(Crews::kMerge, images.groups, plan.slices);
  const int longest = plan.pixels + (plan.longer > 0 ? 1 : 0);
  ring.write_rows = std::max(1, std::min(Crews::kWrite / plan.columns, longest));
  ring.write_threads = (ring.write_rows * plan.columns + 31) / 32 * 32;

  // A chunk is a whole number of steps of the summing warps, so only a slice's last step is short.
  const int step_bytes = plan.rows * images.channels * item_bytes;
  ring.chunk = plan.rows * std::max(1, (Crews::kChunkBytes + step_bytes / 2) / step_bytes);
  ring.slot_bytes = ring.chunk * images.channels * item_bytes;
  const int slot_bytes = Crews::kArrays * ring.slot_bytes;
  const int items_bytes = item_sums * plan.item_pitch * static_cast<int>(sizeof(float2));
  const int merged_bytes = 2 * images.groups * static_cast<int>(sizeof(float2));
  const int fixed_bytes = items_bytes + merged_bytes + kept_bytes;
  const int barrier_bytes = 2 * static_cast<int>(sizeof(uint64_t));
  ring.slots = (device.shared_bytes - fixed_bytes) / (slot_bytes + barrier_bytes);
  if (ring.slots <= (longest + ring.chunk - 1) / ring.chunk) {
    return ffi::Error::InvalidArgument("group_norm: slices of " + std::to_string(longest) +
                                       " pixels leave no room in shared memory");
  }
  ring.items_at = ring.slots * slot_bytes;
  ring.merged_at = ring.items_at + items_bytes;
  ring.kept_at = ring.merged_at + merged_bytes;
  ring.barriers_at = ring.kept_at + kept_bytes;
  const int shared_bytes = ring.barriers_at + ring.slots * barrier_bytes;

  RETURN_IF_ERROR(
      check_cuda(cudaMemsetAsync(ring.counters, 0, (images.count + 1) * sizeof(unsigned), stream),
                 "cudaMemsetAsync"));
  RETURN_IF_ERROR(allow_shared_memory(kernel, device));
  Launch launch = {dim3(ring.teams * plan.slices),
                   Crews::kLoader + Crews::kMerge + ring.sum_threads + ring.write_threads,
                   shared_bytes};
  launch.cooperative = true;
  return launch_kernel(kernel, args, launch, stream);
}

// Calls `f` with a value of x's type and its vector size: `k16Bits` in 16 bits, 4 in float32.
template <int k16Bits, typename F>
ffi::Error with_whole_vectors(Dtype dtype, bool aligned, int channels, const F& f) {
  using std::integral_constant;
  if (!aligned || channels % (dtype == Dtype::kFloat32 ? 4 : 8) != 0) {
    return ffi::Error::InvalidArgument(
        "group_norm: images are read once where pixels are whole 16 bytes");
  }
  switch (dtype) {
    case Dtype::kFloat32:
      return f(float{}, integral_constant<int, 4>{});
    case Dtype::kBfloat16:
      return f(__nv_bfloat16{}, integral_constant<int, k16Bits>{});
    default:
      return f(__half{}, integral_constant<int, k16Bits>{});
  }
}

}  // namespace group_norm
