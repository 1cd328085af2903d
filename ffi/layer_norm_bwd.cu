// layer_norm and rms_norm, backward. With u = pre_activation(h), xhat = (u - mean) rstd,
// z = xhat scale + bias, dz = dy activation'(z) and g = dz scale:
//
//     dh = pre_activation'(h) rstd (g - mean(g) - xhat mean(g xhat)) + dnext_residual
//     dscale = sum(dz xhat),   dbias = sum(dz),   dpre_bias = sum(dh)   over the rows
//
// (rms_norm: without mean(g)). The sums over rows are kept per block, in a fixed order, and added
// up by a second, small kernel: no atomics, the same bits from run to run.

#include "layer_norm.cuh"
#include "row_ring.cuh"

namespace {

constexpr int kParameters = 3;  // scale, bias, pre_bias

struct BackwardArgs {
  const void* dy;
  const void* dnext_residual;  // nullptr: none, and pre_bias is not in h yet
  const void* h;
  const float* mean;  // nullptr: the norm subtracts none
  const float* rstd;
  Parameter scale;
  Parameter bias;
  Parameter pre_bias;
  void* dx;
  // [segments * segment_blocks, features] each, nullptr where not wanted.
  float* gradients[kParameters];
  float2* row_terms;  // [rows] only between the kernels for long rows
  int rows;           // of one segment
  int segments;
  int segment_blocks;
  int features;
  NormOptions options;
  int team_size;
  int stages;

  __device__ bool adds_pre_bias() const {
    return pre_bias.data != nullptr && dnext_residual == nullptr;
  }
};

// What becomes of an element before the sums over its row are known: centred = u - mean, dz out of
// dy, and h with pre_bias.
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

// Adds an element's part to the sums over its row, sum(g centred) and sum(g), and to those over its
// column, sum(dz xhat) and sum(dz), as many of each as there are.
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

// What dh takes from the sums over its row: rstd mean(g xhat) and mean(g).
template <int kSums>
__device__ __forceinline__ float2 row_terms(const NormOptions& options, float rstd,
                                            const float (&sums)[kSums]) {
  const float slope = sums[0] * options.inverse_features * rstd * rstd;
  const bool centred = kSums > 1 && options.subtract_mean;
  return make_float2(slope, centred ? sums[kSums - 1] * options.inverse_features : 0.0f);
}

// dh without dnext_residual.
template <int kVec>
__device__ __forceinline__ void gradient_of_h(const NormOptions& options, float rstd, float2 terms,
                                              const float (&h)[kVec], const float (&scale)[kVec],
                                              const float (&dz)[kVec], const float (&centred)[kVec],
                                              float (&dh)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    // Rounded here: a product fused into g - mean(g) would leave a residue where both are the same.
    const float g = __fmul_rn(dz[i], scale[i]) - terms.y;
    dh[i] = (g - centred[i] * terms.x) * rstd;
  }
  multiply_derivative(options.pre_activation, h, dh);
}

// --- rows that one or two blocks hold
// -------------------------------------------------------------

// The gradients of a thread's columns stay in registers, in float32. Rows come in through a ring in
// shared memory; a row is needed twice, before and after the exchange of its sums, and stays in
// registers meanwhile, packed. Where a block has no room for that, a cluster of two blocks
// (kPair) shares each row. kMean: whether there are a mean and dbias; without, a chain is plain.
template <Chain kChain, bool kPair>
constexpr ThreadLimits backward_limits() {
  if (kPair) return {0, 0, 0, 256};
  return kChain == Chain::kPlain ? ThreadLimits{512, 512, 384, 256}
                                 : ThreadLimits{512, 384, 256, 256};
}

// Whether the scale has registers.
template <typename T, Chain kChain>
constexpr bool kHoldsScale = kChain == Chain::kPlain && sizeof(T) == 2;

// Parameters in shared memory.
template <typename T, Chain kChain>
constexpr int kBackwardParameters = (kChain == Chain::kPlain  ? 1
                                     : kChain == Chain::kRelu ? 2
                                                              : 3) -
                                    kHoldsScale<T, kChain>;

template <typename T, int kVec, int kElements, Chain kChain, bool kMean, bool kResidual, bool kPair>
__global__ void __launch_bounds__(threads_limit(backward_limits<kChain, kPair>(), kElements))
    backward_rows(const __grid_constant__ BackwardArgs args) {
  constexpr int kBlocks = kPair ? 2 : 1;  // a row
  constexpr int kVectors = kElements / kVec;
  constexpr int kSums = kMean ? 2 : 1;
  constexpr int kGradients = !kMean ? 1 : kChain == Chain::kPlain ? 2 : 3;
  static_assert(kMean || kChain == Chain::kPlain);
  using Columns = Columns<kVec, kVectors>;
  using Ring = RowRing<T, kVec, kVectors, kResidual ? 3 : 2>;
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
  const Columns column(team, width, first_column);
  const int unit = blockIdx.x / kBlocks;
  const int segment = unit / args.segment_blocks;
  // The unit of a ring is a warp, or a larger team.
  const int height = max(kWarpSize / team.size, 1);
  const int teams = blockDim.x / team.size;
  const int ring_unit = team.index / height;
  const int first_row = segment * args.rows + unit % args.segment_blocks * teams;
  const RowWalk walk(team, height, ring_unit, first_row + ring_unit * height,
                     args.segment_blocks * teams, (segment + 1) * args.rows);
  ColumnValues<kVec, kVectors, kHoldsScale<T, kChain>> scale(shared, team);
  ColumnValues<kVec, kVectors, kChain == Chain::kPlain> pre_bias(shared, team);
  ColumnValues<kVec, kVectors, kChain != Chain::kGeneral> bias(shared, team);
  uint64_t* barriers = reinterpret_cast<uint64_t*>(shared);
  shared += kRingBarriers * sizeof(uint64_t) / sizeof(float);

  // The first rows are on their way while the parameters are loaded.
  const auto source = [&](const void* rows) -> const void* {
    return rows == nullptr ? nullptr : static_cast<const T*>(rows) + first_column;
  };
  const void* const sources[] = {source(args.h), source(args.dy), source(args.dnext_residual)};
  Ring ring(barriers, shared, sources, args.features, args.stages, team, column, walk);
  // What comes from memory directly is asked for one step ahead: a load takes about as long as a
  // row.
  const auto load_statistics = [&](int row) {
    if (row >= walk.end) return make_float2(0.0f, 0.0f);
    const bool centred = kMean && args.mean != nullptr;
    return make_float2(centred ? args.mean[row] : 0.0f, args.rstd[row]);
  };
  float2 next_statistics = load_statistics(walk.first + walk.line);
  {
    float values[3][kVectors][kVec];
    load_scale_columns(args.scale, options.scale_offset, column, values[0]);
    const Parameter offset = args.adds_pre_bias() ? args.pre_bias : Parameter{};
    if constexpr (kChain != Chain::kPlain) load_columns(offset, column, 0.0f, values[1]);
    if constexpr (kChain == Chain::kGeneral) load_columns(args.bias, column, 0.0f, values[2]);
    scale.write(values[0]);
    if constexpr (kChain != Chain::kPlain) pre_bias.write(values[1]);
    if constexpr (kChain == Chain::kGeneral) bias.write(values[2]);
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
        store_streaming(static_cast<T*>(args.dx) + column.place(row, args.features, v), dx);
      }
    }
  }

  // The block's sums over its rows, through the memory of the ring.
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

// --- rows longer than that -----------------------------------------------------------------------

// Such rows are read twice, once by each of two kernels: no block can hold a row and the sums over
// rows of its columns at the same time.

template <int kVec>
struct ColumnParameters {
  float scale[kVec], bias[kVec], pre_bias[kVec];

  __device__ __forceinline__ ColumnParameters(const BackwardArgs& args, int column) {
    load_scale(args.scale, args.options.scale_offset, column, scale);
    load_or_zero(args.bias, column, bias);
    load_or_zero(args.adds_pre_bias() ? args.pre_bias : Parameter{}, column, pre_bias);
  }
};

// A vector of h and of dy as in memory, and what becomes of it.
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

// Rows that a block takes at a time: they share the parameters, and are all under way.
constexpr int kTermRows = 4;

// row_terms, of one row after the other where there are few.
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

// dx and the sums over rows, a thread a vector of columns.
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
#pragma unroll
    for (int i = 0; i < kVec; ++i) gradient[i] = gradients[parameter][i];
  }
}

// --- the sums over blocks ------------------------------------------------------------------------

struct AddBlocksArgs {
  const float* parts[kParameters];  // [segments * segment_blocks, features]
  float* totals[kParameters];       // [segments, features]
  int segment_blocks;
  int features;
};

constexpr int kAddThreads = 32;  // side by side
constexpr int kAddSlices = 16;   // of the parts

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

using BackwardKernel = void (*)(BackwardArgs);

struct BackwardPlan {
  BackwardKernel kernel = nullptr;  // nullptr: the row is too long
  Spread spread;                    // over one block
  int parameters;                   // in shared memory
  int threads;                      // of a block, at most
};

template <typename T, int kVec, Chain kChain, bool kMean = true, bool kResidual = true>
BackwardPlan plan_rows(int features, int blocks) {
  BackwardPlan plan;
  plan.parameters = kBackwardParameters<T, kChain>;
  const auto choose = [&](int row, const ThreadLimits& limits) {
    plan.spread = choose_spread(row, kVec, limits, Ties::kFewerThreads);
    if (plan.spread.elements != 0) plan.threads = threads_limit(limits, plan.spread.elements);
  };
  if (blocks == 1) {
    choose(features, backward_limits<kChain, false>());
    switch (plan.spread.elements) {
      case 8:
        plan.kernel = backward_rows<T, kVec, 8, kChain, kMean, kResidual, false>;
        break;
      case 16:
        plan.kernel = backward_rows<T, kVec, 16, kChain, kMean, kResidual, false>;
        break;
      case 24:
        if constexpr (kVec > 1)
          plan.kernel = backward_rows<T, kVec, 24, kChain, kMean, kResidual, false>;
        break;
      case 32:
        if constexpr (kVec > 1)
          plan.kernel = backward_rows<T, kVec, 32, kChain, kMean, kResidual, false>;
        break;
    }
  } else if constexpr (kVec > 1) {
    if (features % (blocks * kVec) == 0) choose(features / blocks, backward_limits<kChain, true>());
    if (plan.spread.elements != 0) {
      plan.kernel = backward_rows<T, kVec, 32, kChain, kMean, kResidual, true>;
    }
  }
  return plan;
}

template <typename T, bool kMean>
BackwardPlan plan_plain_rows(const BackwardArgs& args, int blocks) {
  constexpr int kVec = 16 / sizeof(T);
  return args.dnext_residual == nullptr
             ? plan_rows<T, kVec, Chain::kPlain, kMean, false>(args.features, blocks)
             : plan_rows<T, kVec, Chain::kPlain, kMean, true>(args.features, blocks);
}

template <typename T>
BackwardPlan plan_backward(const BackwardArgs& args, int vec, int blocks) {
  constexpr int kVec = 16 / sizeof(T);
  if (vec == 1) return plan_rows<T, 1, Chain::kGeneral>(args.features, blocks);
  switch (chain_of(args.options, args.pre_bias.data != nullptr)) {
    case Chain::kPlain:
      return args.mean == nullptr && args.gradients[1] == nullptr
                 ? plan_plain_rows<T, false>(args, blocks)
                 : plan_plain_rows<T, true>(args, blocks);
    case Chain::kRelu:
      return plan_rows<T, kVec, Chain::kRelu>(args.features, blocks);
    default:
      return plan_rows<T, kVec, Chain::kGeneral>(args.features, blocks);
  }
}

// args.gradients are the results here, [segments, features].
template <typename T>
ffi::Error launch_backward(BackwardArgs args, const Device& device, cudaStream_t stream,
                           ffi::ScratchAllocator& memory) {
  const int segments = args.segments;
  constexpr int kFullVec = 16 / sizeof(T);
  const bool aligned = are_aligned({args.dy, args.dnext_residual, args.h, args.scale.data,
                                    args.bias.data, args.pre_bias.data, args.dx});
  const int vec = aligned && args.features % kFullVec == 0 ? kFullVec : 1;

  // One block a multiprocessor: more would only make more sums to add up. It has as many teams as
  // find room for two stages of the ring in shared memory, or for one where two fit no team.
  BackwardPlan plan;
  Launch launch;
  int teams = 0;
  const int streams = args.dnext_residual == nullptr ? 2 : 3;
  for (const auto [blocks, least_stages] : {std::pair{1, 2}, {2, 2}, {1, 1}, {2, 1}}) {
    if (teams != 0) break;
    if (blocks > 1 && !device.clusters) continue;
    plan = plan_backward<T>(args, vec, blocks);
    if (plan.kernel == nullptr) continue;
    const Spread& spread = plan.spread;
    args.team_size = spread.team_size;
    launch.cluster = blocks;
    const int head = (TeamSum::kScratch + spread.parameters(plan.parameters, vec)) * sizeof(float) +
                     kRingBarriers * sizeof(uint64_t);
    const int least = std::max(spread.team_size, kWarpSize);
    const int most = blocks == 1 ? plan.threads : least;
    launch.threads = choose_threads(spread, args.rows * segments, most, device);
    for (; launch.threads >= least; launch.threads -= least) {
      const int block_teams = launch.threads / spread.team_size;
      const int stage_bytes = block_teams * args.features / blocks * streams * sizeof(T);
      args.stages = std::min(std::clamp(kBytesInFlight / stage_bytes, least_stages, kMaxStages),
                             (device.shared_bytes - head) / stage_bytes);
      if (args.stages < least_stages) continue;
      teams = block_teams;
      launch.shared_bytes = head + args.stages * stage_bytes;
      break;
    }
  }
  const bool wide = teams == 0;
  if (wide) launch.cluster = 1;
  args.segment_blocks = std::min(divide_up(args.rows, wide ? 1 : teams),
                                 std::max(device.multiprocessors / (launch.cluster * segments), 1));
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

  if (wide) {
    args.team_size = kWideThreads;
    const int rows = args.rows * segments;
    const auto terms = memory.Allocate(static_cast<size_t>(rows) * sizeof(float2), 16);
    if (!terms) return ffi::Error::Internal("layer_norm: no memory for the sums of each row");
    args.row_terms = static_cast<float2*>(*terms);
    const auto terms_kernel = vec == 1 ? backward_row_terms<T, 1> : backward_row_terms<T, kFullVec>;
    const auto columns_kernel = vec == 1 ? backward_columns<T, 1> : backward_columns<T, kFullVec>;
    RETURN_IF_ERROR(launch_kernel(terms_kernel, args,
                                  {dim3(std::min(rows, 2 * device.multiprocessors)), kWideThreads,
                                   TeamSum::kScratch * sizeof(float)},
                                  stream));
    constexpr int kThreads = 128;
    const int column_blocks = divide_up(args.features, kThreads * vec);
    RETURN_IF_ERROR(
        launch_kernel(columns_kernel, args, {dim3(blocks, column_blocks), kThreads, 0}, stream));
  } else {
    launch.grid = dim3(blocks * launch.cluster);
    RETURN_IF_ERROR(allow_shared_memory(plan.kernel, device));
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
                               std::string_view pre_activation, std::string_view activation) {
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

  Device device;
  RETURN_IF_ERROR(current_device(&device));
  switch (*dtype_of(h)) {
    case Dtype::kFloat32:
      return launch_backward<float>(args, device, stream, memory);
    case Dtype::kBfloat16:
      return launch_backward<__nv_bfloat16>(args, device, stream, memory);
    default:
      return launch_backward<__half>(args, device, stream, memory);
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
                   .Attr<std::string_view>("activation"));
