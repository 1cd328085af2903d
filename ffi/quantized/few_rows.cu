// A product of one to four rows of 16-bit x with weights of 4 bits on Hopper:
// y = activation(x w + bias) + residual, or the gated unit activation(x w + bias) * (x w2 + bias2).
//
// A thread block computes a range of columns. Each of its warps multiplies a slice of 256 features,
// 16 columns a step, and then the next slice that no other warp has. x of the slice is in
// registers; the weights are copied into a ring of the warp's own in shared memory, so that no warp
// waits for another one until the end, where the warps' sums are added up in a fixed order. The
// steps of a gated unit alternate between w and w2.

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/handler.h"
#include "common/mma.cuh"
#include "common/operands.h"
#include "few_rows_step.cuh"
#include "quantized_epilogue.cuh"

namespace {

constexpr int kMaxWarps = 16, kMaxRows = 4;
constexpr int kStages = 3;                // pipeline stages of a warp's ring
constexpr int kSharedBytes = 227 * 1024;  // shared memory of a thread block
constexpr int kReservedBytes = 1024;      // what CUDA uses of it, before the kernel's own

struct FewRowsArgs {
  const void* x;                           // [rows, features]
  const uint8_t* values[kMaxProducts];     // [columns, features / 2]
  const uint8_t* scale[kMaxProducts];      // [groups, columns], float32 or bytes of E8M0
  const int8_t* zero_point[kMaxProducts];  // [groups, columns], or nullptr
  uint16_t codebook[16];                   // bits of the numbers in x's dtype
  int features;
  int group;       // features that share a scale
  int units;       // of 16 columns, of all blocks
  int most;        // most columns of a block, of w and w2 together
  int x_slots;     // slices of x that a warp has in shared memory
  int warp_bytes;  // shared memory of a warp: its ring and its slices of x
  int behind;      // warps whose shared memory lies behind the table; that of others lies before it
  QuantizedEpilogue epilogue;
};

// Waits for the copies of the oldest stage of the ring.
__device__ __forceinline__ void wait_for_stage() {
  static_assert(kStages == 3);
  async_copies_wait(2);
}

// The slices and columns that a warp multiplies.
struct Work {
  int lane, warp, warps;
  int first, count;  // of the block's units of 16 columns
  int steps;         // of a slice: units of w and w2
  int slices;        // of all warps

  __device__ explicit Work(const FewRowsArgs& args)
      : lane(threadIdx.x % 32), warp(threadIdx.x / 32), warps(blockDim.x / 32) {
    const auto units = static_cast<unsigned>(args.units);
    first = static_cast<int>(blockIdx.x * units / gridDim.x);
    count = static_cast<int>((blockIdx.x + 1) * units / gridDim.x) - first;
    steps = count * args.epilogue.products;
    slices = (args.features + kSlice - 1) / kSlice;
  }
};

// A lane's part of a warp's copies: the weights of a step with their scales and zero points, and
// with the first step of a slice its x. For features beyond the last, x is 0 and the weights are
// those of earlier features. If fewer than 16 columns are left, the last step takes the last 16, so
// that some columns are computed twice.
template <typename Of, int kRows>
class Copies {
  static constexpr int kLanes = Of::kScaleRow / 16;  // lanes that copy a group's scales

 public:
  __device__ Copies(const FewRowsArgs& args, const Work& work, uint32_t ring)
      : args_(args), work_(work), slice_(work.warp), left_(0), slot_(0) {
    to_ = kept(ring + Of::place(work.lane / 8, work.lane % 8));
    to_scale_ = kept(ring + Of::kScales + work.lane * 16);
    to_x_ = kept(ring + kStages * Of::kStage + work.lane * 16);
    // In a gated unit a pointer moves from w to w2 and then to w's next columns, in turn.
    // `advances_` is the sum of both moves: less the last one, it is the next.
    const bool are_two = args.epilogue.products == kMaxProducts;
    const int64_t stride = int64_t{kUnit} * (args.features / 2);
    advance_ = are_two ? args.values[1] - args.values[0] : stride;
    advances_ = are_two ? stride : 2 * stride;
    scale_advance_ = are_two ? args.scale[1] - args.scale[0] : Of::kScaleRow;
    scale_advances_ = are_two ? Of::kScaleRow : 2 * Of::kScaleRow;
    if constexpr (Of::kZeroPoints) {
      zero_advance_ = are_two ? args.zero_point[1] - args.zero_point[0] : kUnit;
      zero_advances_ = are_two ? kUnit : 2 * kUnit;
    }
    const bool has_last = work.first + work.count == args.units;
    shift_ = has_last ? args.units * kUnit - args.epilogue.columns : 0;
    begin();
  }

  // Starts the copies of the next step, if there is one, into the stage at `offset`.
  __device__ __forceinline__ void next(uint32_t offset) {
    if (left_ > 0) {
      if (left_ == work_.steps) copy_x();
      if (left_ == args_.epilogue.products && shift_ != 0) move(-shift_);
#pragma unroll
      for (int pass = 0; pass < 4; ++pass) {
        // The swizzle of `Of::place` reads a column's lower two bits, equal in columns 4 apart.
        async_copy_or_zero<true>(to_ + offset + pass * 4 * kRowBytes, values_[pass], true);
        values_[pass] += advance_;
      }
      advance_ = advances_ - advance_;
      if (work_.lane < Of::kGroups * kLanes) async_copy_or_zero(to_scale_ + offset, scale_, true);
      scale_ += scale_advance_;
      scale_advance_ = scale_advances_ - scale_advance_;
      if constexpr (Of::kZeroPoints) {
        if (work_.lane < Of::kGroups) {
          async_copy_or_zero(to_scale_ + (Of::kZeros - Of::kScales) + offset, zero_, true);
        }
        zero_ += zero_advance_;
        zero_advance_ = zero_advances_ - zero_advance_;
      }
      if (--left_ == 0) {
        slice_ += work_.warps;
        begin();
      }
    }
    async_copies_commit();
  }

 private:
  __device__ __forceinline__ void begin() {
    if (slice_ >= work_.slices) return;
    left_ = work_.steps;
    const int row_bytes = args_.features / 2, column = work_.first * kUnit;
    const int byte = min(slice_ * kRowBytes + work_.lane % 8 * 16, row_bytes - 16);
#pragma unroll
    for (int pass = 0; pass < 4; ++pass) {
      values_[pass] =
          args_.values[0] + int64_t{column + pass * 4 + work_.lane / 8} * row_bytes + byte;
    }
    scale_ = args_.scale[0] + (group_start(work_.lane / kLanes) + column) * Of::kScaleBytes +
             work_.lane % kLanes * 16;
    if constexpr (Of::kZeroPoints) zero_ = args_.zero_point[0] + group_start(work_.lane) + column;
  }

  __device__ __forceinline__ void copy_x() {
    const int feature = slice_ * kSlice + work_.lane * 8;
    const bool exists = feature < args_.features;
    const auto* from = static_cast<const uint16_t*>(args_.x) + (exists ? feature : 0);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row < args_.epilogue.rows) {
        async_copy_or_zero(to_x_ + (slot_ * kRows + row) * kXPitch,
                           from + int64_t{row} * args_.features, exists);
      }
    }
    slot_ = slot_ + 1 == args_.x_slots ? 0 : slot_ + 1;
  }

  // Returns the index of column 0 of a group of the slice in the arrays of scales.
  __device__ __forceinline__ int64_t group_start(int group) const {
    const int feature = min(slice_ * kSlice + group * Of::kGroup, args_.features - 1);
    return static_cast<int64_t>(feature / args_.group) * args_.epilogue.columns;
  }

  // Moves the pointers by a number of columns.
  __device__ __forceinline__ void move(int columns) {
#pragma unroll
    for (int pass = 0; pass < 4; ++pass) values_[pass] += int64_t{columns} * (args_.features / 2);
    scale_ += columns * Of::kScaleBytes;
    if constexpr (Of::kZeroPoints) zero_ += columns;
  }

  const FewRowsArgs& args_;
  const Work& work_;
  uint32_t to_, to_scale_, to_x_;
  int slice_, left_, slot_, shift_, scale_advances_, zero_advances_;
  int64_t advance_, advances_, scale_advance_, zero_advance_;
  const uint8_t *values_[4], *scale_;
  const int8_t* zero_;
};

// Writes the table of the codebook's pairs of numbers. Each warp writes those of some upper codes.
__device__ __forceinline__ void write_table(const FewRowsArgs& args, uint8_t* table,
                                            const Work& work) {
  for (int high = work.warp; high < 16; high += work.warps) {
#pragma unroll
    for (int low = 0; low < 16; ++low) {
      const uint32_t pair = args.codebook[low] | static_cast<uint32_t>(args.codebook[high]) << 16;
      reinterpret_cast<uint32_t*>(table + (high * 16 + low) * 256)[work.lane] = pair;
    }
  }
}

// Adds up the warps' sums, [warps, kRows, most], multiplies them by `factor` and writes the
// results.
template <int kRows>
__device__ __forceinline__ void add_up(const FewRowsArgs& args, const Work& work, const float* sums,
                                       float factor) {
  const int vectors = work.count * kUnit / kEpilogueVec, last = args.epilogue.columns - kUnit;
  for (int i = threadIdx.x; i < args.epilogue.rows * vectors; i += blockDim.x) {
    const int row = i / vectors, place = i % vectors * kEpilogueVec;
    float z[kMaxProducts][kEpilogueVec] = {};
#pragma unroll
    for (int product = 0; product < kMaxProducts; ++product) {
      if (product >= args.epilogue.products) continue;
      const int step = place / kUnit * args.epilogue.products + product;
      const float* from = sums + row * args.most + step * kUnit + place % kUnit;
#pragma unroll 4
      for (int warp = 0; warp < work.warps; ++warp) {
        const float4 part = *reinterpret_cast<const float4*>(from + warp * kRows * args.most);
        z[product][0] += part.x, z[product][1] += part.y;
        z[product][2] += part.z, z[product][3] += part.w;
      }
#pragma unroll
      for (int k = 0; k < kEpilogueVec; ++k) z[product][k] *= factor;
    }
    const int column = min(work.first * kUnit + place / kUnit * kUnit, last) + place % kUnit;
    finish(args.epilogue, row, column, z);
  }
}

template <typename T, FourBits kFormat, int kGroups, int kRows>
__global__ void __launch_bounds__(32 * kMaxWarps, 1)
    few_rows_kernel(const __grid_constant__ FewRowsArgs args) {
  if constexpr (kHasBulkCopies) {
    using Of = Shape<kFormat, kGroups, kRows>;
    extern __shared__ __align__(1024) uint8_t memory[];
    const Work work(args);
    const int before =
        max(work.warps - args.behind, 0);  // warps whose memory lies before the table
    const int base = static_cast<int>(shared_address(memory));
    uint8_t* const own = work.warp < args.behind
                             ? memory + (2 * kTableBytes - base) + work.warp * args.warp_bytes
                             : memory + (work.warp - args.behind) * args.warp_bytes;
    float* const sums = reinterpret_cast<float*>(memory + before * args.warp_bytes);
    float* const own_sums = sums + work.warp * kRows * args.most;
    const uint32_t ring = shared_address(own);
    Copies<Of, kRows> copies(args, work, ring);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) copies.next(stage * Of::kStage);
    if constexpr (has_table(kFormat)) {
      write_table(args, memory + (kTableBytes - base), work);
      __syncthreads();
    }
    const typename Step<T, Of, kRows>::Places places(ring, work.lane);
    float* const lane_sums = own_sums + place_of_sums<kRows>(work.lane, args.most);
    uint32_t offset = 0;
    int slot = 0;
    bool adds = false;
    for (int slice = work.warp; slice < work.slices; slice += work.warps) {
      wait_for_stage();
      __syncwarp();
      uint32_t x[kWords][4];
      load_x<Of, kRows>(ring + kStages * Of::kStage + slot * kRows * kXPitch, args.epilogue.rows,
                        work.lane, x);
      slot = slot + 1 == args.x_slots ? 0 : slot + 1;
      float* to = lane_sums;
#pragma unroll 1
      for (int left = work.steps; left > 0; --left) {
        wait_for_stage();
        __syncwarp();
        Step<T, Of, kRows> step;
        step.load(places, offset);
        __syncwarp();
        copies.next(offset);
        multiply<T, Of, kRows>(step, x, work.lane, adds, to, args.most);
        to += kUnit;
        offset = offset == (kStages - 1) * Of::kStage ? 0 : offset + Of::kStage;
      }
      adds = true;
    }
    __syncthreads();
    add_up<kRows>(args, work, sums, Of::kInt4 ? Nibbles<T>::kUnits : 1.0f);
  }
}

// --- the handler ---------------------------------------------------------------------------------

struct Choice {
  void (*kernel)(FewRowsArgs) = nullptr;
  int rows = 0, stage_bytes = 0;
};

template <typename T, FourBits kFormat, int kGroups, int kRows>
Choice choice() {
  return {few_rows_kernel<T, kFormat, kGroups, kRows>, kRows,
          Shape<kFormat, kGroups, kRows>::kStage};
}

template <typename T, FourBits kFormat, int kGroups>
Choice choose(int rows) {
  if (rows == 1) return choice<T, kFormat, kGroups, 1>();
  if (rows == 2) return choice<T, kFormat, kGroups, 2>();
  return choice<T, kFormat, kGroups, 4>();
}

template <typename T>
Choice choose(FourBits format, int64_t group, int rows) {
  switch (format) {
    case FourBits::kInt4:
      if (group == 32) return choose<T, FourBits::kInt4, 8>(rows);
      if (group == 64) return choose<T, FourBits::kInt4, 4>(rows);
      return choose<T, FourBits::kInt4, 2>(rows);
    case FourBits::kZeroPoints:
      if (group == 32) return choose<T, FourBits::kZeroPoints, 8>(rows);
      if (group == 64) return choose<T, FourBits::kZeroPoints, 4>(rows);
      return choose<T, FourBits::kZeroPoints, 2>(rows);
    case FourBits::kExponents:
      return choose<T, FourBits::kExponents, 8>(rows);
    case FourBits::kCodes:
    default:
      if (group == 32) return choose<T, FourBits::kCodes, 8>(rows);
      if (group == 64) return choose<T, FourBits::kCodes, 4>(rows);
      return choose<T, FourBits::kCodes, 2>(rows);
  }
}

// Divides the columns among one block for each SM, and the slices among up to 16 warps of a block,
// as many as fit its shared memory. If that is less than half of 16, or of the slices, each SM gets
// two blocks or more, of fewer columns.
ffi::Error divide(const Choice& chosen, bool with_table, int multiprocessors, FewRowsArgs* args,
                  Launch* launch) {
  const int slices = (args->features + kSlice - 1) / kSlice;
  const int least = (slices + kMaxWarps - 1) / kMaxWarps;
  for (int waves = 1; waves * multiprocessors <= 65535; ++waves) {
    const int blocks = std::min(args->units, waves * multiprocessors);
    const int products = args->epilogue.products, steps = args->units / blocks * products;
    args->most = (args->units + blocks - 1) / blocks * kUnit * products;
    for (int passes = least; passes <= 2 * least; ++passes) {
      const int warps = (slices + passes - 1) / passes;
      // Copies run kStages steps ahead, so a warp needs a slot for the x of each slice that begins
      // within so many steps. Its own slice is in registers, and needs none.
      args->x_slots = std::min(passes, (kStages + steps - 1) / steps);
      args->warp_bytes = kStages * chosen.stage_bytes + args->x_slots * chosen.rows * kXPitch;
      args->behind = with_table ? (kSharedBytes - 2 * kTableBytes) / args->warp_bytes : 0;
      const int first = std::max(warps - args->behind, 0) * args->warp_bytes +
                        warps * chosen.rows * args->most * 4;
      if (first > (with_table ? kTableBytes - kReservedBytes : kSharedBytes)) continue;
      const int behind = 2 * kTableBytes + std::min(warps, args->behind) * args->warp_bytes;
      *launch = {dim3(static_cast<unsigned>(blocks)), warps * 32, with_table ? behind : first};
      return ffi::Error::Success();
    }
  }
  return ffi::Error::InvalidArgument("there are more columns than blocks have shared memory for");
}

ffi::Error few_rows(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer values,
                    ffi::AnyBuffer scale, ffi::AnyBuffer zero_point, ffi::AnyBuffer values2,
                    ffi::AnyBuffer scale2, ffi::AnyBuffer zero_point2, ffi::AnyBuffer bias,
                    ffi::AnyBuffer bias2, ffi::AnyBuffer residual, ffi::Result<ffi::AnyBuffer> y,
                    ffi::Result<ffi::AnyBuffer> preactivation, std::string_view activation,
                    ffi::Span<const float> codebook) {
  FewRowsArgs args = {};
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
  const bool in_words = values.element_type() == ffi::DataType::S32;
  const bool has_zeros = !is_absent(zero_point);
  const bool exponents = scale.element_type() == ffi::DataType::U8;
  if (!in_words) RETURN_IF_ERROR(check_dtype("the codes", values, ffi::DataType::U8));
  if (!exponents) RETURN_IF_ERROR(check_dtype("scale", scale, ffi::DataType::F32));
  if (has_zeros) RETURN_IF_ERROR(check_dtype("zero_point", zero_point, ffi::DataType::S8));
  const bool fits_format =
      in_words ? !exponents && codebook.size() == 0 : !has_zeros && codebook.size() == 16;
  if (!fits_format) {
    return ffi::Error::InvalidArgument(
        "int4 in words has float32 scales and no codebook, codes have 16 numbers and no zero "
        "points");
  }
  constexpr int64_t kMost = int64_t{1} << 19;
  if (rows < 1 || rows > kMaxRows || features < 1 || features > kMost || columns > kMost ||
      features % (in_words ? 128 : 32) != 0 ||
      values.dimensions()[1] * (in_words ? 8 : 2) != features) {
    return ffi::Error::InvalidArgument("the weights have shape " + to_string(values.dimensions()) +
                                       ", which does not fit x of shape " +
                                       to_string(x.dimensions()));
  }
  const int grain = exponents || has_zeros ? 16 : 4;
  if (columns < kUnit || columns % grain != 0) {
    return ffi::Error::InvalidArgument("there must be a multiple of " + std::to_string(grain) +
                                       " columns, from 16 on");
  }
  const int64_t group = groups > 1 ? features / groups : features;
  const bool is_listed = group == 32 || group == 64 || group % 128 == 0;
  if (groups < 1 || features % groups != 0 || (groups > 1 && !is_listed) ||
      (exponents && group != 32)) {
    return ffi::Error::InvalidArgument(
        "groups must be of 32, 64 or a multiple of 128 features, and of 32 with E8M0 scales");
  }
  RETURN_IF_ERROR(check_shape("scale", scale, {groups, columns}));
  if (has_zeros) RETURN_IF_ERROR(check_shape("zero_point", zero_point, {groups, columns}));
  epilogue.rows = static_cast<int>(rows);
  epilogue.columns = static_cast<int>(columns);
  epilogue.products = is_absent(values2) ? 1 : 2;
  if (epilogue.products == 2) {
    RETURN_IF_ERROR(check_like("values2", values2, values));
    RETURN_IF_ERROR(check_like("scale2", scale2, scale));
    if (has_zeros || !is_absent(zero_point2)) {
      RETURN_IF_ERROR(check_like("zero_point2", zero_point2, zero_point));
    }
  }
  RETURN_IF_ERROR(parse_epilogue(activation, bias, residual, *y, *preactivation, &epilogue));
  RETURN_IF_ERROR(parse_parameter("bias2", bias2, columns, &epilogue.bias[1]));
  args.x = x.untyped_data();
  args.values[0] = static_cast<const uint8_t*>(values.untyped_data());
  args.values[1] = data_or_null<const uint8_t>(values2);
  args.scale[0] = static_cast<const uint8_t*>(scale.untyped_data());
  args.scale[1] = data_or_null<const uint8_t>(scale2);
  args.zero_point[0] = data_or_null<const int8_t>(zero_point);
  args.zero_point[1] = data_or_null<const int8_t>(zero_point2);
  if (!are_aligned({args.x, args.values[0], args.values[1], args.scale[0], args.scale[1],
                    args.zero_point[0], args.zero_point[1], epilogue.y.data,
                    epilogue.preactivation.data, epilogue.residual.data, epilogue.bias[0].data,
                    epilogue.bias[1].data})) {
    return ffi::Error::InvalidArgument("an array does not begin at a multiple of 16 bytes");
  }
  const bool is_half = *dtype == Dtype::kFloat16;
  for (size_t i = 0; i < codebook.size(); ++i) {
    args.codebook[i] = is_half ? __half_as_ushort(__float2half_rn(codebook[i]))
                               : __bfloat16_as_ushort(__float2bfloat16_rn(codebook[i]));
  }
  args.features = static_cast<int>(features);
  args.group = static_cast<int>(group);
  args.units = static_cast<int>((columns + kUnit - 1) / kUnit);
  const FourBits format = !in_words   ? exponents ? FourBits::kExponents : FourBits::kCodes
                          : has_zeros ? FourBits::kZeroPoints
                                      : FourBits::kInt4;
  const Choice chosen = is_half ? choose<__half>(format, group, epilogue.rows)
                                : choose<__nv_bfloat16>(format, group, epilogue.rows);
  Device device = {};
  RETURN_IF_ERROR(current_device(&device));
  if (device.shared_bytes < kSharedBytes) {
    return ffi::Error::InvalidArgument("a block of this GPU has too little shared memory for it");
  }
  Launch launch = {};
  RETURN_IF_ERROR(divide(chosen, has_table(format), device.multiprocessors, &args, &launch));
  RETURN_IF_ERROR(allow_shared_memory(chosen.kernel, device));
  return launch_kernel(chosen.kernel, args, launch, stream);
}

}  // namespace

DEFINE_HANDLER(jaxfused_few_rows, few_rows,
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
                   .Attr<std::string_view>("activation")
                   .Attr<ffi::Span<const float>>("codebook"),
               {ffi::Traits::kCmdBufferCompatible});
