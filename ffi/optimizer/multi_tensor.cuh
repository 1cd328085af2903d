// Multi-tensor lists: one launch over all leaves of a parameter tree, arrays of any sizes.
//
// A leaf is cut into tiles, the last of which may not be full. The tiles are numbered across all
// leaves, and the grid processes them from the last to the first: an earlier kernel that went from
// first to last has left the last ones in L2. The leaves' pointers are parameters of the kernel, so
// that a launch needs no table in device memory.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"
#include "common/rows.cuh"

constexpr int kLeafThreads = 256;
constexpr int kLeafWarps = kLeafThreads / kWarpSize;
constexpr int kLeafVec = 4;  // values that a thread handles at a time
// Limit on the leaves of a launch. A kernel's parameters have room for 500, but XLA's compile time
// grows with the square of a call's results.
constexpr int kMaxLeaves = 256;
constexpr int kMaxStreams = 8;  // most arrays of one leaf: gradient, parameter, moments, ...

constexpr int kBlockValues = 256;  // 8-bit values that share a scale

// What an array holds: float values, 8-bit codes, or the scales of blocks of codes.
enum class Coded : uint8_t { kNo, kCodes, kScales };

struct Leaf {
  void* data[kMaxStreams];
  int64_t size;
  uint32_t first_tile;
  uint16_t decays;
  uint16_t aligned;  // whether all arrays are 16-byte aligned
};

struct Leaves {
  Dtype dtypes[kMaxStreams];  // dtype of each kind of array, common to all leaves
  uint32_t streams;           // one bit for each kind of array that the leaves have
  uint32_t tiles;
  int count;
  Leaf leaves[kMaxLeaves];
};

__host__ __device__ constexpr int item_size(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 4 : 2;
}

__host__ __device__ constexpr bool has_stream(uint32_t streams, int stream) {
  return streams >> stream & 1;
}

// Keeps the compiler from moving a warp's loads from before this point to their uses after it,
// which would save registers. The loads are then in flight together. All threads of the warp call
// it.
__device__ __forceinline__ void keep_loads_together() { __syncwarp(); }

// A vector as loaded, before conversion to float32: eight 16-bit values, or four values, which fill
// only the first half if they have 16 bits.
using RawVector = uint4;

template <int kCount = kLeafVec>
__device__ __forceinline__ RawVector load_raw(const void* data, Dtype dtype, int64_t index) {
  static_assert(kCount == kLeafVec || kCount == 2 * kLeafVec);
  if constexpr (kCount == 2 * kLeafVec) {
    return *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + index);
  }
  if (dtype == Dtype::kFloat32) {
    return *reinterpret_cast<const uint4*>(static_cast<const float*>(data) + index);
  }
  const uint2 half = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + index);
  return make_uint4(half.x, half.y, 0, 0);
}

template <int kCount>
__device__ __forceinline__ void unpack_raw(const RawVector& raw, Dtype dtype,
                                           float (&out)[kCount]) {
  const uint32_t words[] = {raw.x, raw.y, raw.z, raw.w};
  with_type(dtype, [&](auto type) {
    Vector<decltype(type), kCount> vector;
    constexpr int kWords = sizeof(vector) / sizeof(uint32_t);
    if constexpr (kWords <= 4) {
      auto* to = reinterpret_cast<uint32_t*>(&vector);
#pragma unroll
      for (int i = 0; i < kWords; ++i) to[i] = words[i];
      unpack(vector, out);
    }
  });
}

// Returns the number of the last leaf whose member `kFirst` is at most `index`; `kFirst` must grow
// from leaf to leaf.
template <auto kFirst, typename Args>
__device__ __forceinline__ int leaf_at(const Args& args, uint32_t index) {
  int leaf = 0, last = args.count - 1;
  while (leaf < last) {
    const int middle = (leaf + last + 1) / 2;
    if (args.leaves[middle].*kFirst <= index) {
      leaf = middle;
    } else {
      last = middle - 1;
    }
  }
  return leaf;
}

// Returns the sums over the block's threads.
template <int kThreads = kLeafThreads>
__device__ float2 block_total(float first, float second) {
  __shared__ float2 of_warps[kThreads / kWarpSize];
  float values[] = {first, second};
  add_over_lanes(kWarpSize, values);
  __syncthreads();  // all threads have read the previous totals
  if (threadIdx.x % kWarpSize == 0) {
    of_warps[threadIdx.x / kWarpSize] = make_float2(values[0], values[1]);
  }
  __syncthreads();
  float2 total = {0.0f, 0.0f};
  for (const float2& of_warp : of_warps) {
    total.x += of_warp.x;
    total.y += of_warp.y;
  }
  return total;
}

// Writes values that the kernel does not read again.
template <int kCount>
__device__ __forceinline__ void store_values(void* data, Dtype dtype, int64_t index,
                                             const float (&values)[kCount]) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    Vector<T, kCount> vector;
    pack(values, vector);
    T* address = static_cast<T*>(data) + index;
    if constexpr (sizeof(vector) == 16) {
      store_streaming(address, vector);
    } else if constexpr (sizeof(vector) == 8) {
      __stcs(reinterpret_cast<uint2*>(address), reinterpret_cast<const uint2&>(vector));
    }  // eight float32 values are never stored
  });
}

__device__ __forceinline__ float load_value(const void* data, Dtype dtype, int64_t index) {
  float value[1];
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    unpack(load_vector<T, 1>(static_cast<const T*>(data) + index), value);
  });
  return value[0];
}

__device__ __forceinline__ void store_value(void* data, Dtype dtype, int64_t index, float value) {
  const float values[1] = {value};
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    Vector<T, 1> packed;
    pack(values, packed);
    store_vector(static_cast<T*>(data) + index, packed);
  });
}

// Finds the leaf of a tile, starting from that of the previous tile.
class LeafCursor {
 public:
  // Finds the leaf of `tile`.
  __device__ LeafCursor(const Leaves& leaves, int64_t tile) : leaves_(leaves) {
    int last = leaves.count - 1;
    while (leaf_ < last) {
      const int middle = (leaf_ + last + 1) / 2;
      if (leaves.leaves[middle].first_tile <= tile) {
        leaf_ = middle;
      } else {
        last = middle - 1;
      }
    }
  }

  // Moves back to the leaf of `tile`, which must not come after the previous tile.
  __device__ __forceinline__ const Leaf& earlier(int64_t tile) {
    while (leaves_.leaves[leaf_].first_tile > tile) --leaf_;
    return leaves_.leaves[leaf_];
  }

  // Moves forward to the leaf of `tile`, which must not come before the previous tile.
  __device__ __forceinline__ const Leaf& later(int64_t tile) {
    while (leaf_ + 1 < leaves_.count && leaves_.leaves[leaf_ + 1].first_tile <= tile) ++leaf_;
    return leaves_.leaves[leaf_];
  }

  __device__ __forceinline__ int index() const { return leaf_; }

 private:
  const Leaves& leaves_;
  int leaf_ = 0;
};

// Values of a tile in which each thread has kVectors vectors of kCount values.
template <int kVectors, int kCount = kLeafVec>
constexpr int kLeafTile = kLeafThreads * kCount * kVectors;

// The part of a leaf in one tile.
struct LeafTile {
  int64_t start;
  int values;
  int whole;  // values in whole vectors; the others are handled one by one

  __device__ LeafTile(const Leaf& leaf, int64_t tile, int tile_values, int vec = kLeafVec) {
    start = (tile - leaf.first_tile) * tile_values;
    values = static_cast<int>(min(static_cast<int64_t>(tile_values), leaf.size - start));
    whole = leaf.aligned ? values & ~(vec - 1) : 0;
  }
};

// Returns the position in a tile of this thread's vector `v`; a warp's vectors are adjacent.
template <int kVectors, int kCount = kLeafVec>
__device__ __forceinline__ int vector_start(int v) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  return ((warp * kVectors + v) * kWarpSize + lane) * kCount;
}
