// layer_norm and rms_norm, backward. With u = pre_activation(h), xhat = (u - mean) rstd, z = xhat
// scale + bias, dz = dy activation'(z) and g = dz scale:
//
//     dh = pre_activation'(h) rstd (g - mean(g) - xhat mean(g xhat)) + dnext_residual
//     dscale = sum(dz xhat),   dbias = sum(dz),   dpre_bias = sum(dh)   over the rows
//
// (rms_norm: without mean(g)). Each block sums over its rows, and a second, small kernel adds the
// blocks' sums in a fixed order, without atomics, so that results repeat bit for bit.

#include "common/row_ring.cuh"
#include "common/staged_rows.cuh"
#include "common/unaligned_rows.cuh"
#include "layer_norm.cuh"

namespace {

constexpr int kParameters = 3;  // scale, bias, pre_bias

struct BackwardArgs {
  const void* dy;
  const void* dnext_residual;  // nullptr if there is none; pre_bias is then still to be added to h
  const void* h;
  const float* mean;  // nullptr: the norm subtracts no mean
  const float* rstd;
  Parameter scale;
  Parameter bias;
  Parameter pre_bias;
  void* dx;
  // Each block's dscale, dbias and dpre_bias, summed over its rows: [segments * segment_blocks,
  // features] each, nullptr if not needed
  float* gradients[kParameters];
  float2* row_terms;  // row_terms() of each row; backward_row_terms writes them
  int rows;           // rows of a segment, whose parameter gradients are its own
  int segments;
  int segment_blocks;
  int features;
  NormOptions options;
  int team_size;  // threads that share a row (a team)
  int stages;
  int teams;  // teams of a block in backward_few_rows; rows of a tile in backward_flat_rows
  // Used by backward_few_rows only.
  int column_blocks;  // blocks of kBlockColumns columns of one segment
  int row_splits;     // blocks of a cluster, which divide the rows of their columns

  __device__ bool adds_pre_bias() const {
    return pre_bias.data != nullptr && dnext_residual == nullptr;
  }
};

// Computes, for kVec columns of a row, centred = pre_activation(h) - mean, where h includes
// pre_bias, and turns `dz`, which holds dy, into dy activation'(z).
template <int kVec>
__device__ __forceinline__ void prepare(const NormOptions& options, float mean, float rstd,
                                        const float (&h)[kVec], const float (&scale)[kVec],
                                        const float (&bias)[kVec], float (&dz)[kVec],
                                        float (&centred)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) centred[i] = h[i];
  activate(options.pre_activation, centred);
#pragma unroll
  for (float& value : centred) value -= mean;
  if (options.activation != Activation::kNone) {
    float z[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) z[i] = centred[i] * rstd * scale[i] + bias[i];
    multiply_derivative(options.activation, z, dz);
  }
}

// Adds kVec columns of a row to the row's sum of g centred (sums[0]), where g = dz scale, and to
// the columns' sums over rows of dz xhat (gradients[0]), where xhat = centred rstd. If kSums > 1,
// also to the row's sum of g; if kGradients > 1, also to the columns' sums of dz.
template <int kVec, int kSums, int kGradients>
__device__ __forceinline__ void add_to_sums(float rstd, const float (&scale)[kVec],
                                            const float (&dz)[kVec], const float (&centred)[kVec],
                                            float (&sums)[kSums],
                                            float (&gradients)[kGradients][kVec]) {
  float parts[kSums] = {};
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float product = dz[i] * centred[i];
    parts[0] += product * scale[i];
    gradients[0][i] += product * rstd;
    if constexpr (kSums > 1) parts[1] += dz[i] * scale[i];
    if constexpr (kGradients > 1) gradients[1][i] += dz[i];
  }
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] += parts[i];
}

// Returns the terms of dh that depend on the row's sums: rstd mean(g xhat), and mean(g) or 0
// without a mean, where g = dz scale and xhat is the normalised h.
template <int kSums>
__device__ __forceinline__ float2 row_terms(const NormOptions& options, float rstd,
                                            const float (&sums)[kSums]) {
  const float slope = sums[0] * options.inverse_features * rstd * rstd;
  const bool centred = kSums > 1 && options.subtract_mean;
  return make_float2(slope, centred ? sums[kSums - 1] * options.inverse_features : 0.0f);
}

// Computes dh of kVec columns of a row, without dnext_residual. `terms` is the row's row_terms().
template <int kVec>
__device__ __forceinline__ void gradient_of_h(const NormOptions& options, float rstd, float2 terms,
                                              const float (&h)[kVec], const float (&scale)[kVec],
                                              const float (&dz)[kVec], const float (&centred)[kVec],
                                              float (&dh)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    // The product is rounded first: an FMA would leave a residue where g equals mean(g).
    const float g = __fmul_rn(dz[i], scale[i]) - terms.y;
    dh[i] = (g - centred[i] * terms.x) * rstd;
  }
  multiply_derivative(options.pre_activation, h, dh);
}

// --- rows that one or two blocks hold ------------------------------------------------------------

// Rows of h and dy arrive in a ring of buffers in shared memory. A thread holds its columns of a
// row packed in registers, since it reads them before and after the row's sums. A cluster of two
// blocks (kPair) shares a row that takes more registers than a block has. kMean: whether there is a
// mean or a dbias; without both, only kPlain is compiled.
template <Chain kChain, bool kPair>
constexpr ThreadLimits backward_limits() {
  if (kPair) return {0, 0, 0, 256};
  return kChain == Chain::kPlain ? ThreadLimits{512, 512, 384, 256}
                                 : ThreadLimits{512, 384, 256, 256};
}

// Whether threads hold the scale in registers. With kShifted, rows start at different offsets from
// a multiple of 16 bytes, so thread `rank` has other columns in each team. Teams then cannot share
// parameters in shared memory, and threads hold all in registers.
template <typename T, Chain kChain, bool kShifted>
constexpr bool kHoldsScale = (kChain == Chain::kPlain && sizeof(T) == 2) || kShifted;

// Number of parameters in shared memory.
template <typename T, Chain kChain, bool kShifted>
constexpr int kBackwardParameters = kShifted ? 0
                                             : (kChain == Chain::kPlain  ? 1
                                                : kChain == Chain::kRelu ? 2
                                                                         : 3) -
                                                   kHoldsScale<T, kChain, kShifted>;

template <typename T, int kElements, Chain kChain, bool kMean, bool kResidual, bool kPair,
          bool kShifted>
__global__ void __launch_bounds__(threads_limit(backward_limits<kChain, kPair>(), kElements))
    backward_rows(const __grid_constant__ BackwardArgs args) {
  static_assert(!kShifted || (kChain != Chain::kRelu && !kPair));
  constexpr int kBlocks = kPair ? 2 : 1;  // blocks that share a row
  constexpr int kVec = 16 / sizeof(T);
  constexpr int kVectors = kElements / kVec;
  constexpr int kSums = kMean ? 2 : 1;
  constexpr int kGradients = !kMean ? 1 : kChain == Chain::kPlain ? 2 : 3;
  static_assert(kMean || kChain == Chain::kPlain);
  using Columns = Columns<kVec, kVectors, kShifted>;
  using Ring = RowRing<T, kVec, kVectors, kResidual ? 3 : 2, kShifted>;
  using RowSum = std::conditional_t<kPair, PairSum, TeamSum>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);

  const NormOptions options = known_options<kChain>(args.options);
  const bool has_dnext = kResidual && args.dnext_residual != nullptr;
  const Team team(args.team_size);
  RowSum row_sum(team, shared);
  shared += TeamSum::kScratch;
  const int width = args.features / kBlocks;
  const int first_column = kPair ? cluster_rank() * width : 0;
  const int unit = blockIdx.x / kBlocks;
  const int segment = unit / args.segment_blocks;
  // Each warp, or each team larger than a warp, has its own part of the ring.
  const int height = max(kWarpSize / team.size, 1);
  const int teams = blockDim.x / team.size;
  const int ring_unit = team.index / height;
  const int first_row = segment * args.rows + unit % args.segment_blocks * teams;
  const RowWalk walk(team, height, ring_unit, first_row + ring_unit * height,
                     args.segment_blocks * teams, (segment + 1) * args.rows);
  const Columns column(team, width, first_column,
                       shift_of<kVec, kShifted>(walk.first + walk.line, args.features));
  ColumnValues<kVec, kVectors, kHoldsScale<T, kChain, kShifted>> scale(shared, team);
  ColumnValues<kVec, kVectors, kChain == Chain::kPlain || kShifted> pre_bias(shared, team);
  ColumnValues<kVec, kVectors, kChain != Chain::kGeneral || kShifted> bias(shared, team);
  uint64_t* barriers = reinterpret_cast<uint64_t*>(shared);
  shared += kRingBarriers * sizeof(uint64_t) / sizeof(float);

  // The first rows are in flight while the parameters are loaded.
  const auto source = [&](const void* rows) -> const void* {
    return rows == nullptr ? nullptr : static_cast<const T*>(rows) + first_column;
  };
  const void* const sources[] = {source(args.h), source(args.dy), source(args.dnext_residual)};
  Ring ring(barriers, shared, sources, args.features, args.stages, team, column, walk);
  // The next row's mean and rstd are loaded before a row is computed, because a load takes about as
  // long as that.
  const auto load_statistics = [&](int row) {
    if (row >= walk.end) return make_float2(0.0f, 0.0f);
    const bool centred = kMean && args.mean != nullptr;
    return make_float2(centred ? args.mean[row] : 0.0f, args.rstd[row]);
  };
  float2 next_statistics = load_statistics(walk.first + walk.line);
  {
    using Load = ParameterLoad<kVec, kVectors, kShifted>;
    const bool adds = kChain != Chain::kPlain && args.adds_pre_bias();
    const Parameter own_pre_bias = adds ? args.pre_bias : Parameter{};
    const Parameter own_bias = kChain == Chain::kGeneral ? args.bias : Parameter{};
    if constexpr (kElements <= kTogetherElements) {
      const Load loads[] = {{args.scale, column}, {own_pre_bias, column}, {own_bias, column}};
      write_columns(loads[0], 1.0f, options.scale_offset, scale);
      if (kChain != Chain::kPlain) write_columns(loads[1], 0.0f, 0.0f, pre_bias);
      if (kChain == Chain::kGeneral) write_columns(loads[2], 0.0f, 0.0f, bias);
    } else {
      write_columns(Load(args.scale, column), 1.0f, options.scale_offset, scale);
      if (kChain != Chain::kPlain) write_columns(Load(own_pre_bias, column), 0.0f, 0.0f, pre_bias);
      if (kChain == Chain::kGeneral) write_columns(Load(own_bias, column), 0.0f, 0.0f, bias);
    }
  }
  float gradients[kVectors][kGradients][kVec] = {};
  row_sum.start();

  for (int base = walk.first; base < walk.end; base += walk.step) {
    const int row = base + walk.line;
    const bool active = row < walk.end;
    const float mean = next_statistics.x;
    const float rstd = next_statistics.y;
    next_statistics = load_statistics(row + walk.step);
    Vector<T, kVec> inputs[kVectors][2], dnext[kVectors];
    const auto read = [&](int v, float (&h)[kVec], float (&factor)[kVec], float (&dz)[kVec],
                          float (&centred)[kVec]) {
      unpack(inputs[v][0], h);
      unpack(inputs[v][1], dz);
      column.mask(v, h);
      column.mask(v, dz);
      float offset[kVec] = {};
      scale.read(v, factor);
      if constexpr (kChain != Chain::kPlain) {
        pre_bias.read(v, offset);
#pragma unroll
        for (int i = 0; i < kVec; ++i) h[i] += offset[i];
      }
      if constexpr (kChain == Chain::kGeneral) bias.read(v, offset);
      prepare(options, mean, rstd, h, factor, offset, dz, centred);
    };
    float sums[kSums] = {};
    ring.wait();
    if (active) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float h[kVec], factor[kVec], dz[kVec], centred[kVec];
        inputs[v][0] = ring.read(0, v);
        inputs[v][1] = ring.read(1, v);
        if (has_dnext) dnext[v] = ring.read(2, v);
        read(v, h, factor, dz, centred);
        add_to_sums(rstd, factor, dz, centred, sums, gradients[v]);
      }
    }
    row_sum(sums);
    ring.fetch();
    const float2 terms = row_terms(options, rstd, sums);
    if (active) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float h[kVec], factor[kVec], dz[kVec], centred[kVec], dh[kVec];
        read(v, h, factor, dz, centred);
        gradient_of_h(options, rstd, terms, h, factor, dz, centred, dh);
        if (!column.has(v)) continue;
        if (has_dnext) {
          float addend[kVec];
          unpack(dnext[v], addend);
#pragma unroll
          for (int i = 0; i < kVec; ++i) dh[i] += addend[i];
        }
        if constexpr (kGradients > 2) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) gradients[v][2][i] += dh[i];
        }
        Vector<T, kVec> dx;
        pack(dh, dx);
        column.store_once(static_cast<T*>(args.dx) + column.start(row, args.features), v, dx);
      }
    }
  }

  // Adds the columns' gradients of the block's teams, in the shared memory of the ring, which no
  // row needs any more.
#pragma unroll
  for (int i = 0; i < kGradients; ++i) {
    if (args.gradients[i] == nullptr) continue;
    float values[kVectors][kVec];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) values[v][j] = gradients[v][i][j];
    }
    __syncthreads();
    add_over_teams(values, team, column, shared,
                   args.gradients[i] + column.start(unit, args.features));
  }
}

// --- misaligned rows -----------------------------------------------------------------------------

// Limit on the rows of a tile. With small tiles several blocks are resident on an SM, so that one
// computes while another waits for memory.
constexpr int kMostFlatTileRows = 64;

// Resident blocks of an SM that the compiler must leave registers for.
constexpr int flat_blocks(Chain chain, int steps) {
  return chain == Chain::kGeneral && steps > 12 ? 1 : 2;
}

template <typename T, int kSteps, Chain kChain>
__global__ void __launch_bounds__(kFlatThreads, flat_blocks(kChain, kSteps))
    backward_flat_rows(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ float2 statistics[kMostFlatTileRows];
  constexpr int kGradients = kChain == Chain::kPlain ? 2 : 3;
  const NormOptions options = known_options<kChain>(args.options);
  const int segment = blockIdx.x / args.segment_blocks;
  const bool has_dnext = args.dnext_residual != nullptr;
  const bool has_pre_bias = kChain != Chain::kPlain && args.adds_pre_bias();
  const int tile_bytes = round_up(args.teams * args.features * static_cast<int>(sizeof(T)), 16);
  T* const h_tile = reinterpret_cast<T*>(shared_memory);
  T* const dy_tile = reinterpret_cast<T*>(shared_memory + tile_bytes);
  T* const dnext_tile = reinterpret_cast<T*>(shared_memory + 2 * tile_bytes);
  float* const scale = reinterpret_cast<float*>(shared_memory + (has_dnext ? 3 : 2) * tile_bytes);
  float* const bias = scale + args.features;
  float* const pre_bias = bias + args.features;
  load_flat_parameter(args.scale, args.features, 1.0f, options.scale_offset, scale);
  load_flat_parameter(args.bias, args.features, 0.0f, 0.0f, bias);
  if (has_pre_bias) load_flat_parameter(args.pre_bias, args.features, 0.0f, 0.0f, pre_bias);

  const FlatColumns column(args.features);
  float gradients[kGradients][kSteps] = {};
  for (int first = blockIdx.x % args.segment_blocks * args.teams; first < args.rows;
       first += args.segment_blocks * args.teams) {
    const int rows = min(args.teams, args.rows - first);
    const int count = rows * args.features;
    const int64_t first_row = static_cast<int64_t>(segment) * args.rows + first;
    const int64_t start = first_row * args.features;
    {
      const FlatLoad<T> h(static_cast<const T*>(args.h) + start, count);
      const FlatLoad<T> dy(static_cast<const T*>(args.dy) + start, count);
      const FlatLoad<T> dnext(static_cast<const T*>(args.dnext_residual) + start,
                              has_dnext ? count : 0);
      if (static_cast<int>(threadIdx.x) < rows) {
        const int64_t row = first_row + threadIdx.x;
        statistics[threadIdx.x] =
            make_float2(args.mean == nullptr ? 0.0f : args.mean[row], args.rstd[row]);
      }
      h.store(h_tile);
      dy.store(dy_tile);
      dnext.store(dnext_tile);
    }
    __syncthreads();

    for (int line = threadIdx.x / kWarpSize; line < rows; line += kFlatThreads / kWarpSize) {
      const float mean = statistics[line].x;
      const float rstd = statistics[line].y;
      const int row_start = line * args.features;
      float h[kSteps], dz[kSteps], centred[kSteps], factor[kSteps], offset[kSteps];
      column.read(h_tile + row_start, h);
      column.read(dy_tile + row_start, dz);
      column.read(scale, factor);
      column.read(bias, offset);
      if (has_pre_bias) {
        float addend[kSteps];
        column.read(pre_bias, addend);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) h[i] += addend[i];
      }
      prepare(options, mean, rstd, h, factor, offset, dz, centred);
      float sums[2] = {};
      add_to_sums(rstd, factor, dz, centred, sums, gradients);
      add_over_lanes(kWarpSize, sums);
      float dh[kSteps];
      gradient_of_h(options, rstd, row_terms(options, rstd, sums), h, factor, dz, centred, dh);
      if (has_dnext) {
        float addend[kSteps];
        column.read(dnext_tile + row_start, addend);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) dh[i] += addend[i];
      }
      if constexpr (kGradients > 2) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) gradients[2][i] += dh[i];
      }
      column.write(dh, dy_tile + row_start);
    }
    __syncthreads();
    store_flat(dy_tile, count, static_cast<T*>(args.dx) + start);
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < kGradients; ++i) {
    if (args.gradients[i] == nullptr) continue;
    __syncthreads();
    add_over_warps(column, gradients[i], reinterpret_cast<float*>(shared_memory),
                   args.gradients[i] + static_cast<int64_t>(blockIdx.x) * args.features);
  }
}

// --- longer rows ---------------------------------------------------------------------------------

// Two kernels read these rows, one for the sums of each row and one for dx and the sums over rows,
// because no block has registers for both a row and the sums of its columns.

template <int kVec>
struct ColumnParameters {
  float scale[kVec], bias[kVec], pre_bias[kVec];

  __device__ __forceinline__ ColumnParameters(const BackwardArgs& args, int column) {
    load_scale(args.scale, args.options.scale_offset, column, scale);
    load_or_zero(args.bias, column, bias);
    load_or_zero(args.adds_pre_bias() ? args.pre_bias : Parameter{}, column, pre_bias);
  }
};

// A vector of h and one of dy, packed as in memory.
template <typename T, int kVec>
struct Operands {
  Vector<T, kVec> packed_h, packed_dy;

  __device__ __forceinline__ void load(const BackwardArgs& args, int64_t place) {
    packed_h = load_vector<T, kVec>(static_cast<const T*>(args.h) + place);
    packed_dy = load_vector<T, kVec>(static_cast<const T*>(args.dy) + place);
  }

  __device__ __forceinline__ void prepare(const NormOptions& options, float mean, float rstd,
                                          const ColumnParameters<kVec>& parameters,
                                          float (&h)[kVec], float (&dz)[kVec],
                                          float (&centred)[kVec]) const {
    unpack(packed_h, h);
    unpack(packed_dy, dz);
#pragma unroll
    for (int i = 0; i < kVec; ++i) h[i] += parameters.pre_bias[i];
    ::prepare(options, mean, rstd, h, parameters.scale, parameters.bias, dz, centred);
  }
};

// Rows that a block loads at the same time, so that they share the loads of parameters.
constexpr int kTermRows = 4;

// Computes row_terms() of all rows. If rows are few, a block has fewer than kTermRows at a time.
template <typename T, int kVec>
__global__ void __launch_bounds__(kWideThreads)
    backward_row_terms(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const Team team(args.team_size);
  TeamSum team_sum(team, reinterpret_cast<float*>(shared_memory));
  __syncthreads();
  const int rows = args.rows * args.segments;
  const int height = min(kTermRows, divide_up(rows, gridDim.x));
  for (int first = blockIdx.x * height; first < rows; first += gridDim.x * height) {
    const int count = min(height, rows - first);
    float mean[kTermRows] = {}, rstd[kTermRows] = {}, sums[kTermRows][2] = {};
#pragma unroll
    for (int r = 0; r < kTermRows; ++r) {
      if (r >= count) continue;
      if (args.mean != nullptr) mean[r] = args.mean[first + r];
      rstd[r] = args.rstd[first + r];
    }
    for (int column = team.rank * kVec; column < args.features; column += team.size * kVec) {
      Operands<T, kVec> operands[kTermRows];
#pragma unroll
      for (int r = 0; r < kTermRows; ++r) {
        if (r >= count) continue;
        operands[r].load(args, static_cast<int64_t>(first + r) * args.features + column);
      }
      const ColumnParameters<kVec> parameters(args, column);
#pragma unroll
      for (int r = 0; r < kTermRows; ++r) {
        if (r >= count) continue;
        float h[kVec], dz[kVec], centred[kVec], unused[1][kVec] = {};
        operands[r].prepare(args.options, mean[r], rstd[r], parameters, h, dz, centred);
        add_to_sums(rstd[r], parameters.scale, dz, centred, sums[r], unused);
      }
    }
#pragma unroll
    for (int r = 0; r < kTermRows; ++r) {
      if (r >= count) continue;
      team_sum(sums[r]);
      if (team.rank == 0) args.row_terms[first + r] = row_terms(args.options, rstd[r], sums[r]);
    }
  }
}

constexpr int kColumnThreads = 128;
constexpr int kFewestWideRows = 8;  // fewest rows of a block if that leaves a block for every SM

// Computes dx and the sums over each block's rows. Each thread has one vector of columns.
template <typename T, int kVec>
__global__ void __launch_bounds__(kWideThreads)
    backward_columns(const __grid_constant__ BackwardArgs args) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * kVec;
  if (column >= args.features) return;
  const int segment = blockIdx.x / args.segment_blocks;
  const int first = segment * args.rows + blockIdx.x % args.segment_blocks;
  const int end = (segment + 1) * args.rows;
  const ColumnParameters<kVec> parameters(args, column);
  const auto place = [&](int row) { return static_cast<int64_t>(row) * args.features + column; };
  float gradients[kParameters][kVec] = {};
  Operands<T, kVec> next;
  next.load(args, place(first));
  for (int row = first; row < end; row += args.segment_blocks) {
    const Operands<T, kVec> operands = next;
    if (row + args.segment_blocks < end) next.load(args, place(row + args.segment_blocks));
    const float mean = args.mean == nullptr ? 0.0f : args.mean[row];
    const float rstd = args.rstd[row];
    float h[kVec], dz[kVec], centred[kVec], dh[kVec], sums[2] = {};
    operands.prepare(args.options, mean, rstd, parameters, h, dz, centred);
    add_to_sums(rstd, parameters.scale, dz, centred, sums, gradients);
    gradient_of_h(args.options, rstd, args.row_terms[row], h, parameters.scale, dz, centred, dh);
    if (args.dnext_residual != nullptr) {
      float dnext[kVec];
      unpack(load_vector<T, kVec>(static_cast<const T*>(args.dnext_residual) + place(row)), dnext);
#pragma unroll
      for (int i = 0; i < kVec; ++i) dh[i] += dnext[i];
    }
    Vector<T, kVec> dx;
    pack(dh, dx);
    store_vector(static_cast<T*>(args.dx) + place(row), dx);
#pragma unroll
    for (int i = 0; i < kVec; ++i) gradients[2][i] += dh[i];
  }
#pragma unroll
  for (int parameter = 0; parameter < kParameters; ++parameter) {
    float* gradient = args.gradients[parameter];
    if (gradient == nullptr) continue;
    gradient += static_cast<int64_t>(blockIdx.x) * args.features + column;
    constexpr int kStored = kVec % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int i = 0; i < kVec; i += kStored) {
      Vector<float, kStored> stored;
#pragma unroll
      for (int j = 0; j < kStored; ++j) stored.values[j] = gradients[parameter][i + j];
      store_vector(gradient + i, stored);
    }
  }
}

// --- long misaligned rows ------------------------------------------------------------------------

constexpr int kStagedColumns = 32;  // limit on columns of a thread; each has two sums in registers

// Bytes of shared memory for one row of an operand, extended to whole 16-byte pieces.
template <typename T>
__host__ __device__ int staged_slot(int features) {
  return RowPieces<T>::most(features) * 16;
}

// Bytes of shared memory: two pipeline stages of dy and h, a row of dnext_residual, and the scale.
template <typename T>
int staged_bytes(const BackwardArgs& args) {
  const int slots = args.dnext_residual == nullptr ? 4 : 5;
  return TeamSum::kScratch * sizeof(float) + slots * staged_slot<T>(args.features) +
         args.features * sizeof(float);
}

template <typename T>
bool stages_rows(const BackwardArgs& args, const Device& device) {
  return chain_of(args.options, args.pre_bias.data != nullptr) == Chain::kPlain &&
         args.features <= kStagedColumns * kWideThreads &&
         staged_bytes<T>(args) <= device.shared_bytes;
}

// A block computes some rows of a segment, and a thread some of their columns, whose sums over rows
// stay in registers. dy and h of the next row are copied during the computation.
template <typename T, bool kResidual>
__global__ void __launch_bounds__(kWideThreads, 1)
    backward_staged_rows(const __grid_constant__ BackwardArgs args) {
  using Pieces = RowPieces<T>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  float* const scratch = reinterpret_cast<float*>(shared_memory);
  unsigned char* const slots = shared_memory + TeamSum::kScratch * sizeof(float);
  const int slot_bytes = staged_slot<T>(args.features);
  const auto slot = [&](int i) { return reinterpret_cast<T*>(slots + i * slot_bytes); };
  T* const dnext = slot(4);
  float* const scale = reinterpret_cast<float*>(slots + (kResidual ? 5 : 4) * slot_bytes);
  const Team team(kWideThreads);
  TeamSum team_sum(team, scratch);
  for (int column = team.rank; column < args.features; column += kWideThreads) {
    float one[1];
    load_scale(args.scale, args.options.scale_offset, column, one);
    scale[column] = one[0];
  }

  const int64_t rows = int64_t{args.rows} * args.segments;
  const int segment = blockIdx.x / args.segment_blocks;
  const int first = segment * args.rows + blockIdx.x % args.segment_blocks;
  const int end = (segment + 1) * args.rows;
  float next_mean = 0.0f, next_rstd = 0.0f;
  const auto request = [&](int row, int stage) {
    if (row < end) {
      const Pieces pieces(row, rows, args.features);
      for (int piece = team.rank; piece < pieces.count(); piece += kWideThreads) {
        pieces.copy(slot(2 * stage), args.dy, piece);
        pieces.copy(slot(2 * stage + 1), args.h, piece);
      }
      next_mean = args.mean == nullptr ? 0.0f : args.mean[row];
      next_rstd = args.rstd[row];
    }
    async_copies_commit();
  };

  float dscale[kStagedColumns] = {}, dbias[kStagedColumns] = {};
  int stage = 0;
  request(first, stage);
  team_sum.start();
  for (int row = first; row < end; row += args.segment_blocks, stage ^= 1) {
    const Pieces pieces(row, rows, args.features);
    const float mean = next_mean, rstd = next_rstd;
    if constexpr (kResidual) {
      for (int piece = team.rank; piece < pieces.count(); piece += kWideThreads) {
        pieces.copy(dnext, args.dnext_residual, piece);
      }
    }
    async_copies_commit();
    request(row + args.segment_blocks, stage ^ 1);
    async_copies_wait(2);
    __syncthreads();
    const T* const dy = slot(2 * stage) + pieces.shift;
    const T* const h = slot(2 * stage + 1) + pieces.shift;
    float sums[2] = {};
#pragma unroll
    for (int k = 0; k < kStagedColumns; ++k) {
      const int column = team.rank + k * kWideThreads;
      if (column >= args.features) break;
      const float gradient = value_at(dy + column);
      const float normal = (value_at(h + column) - mean) * rstd;
      const float scaled = gradient * scale[column];
      sums[0] += scaled;
      sums[1] += scaled * normal;
      dscale[k] += gradient * normal;
      dbias[k] += gradient;
    }
    // The barrier in team_sum makes the other threads' copies of dnext visible.
    async_copies_wait(1);
    team_sum(sums);
    const float shared_part = args.mean == nullptr ? 0.0f : sums[0] * args.options.inverse_features;
    const float along_h = sums[1] * args.options.inverse_features;
    T* const dx = static_cast<T*>(args.dx) + pieces.start;
#pragma unroll 8
    for (int column = team.rank; column < args.features; column += kWideThreads) {
      const float normal = (value_at(h + column) - mean) * rstd;
      const float scaled = value_at(dy + column) * scale[column];
      float value = rstd * (scaled - shared_part - normal * along_h);
      if constexpr (kResidual) value += value_at(dnext + pieces.shift + column);
      store_value(dx + column, value);
    }
    __syncthreads();  // before the next copies overwrite the slots
  }

#pragma unroll
  for (int k = 0; k < kStagedColumns; ++k) {
    const int column = team.rank + k * kWideThreads;
    if (column >= args.features) break;
    const int64_t place = static_cast<int64_t>(blockIdx.x) * args.features + column;
    if (args.gradients[0] != nullptr) args.gradients[0][place] = dscale[k];
    if (args.gradients[1] != nullptr) args.gradients[1][place] = dbias[k];
  }
}

using BackwardKernel = void (*)(BackwardArgs);

// --- few rows ------------------------------------------------------------------------------------

// With few rows, a separate launch to sum over blocks would take longer than the rows. So some
// blocks compute dx, one row per team, while others compute dscale and dbias, some columns per
// cluster. Neither kind of block waits for the other; both read h and dy, the second time from L2.
// dpre_bias is not supported: it is a sum of dh, which only the blocks that compute dx have.
constexpr int kFewRowsElements = 16;
constexpr int kFewRowsThreads = 256;
constexpr int kBlockColumns = 32;
constexpr int kRowsAhead = 4;  // rows of a thread whose loads are in flight together

template <typename T, Chain kChain, bool kShifted>
struct ColumnBlock {
  static constexpr int kWidth = kShifted ? 1 : 4;  // columns of a thread
  static constexpr int kLanes = kBlockColumns / kWidth;
  static constexpr int kSums = 2;

  // Floats of shared memory for a block of `threads` threads.
  static int shared(int threads) { return (threads / kLanes + 1) * kSums * kBlockColumns; }

  // Writes dscale and dbias of a segment's columns from `first_column` on.
  __device__ static void run(const BackwardArgs& args, float* shared) {
    const int block = blockIdx.x / args.row_splits;
    const int segment = block / args.column_blocks;
    const int first_column = block % args.column_blocks * kBlockColumns;
    const int split = blockIdx.x % args.row_splits;
    const int slices = blockDim.x / kLanes;
    const int slice = threadIdx.x / kLanes;
    const int own_column = threadIdx.x % kLanes * kWidth;
    const int column = first_column + own_column;
    float sums[kSums][kWidth] = {};
    if (column < args.features && slice < slices) {
      add_rows(args, segment, column, split * slices + slice, args.row_splits * slices, sums);
    }
    if (slice < slices) {
#pragma unroll
      for (int sum = 0; sum < kSums; ++sum) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          shared[(slice * kSums + sum) * kBlockColumns + own_column + i] = sums[sum][i];
        }
      }
    }
    __syncthreads();
    // Each thread adds one column's dscale or dbias, first over the block's slices (threads with
    // different rows), then over the blocks of the cluster.
    const int place = threadIdx.x;
    float* total = shared + slices * kSums * kBlockColumns + place;
    if (place < kSums * kBlockColumns) {
      *total = accurate_sum<1>(slices, [&](int i) {
                 return load_vector<float, 1>(shared + i * kSums * kBlockColumns + place);
               }).values[0];
    }
    if (args.row_splits > 1) cluster_sync();
    float* gradient = args.gradients[place < kBlockColumns ? 0 : 1];
    const int write_column = first_column + place % kBlockColumns;
    if (split == 0 && place < kSums * kBlockColumns && write_column < args.features &&
        gradient != nullptr) {
      const Vector<float, 1> sum = accurate_sum<1>(args.row_splits, [&](int i) {
        return Vector<float, 1>{args.row_splits > 1 ? cluster_load(cluster_address(total, i))
                                                    : *total};
      });
      gradient[static_cast<int64_t>(segment) * args.features + write_column] = sum.values[0];
    }
    // A block must not exit before the others have read its sums.
    if (args.row_splits > 1) cluster_sync();
  }

 private:
  // Adds rows `first`, `first` + `step`, ... of the segment to `sums`, loading kRowsAhead rows at a
  // time.
  __device__ static void add_rows(const BackwardArgs& args, int segment, int column, int first,
                                  int step, float (&sums)[kSums][kWidth]) {
    const NormOptions options = known_options<kChain>(args.options);
    const ColumnParameters<kWidth> parameters(args, column);
    const int64_t segment_row = static_cast<int64_t>(segment) * args.rows;
    for (int base = first; base < args.rows; base += kRowsAhead * step) {
      Operands<T, kWidth> operands[kRowsAhead] = {};
      float mean[kRowsAhead] = {}, rstd[kRowsAhead] = {};
#pragma unroll
      for (int j = 0; j < kRowsAhead; ++j) {
        if (base + j * step >= args.rows) continue;
        const int64_t row = segment_row + base + j * step;
        operands[j].load(args, row * args.features + column);
        if (args.mean != nullptr) mean[j] = args.mean[row];
        rstd[j] = args.rstd[row];
      }
#pragma unroll
      for (int j = 0; j < kRowsAhead; ++j) {
        if (base + j * step >= args.rows) continue;
        float h[kWidth], dz[kWidth], centred[kWidth], unused[2] = {};
        operands[j].prepare(options, mean[j], rstd[j], parameters, h, dz, centred);
        add_to_sums(rstd[j], parameters.scale, dz, centred, unused, sums);
      }
    }
  }
};

// Computes dx, one row per team. `first_block` is the first block that does so.
template <typename T, int kElements, Chain kChain, bool kShifted>
__device__ __forceinline__ void backward_row_of_team(const BackwardArgs& args, int first_block,
                                                     float* shared) {
  constexpr int kVec = 16 / sizeof(T);
  constexpr int kVectors = kElements / kVec;
  using Load = ParameterLoad<kVec, kVectors, kShifted>;
  constexpr bool kPlain = kChain == Chain::kPlain;
  const NormOptions options = known_options<kChain>(args.options);
  const Team team(args.team_size);
  const int rows = args.rows * args.segments;
  const int own_row = (blockIdx.x - first_block) * args.teams + team.index;
  const bool active = own_row < rows;
  const int row = active ? own_row : rows - 1;
  const int64_t row_start = static_cast<int64_t>(row) * args.features;
  const Columns<kVec, kVectors, kShifted> column(team, args.features, 0,
                                                 shift_of<kVec, kShifted>(row, args.features));
  Vector<T, kVec> packed_h[kVectors] = {}, packed_dy[kVectors] = {}, dnext[kVectors] = {};
  const auto load = [&](const void* matrix, int v) {
    return load_vector<T, kVec>(static_cast<const T*>(matrix) + row_start + column(v));
  };
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!column.has(v)) continue;
    packed_h[v] = load(args.h, v);
    packed_dy[v] = load(args.dy, v);
    if (args.dnext_residual != nullptr) dnext[v] = load(args.dnext_residual, v);
  }
  const float mean = args.mean == nullptr ? 0.0f : args.mean[row];
  const float rstd = args.rstd[row];
  const Load scale_load(args.scale, column);
  const Load bias_load(kPlain ? Parameter{} : args.bias, column);
  const Load pre_bias_load(kPlain || !args.adds_pre_bias() ? Parameter{} : args.pre_bias, column);
  TeamSum team_sum(team, shared);
  team_sum.start();

  // The values are unpacked in each of the two passes, because packed they take fewer registers.
  const auto read = [&](int v, float (&h)[kVec], float (&scale)[kVec], float (&dz)[kVec],
                        float (&centred)[kVec]) {
    unpack(packed_h[v], h);
    unpack(packed_dy[v], dz);
    column.mask(v, h);
    column.mask(v, dz);
    float bias[kVec] = {};
    scale_load.values(v, 1.0f, options.scale_offset, scale);
    if constexpr (!kPlain) {
      pre_bias_load.values(v, 0.0f, 0.0f, bias);
#pragma unroll
      for (int i = 0; i < kVec; ++i) h[i] += bias[i];
      bias_load.values(v, 0.0f, 0.0f, bias);
    }
    prepare(options, mean, rstd, h, scale, bias, dz, centred);
  };
  float sums[2] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float h[kVec], scale[kVec], dz[kVec], centred[kVec], unused[1][kVec] = {};
    read(v, h, scale, dz, centred);
    add_to_sums(rstd, scale, dz, centred, sums, unused);
  }
  team_sum(sums);
  if (!active) return;
  const float2 terms = row_terms(options, rstd, sums);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!column.has(v)) continue;
    float h[kVec], scale[kVec], dz[kVec], centred[kVec], dh[kVec], addend[kVec];
    read(v, h, scale, dz, centred);
    gradient_of_h(options, rstd, terms, h, scale, dz, centred, dh);
    unpack(dnext[v], addend);
    if (args.dnext_residual != nullptr) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) dh[i] += addend[i];
    }
    Vector<T, kVec> dx;
    pack(dh, dx);
    column.store_once(static_cast<T*>(args.dx) + row_start, v, dx);
  }
}

template <typename T, int kElements, Chain kChain, bool kShifted>
__global__ void __launch_bounds__(kFewRowsThreads, 2)
    backward_few_rows(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);
  // Blocks that sum columns over rows start first because they take longest.
  const int column_blocks = args.segments * args.column_blocks * args.row_splits;
  if (static_cast<int>(blockIdx.x) < column_blocks) {
    ColumnBlock<T, kChain, kShifted>::run(args, shared);
  } else {
    backward_row_of_team<T, kElements, kChain, kShifted>(args, column_blocks, shared);
  }
}

template <typename T, Chain kChain>
BackwardKernel few_rows_kernel(int elements, bool shifted) {
  if (elements == 8) {
    return shifted ? backward_few_rows<T, 8, kChain, true> : backward_few_rows<T, 8, kChain, false>;
  }
  return shifted ? backward_few_rows<T, 16, kChain, true> : backward_few_rows<T, 16, kChain, false>;
}

// --- sums over blocks ----------------------------------------------------------------------------

struct AddBlocksArgs {
  const float* parts[kParameters];  // block sums, [segments * segment_blocks, features]
  float* totals[kParameters];       // gradients, [segments, features]
  int segment_blocks;
  int features;
};

constexpr int kAddThreads = 32;  // threads along the columns
constexpr int kAddSlices = 16;   // threads among which the block sums of a column are divided

// Block (x, segment, parameter) adds up kAddThreads vectors of columns of one gradient.
template <int kVec>
__global__ void __launch_bounds__(kAddThreads* kAddSlices)
    add_blocks(const __grid_constant__ AddBlocksArgs args) {
  __shared__ Vector<float, kVec> sums[kAddSlices][kAddThreads];
  const int segment = blockIdx.y;
  const int lane = threadIdx.x % kAddThreads;
  const int slice = threadIdx.x / kAddThreads;
  const int column = (blockIdx.x * kAddThreads + lane) * kVec;
  const int64_t first_part = static_cast<int64_t>(segment) * args.segment_blocks + slice;
  const float* parts = args.parts[blockIdx.z] + first_part * args.features + column;
  const int count = column < args.features ? divide_up(args.segment_blocks - slice, kAddSlices) : 0;
  sums[slice][lane] = accurate_sum<kVec>(count, [&](int i) {
    return load_vector<float, kVec>(parts + static_cast<int64_t>(i) * kAddSlices * args.features);
  });
  __syncthreads();
  if (slice == 0 && column < args.features) {
    store_vector(args.totals[blockIdx.z] + static_cast<int64_t>(segment) * args.features + column,
                 accurate_sum<kVec>(kAddSlices, [&](int i) { return sums[i][lane]; }));
  }
}

// --- launch --------------------------------------------------------------------------------------

struct BackwardPlan {
  BackwardKernel kernel = nullptr;  // nullptr if the row is too long
  Spread spread;                    // division of a row among the threads of a block
  int parameters;                   // parameters in shared memory
  int threads;                      // limit on the threads of a block
};

template <typename T, Chain kChain, bool kMean = true, bool kResidual = true, bool kShifted = false>
BackwardPlan plan_rows(int features, int blocks) {
  constexpr int kVec = 16 / sizeof(T);
  BackwardPlan plan;
  plan.parameters = kBackwardParameters<T, kChain, kShifted>;
  const auto choose = [&](int row, const ThreadLimits& limits) {
    const int most_elements = kElementStep * (kShifted ? 2 : kElementChoices);
    plan.spread = choose_spread(row, kVec, kShifted, most_elements, limits, Ties::kFewerThreads,
                                Narrow::kManyValues);
    if (plan.spread.elements != 0) plan.threads = threads_limit(limits, plan.spread.elements);
  };
  if (blocks == 1) {
    choose(features, backward_limits<kChain, false>());
    switch (plan.spread.elements) {
      case 8:
        plan.kernel = backward_rows<T, 8, kChain, kMean, kResidual, false, kShifted>;
        break;
      case 16:
        plan.kernel = backward_rows<T, 16, kChain, kMean, kResidual, false, kShifted>;
        break;
      case 24:
        if constexpr (!kShifted)
          plan.kernel = backward_rows<T, 24, kChain, kMean, kResidual, false, false>;
        break;
      case 32:
        if constexpr (!kShifted)
          plan.kernel = backward_rows<T, 32, kChain, kMean, kResidual, false, false>;
        break;
    }
  } else if constexpr (!kShifted) {
    if (features % (blocks * kVec) == 0) choose(features / blocks, backward_limits<kChain, true>());
    if (plan.spread.elements != 0) {
      plan.kernel = backward_rows<T, 32, kChain, kMean, kResidual, true, false>;
    }
  }
  return plan;
}

template <typename T, bool kMean>
BackwardPlan plan_plain_rows(const BackwardArgs& args, int blocks) {
  return args.dnext_residual == nullptr
             ? plan_rows<T, Chain::kPlain, kMean, false>(args.features, blocks)
             : plan_rows<T, Chain::kPlain, kMean, true>(args.features, blocks);
}

template <typename T>
BackwardPlan plan_backward(const BackwardArgs& args, bool shifted, int blocks) {
  const Chain chain = chain_of(args.options, args.pre_bias.data != nullptr);
  if (shifted) {
    return chain == Chain::kPlain
               ? plan_rows<T, Chain::kPlain, true, true, true>(args.features, blocks)
               : plan_rows<T, Chain::kGeneral, true, true, true>(args.features, blocks);
  }
  switch (chain) {
    case Chain::kPlain:
      return args.mean == nullptr && args.gradients[1] == nullptr
                 ? plan_plain_rows<T, false>(args, blocks)
                 : plan_plain_rows<T, true>(args, blocks);
    case Chain::kRelu:
      return plan_rows<T, Chain::kRelu>(args.features, blocks);
    default:
      return plan_rows<T, Chain::kGeneral>(args.features, blocks);
  }
}

struct BackwardConfig {
  bool few_rows;  // whether to use backward_few_rows where it can run
  int threads;    // limit on the threads of a block
  int blocks;     // limit on the blocks of an SM
};

// Launches backward_few_rows and sets `done`, if the kernel supports the operands.
template <typename T>
ffi::Error launch_few_rows(BackwardArgs args, bool shifted, const Device& device,
                           cudaStream_t stream, bool* done) {
  constexpr int kVec = 16 / sizeof(T);
  constexpr ThreadLimits kLimits = {kFewRowsThreads, kFewRowsThreads, 0, 0};
  const Spread spread = choose_spread(args.features, kVec, shifted, kFewRowsElements, kLimits,
                                      Ties::kMoreThreads, Narrow::kManyThreads);
  if (spread.elements == 0 || args.gradients[2] != nullptr) return ffi::Error::Success();
  *done = true;
  const int least = std::max(spread.team_size, kWarpSize);
  const int threads = kFewRowsThreads / least * least;
  args.team_size = spread.team_size;
  args.teams = threads / spread.team_size;
  using Aligned = ColumnBlock<T, Chain::kGeneral, false>;
  using Shifted = ColumnBlock<T, Chain::kGeneral, true>;
  const int lanes = shifted ? Shifted::kLanes : Aligned::kLanes;
  Launch launch;
  launch.threads = threads;
  launch.shared_bytes = std::max<int>(TeamSum::kScratch, shifted ? Shifted::shared(threads)
                                                                 : Aligned::shared(threads)) *
                        sizeof(float);
  const bool sums = args.gradients[0] != nullptr || args.gradients[1] != nullptr;
  args.column_blocks = sums ? divide_up(args.features, kBlockColumns) : 0;
  // Doubles the blocks that share a column until each thread loads its rows in one step.
  args.row_splits = 1;
  const int step = threads / lanes * kRowsAhead;
  while (sums && device.clusters && args.row_splits < 8 && args.row_splits * step < args.rows) {
    args.row_splits *= 2;
  }
  launch.cluster = args.row_splits;
  const int row_blocks = divide_up(int64_t{args.rows} * args.segments, args.teams);
  launch.grid = dim3(args.segments * args.column_blocks * args.row_splits +
                     round_up(row_blocks, args.row_splits));
  const bool plain = chain_of(args.options, args.pre_bias.data != nullptr) == Chain::kPlain;
  const auto kernel = plain ? few_rows_kernel<T, Chain::kPlain>(spread.elements, shifted)
                            : few_rows_kernel<T, Chain::kGeneral>(spread.elements, shifted);
  return launch_kernel(kernel, args, launch, stream);
}

// Bytes of shared memory of backward_flat_rows: tiles and parameters, and later sums of each warp.
template <typename T>
int flat_shared_bytes(const BackwardArgs& args) {
  const int tiles = args.dnext_residual == nullptr ? 2 : 3;
  const int vector_bytes = args.features * static_cast<int>(sizeof(float));
  return std::max(tiles * flat_tile_bytes<T>(args.teams, args.features) + 3 * vector_bytes,
                  kFlatThreads / kWarpSize * vector_bytes);
}

template <typename T>
ffi::Error launch_flat_rows(const BackwardArgs& args, cudaStream_t stream) {
  const Launch launch = {dim3(args.segments * args.segment_blocks), kFlatThreads,
                         flat_shared_bytes<T>(args)};
  const bool plain = chain_of(args.options, args.pre_bias.data != nullptr) == Chain::kPlain;
  const auto with_steps = [&](auto steps) {
    return plain
               ? launch_kernel(backward_flat_rows<T, steps(), Chain::kPlain>, args, launch, stream)
               : launch_kernel(backward_flat_rows<T, steps(), Chain::kGeneral>, args, launch,
                               stream);
  };
  const int steps = divide_up(args.features, kWarpSize);  // columns of a lane
  if (steps <= 4) return with_steps(std::integral_constant<int, 4>{});
  if (steps <= 8) return with_steps(std::integral_constant<int, 8>{});
  if (steps <= 12) return with_steps(std::integral_constant<int, 12>{});
  return with_steps(std::integral_constant<int, kMostFlatSums / kWarpSize>{});
}

// Launches the backward. `args.gradients` are the final results here, [segments, features].
template <typename T>
ffi::Error launch_backward(BackwardArgs args, const BackwardConfig& config, const Device& device,
                           cudaStream_t stream, ffi::ScratchAllocator& memory) {
  const int segments = args.segments;
  constexpr int kVec = 16 / sizeof(T);
  const bool aligned = are_aligned({args.dy, args.dnext_residual, args.h, args.scale.data,
                                    args.bias.data, args.pre_bias.data, args.dx});
  const bool shifted = args.features % kVec != 0;
  if (config.few_rows && aligned) {
    bool done = false;
    RETURN_IF_ERROR(launch_few_rows<T>(args, shifted, device, stream, &done));
    if (done) return ffi::Error::Success();
  }

  // At most config.blocks blocks run on an SM, since a second kernel adds the sums of every block.
  // A block has as many teams (of the threads that share a row) as fit in shared memory with two
  // pipeline stages each, or with one stage if not even one team fits with two.
  BackwardPlan plan;
  Launch launch;
  int teams = 0;
  const int streams = args.dnext_residual == nullptr ? 2 : 3;
  const int room = device.shared_bytes / config.blocks - (config.blocks > 1 ? 1024 : 0);
  // backward_flat_rows needs tiles that start at multiples of 16 bytes; they do only if segments
  // do.
  const bool flat = shifted && aligned && args.features <= kMostFlatSums &&
                    (segments == 1 || args.rows % kFlatRows<T> == 0);
  for (const auto [blocks, least_stages] : {std::pair{1, 2}, {2, 2}, {1, 1}, {2, 1}}) {
    if (teams != 0 || !aligned || flat) break;
    if (blocks > 1 && !device.clusters) continue;
    plan = plan_backward<T>(args, shifted, blocks);
    if (plan.kernel == nullptr) continue;
    const Spread& spread = plan.spread;
    args.team_size = spread.team_size;
    launch.cluster = blocks;
    const int head =
        (TeamSum::kScratch + spread.parameters(plan.parameters, kVec)) * sizeof(float) +
        kRingBarriers * sizeof(uint64_t);
    const int least = std::max(spread.team_size, kWarpSize);
    const int most = blocks == 1 ? std::max(std::min(plan.threads, config.threads), least) : least;
    const int height = std::max(kWarpSize / spread.team_size, 1);
    launch.threads = choose_threads(spread, args.rows * segments, most, device);
    for (; launch.threads >= least; launch.threads -= least) {
      const int block_teams = launch.threads / spread.team_size;
      const int slot = slot_values(height, args.features / blocks, kVec, shifted);
      const int stage_bytes = block_teams / height * slot * streams * sizeof(T);
      args.stages = std::min(std::clamp(kBytesInFlight / stage_bytes, least_stages, kMaxStages),
                             (room - head) / stage_bytes);
      if (args.stages < least_stages) continue;
      teams = block_teams;
      launch.shared_bytes = head + args.stages * stage_bytes;
      break;
    }
  }
  int resident = 1;
  if (teams != 0) {
    RETURN_IF_ERROR(allow_shared_memory(plan.kernel, device));
    if (config.blocks > 1) RETURN_IF_ERROR(resident_blocks(plan.kernel, launch, &resident));
    resident = std::min(resident, config.blocks);
  }
  const auto blocks_of_segment = [&](int cluster) {
    return std::max(resident * device.multiprocessors / (cluster * segments), 1);
  };
  if (teams != 0 && shifted) {
    // A team (the threads that share a row) fixes its offset from a multiple of 16 bytes at its
    // first row. Its rows are segment_blocks * teams apart, so segment_blocks is a multiple of
    // `step` unless each team has at most one row.
    const int step = steps_of_one_shift(teams, args.features, kVec);
    const int most = blocks_of_segment(1);
    args.segment_blocks = divide_up(args.rows, teams);
    if (args.segment_blocks > most) args.segment_blocks = most / step * step;
    if (args.segment_blocks == 0) teams = 0;
  }
  const bool staged = teams == 0 && !flat && shifted && aligned && stages_rows<T>(args, device);
  const bool wide = teams == 0 && !flat && !staged;
  if (wide || staged) launch.cluster = 1;
  const bool wide_vectors = aligned && !shifted;
  const int wide_column_blocks =
      divide_up(args.features, kColumnThreads * (wide_vectors ? kVec : 1));
  if (flat) {
    args.teams = std::min(flat_tile_rows<T>(int64_t{args.rows} * segments, args.features, device),
                          kMostFlatTileRows);
    args.segment_blocks =
        std::clamp(2 * device.multiprocessors / segments, 1, divide_up(args.rows, args.teams));
  } else if (staged) {
    args.segment_blocks = std::min(args.rows, blocks_of_segment(1));
  } else if (wide) {
    // Each block writes its sums, which takes longer than computing its rows if these are few.
    const int enough = divide_up(2 * device.multiprocessors, segments * wide_column_blocks);
    args.segment_blocks = std::min(
        {args.rows, blocks_of_segment(1), std::max(divide_up(args.rows, kFewestWideRows), enough)});
  } else if (!shifted) {
    args.segment_blocks = std::min(divide_up(args.rows, teams), blocks_of_segment(launch.cluster));
  }
  const int blocks = segments * args.segment_blocks;

  AddBlocksArgs add = {};
  add.segment_blocks = args.segment_blocks;
  add.features = args.features;
  int gradients = 0;
  for (float*& gradient : args.gradients) {
    if (gradient == nullptr || args.segment_blocks == 1) continue;
    const auto parts =
        memory.Allocate(static_cast<size_t>(blocks) * args.features * sizeof(float), 16);
    if (!parts) return ffi::Error::Internal("layer_norm: no memory for the sums of each block");
    add.totals[gradients] = gradient;
    gradient = static_cast<float*>(*parts);
    add.parts[gradients++] = gradient;
  }

  if (staged) {
    const auto kernel = args.dnext_residual != nullptr ? backward_staged_rows<T, true>
                                                       : backward_staged_rows<T, false>;
    RETURN_IF_ERROR(allow_shared_memory(kernel, device));
    RETURN_IF_ERROR(
        launch_kernel(kernel, args, {dim3(blocks), kWideThreads, staged_bytes<T>(args)}, stream));
  } else if (wide) {
    args.team_size = kWideThreads;
    const int rows = args.rows * segments;
    const auto terms = memory.Allocate(static_cast<size_t>(rows) * sizeof(float2), 16);
    if (!terms) return ffi::Error::Internal("layer_norm: no memory for the sums of each row");
    args.row_terms = static_cast<float2*>(*terms);
    const auto terms_kernel = wide_vectors ? backward_row_terms<T, kVec> : backward_row_terms<T, 1>;
    const auto columns_kernel = wide_vectors ? backward_columns<T, kVec> : backward_columns<T, 1>;
    RETURN_IF_ERROR(launch_kernel(terms_kernel, args,
                                  {dim3(std::min(rows, 2 * device.multiprocessors)), kWideThreads,
                                   TeamSum::kScratch * sizeof(float)},
                                  stream));
    RETURN_IF_ERROR(launch_kernel(columns_kernel, args,
                                  {dim3(blocks, wide_column_blocks), kColumnThreads, 0}, stream));
  } else if (flat) {
    RETURN_IF_ERROR(launch_flat_rows<T>(args, stream));
  } else {
    launch.grid = dim3(blocks * launch.cluster);
    RETURN_IF_ERROR(launch_kernel(plan.kernel, args, launch, stream));
  }
  if (gradients == 0) return ffi::Error::Success();
  const bool whole =
      args.features % 4 == 0 && are_aligned({add.totals[0], add.totals[1], add.totals[2]});
  const int add_vec = whole ? 4 : 1;
  const dim3 grid(divide_up(args.features, kAddThreads * add_vec), segments, gradients);
  return launch_kernel(whole ? add_blocks<4> : add_blocks<1>, add,
                       {grid, kAddThreads * kAddSlices, 0}, stream);
}

ffi::Error layer_norm_backward(cudaStream_t stream, ffi::ScratchAllocator memory, ffi::AnyBuffer dy,
                               ffi::AnyBuffer dnext_residual, ffi::AnyBuffer h, ffi::AnyBuffer mean,
                               ffi::AnyBuffer rstd, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                               ffi::AnyBuffer pre_bias, ffi::Result<ffi::AnyBuffer> dx,
                               ffi::Result<ffi::AnyBuffer> dscale,
                               ffi::Result<ffi::AnyBuffer> dbias,
                               ffi::Result<ffi::AnyBuffer> dpre_bias, int64_t segments,
                               bool subtract_mean, float epsilon, float scale_offset,
                               std::string_view pre_activation, std::string_view activation,
                               bool few_rows, int64_t threads, int64_t blocks) {
  RETURN_IF_ERROR(check_matrix("h", h));
  const int64_t rows = h.dimensions()[0];
  const int64_t features = h.dimensions()[1];
  if (segments < 1 || rows % segments != 0) {
    return ffi::Error::InvalidArgument(
        "segments must divide the rows evenly: " + std::to_string(rows) + " rows, " +
        std::to_string(segments) + " segments");
  }
  BackwardArgs args = {};
  args.rows = static_cast<int>(rows / segments);
  args.segments = static_cast<int>(segments);
  args.features = static_cast<int>(features);
  RETURN_IF_ERROR(parse_options(features, subtract_mean, epsilon, scale_offset, pre_activation,
                                activation, &args.options));
  RETURN_IF_ERROR(parse_parameter("scale", scale, features, &args.scale));
  RETURN_IF_ERROR(parse_parameter("bias", bias, features, &args.bias));
  RETURN_IF_ERROR(parse_parameter("pre_bias", pre_bias, features, &args.pre_bias));
  RETURN_IF_ERROR(check_like("dy", dy, h));
  RETURN_IF_ERROR(check_like("dx", *dx, h));
  RETURN_IF_ERROR(check_like_or_absent("dnext_residual", dnext_residual, h));
  RETURN_IF_ERROR(check_float32("rstd", rstd, {rows}));
  if (subtract_mean) RETURN_IF_ERROR(check_float32("mean", mean, {rows}));
  const ffi::Result<ffi::AnyBuffer> gradients[kParameters] = {dscale, dbias, dpre_bias};
  const Parameter parameters[kParameters] = {args.scale, args.bias, args.pre_bias};
  for (int i = 0; i < kParameters; ++i) {
    if (is_absent(*gradients[i])) continue;
    if (parameters[i].data == nullptr) {
      return ffi::Error::InvalidArgument("a gradient is wanted of a parameter that is absent");
    }
    RETURN_IF_ERROR(check_float32("a parameter's gradient", *gradients[i], {segments, features}));
    args.gradients[i] = data_or_null<float>(*gradients[i]);
  }
  if (rows == 0) return ffi::Error::Success();
  // Without an activation the gradient does not depend on bias.
  if (args.options.activation == Activation::kNone) args.bias.data = nullptr;
  args.dy = dy.untyped_data();
  args.dnext_residual = data_or_null(dnext_residual);
  args.h = h.untyped_data();
  args.mean = subtract_mean ? data_or_null<const float>(mean) : nullptr;
  args.rstd = data_or_null<const float>(rstd);
  args.dx = dx->untyped_data();

  if (threads < kWarpSize || blocks < 1 || blocks > 16) {
    return ffi::Error::InvalidArgument(
        "layer_norm: threads must be 32 or more and blocks 1 to 16, got " +
        std::to_string(threads) + " and " + std::to_string(blocks));
  }
  const BackwardConfig config = {few_rows, static_cast<int>(std::min<int64_t>(threads, 1024)),
                                 static_cast<int>(blocks)};
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  switch (*dtype_of(h)) {
    case Dtype::kFloat32:
      return launch_backward<float>(args, config, device, stream, memory);
    case Dtype::kBfloat16:
      return launch_backward<__nv_bfloat16>(args, config, device, stream, memory);
    default:
      return launch_backward<__half>(args, config, device, stream, memory);
  }
}

}  // namespace

DEFINE_HANDLER(jaxfused_layer_norm_backward, layer_norm_backward,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Ctx<ffi::ScratchAllocator>()
                   .Arg<ffi::AnyBuffer>()  // dy
                   .Arg<ffi::AnyBuffer>()  // dnext_residual
                   .Arg<ffi::AnyBuffer>()  // h
                   .Arg<ffi::AnyBuffer>()  // mean
                   .Arg<ffi::AnyBuffer>()  // rstd
                   .Arg<ffi::AnyBuffer>()  // scale
                   .Arg<ffi::AnyBuffer>()  // bias
                   .Arg<ffi::AnyBuffer>()  // pre_bias
                   .Ret<ffi::AnyBuffer>()  // dx
                   .Ret<ffi::AnyBuffer>()  // dscale
                   .Ret<ffi::AnyBuffer>()  // dbias
                   .Ret<ffi::AnyBuffer>()  // dpre_bias
                   .Attr<int64_t>("segments")
                   .Attr<bool>("subtract_mean")
                   .Attr<float>("epsilon")
                   .Attr<float>("scale_offset")
                   .Attr<std::string_view>("pre_activation")
                   .Attr<std::string_view>("activation")
                   .Attr<bool>("few_rows")
                   .Attr<int64_t>("threads")
                   .Attr<int64_t>("blocks"));
