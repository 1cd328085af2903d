// The epilogue of a product with quantised weights: scales of columns and rows, bias, activation, a
// second product that the activation gates, and a residual.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "common/activation.cuh"
#include "common/operands.h"
#include "common/rows.cuh"

constexpr int kMaxProducts = 2;
constexpr int kEpilogueVec = 4;  // adjacent columns that a thread finishes at a time

// A matrix [rows, columns] with a dtype of its own; absent if `data` is null.
struct Output {
  void* data;
  Dtype dtype;
};

struct QuantizedEpilogue {
  const float* row_scale;                   // [rows], or nullptr
  const float* column_scale[kMaxProducts];  // [columns], or nullptr
  Parameter bias[kMaxProducts];             // [columns]
  Parameter residual;                       // [rows, columns]
  Output y;
  Output preactivation;
  int rows;
  int columns;
  int products;  // if 2, the second product is multiplied by the activation of the first
  Activation activation;
};

// Loads up to kEpilogueVec values from `offset` on, of which `count` exist.
__device__ __forceinline__ void load_existing(const Parameter& from, int64_t offset, int count,
                                              bool aligned, float (&out)[kEpilogueVec]) {
  with_type(from.dtype, [&](auto type) {
    using T = decltype(type);
    const T* data = static_cast<const T*>(from.data) + offset;
    if (aligned) return load_as_float<T>(data, 0, out);
#pragma unroll
    for (int i = 0; i < kEpilogueVec; ++i) {
      out[i] = i < count ? static_cast<float>(data[i]) : 0.0f;
    }
  });
}

__device__ __forceinline__ void store_existing(const Output& to, int64_t offset, int count,
                                               bool aligned, const float (&in)[kEpilogueVec]) {
  with_type(to.dtype, [&](auto type) {
    using T = decltype(type);
    T* data = static_cast<T*>(to.data) + offset;
    if (aligned) {
      Vector<T, kEpilogueVec> vector;
      pack(in, vector);
      return store_vector(data, vector);
    }
#pragma unroll
    for (int i = 0; i < kEpilogueVec; ++i) {
      if (i < count) data[i] = static_cast<T>(in[i]);
    }
  });
}

// Applies the epilogue to the sums z of the columns from `column` on, and writes the results.
__device__ __forceinline__ void finish(const QuantizedEpilogue& args, int row, int column,
                                       float (&z)[kMaxProducts][kEpilogueVec]) {
  const int count = min(kEpilogueVec, args.columns - column);
  const bool aligned = args.columns % kEpilogueVec == 0;
  const int64_t offset = static_cast<int64_t>(row) * args.columns + column;
  const float row_scale = args.row_scale == nullptr ? 1.0f : args.row_scale[row];
  float operand[kEpilogueVec];
#pragma unroll
  for (int product = 0; product < kMaxProducts; ++product) {
    if (product >= args.products) continue;
    if (args.column_scale[product] != nullptr) {
      load_existing({args.column_scale[product], Dtype::kFloat32}, column, count, aligned, operand);
#pragma unroll
      for (int i = 0; i < kEpilogueVec; ++i) z[product][i] = z[product][i] * row_scale * operand[i];
    }
    if (args.bias[product].data != nullptr) {
      load_existing(args.bias[product], column, count, aligned, operand);
#pragma unroll
      for (int i = 0; i < kEpilogueVec; ++i) z[product][i] += operand[i];
    }
  }
  if (args.preactivation.data != nullptr) {
    store_existing(args.preactivation, offset, count, aligned, z[0]);
  }
  activate(args.activation, z[0]);
  if (args.products == kMaxProducts) {
#pragma unroll
    for (int i = 0; i < kEpilogueVec; ++i) z[0][i] *= z[1][i];
  }
  if (args.residual.data != nullptr) {
    load_existing(args.residual, offset, count, aligned, operand);
#pragma unroll
    for (int i = 0; i < kEpilogueVec; ++i) z[0][i] += operand[i];
  }
  store_existing(args.y, offset, count, aligned, z[0]);
}

// Checks a matrix of any float dtype, which may be absent, and sets `output`.
inline ffi::Error parse_output(std::string_view name, const ffi::AnyBuffer& buffer, int64_t rows,
                               int64_t columns, Output* output) {
  *output = {nullptr, Dtype::kFloat32};
  if (is_absent(buffer)) return ffi::Error::Success();
  RETURN_IF_ERROR(check_shape(name, buffer, {rows, columns}));
  const auto dtype = dtype_of(buffer);
  if (!dtype) {
    return ffi::Error::InvalidArgument(std::string(name) + " must be float32, bfloat16 or float16");
  }
  *output = {buffer.untyped_data(), *dtype};
  return ffi::Error::Success();
}

// Checks the operands of an epilogue whose rows, columns and products are set, and sets the rest
// but the scales and the second bias.
inline ffi::Error parse_epilogue(std::string_view activation, const ffi::AnyBuffer& bias,
                                 const ffi::AnyBuffer& residual, const ffi::AnyBuffer& y,
                                 const ffi::AnyBuffer& preactivation, QuantizedEpilogue* epilogue) {
  const int rows = epilogue->rows, columns = epilogue->columns;
  RETURN_IF_ERROR(parse_activation(activation, &epilogue->activation));
  RETURN_IF_ERROR(parse_parameter("bias", bias, columns, &epilogue->bias[0]));
  Output added = {};
  RETURN_IF_ERROR(parse_output("residual", residual, rows, columns, &added));
  epilogue->residual = {added.data, added.dtype};
  RETURN_IF_ERROR(parse_output("y", y, rows, columns, &epilogue->y));
  RETURN_IF_ERROR(
      parse_output("preactivation", preactivation, rows, columns, &epilogue->preactivation));
  if (epilogue->y.data == nullptr) return ffi::Error::InvalidArgument("there is no y");
  if (epilogue->products == kMaxProducts && epilogue->preactivation.data != nullptr) {
    return ffi::Error::InvalidArgument("of a gated unit there is no preactivation");
  }
  return ffi::Error::Success();
}
