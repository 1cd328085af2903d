// A matrix product by cuBLASLt with what it can do to the result on the way out: add a bias, apply
// gelu and keep its argument, multiply by gelu's derivative, sum columns for the gradient of a
// bias.
//
// cuBLASLt thinks in columns where XLA thinks in rows, so it is asked for the transposed product:
// D^T = B^T A^T, of which every matrix lies in memory as XLA has it.

#include <array>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "cublaslt.h"
#include "handler.h"

namespace {

#if JAXFUSED_HAS_CUBLASLT

ffi::Error check_status(const CublasLt& lt, cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(what) + ": " + lt.GetStatusString(status));
}

// A descriptor of cuBLASLt's, destroyed with the variable.
template <typename Handle>
struct Owned {
  using Destroy = cublasStatus_t (*)(Handle);

  explicit Owned(Destroy destroy) : destroy(destroy) {}
  Owned(const Owned&) = delete;
  ~Owned() {
    if (handle != nullptr) destroy(handle);
  }

  Destroy destroy;
  Handle handle = nullptr;
};

// What must be done to the product; each may come with a bias, and so on, as its operands say.
enum class Epilogue { kLinear, kGelu, kGeluGradient, kSumB };

bool parse_epilogue(std::string_view name, Epilogue* epilogue) {
  constexpr std::string_view kNames[] = {"linear", "gelu_tanh", "gelu_tanh_gradient", "sum_b"};
  for (int i = 0; i < 4; ++i) {
    if (name == kNames[i]) {
      *epilogue = static_cast<Epilogue>(i);
      return true;
    }
  }
  return false;
}

cudaDataType_t cuda_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return CUDA_R_32F;
    case Dtype::kBfloat16:
      return CUDA_R_16BF;
    default:
      return CUDA_R_16F;
  }
}

// A call, in XLA's terms. Pointers may be nullptr where the epilogue allows it.
struct Product {
  int64_t m, n, k;
  bool transpose_a, transpose_b;
  const void *a, *b, *c;
  void* d;
  cudaDataType_t type;         // of a, b and the preactivation
  cudaDataType_t result_type;  // of c and d
  int epilogue;                // cublasLtEpilogue_t
  void* vector;                // the bias, or its gradient
  cudaDataType_t vector_type;
  void* preactivation;
  void* workspace;
  size_t workspace_bytes;
  int algorithm;  // of those that the heuristic proposes, best first
};

// The largest power of two up to 256 that divides the address: what an algorithm may count on.
uint32_t alignment(const void* address) {
  const auto value = reinterpret_cast<uintptr_t>(address) | 256;
  return static_cast<uint32_t>(value & -value);
}

// One handle a device and one algorithm a kind of product, for as long as the process lives: the
// same call always runs the same kernel.
class Algorithms {
 public:
  ffi::Error handle(const CublasLt& lt, int device, cublasLtHandle_t* handle) {
    const std::lock_guard lock(mutex_);
    cublasLtHandle_t& known = handles_[device];
    if (known == nullptr) {
      RETURN_IF_ERROR(check_status(lt, lt.Create(&known), "cublasLtCreate"));
    }
    *handle = known;
    return ffi::Error::Success();
  }

  using Key = std::array<int64_t, 20>;

  template <typename Choose>
  ffi::Error find(const Key& key, cublasLtMatmulAlgo_t* algorithm, Choose choose) {
    const std::lock_guard lock(mutex_);
    const auto place = algorithms_.find(key);
    if (place != algorithms_.end()) {
      *algorithm = place->second;
      return ffi::Error::Success();
    }
    RETURN_IF_ERROR(choose(algorithm));
    algorithms_.emplace(key, *algorithm);
    return ffi::Error::Success();
  }

 private:
  std::mutex mutex_;
  std::map<int, cublasLtHandle_t> handles_;
  std::map<Key, cublasLtMatmulAlgo_t> algorithms_;
};

ffi::Error run_product(const CublasLt& lt, const Product& product, cudaStream_t stream) {
  static Algorithms algorithms;
  int device = 0;
  RETURN_IF_ERROR(check_cuda(cudaGetDevice(&device), "cudaGetDevice"));
  cublasLtHandle_t handle = nullptr;
  RETURN_IF_ERROR(algorithms.handle(lt, device, &handle));

  Owned<cublasLtMatmulDesc_t> description(lt.MatmulDescDestroy);
  RETURN_IF_ERROR(
      check_status(lt, lt.MatmulDescCreate(&description.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                   "cublasLtMatmulDescCreate"));
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    return check_status(
        lt, lt.MatmulDescSetAttribute(description.handle, attribute, &value, sizeof(value)),
        "cublasLtMatmulDescSetAttribute");
  };
  const int32_t operation_b = product.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  const int32_t operation_a = product.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_TRANSA, operation_b));
  RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_TRANSB, operation_a));
  const auto epilogue = static_cast<uint32_t>(product.epilogue);
  RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue));
  if (product.vector != nullptr) {
    RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.vector));
    const auto type = static_cast<int32_t>(product.vector_type);
    RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type));
  }
  if (product.preactivation != nullptr) {
    RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, product.preactivation));
    RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, product.n));
    const auto type = static_cast<int32_t>(product.type);
    RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, type));
  }

  Owned<cublasLtMatrixLayout_t> a(lt.MatrixLayoutDestroy), b(lt.MatrixLayoutDestroy),
      d(lt.MatrixLayoutDestroy);
  const auto create = [&](Owned<cublasLtMatrixLayout_t>& layout, cudaDataType_t type,
                          int64_t columns, int64_t rows) {
    return check_status(lt,
                        lt.MatrixLayoutCreate(&layout.handle, type, static_cast<uint64_t>(columns),
                                              static_cast<uint64_t>(rows), columns),
                        "cublasLtMatrixLayoutCreate");
  };
  const auto [a_rows, a_columns] =
      product.transpose_a ? std::pair(product.k, product.m) : std::pair(product.m, product.k);
  const auto [b_rows, b_columns] =
      product.transpose_b ? std::pair(product.n, product.k) : std::pair(product.k, product.n);
  RETURN_IF_ERROR(create(a, product.type, a_columns, a_rows));
  RETURN_IF_ERROR(create(b, product.type, b_columns, b_rows));
  RETURN_IF_ERROR(create(d, product.result_type, product.n, product.m));

  const void* c = product.c == nullptr ? product.d : product.c;
  const uint32_t alignments[] = {alignment(product.b), alignment(product.a), alignment(c),
                                 alignment(product.d)};
  const auto choose = [&](cublasLtMatmulAlgo_t* algorithm) {
    Owned<cublasLtMatmulPreference_t> preference(lt.MatmulPreferenceDestroy);
    RETURN_IF_ERROR(check_status(lt, lt.MatmulPreferenceCreate(&preference.handle),
                                 "cublasLtMatmulPreferenceCreate"));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      return check_status(
          lt, lt.MatmulPreferenceSetAttribute(preference.handle, attribute, &value, sizeof(value)),
          "cublasLtMatmulPreferenceSetAttribute");
    };
    const auto workspace = static_cast<uint64_t>(product.workspace_bytes);
    RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace));
    // Partial sums in float32, added in a fixed order.
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions));
    constexpr cublasLtMatmulPreferenceAttributes_t kAlignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (int i = 0; i < 4; ++i) RETURN_IF_ERROR(prefer(kAlignments[i], alignments[i]));

    std::array<cublasLtMatmulHeuristicResult_t, 16> proposals = {};
    int found = 0;
    RETURN_IF_ERROR(
        check_status(lt,
                     lt.MatmulAlgoGetHeuristic(handle, description.handle, b.handle, a.handle,
                                               d.handle, d.handle, preference.handle,
                                               product.algorithm + 1, proposals.data(), &found),
                     "cublasLtMatmulAlgoGetHeuristic"));
    if (found <= product.algorithm) {
      return ffi::Error::Internal("cuBLASLt proposes " + std::to_string(found) +
                                  " algorithms for this product, and number " +
                                  std::to_string(product.algorithm) + " is asked for");
    }
    *algorithm = proposals[product.algorithm].algo;
    return ffi::Error::Success();
  };

  const Algorithms::Key key = {device,
                               product.m,
                               product.n,
                               product.k,
                               product.transpose_a,
                               product.transpose_b,
                               product.type,
                               product.result_type,
                               product.epilogue,
                               product.vector != nullptr,
                               product.vector_type,
                               product.c != nullptr,
                               alignment(product.preactivation),
                               static_cast<int64_t>(product.workspace_bytes),
                               product.algorithm,
                               alignments[0],
                               alignments[1],
                               alignments[2],
                               alignments[3]};
  cublasLtMatmulAlgo_t algorithm = {};
  RETURN_IF_ERROR(algorithms.find(key, &algorithm, choose));

  const float alpha = 1.0f, beta = product.c == nullptr ? 0.0f : 1.0f;
  return check_status(lt,
                      lt.Matmul(handle, description.handle, &alpha, product.b, b.handle, product.a,
                                a.handle, &beta, c, d.handle, product.d, d.handle, &algorithm,
                                product.workspace, product.workspace_bytes, stream),
                      "cublasLtMatmul");
}

ffi::Error check_matrix(std::string_view name, const ffi::AnyBuffer& buffer, ffi::DataType type,
                        int64_t rows, int64_t columns) {
  RETURN_IF_ERROR(check_shape(name, buffer, {rows, columns}));
  return check_dtype(name, buffer, type);
}

ffi::Error cublaslt_matmul(cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer b,
                           ffi::AnyBuffer bias, ffi::AnyBuffer c, ffi::AnyBuffer preactivation,
                           ffi::Result<ffi::AnyBuffer> d,
                           ffi::Result<ffi::AnyBuffer> new_preactivation,
                           ffi::Result<ffi::AnyBuffer> bias_gradient,
                           ffi::Result<ffi::AnyBuffer> workspace, bool transpose_a,
                           bool transpose_b, std::string_view epilogue_name, int64_t algorithm) {
  Epilogue epilogue;
  if (!parse_epilogue(epilogue_name, &epilogue)) {
    return ffi::Error::InvalidArgument("the epilogue is not known: " + std::string(epilogue_name));
  }
  if (algorithm < 0 || algorithm >= 16) {
    return ffi::Error::InvalidArgument("algorithm must be 0 to 15");
  }
  for (const auto& [name, matrix] : {std::pair("a", &a), std::pair("b", &b)}) {
    if (matrix->dimensions().size() != 2 || !dtype_of(*matrix)) {
      return ffi::Error::InvalidArgument(std::string(name) +
                                         " must be a matrix of float32, bfloat16 or float16");
    }
  }
  Product product = {};
  product.transpose_a = transpose_a;
  product.transpose_b = transpose_b;
  product.m = a.dimensions()[transpose_a ? 1 : 0];
  product.k = a.dimensions()[transpose_a ? 0 : 1];
  product.n = b.dimensions()[transpose_b ? 0 : 1];
  const ffi::DataType type = a.element_type();
  RETURN_IF_ERROR(check_matrix("b", b, type, transpose_b ? product.n : product.k,
                               transpose_b ? product.k : product.n));
  RETURN_IF_ERROR(check_shape("d", *d, {product.m, product.n}));
  const auto result_dtype = dtype_of(*d);
  if (!result_dtype || (*result_dtype != Dtype::kFloat32 && d->element_type() != type)) {
    return ffi::Error::InvalidArgument("d must have the dtype of a, or float32");
  }
  if (product.m < 1 || product.n < 1 || product.k < 1) {
    return ffi::Error::InvalidArgument("a product without elements");
  }
  product.type = cuda_type(*dtype_of(a));
  product.result_type = cuda_type(*result_dtype);
  product.a = a.untyped_data();
  product.b = b.untyped_data();
  product.d = d->untyped_data();
  product.algorithm = static_cast<int>(algorithm);
  if (!is_absent(c)) {
    RETURN_IF_ERROR(check_matrix("c", c, d->element_type(), product.m, product.n));
    product.c = c.untyped_data();
  }
  product.workspace = data_or_null(*workspace);
  product.workspace_bytes = workspace->size_bytes();

  // The operands that each epilogue knows.
  const bool activates = epilogue == Epilogue::kGelu;
  const bool takes_bias = activates || epilogue == Epilogue::kLinear;
  const bool takes_preactivation = epilogue == Epilogue::kGeluGradient;
  const bool needs_gradient = epilogue == Epilogue::kSumB;
  if ((!is_absent(bias) && !takes_bias) || is_absent(preactivation) == takes_preactivation ||
      (!is_absent(*new_preactivation) && !activates) ||
      (!is_absent(*bias_gradient) && takes_bias) || (is_absent(*bias_gradient) && needs_gradient)) {
    return ffi::Error::InvalidArgument("epilogue " + std::string(epilogue_name) +
                                       " does not go with these operands");
  }
  const auto parse_vector = [&](std::string_view name, const ffi::AnyBuffer& vector) {
    RETURN_IF_ERROR(check_shape(name, vector, {product.n}));
    if (vector.element_type() != type && vector.element_type() != d->element_type()) {
      return ffi::Error::InvalidArgument(std::string(name) + " must have the dtype of a or of d");
    }
    product.vector = vector.untyped_data();
    product.vector_type = cuda_type(*dtype_of(vector));
    return ffi::Error::Success();
  };
  if (!is_absent(bias)) RETURN_IF_ERROR(parse_vector("bias", bias));
  if (!is_absent(*bias_gradient)) RETURN_IF_ERROR(parse_vector("bias_gradient", *bias_gradient));
  for (const ffi::AnyBuffer& matrix : {preactivation, ffi::AnyBuffer(*new_preactivation)}) {
    if (is_absent(matrix)) continue;
    RETURN_IF_ERROR(check_matrix("preactivation", matrix, type, product.m, product.n));
    if (product.n % 8 != 0) {
      return ffi::Error::InvalidArgument(
          "with a preactivation the columns of d must be a multiple of 8");
    }
    product.preactivation = matrix.untyped_data();
  }
  const bool has_vector = product.vector != nullptr;
  switch (epilogue) {
    case Epilogue::kLinear:
      product.epilogue = has_vector ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
      break;
    case Epilogue::kGelu:
      if (product.preactivation != nullptr) {
        product.epilogue =
            has_vector ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
      } else {
        product.epilogue = has_vector ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
      }
      break;
    case Epilogue::kGeluGradient:
      product.epilogue = has_vector ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_DGELU;
      break;
    case Epilogue::kSumB:
      product.epilogue = CUBLASLT_EPILOGUE_BGRADA;
      break;
  }
  std::string error;
  const CublasLt* lt = cublaslt(&error);
  if (lt == nullptr) return ffi::Error::Internal(error);
  return run_product(*lt, product, stream);
}

#else

ffi::Error cublaslt_matmul(cudaStream_t, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer,
                           ffi::AnyBuffer, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>,
                           ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer>,
                           ffi::Result<ffi::AnyBuffer>, bool, bool, std::string_view, int64_t) {
  return ffi::Error::Internal("jaxfused was built without cublasLt.h");
}

#endif

}  // namespace

DEFINE_HANDLER(jaxfused_cublaslt_matmul, cublaslt_matmul,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // a
                   .Arg<ffi::AnyBuffer>()  // b
                   .Arg<ffi::AnyBuffer>()  // bias
                   .Arg<ffi::AnyBuffer>()  // c
                   .Arg<ffi::AnyBuffer>()  // preactivation
                   .Ret<ffi::AnyBuffer>()  // d
                   .Ret<ffi::AnyBuffer>()  // new_preactivation
                   .Ret<ffi::AnyBuffer>()  // bias_gradient
                   .Ret<ffi::AnyBuffer>()  // workspace
                   .Attr<bool>("transpose_a")
                   .Attr<bool>("transpose_b")
                   .Attr<std::string_view>("epilogue")
                   .Attr<int64_t>("algorithm"));
