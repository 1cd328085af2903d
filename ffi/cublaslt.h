// cuBLASLt, opened at run time: the library that JAX's CUDA plugin brings is not linked, so that
// libjaxfused.so also loads where there is none.
#pragma once

#include <string>

// The header of the toolkit or of the nvidia-cublas wheel; see CMakeLists.txt.
#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#define JAXFUSED_HAS_CUBLASLT 1

// Every function that is called, under the name it has without its prefix.
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

// The functions, or nullptr with a reason in *error. The first call opens the library.
const CublasLt* cublaslt(std::string* error);
#else
#define JAXFUSED_HAS_CUBLASLT 0
#endif
