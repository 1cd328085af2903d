// Properties of the library that can be read before any of its handlers is registered.

#include "xla/ffi/api/c_api.h"

// Returns the version of the XLA FFI that the handlers were built against. A runtime of an older
// version would reject all of them, so jaxfused/runtime/cuda_library.py checks it first.
extern "C" __attribute__((visibility("default"))) void jaxfused_xla_ffi_version(int* major,
                                                                                int* minor) {
  *major = XLA_FFI_API_MAJOR;
  *minor = XLA_FFI_API_MINOR;
}

// Returns the GPUs that the kernels were compiled for, as CMake names them, with commas between.
extern "C" __attribute__((visibility("default"))) const char* jaxfused_architectures() {
  return JAXFUSED_ARCHITECTURES;
}
