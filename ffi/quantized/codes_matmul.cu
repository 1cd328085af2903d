// A product of few rows of bfloat16 x with weights that are codes of 4 bits, which index a codebook
// of 16 numbers: y = activation(x w + bias) + residual.
//
// An SM runs one block. Its 16 warps divide the features among them, for all of the block's
// columns; their sums are added up in shared memory, in a fixed order. A byte of two codes is
// looked up in a table of pairs in shared memory, of which each lane has a copy in a bank of its
// own: a byte permute makes the address, and a load the operand of the tensor cores. The scale of a
// group multiplies the group's sum in float32, so that only the codebook is rounded.

#include <cstdint>
#include <string>

#include "common/handler.h"
#include "common/mma.cuh"
#include "common/operands.h"
#include "quantized_epilogue.cuh"

namespace {

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kRun = 32;              // adjacent features with one scale: 16 bytes of codes
constexpr int kStep = kRun * kWarps;  // features of a pipeline stage, a run for each warp
constexpr int kUnit = 16;             // columns of the tensor cores' left operand
constexpr int kMaxUnits = 9;          // units of a block
constexpr int kMostRows = 16;
constexpr int64_t kMaxSize = int64_t{1} << 30;
constexpr int kMaxStages = 5;
constexpr int kPitch = kStep / 2 + 16;  // bytes between columns in shared memory: other banks
constexpr int kEntryBytes = 256;        // of the table, for each byte; the lanes use a half
constexpr int kTableBytes = 256 * kEntryBytes;
constexpr int kSharedBytes = 227 * 1024;  // of a block, from Hopper on

struct CodesArgs {
  const __nv_bfloat16* x;  // [rows, features]
  const uint8_t* values;   // [columns, features / 2]
  const uint8_t* scale;    // [groups, columns], float32 or bytes of E8M0
  int features;
  int group_shift;  // a run's index, shifted right by it, is its group's
  __nv_bfloat16 codebook[16];
  QuantizedEpilogue epilogue;
};

// Shared memory of a block, in bytes: the table, the pipeline stages, and scales in float32.
template <bool kExponents, int kUnits>
struct Memory {
  static constexpr int kColumns = kUnits * kUnit;
  static constexpr int kScale = kExponents ? 1 : 4;
  static constexpr int kScales = kColumns * kPitch;  // place of a stage's scales [warps, columns]
  static constexpr int kStage = kScales + kWarps * kColumns * kScale;
  static constexpr int kConverted = kExponents ? kWarps * kColumns * 4 : 0;
  static constexpr int kFitting = (kSharedBytes - kTableBytes - kConverted) / kStage;
  static constexpr int kStages = kFitting < kMaxStages ? kFitting : kMaxStages;
  static constexpr int kBytes = kTableBytes + kStages * kStage + kConverted;
  static_assert(kStages >= 2);
};

// Returns a byte of E8M0 as float32: 0 is the subnormal 2^-127, 255 is NaN.
__device__ __forceinline__ float power_of_two(uint32_t exponent) {
  return __uint_as_float(exponent << 23 | (exponent - 1u >= 254u ? 0x00400000u : 0u));
}

__device__ __forceinline__ float4 powers_of_two(uint32_t four) {
  // The high bit of a byte is set where it is 0 or 255, and at times beside such a byte.
  const uint32_t special = ((four - 0x01010101u) & ~four) | ((~four - 0x01010101u) & four);
  if (special & 0x80808080u) {
    return {power_of_two(four & 255), power_of_two(four >> 8 & 255), power_of_two(four >> 16 & 255),
            power_of_two(four >> 24)};
  }
  return {__uint_as_float(four << 23 & 0x7f800000u), __uint_as_float(four << 15 & 0x7f800000u),
          __uint_as_float(four << 7 & 0x7f800000u), __uint_as_float(four >> 1 & 0x7f800000u)};
}

// The columns and features that a block and a warp compute.
struct Place {
  __device__ Place(const CodesArgs& args, int block_columns)
      : lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        start(blockIdx.x * block_columns),
        columns(min(block_columns, args.epilogue.columns - start)),
        runs(args.features / kRun),
        steps((runs + kWarps - 1) / kWarps) {}

  __device__ __forceinline__ int run(int step) const { return step * kWarps + warp; }

  int lane, warp;
  int start, columns;  // the block's first column, and how many it has
  int runs, steps;
};

// A thread's copies from global to shared memory.
template <bool kExponents, int kUnits>
class Copies {
  using Of = Memory<kExponents, kUnits>;
  static constexpr int kOfColumn = kStep / 2 / 16;  // copies of 16 bytes of a column
  static constexpr int kPassColumns = kThreads / kOfColumn;

 public:
  __device__ Copies(const CodesArgs& args, const Place& place, uint8_t* stages)
      : args_(args), place_(place), stages_(stages) {
    column_ = threadIdx.x / kOfColumn;
    byte_ = threadIdx.x % kOfColumn * 16;
    values_ = args.values + (int64_t{place.start} + column_) * (args.features / 2) + byte_;
    // Rows 0 to 7 of a unit's operand are its even columns, rows 8 to 15 the odd ones.
    const int row = column_ / kUnit * kUnit + column_ % 2 * 8 + column_ % kUnit / 2;
    to_ = shared_address(stages) + row * kPitch + byte_;
  }

  // Starts the copies of a step; of one beyond the last, of nothing.
  __device__ __forceinline__ void start(int step, int slot) {
    if (step < place_.steps) {
      start_values(step, slot);
      start_scales(step, slot);
    }
    async_copies_commit();
  }

 private:
  __device__ __forceinline__ void start_values(int step, int slot) {
    const int row_bytes = args_.features / 2, from = step * (kStep / 2);
    if (from + byte_ >= row_bytes) return;
    const uint8_t* source = values_ + from;
    const uint32_t to = to_ + slot * Of::kStage;
#pragma unroll
    for (int pass = 0; pass * kPassColumns < Of::kColumns; ++pass) {
      const bool exists = column_ + pass * kPassColumns < place_.columns;
      if (exists) async_copy_or_zero<true>(to + pass * kPassColumns * kPitch, source, true);
      source += int64_t{kPassColumns} * row_bytes;
    }
  }

  __device__ __forceinline__ void start_scales(int step, int slot) {
    const int run = place_.run(step), bytes = place_.columns * Of::kScale;
    if (run >= place_.runs) return;
    const int64_t group = run >> args_.group_shift;
    const uint8_t* source =
        args_.scale + (group * args_.epilogue.columns + place_.start) * Of::kScale;
    uint8_t* to =
        stages_ + slot * Of::kStage + Of::kScales + place_.warp * Of::kColumns * Of::kScale;
#pragma unroll
    for (int first = 0; first < Of::kColumns * Of::kScale; first += 512) {
      const int byte = first + place_.lane * 16;
      if (byte < bytes) async_copy<16>(to + byte, source + byte);
    }
  }

  const CodesArgs& args_;
  const Place& place_;
  uint8_t* stages_;
  const uint8_t* values_;
  int column_, byte_;
  uint32_t to_;
};

// A lane's 8 features of a run, in a row of each of x's tiles of 8 rows. Rows beyond the last one,
// whose products are not stored, are copies of it.
template <int kRowTiles>
class Rows {
 public:
  __device__ Rows(const CodesArgs& args, const Place& place) : place_(place) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const int row = min(tile * 8 + place.lane / 4, args.epilogue.rows - 1);
      rows_[tile] = args.x + int64_t{row} * args.features + place.warp * kRun + place.lane % 4 * 8;
    }
  }

  __device__ __forceinline__ void load(int step, uint4 (&x)[kRowTiles]) const {
    if (place_.run(step) >= place_.runs) return;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      x[tile] = __ldg(reinterpret_cast<const uint4*>(rows_[tile] + step * kStep));
    }
  }

 private:
  const Place& place_;
  const __nv_bfloat16* rows_[kRowTiles];
};

// Fills the table: for each byte of two codes and each lane, the pair of their numbers.
__device__ __forceinline__ void write_table(const CodesArgs& args, const Place& place,
                                            uint8_t* table) {
  static_assert(kWarps == 16);
  __nv_bfloat162 pair;
  pair.y = args.codebook[place.warp];
#pragma unroll
  for (int low = 0; low < 16; ++low) {
    pair.x = args.codebook[low];
    uint8_t* entry = table + (place.warp * 16 + low) * kEntryBytes;
    reinterpret_cast<__nv_bfloat162*>(entry)[place.lane] = pair;
  }
}

// The sums of a warp: the block's columns for all rows of x.
template <bool kExponents, int kUnits, int kRowTiles>
class Sums {
  using Of = Memory<kExponents, kUnits>;

 public:
  // Adds the products of a warp's run; columns beyond the last have those of any bits.
  __device__ __forceinline__ void add(const Place& place, const uint8_t* table, uint8_t* stage,
                                      float* converted, const uint4 (&x)[kRowTiles]) {
    const float* scales = own_scales(place, stage, converted);
    const uint32_t codes = shared_address(stage) + place.lane * kPitch + place.warp * (kRun / 2);
    uint32_t words[4];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      if (unit % 2 == 0) {
        // The last unit of an odd number is loaded twice, not what lies behind it.
        const int back = unit + 1 == kUnits ? place.lane / kUnit * kUnit * kPitch : 0;
        load_matrices(words, codes + unit * kUnit * kPitch - back);
      }
      uint32_t upper[4], lower[4];
      look_up(table, words[unit % 2 * 2], place.lane, upper);
      look_up(table, words[unit % 2 * 2 + 1], place.lane, lower);
      const uint32_t first[4] = {upper[0], lower[0], upper[1], lower[1]};
      const uint32_t last[4] = {upper[2], lower[2], upper[3], lower[3]};
      const float2 scale = reinterpret_cast<const float2*>(scales + unit * kUnit)[place.lane / 4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        float found[4] = {};
        multiply_add<__nv_bfloat16>(found, first, x[tile].x, x[tile].y);
        multiply_add<__nv_bfloat16>(found, last, x[tile].z, x[tile].w);
        float (&sum)[4] = sums_[unit][tile];
        sum[0] = fmaf(scale.x, found[0], sum[0]);
        sum[1] = fmaf(scale.x, found[1], sum[1]);
        sum[2] = fmaf(scale.y, found[2], sum[2]);
        sum[3] = fmaf(scale.y, found[3], sum[3]);
      }
    }
  }

  // Writes the sums to shared memory as [warp, row, column].
  __device__ __forceinline__ void store(const CodesArgs& args, const Place& place,
                                        float* found) const {
    const int rows = args.epilogue.rows;
    float* own = found + place.warp * rows * Of::kColumns + place.lane / 4 * 2;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        const int row = i / 2 * 8 + place.lane % 4 * 2 + i % 2;
        const float (&sum)[4] = sums_[unit][i / 2];
        if (row < rows) {
          *reinterpret_cast<float2*>(own + row * Of::kColumns + unit * kUnit) = {sum[i % 2],
                                                                                 sum[i % 2 + 2]};
        }
      }
    }
  }

 private:
  // Returns the scales of the warp's run, which are converted to float32 if they are E8M0.
  static __device__ __forceinline__ const float* own_scales(const Place& place, uint8_t* stage,
                                                            float* converted) {
    const uint8_t* stored = stage + Of::kScales + place.warp * Of::kColumns * Of::kScale;
    if constexpr (!kExponents) return reinterpret_cast<const float*>(stored);
    float* own = converted + place.warp * Of::kColumns;
    __syncwarp();  // all lanes have read the scales of the run before
#pragma unroll
    for (int first = 0; first < Of::kColumns; first += 128) {
      const int column = first + place.lane * 4;
      if (column < Of::kColumns) {
        *reinterpret_cast<float4*>(own + column) =
            powers_of_two(*reinterpret_cast<const uint32_t*>(stored + column));
      }
    }
    __syncwarp();
    return own;
  }

  // Returns the numbers of a word of eight codes, as four pairs.
  static __device__ __forceinline__ void look_up(const uint8_t* table, uint32_t word, int lane,
                                                 uint32_t (&pairs)[4]) {
    static_assert(kEntryBytes == 256);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Byte 1 of the place is the word's byte i, and byte 0 is the lane's place in an entry.
      const uint32_t at = __byte_perm(word, static_cast<uint32_t>(lane) * 4, 0x5504u + 16u * i);
      pairs[i] = *reinterpret_cast<const uint32_t*>(table + at);
    }
  }

  float sums_[kUnits][kRowTiles][4] = {};
};

// Adds up the sums of the block's warps, [warp, row, column], and applies the epilogue.
__device__ __forceinline__ void finish_block(const CodesArgs& args, const Place& place,
                                             const float* found, int columns) {
  const int rows = args.epilogue.rows, vectors = place.columns / kEpilogueVec;
  for (int i = threadIdx.x; i < rows * vectors; i += kThreads) {
    const int row = i / vectors, column = i % vectors * kEpilogueVec;
    float z[kMaxProducts][kEpilogueVec] = {};
    for (int warp = 0; warp < kWarps; ++warp) {
      const float4 part =
          *reinterpret_cast<const float4*>(found + (warp * rows + row) * columns + column);
      z[0][0] += part.x;
      z[0][1] += part.y;
      z[0][2] += part.z;
      z[0][3] += part.w;
    }
    finish(args.epilogue, row, place.start + column, z);
  }
}

template <bool kExponents, int kUnits, int kRowTiles>
__global__ void __launch_bounds__(kThreads, 1) codes_matmul_kernel(CodesArgs args) {
  if constexpr (kHasBulkCopies) {  // only from Hopper on do blocks have the memory
    using Of = Memory<kExponents, kUnits>;
    extern __shared__ __align__(128) uint8_t memory[];
    uint8_t* const stages = memory + kTableBytes;
    auto* const converted = reinterpret_cast<float*>(stages + Of::kStages * Of::kStage);
    const Place place(args, Of::kColumns);
    Copies<kExponents, kUnits> copies(args, place, stages);
    for (int step = 0; step < Of::kStages - 1; ++step) copies.start(step, step);
    write_table(args, place, memory);
    const Rows<kRowTiles> rows(args, place);
    uint4 x[kRowTiles], next[kRowTiles];
    rows.load(0, next);
    Sums<kExponents, kUnits, kRowTiles> sums;
    int slot = 0, free_slot = Of::kStages - 1;
    for (int step = 0; step < place.steps; ++step) {
      async_copies_wait(Of::kStages - 2);
      __syncthreads();
      copies.start(step + Of::kStages - 1, free_slot);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) x[tile] = next[tile];
      rows.load(step + 1, next);
      if (place.run(step) < place.runs) {
        sums.add(place, memory, stages + slot * Of::kStage, converted, x);
      }
      slot = slot + 1 == Of::kStages ? 0 : slot + 1;
      free_slot = free_slot + 1 == Of::kStages ? 0 : free_slot + 1;
    }
    // The sums reuse the memory of the table and the pipeline stages.
    async_copies_wait(0);
    __syncthreads();
    auto* const found = reinterpret_cast<float*>(memory);
    sums.store(args, place, found);
    __syncthreads();
    finish_block(args, place, found, Of::kColumns);
  }
}

// --- the handler ---------------------------------------------------------------------------------

struct Choice {
  void (*kernel)(CodesArgs);
  int shared_bytes;
};

template <bool kExponents, int kUnits = kMaxUnits>
Choice choose(int units, int rows) {
  if constexpr (kUnits > 1) {
    if (units < kUnits) return choose<kExponents, kUnits - 1>(units, rows);
  }
  constexpr int kBytes = Memory<kExponents, kUnits>::kBytes;
  const int sums = kWarps * rows * kUnits * kUnit * 4;
  return {rows > 8 ? codes_matmul_kernel<kExponents, kUnits, 2>
                   : codes_matmul_kernel<kExponents, kUnits, 1>,
          std::max(kBytes, sums)};
}

ffi::Error parse_groups(int64_t features, int64_t groups, int* shift) {
  *shift = groups == 1 ? 31 : 0;
  if (groups == 1) return ffi::Error::Success();
  const int64_t group = groups < 1 || features % groups != 0 ? 0 : features / groups;
  while (group > int64_t{kRun} << *shift) ++*shift;
  if (group == int64_t{kRun} << *shift) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("groups must be of 32 features times a power of two");
}

ffi::Error codes_matmul(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer values,
                        ffi::AnyBuffer scale, ffi::AnyBuffer bias, ffi::AnyBuffer residual,
                        ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> preactivation,
                        std::string_view activation, ffi::Span<const float> codebook,
                        int64_t units) {
  CodesArgs args = {};
  QuantizedEpilogue& epilogue = args.epilogue;
  if (!parse_activation(activation, &epilogue.activation)) {
    return ffi::Error::InvalidArgument("the activation is not known: " + std::string(activation));
  }
  if (x.dimensions().size() != 2 || values.dimensions().size() != 2 ||
      scale.dimensions().size() != 2) {
    return ffi::Error::InvalidArgument("x, the weights and their scale must be matrices");
  }
  RETURN_IF_ERROR(check_dtype("x", x, ffi::DataType::BF16));
  RETURN_IF_ERROR(check_dtype("the weights", values, ffi::DataType::U8));
  const bool exponents = scale.element_type() == ffi::DataType::U8;
  if (!exponents) RETURN_IF_ERROR(check_dtype("the scale", scale, ffi::DataType::F32));
  const int64_t rows = x.dimensions()[0], features = x.dimensions()[1];
  const int64_t columns = values.dimensions()[0], groups = scale.dimensions()[0];
  if (rows < 1 || rows > kMostRows || features < kRun || features > kMaxSize ||
      features % kRun != 0 || columns < kUnit || columns > kMaxSize || columns % kUnit != 0) {
    return ffi::Error::InvalidArgument(
        "x must have 1 to 16 rows, and the weights multiples of 32 features and 16 columns; got x"
        " of shape " +
        to_string(x.dimensions()) + " and " + std::to_string(columns) + " columns");
  }
  RETURN_IF_ERROR(check_shape("the weights", values, {columns, features / 2}));
  RETURN_IF_ERROR(check_shape("the scale", scale, {groups, columns}));
  RETURN_IF_ERROR(parse_groups(features, groups, &args.group_shift));
  if (units < 1 || units > kMaxUnits || codebook.size() != 16) {
    return ffi::Error::InvalidArgument("units must be 1 to 9, and a codebook has 16 numbers; got " +
                                       std::to_string(units) + " and " +
                                       std::to_string(codebook.size()));
  }
  epilogue.rows = static_cast<int>(rows);
  epilogue.columns = static_cast<int>(columns);
  epilogue.products = 1;
  RETURN_IF_ERROR(parse_parameter("bias", bias, columns, &epilogue.bias[0]));
  Output added = {};
  RETURN_IF_ERROR(parse_output("residual", residual, rows, columns, &added));
  epilogue.residual = {added.data, added.dtype};
  RETURN_IF_ERROR(parse_output("y", *y, rows, columns, &epilogue.y));
  RETURN_IF_ERROR(
      parse_output("preactivation", *preactivation, rows, columns, &epilogue.preactivation));
  if (epilogue.y.data == nullptr) return ffi::Error::InvalidArgument("there is no y");
  args.x = static_cast<const __nv_bfloat16*>(x.untyped_data());
  args.values = static_cast<const uint8_t*>(values.untyped_data());
  args.scale = static_cast<const uint8_t*>(scale.untyped_data());
  if (!are_aligned({args.x, args.values, args.scale, epilogue.y.data, epilogue.preactivation.data,
                    epilogue.residual.data, epilogue.bias[0].data})) {
    return ffi::Error::InvalidArgument("an array does not begin at a multiple of 16 bytes");
  }
  args.features = static_cast<int>(features);
  for (int i = 0; i < 16; ++i) args.codebook[i] = __float2bfloat16_rn(codebook[i]);
  const auto of_block = static_cast<int>(units);
  const Choice chosen = exponents ? choose<true>(of_block, static_cast<int>(rows))
                                  : choose<false>(of_block, static_cast<int>(rows));
  Device device = {};
  RETURN_IF_ERROR(current_device(&device));
  if (chosen.shared_bytes > device.shared_bytes) {
    return ffi::Error::InvalidArgument("a block of this GPU has too little shared memory for it");
  }
  const int64_t blocks = (columns / kUnit + units - 1) / units;
  const Launch launch = {dim3(static_cast<unsigned>(blocks)), kThreads, chosen.shared_bytes};
  RETURN_IF_ERROR(allow_shared_memory(chosen.kernel, device));
  return launch_kernel(chosen.kernel, args, launch, stream);
}

}  // namespace

DEFINE_HANDLER(jaxfused_codes_matmul, codes_matmul,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // values
                   .Arg<ffi::AnyBuffer>()  // scale
                   .Arg<ffi::AnyBuffer>()  // bias
                   .Arg<ffi::AnyBuffer>()  // residual
                   .Ret<ffi::AnyBuffer>()  // y
                   .Ret<ffi::AnyBuffer>()  // preactivation
                   .Attr<std::string_view>("activation")
                   .Attr<ffi::Span<const float>>("codebook")
                   .Attr<int64_t>("units"),
               {ffi::Traits::kCmdBufferCompatible});
