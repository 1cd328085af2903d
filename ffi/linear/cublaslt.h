// cuBLASLt, opened at run time. The library comes with JAX's CUDA plugin and is not linked, so that
// libjaxfused.so also loads on a machine without it.
#pragma once

#include <string>

// The header comes from the CUDA toolkit or from the nvidia-cublas wheel; see CMakeLists.txt.
#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#define JAXFUSED_HAS_CUBLASLT 1

// Every function of cuBLASLt that the handlers call, named without the prefix cublasLt.
#define JAXFUSED_CUBLASLT_FUNCTIONS(X) \
  X(Create)                            \
  X(GetStatusString)                   \
  X(Matmul)                            \
  X(MatmulAlgoConfigGetAttribute)      \
  X(MatmulAlgoGetHeuristic)            \
  X(MatmulDescCreate)                  \
  X(MatmulDescDestroy)                 \
  X(MatmulDescSetAttribute)            \
  X(MatmulPreferenceCreate)            \
  X(MatmulPreferenceDestroy)           \
  X(MatmulPreferenceSetAttribute)      \
  X(MatrixLayoutCreate)                \
  X(MatrixLayoutDestroy)

struct CublasLt {
#define JAXFUSED_DECLARE(name) decltype(&cublasLt##name) name;
  JAXFUSED_CUBLASLT_FUNCTIONS(JAXFUSED_DECLARE)
#undef JAXFUSED_DECLARE
};

// Returns the functions, or nullptr with a reason in *error. The first call opens the library.
const CublasLt* cublaslt(std::string* error);
#else
#define JAXFUSED_HAS_CUBLASLT 0
#endif
