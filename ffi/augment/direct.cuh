// Reads a result's values from an image in global memory, with any map and interpolation.
#pragma once

#include "augment/pass.cuh"

template <int kChannels>
__device__ __forceinline__ void fill_with(const Args& args, float share,
                                          float (&values)[kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) values[c] += share * args.fill[c];
}

// Interpolates at a position of the image, by an interpolation kernel of any width.
template <typename T, int kChannels>
__device__ __forceinline__ void read_around(const Args& args, const Map& map,
                                            const Image<T, kChannels>& image, float x, float y,
                                            float (&values)[kChannels]) {
  const Axis across(args, map, 0, x), down(args, map, 1, y);
  const int left = static_cast<int>(ceilf(across.place - across.reach));
  const int right = static_cast<int>(floorf(across.place + across.reach));
  const int top = static_cast<int>(ceilf(down.place - down.reach));
  const int bottom = static_cast<int>(floorf(down.place + down.reach));
  float total_x = 0.0f, total_y = 0.0f, covered_x = 0.0f, covered_y = 0.0f;
  for (int column = left; column <= right; ++column) {
    covered_x += across.seen(static_cast<float>(column), &total_x);
  }
  for (int row = top; row <= bottom; ++row) {
    const float weight_y = down.seen(static_cast<float>(row), &total_y);
    covered_y += weight_y;
    if (weight_y == 0.0f) continue;
    for (int column = left; column <= right; ++column) {
      float ignored;
      const float weight = weight_y * across.seen(static_cast<float>(column), &ignored);
      if (weight != 0.0f) image.add(row, column, weight, values);
    }
  }
  const float total = total_x * total_y;
  const float inverse = total == 0.0f ? 1.0f : 1.0f / total;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) values[c] *= inverse;
  fill_with(args, 1.0f - covered_x * covered_y * inverse, values);
}

// Reads the value of a pixel of the result into `values`, which must be 0 before.
template <typename T, int kChannels>
__device__ __forceinline__ void read(const Args& args, const Map& map,
                                     const Image<T, kChannels>& image, int row, int column,
                                     float (&values)[kChannels]) {
  if (!args.reads) return image.add(row, column, 1.0f, values);
  float x, y;
  map.move(row, column, &x, &y);
  if (args.interpolation == kNearest) {
    x = floorf(x + 0.5f);
    y = floorf(y + 0.5f);
    const bool seen = x >= 0.0f && x < map.source(0) && y >= 0.0f && y < map.source(1);
    const bool shown = args.drops || (x >= map.first(0) && x <= map.last(0) && y >= map.first(1) &&
                                      y <= map.last(1));
    if (!seen || !shown) return fill_with(args, 1.0f, values);
    return image.add(static_cast<int>(y), static_cast<int>(x), 1.0f, values);
  }
  if (args.interpolation == kBilinear && map.radius(0, args.widest) == 1.0f &&
      map.radius(1, args.widest) == 1.0f) {
    // Four pixels are enough for bilinear interpolation if all lie in the image and the map's
    // window.
    const float left = floorf(x), top = floorf(y);
    if (left >= fmaxf(map.first(0), 0.0f) && top >= fmaxf(map.first(1), 0.0f) &&
        left + 1.0f <= fminf(map.last(0), map.source(0) - 1.0f) &&
        top + 1.0f <= fminf(map.last(1), map.source(1) - 1.0f)) {
      const float right_share = x - left, lower_share = y - top;
      const int column_of = static_cast<int>(left), row_of = static_cast<int>(top);
      const float upper = 1.0f - lower_share, first = 1.0f - right_share;
      image.add(row_of, column_of, upper * first, values);
      image.add(row_of, column_of + 1, upper * right_share, values);
      image.add(row_of + 1, column_of, lower_share * first, values);
      image.add(row_of + 1, column_of + 1, lower_share * right_share, values);
      return;
    }
  }
  read_around(args, map, image, x, y, values);
}
