// Rows that do not start at multiples of 16 bytes. A tile consists of as many neighbouring rows as
// make a piece of memory that starts at such a multiple. A block copies a tile through shared
// memory in vectors, whatever the width of the rows; in shared memory, lane l of a warp owns the
// columns l, l + 32, ... of each row.
#pragma once

#include "rows.cuh"

constexpr int kFlatThreads = 256;
constexpr int kFlatVectors = 4;  // vectors of a tile that a thread copies
constexpr int kMostFlatFeatures = 1024;
// When a kernel also sums columns over the rows, a lane has registers for half as many columns.
constexpr int kMostFlatSums = 512;

// The least number of rows whose bytes are whole vectors, and the tile of as many such rows as the
// threads can copy.
template <typename T>
constexpr int kFlatRows = 16 / sizeof(T);

// Every tile starts at a whole vector, so its rows are a multiple of kFlatRows. Small problems are
// spread over all multiprocessors before tiles grow.
template <typename T>
inline int flat_tile_rows(int64_t rows, int features, const Device& device) {
  const int bytes = kFlatRows<T> * features * static_cast<int>(sizeof(T));
  const int most = std::max(12 * 1024 / bytes, 1);
  const int wanted = divide_up(divide_up(rows, kFlatRows<T>), 4 * device.multiprocessors);
  return kFlatRows<T> * std::clamp(wanted, 1, most);
}

template <typename T>
inline int flat_tile_bytes(int tile_rows, int features) {
  return round_up(tile_rows * features * static_cast<int>(sizeof(T)), 16);
}

// A copy of `count` values, starting at a multiple of 16 bytes, from global to shared memory.
template <typename T>
class FlatLoad {
  static constexpr int kVec = 16 / sizeof(T);

 public:
  __device__ __forceinline__ FlatLoad(const T* global, int count) : global_(global), count_(count) {
#pragma unroll
    for (int i = 0; i < kFlatVectors; ++i) {
      const int vector = threadIdx.x + i * kFlatThreads;
      if (vector < count / kVec) parts_[i] = load_vector<T, kVec>(global + vector * kVec);
    }
  }

  __device__ __forceinline__ void store(T* shared) const {
#pragma unroll
    for (int i = 0; i < kFlatVectors; ++i) {
      const int vector = threadIdx.x + i * kFlatThreads;
      if (vector < count_ / kVec) store_vector(shared + vector * kVec, parts_[i]);
    }
    // The last rows of a matrix may end within a vector.
    const int rest = count_ / kVec * kVec + static_cast<int>(threadIdx.x);
    if (rest < count_) shared[rest] = global_[rest];
  }

 private:
  const T* global_;
  int count_;
  Vector<T, kVec> parts_[kFlatVectors];
};

// Copies a tile from shared memory back to global memory.
template <typename T>
__device__ __forceinline__ void store_flat(const T* shared, int count, T* global) {
  constexpr int kVec = 16 / sizeof(T);
  for (int vector = threadIdx.x; vector < count / kVec; vector += kFlatThreads) {
    store_vector(global + vector * kVec, load_vector<T, kVec>(shared + vector * kVec));
  }
  const int rest = count / kVec * kVec + static_cast<int>(threadIdx.x);
  if (rest < count) global[rest] = shared[rest];
}

// Loads a parameter as float32 into shared memory: its values plus `offset`, or `absent` if there
// is no parameter.
__device__ __forceinline__ void load_flat_parameter(const Parameter& parameter, int features,
                                                    float absent, float offset, float* shared) {
  for (int column = threadIdx.x; column < features; column += kFlatThreads) {
    float value[1] = {absent};
    if (parameter.data != nullptr) {
      load_parameter(parameter, column, value);
      value[0] += offset;
    }
    shared[column] = value[0];
  }
}

// A lane's columns of a row: values[i] is column lane + 32 i, or 0 beyond the end of the row.
struct FlatColumns {
  int features;
  int lane;

  __device__ explicit FlatColumns(int features)
      : features(features), lane(threadIdx.x % kWarpSize) {}

  __device__ __forceinline__ int operator()(int i) const { return lane + i * kWarpSize; }
  __device__ __forceinline__ bool has(int i) const { return (*this)(i) < features; }

  template <typename T, int kSteps>
  __device__ __forceinline__ void read(const T* row, float (&values)[kSteps]) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float value[1] = {0.0f};
      if (has(i)) unpack(load_vector<T, 1>(row + (*this)(i)), value);
      values[i] = value[0];
    }
  }

  template <typename T, int kSteps>
  __device__ __forceinline__ void write(const float (&values)[kSteps], T* row) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (!has(i)) continue;
      const float value[1] = {values[i]};
      Vector<T, 1> packed;
      pack(value, packed);
      store_vector(row + (*this)(i), packed);
    }
  }
};

template <int kSteps>
__device__ __forceinline__ float sum_over_warp(const float (&values)[kSteps]) {
  // The additions form four independent chains.
  float parts[4] = {};
#pragma unroll
  for (int i = 0; i < kSteps; ++i) parts[i % 4] += values[i];
  float sum[1] = {(parts[0] + parts[1]) + (parts[2] + parts[3])};
  add_over_lanes(kWarpSize, sum);
  return sum[0];
}

// Writes totals[column] = the sum of `values` over the block's warps. `shared` has room for
// `features` floats of each warp. The call stands between two barriers.
template <int kSteps>
__device__ __forceinline__ void add_over_warps(const FlatColumns& column,
                                               const float (&values)[kSteps], float* shared,
                                               float* totals) {
  constexpr int kWarps = kFlatThreads / kWarpSize;
  column.write(values, shared + threadIdx.x / kWarpSize * column.features);
  __syncthreads();
  for (int i = threadIdx.x; i < column.features; i += kFlatThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += shared[warp * column.features + i];
    totals[i] = sum;
  }
}

// Calls `f` with the number of a lane's columns as a compile-time constant.
template <int kMostFeatures, typename F>
inline auto with_flat_steps(int features, const F& f) {
  const int steps = divide_up(features, kWarpSize);
  if (steps <= 4) return f(std::integral_constant<int, 4>{});
  if (steps <= 8) return f(std::integral_constant<int, 8>{});
  if (steps <= 12) return f(std::integral_constant<int, 12>{});
  if constexpr (kMostFeatures > 16 * kWarpSize) {
    if (steps > 16) return f(std::integral_constant<int, kMostFeatures / kWarpSize>{});
  }
  return f(std::integral_constant<int, 16>{});
}
