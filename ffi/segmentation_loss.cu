// segmentation_loss: the sums over the pixels of an image that
// jaxfused/reference/segmentation_loss.py states, and their gradient.
//
// A few neighbouring lanes share a pixel, one for each class, or for every 32nd of them. So the
// logits are read in whole cache lines, and a lane keeps the sums of its own classes in registers.
// Each block leaves its sums to be added up afterwards, always in the same order. The gradient
// follows from the cotangents of the sums, pixel by pixel.

#include "handler.h"
#include "mma.cuh"
#include "operands.h"
#include "rows.cuh"
#include "team.cuh"
#include "vector.cuh"

namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr int kThreads = 256;
// Pixels of a lane whose loads are in flight together.
constexpr int kUnroll = 4;
constexpr int kMostClasses = 256;
// The sums of an image: of the pixels' weights and losses, and three of each class.
constexpr int kOverall = 2;

enum class LabelType : int { kInt32, kUint8, kFloat32 };

struct ImageArgs {
  const void* logits;  // [images, pixels, classes]
  const void* labels;  // [images, pixels]
  LabelType label_type;
  const float* weights;  // [images, pixels], or nullptr
  bool ignores;
  int ignore_index;
  float focal_gamma;
  int64_t pixels;
  int classes;
  float* partials;          // forward: [images, blocks, sums]
  const float* cotangents;  // backward: [images, sums]
  void* dlogits;
};

template <int kLanes>
__device__ __forceinline__ float sum_over_lanes(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

template <int kLanes>
__device__ __forceinline__ float max_over_lanes(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// A pixel as a lane sees it: kOwn classes. Lanes beyond the classes have logits of -inf.
template <int kOwn>
struct Pixel {
  float logits[kOwn];
  float label;  // a class, or the share of the only class
  float weight;
  bool counts;
};

template <typename T, int kLanes, int kOwn>
__device__ __forceinline__ Pixel<kOwn> load_pixel(const ImageArgs& args, int64_t start,
                                                  int64_t pixel, int lane) {
  Pixel<kOwn> result;
  result.counts = pixel < args.pixels;
  const int64_t place = start + (result.counts ? pixel : 0);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int c = lane + i * kLanes;
    float value[1] = {-INFINITY};
    if (c < args.classes) {
      unpack(load_vector<T, 1>(static_cast<const T*>(args.logits) + place * args.classes + c),
             value);
    }
    result.logits[i] = value[0];
  }
  switch (args.label_type) {
    case LabelType::kInt32: {
      const int label = static_cast<const int*>(args.labels)[place];
      if (args.ignores && label == args.ignore_index) result.counts = false;
      result.label = static_cast<float>(label);
      break;
    }
    case LabelType::kUint8: {
      const int label = static_cast<const uint8_t*>(args.labels)[place];
      if (args.ignores && label == args.ignore_index) result.counts = false;
      result.label = static_cast<float>(label);
      break;
    }
    default:
      result.label = static_cast<const float*>(args.labels)[place];
  }
  result.weight = args.weights == nullptr ? 1.0f : args.weights[place];
  // What does not count must not be NaN either.
  if (!result.counts) {
    result.weight = 0.0f;
    result.label = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      result.logits[i] = lane + i * kLanes < args.classes ? 0.0f : -INFINITY;
    }
  }
  return result;
}

// base^exponent of a base from 0 to 1; 0^0 is 1.
__device__ __forceinline__ float power(float base, float exponent) {
  return exponent == 0.0f ? 1.0f : exp2_fast(exponent * __log2f(base));
}

// The probabilities and shares of a pixel's classes, and its loss.
template <int kOwn>
struct Terms {
  float probabilities[kOwn];
  float shares[kOwn];
  float loss;
  float slope;  // of the loss by a logit, divided by probability - share
};

// The focal loss is the cross-entropy times (1 - p)^gamma, with p the probability of the truth.
template <int kLanes, int kOwn>
__device__ __forceinline__ Terms<kOwn> terms_of(const ImageArgs& args, const Pixel<kOwn>& pixel,
                                                int lane) {
  Terms<kOwn> terms;
  const float gamma = args.focal_gamma;
  float cross_entropy, miss, hit_slope;
  if constexpr (kLanes == 1) {
    const float z = pixel.logits[0], t = pixel.label;
    const float small = exp2_fast(-fabsf(z) * kLog2e);
    const float larger = 1.0f / (1.0f + small), smaller = small * larger;
    const float p = z >= 0.0f ? larger : smaller, q = z >= 0.0f ? smaller : larger;
    terms.probabilities[0] = z == z ? p : z;
    terms.shares[0] = t;
    cross_entropy = fmaf(-t, z, fmaxf(z, 0.0f)) + log1pf(small);
    if (z != z) cross_entropy = z;
    miss = p * (1.0f - t) + q * t;
    // The derivative of miss is p q (1 - 2 t); divided by p - t only where it is not 0.
    hit_slope = p * q * (1.0f - 2.0f * t);
  } else {
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) most = fmaxf(most, pixel.logits[i]);
    most = max_over_lanes<kLanes>(most);
    const int label = static_cast<int>(pixel.label);
    float sum = 0.0f, picked = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int c = lane + i * kLanes;
      const float distance = c < args.classes ? pixel.logits[i] - most : -INFINITY;
      terms.probabilities[i] = exp2_fast(distance * kLog2e);
      terms.shares[i] = c == label ? 1.0f : 0.0f;
      sum += terms.probabilities[i];
      picked += c == label ? distance : 0.0f;
    }
    sum = sum_over_lanes<kLanes>(sum);
    picked = sum_over_lanes<kLanes>(picked);
    const float inverse = 1.0f / sum;
#pragma unroll
    for (float& probability : terms.probabilities) probability *= inverse;
    cross_entropy = logf(sum) - picked;
    if (label < 0 || label >= args.classes) cross_entropy = nanf("");
    miss = -expm1f(-cross_entropy);
    hit_slope = 1.0f - miss;
  }
  terms.loss = cross_entropy;
  terms.slope = 1.0f;
  if (gamma != 0.0f) {
    const float factor = power(miss, gamma);
    terms.loss = miss == 0.0f ? 0.0f : factor * cross_entropy;
    const float steeper =
        miss == 0.0f ? 0.0f : gamma * power(miss, gamma - 1.0f) * hit_slope * cross_entropy;
    if constexpr (kLanes == 1) {
      // Here `slope` is that by the logit itself.
      terms.slope = factor * (terms.probabilities[0] - terms.shares[0]) + steeper;
    } else {
      terms.slope = factor + steeper;
    }
  } else if constexpr (kLanes == 1) {
    terms.slope = terms.probabilities[0] - terms.shares[0];
  }
  return terms;
}

template <typename T, int kLanes, int kOwn>
__global__ void __launch_bounds__(kThreads) image_sums(const __grid_constant__ ImageArgs args) {
  constexpr int kGroups = kThreads / kLanes;
  constexpr int kWarps = kThreads / kWarpSize;
  const int lane = threadIdx.x % kLanes;
  const int64_t start = blockIdx.y * args.pixels;
  const int64_t begin = args.pixels * blockIdx.x / gridDim.x;
  const int64_t end = args.pixels * (blockIdx.x + 1) / gridDim.x;
  constexpr int kSums = kOverall + 3 * kOwn;
  float sums[kSums] = {};
  for (int64_t base = begin; base < end; base += kGroups * kUnroll) {
    Pixel<kOwn> pixels[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t pixel = base + u * kGroups + threadIdx.x / kLanes;
      pixels[u] = load_pixel<T, kLanes, kOwn>(args, start, pixel < end ? pixel : args.pixels, lane);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Terms<kOwn> terms = terms_of<kLanes, kOwn>(args, pixels[u], lane);
      const float weight = pixels[u].weight;
      if (lane == 0) {
        sums[0] += weight;
        sums[1] += pixels[u].counts ? weight * terms.loss : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        sums[kOverall + i] += weight * terms.probabilities[i] * terms.shares[i];
        sums[kOverall + kOwn + i] += weight * terms.probabilities[i];
        sums[kOverall + 2 * kOwn + i] += weight * terms.shares[i];
      }
    }
  }

  // Lanes of the same classes, first of a warp and then of all warps.
#pragma unroll
  for (int offset = kWarpSize / 2; offset >= kLanes; offset /= 2) {
#pragma unroll
    for (float& sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  __shared__ float of_warps[kWarps][kSums][kLanes];
  if (threadIdx.x % kWarpSize < kLanes) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) of_warps[threadIdx.x / kWarpSize][i][lane] = sums[i];
  }
  __syncthreads();
  const int all = kOverall + 3 * args.classes;
  float* const out = args.partials + (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * all;
  for (int i = threadIdx.x; i < all; i += kThreads) {
    int row = i, column = 0;
    if (i >= kOverall) {
      const int c = (i - kOverall) % args.classes;
      row = kOverall + (i - kOverall) / args.classes * kOwn + c / kLanes;
      column = c % kLanes;
    }
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += of_warps[warp][row][column];
    out[i] = sum;
  }
}

template <typename T, int kLanes, int kOwn>
__global__ void __launch_bounds__(kThreads) image_gradient(const __grid_constant__ ImageArgs args) {
  constexpr int kGroups = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t start = blockIdx.y * args.pixels;
  const int64_t base = int64_t{blockIdx.x} * kGroups * kUnroll;
  Pixel<kOwn> pixels[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t pixel = base + u * kGroups + threadIdx.x / kLanes;
    pixels[u] = load_pixel<T, kLanes, kOwn>(args, start, pixel, lane);
  }
  const float* const cotangents =
      args.cotangents + int64_t{blockIdx.y} * (kOverall + 3 * args.classes);
  const float of_loss = cotangents[1];
  float of_overlap[kOwn], of_predicted[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int c = lane + i * kLanes;
    of_overlap[i] = c < args.classes ? cotangents[kOverall + c] : 0.0f;
    of_predicted[i] = c < args.classes ? cotangents[kOverall + args.classes + c] : 0.0f;
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const Terms<kOwn> terms = terms_of<kLanes, kOwn>(args, pixels[u], lane);
    float pulls[kOwn], mean = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      pulls[i] = of_overlap[i] * terms.shares[i] + of_predicted[i];
      mean += pulls[i] * terms.probabilities[i];
    }
    // A single class has the other one's probability beside it, which nothing pulls at.
    mean = sum_over_lanes<kLanes>(mean);
    const int64_t pixel = base + u * kGroups + threadIdx.x / kLanes;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int c = lane + i * kLanes;
      const float p = terms.probabilities[i];
      const float by_loss = kLanes == 1 ? terms.slope : terms.slope * (p - terms.shares[i]);
      const float value = pixels[u].weight * (of_loss * by_loss + p * (pulls[i] - mean));
      const float gradient[1] = {pixels[u].counts ? value : 0.0f};
      if (pixel >= args.pixels || c >= args.classes) continue;
      Vector<T, 1> packed;
      pack(gradient, packed);
      store_vector(static_cast<T*>(args.dlogits) + (start + pixel) * args.classes + c, packed);
    }
  }
}

// --- launch --------------------------------------------------------------------------------------

// Calls `f` with the lanes of a pixel and the classes of a lane as compile-time constants.
template <typename F>
ffi::Error with_lanes(int classes, const F& f) {
  const auto call = [&](auto lanes, auto own) { return f(lanes, own); };
#define JAXFUSED_LANES(lanes, own) \
  call(std::integral_constant<int, lanes>{}, std::integral_constant<int, own>{})
  if (classes == 1) return JAXFUSED_LANES(1, 1);
  if (classes == 2) return JAXFUSED_LANES(2, 1);
  if (classes <= 4) return JAXFUSED_LANES(4, 1);
  if (classes <= 8) return JAXFUSED_LANES(8, 1);
  if (classes <= 16) return JAXFUSED_LANES(16, 1);
  if (classes <= 32) return JAXFUSED_LANES(32, 1);
  if (classes <= 64) return JAXFUSED_LANES(32, 2);
  if (classes <= 128) return JAXFUSED_LANES(32, 4);
  return JAXFUSED_LANES(32, 8);
#undef JAXFUSED_LANES
}

template <typename F>
ffi::Error with_logits_type(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kFloat32:
      return f(float{});
    case Dtype::kBfloat16:
      return f(__nv_bfloat16{});
    default:
      return f(__half{});
  }
}

ffi::Error parse_images(const ffi::AnyBuffer& logits, const ffi::AnyBuffer& labels,
                        const ffi::AnyBuffer& weights, bool ignores, int64_t ignore_index,
                        float focal_gamma, ImageArgs* args) {
  const auto shape = logits.dimensions();
  if (shape.size() != 3 || !dtype_of(logits)) {
    return ffi::Error::InvalidArgument(
        "logits must be float32, bfloat16 or float16 with axes images, pixels, classes");
  }
  if (shape[2] < 1 || shape[2] > kMostClasses) {
    return ffi::Error::InvalidArgument("logits have " + std::to_string(shape[2]) +
                                       " classes; 1 to " + std::to_string(kMostClasses) +
                                       " are supported");
  }
  if (shape[0] > 65535 || shape[1] > kMaxRows) {
    return ffi::Error::InvalidArgument("logits of shape " + to_string(shape) + " are too large");
  }
  RETURN_IF_ERROR(check_shape("labels", labels, {shape[0], shape[1]}));
  switch (labels.element_type()) {
    case ffi::DataType::S32:
      args->label_type = LabelType::kInt32;
      break;
    case ffi::DataType::U8:
    case ffi::DataType::PRED:
      args->label_type = LabelType::kUint8;
      break;
    case ffi::DataType::F32:
      args->label_type = LabelType::kFloat32;
      break;
    default:
      return ffi::Error::InvalidArgument("labels must be int32, uint8, bool or float32");
  }
  if (!is_absent(weights)) RETURN_IF_ERROR(check_float32("weights", weights, {shape[0], shape[1]}));
  if (!(focal_gamma >= 0.0f)) {
    return ffi::Error::InvalidArgument("focal_gamma must not be negative");
  }
  args->logits = logits.untyped_data();
  args->labels = labels.untyped_data();
  args->weights = data_or_null<const float>(weights);
  args->ignores = ignores;
  args->ignore_index = static_cast<int>(ignore_index);
  args->focal_gamma = focal_gamma;
  args->pixels = shape[1];
  args->classes = static_cast<int>(shape[2]);
  return ffi::Error::Success();
}

ffi::Error segmentation_forward(cudaStream_t stream, ffi::AnyBuffer logits, ffi::AnyBuffer labels,
                                ffi::AnyBuffer weights, ffi::Result<ffi::AnyBuffer> partials,
                                bool ignores, int64_t ignore_index, float focal_gamma) {
  ImageArgs args = {};
  RETURN_IF_ERROR(parse_images(logits, labels, weights, ignores, ignore_index, focal_gamma, &args));
  const auto shape = logits.dimensions();
  if (partials->dimensions().size() != 3 || partials->dimensions()[1] < 1) {
    return ffi::Error::InvalidArgument("partials must have axes images, blocks, sums");
  }
  const int64_t blocks = partials->dimensions()[1];
  RETURN_IF_ERROR(
      check_float32("partials", *partials, {shape[0], blocks, kOverall + 3 * shape[2]}));
  args.partials = static_cast<float*>(partials->untyped_data());
  if (is_absent(logits)) return ffi::Error::InvalidArgument("logits have no elements");
  return with_logits_type(*dtype_of(logits), [&](auto type) {
    return with_lanes(args.classes, [&](auto lanes, auto own) {
      return launch_kernel(
          image_sums<decltype(type), lanes(), own()>, args,
          {dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(shape[0])), kThreads, 0},
          stream);
    });
  });
}

ffi::Error segmentation_backward(cudaStream_t stream, ffi::AnyBuffer logits, ffi::AnyBuffer labels,
                                 ffi::AnyBuffer weights, ffi::AnyBuffer cotangents,
                                 ffi::Result<ffi::AnyBuffer> dlogits, bool ignores,
                                 int64_t ignore_index, float focal_gamma) {
  ImageArgs args = {};
  RETURN_IF_ERROR(parse_images(logits, labels, weights, ignores, ignore_index, focal_gamma, &args));
  const auto shape = logits.dimensions();
  RETURN_IF_ERROR(check_float32("cotangents", cotangents, {shape[0], kOverall + 3 * shape[2]}));
  RETURN_IF_ERROR(check_shape("dlogits", *dlogits, {shape[0], shape[1], shape[2]}));
  RETURN_IF_ERROR(check_dtype("dlogits", *dlogits, logits.element_type()));
  args.cotangents = static_cast<const float*>(cotangents.untyped_data());
  args.dlogits = dlogits->untyped_data();
  if (is_absent(logits)) return ffi::Error::Success();
  return with_logits_type(*dtype_of(logits), [&](auto type) {
    return with_lanes(args.classes, [&](auto lanes, auto own) {
      const int blocks = divide_up(args.pixels, kThreads / lanes() * kUnroll);
      return launch_kernel(image_gradient<decltype(type), lanes(), own()>, args,
                           {dim3(blocks, static_cast<unsigned>(shape[0])), kThreads, 0}, stream);
    });
  });
}

}  // namespace

DEFINE_HANDLER(jaxfused_segmentation_forward, segmentation_forward,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // logits
                   .Arg<ffi::AnyBuffer>()  // labels
                   .Arg<ffi::AnyBuffer>()  // weights
                   .Ret<ffi::AnyBuffer>()  // partials
                   .Attr<bool>("ignores")
                   .Attr<int64_t>("ignore_index")
                   .Attr<float>("focal_gamma"));

DEFINE_HANDLER(jaxfused_segmentation_backward, segmentation_backward,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // logits
                   .Arg<ffi::AnyBuffer>()  // labels
                   .Arg<ffi::AnyBuffer>()  // weights
                   .Arg<ffi::AnyBuffer>()  // cotangents
                   .Ret<ffi::AnyBuffer>()  // dlogits
                   .Attr<bool>("ignores")
                   .Attr<int64_t>("ignore_index")
                   .Attr<float>("focal_gamma"));
