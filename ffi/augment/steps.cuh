// The pointwise steps of a pass. A step is data, [operation, values...], so that all threads of a
// block take the same branches; each is applied to several pixels of a thread at a time.
#pragma once

#include "augment/pass.cuh"

// Operations, with the numbers of `Op` in steps_xla.py.
enum Operation {
  kIdentity = 0,
  kBrightness = 1,
  kContrast = 2,
  kSaturation = 3,
  kHue = 4,
  kGamma = 5,
  kPosterize = 6,
  kSolarize = 7,
  kInvert = 8,
  kAutocontrast = 9,
  kEqualize = 10,
  kErase = 11,
  kNormalize = 12,
};

// Statistics of a whole image, computed by image_pass_cuda.py: the mean of gray, the smallest and
// the largest values of three channels, and a table of new levels for each channel.
struct Statistics {
  const float* values;  // kSums values in shared memory
  const float* table;   // new levels [3, 256], or nullptr if no step equalizes

  __device__ __forceinline__ float pivot() const { return values[0]; }
  __device__ __forceinline__ float low(int channel) const { return values[1 + channel]; }
  __device__ __forceinline__ float high(int channel) const { return values[4 + channel]; }
  __device__ __forceinline__ float equalized(int channel, float level) const {
    if (table == nullptr) return level * (1.0f / 255.0f);
    return __ldg(table + 256 * channel + static_cast<int>(level));
  }
};

// Whether an operation depends on all pixels of an image. A pass has at most one such step.
__device__ __forceinline__ bool is_statistical(int operation) {
  return operation == kContrast || operation == kAutocontrast || operation == kEqualize;
}

// Clips a value to 0 .. 1. A NaN stays a NaN unless values are known to be finite.
template <bool kFinite = false>
__device__ __forceinline__ float clipped(float value) {
  if constexpr (kFinite) return __saturatef(value);
  return value < 0.0f ? 0.0f : value > 1.0f ? 1.0f : value;
}

__device__ __forceinline__ float level_of(float value) { return rintf(clipped(value) * 255.0f); }

template <int kChannels>
__device__ __forceinline__ float gray(const float (&v)[kChannels]) {
  if constexpr (kChannels == 1) {
    return v[0];
  } else {
    return 0.299f * v[0] + 0.587f * v[1] + 0.114f * v[2];
  }
}

// Computes a power, 0 for values below 0. It is not inlined, because it is rare and takes many
// registers.
static __device__ __noinline__ float power(float value, float exponent) {
  return value <= 0.0f ? 0.0f : powf(value, exponent);
}

// Rotates a pixel's hue, as in HSV; the saturation cancels and is not computed.
template <bool kFinite, int kChannels>
__device__ __forceinline__ void turn_hue(float turns, float (&v)[kChannels]) {
  if constexpr (kChannels > 1) {
    const float largest = fmaxf(v[0], fmaxf(v[1], v[2]));
    const float smallest = fminf(v[0], fminf(v[1], v[2]));
    const float chroma = largest - smallest;
    // The reciprocal of a still smaller chroma may be infinite.
    const float inverse = chroma > 1e-35f ? __fdividef(1.0f, chroma) : 1.0f;
    const bool is_red = largest == v[0], is_green = largest == v[1];
    const float from = is_red ? v[1] : is_green ? v[2] : v[0];
    const float to = is_red ? v[2] : is_green ? v[0] : v[1];
    // Hue in sixths of a turn, from red (0) over green (2) to blue (4).
    float hue = (from - to) * inverse + (6.0f * turns + (is_red ? 0.0f : is_green ? 2.0f : 4.0f));
    hue -= 6.0f * floorf(hue * (1.0f / 6.0f));
    v[0] = smallest + chroma * clipped<kFinite>(fabsf(hue - 3.0f) - 1.0f);
    v[1] = smallest + chroma * clipped<kFinite>(2.0f - fabsf(hue - 2.0f));
    v[2] = smallest + chroma * clipped<kFinite>(2.0f - fabsf(hue - 4.0f));
  }
}

// Positions in the result of a thread's pixels.
struct Spots {
  int first_row, rows_apart, first_column;

  __device__ __forceinline__ int row(int i) const { return first_row + i / kPixels * rows_apart; }
  __device__ __forceinline__ int column(int i) const { return first_column + i % kPixels; }
};

// Applies a step to a thread's pixels.
template <bool kFinite, typename Where, int kChannels>
__device__ __forceinline__ void apply(int operation, const float* step,
                                      const Statistics& statistics, const Where& where,
                                      float (&pixels)[kHeld][kChannels]) {
  constexpr int kColours = kChannels == 4 ? 3 : kChannels;  // the fourth channel is opacity
  const float amount = step[1];
  const auto on_colours = [&](auto f) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
#pragma unroll
      for (int c = 0; c < kColours; ++c) pixels[i][c] = f(pixels[i][c]);
    }
  };
  switch (operation) {
    case kBrightness:
      on_colours([&](float v) { return clipped<kFinite>(amount * v); });
      break;
    case kContrast: {
      const float other = (1.0f - amount) * statistics.pivot();
      on_colours([&](float v) { return clipped<kFinite>(amount * v + other); });
      break;
    }
    case kSaturation:
      if constexpr (kColours > 1) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          const float other = (1.0f - amount) * gray(pixels[i]);
#pragma unroll
          for (int c = 0; c < kColours; ++c) {
            pixels[i][c] = clipped<kFinite>(amount * pixels[i][c] + other);
          }
        }
      }
      break;
    case kHue:
#pragma unroll
      for (int i = 0; i < kHeld; ++i) turn_hue<kFinite>(amount, pixels[i]);
      break;
    case kGamma: {
      const float gain = step[2];
      on_colours([&](float v) { return clipped<kFinite>(gain * power(v, amount)); });
      break;
    }
    case kPosterize: {
      const float size = static_cast<float>(1 << (8 - static_cast<int>(amount)));
      const float inverse = 1.0f / size, scale = size * (1.0f / 255.0f);
      on_colours([&](float v) { return floorf(level_of(v) * inverse) * scale; });
      break;
    }
    case kSolarize:
      on_colours([&](float v) { return level_of(v) >= amount ? 1.0f - v : v; });
      break;
    case kInvert:
      on_colours([&](float v) { return 1.0f - v; });
      break;
    case kAutocontrast:
#pragma unroll
      for (int c = 0; c < kColours; ++c) {
        const float low = statistics.low(c), spread = statistics.high(c) - low;
        if (!(spread > 0.0f)) continue;
        const float inverse = 1.0f / spread;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          pixels[i][c] = clipped<kFinite>((pixels[i][c] - low) * inverse);
        }
      }
      break;
    case kEqualize:
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
#pragma unroll
        for (int c = 0; c < kColours; ++c) {
          pixels[i][c] = statistics.equalized(c, level_of(pixels[i][c]));
        }
      }
      break;
    case kErase:
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int row = where.row(i), column = where.column(i);
        if (row >= step[1] && row < step[3] && column >= step[2] && column < step[4]) {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) pixels[i][c] = step[5 + c];
        }
      }
      break;
    case kNormalize:
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const float scale = step[1 + c], offset = step[5 + c];
#pragma unroll
        for (int i = 0; i < kHeld; ++i) pixels[i][c] = pixels[i][c] * scale + offset;
      }
      break;
    default:
      break;
  }
}
