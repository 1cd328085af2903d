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
  int64_t rows;
  int features;
  NormOptions options;
  int team_size;
  int stages;
};

// --- rows that a team holds in registers
// ----------------------------------------------------------

// kGeneral: with a pre_bias, a pre_activation or an activation. Without them a row stays packed in
// its own dtype, which leaves registers for the parameters.
template <typename T, int kVec, int kElements, bool kGeneral>
__global__ void __launch_bounds__(kMaxThreads)
    forward_rows(const __grid_constant__ ForwardArgs args) {
  constexpr int kVectors = kElements / kVec;
  using Kept = std::conditional_t<kGeneral, float, T>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  float* scratch = reinterpret_cast<float*>(shared_memory);
  float* staged = scratch + TeamSum::kScratch;

  const Team team(args.team_size);
  TeamSum team_sum(team, scratch);
  const bool has_residual = args.residual != nullptr;
  const bool has_pre_bias = kGeneral && args.pre_bias.data != nullptr;
  const void* const sources[3] = {args.x, args.residual, nullptr};
  RowRing<T, kVec, kVectors> ring(staged + (has_pre_bias ? team.size * kElements : 0), sources,
                                  has_residual ? 2 : 1, args.stages, args.features, team);

  const int block_rows = blockDim.x / team.size;
  const int64_t step = static_cast<int64_t>(gridDim.x) * block_rows;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * block_rows;
  for (int stage = 0; stage < args.stages; ++stage) {
    const int64_t row = first + stage * step + team.index;
    ring.fetch(row, row < args.rows);
  }

  float scale[kVectors][kVec];
  float bias[kVectors][kVec];
  ColumnFloats<kVec, kVectors> pre_bias(staged, team.size, team.rank);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = ring.column(v);
    float offset[kVec] = {};
    if (column < args.features) {
      load_scale(args.scale, args.options.scale_offset, column, scale[v]);
      load_or_zero(args.bias, column, bias[v]);
      if (has_pre_bias) load_parameter(args.pre_bias, column, offset);
    }
    // Every team of the block writes the same values; one team's are enough.
    if (has_pre_bias && team.index == 0) pre_bias.write(v, offset);
  }
  if (has_pre_bias) __syncthreads();

  for (int64_t base = first; base < args.rows; base += step) {
    const int64_t row = base + team.index;
    const bool active = row < args.rows;
    const int64_t row_start = row * args.features;
    Vector<Kept, kVec> kept[kVectors];
    float sum[1] = {0.0f};
    ring.wait();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float u[kVec];
      ring.read(0, v, u);
      if (has_pre_bias) {
        float offset[kVec];
        pre_bias.read(v, offset);
#pragma unroll
        for (int i = 0; i < kVec; ++i) u[i] += offset[i];
      }
      if (has_residual) {
        float other[kVec];
        ring.read(1, v, other);
#pragma unroll
        for (int i = 0; i < kVec; ++i) u[i] += other[i];
        Vector<T, kVec> rounded;
        pack(u, rounded);
        if (active && ring.column(v) < args.features) {
          store_vector(static_cast<T*>(args.next_residual) + row_start + ring.column(v), rounded);
        }
        unpack(rounded, u);
      }
      if constexpr (kGeneral) activate(args.options.pre_activation, u);
      pack(u, kept[v]);
      sum[0] += sum_of(u);
    }
    const int64_t next_row = row + args.stages * step;
    ring.fetch(next_row, next_row < args.rows);

    float mean = 0.0f;
    if (args.options.subtract_mean) {
      team_sum(sum);
      mean = sum[0] / args.features;
    }
    float squares[1] = {0.0f};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float center = ring.column(v) < args.features ? mean : 0.0f;
      float u[kVec];
      unpack(kept[v], u);
      float vector_squares = 0.0f;
#pragma unroll
      for (int i = 0; i < kVec; ++i) vector_squares += (u[i] - center) * (u[i] - center);
      squares[0] += vector_squares;
    }
    team_sum(squares);
    const float rstd = __frsqrt_rn(squares[0] / args.features + args.options.epsilon);
    if (active && team.rank == 0) {
      if (args.mean != nullptr) args.mean[row] = mean;
      if (args.rstd != nullptr) args.rstd[row] = rstd;
    }

#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float y[kVec];
      unpack(kept[v], y);
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = (y[i] - mean) * rstd * scale[v][i] + bias[v][i];
      if constexpr (kGeneral) activate(args.options.activation, y);
      Vector<T, kVec> packed;
      pack(y, packed);
      if (active && ring.column(v) < args.features) {
        store_vector(static_cast<T*>(args.y) + row_start + ring.column(v), packed);
      }
    }
  }
}

// --- rows longer than that
// ------------------------------------------------------------------------

// A block reads a row three times, the second and third time from L2: a row of every block in
// flight fits there (132 x 256 KiB at worst, in 50 MB).
template <typename T, int kVec>
__global__ void __launch_bounds__(kWideThreads)
    forward_wide_rows(const __grid_constant__ ForwardArgs args) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const Team team(args.team_size);
  TeamSum team_sum(team, reinterpret_cast<float*>(shared_memory));
  const int first_column = team.rank * kVec;
  const int column_step = team.size * kVec;

  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const int64_t row_start = row * args.features;
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
      mean = sum[0] / args.features;
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
    const float rstd = __frsqrt_rn(squares[0] / args.features + args.options.epsilon);
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

// --- launch
// ---------------------------------------------------------------------------------------

using ForwardKernel = void (*)(ForwardArgs);

template <typename T, bool kGeneral>
ForwardKernel rows_kernel(int vec, int elements) {
  constexpr int kVec = 16 / sizeof(T);
  if (vec == 1) {
    return elements == 8 ? forward_rows<T, 1, 8, kGeneral> : forward_rows<T, 1, 16, kGeneral>;
  }
  switch (elements) {
    case 8:
      return forward_rows<T, kVec, 8, kGeneral>;
    case 16:
      return forward_rows<T, kVec, 16, kGeneral>;
    case 24:
      return forward_rows<T, kVec, 24, kGeneral>;
    default:
      return forward_rows<T, kVec, 32, kGeneral>;
  }
}

template <typename T>
ffi::Error launch_forward(ForwardArgs args, const Device& device, cudaStream_t stream) {
  constexpr int kFullVec = 16 / sizeof(T);
  const bool aligned = are_aligned({args.x, args.residual, args.scale.data, args.bias.data,
                                    args.pre_bias.data, args.y, args.next_residual});
  const int vec = aligned && args.features % kFullVec == 0 ? kFullVec : 1;
  const bool general = args.pre_bias.data != nullptr ||
                       args.options.pre_activation != Activation::kNone ||
                       args.options.activation != Activation::kNone;
  const RowsPlan plan = plan_rows({
      .rows = args.rows,
      .segments = 1,
      .features = args.features,
      .vec = vec,
      .value_bytes = sizeof(T),
      .streams = args.residual == nullptr ? 1 : 2,
      .shared_parameters = args.pre_bias.data == nullptr ? 0 : 1,
      .private_parameters = 0,
      .sums_over_teams = false,
      .multiprocessors = device.multiprocessors,
      .shared_bytes = device.shared_bytes,
  });
  args.team_size = plan.team_size;
  args.stages = plan.stages;
  if (plan.stages == 0) {
    args.team_size = kWideThreads;
    const auto kernel = vec == 1 ? forward_wide_rows<T, 1> : forward_wide_rows<T, kFullVec>;
    const int64_t blocks = std::min<int64_t>(args.rows, 2 * device.multiprocessors);
    return launch<ForwardArgs>(kernel, args, dim3(blocks), kWideThreads,
                               TeamSum::kScratch * sizeof(float), stream);
  }
  const auto kernel = general ? rows_kernel<T, true>(vec, plan.elements)
                              : rows_kernel<T, false>(vec, plan.elements);
  int blocks = 0;
  RETURN_IF_ERROR(blocks_per_multiprocessor(kernel, plan.threads, plan.shared_bytes, &blocks));
  const int64_t needed = (args.rows + plan.teams() - 1) / plan.teams();
  blocks = std::min<int64_t>(needed, blocks * device.multiprocessors);
  return launch(kernel, args, dim3(blocks), plan.threads, plan.shared_bytes, stream);
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
  args.rows = rows;
  args.features = static_cast<int>(features);
  RETURN_IF_ERROR(parse_options(subtract_mean, epsilon, scale_offset, pre_activation, activation,
                                &args.options));
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
  RETURN_IF_ERROR(Device::current(&device));
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
