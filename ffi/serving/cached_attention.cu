// Attention of a few new tokens of each sequence to a contiguous or paged cache of keys and values,
// of 16 or 8 bits.
//
// A warp loads tiles of 16 keys of a head from global memory into the operand registers of the
// tensor cores, the next tile while it multiplies the current one. It needs no shared memory for
// them, so pages may have any size, and 8-bit values are widened in registers. The partial outputs
// of a sequence are merged in a fixed order: by a second kernel where the tiles of all sequences
// are divided among warps together, or, if sequences are short, within the cluster of thread
// blocks that attends to a sequence's keys of a head.
#include <cfloat>
#include <cstdint>
#include <string>

#include "common/handler.h"
#include "common/operands.h"
#include "serving/decode_work.cuh"
#include "serving/kept_values.cuh"
#include "serving/pages.h"

namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLowest = -1e30f;  // maximum of a row before its first key
constexpr int kRows = 16;          // most rows of a unit: the queries of one key head in a warp
constexpr int kUnitBytes = 64;     // every row of a cache starts at a multiple of these bytes

struct CacheArgs {
  const void* query;   // [batch, tokens, key heads, group, head size]
  const uint8_t* key;  // pages; the values have the same strides
  const uint8_t* value;
  const float* key_scale;  // nullptr for a cache of 16 bits
  const float* value_scale;
  const int* table;  // page table [batch, most_pages]; nullptr: sequence b has page b
  const int* layer;  // index of the layer, [1]; nullptr for 0
  const float* sinks;
  float* parts;  // partial outputs before division, [slots + batch, units, unit_rows, head size]
  float2* sums;  // [slots + batch, units, unit_rows]: maximum and sum of exponentials, base 2
  void* output;  // like the query
  Sequences sequences;
  Strides strides;
  Strides scale_strides;
  int layer_pages;
  int layers;
  int page_size;
  int page_shift;  // log2 of page_size, or -1 if that is no power of two
  int most_pages;
  int key_heads;
  int group;      // query heads that share a key head
  int row_tiles;  // units (tiles of query rows) of a key head
  int unit_rows;  // rows of a unit that have a place in `parts` and `sums`
  int cluster;    // blocks that share a unit of a sequence, in `attend_in_clusters`
  float scale;
  float cap;  // soft cap of the logits, 0 for none
  float inverse_cap;
  bool is_half;  // whether query and output are float16, not bfloat16

  __host__ __device__ __forceinline__ int units() const { return key_heads * row_tiles; }
  __device__ __forceinline__ int rows() const { return sequences.tokens * group; }
  // Index in query and output of a key head's row: token row / group, query head row % group.
  __device__ __forceinline__ int64_t place_of(int sequence, int head, int row) const {
    const int token = row / group;
    return (static_cast<int64_t>(sequence * sequences.tokens + token) * key_heads + head) * group +
           row % group;
  }
};

__device__ __forceinline__ float2 pair_of(uint32_t bits, bool is_half) {
  if (is_half) return __half22float2(reinterpret_cast<const __half2&>(bits));
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

// Returns 2^exponent.
__device__ __forceinline__ float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// A query in two planes of bytes is kPlane times the first plus the second, and at most kPlanes
// times 2. The first plane is at most 127, the second at most 64.
constexpr int kPlane = 128;
constexpr float kPlanes = 8128.0f;

// Replaces eight values of 16 bits, times `by`, by the bytes of their planes: of the first four
// values the first and the second plane, and so of the others. Returns 0, or NaN if a value is
// infinite or NaN.
__device__ __forceinline__ float to_planes(uint32_t (&words)[4], float by, bool is_half) {
  float none = 0.0f;
  uint32_t planes[2][2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 pair = pair_of(words[i / 2], is_half);
    const float x = i % 2 == 0 ? pair.x : pair.y;
    none += x * 0.0f;
    const int number = __float2int_rn(x * by);
    const int first = (number + kPlane / 2) >> 7;
    const int numbers[2] = {first, number - first * kPlane};
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      planes[p][i / 4] |= (static_cast<uint32_t>(numbers[p]) & 0xffu) << (8 * (i % 4));
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = planes[i % 2][i / 2];
  return none;
}

// Queries of a unit in tiles of 8 rows, as A operands of the tensor cores. An operand has two
// halves of 8 rows. If keys stay bytes, these are the planes of a tile's queries. Otherwise they
// are two tiles; or, of one tile, its columns of two adjacent steps, of which a step needs only its
// own.
template <typename V, int kHead, int kTiles>
struct Queries {
  using Tile = KeyTile<V, kHead>;
  static constexpr int kSteps = Tile::kChunks * Tile::kSteps;
  // Words of a step: its values in 16 bits, or their planes of bytes.
  static constexpr int kWords = kKeysStayBytes<V> ? 4 : 2;

  uint32_t words[kTiles][kSteps][kWords];

  // Computes the products of row lane / 4 of each tile with keys 8 i + 2 q + e, as logits[n][i][e]
  // (q = lane % 4).
  __device__ __forceinline__ void multiply(const Tile& keys, float (&logits)[kTiles][2][2]) const {
    using Sum = std::conditional_t<kKeysStayBytes<V>, int, float>;
    // Sums that do not wait for each other.
    constexpr int kSets = kKeysStayBytes<V> ? kTiles : 2;
    Sum sums[2][kSets][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 b = keys.operand(i, step / Tile::kSteps, step % Tile::kSteps);
        if constexpr (kKeysStayBytes<V>) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            multiply_add_bytes(V(), sums[i][n], words[n][step], b.x, b.y);
          }
        } else {
          const auto& low = kTiles == 2 ? words[0][step] : words[0][step - step % 2];
          const auto& high = kTiles == 2 ? words[kTiles - 1][step] : words[0][step - step % 2 + 1];
          const uint32_t a[4] = {low[0], high[0], low[1], high[1]};
          multiply_add<Multiplied<V>>(sums[i][step % 2], a, b.x, b.y);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if constexpr (kKeysStayBytes<V>) {
            logits[n][i][e] = static_cast<float>(sums[i][n][e] * kPlane + sums[i][n][2 + e]);
          } else {
            const int half = 2 * (kTiles == 2 ? n : 1);
            logits[n][i][e] = sums[i][0][2 * n + e] + sums[i][1][half + e];
          }
        }
      }
    }
  }

  // Loads the rows. Sets `factors` to the multipliers of the logits of row lane / 4 of each tile.
  __device__ __forceinline__ void load(const CacheArgs& args, int sequence, int head, int first,
                                       float (&factors)[kTiles]) {
    constexpr bool kWidens = kKeptBytes<V> == 1;
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = first + 8 * n + g;
      const bool exists = row < args.rows();
      const auto* from = static_cast<const uint16_t*>(args.query) +
                         args.place_of(sequence, head, exists ? row : 0) * kHead;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int column = Tile::column(i / Tile::kSteps, i % Tile::kSteps, q);
#pragma unroll
        for (int w = 0; w < kWords; w += 2) {
          uint2 pair = {};
          if (exists) pair = *reinterpret_cast<const uint2*>(from + column + 2 * w);
          words[n][i][w] = pair.x;
          words[n][i][w + 1] = pair.y;
        }
      }
      float factor = args.scale * kLog2e;
      if constexpr (kWidens) {
        // The query row is divided by a power of two, because bfloat16 may overflow float16.
        float most = 0.0f;
#pragma unroll
        for (const auto& step : words[n]) {
#pragma unroll
          for (const uint32_t bits : step) {
            const float2 x = pair_of(bits, args.is_half);
            most = fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y)));
          }
        }
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
        const int biased = __float_as_int(most) >> 23;
        const int exponent = biased > 0 && biased < 255 ? min(max(biased - 127, -100), 100) : 0;
        factor *= power_of_two(exponent);
        const float down = power_of_two(-exponent);
        if constexpr (kKeysStayBytes<V>) {
          factor *= 1.0f / kPlanes;
          // An infinite or NaN query makes the row's logits NaN.
          float none = 0.0f;
#pragma unroll
          for (auto& step : words[n]) none += to_planes(step, down * kPlanes, args.is_half);
          none += __shfl_xor_sync(kAllLanes, none, 1);
          none += __shfl_xor_sync(kAllLanes, none, 2);
          factor += none;
        } else {
#pragma unroll
          for (auto& step : words[n]) {
#pragma unroll
            for (uint32_t& bits : step) {
              const float2 x = pair_of(bits, args.is_half);
              bits = rounded_pair<__half>(x.x * down, x.y * down);
            }
          }
        }
      }
      factors[n] = factor;
    }
  }
};

// The output of a unit's rows, transposed and not yet divided by the sums of exponentials.
template <typename V, int kHead, int kTiles>
struct Output {
  using Tile = ValueTile<V, kHead>;

  float columns[kTiles][kHead / 16][4] = {};

  // Multiplies each row by a factor, which the lanes have that load the row's queries.
  __device__ __forceinline__ void scale(const float (&factors)[kTiles]) {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float by[2] = {__shfl_sync(kAllLanes, factors[n], 8 * q),
                           __shfl_sync(kAllLanes, factors[n], 8 * q + 4)};
#pragma unroll
      for (auto& column : columns[n]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) column[i] *= by[i % 2];
      }
    }
  }

  __device__ __forceinline__ void add(const uint32_t (&weights)[kTiles][2], const Tile& tile) {
    tile.for_each([&](int product, const uint32_t (&a)[4]) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        multiply_add<Multiplied<V>>(columns[n][product], a, weights[n][0], weights[n][1]);
      }
    });
  }

  // Stores the lane's columns of one row of a tile; the row is 2 (lane % 4) + e.
  __device__ __forceinline__ void store(int n, int e, float* row, float factor) const {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int c = 0; c < Tile::kChunks; ++c) {
      float* const to = row + Tile::column(c, g);
#pragma unroll
      for (int i = 0; i < Tile::kValues; i += 4) {
        const auto& two = columns[n][(c * Tile::kValues + i) / 2];
        const auto& next = columns[n][(c * Tile::kValues + i) / 2 + 1];
        *reinterpret_cast<float4*>(to + i) = {two[e] * factor, two[2 + e] * factor,
                                              next[e] * factor, next[2 + e] * factor};
      }
    }
  }
};

// Page, and index in the page, of the first key of each group of 8 keys of a tile. The 8 keys of a
// group are always in one page.
struct TilePlace {
  int page[2];
  int within[2];
};

// Offsets of a tile from addresses that a lane has in page 0: of each group of 8 keys, in units of
// kUnitBytes, and of the lane's scale.
struct TileOffsets {
  uint32_t rows[2];
  uint32_t scale;
};

template <typename V, int kHead, int kTiles, bool kScaled>
class Unit {
 public:
  __device__ __forceinline__ Unit(const CacheArgs& args, int unit)
      : args_(args),
        head_(unit / args.row_tiles),
        first_row_(unit % args.row_tiles * 8 * kTiles),
        lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        q_(lane_ % 4),
        first_page_(max(first_page(args.layer, args.layer_pages, args.layers), 0)),
        page_stride_(static_cast<uint32_t>(args.strides.page * kKeptBytes<V> / kUnitBytes)),
        place_stride_(static_cast<uint32_t>(args.strides.place * kKeptBytes<V> / kUnitBytes)) {
    const int64_t head = head_ * args.strides.head * kKeptBytes<V>;
    const int64_t place_bytes = args.strides.place * kKeptBytes<V>;
    key_ = args.key + head + g_ * place_bytes + q_ * 16;
    value_ = args.value + head + 2 * q_ * place_bytes + g_ * ValueTile<V, kHead>::kChunkBytes;
    if constexpr (kScaled) {
      scale_ = (lane_ < kTileKeys ? args.key_scale : args.value_scale) +
               head_ * args.scale_strides.head + lane_ % 8 * args.scale_strides.place;
    }
  }

  // Computes attention of a sequence's queries in this unit to the key tiles from `begin` to
  // `stop`: the outputs before division, [unit_rows, kHead], and each row's maximum and sum.
  __device__ __forceinline__ void part(int sequence, int begin, int stop, float* outputs,
                                       float2* sums) {
    sequence_ = sequence;
    length_ = args_.sequences.length(sequence);
    Queries<V, kHead, kTiles> queries;
    float factors[kTiles];
    queries.load(args_, sequence, head_, first_row_, factors);
    Output<V, kHead, kTiles> output;
    // Of row g of each tile (g = lane / 4), `sum` of the lane's keys alone.
    float maximum[kTiles], sum[kTiles];
    int end[kTiles];  // end (exclusive) of the keys that the row attends to
    const int offset = args_.sequences.offsets[sequence];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      maximum[n] = kLowest;
      sum[n] = 0.0f;
      const int row = min(first_row_ + 8 * n + g_, args_.rows() - 1);
      end[n] = offset + row / args_.group + 1;
    }
    uint32_t unit_bits = 0x0d800000u;  // 2^-100; the output is in units of this power of two

    // Every query row of the unit attends to all keys from safe_start to safe_end, so tiles of
    // these keys need no mask.
    const int safe_end = min(offset + first_row_ / args_.group + 1, length_);
    const int window = args_.sequences.window,
              last = min(first_row_ + 8 * kTiles, args_.rows()) - 1;
    const int safe_start = window == 0 ? 0 : offset + last / args_.group + 1 - window;

    KeyTile<V, kHead> keys;
    ValueTile<V, kHead> values;
    TileOffsets offsets = offsets_of(place_of(begin));
    int left = length_ - begin * kTileKeys;  // keys from the loaded tile on
    load(keys, offsets, left);
    load(values, offsets, left);
    float scale = 0.0f, next_scale = 0.0f;
    if constexpr (kScaled) scale = load_scale(offsets, left);
    const bool has_pages = args_.most_pages > 1;
    TilePlace next = {};  // of the tile after the loaded one, if there are several pages
    if (has_pages && begin + 1 < stop) next = place_of(begin + 1);
    for (int tile = begin; tile < stop; ++tile) {
      const bool has_next = tile + 1 < stop;
      float logits[kTiles][2][2];
      queries.multiply(keys, logits);
      if (has_next) {
        if (has_pages) {
          offsets = offsets_of(next);
        } else {
          advance(offsets);
        }
        left -= kTileKeys;
        load(keys, offsets, left);
        if constexpr (kScaled) next_scale = load_scale(offsets, left);
        if (has_pages && tile + 2 < stop) next = place_of(tile + 2);
      }

      float rescaling = 1.0f, key_scale[2][2], value_scale[2][2];
      if constexpr (kScaled) {
        // The output's unit, a power of two, is at least the largest scale of the tile's values.
        const uint32_t own = lane_ < kTileKeys ? 0u : __float_as_uint(scale) & 0x7fffffffu;
        const uint32_t most = __reduce_max_sync(kAllLanes, own);
        const uint32_t bits = min((most + 0x7fffffu) & 0x7f800000u, 0x7e800000u);
        if (bits > unit_bits) {
          rescaling = __uint_as_float(unit_bits) * inverse(bits);
          unit_bits = bits;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = 8 * i + 2 * q_ + e;
            key_scale[i][e] = __shfl_sync(kAllLanes, scale, key);
            value_scale[i][e] = __shfl_sync(kAllLanes, scale, kTileKeys + key) * inverse(unit_bits);
          }
        }
      }
      const int first_key = tile * kTileKeys;
      const bool is_edge = first_key + kTileKeys > safe_end || first_key < safe_start;
      float rescale[kTiles];
      uint32_t weights[kTiles][2];
      bool changes = false;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        float highest = maximum[n];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = logits[n][i][e];
            x *= factors[n];
            if constexpr (kScaled) x *= key_scale[i][e];
            if (args_.cap > 0.0f) x = capped(x);
            if (is_edge && !is_seen(first_key + 8 * i + 2 * q_ + e, end[n])) x = -INFINITY;
            highest = fmaxf(highest, x);
          }
        }
        highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 2));
        const float decay = exp2_fast(maximum[n] - highest);
        maximum[n] = highest;
        sum[n] *= decay;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = logits[n][i][e];
            x = exp2_fast(x - highest);
            sum[n] += x;
            if constexpr (kScaled) x *= value_scale[i][e];
          }
          weights[n][i] = rounded_pair<Multiplied<V>>(logits[n][i][0], logits[n][i][1]);
        }
        rescale[n] = decay * rescaling;
        changes = changes || rescale[n] != 1.0f;
      }
      if (__any_sync(kAllLanes, changes)) output.scale(rescale);
      output.add(weights, values);
      if (has_next) load(values, offsets, left);
      scale = next_scale;
    }

    const float unit = kScaled ? __uint_as_float(unit_bits) : 1.0f;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      sum[n] += __shfl_xor_sync(kAllLanes, sum[n], 1);
      sum[n] += __shfl_xor_sync(kAllLanes, sum[n], 2);
      const int own = 8 * n + g_;
      if (q_ == 0 && first_row_ + own < args_.rows()) sums[own] = {maximum[n], sum[n]};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * n + 2 * q_ + e;
        if (first_row_ + row < args_.rows()) output.store(n, e, outputs + row * kHead, unit);
      }
    }
  }

 private:
  static __device__ __forceinline__ float inverse(uint32_t power_bits) {
    return __uint_as_float((254u << 23) - power_bits);
  }

  // Whether a row attends to `key`; `end` is one past the row's position.
  __device__ __forceinline__ bool is_seen(int key, int end) const {
    const int window = args_.sequences.window;
    return key < min(end, length_) && (window == 0 || key >= end - window);
  }

  // Returns cap * tanh(x / cap) of a logit in base 2.
  __device__ __forceinline__ float capped(float x) const {
    const float e = exp2_fast(2.0f * x * args_.inverse_cap);
    return args_.cap * kLog2e * (1.0f - __fdividef(2.0f, e + 1.0f));
  }

  // Returns the pages of a tile's keys. For keys past the last page the result is arbitrary, but
  // such keys are not loaded.
  __device__ __forceinline__ TilePlace place_of(int tile) const {
    TilePlace place;
    const int key = tile * kTileKeys;
    if (args_.most_pages == 1) {
      const int page = args_.table == nullptr ? sequence_ : args_.table[sequence_];
      return {{page, page}, {key, key + 8}};
    }
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const int own = key + 8 * group;
      const int slot = args_.page_shift < 0 ? own / args_.page_size : own >> args_.page_shift;
      place.within[group] = own - slot * args_.page_size;
      place.page[group] =
          args_.table[sequence_ * args_.most_pages + min(slot, args_.most_pages - 1)];
    }
    return place;
  }

  // Returns the index of a page in the pool, clipped to the pages of the layer.
  __device__ __forceinline__ uint32_t page_of(int page) const {
    return first_page_ + min(max(page, 0), args_.layer_pages - 1);
  }

  __device__ __forceinline__ TileOffsets offsets_of(const TilePlace& place) const {
    TileOffsets offsets = {};
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      offsets.rows[group] = page_of(place.page[group]) * page_stride_ +
                            static_cast<uint32_t>(place.within[group]) * place_stride_;
    }
    if constexpr (kScaled) {
      const bool is_second = lane_ / 8 % 2 == 1;
      const uint32_t page = page_of(is_second ? place.page[1] : place.page[0]);
      const uint32_t within = is_second ? place.within[1] : place.within[0];
      offsets.scale = page * static_cast<uint32_t>(args_.scale_strides.page) +
                      within * static_cast<uint32_t>(args_.scale_strides.place);
    }
    return offsets;
  }

  // Changes the offsets of a tile to those of the next one in the same page.
  __device__ __forceinline__ void advance(TileOffsets& offsets) const {
    offsets.rows[0] += kTileKeys * place_stride_;
    offsets.rows[1] += kTileKeys * place_stride_;
    offsets.scale += kTileKeys * static_cast<uint32_t>(args_.scale_strides.place);
  }

  static __device__ __forceinline__ const uint8_t* at(const uint8_t* first, uint32_t row) {
    return first + static_cast<uint64_t>(row) * kUnitBytes;
  }

  // Calls use(whether all keys of a tile exist, as a type), if `left` keys do.
  template <typename Use>
  static __device__ __forceinline__ void with_whole(int left, const Use& use) {
    if (left >= kTileKeys) {
      use(std::true_type());
    } else {
      use(std::false_type());
    }
  }

  // Loads the tile's first `left` keys; so do the next two functions for values and scales.
  __device__ __forceinline__ void load(KeyTile<V, kHead>& keys, const TileOffsets& offsets,
                                       int left) const {
    const auto load_each = [&](auto is_whole) {
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        const uint8_t* const from = at(key_, offsets.rows[group]);
        keys.template load<!decltype(is_whole)::value>(group, from, 8 * group + g_ < left);
      }
    };
    with_whole(left, load_each);
  }

  __device__ __forceinline__ void load(ValueTile<V, kHead>& values, const TileOffsets& offsets,
                                       int left) const {
    const auto load_each = [&](auto is_whole) {
#pragma unroll
      for (int group = 0; group < 2; ++group) {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          const uint8_t* const from = at(value_, offsets.rows[group] + which * place_stride_);
          values.template load<!decltype(is_whole)::value>(group, which, from,
                                                           8 * group + 2 * q_ + which < left);
        }
      }
    };
    with_whole(left, load_each);
  }

  // Loads one scale per lane: of the tile's keys in lanes 0 to 15, of its values in the others.
  __device__ __forceinline__ float load_scale(const TileOffsets& offsets, int left) const {
    return lane_ % kTileKeys < left ? __ldg(scale_ + offsets.scale) : 0.0f;
  }

  const CacheArgs& args_;
  int head_;
  int first_row_;
  int lane_;
  int g_;
  int q_;
  int first_page_;
  uint32_t page_stride_;  // in units of kUnitBytes, as is place_stride_
  uint32_t place_stride_;
  // Addresses in page 0, for a group of keys at index 0: of the lane's first chunk of keys and of
  // values, and of its scale.
  const uint8_t* key_;
  const uint8_t* value_;
  const float* scale_ = nullptr;
  int sequence_ = 0;
  int length_ = 0;
};

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
// Number of partial outputs that a warp loads at a time. A warp that has a row for itself has many
// of them where a sequence is much longer than the others.
template <int kRowWarps>
constexpr int kTogether = kRowWarps == 1 ? 16 : 4;

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
    const int64_t place = args.place_of(sequence, head, row) * kHead + first;
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
  const int64_t number =
      blockIdx.x * static_cast<int64_t>(blockDim.x / 32 / kRowWarps) + threadIdx.x / 32 / kRowWarps;
  const int row_of_unit = static_cast<int>(number % args.unit_rows);
  const int64_t of_unit = number / args.unit_rows;
  const int unit = static_cast<int>(of_unit % args.units());
  const int64_t of_batch = of_unit / args.units();
  const int row = unit % args.row_tiles * args.unit_rows + row_of_unit;
  const int head = unit / args.row_tiles;
  // If several warps share a row, the block has no other row, so all its threads return here.
  if (of_batch >= args.sequences.batch || row >= args.rows()) return;
  const int sequence = static_cast<int>(of_batch);
  const TileList list(args.sequences);
  const int before = list.before(args.sequences, sequence);
  const int tiles = args.sequences.tiles(sequence);
  const int first = before / list.quota;
  const int count = tiles == 0 ? 0 : (before + tiles - 1) / list.quota + 1 - first;

  const int64_t stride = static_cast<int64_t>(args.units()) * args.unit_rows;
  const int64_t index = (first + sequence) * stride + unit * args.unit_rows + row_of_unit;
  Merged<kColumns> merged;
  constexpr int kLoads = kTogether<kRowWarps>;
  for (int start = warp; start < count; start += kLoads * kRowWarps) {
    float2 sums[kLoads];
    float columns[kLoads][kColumns];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (start + i * kRowWarps >= count) break;
      const int64_t part = index + (start + i * kRowWarps) * stride;
      sums[i] = args.sums[part];
      load_columns(args.parts + part * kHead + lane * kColumns, columns[i]);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (start + i * kRowWarps < count) merged.add(sums[i], columns[i]);
    }
  }
  if constexpr (kRowWarps > 1) {
    __shared__ float outs[kRowWarps][kHead];
    __shared__ float2 sums[kRowWarps];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) outs[warp][lane * kColumns + i] = merged.out[i];
    if (lane == 0) sums[warp] = {merged.maximum, merged.sum};
    __syncthreads();
    if (warp > 0) return;
    merged = {};
#pragma unroll
    for (int w = 0; w < kRowWarps; ++w) {
      float columns[kColumns];
      load_columns(&outs[w][lane * kColumns], columns);
      merged.add(sums[w], columns);
    }
  }
  merged.template store<kHead>(args, sequence, head, row, lane * kColumns);
}

// Of the kernel below: most warps of a block, limited by the registers that a warp needs, fewer if
// there are more blocks than SMs, most blocks of a cluster, and most tiles of a warp.
template <int kTiles>
constexpr int kSharedWarps = kTiles == 1 ? 12 : 8;
constexpr int kFewWarps = 4;
constexpr int kMostBlocks = 8;
constexpr int kMostWarpTiles = 8;

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

// Launches the merge with 1, 8 or 32 warps for each row, chosen by the number of partial outputs
// that a sequence has if all sequences are equally long.
template <int kHead>
ffi::Error launch_merge(const CacheArgs& args, int64_t rows, cudaStream_t stream) {
  const int parts = args.sequences.slots / args.sequences.batch + 2;
  const auto launch = [&](auto kernel, int warps) {
    const int threads = std::max(kMergeThreads, 32 * warps);
    const int64_t blocks = divide_up(rows * warps, threads / 32);
    return launch_kernel(kernel, args, {dim3(static_cast<unsigned>(blocks)), threads, 0}, stream);
  };
  if (parts <= 8) return launch(merge_cached_parts<kHead, 1>, 1);
  if (parts <= 64) return launch(merge_cached_parts<kHead, 8>, 8);
  return launch(merge_cached_parts<kHead, 32>, 32);
}

// Blocks of each cluster and warps of each block of `attend_in_clusters`: as few blocks as leave no
// SM without one. `warps` is 0 if sequences have too many keys for them.
struct Clusters {
  int blocks = 1;
  int warps = 0;

  Clusters(const CacheArgs& args, const Device& device, int most_warps) {
    const int window = args.sequences.window, capacity = args.sequences.capacity;
    const int keys = window == 0 ? capacity : std::min(capacity, window + args.sequences.tokens);
    const int tiles = divide_up(keys, kTileKeys);
    const int64_t units = int64_t{args.sequences.batch} * args.units();
    while (blocks < kMostBlocks && 2 * blocks * units <= device.multiprocessors &&
           most_warps * blocks < tiles) {
      blocks *= 2;
    }
    if (blocks * units > device.multiprocessors) most_warps = kFewWarps;
    if (device.clusters && tiles <= kMostWarpTiles * blocks * most_warps) warps = most_warps;
  }
};

template <typename V, int kHead, int kTiles>
ffi::Error launch(CacheArgs args, int most_slots, cudaStream_t stream) {
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  const Clusters clusters(args, device, kSharedWarps<kTiles>);
  if (clusters.warps > 0) {
    args.cluster = clusters.blocks;
    const int64_t blocks = int64_t{args.sequences.batch} * args.units() * args.cluster;
    const auto kernel = attend_in_clusters<V, kHead, kTiles, kKeptBytes<V> == 1>;
    const int bytes = clusters.warps * args.unit_rows * kHead * static_cast<int>(sizeof(float));
    RETURN_IF_ERROR(allow_shared_memory(kernel, device));
    return launch_kernel(
        kernel, args,
        {dim3(static_cast<unsigned>(blocks)), 32 * clusters.warps, bytes, args.cluster}, stream);
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
                            ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::AnyBuffer> parts,
                            ffi::Result<ffi::AnyBuffer> sums, bool heads_first, int32_t kind,
                            int32_t layer_pages, int32_t window, float scale, float cap) {
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
      batch * tokens > INT32_MAX / 2 || rows > INT32_MAX / kRows ||
      key.size_bytes() / kUnitBytes > UINT32_MAX || key_scale.element_count() > UINT32_MAX) {
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
                   .Ret<ffi::AnyBuffer>()  // parts
                   .Ret<ffi::AnyBuffer>()  // sums
                   .Attr<bool>("heads_first")
                   .Attr<int32_t>("kind")
                   .Attr<int32_t>("layer_pages")
                   .Attr<int32_t>("window")
                   .Attr<float>("scale")
                   .Attr<float>("cap"),
               {ffi::Traits::kCmdBufferCompatible});
