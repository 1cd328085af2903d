// Adafactor's reductions over the leaves of a tree, each a batch of matrices: the sums of squares
// of rows and columns in one pass over the gradients, second moments from these, and the sums of
// the squares of the updates in another pass. The order of all additions is fixed.
//
// A matrix is cut into tiles of kRows x kColumns values, which are numbered across all leaves. A
// block sums a tile's rows and columns. Another kernel, with a thread for each row and column, adds
// up the tiles' sums.

#include <string>

#include "common/handler.h"
#include "common/operands.h"
#include "multi_tensor.cuh"

namespace {

constexpr int kColumnThreads = 128;
constexpr int kPhases = kLeafThreads / kColumnThreads;  // rows that a block reads at a time
constexpr int kColumns = kColumnThreads * kLeafVec;
constexpr int kRows = 64;
constexpr int kTogether = 8;  // rows of a thread whose loads are in flight together
constexpr int kColumnWarps = kColumnThreads / kWarpSize;
static_assert(kRows % (kPhases * kTogether) == 0);

struct FactoredLeaf {
  void* gradient;
  void* parameter;
  void* moments[2];  // moments of the rows and of the columns
  int batch;
  int rows;
  int columns;
  uint32_t first_tile;
  uint32_t first_sum;     // index of the leaf's first row sum; column sums follow
  uint32_t first_matrix;  // index of the leaf's first matrix among all leaves'
  uint32_t first_partial[2];
  float inverse_counts[2];  // 1 / number of values of a row and a column, on all devices
  uint16_t normalizes_columns;
  uint16_t whole;  // whether rows consist of whole, aligned vectors
};

struct FactoredArgs {
  Dtype gradient_dtype, parameter_dtype, moment_dtype;
  int count;
  uint32_t tiles, sums, matrices;
  const float* scalars;
  float* partial;       // row sums of each strip of columns, column sums of each block of rows
  float2* tile_totals;  // for each tile, sums of squares of gradients or updates, and parameters
  float* of_lines;      // sums of squares of each row and each column
  float2* totals;       // totals of each leaf or each matrix
  float* moment_sums;   // sum of each matrix's row or column moments, whose mean is needed
  FactoredLeaf leaves[kMaxLeaves];
};
static_assert(sizeof(FactoredArgs) <= 32764);

// The scalars of a step, which the kernels read from device memory.
struct FactoredScalars {
  float decay, one_minus_decay;
  float squared_factor;  // square of the factor that multiplies the gradients
  float eps;
};

__host__ __device__ __forceinline__ int strips_of(const FactoredLeaf& leaf) {
  return divide_up(leaf.columns, kColumns);
}

__host__ __device__ __forceinline__ int blocks_of(const FactoredLeaf& leaf) {
  return divide_up(leaf.rows, kRows);
}

// A tile's position in its leaf, and a thread's columns in the tile.
struct FactoredTile {
  int matrix, block, strip;
  int first_row, rows, column, columns;  // the thread has `columns` columns from `column` on
  int64_t start;                         // offset of the tile's first row, at `column`

  __device__ FactoredTile(const FactoredLeaf& leaf, uint32_t tile) {
    const int strips = strips_of(leaf), blocks = blocks_of(leaf);
    const int index = static_cast<int>(tile - leaf.first_tile);
    strip = index % strips;
    block = index / strips % blocks;
    matrix = index / strips / blocks;
    first_row = block * kRows;
    rows = min(kRows, leaf.rows - first_row);
    column = strip * kColumns + static_cast<int>(threadIdx.x) % kColumnThreads * kLeafVec;
    columns = max(0, min(kLeafVec, leaf.columns - column));
    start = (static_cast<int64_t>(matrix) * leaf.rows + first_row) * leaf.columns + column;
  }
};

// Calls `take(i, row of the tile, its values)` for each row of a thread, with missing values as 0.
// After every kTogether rows it calls `end(first row)`.
template <typename Take, typename End>
__device__ __forceinline__ void for_rows(const FactoredLeaf& leaf, const FactoredTile& tile,
                                         const void* data, Dtype dtype, const Take& take,
                                         const End& end) {
  const int phase = static_cast<int>(threadIdx.x) / kColumnThreads;
  for (int group = 0; group < kRows; group += kPhases * kTogether) {
    if (group >= tile.rows) break;
    RawVector raw[kTogether];
    if (leaf.whole) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int row = group + i * kPhases + phase;
        raw[i] = make_uint4(0, 0, 0, 0);
        if (row < tile.rows && tile.columns > 0) {
          raw[i] = load_raw(data, dtype, tile.start + static_cast<int64_t>(row) * leaf.columns);
        }
      }
    }
    keep_loads_together();
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int row = group + i * kPhases + phase;
      float values[kLeafVec] = {};
      if (leaf.whole) {
        unpack_raw(raw[i], dtype, values);
      } else if (row < tile.rows) {
#pragma unroll
        for (int j = 0; j < kLeafVec; ++j) {
          if (j >= tile.columns) continue;
          values[j] =
              load_value(data, dtype, tile.start + static_cast<int64_t>(row) * leaf.columns + j);
        }
      }
      take(i, row, values);
    }
    end(group);
  }
}

// Sums the squares of each row and each column of a tile.
__global__ void __launch_bounds__(kLeafThreads, 3)
    sum_tiles(const __grid_constant__ FactoredArgs args) {
  __shared__ float of_rows[kRows][kColumnWarps];
  __shared__ float of_columns[kPhases - 1][kColumns];
  const int phase = threadIdx.x / kColumnThreads, column_thread = threadIdx.x % kColumnThreads;
  for (uint32_t index = blockIdx.x; index < args.tiles; index += gridDim.x) {
    const FactoredLeaf& leaf = args.leaves[leaf_at<&FactoredLeaf::first_tile>(args, index)];
    const FactoredTile tile(leaf, index);
    float columns[kLeafVec] = {};
    float rows[kTogether];
    for_rows(
        leaf, tile, leaf.gradient, args.gradient_dtype,
        [&](int i, int, const float (&values)[kLeafVec]) {
          rows[i] = 0.0f;
#pragma unroll
          for (int j = 0; j < kLeafVec; ++j) {
            const float square = values[j] * values[j];
            columns[j] += square;
            rows[i] += square;
          }
        },
        [&](int group) {
          add_over_lanes(kWarpSize, rows);
          if (threadIdx.x % kWarpSize == 0) {
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
              of_rows[group + i * kPhases + phase][column_thread / kWarpSize] = rows[i];
            }
          }
        });
    float of_parameter = 0.0f;
    if (leaf.parameter != nullptr) {
      for_rows(
          leaf, tile, leaf.parameter, args.parameter_dtype,
          [&](int, int, const float (&values)[kLeafVec]) {
#pragma unroll
            for (const float value : values) of_parameter += value * value;
          },
          [](int) {});
    }
    if (phase > 0) {
#pragma unroll
      for (int j = 0; j < kLeafVec; ++j) {
        of_columns[phase - 1][column_thread * kLeafVec + j] = columns[j];
      }
    }
    __syncthreads();
    float of_gradient = 0.0f;
    if (static_cast<int>(threadIdx.x) < tile.rows) {
#pragma unroll
      for (const float part : of_rows[threadIdx.x]) of_gradient += part;
      const int64_t strip = static_cast<int64_t>(tile.matrix) * strips_of(leaf) + tile.strip;
      args.partial[leaf.first_partial[0] + strip * leaf.rows + tile.first_row + threadIdx.x] =
          of_gradient;
    }
    if (phase == 0) {
      const int64_t block = static_cast<int64_t>(tile.matrix) * blocks_of(leaf) + tile.block;
#pragma unroll
      for (int j = 0; j < kLeafVec; ++j) {
        if (j >= tile.columns) continue;
        float sum = columns[j];
#pragma unroll
        for (int other = 0; other < kPhases - 1; ++other) {
          sum += of_columns[other][column_thread * kLeafVec + j];
        }
        args.partial[leaf.first_partial[1] + block * leaf.columns + tile.column + j] = sum;
      }
    }
    const float2 total = block_total(of_gradient, of_parameter);
    if (threadIdx.x == 0) args.tile_totals[index] = total;
  }
}

// Adds up the tiles' sums of squares of each row and each column into of_lines.
__global__ void __launch_bounds__(kLeafThreads)
    add_lines(const __grid_constant__ FactoredArgs args) {
  const uint32_t index = blockIdx.x * kLeafThreads + threadIdx.x;
  if (index >= args.sums) return;
  const FactoredLeaf& leaf = args.leaves[leaf_at<&FactoredLeaf::first_sum>(args, index)];
  const int64_t line = index - leaf.first_sum;
  const int64_t rows = static_cast<int64_t>(leaf.batch) * leaf.rows;
  const bool is_column = line >= rows;
  const int64_t of_kind = is_column ? line - rows : line;
  const int length = is_column ? leaf.columns : leaf.rows;
  const int parts = is_column ? blocks_of(leaf) : strips_of(leaf);
  const int64_t matrix = of_kind / length;
  const float* partial =
      args.partial + leaf.first_partial[is_column] + matrix * parts * length + of_kind % length;
  float sum = 0.0f;
#pragma unroll 16
  for (int i = 0; i < parts; ++i) sum += partial[static_cast<int64_t>(i) * length];
  args.of_lines[index] = sum;
}

// Adds up tile_totals of each leaf's tiles or, with `of_matrices`, of each matrix's tiles. A block
// has one leaf or one matrix.
__global__ void __launch_bounds__(kLeafThreads)
    add_tiles(const __grid_constant__ FactoredArgs args, bool of_matrices) {
  const int which =
      of_matrices ? leaf_at<&FactoredLeaf::first_matrix>(args, blockIdx.x) : blockIdx.x;
  const FactoredLeaf& leaf = args.leaves[which];
  const int tiles = strips_of(leaf) * blocks_of(leaf);
  const int64_t first =
      leaf.first_tile +
      (of_matrices ? static_cast<int64_t>(blockIdx.x - leaf.first_matrix) * tiles : 0);
  const int64_t count = of_matrices ? tiles : static_cast<int64_t>(tiles) * leaf.batch;
  float2 sum = {0.0f, 0.0f};
  for (int64_t i = threadIdx.x; i < count; i += kLeafThreads) {
    sum.x += args.tile_totals[first + i].x;
    sum.y += args.tile_totals[first + i].y;
  }
  const float2 total = block_total(sum.x, sum.y);
  if (threadIdx.x == 0) args.totals[blockIdx.x] = total;
}

constexpr int kMomentThreads = 1024;

// Updates the second moments of a matrix's rows and columns from their sums of squares, and sums
// the moments of the rows or of the columns: their mean divides the product of a row's moment and a
// column's. Each matrix has a block.
__global__ void __launch_bounds__(kMomentThreads)
    update_moments(const __grid_constant__ FactoredArgs args) {
  const FactoredScalars s = *reinterpret_cast<const FactoredScalars*>(args.scalars);
  const FactoredLeaf& leaf = args.leaves[leaf_at<&FactoredLeaf::first_matrix>(args, blockIdx.x)];
  const int64_t matrix = blockIdx.x - leaf.first_matrix;
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    const int length = kind == 0 ? leaf.rows : leaf.columns;
    const float* squares = args.of_lines + leaf.first_sum + matrix * length +
                           (kind == 0 ? 0 : static_cast<int64_t>(leaf.batch) * leaf.rows);
    const float scale = s.squared_factor * leaf.inverse_counts[kind];
    for (int i = threadIdx.x; i < length; i += kMomentThreads) {
      const int64_t place = matrix * length + i;
      const float old = load_value(leaf.moments[kind], args.moment_dtype, place);
      const float value = s.decay * old + s.one_minus_decay * (squares[i] * scale + s.eps);
      store_value(leaf.moments[kind], args.moment_dtype, place, value);
      // The sums are of the rounded moments, which the next pass reads.
      sums[kind] += load_value(leaf.moments[kind], args.moment_dtype, place);
    }
  }
  const float2 total = block_total<kMomentThreads>(sums[leaf.normalizes_columns], 0.0f);
  if (threadIdx.x == 0) args.moment_sums[blockIdx.x] = total.x;
}

// Sums g^2 / (r c) over a tile's gradients g, with the second moments r of a gradient's row and c
// of its column.
__global__ void __launch_bounds__(kLeafThreads, 4)
    sum_updates(const __grid_constant__ FactoredArgs args) {
  __shared__ float inverse_rows[kRows];
  for (uint32_t index = args.tiles - 1 - blockIdx.x; index < args.tiles; index -= gridDim.x) {
    const FactoredLeaf& leaf = args.leaves[leaf_at<&FactoredLeaf::first_tile>(args, index)];
    const FactoredTile tile(leaf, index);
    __syncthreads();  // all threads have read the previous tile's inverse_rows
    if (static_cast<int>(threadIdx.x) < kRows) {
      const int64_t row = static_cast<int64_t>(tile.matrix) * leaf.rows + tile.first_row;
      inverse_rows[threadIdx.x] =
          static_cast<int>(threadIdx.x) < tile.rows
              ? rsqrtf(load_value(leaf.moments[0], args.moment_dtype, row + threadIdx.x))
              : 0.0f;
    }
    float inverse_columns[kLeafVec] = {};
#pragma unroll
    for (int j = 0; j < kLeafVec; ++j) {
      if (j >= tile.columns) continue;
      const int64_t place = static_cast<int64_t>(tile.matrix) * leaf.columns + tile.column + j;
      inverse_columns[j] = rsqrtf(load_value(leaf.moments[1], args.moment_dtype, place));
    }
    __syncthreads();
    float sum = 0.0f;
    for_rows(
        leaf, tile, leaf.gradient, args.gradient_dtype,
        [&](int, int row, const float (&values)[kLeafVec]) {
#pragma unroll
          for (int j = 0; j < kLeafVec; ++j) {
            // The gradient is multiplied by one factor after the other: the square of the product
            // of both factors could overflow or underflow.
            const float update = values[j] * inverse_rows[row] * inverse_columns[j];
            sum += update * update;
          }
        },
        [](int) {});
    const float2 total = block_total(sum, 0.0f);
    if (threadIdx.x == 0) args.tile_totals[index] = total;
  }
}

// --- handlers -----------------------------------------------------------------------------------

// Fills in each leaf's sizes and its first tile, sum and matrix, and the totals of all leaves.
ffi::Error parse_sizes(ffi::Span<const int64_t> batches, ffi::Span<const int64_t> rows,
                       ffi::Span<const int64_t> columns, FactoredArgs* args) {
  const size_t count = batches.size();
  if (count > kMaxLeaves || rows.size() != count || columns.size() != count) {
    return ffi::Error::InvalidArgument("there are sizes of " + std::to_string(count) + " leaves");
  }
  args->count = static_cast<int>(count);
  int64_t tiles = 0, sums = 0, matrices = 0, partial = 0;
  for (size_t i = 0; i < count; ++i) {
    FactoredLeaf& leaf = args->leaves[i];
    if (batches[i] < 1 || rows[i] < 1 || columns[i] < 1 || rows[i] > INT32_MAX ||
        columns[i] > INT32_MAX || batches[i] > INT32_MAX) {
      return ffi::Error::InvalidArgument("a leaf is empty or too large");
    }
    leaf.batch = static_cast<int>(batches[i]);
    leaf.rows = static_cast<int>(rows[i]);
    leaf.columns = static_cast<int>(columns[i]);
    leaf.first_tile = static_cast<uint32_t>(tiles);
    leaf.first_sum = static_cast<uint32_t>(sums);
    leaf.first_matrix = static_cast<uint32_t>(matrices);
    tiles += batches[i] * strips_of(leaf) * blocks_of(leaf);
    sums += batches[i] * (rows[i] + columns[i]);
    matrices += batches[i];
    leaf.first_partial[0] = static_cast<uint32_t>(partial);
    partial += batches[i] * strips_of(leaf) * rows[i];
    leaf.first_partial[1] = static_cast<uint32_t>(partial);
    partial += batches[i] * blocks_of(leaf) * columns[i];
    if (tiles > INT32_MAX || sums > INT32_MAX || partial > UINT32_MAX) {
      return ffi::Error::InvalidArgument("the leaves are too large");
    }
  }
  args->tiles = static_cast<uint32_t>(tiles);
  args->sums = static_cast<uint32_t>(sums);
  args->matrices = static_cast<uint32_t>(matrices);
  return ffi::Error::Success();
}

// Reads array `index`, which must have `size` elements and, unless `is_first`, the dtype `*dtype`.
ffi::Error next_array(const ffi::RemainingArgs& arrays, size_t index, int64_t size, bool is_first,
                      Dtype* dtype, void** data) {
  const auto array = arrays.get<ffi::AnyBuffer>(index);
  if (!array.has_value()) return array.error();
  const std::string name = "array " + std::to_string(index);
  const auto own = dtype_of(*array);
  if (!own) return ffi::Error::InvalidArgument(name + " must be float32, bfloat16 or float16");
  if (is_first) *dtype = *own;
  if (*own != *dtype || static_cast<int64_t>(array->element_count()) != size) {
    return ffi::Error::InvalidArgument(name + " has another dtype or size than its leaf needs");
  }
  *data = array->untyped_data();
  return ffi::Error::Success();
}

int64_t size_of(const FactoredLeaf& leaf) {
  return static_cast<int64_t>(leaf.batch) * leaf.rows * leaf.columns;
}

int64_t lines_of(const FactoredLeaf& leaf, int kind) {
  return static_cast<int64_t>(leaf.batch) * (kind == 0 ? leaf.rows : leaf.columns);
}

int64_t partial_size(const FactoredArgs& args) {
  const FactoredLeaf& last = args.leaves[args.count - 1];
  return last.first_partial[1] + static_cast<int64_t>(last.batch) * blocks_of(last) * last.columns;
}

ffi::Error launch_tiles(void (*kernel)(FactoredArgs), const FactoredArgs& args,
                        cudaStream_t stream) {
  Device device = {};
  RETURN_IF_ERROR(current_device(&device));
  Launch launch = {dim3(1), kLeafThreads, 0};
  int resident = 0;
  RETURN_IF_ERROR(resident_blocks(kernel, launch, &resident));
  launch.grid = dim3(static_cast<unsigned>(
      std::min<int64_t>(args.tiles, int64_t{resident} * device.multiprocessors)));
  return launch_kernel(kernel, args, launch, stream);
}

ffi::Error add_totals(const FactoredArgs& args, bool of_matrices, cudaStream_t stream) {
  const unsigned blocks = of_matrices ? args.matrices : static_cast<unsigned>(args.count);
  add_tiles<<<blocks, kLeafThreads, 0, stream>>>(args, of_matrices);
  return check_cuda(cudaGetLastError(), "kernel launch");
}

// Computes the sums of squares of all rows and columns, and of each leaf's gradients and parameters
// as a whole. `arrays` are the gradients, followed by the parameters if there are as many again.
ffi::Error factored_sums(cudaStream_t stream, ffi::RemainingArgs arrays,
                         ffi::Result<ffi::AnyBuffer> sums, ffi::Result<ffi::AnyBuffer> totals,
                         ffi::Result<ffi::AnyBuffer> partial,
                         ffi::Result<ffi::AnyBuffer> tile_totals, ffi::Span<const int64_t> batches,
                         ffi::Span<const int64_t> rows, ffi::Span<const int64_t> columns) {
  FactoredArgs args = {};
  RETURN_IF_ERROR(parse_sizes(batches, rows, columns, &args));
  const size_t count = args.count;
  const bool has_parameters = arrays.size() == 2 * count;
  if (count == 0 || (arrays.size() != count && !has_parameters)) {
    return ffi::Error::InvalidArgument("there must be one or two arrays of each leaf");
  }
  for (size_t i = 0; i < count; ++i) {
    FactoredLeaf& leaf = args.leaves[i];
    RETURN_IF_ERROR(
        next_array(arrays, i, size_of(leaf), i == 0, &args.gradient_dtype, &leaf.gradient));
    if (has_parameters) {
      RETURN_IF_ERROR(next_array(arrays, count + i, size_of(leaf), i == 0, &args.parameter_dtype,
                                 &leaf.parameter));
    }
    leaf.whole = leaf.columns % kLeafVec == 0 && are_aligned({leaf.gradient, leaf.parameter});
  }
  RETURN_IF_ERROR(check_float32("sums", *sums, {args.sums}));
  RETURN_IF_ERROR(check_float32("totals", *totals, {args.count, 2}));
  RETURN_IF_ERROR(check_float32("partial", *partial, {partial_size(args)}));
  RETURN_IF_ERROR(check_float32("tile_totals", *tile_totals, {args.tiles, 2}));
  args.of_lines = static_cast<float*>(sums->untyped_data());
  args.totals = static_cast<float2*>(totals->untyped_data());
  args.partial = static_cast<float*>(partial->untyped_data());
  args.tile_totals = static_cast<float2*>(tile_totals->untyped_data());
  RETURN_IF_ERROR(launch_tiles(sum_tiles, args, stream));
  Launch launch = {dim3(divide_up(args.sums, kLeafThreads)), kLeafThreads, 0};
  RETURN_IF_ERROR(launch_kernel(add_lines, args, launch, stream));
  return add_totals(args, false, stream);
}

// Updates the moments in place, and sums those whose mean is needed. `arrays` has the row moments
// and the column moments of each leaf, and `results` are the same buffers.
ffi::Error factored_moments(cudaStream_t stream, ffi::AnyBuffer scalars, ffi::AnyBuffer sums,
                            ffi::RemainingArgs arrays, ffi::Result<ffi::AnyBuffer> moment_sums,
                            ffi::RemainingRets results, ffi::Span<const int64_t> batches,
                            ffi::Span<const int64_t> rows, ffi::Span<const int64_t> columns,
                            ffi::Span<const int64_t> row_counts,
                            ffi::Span<const int64_t> column_counts,
                            ffi::Span<const int64_t> normalizes_columns) {
  FactoredArgs args = {};
  RETURN_IF_ERROR(parse_sizes(batches, rows, columns, &args));
  const size_t count = args.count;
  if (count == 0 || arrays.size() != 2 * count || results.size() != 2 * count ||
      row_counts.size() != count || column_counts.size() != count ||
      normalizes_columns.size() != count) {
    return ffi::Error::InvalidArgument("each leaf must have moments of rows and of columns");
  }
  for (size_t i = 0; i < count; ++i) {
    FactoredLeaf& leaf = args.leaves[i];
    for (int kind = 0; kind < 2; ++kind) {
      const size_t index = 2 * i + kind;
      RETURN_IF_ERROR(next_array(arrays, index, lines_of(leaf, kind), index == 0,
                                 &args.moment_dtype, &leaf.moments[kind]));
      const auto result = results.get<ffi::AnyBuffer>(index);
      if (!result.has_value()) return result.error();
      if ((*result)->untyped_data() != leaf.moments[kind]) {
        return ffi::Error::InvalidArgument("a moment is not updated in place");
      }
    }
    leaf.inverse_counts[0] = 1.0f / static_cast<float>(row_counts[i]);
    leaf.inverse_counts[1] = 1.0f / static_cast<float>(column_counts[i]);
    leaf.normalizes_columns = normalizes_columns[i] != 0;
  }
  RETURN_IF_ERROR(check_float32("scalars", scalars, {sizeof(FactoredScalars) / sizeof(float)}));
  RETURN_IF_ERROR(check_float32("sums", sums, {args.sums}));
  RETURN_IF_ERROR(check_float32("moment_sums", *moment_sums, {args.matrices}));
  args.scalars = static_cast<const float*>(scalars.untyped_data());
  args.of_lines = static_cast<float*>(sums.untyped_data());
  args.moment_sums = static_cast<float*>(moment_sums->untyped_data());
  Launch launch = {dim3(args.matrices), kMomentThreads, 0};
  return launch_kernel(update_moments, args, launch, stream);
}

// Sums the squares of the updates of each matrix, without the factor that all its updates share.
// `arrays` has each leaf's gradient, row moments and column moments.
ffi::Error factored_updates(cudaStream_t stream, ffi::RemainingArgs arrays,
                            ffi::Result<ffi::AnyBuffer> totals,
                            ffi::Result<ffi::AnyBuffer> tile_totals,
                            ffi::Span<const int64_t> batches, ffi::Span<const int64_t> rows,
                            ffi::Span<const int64_t> columns) {
  FactoredArgs args = {};
  RETURN_IF_ERROR(parse_sizes(batches, rows, columns, &args));
  const size_t count = args.count;
  if (count == 0 || arrays.size() != 3 * count) {
    return ffi::Error::InvalidArgument("each leaf must have a gradient and two arrays of moments");
  }
  for (size_t i = 0; i < count; ++i) {
    FactoredLeaf& leaf = args.leaves[i];
    RETURN_IF_ERROR(
        next_array(arrays, 3 * i, size_of(leaf), i == 0, &args.gradient_dtype, &leaf.gradient));
    for (int kind = 0; kind < 2; ++kind) {
      RETURN_IF_ERROR(next_array(arrays, 3 * i + 1 + kind, lines_of(leaf, kind),
                                 i == 0 && kind == 0, &args.moment_dtype, &leaf.moments[kind]));
    }
    leaf.whole = leaf.columns % kLeafVec == 0 && are_aligned({leaf.gradient});
  }
  RETURN_IF_ERROR(check_float32("totals", *totals, {args.matrices, 2}));
  RETURN_IF_ERROR(check_float32("tile_totals", *tile_totals, {args.tiles, 2}));
  args.totals = static_cast<float2*>(totals->untyped_data());
  args.tile_totals = static_cast<float2*>(tile_totals->untyped_data());
  RETURN_IF_ERROR(launch_tiles(sum_updates, args, stream));
  return add_totals(args, true, stream);
}

}  // namespace

DEFINE_HANDLER(jaxfused_factored_sums, factored_sums,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .RemainingArgs()
                   .Ret<ffi::AnyBuffer>()  // sums
                   .Ret<ffi::AnyBuffer>()  // totals
                   .Ret<ffi::AnyBuffer>()  // partial
                   .Ret<ffi::AnyBuffer>()  // tile_totals
                   .Attr<ffi::Span<const int64_t>>("batches")
                   .Attr<ffi::Span<const int64_t>>("rows")
                   .Attr<ffi::Span<const int64_t>>("columns"),
               {ffi::Traits::kCmdBufferCompatible});

DEFINE_HANDLER(jaxfused_factored_moments, factored_moments,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // scalars
                   .Arg<ffi::AnyBuffer>()  // sums
                   .RemainingArgs()
                   .Ret<ffi::AnyBuffer>()  // moment_sums
                   .RemainingRets()
                   .Attr<ffi::Span<const int64_t>>("batches")
                   .Attr<ffi::Span<const int64_t>>("rows")
                   .Attr<ffi::Span<const int64_t>>("columns")
                   .Attr<ffi::Span<const int64_t>>("row_counts")
                   .Attr<ffi::Span<const int64_t>>("column_counts")
                   .Attr<ffi::Span<const int64_t>>("normalizes_columns"),
               {ffi::Traits::kCmdBufferCompatible});

DEFINE_HANDLER(jaxfused_factored_updates, factored_updates,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .RemainingArgs()
                   .Ret<ffi::AnyBuffer>()  // totals
                   .Ret<ffi::AnyBuffer>()  // tile_totals
                   .Attr<ffi::Span<const int64_t>>("batches")
                   .Attr<ffi::Span<const int64_t>>("rows")
                   .Attr<ffi::Span<const int64_t>>("columns"),
               {ffi::Traits::kCmdBufferCompatible});
