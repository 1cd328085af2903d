// y = activation(x w + bias), plus a residual if there is no activation, by cuBLASLt, whose kernels
// apply all of it in the epilogue of the product. The residual may be in the buffer of y.
//
// cuBLASLt's epilogues for the backward are not used, because a separate pass (bias_activation.cu)
// is faster than gelu's derivative with the bias gradient, and a separate sum is faster than the
// bias gradient fused into the weight gradient (wgrad).
//
// cuBLASLt stores matrices by columns and XLA by rows, so the call computes the transposed product
// y^T = w^T x^T: each matrix is then in memory as cuBLASLt expects it.

#include <array>
#include <map>
#include <mutex>

#include "common/handler.h"
#include "cublaslt.h"

namespace {

#if JAXFUSED_HAS_CUBLASLT

ffi::Error check_status(const CublasLt& lt, cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(what) + ": " + lt.GetStatusString(status));
}

// Owns a descriptor of cuBLASLt, and destroys it at the end of the scope.
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

// kProposals: algorithms that the heuristic is asked for. kManyWaves: least waves of 128x128 tiles
// of a product that counts as large.
constexpr int kProposals = 16;
constexpr float kManyWaves = 16.0f;

// A product of matrices stored by rows, as XLA has them. Absent operands are nullptr.
struct Product {
  int64_t rows, features, hidden;  // x is [rows, features], w [features, hidden]
  bool transpose_w;                // whether w is [hidden, features]
  bool transpose_x;                // whether x is [features, rows]
  const void *x, *w, *bias, *residual;
  void *y, *preactivation;
  cudaDataType_t type;    // type of x, w and the preactivation
  cudaDataType_t y_type;  // type of y and the residual
  bool gelu;
  void* workspace;
  size_t workspace_bytes;

  uint32_t epilogue() const {
    if (!gelu) return bias == nullptr ? CUBLASLT_EPILOGUE_DEFAULT : CUBLASLT_EPILOGUE_BIAS;
    if (preactivation == nullptr) {
      return bias == nullptr ? CUBLASLT_EPILOGUE_GELU : CUBLASLT_EPILOGUE_GELU_BIAS;
    }
    return bias == nullptr ? CUBLASLT_EPILOGUE_GELU_AUX : CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  }
};

// Returns the alignment that an algorithm may assume: the largest power of two, up to 256, that
// divides the address.
uint32_t alignment(const void* address) {
  const auto value = reinterpret_cast<uintptr_t>(address) | 256;
  return static_cast<uint32_t>(value & -value);
}

// A cuBLASLt handle for each device and an algorithm for each kind of product. Both are kept until
// the process ends, so that the same call always runs the same kernel.
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

  using Key = std::array<int64_t, 16>;

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
  const int32_t operation = product.transpose_w ? CUBLAS_OP_T : CUBLAS_OP_N;
  RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_TRANSA, operation));
  const int32_t x_operation = product.transpose_x ? CUBLAS_OP_T : CUBLAS_OP_N;
  RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_TRANSB, x_operation));
  RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_EPILOGUE, product.epilogue()));
  if (product.bias != nullptr) {
    RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias));
  }
  if (product.preactivation != nullptr) {
    RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, product.preactivation));
    RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, product.hidden));
    const auto type = static_cast<int32_t>(product.type);
    RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, type));
  }

  Owned<cublasLtMatrixLayout_t> w(lt.MatrixLayoutDestroy), x(lt.MatrixLayoutDestroy),
      y(lt.MatrixLayoutDestroy);
  const auto create = [&](Owned<cublasLtMatrixLayout_t>& layout, cudaDataType_t type, int64_t rows,
                          int64_t columns) {
    return check_status(lt,
                        lt.MatrixLayoutCreate(&layout.handle, type, static_cast<uint64_t>(columns),
                                              static_cast<uint64_t>(rows), columns),
                        "cublasLtMatrixLayoutCreate");
  };
  RETURN_IF_ERROR(product.transpose_w ? create(w, product.type, product.hidden, product.features)
                                      : create(w, product.type, product.features, product.hidden));
  RETURN_IF_ERROR(product.transpose_x ? create(x, product.type, product.features, product.rows)
                                      : create(x, product.type, product.rows, product.features));
  RETURN_IF_ERROR(create(y, product.y_type, product.rows, product.hidden));

  const void* residual = product.residual == nullptr ? product.y : product.residual;
  const uint32_t alignments[] = {alignment(product.w), alignment(product.x), alignment(residual),
                                 alignment(product.y)};
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
    // Split-K is allowed only with float32 partial sums, which are added in a fixed order.
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions));
    constexpr cublasLtMatmulPreferenceAttributes_t kAlignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (int i = 0; i < 4; ++i) RETURN_IF_ERROR(prefer(kAlignments[i], alignments[i]));

    std::array<cublasLtMatmulHeuristicResult_t, kProposals> proposals = {};
    int found = 0;
    RETURN_IF_ERROR(
        check_status(lt,
                     lt.MatmulAlgoGetHeuristic(handle, description.handle, w.handle, x.handle,
                                               y.handle, y.handle, preference.handle, kProposals,
                                               proposals.data(), &found),
                     "cublasLtMatmulAlgoGetHeuristic"));
    if (found == 0) return ffi::Error::Internal("cuBLASLt has no algorithm for this product");
    // The heuristic ignores the cost of an epilogue. 128x128 tiles are preferred, because their two
    // warpgroups work in ping-pong: one multiplies while the other runs its epilogue. Products of
    // few tiles, and those that also write the preactivation, take the heuristic's first proposal.
    *algorithm = proposals[0].algo;
    for (int i = 0; product.preactivation == nullptr && i < found; ++i) {
      uint32_t tile = 0;
      RETURN_IF_ERROR(check_status(
          lt,
          lt.MatmulAlgoConfigGetAttribute(&proposals[i].algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile,
                                          sizeof(tile), nullptr),
          "cublasLtMatmulAlgoConfigGetAttribute"));
      if (tile == CUBLASLT_MATMUL_TILE_128x128 && proposals[i].wavesCount >= kManyWaves) {
        *algorithm = proposals[i].algo;
        break;
      }
    }
    return ffi::Error::Success();
  };

  const Algorithms::Key key = {device,
                               product.rows,
                               product.features,
                               product.hidden,
                               product.transpose_w,
                               product.transpose_x,
                               product.type,
                               product.y_type,
                               product.epilogue(),
                               product.residual != nullptr,
                               static_cast<int64_t>(product.workspace_bytes),
                               alignment(product.preactivation),
                               alignments[0],
                               alignments[1],
                               alignments[2],
                               alignments[3]};
  cublasLtMatmulAlgo_t algorithm = {};
  RETURN_IF_ERROR(algorithms.find(key, &algorithm, choose));

  const float alpha = 1.0f, beta = product.residual == nullptr ? 0.0f : 1.0f;
  return check_status(lt,
                      lt.Matmul(handle, description.handle, &alpha, product.w, w.handle, product.x,
                                x.handle, &beta, residual, y.handle, product.y, y.handle,
                                &algorithm, product.workspace, product.workspace_bytes, stream),
                      "cublasLtMatmul");
}

ffi::Error check(std::string_view name, const ffi::AnyBuffer& buffer, ffi::DataType type,
                 std::initializer_list<int64_t> shape) {
  RETURN_IF_ERROR(check_shape(name, buffer, shape));
  return check_dtype(name, buffer, type);
}

ffi::Error linear(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer bias,
                  ffi::AnyBuffer residual, ffi::Result<ffi::AnyBuffer> y,
                  ffi::Result<ffi::AnyBuffer> preactivation, ffi::Result<ffi::AnyBuffer> workspace,
                  std::string_view activation, bool transpose_w, bool transpose_x) {
  if (activation != "none" && activation != "gelu_tanh") {
    return ffi::Error::InvalidArgument("activation must be none or gelu_tanh, but is " +
                                       std::string(activation));
  }
  const ffi::DataType type = x.element_type();
  if (x.dimensions().size() != 2 || (type != ffi::DataType::BF16 && type != ffi::DataType::F16)) {
    return ffi::Error::InvalidArgument("x must be a matrix of bfloat16 or float16");
  }
  if (w.dimensions().size() != 2) return ffi::Error::InvalidArgument("w must be a matrix");
  Product product = {};
  product.rows = x.dimensions()[transpose_x ? 1 : 0];
  product.features = x.dimensions()[transpose_x ? 0 : 1];
  product.hidden = w.dimensions()[transpose_w ? 0 : 1];
  product.transpose_w = transpose_w;
  product.transpose_x = transpose_x;
  product.gelu = activation == "gelu_tanh";
  if (product.rows < 1 || product.features < 8 || product.hidden < 8 || product.features % 8 != 0 ||
      product.hidden % 8 != 0) {
    return ffi::Error::InvalidArgument("both sizes of w must be multiples of 8, but it has shape " +
                                       to_string(w.dimensions()));
  }
  RETURN_IF_ERROR(transpose_w ? check("w", w, type, {product.hidden, product.features})
                              : check("w", w, type, {product.features, product.hidden}));
  const bool bare = !product.gelu && is_absent(bias);
  const ffi::DataType y_type = bare ? y->element_type() : type;
  if (y_type != type && y_type != ffi::DataType::F32) {
    return ffi::Error::InvalidArgument("y must be of the type of x or float32");
  }
  RETURN_IF_ERROR(check("y", *y, y_type, {product.rows, product.hidden}));
  if (!is_absent(bias)) RETURN_IF_ERROR(check("bias", bias, type, {product.hidden}));
  if (!is_absent(residual)) {
    if (product.gelu) {
      return ffi::Error::InvalidArgument("a residual goes with activation none alone");
    }
    RETURN_IF_ERROR(check("residual", residual, y_type, {product.rows, product.hidden}));
  }
  if (!is_absent(*preactivation)) {
    if (!product.gelu) {
      return ffi::Error::InvalidArgument("a preactivation goes with activation gelu_tanh alone");
    }
    RETURN_IF_ERROR(check("preactivation", *preactivation, type, {product.rows, product.hidden}));
  }
  product.x = x.untyped_data();
  product.w = w.untyped_data();
  product.bias = data_or_null(bias);
  product.residual = data_or_null(residual);
  product.y = y->untyped_data();
  product.preactivation = data_or_null(*preactivation);
  product.type = type == ffi::DataType::BF16 ? CUDA_R_16BF : CUDA_R_16F;
  product.y_type = y_type == type ? product.type : CUDA_R_32F;
  product.workspace = data_or_null(*workspace);
  product.workspace_bytes = workspace->size_bytes();
  std::string error;
  const CublasLt* lt = cublaslt(&error);
  if (lt == nullptr) return ffi::Error::Internal(error);
  return run_product(*lt, product, stream);
}

#else

ffi::Error linear(cudaStream_t, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer,
                  ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer>,
                  ffi::Result<ffi::AnyBuffer>, std::string_view, bool, bool) {
  return ffi::Error::Internal("jaxfused was built without cublasLt.h");
}

#endif

}  // namespace

DEFINE_HANDLER(jaxfused_linear, linear,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // w
                   .Arg<ffi::AnyBuffer>()  // bias
                   .Arg<ffi::AnyBuffer>()  // residual
                   .Ret<ffi::AnyBuffer>()  // y
                   .Ret<ffi::AnyBuffer>()  // preactivation
                   .Ret<ffi::AnyBuffer>()  // workspace
                   .Attr<std::string_view>("activation")
                   .Attr<bool>("transpose_w")
                   .Attr<bool>("transpose_x"));
