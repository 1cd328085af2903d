// layer_norm and rms_norm, forward: jaxfused/reference/layer_norm.py in one pass over memory.

#include "layer_norm.cuh"

namespace {

struct ForwardArgs {
  const void* x;
  const void* residual;  // nullptr: none
  Parameter scale;
  Parameter bias;
  Parameter pre_bias;
  void* y;
  void* next_residual;
  float* mean;  // nullptr: not wanted
  float* rstd;
  int rows;
  int features;
  NormOptions options;
  int team_size;
  int team_blocks;
  int block_features;
  int stages;
};

// --- rows that a team holds in registers ---------------------------------------------------------

// A row and the parameters stay in registers, in float32.
constexpr ThreadLimits forward_limits(Chain chain) {
  return chain == Chain::kPlain ? ThreadLimits{512, 512, 512, 512}
                                : ThreadLimits{512, 512, 384, 384};
}

template <typename T, int kVec, int kElements, Chain kChain>
__global__ void __launch_bounds__(threads_limit(forward_limits(kChain), kElements))
    forward_rows(const __grid_constant__ ForwardArgs args) {
  constexpr int kVectors = kElements / kVec;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  uint64_t* barriers =
      reinterpret_cast<uint64_t*>(shared_memory + TeamSum::kScratch * sizeof(float));

  const NormOptions options = known_options<kChain>(args.options);
  const bool has_residual = args.residual != nullptr;
  const Team team(args.team_size, args.team_blocks);
  TeamSum team_sum(team, reinterpret_cast<float*>(shared_memory));
  const Columns<kVec, kVectors> column(team, args.features, args.block_features);
  const RowWalk walk(team, blockIdx.x / team.blocks, gridDim.x / team.blocks, 0, args.rows);
  const void* const sources[kMaxStreams] = {args.x, args.residual, nullptr};
  RowRing<T, kVec, kVectors> ring(barriers, shared_memory + kSharedHead, sources,
                                  has_residual ? 2 : 1, args.stages, args.features,
                                  args.block_features, team, column, walk);

  float scale[kVectors][kVec], bias[kVectors][kVec], pre_bias[kVectors][kVec];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) scale[v][i] = bias[v][i] = pre_bias[v][i] = 0.0f;
    if (!column.has(v)) continue;
    load_scale(args.scale, options.scale_offset, column(v), scale[v]);
    load_or_zero(args.bias, column(v), bias[v]);
    if constexpr (kChain != Chain::kPlain) load_or_zero(args.pre_bias, column(v), pre_bias[v]);
  }
  team.synchronize_blocks();

  for (int base = walk.first; base < walk.end; base += walk.step) {
    const int row = base + walk.line;
    const bool active = row < walk.end;
    const int64_t row_start = static_cast<int64_t>(row) * args.features;
    float u[kVectors][kVec];
    float sum[1] = {0.0f};
    ring.wait();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      unpack(ring.read(0, v), u[v]);
      if constexpr (kChain != Chain::kPlain) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) u[v][i] += pre_bias[v][i];
      }
      if (has_residual) {
        float other[kVec];
        unpack(ring.read(1, v), other);
#pragma unroll
        for (int i = 0; i < kVec; ++i) u[v][i] += other[i];
        Vector<T, kVec> rounded;
        pack(u[v], rounded);
        if (active && column.has(v)) {
          store_vector(static_cast<T*>(args.next_residual) + row_start + column(v), rounded);
        }
        unpack(rounded, u[v]);
      }
      activate(options.pre_activation, u[v]);
      sum[0] += sum_of(u[v]);
    }

    float mean = 0.0f;
    if (options.subtract_mean) {
      team_sum(sum);
      mean = sum[0] * options.inverse_features;
    }
    float squares[1] = {0.0f};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float vector_squares = 0.0f;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        u[v][i] = column.has(v) ? u[v][i] - mean : 0.0f;
        vector_squares += u[v][i] * u[v][i];
      }
      squares[0] += vector_squares;
    }
    team_sum(squares);
    ring.fetch();
    const float rstd = __frsqrt_rn(squares[0] * options.inverse_features + options.epsilon);
    if (active && team.leads()) {
      if (args.mean != nullptr) args.mean[row] = mean;
      if (args.rstd != nullptr) args.rstd[row] = rstd;
    }

#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float y[kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = u[v][i] * rstd * scale[v][i] + bias[v][i];
      activate(options.activation, y);
      Vector<T, kVec> packed;
      pack(y, packed);
      if (active && column.has(v)) {
        store_vector(static_cast<T*>(args.y) + row_start + column(v), packed);
      }
    }
  }
}

// --- rows longer than that -----------------------------------------------------------------------

// A block reads a row three times, the second and third time from L2: a row of every block in
// flight fits there (132 x 256 KiB at worst, in 50 MB).
template <typename T, int kVec>
__global__ void __launch_bounds__(kWideThreads)
    forward_wide_rows(const __grid_constant__ ForwardArgs args) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const Team team(args.team_size, 1);
  TeamSum team_sum(team, reinterpret_cast<float*>(shared_memory));
  __syncthreads();
  const int first_column = team.rank * kVec;
  const int column_step = team.size * kVec;

  for (int row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const int64_t row_start = static_cast<int64_t>(row) * args.features;
    const T* x = static_cast<const T*>(args.x) + row_start;
    T* next_residual = static_cast<T*>(args.next_residual) + row_start;

    // A thread reads back only what it wrote itself.
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
    if (team.leads()) {
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

template <typename T, Chain kChain>
ForwardKernel vector_kernel(int elements) {
  constexpr int kVec = 16 / sizeof(T);
  constexpr ForwardKernel kKernels[kElementChoices] = {
      forward_rows<T, kVec, 8, kChain>, forward_rows<T, kVec, 16, kChain>,
      forward_rows<T, kVec, 24, kChain>, forward_rows<T, kVec, 32, kChain>};
  return kKernels[elements / kElementStep - 1];
}

template <typename T>
ForwardKernel rows_kernel(Chain chain, int vec, int elements) {
  if (vec == 1) {
    return elements == 8 ? forward_rows<T, 1, 8, Chain::kGeneral>
                         : forward_rows<T, 1, 16, Chain::kGeneral>;
  }
  switch (chain) {
    case Chain::kPlain:
      return vector_kernel<T, Chain::kPlain>(elements);
    case Chain::kRelu:
      return vector_kernel<T, Chain::kRelu>(elements);
    default:
      return vector_kernel<T, Chain::kGeneral>(elements);
  }
}

// Small blocks: while some wait for their rows, others compute.
constexpr int kForwardThreads = 128;

template <typename T>
ffi::Error launch_forward(ForwardArgs args, const Device& device, cudaStream_t stream) {
  constexpr int kFullVec = 16 / sizeof(T);
  const bool aligned = are_aligned({args.x, args.residual, args.scale.data, args.bias.data,
                                    args.pre_bias.data, args.y, args.next_residual});
  const int vec = aligned && args.features % kFullVec == 0 ? kFullVec : 1;
  const Chain chain =
      vec == 1 ? Chain::kGeneral : chain_of(args.options, args.pre_bias.data != nullptr);
  const Spread spread =
      choose_spread(args.features, vec, forward_limits(chain), device.max_team_blocks);
  if (spread.elements == 0) {
    args.team_size = kWideThreads;
    const auto kernel = vec == 1 ? forward_wide_rows<T, 1> : forward_wide_rows<T, kFullVec>;
    const int64_t blocks = std::min(args.rows, 2 * device.multiprocessors);
    return launch_kernel(kernel, args,
                         {dim3(blocks), kWideThreads, TeamSum::kScratch * sizeof(float)}, stream);
  }
  const auto kernel = rows_kernel<T>(chain, vec, spread.elements);
  const int streams = args.residual == nullptr ? 1 : 2;
  Launch launch;
  launch.threads = choose_threads(spread, args.rows, kForwardThreads, device);
  launch.cluster = spread.team_blocks;
  const int teams = launch.threads / spread.team_size;

  // The ring's depth leaves room for as many blocks as registers allow.
  launch.shared_bytes = kSharedHead;
  launch.grid = dim3(launch.cluster);
  int clusters = 0;
  RETURN_IF_ERROR(resident_clusters(kernel, launch, device, &clusters));
  const RingPlan ring =
      plan_ring(teams * spread.block_features * streams * sizeof(T), 0,
                divide_up(clusters * launch.cluster, device.multiprocessors), device);
  if (ring.stages == 0) return ffi::Error::Internal("layer_norm: no shared memory for a row");
  launch.shared_bytes = ring.shared_bytes;
  RETURN_IF_ERROR(resident_clusters(kernel, launch, device, &clusters));
  launch.grid = dim3(std::min(divide_up(args.rows, teams), clusters) * launch.cluster);
  args.team_size = spread.team_size;
  args.team_blocks = spread.team_blocks;
  args.block_features = spread.block_features;
  args.stages = ring.stages;
  return launch_kernel(kernel, args, launch, stream);
}

ffi::Error layer_norm_forward(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                              ffi::AnyBuffer bias, ffi::AnyBuffer residual, ffi::AnyBuffer pre_bias,
                              ffi::Result<ffi::AnyBuffer> y,
                              ffi::Result<ffi::AnyBuffer> next_residual,
                              ffi::Result<ffi::AnyBuffer> mean, ffi::Result<ffi::AnyBuffer> rstd,
                              bool subtract_mean, float epsilon, float scale_offset,
                              std::string_view pre_activation, std::string_view activation) {
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

  Device device;
  RETURN_IF_ERROR(current_device(&device));
  switch (*dtype_of(x)) {
    case Dtype::kFloat32:
      return launch_forward<float>(args, device, stream);
    case Dtype::kBfloat16:
      return launch_forward<__nv_bfloat16>(args, device, stream);
    default:
      return launch_forward<__half>(args, device, stream);
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
                   .Attr<std::string_view>("activation"));
