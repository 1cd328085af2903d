// A pass over images of any dtype, read directly from global memory.
#pragma once

#include "augment/block.cuh"

// Computes a tile of a result, or with kCounts the statistics of its values before the step that
// needs them.
template <typename T, int kChannels, bool kCounts>
__global__ void __launch_bounds__(kThreads) image_pass_kernel(const __grid_constant__ Args args) {
  __shared__ Shared shared;
  __shared__ uint4 stages[kWarps * 8 * kChannels];  // a warp's pixels, 4 bytes per value
  const Tile tile(args);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  load<false>(args, tile.image, &shared);
  __syncthreads();
  const int operation = kCounts ? statistical(args, shared) : kIdentity;
  if (kCounts && operation == kIdentity) return write_none(args);
  const Map map = {shared.map};
  const Image<T, kChannels> image = {
      static_cast<const T*>(args.x) + int64_t{tile.image} * args.height * args.width * kChannels,
      args.width};
  const Statistics statistics = {args.statistics + int64_t{tile.image} * args.statistics_size,
                                 args.statistics_size};
  Counted<kChannels> counted(operation, &shared);
  for (int line = warp; line < tile.rows; line += kPixels * kWarps) {
    int rows[kPixels], columns[kPixels];
    float values[kPixels][kChannels] = {};
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      rows[i] = tile.row + line + i * kWarps;
      columns[i] = tile.column + lane;
      if (rows[i] < args.out_height && lane < tile.columns) {
        read(args, map, image, rows[i], columns[i], values[i]);
      }
    }
    run<false, kCounts>(shared, 0, args.steps, statistics, rows, columns, values);
    if constexpr (kCounts) {
      counted.add(args, map, rows, columns, values);
    } else {
      write(args, tile.place<kChannels>(args, line, kWarps), values, stages + warp * 8 * kChannels);
    }
  }
  if constexpr (kCounts) counted.write(args, tile.image);
}
