// segmentation_loss: the sums over an image's pixels that define the loss (see
// jaxfused/ops/loss/segmentation_loss_xla.py), and the gradient of the logits.
//
// For a binary mask, a lane has vectors of adjacent pixels. For a few classes it has 1 to 4
// pixels, whose logits pass through shared memory, so that they are read and written in whole cache
// lines; warps are independent until the end. For many classes, a warp has a pixel.
//
// The sums of an image's blocks are added in a fixed order: in the cluster that has the whole
// image, or by the caller. The gradient follows from the cotangents of the sums, pixel by pixel.

#include "common/handler.h"
#include "common/mma.cuh"
#include "common/operands.h"
#include "common/row_group.cuh"
#include "common/rows.cuh"
#include "common/vector.cuh"

namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr int kThreads = 256;
constexpr int kMaskSumsThreads = 512;
constexpr int kMaskGradientThreads = 256;
constexpr int kFewThreads = 128;
constexpr int kFewClasses = 24;
// Pixels of a lane whose loads are in flight together.
constexpr int kUnroll = 4;
constexpr int kMostClasses = 256;
// Number of an image's sums that are not per class: the sum of the pixels' weights and that of
// their weighted losses. Each class has three more.
constexpr int kOverall = 2;

enum class LabelType : int { kInt32, kUint8, kFloat32 };

// Coefficients of a mask's loss as a function of its sums; `scale` multiplies the gradient.
struct LossArgs {
  float cross_entropy_weight, dice_weight, smooth;
  float tversky_alpha, tversky_beta, tversky_rest;  // rest: 1 - alpha - beta
  float scale;
};

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
  int cluster;              // blocks of a cluster that add their sums; 1: the caller adds them
  const float* cotangents;  // backward: [images, sums]
  void* dlogits;
  LossArgs loss;  // for a mask's loss and gradient in one kernel
  float* losses;  // [images]
  bool wide;      // for few classes: whether images can be copied in 16-byte vectors
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

__device__ __forceinline__ int load_class(const ImageArgs& args, int64_t place) {
  return args.label_type == LabelType::kInt32 ? static_cast<const int*>(args.labels)[place]
                                              : static_cast<const uint8_t*>(args.labels)[place];
}

// Returns base^exponent for a base from 0 to 1; 0^0 is 1.
__device__ __forceinline__ float power(float base, float exponent) {
  return exponent == 0.0f ? 1.0f : exp2_fast(exponent * __log2f(base));
}

// --- many classes --------------------------------------------------------------------------------

// A lane's part of a pixel: kOwn classes. Those beyond the last class have logits of -inf.
template <int kOwn>
struct Pixel {
  float logits[kOwn];
  float label;
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
  const int label = load_class(args, place);
  if (args.ignores && label == args.ignore_index) result.counts = false;
  result.label = static_cast<float>(label);
  result.weight = args.weights == nullptr ? 1.0f : args.weights[place];
  // A pixel that is ignored or beyond the image must add 0, even if its values are NaN.
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

// Probabilities and targets (`shares`) of a lane's classes of a pixel, and the pixel's loss.
template <int kOwn>
struct Terms {
  float probabilities[kOwn];
  float shares[kOwn];
  float loss;
  float slope;  // derivative of the loss with respect to a logit, over (probability - share)
};

// Computes the Terms of a pixel, whose classes kLanes lanes share. The focal loss is the
// cross-entropy times (1 - p)^gamma, where p is the probability of the label.
template <int kLanes, int kOwn>
__device__ __forceinline__ Terms<kOwn> terms_of(const ImageArgs& args, const Pixel<kOwn>& pixel,
                                                int lane) {
  Terms<kOwn> terms;
  const float gamma = args.focal_gamma;
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
  float cross_entropy = logf(sum) - picked;
  if (label < 0 || label >= args.classes) cross_entropy = nanf("");
  const float miss = -expm1f(-cross_entropy);
  const float hit_slope = 1.0f - miss;
  terms.loss = cross_entropy;
  terms.slope = 1.0f;
  if (gamma != 0.0f) {
    const float factor = power(miss, gamma);
    terms.loss = miss == 0.0f ? 0.0f : factor * cross_entropy;
    const float steeper =
        miss == 0.0f ? 0.0f : gamma * power(miss, gamma - 1.0f) * hit_slope * cross_entropy;
    terms.slope = factor + steeper;
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

  // Adds up lanes of the same classes, first those of a warp and then of all warps.
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
    mean = sum_over_lanes<kLanes>(mean);
    const int64_t pixel = base + u * kGroups + threadIdx.x / kLanes;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int c = lane + i * kLanes;
      const float p = terms.probabilities[i];
      const float by_loss = terms.slope * (p - terms.shares[i]);
      const float value = pixels[u].weight * (of_loss * by_loss + p * (pulls[i] - mean));
      const float gradient[1] = {pixels[u].counts ? value : 0.0f};
      if (pixel >= args.pixels || c >= args.classes) continue;
      Vector<T, 1> packed;
      pack(gradient, packed);
      store_vector(static_cast<T*>(args.dlogits) + (start + pixel) * args.classes + c, packed);
    }
  }
}

// --- masks ---------------------------------------------------------------------------------------

// Pixels of a mask that a thread loads as one vector.
constexpr int kMaskPixels = 8;
// Blocks of the cluster that computes one image.
constexpr int kCluster = 8;
constexpr int kMaskSums = kOverall + 3;

// Distance by which a float label may lie below 0 or above 1; equal to SHARE_TOLERANCE of
// jaxfused/ops/loss/segmentation_loss_xla.py.
constexpr float kShareTolerance = 1e-3f;

// Returns a mask's label, or NaN if it lies outside of 0 to 1 by more than `tolerance`, as 255
// does.
__device__ __forceinline__ float share_of(float label, float tolerance) {
  return label >= -tolerance && label <= 1.0f + tolerance ? label : nanf("");
}

// Adjacent pixels of a mask. Ignored ones have weight, label and logit 0.
template <int kVec>
struct MaskPixels {
  float logits[kVec];
  float labels[kVec];
  float weights[kVec];
  uint32_t counts = (1u << kVec) - 1;
};

// Adjacent pixels as loaded. The constructor uses no loaded value, so that the loads of several
// vectors are in flight together.
template <typename T, int kVec>
struct MaskBits {
  static constexpr int kPart = kVec * sizeof(T) <= 16 ? kVec : 16 / sizeof(T);
  static constexpr int kLabelPart = kVec < 4 ? kVec : 4;
  Vector<T, kPart> logits[kVec / kPart];
  int labels[kVec];  // classes, bits of floats, or bytes (four to a word if kVec is 8)

  __device__ __forceinline__ MaskBits(const ImageArgs& args, int64_t place) {
#pragma unroll
    for (int i = 0; i < kVec; i += kPart) {
      logits[i / kPart] = load_vector<T, kPart>(static_cast<const T*>(args.logits) + place + i);
    }
    if (args.label_type == LabelType::kUint8) {
      const auto* const from = static_cast<const uint8_t*>(args.labels) + place;
      if constexpr (kVec == 8) {
        const uint2 bytes = *reinterpret_cast<const uint2*>(from);
        labels[0] = static_cast<int>(bytes.x);
        labels[1] = static_cast<int>(bytes.y);
      } else {
        static_assert(kVec == 1);
        labels[0] = *from;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kVec; i += kLabelPart) {
      const auto part =
          load_vector<int, kLabelPart>(static_cast<const int*>(args.labels) + place + i);
#pragma unroll
      for (int j = 0; j < kLabelPart; ++j) labels[i + j] = part.values[j];
    }
  }
};

// Unpacks pixels of a mask. With kPlain no pixel is ignored, and all have weight 1.
template <typename T, int kVec, bool kPlain>
__device__ __forceinline__ MaskPixels<kVec> mask_pixels(const ImageArgs& args,
                                                        const MaskBits<T, kVec>& bits,
                                                        int64_t place) {
  constexpr int kPart = MaskBits<T, kVec>::kPart;
  MaskPixels<kVec> pixels;
#pragma unroll
  for (int i = 0; i < kVec; i += kPart) {
    float part[kPart];
    unpack(bits.logits[i / kPart], part);
#pragma unroll
    for (int j = 0; j < kPart; ++j) pixels.logits[i + j] = part[j];
  }
  const auto set_class = [&](int i, int label) {
    if (!kPlain && args.ignores && label == args.ignore_index) pixels.counts &= ~(1u << i);
    pixels.labels[i] = share_of(static_cast<float>(label), 0.0f);
  };
  switch (args.label_type) {
    case LabelType::kInt32:
#pragma unroll
      for (int i = 0; i < kVec; ++i) set_class(i, bits.labels[i]);
      break;
    case LabelType::kUint8:
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        set_class(i, static_cast<uint32_t>(bits.labels[i / 4]) >> 8 * (i % 4) & 255);
      }
      break;
    default:
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        pixels.labels[i] = share_of(__int_as_float(bits.labels[i]), kShareTolerance);
      }
  }
#pragma unroll
  for (float& weight : pixels.weights) weight = 1.0f;
  if constexpr (kPlain) return pixels;
  if (args.weights != nullptr) load_as_float<float>(args.weights + place, 0, pixels.weights);
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    // An ignored pixel must add 0, even if its values are NaN.
    if (pixels.counts >> i & 1) continue;
    pixels.logits[i] = pixels.labels[i] = pixels.weights[i] = 0.0f;
  }
  return pixels;
}

// Computes log(1 + x) for x from 0 to 1, with a relative error of 2^-22 however small x is.
__device__ __forceinline__ float log1p_to_one(float x) {
  constexpr float kCoefficients[] = {1.0f,         -0.499999017f,  0.333299607f, -0.249541298f,
                                     0.196759179f, -0.15305531f,   0.106035516f, -0.0569585115f,
                                     0.019850919f, -0.00324390456f};
  constexpr int kDegree = sizeof(kCoefficients) / sizeof(float) - 1;
  float sum = kCoefficients[kDegree];
#pragma unroll
  for (int i = kDegree - 1; i >= 0; --i) sum = fmaf(sum, x, kCoefficients[i]);
  return sum * x;
}

// Returns 1 / x for x of at least 1 or NaN, by one instruction whose last bit may be wrong.
__device__ __forceinline__ float reciprocal(float x) {
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}

// Probabilities that a pixel is inside and outside the mask, and exp(-|logit|).
struct Odds {
  float inside, outside, small;

  __device__ __forceinline__ explicit Odds(float logit) {
    small = exp2_fast(-fabsf(logit) * kLog2e);
    const float larger = reciprocal(1.0f + small), smaller = small * larger;
    inside = logit >= 0.0f ? larger : smaller;
    outside = logit >= 0.0f ? smaller : larger;
  }

  // Returns the cross-entropy without its term log(1 + exp(-|logit|)).
  __device__ __forceinline__ float linear_loss(float logit, float label) const {
    return fmaf(-label, logit, fmaxf(logit, 0.0f));
  }

  __device__ __forceinline__ float cross_entropy(float logit, float label) const {
    return linear_loss(logit, label) + log1p_to_one(small);
  }

  // Returns the probability p of the wrong class; the focal loss is p^gamma times cross-entropy.
  __device__ __forceinline__ float miss(float label) const {
    return inside * (1.0f - label) + outside * label;
  }
};

// Sums over a thread's pixels of a mask.
template <bool kFocal, bool kPlain>
struct MaskTotals {
  static_assert(!(kFocal && kPlain));
  float sums[kMaskSums] = {};

  // Adds pixels, and sets `inside` to the probabilities that they are in the mask.
  template <int kVec>
  __device__ __forceinline__ void add(const ImageArgs& args, const MaskPixels<kVec>& pixels,
                                      float (&inside)[kVec]) {
    // Product of all 1 + exp(-|logit|) of plain pixels, minus 1, so that tiny terms are not lost
    // next to the 1. Its logarithm is computed once.
    float product = 0.0f;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float logit = pixels.logits[i], label = pixels.labels[i], weight = pixels.weights[i];
      const Odds odds(logit);
      inside[i] = odds.inside;
      if constexpr (kPlain) {
        product = fmaf(product, odds.small, product + odds.small);
        sums[1] += odds.linear_loss(logit, label);
        sums[2] = fmaf(odds.inside, label, sums[2]);
        sums[3] += odds.inside;
        sums[4] += label;
      } else {
        float loss = odds.cross_entropy(logit, label);
        if constexpr (kFocal) {
          const float miss = odds.miss(label);
          loss = miss == 0.0f ? 0.0f : power(miss, args.focal_gamma) * loss;
        }
        sums[0] += weight;
        sums[1] += weight * loss;
        sums[2] += weight * odds.inside * label;
        sums[3] += weight * odds.inside;
        sums[4] += weight * label;
      }
    }
    if constexpr (kPlain) {
      sums[0] += kVec;
      sums[1] += log1pf(product);
    }
  }

  // Returns the block's sum `i` to the threads of the first two warps, and 0 to the others.
  template <int kWarps>
  __device__ __forceinline__ float of_block(float (&of_warps)[kWarps][kMaskSums], int i) {
#pragma unroll
    for (float& sum : sums) sum = sum_over_lanes<kWarpSize>(sum);
    if (threadIdx.x % kWarpSize == 0) {
#pragma unroll
      for (int j = 0; j < kMaskSums; ++j) of_warps[threadIdx.x / kWarpSize][j] = sums[j];
    }
    __syncthreads();
    float sum = 0.0f;
    if (threadIdx.x < 2 * kWarpSize) {
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) sum += of_warps[warp][i];
    }
    return sum;
  }
};

// Probabilities and labels of a thread's two vectors of pixels, held in registers for the gradient.
template <int kVec>
struct Kept {
  float inside[2][kVec];
  float labels[2][kVec];
};

// Adds the vectors at `pixel` and `pixel + step` of the image; their loads are in flight together.
template <typename T, int kVec, bool kFocal, bool kPlain>
__device__ __forceinline__ void add_two(const ImageArgs& args, int64_t pixel, int64_t step,
                                        MaskTotals<kFocal, kPlain>& totals, Kept<kVec>& kept) {
  const int64_t first = blockIdx.y * args.pixels + pixel;
  // If the second lies beyond the image, the first is read again and not added.
  const bool two = pixel + step < args.pixels;
  const int64_t places[2] = {first, two ? first + step : first};
  const MaskBits<T, kVec> bits[2] = {{args, places[0]}, {args, places[1]}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i == 1 && !two) return;
    const auto pixels = mask_pixels<T, kVec, kPlain>(args, bits[i], places[i]);
    totals.add(args, pixels, kept.inside[i]);
#pragma unroll
    for (int j = 0; j < kVec; ++j) kept.labels[i][j] = pixels.labels[j];
  }
}

// Sums of all blocks of a cluster, in the shared memory of each of them. Each block sends its sums
// to all, and an mbarrier counts the bytes that arrive. A cluster barrier would also wait for other
// memory accesses.
struct ClusterSums {
  float sums[kCluster][kMaskSums];
  uint64_t barrier;

  // Initialises the barrier on which the block receives sums. All threads must call it.
  __device__ __forceinline__ void begin() {
    if (threadIdx.x == 0) {
      mbarrier_init(&barrier);
      mbarrier_init_fence();
      mbarrier_arrive_expect(&barrier, sizeof(sums));
    }
    __syncwarp();
    cluster_arrive();
  }

  // Sends the block's sum `i`, where i is threadIdx.x modulo the number of sums, and returns the
  // cluster's sum to the first warp (0 to others). All threads must call it.
  __device__ __forceinline__ float total(float sum, int i) {
    cluster_wait();
    if (threadIdx.x < kCluster * kMaskSums) {
      const uint32_t rank = threadIdx.x / kMaskSums;
      cluster_store(cluster_address(&sums[cluster_rank()][i], rank), sum,
                    cluster_address(&barrier, rank));
    }
    // A block must not end before it has received all sums.
    if (threadIdx.x >= kWarpSize) return 0.0f;
    mbarrier_wait(&barrier, 0);
    float total = 0.0f;
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank) total += sums[rank][i];
    return total;
  }
};

template <typename T, int kVec, bool kFocal, bool kPlain>
__global__ void __launch_bounds__(kMaskSumsThreads, 2)
    mask_sums(const __grid_constant__ ImageArgs args) {
  __shared__ float of_warps[kMaskSumsThreads / kWarpSize][kMaskSums];
  __shared__ ClusterSums of_blocks;
  if (args.cluster > 1) of_blocks.begin();
  const int64_t step = int64_t{gridDim.x} * kMaskSumsThreads * kVec;
  int64_t pixel = (int64_t{blockIdx.x} * kMaskSumsThreads + threadIdx.x) * kVec;
  MaskTotals<kFocal, kPlain> totals;
  Kept<kVec> unused;
  for (; pixel < args.pixels; pixel += 2 * step) add_two<T>(args, pixel, step, totals, unused);
  const int i = threadIdx.x % kMaskSums;
  float sum = totals.of_block(of_warps, i);
  int64_t place = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  if (args.cluster > 1) {
    sum = of_blocks.total(sum, i);
    if (cluster_rank() != 0) return;
    place = blockIdx.y;
  }
  if (threadIdx.x < kMaskSums) args.partials[place * kMaskSums + i] = sum;
}

// Derivatives of an image's loss with respect to its sums of losses, overlaps and predictions.
struct Pulls {
  float of_loss, of_overlap, of_predicted;
};

template <typename T, int kVec, bool kFocal>
__device__ __forceinline__ void gradient_of(const ImageArgs& args, const Pulls& pulls,
                                            const MaskPixels<kVec>& pixels,
                                            float (&gradient)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float logit = pixels.logits[i], label = pixels.labels[i];
    const Odds odds(logit);
    float slope = odds.inside - label;
    if constexpr (kFocal) {
      const float gamma = args.focal_gamma, miss = odds.miss(label);
      // The derivative of `miss` with respect to the logit is inside * outside * (1 - 2 * label).
      slope *= power(miss, gamma);
      if (miss != 0.0f) {
        slope += gamma * power(miss, gamma - 1.0f) * odds.inside * odds.outside *
                 (1.0f - 2.0f * label) * odds.cross_entropy(logit, label);
      }
    }
    const float pull = fmaf(pulls.of_overlap, label, pulls.of_predicted);
    const float value =
        pixels.weights[i] * (pulls.of_loss * slope + pull * odds.inside * odds.outside);
    gradient[i] = pixels.counts >> i & 1 ? value : 0.0f;
  }
}

template <typename T, int kVec>
__device__ __forceinline__ void store_gradient(const ImageArgs& args, int64_t place,
                                               const float (&gradient)[kVec]) {
  constexpr int kPart = MaskBits<T, kVec>::kPart;
#pragma unroll
  for (int i = 0; i < kVec; i += kPart) {
    float part[kPart];
#pragma unroll
    for (int j = 0; j < kPart; ++j) part[j] = gradient[i + j];
    Vector<T, kPart> packed;
    pack(part, packed);
    T* const to = static_cast<T*>(args.dlogits) + place + i;
    if constexpr (sizeof(packed) == 16) {
      // A single instruction stores 16 bytes; nvcc would split an ordinary store into four.
      __stwb(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(&packed));
    } else {
      store_vector(to, packed);
    }
  }
}

template <typename T, int kVec, bool kFocal, bool kPlain>
__device__ __forceinline__ void load_and_differentiate(const ImageArgs& args, const Pulls& pulls,
                                                       int64_t place) {
  const MaskBits<T, kVec> bits(args, place);
  float gradient[kVec];
  gradient_of<T, kVec, kFocal>(args, pulls, mask_pixels<T, kVec, kPlain>(args, bits, place),
                               gradient);
  store_gradient<T>(args, place, gradient);
}

template <typename T, int kVec, bool kFocal, bool kPlain>
__global__ void __launch_bounds__(kMaskGradientThreads, 5)
    mask_gradient(const __grid_constant__ ImageArgs args) {
  const int64_t pixel = (int64_t{blockIdx.x} * kMaskGradientThreads + threadIdx.x) * kVec;
  if (pixel >= args.pixels) return;
  const float* const cotangents = args.cotangents + int64_t{blockIdx.y} * kMaskSums;
  const Pulls pulls = {cotangents[1], cotangents[2], cotangents[3]};
  load_and_differentiate<T, kVec, kFocal, kPlain>(args, pulls, blockIdx.y * args.pixels + pixel);
}

// Returns an image's loss from its sums, and sets `pulls` to its derivatives.
__device__ __forceinline__ float loss_of(const LossArgs& args, const float (&sums)[kMaskSums],
                                         Pulls* pulls) {
  const auto [total, losses, overlap, predicted, present] = sums;
  const float divisor = total == 0.0f ? 1.0f : total;
  const float hits = 2.0f * overlap;
  const float below = 2.0f * (args.tversky_alpha * predicted + args.tversky_beta * present) +
                      args.tversky_rest * hits + args.smooth;
  const float index = (hits + args.smooth) / below;
  const float dice = 2.0f * args.scale * args.dice_weight / below;
  pulls->of_loss = args.scale * args.cross_entropy_weight / divisor;
  pulls->of_overlap = dice * (index * args.tversky_rest - 1.0f);
  pulls->of_predicted = dice * index * args.tversky_alpha;
  return args.cross_entropy_weight * (losses / divisor) + args.dice_weight * (1.0f - index);
}

// Computes sums and gradient in one kernel, with a cluster for each image. With kKeep, which needs
// pixels of weight 1 and at most two vectors per thread, probabilities stay in registers in
// between. Otherwise pixels are read again, mostly from the caches.
template <typename T, int kVec, bool kFocal, bool kPlain, bool kKeep>
__global__ void __launch_bounds__(kMaskSumsThreads, 2)
    mask_loss(const __grid_constant__ ImageArgs args) {
  __shared__ float of_warps[kMaskSumsThreads / kWarpSize][kMaskSums];
  __shared__ ClusterSums of_blocks;
  __shared__ Pulls shared_pulls;
  of_blocks.begin();
  const int64_t step = int64_t{kCluster} * kMaskSumsThreads * kVec;
  const int64_t first = (int64_t{blockIdx.x} * kMaskSumsThreads + threadIdx.x) * kVec;
  const int64_t start = blockIdx.y * args.pixels;
  MaskTotals<kFocal, kPlain> totals;
  Kept<kVec> kept;
  for (int64_t pixel = first; pixel < args.pixels; pixel += 2 * step) {
    add_two<T>(args, pixel, step, totals, kept);
    if (kKeep) break;
  }
  const int i = threadIdx.x % kMaskSums;
  const float sum = of_blocks.total(totals.of_block(of_warps, i), i);
  if (threadIdx.x < kWarpSize) {
    float sums[kMaskSums];
#pragma unroll
    for (int j = 0; j < kMaskSums; ++j) sums[j] = __shfl_sync(0xffffffffu, sum, j);
    Pulls pulls;
    const float loss = loss_of(args.loss, sums, &pulls);
    if (threadIdx.x == 0) {
      shared_pulls = pulls;
      if (cluster_rank() == 0) args.losses[blockIdx.y] = loss;
    }
  }
  __syncthreads();
  const Pulls pulls = shared_pulls;
  if constexpr (kKeep) {
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const int64_t pixel = first + turn * step;
      if (pixel >= args.pixels) return;
      float gradient[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float p = kept.inside[turn][j], label = kept.labels[turn][j];
        const float pull = fmaf(pulls.of_overlap, label, pulls.of_predicted);
        gradient[j] = fmaf(pulls.of_loss, p - label, pull * fmaf(-p, p, p));
      }
      store_gradient<T>(args, start + pixel, gradient);
    }
  } else {
    for (int64_t pixel = first; pixel < args.pixels; pixel += step) {
      load_and_differentiate<T, kVec, kFocal, kPlain>(args, pulls, start + pixel);
    }
  }
}

// --- few classes ---------------------------------------------------------------------------------

// Layout of a warp's logits in shared memory, with a row for each pixel.
struct Rows {
  int row;    // bytes of a pixel
  int pitch;  // bytes between the starts of successive pixels

  // A gap of 16 bytes after rows whose bytes are a multiple of 32 avoids most bank conflicts.
  __host__ __device__ __forceinline__ Rows(int classes, int itemsize)
      : row(classes * itemsize), pitch(row % 32 == 0 ? row + 16 : row) {}

  // Bytes of a warp's rows, a multiple of 16.
  __host__ __device__ __forceinline__ int bytes() const {
    return (kWarpSize * pitch + 15) / 16 * 16;
  }

  // Returns the offset in shared memory of the 16 bytes at offset `byte` in global memory.
  __device__ __forceinline__ int place(int byte) const {
    return pitch == row ? byte : byte / row * pitch + byte % row;
  }
};

template <typename T>
__device__ __forceinline__ void load_rows(const ImageArgs& args, const Rows& rows, char* shared,
                                          int64_t first, int pixels) {
  const char* const from = static_cast<const char*>(args.logits) + first * rows.row;
  const int bytes = pixels * rows.row;
  const int whole = args.wide ? bytes / 16 * 16 : 0;
  const int lane = threadIdx.x % kWarpSize;
  for (int byte = lane * 16; byte < whole; byte += kWarpSize * 16) {
    async_copy<16>(shared + rows.place(byte), from + byte);
  }
  for (int byte = whole + lane * static_cast<int>(sizeof(T)); byte < bytes;
       byte += kWarpSize * static_cast<int>(sizeof(T))) {
    async_copy<sizeof(T)>(shared + rows.place(byte), from + byte);
  }
}

template <typename T>
__device__ __forceinline__ void store_rows(const ImageArgs& args, const Rows& rows,
                                           const char* shared, int64_t first, int pixels) {
  char* const to = static_cast<char*>(args.dlogits) + first * rows.row;
  const int bytes = pixels * rows.row;
  const int whole = args.wide ? bytes / 16 * 16 : 0;
  const int lane = threadIdx.x % kWarpSize;
  for (int byte = lane * 16; byte < whole; byte += kWarpSize * 16) {
    *reinterpret_cast<uint4*>(to + byte) =
        *reinterpret_cast<const uint4*>(shared + rows.place(byte));
  }
  for (int byte = whole + lane * static_cast<int>(sizeof(T)); byte < bytes;
       byte += kWarpSize * static_cast<int>(sizeof(T))) {
    *reinterpret_cast<T*>(to + byte) = *reinterpret_cast<const T*>(shared + rows.place(byte));
  }
}

// Pixels that a lane computes at a time; more for few classes, so that enough bytes are in flight.
template <int kMost>
constexpr int kPixels = kMost <= 4   ? 4
                        : kMost <= 8 ? 2
                                     : 1;

// A pixel's label and weight as loaded. The constructor uses no loaded value, so it does not wait.
struct TruthBits {
  int label = 0;
  float weight = 1.0f;
  bool inside = false;

  TruthBits() = default;

  __device__ __forceinline__ TruthBits(const ImageArgs& args, int64_t place, bool inside)
      : inside(inside) {
    if (!inside) return;
    label = load_class(args, place);
    if (args.weights != nullptr) weight = args.weights[place];
  }
};

// A pixel's label and weight, both 0 if the pixel is ignored or beyond the image.
struct Truth {
  bool counts;
  int label;
  float weight;

  __device__ __forceinline__ Truth(const ImageArgs& args, const TruthBits& bits)
      : counts(bits.inside && !(args.ignores && bits.label == args.ignore_index)),
        label(counts ? bits.label : 0),
        weight(counts ? bits.weight : 0.0f) {}
};

// Probabilities and loss of a lane's pixel.
template <int kMost>
struct FewTerms {
  float exponentials[kMost];  // probabilities divided by `inverse`
  float inverse;              // reciprocal of the sum of exponentials
  float own;                  // the probability of the pixel's own class
  float loss;
  float slope;  // derivative of the loss with respect to a logit, over (probability - share)
  bool valid;   // whether the label is a class

  template <typename T>
  __device__ __forceinline__ FewTerms(const ImageArgs& args, const T* row, const Truth& truth) {
    const auto logit = [&](int c) {
      float value[1];
      unpack(load_vector<T, 1>(row + c), value);
      return truth.counts ? value[0] : 0.0f;
    };
    float most = -INFINITY;
    if (kMost * sizeof(T) <= 16 && args.classes == kMost) {
      constexpr int kWhole = kMost * sizeof(T) <= 16 ? kMost : 1;
      float values[kWhole];
      unpack(load_vector<T, kWhole>(row), values);
#pragma unroll
      for (int c = 0; c < kWhole; ++c) exponentials[c] = truth.counts ? values[c] : 0.0f;
    } else {
#pragma unroll
      for (int c = 0; c < kMost; ++c) exponentials[c] = c < args.classes ? logit(c) : -INFINITY;
    }
#pragma unroll
    for (int c = 0; c < kMost; ++c) most = fmaxf(most, exponentials[c]);
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kMost; ++c) {
      // Classes beyond the last one get exp2(-inf) = 0. Their logits of -inf would give NaN if all
      // logits of the pixel are -inf.
      const float distance = c < args.classes ? exponentials[c] - most : -INFINITY;
      exponentials[c] = exp2_fast(distance * kLog2e);
      sum += exponentials[c];
    }
    valid = truth.label >= 0 && truth.label < args.classes;
    const float picked = valid ? logit(truth.label) - most : nanf("");
    inverse = reciprocal(sum);
    own = valid ? exp2_fast(picked * kLog2e) * inverse : 0.0f;
    const float cross_entropy = logf(sum) - picked;
    loss = cross_entropy;
    slope = 1.0f;
    const float gamma = args.focal_gamma;
    if (gamma != 0.0f) {
      const float miss = -expm1f(-cross_entropy);
      const float factor = power(miss, gamma);
      loss = miss == 0.0f ? 0.0f : factor * cross_entropy;
      slope = factor;
      if (miss != 0.0f) {
        slope += gamma * power(miss, gamma - 1.0f) * (1.0f - miss) * cross_entropy;
      }
    }
  }
};

template <typename T, int kMost>
__global__ void __launch_bounds__(kFewThreads) few_sums(const __grid_constant__ ImageArgs args) {
  extern __shared__ __align__(16) char shared[];
  constexpr int kWarps = kFewThreads / kWarpSize;
  const Rows rows(args.classes, sizeof(T));
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  constexpr int kTurn = kPixels<kMost>, kWarpPixels = kTurn * kWarpSize;
  const int stage = kTurn * rows.bytes();
  char* const stages = shared + warp * 2 * stage;
  // For each label, a thread's sums over the pixels with that label: the label's probability times
  // the weight, and the weight.
  float2* const places = reinterpret_cast<float2*>(shared + kWarps * 2 * stage);
  float2* const own = places + threadIdx.x;
  for (int c = 0; c < args.classes; ++c) own[c * kFewThreads] = make_float2(0.0f, 0.0f);
  float total = 0.0f, losses = 0.0f, predicted[kMost] = {};

  const int64_t start = blockIdx.y * args.pixels;
  const int64_t step = int64_t{gridDim.x} * kWarps * kWarpPixels;
  // First pixel of the warp.
  int64_t pixel = (int64_t{blockIdx.x} * kWarps + warp) * kWarpPixels;
  TruthBits next[kTurn];
  const auto load = [&](int64_t first, char* to) {
    const int64_t pixels = args.pixels - first;
    if (pixels > 0) {
      load_rows<T>(args, rows, to, start + first,
                   static_cast<int>(pixels < kWarpPixels ? pixels : kWarpPixels));
    }
    async_copies_commit();
#pragma unroll
    for (int i = 0; i < kTurn; ++i) {
      const int own_pixel = i * kWarpSize + lane;
      next[i] = TruthBits(args, start + first + own_pixel, own_pixel < pixels);
    }
  };
  load(pixel, stages);
  for (int turn = 0; pixel < args.pixels; ++turn, pixel += step) {
    TruthBits bits[kTurn];
#pragma unroll
    for (int i = 0; i < kTurn; ++i) bits[i] = next[i];
    load(pixel + step, stages + (turn + 1) % 2 * stage);
    async_copies_wait(1);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kTurn; ++i) {
      const Truth truth(args, bits[i]);
      const char* const row = stages + turn % 2 * stage + (i * kWarpSize + lane) * rows.pitch;
      const FewTerms<kMost> terms(args, reinterpret_cast<const T*>(row), truth);
      // Ignored pixels add nothing, nor do lanes beyond the image, whose rows are
      // arbitrary.
      if (!truth.counts) continue;
      total += truth.weight;
      losses += truth.weight * terms.loss;
      const float factor = truth.weight * terms.inverse;
#pragma unroll
      for (int c = 0; c < kMost; ++c) predicted[c] += factor * terms.exponentials[c];
      if (terms.valid) {
        float2& sum = own[truth.label * kFewThreads];
        sum.x += truth.weight * terms.own;
        sum.y += truth.weight;
      }
    }
    __syncwarp();
  }

  // After this barrier no warp reads logits, so their memory can hold the sums of the warps.
  __syncthreads();
  auto& of_warps = *reinterpret_cast<float (*)[kWarps][kOverall + kMost]>(shared);
  total = sum_over_lanes<kWarpSize>(total);
  losses = sum_over_lanes<kWarpSize>(losses);
#pragma unroll
  for (float& sum : predicted) sum = sum_over_lanes<kWarpSize>(sum);
  if (lane == 0) {
    of_warps[warp][0] = total;
    of_warps[warp][1] = losses;
#pragma unroll
    for (int c = 0; c < kMost; ++c) of_warps[warp][kOverall + c] = predicted[c];
  }
  __syncthreads();
  const int all = kOverall + 3 * args.classes;
  float* const out = args.partials + (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * all;
  if (threadIdx.x < kOverall + args.classes) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += of_warps[i][threadIdx.x];
    out[threadIdx.x < kOverall ? threadIdx.x : threadIdx.x + args.classes] = sum;
  }
  for (int c = warp; c < args.classes; c += kWarps) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const float2 part = places[c * kFewThreads + i * kWarpSize + lane];
      sum = make_float2(sum.x + part.x, sum.y + part.y);
    }
    sum.x = sum_over_lanes<kWarpSize>(sum.x);
    sum.y = sum_over_lanes<kWarpSize>(sum.y);
    if (lane == 0) {
      out[kOverall + c] = sum.x;
      out[kOverall + 2 * args.classes + c] = sum.y;
    }
  }
}

template <typename T, int kMost>
__global__ void __launch_bounds__(kFewThreads)
    few_gradient(const __grid_constant__ ImageArgs args) {
  extern __shared__ __align__(16) char shared[];
  __shared__ float of_overlap[kMost], of_predicted[kMost];
  const Rows rows(args.classes, sizeof(T));
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  constexpr int kTurn = kPixels<kMost>, kWarpPixels = kTurn * kWarpSize;
  constexpr int kTurns = kUnroll / kTurn;
  const int stage = kTurn * rows.bytes();
  char* const stages = shared + warp * 2 * stage;
  const float* const cotangents =
      args.cotangents + int64_t{blockIdx.y} * (kOverall + 3 * args.classes);
  const int64_t start = blockIdx.y * args.pixels;
  // A warp's pixels are consecutive.
  const int64_t begin =
      (int64_t{blockIdx.x} * (kFewThreads / kWarpSize) + warp) * (kTurns * kWarpPixels);
  const auto pixels_of = [&](int turn) {
    const int64_t pixels = args.pixels - begin - turn * kWarpPixels;
    return static_cast<int>(max(int64_t{0}, min(pixels, int64_t{kWarpPixels})));
  };
  TruthBits next[kTurn];
  const auto load = [&](int turn) {
    const int pixels = turn < kTurns ? pixels_of(turn) : 0;
    const int64_t first = start + begin + turn * kWarpPixels;
    if (pixels > 0) load_rows<T>(args, rows, stages + turn % 2 * stage, first, pixels);
    async_copies_commit();
#pragma unroll
    for (int i = 0; i < kTurn; ++i) {
      const int own_pixel = i * kWarpSize + lane;
      next[i] = TruthBits(args, first + own_pixel, own_pixel < pixels);
    }
  };
  load(0);
  if (threadIdx.x < kMost) {
    const int c = min(static_cast<int>(threadIdx.x), args.classes - 1);
    of_overlap[threadIdx.x] = cotangents[kOverall + c];
    of_predicted[threadIdx.x] = cotangents[kOverall + args.classes + c];
  }
  __syncthreads();
  const float of_loss = cotangents[1];
  for (int turn = 0; turn < kTurns; ++turn) {
    const int pixels = pixels_of(turn);
    if (pixels == 0) return;
    TruthBits bits[kTurn];
#pragma unroll
    for (int i = 0; i < kTurn; ++i) bits[i] = next[i];
    load(turn + 1);
    async_copies_wait(1);
    __syncwarp();
    char* const of_turn = stages + turn % 2 * stage;
#pragma unroll
    for (int i = 0; i < kTurn; ++i) {
      const Truth truth(args, bits[i]);
      const int own_pixel = i * kWarpSize + lane;
      T* const row = reinterpret_cast<T*>(of_turn + own_pixel * rows.pitch);
      const FewTerms<kMost> terms(args, row, truth);
      const int label = terms.valid ? truth.label : 0;
      // Classes beyond the last one have probability 0.
      float mean = of_overlap[label] * terms.own;
#pragma unroll
      for (int c = 0; c < kMost; ++c) {
        mean += of_predicted[c] * (terms.exponentials[c] * terms.inverse);
      }
      const float slope = of_loss * terms.slope;
      const auto store = [&](int c, float value) {
        const float gradient[1] = {truth.counts ? truth.weight * value : 0.0f};
        Vector<T, 1> packed;
        pack(gradient, packed);
        store_vector(row + c, packed);
      };
      if (own_pixel >= pixels) continue;
#pragma unroll
      for (int c = 0; c < kMost; ++c) {
        if (c >= args.classes) continue;
        store(c, terms.exponentials[c] * terms.inverse * (slope + of_predicted[c] - mean));
      }
      if (terms.valid) {
        const float pull = of_overlap[label] + of_predicted[label];
        store(label, slope * (terms.own - 1.0f) + terms.own * (pull - mean));
      }
    }
    __syncwarp();
    store_rows<T>(args, rows, of_turn, start + begin + turn * kWarpPixels, pixels);
    __syncwarp();
  }
}

// --- launch --------------------------------------------------------------------------------------

// Calls `f` with two compile-time constants: how many lanes share a pixel, and how many classes
// each of these lanes has.
template <typename F>
ffi::Error with_lanes(int classes, const F& f) {
  const auto call = [&](auto lanes, auto own) { return f(lanes, own); };
#define JAXFUSED_LANES(lanes, own) \
  call(std::integral_constant<int, lanes>{}, std::integral_constant<int, own>{})
  if (classes <= 32) return JAXFUSED_LANES(32, 1);
  if (classes <= 64) return JAXFUSED_LANES(32, 2);
  if (classes <= 128) return JAXFUSED_LANES(32, 4);
  return JAXFUSED_LANES(32, 8);
#undef JAXFUSED_LANES
}

// Calls `f` with the pixels of a vector, whether the loss is focal, and whether all pixels are
// counted with weight 1. Vectors longer than 1 need every image to start at a whole vector.
template <typename F>
ffi::Error with_mask(const ImageArgs& args, const F& f) {
  const bool aligned = args.pixels % kMaskPixels == 0 &&
                       are_aligned({args.logits, args.labels, args.weights, args.dlogits});
  constexpr auto kNo = std::false_type{};
  constexpr auto kYes = std::true_type{};
  const auto call = [&](auto vec) {
    return args.focal_gamma == 0.0f ? f(vec, kNo, kNo) : f(vec, kYes, kNo);
  };
  if (!aligned) return call(std::integral_constant<int, 1>{});
  constexpr auto kVector = std::integral_constant<int, kMaskPixels>{};
  const bool plain = args.weights == nullptr && !args.ignores && args.focal_gamma == 0.0f;
  return plain ? f(kVector, kNo, kYes) : call(kVector);
}

template <typename F>
ffi::Error with_few(int classes, const F& f) {
  if (classes <= 4) return f(std::integral_constant<int, 4>{});
  if (classes <= 8) return f(std::integral_constant<int, 8>{});
  if (classes <= 16) return f(std::integral_constant<int, 16>{});
  return f(std::integral_constant<int, kFewClasses>{});
}

template <typename T>
ffi::Error launch_few(void (*kernel)(ImageArgs), ImageArgs args, int pixels_of_lane, dim3 grid,
                      bool sums, cudaStream_t stream) {
  const Rows rows(args.classes, sizeof(T));
  args.wide = args.pixels * args.classes * static_cast<int64_t>(sizeof(T)) % 16 == 0 &&
              are_aligned({args.logits, args.dlogits});
  int shared = (kFewThreads / kWarpSize) * 2 * pixels_of_lane * rows.bytes();
  shared += sums ? kFewThreads * args.classes * static_cast<int>(sizeof(float2)) : 0;
  if (shared > 48 * 1024) {
    Device device;
    RETURN_IF_ERROR(current_device(&device));
    RETURN_IF_ERROR(allow_shared_memory(kernel, device));
  }
  return launch_kernel(kernel, args, {grid, kFewThreads, shared}, stream);
}

ffi::Error parse_images(const ffi::AnyBuffer& logits, const ffi::AnyBuffer& labels,
                        const ffi::AnyBuffer* weights, bool ignores, int64_t ignore_index,
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
      if (shape[2] != 1) {
        return ffi::Error::InvalidArgument("labels of classes must be int32 or uint8");
      }
      args->label_type = LabelType::kFloat32;
      break;
    default:
      return ffi::Error::InvalidArgument("labels must be int32, uint8, bool or float32");
  }
  if (weights != nullptr && !is_absent(*weights)) {
    RETURN_IF_ERROR(check_float32("weights", *weights, {shape[0], shape[1]}));
    args->weights = data_or_null<const float>(*weights);
  }
  if (!(focal_gamma >= 0.0f)) {
    return ffi::Error::InvalidArgument("focal_gamma must not be negative");
  }
  args->logits = logits.untyped_data();
  args->labels = labels.untyped_data();
  args->ignores = ignores;
  args->ignore_index = static_cast<int>(ignore_index);
  args->focal_gamma = focal_gamma;
  args->pixels = shape[1];
  args->classes = static_cast<int>(shape[2]);
  return ffi::Error::Success();
}

ffi::Error segmentation_forward(cudaStream_t stream, ffi::AnyBuffer logits, ffi::AnyBuffer labels,
                                ffi::AnyBuffer weights, ffi::Result<ffi::AnyBuffer> partials,
                                bool ignores, int64_t ignore_index, float focal_gamma,
                                int64_t cluster) {
  ImageArgs args = {};
  RETURN_IF_ERROR(
      parse_images(logits, labels, &weights, ignores, ignore_index, focal_gamma, &args));
  const auto shape = logits.dimensions();
  if (partials->dimensions().size() != 3 || partials->dimensions()[1] < 1) {
    return ffi::Error::InvalidArgument("partials must have axes images, blocks, sums");
  }
  const int64_t blocks = partials->dimensions()[1];
  RETURN_IF_ERROR(
      check_float32("partials", *partials, {shape[0], blocks, kOverall + 3 * shape[2]}));
  args.partials = static_cast<float*>(partials->untyped_data());
  if (is_absent(logits)) return ffi::Error::InvalidArgument("logits have no elements");
  if (cluster != 1 && !(cluster == kCluster && blocks == 1 && args.classes == 1)) {
    return ffi::Error::InvalidArgument("a cluster has 1 block, or " + std::to_string(kCluster) +
                                       " that have the whole of a mask");
  }
  args.cluster = static_cast<int>(cluster);
  const dim3 grid(static_cast<unsigned>(blocks * cluster), static_cast<unsigned>(shape[0]));
  return with_dtype(*dtype_of(logits), [&](auto type) {
    using T = decltype(type);
    if (args.classes == 1) {
      return with_mask(args, [&](auto vec, auto focal, auto plain) {
        return launch_kernel(mask_sums<T, vec(), focal(), plain()>, args,
                             {grid, kMaskSumsThreads, 0, args.cluster}, stream);
      });
    }
    if (args.classes <= kFewClasses) {
      return with_few(args.classes, [&](auto most) {
        return launch_few<T>(few_sums<T, most()>, args, kPixels<most()>, grid, true, stream);
      });
    }
    return with_lanes(args.classes, [&](auto lanes, auto own) {
      return launch_kernel(image_sums<T, lanes(), own()>, args, {grid, kThreads, 0}, stream);
    });
  });
}

ffi::Error segmentation_backward(cudaStream_t stream, ffi::AnyBuffer logits, ffi::AnyBuffer labels,
                                 ffi::AnyBuffer weights, ffi::AnyBuffer cotangents,
                                 ffi::Result<ffi::AnyBuffer> dlogits, bool ignores,
                                 int64_t ignore_index, float focal_gamma) {
  ImageArgs args = {};
  RETURN_IF_ERROR(
      parse_images(logits, labels, &weights, ignores, ignore_index, focal_gamma, &args));
  const auto shape = logits.dimensions();
  RETURN_IF_ERROR(check_float32("cotangents", cotangents, {shape[0], kOverall + 3 * shape[2]}));
  RETURN_IF_ERROR(check_shape("dlogits", *dlogits, {shape[0], shape[1], shape[2]}));
  RETURN_IF_ERROR(check_dtype("dlogits", *dlogits, logits.element_type()));
  args.cotangents = static_cast<const float*>(cotangents.untyped_data());
  args.dlogits = dlogits->untyped_data();
  if (is_absent(logits)) return ffi::Error::Success();
  const auto images = static_cast<unsigned>(shape[0]);
  return with_dtype(*dtype_of(logits), [&](auto type) {
    using T = decltype(type);
    if (args.classes == 1) {
      return with_mask(args, [&](auto vec, auto focal, auto plain) {
        const int blocks = divide_up(args.pixels, kMaskGradientThreads * vec());
        return launch_kernel(mask_gradient<T, vec(), focal(), plain()>, args,
                             {dim3(blocks, images), kMaskGradientThreads, 0}, stream);
      });
    }
    if (args.classes <= kFewClasses) {
      return with_few(args.classes, [&](auto most) {
        const int blocks = divide_up(args.pixels, kFewThreads * kUnroll);
        return launch_few<T>(few_gradient<T, most()>, args, kPixels<most()>, dim3(blocks, images),
                             false, stream);
      });
    }
    return with_lanes(args.classes, [&](auto lanes, auto own) {
      const int blocks = divide_up(args.pixels, kThreads / lanes() * kUnroll);
      return launch_kernel(image_gradient<T, lanes(), own()>, args,
                           {dim3(blocks, images), kThreads, 0}, stream);
    });
  });
}

ffi::Error segmentation_loss(cudaStream_t stream, ffi::AnyBuffer logits, ffi::AnyBuffer labels,
                             ffi::Result<ffi::AnyBuffer> losses,
                             ffi::Result<ffi::AnyBuffer> dlogits, bool ignores,
                             int64_t ignore_index, float focal_gamma, float cross_entropy_weight,
                             float dice_weight, float smooth, float tversky_alpha,
                             float tversky_beta, float tversky_rest, float scale) {
  ImageArgs args = {};
  RETURN_IF_ERROR(parse_images(logits, labels, nullptr, ignores, ignore_index, focal_gamma, &args));
  const auto shape = logits.dimensions();
  if (shape[2] != 1) {
    return ffi::Error::InvalidArgument("loss and gradient in one kernel are of masks alone");
  }
  RETURN_IF_ERROR(check_float32("losses", *losses, {shape[0]}));
  RETURN_IF_ERROR(check_shape("dlogits", *dlogits, {shape[0], shape[1], 1}));
  RETURN_IF_ERROR(check_dtype("dlogits", *dlogits, logits.element_type()));
  if (is_absent(logits)) return ffi::Error::InvalidArgument("logits have no elements");
  args.losses = static_cast<float*>(losses->untyped_data());
  args.dlogits = dlogits->untyped_data();
  args.loss = {cross_entropy_weight, dice_weight,  smooth, tversky_alpha,
               tversky_beta,         tversky_rest, scale};
  const dim3 grid(kCluster, static_cast<unsigned>(shape[0]));
  const Launch launch = {grid, kMaskSumsThreads, 0, kCluster};
  const auto run = [&](auto type) {
    using T = decltype(type);
    return with_mask(args, [&](auto vec, auto focal, auto plain) {
      if constexpr (plain()) {
        if (args.pixels <= 2 * kCluster * kMaskSumsThreads * vec()) {
          return launch_kernel(mask_loss<T, vec(), false, true, true>, args, launch, stream);
        }
      }
      return launch_kernel(mask_loss<T, vec(), focal(), plain(), false>, args, launch, stream);
    });
  };
  switch (*dtype_of(logits)) {
    case Dtype::kFloat32:
      return run(float{});
    case Dtype::kBfloat16:
      return run(__nv_bfloat16{});
    default:
      return ffi::Error::InvalidArgument(
          "the gradient in float16 is too small before it has been multiplied by its cotangent");
  }
}

}  // namespace

DEFINE_HANDLER(jaxfused_segmentation_loss, segmentation_loss,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // logits
                   .Arg<ffi::AnyBuffer>()  // labels
                   .Ret<ffi::AnyBuffer>()  // losses
                   .Ret<ffi::AnyBuffer>()  // dlogits
                   .Attr<bool>("ignores")
                   .Attr<int64_t>("ignore_index")
                   .Attr<float>("focal_gamma")
                   .Attr<float>("cross_entropy_weight")
                   .Attr<float>("dice_weight")
                   .Attr<float>("smooth")
                   .Attr<float>("tversky_alpha")
                   .Attr<float>("tversky_beta")
                   .Attr<float>("tversky_rest")
                   .Attr<float>("scale"));

DEFINE_HANDLER(jaxfused_segmentation_forward, segmentation_forward,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // logits
                   .Arg<ffi::AnyBuffer>()  // labels
                   .Arg<ffi::AnyBuffer>()  // weights
                   .Ret<ffi::AnyBuffer>()  // partials
                   .Attr<bool>("ignores")
                   .Attr<int64_t>("ignore_index")
                   .Attr<float>("focal_gamma")
                   .Attr<int64_t>("cluster"));

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
