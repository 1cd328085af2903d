// Draws a token from each row of logits, as jaxfused/ops/sampling/sample_xla.py states it.
//
// A cluster of blocks reads a row once from memory and keeps it in shared memory. In this first
// pass it finds the largest logit, the sum of the weights, and the word with the highest score,
// which is the token unless a filter leaves it out. Each further pass tests one word: it finds of
// the words before it, in the order of falling logits, how many there are, what they weigh, and
// which has the highest score. Nothing is sorted, and the row's words are never stored again.
#include <cfloat>
#include <climits>
#include <cmath>

#include "common/approximate.cuh"
#include "common/handler.h"
#include "common/operands.h"
#include "common/stochastic_rounding.cuh"
#include "sampling/row_slice.cuh"
#include "sampling/row_weight.cuh"

namespace {

constexpr float kLn2 = 0.6931471805599453f;
constexpr int kNone = -1;  // the token of a row without a distribution

// Columns of `filters`, a row's sampling options in float32; kTopK is a whole number.
enum Filter { kInverseTemperature, kShare, kLeast, kTopK, kFilters };

struct SampleArgs {
  const void* logits;    // [rows, features]
  const uint2* seeds;    // [rows]
  const float* filters;  // [rows, kFilters]
  int* tokens;           // [rows]
  int features;
  bool is_filtered;
  RowSpread spread;
};

// Returns the v of a word's Gumbel noise -log(-log(1 - v)).
__device__ __forceinline__ float uniform(uint2 seeds, int word) {
  const uint32_t bits = random_word(seeds, static_cast<uint32_t>(word));
  return fminf(fmaf(static_cast<float>(bits), 0x1p-32f, 0x1p-33f), 1.0f - 0x1p-24f);
}

__device__ __forceinline__ float gumbel(float v) {
  // -log(1 - v) by its series where 1 - v would lose the bits of v.
  const float series = v * fmaf(v, fmaf(v, fmaf(v, fmaf(v, 0.2f, 0.25f), 1.0f / 3), 0.5f), 1.0f);
  const float exponential = v < 0x1p-5f ? series : -kLn2 * log2_fast(1.0f - v);
  return -kLn2 * log2_fast(exponential);
}

// Word with the highest score; of equal scores, the first.
struct Best {
  float score = -INFINITY;
  int word = INT_MAX;
  float logit = -INFINITY;

  __device__ __forceinline__ void join(const Best& other) {
    if (other.score > score || (other.score == score && other.word < word)) *this = other;
  }
};

// The race of a warp's words for the highest score. A word of weight w beats the score s only if
// its noise has v < -log(1 - v) < w exp(-s). The bound on v is tested first, so most words need no
// logarithm.
struct Race {
  Best best;
  float reach = INFINITY;  // exp(-s) for the best score s of the warp, rounded up

  __device__ __forceinline__ void enter(float logit, int word, float exponent, float weight,
                                        uint2 seeds) {
    const float v = uniform(seeds, word);
    // The comparison is false for a weight of 0, which never wins.
    if (!(v < weight * reach)) return;
    const float score = exponent + gumbel(v);
    if (score > best.score) best = {score, word, logit};
  }

  // Gives all lanes of a warp the highest score; their scores must be relative to one number.
  __device__ __forceinline__ void share() {
    float highest = best.score;
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, offset));
    }
    reach = exp_fast(-highest) * (1.0f + 0x1p-10f);
  }

  // Makes scores relative to a number smaller by `distance`.
  __device__ __forceinline__ void shift(float distance) {
    best.score += distance;
    reach *= exp_fast(-distance);
  }
};

// Results of the first pass; scores and weights are relative to the row's maximum.
struct Drawn {
  RowWeight sum;
  Best best;
};

struct Before {
  int count = 0;
  float weight = 0.0f;

  __device__ __forceinline__ void add(float of_word) {
    count += 1;
    weight += of_word;
  }

  __device__ __forceinline__ void join(const Before& other) {
    count += other.count;
    weight += other.weight;
  }
};

// The words before the tested word: their number and weight, and the best of them, which is tested
// next.
struct Tested {
  Before words;
  Best best;
};

// Pivots that each logit is compared with in one pass.
constexpr int kPivots = 3;

struct Counts {
  int counts[kPivots] = {};
};

// Maps floats to integers of the same order; -0 becomes 0.
__device__ __forceinline__ int ordered(float x) {
  const int bits = __float_as_int(x + 0.0f);
  return bits ^ ((bits >> 31) & INT_MAX);
}

// A row after its first pass.
template <typename T, int kVec>
class Row {
 public:
  __device__ Row(const RowSlice<T, kVec>& slice, ClusterJoin& join, uint2 seeds,
                 float inverse_temperature)
      : slice_(slice), join_(join), seeds_(seeds), inverse_temperature_(inverse_temperature) {}

  // Makes the first pass. At a temperature of 0, kDraws is false and the noise is left out.
  template <bool kDraws>
  __device__ __forceinline__ Drawn draw() {
    RowWeight sum;
    Race race;
    const auto raise = [&](float to) {
      // A NaN leaves the maximum unchanged.
      if (to > sum.maximum) race.shift(sum.raise(to, inverse_temperature_));
    };
    slice_.template for_each<true>(
        [&](int column, const float (&z)[kVec]) {
          raise(largest_of(z));
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            const float exponent = (z[i] - sum.maximum) * inverse_temperature_;
            const float own = exp_fast(exponent);
            sum.weight += own;
            if constexpr (kDraws) {
              race.enter(z[i], column + i, exponent, own, seeds_);
            } else if (exponent > race.best.score) {
              race.best = {exponent, column + i, z[i]};
            }
          }
        },
        [&] {
          if constexpr (kDraws) {
            float most = sum.maximum;
#pragma unroll
            for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
              most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
            }
            raise(most);
            race.share();
          }
        });
    const Drawn drawn = join_(Drawn{sum, race.best}, [&](Drawn& mine, Drawn other) {
      const float most = fmaxf(mine.sum.maximum, other.sum.maximum);
      mine.best.score += mine.sum.raise(most, inverse_temperature_);
      other.best.score += other.sum.raise(most, inverse_temperature_);
      mine.sum.weight += other.sum.weight;
      mine.best.join(other.best);
    });
    maximum_ = drawn.sum.maximum;
    return drawn;
  }

  // Returns the kept word with the highest score, from the word with the highest score of all.
  __device__ __forceinline__ Best first_kept(const Drawn& drawn, const float* filters,
                                             int features) {
    const float share = filters[kShare], least = filters[kLeast];
    const int top_k = static_cast<int>(filters[kTopK]);
    const bool both = top_k < features && share < 1.0f;
    int low = ordered(-INFINITY);
    float kept_weight = both ? 0.0f : drawn.sum.weight;  // 0 until it is computed
    Tested tested;
    for (Best best = drawn.best;; best = tested.best) {
      tested = test({best.logit, best.word});
      const Before& words = tested.words;
      if (words.count == 0) return best;
      if (words.count >= top_k) {
        low = max(low, ordered(best.logit));
        continue;
      }
      if (exponent(best.logit) < least) continue;
      // The words that top-k keeps include this word and those before it, so they weigh at least as
      // much.
      if (words.weight < share * (words.weight + weight(best.logit))) return best;
      if (kept_weight == 0.0f) kept_weight = weight_of_top_k(top_k, low, ordered(best.logit) + 1);
      if (words.weight < share * kept_weight) return best;
    }
  }

 private:
  __device__ __forceinline__ Tested test(const Place& place) {
    Before words;
    Race race;
    slice_.template for_each<false>(
        [&](int column, const float (&z)[kVec]) {
          if (largest_of(z) < place.logit) return;  // true of most vectors
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            if (!place.is_after(z[i], column + i)) continue;
            const float own = weight(z[i]);
            words.add(own);
            race.enter(z[i], column + i, exponent(z[i]), own, seeds_);
          }
        },
        [&] { race.share(); });
    return join_(Tested{words, race.best}, [](Tested& mine, const Tested& other) {
      mine.words.join(other.words);
      mine.best.join(other.best);
    });
  }

  // Returns the weight of the first `top_k` words. In the order of `ordered`, fewer than top_k
  // words are at least `high`, and top_k or more are at least `low`.
  __device__ __forceinline__ float weight_of_top_k(int top_k, int low, int high) {
    int count_high = 0;
    while (low + 1 < high && count_high != top_k) {
      const auto start = static_cast<uint32_t>(low);
      const uint32_t gap = static_cast<uint32_t>(high) - start;
      const uint32_t steps[kPivots] = {max(gap / 4, 1u), gap / 2, gap - gap / 4};
      int pivots[kPivots];
#pragma unroll
      for (int p = 0; p < kPivots; ++p) pivots[p] = static_cast<int>(start + steps[p]);
      const Counts found = counts_from(pivots);
#pragma unroll
      for (int p = 0; p < kPivots; ++p) {
        if (found.counts[p] > top_k) {
          low = pivots[p];
        } else if (pivots[p] < high) {
          high = pivots[p];
          count_high = found.counts[p];
        }
      }
    }
    const Before above = words_from(high);
    // Words still missing from the top_k have the last pivot's logit, and so its weight.
    const float last = __int_as_float(low ^ ((low >> 31) & INT_MAX));
    const auto missing = static_cast<float>(top_k - above.count);
    return missing > 0.0f ? fmaf(missing, weight(last), above.weight) : above.weight;
  }

  // Returns a logit's distance from the maximum, over the temperature.
  __device__ __forceinline__ float exponent(float z) const {
    return (z - maximum_) * inverse_temperature_;
  }

  __device__ __forceinline__ float weight(float z) const { return exp_fast(exponent(z)); }

  // Returns how many words are at least each of the pivots, in the order of `ordered`.
  __device__ __forceinline__ Counts counts_from(const int (&pivots)[kPivots]) {
    Counts found;
    slice_.template for_each<false>([&](int, const float (&z)[kVec]) {
      if (ordered(largest_of(z)) < pivots[0]) return;  // the smallest pivot
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int own = ordered(z[i]);
#pragma unroll
        for (int p = 0; p < kPivots; ++p) found.counts[p] += own >= pivots[p] ? 1 : 0;
      }
    });
    return join_(found, [](Counts& mine, const Counts& other) {
#pragma unroll
      for (int p = 0; p < kPivots; ++p) mine.counts[p] += other.counts[p];
    });
  }

  // Returns the number and the weight of the words that are at least `least`, in the order of
  // `ordered`.
  __device__ __forceinline__ Before words_from(int least) {
    Before words;
    slice_.template for_each<false>([&](int, const float (&z)[kVec]) {
      if (ordered(largest_of(z)) < least) return;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (ordered(z[i]) >= least) words.add(weight(z[i]));
      }
    });
    return join_(words, [](Before& mine, const Before& other) { mine.join(other); });
  }

  const RowSlice<T, kVec>& slice_;
  ClusterJoin& join_;
  uint2 seeds_;
  float inverse_temperature_;
  float maximum_ = 0.0f;
};

template <typename T, int kVec>
__global__ void __launch_bounds__(kMaxBlockThreads) sample_rows(SampleArgs args) {
  extern __shared__ __align__(16) float shared[];
  const int cluster = args.spread.cluster;
  const int64_t row = blockIdx.x / cluster;
  const int rank = cluster > 1 ? cluster_rank() : 0;
  ClusterJoin join(shared, cluster);
  const RowSlice<T, kVec> slice(args.logits, row, args.features, rank, args.spread,
                                shared + ClusterJoin::kFloats);
  const float* const filters = args.filters + row * kFilters;
  const float inverse_temperature = filters[kInverseTemperature];
  const bool draws = inverse_temperature > 0.0f;
  Row<T, kVec> of_row(slice, join, args.seeds[row], draws ? inverse_temperature : 1.0f);
  const Drawn drawn = draws ? of_row.template draw<true>() : of_row.template draw<false>();
  Best best = drawn.best;
  const bool exists = drawn.sum.weight > 0.0f;  // false if the weight is NaN
  if (args.is_filtered && draws && exists) best = of_row.first_kept(drawn, filters, args.features);
  if (rank == 0 && threadIdx.x == 0) args.tokens[row] = exists ? best.word : kNone;
  join.finish();
}

struct Kernel {
  template <typename T, int kVec>
  static auto of() {
    return sample_rows<T, kVec>;
  }
};

ffi::Error sample(cudaStream_t stream, ffi::AnyBuffer logits, ffi::AnyBuffer seeds,
                  ffi::AnyBuffer filters, ffi::Result<ffi::AnyBuffer> tokens, bool is_filtered) {
  RETURN_IF_ERROR(check_logits(logits));
  const int64_t rows = logits.dimensions()[0];
  RETURN_IF_ERROR(check_shape("seeds", seeds, {rows, 2}));
  RETURN_IF_ERROR(check_dtype("seeds", seeds, ffi::DataType::U32));
  RETURN_IF_ERROR(check_float32("filters", filters, {rows, kFilters}));
  RETURN_IF_ERROR(check_shape("tokens", *tokens, {rows}));
  RETURN_IF_ERROR(check_dtype("tokens", *tokens, ffi::DataType::S32));
  SampleArgs args = {};
  args.seeds = static_cast<const uint2*>(seeds.untyped_data());
  args.filters = static_cast<const float*>(filters.untyped_data());
  args.tokens = static_cast<int*>(tokens->untyped_data());
  args.is_filtered = is_filtered;
  return launch_over_rows<Kernel>(logits, args, stream);
}

}  // namespace

DEFINE_HANDLER(jaxfused_sample, sample,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // logits
                   .Arg<ffi::AnyBuffer>()  // seeds
                   .Arg<ffi::AnyBuffer>()  // filters
                   .Ret<ffi::AnyBuffer>()  // tokens
                   .Attr<bool>("is_filtered"),
               {ffi::Traits::kCmdBufferCompatible});
