// A team: the threads of a block that share one row. A team of up to 32 threads (a power of two)
// lies within a warp and needs no barrier; a larger one is whole warps.
#pragma once

#include "ptx.cuh"

constexpr int kWarpSize = 32;
constexpr int kMaxTeamWarps = 32;
constexpr int kMaxThreads = kWarpSize * kMaxTeamWarps;  // a block

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
  // The most values at once.
  static constexpr int kCount = 2;
  // A team of two warps or more has a place for each of them, in whole groups.
  static constexpr int kGroup = 16;
  // Floats of shared memory: a block of up to kGroup warps has half as many teams, a larger one has
  // one team.
  static constexpr int kHalf = kCount * kGroup / 2 * kGroup;
  static constexpr int kScratch = 2 * kHalf;

  // All threads of a block call it, and synchronise before the first sum.
  __device__ TeamSum(const Team& team, float* scratch) : team_(team), scratch_(scratch) {
    for (int i = threadIdx.x; i < kScratch; i += blockDim.x) scratch[i] = 0.0f;
  }

  template <int kValues>
  __device__ __forceinline__ void operator()(float (&values)[kValues]) {
    static_assert(kValues <= kCount);
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      if (offset < team_.size) {
#pragma unroll
        for (float& value : values) value += __shfl_xor_sync(0xffffffffu, value, offset);
      }
    }
    if (team_.size <= kWarpSize) return;

    // The halves take turns, so one barrier a sum is enough: a warp that writes a half again has
    // passed the barrier of the sum between, and so has everyone who read that half.
    const int warps = team_.size / kWarpSize;
    const int places = warps <= kGroup ? kGroup : 2 * kGroup;
    float* own = scratch_ + turn_ * kHalf + team_.index * kCount * places;
    turn_ ^= 1;
    if (threadIdx.x % kWarpSize == 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) own[i * places + team_.rank / kWarpSize] = values[i];
    }
    synchronize();
#pragma unroll
    for (float& value : values) value = 0.0f;
    // Places without a warp stay zero.
#pragma unroll 1
    for (int group = 0; group < warps; group += kGroup) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
#pragma unroll
        for (int place = group; place < group + kGroup; place += 4) {
          const float4 four = *reinterpret_cast<const float4*>(own + i * places + place);
          values[i] += (four.x + four.y) + (four.z + four.w);
        }
      }
    }
  }

  // A barrier for the team.
  __device__ __forceinline__ void synchronize() const { barrier_sync(1 + team_.index, team_.size); }

 private:
  Team team_;
  float* scratch_;
  int turn_ = 0;
};
