// How kernels over the rows of a [rows, features] matrix spread it over threads.
//
// A team of threads owns a row, a block holds several teams, and the grid is persistent: in each
// step, the teams of the whole grid take as many rows as there are teams, and then move on to the
// next rows. Thread `rank` of a team owns the same columns in every row, kVectors vectors of kVec
// values:
//
//     column(v) = (v * team.size + rank) * kVec - shift,    v = 0 .. kVectors - 1
//
// In this way a team reads a row in whole cache lines, and one thread of the team has all values of
// a column, such as its parameters and its sum over rows. The shift is 0 where every row starts at
// a multiple of 16 bytes. For misaligned rows (kShifted) it is the distance from the last such
// multiple to the row's start, so that all accesses are still aligned vectors. The first and the
// last vector of a row then also hold values of adjacent rows, which the kernels mask. A team takes
// only rows of one shift, so that its columns stay the same.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>

#include "row_group.cuh"
#include "vector.cuh"

// A thread holds 8, 16, 24 or 32 values of a row.
constexpr int kElementStep = 8;
constexpr int kElementChoices = 4;
// Up to this many values a thread, the loads of all parameters are in flight together. With more
// values, registers would not suffice for that.
constexpr int kTogetherElements = 16;

struct Device {
  int multiprocessors;
  int shared_bytes;  // limit on the shared memory of a block
  int l2_bytes;
  int clusters;  // whether blocks can be launched in clusters
};

enum class Dtype : int { kFloat32, kBfloat16, kFloat16 };

// A [features] vector of its own dtype; it is absent if `data` is nullptr.
struct Parameter {
  const void* data;
  Dtype dtype;
};

// Loads kSize values of type T from `data`, from `column` on, and converts them to float.
template <typename T, int kSize>
__device__ __forceinline__ void load_as_float(const void* data, int column, float (&out)[kSize]) {
  constexpr int kPart = kSize * sizeof(T) <= 16 ? kSize : 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kSize; i += kPart) {
    float part[kPart];
    unpack(load_vector<T, kPart>(static_cast<const T*>(data) + column + i), part);
#pragma unroll
    for (int j = 0; j < kPart; ++j) out[i + j] = part[j];
  }
}

// Calls `f` with a value of the type that `dtype` names.
template <typename F>
__device__ __forceinline__ void with_type(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kFloat32:
      return f(float{});
    case Dtype::kBfloat16:
      return f(__nv_bfloat16{});
    case Dtype::kFloat16:
      return f(__half{});
  }
}

template <int kSize>
__device__ __forceinline__ void load_parameter(const Parameter& parameter, int column,
                                               float (&out)[kSize]) {
  with_type(parameter.dtype,
            [&](auto type) { load_as_float<decltype(type)>(parameter.data, column, out); });
}

// Loads the factor of the norm: scale + offset, or 1 without a scale.
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

// Sums the values in a short tree instead of a long chain of dependent additions.
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

// Returns the largest value; a NaN counts only if all values are NaN.
template <int kSize>
__device__ __forceinline__ float largest_of(const float (&values)[kSize]) {
  float most = values[0];
#pragma unroll
  for (int i = 1; i < kSize; ++i) most = fmaxf(most, values[i]);
  return most;
}

// The columns that a thread owns in each row of its team. The team has `features` columns, from
// column `first` of the matrix on.
template <int kVec, int kVectors, bool kShifted = false>
class Columns {
 public:
  __device__ Columns(const Team& team, int features, int first = 0, int shift = 0)
      : team_(team), features_(features), first_(first), shift_(shift) {}

  __device__ __forceinline__ int operator()(int v) const {
    return (v * team_.size + team_.rank) * kVec - (kShifted ? shift_ : 0);
  }

  // Whether column(v), and so a part of vector v, lies within the row. Only the last kElementStep
  // values need this test, since choose_spread guarantees the others.
  __device__ __forceinline__ bool has(int v) const {
    if ((v + 1) * kVec <= kVec * kVectors - kElementStep) return true;
    return (*this)(v) < features_;
  }

  // Whether value `i` of vector `v` belongs to the row itself.
  __device__ __forceinline__ bool owns(int v, int i) const {
    const int column = (*this)(v) + i;
    return !kShifted || (column >= 0 && column < features_);
  }

  // Whether all values of vector `v` belong to the row itself; has(v) must be true.
  __device__ __forceinline__ bool owns_all(int v) const {
    return !kShifted || ((*this)(v) >= 0 && (*this)(v) + kVec <= features_);
  }

  // Replaces values that belong to adjacent rows by zeros.
  __device__ __forceinline__ void mask(int v, float (&values)[kVec]) const {
    if (owns_all(v)) return;
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = owns(v, i) ? values[i] : 0.0f;
  }

  // Writes the values of vector `v` that belong to the row at `row`; has(v) must be true.
  template <typename T>
  __device__ __forceinline__ void store(T* row, int v, const Vector<T, kVec>& vector) const {
    if (owns_all(v)) {
      store_vector(row + (*this)(v), vector);
    } else {
      store_own(row, v, vector);
    }
  }
  // Like store, for values that are not read again soon: the caches evict them first.
  template <typename T>
  __device__ __forceinline__ void store_once(T* row, int v, const Vector<T, kVec>& vector) const {
    if (owns_all(v)) {
      store_streaming(row + (*this)(v), vector);
    } else {
      store_own(row, v, vector);
    }
  }

  __device__ __forceinline__ int features() const { return features_; }

  // Returns the index of the team's first value of `row` in a matrix with rows of `features`.
  __device__ __forceinline__ int64_t start(int row, int features) const {
    return static_cast<int64_t>(row) * features + first_;
  }

  // Returns the index of column(v) among all features; the team may own only a part of them.
  __device__ __forceinline__ int of_all(int v) const { return first_ + (*this)(v); }

 private:
  template <typename T>
  __device__ __forceinline__ void store_own(T* row, int v, const Vector<T, kVec>& vector) const {
    float values[kVec];
    unpack(vector, values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (!owns(v, i)) continue;
      const float value[1] = {values[i]};
      Vector<T, 1> packed;
      pack(value, packed);
      store_vector(row + (*this)(v) + i, packed);
    }
  }

  Team team_;
  int features_;
  int first_;
  int shift_;
};

// Returns the number of values from the last multiple of kVec values to the row's start.
template <int kVec, bool kShifted>
__device__ __forceinline__ int shift_of(int row, int features) {
  return kShifted ? static_cast<int>(static_cast<int64_t>(row) * features % kVec) : 0;
}

// A thread's columns of a parameter, in the parameter's dtype. The loads of several parameters are
// in flight together until the values of the first are used.
template <int kVec, int kVectors, bool kShifted>
class ParameterLoad {
  using Columns = ::Columns<kVec, kVectors, kShifted>;

 public:
  __device__ __forceinline__ ParameterLoad(const Parameter& parameter, const Columns& column)
      : dtype_(parameter.dtype), column_(column), present_(parameter.data != nullptr) {
    if (!present_) return;
    if (dtype_ == Dtype::kFloat32) {
      load<uint32_t>(static_cast<const uint32_t*>(parameter.data));
    } else {
      load<uint16_t>(static_cast<const uint16_t*>(parameter.data));
    }
  }

  // Returns the values plus `offset`, or `absent` if there is no parameter or no column.
  __device__ __forceinline__ void values(float absent, float offset,
                                         float (&out)[kVectors][kVec]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) values(v, absent, offset, out[v]);
  }

  // Returns the values of vector `v` alone, plus `offset`, or `absent`.
  __device__ __forceinline__ void values(int v, float absent, float offset,
                                         float (&out)[kVec]) const {
#pragma unroll
    for (float& value : out) value = absent;
    if (!present_ || !column_.has(v)) return;
    float own[kVec];
    with_type(dtype_, [&](auto type) { convert(type, words_[v], own); });
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[i] = column_.owns(v, i) ? own[i] + offset : absent;
  }

 private:
  template <typename Bits>
  __device__ __forceinline__ void load(const Bits* data) {
    constexpr int kWords = kVec * sizeof(Bits) / sizeof(uint32_t);
    constexpr int kPart = kWords < 4 ? kWords : 4;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!column_.has(v)) continue;
      const Bits* place = data + column_.of_all(v);
      if constexpr (kShifted) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) words_[v][i] = column_.owns(v, i) ? place[i] : 0;
      } else {
#pragma unroll
        for (int i = 0; i < kWords; i += kPart) {
          const auto part =
              load_vector<uint32_t, kPart>(reinterpret_cast<const uint32_t*>(place) + i);
#pragma unroll
          for (int j = 0; j < kPart; ++j) words_[v][i + j] = part.values[j];
        }
      }
    }
  }

  // Converts `words` of the parameter to float32. A word holds one value if columns are shifted,
  // otherwise as many values of type T as fit.
  template <typename T>
  __device__ __forceinline__ static void convert(T, const uint32_t (&words)[kVec],
                                                 float (&out)[kVec]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) out[i] = __uint_as_float(words[i]);
    } else {
      Vector<T, kVec> packed;
#pragma unroll
      for (int i = 0; i < kVec / 2; ++i) {
        packed.values[i] = kShifted ? words[2 * i] | words[2 * i + 1] << 16 : words[i];
      }
      unpack(packed, out);
    }
  }

  Dtype dtype_;
  Columns column_;
  bool present_;
  uint32_t words_[kVectors][kVec];
};

// Floats of shared memory for a thread's values of one parameter. They are padded, so that a warp
// reads them without bank conflicts.
__host__ __device__ constexpr int shared_values(int elements, int vec) {
  return elements + (vec < 4 ? vec : 4);
}

// A thread's values of a parameter in float32: in registers, or in shared memory, where the teams
// of a block share one copy.
template <int kVec, int kVectors, bool kInRegisters>
class ColumnValues {
  static constexpr int kPart = kVec < 4 ? kVec : 4;

 public:
  // Unless in registers, the values take shared_values() floats of `shared` per thread of a team.
  __device__ ColumnValues(float*& shared, const Team& team) {
    if constexpr (!kInRegisters) {
      constexpr int kStride = shared_values(kVec * kVectors, kVec);
      shared_ = shared + team.rank * kStride;
      writes_ = team.index == 0;
      shared += team.size * kStride;
    }
  }

  // Writes the values. All threads must call it, and synchronise before the first read.
  __device__ __forceinline__ void write(const float (&values)[kVectors][kVec]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kInRegisters) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) registers_[v][i] = values[v][i];
      } else if (writes_) {
#pragma unroll
        for (int i = 0; i < kVec; i += kPart) {
          Vector<float, kPart> part;
#pragma unroll
          for (int j = 0; j < kPart; ++j) part.values[j] = values[v][i + j];
          store_vector(shared_ + v * kVec + i, part);
        }
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
        const auto part = load_vector<float, kPart>(shared_ + v * kVec + i);
#pragma unroll
        for (int j = 0; j < kPart; ++j) values[i + j] = part.values[j];
      }
    }
  }

 private:
  float* shared_;
  bool writes_;
  float registers_[kInRegisters ? kVectors : 1][kVec];
};

// Loads a parameter at the columns of a thread, plus `offset`, into `target`.
template <int kVec, int kVectors, bool kShifted, bool kInRegisters>
__device__ __forceinline__ void write_columns(
    const ParameterLoad<kVec, kVectors, kShifted>& parameter, float absent, float offset,
    ColumnValues<kVec, kVectors, kInRegisters>& target) {
  float values[kVectors][kVec];
  parameter.values(absent, offset, values);
  target.write(values);
}

// Returns load(0) + ... + load(count - 1), summed in float64. A chain of additions is then as
// accurate as a tree and takes less code, which must be fetched even if it runs only once.
template <int kSize, typename Load>
__device__ __forceinline__ Vector<float, kSize> accurate_sum(int count, const Load& load) {
  double sums[kSize] = {};
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const Vector<float, kSize> part = load(i);
#pragma unroll
    for (int j = 0; j < kSize; ++j) sums[j] += part.values[j];
  }
  Vector<float, kSize> rounded;
#pragma unroll
  for (int j = 0; j < kSize; ++j) rounded.values[j] = static_cast<float>(sums[j]);
  return rounded;
}

// Writes totals[column] = the sum of `values` over the block's teams; `values` are overwritten.
// `shared` must have room for `features` floats of each team. A barrier is needed before and after.
template <int kVec, int kVectors, bool kShifted>
__device__ __forceinline__ void add_over_teams(float (&values)[kVectors][kVec], const Team& team,
                                               const Columns<kVec, kVectors, kShifted>& column,
                                               float* shared, float* totals) {
  constexpr int kPart = kShifted ? 1 : kVec < 4 ? kVec : 4;
  using Part = Vector<float, kPart>;
  // Unless shifts differ, the teams of a warp own the same columns, and are summed first.
  int teams_of_part = 1;
  if constexpr (!kShifted) {
    for (int offset = team.size; offset < kWarpSize; offset *= 2) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (float& value : values[v]) value += __shfl_xor_sync(0xffffffffu, value, offset);
      }
      teams_of_part *= 2;
    }
  }
  const auto for_each_part = [&](auto&& use) {
    if (team.index % teams_of_part != 0) return;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!column.has(v)) continue;
#pragma unroll
      for (int i = 0; i < kVec; i += kPart) {
        if (!column.owns(v, i)) continue;
        Part part;
#pragma unroll
        for (int j = 0; j < kPart; ++j) part.values[j] = values[v][i + j];
        use(column(v) + i, part);
      }
    }
  };
  const int parts = blockDim.x / team.size / teams_of_part;
  if (parts == 1) {
    for_each_part([&](int i, const Part& part) { store_vector(totals + i, part); });
    return;
  }
  for_each_part([&](int i, const Part& part) {
    store_vector(shared + team.index / teams_of_part * column.features() + i, part);
  });
  __syncthreads();
  for (int i = threadIdx.x * kPart; i < column.features(); i += blockDim.x * kPart) {
    const auto load = [&](int other) {
      return load_vector<float, kPart>(shared + other * column.features() + i);
    };
    store_vector(totals + i, accurate_sum<kPart>(parts, load));
  }
}

// The rows of a unit, which is one team or several consecutive teams of a block. In each step it
// computes `height` consecutive rows, one for each of its teams.
struct RowWalk {
  int height;
  int unit;  // index of the unit in its block
  int line;  // index of the team's row among the unit's rows
  int first;
  int step;
  int end;

  __device__ RowWalk(const Team& team, int height, int unit, int first, int step, int end)
      : height(height),
        unit(unit),
        line(team.index - unit * height),
        first(first),
        step(step),
        end(end) {}
};

// --- launch --------------------------------------------------------------------------------------

// Distribution of a row over threads. `elements` is 0 if the row is too long for one team.
struct Spread {
  int elements;   // values of a row per thread
  int team_size;  // threads per row

  int padded() const { return elements * team_size; }
  // Returns the floats of shared memory that `count` parameters take.
  int parameters(int count, int vec) const {
    return count * team_size * shared_values(elements, vec);
  }
};

__host__ __device__ constexpr int divide_up(int64_t value, int64_t divisor) {
  return static_cast<int>((value + divisor - 1) / divisor);
}

__host__ __device__ constexpr int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Returns the values of a buffer for `rows` rows. The buffer starts at a multiple of `vec` values
// of the matrix, so that shifted rows start within it.
__host__ __device__ constexpr int slot_values(int rows, int features, int vec, bool shifted) {
  return shifted ? round_up(rows * features + vec - 1, vec) : rows * features;
}

// Returns the number of steps, of `rows` rows each, after which a row starts at the same offset
// from a vector again.
inline int steps_of_one_shift(int rows, int features, int vec) {
  return vec / std::gcd(vec, static_cast<int>(int64_t{rows} * features % vec));
}

// Limits on the threads of a block set by registers, for 8, 16, 24 and 32 values per thread.
using ThreadLimits = std::array<int, kElementChoices>;

constexpr int threads_limit(const ThreadLimits& limits, int elements) {
  return limits[elements / kElementStep - 1];
}

enum class Ties { kFewerThreads, kMoreThreads };

// Preferences for a row that one warp can hold with kElementStep values a thread: many threads,
// which complete it soonest, or many values a thread, which takes the fewest instructions.
enum class Narrow { kManyThreads, kManyValues };

// Limit for a narrow row: registers would not hold more values and their sums.
constexpr int kMostNarrowElements = 3 * kElementStep;

constexpr int power_of_two_from(int value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

// For Narrow::kManyValues: returns the spread with the fewest idle threads and, among equals, the
// one with the most values a thread.
inline Spread choose_narrow_spread(int values, int most_elements) {
  Spread best = {};
  for (int elements = kElementStep; elements <= most_elements; elements += kElementStep) {
    const Spread spread{elements, power_of_two_from(divide_up(values, elements))};
    // Columns::has assumes that only a thread's last kElementStep values may be beyond the row.
    if (values < spread.team_size * (elements - kElementStep)) continue;
    if (best.elements == 0 || spread.padded() <= best.padded()) best = spread;
  }
  return best;
}

// Returns the spread of a row. Rows of up to 1,024 features get one warp or less, which needs no
// barrier, and longer ones the team with the fewest idle threads; `ties` decides between equals. If
// rows are shifted, a team has room for any shift.
inline Spread choose_spread(int features, int vec, bool shifted, int most_elements,
                            const ThreadLimits& limits, Ties ties, Narrow narrow) {
  Spread best = {};
  const int values = shifted ? features + vec - 1 : features;
  if (narrow == Narrow::kManyValues && values <= kElementStep * kWarpSize) {
    return choose_narrow_spread(values, std::min(most_elements, kMostNarrowElements));
  }
  for (int elements = kElementStep; elements <= most_elements; elements += kElementStep) {
    const int threads = divide_up(values, elements);
    if (threads <= kWarpSize) {
      return {elements, power_of_two_from(threads)};
    }
    const Spread spread{elements, divide_up(threads, kWarpSize) * kWarpSize};
    // Columns::has needs the second condition: it tests only the last kElementStep values.
    if (spread.team_size <= threads_limit(limits, elements) &&
        values >= spread.team_size * (elements - kElementStep) &&
        (best.elements == 0 || spread.padded() < best.padded() ||
         (spread.padded() == best.padded() && ties == Ties::kFewerThreads))) {
      best = spread;
    }
  }
  return best;
}

// Returns the threads of a block: `limit` at most, and fewer if rows are too few for all SMs.
inline int choose_threads(const Spread& spread, int64_t rows, int limit, const Device& device) {
  const int least = std::max(spread.team_size, kWarpSize);
  const int64_t teams = divide_up(rows, device.multiprocessors);
  const int64_t wanted = std::min<int64_t>(teams * spread.team_size, limit);
  return std::max<int64_t>(wanted / least * least, least);
}
