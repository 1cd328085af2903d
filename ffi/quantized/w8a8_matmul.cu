// A product of x and weights that are both int8 or both float8, with a scale for each row of x and
// each column of the weights, or for each 128 features of them: y = activation(x w + bias) +
// residual. Products of int8 are summed exactly, in the latter case over each 128 features.
//
// A block has 128 rows and 128 columns of the result; its 8 warps have 64 x 32 each. Steps of 128
// bytes along the features pass through a circular buffer in shared memory.

#include <cstdint>
#include <string>

#include "common/handler.h"
#include "common/mma_bytes.cuh"
#include "common/operands.h"
#include "quantized_epilogue.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kTile = 128;  // rows and columns of a tile, features of a step
constexpr int kTileBytes = kTile * kTile;
constexpr int kStageBytes = 2 * kTileBytes;
constexpr int kMaxStages = 3;
constexpr int kRowTiles = 4;     // tiles of 16 rows in a warp
constexpr int kColumnTiles = 4;  // tiles of 8 columns in a warp
constexpr int kResultBytes = kTile * kTile * 4;

struct ProductArgs {
  const uint8_t* x;      // [rows, features]
  const uint8_t* w;      // [columns, features]
  const float* x_scale;  // [rows, groups], or nullptr without groups
  const float* w_scale;  // [groups, columns], or nullptr without groups
  int groups;            // number of groups of kTile features that share a scale
  int features;
  int stages;
  QuantizedEpilogue epilogue;
};

// Returns the offset of 16 bytes of a row in shared memory, swizzled so that eight adjacent rows
// have them in different banks.
__device__ __forceinline__ int place(int row, int copy) {
  return row * kTile + ((copy ^ (row & 7)) * 16);
}

// Copies 128 features from `start` on of 128 rows; zeros replace what lies beyond the matrix.
__device__ __forceinline__ void copy_tile(uint32_t shared, const uint8_t* matrix, int rows,
                                          int features, int start) {
  constexpr int kRowCopies = kTile / 16, kPassRows = kThreads / kRowCopies;
  const int copy = threadIdx.x % kRowCopies, first_row = threadIdx.x / kRowCopies;
  const int from = start + copy * 16;
#pragma unroll
  for (int row = first_row; row < kTile; row += kPassRows) {
    const bool exists = row < rows && from < features;
    const uint8_t* source = matrix + (exists ? static_cast<int64_t>(row) * features + from : 0);
    async_copy_or_zero(shared + place(row, copy), source, exists);
  }
}

// Returns the index of a sum in shared memory. Rows are swizzled by 8 columns, so that the rows
// that threads write at a time are in different banks.
__device__ __forceinline__ int place_of_sum(int row, int column) {
  return row * kTile + (column ^ ((row & 3) * 8));
}

// Computes a tile of the product. With kGroups, each step's sums (over 128 features) are multiplied
// by their scales and added in float32.
template <typename V, bool kGroups>
__global__ void __launch_bounds__(kThreads, 1) quantized_product_kernel(ProductArgs args) {
  if constexpr (kHasByteProducts<V>) {
    using Sum = std::conditional_t<std::is_same_v<V, int8_t>, int, float>;
    extern __shared__ __align__(128) uint8_t memory[];
    const uint32_t shared = shared_address(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_row = warp / 4 * (16 * kRowTiles), warp_column = warp % 4 * (8 * kColumnTiles);
    const int row_start = blockIdx.x * kTile, column_start = blockIdx.y * kTile;
    const int rows = min(kTile, args.epilogue.rows - row_start);
    const int columns = min(kTile, args.epilogue.columns - column_start);
    const uint8_t* x = args.x + static_cast<int64_t>(row_start) * args.features;
    const uint8_t* w = args.w + static_cast<int64_t>(column_start) * args.features;
    const auto start_copies = [&](int step, int slot) {
      const uint32_t base = shared + slot * kStageBytes;
      copy_tile(base, x, rows, args.features, step * kTile);
      copy_tile(base + kTileBytes, w, columns, args.features, step * kTile);
      async_copies_commit();
    };

    const int steps = (args.features + kTile - 1) / kTile;
    for (int stage = 0; stage < args.stages - 1; ++stage) {
      if (stage < steps) {
        start_copies(stage, stage);
      } else {
        async_copies_commit();
      }
    }
    // Row and 16-byte chunk whose address this thread gives to ldmatrix.
    const int a_row = warp_row + lane % 16, a_copy = lane / 16;
    const int b_row = warp_column + lane / 16 * 8 + lane % 8, b_copy = lane / 8 % 2;
    Sum sums[kRowTiles][kColumnTiles][4] = {};
    float totals[kGroups ? kRowTiles : 1][kColumnTiles][4] = {};
    int slot = 0, free_slot = args.stages - 1;
    for (int step = 0; step < steps; ++step) {
      async_copies_wait(args.stages - 2);
      __syncthreads();
      if (step + args.stages - 1 < steps) {
        start_copies(step + args.stages - 1, free_slot);
      } else {
        async_copies_commit();
      }
      float row_scales[kRowTiles][2], column_scales[kColumnTiles][2];
      if constexpr (kGroups) {
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i) {
          const int row = warp_row + 8 * i + lane / 4;
          const int64_t place = static_cast<int64_t>(row_start + row) * args.groups + step;
          row_scales[i / 2][i % 2] = row < rows ? args.x_scale[place] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < 2 * kColumnTiles; ++j) {
          const int column = warp_column + j / 2 * 8 + lane % 4 * 2 + j % 2;
          const int64_t place =
              static_cast<int64_t>(step) * args.epilogue.columns + column_start + column;
          column_scales[j / 2][j % 2] = column < columns ? args.w_scale[place] : 0.0f;
        }
      }
      const uint32_t x_tile = shared + slot * kStageBytes, w_tile = x_tile + kTileBytes;
      // Hopper's mma converts float8 before it multiplies: unrolled, that takes too many registers.
#pragma unroll(std::is_same_v<V, int8_t> ? kTile / 32 : 1)
      for (int part = 0; part < kTile / 32; ++part) {
        uint32_t b[kColumnTiles / 2][4];
#pragma unroll
        for (int pair = 0; pair < kColumnTiles / 2; ++pair) {
          load_matrices(b[pair], w_tile + place(b_row + 16 * pair, 2 * part + b_copy));
        }
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          uint32_t a[4];
          load_matrices(a, x_tile + place(a_row + 16 * i, 2 * part + a_copy));
#pragma unroll
          for (int j = 0; j < kColumnTiles; ++j) {
            multiply_add_bytes(V{}, sums[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
          }
        }
      }
      if constexpr (kGroups) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const float sum = static_cast<float>(sums[i][j][k]) * row_scales[i][k / 2];
              totals[i][j][k] = fmaf(sum, column_scales[j][k % 2], totals[i][j][k]);
              sums[i][j][k] = 0;
            }
          }
        }
      }
      slot = slot + 1 == args.stages ? 0 : slot + 1;
      free_slot = free_slot + 1 == args.stages ? 0 : free_slot + 1;
    }

    // The sums reuse the pipeline's memory, from which adjacent columns are written as vectors.
    async_copies_wait(0);
    __syncthreads();
    float* found = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_row + 16 * i + 8 * half + lane / 4;
          const int column = warp_column + 8 * j + lane % 4 * 2;
          float2 pair;
          if constexpr (kGroups) {
            pair = {totals[i][j][2 * half], totals[i][j][2 * half + 1]};
          } else {
            pair = {static_cast<float>(sums[i][j][2 * half]),
                    static_cast<float>(sums[i][j][2 * half + 1])};
          }
          *reinterpret_cast<float2*>(found + place_of_sum(row, column)) = pair;
        }
      }
    }
    __syncthreads();
    constexpr int kVectors = kTile / kEpilogueVec;
    for (int i = threadIdx.x; i < rows * kVectors; i += kThreads) {
      const int row = i / kVectors, column = i % kVectors * kEpilogueVec;
      if (column >= columns) continue;
      const float4 sum = *reinterpret_cast<const float4*>(found + place_of_sum(row, column));
      float z[kMaxProducts][kEpilogueVec] = {{sum.x, sum.y, sum.z, sum.w}};
      finish(args.epilogue, row_start + row, column_start + column, z);
    }
  }
}

using Kernel = void (*)(ProductArgs);

template <typename V>
Kernel kernel_of(bool has_groups) {
  return has_groups ? quantized_product_kernel<V, true> : quantized_product_kernel<V, false>;
}

ffi::Error quantized_matmul_both(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer x_scale,
                                 ffi::AnyBuffer w, ffi::AnyBuffer w_scale, ffi::AnyBuffer bias,
                                 ffi::AnyBuffer residual, ffi::Result<ffi::AnyBuffer> y,
                                 ffi::Result<ffi::AnyBuffer> preactivation,
                                 std::string_view activation) {
  ProductArgs args = {};
  QuantizedEpilogue& epilogue = args.epilogue;
  if (x.dimensions().size() != 2 || w.dimensions().size() != 2) {
    return ffi::Error::InvalidArgument("x and the weights must be matrices");
  }
  const int64_t rows = x.dimensions()[0], features = x.dimensions()[1];
  const int64_t columns = w.dimensions()[0];
  RETURN_IF_ERROR(check_shape("the weights", w, {columns, features}));
  RETURN_IF_ERROR(check_dtype("the weights", w, x.element_type()));
  if (rows < 1 || rows > kMaxRows || columns < 1 || columns > kTile * 65535 || features < 1 ||
      features > kMaxRows || features % 16 != 0) {
    return ffi::Error::InvalidArgument("x has shape " + to_string(x.dimensions()) +
                                       ", whose features must be a multiple of 16");
  }
  const int64_t groups = w_scale.dimensions().size() == 2 ? w_scale.dimensions()[0] : 1;
  RETURN_IF_ERROR(check_float32("the scale of x", x_scale, {rows, groups}));
  RETURN_IF_ERROR(check_float32("the scale of the weights", w_scale, {groups, columns}));
  if (groups != 1 && groups * kTile != features) {
    return ffi::Error::InvalidArgument("groups must be of 128 features");
  }
  epilogue.rows = static_cast<int>(rows);
  epilogue.columns = static_cast<int>(columns);
  epilogue.products = 1;
  args.groups = static_cast<int>(groups);
  const auto* x_scales = static_cast<const float*>(x_scale.untyped_data());
  const auto* w_scales = static_cast<const float*>(w_scale.untyped_data());
  if (groups > 1) {
    args.x_scale = x_scales;
    args.w_scale = w_scales;
  } else {
    epilogue.row_scale = x_scales;
    epilogue.column_scale[0] = w_scales;
  }
  RETURN_IF_ERROR(parse_epilogue(activation, bias, residual, *y, *preactivation, &epilogue));
  args.x = static_cast<const uint8_t*>(x.untyped_data());
  args.w = static_cast<const uint8_t*>(w.untyped_data());
  args.features = static_cast<int>(features);
  if (!are_aligned({args.x, args.w, epilogue.column_scale[0], epilogue.y.data,
                    epilogue.preactivation.data, epilogue.residual.data, epilogue.bias[0].data})) {
    return ffi::Error::InvalidArgument("an array does not begin at a multiple of 16 bytes");
  }
  Kernel kernel = nullptr;
  switch (x.element_type()) {
    case ffi::DataType::S8:
      kernel = kernel_of<int8_t>(groups > 1);
      break;
    case ffi::DataType::F8E4M3FN:
      kernel = kernel_of<E4m3>(groups > 1);
      break;
    case ffi::DataType::F8E5M2:
      kernel = kernel_of<E5m2>(groups > 1);
      break;
    default:
      return ffi::Error::InvalidArgument("x must be int8 or float8");
  }
  Device device = {};
  RETURN_IF_ERROR(current_device(&device));
  args.stages = std::min(kMaxStages, device.shared_bytes / kStageBytes);
  if (args.stages < 2) {
    return ffi::Error::InvalidArgument("a block of this GPU has too little shared memory for it");
  }
  const Launch launch = {dim3(static_cast<unsigned>((rows + kTile - 1) / kTile),
                              static_cast<unsigned>((columns + kTile - 1) / kTile)),
                         kThreads, std::max(args.stages * kStageBytes, kResultBytes)};
  RETURN_IF_ERROR(allow_shared_memory(kernel, device));
  return launch_kernel(kernel, args, launch, stream);
}

}  // namespace

DEFINE_HANDLER(jaxfused_quantized_matmul_both, quantized_matmul_both,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // x_scale
                   .Arg<ffi::AnyBuffer>()  // w
                   .Arg<ffi::AnyBuffer>()  // w_scale
                   .Arg<ffi::AnyBuffer>()  // bias
                   .Arg<ffi::AnyBuffer>()  // residual
                   .Ret<ffi::AnyBuffer>()  // y
                   .Ret<ffi::AnyBuffer>()  // preactivation
                   .Attr<std::string_view>("activation"),
               {ffi::Traits::kCmdBufferCompatible});
