// The sum of the weights of a row's words, and the order of words by falling logit.
#pragma once

#include <cfloat>

#include "common/mma.cuh"
#include "sampling/row_slice.cuh"

constexpr float kLog2e = 1.4426950408889634f;

// Returns a logit that is no NaN, with FLT_MAX for infinity: distances from it are numbers.
__device__ __forceinline__ float finite(float logit) { return fminf(logit, FLT_MAX); }

// Sum over words of 2^((logit - maximum) * scale), and the largest logit.
struct RowWeight {
  float maximum = -FLT_MAX;  // not -inf, as its distance from a logit of -inf would be NaN
  float weight = 0.0f;

  // Rescales the weight to the maximum `to`, which must not be below the present one.
  __device__ __forceinline__ void raise(float to, float scale) {
    weight *= exp2_fast((maximum - to) * scale);
    maximum = to;
  }

  // Adds logits, and sets their weights. An infinite one has an infinite weight, unless kClips.
  template <bool kClips, int kVec>
  __device__ __forceinline__ void add(const float (&logits)[kVec], float scale,
                                      float (&weights)[kVec]) {
    const float most = largest_of(logits);
    if (most > maximum) raise(finite(most), scale);  // a NaN leaves the maximum unchanged
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float z = logits[i];
      const float logit = kClips && z > FLT_MAX ? FLT_MAX : z;  // NaN stays NaN
      weights[i] = exp2_fast((logit - maximum) * scale);
      weight += weights[i];
    }
  }

  __device__ __forceinline__ void join(RowWeight other, float scale) {
    const float most = fmaxf(maximum, other.maximum);
    raise(most, scale);
    other.raise(most, scale);
    weight += other.weight;
  }
};

// Makes the first pass over a row, which yields its maximum and weight. Calls use(column, logits,
// weights, maximum) for each vector; the weights are relative to that maximum, at least `least`.
template <typename T, int kVec, typename Use>
__device__ __forceinline__ RowWeight weight_of_row(const RowSlice<T, kVec>& slice,
                                                   ClusterJoin& join, float scale, float least,
                                                   const Use& use) {
  const auto add = [&](RowWeight& mine, const RowWeight& other) { mine.join(other, scale); };
  float weights[kVec];
  RowWeight sum = {least};
  slice.template for_each<true>([&](int column, const float (&z)[kVec]) {
    sum.add<false>(z, scale, weights);
    use(column, z, weights, sum.maximum);
  });
  sum = join(sum, add);
  if (sum.weight == INFINITY) {
    sum = {};
    slice.template for_each<false>(
        [&](int, const float (&z)[kVec]) { sum.add<true>(z, scale, weights); });
    sum = join(sum, add);
  }
  return sum;
}

// Position of a word in the order of words: larger logits first, then smaller indices.
struct Place {
  float logit;
  int word;

  // Whether another word comes before this one in that order.
  __device__ __forceinline__ bool is_after(float other_logit, int other_word) const {
    return other_logit > logit || (other_logit == logit && other_word < word);
  }
};
