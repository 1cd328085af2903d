// Shared by all FFI handlers: the device, checks of operands, and CUDA errors as ffi::Error.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "rows.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// Returns from a handler with the error, if there is one.
#define RETURN_IF_ERROR(expression)                      \
  do {                                                   \
    ffi::Error returned_error = (expression);            \
    if (returned_error.failure()) return returned_error; \
  } while (false)

// Defines a handler as an exported symbol of the library, whose other symbols are hidden.
#define DEFINE_HANDLER(symbol, function, ...)                              \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol( \
      XLA_FFI_CallFrame* call_frame);                                      \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, function, __VA_ARGS__)

inline ffi::Error check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(what) + ": " + cudaGetErrorString(error));
}

inline ffi::Error current_device(Device* device) {
  int id = 0;
  RETURN_IF_ERROR(check_cuda(cudaGetDevice(&id), "cudaGetDevice"));
  const std::pair<cudaDeviceAttr, int*> attributes[] = {
      {cudaDevAttrMultiProcessorCount, &device->multiprocessors},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &device->shared_bytes},
      {cudaDevAttrL2CacheSize, &device->l2_bytes},
      {cudaDevAttrClusterLaunch, &device->clusters},
  };
  for (const auto& [attribute, value] : attributes) {
    RETURN_IF_ERROR(
        check_cuda(cudaDeviceGetAttribute(value, attribute, id), "cudaDeviceGetAttribute"));
  }
  return ffi::Error::Success();
}

// Raises the limit on a block's dynamic shared memory for `kernel` to `bytes`, which are the same
// in every call, so that calls from several threads do not disturb each other.
template <typename Args>
ffi::Error allow_shared_memory(void (*kernel)(Args), int bytes) {
  return check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                    "cudaFuncSetAttribute");
}

// The same for all shared memory of the device, for a kernel without static shared memory.
template <typename Args>
ffi::Error allow_shared_memory(void (*kernel)(Args), const Device& device) {
  return allow_shared_memory(kernel, device.shared_bytes);
}

struct Launch {
  dim3 grid;
  int threads;
  int shared_bytes;
  int cluster = 1;           // blocks in a cluster
  bool cooperative = false;  // whether all blocks must be resident at once
};

// A Launch as the CUDA runtime's struct, which is valid as long as this object.
class LaunchConfig {
 public:
  LaunchConfig(const Launch& launch, cudaStream_t stream) {
    config_.gridDim = launch.grid;
    config_.blockDim = dim3(launch.threads);
    config_.dynamicSmemBytes = launch.shared_bytes;
    config_.stream = stream;
    config_.attrs = attributes_;
    if (launch.cluster > 1) {
      cudaLaunchAttribute& cluster = attributes_[config_.numAttrs++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
    }
    if (launch.cooperative) {
      cudaLaunchAttribute& cooperative = attributes_[config_.numAttrs++];
      cooperative.id = cudaLaunchAttributeCooperative;
      cooperative.val.cooperative = 1;
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;

  const cudaLaunchConfig_t* get() const { return &config_; }

 private:
  cudaLaunchConfig_t config_ = {};
  cudaLaunchAttribute attributes_[2] = {};
};

template <typename Args>
ffi::Error launch_kernel(void (*kernel)(Args), const Args& args, const Launch& launch,
                         cudaStream_t stream) {
  const LaunchConfig config(launch, stream);
  RETURN_IF_ERROR(check_cuda(cudaLaunchKernelEx(config.get(), kernel, args), "cudaLaunchKernelEx"));
  return check_cuda(cudaGetLastError(), "kernel launch");
}

// Computes how many clusters of a launch the GPU runs at a time, at least 1.
template <typename Args>
ffi::Error resident_clusters(void (*kernel)(Args), const Launch& launch, cudaStream_t stream,
                             int* clusters) {
  const LaunchConfig config(launch, stream);
  RETURN_IF_ERROR(check_cuda(
      cudaOccupancyMaxActiveClusters(clusters, reinterpret_cast<const void*>(kernel), config.get()),
      "cudaOccupancyMaxActiveClusters"));
  *clusters = std::max(*clusters, 1);
  return ffi::Error::Success();
}

// Computes how many blocks of a launch an SM runs at a time, at least 1.
template <typename Args>
ffi::Error resident_blocks(void (*kernel)(Args), const Launch& launch, int* blocks) {
  RETURN_IF_ERROR(check_cuda(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, reinterpret_cast<const void*>(kernel),
                                                    launch.threads, launch.shared_bytes),
      "cudaOccupancyMaxActiveBlocksPerMultiprocessor"));
  *blocks = std::max(*blocks, 1);
  return ffi::Error::Success();
}

inline std::optional<Dtype> dtype_of(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      return Dtype::kFloat32;
    case ffi::DataType::BF16:
      return Dtype::kBfloat16;
    case ffi::DataType::F16:
      return Dtype::kFloat16;
    default:
      return std::nullopt;
  }
}

// Calls `f` with a value of the type that `dtype` names, and returns its result.
template <typename F>
ffi::Error with_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kFloat32:
      return f(float{});
    case Dtype::kBfloat16:
      return f(__nv_bfloat16{});
    default:
      return f(__half{});
  }
}

// Whether an operand is absent, which is passed as a buffer without elements.
inline bool is_absent(const ffi::AnyBuffer& buffer) { return buffer.element_count() == 0; }

template <typename T = void>
T* data_or_null(const ffi::AnyBuffer& buffer) {
  return is_absent(buffer) ? nullptr : static_cast<T*>(buffer.untyped_data());
}

inline std::string to_string(ffi::AnyBuffer::Dimensions dimensions) {
  std::string text = "[";
  for (const int64_t dimension : dimensions) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(dimension);
  }
  return text + "]";
}

inline ffi::Error check_shape(std::string_view name, const ffi::AnyBuffer& buffer,
                              ffi::AnyBuffer::Dimensions expected) {
  const auto dimensions = buffer.dimensions();
  if (std::equal(dimensions.begin(), dimensions.end(), expected.begin(), expected.end())) {
    return ffi::Error::Success();
  }
  return ffi::Error::InvalidArgument(std::string(name) + " has shape " + to_string(dimensions) +
                                     ", but " + to_string(expected) + " is needed");
}

inline ffi::Error check_shape(std::string_view name, const ffi::AnyBuffer& buffer,
                              std::initializer_list<int64_t> expected) {
  return check_shape(name, buffer, ffi::AnyBuffer::Dimensions{expected.begin(), expected.size()});
}

inline ffi::Error check_dtype(std::string_view name, const ffi::AnyBuffer& buffer,
                              ffi::DataType expected) {
  if (buffer.element_type() == expected) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(name) + " has another dtype than is needed");
}

// Whether every pointer allows 16-byte accesses; nullptr, an absent operand, does.
inline bool are_aligned(std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return false;
  }
  return true;
}
