#include "cublaslt.h"

#if JAXFUSED_HAS_CUBLASLT

#include <dlfcn.h>

#define JAXFUSED_TEXT_OF(macro) JAXFUSED_TEXT(macro)
#define JAXFUSED_TEXT(text) #text

namespace {

constexpr char kName[] = "libcublasLt.so." JAXFUSED_TEXT_OF(CUBLAS_VER_MAJOR);

struct Opened {
  CublasLt functions = {};
  std::string error;

  Opened() {
    // The name alone suffices: jaxfused/ops/linear/cublaslt.py has already opened the library in
    // this process.
    void* library = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      error = dlerror();
      return;
    }
#define JAXFUSED_LOOK_UP(name)                                                                   \
  functions.name = reinterpret_cast<decltype(functions.name)>(dlsym(library, "cublasLt" #name)); \
  if (functions.name == nullptr) error = std::string(kName) + " has no cublasLt" #name;
    JAXFUSED_CUBLASLT_FUNCTIONS(JAXFUSED_LOOK_UP)
#undef JAXFUSED_LOOK_UP
  }
};

}  // namespace

const CublasLt* cublaslt(std::string* error) {
  static const Opened opened;
  *error = opened.error;
  return opened.error.empty() ? &opened.functions : nullptr;
}

#endif

// Returns the name of the library that the handlers need, which jaxfused/ops/linear/cublaslt.py
// opens. The name is empty if jaxfused was built without cuBLASLt's header.
extern "C" __attribute__((visibility("default"))) const char* jaxfused_cublaslt_name() {
#if JAXFUSED_HAS_CUBLASLT
  return kName;
#else
  return "";
#endif
}
