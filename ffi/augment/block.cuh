// A block's shared memory, with the map and the steps of its image, and the statistics of a tile.
#pragma once

#include "augment/staged.cuh"
#include "augment/writing.cuh"

// Map, steps and blur weights of a block's image, and the block's sums, in shared memory.
template <int kChannels>
struct alignas(16) Shared {
  float map[kMapSize];
  float steps[kMaxSteps * kStepSize];
  int operations[kMaxSteps];
  float statistics[kSums];
  float blur[2][kBlurWeights];  // weights along columns, weights along rows
  float sums[kWarps][kSums];
  Box box;
  // Memory of a pass that counts levels, or of one that writes pixels.
  union {
    int counts[3 * 256];
    uint4 stages[kWarps][32 * kChannels];  // pixels of a warp, with 4 bytes for each value
  };
};

template <bool kBlur, int kChannels>
__device__ __forceinline__ void load(const Args& args, int image, Shared<kChannels>* shared) {
  // All loads are issued before the first store, so that their latencies overlap.
  const int i = threadIdx.x, step_values = args.steps * kStepSize;
  const float* rows = args.rows + int64_t{image} * step_values;
  const float place = i < kMapSize ? args.maps[int64_t{image} * kMapSize + i] : 0.0f;
  const float statistic = i < kSums && i < args.statistics_size
                              ? args.statistics[int64_t{image} * args.statistics_size + i]
                              : 0.0f;
  const float first = i < step_values ? rows[i] : 0.0f;
  const float second = i + kThreads < step_values ? rows[i + kThreads] : 0.0f;
  static_assert(kMaxSteps * kStepSize <= 2 * kThreads);
  const auto store_step = [&](int at, float value) {
    if (at >= step_values) return;
    shared->steps[at] = value;
    if (at % kStepSize == 0) shared->operations[at / kStepSize] = static_cast<int>(value);
  };
  if (i < kMapSize) shared->map[i] = place;
  if (i < kSums) shared->statistics[i] = statistic;
  store_step(i, first);
  store_step(i + kThreads, second);
  if constexpr (kBlur) {
    if (args.sharpens) {
      // Sharpening sums 3 x 3 pixels with weights of 1. Its factor is stored after the weights.
      if (threadIdx.x < 6) shared->blur[threadIdx.x / 3][threadIdx.x % 3] = 1.0f;
      if (threadIdx.x == 0) shared->blur[0][3] = args.blurs[image];
      return;
    }
    const int down = 2 * args.reach_y + 1, across = 2 * args.reach_x + 1, i = threadIdx.x;
    const float* weights = args.blurs + int64_t{image} * (down + across);
    if (i < down) shared->blur[0][i] = weights[i];
    if (i >= down && i < down + across) shared->blur[1][i - down] = weights[i];
  }
}

template <int kChannels>
__device__ __forceinline__ Statistics statistics_of(const Args& args, int image,
                                                    const Shared<kChannels>& shared) {
  const float* table = args.statistics + int64_t{image} * args.statistics_size + kSums;
  return {shared.statistics, args.statistics_size > kSums ? table : nullptr};
}

// Applies steps `first` to `last` - 1; with kUntilStatistics it stops before the step that needs
// statistics.
template <bool kFinite, bool kUntilStatistics, typename Where, int kChannels>
__device__ __forceinline__ void run(const Shared<kChannels>& shared, int first, int last,
                                    const Statistics& statistics, const Where& where,
                                    float (&values)[kHeld][kChannels]) {
  for (int step = first; step < last; ++step) {
    const int operation = shared.operations[step];
    if (kUntilStatistics && is_statistical(operation)) return;
    apply<kFinite>(operation, shared.steps + step * kStepSize, statistics, where, values);
  }
}

// Returns the operation of the image's step that needs statistics, or kIdentity if there is none.
template <int kChannels>
__device__ __forceinline__ int statistical(const Args& args, const Shared<kChannels>& shared) {
  for (int step = 0; step < args.steps; ++step) {
    const int operation = shared.operations[step];
    if (operation == kEqualize && args.counts == nullptr) continue;
    if (is_statistical(operation)) return operation;
  }
  return kIdentity;
}

// Statistics of a thread's pixels (sum of gray, extremes of colours or counts of levels), combined
// over the block by `write`. All are zero if no step needs statistics.
template <int kChannels>
class Counted {
  static constexpr int kColours = kChannels == 4 ? 3 : kChannels;

 public:
  __device__ Counted(int operation, Shared<kChannels>* shared)
      : operation_(operation), shared_(shared) {
    if (operation_ == kAutocontrast) {
#pragma unroll
      for (int c = 0; c < 3; ++c) {
        sums_[1 + c] = INFINITY;
        sums_[4 + c] = -INFINITY;
      }
    }
    if (operation_ == kEqualize) {
      for (int i = threadIdx.x; i < 3 * 256; i += kThreads) shared->counts[i] = 0;
      __syncthreads();
    }
  }

  // Adds the values of a thread's pixels that lie inside the image's result.
  __device__ __forceinline__ void add(const Args& args, const Map& map, const Spots& spots,
                                      const float (&values)[kHeld][kChannels]) {
    const float height = fminf(map.result(1), static_cast<float>(args.out_height));
    const float width = fminf(map.result(0), static_cast<float>(args.out_width));
    if (spots.row(kHeld - 1) < height && spots.column(kHeld - 1) < width) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) add(values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (spots.row(i) < height && spots.column(i) < width) add(values[i]);
      }
    }
  }

  // Writes the statistics of all threads of a block.
  __device__ __forceinline__ void write(const Args& args, int image) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if (i > 0 && operation_ != kAutocontrast) {
        if (lane == 0) shared_->sums[warp][i] = 0.0f;
        continue;
      }
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, sums_[i], lanes);
        sums_[i] = combined(i, sums_[i], other);
      }
      if (lane == 0) shared_->sums[warp][i] = sums_[i];
    }
    __syncthreads();
    if (threadIdx.x < kSums) {
      const int i = threadIdx.x;
      float all = shared_->sums[0][i];
      for (int j = 1; j < kWarps; ++j) all = combined(i, all, shared_->sums[j][i]);
      args.sums[int64_t{blockIdx.x} * kSums + i] = all;
    }
    if (operation_ == kEqualize) {
      int* counts = args.counts + int64_t{image} * kColours * 256;
      for (int i = threadIdx.x; i < kColours * 256; i += kThreads) {
        if (shared_->counts[i] != 0) atomicAdd(&counts[i], shared_->counts[i]);
      }
    }
  }

 private:
  __device__ __forceinline__ void add(const float (&values)[kChannels]) {
    if (operation_ == kContrast) sums_[0] += gray(values);
#pragma unroll
    for (int c = 0; c < kColours; ++c) {
      if (operation_ == kAutocontrast) {
        sums_[1 + c] = fminf(sums_[1 + c], values[c]);
        sums_[4 + c] = fmaxf(sums_[4 + c], values[c]);
      }
      if (operation_ == kEqualize) {
        atomicAdd(&shared_->counts[256 * c + static_cast<int>(level_of(values[c]))], 1);
      }
    }
  }

  static __device__ __forceinline__ float combined(int i, float a, float b) {
    return i == 0 ? a + b : i < 4 ? fminf(a, b) : fmaxf(a, b);
  }

  int operation_;
  Shared<kChannels>* shared_;
  float sums_[kSums] = {};
};

// Writes zeros as the statistics of an image that needs none.
__device__ __forceinline__ void write_none(const Args& args) {
  if (threadIdx.x < kSums) args.sums[int64_t{blockIdx.x} * kSums + threadIdx.x] = 0.0f;
}
