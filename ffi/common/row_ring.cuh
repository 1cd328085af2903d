// A ring of pipeline stages in shared memory, through which the rows of several matrices are
// loaded. The size of shared memory limits the bytes in flight, not registers or occupancy.
#pragma once

#include "rows.cuh"

constexpr int kMaxStages = 3;  // limit of async_copies_wait, which tells up to 3 groups apart
// Bytes in flight that saturate an SM's share of memory bandwidth; with more, kernels are slower.
constexpr int kBytesInFlight = 64 * 1024;

constexpr int kRingBarriers = kMaxStages * kMaxTeamWarps;

// The ring of one unit of a RowWalk (one or several teams). With bulk copies and rows aligned for
// them, one thread of a unit copies whole rows; otherwise every thread copies its columns.
template <typename T, int kVec, int kVectors, int kMaxStreams, bool kShifted = false>
class RowRing {
  using Columns = ::Columns<kVec, kVectors, kShifted>;

 public:
  static constexpr bool kBulk = kHasBulkCopies && kVec * sizeof(T) == 16;

  // `barriers` are the block's kRingBarriers mbarriers. `sources` has one to kMaxStreams matrices
  // with rows `stride` values apart, then nullptr. `shared` has room for a row for each team, stage
  // and matrix. All threads of the block must synchronise before the first wait.
  __device__ RowRing(uint64_t* barriers, void* shared, const void* const* sources, int stride,
                     int stages, const Team& team, const Columns& column, const RowWalk& walk)
      : stride_(stride),
        stages_(stages),
        team_(team),
        column_(column),
        walk_(walk),
        next_(walk.first) {
#pragma unroll
    for (int stream = 0; stream < kMaxStreams; ++stream) {
      sources_[stream] = sources[stream];
      if (sources[stream] != nullptr) streams_ = stream + 1;
    }
    // A unit's shared memory is contiguous, as [stage, matrix, row].
    slot_values_ = slot_values(walk.height, column.features(), kVec, kShifted);
    slots_ = static_cast<T*>(shared) +
             static_cast<int64_t>(walk.unit) * stages * streams_ * slot_values_;
    first_shift_ = shift_of<kVec, kShifted>(walk.first, column.features());
    barriers_ = barriers + walk.unit * kMaxStages;
    leads_ = team.rank == 0 && walk.line == 0;
    if constexpr (kBulk) {
      if (leads_) {
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage) mbarrier_init(barriers_ + stage);
        mbarrier_init_fence();
      }
    }
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) fetch();
    phase_ = 0;
  }

  // Waits for the oldest stage. Until the next fetch, `read` returns its values.
  __device__ __forceinline__ void wait() {
    if constexpr (kBulk) {
      mbarrier_wait(barriers_ + stage_, phase_);
    } else {
      async_copies_wait(stages_ - 1);
    }
  }

  // Returns a vector of the stage. Columns beyond the last are zeros, which add nothing to a sum.
  // Values that share a vector with a shifted row but belong to adjacent rows are arbitrary.
  __device__ __forceinline__ Vector<T, kVec> read(int stream, int v) const {
    if (!column_.has(v)) return {};
    return load_vector<T, kVec>(line(stream) + column_(v));
  }

  // Starts the copies of the next rows into the oldest stage. All threads of the unit must have
  // read this stage and must have synchronised since.
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
    return slots_ + (stage_ * streams_ + stream) * slot_values_;
  }

  // Returns the address in shared memory of the team's row.
  __device__ __forceinline__ T* line(int stream) const {
    return slot(stream) + first_shift_ + walk_.line * column_.features();
  }

  __device__ __forceinline__ void copy_in() {
    if constexpr (kBulk) {
      if (!leads_) return;
      // If inputs stay in L2, results are evicted from it in longer runs, which makes a norm a
      // little faster. A following kernel that reads the results does not become slower.
      const uint64_t policy = evict_last_policy();
      const int rows = min(walk_.height, walk_.end - next_);
      const uint32_t bytes = round_up(first_shift_ + rows * column_.features(), kVec) * sizeof(T);
      mbarrier_arrive_expect(barriers_ + stage_, streams_ * bytes);
#pragma unroll
      for (int stream = 0; stream < kMaxStreams; ++stream) {
        if (stream == streams_) break;
        bulk_copy(slot(stream), source(stream, next_) - first_shift_, bytes, barriers_ + stage_,
                  policy);
      }
    } else {
      const int row = next_ + walk_.line;
      if (row >= walk_.end) return;
#pragma unroll
      for (int stream = 0; stream < kMaxStreams; ++stream) {
        if (stream == streams_) break;
        T* target = line(stream);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (column_.has(v)) {
            async_copy<sizeof(T) * kVec>(target + column_(v), source(stream, row) + column_(v));
          }
        }
      }
    }
  }

  __device__ __forceinline__ const T* source(int stream, int row) const {
    return static_cast<const T*>(sources_[stream]) + static_cast<int64_t>(row) * stride_;
  }

  T* slots_;
  uint64_t* barriers_;
  const void* sources_[kMaxStreams];
  int streams_ = 1;
  int slot_values_;
  int first_shift_ = 0;
  int stride_;
  int stages_;
  Team team_;
  Columns column_;
  RowWalk walk_;
  int next_;
  bool leads_;
  int stage_ = 0;
  uint32_t phase_ = 0;
};
