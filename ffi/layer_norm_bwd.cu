// layer_norm and rms_norm, backward. With u = pre_activation(h), xhat = (u - mean) rstd,
// z = xhat scale + bias, dz = dy activation'(z) and g = dz scale:
//
//     dh = pre_activation'(h) rstd (g - mean(g) - xhat mean(g xhat)) + dnext_residual
//     dscale = sum(dz xhat),   dbias = sum(dz),   dpre_bias = sum(dh)   over the rows
//
// (rms_norm: without mean(g)). The sums over rows are kept per block, in a fixed order, and added
// up by a second, small kernel: no atomics, the same bits from run to run.

#include "layer_norm.cuh"

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
  int team_blocks;
  int block_features;
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

// --- rows that a team holds in registers ---------------------------------------------------------

// A row, the parameters and their sums over the rows stay in registers, in float32: with pre_bias
// and its sums, 32 values of each would not fit.
constexpr ThreadLimits backward_limits(Chain chain) {
  return chain == Chain::kPlain ? ThreadLimits{512, 384, 256, 256} : ThreadLimits{512, 256, 256, 0};
}

template <typename T, int kVec, int kElements, Chain kChain>
__global__ void __launch_bounds__(threads_limit(backward_limits(kChain), kElements))
    backward_rows(const __grid_constant__ BackwardArgs args) {
  constexpr int kVectors = kElements / kVec;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  uint64_t* barriers =
      reinterpret_cast<uint64_t*>(shared_memory + TeamSum::kScratch * sizeof(float));

  const NormOptions options = known_options<kChain>(args.options);
  const bool has_dnext = args.dnext_residual != nullptr;
  const Team team(args.team_size, args.team_blocks);
  TeamSum team_sum(team, reinterpret_cast<float*>(shared_memory));
  const Columns<kVec, kVectors> column(team, args.features, args.block_features);
  const int team_idx = blockIdx.x / team.blocks;
  const int segment = team_idx / args.segment_blocks;
  const RowWalk walk(team, team_idx % args.segment_blocks, args.segment_blocks, segment * args.rows,
                     (segment + 1) * args.rows);
  const void* const sources[kMaxStreams] = {args.h, args.dy, args.dnext_residual};
  RowRing<T, kVec, kVectors> ring(barriers, shared_memory + kSharedHead, sources, has_dnext ? 3 : 2,
                                  args.stages, args.features, args.block_features, team, column,
                                  walk);

  float scale[kVectors][kVec], bias[kVectors][kVec], pre_bias[kVectors][kVec];
  float gradients[kParameters][kVectors][kVec] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) scale[v][i] = bias[v][i] = pre_bias[v][i] = 0.0f;
    if (!column.has(v)) continue;
    load_scale(args.scale, options.scale_offset, column(v), scale[v]);
    if constexpr (kChain != Chain::kPlain) {
      if (args.adds_pre_bias()) load_parameter(args.pre_bias, column(v), pre_bias[v]);
    }
    if constexpr (kChain == Chain::kGeneral) load_or_zero(args.bias, column(v), bias[v]);
  }
  // A row's statistics are asked for one step ahead: a load from memory takes about as long as a
  // row.
  const auto load_statistics = [&](int row) {
    if (row >= walk.end) return make_float2(0.0f, 0.0f);
    return make_float2(args.mean == nullptr ? 0.0f : args.mean[row], args.rstd[row]);
  };
  float2 next_statistics = load_statistics(walk.first + walk.line);
  team.synchronize_blocks();

  for (int base = walk.first; base < walk.end; base += walk.step) {
    const int row = base + walk.line;
    const bool active = row < walk.end;
    const auto [mean, rstd] = next_statistics;
    next_statistics = load_statistics(row + walk.step);

    Vector<T, kVec> inputs[kVectors], dnext[kVectors];
    float xhat[kVectors][kVec], g[kVectors][kVec];
    float sums[2] = {0.0f, 0.0f};
    const auto read_h = [&](int v, float (&h)[kVec]) {
      unpack(inputs[v], h);
      if constexpr (kChain != Chain::kPlain) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) h[i] += pre_bias[v][i];
      }
    };
    ring.wait();
    if (active) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float h[kVec], dz[kVec];
        inputs[v] = ring.read(0, v);
        read_h(v, h);
        unpack(ring.read(1, v), dz);
        if (has_dnext) dnext[v] = ring.read(2, v);
        normalise(options, mean, rstd, h, scale[v], bias[v], dz, xhat[v], g[v]);
        float products[kVec];
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          products[i] = g[v][i] * xhat[v][i];
          gradients[0][v][i] += dz[i] * xhat[v][i];
          gradients[1][v][i] += dz[i];
        }
        sums[0] += sum_of(g[v]);
        sums[1] += sum_of(products);
      }
    }
    team_sum(sums);
    ring.fetch();
    const float2 row_means = row_means_of(options, sums);
    if (active) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float h[kVec], dh[kVec];
        read_h(v, h);
        gradient_of_h(options, rstd, row_means, h, xhat[v], g[v], dh);
        if (has_dnext) {
          float other[kVec];
          unpack(dnext[v], other);
#pragma unroll
          for (int i = 0; i < kVec; ++i) dh[i] += other[i];
        }
        if constexpr (kChain != Chain::kPlain) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) gradients[2][v][i] += dh[i];
        }
        Vector<T, kVec> dx;
        pack(dh, dx);
        if (column.has(v)) {
          store_vector(
              static_cast<T*>(args.dx) + static_cast<int64_t>(row) * args.features + column(v), dx);
        }
      }
    }
  }

  // The block's sums over its rows, through the memory of the ring.
#pragma unroll
  for (int parameter = 0; parameter < (kChain == Chain::kPlain ? 2 : 3); ++parameter) {
    if (args.gradients[parameter] == nullptr) continue;
    __syncthreads();
    add_over_teams(gradients[parameter], team, column, args.block_features,
                   reinterpret_cast<float*>(shared_memory + kSharedHead),
                   args.gradients[parameter] + static_cast<int64_t>(team_idx) * args.features);
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
  const Team team(args.team_size, 1);
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
    if (team.leads()) args.row_means[row] = row_means_of(args.options, sums);
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

constexpr int kAddColumns = 32;
constexpr int kAddRows = 16;

// Block (x, segment, parameter) adds up kAddColumns columns of one gradient.
__global__ void __launch_bounds__(kAddColumns* kAddRows)
    add_blocks(const __grid_constant__ AddBlocksArgs args) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  float* sums = reinterpret_cast<float*>(shared_memory);
  const int segment = blockIdx.y;
  const int lane = threadIdx.x % kAddColumns;
  const int slice = threadIdx.x / kAddColumns;
  const int column = blockIdx.x * kAddColumns + lane;
  const int64_t first_part = static_cast<int64_t>(segment) * args.segment_blocks;
  const float* parts = args.parts[blockIdx.z] + first_part * args.features + column;
  float sum = 0.0f;
  if (column < args.features) {
#pragma unroll 8
    for (int block = slice; block < args.segment_blocks; block += kAddRows) {
      sum += parts[static_cast<int64_t>(block) * args.features];
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (slice == 0 && column < args.features) {
#pragma unroll
    for (int other = 1; other < kAddRows; ++other) sum += sums[other * kAddColumns + lane];
    args.totals[blockIdx.z][static_cast<int64_t>(segment) * args.features + column] = sum;
  }
}

// --- launch --------------------------------------------------------------------------------------

using BackwardKernel = void (*)(BackwardArgs);

template <typename T>
BackwardKernel rows_kernel(Chain chain, int vec, int elements) {
  constexpr int kVec = 16 / sizeof(T);
  constexpr Chain kPlain = Chain::kPlain, kRelu = Chain::kRelu, kGeneral = Chain::kGeneral;
  if (vec == 1) {
    return elements == 8 ? backward_rows<T, 1, 8, kGeneral> : backward_rows<T, 1, 16, kGeneral>;
  }
  switch (elements) {
    case 8:
      return chain == kPlain  ? backward_rows<T, kVec, 8, kPlain>
             : chain == kRelu ? backward_rows<T, kVec, 8, kRelu>
                              : backward_rows<T, kVec, 8, kGeneral>;
    case 16:
      return chain == kPlain  ? backward_rows<T, kVec, 16, kPlain>
             : chain == kRelu ? backward_rows<T, kVec, 16, kRelu>
                              : backward_rows<T, kVec, 16, kGeneral>;
    case 24:
      return chain == kPlain  ? backward_rows<T, kVec, 24, kPlain>
             : chain == kRelu ? backward_rows<T, kVec, 24, kRelu>
                              : backward_rows<T, kVec, 24, kGeneral>;
    default:
      return backward_rows<T, kVec, 32, kPlain>;
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
  const Chain chain =
      vec == 1 ? Chain::kGeneral : chain_of(args.options, args.pre_bias.data != nullptr);
  const ThreadLimits limits = backward_limits(chain);
  const Spread spread = choose_spread(args.features, vec, limits, device.max_team_blocks);
  const bool wide = spread.elements == 0;

  // One block a multiprocessor: more would only make more sums to add up.
  BackwardKernel kernel = nullptr;
  Launch launch;
  int teams = 1;
  int resident = device.multiprocessors;
  if (!wide) {
    kernel = rows_kernel<T>(chain, vec, spread.elements);
    launch.threads = choose_threads(spread, args.rows * segments,
                                    threads_limit(limits, spread.elements), device);
    launch.cluster = spread.team_blocks;
    launch.grid = dim3(launch.cluster);
    teams = launch.threads / spread.team_size;
    const int team_bytes = teams * spread.block_features * static_cast<int>(sizeof(T));
    const int sums_bytes =
        teams == 1 ? 0 : teams * spread.block_features * static_cast<int>(sizeof(float));
    const int streams = args.dnext_residual == nullptr ? 2 : 3;
    const RingPlan ring = plan_ring(streams * team_bytes, sums_bytes, 1, device);
    if (ring.stages == 0) return ffi::Error::Internal("layer_norm: no shared memory for a row");
    launch.shared_bytes = ring.shared_bytes;
    if (launch.cluster > 1) {
      RETURN_IF_ERROR(resident_clusters(kernel, launch, device, &resident));
    }
    args.team_size = spread.team_size;
    args.team_blocks = spread.team_blocks;
    args.block_features = spread.block_features;
    args.stages = ring.stages;
  }
  args.segment_blocks = std::min(divide_up(args.rows, teams), std::max(resident / segments, 1));
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
    launch.grid = dim3(blocks * launch.cluster);
    RETURN_IF_ERROR(launch_kernel(kernel, args, launch, stream));
  }
  if (gradients == 0) return ffi::Error::Success();
  return launch_kernel(add_blocks, add,
                       {dim3(divide_up(args.features, kAddColumns), segments, gradients),
                        kAddColumns * kAddRows, kAddColumns * kAddRows * sizeof(float)},
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
