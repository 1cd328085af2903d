// A pass over uint8 images, optionally with a blur and steps after it. A block copies the pixels
// that its tile depends on into shared memory, if they fit.
#pragma once

#include "augment/block.cuh"
#include "augment/blur.cuh"

// Reads pixels of a thread from global memory. That is rare; inlined, it would raise the registers
// of every pass.
template <int kChannels>
__device__ __noinline__ void read_directly(const Args& args, const float* map_values, int image,
                                           int row, int4 columns, float* values) {
  const Image<uint8_t, kChannels> pixels = {
      static_cast<const uint8_t*>(args.x) + int64_t{image} * args.height * args.width * kChannels,
      args.width};
  for (int i = 0; i < kPixels; ++i) {
    float value[kChannels] = {};
    const int column = i == 0 ? columns.x : i == 1 ? columns.y : i == 2 ? columns.z : columns.w;
    read(args, Map{map_values}, pixels, row, column, value);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) values[i * kChannels + c] = value[c];
  }
}

// Weights of an upright reading (without rotation or shear), in shared memory. All threads must
// synchronise after `set`.
struct Tables {
  Table across, down;

  __device__ Tables(const Args& args, const Region& region, uint32_t* words)
      : across{region.width(), words},
        down{region.rows, words + (2 + args.taps) * region.width()} {}

  template <bool kBlur>
  __device__ __forceinline__ void set(const Args& args, const Map& map, const Box& box,
                                      const Region& region) const {
    for (int i = threadIdx.x; i < across.entries + down.entries; i += kThreads) {
      const bool is_column = i < across.entries;
      const int place = is_column ? i : i - across.entries;
      float x, y;
      map.move(is_column ? 0 : region.row<kBlur>(place, map),
               is_column ? region.column<kBlur>(place, map) : 0, &x, &y);
      const Axis axis(args, map, is_column ? 0 : 1, is_column ? x : y);
      const Table table = {is_column ? across.entries : down.entries,
                           is_column ? across.words : down.words};
      table.set(axis, is_column ? box.taps_x : box.taps_y, is_column ? 1.0f : kScale, place);
    }
  }
};

// Whether a kernel compiled for `only` contains the code of `reading`; one compiled for kDirect
// contains the code of all.
__host__ __device__ constexpr bool reads_by(Reading reading, Reading only) {
  return only == Reading::kDirect || reading == only;
}

// Computes the positions in the image of adjacent pixels of the result.
template <bool kBlur>
__device__ __forceinline__ void places(const Map& map, const Within<kBlur>& spot,
                                       float (&x)[kPixels], float (&y)[kPixels]) {
  if (map.is_affine()) {
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      Map::move_by(map.values, spot.row(), spot.column(i), &x[i], &y[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      const float2 place = Map::move_in_perspective(map.values, spot.row(), spot.column(i));
      x[i] = place.x;
      y[i] = place.y;
    }
  }
}

// Computes kPixels adjacent pixels of the result from the image's pixels; the values are from 0 to
// 1.
template <Reading kOnly, bool kBlur, int kChannels>
__device__ __forceinline__ void read_values(const Args& args, const Map& map, const Box& box,
                                            int image, const Tables& tables, uint32_t* words,
                                            const float* middle, const Within<kBlur>& spot,
                                            float (&values)[kPixels][kChannels]) {
  if (reads_by(Reading::kBetweenFour, kOnly) && box.reading == Reading::kBetweenFour) {
    float x[kPixels], y[kPixels];
    places(map, spot, x, y);
    if (args.is_precise) {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) Between(box, words, x[i], y[i]).precisely(values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) Between(box, words, x[i], y[i]).quickly(values[i]);
    }
  } else if (reads_by(Reading::kUpright, kOnly) && box.reading == Reading::kUpright) {
    read_upright(args, box, tables.across, tables.down, middle, spot.line, spot.place, values);
  } else if (reads_by(Reading::kNearest, kOnly) && box.reading == Reading::kNearest) {
    float x[kPixels], y[kPixels];
    places(map, spot, x, y);
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      const int row = static_cast<int>(floorf(y[i] + 0.5f)) - box.top;
      const int column = static_cast<int>(floorf(x[i] + 0.5f)) - box.left;
      values_of(words[row * box.pitch + column], values[i]);
    }
  } else if (kBlur && reads_by(Reading::kInPlace, kOnly) && box.reading == Reading::kInPlace) {
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      values_of(words[(spot.row() - box.top) * box.pitch + spot.column(i) - box.left], values[i]);
    }
  } else if (!kBlur && reads_by(Reading::kInPlace, kOnly) && box.reading == Reading::kInPlace) {
    // Pixels beyond the result are not stored, so their positions are clipped to the image.
    const int row = min(spot.row(), args.height - 1);
    const int column = min(spot.column(0), args.has_words ? args.width - kPixels : args.width - 1);
    const int64_t pixel = (int64_t{image} * args.height + row) * args.width + column;
    const uint8_t* from = static_cast<const uint8_t*>(args.x) + pixel * kChannels;
    Quad<kChannels> quad;
    if (args.has_words) {
      quad.template load<true>(args, from);
    } else {
      quad.template load<false>(args, from);
    }
    const uint4 pixels = quad.pixels();
    values_of(pixels.x, values[0]);
    values_of(pixels.y, values[1]);
    values_of(pixels.z, values[2]);
    values_of(pixels.w, values[3]);
  } else {
    // The box's shared memory holds no pixels in this case, so the values can be staged there;
    // set_room has made it large enough.
    float* read = reinterpret_cast<float*>(words) + threadIdx.x * (kPixels * kChannels);
    read_directly<kChannels>(
        args, map.values, image, spot.row(),
        make_int4(spot.column(0), spot.column(1), spot.column(2), spot.column(3)), read);
    load_floats(read, values);
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) values[i][c] *= kScale;
    }
  }
}

// Blurs or sharpens a region of levels, applies the remaining steps, and writes the tile.
template <int kChannels>
__device__ __forceinline__ void blur(const Args& args, const Tile& tile, const Region& region,
                                     const Statistics& statistics, const float* levels,
                                     float* middle, Shared<kChannels>& shared) {
  const int warp = threadIdx.x / 32;
  const Map map = {shared.map};
  const bool is_followed = args.steps_before < args.steps;
  with_reach(args.reach_x, [&](auto reach) {
    blur_rows<reach.value, kChannels>(levels, region, shared.blur[1], args.reach_x, middle);
  });
  __syncthreads();
#pragma unroll 1
  for (int pair = threadIdx.x; pair < kTile / kRows * kQuads; pair += kThreads) {
    const int line = pair / kQuads * kRows, place = pair % kQuads * kPixels;
    float values[kHeld][kChannels] = {};
    with_reach(args.reach_y, [&](auto reach) {
      blur_columns<reach.value>(middle, region.rows, shared.blur[0], args.reach_y, line, place,
                                values);
    });
    const Spots spots = {tile.row + line, 1, tile.column + place};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int row = spots.row(i), column = spots.column(i);
      if (args.sharpens && row < args.out_height && column < args.out_width) {
        const bool is_inner =
            row > 0 && column > 0 && row < map.result(1) - 1.0f && column < map.result(0) - 1.0f;
        const int at = (line + i / kPixels + 1) * region.width() + place + i % kPixels + 1;
        sharpen(levels + at * kChannels, shared.blur[0][3], is_inner, values[i]);
      }
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        // Steps after the blur read bytes, so values are rounded here.
        if (is_followed) values[i][c] = rintf(values[i][c]);
        values[i][c] *= kScale;
      }
    }
    run<true, false>(shared, args.steps_before, args.steps, statistics, spots, values);
    write(args, tile, line, 1, values, shared.stages[warp]);
  }
}

// Positions in the result of two quads of a region.
struct WithinTwo {
  Within<true> quads[kHeld / kPixels];

  __device__ __forceinline__ int row(int i) const { return quads[i / kPixels].row(); }
  __device__ __forceinline__ int column(int i) const {
    return quads[i / kPixels].column(i % kPixels);
  }
};

// Returns quad number `quad` (four adjacent pixels) of a thread's values.
template <int kChannels>
__device__ __forceinline__ float (&quad_of(float (&values)[kHeld][kChannels], int quad))
    [kPixels][kChannels] {
      return reinterpret_cast<float (&)[kPixels][kChannels]>(values[quad * kPixels]);
    }

// Computes what image_pass_kernel does, for uint8 images; kBlur adds a blur after the first steps.
template <int kChannels, Reading kOnly, bool kCounts, bool kBlur>
__global__ void __launch_bounds__(kThreads, kBlur ? kBlurBlocks : kBlocks)
    byte_pass_kernel(const __grid_constant__ Args args) {
  extern __shared__ uint4 room[];
  Shared<kChannels>& shared = *reinterpret_cast<Shared<kChannels>*>(room);
  const Tile tile(args);
  const int warp = threadIdx.x / 32;
  Region region = {tile.row, tile.column, kTile, kTile, args.out_height, args.out_width};
  if constexpr (kBlur) {
    region.first_row -= args.reach_y;
    region.first_column -= args.reach_x;
    region.rows = tile.rows + 2 * args.reach_y;
    region.columns = kTile + 2 * args.reach_x;
  }
  uint32_t* words = reinterpret_cast<uint32_t*>(&shared + 1);
  float* middle = reinterpret_cast<float*>(words + args.room.box);
  float* levels = middle + args.room.middle;
  const Tables tables(args, region, reinterpret_cast<uint32_t*>(levels) + args.room.region);
  load<kBlur>(args, tile.image, &shared);
  const Map map = {shared.map};
  if (warp == 0) {
    __syncwarp();  // makes the map, which this warp has stored, visible to its lanes
    Box box = box_of<kBlur, kChannels>(args, map, region);
    set_seen<kChannels>(args, map, tile.image, &box);
    if (threadIdx.x == 0) shared.box = box;
  }
  __syncthreads();
  const int operation = kCounts ? statistical(args, shared) : kIdentity;
  if (kCounts && operation == kIdentity) return write_none(args);
  const Box box = shared.box;
  if (box.reading != Reading::kDirect && (kBlur || box.reading != Reading::kInPlace)) {
    if (args.has_words && box.is_whole) {
      stage<true, true, kChannels>(args, box, words);
    } else if (args.has_words) {
      stage<true, false, kChannels>(args, box, words);
    } else {
      stage<false, false, kChannels>(args, box, words);
    }
    if (reads_by(Reading::kUpright, kOnly) && box.reading == Reading::kUpright) {
      tables.set<kBlur>(args, map, box, region);
      __syncthreads();
      filter_rows<kChannels>(box, words, tables.across, middle);
    }
    __syncthreads();
  }
  const Statistics statistics = statistics_of(args, tile.image, shared);
  Counted<kChannels> counted(operation, &shared);
  const auto read = [&](const Within<kBlur>& spot, float (&values)[kPixels][kChannels]) {
    read_values<kOnly, kBlur>(args, map, box, tile.image, tables, words, middle, spot, values);
  };
  if constexpr (kBlur) {
    const int count = region.rows * args.region_quads.divisor();
#pragma unroll 1
    for (int first = threadIdx.x; first < count; first += 2 * kThreads) {
      const auto spot_of = [&](int number) {
        const int line = args.region_quads.quotient(number);
        return Within<true>{region, map, line,
                            (number - line * args.region_quads.divisor()) * kPixels};
      };
      const int second = min(first + kThreads, count - 1);
      const WithinTwo spots = {spot_of(first), spot_of(second)};
      float values[kHeld][kChannels] = {};
      read(spots.quads[0], quad_of(values, 0));
      read(spots.quads[1], quad_of(values, 1));
      run<true, false>(shared, 0, args.steps_before, statistics, spots, values);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) values[i][c] = biased_level(values[i][c]) - kBias;
      }
      store_floats(quad_of(values, 0), levels + first * (kPixels * kChannels));
      store_floats(quad_of(values, 1), levels + second * (kPixels * kChannels));
    }
    __syncthreads();
    blur(args, tile, region, statistics, levels, middle, shared);
  } else {
    const int line = threadIdx.x / kQuads, place = threadIdx.x % kQuads * kPixels;
    const Spots spots = {tile.row + line, kTile / 2, tile.column + place};
    float values[kHeld][kChannels] = {};
    read(Within<false>{region, map, line, place}, quad_of(values, 0));
    read(Within<false>{region, map, line + kTile / 2, place}, quad_of(values, 1));
    run<true, kCounts>(shared, 0, args.steps, statistics, spots, values);
    if constexpr (kCounts) {
      counted.add(args, map, spots, values);
    } else {
      write(args, tile, line, kTile / 2, values, shared.stages[warp]);
    }
  }
  if constexpr (kCounts) counted.write(args, tile.image);
}
