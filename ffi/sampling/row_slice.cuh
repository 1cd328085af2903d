// A row of logits that a block, or a cluster of blocks, reads several times.
#pragma once

#include <cfloat>
#include <cstdint>
#include <string>

#include "common/handler.h"
#include "common/operands.h"
#include "common/ptx.cuh"
#include "common/row_vectors.cuh"
#include "common/rows.cuh"

constexpr int kMaxClusterBlocks = 8;
// Turns whose vectors one group of async copies brings, and groups in flight. Bulk copies bring a
// turn each, and as many turns are in flight as fill kBytesInFlight: of all that are in flight at
// once none arrives much before the others, and then no pass hides behind the copies.
constexpr int kGroup = 4;
constexpr int kGroups = 3;
constexpr int kMostBulkTurns = 64;
constexpr int kBytesInFlight = 64 * 1024;
constexpr int kMinBlockThreads = 256;
constexpr int kMaxBlockThreads = 1024;
constexpr int kMaxBlockWarps = kMaxBlockThreads / kWarpSize;
// Most threads, over all its blocks, that share a row.
constexpr int kMaxRowThreads = 2048;

// Distribution of a row's vectors over blocks and threads.
struct RowSpread {
  int cluster;       // blocks that share a row
  int threads;       // threads of a block
  int kept;          // limit on the vectors of a thread that stay in shared memory
  int shared_bytes;  // shared memory of a block

  Launch launch(int64_t rows) const {
    return {dim3(static_cast<unsigned>(rows * cluster)), threads, shared_bytes, cluster};
  }
};

// The vectors of a row that belong to this block. In a turn, each thread of the row's blocks has
// one vector, so that a thread's vectors do not depend on how many blocks there are. A turn is
// whole if every thread has a vector that holds only values of the row. Vectors of up to `kept`
// whole turns are copied to shared memory and stay there; the others are read from the L2 again.
template <typename T, int kVec>
class RowSlice {
  using Pack = Vector<T, kVec>;
  static constexpr bool kBulk = kHasBulkCopies && sizeof(Pack) == 16;

 public:
  // Shared memory before the vectors.
  static constexpr int kSharedBytes = kMostBulkTurns * int{sizeof(uint64_t)};

  // Starts the copies to shared memory. All threads of the block must synchronise before they read.
  __device__ RowSlice(const void* logits, int64_t row, int features, int rank,
                      const RowSpread& spread, void* shared)
      : vectors_(row, features),
        features_(features),
        threads_(spread.threads * spread.cluster),
        first_(rank * spread.threads + static_cast<int>(threadIdx.x)),
        begin_(vectors_.inner == 0 ? 0 : 1),
        data_(static_cast<const T*>(logits) + vectors_.first * kVec),
        barriers_(static_cast<uint64_t*>(shared)),
        shared_(reinterpret_cast<Pack*>(static_cast<unsigned char*>(shared) + kSharedBytes) +
                threadIdx.x) {
    log2_threads_ = 31 - __clz(threads_);
    const int whole = (vectors_.inner + static_cast<int>(vectors_.inners)) >> log2_threads_;
    end_ = max(min(whole, begin_ + spread.kept), begin_);
    turns_ = (vectors_.count + threads_ - 1) >> log2_threads_;
    if constexpr (kBulk) {
      if (threadIdx.x == 0) start_copies();
    } else {
#pragma unroll 1
      for (int g = 0; g < kGroups; ++g) copy(begin_ + g * kGroup);
    }
  }

  __device__ __forceinline__ int features() const { return features_; }

  // Number of columns of the first turn in shared memory; 0 if there is none.
  __device__ __forceinline__ int first_columns() const {
    return end_ > begin_ ? threads_ * kVec : 0;
  }

  // Waits for the thread's vector of that turn, and returns its values.
  __device__ __forceinline__ void read_first(float (&values)[kVec]) const {
    if constexpr (kBulk) {
      mbarrier_wait(barriers_, 0);
    } else {
      async_copies_wait(kGroups - 1);
    }
    unpack(*shared_, values);
  }

  // Calls use(column, values) for each of the thread's vectors, in the order of columns, except
  // that the first comes last if it holds values of another row. A value beyond the row is -inf.
  // The first pass must set kFirst, to wait for shared memory.
  template <bool kFirst, typename Use>
  __device__ __forceinline__ void for_each(const Use& use) const {
    Pack next = load(end_), after_next = load(end_ + 1);
    const Pack* from = shared_;
    int column = vectors_.column(place_of(begin_));
    for (int turn = begin_; turn < end_;) {
      int stop = end_;
      if constexpr (kFirst) {
        if constexpr (kBulk) {
          mbarrier_wait(barriers_ + (turn - begin_), 0);
          if (threadIdx.x == 0 && turn + ahead() < end_) copy_turn(turn + ahead());
          stop = turn + 1;
        } else {
          copy(turn + kGroups * kGroup);
          async_copies_wait(kGroups);
          stop = min(turn + kGroup, end_);
        }
      }
#pragma unroll 1
      for (; turn < stop; ++turn) {
        float values[kVec];
        unpack(*from, values);
        use(column, values);
        from += blockDim.x;
        column += threads_ * kVec;
      }
    }
#pragma unroll 1
    for (int turn = end_; turn < turns_ + begin_; ++turn) {
      const Pack packed = next;
      next = after_next;
      after_next = load(turn + 2);
      const int j = turn_place(turn);
      if (j >= vectors_.count) continue;
      float values[kVec];
      read(j, packed, values);
      use(vectors_.column(j), values);
    }
  }

  // Whether this thread has the vector that holds `column`; sets its first column and values.
  __device__ __forceinline__ bool find(int column, int* first, float (&values)[kVec]) const {
    const int j = (column + vectors_.shift) / kVec, turn = j >> log2_threads_;
    if ((j & (threads_ - 1)) != first_) return false;
    const bool is_kept = turn >= begin_ && turn < end_;
    read(j, is_kept ? shared_[(turn - begin_) * blockDim.x] : load(turn), values);
    *first = vectors_.column(j);
    return true;
  }

 private:
  __device__ __forceinline__ int place_of(int turn) const { return turn * threads_ + first_; }

  // Number of turns whose bulk copies are in flight.
  __device__ __forceinline__ int ahead() const {
    return kBytesInFlight / (static_cast<int>(blockDim.x) * int{sizeof(Pack)});
  }

  // Initialises the barriers and starts the first bulk copies; one thread calls it.
  __device__ __forceinline__ void start_copies() const {
#pragma unroll 1
    for (int turn = begin_; turn < end_; ++turn) mbarrier_init(barriers_ + (turn - begin_));
    mbarrier_init_fence();
#pragma unroll 1
    for (int turn = begin_; turn < min(begin_ + ahead(), end_); ++turn) copy_turn(turn);
  }

  // Starts the bulk copy of the block's vectors of a turn.
  __device__ __forceinline__ void copy_turn(int turn) const {
    const uint32_t bytes = blockDim.x * sizeof(Pack);
    mbarrier_arrive_expect(barriers_ + (turn - begin_), bytes);
    bulk_copy(shared_ + (turn - begin_) * blockDim.x,
              data_ + static_cast<int64_t>(place_of(turn)) * kVec, bytes,
              barriers_ + (turn - begin_));
  }

  // Starts async copies of the thread's vectors of kGroup turns.
  __device__ __forceinline__ void copy(int turn) const {
    const T* from = data_ + static_cast<int64_t>(place_of(turn)) * kVec;
    Pack* to = shared_ + (turn - begin_) * blockDim.x;
#pragma unroll
    for (int u = 0; u < kGroup; ++u) {
      if (turn + u < end_) async_copy<sizeof(Pack)>(to, from);
      from += threads_ * kVec;
      to += blockDim.x;
    }
    async_copies_commit();
  }

  // Returns the index of the thread's vector in a turn; the first turn comes after the last.
  __device__ __forceinline__ int turn_place(int turn) const {
    return place_of(turn < turns_ ? turn : 0);
  }

  __device__ __forceinline__ Pack load(int turn) const {
    const int j = turn_place(turn);
    return j < vectors_.count ? load_vector<T, kVec>(data_ + static_cast<int64_t>(j) * kVec)
                              : Pack{};
  }

  __device__ __forceinline__ void read(int j, const Pack& packed, float (&values)[kVec]) const {
    unpack(packed, values);
    const int column = vectors_.column(j);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (column + i < 0 || column + i >= features_) values[i] = -INFINITY;
    }
  }

  RowVectors<kVec> vectors_;
  int features_;
  int threads_;  // of the row, a power of two
  int log2_threads_;
  int first_;
  int turns_;
  int begin_;  // first turn and end of those in shared memory
  int end_;
  const T* data_;
  uint64_t* barriers_;
  Pack* shared_;
};

// Combines the results of a cluster's threads, in an order that is the same in every run.
//
// All threads get the same result. Calls alternate between two halves of the shared memory, so that
// one barrier per call suffices: a thread that overwrites a place has passed the barrier of the
// call in between, and so have all threads that read that place.
class ClusterJoin {
 public:
  static constexpr int kMostWords = 6;
  static constexpr int kFloats = 2 * kMostWords * kMaxBlockWarps;

  __device__ ClusterJoin(float* places, int cluster) : places_(places), cluster_(cluster) {}

  // `Found` consists of 32-bit words; a default `Found` is the neutral element of `join`.
  template <typename Found, typename Join>
  __device__ __forceinline__ Found operator()(Found found, const Join& join) {
    constexpr int kWords = sizeof(Found) / sizeof(float);
    static_assert(kWords <= kMostWords);
    over_lanes(found, join);
    const int warps = blockDim.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int log2_warps = 31 - __clz(warps);  // blocks have a power of two of them
    float* const own = places_ + turn_ * kMostWords * kMaxBlockWarps;
    turn_ ^= 1;
    if (lane == 0) {
      const auto& words = reinterpret_cast<const float (&)[kWords]>(found);
#pragma unroll
      for (int i = 0; i < kWords; ++i) own[threadIdx.x / kWarpSize * kWords + i] = words[i];
    }
    wait();
    Found all;
#pragma unroll 1
    for (int place = lane; place < warps * cluster_; place += kWarpSize) {
      Found other;
      auto& words = reinterpret_cast<float (&)[kWords]>(other);
      const float* const from = own + (place & (warps - 1)) * kWords;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words[i] = read(from + i, place >> log2_warps);
      }
      join(all, other);
    }
    over_lanes(all, join);
    return all;
  }

  // Waits for all threads of the cluster.
  __device__ __forceinline__ void wait() const {
    if (cluster_ > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
  }

  // Returns the float in block `rank` of the cluster that corresponds to `from` in this block.
  __device__ __forceinline__ float read(const float* from, int rank) const {
    return cluster_ > 1 ? cluster_load(cluster_address(from, rank)) : *from;
  }

  __device__ __forceinline__ int blocks() const { return cluster_; }

  // Must be called before a block ends: other blocks may still read its shared memory.
  __device__ void finish() const {
    if (cluster_ > 1) cluster_sync();
  }

 private:
  template <typename Found, typename Join>
  static __device__ __forceinline__ void over_lanes(Found& found, const Join& join) {
    constexpr int kWords = sizeof(Found) / sizeof(float);
#pragma unroll 1  // because most of the time code that runs once is being fetched
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      Found other;
      const auto& mine = reinterpret_cast<const float (&)[kWords]>(found);
      auto& words = reinterpret_cast<float (&)[kWords]>(other);
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = __shfl_xor_sync(0xffffffffu, mine[i], offset);
      join(found, other);
    }
  }

  float* places_;
  int cluster_;
  int turn_ = 0;
};

constexpr int64_t kMaxWords = int64_t{1} << 24;  // float32 represents every top_k up to here

inline ffi::Error check_logits(const ffi::AnyBuffer& logits) {
  if (logits.dimensions().size() != 2 || !dtype_of(logits)) {
    return ffi::Error::InvalidArgument("logits must be a matrix of float32, bfloat16 or float16");
  }
  const int64_t rows = logits.dimensions()[0], features = logits.dimensions()[1];
  if (rows < 1 || features < 1 || rows > kMaxRows / kMaxClusterBlocks || features > kMaxWords) {
    return ffi::Error::InvalidArgument("logits have shape " + to_string(logits.dimensions()) +
                                       ", which is empty or too large");
  }
  return ffi::Error::Success();
}

// Returns how rows are distributed over blocks and threads. The number of a row's threads depends
// on its length alone, and so does the order of its sums. A row gets more blocks as long as each
// block has an SM of its own. `other_bytes` of a block's shared memory hold no vectors.
inline RowSpread spread_rows(int64_t rows, int64_t features, int vec, int vector_bytes,
                             int other_bytes, const Device& device) {
  constexpr int kReserved = 1024;
  const int most = device.clusters ? kMaxRowThreads : kMaxBlockThreads;
  const int vectors = most_vectors(features, vec);
  int threads = kWarpSize;
  while (threads < most && threads * kGroup < vectors) threads *= 2;
  RowSpread spread = {divide_up(threads, kMaxBlockThreads), 0, 0, 0};
  while (device.clusters && spread.cluster < kMaxClusterBlocks &&
         threads > spread.cluster * kMinBlockThreads &&
         2 * rows * spread.cluster <= device.multiprocessors) {
    spread.cluster *= 2;
  }
  spread.threads = threads / spread.cluster;
  const int blocks = rows * spread.cluster <= device.multiprocessors
                         ? 1
                         : std::max(kMaxBlockThreads / spread.threads, 1);
  const int room = (device.shared_bytes + kReserved) / blocks - kReserved - other_bytes;
  const int row_bytes = spread.threads * vector_bytes;
  spread.kept =
      std::min({divide_up(vectors, threads), std::max(room / row_bytes, 0), kMostBulkTurns});
  spread.shared_bytes = other_bytes + spread.kept * row_bytes;
  return spread;
}

template <typename Kernel, typename T, int kVec, typename Args>
ffi::Error launch_in_vectors(Args args, int64_t rows, cudaStream_t stream) {
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  args.spread = spread_rows(rows, args.features, kVec, sizeof(Vector<T, kVec>),
                            Kernel::kSharedBytes + RowSlice<T, kVec>::kSharedBytes, device);
  const auto kernel = Kernel::template of<T, kVec>();
  RETURN_IF_ERROR(allow_shared_memory(kernel, device));
  return launch_kernel(kernel, args, args.spread.launch(rows), stream);
}

// Launches Kernel::of<T, kVec>() over the rows of `logits`, in vectors of 16 bytes where they are
// aligned. Its blocks have Kernel::kSharedBytes of shared memory in addition to the vectors'.
template <typename Kernel, typename Args>
ffi::Error launch_over_rows(ffi::AnyBuffer logits, Args args, cudaStream_t stream) {
  const int64_t rows = logits.dimensions()[0];
  args.logits = logits.untyped_data();
  args.features = static_cast<int>(logits.dimensions()[1]);
  const bool aligned = are_aligned({args.logits});
  return with_dtype(*dtype_of(logits), [&](auto type) {
    using T = decltype(type);
    if (aligned) return launch_in_vectors<Kernel, T, 16 / sizeof(T)>(args, rows, stream);
    return launch_in_vectors<Kernel, T, 1>(args, rows, stream);
  });
}
