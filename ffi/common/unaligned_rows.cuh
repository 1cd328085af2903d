// Access to misaligned rows: those that do not start at multiples of 16 bytes. A tile is a run of
// consecutive rows that starts at a multiple of 16 bytes. A block copies a tile through shared
// memory in vectors, for rows of any width; in shared memory a thread owns single columns of a row,
// or words of two.
#pragma once

#include <numeric>

#include "rows.cuh"

constexpr int kFlatThreads = 256;
constexpr int kFlatVectors = 4;            // vectors of a tile that a thread copies
constexpr int kFlatRingBytes = 16 * 1024;  // most bytes of a tile in a FlatRing
constexpr int kFlatBarrierBytes = 128;     // bytes for the mbarriers of all stages
// Limit on features in kernels that also sum each column over rows. These sums take registers, so a
// lane holds half as many columns as in other kernels.
constexpr int kMostFlatSums = 512;

// Number of rows whose bytes together are a multiple of 16, for rows of any width.
template <typename T>
constexpr int kFlatRows = 16 / sizeof(T);

// Returns the rows of a tile, a multiple of kFlatRows so that every tile starts at a whole vector.
// Tiles have more than kFlatRows rows only if there would else be more than four tiles for each SM.
template <typename T>
inline int flat_tile_rows(int64_t rows, int features, const Device& device) {
  const int bytes = kFlatRows<T> * features * static_cast<int>(sizeof(T));
  const int most = std::max(12 * 1024 / bytes, 1);
  const int wanted = divide_up(divide_up(rows, kFlatRows<T>), 4 * device.multiprocessors);
  return kFlatRows<T> * std::clamp(wanted, 1, most);
}

// Returns the rows of a tile in a FlatRing: as many as kFlatRingBytes hold, but at least one for
// each warp. There are fewer if that spreads the rows over more SMs, or if `most_bytes` hold fewer.
// Returns 0 if `most_bytes` do not hold the fewest rows that are whole vectors.
template <typename T>
inline int flat_ring_rows(int64_t rows, int features, int most_bytes, const Device& device) {
  constexpr int kWarps = kFlatThreads / kWarpSize;
  const int row_bytes = features * static_cast<int>(sizeof(T));
  const int least = 16 / std::gcd(row_bytes, 16);
  const int most = most_bytes / row_bytes / least * least;
  const int wanted = std::max(kFlatRingBytes / row_bytes / kWarps, 1) * kWarps;
  const int share = round_up(divide_up(rows, 2 * device.multiprocessors), kWarps);
  return std::min(std::min(wanted, share), most);
}

template <typename T>
inline int flat_tile_bytes(int tile_rows, int features) {
  return round_up(tile_rows * features * static_cast<int>(sizeof(T)), 16);
}

// The tiles of kStreams matrices that a block computes, copied through a ring of pipeline stages in
// shared memory.
template <typename T, int kStreams>
class FlatRing {
  static constexpr int kVec = 16 / sizeof(T);

 public:
  // `shared` has kFlatBarrierBytes, and then `stages` times a tile of `tile_rows` rows of each of
  // `sources`. All threads must synchronise before the first wait.
  __device__ FlatRing(unsigned char* shared, const void* const (&sources)[kStreams], int tile_rows,
                      int rows, int features, int stages)
      : barriers_(reinterpret_cast<uint64_t*>(shared)),
        tiles_(reinterpret_cast<T*>(shared + kFlatBarrierBytes)),
        tile_values_(tile_rows * features),
        values_(static_cast<int64_t>(rows) * features),
        stages_(stages),
        next_(blockIdx.x) {
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      sources_[stream] = static_cast<const T*>(sources[stream]);
    }
    if (kHasBulkCopies && threadIdx.x == 0) {
      for (int stage = 0; stage < stages; ++stage) mbarrier_init(barriers_ + stage);
      mbarrier_init_fence();
    }
    for (int stage = 0; stage < stages; ++stage) fetch();
    phase_ = 0;
  }

  // Waits for the oldest stage, which has tile `tile`.
  __device__ __forceinline__ void wait(int tile) {
    if constexpr (kHasBulkCopies) {
      mbarrier_wait(barriers_ + stage_, phase_);
    } else {
      async_copies_wait(stages_ - 1);
    }
    // The last rows of a matrix may end within a vector.
    const int64_t start = static_cast<int64_t>(tile) * tile_values_;
    const int count = count_from(start);
    const int rest = count / kVec * kVec + static_cast<int>(threadIdx.x);
    if (rest < count) {
#pragma unroll
      for (int stream = 0; stream < kStreams; ++stream) {
        (*this)[stream][rest] = sources_[stream][start + rest];
      }
    }
    if (!kHasBulkCopies || count % kVec != 0) __syncthreads();
  }

  // Returns the address of a matrix's tile in the oldest stage. Results may overwrite the tile.
  __device__ __forceinline__ T* operator[](int stream) const {
    return tiles_ + (stage_ * kStreams + stream) * tile_values_;
  }

  // Starts the copies of the next tile into the oldest stage. After the last access to that stage,
  // all threads must have synchronised; a thread that wrote to the stage must have called
  // bulk_copies_fence before.
  __device__ __forceinline__ void fetch() {
    const int64_t start = static_cast<int64_t>(next_) * tile_values_;
    if (start < values_) {
      const int vectors = count_from(start) / kVec;
      if constexpr (kHasBulkCopies) {
        if (threadIdx.x == 0) {
          const uint32_t bytes = vectors * 16;
          mbarrier_arrive_expect(barriers_ + stage_, kStreams * bytes);
#pragma unroll
          for (int stream = 0; stream < kStreams; ++stream) {
            if (bytes > 0) {
              bulk_copy((*this)[stream], sources_[stream] + start, bytes, barriers_ + stage_);
            }
          }
        }
      } else {
#pragma unroll
        for (int stream = 0; stream < kStreams; ++stream) {
          for (int vector = threadIdx.x; vector < vectors; vector += kFlatThreads) {
            async_copy<16>((*this)[stream] + vector * kVec,
                           sources_[stream] + start + vector * kVec);
          }
        }
      }
    }
    if constexpr (!kHasBulkCopies) async_copies_commit();
    next_ += gridDim.x;
    if (++stage_ == stages_) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  // Returns the number of values in the tile that starts at value `start`.
  __device__ __forceinline__ int count_from(int64_t start) const {
    return static_cast<int>(min(static_cast<int64_t>(tile_values_), values_ - start));
  }

  uint64_t* barriers_;
  T* tiles_;
  const T* sources_[kStreams];
  int tile_values_;
  int64_t values_;
  int stages_;
  int next_;
  int stage_ = 0;
  uint32_t phase_ = 0;
};

// A copy of `count` values from a 16-byte aligned address in global memory to shared memory.
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

// Loads a parameter plus `offset` to shared memory as float32; without one, stores `absent`.
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

// Values of FlatWords::kWords that are compiled.
constexpr int kFlatWordChoices[] = {1, 2, 3, 4, 6, 8, 12, 16};
constexpr int kMostFlatWords = 16;

// Returns the largest of these choices below `words`, or 0.
__host__ __device__ constexpr int fewer_flat_words(int words) {
  int fewer = 0;
  for (const int choice : kFlatWordChoices) fewer = choice < words ? choice : fewer;
  return fewer;
}

// A thread's 32-bit words of a row in a tile: word `rank`, and on in steps of the team's size. If a
// row starts in the middle of a word, its first value is the second of that word. values[kPerWord *
// i + p] is value p of word i, or 0 if it is outside the row.
template <typename T, int kWords>
class FlatWords {
 public:
  static constexpr int kPerWord = sizeof(uint32_t) / sizeof(T);
  static constexpr int kValues = kPerWord * kWords;
  using Values = float[kValues];

  // Selects the words of row `line` of a tile; rows that start in the same half of a word share
  // them.
  __device__ FlatWords(const Team& team, int features, int line)
      : rank_(team.rank),
        size_(team.size),
        features_(features),
        shift_(kPerWord == 2 ? line * features % 2 : 0) {}

  __device__ __forceinline__ int column(int i, int p) const {
    return (rank_ + i * size_) * kPerWord - shift_ + p;
  }

  __device__ __forceinline__ bool has(int i, int p) const {
    return (i > 0 || column(i, p) >= 0) && (i < kSure || column(i, p) < features_);
  }

  __device__ __forceinline__ void read(const T* row, Values& values) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (is_whole(i)) {
        float both[kPerWord];
        unpack(load_vector<T, kPerWord>(row + column(i, 0)), both);
#pragma unroll
        for (int p = 0; p < kPerWord; ++p) values[kPerWord * i + p] = both[p];
        continue;
      }
#pragma unroll
      for (int p = 0; p < kPerWord; ++p) {
        float value[1] = {0.0f};
        if (has(i, p)) unpack(load_vector<T, 1>(row + column(i, p)), value);
        values[kPerWord * i + p] = value[0];
      }
    }
  }

  __device__ __forceinline__ void write(const Values& values, T* row) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (is_whole(i)) {
        float both[kPerWord];
#pragma unroll
        for (int p = 0; p < kPerWord; ++p) both[p] = values[kPerWord * i + p];
        Vector<T, kPerWord> packed;
        pack(both, packed);
        store_vector(row + column(i, 0), packed);
        continue;
      }
#pragma unroll
      for (int p = 0; p < kPerWord; ++p) {
        if (!has(i, p)) continue;
        const float value[1] = {values[kPerWord * i + p]};
        Vector<T, 1> packed;
        pack(value, packed);
        store_vector(row + column(i, p), packed);
      }
    }
  }

  // Replaces values outside the row by zeros.
  __device__ __forceinline__ void mask(Values& values) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (!has(i / kPerWord, i % kPerWord)) values[i] = 0.0f;
    }
  }

  // Reads a parameter plus `offset`, or `absent` if there is no parameter.
  __device__ __forceinline__ void read(const Parameter& parameter, float absent, float offset,
                                       Values& values) const {
#pragma unroll
    for (float& value : values) value = absent;
    if (parameter.data == nullptr) return;
    // One branch on the dtype, outside the loop, so that all loads are in flight together.
    with_type(parameter.dtype, [&](auto type) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const int w = i / kPerWord, p = i % kPerWord;
        float value[1] = {0.0f};
        if (has(w, p)) load_as_float<decltype(type)>(parameter.data, column(w, p), value);
        values[i] = value[0] + offset;
      }
    });
  }

 private:
  static constexpr int kSure = fewer_flat_words(kWords);

  // Whether both values of word `i` certainly belong to the row. Other words are read and written
  // as two halves, because another warp may write the adjacent row at the same time.
  __device__ static constexpr bool is_whole(int i) { return i > 0 && i < kSure; }

  int rank_;
  int size_;
  int features_;
  int shift_;
};

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

// Sums a thread's values in four chains of additions, which do not wait for each other.
template <int kValues>
__device__ __forceinline__ float sum_by_chains(const float (&values)[kValues]) {
  float parts[4] = {};
#pragma unroll
  for (int i = 0; i < kValues; ++i) parts[i % 4] += values[i];
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// Writes totals[column] = the sum of `values` over the block's warps. `shared` must have room for
// `features` floats of each warp. A barrier is needed before and after.
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
