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
  float2* row_means;  // [rows] mean(g), mean(g xhat): only between the kernels for long rows
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

// The part of the equations above that needs no sum over the row: h is pre_activation's input, dz
// comes as dy.
template <int kVec>
__device__ __forceinline__ void normalise(const NormOptions& options, float mean, float rstd,
                                          const float (&h)[kVec], const float (&scale)[kVec],
                                          const float (&bias)[kVec], float (&dz)[kVec],
                                          float (&xhat)[kVec], float (&g)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) xhat[i] = h[i];
  activate(options.pre_activation, xhat);
#pragma unroll
  for (float& value : xhat) value = (value - mean) * rstd;
  if (options.activation != Activation::kNone) {
    float z[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) z[i] = xhat[i] * scale[i] + bias[i];
    multiply_derivative(options.activation, z, dz);
  }
  // Rounded here: a g fused into g - mean(g) would leave a residue where both are the same.
#pragma unroll
  for (int i = 0; i < kVec; ++i) g[i] = __fmul_rn(dz[i], scale[i]);
}

// dh without dnext_residual.
template <int kVec>
__device__ __forceinline__ void gradient_of_h(const NormOptions& options, float rstd,
                                              float2 row_means, const float (&h)[kVec],
                                              const float (&xhat)[kVec], const float (&g)[kVec],
                                              float (&dh)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) dh[i] = (g[i] - row_means.x - xhat[i] * row_means.y) * rstd;
  multiply_derivative(options.pre_activation, h, dh);
}

__device__ __forceinline__ float2 row_means_of(const NormOptions& options, const float (&sums)[2]) {
  return make_float2(options.subtract_mean ? sums[0] * options.inverse_features : 0.0f,
                     sums[1] * options.inverse_features);
}

// --- rows that one block works on ----------------------------------------------------------------

// The gradients of a thread's columns stay in registers, in float32, and rows come in through a
// ring in shared memory. A row is needed twice, before and after the exchange of its sums. Up to
// 8,192 features or so it stays in registers meanwhile, packed; longer rows of the plain chain stay
// in the ring.
constexpr ThreadLimits backward_limits(Chain chain) {
  return chain == Chain::kPlain ? ThreadLimits{512, 512, 384, 256}
                                : ThreadLimits{512, 384, 256, 256};
}

// Where only dscale is wanted, twice the threads have its sums: 106 us instead of 115 for 4096
// rows of 16384 bfloat16 values on an H200.
constexpr ThreadLimits kLongLimits = {0, 0, 0, 512};
constexpr ThreadLimits kLongScaleOnlyLimits = {0, 1024, 0, 0};

template <Chain kChain, int kElements, bool kLong>
struct BackwardForm {
  static constexpr bool kScaleOnly = kLong && threads_limit(kLongScaleOnlyLimits, kElements) != 0;
  static constexpr int kGradients = kScaleOnly ? 1 : kChain == Chain::kPlain ? 2 : 3;
  static constexpr int kThreads = threads_limit(kScaleOnly ? kLongScaleOnlyLimits
                                                : kLong    ? kLongLimits
                                                           : backward_limits(kChain),
                                                kElements);
};

constexpr int kBackwardStreams = 2;  // h, dy

template <typename T, int kVec, int kElements, Chain kChain, bool kLong>
__global__ void __launch_bounds__(BackwardForm<kChain, kElements, kLong>::kThreads)
    backward_rows(const __grid_constant__ BackwardArgs args) {
  constexpr int kVectors = kElements / kVec;
  constexpr int kGradients = BackwardForm<kChain, kElements, kLong>::kGradients;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);

  const NormOptions options = known_options<kChain>(args.options);
  const Team team(args.team_size);
  TeamSum team_sum(team, shared);
  shared += TeamSum::kScratch;
  const Columns<kVec, kVectors> column(team, args.features);
  const int segment = blockIdx.x / args.segment_blocks;
  const RowWalk walk(team, blockIdx.x % args.segment_blocks, args.segment_blocks,
                     segment * args.rows, (segment + 1) * args.rows);

  ColumnValues<kVec, kVectors, false> scale, bias, pre_bias;
  const auto place_values = [&](auto& values) {
    values.place(shared, team);
    shared += team.size * kElements;
  };
  place_values(scale);
  if constexpr (kChain != Chain::kPlain) place_values(pre_bias);
  if constexpr (kChain == Chain::kGeneral) place_values(bias);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float values[3][kVec] = {};
    if (column.has(v)) {
      load_scale(args.scale, options.scale_offset, column(v), values[0]);
      load_or_zero(args.bias, column(v), values[1]);
      if (args.adds_pre_bias()) load_parameter(args.pre_bias, column(v), values[2]);
    }
    scale.write(v, values[0]);
    if constexpr (kChain != Chain::kPlain) pre_bias.write(v, values[2]);
    if constexpr (kChain == Chain::kGeneral) bias.write(v, values[1]);
  }
  using Ring = RowRing<T, kVec, kVectors, kBackwardStreams>;
  uint64_t* barriers = reinterpret_cast<uint64_t*>(shared);
  shared += kRingBarriers * sizeof(uint64_t) / sizeof(float);
  const void* const sources[kBackwardStreams] = {args.h, args.dy};
  Ring ring(barriers, shared, sources, args.stages, team, column, walk);

  // What comes from memory directly is asked for one step ahead: a load takes about as long as a
  // row.
  const auto load_statistics = [&](int row) {
    if (row >= walk.end) return make_float2(0.0f, 0.0f);
    return make_float2(args.mean == nullptr ? 0.0f : args.mean[row], args.rstd[row]);
  };
  const auto dnext_address = [&](int row, int v) {
    return static_cast<const T*>(args.dnext_residual) +
           (static_cast<int64_t>(row) * args.features + column(v));
  };
  float2 next_statistics = load_statistics(walk.first + walk.line);
  float gradients[kGradients][kVectors][kVec] = {};
  __syncthreads();

  for (int base = walk.first; base < walk.end; base += walk.step) {
    const int row = base + walk.line;
    const bool active = kLong || row < walk.end;
    const float mean = next_statistics.x;
    const float rstd = next_statistics.y;
    next_statistics = load_statistics(row + walk.step);
    if (args.dnext_residual != nullptr && row + walk.step < walk.end) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (column.has(v)) prefetch(dnext_address(row + walk.step, v));
      }
    }

    Vector<T, kVec> inputs[kLong ? 1 : kVectors][kBackwardStreams];
    const auto read = [&](int v, float (&h)[kVec], float (&dz)[kVec], float (&xhat)[kVec],
                          float (&g)[kVec]) {
      if constexpr (kLong) {
        unpack(ring.read(0, v), h);
        unpack(ring.read(1, v), dz);
      } else {
        unpack(inputs[v][0], h);
        unpack(inputs[v][1], dz);
      }
      float factor[kVec], offset[kVec] = {};
      scale.read(v, factor);
      if constexpr (kChain != Chain::kPlain) {
        pre_bias.read(v, offset);
#pragma unroll
        for (int i = 0; i < kVec; ++i) h[i] += offset[i];
      }
      if constexpr (kChain == Chain::kGeneral) bias.read(v, offset);
      normalise(options, mean, rstd, h, factor, offset, dz, xhat, g);
    };
    float sums[2] = {0.0f, 0.0f};
    ring.wait();
    if (active) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float h[kVec], dz[kVec], xhat[kVec], g[kVec], products[kVec];
        if constexpr (!kLong) {
          inputs[v][0] = ring.read(0, v);
          inputs[v][1] = ring.read(1, v);
        }
        read(v, h, dz, xhat, g);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          products[i] = g[i] * xhat[i];
          gradients[0][v][i] += dz[i] * xhat[i];
          if constexpr (kGradients > 1) gradients[1][v][i] += dz[i];
        }
        sums[0] += sum_of(g);
        sums[1] += sum_of(products);
      }
    }
    team_sum(sums);
    if constexpr (!kLong) ring.fetch();
    const float2 row_means = row_means_of(options, sums);
    if (active) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float h[kVec], dz[kVec], xhat[kVec], g[kVec], dh[kVec];
        read(v, h, dz, xhat, g);
        gradient_of_h(options, rstd, row_means, h, xhat, g, dh);
        if (!column.has(v)) continue;
        if (args.dnext_residual != nullptr) {
          float dnext[kVec];
          unpack(load_streaming<T, kVec>(dnext_address(row, v)), dnext);
#pragma unroll
          for (int i = 0; i < kVec; ++i) dh[i] += dnext[i];
        }
        if constexpr (kGradients > 2) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) gradients[2][v][i] += dh[i];
        }
        Vector<T, kVec> dx;
        pack(dh, dx);
        store_streaming(
            static_cast<T*>(args.dx) + static_cast<int64_t>(row) * args.features + column(v), dx);
      }
    }
    if constexpr (kLong) {
      team_sum.synchronize();
      ring.fetch();
    }
  }

  // The block's sums over its rows, through the memory of the ring.
#pragma unroll
  for (int i = 0; i < kGradients; ++i) {
    if (args.gradients[i] == nullptr) continue;
    __syncthreads();
    add_over_teams(gradients[i], team, column, shared,
                   args.gradients[i] + static_cast<int64_t>(blockIdx.x) * args.features);
  }
}

// --- rows longer than that -----------------------------------------------------------------------

// Such rows are read twice, once by each of two kernels: no block can hold a row and the sums over
// rows of its columns at the same time.

template <typename T, int kVec>
__device__ __forceinline__ void load_operands(const BackwardArgs& args, int row, int column,
                                              float (&h)[kVec], float (&dz)[kVec],
                                              float (&scale)[kVec], float (&bias)[kVec]) {
  const int64_t place = static_cast<int64_t>(row) * args.features + column;
  unpack(load_vector<T, kVec>(static_cast<const T*>(args.h) + place), h);
  unpack(load_vector<T, kVec>(static_cast<const T*>(args.dy) + place), dz);
  load_scale(args.scale, args.options.scale_offset, column, scale);
  load_or_zero(args.bias, column, bias);
  if (args.adds_pre_bias()) {
    float offset[kVec];
    load_parameter(args.pre_bias, column, offset);
#pragma unroll
    for (int i = 0; i < kVec; ++i) h[i] += offset[i];
  }
}

// row_means, a block a row.
template <typename T, int kVec>
__global__ void __launch_bounds__(kWideThreads)
    backward_row_means(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const Team team(args.team_size);
  TeamSum team_sum(team, reinterpret_cast<float*>(shared_memory));
  __syncthreads();
  const int rows = args.rows * args.segments;
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const float mean = args.mean == nullptr ? 0.0f : args.mean[row];
    const float rstd = args.rstd[row];
    float sums[2] = {0.0f, 0.0f};
#pragma unroll 2
    for (int column = team.rank * kVec; column < args.features; column += team.size * kVec) {
      float h[kVec], dz[kVec], xhat[kVec], g[kVec], scale[kVec], bias[kVec];
      load_operands<T>(args, row, column, h, dz, scale, bias);
      normalise(args.options, mean, rstd, h, scale, bias, dz, xhat, g);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        sums[0] += g[i];
        sums[1] += g[i] * xhat[i];
      }
    }
    team_sum(sums);
    if (team.rank == 0) args.row_means[row] = row_means_of(args.options, sums);
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
  float gradients[kParameters][kVec] = {};
#pragma unroll 2
  for (int row = first; row < end; row += args.segment_blocks) {
    const float mean = args.mean == nullptr ? 0.0f : args.mean[row];
    const float rstd = args.rstd[row];
    float h[kVec], dz[kVec], xhat[kVec], g[kVec], scale[kVec], bias[kVec], dh[kVec];
    load_operands<T>(args, row, column, h, dz, scale, bias);
    normalise(args.options, mean, rstd, h, scale, bias, dz, xhat, g);
    gradient_of_h(args.options, rstd, args.row_means[row], h, xhat, g, dh);
    const int64_t place = static_cast<int64_t>(row) * args.features + column;
    if (args.dnext_residual != nullptr) {
      float dnext[kVec];
      unpack(load_vector<T, kVec>(static_cast<const T*>(args.dnext_residual) + place), dnext);
#pragma unroll
      for (int i = 0; i < kVec; ++i) dh[i] += dnext[i];
    }
    Vector<T, kVec> dx;
    pack(dh, dx);
    store_vector(static_cast<T*>(args.dx) + place, dx);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      gradients[0][i] += dz[i] * xhat[i];
      gradients[1][i] += dz[i];
      gradients[2][i] += dh[i];
    }
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
constexpr int kAddRows = 16;

// Block (x, segment, parameter) adds up kAddThreads vectors of columns of one gradient.
template <int kVec>
__global__ void __launch_bounds__(kAddThreads* kAddRows)
    add_blocks(const __grid_constant__ AddBlocksArgs args) {
  using Sum = Vector<float, kVec>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  Sum* sums = reinterpret_cast<Sum*>(shared_memory);
  const int segment = blockIdx.y;
  const int lane = threadIdx.x % kAddThreads;
  const int slice = threadIdx.x / kAddThreads;
  const int column = (blockIdx.x * kAddThreads + lane) * kVec;
  const int64_t first_part = static_cast<int64_t>(segment) * args.segment_blocks;
  const float* parts = args.parts[blockIdx.z] + first_part * args.features + column;
  Sum sum = {};
  const auto add = [&](const Sum& other) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum.values[i] += other.values[i];
  };
  if (column < args.features) {
#pragma unroll 4
    for (int block = slice; block < args.segment_blocks; block += kAddRows) {
      add(load_vector<float, kVec>(parts + static_cast<int64_t>(block) * args.features));
    }
  }
  store_vector(sums + threadIdx.x, sum);
  __syncthreads();
  if (slice == 0 && column < args.features) {
#pragma unroll
    for (int other = 1; other < kAddRows; ++other) {
      add(load_vector<float, kVec>(sums + other * kAddThreads + lane));
    }
    store_vector(args.totals[blockIdx.z] + static_cast<int64_t>(segment) * args.features + column,
                 sum);
  }
}

// --- launch --------------------------------------------------------------------------------------

using BackwardKernel = void (*)(BackwardArgs);

template <typename T, Chain kChain>
BackwardKernel vector_kernel(int elements) {
  constexpr int kVec = 16 / sizeof(T);
  constexpr BackwardKernel kKernels[kElementChoices] = {
      backward_rows<T, kVec, 8, kChain, false>, backward_rows<T, kVec, 16, kChain, false>,
      backward_rows<T, kVec, 24, kChain, false>, backward_rows<T, kVec, 32, kChain, false>};
  return kKernels[elements / kElementStep - 1];
}

struct BackwardPlan {
  BackwardKernel kernel = nullptr;  // nullptr: the row is too long for one block
  Spread spread;
  int parameters;  // in shared memory
  int threads;     // of a block, at most
};

template <typename T>
BackwardPlan plan_rows(const BackwardArgs& args, Chain chain, int vec) {
  constexpr int kVec = 16 / sizeof(T);
  BackwardPlan plan;
  ThreadLimits limits = backward_limits(chain);
  plan.spread = choose_spread(args.features, vec, limits);
  const int elements = plan.spread.elements;
  plan.parameters = chain == Chain::kPlain ? 1 : chain == Chain::kRelu ? 2 : 3;
  if (elements == 0 && chain == Chain::kPlain) {
    const bool scale_only = args.gradients[1] == nullptr;
    limits = scale_only ? kLongScaleOnlyLimits : kLongLimits;
    plan.spread = choose_spread(args.features, vec, limits);
    plan.kernel = scale_only ? backward_rows<T, kVec, 16, Chain::kPlain, true>
                             : backward_rows<T, kVec, 32, Chain::kPlain, true>;
  } else if (elements != 0 && vec == 1) {
    plan.kernel = elements == 8 ? backward_rows<T, 1, 8, Chain::kGeneral, false>
                                : backward_rows<T, 1, 16, Chain::kGeneral, false>;
  } else if (elements != 0) {
    plan.kernel = chain == Chain::kPlain  ? vector_kernel<T, Chain::kPlain>(elements)
                  : chain == Chain::kRelu ? vector_kernel<T, Chain::kRelu>(elements)
                                          : vector_kernel<T, Chain::kGeneral>(elements);
  }
  if (plan.spread.elements == 0) plan.kernel = nullptr;
  if (plan.kernel != nullptr) plan.threads = threads_limit(limits, plan.spread.elements);
  return plan;
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
  const Chain chain =
      vec == 1 ? Chain::kGeneral : chain_of(args.options, args.pre_bias.data != nullptr);
  const BackwardPlan plan = plan_rows<T>(args, chain, vec);

  // One block a multiprocessor: more would only make more sums to add up. It has as many teams as
  // find room for two stages of the ring, at least, in shared memory.
  Launch launch;
  int teams = 0;
  if (plan.kernel != nullptr) {
    const Spread& spread = plan.spread;
    args.team_size = spread.team_size;
    const int head = (TeamSum::kScratch + plan.parameters * spread.padded()) * sizeof(float) +
                     kRingBarriers * sizeof(uint64_t);
    const int least = std::max(spread.team_size, kWarpSize);
    launch.threads = choose_threads(spread, args.rows * segments, plan.threads, device);
    for (; launch.threads >= least; launch.threads -= least) {
      const int block_teams = launch.threads / spread.team_size;
      const int stage_bytes = block_teams * args.features * kBackwardStreams * sizeof(T);
      args.stages = std::min(std::clamp(kBytesInFlight / stage_bytes, 2, kMaxStages),
                             (device.shared_bytes - head) / stage_bytes);
      if (args.stages < 2) continue;
      teams = block_teams;
      launch.shared_bytes = head + args.stages * stage_bytes;
      break;
    }
  }
  const bool wide = teams == 0;
  args.segment_blocks = std::min(divide_up(args.rows, wide ? 1 : teams),
                                 std::max(device.multiprocessors / segments, 1));
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
    const auto means = memory.Allocate(static_cast<size_t>(rows) * sizeof(float2), 16);
    if (!means) return ffi::Error::Internal("layer_norm: no memory for the means of each row");
    args.row_means = static_cast<float2*>(*means);
    const auto means_kernel = vec == 1 ? backward_row_means<T, 1> : backward_row_means<T, kFullVec>;
    const auto columns_kernel = vec == 1 ? backward_columns<T, 1> : backward_columns<T, kFullVec>;
    RETURN_IF_ERROR(launch_kernel(means_kernel, args,
                                  {dim3(std::min(rows, 2 * device.multiprocessors)), kWideThreads,
                                   TeamSum::kScratch * sizeof(float)},
                                  stream));
    constexpr int kThreads = 128;
    const int column_blocks = divide_up(args.features, kThreads * vec);
    RETURN_IF_ERROR(
        launch_kernel(columns_kernel, args, {dim3(blocks, column_blocks), kThreads, 0}, stream));
  } else {
    launch.grid = dim3(blocks);
    RETURN_IF_ERROR(allow_shared_memory(plan.kernel, device));
    RETURN_IF_ERROR(launch_kernel(plan.kernel, args, launch, stream));
  }
  if (gradients == 0) return ffi::Error::Success();
  const bool whole =
      args.features % 4 == 0 && are_aligned({add.totals[0], add.totals[1], add.totals[2]});
  const int add_vec = whole ? 4 : 1;
  const dim3 grid(divide_up(args.features, kAddThreads * add_vec), segments, gradients);
  constexpr int kThreads = kAddThreads * kAddRows;
  return launch_kernel(whole ? add_blocks<4> : add_blocks<1>, add,
                       {grid, kThreads, kThreads * add_vec * static_cast<int>(sizeof(float))},
                       stream);
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
