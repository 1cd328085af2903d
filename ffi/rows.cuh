// How kernels over the rows of a [rows, features] matrix spread it over threads.
//
// A team of threads owns a row, a block holds several teams, and the grid is persistent: each team
// walks over the rows in steps of what the whole grid holds. Thread `rank` of a team owns the same
// columns in every row, kVectors vectors of kVec values:
//
//     column(v) = (v * team.size + rank) * kVec,    v = 0 .. kVectors - 1
//
// so that a team reads a row in whole lines, and what belongs to columns stays with a thread.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "team.cuh"
#include "vector.cuh"

// A thread holds 8, 16, 24 or 32 values of a row.
constexpr int kElementStep = 8;
constexpr int kElementChoices = 4;

struct Device {
  int multiprocessors;
  int shared_bytes;  // that one block can have
};

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

// The columns of a thread, the same in every row.
template <int kVec, int kVectors>
class Columns {
 public:
  __device__ Columns(const Team& team, int features) : team_(team), features_(features) {}

  __device__ __forceinline__ int operator()(int v) const {
    return (v * team_.size + team_.rank) * kVec;
  }

  // Whether the row has column(v): choose_spread leaves only the last kElementStep values in doubt.
  __device__ __forceinline__ bool has(int v) const {
    if (kVec > 1 && (v + 1) * kVec <= kVec * kVectors - kElementStep) return true;
    return (*this)(v) < features_;
  }

  __device__ __forceinline__ int features() const { return features_; }

 private:
  Team team_;
  int features_;
};

// A thread's values of a parameter in float32: in registers, or in shared memory, where the teams
// of a block have one copy, laid out so that a warp reads it without bank conflicts.
template <int kVec, int kVectors, bool kInRegisters>
class ColumnValues {
  static constexpr int kPart = kVec < 4 ? kVec : 4;

 public:
  // `shared`: team.size * kVec * kVectors floats, or whatever where there are registers.
  __device__ __forceinline__ void place(float* shared, const Team& team) {
    if constexpr (!kInRegisters) {
      shared_ = shared + team.rank * kPart;
      stride_ = team.size;
      writes_ = team.index == 0;
    }
  }

  // All threads call it, and synchronise before the first read.
  __device__ __forceinline__ void write(int v, const float (&values)[kVec]) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) registers_[v][i] = values[i];
    } else if (writes_) {
#pragma unroll
      for (int i = 0; i < kVec; i += kPart) {
        Vector<float, kPart> part;
#pragma unroll
        for (int j = 0; j < kPart; ++j) part.values[j] = values[i + j];
        store_vector(shared_ + (v * kVec + i) * stride_, part);
      }
    }
  }

  __device__ __forceinline__ void read(int v, float (&values)[kVec]) const {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] = registers_[v][i];
    } else {
#pragma unroll
      for (int i = 0; i < kVec; i += kPart) {
        const auto part = load_vector<float, kPart>(shared_ + (v * kVec + i) * stride_);
#pragma unroll
        for (int j = 0; j < kPart; ++j) values[i + j] = part.values[j];
      }
    }
  }

 private:
  float* shared_;
  int stride_;
  bool writes_;
  float registers_[kInRegisters ? kVectors : 1][kVec];
};

// Writes totals[column] = the sum over the block's teams of `values`, in the order of the teams.
// `shared` has room for features floats of each team; call it between barriers.
template <int kVec, int kVectors>
__device__ __forceinline__ void add_over_teams(const float (&values)[kVectors][kVec],
                                               const Team& team,
                                               const Columns<kVec, kVectors>& column, float* shared,
                                               float* totals) {
  constexpr int kPart = kVec < 4 ? kVec : 4;
  using Part = Vector<float, kPart>;
  const auto for_each_part = [&](auto&& use) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!column.has(v)) continue;
#pragma unroll
      for (int i = 0; i < kVec; i += kPart) {
        Part part;
#pragma unroll
        for (int j = 0; j < kPart; ++j) part.values[j] = values[v][i + j];
        use(column(v) + i, part);
      }
    }
  };
  const int teams = blockDim.x / team.size;
  if (teams == 1) {
    for_each_part([&](int i, const Part& part) { store_vector(totals + i, part); });
    return;
  }
  for_each_part([&](int i, const Part& part) {
    store_vector(shared + team.index * column.features() + i, part);
  });
  __syncthreads();
  for (int i = threadIdx.x * kPart; i < column.features(); i += blockDim.x * kPart) {
    Part total = {};
    for (int other = 0; other < teams; ++other) {
      const auto addend = load_vector<float, kPart>(shared + other * column.features() + i);
#pragma unroll
      for (int j = 0; j < kPart; ++j) total.values[j] += addend.values[j];
    }
    store_vector(totals + i, total);
  }
}

// The rows that a unit, the threads of a whole warp or of a larger team, takes: `height`
// neighbouring rows a step, one for each of its teams.
struct RowWalk {
  int height;
  int line;  // which of the rows is the team's
  int first;
  int step;
  int end;

  // For block `block` of the `blocks` that share the rows from `begin` to `end`.
  __device__ RowWalk(const Team& team, int block, int blocks, int begin, int end)
      : height(max(kWarpSize / team.size, 1)), line(team.index % height), end(end) {
    const int teams = blockDim.x / team.size;
    first = begin + block * teams + team.index - line;
    step = blocks * teams;
  }
};

// --- launch --------------------------------------------------------------------------------------

// How a row is spread over threads; elements 0 where it is too long to be held by one team.
struct Spread {
  int elements;   // per thread
  int team_size;  // threads per row

  int padded() const { return elements * team_size; }
};

inline int divide_up(int64_t value, int64_t divisor) {
  return static_cast<int>((value + divisor - 1) / divisor);
}

// The most threads of a block for each choice of elements, which is what registers allow.
using ThreadLimits = std::array<int, kElementChoices>;

constexpr int threads_limit(const ThreadLimits& limits, int elements) {
  return limits[elements / kElementStep - 1];
}

// Rows of up to 1,024 features go to one warp or less, which needs no barrier; longer ones to the
// team that wastes the fewest threads, and of those to the smallest.
inline Spread choose_spread(int features, int vec, const ThreadLimits& limits) {
  Spread best = {};
  for (int elements = kElementStep; elements <= kElementStep * kElementChoices;
       elements += kElementStep) {
    // Values one by one are the slow path already: two kernels are enough for it.
    if (vec == 1 && elements > 2 * kElementStep) continue;
    const int threads = divide_up(features, elements);
    if (threads <= kWarpSize) {
      int team_size = 1;
      while (team_size < threads) team_size *= 2;
      return {elements, team_size};
    }
    const Spread spread{elements, divide_up(threads, kWarpSize) * kWarpSize};
    // Columns::has relies on the second condition.
    if (spread.team_size <= threads_limit(limits, elements) &&
        features >= spread.team_size * (elements - kElementStep) &&
        (best.elements == 0 || spread.padded() <= best.padded())) {
      best = spread;
    }
  }
  return best;
}

// The threads of a block: as many teams as `limit` threads allow, but few rows are spread over all
// multiprocessors before blocks grow.
inline int choose_threads(const Spread& spread, int64_t rows, int limit, const Device& device) {
  const int least = std::max(spread.team_size, kWarpSize);
  const int64_t teams = divide_up(rows, device.multiprocessors);
  const int64_t wanted = std::min<int64_t>(teams * spread.team_size, limit);
  return std::max<int64_t>(wanted / least * least, least);
}
