// Draws a token from each row of logits, as jaxfused/ops/sampling/sample_xla.py states it.
//
// A cluster of blocks reads a row once from memory and keeps it in shared memory. From the first
// words that arrive follows a score that about kExpected words (columns) of the whole row exceed.
// The first pass lists them, while the row arrives, and finds the largest logit and the sum of the
// weights. The best of the list is the token unless a filter leaves it out; then it is the best of
// those before it, in the order of falling logits, and so on. So the list gives the next words that
// may have to be tested. The second pass tests several of them at once: it finds how many words are
// before each and what they weigh. If the list is too long, or has no word that is wanted, another
// pass makes a new one. So the token does not depend on the list, nor on the order of its words.
// Nothing is sorted, and the row's words are never stored again.
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
constexpr int kNone = -1;  // token of a row whose logits are all -inf or include NaN
// Expected number of words in a list, which is Poisson distributed, and a list's capacity.
constexpr float kExpected = 16.0f;
constexpr int kMostListed = 128;
// Factor that makes up for rounding in weights and scores, where words are listed.
constexpr float kReachMargin = 1.0f + 0x1p-10f;
// Largest distance, in powers of two, between a row's largest weight and that of its first words,
// from which the first list's lowest score is computed.
constexpr float kMostRise = 1024.0f;
// Number of words that a pass tests, and of pivots that a counting pass compares logits with.
constexpr int kPivots = 3;

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

// Maps floats to integers of the same order; -0 becomes 0.
__device__ __forceinline__ int ordered(float x) {
  const int bits = __float_as_int(x + 0.0f);
  return bits ^ ((bits >> 31) & INT_MAX);
}

__device__ __forceinline__ float from_ordered(int x) {
  return __int_as_float(x ^ ((x >> 31) & INT_MAX));
}

// Returns a uniform number v from random bits; -log(-log(1 - v)) is then Gumbel noise.
__device__ __forceinline__ float uniform(uint32_t bits) {
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

  __device__ __forceinline__ bool exists() const { return word < INT_MAX; }

  __device__ __forceinline__ Place place() const { return {logit, word}; }

  __device__ __forceinline__ void join(const Best& other) {
    if (other.score > score || (other.score == score && other.word < word)) *this = other;
  }

  // Returns the best of the warp's lanes.
  __device__ __forceinline__ Best of_lanes() const {
    const uint32_t key = static_cast<uint32_t>(ordered(score)) ^ 0x80000000u;
    const uint32_t most = largest_of_warp(key);
    const uint32_t last = ~static_cast<uint32_t>(word);  // larger for an earlier word
    const uint32_t first = largest_of_warp(key == most ? last : 0);
    const uint32_t lane = threadIdx.x % kWarpSize;
    const uint32_t winner = largest_of_warp(key == most && last == first ? lane : 0);
    return {__shfl_sync(0xffffffffu, score, winner), static_cast<int>(~first),
            __shfl_sync(0xffffffffu, logit, winner)};
  }
};

// A block's part of the list of words, unordered. `count` includes words that did not fit.
struct List {
  Place words[kMostListed];
  int count;
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

// Number and weight of the words before each tested word.
struct Tested {
  Before words[kPivots];
};

struct Counts {
  int counts[kPivots] = {};
};

struct Filters {
  float share, least;
  int top_k;
};

// A row of logits, and the passes over it.
template <typename T, int kVec>
class Row {
 public:
  __device__ Row(const RowSlice<T, kVec>& slice, ClusterJoin& join, List* list, uint2 seeds,
                 float inverse_temperature)
      : slice_(slice),
        join_(join),
        list_(list),
        seeds_(seeds),
        inverse_temperature_(inverse_temperature),
        scale_(fminf(inverse_temperature * kLog2e, FLT_MAX)) {}

  // Makes the first pass; returns the sum of the weights: 0 if all logits are -inf, NaN if one is
  // NaN. With kLists, it lists words too.
  template <bool kLists>
  __device__ __forceinline__ float begin() {
    RowWeight first;
    float reach = 0.0f;
    if constexpr (kLists) {
      first = weight_of_first();
      const float share = first.weight * (static_cast<float>(slice_.features()) /
                                          static_cast<float>(slice_.first_columns()));
      if (share > 0.0f && share < INFINITY) reach = kExpected / share;
    }
    float reach_maximum = first.maximum, own_reach = reach * kReachMargin;
    const RowWeight sum = weight_of_row(
        slice_, join_, scale_, first.maximum,
        [&](int column, const float (&z)[kVec], const float (&weights)[kVec], float maximum) {
          if constexpr (kLists) {
            if (maximum > reach_maximum) {
              reach_maximum = maximum;
              own_reach = reach * kReachMargin * exp2_fast((maximum - first.maximum) * scale_);
            }
            list_vector(column, z, weights, own_reach);
          }
        });
    maximum_ = sum.maximum;
    weight_ = sum.weight;
    const float rise = maximum_ - first.maximum;
    if (reach > 0.0f && rise * scale_ < kMostRise) {
      lowest_ = -logf(reach) - rise * inverse_temperature_;
    }
    return weight_;
  }

  // Returns the first word with the largest logit.
  __device__ __forceinline__ int largest() {
    struct First {
      int word = INT_MAX;
    } first;
    slice_.template for_each<false>([&](int column, const float (&z)[kVec]) {
      if (largest_of(z) < maximum_) return;
#pragma unroll
      for (int i = kVec - 1; i >= 0; --i) {
        if (finite(z[i]) == maximum_) first.word = min(first.word, column + i);
      }
    });
    return join_(first,
                 [](First& mine, const First& other) { mine.word = min(mine.word, other.word); })
        .word;
  }

  // Returns the word with the highest score.
  __device__ __forceinline__ int best() {
    Best words[1];
    find_best({-INFINITY, INT_MAX}, weight_, -INFINITY, words);
    return words[0].word;
  }

  // Returns the word with the highest score of those that the filters keep.
  __device__ __forceinline__ int best_kept(const Filters& filters, int features) {
    const bool counts = filters.top_k < features;
    int low = ordered(-INFINITY);
    float kept_weight = counts && filters.share < 1.0f ? 0.0f : weight_;  // 0 until it is computed
    Place end = {-INFINITY, INT_MAX};  // the result comes before this one
    float weight_before = weight_;
    for (;;) {
      Best words[kPivots];
      find_best(end, weight_before, filters.least, words);
      const Tested tested = counts ? test<true>(words) : test<false>(words);
#pragma unroll
      for (int p = 0; p < kPivots; ++p) {
        const Best& word = words[p];
        if (!word.exists()) break;
        const Before& before = tested.words[p];
        // A word before this one weighs at least as much as it, so a sum of 0 means that there is
        // none.
        if (before.weight == 0.0f) return word.word;
        end = word.place();
        weight_before = before.weight;
        if (before.count >= filters.top_k) {
          low = max(low, ordered(word.logit));
          continue;
        }
        // The words that top-k keeps include this word and those before it, so they weigh at least
        // as much.
        if (before.weight < filters.share * (before.weight + weight(word.logit))) return word.word;
        if (kept_weight == 0.0f) {
          kept_weight = weight_of_top_k(filters.top_k, low, ordered(word.logit) + 1);
        }
        if (before.weight < filters.share * kept_weight) return word.word;
      }
    }
  }

 private:
  // Returns the weight of the words of the first turn, or of none if it is not in shared memory.
  __device__ __forceinline__ RowWeight weight_of_first() {
    RowWeight sum;
    if (slice_.first_columns() == 0) return sum;
    float z[kVec], weights[kVec];
    slice_.read_first(z);
    sum.add<false>(z, scale_, weights);
    return join_(sum, [&](RowWeight& mine, const RowWeight& other) { mine.join(other, scale_); });
  }

  // Finds the word before `end` with the highest score (words[0]), the best one before that one
  // (words[1]), and so on, as far as the list has them; words[0] always exists. The words before
  // `end` weigh `weight_before`. Only words whose exponents are at least `least` count.
  template <int kBests>
  __device__ __forceinline__ void find_best(Place end, float weight_before, float least,
                                            Best (&words)[kBests]) {
    best_of_list(end, lowest_, least, words);
    if (words[0].exists()) return;
    lowest_ = logf(weight_before * (1.0f / kExpected));
    list_words(fmaxf(least_logit(least), end.logit));
    best_of_list(end, lowest_, least, words);
    if (words[0].exists()) return;
    words[0] = best_before(end, least);
#pragma unroll
    for (int n = 1; n < kBests; ++n) words[n] = {};
  }

  // Returns a lower bound on the logits of words whose exponents are at least `least`.
  __device__ __forceinline__ float least_logit(float least) const {
    const float logit = maximum_ + (least - 0.1f) / inverse_temperature_;
    return fmaf(fabsf(logit), -0x1p-22f, logit);
  }

  // Lists all words with logits of at least `least_logit` whose scores exceed `lowest_`, and some
  // others.
  __device__ __forceinline__ void list_words(float least_logit) {
    join_.wait();  // until all blocks have read the previous list
    if (threadIdx.x == 0) list_->count = 0;
    __syncthreads();
    const float reach = kReachMargin * expf(-lowest_);
    slice_.template for_each<false>([&](int column, const float (&z)[kVec]) {
      if (largest_of(z) < least_logit) return;
      float weights[kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) weights[i] = z[i] < least_logit ? 0.0f : weight(z[i]);
      list_vector(column, z, weights, reach);
    });
    join_.wait();
  }

  // Lists the words of a vector whose scores can exceed log(weight / score's weight), and seldom
  // others. A word of weight w exceeds a score s only if its noise has v < -log(1 - v) < w exp(-s),
  // where w exp(-s) is its weight here times `reach`.
  __device__ __forceinline__ void list_vector(int column, const float (&z)[kVec],
                                              const float (&weights)[kVec], float reach) {
    uint32_t halves[kVec];
    random_upper_halves(seeds_, static_cast<uint32_t>(column), halves);
    bool are_listed[kVec];
    bool any = false;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      // The upper bits are a mantissa: 1 + v, of which the lower half of the bits is wrong.
      const float shifted = __uint_as_float(0x3f800000u + (halves[i] >> 9));
      are_listed[i] = shifted < fmaf(weights[i], reach, 1.0f + 0x1p-16f + 0x1p-22f);
      any = any || are_listed[i];
    }
    if (!any) return;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (!are_listed[i] || !(weights[i] > 0.0f)) continue;
      const int place = atomicAdd(&list_->count, 1);
      if (place < kMostListed) list_->words[place] = {finite(z[i]), column + i};
    }
  }

  // Returns the word with the highest score of those before `end`, with exponents of at least
  // `least`. It takes longer than finding it in the list.
  __device__ __forceinline__ Best best_before(Place end, float least) {
    const float least_of_logits = fmaxf(least_logit(least), end.logit);
    Best best;
    slice_.template for_each<false>([&](int column, const float (&z)[kVec]) {
      if (largest_of(z) < least_of_logits) return;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const Best word = scored({finite(z[i]), column + i}, end, -INFINITY, least);
        if (word.exists()) best.join(word);
      }
    });
    return join_(best, [](Best& mine, const Best& other) { mine.join(other); });
  }

  // Returns a word with its score, or none if it is not before `end`, its exponent is below `least`
  // or its score is not above `lowest`.
  __device__ __forceinline__ Best scored(Place place, Place end, float lowest, float least) const {
    const float z = place.logit;
    if (!(weight(z) > 0.0f && exponent(z) >= least && end.is_after(z, place.word))) return {};
    const uint32_t bits = random_word(seeds_, static_cast<uint32_t>(place.word));
    const float score = exponent(z) + gumbel(uniform(bits));
    if (!(score > lowest)) return {};
    return {score, place.word, z};
  }

  // Sets `words` as find_best does, from the list alone; none exist if the list has overflowed.
  template <int kBests>
  __device__ __forceinline__ void best_of_list(Place end, float lowest, float least,
                                               Best (&words)[kBests]) const {
    constexpr int kEach = kMostListed / kWarpSize;
    Best own[kEach];
    int total = 0;
#pragma unroll 1
    for (int rank = 0; rank < join_.blocks(); ++rank) {
      const int count =
          __float_as_int(join_.read(reinterpret_cast<const float*>(&list_->count), rank));
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int number = static_cast<int>(threadIdx.x) % kWarpSize + i * kWarpSize - total;
        if (number < 0 || number >= min(count, kMostListed)) continue;
        const Place& place = list_->words[number];
        own[i].logit = join_.read(&place.logit, rank);
        own[i].word = __float_as_int(join_.read(reinterpret_cast<const float*>(&place.word), rank));
      }
      total += count;
    }
#pragma unroll
    for (Best& word : own) {
      word =
          word.exists() && total <= kMostListed ? scored(word.place(), end, lowest, least) : Best{};
    }
#pragma unroll
    for (int n = 0; n < kBests; ++n) {
      Best best;
#pragma unroll
      for (const Best& word : own) {
        if (n > 0 &&
            !(words[n - 1].exists() && words[n - 1].place().is_after(word.logit, word.word))) {
          continue;
        }
        best.join(word);
      }
      words[n] = best.of_lanes();
    }
  }

  // Sums the weights of the words before each of `words` and, with kCounts, counts them. Each of
  // `words` comes before the previous one; for one that does not exist, results are meaningless.
  template <bool kCounts>
  __device__ __forceinline__ Tested test(const Best (&words)[kPivots]) {
    Tested tested;
    float above[kPivots];  // the next larger float after a word's logit
#pragma unroll
    for (int p = 0; p < kPivots; ++p) {
      // No logit is larger than FLT_MAX; comparisons with NaN are false.
      above[p] = words[p].logit < FLT_MAX ? from_ordered(ordered(words[p].logit) + 1) : NAN;
    }
    slice_.template for_each<false>([&](int column, const float (&z)[kVec]) {
      // Words before a tested one have a larger logit, or an equal one and a smaller index. In the
      // vector that holds the tested word only larger ones are counted; equal ones are added below.
      float least[kPivots];
#pragma unroll
      for (int p = 0; p < kPivots; ++p) {
        least[p] = column + kVec <= words[p].word ? words[p].logit : above[p];
      }
      bool any = false;
#pragma unroll
      for (int i = 0; i < kVec; ++i) any = any || z[i] >= least[0];
      if (!any) return;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float own = weight(finite(z[i]));
#pragma unroll
        for (int p = 0; p < kPivots; ++p) {
          if (z[i] >= least[p]) tested.words[p].add(own);
        }
      }
    });
#pragma unroll
    for (int p = 0; p < kPivots; ++p) {
      int first;
      float z[kVec];
      if (!words[p].exists() || !slice_.find(words[p].word, &first, z)) continue;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (first + i < words[p].word && finite(z[i]) == words[p].logit) {
          tested.words[p].add(weight(words[p].logit));
        }
      }
    }
    if constexpr (kCounts) {
      return join_(tested, [](Tested& mine, const Tested& other) {
#pragma unroll
        for (int p = 0; p < kPivots; ++p) mine.words[p].join(other.words[p]);
      });
    }
    struct Weights {
      float weights[kPivots] = {};
    } weights;
#pragma unroll
    for (int p = 0; p < kPivots; ++p) weights.weights[p] = tested.words[p].weight;
    weights = join_(weights, [](Weights& mine, const Weights& other) {
#pragma unroll
      for (int p = 0; p < kPivots; ++p) mine.weights[p] += other.weights[p];
    });
#pragma unroll
    for (int p = 0; p < kPivots; ++p) tested.words[p] = {0, weights.weights[p]};
    return tested;
  }

  // Returns the weight of the first `top_k` words. `low` and `high` are logits mapped by `ordered`:
  // fewer than top_k words are at least `high`, and top_k or more are at least `low`.
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
    // Words still missing from the top_k all have the logit `low`, and so the same weight.
    const float last = from_ordered(low);
    const auto missing = static_cast<float>(top_k - above.count);
    return missing > 0.0f ? fmaf(missing, weight(last), above.weight) : above.weight;
  }

  // Returns a logit's distance from the maximum, over the temperature.
  __device__ __forceinline__ float exponent(float z) const {
    return (z - maximum_) * inverse_temperature_;
  }

  __device__ __forceinline__ float weight(float z) const {
    return exp2_fast((z - maximum_) * scale_);
  }

  // Returns how many words have logits of at least each pivot, mapped by `ordered`.
  __device__ __forceinline__ Counts counts_from(const int (&pivots)[kPivots]) {
    Counts found;
    slice_.template for_each<false>([&](int, const float (&z)[kVec]) {
      if (ordered(finite(largest_of(z))) < pivots[0]) return;  // the smallest pivot
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int own = ordered(finite(z[i]));
#pragma unroll
        for (int p = 0; p < kPivots; ++p) found.counts[p] += own >= pivots[p] ? 1 : 0;
      }
    });
    return join_(found, [](Counts& mine, const Counts& other) {
#pragma unroll
      for (int p = 0; p < kPivots; ++p) mine.counts[p] += other.counts[p];
    });
  }

  // Returns the number and weight of the words with logits of at least `least`, mapped by
  // `ordered`.
  __device__ __forceinline__ Before words_from(int least) {
    Before words;
    slice_.template for_each<false>([&](int, const float (&z)[kVec]) {
      if (ordered(finite(largest_of(z))) < least) return;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (ordered(finite(z[i])) >= least) words.add(weight(finite(z[i])));
      }
    });
    return join_(words, [](Before& mine, const Before& other) { mine.join(other); });
  }

  const RowSlice<T, kVec>& slice_;
  ClusterJoin& join_;
  List* list_;  // of all words whose scores exceed lowest_, unless it has overflowed
  float lowest_ = INFINITY;
  uint2 seeds_;
  float inverse_temperature_;
  float scale_;
  float maximum_ = 0.0f;
  float weight_ = 0.0f;
};

struct Shared {
  float join[ClusterJoin::kFloats];
  alignas(16) List list;
};

template <typename T, int kVec>
__global__ void __launch_bounds__(kMaxBlockThreads) sample_rows(SampleArgs args) {
  extern __shared__ __align__(16) unsigned char bytes[];
  auto* const shared = reinterpret_cast<Shared*>(bytes);
  const int cluster = args.spread.cluster;
  const int64_t row = blockIdx.x / cluster;
  const int rank = cluster > 1 ? cluster_rank() : 0;
  ClusterJoin join(shared->join, cluster);
  const RowSlice<T, kVec> slice(args.logits, row, args.features, rank, args.spread, shared + 1);
  const float* const filters = args.filters + row * kFilters;
  const float inverse_temperature = filters[kInverseTemperature];
  const bool draws = inverse_temperature > 0.0f;
  if (threadIdx.x == 0) shared->list.count = 0;
  __syncthreads();
  Row<T, kVec> of_row(slice, join, &shared->list, args.seeds[row],
                      draws ? inverse_temperature : 1.0f);
  int token = kNone;
  const float weight = draws ? of_row.template begin<true>() : of_row.template begin<false>();
  if (weight > 0.0f) {  // false if the weight is NaN
    if (!draws) {
      token = of_row.largest();
    } else if (args.is_filtered) {
      token = of_row.best_kept({filters[kShare], filters[kLeast], static_cast<int>(filters[kTopK])},
                               args.features);
    } else {
      token = of_row.best();
    }
  }
  if (rank == 0 && threadIdx.x == 0) args.tokens[row] = token;
  join.finish();
}

struct Kernel {
  static constexpr int kSharedBytes = sizeof(Shared);

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
