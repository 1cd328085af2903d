// The step of an optimizer over all leaves of a tree: gradients are scaled and clipped; moments,
// parameters, their average and their copy are written in place, in one pass over memory.
//
// Everything that changes from step to step is read from device memory, so that schedules and
// counts may be traced. The arrays of a leaf and their dtypes are known only at run time: branches
// on them are uniform in a block and take no time compared with memory accesses.

#include <cfloat>
#include <optional>
#include <string>

#include "common/approximate.cuh"
#include "common/handler.h"
#include "common/operands.h"
#include "common/stochastic_rounding.cuh"
#include "eight_bit.cuh"
#include "multi_tensor.h"

namespace {

// The arrays of a leaf, in the order in which they are passed.
enum Stream {
  kGradient,
  kParameter,
  kFirstMoment,
  kSecondMoment,
  kAverage,
  kCopy,
  kFirstScale,  // scales of 8-bit moments
  kSecondScale
};
static_assert(kSecondScale + 1 == kMaxStreams);
constexpr int kMostRead = kCopy;         // arrays before this one have values that are read
constexpr int kMostWritten = kCopy + 1;  // arrays before this one have values that are written

// The scalars in the order of memory, which jaxfused/ops/optimizer/optimizer_step_cuda.py repeats.
struct alignas(16) Scalars {
  float learning_rate;
  float weight_decay;
  float b1, one_minus_b1;
  float b2, one_minus_b2;
  float eps, eps_root;
  float moment_weight;  // weight of the moment in the numerator of Adam's step
  float inverse_bias2;
  float gradient_weight;  // weight of the gradient in that numerator (Nesterov)
  float max_norm;
  float inverse_loss_scale;
  float average_decay, one_minus_average_decay;
  float unused;
};
constexpr int kScalars = sizeof(Scalars) / sizeof(float);

// LAMB takes two passes, because the norms of a whole leaf are needed between the moments and the
// parameters. The second pass recomputes the direction. kLambWrite takes the moments that
// kLambMoments has written in float32. kLambWhole, after kLambNorms, starts from the gradient,
// since a second moment rounded to 0 in 16 bits would give a direction other than that of the
// norms.
enum class Rule { kAdam, kAdam8Bit, kLion, kSgd, kLambMoments, kLambWrite, kLambNorms, kLambWhole };

__host__ __device__ constexpr bool takes_norms(Rule rule) {
  return rule == Rule::kLambMoments || rule == Rule::kLambNorms;
}

__host__ __device__ constexpr bool has_trust_ratio(Rule rule) {
  return rule == Rule::kLambWrite || rule == Rule::kLambWhole;
}

__host__ __device__ constexpr bool has_adam_moments(Rule rule) {
  return rule != Rule::kLion && rule != Rule::kSgd;
}

__host__ __device__ constexpr bool is_moment(int stream) {
  return stream == kFirstMoment || stream == kSecondMoment;
}

template <int... kStream>
constexpr uint32_t kBits = ((1u << kStream) | ...);

// Arrays of a leaf that a rule can read, as bits of `Stream`.
__host__ __device__ constexpr uint32_t streams_read(Rule rule) {
  switch (rule) {
    case Rule::kAdam:
    case Rule::kAdam8Bit:
    case Rule::kLambWhole:
      return kBits<kGradient, kParameter, kFirstMoment, kSecondMoment, kAverage>;
    case Rule::kLambMoments:
    case Rule::kLambNorms:
      return kBits<kGradient, kParameter, kFirstMoment, kSecondMoment>;
    case Rule::kLambWrite:
      return kBits<kParameter, kFirstMoment, kSecondMoment, kAverage>;
    default:
      return kBits<kGradient, kParameter, kFirstMoment, kAverage>;
  }
}

// Arrays of a leaf that a rule can write, as bits of `Stream`.
__host__ __device__ constexpr uint32_t streams_written(Rule rule) {
  switch (rule) {
    case Rule::kAdam:
    case Rule::kLambWhole:
      return kBits<kParameter, kFirstMoment, kSecondMoment, kAverage, kCopy>;
    case Rule::kAdam8Bit:
      return kBits<kParameter, kFirstMoment, kSecondMoment, kAverage, kCopy, kFirstScale,
                   kSecondScale>;
    case Rule::kLambMoments:
      return kBits<kFirstMoment, kSecondMoment>;
    case Rule::kLambWrite:
      return kBits<kParameter, kAverage, kCopy>;
    case Rule::kLambNorms:
      return 0;
    default:
      return kBits<kParameter, kFirstMoment, kAverage, kCopy>;
  }
}

// Properties of a tree that are known at compile time. 16-bit values and 8-bit codes are read so
// fast that branches on dtypes and absent arrays would take longer. Except with kAny, a tree has no
// averages, copies or Nesterov momentum, and all its values have one dtype.
enum class Format { kAny, kFloat32, kBfloat16 };

// Values that a thread handles at a time: as many as it loads at once.
template <Format kFormat, Rule kRule>
constexpr int kVec = kFormat == Format::kBfloat16 && kRule != Rule::kAdam8Bit ? 8 : kLeafVec;

template <Format kFormat>
__device__ __forceinline__ Dtype dtype_in(const Leaves& leaves, int stream) {
  if (kFormat == Format::kFloat32) return Dtype::kFloat32;
  if (kFormat == Format::kBfloat16) return Dtype::kBfloat16;
  return leaves.dtypes[stream];
}

template <Rule kRule, Format kFormat>
__device__ __forceinline__ bool is_present(const Leaves& leaves, int stream) {
  if (kFormat == Format::kAny) return has_stream(leaves.streams, stream);
  if (stream == kAverage || stream == kCopy) return false;
  return kRule != Rule::kSgd || stream != kFirstMoment || has_stream(leaves.streams, stream);
}

struct StepArgs {
  const Scalars* scalars;
  const float* stats;        // [2]: sum of squares of all gradients; non-zero if any is not finite
  const float2* norms;       // squared norms of each leaf's parameter and update direction
  float2* partial_norms;     // squared norms of each warp's part of each tile
  const LeafRandom* random;  // seeds of each leaf, if anything is rounded at random
  uint32_t rounded;          // bits of the bfloat16 streams that are rounded at random
  bool clips;
  bool skips_nonfinite;
  bool nesterov;
  Leaves leaves;
};
static_assert(sizeof(StepArgs) <= 32764);

// Returns the factor that undoes the loss scale and clips the gradients' global norm.
__device__ __forceinline__ float gradient_factor(const StepArgs& args, const Scalars& s) {
  if (!args.clips) return s.inverse_loss_scale;
  const float norm = sqrtf(__ldg(args.stats));
  return norm < s.max_norm ? s.inverse_loss_scale : s.inverse_loss_scale * (s.max_norm / norm);
}

// Returns LAMB's trust ratio: the norm of a leaf's parameter over that of its direction.
__device__ __forceinline__ float trust_ratio(float2 squares) {
  return squares.x == 0.0f || squares.y == 0.0f ? 1.0f : sqrtf(squares.x) / sqrtf(squares.y);
}

// Updates the moments and returns the direction before weight decay. 8-bit moments were already
// multiplied by their decay when they were decoded.
template <Rule kRule, Format kFormat>
__device__ __forceinline__ float direction_of(const StepArgs& args, const Scalars& s, float g,
                                              float& m, float& v) {
  if constexpr (has_adam_moments(kRule)) {
    if constexpr (kRule != Rule::kLambWrite) {
      m = s.one_minus_b1 * g + (kRule == Rule::kAdam8Bit ? m : s.b1 * m);
      v = s.one_minus_b2 * (g * g) + (kRule == Rule::kAdam8Bit ? v : s.b2 * v);
    }
    float numerator = s.moment_weight * m;
    if (kFormat == Format::kAny && (kRule == Rule::kAdam || kRule == Rule::kAdam8Bit) &&
        args.nesterov) {
      numerator += s.gradient_weight * g;
    }
    // 8- and 16-bit results need no more than 22 bits here, and so few bytes leave little time for
    // instructions. The smallest normal number is the least radicand, since a root of a subnormal
    // takes three more instructions; compared with eps it vanishes.
    if (kRule == Rule::kAdam8Bit || kFormat == Format::kBfloat16) {
      const float radicand = v * s.inverse_bias2 + fmaxf(s.eps_root, FLT_MIN);
      return numerator * fast_reciprocal(sqrt_of_normal(radicand) + s.eps);
    }
    const float radicand = v * s.inverse_bias2 + s.eps_root;
    return numerator / (sqrtf(radicand) + s.eps);
  } else if constexpr (kRule == Rule::kLion) {
    const float mixed = s.one_minus_b1 * g + s.b1 * m;
    m = s.one_minus_b2 * g + s.b2 * m;
    return mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : mixed;
  } else {
    if (!is_present<kRule, kFormat>(args.leaves, kFirstMoment)) return g;
    m = g + s.b1 * m;
    return kFormat == Format::kAny && args.nesterov ? g + s.b1 * m : m;
  }
}

// Updates kCount values of each stream. `learning_rate` includes LAMB's ratio of norms; `squares`
// accumulates the squares for LAMB's norms.
template <Rule kRule, Format kFormat, int kCount>
__device__ __forceinline__ void update(const StepArgs& args, const Scalars& s, bool decays,
                                       float factor, float learning_rate,
                                       float (&of)[kMostRead][kCount], float2& squares) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float& p = of[kParameter][i];
    float u = direction_of<kRule, kFormat>(args, s, of[kGradient][i] * factor, of[kFirstMoment][i],
                                           of[kSecondMoment][i]);
    if (decays) u += s.weight_decay * p;
    if constexpr (takes_norms(kRule)) {
      squares.x += p * p;
      squares.y += u * u;
    } else {
      p -= learning_rate * u;
    }
  }
}

// Rounds values to `dtype`, as storing does.
template <int kCount>
__device__ __forceinline__ void round_to(Dtype dtype, float (&values)[kCount]) {
  if (dtype == Dtype::kFloat32) return;
  with_type(dtype, [&](auto type) {
    Vector<decltype(type), kCount> vector;
    pack(values, vector);
    unpack(vector, values);
  });
}

// Rounds values of the streams in args.rounded at random to bfloat16 numbers, so that storing them
// is exact. `index` is the first value's position in the leaf.
template <Rule kRule, int kCount>
__device__ __forceinline__ void round_chosen(const StepArgs& args, int leaf_index, int64_t index,
                                             float (&of)[kMostRead][kCount]) {
  if (args.rounded == 0) return;
#pragma unroll
  for (int stream = kParameter; stream <= kSecondMoment; ++stream) {
    if (!has_stream(streams_written(kRule) & args.rounded, stream)) continue;
    round_stochastically(args.random[leaf_index], stream - kParameter, index, of[stream]);
  }
}

// Updates the average with the new parameters, as they are rounded in memory.
template <Format kFormat, int kCount>
__device__ __forceinline__ void average(const StepArgs& args, const Scalars& s,
                                        float (&of)[kMostRead][kCount]) {
  if (kFormat != Format::kAny) return;
  if ((args.leaves.streams & kBits<kAverage, kCopy>) == 0) return;
  round_to(args.leaves.dtypes[kParameter], of[kParameter]);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float& e = of[kAverage][i];
    e = s.average_decay * e + s.one_minus_average_decay * of[kParameter][i];
  }
}

template <Rule kRule, Format kFormat, int kCount>
__device__ __forceinline__ void store_vectors(const StepArgs& args, const Leaf& leaf, int64_t index,
                                              const float (&of)[kMostRead][kCount]) {
#pragma unroll
  for (int stream = 0; stream < kMostWritten; ++stream) {
    if (!has_stream(streams_written(kRule), stream)) continue;
    if (kRule == Rule::kAdam8Bit && is_moment(stream)) continue;
    if (!is_present<kRule, kFormat>(args.leaves, stream)) continue;
    store_values(leaf.data[stream], dtype_in<kFormat>(args.leaves, stream), index,
                 of[stream == kCopy ? kParameter : stream]);
  }
}

// Updates the values of a tile outside whole vectors, one by one, and returns the sums of squares
// for LAMB's norms.
template <Rule kRule>
__device__ __noinline__ float2 update_singly(const StepArgs& args, int leaf_index, int64_t first,
                                             int64_t end, float factor, float learning_rate) {
  const Leaves& leaves = args.leaves;
  const Leaf& leaf = leaves.leaves[leaf_index];
  const Scalars s = *args.scalars;
  float2 squares = {0.0f, 0.0f};
  for (int64_t i = first + threadIdx.x; i < end; i += kLeafThreads) {
    float of[kMostRead][1] = {};
#pragma unroll
    for (int stream = 0; stream < kMostRead; ++stream) {
      if (has_stream(streams_read(kRule) & leaves.streams, stream)) {
        of[stream][0] = load_value(leaf.data[stream], leaves.dtypes[stream], i);
      }
    }
    update<kRule, Format::kAny>(args, s, leaf.decays, factor, learning_rate, of, squares);
    round_chosen<kRule>(args, leaf_index, i, of);
    average<Format::kAny>(args, s, of);
#pragma unroll
    for (int stream = 0; stream < kMostWritten; ++stream) {
      if (has_stream(streams_written(kRule) & leaves.streams, stream)) {
        store_value(leaf.data[stream], leaves.dtypes[stream], i,
                    of[stream == kCopy ? kParameter : stream][0]);
      }
    }
  }
  return squares;
}

template <int kVectors>
using RawTile = RawVector[kMostRead][kVectors];

// Updates a thread's values of a tile.
template <Rule kRule, Format kFormat, int kVectors>
__device__ __forceinline__ void update_tile(const StepArgs& args, const Leaf& leaf, int leaf_index,
                                            int64_t tile_index, const LeafTile& tile,
                                            float factor) {
  constexpr int kCount = kVec<kFormat, kRule>;
  const Leaves& leaves = args.leaves;
  RawTile<kVectors> raw;
#pragma unroll
  for (int stream = 0; stream < kMostRead; ++stream) {
    if (!has_stream(streams_read(kRule), stream)) continue;
    if (!is_present<kRule, kFormat>(leaves, stream)) continue;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int start = vector_start<kVectors, kCount>(v);
      if (start >= tile.whole) continue;
      raw[stream][v] = load_raw<kCount>(leaf.data[stream], dtype_in<kFormat>(leaves, stream),
                                        tile.start + start);
    }
  }
  const Scalars s = *args.scalars;
  float learning_rate = s.learning_rate;
  if constexpr (has_trust_ratio(kRule)) {
    learning_rate *= trust_ratio(__ldg(args.norms + leaf_index));
  }
  float2 squares = {0.0f, 0.0f};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int start = vector_start<kVectors, kCount>(v);
    if (start >= tile.whole) continue;
    float of[kMostRead][kCount] = {};
#pragma unroll
    for (int stream = 0; stream < kMostRead; ++stream) {
      if (!has_stream(streams_read(kRule), stream)) continue;
      if (!is_present<kRule, kFormat>(leaves, stream)) continue;
      unpack_raw(raw[stream][v], dtype_in<kFormat>(leaves, stream), of[stream]);
    }
    update<kRule, kFormat>(args, s, leaf.decays, factor, learning_rate, of, squares);
    round_chosen<kRule>(args, leaf_index, tile.start + start, of);
    average<kFormat>(args, s, of);
    store_vectors<kRule, kFormat>(args, leaf, tile.start + start, of);
  }
  if (tile.whole < tile.values) {
    const float2 more = update_singly<kRule>(args, leaf_index, tile.start + tile.whole,
                                             tile.start + tile.values, factor, learning_rate);
    squares.x += more.x;
    squares.y += more.y;
  }
  if constexpr (takes_norms(kRule)) {
    float sums[] = {squares.x, squares.y};
    add_over_lanes(kWarpSize, sums);
    if (threadIdx.x % kWarpSize == 0) {
      args.partial_norms[tile_index * kLeafWarps + threadIdx.x / kWarpSize] =
          make_float2(sums[0], sums[1]);
    }
  }
}

// Updates a thread's values of a tile with 8-bit moments. A warp owns one block of values, and
// leaves are whole blocks, so a thread has a vector in both halves of a block or in neither.
template <Format kFormat>
__device__ __forceinline__ void update_8bit_tile(const StepArgs& args, const Leaf& leaf,
                                                 int leaf_index, const LeafTile& tile,
                                                 float factor) {
  constexpr Rule kRule = Rule::kAdam8Bit;
  constexpr int kHalf = kBlockValues / 2;
  static_assert(kHalf == kWarpSize * kLeafVec);
  const Leaves& leaves = args.leaves;
  if (vector_start<2>(0) >= tile.whole) return;
  const int64_t first = tile.start + vector_start<2>(0);
  const uint64_t block = static_cast<uint64_t>(first) / kBlockValues;
  const auto codes_at = [&](Stream stream, int v) {
    return reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(leaf.data[stream]) + first) +
           v * kWarpSize;
  };
  const auto scale_at = [&](Stream stream) {
    return static_cast<float*>(leaf.data[stream]) + block;
  };
  RawTile<2> raw;
  uint32_t codes[2][2];
#pragma unroll
  for (int v = 0; v < 2; ++v) {
#pragma unroll
    for (const Stream stream : {kGradient, kParameter, kAverage}) {
      if (!is_present<kRule, kFormat>(leaves, stream)) continue;
      raw[stream][v] =
          load_raw(leaf.data[stream], dtype_in<kFormat>(leaves, stream), first + v * kHalf);
    }
    codes[0][v] = *codes_at(kFirstMoment, v);
    codes[1][v] = *codes_at(kSecondMoment, v);
  }
  const float scales[] = {*scale_at(kFirstScale), *scale_at(kSecondScale)};
  const Scalars s = *args.scalars;
  keep_loads_together();
  float moments[2][2][kLeafVec];
  float2 squares = {0.0f, 0.0f};
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    float of[kMostRead][kLeafVec] = {};
#pragma unroll
    for (const Stream stream : {kGradient, kParameter, kAverage}) {
      if (!is_present<kRule, kFormat>(leaves, stream)) continue;
      unpack_raw(raw[stream][v], dtype_in<kFormat>(leaves, stream), of[stream]);
    }
    decode_signed(codes[0][v], scales[0], s.b1, of[kFirstMoment]);
    decode_unsigned(codes[1][v], scales[1], s.b2, of[kSecondMoment]);
    update<kRule, kFormat>(args, s, leaf.decays, factor, s.learning_rate, of, squares);
    const int64_t index = first + v * kHalf;
    if (kFormat != Format::kFloat32 && has_stream(args.rounded, kParameter)) {
      round_stochastically(args.random[leaf_index], 0, index, of[kParameter]);
    }
    average<kFormat>(args, s, of);
    store_vectors<kRule, kFormat>(args, leaf, index, of);
#pragma unroll
    for (int i = 0; i < kLeafVec; ++i) {
      moments[0][v][i] = of[kFirstMoment][i];
      moments[1][v][i] = of[kSecondMoment][i];
    }
  }
  const float new_scales[] = {largest(moments[0]), largest(moments[1])};
  const float inverse[] = {inverse_scale_of(new_scales[0], moments[0]),
                           inverse_scale_of(new_scales[1], moments[1])};
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    uint32_t halves[2][kLeafVec];
#pragma unroll
    for (int moment = 0; moment < 2; ++moment) {
      random_halves(args.random[leaf_index], 1 + moment, first + v * kHalf, halves[moment]);
    }
    __stcs(codes_at(kFirstMoment, v), encode_signed(moments[0][v], inverse[0], halves[0]));
    __stcs(codes_at(kSecondMoment, v), encode_unsigned(moments[1][v], inverse[1], halves[1]));
  }
  if (threadIdx.x % kWarpSize == 0) {
    *scale_at(kFirstScale) = new_scales[0];
    *scale_at(kSecondScale) = new_scales[1];
  }
}

// Least number of resident blocks of an SM, for enough bytes in flight. If instructions take as
// long as memory, more warps overlap the two.
template <Rule kRule, Format kFormat>
constexpr int kLeastBlocks =
    kFormat == Format::kAny || kRule == Rule::kAdam || kRule == Rule::kLambWhole ? 3 : 4;

// Updates the tiles of all leaves. The grid is as large as the GPU holds at a time. A block's loads
// of a tile are in flight together, and other blocks' loads are while it computes.
template <Rule kRule, Format kFormat, int kVectors>
__global__ void __launch_bounds__(kLeafThreads, kLeastBlocks<kRule, kFormat>)
    step_leaves(const __grid_constant__ StepArgs args) {
  constexpr int kCount = kVec<kFormat, kRule>;
  const Leaves& leaves = args.leaves;
  if (args.skips_nonfinite && __ldg(args.stats + 1) != 0.0f) return;
  int64_t tile_index = static_cast<int64_t>(leaves.tiles) - 1 - blockIdx.x;
  LeafCursor cursor(leaves, tile_index);
  const float factor = gradient_factor(args, *args.scalars);
  for (; tile_index >= 0; tile_index -= gridDim.x) {
    const Leaf& leaf = cursor.earlier(tile_index);
    const LeafTile tile(leaf, tile_index, kLeafTile<kVectors, kCount>, kCount);
    if constexpr (kRule == Rule::kAdam8Bit) {
      update_8bit_tile<kFormat>(args, leaf, cursor.index(), tile, factor);
    } else {
      update_tile<kRule, kFormat, kVectors>(args, leaf, cursor.index(), tile_index, tile, factor);
    }
  }
}

constexpr int kSumThreads = 512;

// Adds up the warps' squared norms of each leaf in a fixed order; each leaf has a block.
__global__ void __launch_bounds__(kSumThreads)
    sum_norms(const __grid_constant__ StepArgs args, float2* norms) {
  const Leaves& leaves = args.leaves;
  const int leaf = blockIdx.x;
  const uint32_t first = leaves.leaves[leaf].first_tile;
  const uint32_t end = leaf + 1 < leaves.count ? leaves.leaves[leaf + 1].first_tile : leaves.tiles;
  const int64_t count = static_cast<int64_t>(end - first) * kLeafWarps;
  const float2* partial = args.partial_norms + static_cast<int64_t>(first) * kLeafWarps;
  float sums[2] = {0.0f, 0.0f};
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) {
    sums[0] += partial[i].x;
    sums[1] += partial[i].y;
  }
  __shared__ float2 of_warps[kSumThreads / kWarpSize];
  add_over_lanes(kWarpSize, sums);
  if (threadIdx.x % kWarpSize == 0) {
    of_warps[threadIdx.x / kWarpSize] = make_float2(sums[0], sums[1]);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float2 total = {0.0f, 0.0f};
    for (const float2& of_warp : of_warps) {
      total.x += of_warp.x;
      total.y += of_warp.y;
    }
    norms[leaf] = total;
  }
}

std::optional<Rule> parse_rule(std::string_view name) {
  if (name == "adam") return Rule::kAdam;
  if (name == "adam_8bit") return Rule::kAdam8Bit;
  if (name == "lion") return Rule::kLion;
  if (name == "sgd") return Rule::kSgd;
  if (name == "lamb_moments") return Rule::kLambMoments;
  if (name == "lamb_write") return Rule::kLambWrite;
  if (name == "lamb_norms") return Rule::kLambNorms;
  if (name == "lamb_whole") return Rule::kLambWhole;
  return std::nullopt;
}

template <Rule kRule, Format kFormat, int kVectors>
ffi::Error launch_step(const StepArgs& args, const Device& device, cudaStream_t stream) {
  const auto kernel = step_leaves<kRule, kFormat, kVectors>;
  Launch launch = {dim3(1), kLeafThreads, 0};
  int resident = 0;
  RETURN_IF_ERROR(resident_blocks(kernel, launch, &resident));
  const int64_t blocks =
      std::min<int64_t>(args.leaves.tiles, int64_t{resident} * device.multiprocessors);
  launch.grid = dim3(static_cast<unsigned>(blocks));
  return launch_kernel(kernel, args, launch, stream);
}

// Returns the format of a tree's values, or kAny if no kernel is compiled for it.
Format format_of(Rule rule, const StepArgs& args) {
  const Leaves& leaves = args.leaves;
  if (args.nesterov || (leaves.streams & kBits<kAverage, kCopy>) != 0) return Format::kAny;
  std::optional<Dtype> dtype;
  for (int stream = kGradient; stream <= kSecondMoment; ++stream) {
    if (!has_stream(leaves.streams, stream)) continue;
    if (rule == Rule::kAdam8Bit && is_moment(stream)) continue;
    if (dtype && *dtype != leaves.dtypes[stream]) return Format::kAny;
    dtype = leaves.dtypes[stream];
  }
  if (dtype == Dtype::kFloat32) return Format::kFloat32;
  return dtype == Dtype::kBfloat16 ? Format::kBfloat16 : Format::kAny;
}

// Launches a rule's kernel: the one for bfloat16 trees, if it applies, with one vector of 8 values
// per thread in place of two of 4; else the one for any tree.
template <Rule kRule, int kVectors>
ffi::Error launch_16bit_or_any(const StepArgs& args, const Device& device, cudaStream_t stream) {
  if constexpr (kVectors == 2) {
    if (format_of(kRule, args) == Format::kBfloat16) {
      return launch_step<kRule, Format::kBfloat16, 1>(args, device, stream);
    }
  }
  return launch_step<kRule, Format::kAny, kVectors>(args, device, stream);
}

ffi::Error launch_8bit(const StepArgs& args, const Device& device, cudaStream_t stream) {
  switch (format_of(Rule::kAdam8Bit, args)) {
    case Format::kFloat32:
      return launch_step<Rule::kAdam8Bit, Format::kFloat32, 2>(args, device, stream);
    case Format::kBfloat16:
      return launch_step<Rule::kAdam8Bit, Format::kBfloat16, 2>(args, device, stream);
    default:
      return launch_step<Rule::kAdam8Bit, Format::kAny, 2>(args, device, stream);
  }
}

template <int kVectors>
ffi::Error launch_rule(Rule rule, const StepArgs& args, const Device& device, cudaStream_t stream) {
  switch (rule) {
    case Rule::kAdam:
      return launch_16bit_or_any<Rule::kAdam, kVectors>(args, device, stream);
    case Rule::kAdam8Bit:
      return launch_8bit(args, device, stream);
    case Rule::kLion:
      return launch_16bit_or_any<Rule::kLion, kVectors>(args, device, stream);
    case Rule::kSgd:
      return launch_16bit_or_any<Rule::kSgd, kVectors>(args, device, stream);
    case Rule::kLambMoments:
      return launch_step<Rule::kLambMoments, Format::kAny, kVectors>(args, device, stream);
    case Rule::kLambWrite:
      return launch_step<Rule::kLambWrite, Format::kAny, kVectors>(args, device, stream);
    case Rule::kLambNorms:
      return launch_16bit_or_any<Rule::kLambNorms, kVectors>(args, device, stream);
    default:
      return launch_16bit_or_any<Rule::kLambWhole, kVectors>(args, device, stream);
  }
}

// Runs a rule on all leaves. `norms` and `random` are absent unless the rule reads them, as are
// `partial_norms` and `new_norms` unless it writes them. `arrays` lists the arrays of each leaf in
// turn, and `results` those that are written.
ffi::Error optimizer_step(cudaStream_t stream, ffi::AnyBuffer scalars, ffi::AnyBuffer stats,
                          ffi::AnyBuffer norms, ffi::AnyBuffer random, ffi::RemainingArgs arrays,
                          ffi::Result<ffi::AnyBuffer> partial_norms,
                          ffi::Result<ffi::AnyBuffer> new_norms, ffi::RemainingRets results,
                          std::string_view rule_name, ffi::Span<const int64_t> decays,
                          int32_t streams, bool clips, bool skips_nonfinite, bool nesterov,
                          int32_t vectors, int32_t rounded) {
  const auto rule = parse_rule(rule_name);
  if (!rule) return ffi::Error::InvalidArgument("the rule is not known");
  RETURN_IF_ERROR(check_float32("scalars", scalars, {kScalars}));
  if (clips || skips_nonfinite) RETURN_IF_ERROR(check_float32("stats", stats, {2}));
  StepArgs args = {};
  Leaves& leaves = args.leaves;
  const bool has_8bits = *rule == Rule::kAdam8Bit;
  if (has_8bits && vectors != 2) {
    return ffi::Error::InvalidArgument("a warp owns a block of 8-bit moments if vectors is 2");
  }
  Coded coded[kMaxStreams] = {};
  coded[kFirstMoment] = coded[kSecondMoment] = has_8bits ? Coded::kCodes : Coded::kNo;
  coded[kFirstScale] = coded[kSecondScale] = Coded::kScales;
  RETURN_IF_ERROR(parse_leaves(arrays, results, streams, streams_written(*rule), decays,
                               vectors * kLeafTile<1>, coded, &leaves));
  args.scalars = static_cast<const Scalars*>(scalars.untyped_data());
  args.stats = data_or_null<const float>(stats);
  args.clips = clips;
  args.skips_nonfinite = skips_nonfinite;
  args.nesterov = nesterov;
  args.rounded = rounded;
  if (rounded != 0 || has_8bits) {
    RETURN_IF_ERROR(check_shape("random", random, {leaves.count, sizeof(LeafRandom) / 4}));
    RETURN_IF_ERROR(check_dtype("random", random, ffi::DataType::U32));
    args.random = static_cast<const LeafRandom*>(random.untyped_data());
  }
  for (const Leaf& leaf : leaves.leaves) {
    if (has_8bits && (leaf.size % kBlockValues != 0 || (leaf.size > 0 && !leaf.aligned))) {
      return ffi::Error::InvalidArgument("a leaf with 8-bit moments must be whole aligned blocks");
    }
  }
  if (has_trust_ratio(*rule)) {
    RETURN_IF_ERROR(check_float32("norms", norms, {leaves.count, 2}));
    args.norms = static_cast<const float2*>(norms.untyped_data());
  }
  if (takes_norms(*rule)) {
    RETURN_IF_ERROR(check_float32("partial_norms", *partial_norms, {leaves.tiles, kLeafWarps, 2}));
    RETURN_IF_ERROR(check_float32("new_norms", *new_norms, {leaves.count, 2}));
    args.partial_norms = static_cast<float2*>(partial_norms->untyped_data());
  }
  if (leaves.tiles == 0) return ffi::Error::Success();
  Device device = {};
  RETURN_IF_ERROR(current_device(&device));
  switch (vectors) {
    case 1:
      RETURN_IF_ERROR(launch_rule<1>(*rule, args, device, stream));
      break;
    case 2:
      RETURN_IF_ERROR(launch_rule<2>(*rule, args, device, stream));
      break;
    default:
      return ffi::Error::InvalidArgument("vectors must be 1 or 2");
  }
  if (!takes_norms(*rule)) return ffi::Error::Success();
  sum_norms<<<leaves.count, kSumThreads, 0, stream>>>(
      args, static_cast<float2*>(new_norms->untyped_data()));
  return check_cuda(cudaGetLastError(), "kernel launch");
}

}  // namespace

DEFINE_HANDLER(jaxfused_optimizer_step, optimizer_step,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // scalars
                   .Arg<ffi::AnyBuffer>()  // stats
                   .Arg<ffi::AnyBuffer>()  // norms
                   .Arg<ffi::AnyBuffer>()  // random
                   .RemainingArgs()
                   .Ret<ffi::AnyBuffer>()  // partial_norms
                   .Ret<ffi::AnyBuffer>()  // new_norms
                   .RemainingRets()
                   .Attr<std::string_view>("rule")
                   .Attr<ffi::Span<const int64_t>>("decays")
                   .Attr<int32_t>("streams")
                   .Attr<bool>("clips")
                   .Attr<bool>("skips_nonfinite")
                   .Attr<bool>("nesterov")
                   .Attr<int32_t>("vectors")
                   .Attr<int32_t>("rounded"),
               {ffi::Traits::kCmdBufferCompatible});
