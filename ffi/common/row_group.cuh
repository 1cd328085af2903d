// A team: the threads of a block that share a row. A team of up to 32 threads (a power of two) lies
// within a warp and needs no barrier; a larger one consists of whole warps.
#pragma once

#include "ptx.cuh"

constexpr int kWarpSize = 32;
constexpr int kMaxTeamWarps = 16;

struct Team {
  int size;
  int index;  // index of the team in its block
  int rank;   // rank of the thread in its team

  __device__ explicit Team(int team_size)
      : size(team_size), index(threadIdx.x / team_size), rank(threadIdx.x % team_size) {}
};

// Returns the largest number of a warp. The number may be the bits of a float of positive sign,
// which order as the floats do, with NaN above all others.
__device__ __forceinline__ uint32_t largest_of_warp(uint32_t number) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, number);
#else
#pragma unroll
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
    number = max(number, __shfl_xor_sync(0xffffffffu, number, lanes));
  }
  return number;
#endif
}

// Sums values[i] over the lanes whose indices differ only in bits below `size`, a power of two.
template <int kValues>
__device__ __forceinline__ void add_over_lanes(int size, float (&values)[kValues]) {
  const auto add = [&](int offset) {
#pragma unroll
    for (float& value : values) value += __shfl_xor_sync(0xffffffffu, value, offset);
  };
  if (size < kWarpSize) {
#pragma unroll 1
    for (int offset = size / 2; offset > 0; offset /= 2) add(offset);
  } else {
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) add(offset);
  }
}

// Sums the values that the `warps` warps of a team have written to shared memory: `places` is
// [kValues, kMaxTeamWarps], with zeros for warps that the team does not have.
template <int kValues>
__device__ __forceinline__ void add_places(const float* places, int warps,
                                           float (&values)[kValues]) {
#pragma unroll
  for (float& value : values) value = 0.0f;
#pragma unroll
  for (int place = 0; place < kMaxTeamWarps; place += 4) {
    if (place >= warps) break;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float4 four = *reinterpret_cast<const float4*>(places + i * kMaxTeamWarps + place);
      values[i] += (four.x + four.y) + (four.z + four.w);
    }
  }
}

// Sums one or two values at a time over the threads of a team. The order of the additions is fixed,
// so every thread gets the same bits in every run.
class TeamSum {
  // Floats of one sum: two values with a float per warp, for at most kMaxTeamWarps / 2 teams.
  static constexpr int kTurn = 2 * kMaxTeamWarps * kMaxTeamWarps / 2;

 public:
  static constexpr int kScratch = 2 * kTurn;

  // All threads of a block must construct the object, and call `start` before the first sum.
  __device__ TeamSum(const Team& team, float* scratch) : team_(team), scratch_(scratch) {
    if (team.size <= kWarpSize) return;
    for (int i = threadIdx.x; i < kScratch; i += blockDim.x) scratch[i] = 0.0f;
  }

  __device__ void start() const { __syncthreads(); }

  template <int kValues>
  __device__ __forceinline__ void operator()(float (&values)[kValues]) {
    static_assert(kValues <= 2);
    add_over_lanes(team_.size, values);
    // After the sum a lane may overwrite shared memory that other lanes read before it. Shuffles
    // order these accesses in larger teams; in teams of one lane, the warp must synchronise.
    if (team_.size == 1) __syncwarp();
    if (team_.size <= kWarpSize) return;
    // Sums alternate between two buffers, so that one barrier per sum suffices: a warp that reuses
    // a float has passed the barrier of the sum in between, as has every reader of that float.
    float* own = scratch_ + turn_ * kTurn + team_.index * 2 * kMaxTeamWarps;
    turn_ ^= 1;
    if (threadIdx.x % kWarpSize == 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        own[i * kMaxTeamWarps + team_.rank / kWarpSize] = values[i];
      }
    }
    barrier_sync(1 + team_.index, team_.size);
    add_places(own, team_.size / kWarpSize, values);
  }

 private:
  Team team_;
  float* scratch_;
  int turn_ = 0;
};

// Sums over a team that is a cluster of two blocks, each with at most half of kMaxTeamWarps warps.
// A warp stores its sums in both blocks, and an mbarrier per buffer counts the stored bytes.
class PairSum {
  static constexpr int kTurn = 2 * kMaxTeamWarps;

 public:
  __device__ PairSum(const Team& half, float* scratch)
      : half_(half), places_(scratch), barriers_(reinterpret_cast<uint64_t*>(scratch + 2 * kTurn)) {
    for (int i = threadIdx.x; i < 2 * kTurn; i += blockDim.x) scratch[i] = 0.0f;
    if (threadIdx.x == 0) {
      mbarrier_init(barriers_);
      mbarrier_init(barriers_ + 1);
      mbarrier_init_fence();
    }
  }

  __device__ void start() const { cluster_sync(); }

  template <int kValues>
  __device__ __forceinline__ void operator()(float (&values)[kValues]) {
    add_over_lanes(kWarpSize, values);
    const uint32_t warps = half_.size / kWarpSize;
    float* own = places_ + turn_ * kTurn;
    uint64_t* barrier = barriers_ + turn_;
    // The barrier's previous phase ended two sums ago, and this one cannot end before this arrival.
    if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, 2 * warps * kValues * sizeof(float));
    const uint32_t lane = threadIdx.x % kWarpSize;
    if (lane < 2 * kValues) {
      const uint32_t block = lane % 2;
      const float* place =
          own + lane / 2 * kMaxTeamWarps + cluster_rank() * warps + threadIdx.x / kWarpSize;
      cluster_store(cluster_address(place, block), lane < 2 ? values[0] : values[kValues - 1],
                    cluster_address(barrier, block));
    }
    mbarrier_wait(barrier, phase_);
    add_places(own, 2 * warps, values);
    turn_ ^= 1;
    if (turn_ == 0) phase_ ^= 1;
  }

 private:
  Team half_;
  float* places_;
  uint64_t* barriers_;
  int turn_ = 0;
  uint32_t phase_ = 0;
};
