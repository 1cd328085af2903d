// The activation functions of jaxfused/runtime/activation.py, and their derivatives, in float32.
#pragma once

#include <cstring>
#include <iterator>
#include <locale>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>

#include "handler.h"

// An activation: its kind in the lower 32 bits and, for kLeakyRelu, the bits of its float32 factor
// of negative values (its slope) in the upper ones.
enum class Activation : long long {
  kNone,
  kRelu,
  kRelu2,
  kRelu6,
  kLeakyRelu,
  kGeluTanh,
  kGeluErf,
  kQuickGelu,
  kSilu,
  kHardSwish,
  kMish,
  kSigmoid,
  kHardSigmoid,
  kTanh,
  kSoftplus,
  kElu,
  kSelu,
  kHardTanh
};

// Returns the kind alone, without the slope of a kLeakyRelu.
__host__ __device__ constexpr Activation kind_of(Activation activation) {
  return static_cast<Activation>(static_cast<long long>(activation) & 0xffffffffll);
}

inline Activation leaky_relu(float slope) {
  unsigned int bits;
  std::memcpy(&bits, &slope, sizeof(bits));
  const long long kind = static_cast<long long>(Activation::kLeakyRelu);
  return static_cast<Activation>(static_cast<long long>(bits) << 32 | kind);
}

inline ffi::Error parse_activation(std::string_view name, Activation* activation) {
  constexpr std::string_view kNames[] = {
      "none",         "relu",       "relu2",    "relu6",      "leaky_relu", "gelu_tanh",
      "gelu_erf",     "quick_gelu", "silu",     "hard_swish", "mish",       "sigmoid",
      "hard_sigmoid", "tanh",       "softplus", "elu",        "selu",       "hard_tanh"};
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (name == kNames[i]) {
      const bool leaks = static_cast<Activation>(i) == Activation::kLeakyRelu;
      *activation = leaks ? leaky_relu(0.01f) : static_cast<Activation>(i);
      return ffi::Error::Success();
    }
  }
  const auto unknown =
      ffi::Error::InvalidArgument("the activation is not known: " + std::string(name));
  // Parses a name such as "leaky_relu(0.2)".
  constexpr std::string_view kLeaky = "leaky_relu(";
  if (name.substr(0, kLeaky.size()) != kLeaky || name.back() != ')') return unknown;
  std::istringstream number(
      std::string(name.substr(kLeaky.size(), name.size() - kLeaky.size() - 1)));
  // The process's locale may use a comma as the decimal point.
  number.imbue(std::locale::classic());
  float slope;
  if (!(number >> slope) || number.peek() != std::istringstream::traits_type::eof()) return unknown;
  *activation = leaky_relu(slope);
  return ffi::Error::Success();
}

namespace activation_detail {

constexpr float kSqrtHalf = 0.70710678118654752f;
constexpr float kInvSqrtTwoPi = 0.39894228040143268f;
// gelu_tanh(x) = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), because 1 + tanh(t) = 2 sigmoid(2 t).
// This form takes one exponential, and nothing cancels for negative x.
constexpr float kGeluTwo = 1.5957691216057308f;
constexpr float kGeluCubic = 0.044715f;
constexpr float kQuickGelu = 1.702f;

// Computes 2^power with one instruction of the special function unit, as quick_reciprocal does 1 /
// x. expf and __fdividef also handle subnormal numbers, which takes longer than the rest of an
// activation. The relative error is 2^-22, plus |x| 2^-24 for exp.
__device__ __forceinline__ float quick_exp2(float power) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(power));
  return power;
}

__device__ __forceinline__ float quick_exp(float x) { return quick_exp2(1.4426950408889634f * x); }

__device__ __forceinline__ float quick_reciprocal(float x) {
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}

__device__ __forceinline__ float sigmoid(float x) { return quick_reciprocal(1.0f + quick_exp(-x)); }

__device__ __forceinline__ float gelu_tanh_logit(float x) {
  return kGeluTwo * (x + kGeluCubic * x * x * x);
}

// Returns x < 0 ? 0 : x; a NaN stays a NaN.
__device__ __forceinline__ float relu(float x) {
#if __CUDA_ARCH__ >= 800
  asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
  return x;
#else
  return x < 0.0f ? 0.0f : x;
#endif
}

// gate = sigmoid(x) and rest = 1 - gate, computed as exp(-x) * gate, since the subtraction would
// cancel for a gate near 1. Where exp(-x) is infinite and the gate 0, the product is NaN, which
// fminf turns into 1.
struct Gate {
  float gate;
  float rest;

  __device__ explicit Gate(float x) {
    const float exponential = quick_exp(-x);
    gate = quick_reciprocal(1.0f + exponential);
    rest = fminf(exponential * gate, 1.0f);
  }
};

// Returns the derivative of gelu_tanh. Far from 0, where x^3 overflows, gate * rest is 0.
__device__ __forceinline__ float gelu_tanh_slope(float x, const Gate& logistic) {
  const float rate = kGeluTwo * (1.0f + 3.0f * kGeluCubic * x * x);
  return logistic.gate + logistic.gate * logistic.rest * x * rate;
}

constexpr float kSixth = 1.0f / 6.0f;
constexpr float kSeluScale = 1.0507009873554805f;
constexpr float kSeluAlpha = 1.6732632423543772f;

// Returns the factor of negative values in a kLeakyRelu.
__device__ __forceinline__ float slope_of(Activation activation) {
  return __uint_as_float(static_cast<unsigned int>(static_cast<long long>(activation) >> 32));
}

// Clips x to [low, high]; a NaN stays a NaN.
__device__ __forceinline__ float clip(float x, float low, float high) {
  return x < low ? low : x > high ? high : x;
}

// Returns the derivative of clip, which is 0 at `low` and `high`.
__device__ __forceinline__ float clip_slope(float x, float low, float high) {
  return x > low && x < high ? 1.0f : 0.0f;
}

__device__ __forceinline__ float hard_sigmoid(float x) {
  return clip(x + 3.0f, 0.0f, 6.0f) * kSixth;
}

// gate = tanh(softplus(x)) and growth, its derivative. With u = exp(-|x|) they are (1 + 2 u) / d
// and 4 u^2 (1 + u) / d^2 for positive x, where d = 1 + 2 u + 2 u^2. For negative x they are (2 u +
// u^2) / d and 4 u (1 + u) / d^2, where d = 2 + 2 u + u^2.
struct MishGate {
  float gate;
  float growth;

  __device__ explicit MishGate(float x) {
    const float u = quick_exp(-fabsf(x)), square = u * u;
    const bool negative = x < 0.0f;
    const float over =
        quick_reciprocal(negative ? 2.0f + 2.0f * u + square : 1.0f + 2.0f * u + 2.0f * square);
    gate = over * (negative ? 2.0f * u + square : 1.0f + 2.0f * u);
    growth = 4.0f * (1.0f + u) * over * over * (negative ? u : square);
  }
};

}  // namespace activation_detail

// Sets values[i] = activation(values[i]). The activation is the same in the whole grid, so one
// branch serves all values.
template <int kSize>
__device__ __forceinline__ void activate(Activation activation, float (&values)[kSize]) {
  using namespace activation_detail;
  switch (kind_of(activation)) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
#pragma unroll
      for (float& x : values) x = relu(x);
      break;
    case Activation::kRelu2:
#pragma unroll
      for (float& x : values) x = relu(x) * relu(x);
      break;
    case Activation::kGeluTanh:
#pragma unroll
      for (float& x : values) x *= sigmoid(gelu_tanh_logit(x));
      break;
    case Activation::kGeluErf:
#pragma unroll
      for (float& x : values) x *= 0.5f * erfcf(-kSqrtHalf * x);
      break;
    case Activation::kQuickGelu:
#pragma unroll
      for (float& x : values) x *= sigmoid(kQuickGelu * x);
      break;
    case Activation::kSilu:
#pragma unroll
      for (float& x : values) x *= sigmoid(x);
      break;
    case Activation::kRelu6:
#pragma unroll
      for (float& x : values) x = clip(x, 0.0f, 6.0f);
      break;
    case Activation::kLeakyRelu: {
      const float slope = slope_of(activation);
#pragma unroll
      for (float& x : values) x = x < 0.0f ? slope * x : x;
      break;
    }
    case Activation::kSoftplus:
#pragma unroll
      for (float& x : values) x = relu(x) + log1pf(quick_exp(-fabsf(x)));
      break;
    case Activation::kElu:
#pragma unroll
      for (float& x : values) x = x > 0.0f ? x : expm1f(x);
      break;
    case Activation::kSelu:
#pragma unroll
      for (float& x : values) x = kSeluScale * (x > 0.0f ? x : kSeluAlpha * expm1f(x));
      break;
    case Activation::kHardTanh:
#pragma unroll
      for (float& x : values) x = clip(x, -1.0f, 1.0f);
      break;
    case Activation::kHardSwish:
#pragma unroll
      for (float& x : values) x *= hard_sigmoid(x);
      break;
    case Activation::kMish:
#pragma unroll
      for (float& x : values) x *= MishGate(x).gate;
      break;
    case Activation::kSigmoid:
#pragma unroll
      for (float& x : values) x = sigmoid(x);
      break;
    case Activation::kHardSigmoid:
#pragma unroll
      for (float& x : values) x = hard_sigmoid(x);
      break;
    case Activation::kTanh:
#pragma unroll
      for (float& x : values) x = tanhf(x);
      break;
  }
}

// Sets gradient[i] *= activation'(inputs[i]).
template <int kSize>
__device__ __forceinline__ void multiply_derivative(Activation activation,
                                                    const float (&inputs)[kSize],
                                                    float (&gradient)[kSize]) {
  using namespace activation_detail;
  switch (kind_of(activation)) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
#pragma unroll
      for (int i = 0; i < kSize; ++i) gradient[i] = inputs[i] > 0.0f ? gradient[i] : 0.0f;
      break;
    case Activation::kRelu2:
#pragma unroll
      for (int i = 0; i < kSize; ++i) gradient[i] *= inputs[i] > 0.0f ? 2.0f * inputs[i] : 0.0f;
      break;
    case Activation::kGeluTanh:
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float x = inputs[i];
        gradient[i] *= gelu_tanh_slope(x, Gate(gelu_tanh_logit(x)));
      }
      break;
    case Activation::kGeluErf:
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float x = inputs[i];
        gradient[i] *= 0.5f * erfcf(-kSqrtHalf * x) + x * kInvSqrtTwoPi * expf(-0.5f * x * x);
      }
      break;
    case Activation::kQuickGelu:
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float x = kQuickGelu * inputs[i];
        const Gate logistic(x);
        gradient[i] *= logistic.gate * (1.0f + x * logistic.rest);
      }
      break;
    case Activation::kSilu:
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const Gate logistic(inputs[i]);
        gradient[i] *= logistic.gate * (1.0f + inputs[i] * logistic.rest);
      }
      break;
    case Activation::kRelu6:
#pragma unroll
      for (int i = 0; i < kSize; ++i) gradient[i] *= clip_slope(inputs[i], 0.0f, 6.0f);
      break;
    case Activation::kLeakyRelu: {
      const float slope = slope_of(activation);
#pragma unroll
      for (int i = 0; i < kSize; ++i) gradient[i] *= inputs[i] < 0.0f ? slope : 1.0f;
      break;
    }
    case Activation::kSoftplus:
#pragma unroll
      for (int i = 0; i < kSize; ++i) gradient[i] *= sigmoid(inputs[i]);
      break;
    case Activation::kElu:
#pragma unroll
      for (int i = 0; i < kSize; ++i) gradient[i] *= inputs[i] > 0.0f ? 1.0f : quick_exp(inputs[i]);
      break;
    case Activation::kSelu:
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float x = inputs[i];
        gradient[i] *= kSeluScale * (x > 0.0f ? 1.0f : kSeluAlpha * quick_exp(x));
      }
      break;
    case Activation::kHardTanh:
      // The derivative at -1 and 1 is 1, as jax.nn's, unlike that of kRelu6 at its corners.
#pragma unroll
      for (int i = 0; i < kSize; ++i)
        gradient[i] *= inputs[i] >= -1.0f && inputs[i] <= 1.0f ? 1.0f : 0.0f;
      break;
    case Activation::kHardSwish:
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float x = inputs[i];
        gradient[i] *= hard_sigmoid(x) + clip_slope(x, -3.0f, 3.0f) * clip(x, -3.0f, 3.0f) * kSixth;
      }
      break;
    case Activation::kMish:
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const MishGate mish(inputs[i]);
        gradient[i] *= mish.gate + clip(inputs[i], -128.0f, 128.0f) * mish.growth;
      }
      break;
    case Activation::kSigmoid:
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const Gate logistic(inputs[i]);
        gradient[i] *= logistic.gate * logistic.rest;
      }
      break;
    case Activation::kHardSigmoid:
#pragma unroll
      for (int i = 0; i < kSize; ++i) gradient[i] *= clip_slope(inputs[i], -3.0f, 3.0f) * kSixth;
      break;
    case Activation::kTanh:
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const Gate logistic(2.0f * inputs[i]);
        gradient[i] *= 4.0f * logistic.gate * logistic.rest;
      }
      break;
  }
}

// Sets values[i] = activation(inputs[i]) and gradient[i] *= activation'(inputs[i]). Terms that an
// activation and its derivative share, mostly an exponential, are computed once.
template <int kSize>
__device__ __forceinline__ void activate_with_derivative(Activation activation,
                                                         const float (&inputs)[kSize],
                                                         float (&values)[kSize],
                                                         float (&gradient)[kSize]) {
  using namespace activation_detail;
  switch (activation) {
    case Activation::kGeluTanh:
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float x = inputs[i];
        const Gate logistic(gelu_tanh_logit(x));
        values[i] = x * logistic.gate;
        gradient[i] *= gelu_tanh_slope(x, logistic);
      }
      break;
    case Activation::kQuickGelu:
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float x = kQuickGelu * inputs[i];
        const Gate logistic(x);
        values[i] = inputs[i] * logistic.gate;
        gradient[i] *= logistic.gate * (1.0f + x * logistic.rest);
      }
      break;
    case Activation::kSilu:
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const Gate logistic(inputs[i]);
        values[i] = inputs[i] * logistic.gate;
        gradient[i] *= logistic.gate * (1.0f + inputs[i] * logistic.rest);
      }
      break;
    default:
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = inputs[i];
      activate(activation, values);
      multiply_derivative(activation, inputs, gradient);
      break;
  }
}

// An activation that is a compile-time constant; AnyActivation is one that is not.
template <Activation kValue>
struct KnownActivation {
  __device__ __forceinline__ operator Activation() const { return kValue; }
};

struct AnyActivation {
  Activation value;

  __device__ __forceinline__ operator Activation() const { return value; }
};

// Whether type A is the compile-time constant Activation::kNone.
template <typename A>
constexpr bool kIsNone = std::is_same_v<A, KnownActivation<Activation::kNone>>;

// Calls f(activation, has residual) with types that have these as constants, so that a loop in f
// does not branch on them. Activations that are rare after norms of images are no constants: they
// share one loop, which branches.
template <typename F>
__device__ __forceinline__ void with_constants(Activation activation, bool has_residual,
                                               const F& f) {
  const auto with_activation = [&](auto residual) {
    switch (activation) {
      case Activation::kNone:
        return f(KnownActivation<Activation::kNone>{}, residual);
      case Activation::kRelu:
        return f(KnownActivation<Activation::kRelu>{}, residual);
      case Activation::kRelu2:
        return f(KnownActivation<Activation::kRelu2>{}, residual);
      case Activation::kGeluTanh:
        return f(KnownActivation<Activation::kGeluTanh>{}, residual);
      case Activation::kGeluErf:
        return f(KnownActivation<Activation::kGeluErf>{}, residual);
      case Activation::kQuickGelu:
        return f(KnownActivation<Activation::kQuickGelu>{}, residual);
      case Activation::kSilu:
        return f(KnownActivation<Activation::kSilu>{}, residual);
      default:
        return f(AnyActivation{activation}, residual);
    }
  };
  has_residual ? with_activation(std::true_type{}) : with_activation(std::false_type{});
}
