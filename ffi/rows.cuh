// How kernels over the rows of a [rows, features] matrix spread it over threads and bring it in.
//
// A team of threads owns a row, a block holds several teams, and the grid is persistent: each block
// walks over the rows in steps of what the whole grid holds. Thread `rank` of a team owns the same
// columns in every row, kVectors vectors of kVec values:
//
//     column(v) = (v * team.size + rank) * kVec,    v = 0 .. kVectors - 1
//
// so parameters and their gradients can stay in registers, and a team reads a row in whole lines.
#pragma once

#include <algorithm>
#include <cstdint>

#include "team.cuh"
#include "vector.cuh"

constexpr int kMaxThreads = kWarpSize * kMaxTeamWarps;  // a block

enum class Dtype : int { kFloat32, kBfloat16, kFloat16 };

// A [features] vector in a dtype of its own; without data it is absent.
struct Parameter {
  const void* data;
  Dtype dtype;
};

template <int kSize>
__device__ __forceinline__ void load_parameter(const Parameter& parameter, int column,
                                               float (&out)[kSize]) {
  constexpr int kFloats = kSize < 4 ? kSize : 4;
  switch (parameter.dtype) {
    case Dtype::kFloat32:
#pragma unroll
      for (int i = 0; i < kSize; i += kFloats) {
        const auto part =
            load_vector<float, kFloats>(static_cast<const float*>(parameter.data) + column + i);
#pragma unroll
        for (int j = 0; j < kFloats; ++j) out[i + j] = part.values[j];
      }
      break;
    case Dtype::kBfloat16:
      unpack(load_vector<__nv_bfloat16, kSize>(static_cast<const __nv_bfloat16*>(parameter.data) +
                                               column),
             out);
      break;
    case Dtype::kFloat16:
      unpack(load_vector<__half, kSize>(static_cast<const __half*>(parameter.data) + column), out);
      break;
  }
}

// What the norm multiplies by: scale + offset, or 1 without a scale.
template <int kSize>
__device__ __forceinline__ void load_scale(const Parameter& scale, float offset, int column,
                                           float (&out)[kSize]) {
  if (scale.data == nullptr) {
#pragma unroll
    for (float& value : out) value = 1.0f;
  } else {
    load_parameter(scale, column, out);
#pragma unroll
    for (float& value : out) value += offset;
  }
}

template <int kSize>
__device__ __forceinline__ void load_or_zero(const Parameter& parameter, int column,
                                             float (&out)[kSize]) {
  if (parameter.data == nullptr) {
#pragma unroll
    for (float& value : out) value = 0.0f;
  } else {
    load_parameter(parameter, column, out);
  }
}

// A short tree instead of a long chain of dependent additions.
template <int kSize>
__device__ __forceinline__ float sum_of(const float (&values)[kSize]) {
  float partial[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) partial[i] = values[i];
#pragma unroll
  for (int width = kSize / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) partial[i] += partial[i + width];
  }
  return partial[0];
}

// Float32 values in shared memory, one for each column of a thread, in 16-byte parts where kVec
// allows. Neighbouring threads hold neighbouring parts, so no two of them meet in a bank.
template <int kVec, int kVectors>
class ColumnFloats {
 public:
  static constexpr int kPart = kVec < 4 ? kVec : 4;
  static constexpr int kParts = kVec / kPart;

  // `width` threads share the storage, of width * kVec * kVectors floats; this thread is number
  // `position` of them.
  __device__ ColumnFloats(float* data, int width, int position)
      : data_(data), width_(width), position_(position) {}

  __device__ __forceinline__ void read(int v, float (&out)[kVec]) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const auto values = load_vector<float, kPart>(address(v, part));
#pragma unroll
      for (int i = 0; i < kPart; ++i) out[part * kPart + i] = values.values[i];
    }
  }

  __device__ __forceinline__ void write(int v, const float (&in)[kVec]) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Vector<float, kPart> values;
#pragma unroll
      for (int i = 0; i < kPart; ++i) values.values[i] = in[part * kPart + i];
      store_vector(address(v, part), values);
    }
  }

 private:
  __device__ __forceinline__ float* address(int v, int part) const {
    return data_ + ((v * kParts + part) * width_ + position_) * kPart;
  }

  float* data_;
  int width_;
  int position_;
};

// totals[column] = the sum over the block's teams of what their threads hold in `data`, a
// ColumnFloats with a place for every thread of the block. Call it between barriers.
template <int kVec, int kVectors>
__device__ __forceinline__ void add_over_teams(const float* data, const Team& team, int features,
                                               float* totals) {
  using Columns = ColumnFloats<kVec, kVectors>;
  const int teams = blockDim.x / team.size;
  for (int i = threadIdx.x; i < kVectors * Columns::kParts * team.size; i += blockDim.x) {
    const int part = i / team.size;
    const int rank = i % team.size;
    const int column = ((part / Columns::kParts) * team.size + rank) * kVec +
                       part % Columns::kParts * Columns::kPart;
    if (column >= features) continue;
    const float* parts = data + (part * blockDim.x + rank) * Columns::kPart;
    Vector<float, Columns::kPart> total = {};
    for (int other = 0; other < teams; ++other) {
      const auto addend =
          load_vector<float, Columns::kPart>(parts + other * team.size * Columns::kPart);
#pragma unroll
      for (int j = 0; j < Columns::kPart; ++j) total.values[j] += addend.values[j];
    }
    store_vector(totals + column, total);
  }
}

constexpr int kMaxStreams = 3;
constexpr int kMaxStages = 4;  // async_copies_wait knows no more

// A ring of rows on their way in. Every thread copies and reads its own columns only, so the ring
// needs no barrier: what bounds the bytes in flight is shared memory, not registers or occupancy.
template <typename T, int kVec, int kVectors>
class RowRing {
 public:
  using Row = Vector<T, kVec>;

  // `sources` are the matrices whose rows travel together.
  __device__ RowRing(void* shared, const void* const (&sources)[kMaxStreams], int streams,
                     int stages, int features, const Team& team)
      : slots_(static_cast<Row*>(shared) + threadIdx.x),
        sources_(sources),
        streams_(streams),
        stages_(stages),
        features_(features),
        team_(team) {
    // Columns past the last are never copied: they read as zeros, which add nothing to a sum.
    Row zeros;
    const float nothing[kVec] = {};
    pack(nothing, zeros);
    for (int slot = 0; slot < stages * streams; ++slot) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) slots_[(slot * kVectors + v) * blockDim.x] = zeros;
    }
  }

  __device__ __forceinline__ int column(int v) const {
    return (v * team_.size + team_.rank) * kVec;
  }

  // Starts the copies of `row` into the oldest stage, whose values are no longer needed; call it
  // every step, with `active` false past the last row.
  __device__ __forceinline__ void fetch(int64_t row, bool active) {
    if (active) {
      for (int stream = 0; stream < streams_; ++stream) {
        const T* source = static_cast<const T*>(sources_[stream]) + row * features_;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (column(v) < features_) {
            async_copy<sizeof(Row)>(slot(stream, v), source + column(v));
          }
        }
      }
    }
    async_copies_commit();
    stage_ = stage_ + 1 == stages_ ? 0 : stage_ + 1;
  }

  // Waits for the oldest stage; `read` then reads it until the next fetch.
  __device__ __forceinline__ void wait() { async_copies_wait(stages_ - 1); }

  __device__ __forceinline__ void read(int stream, int v, float (&out)[kVec]) const {
    unpack(load_vector<T, kVec>(slot(stream, v)), out);
  }

 private:
  __device__ __forceinline__ Row* slot(int stream, int v) const {
    return slots_ + ((stage_ * streams_ + stream) * kVectors + v) * blockDim.x;
  }

  Row* slots_;
  const void* const (&sources_)[kMaxStreams];
  int streams_;
  int stages_;
  int features_;
  Team team_;
  int stage_ = 0;
};

// --- launch
// ---------------------------------------------------------------------------------------

// How a row is spread over threads; elements 0 where it is too long to be held by one team.
struct Spread {
  int elements;   // per thread
  int team_size;  // threads per row

  int padded() const { return elements * team_size; }
};

inline int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Rows of up to 1,024 features go to one warp or less, which needs no barrier; longer ones to the
// team that wastes the fewest threads, and of those to the smallest.
inline Spread choose_spread(int features, int vec) {
  Spread best{0, 0};
  for (const int elements : {8, 16, 24, 32}) {
    // Values one by one are the slow path already: two kernels are enough for it.
    if (vec == 1 && elements > 16) continue;
    const int threads = (features + elements - 1) / elements;
    if (threads <= kWarpSize) {
      int team_size = 1;
      while (team_size < threads) team_size *= 2;
      return {elements, team_size};
    }
    const Spread spread{elements, round_up(threads, kWarpSize)};
    if (elements * kMaxThreads >= features &&
        (best.elements == 0 || spread.padded() <= best.padded()))
      best = spread;
  }
  return best;
}

struct RowsRequest {
  int64_t rows;  // of one segment, where there are several
  int segments;
  int features;
  int vec;
  int value_bytes;
  int streams;             // matrices that the ring brings in
  int shared_parameters;   // ColumnFloats that the teams of a block share
  int private_parameters;  // ColumnFloats that every thread has for itself
  bool sums_over_teams;    // at the end, through the ring's memory
  int multiprocessors;
  int shared_bytes;
};

struct RowsPlan {
  int elements;
  int team_size;
  int threads;  // a block
  int stages;   // 0: no team can hold a row
  int shared_bytes;

  int teams() const { return threads / team_size; }
};

inline RowsPlan plan_rows(const RowsRequest& request) {
  const Spread spread = choose_spread(request.features, request.vec);
  if (spread.elements == 0) return {};
  const int team_size = spread.team_size;
  const int floats = spread.elements * static_cast<int>(sizeof(float));
  const int least = team_size < kWarpSize ? kWarpSize : team_size;
  // Few rows are spread over all multiprocessors before blocks grow.
  const int64_t block_rows =
      (request.rows * request.segments + request.multiprocessors - 1) / request.multiprocessors;
  const int most = kMaxThreads / least * least;
  int threads = least;
  while (threads < most && threads / team_size < block_rows) threads += least;

  // A ring of one stage hides no latency: fewer teams with two are better.
  for (;; threads = round_up(threads / 2, least)) {
    const int fixed = TeamSum::kScratch * static_cast<int>(sizeof(float)) +
                      request.shared_parameters * team_size * floats +
                      request.private_parameters * threads * floats;
    const int stage = request.streams * threads * spread.elements * request.value_bytes;
    const int sums = request.sums_over_teams && threads > team_size ? threads * floats : 0;
    const int available = request.shared_bytes - fixed;
    const int stages = std::min(kMaxStages, available / stage);
    const bool fits = stages >= 1 && available >= sums;
    if (fits && (stages >= 2 || threads == least)) {
      return {spread.elements, team_size, threads, stages, fixed + std::max(stages * stage, sums)};
    }
    if (threads == least) return {};
  }
}
