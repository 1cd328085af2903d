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
};

// --- rows that a team holds in registers ---------------------------------------------------------

constexpr int kForwardMaxThreads = 512;  // leaves 128 registers a thread
constexpr ThreadLimits kForwardLimits = {512, 512, 512, 512};

template <typename T, Chain kChain, bool kResidual>
struct ForwardForm {
  static constexpr bool kHasPreBias = kChain != Chain::kPlain;
  // Whether scale and bias have registers: not beside a residual, or rows of float32.
  static constexpr bool kHolds = sizeof(T) == 2 && kChain != Chain::kGeneral && !kResidual;
  static constexpr int kShared = (kHolds ? 0 : 2) + kHasPreBias;
};

// While a team computes a row, the next one is on its way into registers, packed as in memory.
template <typename T, int kVec, int kElements, Chain kChain, bool kResidual>
__global__ void __launch_bounds__(kForwardMaxThreads)
    forward_rows(const __grid_constant__ ForwardArgs args) {
  using Form = ForwardForm<T, kChain, kResidual>;
  constexpr int kVectors = kElements / kVec;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);

  const NormOptions options = known_options<kChain>(args.options);
  const bool has_residual = kResidual && args.residual != nullptr;
  const bool has_pre_bias = Form::kHasPreBias && (!kResidual || args.pre_bias.data != nullptr);
  const Team team(args.team_size);
  const Columns<kVec, kVectors> column(team, args.features);
  const RowWalk walk(team, blockIdx.x, gridDim.x, 0, args.rows);

  Vector<T, kVec> x[kVectors] = {}, residual[kVectors] = {};
  const auto start_load = [&](int row) {
    if (row >= walk.end) return;
    const int64_t row_start = static_cast<int64_t>(row) * args.features;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!column.has(v)) continue;
      const int64_t place = row_start + column(v);
      x[v] = load_vector<T, kVec>(static_cast<const T*>(args.x) + place);
      if (has_residual) {
        residual[v] = load_vector<T, kVec>(static_cast<const T*>(args.residual) + place);
      }
    }
  };
  start_load(walk.first + walk.line);

  TeamSum team_sum(team, shared);
  shared += TeamSum::kScratch;
  ColumnValues<kVec, kVectors, Form::kHolds> scale(shared, team);
  ColumnValues<kVec, kVectors, Form::kHolds> bias(shared, team);
  ColumnValues<kVec, kVectors, !Form::kHasPreBias> pre_bias(shared, team);
  {
    float values[3][kVectors][kVec];
    load_columns(args.scale, column, 1.0f, values[0]);
    load_columns(args.bias, column, 0.0f, values[1]);
    if (has_pre_bias) load_columns(args.pre_bias, column, 0.0f, values[2]);
    scale.write(values[0], args.scale.data == nullptr ? 0.0f : options.scale_offset);
    bias.write(values[1], 0.0f);
    if (has_pre_bias) pre_bias.write(values[2], 0.0f);
  }
  __syncthreads();

  for (int base = walk.first; base < walk.end; base += walk.step) {
    const int row = base + walk.line;
    const bool active = row < walk.end;
    const int64_t row_start = static_cast<int64_t>(row) * args.features;
    float u[kVectors][kVec];
    float sum[1] = {0.0f};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      unpack(x[v], u[v]);
      if (has_pre_bias) {
        float offset[kVec];
        pre_bias.read(v, offset);
#pragma unroll
        for (int i = 0; i < kVec; ++i) u[v][i] += offset[i];
      }
      if (has_residual) {
        float other[kVec];
        unpack(residual[v], other);
#pragma unroll
        for (int i = 0; i < kVec; ++i) u[v][i] += other[i];
        Vector<T, kVec> rounded;
        pack(u[v], rounded);
        if (active && column.has(v)) {
          store_streaming(static_cast<T*>(args.next_residual) + row_start + column(v), rounded);
        }
        unpack(rounded, u[v]);
      }
      activate(options.pre_activation, u[v]);
      sum[0] += sum_of(u[v]);
    }
    start_load(row + walk.step);

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
    const float rstd = __frsqrt_rn(squares[0] * options.inverse_features + options.epsilon);
    if (active && team.rank == 0) {
      if (args.mean != nullptr) args.mean[row] = mean;
      if (args.rstd != nullptr) args.rstd[row] = rstd;
    }

#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float y[kVec], factor[kVec], offset[kVec];
      scale.read(v, factor);
      bias.read(v, offset);
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = u[v][i] * rstd * factor[i] + offset[i];
      activate(options.activation, y);
      Vector<T, kVec> packed;
      pack(y, packed);
      if (active && column.has(v)) {
        T* target = static_cast<T*>(args.y) + row_start + column(v);
        // Measured on an H200: 1% faster than streaming for the plain chain, and slower for others.
        if constexpr (kChain == Chain::kPlain) {
          store_vector(target, packed);
        } else {
          store_streaming(target, packed);
        }
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
  const Team team(args.team_size);
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

template <typename T, int kVec, Chain kChain, bool kResidual>
ForwardKernel rows_kernel(int elements) {
  if constexpr (kVec == 1) {
    return elements == 8 ? forward_rows<T, 1, 8, kChain, kResidual>
                         : forward_rows<T, 1, 16, kChain, kResidual>;
  } else {
    constexpr ForwardKernel kKernels[kElementChoices] = {
        forward_rows<T, kVec, 8, kChain, kResidual>, forward_rows<T, kVec, 16, kChain, kResidual>,
        forward_rows<T, kVec, 24, kChain, kResidual>, forward_rows<T, kVec, 32, kChain, kResidual>};
    return kKernels[elements / kElementStep - 1];
  }
}

struct ForwardPlan {
  ForwardKernel kernel;
  int shared_parameters;
};

template <typename T, int kVec, Chain kChain, bool kResidual>
ForwardPlan plan_rows(const ForwardArgs& args, int elements) {
  const bool spares_pre_bias = kResidual && args.pre_bias.data == nullptr;
  return {rows_kernel<T, kVec, kChain, kResidual>(elements),
          ForwardForm<T, kChain, kResidual>::kShared - spares_pre_bias};
}

template <typename T>
ForwardPlan plan_forward(const ForwardArgs& args, int vec, int elements) {
  constexpr int kVec = 16 / sizeof(T);
  const bool residual = args.residual != nullptr;
  const Chain chain = chain_of(args.options, residual || args.pre_bias.data != nullptr);
  if (vec == 1) return plan_rows<T, 1, Chain::kGeneral, true>(args, elements);
  if (chain == Chain::kGeneral) return plan_rows<T, kVec, Chain::kGeneral, true>(args, elements);
  if (chain == Chain::kPlain) return plan_rows<T, kVec, Chain::kPlain, false>(args, elements);
  return residual ? plan_rows<T, kVec, Chain::kRelu, true>(args, elements)
                  : plan_rows<T, kVec, Chain::kRelu, false>(args, elements);
}

// Small blocks: while some exchange sums, others compute.
constexpr int kForwardThreads = 128;

template <typename T>
ffi::Error launch_forward(ForwardArgs args, const Device& device, cudaStream_t stream) {
  constexpr int kFullVec = 16 / sizeof(T);
  const bool aligned = are_aligned({args.x, args.residual, args.scale.data, args.bias.data,
                                    args.pre_bias.data, args.y, args.next_residual});
  const int vec = aligned && args.features % kFullVec == 0 ? kFullVec : 1;
  const Spread spread = choose_spread(args.features, vec, kForwardLimits);
  Launch launch;
  ForwardPlan plan = {};
  if (spread.elements != 0) {
    plan = plan_forward<T>(args, vec, spread.elements);
    launch.shared_bytes = (TeamSum::kScratch + spread.parameters(plan.shared_parameters, vec)) *
                          static_cast<int>(sizeof(float));
  }
  if (plan.kernel == nullptr || launch.shared_bytes > device.shared_bytes) {
    args.team_size = kWideThreads;
    const auto kernel = vec == 1 ? forward_wide_rows<T, 1> : forward_wide_rows<T, kFullVec>;
    const int blocks = std::min(args.rows, 2 * device.multiprocessors);
    return launch_kernel(kernel, args,
                         {dim3(blocks), kWideThreads, TeamSum::kScratch * sizeof(float)}, stream);
  }
  RETURN_IF_ERROR(allow_shared_memory(plan.kernel, device));
  args.team_size = spread.team_size;
  launch.threads = choose_threads(spread, args.rows, kForwardThreads, device);
  int blocks = 0;
  RETURN_IF_ERROR(resident_blocks(plan.kernel, launch, device, &blocks));
  const int teams = launch.threads / spread.team_size;
  launch.grid = dim3(std::min(divide_up(args.rows, teams), blocks));
  return launch_kernel(plan.kernel, args, launch, stream);
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
