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
  int64_t rows;       // of one segment
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

// The part of the equations above that needs no sum over the row: h is pre_activation's input.
template <bool kGeneral, int kVec>
__device__ __forceinline__ void normalise(const NormOptions& options, float mean, float rstd,
                                          const float (&h)[kVec], const float (&scale)[kVec],
                                          const float (&bias)[kVec], float (&dz)[kVec],
                                          float (&xhat)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) xhat[i] = h[i];
  if constexpr (kGeneral) activate(options.pre_activation, xhat);
#pragma unroll
  for (float& value : xhat) value = (value - mean) * rstd;
  if constexpr (kGeneral) {
    if (options.activation != Activation::kNone) {
      float z[kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) z[i] = xhat[i] * scale[i] + bias[i];
      multiply_derivative(options.activation, z, dz);
    }
  }
}

// dh without dnext_residual.
template <bool kGeneral, int kVec>
__device__ __forceinline__ void gradient_of_h(const NormOptions& options, float rstd,
                                              float2 row_means, const float (&h)[kVec],
                                              const float (&scale)[kVec], const float (&dz)[kVec],
                                              const float (&xhat)[kVec], float (&dh)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    dh[i] = (dz[i] * scale[i] - row_means.x - xhat[i] * row_means.y) * rstd;
  }
  if constexpr (kGeneral) multiply_derivative(options.pre_activation, h, dh);
}

// --- rows that a team holds
// -----------------------------------------------------------------------

// h and dy are read from memory once, and from the ring twice: before and after the sums over the
// row. dscale and dbias stay in registers over all rows of a block, dpre_bias (kGeneral) in shared
// memory.
template <typename T, int kVec, int kElements, bool kGeneral>
__global__ void __launch_bounds__(kMaxThreads)
    backward_rows(const __grid_constant__ BackwardArgs args) {
  constexpr int kVectors = kElements / kVec;
  using Columns = ColumnFloats<kVec, kVectors>;
  extern __shared__ __align__(16) unsigned char shared_memory[];

  const Team team(args.team_size);
  const bool has_dnext = args.dnext_residual != nullptr;
  const bool has_bias = kGeneral && args.bias.data != nullptr;
  const bool adds_pre_bias = kGeneral && args.adds_pre_bias();
  const bool sums_dh = kGeneral && args.gradients[2] != nullptr;
  const int padded = team.size * kElements;
  float* scratch = reinterpret_cast<float*>(shared_memory);
  float* scale_shared = scratch + TeamSum::kScratch;
  float* bias_shared = scale_shared + padded;
  float* pre_bias_shared = bias_shared + (has_bias ? padded : 0);
  float* dh_shared = pre_bias_shared + (adds_pre_bias ? padded : 0);
  float* ring_shared = dh_shared + (sums_dh ? blockDim.x * kElements : 0);

  TeamSum team_sum(team, scratch);
  const void* const sources[kMaxStreams] = {args.h, args.dy, args.dnext_residual};
  RowRing<T, kVec, kVectors> ring(ring_shared, sources, has_dnext ? 3 : 2, args.stages,
                                  args.features, team);

  const int segment = blockIdx.x / args.segment_blocks;
  const int segment_block = blockIdx.x % args.segment_blocks;
  const int teams = blockDim.x / team.size;
  const int64_t step = static_cast<int64_t>(args.segment_blocks) * teams;
  const int64_t end = (segment + 1) * args.rows;
  const int64_t first = segment * args.rows + segment_block * teams;
  for (int stage = 0; stage < args.stages; ++stage) {
    const int64_t row = first + stage * step + team.index;
    ring.fetch(row, row < end);
  }

  Columns scales(scale_shared, team.size, team.rank);
  Columns biases(bias_shared, team.size, team.rank);
  Columns pre_biases(pre_bias_shared, team.size, team.rank);
  Columns dh_sums(dh_shared, blockDim.x, threadIdx.x);
  float dscale[kVectors][kVec] = {};
  float dbias[kVectors][kVec] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = ring.column(v);
    float scale[kVec] = {}, bias[kVec] = {}, pre_bias[kVec] = {};
    if (column < args.features) {
      load_scale(args.scale, args.options.scale_offset, column, scale);
      if (has_bias) load_parameter(args.bias, column, bias);
      if (adds_pre_bias) load_parameter(args.pre_bias, column, pre_bias);
    }
    if (team.index == 0) {
      scales.write(v, scale);
      if (has_bias) biases.write(v, bias);
      if (adds_pre_bias) pre_biases.write(v, pre_bias);
    }
    if (sums_dh) {
      const float zeros[kVec] = {};
      dh_sums.write(v, zeros);
    }
  }
  __syncthreads();

  const auto read_h = [&](int v, float (&h)[kVec]) {
    ring.read(0, v, h);
    if (adds_pre_bias) {
      float offset[kVec];
      pre_biases.read(v, offset);
#pragma unroll
      for (int i = 0; i < kVec; ++i) h[i] += offset[i];
    }
  };
  const auto read_bias = [&](int v, float (&bias)[kVec]) {
    if (has_bias) {
      biases.read(v, bias);
    } else {
#pragma unroll
      for (float& value : bias) value = 0.0f;
    }
  };
  // A row's statistics are asked for one step ahead: a load from memory takes about as long as a
  // row.
  const auto load_statistics = [&](int64_t row) {
    if (row >= end) return make_float2(0.0f, 0.0f);
    return make_float2(args.mean == nullptr ? 0.0f : args.mean[row], args.rstd[row]);
  };

  float2 next_statistics = load_statistics(first + team.index);
  for (int64_t base = first; base < end; base += step) {
    const int64_t row = base + team.index;
    const bool active = row < end;
    const auto [mean, rstd] = next_statistics;
    next_statistics = load_statistics(row + step);

    float sums[2] = {0.0f, 0.0f};
    ring.wait();
    if (active) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float h[kVec], dz[kVec], xhat[kVec], scale[kVec], bias[kVec];
        read_h(v, h);
        ring.read(1, v, dz);
        scales.read(v, scale);
        read_bias(v, bias);
        normalise<kGeneral>(args.options, mean, rstd, h, scale, bias, dz, xhat);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const float g = dz[i] * scale[i];
          sums[0] += g;
          sums[1] += g * xhat[i];
          dbias[v][i] += dz[i];
          dscale[v][i] += dz[i] * xhat[i];
        }
      }
    }
    team_sum(sums);
    const float2 row_means = make_float2(
        args.options.subtract_mean ? sums[0] / args.features : 0.0f, sums[1] / args.features);
    if (active) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float h[kVec], dz[kVec], xhat[kVec], scale[kVec], bias[kVec], dh[kVec];
        read_h(v, h);
        ring.read(1, v, dz);
        scales.read(v, scale);
        read_bias(v, bias);
        normalise<kGeneral>(args.options, mean, rstd, h, scale, bias, dz, xhat);
        gradient_of_h<kGeneral>(args.options, rstd, row_means, h, scale, dz, xhat, dh);
        if (has_dnext) {
          float dnext[kVec];
          ring.read(2, v, dnext);
#pragma unroll
          for (int i = 0; i < kVec; ++i) dh[i] += dnext[i];
        }
        Vector<T, kVec> dx;
        pack(dh, dx);
        if (ring.column(v) < args.features) {
          store_vector(static_cast<T*>(args.dx) + row * args.features + ring.column(v), dx);
        }
        if (sums_dh) {
          float sum[kVec];
          dh_sums.read(v, sum);
#pragma unroll
          for (int i = 0; i < kVec; ++i) sum[i] += dh[i];
          dh_sums.write(v, sum);
        }
      }
    }
    const int64_t next_row = row + args.stages * step;
    ring.fetch(next_row, next_row < end);
  }

  // The block's sums over its rows, through the memory of the ring.
  const auto write_gradient = [&](float* gradient, const float (&sums)[kVectors][kVec]) {
    if (gradient == nullptr) return;
    Columns own(ring_shared, blockDim.x, threadIdx.x);
    __syncthreads();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) own.write(v, sums[v]);
    __syncthreads();
    add_over_teams<kVec, kVectors>(ring_shared, team, args.features,
                                   gradient + static_cast<int64_t>(blockIdx.x) * args.features);
  };
  write_gradient(args.gradients[0], dscale);
  write_gradient(args.gradients[1], dbias);
  if (sums_dh) {
    __syncthreads();
    add_over_teams<kVec, kVectors>(
        dh_shared, team, args.features,
        args.gradients[2] + static_cast<int64_t>(blockIdx.x) * args.features);
  }
}

// --- rows longer than that
// ------------------------------------------------------------------------

// Such rows are read twice, once by each of two kernels: no block can hold a row and the sums over
// rows of its columns at the same time.

template <typename T, int kVec>
__device__ __forceinline__ void load_operands(const BackwardArgs& args, int64_t row, int column,
                                              float (&h)[kVec], float (&dz)[kVec],
                                              float (&scale)[kVec], float (&bias)[kVec]) {
  const int64_t place = row * args.features + column;
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
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const Team team(args.team_size);
  TeamSum team_sum(team, reinterpret_cast<float*>(shared_memory));
  const int64_t rows = args.rows * args.segments;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const float mean = args.mean == nullptr ? 0.0f : args.mean[row];
    const float rstd = args.rstd[row];
    float sums[2] = {0.0f, 0.0f};
#pragma unroll 2
    for (int column = team.rank * kVec; column < args.features; column += team.size * kVec) {
      float h[kVec], dz[kVec], xhat[kVec], scale[kVec], bias[kVec];
      load_operands<T>(args, row, column, h, dz, scale, bias);
      normalise<true>(args.options, mean, rstd, h, scale, bias, dz, xhat);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float g = dz[i] * scale[i];
        sums[0] += g;
        sums[1] += g * xhat[i];
      }
    }
    team_sum(sums);
    if (team.rank == 0) {
      args.row_means[row] = make_float2(args.options.subtract_mean ? sums[0] / args.features : 0.0f,
                                        sums[1] / args.features);
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
  const int64_t first = segment * args.rows + blockIdx.x % args.segment_blocks;
  const int64_t end = (segment + 1) * args.rows;
  float gradients[kParameters][kVec] = {};
#pragma unroll 2
  for (int64_t row = first; row < end; row += args.segment_blocks) {
    const float mean = args.mean == nullptr ? 0.0f : args.mean[row];
    const float rstd = args.rstd[row];
    float h[kVec], dz[kVec], xhat[kVec], scale[kVec], bias[kVec], dh[kVec];
    load_operands<T>(args, row, column, h, dz, scale, bias);
    normalise<true>(args.options, mean, rstd, h, scale, bias, dz, xhat);
    gradient_of_h<true>(args.options, rstd, args.row_means[row], h, scale, dz, xhat, dh);
    const int64_t place = row * args.features + column;
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

// --- the sums over blocks
// -------------------------------------------------------------------------

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
  extern __shared__ __align__(16) unsigned char shared_memory[];
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

// --- launch
// ---------------------------------------------------------------------------------------

using BackwardKernel = void (*)(BackwardArgs);

template <typename T, bool kGeneral>
BackwardKernel rows_kernel(int vec, int elements) {
  constexpr int kVec = 16 / sizeof(T);
  if (vec == 1) {
    return elements == 8 ? backward_rows<T, 1, 8, kGeneral> : backward_rows<T, 1, 16, kGeneral>;
  }
  switch (elements) {
    case 8:
      return backward_rows<T, kVec, 8, kGeneral>;
    case 16:
      return backward_rows<T, kVec, 16, kGeneral>;
    case 24:
      return backward_rows<T, kVec, 24, kGeneral>;
    default:
      return backward_rows<T, kVec, 32, kGeneral>;
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
  const bool general = args.pre_bias.data != nullptr ||
                       args.options.pre_activation != Activation::kNone ||
                       args.options.activation != Activation::kNone;
  const bool adds_pre_bias = args.pre_bias.data != nullptr && args.dnext_residual == nullptr;
  const RowsPlan plan = plan_rows({
      .rows = args.rows,
      .segments = segments,
      .features = args.features,
      .vec = vec,
      .value_bytes = sizeof(T),
      .streams = args.dnext_residual == nullptr ? 2 : 3,
      .shared_parameters = 1 + (args.bias.data == nullptr ? 0 : 1) + (adds_pre_bias ? 1 : 0),
      .private_parameters = args.gradients[2] != nullptr ? 1 : 0,
      .sums_over_teams = true,
      .multiprocessors = device.multiprocessors,
      .shared_bytes = device.shared_bytes,
  });
  const bool wide = plan.stages == 0;
  args.team_size = wide ? kWideThreads : plan.team_size;
  args.stages = plan.stages;

  // One block a multiprocessor: more would only make more sums to add up.
  const int64_t most = (args.rows + (wide ? 1 : plan.teams()) - 1) / (wide ? 1 : plan.teams());
  args.segment_blocks = std::min<int64_t>(most, std::max(device.multiprocessors / segments, 1));
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
    const int64_t rows = args.rows * segments;
    const auto means = memory.Allocate(rows * sizeof(float2), 16);
    if (!means) return ffi::Error::Internal("layer_norm: no memory for the means of each row");
    args.row_means = static_cast<float2*>(*means);
    const auto means_kernel = vec == 1 ? backward_row_means<T, 1> : backward_row_means<T, kFullVec>;
    const auto columns_kernel = vec == 1 ? backward_columns<T, 1> : backward_columns<T, kFullVec>;
    RETURN_IF_ERROR(launch<BackwardArgs>(means_kernel, args,
                                         dim3(std::min<int64_t>(rows, 2 * device.multiprocessors)),
                                         kWideThreads, TeamSum::kScratch * sizeof(float), stream));
    constexpr int kThreads = 128;
    const int column_blocks = (args.features + kThreads * vec - 1) / (kThreads * vec);
    RETURN_IF_ERROR(launch<BackwardArgs>(columns_kernel, args, dim3(blocks, column_blocks),
                                         kThreads, 0, stream));
  } else {
    const auto kernel = general ? rows_kernel<T, true>(vec, plan.elements)
                                : rows_kernel<T, false>(vec, plan.elements);
    RETURN_IF_ERROR(launch(kernel, args, dim3(blocks), plan.threads, plan.shared_bytes, stream));
  }
  if (gradients == 0) return ffi::Error::Success();
  return launch(add_blocks, add,
                dim3((args.features + kAddColumns - 1) / kAddColumns, segments, gradients),
                kAddColumns * kAddRows, kAddColumns * kAddRows * sizeof(float), stream);
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
  args.rows = rows / segments;
  args.segments = static_cast<int>(segments);
  args.features = static_cast<int>(features);
  RETURN_IF_ERROR(parse_options(subtract_mean, epsilon, scale_offset, pre_activation, activation,
                                &args.options));
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
  RETURN_IF_ERROR(Device::current(&device));
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
