// A blur of a region of pixel levels (0 to 255) in shared memory, along its rows and then along its
// columns.
#pragma once

#include "augment/staged.cuh"

// Blurs a region along rows; the results are lines of kTile pixels.
template <int kReach, int kChannels>
__device__ __forceinline__ void blur_rows(const float* levels, const Region& region,
                                          const float* weights, int reach, float* blurred) {
  if constexpr (kReach > 0) reach = kReach;
  const int pitch = region.width() * kChannels;
  for (int quad = threadIdx.x; quad < region.rows * kQuads; quad += kThreads) {
    const int row = quad / kQuads, column = quad % kQuads * kPixels;
    if (column + 2 * reach >= region.columns) continue;
    const float* from = levels + row * pitch + column * kChannels;
    float sums[kPixels][kChannels] = {};
    const auto add = [&](const float (&pixel)[kChannels], int k) {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        if (k - i < 0 || k - i > 2 * reach) continue;
        const float weight = weights[k - i];
#pragma unroll
        for (int c = 0; c < kChannels; ++c) sums[i][c] += weight * pixel[c];
      }
    };
    if constexpr (kReach > 0) {
      float line[round_up(kPixels + 2 * kReach, kPixels)][kChannels];
      load_floats(from, line);
#pragma unroll
      for (int k = 0; k < kPixels + 2 * kReach; ++k) add(line[k], k);
    } else {
      // Near the end of a line some pixels are missing; the results there are not used.
      const int count = min(kPixels + 2 * reach, region.width() - column);
      for (int k = 0; k < count; ++k) {
        float pixel[kChannels];
#pragma unroll
        for (int c = 0; c < kChannels; ++c) pixel[c] = from[k * kChannels + c];
        add(pixel, k);
      }
    }
    store_floats(sums, blurred + quad * (kPixels * kChannels));
  }
}

constexpr int kRows = kHeld / kPixels;  // rows that a thread blurs at a time

// Blurs kRows lines from `line` on along columns. Results beyond the region are not used.
template <int kReach, int kChannels>
__device__ __forceinline__ void blur_columns(const float* blurred, int lines, const float* weights,
                                             int reach, int line, int column,
                                             float (&values)[kHeld][kChannels]) {
  if constexpr (kReach > 0) reach = kReach;
#pragma unroll
  for (int k = 0; k < 2 * reach + kRows; ++k) {
    float pixels[kPixels][kChannels];
    load_floats(blurred + (min(line + k, lines - 1) * kTile + column) * kChannels, pixels);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (k - j < 0 || k - j > 2 * reach) continue;
      const float weight = weights[k - j];
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) values[j * kPixels + i][c] += weight * pixels[i][c];
      }
    }
  }
}

// Turns `values`, a sum of 3 x 3 pixels, into a blend of the middle pixel with their mean, in which
// the middle pixel has weight 5 of 13. The outermost pixels of an image, and opacity, stay as they
// are.
template <int kChannels>
__device__ __forceinline__ void sharpen(const float* middle, float factor, bool is_inner,
                                        float (&values)[kChannels]) {
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
