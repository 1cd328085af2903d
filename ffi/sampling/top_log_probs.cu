// Computes the log-probabilities of one token and of the most likely ones of each row, as
// jaxfused/ops/sampling/top_log_probs_xla.py states them.
//
// A cluster of blocks keeps a row in shared memory, as in sample.cu. Each pass after the first
// finds the word that follows the last one found, in the order of falling logits.
#include <climits>
#include <cmath>

#include "common/handler.h"
#include "common/operands.h"
#include "sampling/row_slice.cuh"
#include "sampling/row_weight.cuh"

namespace {

constexpr int kNone = -1;  // token of a row whose logits are all -inf or include NaN

struct TopArgs {
  const void* logits;  // [rows, features]
  const int* tokens;   // [rows]
  float* chosen;       // [rows]
  float* top;          // [rows, count]
  int* top_tokens;     // [rows, count]
  int features;
  int count;
  RowSpread spread;
};

// The first of the words seen so far, in the order of falling logits.
struct First {
  Place place = {-INFINITY, INT_MAX};

  __device__ __forceinline__ void join(const First& other) {
    if (place.is_after(other.place.logit, other.place.word)) place = other.place;
  }
};

template <typename T, int kVec>
__global__ void __launch_bounds__(kMaxBlockThreads) top_log_probs_rows(TopArgs args) {
  extern __shared__ __align__(16) float shared[];
  const int cluster = args.spread.cluster;
  const int64_t row = blockIdx.x / cluster;
  const int rank = cluster > 1 ? cluster_rank() : 0;
  const bool writes = rank == 0 && threadIdx.x == 0;
  ClusterJoin join(shared, cluster);
  const RowSlice<T, kVec> slice(args.logits, row, args.features, rank, args.spread,
                                shared + ClusterJoin::kFloats);
  __syncthreads();
  const auto nothing = [](int, const float (&)[kVec], const float (&)[kVec], float) {};
  const RowWeight sum = weight_of_row(slice, join, kLog2e, RowWeight{}.maximum, nothing);
  const bool exists = sum.weight > 0.0f;  // false if the weight is NaN
  const float log_weight = exists ? logf(sum.weight) : NAN;
  if (writes) {
    const int token = args.tokens[row];
    float logit[1] = {NAN};
    if (token >= 0 && token < args.features) {
      load_as_float<T>(static_cast<const T*>(args.logits) + row * args.features, token, logit);
    }
    const float clipped = logit[0] > FLT_MAX ? FLT_MAX : logit[0];  // NaN stays NaN
    args.chosen[row] = clipped - sum.maximum - log_weight;
  }
  Place last = {INFINITY, -1};
  for (int n = 0; n < args.count; ++n) {
    First next;
    slice.template for_each<false>([&](int column, const float (&z)[kVec]) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        // Values beyond the row are padding, not words.
        const bool is_word = column + i >= 0 && column + i < args.features;
        const Place place = {finite(z[i]), column + i};
        if (is_word && place.is_after(last.logit, last.word)) next.join({place});
      }
    });
    next = join(next, [](First& mine, const First& other) { mine.join(other); });
    last = next.place;
    if (writes) {
      args.top[row * args.count + n] = last.logit - sum.maximum - log_weight;
      args.top_tokens[row * args.count + n] = exists ? last.word : kNone;
    }
  }
  join.finish();
}

struct Kernel {
  static constexpr int kSharedBytes = ClusterJoin::kFloats * int{sizeof(float)};

  template <typename T, int kVec>
  static auto of() {
    return top_log_probs_rows<T, kVec>;
  }
};

ffi::Error top_log_probs(cudaStream_t stream, ffi::AnyBuffer logits, ffi::AnyBuffer tokens,
                         ffi::Result<ffi::AnyBuffer> chosen, ffi::Result<ffi::AnyBuffer> top,
                         ffi::Result<ffi::AnyBuffer> top_tokens, int64_t count) {
  RETURN_IF_ERROR(check_logits(logits));
  const int64_t rows = logits.dimensions()[0], features = logits.dimensions()[1];
  if (count < 0 || count > features) {
    return ffi::Error::InvalidArgument("count must be 0 to the number of words");
  }
  RETURN_IF_ERROR(check_shape("tokens", tokens, {rows}));
  RETURN_IF_ERROR(check_dtype("tokens", tokens, ffi::DataType::S32));
  RETURN_IF_ERROR(check_float32("chosen", *chosen, {rows}));
  RETURN_IF_ERROR(check_float32("top", *top, {rows, count}));
  RETURN_IF_ERROR(check_shape("top_tokens", *top_tokens, {rows, count}));
  RETURN_IF_ERROR(check_dtype("top_tokens", *top_tokens, ffi::DataType::S32));
  TopArgs args = {};
  args.tokens = static_cast<const int*>(tokens.untyped_data());
  args.chosen = static_cast<float*>(chosen->untyped_data());
  args.top = static_cast<float*>(top->untyped_data());
  args.top_tokens = static_cast<int*>(top_tokens->untyped_data());
  args.count = static_cast<int>(count);
  return launch_over_rows<Kernel>(logits, args, stream);
}

}  // namespace

DEFINE_HANDLER(jaxfused_top_log_probs, top_log_probs,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // logits
                   .Arg<ffi::AnyBuffer>()  // tokens
                   .Ret<ffi::AnyBuffer>()  // chosen
                   .Ret<ffi::AnyBuffer>()  // top
                   .Ret<ffi::AnyBuffer>()  // top_tokens
                   .Attr<int64_t>("count"),
               {ffi::Traits::kCmdBufferCompatible});
