// The operands of a product with quantised weights, and what of it a block and a warp compute.
#pragma once

#include <cstdint>

#include "quantized_epilogue.cuh"
#include "quantized_weights.cuh"

struct LinearArgs {
  const void* x;                           // [rows, features]
  const uint8_t* values[kMaxProducts];     // [columns, row_bytes]
  const float* scale[kMaxProducts];        // [groups, columns], where there are groups
  const int8_t* zero_point[kMaxProducts];  // [groups or 1, columns], or nullptr
  float* parts;  // sums of a part of the features [parts, products, rows, columns], or nullptr
  int features;
  int row_bytes;
  int group;  // features that share a scale; 0 where all of a column do
  int groups;
  int column_warps;  // warps side by side, those of two products alternating
  int sum_warps;     // warps that share the features
  int steps_of_part;
  int stages;
  Float8Code code;
  QuantizedEpilogue epilogue;
};

// What a block and a warp have of the product, whose warps have `warp_columns` columns each.
struct BlockPlace {
  __device__ BlockPlace(const LinearArgs& args, int tile_rows, int warp_columns)
      : lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        sum_warp(warp / args.column_warps),
        products(args.epilogue.products),
        columns(args.epilogue.columns),
        second(warp % args.column_warps % products != 0),
        tile_rows(tile_rows),
        tile_columns(warp_columns * args.column_warps / products),
        block_column(blockIdx.y * tile_columns),
        column_in_tile(warp % args.column_warps / products * warp_columns),
        warp_column(block_column + column_in_tile),
        existing(max(0, min(warp_columns, columns - warp_column))),
        row_start(blockIdx.x * tile_rows),
        rows(min(tile_rows, args.epilogue.rows - row_start)) {}

  // Where the warp's sums of a row and a column of its own lie in shared memory, as [sum warp,
  // product, row, column].
  __device__ __forceinline__ int place_of_sum(int row, int column) const {
    const int matrix = sum_warp * products + (second ? 1 : 0);
    return (matrix * tile_rows + row) * tile_columns + column_in_tile + column;
  }

  int lane, warp, sum_warp;
  int products, columns;
  bool second;  // whether the warp has columns of the second product
  int tile_rows, tile_columns, block_column;
  int column_in_tile, warp_column;
  int existing;  // columns of the warp
  int row_start, rows;
};
