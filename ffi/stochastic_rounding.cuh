// Rounding up or down at random, with bits that depend on a seed, the step, the leaf and the
// element's index in the whole array: jaxfused/semantics/stochastic_rounding.py states them.
#pragma once

#include <cstdint>

// What the random bits of one leaf on this device depend on; made in
// jaxfused/ops/optimizer_step.py.
struct alignas(16) LeafRandom {
  uint2 seeds[3];  // of the parameter and the moments
  // An element's index in the whole array is base + l + sum over i of l / chunks[i] * skips[i],
  // where l is its index on this device.
  uint32_t base;
  uint32_t chunks[3];  // 0 for none
  uint32_t skips[3];
  uint32_t unused[3];

  __device__ __forceinline__ uint32_t index(int64_t local) const {
    uint32_t index = base + static_cast<uint32_t>(local);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (chunks[i] == 0) break;
      index += static_cast<uint32_t>(local / chunks[i]) * skips[i];
    }
    return index;
  }
};
static_assert(sizeof(LeafRandom) == 64);

__device__ __forceinline__ uint32_t random_word(uint2 seeds, uint32_t pair) {
  uint32_t x = seeds.x ^ pair;
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= (x >> 13) ^ seeds.y;
  x *= 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// Sets 16 random bits for each of kCount neighbours, of which the first is number `local`.
template <int kCount>
__device__ __forceinline__ void random_halves(const LeafRandom& random, int stream, int64_t local,
                                              uint32_t (&halves)[kCount]) {
  const uint2 seeds = random.seeds[stream];
  const uint32_t first = random.index(local);
  if (kCount % 2 == 0 && random.chunks[0] == 0 && first % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const uint32_t word = random_word(seeds, first / 2 + i);
      halves[2 * i] = word & 0xFFFFu;
      halves[kCount == 1 ? 0 : 2 * i + 1] = word >> 16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t index = random.index(local + i);
      const uint32_t word = random_word(seeds, index / 2);
      halves[i] = index % 2 == 0 ? word & 0xFFFFu : word >> 16;
    }
  }
}

// Rounds finite values to ones that bfloat16 has: up with the probability of the bits cut off.
template <int kCount>
__device__ __forceinline__ void round_stochastically(const LeafRandom& random, int stream,
                                                     int64_t local, float (&values)[kCount]) {
  uint32_t halves[kCount];
  random_halves(random, stream, local, halves);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t bits = __float_as_uint(values[i]);
    if ((bits & 0x7F800000u) == 0x7F800000u) continue;
    values[i] = __uint_as_float((bits + halves[i]) & 0xFFFF0000u);
  }
}
