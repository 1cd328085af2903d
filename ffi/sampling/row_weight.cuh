// The sum of the weights exp(logit) of a row's words, and the order of words by falling logit.
#pragma once

#include <cfloat>

#include "common/mma.cuh"

constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float exp_fast(float x) { return exp2_fast(x * kLog2e); }

// Sum over words of exp((logit - maximum) * inverse_temperature), and the maximum.
struct RowWeight {
  float maximum = -FLT_MAX;  // not -inf, as its distance from a logit of -inf would be NaN
  float weight = 0.0f;

  // Makes the weight relative to `to`, which is no smaller maximum; returns the change of the
  // exponents.
  __device__ __forceinline__ float raise(float to, float inverse_temperature) {
    const float distance = (maximum - to) * inverse_temperature;
    weight *= exp_fast(distance);
    maximum = to;
    return distance;
  }
};

// Position of a word in the order of words: larger logits first, then smaller indices.
struct Place {
  float logit;
  int word;

  // Whether another word comes before this one in that order.
  __device__ __forceinline__ bool is_after(float other_logit, int other_word) const {
    return other_logit > logit || (other_logit == logit && other_word < word);
  }
};

template <int kVec>
__device__ __forceinline__ float largest_of(const float (&values)[kVec]) {
  float most = values[0];
#pragma unroll
  for (int i = 1; i < kVec; ++i) most = fmaxf(most, values[i]);
  return most;
}
