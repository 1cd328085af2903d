// Forward of attention on the tensor cores that every GPU since Turing has, in one pass over the
// keys.
//
// A CTA owns a block of queries of one head and visits the blocks of keys that they attend to.
// Shared memory holds one or two blocks of K and one of V: while the tensor cores use one block,
// another is copied. An SM has two CTAs, so that one computes while the other waits.

#include "attention.h"

namespace {

struct ForwardArgs : AttentionArgs {
  const float* sinks;  // logit of each head's sink, which has no key or value, [N], or nullptr
  void* out;           // [B, T, N, V]
  float* lse;          // [B, N, T]
  float* rest;         // of lse, in base 2, behind it, [B, N, T], if `saves_rest`
  int key_stages;      // blocks of K in shared memory, 1 or 2
};

// Tile sizes of the forward. A warp has 32 rows if registers suffice: each read of K and V from
// shared memory then serves two row tiles, so that shared memory is as fast as the tensor cores.
template <typename T, int kHead, bool kPlain>
struct ForwardShape {
  static constexpr int kWarps = 4;
  static constexpr int kRowTiles = kHead <= 128 ? 2 : 1;
  static constexpr int kColumns = kHead <= (kPlain && !kIsTf32<T> ? 128 : 64) ? 64 : 32;
  static constexpr int kRows = 16 * kRowTiles * kWarps;
  static constexpr int kThreads = kWarps * kLanes;

  static constexpr int shared_bytes(int key_stages) {
    return Tile<T, kHead>::bytes(kRows + (1 + key_stages) * kColumns);
  }
};

// Excess, in base 2, of a row's true maximum over the maximum that is subtracted, from which on the
// subtracted one is updated. Updates, which rescale `acc`, are then rare, and sums of exponentials
// stay below 2^8 times those with the true maximum.
constexpr float kMaximumLag = 8.0f;

// The running softmax of a lane's rows.
template <int kRowTiles>
struct Softmax {
  float maximum[kRowTiles][2];  // maximum subtracted from each row, before `multiplier`
  float total[kRowTiles][2];    // sums of exponentials over this lane's columns

  // Replaces x, logits divided by `multiplier`, by their exponentials; rescales `acc` if the
  // maximum changes. If `is_low`, x may be so low that only its difference from the maximum is
  // multiplied.
  template <int kColumnTiles, int kAccTiles>
  __device__ __forceinline__ void take(float (&x)[kRowTiles][kColumnTiles][4], float multiplier,
                                       bool is_low, float (&acc)[kRowTiles][kAccTiles][4]) {
    float greatest[kRowTiles][2];
    bool lags = false;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = fmaxf(x[i][0][2 * half], x[i][0][2 * half + 1]);
#pragma unroll
        for (int j = 1; j < kColumnTiles; ++j) {
          most = fmaxf(most, fmaxf(x[i][j][2 * half], x[i][j][2 * half + 1]));
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        lags |= (most - maximum[i][half]) * multiplier > kMaximumLag;
        greatest[i][half] = most;
      }
    }
    if (__any_sync(0xffffffffu, lags)) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float old = maximum[i][half];
          maximum[i][half] = fmaxf(old, greatest[i][half]);
          const float factor = exp2_fast((old - finite(maximum[i][half])) * multiplier);
          total[i][half] *= factor;
#pragma unroll
          for (int j = 0; j < kAccTiles; ++j) {
            acc[i][j][2 * half] *= factor;
            acc[i][j][2 * half + 1] *= factor;
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float first = is_low ? finite(maximum[i][half]) : 0.0f;
        const float then = is_low ? 0.0f : finite(maximum[i][half]) * multiplier;
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            x[i][j][e] = exp2_fast(fmaf(x[i][j][e] - first, multiplier, -then));
            total[i][half] += x[i][j][e];
          }
        }
      }
    }
  }

  // Replaces a maximum of -inf by a finite one, since -inf - (-inf) is NaN.
  static __device__ __forceinline__ float finite(float x) { return x == -kInfinity ? 0.0f : x; }
};

template <typename T, int kHead, bool kPlain>
__global__ void __launch_bounds__(ForwardShape<T, kHead, kPlain>::kThreads, 2)
    attention_forward(const __grid_constant__ ForwardArgs args) {
  if constexpr (kHasProducts<T>) {
    using Shape = ForwardShape<T, kHead, kPlain>;
    constexpr int kRowTiles = Shape::kRowTiles;
    constexpr int kColumns = Shape::kColumns;
    constexpr int kColumnTiles = kColumns / 8;
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const uint32_t q_smem = shared_address(shared_memory);
    const uint32_t v_smem = q_smem + Tile<T, kHead>::bytes(Shape::kRows);
    const uint32_t k_smem = v_smem + Tile<T, kHead>::bytes(kColumns);

    const Owner at(args, args.heads);
    const Extent extent(args, at.batch);
    const int first = at.tile * Shape::kRows;
    const int key_head = at.head / (args.heads / args.key_heads);
    const auto q =
        head_of<const T>(args.q, at.batch, at.head, args.heads, args.query_count, args.head_size);
    auto k = head_of<const T>(args.k, at.batch, key_head, args.key_heads, args.key_count,
                              args.head_size);
    auto v = head_of<const T>(args.v, at.batch, key_head, args.key_heads, args.key_count,
                              args.value_size);
    // Keys and values beyond the length are read as zeros, since a weight of 0 times NaN is NaN.
    k.rows = v.rows = extent.keys;
    const Bounds bounds = column_bounds<false>(args, extent, at.batch, first, first + Shape::kRows);
    const int stop = divide_up(bounds.stop, kColumns);
    int block = bounds.start / kColumns;

    const int lane = threadIdx.x % kLanes;
    const int warp_row = threadIdx.x / kLanes * 16 * kRowTiles;
    const float multiplier = args.multiplier();
    Softmax<kRowTiles> softmax;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        softmax.maximum[i][half] = -kInfinity;
        softmax.total[i][half] = 0.0f;
        if (args.sinks != nullptr) {
          const float sink = args.sinks[at.head] * kLog2e;
          softmax.maximum[i][half] = sink / multiplier;
          softmax.total[i][half] = lane % 4 == 0 && sink != -kInfinity ? 1.0f : 0.0f;
        }
      }
    }
    float acc[kRowTiles][kHead / 8][4] = {};

    if (block < stop) {
      load_tile<kHead, Shape::kRows, Shape::kThreads>(q_smem, q, first);
      load_tile<kHead, kColumns, Shape::kThreads>(k_smem, k, block * kColumns);
      round_tile<T, kHead, Shape::kRows, Shape::kThreads>(q_smem);
    }
    const uint32_t q_lane =
        Tile<T, kHead>::lane_of_rows(q_smem + warp_row * Tile<T, kHead>::kStride);
    const uint32_t v_lane = Tile<T, kHead>::lane_of_depth(v_smem);
    int stage = 0;
    const auto load_next_keys = [&] {
      stage = args.key_stages - 1 - stage;
      if (block + 1 < stop) {
        load_tile<kHead, kColumns, Shape::kThreads>(
            k_smem + stage * Tile<T, kHead>::bytes(kColumns), k, (block + 1) * kColumns);
      }
    };
    for (; block < stop; ++block) {
      async_copies_wait_all();
      __syncthreads();
      const uint32_t k_now = k_smem + stage * Tile<T, kHead>::bytes(kColumns);
      load_tile<kHead, kColumns, Shape::kThreads>(v_smem, v, block * kColumns);
      async_copies_commit();
      if (args.key_stages == 2) {
        load_next_keys();
        async_copies_commit();
      }

      float x[kRowTiles][kColumnTiles][4] = {};
      add_product_transposed<T, kHead>(x, q_lane, Tile<T, kHead>::lane_of_columns(k_now));
      const Place<false> place{at.batch, at.head, first + warp_row + lane / 4,
                               block * kColumns + lane % 4 * 2};
      if constexpr (!kPlain) to_logits<T>(args, place, x, [](int, int, int, float) {});
      if (block * kColumns < bounds.full_start || (block + 1) * kColumns > bounds.full_stop) {
        mask_tile<kPlain>(args, extent, place, x);
      }
      softmax.take(x, multiplier, !kPlain && args.saves_rest(), acc);
      if constexpr (!kPlain) {
        if (args.dropout_seeds != nullptr) {
          const uint64_t keeps = kept<false, kRowTiles, kColumnTiles>(args, place);
          for_elements<kRowTiles, kColumnTiles>([&](int i, int j, int e) {
            if (!is_kept<kColumnTiles>(keeps, i, j, e)) x[i][j][e] = 0.0f;
          });
        }
      }
      Operand<T, kRowTiles, kColumnTiles> p;
      round_to_operand<T>(x, p);

      if (args.key_stages == 2) {
        async_copies_wait(1);
        __syncthreads();
      } else {
        async_copies_wait_all();
        __syncthreads();
        load_next_keys();
      }
      add_product<T, kHead, kRowTiles, kColumnTiles>(acc, p, v_lane);
    }

    float factor[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = softmax.total[i][half];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        const int query = first + warp_row + 16 * i + 8 * half + lane / 4;
        const bool is_empty = total == 0.0f || query >= extent.queries;
        factor[i][half] = is_empty ? 0.0f : 1.0f / (total * args.keep_probability);
        if (lane % 4 == 0 && query < args.query_count) {
          const int64_t row = int64_t{at.batch} * args.heads + at.head;
          const int64_t place = row * args.query_count + query;
          const float maximum = softmax.maximum[i][half], log = log2f(total);
          float lse = fmaf(maximum, multiplier, log) / kLog2e;
          if (!kPlain && args.saves_rest()) {
            lse = maximum + log / kLog2e;
            args.rest[place] = is_empty ? 0.0f : log - (lse - maximum) * kLog2e;
          }
          args.lse[place] = is_empty ? kEmptyLse : lse;
        }
      }
    }
    const auto out =
        head_of<T>(args.out, at.batch, at.head, args.heads, args.query_count, args.value_size);
    store_rows<T, kHead>(out, first + warp_row, q_smem, warp_row, acc, factor);
  }
}

template <typename T, int kHead, bool kPlain>
ffi::Error launch_forward(ForwardArgs args, const Device& device, cudaStream_t stream) {
  using Shape = ForwardShape<T, kHead, kPlain>;
  args.tiles = divide_up(args.query_count, Shape::kRows);
  // Under a causal mask the last queries have the most keys, so their tiles start first.
  args.descending = args.right < args.key_count;
  args.heads_together = args.descending ? 8 : 1;
  int64_t blocks = 0;
  RETURN_IF_ERROR(count_blocks(args, args.heads, &blocks));
  const auto kernel = attention_forward<T, kHead, kPlain>;
  RETURN_IF_ERROR(allow_shared_memory(kernel, device));
  args.key_stages = Shape::shared_bytes(2) <= device.shared_bytes ? 2 : 1;
  const int shared_bytes = Shape::shared_bytes(args.key_stages);
  return launch_kernel(kernel, args, {dim3(blocks), Shape::kThreads, shared_bytes}, stream);
}

ffi::Error attention_forward_handler(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k,
                                     ffi::AnyBuffer v, ffi::AnyBuffer bias,
                                     ffi::AnyBuffer explicit_mask, ffi::AnyBuffer query_lengths,
                                     ffi::AnyBuffer key_lengths, ffi::AnyBuffer query_offset,
                                     ffi::AnyBuffer query_segments, ffi::AnyBuffer key_segments,
                                     ffi::AnyBuffer key_bounds, ffi::AnyBuffer dropout_seeds,
                                     ffi::AnyBuffer sinks, ffi::Result<ffi::AnyBuffer> out,
                                     ffi::Result<ffi::AnyBuffer> lse, float scale, float soft_cap,
                                     int64_t left, int64_t right, int64_t dropout_threshold) {
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  ForwardArgs args = {};
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
  RETURN_IF_ERROR(check_like_queries("out", *out, q, args.value_size));
  const int numbers = args.saves_rest() ? 2 : 1;
  RETURN_IF_ERROR(check_shape("lse", *lse, {numbers * args.batch, args.heads, args.query_count}));
  RETURN_IF_ERROR(check_dtype("lse", *lse, ffi::DataType::F32));
  RETURN_IF_ERROR(check_optional("sinks", sinks, {args.heads}, ffi::DataType::F32));
  args.sinks = data_or_null<const float>(sinks);
  args.out = out->untyped_data();
  args.lse = static_cast<float*>(lse->untyped_data());
  args.rest = args.lse + int64_t{args.batch} * args.heads * args.query_count;
  return for_dtype_and_head(args, q.element_type(), [&](auto type, auto head) {
    using T = decltype(type);
    return args.is_plain() ? launch_forward<T, head.value, true>(args, device, stream)
                           : launch_forward<T, head.value, false>(args, device, stream);
  });
}

}  // namespace

DEFINE_HANDLER(jaxfused_attention_forward, attention_forward_handler,
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
                   .Arg<ffi::AnyBuffer>()  // sinks
                   .Ret<ffi::AnyBuffer>()  // out
                   .Ret<ffi::AnyBuffer>()  // lse
                   .Attr<float>("scale")
                   .Attr<float>("soft_cap")
                   .Attr<int64_t>("left")
                   .Attr<int64_t>("right")
                   .Attr<int64_t>("dropout_threshold"));
