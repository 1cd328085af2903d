// A team: the threads that share one row. A team of up to 32 threads (a power of two) lies within a
// warp and needs no barrier; a larger one is whole warps of one block, or (sm_90 and later) the
// whole blocks of a cluster.
#pragma once

#include "ptx.cuh"

constexpr int kWarpSize = 32;
constexpr int kMaxTeamWarps = 16;  // in one block
constexpr int kMaxTeamBlocks = 8;  // what every GPU with clusters can have

struct Team {
  int size;    // threads of this block
  int index;   // of the team in its block
  int rank;    // of the thread in its block's part of the team
  int blocks;  // that share the row
  int block;   // which of them this is

  __device__ Team(int team_size, int team_blocks)
      : size(team_size),
        index(threadIdx.x / team_size),
        rank(threadIdx.x % team_size),
        blocks(team_blocks),
        block(blockIdx.x % team_blocks) {}

  // One thread of the team.
  __device__ __forceinline__ bool leads() const { return rank == 0 && block == 0; }

  // A barrier for all threads of the team's blocks.
  __device__ __forceinline__ void synchronize_blocks() const {
    if (blocks == 1) {
      __syncthreads();
    } else {
      cluster_sync();
    }
  }
};

// Sums over a team, several at once. Every thread gets the same bits, from run to run too: the
// order of the additions is fixed.
class TeamSum {
 public:
  // The most values at once.
  static constexpr int kCount = 2;
  // Floats of shared memory, for a block of at most kMaxTeamWarps warps.
  static constexpr int kPartials = kMaxTeamWarps * kMaxTeamBlocks;
  static constexpr int kScratch = 2 * kCount * kPartials;

  // All threads of all blocks of the team call it, and synchronise before the first sum.
  __device__ TeamSum(const Team& team, float* scratch)
      : team_(team), warps_(team.size / kWarpSize), scratch_(scratch) {
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

    // The two halves of the scratch take turns, so one barrier a sum is enough: a warp that writes
    // a half again has passed the barrier of the sum between, and so has everyone who read that
    // half.
    float* half = scratch_ + turn_ * kCount * kPartials;
    turn_ ^= 1;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = team_.rank / kWarpSize;
    // A team's partials fill whole quadruples; the zeros at their end are never written.
    float* own = half + team_.index * ((warps_ + 3) / 4 * 4);
    const int partials = team_.blocks * warps_;
    if (team_.blocks == 1) {
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) own[i * kPartials + warp] = values[i];
      }
      barrier_sync(1 + team_.index, team_.size);
    } else {
      if (lane < team_.blocks) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          cluster_store(own + i * kPartials + team_.block * warps_ + warp, lane, values[i]);
        }
      }
      cluster_sync();
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      float sum = 0.0f;
#pragma unroll 1
      for (int part = 0; part < partials; part += 4) {
        const float4 four = *reinterpret_cast<const float4*>(own + i * kPartials + part);
        sum += (four.x + four.y) + (four.z + four.w);
      }
      values[i] = sum;
    }
  }

 private:
  Team team_;
  int warps_;
  float* scratch_;
  int turn_ = 0;
};
