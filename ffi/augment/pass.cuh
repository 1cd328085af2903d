// Arguments of a pass over images, an image's map, and access to its pixels.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/rows.cuh"
#include "common/vector.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kTile = 32;   // rows and columns of a block's tile of the result
constexpr int kPixels = 4;  // pixels of a quad, adjacent in a row
constexpr int kQuads = kTile / kPixels;
constexpr int kHeld = 2 * kPixels;           // pixels of a thread, in two rows
constexpr int kBlocks = 8, kBlurBlocks = 5;  // resident blocks of a byte pass without, with a blur
constexpr int kMapSize =
    19;  // values of a map: matrix 9, window 4, radius 2, image size 2, result size 2
constexpr int kStepSize = 9;  // numbers of a step: an operation and 8 values
constexpr int kMaxSteps = 16;
constexpr int kSums = 7;
constexpr int kMaxBlur = 16;  // largest number of pixels on each side that a blur reaches
constexpr int kBlurWeights = 2 * kMaxBlur + 1;

enum Interpolation { kNearest = 0, kBilinear = 1, kBicubic = 2 };

enum class Type { kUint8, kFloat32, kBfloat16, kFloat16 };

// Sizes of the arrays in a block's shared memory, in words of 4 bytes.
struct Room {
  int box;     // pixels copied from the image
  int middle;  // values filtered along rows only
  int region;  // the result's values before the blur
  int table;   // weights of pixels along rows and columns
};

// Divisor of integers from 0 to 2^31 - 1; it multiplies and shifts instead of dividing.
class Divider {
 public:
  Divider() = default;
  explicit Divider(int divisor) : divisor_(divisor) {
    while ((int64_t{1} << shift_) < divisor) ++shift_;
    factor_ = static_cast<uint32_t>(((uint64_t{1} << (31 + shift_)) + divisor - 1) / divisor);
  }
  __host__ __device__ __forceinline__ int divisor() const { return divisor_; }
  __device__ __forceinline__ int quotient(int n) const {
    return static_cast<int>((uint64_t{static_cast<uint32_t>(n)} * factor_) >> (31 + shift_));
  }

 private:
  int divisor_ = 1, shift_ = 0;
  uint32_t factor_ = 0x80000000u;
};

struct Args {
  int height, width;            // size of the images
  int out_height, out_width;    // size of the results
  Divider tiles_across, tiles;  // tiles across a result, tiles of a result
  int steps;
  int steps_before;  // steps before the blur; all steps if there is none
  int interpolation;
  bool reads;  // whether images are resampled; if not, each pixel stays in its place
  // Whether pixels outside the map's window have weight 0; otherwise they have the colour `fill`.
  // If true, x depends on the result's column alone, and y on its row.
  bool drops;
  Type out_type;
  bool is_precise;     // whether interpolation weights are float32 rather than 15-bit integers
  int pixel_bytes;     // bytes of a result's pixel
  int unit;            // bytes of one store; a row of the result has a multiple of them
  float widest;        // upper limit of Map::radius, by which the interpolation kernel is stretched
  float fill[4];       // fill colour, in the units of the images' values
  bool fill_is_bytes;  // whether `fill` is whole numbers from 0 to 255
  uint32_t fill_word;  // `fill` as a pixel of bytes
  int taps;            // largest number of pixels along an axis that a value depends on
  int reach_x, reach_y;  // pixels that the blur reaches on each side
  Divider region_quads;  // quads in a line of a tile with the blur's margin
  bool sharpens;         // whether the image is blended with its blur, which sharpens edges
  Room room;
  int64_t bytes;   // bytes of all images
  bool has_words;  // whether each quad of an image's pixels starts at a multiple of 4 bytes
  const void* x;
  const float* maps;        // position maps, [images, kMapSize]
  const float* rows;        // operation and values of each step, [images, steps, kStepSize]
  const float* statistics;  // [images, statistics_size], or nullptr if no step needs statistics
  int statistics_size;
  const float* blurs;  // weights [images, 2 (reach_y + reach_x + 1)], factors [images, 1] or null
  void* y;             // [images, out_height, out_width, channels]
  // The sum of gray, and least and largest values of three channels, before the step that needs
  // statistics: [images, tiles, kSums], or nullptr.
  float* sums;
  int* counts;  // number of pixels of each level, [images, colours, 256], or nullptr
};

// An image's map, from positions in the result to those in the image, in shared memory.
struct Map {
  const float* values;

  __device__ float first(int axis) const { return values[9 + axis]; }
  __device__ float last(int axis) const { return values[11 + axis]; }
  __device__ float radius(int axis, float widest) const {
    return fminf(fmaxf(values[13 + axis], 1.0f), widest);
  }
  // Returns the image's size along x (0) or y (1).
  __device__ float source(int axis) const { return values[16 - axis]; }
  __device__ float result(int axis) const { return values[18 - axis]; }

  // Whether the map keeps parallel lines parallel.
  __device__ __forceinline__ bool is_affine() const {
    return values[6] == 0.0f && values[7] == 0.0f && values[8] == 1.0f;
  }

  // Computes where a pixel of the result lies in the image.
  __device__ __forceinline__ void move(int row, int column, float* x, float* y) const {
    if (is_affine()) {
      move_by(values, row, column, x, y);
    } else {
      const float2 place = move_in_perspective(values, row, column);
      *x = place.x;
      *y = place.y;
    }
  }

  static __device__ __forceinline__ void move_by(const float* matrix, int row, int column, float* x,
                                                 float* y) {
    const float u = static_cast<float>(column), v = static_cast<float>(row);
    *x = matrix[0] * u + (matrix[1] * v + matrix[2]);
    *y = matrix[3] * u + (matrix[4] * v + matrix[5]);
  }

  // Perspective is rare. Inlined, it would raise the registers of every pass.
  static __device__ __noinline__ float2 move_in_perspective(const float* matrix, int row,
                                                            int column) {
    float x, y;
    move_by(matrix, row, column, &x, &y);
    const float below = matrix[6] * column + (matrix[7] * row + matrix[8]);
    // Positions at or beyond the horizon of a perspective map lie outside of the image.
    if (!(below > 1e-6f)) return make_float2(-1e6f, -1e6f);
    return make_float2(x / below, y / below);
  }
};

template <typename T, int kChannels>
struct Image {
  const T* pixels;
  int width;

  // Adds `weight` times a pixel to `sums`, channel by channel.
  __device__ __forceinline__ void add(int row, int column, float weight,
                                      float (&sums)[kChannels]) const {
    const T* pixel = pixels + (int64_t{row} * width + column) * kChannels;
    if constexpr (std::is_same_v<T, uint8_t> && kChannels == 4) {
      const uchar4 p = *reinterpret_cast<const uchar4*>(pixel);
      sums[0] += weight * p.x;
      sums[1] += weight * p.y;
      sums[2] += weight * p.z;
      sums[3] += weight * p.w;
    } else {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) sums[c] += weight * as_float(pixel[c]);
    }
  }

  static __device__ __forceinline__ float as_float(uint8_t value) { return value; }
  static __device__ __forceinline__ float as_float(float value) { return value; }
  static __device__ __forceinline__ float as_float(__nv_bfloat16 value) {
    return __bfloat162float(value);
  }
  static __device__ __forceinline__ float as_float(__half value) { return __half2float(value); }
};

// Returns the interpolation kernel's value at `distance`, the distance from its centre in units of
// Map::radius.
__device__ __forceinline__ float kernel_at(float distance, int interpolation) {
  const float d = fabsf(distance);
  if (interpolation == kBilinear) return fmaxf(1.0f - d, 0.0f);
  if (d < 1.0f) return (1.5f * d - 2.5f) * d * d + 1.0f;
  return d < 2.0f ? ((-0.5f * d + 2.5f) * d - 4.0f) * d + 2.0f : 0.0f;
}

// Interpolation weights, along one axis, of the pixels around a position.
struct Axis {
  float place, inverse_radius, reach;
  float first, last, count;  // ends of the window, and length of the image
  int interpolation;
  bool drops;

  __device__ Axis(const Args& args, const Map& map, int axis, float position)
      : first(map.first(axis)),
        last(map.last(axis)),
        count(map.source(axis)),
        interpolation(args.interpolation),
        drops(args.drops) {
    const float radius = map.radius(axis, args.widest);
    inverse_radius = 1.0f / radius;
    reach = radius * (interpolation == kBicubic ? 2.0f : 1.0f);
    // Far outside the image all pixels are the fill colour, so clipping changes no result.
    place = fminf(fmaxf(position, -reach - 2.0f), count + reach + 1.0f);
  }

  // Returns a pixel's weight, or 0 outside the image or its window. Adds the weight to `total`,
  // except for pixels outside the window if `drops`.
  __device__ __forceinline__ float seen(float pixel, float* total) const {
    const float weight = kernel_at((pixel - place) * inverse_radius, interpolation);
    const bool in_window = pixel >= first && pixel <= last;
    const bool in_image = pixel >= 0.0f && pixel < count;
    if (in_window || !drops) *total += weight;
    return in_window && in_image ? weight : 0.0f;
  }
};
