// A pass over uint8 images, perhaps with a blur and steps after it. A block copies the pixels that
// its tile depends on into shared memory, if they fit.
#pragma once

#include "augment/block.cuh"
#include "augment/blur.cuh"

// Reads a value from global memory. The function is not inlined, because it is rarely called and
// would take registers.
template <int kChannels>
__device__ __noinline__ float4 read_directly(const Args& args, const float* map_values, int image,
                                             int row, int column) {
  const Image<uint8_t, kChannels> pixels = {
      static_cast<const uint8_t*>(args.x) + int64_t{image} * args.height * args.width * kChannels,
      args.width};
  float values[kChannels] = {};
  read(args, Map{map_values}, pixels, row, column, values);
  float4 all = {};
  all.x = values[0];
  if constexpr (kChannels > 1) {
    all.y = values[1];
    all.z = values[2];
  }
  if constexpr (kChannels > 3) all.w = values[3];
  return all;
}

// Pixels of a region, divided among the threads; a thread has kPixels at a time.
template <bool kBlur>
class Pixels {
 public:
  __device__ Pixels(const Region& region, const Map& map)
      : region_(region),
        by_columns_(kBlur ? region.columns : kTile),
        height_(kBlur ? static_cast<int>(map.result(1)) : 0),
        width_(kBlur ? static_cast<int>(map.result(0)) : 0) {}

  // Computes the position of the thread's i-th pixel, counted from pixel `start` of the region:
  // line and place in the region, row and column in the result. Returns false beyond the region.
  __device__ __forceinline__ bool place(int start, int i, int* line, int* place, int* row,
                                        int* column) const {
    const int number = start + i * kThreads + static_cast<int>(threadIdx.x);
    *line = kBlur ? by_columns_.quotient(number) : number / kTile;
    *place = kBlur ? number - *line * region_.columns : number % kTile;
    *row = kBlur ? region_.row(*line, height_) : region_.first_row + *line;
    *column = kBlur ? region_.column(*place, width_) : region_.first_column + *place;
    return *line < region_.rows && *place < region_.columns;
  }

  // Returns the number of pixels that the threads of a block cover together.
  __device__ __forceinline__ int count() const {
    return region_.rows * (kBlur ? region_.columns : kTile);
  }

 private:
  const Region& region_;
  Divider by_columns_;
  int height_, width_;
};

// Weights of an upright reading, in shared memory. All threads must synchronise after `set`.
struct Tables {
  Table across, down;

  __device__ Tables(const Args& args, const Region& region, uint32_t* words)
      : across{region.columns, words},
        down{region.rows, words + (2 + args.taps) * region.columns} {}

  template <bool kBlur>
  __device__ __forceinline__ void set(const Args& args, const Map& map, const Box& box,
                                      const Region& region) const {
    for (int i = threadIdx.x; i < region.columns + region.rows; i += kThreads) {
      const bool is_column = i < region.columns;
      const int place = is_column ? i : i - region.columns;
      int u = region.first_column + place, v = region.first_row + place;
      if (kBlur) {
        u = region.column(place, static_cast<int>(map.result(0)));
        v = region.row(place, static_cast<int>(map.result(1)));
      }
      float x, y;
      map.move(is_column ? 0 : v, is_column ? u : 0, &x, &y);
      const Axis axis(args, map, is_column ? 0 : 1, is_column ? x : y);
      (is_column ? across : down).set(axis, is_column ? box.taps_x : box.taps_y, place);
    }
  }
};

// Whether a kernel compiled for `only` contains the code of `reading`; kDirect contains all of
// them.
__host__ __device__ constexpr bool reads_by(Reading reading, Reading only) {
  return only == Reading::kDirect || reading == only;
}

// Reads kPixels pixels of a thread, as values from 0 to 255.
template <Reading kOnly, bool kBlur, int kChannels>
__device__ __forceinline__ void read_levels(const Args& args, const Shared& shared, int image,
                                            const Pixels<kBlur>& pixels, const Tables& tables,
                                            const uint32_t* words, const float* middle, int start,
                                            int (&rows)[kPixels], int (&columns)[kPixels],
                                            float (&values)[kPixels][kChannels]) {
  const Map map = {shared.map};
  const Box& box = shared.box;
  const auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      int line, place;
      if (pixels.place(start, i, &line, &place, &rows[i], &columns[i])) f(i, line, place);
    }
  };
  if (reads_by(Reading::kBetweenFour, kOnly) && box.reading == Reading::kBetweenFour) {
    each([&](int i, int, int) {
      float x, y;
      map.move(rows[i], columns[i], &x, &y);
      read_between(box, words, x, y, values[i]);
    });
  } else if (reads_by(Reading::kUpright, kOnly) && box.reading == Reading::kUpright) {
    each([&](int i, int line, int place) {
      read_upright(args, box, tables.across, tables.down, middle, line, place, values[i]);
    });
  } else if (reads_by(Reading::kNearest, kOnly) && box.reading == Reading::kNearest) {
    each([&](int i, int, int) {
      float x, y;
      map.move(rows[i], columns[i], &x, &y);
      const int row = static_cast<int>(floorf(y + 0.5f)) - box.top;
      const int column = static_cast<int>(floorf(x + 0.5f)) - box.left;
      levels_of(words[row * box.pitch + column], values[i]);
    });
  } else if (reads_by(Reading::kInPlace, kOnly) && box.reading == Reading::kInPlace) {
    each([&](int i, int, int) {
      levels_of(words[(rows[i] - box.top) * box.pitch + columns[i] - box.left], values[i]);
    });
  } else {
    each([&](int i, int, int) {
      const float4 all = read_directly<kChannels>(args, shared.map, image, rows[i], columns[i]);
      values[i][0] = all.x;
      if constexpr (kChannels > 1) {
        values[i][1] = all.y;
        values[i][2] = all.z;
      }
      if constexpr (kChannels > 3) values[i][3] = all.w;
    });
  }
}

// Rounds a pixel's values of 0 to 1 to bytes, packed in a word.
template <int kChannels>
__device__ __forceinline__ uint32_t packed(const float (&values)[kChannels]) {
  uint32_t word = 0;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    // Adding kBias rounds to the nearest level, halves to even; the sum's last bits hold the level.
    const float level = __fmul_rn(__saturatef(values[c]), 255.0f) + kBias;
    word |= (__float_as_uint(level) & 0xffu) << (8 * c);
  }
  return word;
}

// Part of a block's shared memory whose size does not depend on the image. The box and its filtered
// values follow.
template <int kChannels>
struct alignas(16) Fixed {
  Shared shared;
  uint4 stages[kWarps * 8 * kChannels];  // a warp's pixels, 4 bytes per value
};

// Blurs or sharpens a region of pixels, applies the steps after the blur, and writes the tile.
template <int kChannels>
__device__ __forceinline__ void blur(const Args& args, const Tile& tile, const Region& region,
                                     const Fixed<kChannels>& fixed, const Statistics& statistics,
                                     const uint32_t* words, float* middle, uint4* stage) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Shared& shared = fixed.shared;
  const Map map = {shared.map};
  const bool is_followed = args.steps_before < args.steps;
  with_reach(args.reach_x, [&](auto reach) {
    blur_rows<reach.value, kChannels>(words, region, shared.blur[1], args.reach_x, middle);
  });
  __syncthreads();
  for (int line = warp * kPixels; line < tile.rows; line += kWarps * kPixels) {
    int rows[kPixels], columns[kPixels];
    float values[kPixels][kChannels] = {};
    with_reach(args.reach_y, [&](auto reach) {
      blur_column<reach.value>(middle, shared.blur[0], args.reach_y, line, lane, values);
    });
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      rows[i] = tile.row + line + i;
      columns[i] = tile.column + lane;
      if (args.sharpens && lane < tile.columns && line + i < tile.rows) {
        const bool is_inner = rows[i] > 0 && columns[i] > 0 && rows[i] < map.result(1) - 1.0f &&
                              columns[i] < map.result(0) - 1.0f;
        sharpen(words[(line + i + 1) * region.columns + lane + 1], shared.blur[0][3], is_inner,
                values[i]);
      }
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        // Steps after the blur read bytes, so values are rounded here.
        if (is_followed) values[i][c] = rintf(values[i][c]);
        values[i][c] *= 1.0f / 255.0f;
      }
    }
    run<true, false>(shared, args.steps_before, args.steps, statistics, rows, columns, values);
    write(args, tile.place<kChannels>(args, line, 1), values, stage);
  }
}

// The kernel of image_pass_kernel for uint8 images; kBlur adds a blur after the first steps.
template <int kChannels, Reading kOnly, bool kCounts, bool kBlur>
__global__ void __launch_bounds__(kThreads, kBlocks)
    byte_pass_kernel(const __grid_constant__ Args args) {
  extern __shared__ uint4 room[];
  Fixed<kChannels>& fixed = *reinterpret_cast<Fixed<kChannels>*>(room);
  Shared& shared = fixed.shared;
  const Tile tile(args);
  const int warp = threadIdx.x / 32;
  const int reach_x = kBlur ? args.reach_x : 0, reach_y = kBlur ? args.reach_y : 0;
  const Region region = {tile.row - reach_y,         tile.column - reach_x, tile.rows + 2 * reach_y,
                         tile.columns + 2 * reach_x, args.out_height,       args.out_width};
  uint32_t* words = reinterpret_cast<uint32_t*>(&fixed + 1);
  float* middle = reinterpret_cast<float*>(words + args.room.box);
  uint32_t* blurry = reinterpret_cast<uint32_t*>(middle) + args.room.middle;
  const Tables tables(args, region, blurry + args.room.region);
  uint4* stage_of_warp = fixed.stages + warp * 8 * kChannels;
  load<kBlur>(args, tile.image, &shared);
  __syncthreads();
  const int operation = kCounts ? statistical(args, shared) : kIdentity;
  if (kCounts && operation == kIdentity) return write_none(args);
  const Map map = {shared.map};
  if (warp == 0) {
    const Box box = box_of<kChannels>(args, map, region);
    if (threadIdx.x == 0) shared.box = box;
  }
  __syncthreads();
  const Box& box = shared.box;
  if (box.reading != Reading::kDirect) {
    const uint8_t* image = static_cast<const uint8_t*>(args.x) +
                           int64_t{tile.image} * args.height * args.width * kChannels;
    stage<kChannels>(args, map, box, image, words);
    if (reads_by(Reading::kUpright, kOnly) && box.reading == Reading::kUpright) {
      tables.set<kBlur>(args, map, box, region);
      __syncthreads();
      filter_rows<kChannels>(box, words, tables.across, middle);
    }
    __syncthreads();
  }
  const Statistics statistics = {args.statistics + int64_t{tile.image} * args.statistics_size,
                                 args.statistics_size};
  const Pixels<kBlur> pixels(region, map);
  Counted<kChannels> counted(operation, &shared);
  for (int start = 0; start < pixels.count(); start += kPixels * kThreads) {
    int rows[kPixels], columns[kPixels];
    float values[kPixels][kChannels] = {};
    read_levels<kOnly>(args, shared, tile.image, pixels, tables, words, middle, start, rows,
                       columns, values);
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) values[i][c] *= 1.0f / 255.0f;
    }
    run<true, kCounts>(shared, 0, args.steps_before, statistics, rows, columns, values);
    if constexpr (kCounts) {
      counted.add(args, map, rows, columns, values);
    } else if constexpr (kBlur) {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        const int number = start + i * kThreads + static_cast<int>(threadIdx.x);
        if (number < pixels.count()) blurry[number] = packed(values[i]);
      }
    } else {
      write(args, tile.place<kChannels>(args, start / kTile + warp, kWarps), values, stage_of_warp);
    }
  }
  if constexpr (kCounts) counted.write(args, tile.image);
  if constexpr (kBlur) {
    __syncthreads();
    blur(args, tile, region, fixed, statistics, blurry, middle, stage_of_warp);
  }
}
