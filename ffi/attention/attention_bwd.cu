// Backward of attention on the tensor cores that every GPU since Turing has: one kernel for the
// gradients of keys and values, one for that of queries, and one for that of the bias.
//
// The kernel for queries runs first, because it also corrects delta, the term that the gradients of
// all logits of a row have in common. Computed as rowsum(dout * out), delta has the rounding error
// of `out`, which shows where the gradients of a row nearly cancel in a sum, as for a bias that is
// the same for all keys.
//
// The kernels for queries and for keys and values both recompute the probabilities, so there are
// seven products where one kernel for all gradients would have five. In return a CTA owns its sums
// and accumulates them in registers in a fixed order: no atomics, no memory traffic for partial
// sums, and the same bits in every run. For keys and values the tiles are transposed, so that the
// accumulators of one product are the left operand of the next. The CTA of a key head visits the
// blocks of all query heads that share it.

#include "attention.h"

namespace {

// The query axis of statistics is padded to a multiple of this number.
constexpr int kStatisticsBlock = 128;

// Statistics of a row of logits (a query and a head). `lse` is the log-sum-exp in the logits' base,
// +inf for a row that adds nothing to any gradient. `delta`, rowsum(P * dP) - dlse, is subtracted
// from dP.
struct Statistics {
  float lse;
  float delta;
};

struct BackwardArgs : AttentionArgs {
  const void* dout;              // [B, T, N, V]
  const Statistics* statistics;  // [B, N, T padded]
  // For each row: the corrected delta minus the sum of its logits' gradients, [B, N, T padded].
  const float* missing;
  const float* rests;     // of the log-sum-exps, behind `missing`, in its shape, if `saves_rest`
  Statistics* corrected;  // statistics with the corrected delta, [B, N, T padded]
  int statistics_rows;
  void* dq;
  void* dk;
  void* dv;
  float* dbias;  // gradient of the bias, in its shape
  int bias_shape[4];
  int stages;  // pipeline stages, each of a block of columns: 1 or 2
};

enum class Gradient { kQuery, kKeyAndValue, kKey, kValue };

// Tile sizes of one gradient. A warp's registers hold kRowTiles * kHead values for each of 1 or 2
// accumulators, and two tiles of logits. kFewWarps is for Turing, whose blocks have 64 KB of shared
// memory.
template <typename T, int kHead, Gradient kOf, bool kFewWarps>
struct BackwardShape {
  static constexpr bool kTransposed = kOf != Gradient::kQuery;
  static constexpr bool kSumsTwo = kOf == Gradient::kKeyAndValue;
  static constexpr int kWarps = kFewWarps ? 2 : 4;
  static constexpr int kRowTiles = kHead * (kSumsTwo || kIsTf32<T> ? 2 : 1) <= 128 ? 2 : 1;
  static constexpr int kColumns =
      kHead == 256 || (kHead == 64 && kSumsTwo) || (kHead == 128 && !kSumsTwo) || kIsTf32<T> ? 32
                                                                                             : 64;
  static constexpr int kRows = 16 * kRowTiles * kWarps;
  static constexpr int kThreads = kWarps * kLanes;
  static constexpr int kOwnTiles = kOf == Gradient::kValue ? 1 : 2;
  static constexpr int kStageBytes = Tile<T, kHead>::bytes(2 * kColumns);
  static constexpr int kStatisticsBytes =
      kTransposed ? kColumns * static_cast<int>(sizeof(Statistics)) : 0;

  static constexpr int shared_bytes(int stages) {
    return Tile<T, kHead>::bytes(kOwnTiles * kRows) + stages * (kStageBytes + kStatisticsBytes);
  }
};

// Turns the products S = Q K^T into probabilities, and dP = dO V^T into the gradient of the logits.
// `statistics_of(j)` returns, for column tile j, a function of (i, e) that returns an element's
// Statistics. `use_derivative(i, j, e, factor)` receives the soft cap's derivative at each product,
// by which the caller must multiply the gradient of the capped product.
template <typename T, bool kPlain, bool kTransposed, int kRowTiles, int kColumnTiles, typename F,
          typename G>
__device__ __forceinline__ void differentiate(const BackwardArgs& args, const Extent& extent,
                                              const Place<kTransposed>& place, bool is_full,
                                              const F& statistics_of, const G& use_derivative,
                                              float (&s)[kRowTiles][kColumnTiles][4],
                                              float (&dp)[kRowTiles][kColumnTiles][4]) {
  const float multiplier = args.multiplier();
  const auto for_each = [&](const auto& f) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      const auto statistics = statistics_of(j);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) f(i, j, e, statistics(i, e));
      }
    }
  };
  if constexpr (kPlain) {
    if (!is_full) mask_tile<true>(args, extent, place, s);
    for_each([&](int i, int j, int e, const Statistics& row) {
      s[i][j][e] = exp2_fast(fmaf(s[i][j][e], multiplier, -row.lse));
      dp[i][j][e] = s[i][j][e] * (dp[i][j][e] - row.delta);
    });
  } else {
    const bool drops = args.dropout_seeds != nullptr;
    const uint64_t keeps = drops ? kept<kTransposed, kRowTiles, kColumnTiles>(args, place) : 0;
    const float weight = 1.0f / args.keep_probability;
    for_each([&](int i, int j, int e, const Statistics& row) {
      if (drops) dp[i][j][e] *= is_kept<kColumnTiles>(keeps, i, j, e) ? weight : 0.0f;
      dp[i][j][e] -= row.delta;
    });
    to_logits<T>(args, place, s, use_derivative);
    if (!is_full) mask_tile<false>(args, extent, place, s);
    if (args.saves_rest()) {
      const int64_t head = int64_t{place.batch} * args.heads + place.head;
      const float* rests = args.rests + head * args.statistics_rows;
      for_each([&](int i, int j, int e, const Statistics& row) {
        const float rest = rests[place.query(i, j, e)];
        s[i][j][e] = exp2_fast(fmaf(s[i][j][e] - row.lse, multiplier, -rest));
      });
    } else {
      for_each([&](int i, int j, int e, const Statistics& row) {
        s[i][j][e] = exp2_fast(fmaf(s[i][j][e], multiplier, -row.lse));
      });
    }
    for_each([&](int i, int j, int e, const Statistics&) {
      dp[i][j][e] *= s[i][j][e];
      if (drops && !is_kept<kColumnTiles>(keeps, i, j, e)) s[i][j][e] = 0.0f;
    });
  }
}

// A block of columns (keys, or queries if transposed) that a CTA loads and multiplies with the rows
// that it owns.
struct Visit {
  int head;  // query head
  int block;
};

template <typename T, int kHead, Gradient kOf, bool kPlain, bool kFewWarps>
__global__ void __launch_bounds__(BackwardShape<T, kHead, kOf, kFewWarps>::kThreads, 2)
    attention_backward(const __grid_constant__ BackwardArgs args) {
  if constexpr (kHasProducts<T> && kFewWarps == kHasLittleSharedMemory) {
    using Shape = BackwardShape<T, kHead, kOf, kFewWarps>;
    constexpr bool kTransposed = Shape::kTransposed;
    constexpr int kRowTiles = Shape::kRowTiles;
    constexpr int kColumns = Shape::kColumns;
    constexpr int kColumnTiles = kColumns / 8;
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    // The CTA owns a block of Q and dO and visits blocks of K and V or, with kTransposed, the other
    // way round.
    const uint32_t own_smem = shared_address(shared_memory);
    const uint32_t own_other_smem =
        own_smem + (Shape::kOwnTiles - 1) * Tile<T, kHead>::bytes(Shape::kRows);
    const uint32_t visited_smem = own_other_smem + Tile<T, kHead>::bytes(Shape::kRows);
    const uint32_t statistics_smem = visited_smem + args.stages * Shape::kStageBytes;

    const Owner at(args, kTransposed ? args.key_heads : args.heads);
    const Extent extent(args, at.batch);
    const int group = args.heads / args.key_heads;
    const int first = at.tile * Shape::kRows;
    const Bounds bounds =
        column_bounds<kTransposed>(args, extent, at.batch, first, first + Shape::kRows);
    const int start = bounds.start / kColumns;
    const int stop = max(divide_up(bounds.stop, kColumns), start);
    const int visits = (stop - start) * (kTransposed ? group : 1);

    const auto queries = [&](const void* operand, int head, int size) {
      return head_of<const T>(operand, at.batch, head, args.heads, args.query_count, size);
    };
    // Keys and values beyond the length are read as zeros, since 0 times NaN is NaN.
    const auto keys = [&](const void* operand, int head, int size) {
      auto source = head_of<const T>(operand, at.batch, head, args.key_heads, args.key_count, size);
      source.rows = extent.keys;
      return source;
    };
    const auto statistics_of = [&](int head) {
      return args.statistics + (int64_t{at.batch} * args.heads + head) * args.statistics_rows;
    };
    const auto load_visited = [&](const Visit& visit, int stage) {
      constexpr int kThreads = Shape::kThreads;
      const int head = visit.head;
      const int column = visit.block * kColumns;
      const uint32_t tile = visited_smem + stage * Shape::kStageBytes;
      const uint32_t other = tile + Tile<T, kHead>::bytes(kColumns);
      if constexpr (kTransposed) {
        load_tile<kHead, kColumns, kThreads>(tile, queries(args.q, head, args.head_size), column);
        load_tile<kHead, kColumns, kThreads>(other, queries(args.dout, head, args.value_size),
                                             column);
        constexpr int kEach = 16 / sizeof(Statistics);
        if (threadIdx.x < kColumns / kEach) {
          const int i = threadIdx.x * kEach;
          async_copy_or_zero(statistics_smem + stage * Shape::kStatisticsBytes +
                                 i * static_cast<int>(sizeof(Statistics)),
                             statistics_of(head) + column + i, true);
        }
      } else {
        const int key_head = head / group;
        load_tile<kHead, kColumns, kThreads>(tile, keys(args.k, key_head, args.head_size), column);
        load_tile<kHead, kColumns, kThreads>(other, keys(args.v, key_head, args.value_size),
                                             column);
      }
    };

    Visit visit = {kTransposed ? at.head * group : at.head, start};
    Visit ahead = visit;
    if (visits > 0) {
      const auto own = kTransposed ? keys(args.k, at.head, args.head_size)
                                   : queries(args.q, at.head, args.head_size);
      load_tile<kHead, Shape::kRows, Shape::kThreads>(own_smem, own, first);
      if constexpr (Shape::kOwnTiles == 2) {
        const auto other = kTransposed ? keys(args.v, at.head, args.value_size)
                                       : queries(args.dout, at.head, args.value_size);
        load_tile<kHead, Shape::kRows, Shape::kThreads>(own_other_smem, other, first);
      }
      if (args.stages == 2) load_visited(ahead, 0);
      round_tile<T, kHead, Shape::kRows, Shape::kThreads>(own_smem);
      if constexpr (Shape::kOwnTiles == 2) {
        round_tile<T, kHead, Shape::kRows, Shape::kThreads>(own_other_smem);
      }
    }

    const int lane = threadIdx.x % kLanes;
    const int warp_row = threadIdx.x / kLanes * 16 * kRowTiles;
    Statistics of_rows[kRowTiles][2];
    if constexpr (!kTransposed) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          of_rows[i][half] =
              statistics_of(at.head)[first + warp_row + 16 * i + 8 * half + lane / 4];
        }
      }
    }
    float of_logits[kRowTiles][2] = {};  // sums of the logits' gradients over this lane's columns
    // Sums of dS times the visited Q or K, and of P times the visited dO.
    float acc[kOf == Gradient::kValue ? 1 : kRowTiles][kHead / 8][4] = {};
    float acc_other[kOf == Gradient::kKeyAndValue || kOf == Gradient::kValue ? kRowTiles : 1]
                   [kHead / 8][4] = {};

    const uint32_t own_lane =
        Tile<T, kHead>::lane_of_rows(own_smem + warp_row * Tile<T, kHead>::kStride);
    const uint32_t own_other_lane = own_lane + (own_other_smem - own_smem);
    const auto advance = [&](Visit& one) {
      ++one.block;
      // A CTA that owns queries has one head; one that owns keys visits its query heads in turn.
      if (kTransposed && one.block == stop) one = {one.head + 1, start};
    };
    for (int step = 0; step < visits; ++step, advance(visit)) {
      int stage = 0;
      if (args.stages == 2) {
        stage = step % 2;
        async_copies_wait_all();
        __syncthreads();
        advance(ahead);
        if (step + 1 < visits) load_visited(ahead, 1 - stage);
      } else {
        __syncthreads();
        load_visited(visit, 0);
        async_copies_wait_all();
        __syncthreads();
      }
      const uint32_t tile = visited_smem + stage * Shape::kStageBytes;
      const uint32_t other = tile + Tile<T, kHead>::bytes(kColumns);

      float s[kRowTiles][kColumnTiles][4] = {};
      add_product_transposed<T, kHead>(s, own_lane, Tile<T, kHead>::lane_of_columns(tile));
      float dp[kRowTiles][kColumnTiles][4] = {};
      if constexpr (kOf != Gradient::kValue) {
        add_product_transposed<T, kHead>(dp, own_other_lane,
                                         Tile<T, kHead>::lane_of_columns(other));
      }

      const int column = visit.block * kColumns;
      const Place<kTransposed> place{at.batch, visit.head, first + warp_row + lane / 4,
                                     column + lane % 4 * 2};
      const bool is_full = column >= bounds.full_start && column + kColumns <= bounds.full_stop;
      // In float32, delta is corrected even with a soft cap. The correction needs the gradients of
      // the capped logits, so the kernel for queries multiplies by the cap's derivative later.
      constexpr bool kDerivativesLater = kIsTf32<T> && kOf == Gradient::kQuery && !kPlain;
      float derivatives[kDerivativesLater ? kRowTiles : 1][kColumnTiles][4];
      differentiate<T, kPlain>(
          args, extent, place, is_full,
          [&](int j) {
            if constexpr (kTransposed) {
              const int column_of_lane = 8 * j + lane % 4 * 2;
              const uint4 two =
                  load_shared_16(statistics_smem + stage * Shape::kStatisticsBytes +
                                 column_of_lane * static_cast<int>(sizeof(Statistics)));
              return [two](int, int e) {
                return e % 2 == 0 ? Statistics{__uint_as_float(two.x), __uint_as_float(two.y)}
                                  : Statistics{__uint_as_float(two.z), __uint_as_float(two.w)};
              };
            } else {
              return [&](int i, int e) { return of_rows[i][e / 2]; };
            }
          },
          [&](int i, int j, int e, float derivative) {
            if constexpr (kDerivativesLater) {
              derivatives[i][j][e] = derivative;
            } else {
              dp[i][j][e] *= derivative;
            }
          },
          s, dp);

      if constexpr (kOf == Gradient::kQuery) {
        for_elements<kRowTiles, kColumnTiles>(
            [&](int i, int j, int e) { of_logits[i][e / 2] += dp[i][j][e]; });
      }
      if constexpr (kDerivativesLater) {
        if (args.soft_cap != 0.0f) {
          for_elements<kRowTiles, kColumnTiles>(
              [&](int i, int j, int e) { dp[i][j][e] *= derivatives[i][j][e]; });
        }
      }
      if constexpr (kOf == Gradient::kKeyAndValue || kOf == Gradient::kValue) {
        Operand<T, kRowTiles, kColumnTiles> p;
        round_to_operand<T>(s, p);
        add_product<T, kHead, kRowTiles, kColumnTiles>(acc_other, p,
                                                       Tile<T, kHead>::lane_of_depth(other));
      }
      if constexpr (kOf != Gradient::kValue) {
        Operand<T, kRowTiles, kColumnTiles> ds;
        round_to_operand<T>(dp, ds);
        add_product<T, kHead, kRowTiles, kColumnTiles>(acc, ds,
                                                       Tile<T, kHead>::lane_of_depth(tile));
      }
    }

    // After this barrier, lanes overwrite rows of the tile that other lanes of the warp have read.
    __syncwarp();

    const auto store = [&](void* gradient, int size, uint32_t by_way_of, float factor,
                           const auto& sums) {
      const auto head =
          kTransposed
              ? head_of<T>(gradient, at.batch, at.head, args.key_heads, args.key_count, size)
              : head_of<T>(gradient, at.batch, at.head, args.heads, args.query_count, size);
      float factors[kRowTiles][2];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) factors[i][0] = factors[i][1] = factor;
      store_rows<T, kHead>(head, first + warp_row, by_way_of, warp_row, sums, factors);
    };
    if constexpr (kOf == Gradient::kQuery) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float sum = of_logits[i][half];
          sum += __shfl_xor_sync(0xffffffffu, sum, 1);
          sum += __shfl_xor_sync(0xffffffffu, sum, 2);
          const int row = first + warp_row + 16 * i + 8 * half + lane / 4;
          const int64_t place =
              (int64_t{at.batch} * args.heads + at.head) * args.statistics_rows + row;
          // The 16-bit kernels correct delta only without a soft cap: with one, `sum` is of the
          // products' gradients instead of the logits'.
          const float delta = kIsTf32<T> || args.soft_cap == 0.0f ? sum + args.missing[place]
                                                                  : of_rows[i][half].delta;
          if (lane % 4 == 0) args.corrected[place] = {of_rows[i][half].lse, delta};
        }
      }
      store(args.dq, args.head_size, own_smem, args.scale, acc);
    }
    if constexpr (kOf == Gradient::kKeyAndValue || kOf == Gradient::kKey) {
      store(args.dk, args.head_size, own_smem, args.scale, acc);
    }
    if constexpr (kOf == Gradient::kKeyAndValue || kOf == Gradient::kValue) {
      store(args.dv, args.value_size, own_other_smem, 1.0f / args.keep_probability, acc_other);
    }
  }
}

// --- bias ----------------------------------------------------------------------------------------

// Tile sizes of the bias gradient. A CTA sums gradients of all logits that its tile of the bias is
// broadcast to.
template <typename T, int kHead>
struct BiasShape {
  static constexpr int kWarps = 4;
  static constexpr int kRows = 16 * kWarps;
  static constexpr int kColumns = kHead <= (kIsTf32<T> ? 64 : 128) ? 64 : 32;
  static constexpr int kThreads = kWarps * kLanes;
  static constexpr int kSharedBytes = Tile<T, kHead>::bytes(2 * kRows + 2 * kColumns);
};

template <typename T, int kHead>
__global__ void __launch_bounds__(BiasShape<T, kHead>::kThreads, 2)
    attention_bias_gradient(const __grid_constant__ BackwardArgs args) {
  if constexpr (kHasProducts<T>) {
    using Shape = BiasShape<T, kHead>;
    constexpr int kRows = Shape::kRows, kColumns = Shape::kColumns, kThreads = Shape::kThreads;
    constexpr int kColumnTiles = kColumns / 8;
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const uint32_t q_smem = shared_address(shared_memory);
    const uint32_t do_smem = q_smem + Tile<T, kHead>::bytes(kRows);
    const uint32_t k_smem = do_smem + Tile<T, kHead>::bytes(kRows);
    const uint32_t v_smem = k_smem + Tile<T, kHead>::bytes(kColumns);

    // Along each axis of the logits, the CTA visits one index, or all indices if the bias has
    // length 1 there.
    const int counts[4] = {args.batch, args.heads, divide_up(args.query_count, kRows),
                           divide_up(args.key_count, kColumns)};
    int begin[4], end[4];
    int index = blockIdx.x;
    for (int axis = 3; axis >= 0; --axis) {
      if (args.bias_shape[axis] == 1) {
        begin[axis] = 0;
        end[axis] = counts[axis];
      } else {
        begin[axis] = index % counts[axis];
        end[axis] = begin[axis] + 1;
        index /= counts[axis];
      }
    }

    const int lane = threadIdx.x % kLanes;
    const int warp_row = threadIdx.x / kLanes * 16;
    float acc[1][kColumnTiles][4] = {};
    for (int batch = begin[0]; batch < end[0]; ++batch) {
      const Extent extent(args, batch);
      for (int tile = begin[2]; tile < end[2]; ++tile) {
        const int first = tile * kRows;
        const Bounds bounds = column_bounds<false>(args, extent, batch, first, first + kRows);
        for (int block = max(begin[3], bounds.start / kColumns);
             block < min(end[3], divide_up(bounds.stop, kColumns)); ++block) {
          const int column = block * kColumns;
          for (int head = begin[1]; head < end[1]; ++head) {
            const int key_head = head / (args.heads / args.key_heads);
            const auto load = [&](uint32_t smem, const void* operand, int size, auto rows) {
              const bool of_queries = smem == q_smem || smem == do_smem;
              auto source = of_queries ? head_of<const T>(operand, batch, head, args.heads,
                                                          args.query_count, size)
                                       : head_of<const T>(operand, batch, key_head, args.key_heads,
                                                          args.key_count, size);
              if (!of_queries) source.rows = extent.keys;
              load_tile<kHead, rows.value, kThreads>(smem, source, of_queries ? first : column);
            };
            const std::integral_constant<int, kRows> rows;
            const std::integral_constant<int, kColumns> columns;
            __syncthreads();
            load(q_smem, args.q, args.head_size, rows);
            load(do_smem, args.dout, args.value_size, rows);
            load(k_smem, args.k, args.head_size, columns);
            load(v_smem, args.v, args.value_size, columns);
            const int row = first + warp_row + lane / 4;
            const Statistics* statistics =
                args.statistics + (int64_t{batch} * args.heads + head) * args.statistics_rows + row;
            const Statistics of_rows[2] = {statistics[0], statistics[8]};
            async_copies_wait_all();
            round_tile<T, kHead, kRows, kThreads>(q_smem);
            round_tile<T, kHead, kRows, kThreads>(do_smem);
            __syncthreads();

            const uint32_t row_offset = warp_row * Tile<T, kHead>::kStride;
            float s[1][kColumnTiles][4] = {};
            add_product_transposed<T, kHead>(s, Tile<T, kHead>::lane_of_rows(q_smem + row_offset),
                                             Tile<T, kHead>::lane_of_columns(k_smem));
            float dp[1][kColumnTiles][4] = {};
            add_product_transposed<T, kHead>(dp, Tile<T, kHead>::lane_of_rows(do_smem + row_offset),
                                             Tile<T, kHead>::lane_of_columns(v_smem));
            const bool is_full =
                column >= bounds.full_start && column + kColumns <= bounds.full_stop;
            differentiate<T, false>(
                args, extent, Place<false>{batch, head, row, column + lane % 4 * 2}, is_full,
                [&](int) { return [&](int, int e) { return of_rows[e / 2]; }; },
                [](int, int, int, float) {}, s, dp);
            for_elements<1, kColumnTiles>(
                [&](int i, int j, int e) { acc[i][j][e] += dp[i][j][e]; });
          }
        }
      }
    }

    // The tile of gradients is written to shared memory as a matrix, and then summed along the axes
    // where the bias has length 1.
    __syncthreads();
    auto* matrix = reinterpret_cast<float*>(shared_memory);
    for_elements<1, kColumnTiles>([&](int, int j, int e) {
      const int row = warp_row + lane / 4 + e / 2 * 8, column = 8 * j + lane % 4 * 2 + e % 2;
      matrix[row * kColumns + column] = acc[0][j][e];
    });
    __syncthreads();
    const bool one_row = args.bias_shape[2] == 1, one_column = args.bias_shape[3] == 1;
    if (one_row && threadIdx.x < kColumns) {
      float sum = 0.0f;
      for (int row = 0; row < kRows; ++row) sum += matrix[row * kColumns + threadIdx.x];
      matrix[threadIdx.x] = sum;
    }
    __syncthreads();
    if (one_column && threadIdx.x < (one_row ? 1 : kRows)) {
      float sum = 0.0f;
      for (int column = 0; column < kColumns; ++column) {
        sum += matrix[threadIdx.x * kColumns + column];
      }
      matrix[threadIdx.x * kColumns] = sum;
    }
    __syncthreads();
    const int first_row = one_row ? 0 : begin[2] * kRows;
    const int first_column = one_column ? 0 : begin[3] * kColumns;
    const int rows = one_row ? 1 : min(kRows, args.query_count - first_row);
    const int columns = one_column ? 1 : min(kColumns, args.key_count - first_column);
    const int64_t matrix_index =
        (args.bias_shape[0] == 1 ? 0 : begin[0]) * int64_t{args.bias_shape[1]} +
        (args.bias_shape[1] == 1 ? 0 : begin[1]);
    for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
      const int row = i / kColumns, column = i % kColumns;
      if (row >= rows || column >= columns) continue;
      args.dbias[(matrix_index * args.bias_shape[2] + first_row + row) * args.bias_shape[3] +
                 first_column + column] = matrix[i];
    }
  }
}

// --- launch --------------------------------------------------------------------------------------

template <typename T, int kHead, Gradient kOf, bool kFewWarps>
ffi::Error launch_gradient(BackwardArgs args, const Device& device, cudaStream_t stream) {
  using Shape = BackwardShape<T, kHead, kOf, kFewWarps>;
  constexpr bool kTransposed = Shape::kTransposed;
  static_assert(kTransposed || kStatisticsBlock % Shape::kRows == 0);
  const int heads = kTransposed ? args.key_heads : args.heads;
  args.tiles = divide_up(kTransposed ? args.key_count : args.query_count, Shape::kRows);
  // Under a causal mask the first keys and last queries have the most work and start first.
  const bool is_uneven = args.right < args.key_count;
  args.descending = is_uneven && !kTransposed;
  args.heads_together = is_uneven ? 8 : 1;
  int64_t blocks = 0;
  RETURN_IF_ERROR(count_blocks(args, heads, &blocks));
  const auto kernel = args.is_plain() ? attention_backward<T, kHead, kOf, true, kFewWarps>
                                      : attention_backward<T, kHead, kOf, false, kFewWarps>;
  RETURN_IF_ERROR(allow_shared_memory(kernel, device));
  // Two pipeline stages are used unless their shared memory leaves an SM one block instead of two.
  int resident[2] = {};
  for (const int stages : {1, 2}) {
    const int shared_bytes = Shape::shared_bytes(stages);
    if (shared_bytes > device.shared_bytes) continue;
    const Launch launch = {dim3(blocks), Shape::kThreads, shared_bytes};
    RETURN_IF_ERROR(resident_blocks(kernel, launch, &resident[stages - 1]));
  }
  args.stages = resident[1] >= resident[0] ? 2 : 1;
  const int shared_bytes = Shape::shared_bytes(args.stages);
  return launch_kernel(kernel, args, {dim3(blocks), Shape::kThreads, shared_bytes}, stream);
}

template <typename T, int kHead>
ffi::Error launch_bias_gradient(const BackwardArgs& args, const Device& device,
                                cudaStream_t stream) {
  using Shape = BiasShape<T, kHead>;
  const int sizes[4] = {args.batch, args.heads, divide_up(args.query_count, Shape::kRows),
                        divide_up(args.key_count, Shape::kColumns)};
  int64_t blocks = 1;
  for (int axis = 0; axis < 4; ++axis) blocks *= args.bias_shape[axis] == 1 ? 1 : sizes[axis];
  if (blocks > INT32_MAX) {
    return ffi::Error::InvalidArgument("bias has too many elements for one launch");
  }
  const auto kernel = attention_bias_gradient<T, kHead>;
  RETURN_IF_ERROR(allow_shared_memory(kernel, device));
  return launch_kernel(kernel, args, {dim3(blocks), Shape::kThreads, Shape::kSharedBytes}, stream);
}

template <typename T, int kHead, bool kFewWarps>
ffi::Error launch_gradients(BackwardArgs args, const Device& device, cudaStream_t stream) {
  const auto launch = [&](auto of) {
    return launch_gradient<T, kHead, of.value, kFewWarps>(args, device, stream);
  };
  RETURN_IF_ERROR(launch(std::integral_constant<Gradient, Gradient::kQuery>{}));
  args.statistics = args.corrected;
  if (args.bias.data != nullptr) {
    RETURN_IF_ERROR((launch_bias_gradient<T, kHead>(args, device, stream)));
  }
  if constexpr (kHead == 256) {
    // The sums for keys and values together would not fit registers, so each has a launch.
    RETURN_IF_ERROR(launch(std::integral_constant<Gradient, Gradient::kValue>{}));
    return launch(std::integral_constant<Gradient, Gradient::kKey>{});
  } else {
    return launch(std::integral_constant<Gradient, Gradient::kKeyAndValue>{});
  }
}

ffi::Error attention_backward_handler(
    cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer bias,
    ffi::AnyBuffer explicit_mask, ffi::AnyBuffer query_lengths, ffi::AnyBuffer key_lengths,
    ffi::AnyBuffer query_offset, ffi::AnyBuffer query_segments, ffi::AnyBuffer key_segments,
    ffi::AnyBuffer key_bounds, ffi::AnyBuffer dropout_seeds, ffi::AnyBuffer query_bounds,
    ffi::AnyBuffer dout, ffi::AnyBuffer statistics, ffi::AnyBuffer missing,
    ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk, ffi::Result<ffi::AnyBuffer> dv,
    ffi::Result<ffi::AnyBuffer> dbias, ffi::Result<ffi::AnyBuffer> corrected, float scale,
    float soft_cap, int64_t left, int64_t right, int64_t dropout_threshold) {
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  BackwardArgs args = {};
  const AttentionOperands operands = {q,
                                      k,
                                      v,
                                      bias,
                                      explicit_mask,
                                      query_lengths,
                                      key_lengths,
                                      query_offset,
                                      query_segments,
                                      key_segments,
                                      key_bounds,
                                      dropout_seeds};
  const AttentionOptions options = {scale, soft_cap, left, right, dropout_threshold};
  RETURN_IF_ERROR(parse_attention(operands, options, &args));
  if (args.query_segments != nullptr) {
    const int64_t key_blocks = divide_up(args.key_count, kSegmentBlock);
    RETURN_IF_ERROR(check_shape("query_bounds", query_bounds, {args.batch, key_blocks, 4}));
    RETURN_IF_ERROR(check_dtype("query_bounds", query_bounds, ffi::DataType::S32));
    args.query_bounds = static_cast<const int4*>(query_bounds.untyped_data());
  }
  RETURN_IF_ERROR(check_like_queries("dout", dout, q, args.value_size));
  if (!are_aligned({dout.untyped_data()})) {
    return ffi::Error::InvalidArgument("dout does not start at 16 bytes");
  }
  args.statistics_rows = divide_up(args.query_count, kStatisticsBlock) * kStatisticsBlock;
  RETURN_IF_ERROR(
      check_shape("statistics", statistics, {args.batch, args.heads, args.statistics_rows, 2}));
  RETURN_IF_ERROR(check_dtype("statistics", statistics, ffi::DataType::F32));
  const int numbers = args.saves_rest() ? 2 : 1;
  RETURN_IF_ERROR(
      check_shape("missing", missing, {numbers * args.batch, args.heads, args.statistics_rows}));
  RETURN_IF_ERROR(check_dtype("missing", missing, ffi::DataType::F32));
  RETURN_IF_ERROR(
      check_shape("corrected", *corrected, {args.batch, args.heads, args.statistics_rows, 2}));
  RETURN_IF_ERROR(check_dtype("corrected", *corrected, ffi::DataType::F32));
  RETURN_IF_ERROR(check_like_queries("dq", *dq, q, args.head_size));
  for (const auto& [name, gradient, operand] :
       {std::tuple<const char*, const ffi::AnyBuffer&, const ffi::AnyBuffer&>{"dk", *dk, k},
        {"dv", *dv, v}}) {
    const auto shape = operand.dimensions();
    RETURN_IF_ERROR(check_shape(name, gradient, {shape[0], shape[1], shape[2], shape[3]}));
    RETURN_IF_ERROR(check_dtype(name, gradient, q.element_type()));
  }
  args.dout = dout.untyped_data();
  args.statistics = static_cast<const Statistics*>(statistics.untyped_data());
  args.missing = static_cast<const float*>(missing.untyped_data());
  args.rests = args.missing + int64_t{args.batch} * args.heads * args.statistics_rows;
  args.corrected = static_cast<Statistics*>(corrected->untyped_data());
  args.dq = dq->untyped_data();
  args.dk = dk->untyped_data();
  args.dv = dv->untyped_data();
  if (args.bias.data != nullptr) {
    const auto shape = bias.dimensions();
    RETURN_IF_ERROR(check_shape("dbias", *dbias, {shape[0], shape[1], shape[2], shape[3]}));
    RETURN_IF_ERROR(check_dtype("dbias", *dbias, ffi::DataType::F32));
    args.dbias = static_cast<float*>(dbias->untyped_data());
    std::copy(shape.begin(), shape.end(), args.bias_shape);
  }
  return for_dtype_and_head(args, q.element_type(), [&](auto type, auto head) {
    using T = decltype(type);
    constexpr int kHead = head.value;
    if (device.shared_bytes > kLittleSharedMemory) {
      return launch_gradients<T, kHead, false>(args, device, stream);
    }
    if constexpr (std::is_same_v<T, __half> && kHead <= 128) {
      return launch_gradients<T, kHead, true>(args, device, stream);
    }
    return ffi::Error::InvalidArgument("head sizes above 128 need compute capability 8.0 or later");
  });
}

}  // namespace

DEFINE_HANDLER(jaxfused_attention_backward, attention_backward_handler,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // q
                   .Arg<ffi::AnyBuffer>()  // k
                   .Arg<ffi::AnyBuffer>()  // v
                   .Arg<ffi::AnyBuffer>()  // bias
                   .Arg<ffi::AnyBuffer>()  // explicit_mask
                   .Arg<ffi::AnyBuffer>()  // query_lengths
                   .Arg<ffi::AnyBuffer>()  // key_lengths
                   .Arg<ffi::AnyBuffer>()  // query_offset
                   .Arg<ffi::AnyBuffer>()  // query_segments
                   .Arg<ffi::AnyBuffer>()  // key_segments
                   .Arg<ffi::AnyBuffer>()  // key_bounds
                   .Arg<ffi::AnyBuffer>()  // dropout_seeds
                   .Arg<ffi::AnyBuffer>()  // query_bounds
                   .Arg<ffi::AnyBuffer>()  // dout
                   .Arg<ffi::AnyBuffer>()  // statistics
                   .Arg<ffi::AnyBuffer>()  // missing
                   .Ret<ffi::AnyBuffer>()  // dq
                   .Ret<ffi::AnyBuffer>()  // dk
                   .Ret<ffi::AnyBuffer>()  // dv
                   .Ret<ffi::AnyBuffer>()  // dbias
                   .Ret<ffi::AnyBuffer>()  // corrected
                   .Attr<float>("scale")
                   .Attr<float>("soft_cap")
                   .Attr<int64_t>("left")
                   .Attr<int64_t>("right")
                   .Attr<int64_t>("dropout_threshold"));
