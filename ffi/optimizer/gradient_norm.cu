// The sum of the squares of all gradients of a tree, and whether one of them is not finite, in one
// pass. The order of the additions is fixed.

#include "common/handler.h"
#include "common/operands.h"
#include "multi_tensor.h"

namespace {

constexpr int kVectors = 4;
constexpr int kTile = kLeafTile<kVectors>;
constexpr int kMostBlocks = 2048;

struct NormArgs {
  const float* factor;  // factor that multiplies the gradients
  float2* partial;      // for each block: sum of squares, and non-zero if a value is not finite
  Leaves leaves;
};
static_assert(sizeof(NormArgs) <= 32764);

__device__ __forceinline__ void add(float value, float& sum, bool& finite) {
  sum += value * value;
  finite = finite && isfinite(value);
}

__global__ void __launch_bounds__(kLeafThreads) sum_squares(const __grid_constant__ NormArgs args) {
  const Leaves& leaves = args.leaves;
  const Dtype dtype = leaves.dtypes[0];
  const float factor = __ldg(args.factor);
  float sum = 0.0f;
  bool finite = true;
  int64_t tile_index = static_cast<int64_t>(blockIdx.x);
  LeafCursor cursor(leaves, tile_index);
  for (; tile_index < leaves.tiles; tile_index += gridDim.x) {
    const Leaf& leaf = cursor.later(tile_index);
    const LeafTile tile(leaf, tile_index, kTile);
    RawVector raw[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int start = vector_start<kVectors>(v);
      if (start < tile.whole) raw[v] = load_raw(leaf.data[0], dtype, tile.start + start);
    }
    // Each tile has its own sum, so that rounding errors do not grow with the length of the sum.
    float of_tile = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (vector_start<kVectors>(v) >= tile.whole) continue;
      float values[kLeafVec];
      unpack_raw(raw[v], dtype, values);
#pragma unroll
      for (const float value : values) add(value * factor, of_tile, finite);
    }
    for (int i = tile.whole + threadIdx.x; i < tile.values; i += kLeafThreads) {
      add(load_value(leaf.data[0], dtype, tile.start + i) * factor, of_tile, finite);
    }
    sum += of_tile;
  }
  const float2 total = block_total(sum, finite ? 0.0f : 1.0f);
  if (threadIdx.x == 0) args.partial[blockIdx.x] = total;
}

// Adds up the blocks' `partial` [blocks] into `stats`; launched with one block.
__global__ void __launch_bounds__(kLeafThreads)
    add_blocks(const float2* partial, int blocks, float2* stats) {
  float sum = 0.0f, nonfinite = 0.0f;
  for (int i = threadIdx.x; i < blocks; i += kLeafThreads) {
    sum += partial[i].x;
    nonfinite += partial[i].y;
  }
  const float2 total = block_total(sum, nonfinite);
  if (threadIdx.x == 0) *stats = make_float2(total.x, total.y > 0.0f ? 1.0f : 0.0f);
}

ffi::Error gradient_norm(cudaStream_t stream, ffi::AnyBuffer factor, ffi::RemainingArgs gradients,
                         ffi::Result<ffi::AnyBuffer> stats, ffi::Result<ffi::AnyBuffer> partial,
                         ffi::RemainingRets none) {
  RETURN_IF_ERROR(check_float32("factor", factor, {1}));
  RETURN_IF_ERROR(check_float32("stats", *stats, {2}));
  RETURN_IF_ERROR(check_float32("partial", *partial, {kMostBlocks, 2}));
  NormArgs args = {};
  std::vector<int64_t> decays(gradients.size());
  RETURN_IF_ERROR(parse_leaves(gradients, none, 1, 0, {decays.data(), decays.size()}, kTile,
                               nullptr, &args.leaves));
  args.factor = static_cast<const float*>(factor.untyped_data());
  args.partial = static_cast<float2*>(partial->untyped_data());
  Device device = {};
  RETURN_IF_ERROR(current_device(&device));
  Launch launch = {dim3(1), kLeafThreads, 0};
  int resident = 0;
  RETURN_IF_ERROR(resident_blocks(sum_squares, launch, &resident));
  const int blocks = static_cast<int>(std::min<int64_t>(
      {args.leaves.tiles, kMostBlocks, int64_t{resident} * device.multiprocessors}));
  if (blocks > 0) {
    launch.grid = dim3(static_cast<unsigned>(blocks));
    RETURN_IF_ERROR(launch_kernel(sum_squares, args, launch, stream));
  }
  add_blocks<<<1, kLeafThreads, 0, stream>>>(args.partial, blocks,
                                             static_cast<float2*>(stats->untyped_data()));
  return check_cuda(cudaGetLastError(), "kernel launch");
}

}  // namespace

DEFINE_HANDLER(jaxfused_gradient_norm, gradient_norm,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // factor
                   .RemainingArgs()
                   .Ret<ffi::AnyBuffer>()  // stats
                   .Ret<ffi::AnyBuffer>()  // partial
                   .RemainingRets(),
               {ffi::Traits::kCmdBufferCompatible});
