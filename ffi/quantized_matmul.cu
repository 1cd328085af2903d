// A product of 16-bit x with weights of 8 or 4 bits, which stay as they are in memory and become
// numbers of x's dtype in registers: y = activation(x w + bias) + residual, or the gated unit
// activation(x w + bias) * (x w2 + bias2).
//
// The weights are the left operand of the tensor cores, 16 columns a warp, and x is the right one,
// so that 8 rows of x waste nothing. A block's 8 warps share its columns and the features of a
// step; further blocks may share the features too. All sums are added up in a fixed order: those of
// the warps in shared memory, those of blocks by a second kernel. The scale of a group of features
// multiplies the group's sum in float32, so that no weight is ever rounded.

#include <cstdint>
#include <string>

#include "handler.h"
#include "operands.h"
#include "quantized_epilogue.cuh"
#include "quantized_weights.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxStages = 4;
constexpr int kChunks = kStep / kChunk;
constexpr int kMaxParts = 64;
constexpr int kReservedBytes = 1024;  // of shared memory, for a block

struct LinearArgs {
  const void* x;                           // [rows, features]
  const uint8_t* values[kMaxProducts];     // [columns, row_bytes]
  const float* scale[kMaxProducts];        // [groups, columns], where there are groups
  const int8_t* zero_point[kMaxProducts];  // [groups or 1, columns], or nullptr
  float* parts;  // sums of a part of the features [parts, products, rows, columns], or nullptr
  int features;
  int row_bytes;
  int group;  // features that share a scale; 0 where all of a column do
  int groups;
  int column_warps;  // warps side by side, those of two products alternating
  int sum_warps;     // warps that share the features
  int steps_of_part;
  int stages;
  Float8Code code;
  QuantizedEpilogue epilogue;
};

// The shared memory of a stage, in bytes.
template <Weights kWeights, int kRowTiles>
struct Stage {
  static constexpr int kRows = 8 * kRowTiles;
  // Eight threads read 16 bytes of x each at a time. The distance of rows spreads them over all
  // banks: in the order of instructions a row each, with bytes two rows of 64 bytes.
  static constexpr int kPitch = kStep * 2 + (kWeights == Weights::kInt4 ? 16 : 64);
  static constexpr int kWeightBytes = kWarps * WarpWeights<kWeights>::kBytes;
  static constexpr int kSliceBytes = kRows * kPitch;  // of x, for the features of a warp
  static constexpr int kScaleBytes = kWarps * kChunks * kWarpRows * 4;
  static constexpr int kZeroBytes = kWarps * kChunks * kWarpRows;

  static __host__ __device__ int bytes(int sum_warps) {
    return kWeightBytes + sum_warps * kSliceBytes + kScaleBytes + kZeroBytes;
  }
};

// What a thread copies of the scales and zero points of its warp's columns: of each group that a
// step has, 16 of them.
struct GroupCopies {
  static constexpr int kPasses = kChunks * kWarpRows / 32;
  int of_step;  // groups
  int row;      // group of the first pass
  int column;

  __device__ GroupCopies(int group, int lane)
      : of_step(group == 0 || group >= kStep ? 1 : kStep / group),
        row(lane / kWarpRows),
        column(lane % kWarpRows) {}

  __device__ __forceinline__ int group_of(int pass) const { return pass * 2 + row; }
};

template <typename T, Weights kWeights, int kRowTiles>
__global__ void __launch_bounds__(kThreads, kRowTiles == 8 ? 1 : 2)
    quantized_linear_kernel(LinearArgs args) {
  if constexpr (kHasProducts<T>) {
    using Layout = Stage<kWeights, kRowTiles>;
    using OfWarp = WarpWeights<kWeights>;
    using Conversion = Converter<T, kWeights>;
    extern __shared__ __align__(128) uint8_t memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int q = lane % 4, g = lane / 4;
    const int sum_warp = warp / args.column_warps, column_warp = warp % args.column_warps;
    const int products = args.epilogue.products, columns = args.epilogue.columns;
    const bool second = column_warp % products != 0;
    const int tile_columns = kWarpRows * args.column_warps / products;
    const int block_column = blockIdx.y * tile_columns;
    const int column_in_tile = column_warp / products * kWarpRows;
    const int warp_column = block_column + column_in_tile;
    const int row_start = blockIdx.x * Layout::kRows;
    const int rows = min(Layout::kRows, args.epilogue.rows - row_start);

    const int stage_bytes = Layout::bytes(args.sum_warps);
    const int x_place = Layout::kWeightBytes;
    const int scale_place = x_place + args.sum_warps * Layout::kSliceBytes;
    const int zero_place = scale_place + Layout::kScaleBytes;
    const uint32_t shared = shared_address(memory);

    const int existing = max(0, min(kWarpRows, columns - warp_column));
    const uint8_t* values = second ? args.values[1] : args.values[0];
    values += static_cast<int64_t>(existing > 0 ? warp_column : 0) * args.row_bytes;
    const float* scale = second ? args.scale[1] : args.scale[0];
    const int8_t* zero_point = second ? args.zero_point[1] : args.zero_point[0];
    const GroupCopies of_groups(args.group, lane);
    const bool has_column = of_groups.column < existing;

    // A thread copies the same 16 bytes of the rows of x from its first one on.
    const int x_copies = args.sum_warps * (kStep / 8);
    const int x_copy = threadIdx.x % x_copies;
    const int first_row = threadIdx.x / x_copies, pass_rows = kThreads / x_copies;
    const int x_offset = x_place + x_copy / 16 * Layout::kSliceBytes + x_copy % 16 * 16;
    const T* x = static_cast<const T*>(args.x) + static_cast<int64_t>(row_start) * args.features;

    // Returns which group, if any, a thread copies the scale or the zero point of in a pass.
    const auto group_at = [&](int step, int pass) {
      const int row = of_groups.group_of(pass);
      if (row >= of_groups.of_step || !has_column) return -1;
      const int group = args.group == 0 ? 0 : step * kStep / args.group + row;
      return group < args.groups ? group : -1;
    };
    const auto start_copies = [&](int first_step, int slot) {
      const int step = first_step + sum_warp;
      const int base = slot * stage_bytes;
      OfWarp::copy(shared + base + warp * OfWarp::kBytes, values, existing, args.row_bytes,
                   static_cast<int64_t>(step) * OfWarp::kRowBytes, lane);
      const int feature = first_step * kStep + x_copy * 8;
      const bool exists = feature < args.features;
      for (int row = first_row; row < rows; row += pass_rows) {
        const T* source = x + (exists ? static_cast<int64_t>(row) * args.features + feature : 0);
        async_copy_or_zero(shared + base + x_offset + row * Layout::kPitch, source, exists);
      }
      if (args.group != 0) {
#pragma unroll
        for (int pass = 0; pass < GroupCopies::kPasses; ++pass) {
          float* to = reinterpret_cast<float*>(memory + base + scale_place) +
                      (warp * kChunks + of_groups.group_of(pass)) * kWarpRows + of_groups.column;
          const int group = group_at(step, pass);
          if (group < 0) {
            *to = 0.0f;
          } else {
            async_copy<4>(
                to, scale + static_cast<int64_t>(group) * columns + warp_column + of_groups.column);
          }
        }
      }
      async_copies_commit();
    };
    // Zero points are single bytes, which asynchronous copies do not take: they wait in registers.
    int8_t zeros[GroupCopies::kPasses] = {};
    const auto load_zeros = [&](int first_step) {
      if (zero_point == nullptr) return;
#pragma unroll
      for (int pass = 0; pass < GroupCopies::kPasses; ++pass) {
        const int group = group_at(first_step + sum_warp, pass);
        zeros[pass] = group < 0 ? int8_t{0}
                                : zero_point[static_cast<int64_t>(group) * columns + warp_column +
                                             of_groups.column];
      }
    };
    const auto store_zeros = [&](int slot) {
      if (zero_point == nullptr) return;
#pragma unroll
      for (int pass = 0; pass < GroupCopies::kPasses; ++pass) {
        reinterpret_cast<int8_t*>(
            memory + slot * stage_bytes +
            zero_place)[(warp * kChunks + of_groups.group_of(pass)) * kWarpRows +
                        of_groups.column] = zeros[pass];
      }
    };

    // Rows of x that do not exist are zeros in every stage.
    const uint4 nothing = {};
    for (int stage = 0; stage < args.stages; ++stage) {
      for (int row = rows + first_row; row < Layout::kRows; row += pass_rows) {
        *reinterpret_cast<uint4*>(memory + stage * stage_bytes + x_offset + row * Layout::kPitch) =
            nothing;
      }
    }

    const int all_steps = (args.features + kStep - 1) / kStep;
    const int start = blockIdx.z * args.steps_of_part;
    const int stop = min(all_steps, start + args.steps_of_part);
    for (int stage = 0; stage < args.stages - 1; ++stage) {
      const int step = start + stage * args.sum_warps;
      if (step < stop) {
        start_copies(step, stage);
        load_zeros(step);
        store_zeros(stage);
      } else {
        async_copies_commit();
      }
    }

    float sums[kRowTiles][4] = {}, of_group[kRowTiles][4] = {};
    const int chunks_of_group = max(1, min(args.group, kStep) / kChunk);
    int slot = 0, free_slot = args.stages - 1, zeros_slot = -1;
    for (int step = start; step < stop; step += args.sum_warps) {
      async_copies_wait(args.stages - 2);
      if (zeros_slot >= 0) store_zeros(zeros_slot);
      __syncthreads();
      const int next = step + (args.stages - 1) * args.sum_warps;
      zeros_slot = -1;
      if (next < stop) {
        start_copies(next, free_slot);
        load_zeros(next);
        zeros_slot = free_slot;
      } else {
        async_copies_commit();
      }

      const int base = slot * stage_bytes;
      const uint32_t weights = shared + base + warp * OfWarp::kBytes;
      const uint32_t x_slice = shared + base + x_place + sum_warp * Layout::kSliceBytes;
      const auto* scales =
          reinterpret_cast<const float*>(memory + base + scale_place) + warp * kChunks * kWarpRows;
      const auto* zero_points =
          reinterpret_cast<const int8_t*>(memory + base + zero_place) + warp * kChunks * kWarpRows;
      const typename OfWarp::Row upper(weights, g, lane), lower(weights, g + 8, lane);
      typename Conversion::Offset offsets[2] = {Conversion::offset(0), Conversion::offset(0)};
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        if (zero_point != nullptr && (chunk & (chunks_of_group - 1)) == 0) {
          const int group = args.group == 0 ? 0 : chunk / chunks_of_group;
          offsets[0] = Conversion::offset(zero_points[group * kWarpRows + g]);
          offsets[1] = Conversion::offset(zero_points[group * kWarpRows + g + 8]);
        }
        uint32_t words[Conversion::kWords], of_upper[4], of_lower[4];
        upper.load(chunk, words);
        Conversion::convert(words, offsets[0], args.code, of_upper);
        lower.load(chunk, words);
        Conversion::convert(words, offsets[1], args.code, of_lower);
        const uint32_t first[4] = {of_upper[0], of_lower[0], of_upper[1], of_lower[1]};
        const uint32_t last[4] = {of_upper[2], of_lower[2], of_upper[3], of_lower[3]};
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          uint32_t b[4];
          const uint32_t x_chunk = x_slice + tile * 8 * Layout::kPitch + chunk * kChunk * 2;
          if constexpr (kWeights == Weights::kInt4) {
            load_matrices(b, x_chunk + lane % 8 * Layout::kPitch + lane / 8 * 16);
          } else {
            const uint4 found = load_shared_16(x_chunk + g * Layout::kPitch + q * 16);
            b[0] = found.x, b[1] = found.y, b[2] = found.z, b[3] = found.w;
          }
          multiply_add<T>(of_group[tile], first, b[0], b[1]);
          multiply_add<T>(of_group[tile], last, b[2], b[3]);
        }
        if (args.group != 0 && ((chunk + 1) & (chunks_of_group - 1)) == 0) {
          const float* factors = scales + chunk / chunks_of_group * kWarpRows;
          const float upper_scale = factors[g], lower_scale = factors[g + 8];
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              sums[tile][i] =
                  fmaf(i < 2 ? upper_scale : lower_scale, of_group[tile][i], sums[tile][i]);
              of_group[tile][i] = 0.0f;
            }
          }
        }
      }
      slot = slot + 1 == args.stages ? 0 : slot + 1;
      free_slot = free_slot + 1 == args.stages ? 0 : free_slot + 1;
    }

    // The sums [sum warp, product, row, column] in the memory of the stages.
    async_copies_wait(0);
    __syncthreads();
    float* found = reinterpret_cast<float*>(memory);
    const int matrix = Layout::kRows * tile_columns;
    float* own = found + (sum_warp * products + (second ? 1 : 0)) * matrix + column_in_tile + g;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = tile * 8 + 2 * q + i % 2;
        own[row * tile_columns + i / 2 * 8] = args.group == 0 ? of_group[tile][i] : sums[tile][i];
      }
    }
    __syncthreads();
    const int vectors = tile_columns / kEpilogueVec;
    for (int i = threadIdx.x; i < rows * vectors; i += kThreads) {
      const int row = i / vectors, in_tile = i % vectors * kEpilogueVec;
      const int column = block_column + in_tile;
      if (column >= columns) continue;
      float z[kMaxProducts][kEpilogueVec] = {};
#pragma unroll
      for (int product = 0; product < kMaxProducts; ++product) {
        if (product >= products) continue;
        for (int slice = 0; slice < args.sum_warps; ++slice) {
          const float* from = found + (slice * products + product) * matrix + row * tile_columns;
          const float4 part = *reinterpret_cast<const float4*>(from + in_tile);
          z[product][0] += part.x;
          z[product][1] += part.y;
          z[product][2] += part.z;
          z[product][3] += part.w;
        }
      }
      if (args.parts == nullptr) {
        finish(args.epilogue, row_start + row, column, z);
        continue;
      }
#pragma unroll
      for (int product = 0; product < kMaxProducts; ++product) {
        if (product >= products) continue;
        const int64_t line =
            (static_cast<int64_t>(blockIdx.z) * products + product) * args.epilogue.rows +
            row_start + row;
        store_existing({args.parts, Dtype::kFloat32}, line * columns + column,
                       min(kEpilogueVec, columns - column), columns % kEpilogueVec == 0,
                       z[product]);
      }
    }
  }
}

struct MergeArgs {
  const float* sums;  // [parts, products, rows, columns]
  int parts;
  QuantizedEpilogue epilogue;
};

// Adds up the sums of blocks that share the features, and finishes them.
__global__ void __launch_bounds__(kThreads) quantized_merge_kernel(MergeArgs args) {
  const int rows = args.epilogue.rows, columns = args.epilogue.columns;
  const int column = (blockIdx.x * kThreads + threadIdx.x) * kEpilogueVec;
  const int row = blockIdx.y;
  if (column >= columns) return;
  const int count = min(kEpilogueVec, columns - column);
  float z[kMaxProducts][kEpilogueVec] = {};
#pragma unroll
  for (int product = 0; product < kMaxProducts; ++product) {
    if (product >= args.epilogue.products) continue;
    for (int part = 0; part < args.parts; ++part) {
      const int64_t line =
          (static_cast<int64_t>(part) * args.epilogue.products + product) * rows + row;
      float sums[kEpilogueVec];
      load_existing({args.sums, Dtype::kFloat32}, line * columns + column, count,
                    columns % kEpilogueVec == 0, sums);
#pragma unroll
      for (int i = 0; i < kEpilogueVec; ++i) z[product][i] += sums[i];
    }
  }
  finish(args.epilogue, row, column, z);
}

// --- the handler ---------------------------------------------------------------------------------

using Kernel = void (*)(LinearArgs);

struct Choice {
  Kernel kernel;
  int stage_bytes;
  int rows;  // of a block
};

template <typename T, Weights kWeights, int kRowTiles>
Choice choice(int sum_warps) {
  using Layout = Stage<kWeights, kRowTiles>;
  return {quantized_linear_kernel<T, kWeights, kRowTiles>, Layout::bytes(sum_warps), Layout::kRows};
}

template <typename T, Weights kWeights>
Choice choose(int row_tiles, int sum_warps) {
  switch (row_tiles) {
    case 1:
      return choice<T, kWeights, 1>(sum_warps);
    case 2:
      return choice<T, kWeights, 2>(sum_warps);
    case 4:
      return choice<T, kWeights, 4>(sum_warps);
    default:
      return choice<T, kWeights, 8>(sum_warps);
  }
}

template <typename T>
Choice choose(Weights weights, int row_tiles, int sum_warps) {
  switch (weights) {
    case Weights::kInt8:
      return choose<T, Weights::kInt8>(row_tiles, sum_warps);
    case Weights::kInt4:
      return choose<T, Weights::kInt4>(row_tiles, sum_warps);
    default:
      return choose<T, Weights::kFloat8>(row_tiles, sum_warps);
  }
}

// Returns how bytes of a float8 become numbers of x's dtype: see Float8Code.
Float8Code float8_code(bool is_e4m3, bool is_half) {
  if (is_half) {
    return is_e4m3 ? Float8Code{1, 0x00800080u, 0x40004000u, 1, 4, 0x5c005c00u}
                   : Float8Code{0, 0, 0, 0, 0, 0x3c003c00u};
  }
  return is_e4m3 ? Float8Code{4, 0x00100010u, 0x08000800u, 4, 4, 0x7b807b80u}
                 : Float8Code{3, 0x00800080u, 0x10001000u, 3, 5, 0x77807780u};
}

// The weights of a product: values, scales and zero points.
struct Packed {
  const ffi::AnyBuffer &values, &scale, &zero_point;
};

ffi::Error parse_weights(const Packed& packed, int index, int64_t columns, int64_t groups,
                         const ffi::AnyBuffer& first, LinearArgs* args) {
  RETURN_IF_ERROR(check_shape("the weights", packed.values, {columns, first.dimensions()[1]}));
  RETURN_IF_ERROR(check_dtype("the weights", packed.values, first.element_type()));
  RETURN_IF_ERROR(check_shape("the scale", packed.scale, {groups, columns}));
  RETURN_IF_ERROR(check_dtype("the scale", packed.scale, ffi::DataType::F32));
  if (!is_absent(packed.zero_point)) {
    RETURN_IF_ERROR(check_shape("the zero point", packed.zero_point, {groups, columns}));
    RETURN_IF_ERROR(check_dtype("the zero point", packed.zero_point, ffi::DataType::S8));
  }
  args->values[index] = static_cast<const uint8_t*>(packed.values.untyped_data());
  const auto* scale = static_cast<const float*>(packed.scale.untyped_data());
  (groups > 1 ? args->scale : args->epilogue.column_scale)[index] = scale;
  args->zero_point[index] = data_or_null<const int8_t>(packed.zero_point);
  return ffi::Error::Success();
}

ffi::Error quantized_matmul(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer values,
                            ffi::AnyBuffer scale, ffi::AnyBuffer zero_point, ffi::AnyBuffer values2,
                            ffi::AnyBuffer scale2, ffi::AnyBuffer zero_point2, ffi::AnyBuffer bias,
                            ffi::AnyBuffer bias2, ffi::AnyBuffer residual,
                            ffi::Result<ffi::AnyBuffer> y,
                            ffi::Result<ffi::AnyBuffer> preactivation,
                            ffi::Result<ffi::AnyBuffer> workspace, std::string_view activation,
                            int64_t row_tiles, int64_t sum_warps) {
  LinearArgs args = {};
  QuantizedEpilogue& epilogue = args.epilogue;
  if (!parse_activation(activation, &epilogue.activation)) {
    return ffi::Error::InvalidArgument("the activation is not known: " + std::string(activation));
  }
  const auto dtype = dtype_of(x);
  if (x.dimensions().size() != 2 || !dtype || *dtype == Dtype::kFloat32) {
    return ffi::Error::InvalidArgument("x must be a matrix of bfloat16 or float16");
  }
  const int64_t rows = x.dimensions()[0], features = x.dimensions()[1];
  if (values.dimensions().size() != 2 || scale.dimensions().size() != 2) {
    return ffi::Error::InvalidArgument("the weights and their scale must be matrices");
  }
  const int64_t columns = values.dimensions()[0], groups = scale.dimensions()[0];
  Weights weights = Weights::kFloat8;
  int64_t of_element = 1;  // features
  switch (values.element_type()) {
    case ffi::DataType::S8:
      weights = Weights::kInt8;
      break;
    case ffi::DataType::S32:
      weights = Weights::kInt4;
      of_element = 8;
      break;
    case ffi::DataType::F8E4M3FN:
    case ffi::DataType::F8E5M2:
      break;
    default:
      return ffi::Error::InvalidArgument("the weights must be int8, int4 in words, or float8");
  }
  const int64_t grain = weights == Weights::kInt4 ? kStep : 16;
  if (rows < 1 || rows > kMaxRows || columns < 1 || columns > kMaxRows || features < 1 ||
      features > kMaxRows || features % grain != 0 ||
      values.dimensions()[1] * of_element != features) {
    return ffi::Error::InvalidArgument("the weights have shape " + to_string(values.dimensions()) +
                                       ", which does not fit x of shape " +
                                       to_string(x.dimensions()));
  }
  const int64_t group = groups > 1 ? features / groups : 0;
  if (groups < 1 || features % groups != 0 ||
      (group != 0 && group != 32 && group != 64 && group % kStep != 0)) {
    return ffi::Error::InvalidArgument("groups must be of 32, 64 or a multiple of 128 features");
  }
  const bool tiles_fit = row_tiles == 1 || row_tiles == 2 || row_tiles == 4 || row_tiles == 8;
  const bool warps_fit = sum_warps == 1 || sum_warps == 2 || sum_warps == 4 || sum_warps == 8;
  epilogue.products = is_absent(values2) ? 1 : 2;
  if (!tiles_fit || !warps_fit || kWarps / sum_warps < epilogue.products) {
    return ffi::Error::InvalidArgument("row_tiles or sum_warps is not one of 1, 2, 4, 8 that fits");
  }
  epilogue.rows = static_cast<int>(rows);
  epilogue.columns = static_cast<int>(columns);
  RETURN_IF_ERROR(parse_weights({values, scale, zero_point}, 0, columns, groups, values, &args));
  if (epilogue.products == 2) {
    RETURN_IF_ERROR(
        parse_weights({values2, scale2, zero_point2}, 1, columns, groups, values, &args));
    if (!is_absent(*preactivation)) {
      return ffi::Error::InvalidArgument("of a gated unit there is no preactivation");
    }
  }
  RETURN_IF_ERROR(parse_parameter("bias", bias, columns, &epilogue.bias[0]));
  RETURN_IF_ERROR(parse_parameter("bias2", bias2, columns, &epilogue.bias[1]));
  Output added = {};
  RETURN_IF_ERROR(parse_output("residual", residual, rows, columns, &added));
  epilogue.residual = {added.data, added.dtype};
  RETURN_IF_ERROR(parse_output("y", *y, rows, columns, &epilogue.y));
  RETURN_IF_ERROR(
      parse_output("preactivation", *preactivation, rows, columns, &epilogue.preactivation));
  if (epilogue.y.data == nullptr) return ffi::Error::InvalidArgument("there is no y");

  const int64_t matrix = epilogue.products * rows * columns;
  const int64_t parts = is_absent(*workspace) ? 1 : workspace->element_count() / matrix;
  if (!is_absent(*workspace)) {
    RETURN_IF_ERROR(
        check_float32("workspace", *workspace, {parts, int64_t{epilogue.products}, rows, columns}));
    if (parts > kMaxParts) return ffi::Error::InvalidArgument("there are more than 64 parts");
    args.parts = static_cast<float*>(workspace->untyped_data());
  }
  args.x = x.untyped_data();
  if (!are_aligned({args.x, args.values[0], args.values[1], args.parts, epilogue.y.data,
                    epilogue.preactivation.data, epilogue.residual.data, epilogue.bias[0].data,
                    epilogue.bias[1].data})) {
    return ffi::Error::InvalidArgument("an array does not begin at a multiple of 16 bytes");
  }
  args.features = static_cast<int>(features);
  args.row_bytes = static_cast<int>(weights == Weights::kInt4 ? features / 2 : features);
  args.group = static_cast<int>(group);
  args.groups = static_cast<int>(groups);
  args.sum_warps = static_cast<int>(sum_warps);
  args.column_warps = kWarps / args.sum_warps;
  const int all_steps = static_cast<int>((features + kStep - 1) / kStep);
  const int passes = (all_steps + args.sum_warps - 1) / args.sum_warps;
  const auto passes_of_part = static_cast<int>((passes + parts - 1) / parts);
  args.steps_of_part = passes_of_part * args.sum_warps;
  args.code =
      float8_code(values.element_type() == ffi::DataType::F8E4M3FN, *dtype == Dtype::kFloat16);

  const Choice chosen =
      *dtype == Dtype::kFloat16
          ? choose<__half>(weights, static_cast<int>(row_tiles), args.sum_warps)
          : choose<__nv_bfloat16>(weights, static_cast<int>(row_tiles), args.sum_warps);
  Device device = {};
  RETURN_IF_ERROR(current_device(&device));
  // Two blocks share a multiprocessor where two stages of both fit, beside what it keeps of each
  // for itself. The registers of blocks with the most rows leave no room for a second one.
  const int half = device.shared_bytes / 2 - kReservedBytes;
  const bool are_two = row_tiles < 8 && half / chosen.stage_bytes >= 2;
  const int shared = are_two ? half : device.shared_bytes;
  args.stages = std::min(kMaxStages, shared / chosen.stage_bytes);
  if (args.stages < 2) {
    return ffi::Error::InvalidArgument("a block of this GPU has too little shared memory for it");
  }
  const int tile_columns = kWarpRows * args.column_warps / epilogue.products;
  const int64_t column_tiles = (columns + tile_columns - 1) / tile_columns;
  if (column_tiles > 65535 || (args.parts != nullptr && rows > 65535)) {
    return ffi::Error::InvalidArgument("there are too many columns, or rows of parts");
  }
  const int results = kWarps * 8 * static_cast<int>(row_tiles) * kWarpRows * 4;
  const Launch launch = {dim3(static_cast<unsigned>((rows + chosen.rows - 1) / chosen.rows),
                              static_cast<unsigned>(column_tiles), static_cast<unsigned>(parts)),
                         kThreads, std::max(args.stages * chosen.stage_bytes, results)};
  RETURN_IF_ERROR(allow_shared_memory(chosen.kernel, device));
  RETURN_IF_ERROR(launch_kernel(chosen.kernel, args, launch, stream));
  if (args.parts == nullptr) return ffi::Error::Success();
  const MergeArgs merge = {args.parts, static_cast<int>(parts), epilogue};
  const int64_t of_block = int64_t{kThreads} * kEpilogueVec;
  const Launch merging = {
      dim3(static_cast<unsigned>((columns + of_block - 1) / of_block), static_cast<unsigned>(rows)),
      kThreads, 0};
  return launch_kernel(quantized_merge_kernel, merge, merging, stream);
}

}  // namespace

DEFINE_HANDLER(jaxfused_quantized_matmul, quantized_matmul,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // values
                   .Arg<ffi::AnyBuffer>()  // scale
                   .Arg<ffi::AnyBuffer>()  // zero_point
                   .Arg<ffi::AnyBuffer>()  // values2
                   .Arg<ffi::AnyBuffer>()  // scale2
                   .Arg<ffi::AnyBuffer>()  // zero_point2
                   .Arg<ffi::AnyBuffer>()  // bias
                   .Arg<ffi::AnyBuffer>()  // bias2
                   .Arg<ffi::AnyBuffer>()  // residual
                   .Ret<ffi::AnyBuffer>()  // y
                   .Ret<ffi::AnyBuffer>()  // preactivation
                   .Ret<ffi::AnyBuffer>()  // workspace
                   .Attr<std::string_view>("activation")
                   .Attr<int64_t>("row_tiles")
                   .Attr<int64_t>("sum_warps"),
               {ffi::Traits::kCmdBufferCompatible});
