// The emulator for sources that have handlers of the XLA FFI too: on a CPU no stream is passed to them.
#pragma once

#include "emulator.h"
#include "xla/ffi/api/ffi.h"

namespace cuda_emulator {
struct Stream {};
}  // namespace cuda_emulator

template <>
struct xla::ffi::CtxDecoding<cuda_emulator::Stream> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*,
                                    DiagnosticEngine&) {
    return nullptr;
  }
};
