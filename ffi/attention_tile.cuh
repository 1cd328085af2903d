// Tiles of attention in shared memory, [rows, kHead] of 16 bits, and the products of a warp with
// them.
//
// A row of a tile consists of chunks of 16 bytes, and chunk c of row r is stored at place c ^ (r %
// 8). In this way the 8 rows that ldmatrix reads at a time are in different banks, and so are rows
// that are written. Columns beyond the real head size are zero.
#pragma once

#include "mma.cuh"

constexpr int kAttentionWarps = 4;
constexpr int kLanes = 32;

template <int kHead>
struct Tile {
  static_assert(kHead % 64 == 0, "the places of a row's chunks are a multiple of 8");
  static constexpr int kStride = 2 * kHead;
  static constexpr int kChunks = kHead / 8;
  static __host__ __device__ constexpr int bytes(int rows) { return rows * kStride; }

  static __device__ __forceinline__ uint32_t address(uint32_t tile, int row, int chunk) {
    return tile + row * kStride + ((chunk ^ (row & 7)) << 4);
  }

  // The address at which this lane starts to read A, or B transposed, whose rows are the tile's
  // rows, in blocks of 16 by 16; the next function is for B whose columns are the tile's rows. Step
  // `k` of 16 tile columns is at ^ (k << 5), and the next 16 rows are at + 16 * kStride.
  static __device__ __forceinline__ uint32_t lane_of_rows(uint32_t tile) {
    const int lane = threadIdx.x % kLanes;
    return address(tile, lane & 15, lane >> 4);
  }
  static __device__ __forceinline__ uint32_t lane_of_columns(uint32_t tile) {
    const int lane = threadIdx.x % kLanes;
    return address(tile, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  }
};

// One head of an operand [length, heads, size], starting at its first row.
template <typename T>
struct Head {
  T* data;
  int stride;  // distance of two rows, in values
  int rows;
  int size;

  // The address of `column` in any row, which may lie beyond the last row.
  __device__ __forceinline__ T* at(int row, int column) const {
    // The address takes one multiplication, since the bytes of a row fit an int.
    constexpr int kBytes = sizeof(T);
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return reinterpret_cast<T*>(reinterpret_cast<Byte*>(data + column) +
                                int64_t{row} * (stride * kBytes));
  }
};

// Starts copying kRows rows from `first` on; rows beyond the end of the head are filled with zeros.
template <int kHead, int kRows, int kThreads, typename T>
__device__ __forceinline__ void load_tile(uint32_t tile, const Head<const T>& head, int first) {
  constexpr int kChunks = Tile<kHead>::kChunks;
  constexpr int kStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0);
  const int chunk = threadIdx.x % kChunks;
  const int row = threadIdx.x / kChunks;
  const bool has_chunk = chunk * 8 < head.size;
#pragma unroll
  for (int i = 0; i < kRows; i += kStep) {
    async_copy_or_zero(Tile<kHead>::address(tile, row + i, chunk),
                       head.at(first + row + i, chunk * 8),
                       has_chunk && first + row + i < head.rows);
  }
}

// Adds a[rows, kHead] b[columns, kHead]^T to acc[rows of the warp, columns]. `a` and `b` are this
// lane's addresses.
template <typename T, int kHead, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void add_product_transposed(float (&acc)[kRowTiles][kColumnTiles][4],
                                                       uint32_t a, uint32_t b) {
  constexpr int kDown = 16 * Tile<kHead>::kStride;
#pragma unroll
  for (int k = 0; k < kHead / 16; ++k) {
    uint32_t a_k[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) load_matrices(a_k[i], (a ^ (k << 5)) + i * kDown);
#pragma unroll
    for (int j = 0; j < kColumnTiles; j += 2) {
      uint32_t b_k[4];
      load_matrices(b_k, (b ^ (k << 5)) + j / 2 * kDown);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        multiply_add<T>(acc[i][j], a_k[i], b_k[0], b_k[1]);
        multiply_add<T>(acc[i][j + 1], a_k[i], b_k[2], b_k[3]);
      }
    }
  }
}

// Adds a[rows, columns] b[columns, kHead] to acc[rows of the warp, kHead]. `a` is rounded from the
// registers in which a product has left it.
template <typename T, int kHead, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void add_product(float (&acc)[kRowTiles][kHead / 8][4],
                                            const uint32_t (&a)[kRowTiles][kColumnTiles / 2][4],
                                            uint32_t b) {
  constexpr int kDown = 16 * Tile<kHead>::kStride;
#pragma unroll
  for (int k = 0; k < kColumnTiles / 2; ++k) {
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

// The accumulators of one product, rounded, as the first operand of the next product.
template <typename T, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void round_to_operand(const float (&x)[kRowTiles][kColumnTiles][4],
                                                 uint32_t (&a)[kRowTiles][kColumnTiles / 2][4]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a[i][j / 2][j % 2 * 2 + half] = rounded_pair<T>(x[i][j][2 * half], x[i][j][2 * half + 1]);
      }
    }
  }
}

// Writes the warp's rows of acc * factor[row], and 0 where the factor is 0 whatever acc is. The
// rows pass through rows of `tile` that no other warp uses any more. `first` is the warp's first
// row in the head, and `tile_row` its first row in the tile.
template <typename T, int kHead, int kRowTiles>
__device__ __forceinline__ void store_rows(const Head<T>& head, int first, uint32_t tile,
                                           int tile_row,
                                           const float (&acc)[kRowTiles][kHead / 8][4],
                                           const float (&factor)[kRowTiles][2]) {
  constexpr int kChunks = Tile<kHead>::kChunks;
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile_row + 16 * i + 8 * half + lane / 4;
#pragma unroll
      for (int j = 0; j < kHead / 8; ++j) {
        const uint32_t pair = rounded_pair<T>(acc[i][j][2 * half] * factor[i][half],
                                              acc[i][j][2 * half + 1] * factor[i][half]);
        store_shared(Tile<kHead>::address(tile, row, j) + lane % 4 * 4,
                     factor[i][half] == 0.0f ? 0 : pair);
      }
    }
  }
  __syncwarp();
#pragma unroll 4
  for (int i = lane; i < 16 * kRowTiles * kChunks; i += kLanes) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (first + row >= head.rows || chunk * 8 >= head.size) continue;
    *reinterpret_cast<uint4*>(head.at(first + row, chunk * 8)) =
        load_shared_16(Tile<kHead>::address(tile, tile_row + row, chunk));
  }
}
