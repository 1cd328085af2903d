// Shared by the forward and the backward of attention: which queries attend to which keys, and how
// products Q K^T become logits. Logits are in base 2 here, log2(e) times the logits of the formula,
// because exp2 is one instruction.
//
// The rows of a tile are queries and its columns keys; with kTransposed, rows are keys and columns
// queries. A CTA owns a block of rows and visits blocks of columns.
#pragma once

#include <climits>
#include <cmath>
#include <cstdint>

#include "attention_tile.cuh"

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kInfinity = INFINITY;
// Log-sum-exp of a row that attends to nothing: -0.7 times the largest float32, as in the XLA
// implementation.
constexpr float kEmptyLse = -2.3819763e38f;
// Number of queries, or of keys, in a block: the unit of AttentionArgs::key_bounds, query_bounds.
constexpr int kSegmentBlock = 32;

// Bounds along keys for some queries, or along queries for some keys: outside [start, stop) every
// pair is masked, and in [full_start, full_stop) none is.
struct Bounds {
  int start, full_start, full_stop, stop;
};

// An optional operand [batch, heads, queries, keys]; axes of length 1 broadcast, with stride 0.
struct LogitsOperand {
  const void* data;
  int64_t strides[4];
};

// Shapes: B batch, T queries, S keys, N query heads, K key heads, H head size, V value size.
struct AttentionArgs {
  const void* q;  // [B, T, N, H]
  const void* k;  // [B, S, K, H]
  const void* v;  // [B, S, K, V]
  int batch, heads, key_heads, query_count, key_count, head_size, value_size;
  float scale;
  float soft_cap;            // 0 means no cap
  int left, right;           // a query at position p attends to keys p - left to p + right
  const int* query_lengths;  // [B]; may be null, like all pointers below
  const int* key_lengths;
  const int* query_offset;    // [B]: query t has position p = t + offset
  const int* query_segments;  // [B, T]
  const int* key_segments;    // [B, S]
  // Bounds in blocks: of the keys in the segments of each block of queries, [B, query blocks, 4],
  // and of the queries in the segments of each block of keys, [B, key blocks, 4].
  const int4* key_bounds;
  const int4* query_bounds;
  LogitsOperand bias;
  bool is_bias_float32;           // otherwise the bias has the dtype of q
  LogitsOperand explicit_mask;    // 8-bit, 0 where a query may not attend to a key
  const uint32_t* dropout_seeds;  // [2, B, N]
  uint32_t dropout_threshold;
  float keep_probability;
  int tiles;           // tiles of rows of one batch entry and head
  int heads_together;  // number of heads whose tiles alternate in the order of CTAs
  bool descending;     // whether the last tile belongs to the first CTA

  // Whether position and length alone decide which keys a query attends to, and no other option is
  // given. This common case is compiled separately, since each option takes scarce registers.
  bool is_plain() const {
    return !transforms() && query_segments == nullptr && explicit_mask.data == nullptr &&
           dropout_seeds == nullptr;
  }
  // Whether a bias may lower all logits of a row, by 1e9 for example. Logits and log-sum-exps are
  // then in base e: differences of such logits are exact, and the lowest float times log2(e) would
  // be -inf. Next to them float has no digits for the logarithm of the sum, so the forward saves
  // what the log-sum-exp lacks, its rest, too.
  __host__ __device__ bool saves_rest() const { return bias.data != nullptr; }
  // Whether a soft cap or a bias follows the scaling, or the scale is not positive. Otherwise the
  // scaling is done in the argument of the exponential (see multiplier).
  __host__ __device__ bool transforms() const {
    return soft_cap != 0.0f || bias.data != nullptr || scale <= 0.0f;
  }
  // Factor that turns the results of `to_logits` into logits; the caller of to_logits applies it.
  __host__ __device__ float multiplier() const {
    return saves_rest() ? kLog2e : transforms() ? 1.0f : scale * kLog2e;
  }
};

// The tile of rows that a CTA owns.
struct Owner {
  int batch;
  int head;  // query head, or key head if transposed
  int tile;

  __device__ Owner(const AttentionArgs& args, int heads) {
    const int all = args.batch * heads;
    const int together = args.heads_together;
    const int group = blockIdx.x / (args.tiles * together);
    const int within = blockIdx.x % (args.tiles * together);
    const int members = min(together, all - group * together);
    const int index = group * together + within % members;
    tile = within / members;
    if (args.descending) tile = args.tiles - 1 - tile;
    batch = index / heads;
    head = index % heads;
  }
};

// Window size that means "no limit", and the largest query offset: with two lengths added to it, a
// sum still fits an int.
constexpr int kNoLimit = 1 << 29;

// Lengths of a batch entry, and the position of its queries among its keys.
struct Extent {
  int queries, keys;
  int offset = 0;  // query t has the position of key t + offset

  __device__ Extent(const AttentionArgs& args, int batch)
      : queries(args.query_count), keys(args.key_count) {
    if (args.query_lengths != nullptr) queries = max(0, min(queries, args.query_lengths[batch]));
    if (args.key_lengths != nullptr) keys = max(0, min(keys, args.key_lengths[batch]));
    if (args.query_offset != nullptr) {
      offset = max(-kNoLimit, min(kNoLimit, args.query_offset[batch]));
    }
  }
};

// Returns the bounds of the columns to which the rows [first, end) attend.
template <bool kTransposed>
__device__ __forceinline__ Bounds column_bounds(const AttentionArgs& args, const Extent& extent,
                                                int batch, int first, int end) {
  const int left = kTransposed ? args.right : args.left;
  const int right = kTransposed ? args.left : args.right;
  const int rows = kTransposed ? extent.keys : extent.queries;
  const int columns = kTransposed ? extent.queries : extent.keys;
  if (first >= rows) return {0, 0, 0, 0};
  // Positions of the first and of the last row, as indices of columns.
  const int offset = kTransposed ? -extent.offset : extent.offset;
  const int from = first + offset, to = min(end, rows) - 1 + offset;
  const auto clip = [columns](int stop) { return max(0, min(columns, stop)); };
  Bounds bounds = {max(0, from - left), max(0, to - left), clip(from + right + 1),
                   clip(to + right + 1)};
  // Rows of keys beyond the key length need a mask. Rows of queries beyond theirs need none: their
  // log-sum-exp is +inf, so their probabilities are 0.
  if (kTransposed && end > rows) bounds.full_stop = 0;
  const int4* within = kTransposed ? args.query_bounds : args.key_bounds;
  if (within != nullptr) {
    const int all = kTransposed ? args.key_count : args.query_count;
    const int blocks = (all + kSegmentBlock - 1) / kSegmentBlock;
    Bounds merged = {INT_MAX, 0, INT_MAX, 0};
    for (int i = first / kSegmentBlock; i * kSegmentBlock < min(end, all); ++i) {
      const int4 one = within[int64_t{batch} * blocks + i];
      merged.start = min(merged.start, one.x * kSegmentBlock);
      merged.full_start = max(merged.full_start, one.y * kSegmentBlock);
      merged.full_stop = min(merged.full_stop, one.z * kSegmentBlock);
      merged.stop = max(merged.stop, one.w * kSegmentBlock);
    }
    bounds = {max(bounds.start, merged.start), max(bounds.full_start, merged.full_start),
              min(bounds.full_stop, merged.full_stop), min(bounds.stop, merged.stop)};
  }
  if (args.explicit_mask.data != nullptr) bounds.full_stop = 0;
  return bounds;
}

// Positions of a lane's elements in a tile: element e of row tile i and column tile j.
template <bool kTransposed>
struct Place {
  int batch;
  int head;    // query head
  int row;     // the lane's row in row tile 0
  int column;  // the lane's column in column tile 0

  __device__ __forceinline__ int row_of(int i, int e) const { return row + 16 * i + e / 2 * 8; }
  __device__ __forceinline__ int column_of(int j, int e) const { return column + 8 * j + e % 2; }
  __device__ __forceinline__ int query(int i, int j, int e) const {
    return kTransposed ? column_of(j, e) : row_of(i, e);
  }
  __device__ __forceinline__ int key(int i, int j, int e) const {
    return kTransposed ? row_of(i, e) : column_of(j, e);
  }
};

template <int kRowTiles, int kColumnTiles, typename F>
__device__ __forceinline__ void for_elements(const F& f) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) f(i, j, e);
    }
  }
}

// Calls `f` for one column tile at a time: loads for the whole tile would not fit the registers.
template <int kRowTiles, int kColumnTiles, typename F>
__device__ __forceinline__ void for_loaded_elements(const F& f) {
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) f(i, j, e);
    }
    asm volatile("" ::: "memory");
  }
}

// A lane's elements of an operand that broadcasts to the logits. A lane beyond the end of an axis
// reads another element, whose value has no effect. Offsets from the lane's first element fit an
// int.
template <bool kTransposed, typename T>
class LaneOfLogits {
 public:
  __device__ __forceinline__ LaneOfLogits(const AttentionArgs& args, const LogitsOperand& operand,
                                          const Place<kTransposed>& place) {
    const int query = min(place.query(0, 0, 0), args.query_count - 1);
    const int key = min(place.key(0, 0, 0), args.key_count - 1);
    last_query_ = args.query_count - 1 - query;
    last_key_ = args.key_count - 1 - key;
    query_stride_ = static_cast<int>(operand.strides[2]);
    key_stride_ = static_cast<int>(operand.strides[3]);
    data_ = static_cast<const T*>(operand.data) + place.batch * operand.strides[0] +
            place.head * operand.strides[1] + query * operand.strides[2] + key * key_stride_;
  }

  __device__ __forceinline__ T operator()(int i, int j, int e) const {
    const Place<kTransposed> ahead = {};
    return data_[min(ahead.query(i, j, e), last_query_) * query_stride_ +
                 min(ahead.key(i, j, e), last_key_) * key_stride_];
  }

 private:
  const T* data_;
  int last_query_, last_key_, query_stride_, key_stride_;
};

// Computes tanh as 1 - 2 / (exp(2 x) + 1), because the error of the tanh instruction, 2^-11, is
// more than the rounding of bfloat16 logits.
__device__ __forceinline__ float accurate_tanh(float x) {
  return 1.0f - __fdividef(2.0f, exp2_fast(x * (2.0f * kLog2e)) + 1.0f);
}

// Turns products into logits divided by args.multiplier(). `use_derivative(i, j, e, factor)`
// receives the soft cap's derivative at each product.
template <typename T, bool kTransposed, int kRowTiles, int kColumnTiles, typename F>
__device__ __forceinline__ void to_logits(const AttentionArgs& args,
                                          const Place<kTransposed>& place,
                                          float (&x)[kRowTiles][kColumnTiles][4],
                                          const F& use_derivative) {
  if (!args.transforms()) return;
  const float unit = args.saves_rest() ? 1.0f : kLog2e;
  if (args.soft_cap != 0.0f) {
    const float inner = args.scale / args.soft_cap;
    const float outer = args.soft_cap * unit;
    for_elements<kRowTiles, kColumnTiles>([&](int i, int j, int e) {
      const float y = accurate_tanh(x[i][j][e] * inner);
      use_derivative(i, j, e, 1.0f - y * y);
      x[i][j][e] = y * outer;
    });
  } else {
    const float factor = args.scale * unit;
    for_elements<kRowTiles, kColumnTiles>([&](int i, int j, int e) { x[i][j][e] *= factor; });
  }
  if (args.bias.data == nullptr) return;
  const auto add = [&](auto type) {
    const LaneOfLogits<kTransposed, decltype(type)> bias(args, args.bias, place);
    for_loaded_elements<kRowTiles, kColumnTiles>(
        [&](int i, int j, int e) { x[i][j][e] += static_cast<float>(bias(i, j, e)); });
  };
  if (std::is_same_v<T, float> || args.is_bias_float32) {
    add(float{});
  } else {
    add(T{});
  }
}

// Writes -inf to masked logits.
template <bool kPlain, bool kTransposed, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void mask_tile(const AttentionArgs& args, const Extent& extent,
                                          const Place<kTransposed>& place,
                                          float (&x)[kRowTiles][kColumnTiles][4]) {
  for_elements<kRowTiles, kColumnTiles>([&](int i, int j, int e) {
    const int query = place.query(i, j, e), key = place.key(i, j, e);
    const int ahead = key - query - extent.offset;
    // The conditions are combined by & rather than &&, so that there are no branches.
    const bool allowed = (ahead >= -args.left) & (ahead <= args.right) & (key < extent.keys) &
                         (query < extent.queries);
    if (!allowed) x[i][j][e] = -kInfinity;
  });
  if constexpr (kPlain) return;
  if (args.query_segments != nullptr) {
    const int* queries = args.query_segments + int64_t{place.batch} * args.query_count;
    const int* keys = args.key_segments + int64_t{place.batch} * args.key_count;
    for_loaded_elements<kRowTiles, kColumnTiles>([&](int i, int j, int e) {
      const int query = min(place.query(i, j, e), args.query_count - 1);
      const int key = min(place.key(i, j, e), args.key_count - 1);
      if (queries[query] != keys[key]) x[i][j][e] = -kInfinity;
    });
  }
  if (args.explicit_mask.data != nullptr) {
    const LaneOfLogits<kTransposed, int8_t> allows(args, args.explicit_mask, place);
    for_loaded_elements<kRowTiles, kColumnTiles>([&](int i, int j, int e) {
      if (allows(i, j, e) == 0) x[i][j][e] = -kInfinity;
    });
  }
}

// --- dropout: the same bits as jaxfused.ops.attention.attention_xla.keep -------------------------

__device__ __forceinline__ uint32_t murmur(uint32_t x, uint32_t tweak = 0) {
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= (x >> 13) ^ tweak;
  x *= 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// Returns one bit per element: whether dropout keeps it (see is_kept).
template <bool kTransposed, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ uint64_t kept(const AttentionArgs& args,
                                         const Place<kTransposed>& place) {
  static_assert(kRowTiles * kColumnTiles * 4 <= 64);
  const int row = place.batch * args.heads + place.head;
  const uint32_t seeds[2] = {args.dropout_seeds[row],
                             args.dropout_seeds[args.batch * args.heads + row]};
  uint64_t bits = 0;
  for_elements<kRowTiles, kColumnTiles>([&](int i, int j, int e) {
    const uint32_t query = place.query(i, j, e), key = place.key(i, j, e);
    const uint32_t u = murmur(seeds[0] ^ query), v = murmur(seeds[1] ^ query);
    // Two adjacent keys share a hash. This form shows the compiler that the first column is even.
    const uint32_t pair = kTransposed ? key / 2 : place.column / 2 + 4 * j;
    const bool is_odd = kTransposed ? key % 2 : e % 2;
    const uint32_t x = murmur(u ^ pair, v);
    const uint32_t half = is_odd ? x >> 16 : x & 0xFFFF;
    if (half >= args.dropout_threshold) bits |= uint64_t{1} << ((i * kColumnTiles + j) * 4 + e);
  });
  return bits;
}

template <int kColumnTiles>
__device__ __forceinline__ bool is_kept(uint64_t bits, int i, int j, int e) {
  return bits >> ((i * kColumnTiles + j) * 4 + e) & 1;
}

template <typename T, typename Pointer>
__device__ __forceinline__ Head<T> head_of(Pointer* operand, int batch, int head, int heads,
                                           int length, int size) {
  const int stride = heads * size;
  return {static_cast<T*>(operand) + int64_t{batch} * length * stride + head * size, stride, length,
          size};
}
