// Shared by the kernels of depthwise convolution: their operands and the checks of these.
#pragma once

#include "common/activation.cuh"
#include "common/handler.h"
#include "common/operands.h"

struct ConvShape {
  int images, height, width, channels;  // size of the input
  int out_height, out_width;
  int top, left;  // rows of zeros above the input, columns left of it
};

struct WeightsOperands {
  ConvShape shape;
  const void *x, *dy;
  float* sums;    // gradients of taps, then of the bias: [parts, taps + 1, channels]
  int64_t parts;  // number of partial sums of each tap, which the caller adds
};

struct ConvOperands {
  ConvShape shape;
  const void* x;
  Parameter weights;  // [taps, channels]
  bool turned;        // whether to rotate the kernel by 180 degrees, as for dgrad
  Parameter bias;
  const void* residual;  // may be nullptr
  void* y;
  void* z;  // input of the activation as a result, or nullptr
  Activation activation;
};

inline ffi::Error parse_conv_shape(const ffi::AnyBuffer& x, const ffi::AnyBuffer& y, int64_t top,
                                   int64_t left, ConvShape* shape) {
  const auto in = x.dimensions(), out = y.dimensions();
  if (in.size() != 4 || !dtype_of(x) || out.size() != 4) {
    return ffi::Error::InvalidArgument(
        "x must be float32, bfloat16 or float16 with axes image, row, column, channel");
  }
  if (out[0] != in[0] || out[3] != in[3]) {
    return ffi::Error::InvalidArgument("the result has shape " + to_string(out) +
                                       ", which does not fit x of shape " + to_string(in));
  }
  RETURN_IF_ERROR(check_dtype("the result", y, x.element_type()));
  if (in[3] % 2 != 0) {
    return ffi::Error::InvalidArgument("depthwise_conv: the number of channels must be even");
  }
  for (const int64_t size : {in[0] * out[1] * out[2], in[0] * in[1] * in[2], in[3]}) {
    if (size > INT32_MAX / 8) {
      return ffi::Error::InvalidArgument("x of shape " + to_string(in) + " is too large");
    }
  }
  if (top < 0 || left < 0) {
    return ffi::Error::InvalidArgument("depthwise_conv: padding must not be negative");
  }
  *shape = {static_cast<int>(in[0]), static_cast<int>(in[1]),  static_cast<int>(in[2]),
            static_cast<int>(in[3]), static_cast<int>(out[1]), static_cast<int>(out[2]),
            static_cast<int>(top),   static_cast<int>(left)};
  return ffi::Error::Success();
}

// Checks the operands of wgrad for `taps` weights per channel.
inline ffi::Error parse_weights_operands(const ffi::AnyBuffer& x, const ffi::AnyBuffer& dy,
                                         const ffi::AnyBuffer& sums, int64_t taps, int64_t top,
                                         int64_t left, WeightsOperands* operands) {
  RETURN_IF_ERROR(parse_conv_shape(x, dy, top, left, &operands->shape));
  const auto shape = sums.dimensions();
  if (shape.size() != 3 || shape[0] < 1 || shape[0] > INT32_MAX) {
    return ffi::Error::InvalidArgument("sums has shape " + to_string(shape) +
                                       ", but it must be [parts, taps + 1, channels]");
  }
  RETURN_IF_ERROR(check_float32("sums", sums, {shape[0], taps + 1, operands->shape.channels}));
  operands->x = x.untyped_data();
  operands->dy = dy.untyped_data();
  operands->sums = static_cast<float*>(sums.untyped_data());
  operands->parts = shape[0];
  return ffi::Error::Success();
}

// Checks the operands of a convolution with `taps` weights per channel.
inline ffi::Error parse_conv_operands(const ffi::AnyBuffer& x, const ffi::AnyBuffer& weights,
                                      const ffi::AnyBuffer& bias, const ffi::AnyBuffer& residual,
                                      const ffi::AnyBuffer& y, const ffi::AnyBuffer& z,
                                      int64_t taps, int64_t top, int64_t left, bool turned,
                                      std::string_view activation, ConvOperands* operands) {
  RETURN_IF_ERROR(parse_conv_shape(x, y, top, left, &operands->shape));
  const int64_t channels = operands->shape.channels;
  RETURN_IF_ERROR(check_shape("weights", weights, {taps, channels}));
  if (!dtype_of(weights)) {
    return ffi::Error::InvalidArgument("weights must be float32, bfloat16 or float16");
  }
  RETURN_IF_ERROR(parse_parameter("bias", bias, channels, &operands->bias));
  const auto out = y.dimensions();
  for (const auto& [name, buffer] :
       {std::pair<std::string_view, ffi::AnyBuffer>{"residual", residual}, {"z", z}}) {
    if (is_absent(buffer)) continue;
    RETURN_IF_ERROR(check_shape(name, buffer, {out[0], out[1], out[2], out[3]}));
    RETURN_IF_ERROR(check_dtype(name, buffer, x.element_type()));
  }
  RETURN_IF_ERROR(parse_activation(activation, &operands->activation));
  operands->x = x.untyped_data();
  operands->weights = {weights.untyped_data(), *dtype_of(weights)};
  operands->turned = turned;
  operands->residual = data_or_null(residual);
  operands->y = y.untyped_data();
  operands->z = data_or_null(z);
  return ffi::Error::Success();
}
