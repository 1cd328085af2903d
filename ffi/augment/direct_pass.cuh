// A pass over images of any dtype, read directly from global memory.
#pragma once

#include "augment/block.cuh"

static_assert(kTile * kTile == kThreads * kHeld);

// Computes a tile of a result, or with kCounts the statistics of its values before the step that
// needs them.
template <typename T, int kChannels, bool kCounts>
__global__ void __launch_bounds__(kThreads) image_pass_kernel(const __grid_constant__ Args args) {
  __shared__ Shared<kChannels> shared;
  const Tile tile(args);
  const int warp = threadIdx.x / 32;
  load<false>(args, tile.image, &shared);
  __syncthreads();
  const int operation = kCounts ? statistical(args, shared) : kIdentity;
  if (kCounts && operation == kIdentity) return write_none(args);
  const Map map = {shared.map};
  const Image<T, kChannels> image = {
      static_cast<const T*>(args.x) + int64_t{tile.image} * args.height * args.width * kChannels,
      args.width};
  const Statistics statistics = statistics_of(args, tile.image, shared);
  Counted<kChannels> counted(operation, &shared);
  const int line = threadIdx.x / kQuads;
  const Spots spots = {tile.row + line, kTile / 2,
                       tile.column + static_cast<int>(threadIdx.x) % kQuads * kPixels};
  float values[kHeld][kChannels] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (spots.row(i) < args.out_height && spots.column(i) < args.out_width) {
      read(args, map, image, spots.row(i), spots.column(i), values[i]);
    }
  }
  run<false, kCounts>(shared, 0, args.steps, statistics, spots, values);
  if constexpr (kCounts) {
    counted.add(args, map, spots, values);
  } else {
    write(args, tile, line, kTile / 2, values, shared.stages[warp]);
  }
  if constexpr (kCounts) counted.write(args, tile.image);
}
