// Attention of a few new tokens of each sequence to a contiguous or paged cache of keys and values,
// of 16 or 8 bits.
//
// A warp attends to some of a sequence's keys, and partial outputs are merged in a fixed order: by
// a second kernel where the tiles of all sequences are divided among warps together, or, if
// sequences are short, within the cluster of thread blocks that has all keys of a sequence and
// head.
#include <cstdint>
#include <string>

#include "common/handler.h"
#include "common/operands.h"
#include "serving/cache_unit.cuh"

namespace {

// Warps of a block, and resident blocks of an SM, limited by the registers that a warp needs.
template <typename V, int kTiles>
constexpr int kWarps = kKeptBytes<V> == 1 && kTiles == 1 ? 8 : 4;
template <typename V, int kTiles>
constexpr int kBlocks = kTiles == 1 ? (kKeptBytes<V> == 1 ? 2 : 3) : (kKeptBytes<V> == 1 ? 3 : 2);

template <typename V, int kHead, int kTiles, bool kScaled>
__global__ void __launch_bounds__(32 * kWarps<V, kTiles>, kBlocks<V, kTiles>)
    attend_to_cache(const __grid_constant__ CacheArgs args) {
  if constexpr (kHasProducts<__nv_bfloat16>) {
    const int warp = blockIdx.x * kWarps<V, kTiles> + static_cast<int>(threadIdx.x) / 32;
    const int slot = warp / args.units();
    if (slot >= args.sequences.slots) return;
    const TileList list(args.sequences);
    int tile = slot * list.quota;
    const int stop = min(tile + list.quota, list.total);
    if (tile >= stop) return;
    const int2 found = list.find(args.sequences, tile);
    int sequence = found.x, before = found.y;
    const int number = warp % args.units();
    Unit<V, kHead, kTiles, kScaled> unit(args, number);
    for (; tile < stop; ++sequence) {
      const int tiles = args.sequences.tiles(sequence);
      if (tiles == 0) continue;
      const int first = args.sequences.first_tile(sequence) - before;
      const int end = min(stop, before + tiles);
      const int64_t row =
          (static_cast<int64_t>(slot + sequence) * args.units() + number) * args.unit_rows;
      unit.part(sequence, first + tile, first + end, args.parts + row * kHead, args.sums + row);
      before += tiles;
      tile = end;
    }
  }
}

constexpr int kMergeThreads = 256;
constexpr int kTogether = 16;  // partial outputs that a warp loads at a time

// Columns of a row's output, merged from partial outputs.
template <int kColumns>
struct Merged {
  float maximum = kLowest;
  float sum = 0.0f;
  float out[kColumns] = {};

  __device__ __forceinline__ void add(float2 sums, const float (&columns)[kColumns]) {
    const float highest = fmaxf(maximum, sums.x);
    const float decay = exp2_fast(maximum - highest), weight = exp2_fast(sums.x - highest);
    maximum = highest;
    sum = fmaf(sums.y, weight, sum * decay);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out[i] = fmaf(columns[i], weight, out[i] * decay);
  }

  // Adds several partial outputs, whose exponentials do not wait for each other.
  template <int kCount>
  __device__ __forceinline__ void add_all(const float2 (&sums)[kCount],
                                          const float (&columns)[kCount][kColumns]) {
    float highest = sums[0].x;
#pragma unroll
    for (int p = 1; p < kCount; ++p) highest = fmaxf(highest, sums[p].x);
    Merged all = {highest};
#pragma unroll
    for (int p = 0; p < kCount; ++p) {
      const float weight = exp2_fast(sums[p].x - highest);
      all.sum = fmaf(sums[p].y, weight, all.sum);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) all.out[i] = fmaf(columns[p][i], weight, all.out[i]);
    }
    add({highest, all.sum}, all.out);
  }

  // Adds the row's sink, divides by the sum and stores the columns from `first` on.
  template <int kHead>
  __device__ __forceinline__ void store(const CacheArgs& args, int sequence, int head, int row,
                                        int first) {
    if (args.sinks != nullptr) {
      const float none[kColumns] = {};
      add({args.sinks[head * args.group + row % args.group] * kLog2e, 1.0f}, none);
    }
    const int token = row / args.group;
    const bool is_real =
        args.sequences.counts == nullptr || token < args.sequences.counts[sequence];
    // A query beyond the count may be NaN, which a factor of 0 would not cancel.
    if (!is_real) *this = {};
    // The sum is 0 for a row that attends to no key.
    const float inverse = sum != 0.0f ? __fdividef(1.0f, sum) : 0.0f;
    const int64_t query = args.place_of(sequence, head, row), place = query * kHead + first;
    if (first == 0) {
      args.lse[query] = sum != 0.0f ? (maximum + __log2f(sum)) * (1.0f / kLog2e) : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kColumns; i += 2) {
      const float low = out[i] * inverse, high = out[i + 1] * inverse;
      uint16_t* const to = static_cast<uint16_t*>(args.output) + place + i;
      *reinterpret_cast<uint32_t*>(to) =
          args.is_half ? rounded_pair<__half>(low, high) : rounded_pair<__nv_bfloat16>(low, high);
    }
  }
};

template <int kColumns>
__device__ __forceinline__ void load_columns(const float* from, float (&columns)[kColumns]) {
  const auto vector = load_vector<float, kColumns>(from);
  unpack(vector, columns);
}

// Merges the partial outputs of each row, of which each of kRowWarps warps adds every kRowWarps-th.
template <int kHead, int kRowWarps>
__global__ void __launch_bounds__(kRowWarps * 32 > kMergeThreads ? kRowWarps * 32 : kMergeThreads)
    merge_cached_parts(const __grid_constant__ CacheArgs args) {
  constexpr int kColumns = kHead / 32;  // of a lane
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kRowWarps;
  // Numbers of rows have 31 bits; division of 64 bits takes a few hundred cycles.
  const unsigned number = blockIdx.x * (blockDim.x / 32 / kRowWarps) + threadIdx.x / 32 / kRowWarps;
  const int row_of_unit = static_cast<int>(number % args.unit_rows);
  const unsigned of_unit = number / args.unit_rows;
  const int unit = static_cast<int>(of_unit % args.units());
  const int sequence = static_cast<int>(of_unit / args.units());
  const int row = unit % args.row_tiles * args.unit_rows + row_of_unit;
  const int head = unit / args.row_tiles;
  // If several warps share a row, the block has no other row, so all its threads return here.
  if (sequence >= args.sequences.batch || row >= args.rows()) return;
  const TileList list(args.sequences);
  const int before = list.before(args.sequences, sequence);
  const int tiles = args.sequences.tiles(sequence);
  const int first = before / list.quota;
  const int count = tiles == 0 ? 0 : (before + tiles - 1) / list.quota + 1 - first;

  const int64_t stride = static_cast<int64_t>(args.units()) * args.unit_rows;
  const int64_t index = (first + sequence) * stride + unit * args.unit_rows + row_of_unit;
  Merged<kColumns> merged;
  for (int start = warp; start < count; start += kTogether * kRowWarps) {
    float2 sums[kTogether];
    float columns[kTogether][kColumns] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int own = start + i * kRowWarps;
      sums[i] = {kLowest, 0.0f};
      if (own >= count) continue;
      const int64_t part = index + own * stride;
      sums[i] = args.sums[part];
      load_columns(args.parts + part * kHead + lane * kColumns, columns[i]);
    }
    merged.add_all(sums, columns);
  }
  if constexpr (kRowWarps > 1) {
    __shared__ float outs[kRowWarps][kHead];
    __shared__ float2 sums[kRowWarps];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) outs[warp][lane * kColumns + i] = merged.out[i];
    if (lane == 0) sums[warp] = {merged.maximum, merged.sum};
    __syncthreads();
    if (warp > 0) return;
    float2 of_warps[kRowWarps];
    float columns[kRowWarps][kColumns];
#pragma unroll
    for (int w = 0; w < kRowWarps; ++w) {
      of_warps[w] = sums[w];
      load_columns(&outs[w][lane * kColumns], columns[w]);
    }
    merged = {};
    merged.add_all(of_warps, columns);
  }
  merged.template store<kHead>(args, sequence, head, row, lane * kColumns);
}

// Of the kernel below: most warps of a block, limited by the registers that a warp needs, and most
// blocks of a cluster.
template <int kTiles>
constexpr int kSharedWarps = kTiles == 1 ? 12 : 8;
constexpr int kMostBlocks = 8;

// Attends to caches of short sequences. A cluster has the keys of one unit of a sequence, each of
// its warps as many consecutive tiles, and merges their outputs in shared memory: first those of a
// block's warps, then those of its blocks.
template <typename V, int kHead, int kTiles, bool kScaled>
__global__ void __launch_bounds__(32 * kSharedWarps<kTiles>)
    attend_in_clusters(const __grid_constant__ CacheArgs args) {
  if constexpr (kHasBulkCopies) {
    constexpr int kColumns = 2;
    using Pair = Merged<kColumns>;
    extern __shared__ __align__(16) float outputs[];  // [warps, unit_rows, kHead]
    __shared__ float2 sums[kSharedWarps<kTiles>][8 * kTiles];
    __shared__ float2 block_sums[8 * kTiles];
    const int rank = static_cast<int>(blockIdx.x) % args.cluster;
    const int number = static_cast<int>(blockIdx.x) / args.cluster;
    const int sequence = number / args.units(), of_unit = number % args.units();
    const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int all_warps = warps * args.cluster, own = rank * warps + warp;
    const int size = args.unit_rows * kHead;  // of a warp's output
    const int first = args.sequences.first_tile(sequence);
    const int64_t tiles = args.sequences.tiles(sequence);
    const int begin = static_cast<int>(tiles * own / all_warps);
    const int stop = static_cast<int>(tiles * (own + 1) / all_warps);
    if (begin < stop) {
      Unit<V, kHead, kTiles, kScaled> unit(args, of_unit);
      unit.part(sequence, first + begin, first + stop, outputs + warp * size, sums[warp]);
    } else if (threadIdx.x % 32 < 8 * kTiles) {
      sums[warp][threadIdx.x % 32] = {kLowest, 0.0f};
    }
    __syncthreads();

    const int head = of_unit / args.row_tiles;
    const int first_row = of_unit % args.row_tiles * args.unit_rows;
    const int pairs = min(args.unit_rows, args.rows() - first_row) * kHead / kColumns;
    for (int i = static_cast<int>(threadIdx.x); i < pairs; i += static_cast<int>(blockDim.x)) {
      const int row = i * kColumns / kHead, column = i * kColumns % kHead;
      Pair merged;
      for (int w = 0; w < warps; ++w) {
        // A warp without keys has written no output.
        const float2 sum = sums[w][row];
        if (sum.y == 0.0f) continue;
        float columns[kColumns];
        load_columns(outputs + w * size + i * kColumns, columns);
        merged.add(sum, columns);
      }
      if (args.cluster == 1) {
        merged.template store<kHead>(args, sequence, head, first_row + row, column);
        continue;
      }
      // This thread alone has read this pair of the first warp's output.
      outputs[i * kColumns] = merged.out[0];
      outputs[i * kColumns + 1] = merged.out[1];
      if (column == 0) block_sums[row] = {merged.maximum, merged.sum};
    }
    if (args.cluster == 1) return;
    cluster_sync();
    const int stop_pair = pairs * (rank + 1) / args.cluster;
    for (int i = pairs * rank / args.cluster + static_cast<int>(threadIdx.x); i < stop_pair;
         i += static_cast<int>(blockDim.x)) {
      const int row = i * kColumns / kHead, column = i * kColumns % kHead;
      float2 block_sum[kMostBlocks];
      float columns[kMostBlocks][kColumns];
#pragma unroll
      for (int b = 0; b < kMostBlocks; ++b) {
        if (b == args.cluster) break;
        const uint32_t of_sum = cluster_address(&block_sums[row], b);
        const uint32_t of_pair = cluster_address(outputs + i * kColumns, b);
        block_sum[b] = {cluster_load(of_sum), cluster_load(of_sum + 4)};
        columns[b][0] = cluster_load(of_pair);
        columns[b][1] = cluster_load(of_pair + 4);
      }
      Pair merged;
#pragma unroll
      for (int b = 0; b < kMostBlocks; ++b) {
        if (b < args.cluster) merged.add(block_sum[b], columns[b]);
      }
      merged.template store<kHead>(args, sequence, head, first_row + row, column);
    }
    cluster_sync();  // A block's shared memory lasts until the others have read it.
  }
}

// Launches the merge with 1, 8 or 16 warps for each row, chosen by the number of partial outputs
// that a sequence has if all sequences are equally long.
template <int kHead>
ffi::Error launch_merge(const CacheArgs& args, int64_t rows, cudaStream_t stream) {
  const int parts = args.sequences.slots / args.sequences.batch + 2;
  const auto launch = [&](auto kernel, int warps) {
    const int threads = std::max(kMergeThreads, 32 * warps);
    const int64_t blocks = divide_up(rows * warps, threads / 32);
    return launch_kernel(kernel, args, {dim3(static_cast<unsigned>(blocks)), threads, 0}, stream);
  };
  if (parts <= 2 * kTogether) return launch(merge_cached_parts<kHead, 1>, 1);
  if (parts <= 8 * kTogether) return launch(merge_cached_parts<kHead, 8>, 8);
  return launch(merge_cached_parts<kHead, 16>, 16);
}

template <typename V, int kHead, int kTiles>
ffi::Error launch(CacheArgs args, int most_slots, cudaStream_t stream) {
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  if (args.cluster > 0) {
    const auto kernel = attend_in_clusters<V, kHead, kTiles, kKeptBytes<V> == 1>;
    if (!device.clusters || args.cluster_warps > kSharedWarps<kTiles>) {
      return ffi::Error::InvalidArgument("the GPU or the kernel has no such clusters");
    }
    constexpr int kRowBytes = kHead * static_cast<int>(sizeof(float));
    RETURN_IF_ERROR(allow_shared_memory(kernel, kSharedWarps<kTiles> * 8 * kTiles * kRowBytes));
    const int64_t blocks = int64_t{args.sequences.batch} * args.units() * args.cluster;
    const int bytes = args.cluster_warps * args.unit_rows * kRowBytes;
    return launch_kernel(
        kernel, args,
        {dim3(static_cast<unsigned>(blocks)), 32 * args.cluster_warps, bytes, args.cluster},
        stream);
  }
  constexpr int kBlockWarps = kWarps<V, kTiles>;
  const int units = args.key_heads * args.row_tiles;
  const int warps = device.multiprocessors * kBlocks<V, kTiles> * kBlockWarps;
  args.sequences.slots = std::min(std::max(warps / units, 1), most_slots);
  const int64_t blocks = divide_up(int64_t{args.sequences.slots} * units, int64_t{kBlockWarps});
  RETURN_IF_ERROR(launch_kernel(attend_to_cache<V, kHead, kTiles, kKeptBytes<V> == 1>, args,
                                {dim3(static_cast<unsigned>(blocks)), 32 * kBlockWarps, 0},
                                stream));
  const int64_t rows = int64_t{args.sequences.batch} * units * args.unit_rows;
  return launch_merge<kHead>(args, rows, stream);
}

template <typename V, int kHead>
ffi::Error launch_with_rows(const CacheArgs& args, int most_slots, cudaStream_t stream) {
  if (args.sequences.tokens * args.group <= 8) return launch<V, kHead, 1>(args, most_slots, stream);
  return launch<V, kHead, 2>(args, most_slots, stream);
}

template <typename V>
ffi::Error launch_with_heads(const CacheArgs& args, int head_size, int most_slots,
                             cudaStream_t stream) {
  if (head_size == 64) return launch_with_rows<V, 64>(args, most_slots, stream);
  return launch_with_rows<V, 128>(args, most_slots, stream);
}

ffi::Error cached_attention(cudaStream_t stream, ffi::AnyBuffer query, ffi::AnyBuffer key,
                            ffi::AnyBuffer value, ffi::AnyBuffer key_scale,
                            ffi::AnyBuffer value_scale, ffi::AnyBuffer table,
                            ffi::AnyBuffer lengths, ffi::AnyBuffer offsets, ffi::AnyBuffer counts,
                            ffi::AnyBuffer sinks, ffi::AnyBuffer layer,
                            ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::AnyBuffer> lse,
                            ffi::Result<ffi::AnyBuffer> parts, ffi::Result<ffi::AnyBuffer> sums,
                            bool heads_first, int32_t kind, int32_t layer_pages, int32_t window,
                            int32_t cluster, int32_t cluster_warps, float scale, float cap) {
  const auto shape = query.dimensions();
  if (shape.size() != 5 || key.dimensions().size() != 4 || is_absent(query) || is_absent(key)) {
    return ffi::Error::InvalidArgument("query must have 5 axes and key 4, and neither be empty");
  }
  const bool is_half = query.element_type() == ffi::DataType::F16;
  if (!is_half && query.element_type() != ffi::DataType::BF16) {
    return ffi::Error::InvalidArgument("query must be bfloat16 or float16");
  }
  const int64_t batch = shape[0], tokens = shape[1], heads = shape[2], group = shape[3];
  const int64_t head_size = shape[4], rows = tokens * group;
  RETURN_IF_ERROR(check_like("output", *output, query));
  RETURN_IF_ERROR(check_float32("lse", *lse, {batch, tokens, heads, group}));
  const bool combined = is_absent(value);
  const auto pool = key.dimensions();
  const int64_t pages = pool[heads_first ? 1 : 0], page_size = pool[heads_first ? 2 : 1];
  if (pool[heads_first ? 0 : 2] != heads * (combined ? 2 : 1) || pool[3] != head_size ||
      (combined && heads_first)) {
    return ffi::Error::InvalidArgument("key has shape " + to_string(pool) +
                                       ", which does not fit query of shape " + to_string(shape));
  }
  const auto kept = static_cast<Kept>(kind);
  const bool scaled = kept != Kept::kFloats;
  if (scaled ? !has_bytes(key) || combined : key.element_type() != query.element_type()) {
    return ffi::Error::InvalidArgument("key has another dtype than is needed");
  }
  if (!combined) RETURN_IF_ERROR(check_like("value", value, key));
  CacheArgs args = {};
  if (scaled) {
    const auto scales = key_scale.dimensions();
    if (scales.size() != 3) return ffi::Error::InvalidArgument("key_scale must have 3 axes");
    for (int i = 0; i < 3; ++i) {
      if (scales[i] != pool[i] && scales[i] != 1) {
        return ffi::Error::InvalidArgument("key_scale has shape " + to_string(scales) +
                                           ", which does not fit key of shape " + to_string(pool));
      }
    }
    RETURN_IF_ERROR(check_shape("value_scale", value_scale, scales));
    RETURN_IF_ERROR(check_dtype("key_scale", key_scale, ffi::DataType::F32));
    RETURN_IF_ERROR(check_dtype("value_scale", value_scale, ffi::DataType::F32));
    args.scale_strides = strides_of(scales, heads_first);
    if (scales[heads_first ? 1 : 0] == 1) args.scale_strides.page = 0;
    if (scales[heads_first ? 2 : 1] == 1) args.scale_strides.place = 0;
    if (scales[heads_first ? 0 : 2] == 1) args.scale_strides.head = 0;
    args.key_scale = static_cast<const float*>(key_scale.untyped_data());
    args.value_scale = static_cast<const float*>(value_scale.untyped_data());
  }
  int64_t most_pages = 0;
  RETURN_IF_ERROR(check_table(table, batch, &most_pages));
  args.table = data_or_null<int>(table);
  if (!is_absent(lengths)) RETURN_IF_ERROR(check_integers("lengths", lengths, {batch}));
  RETURN_IF_ERROR(check_integers("offsets", offsets, {batch}));
  if (!is_absent(counts)) RETURN_IF_ERROR(check_integers("counts", counts, {batch}));
  if (!is_absent(layer)) RETURN_IF_ERROR(check_integers("layer", layer, {1}));
  if (!is_absent(sinks)) RETURN_IF_ERROR(check_float32("sinks", sinks, {heads, group}));
  if ((head_size != 64 && head_size != 128) || (most_pages > 1 && page_size % 8 != 0) ||
      most_pages * page_size > INT32_MAX / 2 || pages > INT32_MAX || layer_pages < 1 ||
      pages % layer_pages != 0 || (args.table == nullptr && batch > layer_pages) || window < 0 ||
      cluster < 0 || cluster > kMostBlocks || (cluster & (cluster - 1)) != 0 ||
      (cluster > 0 && cluster_warps < 1) || batch * tokens > INT32_MAX / 2 ||
      rows > INT32_MAX / kRows || key.size_bytes() / kUnitBytes > UINT32_MAX ||
      key_scale.element_count() > UINT32_MAX) {
    return ffi::Error::InvalidArgument("sizes that the kernel does not have: query " +
                                       to_string(shape) + ", key " + to_string(pool));
  }
  const int64_t row_tiles = divide_up(rows, int64_t{kRows}),
                unit_rows = std::min<int64_t>(rows, kRows);
  const int64_t units = heads * row_tiles;
  const int64_t most_slots = parts->dimensions().size() == 0 ? 0 : parts->dimensions()[0] - batch;
  if (most_slots < 1 || most_slots > INT32_MAX || batch * units * unit_rows > INT32_MAX ||
      most_slots * units > INT32_MAX) {
    return ffi::Error::InvalidArgument("parts have too few rows, or query is too large");
  }
  RETURN_IF_ERROR(
      check_float32("parts", *parts, {most_slots + batch, units, unit_rows, head_size}));
  RETURN_IF_ERROR(check_float32("sums", *sums, {most_slots + batch, units, unit_rows, 2}));
  if (!are_aligned(
          {key.untyped_data(), data_or_null(value), query.untyped_data(), parts->untyped_data()})) {
    return ffi::Error::InvalidArgument("an operand does not start at a multiple of 16 bytes");
  }
  args.query = query.untyped_data();
  args.key = static_cast<const uint8_t*>(key.untyped_data());
  args.value = static_cast<const uint8_t*>((combined ? key : value).untyped_data());
  args.layer = data_or_null<int>(layer);
  args.sinks = data_or_null<float>(sinks);
  args.parts = static_cast<float*>(parts->untyped_data());
  args.sums = static_cast<float2*>(sums->untyped_data());
  args.output = output->untyped_data();
  args.lse = static_cast<float*>(lse->untyped_data());
  args.sequences = {data_or_null<int>(lengths),
                    static_cast<const int*>(offsets.untyped_data()),
                    data_or_null<int>(counts),
                    static_cast<int>(batch),
                    static_cast<int>(tokens),
                    static_cast<int>(most_pages * page_size),
                    window,
                    1};
  args.strides = strides_of(pool, heads_first);
  if (combined) {
    args.value += head_size * 2;
    args.strides.head *= 2;
  }
  args.cluster = cluster;
  args.cluster_warps = cluster_warps;
  args.layer_pages = layer_pages;
  args.layers = static_cast<int>(pages / layer_pages);
  args.page_size = static_cast<int>(page_size);
  args.most_pages = static_cast<int>(most_pages);
  args.key_heads = static_cast<int>(heads);
  args.group = static_cast<int>(group);
  args.row_tiles = static_cast<int>(row_tiles);
  args.unit_rows = static_cast<int>(unit_rows);
  args.scale = scale;
  args.cap = cap;
  args.inverse_cap = cap > 0.0f ? 1.0f / cap : 0.0f;
  args.page_shift = -1;
  for (int shift = 0; shift < 30; ++shift) {
    if (page_size == int64_t{1} << shift) args.page_shift = shift;
  }
  args.is_half = is_half;
  const int size = static_cast<int>(head_size), slots = static_cast<int>(most_slots);
  switch (kept) {
    case Kept::kFloats:
      return is_half ? launch_with_heads<__half>(args, size, slots, stream)
                     : launch_with_heads<__nv_bfloat16>(args, size, slots, stream);
    case Kept::kInt8:
      return launch_with_heads<int8_t>(args, size, slots, stream);
    case Kept::kE4m3:
      return launch_with_heads<E4m3>(args, size, slots, stream);
    case Kept::kE5m2:
      return launch_with_heads<E5m2>(args, size, slots, stream);
  }
  return ffi::Error::InvalidArgument("this kind of cache is not known");
}

}  // namespace

DEFINE_HANDLER(jaxfused_cached_attention, cached_attention,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // query
                   .Arg<ffi::AnyBuffer>()  // key
                   .Arg<ffi::AnyBuffer>()  // value
                   .Arg<ffi::AnyBuffer>()  // key_scale
                   .Arg<ffi::AnyBuffer>()  // value_scale
                   .Arg<ffi::AnyBuffer>()  // table
                   .Arg<ffi::AnyBuffer>()  // lengths
                   .Arg<ffi::AnyBuffer>()  // offsets
                   .Arg<ffi::AnyBuffer>()  // counts
                   .Arg<ffi::AnyBuffer>()  // sinks
                   .Arg<ffi::AnyBuffer>()  // layer
                   .Ret<ffi::AnyBuffer>()  // output
                   .Ret<ffi::AnyBuffer>()  // lse
                   .Ret<ffi::AnyBuffer>()  // parts
                   .Ret<ffi::AnyBuffer>()  // sums
                   .Attr<bool>("heads_first")
                   .Attr<int32_t>("kind")
                   .Attr<int32_t>("layer_pages")
                   .Attr<int32_t>("window")
                   .Attr<int32_t>("cluster")
                   .Attr<int32_t>("cluster_warps")
                   .Attr<float>("scale")
                   .Attr<float>("cap"),
               {ffi::Traits::kCmdBufferCompatible});
