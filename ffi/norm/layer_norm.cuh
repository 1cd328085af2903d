// Shared by the forward and the backward of layer_norm and rms_norm: the constants of a call and
// the checks of its operands.
#pragma once

#include "common/activation.cuh"
#include "common/handler.h"
#include "common/operands.h"
#include "common/rows.cuh"

// Threads per row in the kernels that read a row more than once, as it is too long for registers.
constexpr int kWideThreads = 512;

struct NormOptions {
  bool subtract_mean;
  float inverse_features;
  float epsilon;
  float scale_offset;  // added to the scale
  Activation pre_activation;
  Activation activation;
};

// Operations around the norm. Frequent combinations are compiled separately, because branches at
// run time take registers even if they are not executed.
enum class Chain {
  kPlain,    // only the norm
  kRelu,     // additions and a relu before the norm, each optional
  kGeneral,  // any activation, before or after
};

// Returns the chain for the options; `adds` says whether anything is added to the input.
inline Chain chain_of(const NormOptions& options, bool adds) {
  if (options.activation != Activation::kNone) return Chain::kGeneral;
  if (options.pre_activation == Activation::kRelu) return Chain::kRelu;
  if (options.pre_activation != Activation::kNone) return Chain::kGeneral;
  return adds ? Chain::kRelu : Chain::kPlain;
}

// Returns the options, with everything that the chain implies replaced by constants.
template <Chain kChain>
__device__ __forceinline__ NormOptions known_options(const NormOptions& options) {
  NormOptions known = options;
  if constexpr (kChain != Chain::kGeneral) {
    const bool relu = kChain == Chain::kRelu && options.pre_activation == Activation::kRelu;
    known.pre_activation = relu ? Activation::kRelu : Activation::kNone;
    known.activation = Activation::kNone;
  }
  return known;
}

inline ffi::Error parse_options(int64_t features, bool subtract_mean, float epsilon,
                                float scale_offset, std::string_view pre_activation,
                                std::string_view activation, NormOptions* options) {
  options->subtract_mean = subtract_mean;
  options->inverse_features = 1.0f / static_cast<float>(features);
  options->epsilon = epsilon;
  options->scale_offset = scale_offset;
  RETURN_IF_ERROR(parse_activation(pre_activation, &options->pre_activation));
  return parse_activation(activation, &options->activation);
}

inline ffi::Error check_matrix(std::string_view name, const ffi::AnyBuffer& x) {
  if (x.dimensions().size() != 2 || !dtype_of(x)) {
    return ffi::Error::InvalidArgument(std::string(name) +
                                       " must be a matrix of float32, bfloat16 or float16");
  }
  const int64_t features = x.dimensions()[1];
  if (features < 1 || features > 65536) {
    return ffi::Error::InvalidArgument(std::string(name) + " has " + std::to_string(features) +
                                       " features; 1 to 65536 are supported");
  }
  const int64_t rows = x.dimensions()[0];
  if (rows > kMaxRows) {
    return ffi::Error::InvalidArgument(std::string(name) + " has " + std::to_string(rows) +
                                       " rows; at most " + std::to_string(kMaxRows) +
                                       " are supported");
  }
  return ffi::Error::Success();
}
