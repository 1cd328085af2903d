// The sum of the weights of a row's words, and the order in which the words stand.
#pragma once

#include <cfloat>

#include "common/mma.cuh"

constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float exp_fast(float x) { return exp2_fast(x * kLog2e); }

// The sum of exp((logit - maximum) * inverse_temperature).
struct RowWeight {
  float maximum = -FLT_MAX;  // not -inf, as its distance from a logit of -inf would be NaN
  float weight = 0.0f;

  // Makes the weight relative to a maximum that is not smaller. Returns what exponents change by.
  __device__ __forceinline__ float raise(float to, float inverse_temperature) {
    const float distance = (maximum - to) * inverse_temperature;
    weight *= exp_fast(distance);
    maximum = to;
    return distance;
  }
};

// The logit and the index of a word, by which words are ordered.
struct Place {
  float logit;
  int word;

  // Whether another word stands before this one.
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
