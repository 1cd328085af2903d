// State that the threads of a block share: map, steps and blur of its image, and the statistics of
// its tile.
#pragma once

#include "augment/staged.cuh"
#include "augment/writing.cuh"

constexpr int kBlocks = 3;  // fewest blocks of a pass over bytes that an SM holds
constexpr int kPixels = 4;  // pixels that a thread changes at a time

// Shared memory of a block: map, steps and blur weights of its image, and its sums.
struct Shared {
  float map[kMapSize];
  float steps[kMaxSteps * kStepSize];
  float blur[2][kBlurWeights];  // weights along columns, weights along rows
  float sums[kWarps][kSums];
  int counts[3 * 256];
  Box box;
};

struct Tile {
  int image, row, column;
  int rows, columns;  // rows and columns inside of the result

  __device__ explicit Tile(const Args& args) {
    image = blockIdx.x / args.tiles;
    const int tile = blockIdx.x - image * args.tiles;
    const int down = tile / args.tiles_across;
    row = down * kTile;
    column = (tile - down * args.tiles_across) * kTile;
    rows = min(kTile, args.out_height - row);
    columns = min(kTile, args.out_width - column);
  }

  // Returns the tile's rows from `line` on in steps of `step`, as the place of a warp's pixels.
  template <int kChannels>
  __device__ __forceinline__ Place place(const Args& args, int line, int step) const {
    const int64_t pixel = (int64_t{image} * args.out_height + row + line) * args.out_width + column;
    return {pixel * kChannels, int64_t{step} * args.out_width * kChannels,
            (rows - line + step - 1) / step, columns};
  }
};

template <bool kBlur>
__device__ __forceinline__ void load(const Args& args, int image, Shared* shared) {
  const int step_values = args.steps * kStepSize;
  if (threadIdx.x < kMapSize) {
    shared->map[threadIdx.x] = args.maps[int64_t{image} * kMapSize + threadIdx.x];
  }
  for (int i = threadIdx.x; i < step_values; i += kThreads) {
    shared->steps[i] = args.rows[int64_t{image} * step_values + i];
  }
  if constexpr (kBlur) {
    if (args.sharpens) {
      // Sharpening sums 3 x 3 pixels. The factor stands after the three weights.
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

// Applies the steps from `first` to `last`; with kUntilStatistics it stops before the step that
// needs statistics.
template <bool kFinite, bool kUntilStatistics, int kChannels>
__device__ __forceinline__ void run(const Shared& shared, int first, int last,
                                    const Statistics& statistics, const int (&rows)[kPixels],
                                    const int (&columns)[kPixels],
                                    float (&values)[kPixels][kChannels]) {
  for (int step = first; step < last; ++step) {
    const float* row = shared.steps + step * kStepSize;
    if (kUntilStatistics && is_statistical(row[0])) return;
    apply<kFinite>(row, statistics, rows, columns, values);
  }
}

// Returns the operation of the image's step that needs statistics, or kIdentity.
__device__ __forceinline__ int statistical(const Args& args, const Shared& shared) {
  for (int step = 0; step < args.steps; ++step) {
    const float operation = shared.steps[step * kStepSize];
    if (operation == kEqualize && args.counts == nullptr) continue;
    if (is_statistical(operation)) return static_cast<int>(operation);
  }
  return kIdentity;
}

// Statistics of a thread's values, combined later over the block. All are zero if no step needs
// statistics.
template <int kChannels>
class Counted {
  static constexpr int kColours = kChannels == 4 ? 3 : kChannels;

 public:
  __device__ Counted(int operation, Shared* shared) : operation_(operation), shared_(shared) {
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
  __device__ __forceinline__ void add(const Args& args, const Map& map, const int (&rows)[kPixels],
                                      const int (&columns)[kPixels],
                                      const float (&values)[kPixels][kChannels]) {
    const float height = fminf(map.result(1), static_cast<float>(args.out_height));
    const float width = fminf(map.result(0), static_cast<float>(args.out_width));
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      if (rows[i] < height && columns[i] < width) add(values[i]);
    }
  }

  // Writes the statistics of all threads of a block.
  __device__ __forceinline__ void write(const Args& args, int image) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
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
  Shared* shared_;
  float sums_[kSums] = {};
};

// Writes zeros as the statistics of an image that needs none.
__device__ __forceinline__ void write_none(const Args& args) {
  if (threadIdx.x < kSums) args.sums[int64_t{blockIdx.x} * kSums + threadIdx.x] = 0.0f;
}
