// Checks of operands over rows: matrices [rows, features] of one common dtype, and vectors
// [features] of any dtype.
#pragma once

#include "handler.h"
#include "rows.cuh"

// Limit on rows, so that int row indices a few grid steps beyond the last row do not overflow.
constexpr int64_t kMaxRows = int64_t{1} << 30;

inline ffi::Error parse_parameter(std::string_view name, const ffi::AnyBuffer& buffer,
                                  int64_t features, Parameter* parameter) {
  *parameter = {nullptr, Dtype::kFloat32};
  if (is_absent(buffer)) return ffi::Error::Success();
  RETURN_IF_ERROR(check_shape(name, buffer, {features}));
  const auto dtype = dtype_of(buffer);
  if (!dtype) {
    return ffi::Error::InvalidArgument(std::string(name) + " must be float32, bfloat16 or float16");
  }
  *parameter = {buffer.untyped_data(), *dtype};
  return ffi::Error::Success();
}

inline ffi::Error check_like(std::string_view name, const ffi::AnyBuffer& buffer,
                             const ffi::AnyBuffer& x) {
  RETURN_IF_ERROR(check_shape(name, buffer, x.dimensions()));
  return check_dtype(name, buffer, x.element_type());
}

inline ffi::Error check_like_or_absent(std::string_view name, const ffi::AnyBuffer& buffer,
                                       const ffi::AnyBuffer& x) {
  return is_absent(buffer) ? ffi::Error::Success() : check_like(name, buffer, x);
}

inline ffi::Error check_float32(std::string_view name, const ffi::AnyBuffer& buffer,
                                std::initializer_list<int64_t> shape) {
  RETURN_IF_ERROR(check_shape(name, buffer, shape));
  return check_dtype(name, buffer, ffi::DataType::F32);
}
