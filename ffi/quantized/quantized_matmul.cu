// A product of 16-bit x with weights of 8 or 4 bits, which are dequantised to x's dtype in
// registers only: y = activation(x w + bias) + residual, or the gated unit activation(x w + bias) *
// (x w2 + bias2).
//
// The weights are the left operand of the tensor cores, 16 columns a warp, and x is the right one,
// whose tile has only 8 rows: small M computes few unused rows. A block's 8 warps divide its
// columns and features among them; further blocks may split the features too (split-K). All sums
// are added up in a fixed order: those of warps in shared memory, those of blocks by a second
// kernel. The scale of a group of features multiplies the group's sum in float32, so that no weight
// is ever rounded.

#include <cstdint>
#include <string>

#include "common/handler.h"
#include "common/operands.h"
#include "quantized_epilogue.cuh"
#include "quantized_weights.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxStages = 4;
constexpr int kChunks = kStep / kChunk;
constexpr int kMaxParts = 64;
constexpr int kReservedBytes = 1024;  // bytes that CUDA reserves of shared memory per block

struct LinearArgs {
  const void* x;                           // [rows, features]
  const uint8_t* values[kMaxProducts];     // [columns, row_bytes]
  const float* scale[kMaxProducts];        // [groups, columns], or nullptr without groups
  const int8_t* zero_point[kMaxProducts];  // [groups or 1, columns], or nullptr
  float* parts;  // split-K sums [parts, products, rows, columns], or nullptr
  int features;
  int row_bytes;
  int group;  // features that share a scale; 0 if all of a column do
  int groups;
  int column_warps;   // warps along columns; in a gated unit, alternating between w and w2
  int sum_warps;      // warps that split the features
  int steps_of_part;  // steps, of kStep features each, of one block of split-K
  int stages;
  Float8Code code;
  QuantizedEpilogue epilogue;
};

// Layout of a pipeline stage in shared memory, in bytes.
template <Weights kWeights, int kRowTiles>
struct Stage {
  static constexpr int kRows = 8 * kRowTiles;
  // Pitch of a row of x, which avoids bank conflicts. Eight threads read 16 bytes each at a time:
  // one row each with int4 (ldmatrix), else 64 bytes of each of two rows.
  static constexpr int kPitch = kStep * 2 + (kWeights == Weights::kInt4 ? 16 : 64);
  static constexpr int kWeightBytes = kWarps * WarpWeights<kWeights>::kBytes;
  static constexpr int kSliceBytes = kRows * kPitch;  // bytes of x for the kStep features of a warp
  static constexpr int kScaleBytes = kWarps * kChunks * kWarpRows * 4;
  static constexpr int kZeroBytes = kWarps * kChunks * kWarpRows;

  static __host__ __device__ int bytes(int sum_warps) {
    return kWeightBytes + sum_warps * kSliceBytes + kScaleBytes + kZeroBytes;
  }
};

// The rows and columns of the product that a block and a warp compute.
template <Weights kWeights, int kRowTiles>
struct Place {
  using Layout = Stage<kWeights, kRowTiles>;

  __device__ explicit Place(const LinearArgs& args)
      : lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        sum_warp(warp / args.column_warps),
        products(args.epilogue.products),
        columns(args.epilogue.columns),
        second(warp % args.column_warps % products != 0),
        tile_columns(kWarpRows * args.column_warps / products),
        block_column(blockIdx.y * tile_columns),
        column_in_tile(warp % args.column_warps / products * kWarpRows),
        warp_column(block_column + column_in_tile),
        existing(max(0, min(kWarpRows, columns - warp_column))),
        row_start(blockIdx.x * Layout::kRows),
        rows(min(Layout::kRows, args.epilogue.rows - row_start)),
        stage_bytes(Layout::bytes(args.sum_warps)),
        scale_place(Layout::kWeightBytes + args.sum_warps * Layout::kSliceBytes) {}

  int lane, warp, sum_warp;
  int products, columns;
  bool second;  // whether the warp's columns are of the second product
  int tile_columns, block_column;
  int column_in_tile, warp_column;
  int existing;  // columns of the warp within the matrix
  int row_start, rows;
  int stage_bytes, scale_place;  // bytes in shared memory

  // Return the warp's scales and zero points in a pipeline stage: 16 columns for each group.
  __device__ __forceinline__ float* scales(uint8_t* stage) const {
    return reinterpret_cast<float*>(stage + scale_place) + warp * kChunks * kWarpRows;
  }
  __device__ __forceinline__ int8_t* zero_points(uint8_t* stage) const {
    return reinterpret_cast<int8_t*>(stage + scale_place + Layout::kScaleBytes) +
           warp * kChunks * kWarpRows;
  }
};

// A thread's copies from global to shared memory, of kStep features for each of the warps that
// split the features (LinearArgs::sum_warps).
template <typename T, Weights kWeights, int kRowTiles>
class Copies {
  using OfPlace = Place<kWeights, kRowTiles>;
  using Layout = Stage<kWeights, kRowTiles>;
  using OfWarp = WarpWeights<kWeights>;
  static constexpr int kPasses = kChunks * kWarpRows / 32;  // passes over the scales of a step

 public:
  __device__ Copies(const LinearArgs& args, const OfPlace& place, uint8_t* memory)
      : args_(args),
        place_(place),
        memory_(memory),
        values_(place.second ? args.values[1] : args.values[0]),
        scale_(place.second ? args.scale[1] : args.scale[0]),
        zero_point_(place.second ? args.zero_point[1] : args.zero_point[0]),
        groups_of_step_(args.group == 0 || args.group >= kStep ? 1 : kStep / args.group) {
    if (place.existing > 0) values_ += static_cast<int64_t>(place.warp_column) * args.row_bytes;
    const int x_copies = args.sum_warps * (kStep / 8);
    x_copy_ = threadIdx.x % x_copies;
    first_row_ = threadIdx.x / x_copies;
    pass_rows_ = kThreads / x_copies;
    x_offset_ = Layout::kWeightBytes + x_copy_ / 16 * Layout::kSliceBytes + x_copy_ % 16 * 16;
    x_ = static_cast<const T*>(args.x) + static_cast<int64_t>(place.row_start) * args.features;
  }

  __device__ __forceinline__ bool have_zero_points() const { return zero_point_ != nullptr; }

  // Zeroes the tile's rows beyond the end of x, in every pipeline stage.
  __device__ __forceinline__ void clear() {
    const uint4 nothing = {};
    for (int stage = 0; stage < args_.stages; ++stage) {
      uint8_t* x = memory_ + stage * place_.stage_bytes + x_offset_;
      for (int row = place_.rows + first_row_; row < Layout::kRows; row += pass_rows_) {
        *reinterpret_cast<uint4*>(x + row * Layout::kPitch) = nothing;
      }
    }
  }

  // Starts the copies of one step: kStep features for each of the warps that split the features.
  // Zero points are single bytes, which cp.async cannot copy: they stay in registers until
  // store_zero_points.
  __device__ __forceinline__ void start(int first_step, int slot) {
    uint8_t* stage = memory_ + slot * place_.stage_bytes;
    const uint32_t shared = shared_address(stage);
    const int step = first_step + place_.sum_warp;
    OfWarp::copy(shared + place_.warp * OfWarp::kBytes, values_, place_.existing, args_.row_bytes,
                 static_cast<int64_t>(step) * OfWarp::kRowBytes, place_.lane);
    const int feature = first_step * kStep + x_copy_ * 8;
    const bool exists = feature < args_.features;
    for (int row = first_row_; row < place_.rows; row += pass_rows_) {
      const T* source = x_ + (exists ? static_cast<int64_t>(row) * args_.features + feature : 0);
      async_copy_or_zero(shared + x_offset_ + row * Layout::kPitch, source, exists);
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int64_t source = source_of_group(step, pass);
      if (args_.group != 0) {
        float* to = place_.scales(stage) + pass * 32 + place_.lane;
        if (source < 0) {
          *to = 0.0f;
        } else {
          async_copy<4>(to, scale_ + source);
        }
      }
      if (have_zero_points()) zeros_[pass] = source < 0 ? int8_t{0} : zero_point_[source];
    }
    async_copies_commit();
  }

  __device__ __forceinline__ void store_zero_points(int slot) {
    if (!have_zero_points()) return;
    int8_t* to = place_.zero_points(memory_ + slot * place_.stage_bytes);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) to[pass * 32 + place_.lane] = zeros_[pass];
  }

 private:
  // Returns the index of the scale that the thread copies in a pass, or -1 if there is none.
  __device__ __forceinline__ int64_t source_of_group(int step, int pass) const {
    const int line = pass * 2 + place_.lane / kWarpRows, column = place_.lane % kWarpRows;
    const int group = args_.group == 0 ? 0 : step * kStep / args_.group + line;
    if (line >= groups_of_step_ || column >= place_.existing || group >= args_.groups) return -1;
    return static_cast<int64_t>(group) * place_.columns + place_.warp_column + column;
  }

  const LinearArgs& args_;
  const OfPlace& place_;
  uint8_t* memory_;
  const uint8_t* values_;
  const float* scale_;
  const int8_t* zero_point_;
  int groups_of_step_;
  int x_copy_, first_row_, pass_rows_, x_offset_;  // positions of the thread's copies of x
  const T* x_;
  int8_t zeros_[kPasses] = {};
};

// The sums of a warp: its 16 columns for the block's rows.
template <typename T, Weights kWeights, int kRowTiles>
class Sums {
  using OfPlace = Place<kWeights, kRowTiles>;
  using Layout = Stage<kWeights, kRowTiles>;
  using OfWarp = WarpWeights<kWeights>;
  using Conversion = Converter<T, kWeights>;

 public:
  __device__ __forceinline__ void multiply(const LinearArgs& args, const OfPlace& place,
                                           uint8_t* stage, bool have_zero_points) {
    const int g = place.lane / 4;
    const uint32_t shared = shared_address(stage);
    const uint32_t weights = shared + place.warp * OfWarp::kBytes;
    const uint32_t x = shared + Layout::kWeightBytes + place.sum_warp * Layout::kSliceBytes;
    const int chunks_of_group = max(1, min(args.group, kStep) / kChunk);
    const typename OfWarp::Row upper(weights, g, place.lane), lower(weights, g + 8, place.lane);
    typename Conversion::Offset offsets[2] = {Conversion::offset(0), Conversion::offset(0)};
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (have_zero_points && (chunk & (chunks_of_group - 1)) == 0) {
        const int group = args.group == 0 ? 0 : chunk / chunks_of_group;
        const int8_t* zero_points = place.zero_points(stage) + group * kWarpRows;
        offsets[0] = Conversion::offset(zero_points[g]);
        offsets[1] = Conversion::offset(zero_points[g + 8]);
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
        load_x(x + tile * 8 * Layout::kPitch + chunk * kChunk * 2, place.lane, b);
        multiply_add<T>(of_group_[tile], first, b[0], b[1]);
        multiply_add<T>(of_group_[tile], last, b[2], b[3]);
      }
      if (args.group != 0 && ((chunk + 1) & (chunks_of_group - 1)) == 0) {
        const float* scales = place.scales(stage) + chunk / chunks_of_group * kWarpRows;
        end_group(scales[g], scales[g + 8]);
      }
    }
  }

  // Writes the sums to shared memory as [sum warp, product, row, column].
  __device__ __forceinline__ void store(const LinearArgs& args, const OfPlace& place,
                                        float* found) {
    const int matrix = Layout::kRows * place.tile_columns;
    const int index = place.sum_warp * place.products + (place.second ? 1 : 0);
    float* own = found + index * matrix + place.column_in_tile + place.lane / 4;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = tile * 8 + 2 * (place.lane % 4) + i % 2;
        own[row * place.tile_columns + i / 2 * 8] =
            args.group == 0 ? of_group_[tile][i] : sums_[tile][i];
      }
    }
  }

 private:
  // Loads the thread's values of 8 rows of x in a chunk, in the weights' order of features.
  static __device__ __forceinline__ void load_x(uint32_t chunk, int lane, uint32_t (&b)[4]) {
    if constexpr (kWeights == Weights::kInt4) {
      load_matrices(b, chunk + lane % 8 * Layout::kPitch + lane / 8 * 16);
    } else {
      const uint4 found = load_shared_16(chunk + lane / 4 * Layout::kPitch + lane % 4 * 16);
      b[0] = found.x, b[1] = found.y, b[2] = found.z, b[3] = found.w;
    }
  }

  __device__ __forceinline__ void end_group(float upper_scale, float lower_scale) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = i < 2 ? upper_scale : lower_scale;
        sums_[tile][i] = fmaf(scale, of_group_[tile][i], sums_[tile][i]);
        of_group_[tile][i] = 0.0f;
      }
    }
  }

  float sums_[kRowTiles][4] = {};      // scaled sums of the groups that have ended
  float of_group_[kRowTiles][4] = {};  // sums of the current group, or of all features
};

// Adds up the sums of the block's warps, then applies the epilogue or, with split-K, stores them.
template <Weights kWeights, int kRowTiles>
__device__ __forceinline__ void finish_block(const LinearArgs& args,
                                             const Place<kWeights, kRowTiles>& place,
                                             const float* found) {
  const int matrix = Stage<kWeights, kRowTiles>::kRows * place.tile_columns;
  const int vectors = place.tile_columns / kEpilogueVec;
  for (int i = threadIdx.x; i < place.rows * vectors; i += kThreads) {
    const int row = i / vectors, in_tile = i % vectors * kEpilogueVec;
    const int column = place.block_column + in_tile;
    if (column >= place.columns) continue;
    float z[kMaxProducts][kEpilogueVec] = {};
#pragma unroll
    for (int product = 0; product < kMaxProducts; ++product) {
      if (product >= place.products) continue;
      for (int slice = 0; slice < args.sum_warps; ++slice) {
        const float* from = found + (slice * place.products + product) * matrix;
        const float4 part =
            *reinterpret_cast<const float4*>(from + row * place.tile_columns + in_tile);
        z[product][0] += part.x;
        z[product][1] += part.y;
        z[product][2] += part.z;
        z[product][3] += part.w;
      }
    }
    if (args.parts == nullptr) {
      finish(args.epilogue, place.row_start + row, column, z);
      continue;
    }
#pragma unroll
    for (int product = 0; product < kMaxProducts; ++product) {
      if (product >= place.products) continue;
      const int64_t part = static_cast<int64_t>(blockIdx.z) * place.products + product;
      const int64_t line = part * args.epilogue.rows + place.row_start + row;
      store_existing({args.parts, Dtype::kFloat32}, line * place.columns + column,
                     min(kEpilogueVec, place.columns - column), place.columns % kEpilogueVec == 0,
                     z[product]);
    }
  }
}

template <typename T, Weights kWeights, int kRowTiles>
__global__ void __launch_bounds__(kThreads, kRowTiles == 8 ? 1 : 2)
    quantized_linear_kernel(LinearArgs args) {
  if constexpr (kHasProducts<T>) {
    extern __shared__ __align__(128) uint8_t memory[];
    const Place<kWeights, kRowTiles> place(args);
    Copies<T, kWeights, kRowTiles> copies(args, place, memory);
    Sums<T, kWeights, kRowTiles> sums;
    copies.clear();
    const int all_steps = (args.features + kStep - 1) / kStep;
    const int start = blockIdx.z * args.steps_of_part;
    const int stop = min(all_steps, start + args.steps_of_part);
    for (int stage = 0; stage < args.stages - 1; ++stage) {
      const int step = start + stage * args.sum_warps;
      if (step < stop) {
        copies.start(step, stage);
        copies.store_zero_points(stage);
      } else {
        async_copies_commit();
      }
    }
    int slot = 0, free_slot = args.stages - 1, started_slot = -1;
    for (int step = start; step < stop; step += args.sum_warps) {
      async_copies_wait(args.stages - 2);
      if (started_slot >= 0) copies.store_zero_points(started_slot);
      __syncthreads();
      const int next = step + (args.stages - 1) * args.sum_warps;
      started_slot = next < stop ? free_slot : -1;
      if (next < stop) {
        copies.start(next, free_slot);
      } else {
        async_copies_commit();
      }
      sums.multiply(args, place, memory + slot * place.stage_bytes, copies.have_zero_points());
      slot = slot + 1 == args.stages ? 0 : slot + 1;
      free_slot = free_slot + 1 == args.stages ? 0 : free_slot + 1;
    }
    // The sums reuse the memory of the pipeline stages.
    async_copies_wait(0);
    __syncthreads();
    float* found = reinterpret_cast<float*>(memory);
    sums.store(args, place, found);
    __syncthreads();
    finish_block(args, place, found);
  }
}

struct MergeArgs {
  const float* sums;  // split-K sums, [parts, products, rows, columns]
  int parts;
  QuantizedEpilogue epilogue;
};

// Adds up the partial sums of split-K, and applies the epilogue.
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
  int rows;  // rows of x in a block's tile
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

// Returns the constants that convert float8 to x's dtype: see Float8Code.
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
  int64_t of_element = 1;  // features that one element of `values` holds
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
  }
  RETURN_IF_ERROR(parse_epilogue(activation, bias, residual, *y, *preactivation, &epilogue));
  RETURN_IF_ERROR(parse_parameter("bias2", bias2, columns, &epilogue.bias[1]));

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
  // An SM runs two blocks if two pipeline stages of each fit its shared memory, with what CUDA
  // reserves per block. With 8 row tiles, two blocks would need too many registers.
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
    return ffi::Error::InvalidArgument(
        "more than 65,535 tiles of columns, or rows of partial sums");
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
