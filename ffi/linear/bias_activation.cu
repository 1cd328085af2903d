// The operations around a matrix product that XLA computes: a bias, an activation or a gated one,
// and the residual. The backward multiplies by the activation's derivative and sums the bias
// gradient.
//
// A thread owns a vector of columns and loops over rows, with the columns' biases and its sums of
// the bias gradient in registers. A block writes one partial sum for each column; the caller adds
// these, always in the same order.

#include "common/activation.cuh"
#include "common/handler.h"
#include "common/operands.h"
#include "common/vector.cuh"

namespace {

constexpr int kThreads = 256;
// Number of a thread's rows whose loads are in flight at the same time.
template <bool kGated>
constexpr int kForwardRows = kGated ? 2 : 4;
constexpr int kBackwardRows = 2;

// One of the two operands of a gated activation, or the only operand of a plain one.
struct Branch {
  const void* in;   // the product; in the backward the preactivation, [rows, features]
  Parameter bias;   // absent in the backward, whose input contains the bias
  void* out;        // forward: preactivation or nullptr; backward: its gradient
  float* partials;  // partial bias gradients, [blocks along the rows, features], or nullptr
};

struct BiasActivationArgs {
  Branch gate;
  Branch up;             // used by gated activations only
  const void* residual;  // may be nullptr
  const void* dy;
  void* y;  // in the backward nullptr unless y is recomputed
  int rows;
  int features;
  int lanes;  // adjacent threads that share a row
  Activation activation;
};

// kVec values of a row of y, dy or the residual, whose dtype O may be wider than the product's,
// accessed 16 bytes at a time.
template <typename O, int kVec>
struct Values {
  static constexpr int kPart = sizeof(O) * kVec > 16 ? kVec / 2 : kVec;
  Vector<O, kPart> parts[kVec / kPart];

  __device__ __forceinline__ void load(const void* address, int64_t place) {
#pragma unroll
    for (int i = 0; i < kVec / kPart; ++i) {
      parts[i] = load_streaming<O, kPart>(static_cast<const O*>(address) + place + i * kPart);
    }
  }

  __device__ __forceinline__ void store(void* address, int64_t place) const {
#pragma unroll
    for (int i = 0; i < kVec / kPart; ++i) {
      store_streaming(static_cast<O*>(address) + place + i * kPart, parts[i]);
    }
  }

  __device__ __forceinline__ void get(float (&values)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; i += kPart) {
      float part[kPart];
      unpack(parts[i / kPart], part);
#pragma unroll
      for (int j = 0; j < kPart; ++j) values[i + j] = part[j];
    }
  }

  __device__ __forceinline__ void set(const float (&values)[kVec]) {
#pragma unroll
    for (int i = 0; i < kVec; i += kPart) {
      float part[kPart];
#pragma unroll
      for (int j = 0; j < kPart; ++j) part[j] = values[i + j];
      pack(part, parts[i / kPart]);
    }
  }
};

template <typename O, int kVec>
__device__ __forceinline__ void store_values(void* address, int64_t place,
                                             const float (&values)[kVec]) {
  Values<O, kVec> packed;
  packed.set(values);
  packed.store(address, place);
}

// Computes the preactivation: the product plus the bias, rounded to the product's dtype, so that
// the activation and its derivative in the backward see the same numbers.
template <typename T, int kVec>
__device__ __forceinline__ void preactivation(const Vector<T, kVec>& product,
                                              const float (&bias)[kVec], void* out, int64_t place,
                                              float (&z)[kVec]) {
  unpack(product, z);
#pragma unroll
  for (int i = 0; i < kVec; ++i) z[i] += bias[i];
  Vector<T, kVec> rounded;
  pack(z, rounded);
  if (out != nullptr) store_streaming(static_cast<T*>(out) + place, rounded);
  unpack(rounded, z);
}

// A thread's vector of columns, and the rows that it loops over.
struct Walk {
  int column;
  int line;   // index in the block of the thread's line: `lanes` adjacent threads that share a row
  int lines;  // number of lines of a block
  int first;
  int step;

  __device__ Walk(int lanes, int vec)
      : column((blockIdx.x * lanes + threadIdx.x % lanes) * vec),
        line(threadIdx.x / lanes),
        lines(kThreads / lanes),
        first(blockIdx.y * lines + line),
        step(gridDim.y * lines) {}
};

// Activations that are compiled separately. With a branch at run time, every activation would take
// the registers of the most demanding one, gelu_erf.
enum class Known { kAny, kGeluTanh, kSilu };

template <Known kKnown>
__device__ __forceinline__ Activation known_activation(const BiasActivationArgs& args) {
  if constexpr (kKnown == Known::kGeluTanh) return Activation::kGeluTanh;
  if constexpr (kKnown == Known::kSilu) return Activation::kSilu;
  return args.activation;
}

// The forward kernel. O is the dtype of the residual and of the result y.
template <typename T, typename O, int kVec, bool kGated, Known kKnown>
__global__ void __launch_bounds__(kThreads)
    bias_activation_rows(const __grid_constant__ BiasActivationArgs args) {
  constexpr int kRows = kForwardRows<kGated>;
  const Activation activation = known_activation<kKnown>(args);
  const Walk walk(args.lanes, kVec);
  if (walk.column >= args.features) return;
  float bias[kVec], up_bias[kVec];
  load_or_zero(args.gate.bias, walk.column, bias);
  if (kGated) load_or_zero(args.up.bias, walk.column, up_bias);

  for (int base = walk.first; base < args.rows; base += kRows * walk.step) {
    Vector<T, kVec> product[kRows], up_product[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = base + r * walk.step;
      if (row >= args.rows) break;
      const int64_t place = row * args.features + walk.column;
      product[r] = load_streaming<T, kVec>(static_cast<const T*>(args.gate.in) + place);
      if (kGated) {
        up_product[r] = load_streaming<T, kVec>(static_cast<const T*>(args.up.in) + place);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = base + r * walk.step;
      if (row >= args.rows) break;
      float y[kVec];
      preactivation(product[r], bias, args.gate.out, row * args.features + walk.column, y);
      activate(activation, y);
      if constexpr (kGated) {
        float up[kVec];
        preactivation(up_product[r], up_bias, args.up.out, row * args.features + walk.column, up);
#pragma unroll
        for (int i = 0; i < kVec; ++i) y[i] *= up[i];
      }
      const int64_t place = row * args.features + walk.column;
      if (args.residual != nullptr) {
        Values<O, kVec> residual;
        residual.load(args.residual, place);
        float values[kVec];
        residual.get(values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) y[i] += values[i];
      }
      store_values<O, kVec>(args.y, place, y);
    }
  }
}

// Sums each column over a block's rows of threads, in order, and writes the sums to `partials`.
template <int kVec>
__device__ __forceinline__ void write_partials(const Walk& walk, int lanes, int features,
                                               const float (&sums)[kVec], float* partials) {
  __shared__ float shared[kThreads * kVec];
  const int lane = threadIdx.x % lanes;
  // Values number i of all threads of a line are adjacent, which avoids bank conflicts.
#pragma unroll
  for (int i = 0; i < kVec; ++i) shared[(walk.line * kVec + i) * lanes + lane] = sums[i];
  __syncthreads();
  for (int place = threadIdx.x; place < lanes * kVec; place += kThreads) {
    float total = 0.0f;
    for (int line = 0; line < walk.lines; ++line) total += shared[line * kVec * lanes + place];
    const int column = (blockIdx.x * lanes + place % lanes) * kVec + place / lanes;
    if (column < features) partials[static_cast<int64_t>(blockIdx.y) * features + column] = total;
  }
  __syncthreads();
}

// The backward kernel. O is the dtype of dy.
template <typename T, typename O, int kVec, bool kGated, Known kKnown>
__global__ void __launch_bounds__(kThreads)
    bias_activation_gradient(const __grid_constant__ BiasActivationArgs args) {
  constexpr int kRows = kBackwardRows;
  const Activation activation = known_activation<kKnown>(args);
  const Walk walk(args.lanes, kVec);
  float sums[kVec] = {}, up_sums[kVec] = {};
  const int end = walk.column < args.features ? args.rows : 0;

  for (int base = walk.first; base < end; base += kRows * walk.step) {
    Vector<T, kVec> saved[kRows], up_saved[kRows];
    Values<O, kVec> dy[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = base + r * walk.step;
      if (row >= end) break;
      const int64_t place = row * args.features + walk.column;
      saved[r] = load_streaming<T, kVec>(static_cast<const T*>(args.gate.in) + place);
      if (kGated) up_saved[r] = load_streaming<T, kVec>(static_cast<const T*>(args.up.in) + place);
      dy[r].load(args.dy, place);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = base + r * walk.step;
      if (row >= end) break;
      const int64_t place = row * args.features + walk.column;
      float z[kVec], y[kVec], gradient[kVec];
      unpack(saved[r], z);
      dy[r].get(gradient);
      if constexpr (kGated) {
        float up[kVec], up_gradient[kVec];
        unpack(up_saved[r], up);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          up_gradient[i] = gradient[i];
          gradient[i] *= up[i];
        }
        activate_with_derivative(activation, z, y, gradient);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          up_gradient[i] *= y[i];
          up_sums[i] += up_gradient[i];
          y[i] *= up[i];
        }
        store_values<T, kVec>(args.up.out, place, up_gradient);
      } else if (args.y != nullptr) {
        activate_with_derivative(activation, z, y, gradient);
      } else {
        multiply_derivative(activation, z, gradient);
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) sums[i] += gradient[i];
      store_values<T, kVec>(args.gate.out, place, gradient);
      if (args.y != nullptr) store_values<T, kVec>(args.y, row * args.features + walk.column, y);
    }
  }
  if (args.gate.partials != nullptr) {
    write_partials(walk, args.lanes, args.features, sums, args.gate.partials);
  }
  if (kGated && args.up.partials != nullptr) {
    write_partials(walk, args.lanes, args.features, up_sums, args.up.partials);
  }
}

// --- launch --------------------------------------------------------------------------------------

using Kernel = void (*)(BiasActivationArgs);

template <typename T, typename O, int kVec, Known kKnown>
Kernel kernel_of(bool gated, bool backward) {
  if (backward) {
    return gated ? bias_activation_gradient<T, O, kVec, true, kKnown>
                 : bias_activation_gradient<T, O, kVec, false, kKnown>;
  }
  return gated ? bias_activation_rows<T, O, kVec, true, kKnown>
               : bias_activation_rows<T, O, kVec, false, kKnown>;
}

template <typename T, typename O>
Kernel kernel_of(int vec, Activation activation, bool gated, bool backward) {
  constexpr int kFullVec = 16 / sizeof(T);
  if (vec == 1) return kernel_of<T, O, 1, Known::kAny>(gated, backward);
  switch (activation) {
    case Activation::kGeluTanh:
      return kernel_of<T, O, kFullVec, Known::kGeluTanh>(gated, backward);
    case Activation::kSilu:
      return kernel_of<T, O, kFullVec, Known::kSilu>(gated, backward);
    default:
      return kernel_of<T, O, kFullVec, Known::kAny>(gated, backward);
  }
}

// Launches the forward or backward kernel. `blocks` is the number of blocks along the rows; 0
// chooses one for every kThreads / lanes * kForwardRows (or kBackwardRows) rows, at most 65535.
template <typename T, typename O>
ffi::Error launch(BiasActivationArgs args, int blocks, bool backward, cudaStream_t stream) {
  constexpr int kFullVec = 16 / sizeof(T);
  const bool aligned =
      are_aligned({args.gate.in, args.gate.bias.data, args.gate.out, args.up.in, args.up.bias.data,
                   args.up.out, args.residual, args.dy, args.y});
  const int vec = aligned && args.features % kFullVec == 0 ? kFullVec : 1;
  args.lanes = 1;
  while (args.lanes < kWarpSize && args.lanes * vec < args.features) args.lanes *= 2;
  const int columns = divide_up(args.features, args.lanes * vec);
  // Blocks are small, so that the last wave leaves few SMs idle.
  const bool gated = args.up.in != nullptr;
  const int forward_rows = gated ? kForwardRows<true> : kForwardRows<false>;
  const int rows = kThreads / args.lanes * (backward ? kBackwardRows : forward_rows);
  if (blocks == 0) blocks = std::min(divide_up(args.rows, rows), 65535);
  const Kernel kernel = kernel_of<T, O>(vec, args.activation, gated, backward);
  return launch_kernel(kernel, args, {dim3(columns, blocks), kThreads, 0}, stream);
}

ffi::Error launch(const BiasActivationArgs& args, int blocks, Dtype dtype, Dtype other,
                  bool backward, cudaStream_t stream) {
  if (dtype == Dtype::kFloat32) {
    return launch<float, float>(args, blocks, backward, stream);
  }
  const bool wide = other == Dtype::kFloat32;
  if (dtype == Dtype::kBfloat16) {
    return wide ? launch<__nv_bfloat16, float>(args, blocks, backward, stream)
                : launch<__nv_bfloat16, __nv_bfloat16>(args, blocks, backward, stream);
  }
  return wide ? launch<__half, float>(args, blocks, backward, stream)
              : launch<__half, __half>(args, blocks, backward, stream);
}

// Checks and stores the operands of both directions; `in` and `up` are products or preactivations.
ffi::Error parse(const ffi::AnyBuffer& in, const ffi::AnyBuffer& up, std::string_view activation,
                 BiasActivationArgs* args) {
  RETURN_IF_ERROR(parse_activation(activation, &args->activation));
  const auto shape = in.dimensions();
  if (shape.size() != 2 || !dtype_of(in) || shape[0] > kMaxRows || shape[1] > kMaxRows) {
    return ffi::Error::InvalidArgument(
        "the first matrix must be float32, bfloat16 or float16 of at most " +
        std::to_string(kMaxRows) + " rows and columns, but has shape " + to_string(shape));
  }
  RETURN_IF_ERROR(check_like_or_absent("up", up, in));
  args->rows = static_cast<int>(shape[0]);
  args->features = static_cast<int>(shape[1]);
  args->gate.in = in.untyped_data();
  args->up.in = data_or_null(up);
  return ffi::Error::Success();
}

// Checks and stores the results with the shape and dtype of `in` and `up`.
ffi::Error parse_out(const ffi::AnyBuffer& out, const ffi::AnyBuffer& up_out,
                     const ffi::AnyBuffer& in, BiasActivationArgs* args) {
  RETURN_IF_ERROR(check_like("the first result after y", out, in));
  args->gate.out = out.untyped_data();
  if (args->up.in != nullptr) {
    RETURN_IF_ERROR(check_like("the second result after y", up_out, in));
    args->up.out = up_out.untyped_data();
  }
  return ffi::Error::Success();
}

// Checks a [rows, features] matrix that has the dtype of `in` or float32.
ffi::Error check_beside(std::string_view name, const ffi::AnyBuffer& buffer,
                        const ffi::AnyBuffer& in, const BiasActivationArgs& args) {
  RETURN_IF_ERROR(check_shape(name, buffer, {args.rows, args.features}));
  if (buffer.element_type() == ffi::DataType::F32) return ffi::Error::Success();
  return check_dtype(name, buffer, in.element_type());
}

ffi::Error bias_activation(cudaStream_t stream, ffi::AnyBuffer product, ffi::AnyBuffer up,
                           ffi::AnyBuffer bias, ffi::AnyBuffer up_bias, ffi::AnyBuffer residual,
                           ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> z,
                           ffi::Result<ffi::AnyBuffer> up_z, std::string_view activation) {
  if (is_absent(product)) return ffi::Error::Success();
  BiasActivationArgs args = {};
  RETURN_IF_ERROR(parse(product, up, activation, &args));
  RETURN_IF_ERROR(parse_parameter("bias", bias, args.features, &args.gate.bias));
  RETURN_IF_ERROR(parse_parameter("up_bias", up_bias, args.features, &args.up.bias));
  RETURN_IF_ERROR(check_beside("y", *y, product, args));
  if (!is_absent(residual)) {
    RETURN_IF_ERROR(check_shape("residual", residual, {args.rows, args.features}));
    RETURN_IF_ERROR(check_dtype("residual", residual, y->element_type()));
  }
  if (!is_absent(*z)) RETURN_IF_ERROR(parse_out(*z, *up_z, product, &args));
  args.residual = data_or_null(residual);
  args.y = y->untyped_data();
  return launch(args, 0, *dtype_of(product), *dtype_of(*y), false, stream);
}

ffi::Error bias_activation_backward(cudaStream_t stream, ffi::AnyBuffer dy, ffi::AnyBuffer z,
                                    ffi::AnyBuffer up_z, ffi::Result<ffi::AnyBuffer> dz,
                                    ffi::Result<ffi::AnyBuffer> dup_z,
                                    ffi::Result<ffi::AnyBuffer> y,
                                    ffi::Result<ffi::AnyBuffer> partials,
                                    std::string_view activation) {
  if (is_absent(z)) return ffi::Error::Success();
  BiasActivationArgs args = {};
  RETURN_IF_ERROR(parse(z, up_z, activation, &args));
  RETURN_IF_ERROR(check_beside("dy", dy, z, args));
  RETURN_IF_ERROR(parse_out(*dz, *dup_z, z, &args));
  args.dy = dy.untyped_data();
  if (!is_absent(*y)) {
    RETURN_IF_ERROR(check_shape("y", *y, {args.rows, args.features}));
    RETURN_IF_ERROR(check_dtype("y", *y, z.element_type()));
    args.y = y->untyped_data();
  }
  int blocks = 0;
  if (!is_absent(*partials)) {
    const auto shape = partials->dimensions();
    if (shape.size() != 3 || shape[1] < 1 || shape[1] > 65535) {
      return ffi::Error::InvalidArgument("partials has shape " + to_string(shape) +
                                         ", but three axes are needed, with 1 to 65535 blocks");
    }
    const bool gated = args.up.in != nullptr;
    RETURN_IF_ERROR(check_float32("partials", *partials, {gated ? 2 : 1, shape[1], args.features}));
    blocks = static_cast<int>(shape[1]);
    args.gate.partials = static_cast<float*>(partials->untyped_data());
    if (gated) args.up.partials = args.gate.partials + shape[1] * args.features;
  }
  return launch(args, blocks, *dtype_of(z), *dtype_of(dy), true, stream);
}

}  // namespace

DEFINE_HANDLER(jaxfused_bias_activation, bias_activation,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // product
                   .Arg<ffi::AnyBuffer>()  // up
                   .Arg<ffi::AnyBuffer>()  // bias
                   .Arg<ffi::AnyBuffer>()  // up_bias
                   .Arg<ffi::AnyBuffer>()  // residual
                   .Ret<ffi::AnyBuffer>()  // y
                   .Ret<ffi::AnyBuffer>()  // z
                   .Ret<ffi::AnyBuffer>()  // up_z
                   .Attr<std::string_view>("activation"));

DEFINE_HANDLER(jaxfused_bias_activation_backward, bias_activation_backward,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // dy
                   .Arg<ffi::AnyBuffer>()  // z
                   .Arg<ffi::AnyBuffer>()  // up_z
                   .Ret<ffi::AnyBuffer>()  // dz
                   .Ret<ffi::AnyBuffer>()  // dup_z
                   .Ret<ffi::AnyBuffer>()  // y
                   .Ret<ffi::AnyBuffer>()  // partials
                   .Attr<std::string_view>("activation"),
               {ffi::Traits::kCmdBufferCompatible});
