// layer_norm and rms_norm, forward: jaxfused/ops/norm/layer_norm_xla.py in one pass over memory.

#include "common/row_ring.cuh"
#include "common/staged_rows.cuh"
#include "common/unaligned_rows.cuh"
#include "layer_norm.cuh"

namespace {

struct ForwardArgs {
  const void* x;
  const void* residual;  // may be nullptr
  Parameter scale;
  Parameter bias;
  Parameter pre_bias;
  void* y;
  void* next_residual;
  float* mean;  // mean and rstd are nullptr if not needed
  float* rstd;
  int rows;
  int features;
  NormOptions options;
  int team_size;  // threads that share a row (a team)
  int teams;      // teams of a block; in forward_flat_rows, rows of a tile
  int stages;
  int run;  // consecutive rows of a block; 0: rows go to the resident blocks in turn
};

// --- rows that a team holds in registers ---------------------------------------------------------

constexpr ThreadLimits kForwardLimits = {128, 256, 128, 512};

// Resident blocks of an SM that the compiler must leave registers for. While one starts, the others
// compute.
template <typename T>
constexpr int forward_blocks(Chain chain, bool mean, int elements) {
  if (elements == 32) return 1;
  if (sizeof(T) == 4 || chain == Chain::kGeneral) return elements == 16 ? 2 : 4;
  if (elements == 16) return mean ? 3 : 4;
  return chain == Chain::kPlain && !mean ? 5 : 4;
}

// A thread's values of a row: in float32, or packed as T in half the registers, if T represents
// them exactly.
template <typename T, int kVec, int kVectors, bool kPacked>
class RowValues {
 public:
  __device__ __forceinline__ void write(int v, const Vector<T, kVec>& packed) {
    static_assert(kPacked);
    packed_[v] = packed;
  }

  __device__ __forceinline__ void write(int v, const float (&values)[kVec]) {
    if constexpr (kPacked) {
      pack(values, packed_[v]);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) wide_[v][i] = values[i];
    }
  }

  __device__ __forceinline__ void read(int v, float (&values)[kVec]) const {
    if constexpr (kPacked) {
      unpack(packed_[v], values);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] = wide_[v][i];
    }
  }

 private:
  Vector<T, kVec> packed_[kPacked ? kVectors : 1];
  float wide_[kPacked ? 1 : kVectors][kVec];
};

// kMean: whether there is a mean or a bias. Without them only plain norms (kPlain) are compiled.
template <typename T, Chain kChain, bool kResidual, bool kMean>
struct ForwardForm {
  static constexpr bool kHasPreBias = kChain != Chain::kPlain;
  // Whether T represents the normalised values exactly: x, or a sum rounded to T, or its relu.
  static constexpr bool kPacked = kChain == Chain::kPlain || (kChain == Chain::kRelu && kResidual);
  // Whether scale and bias are in registers. With values in float32, both together would spill.
  static constexpr bool kHoldsScale = kChain != Chain::kGeneral;
  static constexpr bool kHoldsBias = kHoldsScale && kPacked && sizeof(T) == 2;
  static constexpr bool kHoldsPreBias = !kHasPreBias;
  // Number of parameters in shared memory.
  static constexpr int kShared = !kHoldsScale + !kHoldsBias + !kHoldsPreBias;
  static_assert(kMean || kChain == Chain::kPlain);
};

// kWarp: whether a team is known to be a warp, which saves a third of the instructions a row.
template <typename T, int kElements, Chain kChain, bool kResidual, bool kMean, bool kWarp>
__global__ void __launch_bounds__(threads_limit(kForwardLimits, kElements),
                                  forward_blocks<T>(kChain, kMean, kElements))
    forward_rows(const __grid_constant__ ForwardArgs args) {
  using Form = ForwardForm<T, kChain, kResidual, kMean>;
  constexpr bool kHasPreBias = Form::kHasPreBias;
  constexpr int kVec = 16 / sizeof(T);
  constexpr int kVectors = kElements / kVec;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);

  const NormOptions options = known_options<kChain>(args.options);
  const bool has_residual = kResidual && args.residual != nullptr;
  const bool has_pre_bias = kHasPreBias && (!kResidual || args.pre_bias.data != nullptr);
  const Team team(kWarp ? kWarpSize : args.team_size);
  // Each copy loads `height` consecutive rows, one for each team of the block.
  const int height = args.teams;
  const int first = blockIdx.x * (args.run == 0 ? height : args.run);
  const RowWalk walk(team, height, 0, first, args.run == 0 ? gridDim.x * height : height,
                     args.run == 0 ? args.rows : min(first + args.run, args.rows));
  const Columns<kVec, kVectors> column(team, args.features);
  TeamSum team_sum(team, shared);
  shared += TeamSum::kScratch;
  ColumnValues<kVec, kVectors, Form::kHoldsScale> scale(shared, team);
  ColumnValues<kVec, kVectors, Form::kHoldsBias> bias(shared, team);
  float* const past_bias = shared;
  ColumnValues<kVec, kVectors, Form::kHoldsPreBias> pre_bias(shared, team);
  if (!has_pre_bias) shared = past_bias;  // plan_rows reserved no memory for pre_bias
  uint64_t* barriers = reinterpret_cast<uint64_t*>(shared);
  shared += kRingBarriers * sizeof(uint64_t) / sizeof(float);

  // The first rows are in flight while the parameters are loaded.
  const void* const sources[] = {args.x, args.residual};
  RowRing<T, kVec, kVectors, kResidual ? 2 : 1> ring(barriers, shared, sources, args.features,
                                                     args.stages, team, column, walk);
  {
    using Load = ParameterLoad<kVec, kVectors, false>;
    const Parameter own_bias = kMean ? args.bias : Parameter{};
    const Parameter own_pre_bias = has_pre_bias ? args.pre_bias : Parameter{};
    if constexpr (kElements <= kTogetherElements) {
      const Load loads[] = {{args.scale, column}, {own_bias, column}, {own_pre_bias, column}};
      write_columns(loads[0], 1.0f, options.scale_offset, scale);
      if (kMean) write_columns(loads[1], 0.0f, 0.0f, bias);
      if (has_pre_bias) write_columns(loads[2], 0.0f, 0.0f, pre_bias);
    } else {
      write_columns(Load(args.scale, column), 1.0f, options.scale_offset, scale);
      if (kMean) write_columns(Load(own_bias, column), 0.0f, 0.0f, bias);
      if (has_pre_bias) write_columns(Load(own_pre_bias, column), 0.0f, 0.0f, pre_bias);
    }
  }
  __syncthreads();

  for (int base = walk.first; base < walk.end; base += walk.step) {
    const int row = base + walk.line;
    const bool active = row < walk.end;
    const int64_t row_start = static_cast<int64_t>(row) * args.features;
    RowValues<T, kVec, kVectors, Form::kPacked> u_values;
    float parts[kVec];
    ring.wait();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float u[kVec];
      const Vector<T, kVec> x = ring.read(0, v);
      unpack(x, u);
      if (has_pre_bias) {
        float offset[kVec];
        pre_bias.read(v, offset);
#pragma unroll
        for (int i = 0; i < kVec; ++i) u[i] += offset[i];
      }
      if (has_residual) {
        float other[kVec];
        unpack(ring.read(1, v), other);
#pragma unroll
        for (int i = 0; i < kVec; ++i) u[i] += other[i];
        Vector<T, kVec> rounded;
        pack(u, rounded);
        if (active && column.has(v)) {
          column.store_once(static_cast<T*>(args.next_residual) + row_start, v, rounded);
        }
        unpack(rounded, u);
      }
      activate(options.pre_activation, u);
      column.mask(v, u);
      if constexpr (kChain == Chain::kGeneral) {
        // Values beyond the row are zeros before the activation. They are set to zero again, so
        // that they add nothing to the row's sums: sigmoid(0) is 0.5.
        if (!column.has(v)) {
#pragma unroll
          for (float& value : u) value = 0.0f;
        }
      }
      if constexpr (kChain == Chain::kPlain) {
        u_values.write(v, x);
      } else {
        u_values.write(v, u);
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) parts[i] = v == 0 ? u[i] : parts[i] + u[i];
    }
    // Teams larger than a warp fetch the next rows later, after the row's sums, whose barriers
    // synchronise the team.
    if (team.size <= kWarpSize) {
      __syncthreads();
      ring.fetch();
    }

    float mean = 0.0f;
    if (kMean && options.subtract_mean) {
      float sum[1] = {sum_of(parts)};
      team_sum(sum);
      mean = sum[0] * options.inverse_features;
    }
    float squares[kVec] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!column.has(v)) continue;
      float u[kVec];
      u_values.read(v, u);
#pragma unroll
      for (float& value : u) value -= mean;
      column.mask(v, u);
#pragma unroll
      for (int i = 0; i < kVec; ++i) squares[i] += u[i] * u[i];
    }
    float sum[1] = {sum_of(squares)};
    team_sum(sum);
    if (team.size > kWarpSize) {
      // One thread's bulk copies overwrite the rows of all teams, so all must have read theirs.
      if (args.teams > 1) __syncthreads();
      ring.fetch();
    }
    const float rstd = rsqrtf(sum[0] * options.inverse_features + options.epsilon);
    if (active && team.rank == 0) {
      if (args.mean != nullptr) args.mean[row] = mean;
      if (args.rstd != nullptr) args.rstd[row] = rstd;
    }

#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float y[kVec], factor[kVec], offset[kVec] = {};
      u_values.read(v, y);
      scale.read(v, factor);
      if (kMean) bias.read(v, offset);
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = (y[i] - mean) * rstd * factor[i] + offset[i];
      activate(options.activation, y);
      Vector<T, kVec> packed;
      pack(y, packed);
      if (active && column.has(v)) {
        column.store(static_cast<T*>(args.y) + row_start, v, packed);
      }
    }
  }
}

// --- few rows ------------------------------------------------------------------------------------

// Few rows are limited by latency, not by bandwidth. So each team has one row, issues all its loads
// at once, and waits for no other thread's copies.
constexpr int kFewRowsElements = 16;
constexpr int kFewRowsThreads = 128;

template <typename T, int kElements>
__global__ void __launch_bounds__(threads_limit(kForwardLimits, kElements))
    forward_few_rows(const __grid_constant__ ForwardArgs args) {
  constexpr int kVec = 16 / sizeof(T);
  constexpr int kVectors = kElements / kVec;
  using Load = ParameterLoad<kVec, kVectors, false>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const NormOptions& options = args.options;
  const Team team(args.team_size);
  const bool active = blockIdx.x * args.teams + team.index < args.rows;
  const int row = active ? blockIdx.x * args.teams + team.index : args.rows - 1;
  const int64_t row_start = static_cast<int64_t>(row) * args.features;
  const Columns<kVec, kVectors> column(team, args.features);

  Vector<T, kVec> x[kVectors] = {}, residual[kVectors] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!column.has(v)) continue;
    x[v] = load_vector<T, kVec>(static_cast<const T*>(args.x) + row_start + column(v));
    if (args.residual == nullptr) continue;
    residual[v] =
        load_vector<T, kVec>(static_cast<const T*>(args.residual) + row_start + column(v));
  }
  const Load pre_bias_load(args.pre_bias, column);
  const Load scale_load(args.scale, column);
  const Load bias_load(args.bias, column);
  TeamSum team_sum(team, reinterpret_cast<float*>(shared_memory));
  team_sum.start();

  float u[kVectors][kVec];
  float sum[1] = {0.0f};
  pre_bias_load.values(0.0f, 0.0f, u);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float value[kVec];
    unpack(x[v], value);
#pragma unroll
    for (int i = 0; i < kVec; ++i) u[v][i] += value[i];
    if (args.residual != nullptr) {
      unpack(residual[v], value);
#pragma unroll
      for (int i = 0; i < kVec; ++i) u[v][i] += value[i];
      Vector<T, kVec> rounded;
      pack(u[v], rounded);
      if (active && column.has(v)) {
        column.store_once(static_cast<T*>(args.next_residual) + row_start, v, rounded);
      }
      unpack(rounded, u[v]);
    }
    activate(options.pre_activation, u[v]);
    column.mask(v, u[v]);
    if (column.has(v)) sum[0] += sum_of(u[v]);
  }
  float mean = 0.0f;
  if (options.subtract_mean) {
    team_sum(sum);
    mean = sum[0] * options.inverse_features;
  }
  float squares[1] = {0.0f};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!column.has(v)) continue;
#pragma unroll
    for (float& value : u[v]) value -= mean;
    column.mask(v, u[v]);
    float square[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) square[i] = u[v][i] * u[v][i];
    squares[0] += sum_of(square);
  }
  team_sum(squares);
  const float rstd = rsqrtf(squares[0] * options.inverse_features + options.epsilon);
  if (!active) return;
  if (team.rank == 0) {
    if (args.mean != nullptr) args.mean[row] = mean;
    if (args.rstd != nullptr) args.rstd[row] = rstd;
  }

  float factor[kVectors][kVec], offset[kVectors][kVec];
  scale_load.values(1.0f, options.scale_offset, factor);
  bias_load.values(0.0f, 0.0f, offset);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!column.has(v)) continue;
    float y[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) y[i] = u[v][i] * rstd * factor[v][i] + offset[v][i];
    activate(options.activation, y);
    Vector<T, kVec> packed;
    pack(y, packed);
    column.store(static_cast<T*>(args.y) + row_start, v, packed);
  }
}

// --- few rows, only a norm -----------------------------------------------------------------------

constexpr int kPlainThreads = 128;   // threads of a block whose warps have a row each
constexpr int kMostPlainWarps = 16;  // limit on the warps of a row
constexpr int kMostPlainVectors = 4;

// Returns the sum over the threads of a row. Each call uses its own floats of `shared`, one per
// warp, so that, unlike TeamSum, it needs no zeros in `shared` and no barrier before the first sum.
template <bool kOneWarp>
__device__ __forceinline__ float sum_over_row(float value, float* shared) {
  float sum[1] = {value};
  add_over_lanes(kWarpSize, sum);
  if constexpr (kOneWarp) return sum[0];
  if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = sum[0];
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / kWarpSize; ++warp) {
    total += shared[warp];
  }
  return total;
}

// Normalises few rows without residual, pre_bias or activation, with parameters of type P. Almost
// all sizes are compile-time constants, so that few instructions remain besides the loads. Each row
// has a warp (kOneWarp) or a block.
template <typename T, typename P, int kVectors, bool kOneWarp>
__global__ void __launch_bounds__(kOneWarp ? kPlainThreads : kMostPlainWarps * kWarpSize)
    forward_few_plain_rows(const __grid_constant__ ForwardArgs args) {
  constexpr int kVec = 16 / sizeof(T);
  __shared__ float shared[2 * kMostPlainWarps];
  const NormOptions& options = args.options;
  const int lane = threadIdx.x % kWarpSize;
  const int row = kOneWarp ? blockIdx.x * (kPlainThreads / kWarpSize) + threadIdx.x / kWarpSize
                           : static_cast<int>(blockIdx.x);
  if (row >= args.rows) return;
  const int rank = kOneWarp ? lane : threadIdx.x;
  const int step = (kOneWarp ? kWarpSize : static_cast<int>(blockDim.x)) * kVec;
  const int64_t start = static_cast<int64_t>(row) * args.features;
  const auto column = [&](int v) { return rank * kVec + v * step; };
  const auto has = [&](int v) { return column(v) < args.features; };

  Vector<T, kVec> x[kVectors] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (has(v)) x[v] = load_vector<T, kVec>(static_cast<const T*>(args.x) + start + column(v));
  }
  float scale[kVectors][kVec], bias[kVectors][kVec];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      scale[v][i] = 1.0f;
      bias[v][i] = 0.0f;
    }
    if (!has(v)) continue;
    if (args.scale.data != nullptr) load_as_float<P>(args.scale.data, column(v), scale[v]);
    if (args.bias.data != nullptr) load_as_float<P>(args.bias.data, column(v), bias[v]);
  }

  float u[kVectors][kVec];
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    unpack(x[v], u[v]);
    sum += sum_of(u[v]);
  }
  float mean = 0.0f;
  if (options.subtract_mean) {
    mean = sum_over_row<kOneWarp>(sum, shared) * options.inverse_features;
  }
  float squares = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float square[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      u[v][i] -= mean;
      square[i] = u[v][i] * u[v][i];
    }
    if (has(v)) squares += sum_of(square);
  }
  squares = sum_over_row<kOneWarp>(squares, shared + kMostPlainWarps);
  const float rstd = rsqrtf(squares * options.inverse_features + options.epsilon);
  if (rank == 0) {
    if (args.mean != nullptr) args.mean[row] = mean;
    if (args.rstd != nullptr) args.rstd[row] = rstd;
  }
  const float scale_offset = args.scale.data != nullptr ? options.scale_offset : 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!has(v)) continue;
    float y[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      y[i] = u[v][i] * rstd * (scale[v][i] + scale_offset) + bias[v][i];
    }
    Vector<T, kVec> packed;
    pack(y, packed);
    store_vector(static_cast<T*>(args.y) + start + column(v), packed);
  }
}

// --- misaligned rows -----------------------------------------------------------------------------

__host__ __device__ constexpr int flat_forward_blocks(int words) {
  return words <= 4 ? 4 : words <= 8 ? 3 : 2;
}

// Each team normalises rows in place in shared memory, one at a time, with its columns of the
// parameters in registers. args.teams is the number of rows in a tile. All rows of a team start at
// the same half of a 32-bit word, because the number of teams or of features is even. kPlain: no
// pre_bias and no activation, which take registers.
template <typename T, int kWords, bool kWarp, bool kResidual, bool kPlain>
__global__ void __launch_bounds__(kFlatThreads, flat_forward_blocks(kWords))
    forward_flat_rows(const __grid_constant__ ForwardArgs args) {
  using Words = FlatWords<T, kWords>;
  constexpr int kStreams = kResidual ? 2 : 1;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const NormOptions& options = args.options;
  const int features = args.features;
  const Team team(kWarp ? kWarpSize : args.team_size);
  const int teams = kFlatThreads / team.size;
  const void* sources[kStreams] = {args.x};
  if constexpr (kResidual) sources[1] = args.residual;
  TeamSum team_sum(team, reinterpret_cast<float*>(shared_memory));
  FlatRing<T, kStreams> ring(shared_memory + TeamSum::kScratch * sizeof(float), sources, args.teams,
                             args.rows, features, args.stages);
  const Words words(team, features, team.index);
  typename Words::Values scale, bias;
  words.read(args.scale, 1.0f, options.scale_offset, scale);
  words.read(args.bias, 0.0f, 0.0f, bias);
  __syncthreads();

  const int tiles = divide_up(args.rows, args.teams);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int first_row = tile * args.teams;
    const int rows = min(args.teams, args.rows - first_row);
    ring.wait(tile);
    for (int line = team.index; line < rows; line += teams) {
      T* const x_row = ring[0] + line * features;
      typename Words::Values u;
      words.read(x_row, u);
      if (!kPlain && args.pre_bias.data != nullptr) {
        typename Words::Values pre_bias;
        words.read(args.pre_bias, 0.0f, 0.0f, pre_bias);
#pragma unroll
        for (int i = 0; i < Words::kValues; ++i) u[i] += pre_bias[i];
      }
      if constexpr (kResidual) {
        T* const residual_row = ring[1] + line * features;
        typename Words::Values residual;
        words.read(residual_row, residual);
#pragma unroll
        for (int i = 0; i < Words::kValues; ++i) u[i] += residual[i];
        words.write(u, residual_row);
        words.read(residual_row, u);  // the rounded sum
      }
      if constexpr (!kPlain) {
        activate(options.pre_activation, u);
        words.mask(u);
      }
      float sum[1] = {sum_by_chains(u)};
      float mean = 0.0f;
      if (options.subtract_mean) {
        team_sum(sum);
        mean = sum[0] * options.inverse_features;
      }
      typename Words::Values squares;
#pragma unroll
      for (float& value : u) value -= mean;
      words.mask(u);
#pragma unroll
      for (int i = 0; i < Words::kValues; ++i) squares[i] = u[i] * u[i];
      sum[0] = sum_by_chains(squares);
      team_sum(sum);
      const float rstd = rsqrtf(sum[0] * options.inverse_features + options.epsilon);
      if (team.rank == 0) {
        if (args.mean != nullptr) args.mean[first_row + line] = mean;
        if (args.rstd != nullptr) args.rstd[first_row + line] = rstd;
      }
#pragma unroll
      for (int i = 0; i < Words::kValues; ++i) u[i] = u[i] * rstd * scale[i] + bias[i];
      if constexpr (!kPlain) activate(options.activation, u);
      words.write(u, x_row);
    }
    __syncthreads();
    const int64_t start = static_cast<int64_t>(first_row) * features;
    store_flat(ring[0], rows * features, static_cast<T*>(args.y) + start);
    if constexpr (kResidual) {
      store_flat(ring[1], rows * features, static_cast<T*>(args.next_residual) + start);
    }
    bulk_copies_fence();
    __syncthreads();
    ring.fetch();
  }
}

// --- long misaligned rows ------------------------------------------------------------------------

// Whether forward_staged_rows can run: it normalises only numbers that x or next_residual has in
// memory, without a pre_bias or pre_activation in between.
bool stages_rows(const ForwardArgs& args) {
  return args.options.pre_activation == Activation::kNone &&
         (args.residual != nullptr || args.pre_bias.data == nullptr);
}

template <typename T>
int staged_bytes(const ForwardArgs& args) {
  return TeamSum::kScratch * sizeof(float) + RowPieces<T>::most(args.features) * 16;
}

// Each block has a row. Its threads copy the aligned 16-byte pieces around the row to shared
// memory, then read the columns one by one, so that adjacent threads read adjacent parameters.
template <typename T, bool kResidual>
__global__ void __launch_bounds__(kWideThreads, 2)
    forward_staged_rows(const __grid_constant__ ForwardArgs args) {
  using Pieces = RowPieces<T>;
  constexpr int kVec = Pieces::kVec;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  float* const scratch = reinterpret_cast<float*>(shared_memory);
  T* const staged = reinterpret_cast<T*>(scratch + TeamSum::kScratch);
  const Team team(kWideThreads);
  TeamSum team_sum(team, scratch);
  const int row = blockIdx.x;
  const Pieces pieces(row, args.rows, args.features);
  const int count = pieces.count();
  const auto masked_sum = [&](int piece, float (&values)[kVec]) {
    if (!pieces.in_row(piece)) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (!pieces.has(pieces.column(piece) + i)) values[i] = 0.0f;
      }
    }
    return sum_of(values);
  };

  float sum[1] = {0.0f};
#pragma unroll 4
  for (int piece = team.rank; piece < count; piece += kWideThreads) {
    Vector<T, kVec> packed = pieces.load(args.x, piece);
    float u[kVec];
    unpack(packed, u);
    if constexpr (kResidual) {
      float other[kVec];
      unpack(pieces.load(args.residual, piece), other);
      if (args.pre_bias.data != nullptr) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const int column = pieces.column(piece) + i;
          float offset[1] = {0.0f};
          if (pieces.has(column)) load_parameter(args.pre_bias, column, offset);
          u[i] += offset[0];
        }
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) u[i] += other[i];
      pack(u, packed);
      pieces.store(args.next_residual, piece, packed);
      unpack(packed, u);
    }
    store_vector(staged + piece * kVec, packed);
    sum[0] += masked_sum(piece, u);
  }
  team_sum.start();
  float mean = 0.0f;
  if (args.options.subtract_mean) {
    team_sum(sum);
    mean = sum[0] * args.options.inverse_features;
  }
  float squares[1] = {0.0f};
  for (int piece = team.rank; piece < count; piece += kWideThreads) {
    float u[kVec];
    unpack(load_vector<T, kVec>(staged + piece * kVec), u);
#pragma unroll
    for (float& value : u) value = (value - mean) * (value - mean);
    squares[0] += masked_sum(piece, u);
  }
  team_sum(squares);
  const float rstd = __frsqrt_rn(squares[0] * args.options.inverse_features + args.options.epsilon);
  if (team.rank == 0) {
    if (args.mean != nullptr) args.mean[row] = mean;
    if (args.rstd != nullptr) args.rstd[row] = rstd;
  }
  T* const y = static_cast<T*>(args.y) + pieces.start;
#pragma unroll 4
  for (int column = team.rank; column < args.features; column += kWideThreads) {
    float scale[1], bias[1];
    load_scale(args.scale, args.options.scale_offset, column, scale);
    load_or_zero(args.bias, column, bias);
    float value[1] = {(value_at(staged + pieces.shift + column) - mean) * rstd * scale[0] +
                      bias[0]};
    activate(args.options.activation, value);
    store_value(y + column, value[0]);
  }
}

// --- longer rows ---------------------------------------------------------------------------------

// A block reads a row three times, the second and third time from L2, which holds the rows of all
// running blocks (on an H200 two per SM: 264 rows of at most 128 KiB in 16 bits, in 50 MB).
template <typename T, int kVec>
__global__ void __launch_bounds__(kWideThreads)
    forward_wide_rows(const __grid_constant__ ForwardArgs args) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const Team team(args.team_size);
  TeamSum team_sum(team, reinterpret_cast<float*>(shared_memory));
  __syncthreads();
  const int first_column = team.rank * kVec;
  const int column_step = team.size * kVec;

  for (int row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const int64_t row_start = static_cast<int64_t>(row) * args.features;
    const T* x = static_cast<const T*>(args.x) + row_start;
    T* next_residual = static_cast<T*>(args.next_residual) + row_start;

    // A thread reads back only what it wrote itself, so no barrier is needed.
    const auto load_u = [&](int column, float (&u)[kVec]) {
      if (args.residual != nullptr) {
        unpack(load_vector<T, kVec>(next_residual + column), u);
      } else {
        float offset[kVec];
        unpack(load_vector<T, kVec>(x + column), u);
        load_or_zero(args.pre_bias, column, offset);
#pragma unroll
        for (int i = 0; i < kVec; ++i) u[i] += offset[i];
      }
      activate(args.options.pre_activation, u);
    };

    if (args.residual != nullptr) {
      const T* residual = static_cast<const T*>(args.residual) + row_start;
#pragma unroll 2
      for (int column = first_column; column < args.features; column += column_step) {
        float h[kVec], offset[kVec], other[kVec];
        unpack(load_vector<T, kVec>(x + column), h);
        unpack(load_vector<T, kVec>(residual + column), other);
        load_or_zero(args.pre_bias, column, offset);
#pragma unroll
        for (int i = 0; i < kVec; ++i) h[i] = h[i] + offset[i] + other[i];
        Vector<T, kVec> rounded;
        pack(h, rounded);
        store_vector(next_residual + column, rounded);
      }
    }

    float mean = 0.0f;
    if (args.options.subtract_mean) {
      float sum[1] = {0.0f};
#pragma unroll 2
      for (int column = first_column; column < args.features; column += column_step) {
        float u[kVec];
        load_u(column, u);
        sum[0] += sum_of(u);
      }
      team_sum(sum);
      mean = sum[0] * args.options.inverse_features;
    }
    float squares[1] = {0.0f};
#pragma unroll 2
    for (int column = first_column; column < args.features; column += column_step) {
      float u[kVec];
      load_u(column, u);
#pragma unroll
      for (float& value : u) value = (value - mean) * (value - mean);
      squares[0] += sum_of(u);
    }
    team_sum(squares);
    const float rstd =
        __frsqrt_rn(squares[0] * args.options.inverse_features + args.options.epsilon);
    if (team.rank == 0) {
      if (args.mean != nullptr) args.mean[row] = mean;
      if (args.rstd != nullptr) args.rstd[row] = rstd;
    }

#pragma unroll 2
    for (int column = first_column; column < args.features; column += column_step) {
      float y[kVec], scale[kVec], bias[kVec];
      load_u(column, y);
      load_scale(args.scale, args.options.scale_offset, column, scale);
      load_or_zero(args.bias, column, bias);
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = (y[i] - mean) * rstd * scale[i] + bias[i];
      activate(args.options.activation, y);
      Vector<T, kVec> packed;
      pack(y, packed);
      store_vector(static_cast<T*>(args.y) + row_start + column, packed);
    }
  }
}

// --- launch --------------------------------------------------------------------------------------

using ForwardKernel = void (*)(ForwardArgs);

template <typename T, Chain kChain, bool kResidual, bool kMean, bool kWarp>
ForwardKernel rows_kernel(int elements) {
  constexpr ForwardKernel kKernels[kElementChoices] = {
      forward_rows<T, 8, kChain, kResidual, kMean, kWarp>,
      forward_rows<T, 16, kChain, kResidual, kMean, kWarp>,
      forward_rows<T, 24, kChain, kResidual, kMean, kWarp>,
      forward_rows<T, 32, kChain, kResidual, kMean, kWarp>};
  return kKernels[elements / kElementStep - 1];
}

struct ForwardPlan {
  ForwardKernel kernel;
  int parameters;  // parameters in shared memory
};

template <typename T, Chain kChain, bool kResidual, bool kMean = true>
ForwardPlan plan_rows(const ForwardArgs& args, int elements) {
  constexpr int kShared = ForwardForm<T, kChain, kResidual, kMean>::kShared;
  const bool spares_pre_bias = kResidual && args.pre_bias.data == nullptr;
  // Only frequent combinations (chains) have a kernel for teams of one warp, to save compile time.
  constexpr bool kKnowsWarps = kChain != Chain::kGeneral;
  return {kKnowsWarps && args.team_size == kWarpSize
              ? rows_kernel<T, kChain, kResidual, kMean, kKnowsWarps>(elements)
              : rows_kernel<T, kChain, kResidual, kMean, false>(elements),
          kShared - spares_pre_bias};
}

Chain chain_of(const ForwardArgs& args) {
  return chain_of(args.options, args.residual != nullptr || args.pre_bias.data != nullptr);
}

bool has_mean_or_bias(const ForwardArgs& args) {
  return args.options.subtract_mean || args.bias.data != nullptr;
}

template <typename T>
ForwardPlan plan_forward(const ForwardArgs& args, int elements) {
  switch (chain_of(args)) {
    case Chain::kPlain:
      return has_mean_or_bias(args) ? plan_rows<T, Chain::kPlain, false>(args, elements)
                                    : plan_rows<T, Chain::kPlain, false, false>(args, elements);
    case Chain::kRelu:
      return args.residual != nullptr ? plan_rows<T, Chain::kRelu, true>(args, elements)
                                      : plan_rows<T, Chain::kRelu, false>(args, elements);
    default:
      return plan_rows<T, Chain::kGeneral, true>(args, elements);
  }
}

// Fewest threads of a team of several warps for which blocks take short runs of rows, if there is
// no residual. For smaller teams, reloading the parameters in every block takes too long.
constexpr int kWideTeam = 128;

// Returns ForwardArgs::run in rows per team, for matrices larger than L2. Blocks that each take a
// short run keep all SMs busy and the rows in flight close together in memory. But every block
// reloads the parameters, which takes longest if few blocks are resident or if the parameters are
// copied to shared memory.
int neighbouring_rows(const ForwardArgs& args, int shared_parameters, int resident) {
  // A block computes many narrow rows at once, so a short run would be mostly loads of parameters.
  if (args.team_size < kWarpSize) return 0;
  const bool warp = args.team_size == kWarpSize;
  if (!warp && shared_parameters > 1) return 0;
  if (args.residual != nullptr) return warp ? 1 : 2;
  if (!warp && args.team_size < kWideTeam) return 0;
  int parameters = 0;
  for (const Parameter& parameter : {args.scale, args.bias, args.pre_bias}) {
    parameters += parameter.data != nullptr;
  }
  if (warp) return parameters + 1;
  if (parameters < 2) return resident == 3 ? 2 : 4;
  return resident > 2 ? 4 : resident == 2 ? 8 : 0;
}

struct ForwardConfig {
  bool few_rows;  // whether to use forward_few_rows where it can hold a row
  int threads;    // limit on the threads of a block
  int run;        // rows per team, or -1 to call neighbouring_rows
};

// Split of a row over warps and over each thread's vectors, for a norm alone.
struct PlainSplit {
  int warps;
  int vectors;  // 0 if the row is too long
};

// Returns the fewest warps whose threads hold the row in kMostPlainVectors vectors each. The limit
// is two vectors if there are at most two rows per SM, where threads are plentiful.
template <typename T>
PlainSplit split_plain_row(const ForwardArgs& args, const Device& device) {
  const int most = args.rows <= 2 * device.multiprocessors ? 2 : kMostPlainVectors;
  const int lanes = args.features * static_cast<int>(sizeof(T)) / 16;
  for (int warps = 1; warps <= kMostPlainWarps; warps *= 2) {
    const int vectors = divide_up(lanes, warps * kWarpSize);
    if (vectors <= (warps == kMostPlainWarps ? kMostPlainVectors : most)) return {warps, vectors};
  }
  return {};
}

template <typename T, typename P, bool kOneWarp>
ForwardKernel few_plain_rows_kernel(int vectors) {
  constexpr ForwardKernel kKernels[kMostPlainVectors] = {
      forward_few_plain_rows<T, P, 1, kOneWarp>, forward_few_plain_rows<T, P, 2, kOneWarp>,
      forward_few_plain_rows<T, P, 3, kOneWarp>, forward_few_plain_rows<T, P, 4, kOneWarp>};
  return kKernels[vectors - 1];
}

template <typename T>
ffi::Error launch_few_plain_rows(const ForwardArgs& args, const PlainSplit& split, Dtype parameters,
                                 cudaStream_t stream) {
  const bool wide = parameters == Dtype::kFloat32;
  const auto kernel_of = [&](auto one_warp) {
    return wide ? few_plain_rows_kernel<T, float, one_warp()>(split.vectors)
                : few_plain_rows_kernel<T, T, one_warp()>(split.vectors);
  };
  if (split.warps == 1) {
    return launch_kernel(kernel_of(std::true_type{}), args,
                         {dim3(divide_up(args.rows, kPlainThreads / kWarpSize)), kPlainThreads, 0},
                         stream);
  }
  return launch_kernel(kernel_of(std::false_type{}), args,
                       {dim3(args.rows), split.warps * kWarpSize, 0}, stream);
}

// The dtype of scale and bias, if they share one that forward_few_plain_rows is compiled for.
template <typename T>
std::optional<Dtype> plain_parameters(const ForwardArgs& args) {
  constexpr Dtype dtype = std::is_same_v<T, float>           ? Dtype::kFloat32
                          : std::is_same_v<T, __nv_bfloat16> ? Dtype::kBfloat16
                                                             : Dtype::kFloat16;
  const bool has_scale = args.scale.data != nullptr, has_bias = args.bias.data != nullptr;
  if (has_scale && has_bias && args.scale.dtype != args.bias.dtype) return std::nullopt;
  const Dtype own = has_scale ? args.scale.dtype : has_bias ? args.bias.dtype : dtype;
  if (own != dtype && own != Dtype::kFloat32) return std::nullopt;
  return own;
}

template <typename T>
ffi::Error launch_few_rows(ForwardArgs args, const Device& device, cudaStream_t stream,
                           bool* done) {
  *done = true;
  if (chain_of(args) == Chain::kPlain) {
    const PlainSplit split = split_plain_row<T>(args, device);
    const auto parameters = plain_parameters<T>(args);
    if (split.vectors != 0 && parameters) {
      return launch_few_plain_rows<T>(args, split, *parameters, stream);
    }
  }
  const Spread spread = choose_spread(args.features, 16 / sizeof(T), false, kFewRowsElements,
                                      kForwardLimits, Ties::kMoreThreads, Narrow::kManyThreads);
  *done = spread.elements != 0;
  if (!*done) return ffi::Error::Success();
  const int least = std::max(spread.team_size, kWarpSize);
  const int threads = std::max(kFewRowsThreads / least * least, least);
  args.team_size = spread.team_size;
  args.teams = threads / spread.team_size;
  return launch_kernel(spread.elements == 8 ? forward_few_rows<T, 8> : forward_few_rows<T, 16>,
                       args,
                       {dim3(divide_up(args.rows, args.teams)), threads,
                        static_cast<int>(TeamSum::kScratch * sizeof(float))},
                       stream);
}

// Returns the kernel with the fewest registers that hold a thread's `words` of a row. A row gets
// twice the warps only if half as many cannot hold it, so with several warps a thread has more than
// kMostFlatWords / 2 words: smaller kernels are compiled only for one warp (kWarp).
template <typename T, bool kWarp, bool kResidual, bool kPlain, int kWords = kMostFlatWords>
ForwardKernel flat_kernel(int words) {
  constexpr int kFewer = fewer_flat_words(kWords);
  if constexpr (kFewer > (kWarp ? 0 : kMostFlatWords / 2)) {
    if (words <= kFewer) return flat_kernel<T, kWarp, kResidual, kPlain, kFewer>(words);
  }
  return forward_flat_rows<T, kWords, kWarp, kResidual, kPlain>;
}

template <typename T, bool kWarp>
ForwardKernel flat_kernel(const ForwardArgs& args, int words) {
  const bool plain = chain_of(args.options, args.pre_bias.data != nullptr) == Chain::kPlain;
  if (args.residual != nullptr) {
    return plain ? flat_kernel<T, kWarp, true, true>(words)
                 : flat_kernel<T, kWarp, true, false>(words);
  }
  return plain ? flat_kernel<T, kWarp, false, true>(words)
               : flat_kernel<T, kWarp, false, false>(words);
}

// Launches forward_flat_rows and sets `done`, if registers hold a row and shared memory holds two
// tiles of the fewest rows that start and end at multiples of 16 bytes.
template <typename T>
ffi::Error launch_flat_rows(ForwardArgs args, const Device& device, cudaStream_t stream,
                            bool* done) {
  constexpr int kPerWord = FlatWords<T, 1>::kPerWord;
  const int row_words = divide_up(args.features, kPerWord);
  int warps = 1;
  while (row_words > warps * kWarpSize * kMostFlatWords) warps *= 2;
  args.team_size = warps * kWarpSize;
  const int teams = kFlatThreads / args.team_size;
  const int streams = args.residual == nullptr ? 1 : 2;
  const int head = TeamSum::kScratch * sizeof(float) + kFlatBarrierBytes;
  const int room = device.shared_bytes - head;
  args.teams = flat_ring_rows<T>(args.rows, args.features, room / (2 * streams), device);
  *done = args.teams > 0 && teams > 0 && (teams % 2 == 0 || args.features % kPerWord == 0);
  if (!*done) return ffi::Error::Success();
  const int stage_bytes = streams * flat_tile_bytes<T>(args.teams, args.features);
  args.stages = std::min(room / stage_bytes, kMaxStages);
  const int words = divide_up(row_words, args.team_size);
  const ForwardKernel kernel =
      warps == 1 ? flat_kernel<T, true>(args, words) : flat_kernel<T, false>(args, words);
  Launch launch;
  launch.threads = kFlatThreads;
  launch.shared_bytes = head + args.stages * stage_bytes;
  RETURN_IF_ERROR(allow_shared_memory(kernel, device));
  int resident = 0;
  RETURN_IF_ERROR(resident_blocks(kernel, launch, &resident));
  launch.grid = dim3(std::min(divide_up(args.rows, args.teams), resident * device.multiprocessors));
  return launch_kernel(kernel, args, launch, stream);
}

template <typename T>
ffi::Error launch_forward(ForwardArgs args, const ForwardConfig& config, const Device& device,
                          cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(T);
  const bool aligned = are_aligned({args.x, args.residual, args.scale.data, args.bias.data,
                                    args.pre_bias.data, args.y, args.next_residual});
  const bool shifted = args.features % kVec != 0;
  bool done = false;
  if (shifted && aligned) {
    RETURN_IF_ERROR(launch_flat_rows<T>(args, device, stream, &done));
  } else if (config.few_rows && aligned) {
    RETURN_IF_ERROR(launch_few_rows<T>(args, device, stream, &done));
  }
  if (done) return ffi::Error::Success();
  // With a mean, warps exchange two sums a row instead of one, which favours fewer threads.
  const bool plain = chain_of(args) == Chain::kPlain && !has_mean_or_bias(args);
  const Spread spread =
      choose_spread(args.features, kVec, false, kElementStep * kElementChoices, kForwardLimits,
                    plain ? Ties::kMoreThreads : Ties::kFewerThreads, Narrow::kManyValues);
  Launch launch;
  ForwardPlan plan = {};
  const int streams = args.residual == nullptr ? 1 : 2;
  int stage_bytes = 0, most_stages = 0;
  if (spread.elements != 0 && aligned && !shifted) {
    args.team_size = spread.team_size;
    plan = plan_forward<T>(args, spread.elements);
    launch.threads = choose_threads(spread, args.rows, config.threads, device);
    args.teams = launch.threads / spread.team_size;
    launch.shared_bytes =
        (TeamSum::kScratch + spread.parameters(plan.parameters, kVec)) * sizeof(float) +
        kRingBarriers * sizeof(uint64_t);
    stage_bytes = streams * slot_values(args.teams, args.features, kVec, false) * sizeof(T);
    most_stages = std::min(kMaxStages, (device.shared_bytes - launch.shared_bytes) / stage_bytes);
  }
  if (most_stages < 1 && shifted && aligned && stages_rows(args) &&
      staged_bytes<T>(args) <= device.shared_bytes) {
    const auto kernel =
        args.residual != nullptr ? forward_staged_rows<T, true> : forward_staged_rows<T, false>;
    RETURN_IF_ERROR(allow_shared_memory(kernel, device));
    return launch_kernel(kernel, args, {dim3(args.rows), kWideThreads, staged_bytes<T>(args)},
                         stream);
  }
  if (most_stages < 1) {
    args.team_size = kWideThreads;
    const bool vectors = aligned && !shifted;
    const auto kernel = vectors ? forward_wide_rows<T, kVec> : forward_wide_rows<T, 1>;
    const int blocks = std::min(args.rows, 2 * device.multiprocessors);
    return launch_kernel(kernel, args,
                         {dim3(blocks), kWideThreads, TeamSum::kScratch * sizeof(float)}, stream);
  }
  RETURN_IF_ERROR(allow_shared_memory(plan.kernel, device));
  // Whether the bytes read and written exceed 1.5 times the size of L2.
  const int64_t bytes = int64_t{2 * streams} * args.rows * args.features * sizeof(T);
  const bool large = 2 * bytes > int64_t{3} * device.l2_bytes;
  args.stages = std::min(most_stages, !large && spread.team_size <= kWarpSize ? 3 : 2);
  launch.shared_bytes += args.stages * stage_bytes;
  int resident = 0;
  RETURN_IF_ERROR(resident_blocks(plan.kernel, launch, &resident));
  args.run = config.run >= 0 ? config.run
             : large         ? neighbouring_rows(args, plan.parameters, resident)
                             : 0;
  args.run *= args.teams;
  // If few blocks are resident, one more pipeline stage keeps more rows in flight. It is added
  // only if its shared memory lets as many blocks be resident as before.
  if (resident <= 2 && args.run > args.stages * args.teams && args.stages < most_stages) {
    Launch larger = launch;
    larger.shared_bytes += stage_bytes;
    int still_resident = 0;
    RETURN_IF_ERROR(resident_blocks(plan.kernel, larger, &still_resident));
    if (still_resident == resident) {
      launch = larger;
      ++args.stages;
    }
  }
  int blocks = divide_up(args.rows, args.run == 0 ? args.teams : args.run);
  if (args.run == 0) blocks = std::min(blocks, resident * device.multiprocessors);
  launch.grid = dim3(blocks);
  return launch_kernel(plan.kernel, args, launch, stream);
}

ffi::Error layer_norm_forward(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                              ffi::AnyBuffer bias, ffi::AnyBuffer residual, ffi::AnyBuffer pre_bias,
                              ffi::Result<ffi::AnyBuffer> y,
                              ffi::Result<ffi::AnyBuffer> next_residual,
                              ffi::Result<ffi::AnyBuffer> mean, ffi::Result<ffi::AnyBuffer> rstd,
                              bool subtract_mean, float epsilon, float scale_offset,
                              std::string_view pre_activation, std::string_view activation,
                              bool few_rows, int64_t threads, int64_t run) {
  RETURN_IF_ERROR(check_matrix("x", x));
  const int64_t rows = x.dimensions()[0];
  const int64_t features = x.dimensions()[1];
  ForwardArgs args = {};
  args.rows = static_cast<int>(rows);
  args.features = static_cast<int>(features);
  RETURN_IF_ERROR(parse_options(features, subtract_mean, epsilon, scale_offset, pre_activation,
                                activation, &args.options));
  RETURN_IF_ERROR(parse_parameter("scale", scale, features, &args.scale));
  RETURN_IF_ERROR(parse_parameter("bias", bias, features, &args.bias));
  RETURN_IF_ERROR(parse_parameter("pre_bias", pre_bias, features, &args.pre_bias));
  RETURN_IF_ERROR(check_like("y", *y, x));
  RETURN_IF_ERROR(check_like_or_absent("residual", residual, x));
  if (is_absent(residual) != is_absent(*next_residual)) {
    return ffi::Error::InvalidArgument("next_residual goes with residual: both or neither");
  }
  RETURN_IF_ERROR(check_like_or_absent("next_residual", *next_residual, x));
  if (!is_absent(*mean)) RETURN_IF_ERROR(check_float32("mean", *mean, {rows}));
  if (!is_absent(*rstd)) RETURN_IF_ERROR(check_float32("rstd", *rstd, {rows}));
  if (rows == 0) return ffi::Error::Success();
  args.x = x.untyped_data();
  args.residual = data_or_null(residual);
  args.y = y->untyped_data();
  args.next_residual = data_or_null(*next_residual);
  args.mean = data_or_null<float>(*mean);
  args.rstd = data_or_null<float>(*rstd);

  const int most_threads = threads_limit(kForwardLimits, kElementStep);
  if (threads < kWarpSize || threads > most_threads || run < -1 || run > rows) {
    return ffi::Error::InvalidArgument("layer_norm: threads must be " + std::to_string(kWarpSize) +
                                       " to " + std::to_string(most_threads) +
                                       " and run -1 or more, got " + std::to_string(threads) +
                                       " and " + std::to_string(run));
  }
  const ForwardConfig config = {few_rows, static_cast<int>(threads), static_cast<int>(run)};
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  switch (*dtype_of(x)) {
    case Dtype::kFloat32:
      return launch_forward<float>(args, config, device, stream);
    case Dtype::kBfloat16:
      return launch_forward<__nv_bfloat16>(args, config, device, stream);
    default:
      return launch_forward<__half>(args, config, device, stream);
  }
}

}  // namespace

DEFINE_HANDLER(jaxfused_layer_norm_forward, layer_norm_forward,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // scale
                   .Arg<ffi::AnyBuffer>()  // bias
                   .Arg<ffi::AnyBuffer>()  // residual
                   .Arg<ffi::AnyBuffer>()  // pre_bias
                   .Ret<ffi::AnyBuffer>()  // y
                   .Ret<ffi::AnyBuffer>()  // next_residual
                   .Ret<ffi::AnyBuffer>()  // mean
                   .Ret<ffi::AnyBuffer>()  // rstd
                   .Attr<bool>("subtract_mean")
                   .Attr<float>("epsilon")
                   .Attr<float>("scale_offset")
                   .Attr<std::string_view>("pre_activation")
                   .Attr<std::string_view>("activation")
                   .Attr<bool>("few_rows")
                   .Attr<int64_t>("threads")
                   .Attr<int64_t>("run"),
               {ffi::Traits::kCmdBufferCompatible});
