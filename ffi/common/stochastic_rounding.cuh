// Rounding away from or towards 0 at random, with bits that depend on a seed, the step, the
// parameter and the element's index in the whole array. jaxfused/runtime/stochastic_rounding.py
// defines them.
#pragma once

#include <cstdint>

// Inputs of the random bits of one parameter on this device, computed by
// jaxfused/ops/optimizer/optimizer_step.py.
struct alignas(16) LeafRandom {
  uint2 seeds[3];  // seeds of the parameter and the moments
  // An element's index in the whole array is base + l + sum over i of l / chunks[i] * skips[i],
  // where l is its index on this device.
  uint32_t base;
  uint32_t chunks[3];  // 0: no further chunks
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

__device__ __forceinline__ uint32_t halves_mixed(uint32_t x) { return x ^ (x >> 16); }

__device__ __forceinline__ uint32_t products_mixed(uint32_t x, uint32_t tweak) {
  x *= 0x85EBCA6Bu;
  x ^= (x >> 13) ^ tweak;
  return x * 0xC2B2AE35u;
}

__device__ __forceinline__ uint32_t random_word(uint2 seeds, uint32_t pair) {
  return halves_mixed(products_mixed(halves_mixed(seeds.x ^ pair), seeds.y));
}

// Sets the upper halves of random_word for kCount indices, a power of two, from `first` on. The
// lower halves differ from random_word's.
template <int kCount>
__device__ __forceinline__ void random_upper_halves(uint2 seeds, uint32_t first,
                                                    uint32_t (&words)[kCount]) {
  // random_word's last halves_mixed changes lower halves only. From a multiple of kCount on,
  // indices differ in their lowest bits alone, and the first halves_mixed does not change these
  // bits, so that one call of it serves all indices.
  if (first % kCount == 0) {
    const uint32_t mixed = halves_mixed(seeds.x ^ first);
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = products_mixed(mixed ^ i, seeds.y);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      words[i] = products_mixed(halves_mixed(seeds.x ^ (first + i)), seeds.y);
    }
  }
}

// Returns the 16 random bits of one value: a half of the word that two adjacent values share. It is
// not inlined: it is rarely called, and its divisions take registers.
static __device__ __noinline__ uint32_t random_half(const LeafRandom& random, int stream,
                                                    int64_t local) {
  const uint32_t index = random.index(local);
  const uint32_t word = random_word(random.seeds[stream], index / 2);
  return index % 2 == 0 ? word & 0xFFFFu : word >> 16;
}

// Sets 16 random bits for each of kCount adjacent values, from index `local` on.
template <int kCount>
__device__ __forceinline__ void random_halves(const LeafRandom& random, int stream, int64_t local,
                                              uint32_t (&halves)[kCount]) {
  const uint32_t first = __ldg(&random.base) + static_cast<uint32_t>(local);
  if (kCount % 2 == 0 && __ldg(&random.chunks[0]) == 0 && first % 2 == 0) {
    const uint2 seeds = __ldg(&random.seeds[stream]);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const uint32_t word = random_word(seeds, first / 2 + i);
      halves[2 * i] = word & 0xFFFFu;
      halves[kCount == 1 ? 0 : 2 * i + 1] = word >> 16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) halves[i] = random_half(random, stream, local + i);
  }
}

// Rounds values to bfloat16 numbers: away from 0 with the probability (lower 16 bits, which are cut
// off) / 2^16, else towards 0.
//
// These bits are 0 in an infinity. The NaN of arithmetic, 0x7FFFFFFF, has its lower half cleared
// first, so that nothing is carried into the upper one.
template <int kCount>
__device__ __forceinline__ void round_stochastically(const LeafRandom& random, int stream,
                                                     int64_t local, float (&values)[kCount]) {
  uint32_t halves[kCount];
  random_halves(random, stream, local, halves);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int bits = min(__float_as_int(values[i]), 0x7FFF0000);
    values[i] = __uint_as_float((static_cast<uint32_t>(bits) + halves[i]) & 0xFFFF0000u);
  }
}
