// A team: the threads of one block that share one row. A team of up to 32 threads (a power of two)
// lies within a warp and needs no barrier; a larger one is whole warps.
#pragma once

#include "ptx.cuh"

constexpr int kWarpSize = 32;
constexpr int kMaxTeamWarps = 16;

struct Team {
  int size;
  int index;  // of the team in its block
  int rank;   // of the thread in its team

  __device__ explicit Team(int team_size)
      : size(team_size), index(threadIdx.x / team_size), rank(threadIdx.x % team_size) {}
};

// Sums over a team, several at once. Every thread gets the same bits, from run to run too: the
// order of the additions is fixed.
class TeamSum {
 public:
  // Floats of shared memory for a block of at most kMaxTeamWarps warps.
  static constexpr int kScratch = 2 * 2 * kMaxTeamWarps;

  __device__ TeamSum(const Team& team, float* scratch) : team_(team), scratch_(scratch) {}

  template <int kCount>
  __device__ __forceinline__ void operator()(float (&values)[kCount]) {
    static_assert(kCount <= 2);
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      if (offset < team_.size) {
#pragma unroll
        for (float& value : values) value += __shfl_xor_sync(0xffffffffu, value, offset);
      }
    }
    if (team_.size <= kWarpSize) return;

    // The two halves of the scratch take turns, so one barrier a sum is enough: a warp that writes
    // a half again has passed the barrier of the sum between, and so has everyone who read that
    // half.
    float* half = scratch_ + turn_ * 2 * kMaxTeamWarps;
    turn_ ^= 1;
    const int lane = threadIdx.x % kWarpSize;
    const int warps = team_.size / kWarpSize;
    const int first_warp = team_.index * warps;
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        half[i * kMaxTeamWarps + threadIdx.x / kWarpSize] = values[i];
      }
    }
    barrier_sync(1 + team_.index, team_.size);
    const int warp = lane % kMaxTeamWarps;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = warp < warps ? half[i * kMaxTeamWarps + first_warp + warp] : 0.0f;
    }
#pragma unroll
    for (int offset = kMaxTeamWarps / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (float& value : values) value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
  }

 private:
  Team team_;
  float* scratch_;
  int turn_ = 0;
};
