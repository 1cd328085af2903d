// x @ w^T for a matrix w of which two of each four numbers in a row are zero, on Hopper.
//
// Tensor cores accept a sparse matrix only as their left operand, so each tile of the result is
// computed transposed: its rows are rows of w, the features. Two warpgroups multiply, 64 features
// each; a warp of a third one copies.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "common/ptx.cuh"
#include "sparse/wgmma_sparse.cuh"

namespace sparse24 {

constexpr int kFeatures = 128;  // features of a block's tile, 64 for each warpgroup
constexpr int kRows = 256;      // rows of x in a tile
constexpr int kStep = 64;       // columns of x and w in a pipeline stage
constexpr int kWords = 128;     // words of metadata for 64 features and 64 columns: one per thread
constexpr int kStages = 4;
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
// Rows of tiles in a band of the raster order, whose rows of x stay in L2.
constexpr int kBand = 8;
constexpr int kStoredRows = 128;  // rows of the result that a warpgroup stores at a time

// Bytes of w in a pipeline stage: half of the numbers, two bytes each.
constexpr int kWeightBytes = kFeatures * kStep;
constexpr int kXBytes = kRows * kStep * 2;
constexpr int kMetadataBytes = kConsumers * kWords * 4;
constexpr int kStageBytes = kXBytes + kWeightBytes + kMetadataBytes;
constexpr int kStoredBytes = kStoredRows * 64 * 2;
constexpr int kSharedBytes =
    1024 + kStages * kStageBytes + kConsumers * kStoredBytes + 2 * kStages * 8;

struct Args {
  CUtensorMap weights;       // [features, K / 2], in boxes of [128, 32], with a swizzle of 64 bytes
  CUtensorMap x;             // [rows, K], in boxes of [256, 64], with a swizzle of 128 bytes
  CUtensorMap y;             // [rows, features], in boxes of [128, 64], with a swizzle of 128 bytes
  const uint32_t* metadata;  // [K / 64, features / 64, 128], with features a multiple of 128
  int feature_tiles;
  int row_tiles;
  int steps;
};

// Copies a box of a matrix to shared memory.
__device__ __forceinline__ void copy_box(uint32_t shared, const CUtensorMap& map, int column,
                                         int row, uint32_t barrier) {
  JAXFUSED_SM90A(
      asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                   "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
                   "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory"));
}

// Copies a box from shared memory to a matrix.
__device__ __forceinline__ void store_box(const CUtensorMap& map, int column, int row,
                                          uint32_t shared) {
  JAXFUSED_SM90A(
      asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
                   "cp.async.bulk.commit_group;\n" ::"l"(&map),
                   "r"(column), "r"(row), "r"(shared) : "memory"));
}

// Waits until this thread's stores have finished reading shared memory.
__device__ __forceinline__ void await_stores_read() {
  JAXFUSED_SM90A(asm volatile("cp.async.bulk.wait_group.read 0;" :: : "memory"));
}

__device__ __forceinline__ void await_stores() {
  JAXFUSED_SM90A(asm volatile("cp.async.bulk.wait_group 0;" :: : "memory"));
}

template <int kRegisters, bool kMore>
__device__ __forceinline__ void set_registers() {
  if constexpr (kMore) {
    JAXFUSED_SM90A(asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)));
  } else {
    JAXFUSED_SM90A(asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)));
  }
}

// A pipeline stage, and the phase parity of its barriers.
struct Stage {
  int index = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kStages) {
      index = 0;
      phase ^= 1;
    }
  }
};

struct Tile {
  int feature;  // index of the tile of features
  int row;      // index of the tile of rows
};

// Returns tile number `item`. Tiles are ordered in bands of kBand rows of tiles; within a band,
// consecutive tiles have the same features and different rows.
__device__ __forceinline__ Tile tile_at(int item, const Args& args) {
  const int across = args.feature_tiles;
  const int band = item / (kBand * across);
  const int within = item - band * kBand * across;
  const int height = min(kBand, args.row_tiles - band * kBand);
  return {within / height, band * kBand + within % height};
}

// Shared memory of a block.
struct Shared {
  unsigned char* x;
  unsigned char* weights;
  unsigned char* metadata;
  unsigned char* stored;
  uint64_t* full;
  uint64_t* free;

  __device__ explicit Shared(unsigned char* memory) {
    // The swizzle depends on the address, so the memory starts at a multiple of 1024 bytes.
    memory += (1024 - (shared_address(memory) & 1023)) & 1023;
    x = memory;
    weights = x + kStages * kXBytes;
    stored = weights + kStages * kWeightBytes;
    metadata = stored + kConsumers * kStoredBytes;
    full = reinterpret_cast<uint64_t*>(metadata + kStages * kMetadataBytes);
    free = full + kStages;
  }
};

// Fills the pipeline stages for all tiles of the block; one thread runs it.
__device__ __forceinline__ void produce(const Args& args, const Shared& shared) {
  Stage stage;
  const int tiles = args.feature_tiles * args.row_tiles;
  for (int item = blockIdx.x; item < tiles; item += gridDim.x) {
    const Tile tile = tile_at(item, args);
    const uint32_t* metadata = args.metadata + int64_t{tile.feature} * kConsumers * kWords;
    const int64_t stride = int64_t{args.feature_tiles} * kConsumers * kWords;
    for (int step = 0; step < args.steps; ++step) {
      const int s = stage.index;
      mbarrier_wait(shared.free + s, stage.phase ^ 1);
      uint64_t* full = shared.full + s;
      mbarrier_arrive_expect(full, kStageBytes);
      const uint32_t x = shared_address(shared.x + s * kXBytes);
      const uint32_t barrier = shared_address(full);
      copy_box(x, args.x, step * kStep, tile.row * kRows, barrier);
      copy_box(shared_address(shared.weights + s * kWeightBytes), args.weights, step * kStep / 2,
               tile.feature * kFeatures, barrier);
      bulk_copy(shared.metadata + s * kMetadataBytes, metadata + step * stride, kMetadataBytes,
                full);
      stage.advance();
    }
  }
}

// Packs two numbers as bfloat16 into a word, the first in the lower half.
__device__ __forceinline__ uint32_t packed(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Stores four 8 x 8 matrices of two-byte numbers to shared memory, transposed.
__device__ __forceinline__ void store_transposed(uint32_t address, const uint32_t (&words)[4]) {
  JAXFUSED_SM90A(asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory"));
}

// A consumer warpgroup.
struct Consumer {
  const Args& args;
  const Shared& shared;
  int warpgroup;
  Stage stage;

  // Releases a pipeline stage to the producer.
  __device__ __forceinline__ void release(int index) {
    if (threadIdx.x % 128 == 0) mbarrier_arrive(shared.free + index);
  }

  // Issues the WGMMAs of a pipeline stage, and sets `word` to this thread's metadata.
  __device__ __forceinline__ void multiply(float (&d)[128], uint32_t& word, bool accumulates) {
    const int s = stage.index;
    mbarrier_wait(shared.full + s, stage.phase);
    word = reinterpret_cast<const uint32_t*>(
        shared.metadata + s * kMetadataBytes)[warpgroup * kWords + threadIdx.x % 128];
    const uint32_t w =
        shared_address(shared.weights + s * kWeightBytes) + warpgroup * (kWeightBytes / kConsumers);
    const uint32_t x = shared_address(shared.x + s * kXBytes);
    wgmma_fence();
    wgmma_sparse<0>(d, matrix_descriptor<Swizzle::k64>(w), matrix_descriptor<Swizzle::k128>(x),
                    word, accumulates);
    wgmma_sparse<1>(d, matrix_descriptor<Swizzle::k64>(w + 32),
                    matrix_descriptor<Swizzle::k128>(x + 64), word, true);
    wgmma_commit();
    stage.advance();
  }

  // Computes the sums of a tile. Two metadata registers alternate, because WGMMAs in flight still
  // read the previous one.
  __device__ __forceinline__ void sum(float (&d)[128]) {
    uint32_t even, odd;
    int previous = stage.index;
    multiply(d, even, false);
    int step = 1;
    for (; step + 1 < args.steps; step += 2) {
      const int first = stage.index;
      multiply(d, odd, true);
      wgmma_wait<1>();
      release(previous);
      const int second = stage.index;
      multiply(d, even, true);
      wgmma_wait<1>();
      release(first);
      previous = second;
    }
    if (step < args.steps) {
      const int first = stage.index;
      multiply(d, odd, true);
      wgmma_wait<1>();
      release(previous);
      previous = first;
    }
    wgmma_wait<0>();
    release(previous);
  }

  // Rounds a tile's sums and stores them through shared memory.
  __device__ __forceinline__ void store(const float (&d)[128], const Tile& tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const uint32_t stored = shared_address(shared.stored + warpgroup * kStoredBytes);
    // One stmatrix stores four 8 x 8 matrices: two have 16 rows of x for 8 features, two for the
    // next 8 features.
    const int chunk = warp * 2 + lane / 8 % 2;
    const int row_of_lane = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int part = 0; part < kRows / kStoredRows; ++part) {
      if (threadIdx.x % 128 == 0) await_stores_read();
      barrier_sync(1 + warpgroup, 128);
#pragma unroll
      for (int pair = 0; pair < kStoredRows / 16; ++pair) {
        const float* of_pair = d + part * (kStoredRows / 2) + pair * 8;
        const uint32_t words[4] = {packed(of_pair[0], of_pair[1]), packed(of_pair[2], of_pair[3]),
                                   packed(of_pair[4], of_pair[5]), packed(of_pair[6], of_pair[7])};
        const int row = pair * 16 + row_of_lane;
        store_transposed(stored + row * 128 + ((chunk ^ (row & 7)) << 4), words);
      }
      bulk_copies_fence();
      barrier_sync(1 + warpgroup, 128);
      if (threadIdx.x % 128 == 0) {
        store_box(args.y, tile.feature * kFeatures + warpgroup * 64,
                  tile.row * kRows + part * kStoredRows, stored);
      }
    }
  }

  __device__ __forceinline__ void run() {
    const int tiles = args.feature_tiles * args.row_tiles;
    for (int item = blockIdx.x; item < tiles; item += gridDim.x) {
      float d[128];
      sum(d);
      store(d, tile_at(item, args));
    }
    if (threadIdx.x % 128 == 0) await_stores();
  }
};

__global__ void __launch_bounds__(kThreads, 1) matmul(const __grid_constant__ Args args) {
  extern __shared__ unsigned char memory[];
  const Shared shared(memory);
  const int warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(shared.full + s);
      mbarrier_init(shared.free + s, kConsumers);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == kConsumers) {
    set_registers<40, false>();
    if (threadIdx.x == kConsumers * 128) produce(args, shared);
  } else {
    set_registers<232, true>();
    Consumer{args, shared, warpgroup}.run();
  }
}

}  // namespace sparse24
