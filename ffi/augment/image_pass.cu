// One pass of augmentation: a resampling by a map of each image, then pointwise steps on colours.
//
// This is CUDA C because every value gathers pixels from addresses of its own, which the tiles of
// Mosaic GPU do not express. A warp has 32 adjacent pixels of a row of the result, one a lane,
// whose sources overlap in the caches, and writes them by vectors. An image's map and its steps are
// data: a block reads them once, and its threads take the same branches.

#include "common/handler.h"
#include "common/operands.h"
#include "common/vector.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTile = 32;  // rows and columns of the result that a block has
constexpr int kMapSize =
    19;  // matrix 9, window 4, radius 2, size of the image 2 and of the result 2
constexpr int kStepSize = 9;  // operation, values 8
constexpr int kMaxSteps = 16;

// The numbers are those of steps_xla.py.
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
  kErase = 11,
  kNormalize = 12,
};

enum Interpolation { kNearest = 0, kBilinear = 1, kBicubic = 2 };

enum class Type { kUint8, kFloat32, kBfloat16, kFloat16 };

struct Args {
  int height, width;          // of the images
  int out_height, out_width;  // of the results
  int tiles_across, tiles;    // tiles of a result
  int steps;
  int interpolation;
  bool reads;  // whether the images are resampled; else each pixel stays in its place
  bool drops;  // whether pixels outside the window do not count, or are `fill`
  Type out_type;
  float widest;   // largest radius of the kernel
  float fill[4];  // in the values of the images
  const void* x;
  const float* maps;    // [images, kMapSize]
  const float* rows;    // [images, steps, kStepSize]
  const float* pivots;  // [images], or nullptr where no step is a contrast
  void* y;              // [images, out_height, out_width, channels]
  float* sums;          // [images, tiles]: of gray before the contrast, instead of y
};

// --- reading -------------------------------------------------------------------------------------

// A map in shared memory.
struct Map {
  const float* values;

  __device__ float first(int axis) const { return values[9 + axis]; }
  __device__ float last(int axis) const { return values[11 + axis]; }
  __device__ float radius(int axis, float widest) const {
    return fminf(fmaxf(values[13 + axis], 1.0f), widest);
  }
  __device__ float source(int axis) const { return values[16 - axis]; }  // along x (0) or y (1)
  __device__ float result(int axis) const { return values[18 - axis]; }

  // Computes the position in the image of a pixel of the result.
  __device__ void move(int row, int column, float* x, float* y) const {
    const float u = static_cast<float>(column), v = static_cast<float>(row);
    *x = values[0] * u + values[1] * v + values[2];
    *y = values[3] * u + values[4] * v + values[5];
    if (values[6] == 0.0f && values[7] == 0.0f && values[8] == 1.0f) return;
    const float below = values[6] * u + values[7] * v + values[8];
    // Positions at the horizon of a perspective and beyond are nowhere in the image.
    *x = below > 1e-6f ? *x / below : -1e6f;
    *y = below > 1e-6f ? *y / below : -1e6f;
  }
};

template <typename T, int kChannels>
struct Image {
  const T* pixels;
  int width;

  // Adds `weight` times a pixel.
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

// Returns the kernel of an interpolation at a distance from its middle.
__device__ __forceinline__ float kernel_at(float distance, int interpolation) {
  const float d = fabsf(distance);
  if (interpolation == kBilinear) return fmaxf(1.0f - d, 0.0f);
  if (d < 1.0f) return (1.5f * d - 2.5f) * d * d + 1.0f;
  return d < 2.0f ? ((-0.5f * d + 2.5f) * d - 4.0f) * d + 2.0f : 0.0f;
}

// What the pixels along an axis count for a position: those inside the window, inside the image.
struct Axis {
  float place, inverse_radius, reach;
  float first, last, count;  // of the window, and the length of the image
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
    // Far from the image all is fill.
    place = fminf(fmaxf(position, -reach - 2.0f), count + reach + 1.0f);
  }

  // Returns a pixel's weight where it shows the image, and adds its weight to `total`.
  __device__ __forceinline__ float seen(float pixel, float* total) const {
    const float weight = kernel_at((pixel - place) * inverse_radius, interpolation);
    const bool in_window = pixel >= first && pixel <= last;
    const bool in_image = pixel >= 0.0f && pixel < count;
    if (in_window || !drops) *total += weight;
    return in_window && in_image ? weight : 0.0f;
  }
};

template <typename T, int kChannels>
__device__ __forceinline__ void fill_with(const Args& args, float share,
                                          float (&values)[kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) values[c] += share * args.fill[c];
}

// Reads an image by a kernel of any width.
template <typename T, int kChannels>
__device__ __forceinline__ void read_around(const Args& args, const Map& map,
                                            const Image<T, kChannels>& image, float x, float y,
                                            float (&values)[kChannels]) {
  const Axis across(args, map, 0, x), down(args, map, 1, y);
  const int left = static_cast<int>(ceilf(across.place - across.reach));
  const int right = static_cast<int>(floorf(across.place + across.reach));
  const int top = static_cast<int>(ceilf(down.place - down.reach));
  const int bottom = static_cast<int>(floorf(down.place + down.reach));
  float total_x = 0.0f, total_y = 0.0f, covered_x = 0.0f, covered_y = 0.0f;
  for (int column = left; column <= right; ++column) {
    covered_x += across.seen(static_cast<float>(column), &total_x);
  }
  for (int row = top; row <= bottom; ++row) {
    const float weight_y = down.seen(static_cast<float>(row), &total_y);
    covered_y += weight_y;
    if (weight_y == 0.0f) continue;
    for (int column = left; column <= right; ++column) {
      float ignored;
      const float weight = weight_y * across.seen(static_cast<float>(column), &ignored);
      if (weight != 0.0f) image.add(row, column, weight, values);
    }
  }
  const float total = total_x * total_y;
  const float inverse = total == 0.0f ? 1.0f : 1.0f / total;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) values[c] *= inverse;
  fill_with<T>(args, 1.0f - covered_x * covered_y * inverse, values);
}

// Reads the value of a pixel of the result; all values are 0 before.
template <typename T, int kChannels>
__device__ __forceinline__ void read(const Args& args, const Map& map, bool is_plain,
                                     const Image<T, kChannels>& image, int row, int column,
                                     float (&values)[kChannels]) {
  if (!args.reads) return image.add(row, column, 1.0f, values);
  float x, y;
  map.move(row, column, &x, &y);
  if (args.interpolation == kNearest) {
    x = floorf(x + 0.5f);
    y = floorf(y + 0.5f);
    const bool seen = x >= 0.0f && x < map.source(0) && y >= 0.0f && y < map.source(1);
    const bool shown = args.drops || (x >= map.first(0) && x <= map.last(0) && y >= map.first(1) &&
                                      y <= map.last(1));
    if (!seen || !shown) return fill_with<T>(args, 1.0f, values);
    return image.add(static_cast<int>(y), static_cast<int>(x), 1.0f, values);
  }
  if (is_plain) {
    // Four pixels, where all of them show the image.
    const float left = floorf(x), top = floorf(y);
    if (left >= fmaxf(map.first(0), 0.0f) && top >= fmaxf(map.first(1), 0.0f) &&
        left + 1.0f <= fminf(map.last(0), map.source(0) - 1.0f) &&
        top + 1.0f <= fminf(map.last(1), map.source(1) - 1.0f)) {
      const float right_share = x - left, lower_share = y - top;
      const int column_of = static_cast<int>(left), row_of = static_cast<int>(top);
      const float upper = 1.0f - lower_share, first = 1.0f - right_share;
      image.add(row_of, column_of, upper * first, values);
      image.add(row_of, column_of + 1, upper * right_share, values);
      image.add(row_of + 1, column_of, lower_share * first, values);
      image.add(row_of + 1, column_of + 1, lower_share * right_share, values);
      return;
    }
  }
  read_around(args, map, image, x, y, values);
}

// --- steps ---------------------------------------------------------------------------------------

// Returns a value in 0 to 1; a NaN stays one.
__device__ __forceinline__ float clipped(float value) {
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

// Turns the hue of a pixel: HSV without its saturation, which cancels.
template <int kChannels>
__device__ __forceinline__ void turn_hue(float turns, float (&v)[kChannels]) {
  if constexpr (kChannels > 1) {
    const float largest = fmaxf(v[0], fmaxf(v[1], v[2]));
    const float chroma = largest - fminf(v[0], fminf(v[1], v[2]));
    const float inverse = chroma > 0.0f ? 1.0f / chroma : 1.0f;
    const float sixths = largest == v[0]   ? (v[1] - v[2]) * inverse
                         : largest == v[1] ? 2.0f + (v[2] - v[0]) * inverse
                                           : 4.0f + (v[0] - v[1]) * inverse;
    const float turned = sixths + 6.0f * turns;
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      float k = turned + (5 - 2 * c);
      k -= 6.0f * floorf(k * (1.0f / 6.0f));
      v[c] = largest - chroma * clipped(fminf(k, 4.0f - k));
    }
  }
}

// Applies one step, [operation, values...], to a pixel.
template <int kChannels>
__device__ __forceinline__ void apply(const float* step, float pivot, int row, int column,
                                      float (&v)[kChannels]) {
  constexpr int kColours = kChannels == 4 ? 3 : kChannels;  // the fourth channel is opacity
  const float amount = step[1];
  switch (static_cast<int>(step[0])) {
    case kBrightness:
#pragma unroll
      for (int c = 0; c < kColours; ++c) v[c] = clipped(amount * v[c]);
      break;
    case kContrast:
    case kSaturation: {
      if (kColours == 1 && step[0] == kSaturation) break;
      const float other = (1.0f - amount) * (step[0] == kContrast ? pivot : gray(v));
#pragma unroll
      for (int c = 0; c < kColours; ++c) v[c] = clipped(amount * v[c] + other);
      break;
    }
    case kHue:
      turn_hue(amount, v);
      break;
    case kGamma:
#pragma unroll
      for (int c = 0; c < kColours; ++c) v[c] = clipped(step[2] * powf(v[c], amount));
      break;
    case kPosterize: {
      const float size = static_cast<float>(1 << (8 - static_cast<int>(amount)));
#pragma unroll
      for (int c = 0; c < kColours; ++c) v[c] = floorf(level_of(v[c]) / size) * size / 255.0f;
      break;
    }
    case kSolarize:
#pragma unroll
      for (int c = 0; c < kColours; ++c) v[c] = level_of(v[c]) >= amount ? 1.0f - v[c] : v[c];
      break;
    case kInvert:
#pragma unroll
      for (int c = 0; c < kColours; ++c) v[c] = 1.0f - v[c];
      break;
    case kErase:
      if (row >= step[1] && row < step[3] && column >= step[2] && column < step[4]) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) v[c] = step[5 + c];
      }
      break;
    case kNormalize:
#pragma unroll
      for (int c = 0; c < kChannels; ++c) v[c] = v[c] * step[1 + c] + step[5 + c];
      break;
    default:
      break;
  }
}

// --- writing -------------------------------------------------------------------------------------

__device__ __forceinline__ void convert(float value, uint8_t* out) {
  *out = static_cast<uint8_t>(level_of(value));
}
__device__ __forceinline__ void convert(float value, float* out) { *out = value; }
__device__ __forceinline__ void convert(float value, __nv_bfloat16* out) {
  *out = __float2bfloat16_rn(value);
}
__device__ __forceinline__ void convert(float value, __half* out) { *out = __float2half_rn(value); }

// Writes a warp's pixels, `count` of them, which are adjacent from y on.
template <typename Out, int kChannels>
__device__ __forceinline__ void write(void* y, int64_t first, int count,
                                      const float (&values)[kChannels], uint4* stage) {
  const int lane = threadIdx.x % 32;
  Out* staged = reinterpret_cast<Out*>(stage);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) convert(values[c], staged + lane * kChannels + c);
  __syncwarp();
  Out* out = static_cast<Out*>(y) + first;
  const int size = count * kChannels;
  const int bytes = size * static_cast<int>(sizeof(Out));
  if (bytes % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    for (int i = lane; i < bytes / 16; i += 32) {
      reinterpret_cast<uint4*>(out)[i] = stage[i];
    }
  } else {
    for (int i = lane; i < size; i += 32) out[i] = staged[i];
  }
  __syncwarp();
}

template <int kChannels>
__device__ __forceinline__ void write(const Args& args, int64_t first, int count,
                                      const float (&values)[kChannels], uint4* stage) {
  switch (args.out_type) {
    case Type::kUint8:
      return write<uint8_t>(args.y, first, count, values, stage);
    case Type::kFloat32:
      return write<float>(args.y, first, count, values, stage);
    case Type::kBfloat16:
      return write<__nv_bfloat16>(args.y, first, count, values, stage);
    case Type::kFloat16:
      return write<__half>(args.y, first, count, values, stage);
  }
}

// --- kernel --------------------------------------------------------------------------------------

// Computes a tile of a result, or with `kSums` the sum of gray over it, as it is before the
// contrast.
template <typename T, int kChannels, bool kSums>
__global__ void __launch_bounds__(kThreads) image_pass_kernel(const __grid_constant__ Args args) {
  __shared__ float map_values[kMapSize];
  __shared__ float steps[kMaxSteps * kStepSize];
  __shared__ float warp_sums[kWarps];
  __shared__ uint4 stage[kWarps * 8 * kChannels];  // a warp's pixels, 4 bytes a value
  const int image_of = blockIdx.x / args.tiles, tile = blockIdx.x % args.tiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int step_values = args.steps * kStepSize;
  if (threadIdx.x < kMapSize) {
    map_values[threadIdx.x] = args.maps[int64_t{image_of} * kMapSize + threadIdx.x];
  }
  for (int i = threadIdx.x; i < step_values; i += kThreads) {
    steps[i] = args.rows[int64_t{image_of} * step_values + i];
  }
  __syncthreads();
  const Map map = {map_values};
  const bool is_plain = args.interpolation == kBilinear && map.radius(0, args.widest) == 1.0f &&
                        map.radius(1, args.widest) == 1.0f;
  const Image<T, kChannels> image = {
      static_cast<const T*>(args.x) + int64_t{image_of} * args.height * args.width * kChannels,
      args.width};
  const float pivot = kSums || args.pivots == nullptr ? 0.0f : args.pivots[image_of];
  const int first_row = tile / args.tiles_across * kTile;
  const int first_column = tile % args.tiles_across * kTile;
  const int count = min(32, args.out_width - first_column);
  const int column = first_column + lane;
  float sum = 0.0f;
  for (int i = warp; i < kTile; i += kWarps) {
    const int row = first_row + i;
    if (row >= args.out_height) break;
    float values[kChannels] = {};
    if (lane < count) {
      read(args, map, is_plain, image, row, column, values);
      if constexpr (std::is_same_v<T, uint8_t>) {
#pragma unroll
        for (float& value : values) value *= 1.0f / 255.0f;
      }
      int step = 0;
      for (; step < args.steps; ++step) {
        if (kSums && steps[step * kStepSize] == kContrast) break;
        apply(steps + step * kStepSize, pivot, row, column, values);
      }
      // Images without a contrast need no sum.
      const bool counts = step < args.steps && row < map.result(1) && column < map.result(0);
      if (kSums && counts) sum += gray(values);
    }
    if constexpr (!kSums) {
      const int64_t pixel =
          (int64_t{image_of} * args.out_height + row) * args.out_width + first_column;
      write(args, pixel * kChannels, count, values, stage + warp * 8 * kChannels);
    }
  }
  if constexpr (kSums) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (lane == 0) warp_sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 1; i < kWarps; ++i) sum += warp_sums[i];
      args.sums[blockIdx.x] = sum;
    }
  }
}

// --- handlers ------------------------------------------------------------------------------------

std::optional<Type> type_of(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::U8:
      return Type::kUint8;
    case ffi::DataType::F32:
      return Type::kFloat32;
    case ffi::DataType::BF16:
      return Type::kBfloat16;
    case ffi::DataType::F16:
      return Type::kFloat16;
    default:
      return std::nullopt;
  }
}

struct Options {
  int64_t interpolation;
  bool reads, drops;
  float widest;
  ffi::Span<const float> fill;
};

ffi::Error parse(const ffi::AnyBuffer& x, const ffi::AnyBuffer& maps, const ffi::AnyBuffer& rows,
                 int64_t height, int64_t width, const Options& options, Args* args) {
  const auto shape = x.dimensions(), steps = rows.dimensions();
  if (shape.size() != 4 || !type_of(x) || (shape[3] != 1 && shape[3] != 3 && shape[3] != 4)) {
    return ffi::Error::InvalidArgument(
        "x must be uint8, float32, bfloat16 or float16 with axes image, row, column and 1, 3 or 4"
        " channels");
  }
  for (const int64_t size : {shape[1], shape[2], height, width}) {
    if (size < 1 || size > 1 << 20) {
      return ffi::Error::InvalidArgument("an axis of " + std::to_string(size) +
                                         " is not between 1 and 2^20");
    }
  }
  RETURN_IF_ERROR(check_float32("maps", maps, {shape[0], kMapSize}));
  if (steps.size() != 3 || steps[1] > kMaxSteps) {
    return ffi::Error::InvalidArgument("rows must have axes image, step, value, and at most " +
                                       std::to_string(kMaxSteps) + " steps");
  }
  RETURN_IF_ERROR(check_float32("rows", rows, {shape[0], steps[1], kStepSize}));
  if (options.fill.size() != 4 || options.interpolation < kNearest ||
      options.interpolation > kBicubic || !(options.widest >= 1.0f)) {
    return ffi::Error::InvalidArgument(
        "augment: fill has 4 values, interpolation is 0 to 2 and the kernel is 1 or wider");
  }
  if (!options.reads && (height != shape[1] || width != shape[2])) {
    return ffi::Error::InvalidArgument("augment: images that are not resampled keep their size");
  }
  *args = {};
  args->height = static_cast<int>(shape[1]);
  args->width = static_cast<int>(shape[2]);
  args->out_height = static_cast<int>(height);
  args->out_width = static_cast<int>(width);
  args->tiles_across = (args->out_width + kTile - 1) / kTile;
  args->tiles = args->tiles_across * ((args->out_height + kTile - 1) / kTile);
  args->steps = static_cast<int>(steps[1]);
  args->interpolation = static_cast<int>(options.interpolation);
  args->reads = options.reads;
  args->drops = options.drops;
  args->widest = options.widest;
  std::copy(options.fill.begin(), options.fill.end(), args->fill);
  args->x = x.untyped_data();
  args->maps = static_cast<const float*>(maps.untyped_data());
  args->rows = data_or_null<const float>(rows);
  return ffi::Error::Success();
}

template <typename T, bool kSums>
ffi::Error launch(const ffi::AnyBuffer& x, const Args& args, cudaStream_t stream) {
  const auto shape = x.dimensions();
  if (shape[0] > INT32_MAX / args.tiles) {
    return ffi::Error::InvalidArgument("the images are too large for one launch");
  }
  const Launch grid = {dim3(static_cast<unsigned>(shape[0] * args.tiles)), kThreads, 0};
  switch (shape[3]) {
    case 1:
      return launch_kernel(image_pass_kernel<T, 1, kSums>, args, grid, stream);
    case 3:
      return launch_kernel(image_pass_kernel<T, 3, kSums>, args, grid, stream);
    default:
      return launch_kernel(image_pass_kernel<T, 4, kSums>, args, grid, stream);
  }
}

template <bool kSums>
ffi::Error launch_of(const ffi::AnyBuffer& x, const Args& args, cudaStream_t stream) {
  switch (*type_of(x)) {
    case Type::kUint8:
      return launch<uint8_t, kSums>(x, args, stream);
    case Type::kFloat32:
      return launch<float, kSums>(x, args, stream);
    case Type::kBfloat16:
      return launch<__nv_bfloat16, kSums>(x, args, stream);
    default:
      return launch<__half, kSums>(x, args, stream);
  }
}

// Writes the results y of the images x.
ffi::Error image_pass(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer maps,
                      ffi::AnyBuffer rows, ffi::AnyBuffer pivots, ffi::Result<ffi::AnyBuffer> y,
                      int64_t interpolation, bool reads, bool drops, float widest,
                      ffi::Span<const float> fill) {
  const auto out = y->dimensions();
  if (out.size() != 4 || !type_of(*y)) {
    return ffi::Error::InvalidArgument(
        "y must be uint8, float32, bfloat16 or float16 with axes image, row, column, channel");
  }
  Args args;
  RETURN_IF_ERROR(
      parse(x, maps, rows, out[1], out[2], {interpolation, reads, drops, widest, fill}, &args));
  const auto shape = x.dimensions();
  RETURN_IF_ERROR(check_shape("y", *y, {shape[0], out[1], out[2], shape[3]}));
  if (!is_absent(pivots)) RETURN_IF_ERROR(check_float32("pivots", pivots, {shape[0]}));
  if (is_absent(*y)) return ffi::Error::Success();
  args.pivots = data_or_null<const float>(pivots);
  args.y = y->untyped_data();
  args.out_type = *type_of(*y);
  return launch_of<false>(x, args, stream);
}

// Writes the sums of gray over the tiles of results of size [height, width], before their contrast.
ffi::Error image_sums(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer maps,
                      ffi::AnyBuffer rows, ffi::Result<ffi::AnyBuffer> sums, int64_t height,
                      int64_t width, int64_t interpolation, bool reads, bool drops, float widest,
                      ffi::Span<const float> fill) {
  Args args;
  RETURN_IF_ERROR(
      parse(x, maps, rows, height, width, {interpolation, reads, drops, widest, fill}, &args));
  RETURN_IF_ERROR(check_float32("sums", *sums, {x.dimensions()[0], args.tiles}));
  if (is_absent(*sums)) return ffi::Error::Success();
  args.sums = static_cast<float*>(sums->untyped_data());
  return launch_of<true>(x, args, stream);
}

}  // namespace

DEFINE_HANDLER(jaxfused_image_pass, image_pass,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // maps
                   .Arg<ffi::AnyBuffer>()  // rows
                   .Arg<ffi::AnyBuffer>()  // pivots
                   .Ret<ffi::AnyBuffer>()  // y
                   .Attr<int64_t>("interpolation")
                   .Attr<bool>("reads")
                   .Attr<bool>("drops")
                   .Attr<float>("widest")
                   .Attr<ffi::Span<const float>>("fill"));

DEFINE_HANDLER(jaxfused_image_sums, image_sums,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // maps
                   .Arg<ffi::AnyBuffer>()  // rows
                   .Ret<ffi::AnyBuffer>()  // sums
                   .Attr<int64_t>("height")
                   .Attr<int64_t>("width")
                   .Attr<int64_t>("interpolation")
                   .Attr<bool>("reads")
                   .Attr<bool>("drops")
                   .Attr<float>("widest")
                   .Attr<ffi::Span<const float>>("fill"));
