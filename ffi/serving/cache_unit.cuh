// Attention of one warp: the queries of a key head that one sequence has, to tiles of cached keys.
//
// The warp loads tiles of 16 keys from global memory into the operand registers of the tensor
// cores, the next tile while it multiplies the current one. It needs no shared memory for them, so
// pages may have any size. int8 keys are multiplied as bytes; other 8-bit values are widened in
// registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/mma.cuh"
#include "common/mma_bytes.cuh"
#include "serving/decode_work.cuh"
#include "serving/kept_values.cuh"
#include "serving/pages.h"

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
  float* lse;  // log-sum-exp of each query's logits and its sink, [batch, tokens, key heads, group]
  Sequences sequences;
  Strides strides;
  Strides scale_strides;
  int layer_pages;
  int layers;
  int page_size;
  int page_shift;  // log2 of page_size, or -1 if that is no power of two
  int most_pages;
  int key_heads;
  int group;          // query heads that share a key head
  int row_tiles;      // units (tiles of query rows) of a key head
  int unit_rows;      // rows of a unit that have a place in `parts` and `sums`
  int cluster;        // blocks of a cluster, which share a unit of a sequence; 0 for no clusters
  int cluster_warps;  // warps of a block of a cluster
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
