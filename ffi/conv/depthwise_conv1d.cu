// Depthwise convolution along one axis, as the short convolutions of Mamba and Griffin.
//
// The steps (positions) of an image are cut into pieces. A thread loops over the steps of one
// piece, for a vector of channels. The last inputs are in registers, so that each input is read
// once, and the next steps' inputs are loaded before the current steps are computed. Adjacent
// threads have adjacent channels.
//
// The gradient reads only x and dy. It recomputes the activation's input: a few multiply-adds,
// while reading it would take a third more bytes. One loop yields the gradients of the input, the
// weights and the bias. Each thread writes its sums for the weights, and the caller adds them in
// the order of the pieces.

#include "common/activation.cuh"
#include "common/handler.h"
#include "common/operands.h"
#include "common/vector.cuh"

namespace {

constexpr int kThreads = 128;

struct Conv1dShape {
  int images, length, out_length, channels;
  int left;    // steps of zeros before the input
  int pieces;  // pieces of an image; a thread computes one piece
};

struct ForwardArgs {
  Conv1dShape shape;
  const void* x;
  Parameter weights;     // [taps, channels]
  Parameter bias;        // [channels]
  const void* residual;  // shape of y, or nullptr
  void* y;
  Activation activation;
};

struct BackwardArgs {
  Conv1dShape shape;
  const void *x, *dy;
  Parameter weights;
  Parameter bias;
  const void* residual;  // shape of y, or nullptr
  const void* other;     // another gradient of x to add to dx, or nullptr
  void* dx;
  void* dz;     // gradient of the residual, or nullptr
  float* sums;  // gradients of taps, then of the bias: [images * pieces, taps + 1, channels]
  Activation activation;
};

// A thread's part of an image of `steps` steps: its first channel and its steps [begin, end).
struct Piece {
  int image, index, channel, begin, end;

  template <int kVec>
  static __device__ __forceinline__ Piece at(const Conv1dShape& shape, int steps, int64_t thread) {
    const int groups = shape.channels / kVec;
    const int rest = static_cast<int>(thread / groups);
    Piece piece;
    piece.channel = static_cast<int>(thread % groups) * kVec;
    piece.index = rest % shape.pieces;
    piece.image = rest / shape.pieces;
    piece.begin = static_cast<int>(int64_t{steps} * piece.index / shape.pieces);
    piece.end = static_cast<int>(int64_t{steps} * (piece.index + 1) / shape.pieces);
    return piece;
  }
};

// A thread's channels at all steps of one image of `data`.
template <typename T, int kVec>
class Line {
 public:
  __device__ __forceinline__ Line(const void* data, const Conv1dShape& shape, int length,
                                  const Piece& piece)
      : first_(reinterpret_cast<const char*>(
            static_cast<const T*>(data) +
            static_cast<int64_t>(piece.image) * length * shape.channels + piece.channel)),
        pitch_(shape.channels * static_cast<int>(sizeof(T))),
        length_(length) {}

  // Whether steps [begin, end) lie in the image.
  __device__ __forceinline__ bool has(int begin, int end) const {
    return begin >= 0 && end <= length_;
  }

  // Returns a step's values, not unpacked. With kChecked, steps outside the image are zeros.
  template <bool kChecked = true>
  __device__ __forceinline__ Vector<T, kVec> load(int step) const {
    if (kChecked && !has(step, step + 1)) return Vector<T, kVec>{};
    return load_streaming<T, kVec>(at(step));
  }

  __device__ __forceinline__ void load(int step, float (&out)[kVec]) const {
    unpack(load(step), out);
  }

  template <bool kChecked = true>
  __device__ __forceinline__ void store(int step, const float (&values)[kVec]) const {
    if (kChecked && !has(step, step + 1)) return;
    Vector<T, kVec> packed;
    pack(values, packed);
    store_vector(const_cast<char*>(at(step)), packed);
  }

 private:
  __device__ __forceinline__ const char* at(int step) const {
    return first_ + static_cast<int64_t>(step) * pitch_;
  }

  const char* first_;
  int pitch_, length_;
};

// Weights of a thread's channels.
template <int kTaps, int kVec>
struct Weights {
  float taps[kTaps][kVec];
  float bias[kVec];

  __device__ __forceinline__ Weights(const Parameter& weights, const Parameter& bias_parameter,
                                     int channels, int channel) {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) load_parameter(weights, k * channels + channel, taps[k]);
    load_or_zero(bias_parameter, channel, bias);
  }

  // Computes the bias plus the products with window[0], window[1], ..., oldest input first.
  __device__ __forceinline__ void convolve(const float (*window)[kVec], float (&z)[kVec]) const {
#pragma unroll
    for (int v = 0; v < kVec; ++v) z[v] = bias[v];
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) z[v] += taps[k][v] * window[k][v];
    }
  }
};

template <int kVec>
__device__ __forceinline__ void add(const float (&from)[kVec], float (&to)[kVec]) {
#pragma unroll
  for (int v = 0; v < kVec; ++v) to[v] += from[v];
}

// Steps whose inputs are loaded together, limited by registers.
template <typename T, int kTaps>
constexpr int kForwardSteps = sizeof(T) == 2 && kTaps <= 5 ? 8 : 4;
template <typename T, int kTaps>
constexpr int kGradientSteps = sizeof(T) == 2 && kTaps <= 4 ? 4 : 2;

template <typename T, int kTaps, int kVec>
__global__ void __launch_bounds__(kThreads, 4)
    depthwise_conv1d_kernel(const __grid_constant__ ForwardArgs args) {
  constexpr int kSteps = kForwardSteps<T, kTaps>;
  const Conv1dShape& shape = args.shape;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (thread >= int64_t{shape.images} * shape.pieces * (shape.channels / kVec)) return;
  const Piece piece = Piece::at<kVec>(shape, shape.out_length, thread);
  const Weights<kTaps, kVec> weights(args.weights, args.bias, shape.channels, piece.channel);
  const Line<T, kVec> x(args.x, shape, shape.length, piece);
  const Line<T, kVec> residual(args.residual, shape, shape.out_length, piece);
  const Line<T, kVec> y(args.y, shape, shape.out_length, piece);

  // window[0] is the oldest input that the first of the current steps needs.
  float window[kTaps - 1 + kSteps][kVec];
  Vector<T, kVec> next[kSteps];
  const int ahead = kTaps - 1 - shape.left;  // distance from a step to its newest input
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) x.load(piece.begin - shape.left + i, window[i]);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) next[i] = x.load(piece.begin + ahead + i);

  const auto advance = [&](int step, auto checked) {
    constexpr bool kChecked = decltype(checked)::value;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) unpack(next[i], window[kTaps - 1 + i]);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      next[i] = x.template load<kChecked>(step + kSteps + ahead + i);
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float z[kVec];
      weights.convolve(window + i, z);
      if (args.residual != nullptr) {
        float added[kVec];
        residual.load(step + i, added);
        add(added, z);
      }
      activate(args.activation, z);
      if (!kChecked || step + i < piece.end) y.template store<kChecked>(step + i, z);
    }
#pragma unroll
    for (int i = 0; i < kTaps - 1; ++i) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) window[i][v] = window[i + kSteps][v];
    }
  };
  int step = piece.begin;
#pragma unroll 1
  while (step + kSteps <= piece.end && x.has(step + ahead + kSteps, step + ahead + 2 * kSteps)) {
    advance(step, std::false_type{});
    step += kSteps;
  }
#pragma unroll 1
  for (; step < piece.end; step += kSteps) advance(step, std::true_type{});
}

// A thread's loop over a piece in the backward. A step computes dz, the gradient of the
// activation's input, and completes dx of the input `left` steps before.
template <typename T, int kTaps, int kVec>
class GradientWalk {
  static constexpr int kSteps = kGradientSteps<T, kTaps>;

 public:
  __device__ __forceinline__ GradientWalk(const BackwardArgs& args, const Piece& piece)
      : args_(args),
        piece_(piece),
        weights_(args.weights, args.bias, args.shape.channels, piece.channel),
        x_(input(args.x)),
        dy_(result(args.dy)),
        dx_(input(args.dx)) {}

  __device__ __forceinline__ void run() {
    const int ahead = kTaps - 1 - args_.shape.left;
    // dx of the piece's first inputs also needs dz of the steps before the piece.
    const int start = piece_.begin - (kTaps - 1);
#pragma unroll
    for (int i = 0; i < kTaps - 1; ++i) x_.load(start - args_.shape.left + i, window_[i]);
    request(start, ahead);
    int step = start;
    // The first steps belong to the piece before, and the last ones may lie beyond the result.
#pragma unroll 1
    while (step < piece_.end) {
      if (is_inside(step, ahead)) {
#pragma unroll 2
        for (; is_inside(step, ahead); step += kSteps) advance<false>(step, ahead);
      } else {
        advance<true>(step, ahead);
        step += kSteps;
      }
    }
    write_sums();
  }

 private:
  __device__ __forceinline__ Line<T, kVec> input(const void* data) const {
    return {data, args_.shape, args_.shape.length, piece_};
  }
  __device__ __forceinline__ Line<T, kVec> result(const void* data) const {
    return {data, args_.shape, args_.shape.out_length, piece_};
  }

  // Whether the next kSteps steps belong to the piece and have results, and whether the kSteps
  // steps after them can be requested unchecked.
  __device__ __forceinline__ bool is_inside(int step, int ahead) const {
    return step >= piece_.begin && step + kSteps <= piece_.end && step >= args_.shape.left &&
           x_.has(step + kSteps + ahead, step + 2 * kSteps + ahead) &&
           dy_.has(step + kSteps, step + 2 * kSteps);
  }

  template <bool kChecked = true>
  __device__ __forceinline__ void request(int step, int ahead) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      next_x_[i] = x_.template load<kChecked>(step + ahead + i);
      next_dy_[i] = dy_.template load<kChecked>(step + i);
    }
  }

  // With kChecked, steps may have no result, or belong to the piece before or after.
  template <bool kChecked>
  __device__ __forceinline__ void advance(int step, int ahead) {
    Vector<T, kVec> dy[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      unpack(next_x_[i], window_[kTaps - 1 + i]);
      dy[i] = next_dy_[i];
    }
    request<kChecked>(step + kSteps, ahead);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int at = step + i;
      float (&dz)[kVec] = gradients_[kTaps - 1 + i];
      const bool own = !kChecked || (at >= piece_.begin && at < piece_.end);
      if (!kChecked || dy_.has(at, at + 1)) {
        gradient(at, i, dy[i], dz);
        if (own) {
          add_products(i, dz);
          if (args_.dz != nullptr) result(args_.dz).store(at, dz);
        }
      } else {
#pragma unroll
        for (int v = 0; v < kVec; ++v) dz[v] = 0.0f;
      }
      if (own) input_gradient<kChecked>(at - args_.shape.left, i);
    }
#pragma unroll
    for (int i = 0; i < kTaps - 1; ++i) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        window_[i][v] = window_[i + kSteps][v];
        gradients_[i][v] = gradients_[i + kSteps][v];
      }
    }
  }

  __device__ __forceinline__ void gradient(int at, int i, const Vector<T, kVec>& dy,
                                           float (&dz)[kVec]) const {
    unpack(dy, dz);
    if (args_.activation == Activation::kNone) return;
    float z[kVec];
    weights_.convolve(window_ + i, z);
    if (args_.residual != nullptr) {
      float added[kVec];
      result(args_.residual).load(at, added);
      add(added, z);
    }
    multiply_derivative(args_.activation, z, dz);
  }

  __device__ __forceinline__ void add_products(int i, const float (&dz)[kVec]) {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) sums_[k][v] += dz[v] * window_[i + k][v];
    }
    add(dz, sums_[kTaps]);
  }

  template <bool kChecked>
  __device__ __forceinline__ void input_gradient(int at, int i) const {
    float dx[kVec] = {};
    // The newest dz multiplies tap 0, because its output used tap 0 with this input.
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        dx[v] += weights_.taps[k][v] * gradients_[kTaps - 1 + i - k][v];
      }
    }
    if (args_.other != nullptr) {
      float added[kVec];
      input(args_.other).load(at, added);
      add(added, dx);
    }
    dx_.template store<kChecked>(at, dx);
  }

  __device__ __forceinline__ void write_sums() const {
    const int64_t part = int64_t{piece_.image} * args_.shape.pieces + piece_.index;
#pragma unroll
    for (int k = 0; k <= kTaps; ++k) {
      float* const to =
          args_.sums + (part * (kTaps + 1) + k) * args_.shape.channels + piece_.channel;
      Vector<float, kVec> packed;
      pack(sums_[k], packed);
      store_vector(to, packed);
    }
  }

  const BackwardArgs& args_;
  Piece piece_;
  Weights<kTaps, kVec> weights_;
  Line<T, kVec> x_, dy_, dx_;
  // Inputs (window_) and gradients of the activation's input (gradients_) of the last kTaps - 1
  // steps and of the current ones.
  float window_[kTaps - 1 + kSteps][kVec] = {};
  float gradients_[kTaps - 1 + kSteps][kVec] = {};
  Vector<T, kVec> next_x_[kSteps], next_dy_[kSteps];
  float sums_[kTaps + 1][kVec] = {};
};

template <typename T, int kTaps, int kVec>
__global__ void __launch_bounds__(kThreads, 3)
    depthwise_conv1d_gradient_kernel(const __grid_constant__ BackwardArgs args) {
  const Conv1dShape& shape = args.shape;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (thread >= int64_t{shape.images} * shape.pieces * (shape.channels / kVec)) return;
  const Piece piece = Piece::at<kVec>(shape, shape.length + shape.left, thread);
  GradientWalk<T, kTaps, kVec>(args, piece).run();
}

// --- launch --------------------------------------------------------------------------------------

ffi::Error parse_shape(const ffi::AnyBuffer& x, const ffi::AnyBuffer& y, int64_t left,
                       int64_t pieces, Conv1dShape* shape) {
  const auto in = x.dimensions(), out = y.dimensions();
  if (in.size() != 3 || !dtype_of(x) || out.size() != 3) {
    return ffi::Error::InvalidArgument(
        "x must be float32, bfloat16 or float16 with axes image, step, channel");
  }
  if (out[0] != in[0] || out[2] != in[2]) {
    return ffi::Error::InvalidArgument("the result has shape " + to_string(out) +
                                       ", which does not fit x of shape " + to_string(in));
  }
  RETURN_IF_ERROR(check_dtype("the result", y, x.element_type()));
  const int64_t most = INT32_MAX / 8;
  if (left < 0 || pieces < 1 || left > most || in[1] > most || out[1] > most || in[2] > most ||
      pieces > most || double(in[0]) * double(pieces) * double(in[2]) > double(INT32_MAX) * 64) {
    return ffi::Error::InvalidArgument("depthwise_conv1d: x of shape " + to_string(in) +
                                       " in so many pieces is too large");
  }
  *shape = {static_cast<int>(in[0]), static_cast<int>(in[1]), static_cast<int>(out[1]),
            static_cast<int>(in[2]), static_cast<int>(left),  static_cast<int>(pieces)};
  return ffi::Error::Success();
}

ffi::Error parse_weights(const ffi::AnyBuffer& weights, const ffi::AnyBuffer& bias,
                         std::string_view name, int channels, Parameter* taps, Parameter* added,
                         Activation* activation) {
  const auto shape = weights.dimensions();
  if (shape.size() != 2 || shape[1] != channels || !dtype_of(weights)) {
    return ffi::Error::InvalidArgument(
        "weights must be float32, bfloat16 or float16 with axes tap, channel, and have shape " +
        to_string(shape));
  }
  *taps = {weights.untyped_data(), *dtype_of(weights)};
  RETURN_IF_ERROR(parse_parameter("bias", bias, channels, added));
  return parse_activation(name, activation);
}

template <typename F>
ffi::Error with_taps(int64_t taps, const F& f) {
  if (taps == 2) return f(std::integral_constant<int, 2>{});
  if (taps == 3) return f(std::integral_constant<int, 3>{});
  if (taps == 4) return f(std::integral_constant<int, 4>{});
  if (taps == 5) return f(std::integral_constant<int, 5>{});
  if (taps == 7) return f(std::integral_constant<int, 7>{});
  return ffi::Error::InvalidArgument("depthwise_conv1d: there is no kernel of " +
                                     std::to_string(taps) + " taps");
}

// Calls `f` with the channels of a thread: several if their loads are aligned.
template <int kMost, typename F>
ffi::Error with_vector(int channels, std::initializer_list<const void*> pointers, const F& f) {
  if (channels % kMost == 0 && are_aligned(pointers)) {
    return f(std::integral_constant<int, kMost>{});
  }
  return f(std::integral_constant<int, 1>{});
}

template <typename Args>
ffi::Error launch(void (*kernel)(Args), const Args& args, int vector, cudaStream_t stream) {
  const Conv1dShape& shape = args.shape;
  const int64_t threads = int64_t{shape.images} * shape.pieces * (shape.channels / vector);
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  return launch_kernel(kernel, args, {dim3(static_cast<unsigned>(blocks)), kThreads, 0}, stream);
}

ffi::Error forward(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer weights,
                   ffi::AnyBuffer bias, ffi::AnyBuffer residual, ffi::Result<ffi::AnyBuffer> y,
                   int64_t left, int64_t pieces, std::string_view activation) {
  ForwardArgs args = {};
  RETURN_IF_ERROR(parse_shape(x, *y, left, pieces, &args.shape));
  RETURN_IF_ERROR(parse_weights(weights, bias, activation, args.shape.channels, &args.weights,
                                &args.bias, &args.activation));
  RETURN_IF_ERROR(check_like_or_absent("residual", residual, *y));
  if (is_absent(*y)) return ffi::Error::Success();
  args.x = x.untyped_data();
  args.residual = data_or_null(residual);
  args.y = y->untyped_data();
  return with_dtype(*dtype_of(x), [&](auto type) {
    using T = decltype(type);
    return with_taps(weights.dimensions()[0], [&](auto taps) {
      return with_vector<4>(
          args.shape.channels, {args.x, args.residual, args.y, args.weights.data, args.bias.data},
          [&](auto vector) {
            return launch(depthwise_conv1d_kernel<T, taps(), vector()>, args, vector(), stream);
          });
    });
  });
}

ffi::Error backward(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer weights,
                    ffi::AnyBuffer bias, ffi::AnyBuffer residual, ffi::AnyBuffer dy,
                    ffi::AnyBuffer other, ffi::Result<ffi::AnyBuffer> dx,
                    ffi::Result<ffi::AnyBuffer> dz, ffi::Result<ffi::AnyBuffer> sums, int64_t left,
                    int64_t pieces, std::string_view activation) {
  BackwardArgs args = {};
  RETURN_IF_ERROR(parse_shape(x, dy, left, pieces, &args.shape));
  RETURN_IF_ERROR(parse_weights(weights, bias, activation, args.shape.channels, &args.weights,
                                &args.bias, &args.activation));
  RETURN_IF_ERROR(check_like_or_absent("residual", residual, dy));
  RETURN_IF_ERROR(check_like_or_absent("other", other, x));
  RETURN_IF_ERROR(check_like_or_absent("dx", *dx, x));
  RETURN_IF_ERROR(check_like_or_absent("dz", *dz, dy));
  const int64_t taps = weights.dimensions()[0];
  RETURN_IF_ERROR(check_float32(
      "sums", *sums, {int64_t{args.shape.images} * pieces, taps + 1, x.dimensions()[2]}));
  if (is_absent(*sums)) return ffi::Error::Success();
  args.x = x.untyped_data();
  args.dy = dy.untyped_data();
  args.residual = data_or_null(residual);
  args.other = data_or_null(other);
  args.dx = dx->untyped_data();
  args.dz = data_or_null(*dz);
  args.sums = static_cast<float*>(sums->untyped_data());
  return with_dtype(*dtype_of(x), [&](auto type) {
    using T = decltype(type);
    return with_taps(taps, [&](auto taps) {
      return with_vector<4>(args.shape.channels,
                            {args.x, args.dy, args.residual, args.other, args.dx, args.dz,
                             args.sums, args.weights.data, args.bias.data},
                            [&](auto vector) {
                              return launch(depthwise_conv1d_gradient_kernel<T, taps(), vector()>,
                                            args, vector(), stream);
                            });
    });
  });
}

}  // namespace

DEFINE_HANDLER(jaxfused_depthwise_conv1d, forward,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // weights
                   .Arg<ffi::AnyBuffer>()  // bias
                   .Arg<ffi::AnyBuffer>()  // residual
                   .Ret<ffi::AnyBuffer>()  // y
                   .Attr<int64_t>("left")
                   .Attr<int64_t>("pieces")
                   .Attr<std::string_view>("activation"));

DEFINE_HANDLER(jaxfused_depthwise_conv1d_backward, backward,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // weights
                   .Arg<ffi::AnyBuffer>()  // bias
                   .Arg<ffi::AnyBuffer>()  // residual
                   .Arg<ffi::AnyBuffer>()  // dy
                   .Arg<ffi::AnyBuffer>()  // other
                   .Ret<ffi::AnyBuffer>()  // dx
                   .Ret<ffi::AnyBuffer>()  // dz
                   .Ret<ffi::AnyBuffer>()  // sums
                   .Attr<int64_t>("left")
                   .Attr<int64_t>("pieces")
                   .Attr<std::string_view>("activation"));
