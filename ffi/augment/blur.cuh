// A blur of a region of uint8 pixels in shared memory, along its rows and then along its columns.
#pragma once

#include "augment/staged.cuh"

// Adjacent values of a line per thread, which share most of the pixels that they read.
constexpr int kAcross = 2;

// Blurs along rows: from words [row][columns] to values [row][kTile, channel].
template <int kReach, int kChannels>
__device__ __forceinline__ void blur_rows(const uint32_t* words, const Region& region,
                                          const float* weights, int reach, float* blurred) {
  if constexpr (kReach > 0) reach = kReach;
  float w[kReach > 0 ? 2 * kReach + 1 : 1];
  if constexpr (kReach > 0) {
#pragma unroll
    for (int k = 0; k < 2 * kReach + 1; ++k) w[k] = weights[k];
  }
  const int count = region.columns - 2 * reach;
  constexpr int kGroups = kTile / kAcross;
  for (int i = threadIdx.x; i < region.rows * kGroups; i += kThreads) {
    const int row = i / kGroups, column = i % kGroups * kAcross;
    if (column >= count) continue;
    const uint32_t* from = words + row * region.columns + column;
    float sums[kAcross][kChannels] = {};
#pragma unroll
    for (int k = 0; k < 2 * reach + kAcross; ++k) {
      // A pair of columns with a single one does not need the last pixel.
      if (k == 2 * reach + 1 && column + 1 >= count) break;
      float pixel[kChannels];
      levels_of(from[k], pixel);
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        if (k - j < 0 || k - j > 2 * reach) continue;
        const float weight = kReach > 0 ? w[kReach > 0 ? k - j : 0] : weights[k - j];
#pragma unroll
        for (int c = 0; c < kChannels; ++c) sums[j][c] += weight * pixel[c];
      }
    }
#pragma unroll
    for (int j = 0; j < kAcross; ++j) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        blurred[(row * kTile + column + j) * kChannels + c] = sums[j][c];
      }
    }
  }
}

// Blurs along a column, for adjacent rows from `row` on. Values of rows beyond the region are not
// used.
template <int kReach, int kPixels, int kChannels>
__device__ __forceinline__ void blur_column(const float* blurred, const float* weights, int reach,
                                            int row, int column,
                                            float (&values)[kPixels][kChannels]) {
  if constexpr (kReach > 0) reach = kReach;
#pragma unroll
  for (int k = 0; k < 2 * reach + kPixels; ++k) {
    const float* from = blurred + ((row + k) * kTile + column) * kChannels;
    float pixel[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) pixel[c] = from[c];
#pragma unroll
    for (int j = 0; j < kPixels; ++j) {
      if (k - j < 0 || k - j > 2 * reach) continue;
      const float weight = weights[k - j];
#pragma unroll
      for (int c = 0; c < kChannels; ++c) values[j][c] += weight * pixel[c];
    }
  }
}

// Turns the sum of 3 x 3 pixels into a blend of the middle pixel with their mean, in which the
// middle pixel has weight 5 of 13. The outermost pixels of an image, and opacity, stay as they are.
template <int kChannels>
__device__ __forceinline__ void sharpen(uint32_t word, float factor, bool is_inner,
                                        float (&values)[kChannels]) {
  float middle[kChannels];
  levels_of(word, middle);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    const float mean = (values[c] + 4.0f * middle[c]) * (1.0f / 13.0f);
    const float blend = fminf(fmaxf(factor * middle[c] + (1.0f - factor) * mean, 0.0f), 255.0f);
    values[c] = is_inner && c < 3 ? blend : middle[c];
  }
}

// Calls `f` with the blur's reach as a compile-time constant if it is 1 or 2, else with 0.
template <typename F>
__device__ __forceinline__ void with_reach(int reach, const F& f) {
  switch (reach) {
    case 1:
      return f(std::integral_constant<int, 1>{});
    case 2:
      return f(std::integral_constant<int, 2>{});
    default:
      return f(std::integral_constant<int, 0>{});
  }
}
