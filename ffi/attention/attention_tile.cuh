// Tiles of attention in shared memory, [rows, kHead] of T, and the products of a warp with them.
//
// A row of a tile consists of chunks of 16 bytes, and chunk c of row r is stored as chunk c ^ (r %
// 8). In this way the 8 rows that ldmatrix reads at a time are in different banks, and so are rows
// that are written. Columns beyond the real head size are zero.
//
// Float32 values are multiplied as tf32 and rounded to it first, since the instructions would
// truncate them: in shared memory if the CTA owns the tile and reads it many times, otherwise in
// the operand's registers, because shared memory is busier than the units that round.
#pragma once

#include "common/mma.cuh"

constexpr int kLanes = 32;

template <typename T>
constexpr bool kIsTf32 = std::is_same_v<T, float>;

template <typename T, int kHead>
struct Tile {
  static constexpr int kStride = static_cast<int>(sizeof(T)) * kHead;
  static_assert(kStride % 128 == 0, "a row of a tile must be a multiple of 128 bytes");
  static constexpr int kChunkValues = 16 / sizeof(T);
  static constexpr int kChunks = kHead / kChunkValues;
  static __host__ __device__ constexpr int bytes(int rows) { return rows * kStride; }

  static __device__ __forceinline__ uint32_t address(uint32_t tile, int row, int chunk) {
    return tile + row * kStride + ((chunk ^ (row & 7)) << 4);
  }

  // Returns the address at which this lane starts to read the left operand A of a product, if A's
  // rows are the tile's rows, in blocks of 16 rows by 32 bytes. Step `k` of 32 bytes is at address
  // ^ (k << 5), and the next 16 rows are at address + 16 * kStride. `lane_of_columns` returns that
  // of the right operand B, if the tile's rows are the columns of B.
  static __device__ __forceinline__ uint32_t lane_of_rows(uint32_t tile) {
    const int lane = threadIdx.x % kLanes;
    return address(tile, lane & 15, lane >> 4);
  }
  static __device__ __forceinline__ uint32_t lane_of_columns(uint32_t tile) {
    const int lane = threadIdx.x % kLanes;
    return address(tile, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  }

  // Returns the address at which this lane starts to read the right operand B for add_product, if
  // the tile's rows are the rows of B, which lie along the summed axis.
  static __device__ __forceinline__ uint32_t lane_of_depth(uint32_t tile) {
    if constexpr (!kIsTf32<T>) return lane_of_rows(tile);
    const int lane = threadIdx.x % kLanes;
    return address(tile, lane % 4 * 2, lane / 4);
  }
};

// One head of an operand [length, heads, size], starting at its first row.
template <typename T>
struct Head {
  T* data;
  int stride;  // values between two rows
  int rows;
  int size;

  // Returns the address of a value; `row` may lie beyond the last row.
  __device__ __forceinline__ T* at(int row, int column) const {
    // The offset takes one multiplication, because the bytes of a row fit an int.
    constexpr int kBytes = sizeof(T);
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return reinterpret_cast<T*>(reinterpret_cast<Byte*>(data + column) +
                                int64_t{row} * (stride * kBytes));
  }
};

// Starts copying kRows rows from `first` on; rows beyond the end of the head are filled with zeros.
template <int kHead, int kRows, int kThreads, typename T>
__device__ __forceinline__ void load_tile(uint32_t tile, const Head<const T>& head, int first) {
  using Places = Tile<T, kHead>;
  constexpr int kChunks = Places::kChunks;
  constexpr int kStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0);
  const int chunk = threadIdx.x % kChunks;
  const int row = threadIdx.x / kChunks;
  const bool has_chunk = chunk * Places::kChunkValues < head.size;
#pragma unroll
  for (int i = 0; i < kRows; i += kStep) {
    async_copy_or_zero(Places::address(tile, row + i, chunk),
                       head.at(first + row + i, chunk * Places::kChunkValues),
                       has_chunk && first + row + i < head.rows);
  }
}

// Waits for this thread's copies and, in float32, rounds those that load_tile has made to tf32. A
// barrier must follow before another thread reads the tile.
template <typename T, int kHead, int kRows, int kThreads>
__device__ __forceinline__ void round_tile(uint32_t tile) {
  if constexpr (kIsTf32<T>) {
    constexpr int kChunks = Tile<T, kHead>::kChunks;
    async_copies_wait_all();
#pragma unroll 4
    for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
      const uint32_t address = Tile<T, kHead>::address(tile, i / kChunks, i % kChunks);
      const uint4 x = load_shared_16(address);
      store_shared_16(address, {rounded_to_tf32(x.x), rounded_to_tf32(x.y), rounded_to_tf32(x.z),
                                rounded_to_tf32(x.w)});
    }
  }
}

// Adds a[rows, kHead] b[columns, kHead]^T to acc[rows of the warp, columns]. `a` and `b` are this
// lane's addresses; the tile at `a` must already be rounded.
template <typename T, int kHead, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void add_product_transposed(float (&acc)[kRowTiles][kColumnTiles][4],
                                                       uint32_t a, uint32_t b) {
  constexpr int kDown = 16 * Tile<T, kHead>::kStride;
#pragma unroll
  for (int k = 0; k < kHead / kDepth<T>; ++k) {
    uint32_t a_k[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) load_matrices(a_k[i], (a ^ (k << 5)) + i * kDown);
#pragma unroll
    for (int j = 0; j < kColumnTiles; j += 2) {
      uint32_t b_k[4];
      load_matrices(b_k, (b ^ (k << 5)) + j / 2 * kDown);
      if constexpr (kIsTf32<T>) {
#pragma unroll
        for (uint32_t& value : b_k) value = rounded_to_tf32(value);
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        multiply_add<T>(acc[i][j], a_k[i], b_k[0], b_k[1]);
        multiply_add<T>(acc[i][j + 1], a_k[i], b_k[2], b_k[3]);
      }
    }
  }
}

// Rounded accumulators of a product, laid out as the first operand (A) of the next product: one A
// for every kDepth columns.
template <typename T, int kRowTiles, int kColumnTiles>
using Operand = uint32_t[kRowTiles][kColumnTiles * 8 / kDepth<T>][4];

// Adds a[rows, columns] b[columns, kHead] to acc[rows of the warp, kHead]. In tf32, a lane reads
// four adjacent columns of B at a time and gives one to each of four tiles of acc. So its acc[i][j]
// has the columns that store_rows writes, not 8 j + lane % 4 * 2 + {0, 1}.
template <typename T, int kHead, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void add_product(float (&acc)[kRowTiles][kHead / 8][4],
                                            const Operand<T, kRowTiles, kColumnTiles>& a,
                                            uint32_t b) {
  constexpr int kDown = kDepth<T> * Tile<T, kHead>::kStride;
#pragma unroll
  for (int k = 0; k < kColumnTiles * 8 / kDepth<T>; ++k) {
    if constexpr (kIsTf32<T>) {
#pragma unroll
      for (int j = 0; j < kHead / 8; j += 4) {
        const uint32_t row = b + j * 32 + k * kDown;
        const uint4 even = load_shared_16(row);
        const uint4 odd = load_shared_16((row ^ 16) + Tile<T, kHead>::kStride);
        const uint32_t b_k[4][2] = {
            {even.x, odd.x}, {even.y, odd.y}, {even.z, odd.z}, {even.w, odd.w}};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const uint32_t b0 = rounded_to_tf32(b_k[n][0]), b1 = rounded_to_tf32(b_k[n][1]);
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) multiply_add<T>(acc[i][j + n], a[i][k], b0, b1);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kHead / 8; j += 2) {
        uint32_t b_k[4];
        load_transposed(b_k, (b ^ (j << 4)) + k * kDown);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          multiply_add<T>(acc[i][j], a[i][k], b_k[0], b_k[1]);
          multiply_add<T>(acc[i][j + 1], a[i][k], b_k[2], b_k[3]);
        }
      }
    }
  }
}

template <typename T, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void round_to_operand(const float (&x)[kRowTiles][kColumnTiles][4],
                                                 Operand<T, kRowTiles, kColumnTiles>& a) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = x[i][j][2 * half], high = x[i][j][2 * half + 1];
        if constexpr (kIsTf32<T>) {
          a[i][j][half] = rounded_to_tf32(__float_as_uint(low));
          a[i][j][2 + half] = rounded_to_tf32(__float_as_uint(high));
        } else {
          a[i][j / 2][j % 2 * 2 + half] = rounded_pair<T>(low, high);
        }
      }
    }
  }
}

// Writes the warp's rows of acc * factor[row], or 0 if the factor is 0, even if acc is NaN. The
// rows are staged in rows of `tile` that no other warp still uses. `first` is the warp's first row
// in the head, and `tile_row` its first row in the tile.
template <typename T, int kHead, int kRowTiles>
__device__ __forceinline__ void store_rows(const Head<T>& head, int first, uint32_t tile,
                                           int tile_row,
                                           const float (&acc)[kRowTiles][kHead / 8][4],
                                           const float (&factor)[kRowTiles][2]) {
  using Places = Tile<T, kHead>;
  constexpr int kChunks = Places::kChunks;
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile_row + 16 * i + 8 * half + lane / 4;
      const auto scaled = [&](int j, int odd) {
        return factor[i][half] == 0.0f ? 0.0f : acc[i][j][2 * half + odd] * factor[i][half];
      };
      if constexpr (kIsTf32<T>) {
#pragma unroll
        for (int j = 0; j < kHead / 8; j += 4) {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            store_shared_16(
                Places::address(tile, row, 2 * j + lane % 4 * 2 + odd),
                {__float_as_uint(scaled(j, odd)), __float_as_uint(scaled(j + 1, odd)),
                 __float_as_uint(scaled(j + 2, odd)), __float_as_uint(scaled(j + 3, odd))});
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < kHead / 8; ++j) {
          const uint32_t pair = rounded_pair<T>(acc[i][j][2 * half] * factor[i][half],
                                                acc[i][j][2 * half + 1] * factor[i][half]);
          store_shared(Places::address(tile, row, j) + lane % 4 * 4,
                       factor[i][half] == 0.0f ? 0 : pair);
        }
      }
    }
  }
  __syncwarp();
#pragma unroll 4
  for (int i = lane; i < 16 * kRowTiles * kChunks; i += kLanes) {
    const int row = i / kChunks, column = i % kChunks * Places::kChunkValues;
    if (first + row >= head.rows || column >= head.size) continue;
    *reinterpret_cast<uint4*>(head.at(first + row, column)) =
        load_shared_16(Places::address(tile, tile_row + row, i % kChunks));
  }
}
