// Depthwise convolution: each channel has one kernel of its own, and pixels are channels last.
//
// A lane has a pair of channels, a warp 64 channels of a patch of the output, and a block of four
// warps a tile of patches, whose input with its halo is in shared memory. Of its patch a warp keeps
// all sums in registers, and of each input value that it reads it makes all products: an input row
// meets every row of the kernel while it is in registers. The copies of the next tile run
// meanwhile. Blocks are persistent and keep their channels, and with them the weights.
//
// The gradient of the weights has the same loops with the sums and the weights exchanged: a warp
// keeps a sum for each weight over all of its patches. Each block writes its sums, and whoever
// called adds them up in the order of the blocks.

#include "activation.cuh"
#include "handler.h"
#include "operands.h"
#include "ptx.cuh"
#include "vector.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kBlockChannels = 64;
constexpr int kPatchRows = 4;
constexpr int kPatchColumns = 8;

struct Shape {
  int images, height, width, channels;  // of the input
  int out_height, out_width;
  int top, left;  // zeros before the input
};

struct Tiling {
  int warps_down, warps_across;
  int down, across;  // tiles of an image
  int tiles;         // of all images
  int buffers;
  bool wide;  // whether copies are 16 bytes, not 4
};

struct ConvArgs {
  Shape shape;
  Tiling tiling;
  const void* x;
  const float* weights;  // [taps, channels]
  Parameter bias;
  const void* residual;  // or nullptr
  void* y;
  void* z;  // what the activation is applied to, or nullptr
  Activation activation;
};

struct WeightsArgs {
  Shape shape;
  Tiling tiling;
  const void* x;
  const void* dy;
  float* sums;  // [blocks along x, taps + 1, channels]; the last is the gradient of the bias
};

// A kernel's size and stride, and what follows from them.
template <int kHigh, int kWide, int kStep>
struct Kernel {
  static constexpr int kHeight = kHigh, kWidth = kWide, kStride = kStep;
  static constexpr int kTaps = kHeight * kWidth;
  static constexpr int kRows = (kPatchRows - 1) * kStride + kHeight;  // of a patch's input
  static constexpr int kColumns = (kPatchColumns - 1) * kStride + kWidth;

  static constexpr __host__ __device__ int rows(const Tiling& tiling) {  // of a tile's input
    return (tiling.warps_down * kPatchRows - 1) * kStride + kHeight;
  }
  static constexpr __host__ __device__ int columns(const Tiling& tiling) {
    return (tiling.warps_across * kPatchColumns - 1) * kStride + kWidth;
  }
};

// Where a tile lies: its image, and its first row and column in the output.
struct Tile {
  int image, row, column;

  __device__ Tile(const Tiling& tiling, int index) {
    const int in_image = index % (tiling.down * tiling.across);
    image = index / (tiling.down * tiling.across);
    row = in_image / tiling.across * tiling.warps_down * kPatchRows;
    column = in_image % tiling.across * tiling.warps_across * kPatchColumns;
  }
};

// Starts the copies of `rows` x `columns` pixels of 64 channels from (top, left) of an image on;
// what is outside of the image or beyond its channels is zero.
template <typename T, int kBytes>
__device__ __forceinline__ void copy_pixels(T* shared, const T* image, int height, int width,
                                            int channels, int top, int left, int rows,
                                            int columns) {
  constexpr int kSize = kBytes / sizeof(T);
  constexpr int kParts = kBlockChannels / kSize;
  const int first_channel = blockIdx.y * kBlockChannels;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int row = warp; row < rows; row += kWarps) {
    const int y = top + row;
    const bool row_inside = y >= 0 && y < height;
    for (int part = lane; part < columns * kParts; part += 32) {
      const int x = left + part / kParts;
      const int channel = first_channel + part % kParts * kSize;
      T* to = shared + row * columns * kBlockChannels + part * kSize;
      if (row_inside && x >= 0 && x < width && channel < channels) {
        async_copy<kBytes>(to, image + (static_cast<int64_t>(y) * width + x) * channels + channel);
      } else {
        store_vector(to, Vector<T, kSize>{});
      }
    }
  }
}

template <typename T>
__device__ __forceinline__ void copy_tile(const Tiling& tiling, T* shared, const void* data,
                                          int image, int height, int width, int channels, int top,
                                          int left, int rows, int columns) {
  const T* from =
      static_cast<const T*>(data) + static_cast<int64_t>(image) * height * width * channels;
  if (tiling.wide) {
    copy_pixels<T, 16>(shared, from, height, width, channels, top, left, rows, columns);
  } else {
    copy_pixels<T, 4>(shared, from, height, width, channels, top, left, rows, columns);
  }
}

// Loads this lane's channels of a row of pixels in shared memory.
template <typename T, int kPixels>
__device__ __forceinline__ void load_row(const T* row, float (&out)[kPixels][2]) {
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    unpack(load_vector<T, 2>(row + i * kBlockChannels), out[i]);
  }
}

// Calls f(tile, shared) for this block's tiles, whose copies `copy(tile, shared)` starts.
template <typename T, typename Copy, typename F>
__device__ __forceinline__ void for_each_tile(const Tiling& tiling, T* shared, int buffer_size,
                                              const Copy& copy, const F& f) {
  int index = blockIdx.x;
  if (index >= tiling.tiles) return;
  copy(Tile(tiling, index), shared);
  async_copies_commit();
  for (int turn = 0; index < tiling.tiles; ++turn) {
    const int next = index + gridDim.x;
    T* current = shared + (turn % tiling.buffers) * buffer_size;
    const bool ahead = tiling.buffers > 1;
    if (ahead && next < tiling.tiles) {
      copy(Tile(tiling, next), shared + ((turn + 1) % tiling.buffers) * buffer_size);
    }
    async_copies_commit();
    async_copies_wait(1);
    __syncthreads();
    f(Tile(tiling, index), current);
    __syncthreads();
    if (!ahead && next < tiling.tiles) {
      copy(Tile(tiling, next), shared);
      async_copies_commit();
    }
    index = next;
  }
}

template <typename T, typename K>
__global__ void __launch_bounds__(kThreads, 2)
    depthwise_conv_kernel(const __grid_constant__ ConvArgs args) {
  extern __shared__ __align__(16) char shared[];
  const Shape& shape = args.shape;
  const Tiling& tiling = args.tiling;
  const int rows = K::rows(tiling), columns = K::columns(tiling);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int patch_row = warp / tiling.warps_across * kPatchRows;
  const int patch_column = warp % tiling.warps_across * kPatchColumns;
  const int channel = blockIdx.y * kBlockChannels + 2 * lane;
  const bool has_channel = channel < shape.channels;

  float weights[K::kTaps][2], bias[2] = {0.0f, 0.0f};
#pragma unroll
  for (int tap = 0; tap < K::kTaps; ++tap) {
    const float2 pair =
        has_channel
            ? *reinterpret_cast<const float2*>(args.weights + tap * shape.channels + channel)
            : make_float2(0.0f, 0.0f);
    weights[tap][0] = pair.x;
    weights[tap][1] = pair.y;
  }
  if (has_channel && args.bias.data != nullptr) load_parameter(args.bias, channel, bias);

  const auto copy = [&](const Tile& tile, T* to) {
    copy_tile(tiling, to, args.x, tile.image, shape.height, shape.width, shape.channels,
              tile.row * K::kStride - shape.top, tile.column * K::kStride - shape.left, rows,
              columns);
  };
  const auto compute = [&](const Tile& tile, const T* in) {
    float sums[kPatchRows][kPatchColumns][2];
#pragma unroll
    for (int i = 0; i < kPatchRows * kPatchColumns; ++i) {
      sums[i / kPatchColumns][i % kPatchColumns][0] = bias[0];
      sums[i / kPatchColumns][i % kPatchColumns][1] = bias[1];
    }
    const T* row_in =
        in + (patch_row * K::kStride * columns + patch_column * K::kStride) * kBlockChannels +
        2 * lane;
#pragma unroll
    for (int r = 0; r < K::kRows; ++r) {
      float values[K::kColumns][2];
      load_row(row_in + r * columns * kBlockChannels, values);
#pragma unroll
      for (int o = 0; o < kPatchRows; ++o) {
        const int ky = r - o * K::kStride;
        if (ky < 0 || ky >= K::kHeight) continue;
#pragma unroll
        for (int kx = 0; kx < K::kWidth; ++kx) {
#pragma unroll
          for (int i = 0; i < kPatchColumns; ++i) {
            const float* value = values[i * K::kStride + kx];
            const float* weight = weights[ky * K::kWidth + kx];
            sums[o][i][0] += value[0] * weight[0];
            sums[o][i][1] += value[1] * weight[1];
          }
        }
      }
    }
    if (!has_channel) return;
#pragma unroll
    for (int o = 0; o < kPatchRows; ++o) {
      const int y = tile.row + patch_row + o, x = tile.column + patch_column;
      if (y >= shape.out_height) break;
      const int64_t at =
          ((static_cast<int64_t>(tile.image) * shape.out_height + y) * shape.out_width + x) *
              shape.channels +
          channel;
      float values[kPatchColumns * 2];
#pragma unroll
      for (int i = 0; i < kPatchColumns; ++i) {
        float pair[2] = {0.0f, 0.0f};
        if (args.residual != nullptr && x + i < shape.out_width) {
          unpack(load_vector<T, 2>(static_cast<const T*>(args.residual) + at + i * shape.channels),
                 pair);
        }
        values[2 * i] = sums[o][i][0] + pair[0];
        values[2 * i + 1] = sums[o][i][1] + pair[1];
      }
      const auto store = [&](void* to) {
#pragma unroll
        for (int i = 0; i < kPatchColumns; ++i) {
          if (x + i >= shape.out_width) break;
          const float pair[2] = {values[2 * i], values[2 * i + 1]};
          Vector<T, 2> out;
          pack(pair, out);
          store_vector(static_cast<T*>(to) + at + i * shape.channels, out);
        }
      };
      if (args.z != nullptr) store(args.z);
      activate(args.activation, values);
      store(args.y);
    }
  };
  for_each_tile(tiling, reinterpret_cast<T*>(shared), rows * columns * kBlockChannels, copy,
                compute);
}

template <typename T, typename K>
__global__ void __launch_bounds__(kThreads, 2)
    depthwise_weights_kernel(const __grid_constant__ WeightsArgs args) {
  extern __shared__ __align__(16) char shared[];
  const Shape& shape = args.shape;
  const Tiling& tiling = args.tiling;
  const int rows = K::rows(tiling), columns = K::columns(tiling);
  const int out_rows = tiling.warps_down * kPatchRows;
  const int out_columns = tiling.warps_across * kPatchColumns;
  const int in_size = rows * columns * kBlockChannels;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int patch_row = warp / tiling.warps_across * kPatchRows;
  const int patch_column = warp % tiling.warps_across * kPatchColumns;

  float sums[K::kTaps + 1][2] = {};
  const auto copy = [&](const Tile& tile, T* to) {
    copy_tile(tiling, to, args.x, tile.image, shape.height, shape.width, shape.channels,
              tile.row * K::kStride - shape.top, tile.column * K::kStride - shape.left, rows,
              columns);
    copy_tile(tiling, to + in_size, args.dy, tile.image, shape.out_height, shape.out_width,
              shape.channels, tile.row, tile.column, out_rows, out_columns);
  };
  const auto compute = [&](const Tile&, const T* in) {
    float dy[kPatchRows][kPatchColumns][2];
    const T* row_dy =
        in + in_size + (patch_row * out_columns + patch_column) * kBlockChannels + 2 * lane;
#pragma unroll
    for (int o = 0; o < kPatchRows; ++o) {
      load_row(row_dy + o * out_columns * kBlockChannels, dy[o]);
#pragma unroll
      for (int i = 0; i < kPatchColumns; ++i) {
        sums[K::kTaps][0] += dy[o][i][0];
        sums[K::kTaps][1] += dy[o][i][1];
      }
    }
    const T* row_in =
        in + (patch_row * K::kStride * columns + patch_column * K::kStride) * kBlockChannels +
        2 * lane;
#pragma unroll
    for (int r = 0; r < K::kRows; ++r) {
      float values[K::kColumns][2];
      load_row(row_in + r * columns * kBlockChannels, values);
#pragma unroll
      for (int o = 0; o < kPatchRows; ++o) {
        const int ky = r - o * K::kStride;
        if (ky < 0 || ky >= K::kHeight) continue;
#pragma unroll
        for (int i = 0; i < kPatchColumns; ++i) {
#pragma unroll
          for (int kx = 0; kx < K::kWidth; ++kx) {
            const float* value = values[i * K::kStride + kx];
            float* sum = sums[ky * K::kWidth + kx];
            sum[0] += value[0] * dy[o][i][0];
            sum[1] += value[1] * dy[o][i][1];
          }
        }
      }
    }
  };
  for_each_tile(tiling, reinterpret_cast<T*>(shared),
                in_size + out_rows * out_columns * kBlockChannels, copy, compute);

  // Adds up the warps in their order.
  float* totals = reinterpret_cast<float*>(shared);
  for (int turn = 0; turn < kWarps; ++turn) {
    if (warp == turn) {
#pragma unroll
      for (int tap = 0; tap <= K::kTaps; ++tap) {
        float2* total = reinterpret_cast<float2*>(totals + tap * kBlockChannels + 2 * lane);
        const float2 before = turn == 0 ? make_float2(0.0f, 0.0f) : *total;
        *total = make_float2(before.x + sums[tap][0], before.y + sums[tap][1]);
      }
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < (K::kTaps + 1) * kBlockChannels; i += kThreads) {
    const int tap = i / kBlockChannels;
    const int channel = blockIdx.y * kBlockChannels + i % kBlockChannels;
    if (channel < shape.channels) {
      args.sums[(static_cast<int64_t>(blockIdx.x) * (K::kTaps + 1) + tap) * shape.channels +
                channel] = totals[i];
    }
  }
}

// --- launch --------------------------------------------------------------------------------------

// Chooses the arrangement of the warps that covers the output with the fewest tiles.
inline void arrange(const Shape& shape, Tiling* tiling) {
  int64_t fewest = INT64_MAX;
  for (const int across : {2, 1, 4}) {
    const int down = kWarps / across;
    const int64_t tiles = int64_t{divide_up(shape.out_height, down * kPatchRows)} *
                          divide_up(shape.out_width, across * kPatchColumns);
    if (tiles < fewest) {
      fewest = tiles;
      tiling->warps_down = down;
      tiling->warps_across = across;
    }
  }
  tiling->down = divide_up(shape.out_height, tiling->warps_down * kPatchRows);
  tiling->across = divide_up(shape.out_width, tiling->warps_across * kPatchColumns);
}

// Completes the tiling and launches; `most_blocks` limits the blocks that share the channels.
template <typename K, typename Args>
ffi::Error launch(void (*kernel)(Args), Args args, int itemsize, bool copies_dy,
                  int64_t most_blocks, bool exactly, cudaStream_t stream) {
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  RETURN_IF_ERROR(allow_shared_memory(kernel, device));
  Tiling& tiling = args.tiling;
  int pixels = K::rows(tiling) * K::columns(tiling);
  if (copies_dy) pixels += kWarps * kPatchRows * kPatchColumns;
  const int buffer_bytes = pixels * kBlockChannels * itemsize;
  const int least = copies_dy ? (K::kTaps + 1) * kBlockChannels * 4 : 0;
  tiling.buffers = 2 * buffer_bytes <= device.shared_bytes ? 2 : 1;
  Launch shape = {dim3(1), kThreads, std::max(tiling.buffers * buffer_bytes, least)};
  if (shape.shared_bytes > device.shared_bytes) {
    return ffi::Error::InvalidArgument("depthwise_conv: a tile of " + std::to_string(buffer_bytes) +
                                       " bytes does not fit into the shared memory of this GPU");
  }
  const int groups = divide_up(args.shape.channels, kBlockChannels);
  int64_t blocks = most_blocks;
  if (!exactly) {
    int resident = 1;
    RETURN_IF_ERROR(resident_blocks(kernel, shape, &resident));
    blocks = std::max(1, resident * device.multiprocessors / groups);
    blocks = std::min<int64_t>(blocks, tiling.tiles);
  }
  shape.grid = dim3(static_cast<unsigned>(blocks), groups);
  return launch_kernel(kernel, args, shape, stream);
}

ffi::Error parse_shape(const ffi::AnyBuffer& x, const ffi::AnyBuffer& y, int64_t top, int64_t left,
                       Shape* shape) {
  const auto in = x.dimensions(), out = y.dimensions();
  if (in.size() != 4 || !dtype_of(x) || out.size() != 4) {
    return ffi::Error::InvalidArgument(
        "x must be float32, bfloat16 or float16 with axes image, row, column, channel");
  }
  if (out[0] != in[0] || out[3] != in[3]) {
    return ffi::Error::InvalidArgument("the result has shape " + to_string(out) +
                                       ", which does not fit x of shape " + to_string(in));
  }
  RETURN_IF_ERROR(check_dtype("the result", y, x.element_type()));
  if (in[3] % 2 != 0) {
    return ffi::Error::InvalidArgument("depthwise_conv: the number of channels must be even");
  }
  for (const int64_t size : {in[0] * out[1] * out[2], in[1] * in[2], in[3]}) {
    if (size > INT32_MAX / 8) {
      return ffi::Error::InvalidArgument("x of shape " + to_string(in) + " is too large");
    }
  }
  if (top < 0 || left < 0) {
    return ffi::Error::InvalidArgument("depthwise_conv: padding must not be negative");
  }
  *shape = {static_cast<int>(in[0]), static_cast<int>(in[1]),  static_cast<int>(in[2]),
            static_cast<int>(in[3]), static_cast<int>(out[1]), static_cast<int>(out[2]),
            static_cast<int>(top),   static_cast<int>(left)};
  return ffi::Error::Success();
}

template <typename F>
ffi::Error with_kernel(int64_t height, int64_t width, int64_t stride, const F& f) {
  if (height == 3 && width == 3 && stride == 1) return f(Kernel<3, 3, 1>{});
  if (height == 3 && width == 3 && stride == 2) return f(Kernel<3, 3, 2>{});
  if (height == 5 && width == 5 && stride == 1) return f(Kernel<5, 5, 1>{});
  if (height == 5 && width == 5 && stride == 2) return f(Kernel<5, 5, 2>{});
  if (height == 7 && width == 7 && stride == 1) return f(Kernel<7, 7, 1>{});
  if (height == 1 && width == 3 && stride == 1) return f(Kernel<1, 3, 1>{});
  if (height == 1 && width == 4 && stride == 1) return f(Kernel<1, 4, 1>{});
  if (height == 1 && width == 7 && stride == 1) return f(Kernel<1, 7, 1>{});
  return ffi::Error::InvalidArgument("depthwise_conv: there is no kernel of " +
                                     std::to_string(height) + " x " + std::to_string(width) +
                                     " with stride " + std::to_string(stride));
}

template <typename F>
ffi::Error with_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kFloat32:
      return f(float{});
    case Dtype::kBfloat16:
      return f(__nv_bfloat16{});
    default:
      return f(__half{});
  }
}

bool is_wide(const ffi::AnyBuffer& x, std::initializer_list<const void*> pointers) {
  const int itemsize = *dtype_of(x) == Dtype::kFloat32 ? 4 : 2;
  return x.dimensions()[3] * itemsize % 16 == 0 && are_aligned(pointers);
}

ffi::Error conv(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer weights, ffi::AnyBuffer bias,
                ffi::AnyBuffer residual, ffi::Result<ffi::AnyBuffer> y,
                ffi::Result<ffi::AnyBuffer> z, int64_t height, int64_t width, int64_t stride,
                int64_t top, int64_t left, std::string_view activation) {
  ConvArgs args = {};
  RETURN_IF_ERROR(parse_shape(x, *y, top, left, &args.shape));
  const int64_t channels = args.shape.channels;
  RETURN_IF_ERROR(check_float32("weights", weights, {height * width, channels}));
  RETURN_IF_ERROR(parse_parameter("bias", bias, channels, &args.bias));
  const auto out = y->dimensions();
  for (const auto& [name, buffer] :
       {std::pair<std::string_view, ffi::AnyBuffer>{"residual", residual}, {"z", *z}}) {
    if (is_absent(buffer)) continue;
    RETURN_IF_ERROR(check_shape(name, buffer, {out[0], out[1], out[2], out[3]}));
    RETURN_IF_ERROR(check_dtype(name, buffer, x.element_type()));
  }
  if (!parse_activation(activation, &args.activation)) {
    return ffi::Error::InvalidArgument("depthwise_conv: an activation is not known: " +
                                       std::string(activation));
  }
  args.x = x.untyped_data();
  args.weights = static_cast<const float*>(weights.untyped_data());
  args.residual = data_or_null(residual);
  args.y = y->untyped_data();
  args.z = data_or_null(*z);
  return with_kernel(height, width, stride, [&](auto kernel) {
    using K = decltype(kernel);
    if (is_absent(*y)) return ffi::Error::Success();
    args.tiling.wide = is_wide(x, {args.x});
    arrange(args.shape, &args.tiling);
    args.tiling.tiles = args.shape.images * args.tiling.down * args.tiling.across;
    return with_dtype(*dtype_of(x), [&](auto type) {
      using T = decltype(type);
      return launch<K>(depthwise_conv_kernel<T, K>, args, sizeof(T), false, 0, false, stream);
    });
  });
}

ffi::Error conv_weights(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer dy,
                        ffi::Result<ffi::AnyBuffer> sums, int64_t height, int64_t width,
                        int64_t stride, int64_t top, int64_t left) {
  WeightsArgs args = {};
  RETURN_IF_ERROR(parse_shape(x, dy, top, left, &args.shape));
  const auto shape = sums->dimensions();
  if (shape.size() != 3 || shape[0] < 1 || shape[0] > INT32_MAX) {
    return ffi::Error::InvalidArgument("sums has shape " + to_string(shape) +
                                       ", but it must be [blocks, taps + 1, channels]");
  }
  RETURN_IF_ERROR(
      check_float32("sums", *sums, {shape[0], height * width + 1, args.shape.channels}));
  args.x = x.untyped_data();
  args.dy = dy.untyped_data();
  args.sums = static_cast<float*>(sums->untyped_data());
  return with_kernel(height, width, stride, [&](auto kernel) {
    using K = decltype(kernel);
    if (is_absent(*sums)) return ffi::Error::Success();
    args.tiling.wide = is_wide(x, {args.x, args.dy});
    arrange(args.shape, &args.tiling);
    args.tiling.tiles = args.shape.images * args.tiling.down * args.tiling.across;
    return with_dtype(*dtype_of(x), [&](auto type) {
      using T = decltype(type);
      return launch<K>(depthwise_weights_kernel<T, K>, args, sizeof(T), true, shape[0], true,
                       stream);
    });
  });
}

}  // namespace

DEFINE_HANDLER(jaxfused_depthwise_conv, conv,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // weights
                   .Arg<ffi::AnyBuffer>()  // bias
                   .Arg<ffi::AnyBuffer>()  // residual
                   .Ret<ffi::AnyBuffer>()  // y
                   .Ret<ffi::AnyBuffer>()  // z
                   .Attr<int64_t>("height")
                   .Attr<int64_t>("width")
                   .Attr<int64_t>("stride")
                   .Attr<int64_t>("top")
                   .Attr<int64_t>("left")
                   .Attr<std::string_view>("activation"));

DEFINE_HANDLER(jaxfused_depthwise_conv_weights, conv_weights,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // dy
                   .Ret<ffi::AnyBuffer>()  // sums
                   .Attr<int64_t>("height")
                   .Attr<int64_t>("width")
                   .Attr<int64_t>("stride")
                   .Attr<int64_t>("top")
                   .Attr<int64_t>("left"));
