// How kernels over the rows of a [rows, features] matrix spread it over threads and bring it in.
//
// A team of threads owns a row, a block holds several teams (or a cluster of blocks is one), and
// the grid is persistent: each team walks over the rows in steps of what the whole grid holds.
// Thread `rank` of a team owns the same columns in every row, kVectors vectors of kVec values:
//
//     column(v) = first + (v * team.size + rank) * kVec,    v = 0 .. kVectors - 1
//
// (`first`: where its block's part of the row starts), so that the row, the parameters and their
// gradients stay in registers, and a team reads a row in whole lines.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "team.cuh"
#include "vector.cuh"

constexpr int kMaxThreads = kWarpSize * kMaxTeamWarps;  // a block
// A thread holds 8, 16, 24 or 32 values of a row.
constexpr int kElementStep = 8;
constexpr int kElementChoices = 4;

struct Device {
  int multiprocessors;
  int shared_bytes;                 // that one block can have
  int multiprocessor_shared_bytes;  // that the blocks of one multiprocessor can have
  int reserved_shared_bytes;        // of each block, out of the latter
  int max_team_blocks;
};

enum class Dtype : int { kFloat32, kBfloat16, kFloat16 };

// A [features] vector in a dtype of its own; without data it is absent.
struct Parameter {
  const void* data;
  Dtype dtype;
};

template <int kSize>
__device__ __forceinline__ void load_parameter(const Parameter& parameter, int column,
                                               float (&out)[kSize]) {
  constexpr int kFloats = kSize < 4 ? kSize : 4;
  switch (parameter.dtype) {
    case Dtype::kFloat32:
#pragma unroll
      for (int i = 0; i < kSize; i += kFloats) {
        const auto part =
            load_vector<float, kFloats>(static_cast<const float*>(parameter.data) + column + i);
#pragma unroll
        for (int j = 0; j < kFloats; ++j) out[i + j] = part.values[j];
      }
      break;
    case Dtype::kBfloat16:
      unpack(load_vector<__nv_bfloat16, kSize>(static_cast<const __nv_bfloat16*>(parameter.data) +
                                               column),
             out);
      break;
    case Dtype::kFloat16:
      unpack(load_vector<__half, kSize>(static_cast<const __half*>(parameter.data) + column), out);
      break;
  }
}

// What the norm multiplies by: scale + offset, or 1 without a scale.
template <int kSize>
__device__ __forceinline__ void load_scale(const Parameter& scale, float offset, int column,
                                           float (&out)[kSize]) {
  if (scale.data == nullptr) {
#pragma unroll
    for (float& value : out) value = 1.0f;
  } else {
    load_parameter(scale, column, out);
#pragma unroll
    for (float& value : out) value += offset;
  }
}

template <int kSize>
__device__ __forceinline__ void load_or_zero(const Parameter& parameter, int column,
                                             float (&out)[kSize]) {
  if (parameter.data == nullptr) {
#pragma unroll
    for (float& value : out) value = 0.0f;
  } else {
    load_parameter(parameter, column, out);
  }
}

// A short tree instead of a long chain of dependent additions.
template <int kSize>
__device__ __forceinline__ float sum_of(const float (&values)[kSize]) {
  float partial[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) partial[i] = values[i];
#pragma unroll
  for (int width = kSize / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) partial[i] += partial[i + width];
  }
  return partial[0];
}

// The columns of a thread, the same in every row.
template <int kVec, int kVectors>
class Columns {
 public:
  __device__ Columns(const Team& team, int features, int block_features)
      : team_(team),
        first_(team.block * block_features),
        count_(min(block_features, features - first_)) {}

  // Within the block's part of the row.
  __device__ __forceinline__ int local(int v) const { return (v * team_.size + team_.rank) * kVec; }

  __device__ __forceinline__ int operator()(int v) const { return first_ + local(v); }

  // Whether the row has column(v): choose_spread leaves only the last kElementStep values in doubt.
  __device__ __forceinline__ bool has(int v) const {
    if (kVec > 1 && (v + 1) * kVec <= kVec * kVectors - kElementStep) return true;
    return local(v) < count_;
  }

  __device__ __forceinline__ int first() const { return first_; }
  __device__ __forceinline__ int count() const { return count_; }  // of the block

 private:
  Team team_;
  int first_;
  int count_;
};

// Writes totals[column] = the sum over the block's teams of `values`, in the order of the teams.
// `shared` has room for block_features floats of each team; call it between barriers.
template <int kVec, int kVectors>
__device__ __forceinline__ void add_over_teams(const float (&values)[kVectors][kVec],
                                               const Team& team,
                                               const Columns<kVec, kVectors>& column,
                                               int block_features, float* shared, float* totals) {
  constexpr int kPart = kVec < 4 ? kVec : 4;
  using Part = Vector<float, kPart>;
  const auto for_each_part = [&](auto&& use) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!column.has(v)) continue;
#pragma unroll
      for (int i = 0; i < kVec; i += kPart) {
        Part part;
#pragma unroll
        for (int j = 0; j < kPart; ++j) part.values[j] = values[v][i + j];
        use(column.local(v) + i, part);
      }
    }
  };
  totals += column.first();
  const int teams = blockDim.x / team.size;
  if (teams == 1) {
    for_each_part([&](int i, const Part& part) { store_vector(totals + i, part); });
    return;
  }
  for_each_part([&](int i, const Part& part) {
    store_vector(shared + team.index * block_features + i, part);
  });
  __syncthreads();
  for (int i = threadIdx.x * kPart; i < column.count(); i += blockDim.x * kPart) {
    Part total = {};
    for (int other = 0; other < teams; ++other) {
      const auto addend = load_vector<float, kPart>(shared + other * block_features + i);
#pragma unroll
      for (int j = 0; j < kPart; ++j) total.values[j] += addend.values[j];
    }
    store_vector(totals + i, total);
  }
}

constexpr int kMaxStreams = 3;
constexpr int kMaxStages = 4;  // async_copies_wait knows no more

// The rows that a unit, the threads of a whole warp or of a larger team, takes: `height`
// neighbouring rows a step, one for each of its teams.
struct RowWalk {
  int height;
  int line;  // which of the rows is the team's
  int first;
  int step;
  int end;

  // For block `block` of the `blocks` that share the rows from `begin` to `end`.
  __device__ RowWalk(const Team& team, int block, int blocks, int begin, int end)
      : height(max(kWarpSize / team.size, 1)), line(team.index % height), end(end) {
    const int teams = blockDim.x / team.size;
    first = begin + block * teams + team.index - line;
    step = blocks * teams;
  }
};

// A ring of rows on their way in: what bounds the bytes in flight is shared memory, not registers
// or occupancy. Where the GPU has bulk copies and rows allow them, one thread of a unit copies
// whole rows; elsewhere every thread copies its own columns.
template <typename T, int kVec, int kVectors>
class RowRing {
 public:
  static constexpr bool kBulk = kHasBulkCopies && kVec * sizeof(T) == 16;
  static constexpr int kBarriers = kMaxStages * kMaxTeamWarps;

  // `sources` are the matrices whose rows travel together. `shared` holds, for each stage and
  // stream, block_features columns of a row for each team. All threads of a team (and of its
  // cluster) synchronise before the first wait.
  __device__ RowRing(uint64_t* barriers, void* shared, const void* const (&sources)[kMaxStreams],
                     int streams, int stages, int features, int block_features, const Team& team,
                     const Columns<kVec, kVectors>& column, const RowWalk& walk)
      : sources_(sources),
        streams_(streams),
        stages_(stages),
        features_(features),
        block_features_(block_features),
        team_(team),
        column_(column),
        walk_(walk),
        next_(walk.first) {
    const int unit = team.index / walk.height;
    // A unit's rows lie together, its streams and stages too.
    slots_ = static_cast<T*>(shared) +
             static_cast<int64_t>(unit) * stages * streams * walk.height * block_features;
    barriers_ = barriers + unit * kMaxStages;
    leads_ = team.rank == 0 && walk.line == 0;
    if constexpr (kBulk) {
      if (leads_) {
        for (int stage = 0; stage < stages; ++stage) mbarrier_init(barriers_ + stage);
        mbarrier_init_fence();
      }
    }
    for (int stage = 0; stage < stages; ++stage) fetch();
    phase_ = 0;
  }

  // Waits for the oldest stage; `read` then reads it until the next fetch.
  __device__ __forceinline__ void wait() {
    if constexpr (kBulk) {
      mbarrier_wait(barriers_ + stage_, phase_);
    } else {
      async_copies_wait(stages_ - 1);
    }
  }

  // Columns past the last read as zeros, which add nothing to a sum.
  __device__ __forceinline__ Vector<T, kVec> read(int stream, int v) const {
    if (!column_.has(v)) return {};
    return load_vector<T, kVec>(slot(stream) + walk_.line * block_features_ + column_.local(v));
  }

  // Starts the copies of the next rows into the oldest stage. All of the unit have read it, and
  // have synchronised since.
  __device__ __forceinline__ void fetch() {
    if (next_ < walk_.end) copy_in();
    if constexpr (!kBulk) async_copies_commit();
    next_ += walk_.step;
    if (++stage_ == stages_) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  __device__ __forceinline__ T* slot(int stream) const {
    return slots_ + (stage_ * streams_ + stream) * walk_.height * block_features_;
  }

  __device__ __forceinline__ void copy_in() {
    if constexpr (kBulk) {
      if (!leads_) return;
      const int rows = min(walk_.height, walk_.end - next_);
      const uint32_t bytes = rows * column_.count() * sizeof(T);
      mbarrier_arrive_expect(barriers_ + stage_, streams_ * bytes);
#pragma unroll
      for (int stream = 0; stream < kMaxStreams; ++stream) {
        if (stream >= streams_) break;
        bulk_copy(slot(stream), source(stream, next_) + column_.first(), bytes, barriers_ + stage_);
      }
    } else {
      const int row = next_ + walk_.line;
      if (row >= walk_.end) return;
#pragma unroll
      for (int stream = 0; stream < kMaxStreams; ++stream) {
        if (stream >= streams_) break;
        T* target = slot(stream) + walk_.line * block_features_;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (column_.has(v)) {
            async_copy<sizeof(T) * kVec>(target + column_.local(v),
                                         source(stream, row) + column_(v));
          }
        }
      }
    }
  }

  __device__ __forceinline__ const T* source(int stream, int row) const {
    return static_cast<const T*>(sources_[stream]) + static_cast<int64_t>(row) * features_;
  }

  T* slots_;
  uint64_t* barriers_;
  const void* const (&sources_)[kMaxStreams];
  int streams_;
  int stages_;
  int features_;
  int block_features_;
  Team team_;
  Columns<kVec, kVectors> column_;
  RowWalk walk_;
  int next_;
  bool leads_;
  int stage_ = 0;
  uint32_t phase_ = 0;
};

// --- launch --------------------------------------------------------------------------------------

// How a row is spread over threads; elements 0 where it is too long to be held by one team.
struct Spread {
  int elements;        // per thread
  int team_size;       // threads per row in one block
  int team_blocks;     // that share a row
  int block_features;  // columns of a block: features where it is alone

  int padded() const { return elements * team_size; }
};

inline int divide_up(int64_t value, int64_t divisor) {
  return static_cast<int>((value + divisor - 1) / divisor);
}

inline int round_up(int value, int multiple) { return divide_up(value, multiple) * multiple; }

// The most threads of a block for each choice of elements, which is what registers allow; 0 where
// no kernel is built.
using ThreadLimits = std::array<int, kElementChoices>;

constexpr int threads_limit(const ThreadLimits& limits, int elements) {
  return limits[elements / kElementStep - 1];
}

// Rows of up to 1,024 features go to one warp or less, which needs no barrier; longer ones to the
// team that wastes the fewest threads, and of those to the smallest; rows that no block can hold,
// to as few blocks as possible.
inline Spread choose_spread(int features, int vec, const ThreadLimits& limits, int max_blocks) {
  for (int blocks = 1; blocks <= max_blocks; blocks *= 2) {
    const int block_features = round_up(divide_up(features, blocks), vec);
    Spread best = {};
    for (int elements = kElementStep; elements <= kElementStep * kElementChoices;
         elements += kElementStep) {
      // Values one by one are the slow path already: two kernels are enough for it.
      if (vec == 1 && elements > 2 * kElementStep) continue;
      const int limit = threads_limit(limits, elements);
      const int threads = divide_up(block_features, elements);
      if (limit != 0 && threads <= kWarpSize) {
        int team_size = 1;
        while (team_size < threads) team_size *= 2;
        return {elements, team_size, blocks, block_features};
      }
      const Spread spread{elements, round_up(threads, kWarpSize), blocks, block_features};
      // Columns::has relies on the second condition, in the last block too.
      const int team_features_but_last = spread.team_size * (elements - kElementStep);
      if (spread.team_size <= limit &&
          features - (blocks - 1) * block_features >= team_features_but_last &&
          (best.elements == 0 || spread.padded() <= best.padded())) {
        best = spread;
      }
    }
    if (best.elements != 0) return best;
  }
  return {};
}

// Bytes at the start of a block's shared memory: the scratch of TeamSum and the ring's barriers.
constexpr int kSharedHead =
    TeamSum::kScratch * sizeof(float) + kMaxStages * kMaxTeamWarps * sizeof(uint64_t);

// The threads of a block: as many teams as `limit` threads allow, but few rows are spread over all
// multiprocessors before blocks grow, and blocks that share a row have one team.
inline int choose_threads(const Spread& spread, int64_t rows, int limit, const Device& device) {
  if (spread.team_blocks > 1) return spread.team_size;
  const int least = std::max(spread.team_size, kWarpSize);
  const int64_t teams = divide_up(rows, device.multiprocessors);
  const int64_t wanted = std::min<int64_t>(teams * spread.team_size, limit);
  return std::max<int64_t>(wanted / least * least, least);
}

struct RingPlan {
  int stages;  // 0: there is no room
  int shared_bytes;
};

// A ring as deep as fits when `blocks` blocks share a multiprocessor, or fewer where there is no
// room for two stages each: one stage hides no latency. `least` is what else its memory must hold.
inline RingPlan plan_ring(int stage_bytes, int least, int blocks, const Device& device) {
  int stages = 0;
  for (; blocks > 0 && stages < 2; --blocks) {
    const int available =
        std::min(device.shared_bytes,
                 device.multiprocessor_shared_bytes / blocks - device.reserved_shared_bytes) -
        kSharedHead;
    stages = available < least ? 0 : std::min(kMaxStages, available / stage_bytes);
  }
  return {stages, kSharedHead + std::max(stages * stage_bytes, least)};
}
