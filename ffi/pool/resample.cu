// Resampling of images: max_pool, bilinear upsampling by 2, and their gradients.
//
// Every kernel writes each value once. A thread has one pixel of the result (2 x 2 pixels when it
// upsamples) and a vector of channels. Input pixels that adjacent threads share are read through
// the caches. max_pool saves each maximum's position in its window, so that its gradient need not
// read the image.

#include "common/handler.h"
#include "common/rows.cuh"
#include "common/vector.cuh"

namespace {

constexpr int kThreads = 256;

struct Image {
  int height, width;
};

// Division of numbers below 2^31 by a multiplication.
struct Divisor {
  uint32_t divisor = 1, factor = 1;
  int shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t d) : divisor(d) {
    while ((uint64_t{1} << shift) < d) ++shift;
    factor = static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d) / d + 1);
  }

  // Returns the quotient, and leaves the remainder in `value`.
  __device__ uint32_t divide(uint32_t* value) const {
    const uint32_t quotient = (__umulhi(*value, factor) + *value) >> shift;
    *value -= quotient * divisor;
    return quotient;
  }
};

// The threads of a grid: one for each vector of channels of each pixel.
struct Threads {
  uint32_t count;
  Divisor vectors, columns, rows;
};

struct PoolArgs {
  Threads threads;
  int channels;
  Image in, out;
  Image window, stride, before;  // `before`: rows of padding above the image, columns left of it
  const void* x;                 // the image; dy in the gradient
  void* y;                       // the result; dx in the gradient
  uint8_t* places;               // index of each maximum of y in its window, or nullptr
};

struct UpsampleArgs {
  Threads threads;
  int channels;
  Image small;  // Size of the smaller image, before the upsampling.
  const void* x;
  void* y;
};

// A thread's vector of channels, its pixel and its image.
struct Place {
  int channel;
  int row, column;
  int64_t image;

  template <int kVec>
  static __device__ bool find(const Threads& threads, Place* place) {
    uint32_t index = blockIdx.x * kThreads + threadIdx.x;
    if (index >= threads.count) return false;
    uint32_t pixel = threads.vectors.divide(&index);
    place->channel = static_cast<int>(index) * kVec;
    uint32_t row = threads.columns.divide(&pixel);
    place->column = static_cast<int>(pixel);
    place->image = threads.rows.divide(&row);
    place->row = static_cast<int>(row);
    return true;
  }

  __device__ int64_t offset(const Image& size, int row, int column, int channels) const {
    return ((image * size.height + row) * size.width + column) * channels + channel;
  }
};

// --- max_pool ------------------------------------------------------------------------------------

// Whether `value` replaces `best`. As in XLA, the first of equal values stays, and a NaN is larger
// than every number.
__device__ __forceinline__ bool is_larger(float value, float best) {
  return value > best || (value != value && best == best);
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) max_pool_kernel(const __grid_constant__ PoolArgs args) {
  Place place;
  if (!Place::find<kVec>(args.threads, &place)) return;
  const int top = place.row * args.stride.height - args.before.height;
  const int left = place.column * args.stride.width - args.before.width;
  float best[kVec];
  uint8_t places[kVec] = {};
#pragma unroll
  for (float& value : best) value = -INFINITY;
  bool first = true;
  for (int i = 0; i < args.window.height; ++i) {
    const int row = top + i;
    if (row < 0 || row >= args.in.height) continue;
#pragma unroll 2
    for (int j = 0; j < args.window.width; ++j) {
      const int column = left + j;
      if (column < 0 || column >= args.in.width) continue;
      float values[kVec];
      unpack(load_vector<T, kVec>(static_cast<const T*>(args.x) +
                                  place.offset(args.in, row, column, args.channels)),
             values);
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        if (first || is_larger(values[c], best[c])) {
          best[c] = values[c];
          places[c] = static_cast<uint8_t>(i * args.window.width + j);
        }
      }
      first = false;
    }
  }
  const int64_t at = place.offset(args.out, place.row, place.column, args.channels);
  Vector<T, kVec> out;
  pack(best, out);
  store_vector(static_cast<T*>(args.y) + at, out);
  if (args.places == nullptr) return;
  if constexpr (kVec == 8) {
    *reinterpret_cast<uint2*>(args.places + at) = *reinterpret_cast<const uint2*>(places);
  } else if constexpr (kVec == 4) {
    *reinterpret_cast<uint32_t*>(args.places + at) = *reinterpret_cast<const uint32_t*>(places);
  } else {
    args.places[at] = places[0];
  }
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    max_pool_gradient_kernel(const __grid_constant__ PoolArgs args) {
  Place place;
  if (!Place::find<kVec>(args.threads, &place)) return;
  // The range of windows (pixels of dy) that contain this pixel of dx.
  const int row = place.row + args.before.height, column = place.column + args.before.width;
  const int first_row =
      row < args.window.height ? 0 : (row - args.window.height) / args.stride.height + 1;
  const int first_column =
      column < args.window.width ? 0 : (column - args.window.width) / args.stride.width + 1;
  const int last_row = min(row / args.stride.height, args.out.height - 1);
  const int last_column = min(column / args.stride.width, args.out.width - 1);
  float sums[kVec] = {};
  for (int u = first_row; u <= last_row; ++u) {
    for (int v = first_column; v <= last_column; ++v) {
      const int64_t at = place.offset(args.out, u, v, args.channels);
      alignas(8) uint8_t places[kVec];
      if constexpr (kVec == 8) {
        *reinterpret_cast<uint2*>(places) = *reinterpret_cast<const uint2*>(args.places + at);
      } else if constexpr (kVec == 4) {
        *reinterpret_cast<uint32_t*>(places) = *reinterpret_cast<const uint32_t*>(args.places + at);
      } else {
        places[0] = args.places[at];
      }
      float values[kVec];
      unpack(load_vector<T, kVec>(static_cast<const T*>(args.x) + at), values);
      const int own =
          (row - u * args.stride.height) * args.window.width + (column - v * args.stride.width);
#pragma unroll
      for (int c = 0; c < kVec; ++c) sums[c] += places[c] == own ? values[c] : 0.0f;
    }
  }
  Vector<T, kVec> out;
  pack(sums, out);
  store_vector(
      static_cast<T*>(args.y) + place.offset(args.in, place.row, place.column, args.channels), out);
}

// --- upsampling ----------------------------------------------------------------------------------

// Along each axis the results are y[2 i] = (x[i - 1] + 3 x[i]) / 4 and y[2 i + 1] = (3 x[i] + x[i +
// 1]) / 4, where x is extended by copies of its first and last value.
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    upsample_kernel(const __grid_constant__ UpsampleArgs args) {
  Place place;
  if (!Place::find<kVec>(args.threads, &place)) return;
  const Image large = {2 * args.small.height, 2 * args.small.width};
  // Four results of the pixel: even and odd row, even and odd column.
  float sums[2][2][kVec] = {};
#pragma unroll
  for (int i = -1; i <= 1; ++i) {
    const int row = min(max(place.row + i, 0), args.small.height - 1);
    float even[kVec], odd[kVec];
#pragma unroll
    for (int j = -1; j <= 1; ++j) {
      const int column = min(max(place.column + j, 0), args.small.width - 1);
      float values[kVec];
      unpack(load_vector<T, kVec>(static_cast<const T*>(args.x) +
                                  place.offset(args.small, row, column, args.channels)),
             values);
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        if (j == -1) even[c] = 0.25f * values[c];
        if (j == 0) {
          even[c] += 0.75f * values[c];
          odd[c] = 0.75f * values[c];
        }
        if (j == 1) odd[c] += 0.25f * values[c];
      }
    }
    const float weight = i == 0 ? 0.75f : 0.25f;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      if (i <= 0) {
        sums[0][0][c] += weight * even[c];
        sums[0][1][c] += weight * odd[c];
      }
      if (i >= 0) {
        sums[1][0][c] += weight * even[c];
        sums[1][1][c] += weight * odd[c];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      Vector<T, kVec> out;
      pack(sums[i][j], out);
      store_vector(static_cast<T*>(args.y) +
                       place.offset(large, 2 * place.row + i, 2 * place.column + j, args.channels),
                   out);
    }
  }
}

// Returns the weight of x[i] in result 2 i + k - 1, k = 0 .. 3, or 0 if there is no such result. At
// the ends of the axis it includes the weights of the copies of x[i].
__device__ __forceinline__ float weight_of(int i, int k, int size) {
  if (k == 0) return i > 0 ? 0.25f : 0.0f;
  if (k == 3) return i < size - 1 ? 0.25f : 0.0f;
  const bool at_end = k == 1 ? i == 0 : i == size - 1;
  return at_end ? 1.0f : 0.75f;
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    upsample_gradient_kernel(const __grid_constant__ UpsampleArgs args) {
  Place place;
  if (!Place::find<kVec>(args.threads, &place)) return;
  const Image large = {2 * args.small.height, 2 * args.small.width};
  float sums[kVec] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float row_weight = weight_of(place.row, i, args.small.height);
    const int row = min(max(2 * place.row + i - 1, 0), large.height - 1);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float weight = row_weight * weight_of(place.column, j, args.small.width);
      const int column = min(max(2 * place.column + j - 1, 0), large.width - 1);
      float values[kVec];
      unpack(load_vector<T, kVec>(static_cast<const T*>(args.x) +
                                  place.offset(large, row, column, args.channels)),
             values);
      if (weight == 0.0f) continue;  // 0 times an infinite value would be NaN
#pragma unroll
      for (int c = 0; c < kVec; ++c) sums[c] += weight * values[c];
    }
  }
  Vector<T, kVec> out;
  pack(sums, out);
  store_vector(
      static_cast<T*>(args.y) + place.offset(args.small, place.row, place.column, args.channels),
      out);
}

// --- handlers ------------------------------------------------------------------------------------

ffi::Error check_images(std::string_view name, const ffi::AnyBuffer& x) {
  if (x.dimensions().size() == 4 && dtype_of(x)) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(
      std::string(name) +
      " must be float32, bfloat16 or float16 with axes image, row, column, channel");
}

ffi::Error check_sizes(std::initializer_list<int64_t> sizes) {
  for (const int64_t size : sizes) {
    if (size < 0 || size > INT32_MAX / 4) {
      return ffi::Error::InvalidArgument("an axis of " + std::to_string(size) + " is too large");
    }
  }
  return ffi::Error::Success();
}

// Calls f(type, vector size) for x's dtype. Vectors have 16 bytes if all pixels start at multiples
// of 16 bytes, else one value.
template <typename F>
ffi::Error with_vectors(const ffi::AnyBuffer& x, int64_t channels,
                        std::initializer_list<const void*> pointers, const F& f) {
  using std::integral_constant;
  const Dtype dtype = *dtype_of(x);
  const bool whole =
      channels * (dtype == Dtype::kFloat32 ? 4 : 2) % 16 == 0 && are_aligned(pointers);
  switch (dtype) {
    case Dtype::kFloat32:
      return whole ? f(float{}, integral_constant<int, 4>{})
                   : f(float{}, integral_constant<int, 1>{});
    case Dtype::kBfloat16:
      return whole ? f(__nv_bfloat16{}, integral_constant<int, 8>{})
                   : f(__nv_bfloat16{}, integral_constant<int, 1>{});
    default:
      return whole ? f(__half{}, integral_constant<int, 8>{})
                   : f(__half{}, integral_constant<int, 1>{});
  }
}

// Launches a kernel with a thread for each vector of `images` images of the given size.
template <int kVec, typename Args>
ffi::Error launch_vectors(void (*kernel)(Args), Args args, int64_t images, const Image& size,
                          cudaStream_t stream) {
  const int vectors = args.channels / kVec;
  const int64_t pixels = images * size.height * size.width;
  if (pixels > INT32_MAX / vectors - kThreads) {
    return ffi::Error::InvalidArgument("the images are too large for one launch");
  }
  args.threads = {static_cast<uint32_t>(pixels * vectors), Divisor(vectors), Divisor(size.width),
                  Divisor(size.height)};
  return launch_kernel(
      kernel, args,
      {dim3(static_cast<unsigned>(divide_up(args.threads.count, kThreads))), kThreads, 0}, stream);
}

struct Window {
  int64_t height, width, row_stride, column_stride, top, left;
};

ffi::Error parse_pool(const ffi::AnyBuffer& image, const ffi::AnyBuffer& result,
                      const ffi::AnyBuffer& places, const Window& window, PoolArgs* args) {
  RETURN_IF_ERROR(check_images("x", image));
  RETURN_IF_ERROR(check_images("y", result));
  RETURN_IF_ERROR(check_dtype("y", result, image.element_type()));
  const auto in = image.dimensions(), out = result.dimensions();
  if (in[0] != out[0] || in[3] != out[3]) {
    return ffi::Error::InvalidArgument("y has shape " + to_string(out) +
                                       ", which does not fit x of shape " + to_string(in));
  }
  RETURN_IF_ERROR(check_sizes({in[1], in[2], in[3], out[1], out[2]}));
  if (!is_absent(places)) {
    RETURN_IF_ERROR(check_shape("places", places, {out[0], out[1], out[2], out[3]}));
    RETURN_IF_ERROR(check_dtype("places", places, ffi::DataType::U8));
  }
  if (window.height < 1 || window.width < 1 || window.height * window.width > 255 ||
      window.row_stride < 1 || window.column_stride < 1 || window.top < 0 || window.left < 0 ||
      window.top >= window.height || window.left >= window.width ||
      (out[1] - 1) * window.row_stride - window.top >= in[1] ||
      (out[2] - 1) * window.column_stride - window.left >= in[2]) {
    return ffi::Error::InvalidArgument(
        "max_pool: a window has 1 to 255 values, strides are 1 or more, and every window has a"
        " value of x");
  }
  const auto size = [](int64_t height, int64_t width) {
    return Image{static_cast<int>(height), static_cast<int>(width)};
  };
  args->channels = static_cast<int>(in[3]);
  args->in = size(in[1], in[2]);
  args->out = size(out[1], out[2]);
  args->window = size(window.height, window.width);
  args->stride = size(window.row_stride, window.column_stride);
  args->before = size(window.top, window.left);
  args->places = data_or_null<uint8_t>(places);
  return ffi::Error::Success();
}

ffi::Error max_pool(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                    ffi::Result<ffi::AnyBuffer> places, int64_t height, int64_t width,
                    int64_t row_stride, int64_t column_stride, int64_t top, int64_t left) {
  PoolArgs args = {};
  RETURN_IF_ERROR(
      parse_pool(x, *y, *places, {height, width, row_stride, column_stride, top, left}, &args));
  if (is_absent(*y)) return ffi::Error::Success();
  args.x = x.untyped_data();
  args.y = y->untyped_data();
  const int64_t images = x.dimensions()[0];
  return with_vectors(x, args.channels, {args.x, args.y, args.places}, [&](auto type, auto vec) {
    using T = decltype(type);
    constexpr int kVec = decltype(vec)::value;
    return launch_vectors<kVec>(max_pool_kernel<T, kVec>, args, images, args.out, stream);
  });
}

ffi::Error max_pool_gradient(cudaStream_t stream, ffi::AnyBuffer dy, ffi::AnyBuffer places,
                             ffi::Result<ffi::AnyBuffer> dx, int64_t height, int64_t width,
                             int64_t row_stride, int64_t column_stride, int64_t top, int64_t left) {
  PoolArgs args = {};
  RETURN_IF_ERROR(
      parse_pool(*dx, dy, places, {height, width, row_stride, column_stride, top, left}, &args));
  if (is_absent(*dx)) return ffi::Error::Success();
  if (args.places == nullptr) return ffi::Error::InvalidArgument("places are absent");
  args.x = dy.untyped_data();
  args.y = dx->untyped_data();
  const int64_t images = dy.dimensions()[0];
  return with_vectors(dy, args.channels, {args.x, args.y, args.places}, [&](auto type, auto vec) {
    using T = decltype(type);
    constexpr int kVec = decltype(vec)::value;
    return launch_vectors<kVec>(max_pool_gradient_kernel<T, kVec>, args, images, args.in, stream);
  });
}

// Upsamples x to y. With `backward`, x is the gradient of the upsampled image, and y that of the
// smaller one.
ffi::Error upsample(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                    bool backward) {
  RETURN_IF_ERROR(check_images("x", x));
  RETURN_IF_ERROR(check_dtype("y", *y, x.element_type()));
  const ffi::AnyBuffer& small = backward ? *y : x;
  const ffi::AnyBuffer& large = backward ? x : *y;
  RETURN_IF_ERROR(check_images("y", *y));
  const auto shape = small.dimensions();
  RETURN_IF_ERROR(
      check_shape(backward ? "x" : "y", large, {shape[0], 2 * shape[1], 2 * shape[2], shape[3]}));
  RETURN_IF_ERROR(check_sizes({2 * shape[1], 2 * shape[2], shape[3]}));
  if (is_absent(x)) return ffi::Error::Success();
  UpsampleArgs args = {};
  args.channels = static_cast<int>(shape[3]);
  args.small = {static_cast<int>(shape[1]), static_cast<int>(shape[2])};
  args.x = x.untyped_data();
  args.y = y->untyped_data();
  const int64_t images = shape[0];
  return with_vectors(x, args.channels, {args.x, args.y}, [&](auto type, auto vec) {
    using T = decltype(type);
    constexpr int kVec = decltype(vec)::value;
    const auto kernel = backward ? upsample_gradient_kernel<T, kVec> : upsample_kernel<T, kVec>;
    return launch_vectors<kVec>(kernel, args, images, args.small, stream);
  });
}

}  // namespace

DEFINE_HANDLER(jaxfused_max_pool, max_pool,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Ret<ffi::AnyBuffer>()  // y
                   .Ret<ffi::AnyBuffer>()  // places
                   .Attr<int64_t>("height")
                   .Attr<int64_t>("width")
                   .Attr<int64_t>("row_stride")
                   .Attr<int64_t>("column_stride")
                   .Attr<int64_t>("top")
                   .Attr<int64_t>("left"),
               {ffi::Traits::kCmdBufferCompatible});

DEFINE_HANDLER(jaxfused_max_pool_gradient, max_pool_gradient,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // dy
                   .Arg<ffi::AnyBuffer>()  // places
                   .Ret<ffi::AnyBuffer>()  // dx
                   .Attr<int64_t>("height")
                   .Attr<int64_t>("width")
                   .Attr<int64_t>("row_stride")
                   .Attr<int64_t>("column_stride")
                   .Attr<int64_t>("top")
                   .Attr<int64_t>("left"),
               {ffi::Traits::kCmdBufferCompatible});

DEFINE_HANDLER(jaxfused_upsample, upsample,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Ret<ffi::AnyBuffer>()  // y
                   .Attr<bool>("backward"),
               {ffi::Traits::kCmdBufferCompatible});
