// The emulator for sources with handlers of the XLA FFI, to which a CPU passes neither a stream nor
// scratch memory.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "emulator.h"
#include "xla/ffi/api/ffi.h"

namespace cuda_emulator {
struct Stream {};

// Replaces ffi::ScratchAllocator. Unwritten memory is NaN.
class Scratch {
 public:
  std::optional<void*> Allocate(size_t size, size_t alignment) {
    void* data = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    if (data == nullptr) return std::nullopt;
    allocations_.emplace_back(std::memset(data, 0xFF, size), std::free);
    return data;
  }

 private:
  std::vector<std::unique_ptr<void, void (*)(void*)>> allocations_;
};
}  // namespace cuda_emulator

template <>
struct xla::ffi::CtxDecoding<cuda_emulator::Stream> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*,
                                    DiagnosticEngine&) {
    return nullptr;
  }
};

template <>
struct xla::ffi::CtxDecoding<cuda_emulator::Scratch> {
  using Type = cuda_emulator::Scratch;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*,
                                    DiagnosticEngine&) {
    return Type();
  }
};
