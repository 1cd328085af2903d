// Muon's momentum for leaves of one shape, or its transpose, updated in place. The kernels also
// write the operands of the orthogonalisation: the stack of all matrices, their transposes, and the
// sum of squares of each matrix.

#include <string>

#include "common/handler.h"
#include "common/operands.h"
#include "multi_tensor.cuh"

namespace {

constexpr int kSide = 64;  // rows and columns of a tile, which a block transposes
constexpr int kVectorsOfRow = kSide / kLeafVec;
constexpr int kRowsAtOnce = kLeafThreads / kVectorsOfRow;
constexpr int kSteps = kSide / kRowsAtOnce;

struct MomentumScalars {
  float beta, one_minus_beta;
  float factor;                    // factor that multiplies the gradients
  float of_momentum, of_gradient;  // weights of momentum and gradient in `wide`
};

struct MomentumLeaf {
  const void* gradient;
  void* momentum;
  int rows;
  int columns;
  uint32_t first_tile;
  uint32_t first_matrix;
  uint32_t is_tall;  // whether rows are the long side, so that `wide` gets the transpose
};

struct MomentumArgs {
  Dtype gradient_dtype, momentum_dtype, dtype;
  int count;
  uint32_t tiles, matrices;
  const MomentumScalars* scalars;
  void* wide;  // all matrices, [matrices, rows, columns] with rows <= columns
  void* tall;  // transposes of `wide`
  float* partial;
  float* squares;
  bool rounds;  // whether to round `wide` and `tall` to tf32
  MomentumLeaf leaves[kMaxLeaves];
};
static_assert(sizeof(MomentumArgs) <= 32764);

__host__ __device__ __forceinline__ int tiles_of(const MomentumLeaf& leaf) {
  return divide_up(leaf.rows, kSide) * divide_up(leaf.columns, kSide);
}

// Rounds to TF32, whose mantissa has 10 bits; ties go away from zero.
__device__ __forceinline__ float rounded_to_tf32(float value) {
  if (value != value) return value;  // A NaN's bits could overflow into a number's.
  return __uint_as_float((__float_as_uint(value) + 0x1000u) & ~0x1fffu);
}

// Returns the sum over the block's threads.
__device__ float block_total(float value) {
  __shared__ float of_warps[kLeafWarps];
  float values[] = {value};
  add_over_lanes(kWarpSize, values);
  if (threadIdx.x % kWarpSize == 0) of_warps[threadIdx.x / kWarpSize] = values[0];
  __syncthreads();
  float total = 0.0f;
  for (const float of_warp : of_warps) total += of_warp;
  return total;
}

template <int kCount>
__device__ __forceinline__ void store_kept(void* data, Dtype dtype, int64_t index,
                                           const float (&values)[kCount]) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    Vector<T, kCount> vector;
    pack(values, vector);
    store_vector(static_cast<T*>(data) + index, vector);
  });
}

__global__ void __launch_bounds__(kLeafThreads, 4)
    update_momentum(const __grid_constant__ MomentumArgs args) {
  __shared__ float values_of_tile[kSide][kSide + 1];
  const MomentumScalars s = *args.scalars;
  const MomentumLeaf& leaf = args.leaves[leaf_at<&MomentumLeaf::first_tile>(args, blockIdx.x)];
  const int of_matrix = tiles_of(leaf), across = divide_up(leaf.columns, kSide);
  const int index = static_cast<int>(blockIdx.x - leaf.first_tile);
  const int matrix = index / of_matrix;
  const int row = index % of_matrix / across * kSide, column = index % across * kSide;
  const int64_t size = static_cast<int64_t>(leaf.rows) * leaf.columns;
  const int64_t of_leaf = matrix * size, of_group = (leaf.first_matrix + matrix) * size;
  void* as_it_is = leaf.is_tall ? args.tall : args.wide;
  void* turned = leaf.is_tall ? args.wide : args.tall;
  const int vector = static_cast<int>(threadIdx.x) % kVectorsOfRow * kLeafVec;
  const int first = static_cast<int>(threadIdx.x) / kVectorsOfRow;
  RawVector gradients[kSteps], momenta[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int r = row + first + i * kRowsAtOnce, c = column + vector;
    if (r >= leaf.rows || c >= leaf.columns) continue;
    const int64_t place = of_leaf + static_cast<int64_t>(r) * leaf.columns + c;
    gradients[i] = load_raw(leaf.gradient, args.gradient_dtype, place);
    momenta[i] = load_raw(leaf.momentum, args.momentum_dtype, place);
  }
  keep_loads_together();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int r = row + first + i * kRowsAtOnce, c = column + vector;
    float values[kLeafVec] = {};
    if (r < leaf.rows && c < leaf.columns) {
      float gradient[kLeafVec], momentum[kLeafVec];
      unpack_raw(gradients[i], args.gradient_dtype, gradient);
      unpack_raw(momenta[i], args.momentum_dtype, momentum);
#pragma unroll
      for (int j = 0; j < kLeafVec; ++j) {
        const float g = gradient[j] * s.factor;
        momentum[j] = s.beta * momentum[j] + s.one_minus_beta * g;
        values[j] = s.of_momentum * momentum[j] + s.of_gradient * g;
        sum += values[j] * values[j];
        if (args.rounds) values[j] = rounded_to_tf32(values[j]);
      }
      const int64_t place = static_cast<int64_t>(r) * leaf.columns + c;
      store_values(leaf.momentum, args.momentum_dtype, of_leaf + place, momentum);
      store_kept(as_it_is, args.dtype, of_group + place, values);
    }
#pragma unroll
    for (int j = 0; j < kLeafVec; ++j) {
      values_of_tile[first + i * kRowsAtOnce][vector + j] = values[j];
    }
  }
  const float total = block_total(sum);  // its barrier also orders the writes to the tile
  if (threadIdx.x == 0) args.partial[blockIdx.x] = total;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int c = first + i * kRowsAtOnce;
    if (column + c >= leaf.columns || row + vector >= leaf.rows) continue;
    float values[kLeafVec];
#pragma unroll
    for (int j = 0; j < kLeafVec; ++j) values[j] = values_of_tile[vector + j][c];
    store_kept(turned, args.dtype,
               of_group + static_cast<int64_t>(column + c) * leaf.rows + row + vector, values);
  }
}

// Adds up the sums of squares of a matrix's tiles; each block has one matrix.
__global__ void __launch_bounds__(kLeafThreads)
    add_squares(const __grid_constant__ MomentumArgs args) {
  const MomentumLeaf& leaf = args.leaves[leaf_at<&MomentumLeaf::first_matrix>(args, blockIdx.x)];
  const int tiles = tiles_of(leaf);
  const float* partial =
      args.partial + leaf.first_tile + static_cast<int64_t>(blockIdx.x - leaf.first_matrix) * tiles;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < tiles; i += kLeafThreads) sum += partial[i];
  const float total = block_total(sum);
  if (threadIdx.x == 0) args.squares[blockIdx.x] = total;
}

ffi::Error check_leaf(const std::string& name, const ffi::AnyBuffer& array, int64_t size,
                      bool is_first, Dtype* dtype) {
  const auto own = dtype_of(array);
  if (!own) return ffi::Error::InvalidArgument(name + " must be float32, bfloat16 or float16");
  if (is_first) *dtype = *own;
  if (*own != *dtype || static_cast<int64_t>(array.element_count()) != size) {
    return ffi::Error::InvalidArgument(name + " has another dtype or size than its leaf needs");
  }
  if (!are_aligned({array.untyped_data()})) {
    return ffi::Error::InvalidArgument(name + " does not start at a multiple of 16 bytes");
  }
  return ffi::Error::Success();
}

// Updates the momenta. `arrays` has each leaf's gradient and momentum, and `results` the same
// momentum buffers. `rows` has the rows of each leaf's matrices: the short or long side of `wide`.
ffi::Error muon_momentum(cudaStream_t stream, ffi::AnyBuffer scalars, ffi::RemainingArgs arrays,
                         ffi::Result<ffi::AnyBuffer> wide, ffi::Result<ffi::AnyBuffer> tall,
                         ffi::Result<ffi::AnyBuffer> squares, ffi::Result<ffi::AnyBuffer> partial,
                         ffi::RemainingRets results, ffi::Span<const int64_t> batches,
                         ffi::Span<const int64_t> rows, bool rounds) {
  RETURN_IF_ERROR(check_float32("scalars", scalars, {sizeof(MomentumScalars) / sizeof(float)}));
  const auto shape = wide->dimensions();
  if (shape.size() != 3)
    return ffi::Error::InvalidArgument("there must be [matrices, rows, columns]");
  const size_t count = batches.size();
  if (count == 0 || count > kMaxLeaves || rows.size() != count || arrays.size() != 2 * count ||
      results.size() != count) {
    return ffi::Error::InvalidArgument("each leaf must have a gradient and a momentum");
  }
  const int64_t short_side = shape[1], long_side = shape[2];
  if (short_side % kLeafVec != 0 || long_side % kLeafVec != 0) {
    return ffi::Error::InvalidArgument("rows and columns must be multiples of 4");
  }
  MomentumArgs args = {};
  args.count = static_cast<int>(count);
  int64_t tiles = 0, matrices = 0;
  for (size_t i = 0; i < count; ++i) {
    MomentumLeaf& leaf = args.leaves[i];
    if (rows[i] != short_side && rows[i] != long_side) {
      return ffi::Error::InvalidArgument("a leaf has other sides than its group");
    }
    leaf.is_tall = rows[i] != short_side;
    leaf.rows = static_cast<int>(rows[i]);
    leaf.columns = static_cast<int>(leaf.is_tall ? short_side : long_side);
    leaf.first_tile = static_cast<uint32_t>(tiles);
    leaf.first_matrix = static_cast<uint32_t>(matrices);
    tiles += batches[i] * tiles_of(leaf);
    matrices += batches[i];
    const int64_t size = batches[i] * short_side * long_side;
    const std::string name = "leaf " + std::to_string(i);
    const auto gradient = arrays.get<ffi::AnyBuffer>(2 * i);
    if (!gradient.has_value()) return gradient.error();
    RETURN_IF_ERROR(check_leaf(name, *gradient, size, i == 0, &args.gradient_dtype));
    const auto momentum = arrays.get<ffi::AnyBuffer>(2 * i + 1);
    if (!momentum.has_value()) return momentum.error();
    RETURN_IF_ERROR(check_leaf(name, *momentum, size, i == 0, &args.momentum_dtype));
    const auto result = results.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return result.error();
    if ((*result)->untyped_data() != momentum->untyped_data()) {
      return ffi::Error::InvalidArgument(name + " is not updated in place");
    }
    leaf.gradient = gradient->untyped_data();
    leaf.momentum = momentum->untyped_data();
  }
  if (tiles > INT32_MAX) return ffi::Error::InvalidArgument("the leaves are too large");
  RETURN_IF_ERROR(check_shape("wide", *wide, {matrices, short_side, long_side}));
  RETURN_IF_ERROR(check_shape("tall", *tall, {matrices, long_side, short_side}));
  RETURN_IF_ERROR(check_dtype("tall", *tall, wide->element_type()));
  const auto dtype = dtype_of(*wide);
  if (!dtype) return ffi::Error::InvalidArgument("wide must be float32, bfloat16 or float16");
  RETURN_IF_ERROR(check_float32("squares", *squares, {matrices}));
  RETURN_IF_ERROR(check_float32("partial", *partial, {tiles}));
  args.dtype = *dtype;
  args.rounds = rounds && *dtype == Dtype::kFloat32;
  args.tiles = static_cast<uint32_t>(tiles);
  args.matrices = static_cast<uint32_t>(matrices);
  args.scalars = static_cast<const MomentumScalars*>(scalars.untyped_data());
  args.wide = wide->untyped_data();
  args.tall = tall->untyped_data();
  args.partial = static_cast<float*>(partial->untyped_data());
  args.squares = static_cast<float*>(squares->untyped_data());
  RETURN_IF_ERROR(
      launch_kernel(update_momentum, args, {dim3(args.tiles), kLeafThreads, 0}, stream));
  return launch_kernel(add_squares, args, {dim3(args.matrices), kLeafThreads, 0}, stream);
}

}  // namespace

DEFINE_HANDLER(jaxfused_muon_momentum, muon_momentum,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // scalars
                   .RemainingArgs()
                   .Ret<ffi::AnyBuffer>()  // wide
                   .Ret<ffi::AnyBuffer>()  // tall
                   .Ret<ffi::AnyBuffer>()  // squares
                   .Ret<ffi::AnyBuffer>()  // partial
                   .RemainingRets()
                   .Attr<ffi::Span<const int64_t>>("batches")
                   .Attr<ffi::Span<const int64_t>>("rows")
                   .Attr<bool>("rounds"),
               {ffi::Traits::kCmdBufferCompatible});
