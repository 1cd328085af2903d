// Shared by the handlers of attention: checks of operands, and dispatch by dtype and head size.
#pragma once

#include "attention.cuh"
#include "common/handler.h"

// Bytes of shared memory of one block on Turing, which has the least of all supported GPUs.
constexpr int kLittleSharedMemory = 64 * 1024;

// Limits of a length (positions) and of heads times head size (values of a position), so that sums
// of two lengths, offsets in a tile of logits, and a position's bytes fit an int.
constexpr int64_t kMaxLength = int64_t{1} << 24;
constexpr int64_t kMaxRowValues = int64_t{1} << 29;
// Tiles of float32 with larger heads would not fit into the shared memory of most GPUs.
constexpr int kLargestHeadOfFloat32 = 128;

struct AttentionOperands {
  const ffi::AnyBuffer& q;
  const ffi::AnyBuffer& k;
  const ffi::AnyBuffer& v;
  const ffi::AnyBuffer& bias;
  const ffi::AnyBuffer& explicit_mask;
  const ffi::AnyBuffer& query_lengths;
  const ffi::AnyBuffer& key_lengths;
  const ffi::AnyBuffer& query_offset;
  const ffi::AnyBuffer& query_segments;
  const ffi::AnyBuffer& key_segments;
  const ffi::AnyBuffer& key_bounds;
  const ffi::AnyBuffer& dropout_seeds;
};

struct AttentionOptions {
  float scale;
  float soft_cap;             // 0 means no cap
  int64_t left, right;        // -1 means no limit
  int64_t dropout_threshold;  // probability of dropout in units of 1/65536
};

inline ffi::Error check_optional(std::string_view name, const ffi::AnyBuffer& buffer,
                                 std::initializer_list<int64_t> shape, ffi::DataType dtype) {
  if (is_absent(buffer)) return ffi::Error::Success();
  RETURN_IF_ERROR(check_shape(name, buffer, shape));
  return check_dtype(name, buffer, dtype);
}

// Checks that a buffer is [B, T, N, size] of the dtype of q.
inline ffi::Error check_like_queries(std::string_view name, const ffi::AnyBuffer& buffer,
                                     const ffi::AnyBuffer& q, int64_t size) {
  const auto like = q.dimensions();
  RETURN_IF_ERROR(check_shape(name, buffer, {like[0], like[1], like[2], size}));
  return check_dtype(name, buffer, q.element_type());
}

inline ffi::Error parse_logits_operand(std::string_view name, const ffi::AnyBuffer& buffer,
                                       const AttentionArgs& args, LogitsOperand* operand) {
  if (is_absent(buffer)) return ffi::Error::Success();
  const int64_t full[] = {args.batch, args.heads, args.query_count, args.key_count};
  const auto dimensions = buffer.dimensions();
  bool fits = dimensions.size() == 4;
  int64_t stride = 1;
  for (int axis = 3; fits && axis >= 0; --axis) {
    fits = dimensions[axis] == 1 || dimensions[axis] == full[axis];
    operand->strides[axis] = dimensions[axis] == 1 ? 0 : stride;
    stride *= dimensions[axis];
  }
  if (!fits) {
    return ffi::Error::InvalidArgument(std::string(name) + " has shape " + to_string(dimensions) +
                                       ", which does not broadcast to the logits");
  }
  operand->data = buffer.untyped_data();
  return ffi::Error::Success();
}

inline ffi::Error parse_attention(const AttentionOperands& operands,
                                  const AttentionOptions& options, AttentionArgs* args) {
  const auto& [q, k, v, bias, explicit_mask, query_lengths, key_lengths, query_offset,
               query_segments, key_segments, key_bounds, dropout_seeds] = operands;
  const bool is_float32 = q.element_type() == ffi::DataType::F32;
  if (q.element_type() != ffi::DataType::BF16 && q.element_type() != ffi::DataType::F16 &&
      !is_float32) {
    return ffi::Error::InvalidArgument("q must be float32, bfloat16 or float16");
  }
  int id = 0, major = 0;
  RETURN_IF_ERROR(check_cuda(cudaGetDevice(&id), "cudaGetDevice"));
  RETURN_IF_ERROR(check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id),
                             "cudaDeviceGetAttribute"));
  if (major < 8 && q.element_type() != ffi::DataType::F16) {
    return ffi::Error::InvalidArgument("q must be float16 before compute capability 8.0");
  }
  for (const auto& [name, buffer] :
       {std::pair<const char*, const ffi::AnyBuffer&>{"q", q}, {"k", k}, {"v", v}}) {
    const auto dimensions = buffer.dimensions();
    const int largest = is_float32 ? kLargestHeadOfFloat32 : 256;
    if (dimensions.size() != 4 || buffer.element_count() == 0 || dimensions[3] % 8 != 0 ||
        dimensions[3] > largest || dimensions[1] > kMaxLength ||
        dimensions[2] * dimensions[3] >= kMaxRowValues) {
      return ffi::Error::InvalidArgument(
          std::string(name) + " has shape " + to_string(dimensions) +
          ", but it needs axes batch, length, heads, head size, none of them empty, a head size "
          "that is a multiple of 8 up to " +
          std::to_string(largest) +
          ", a length up to 2^24 and less than 2^29 values of a position");
    }
    if (!are_aligned({buffer.untyped_data()})) {
      return ffi::Error::InvalidArgument(std::string(name) + " does not start at 16 bytes");
    }
  }
  const auto queries = q.dimensions(), keys = k.dimensions();
  if (queries[2] % keys[2] != 0) {
    return ffi::Error::InvalidArgument("q has " + std::to_string(queries[2]) +
                                       " heads, which is no multiple of k's " +
                                       std::to_string(keys[2]));
  }
  RETURN_IF_ERROR(check_shape("k", k, {queries[0], keys[1], keys[2], queries[3]}));
  RETURN_IF_ERROR(check_dtype("k", k, q.element_type()));
  RETURN_IF_ERROR(check_shape("v", v, {queries[0], keys[1], keys[2], v.dimensions()[3]}));
  RETURN_IF_ERROR(check_dtype("v", v, q.element_type()));
  args->q = q.untyped_data();
  args->k = k.untyped_data();
  args->v = v.untyped_data();
  args->batch = static_cast<int>(queries[0]);
  args->query_count = static_cast<int>(queries[1]);
  args->heads = static_cast<int>(queries[2]);
  args->head_size = static_cast<int>(queries[3]);
  args->key_count = static_cast<int>(keys[1]);
  args->key_heads = static_cast<int>(keys[2]);
  args->value_size = static_cast<int>(v.dimensions()[3]);

  args->scale = options.scale;
  args->soft_cap = options.soft_cap;
  const auto limit = [](int64_t asked) {
    return asked < 0 ? kNoLimit : static_cast<int>(std::min<int64_t>(asked, kNoLimit));
  };
  args->left = limit(options.left);
  args->right = limit(options.right);

  constexpr auto kInt32 = ffi::DataType::S32;
  RETURN_IF_ERROR(check_optional("query_lengths", query_lengths, {args->batch}, kInt32));
  RETURN_IF_ERROR(check_optional("key_lengths", key_lengths, {args->batch}, kInt32));
  RETURN_IF_ERROR(check_optional("query_offset", query_offset, {args->batch}, kInt32));
  args->query_lengths = data_or_null<const int>(query_lengths);
  args->key_lengths = data_or_null<const int>(key_lengths);
  args->query_offset = data_or_null<const int>(query_offset);
  if (!is_absent(query_segments)) {
    const int64_t blocks = divide_up(args->query_count, kSegmentBlock);
    RETURN_IF_ERROR(
        check_optional("query_segments", query_segments, {args->batch, args->query_count}, kInt32));
    RETURN_IF_ERROR(check_shape("key_segments", key_segments, {args->batch, args->key_count}));
    RETURN_IF_ERROR(check_dtype("key_segments", key_segments, kInt32));
    RETURN_IF_ERROR(check_shape("key_bounds", key_bounds, {args->batch, blocks, 4}));
    RETURN_IF_ERROR(check_dtype("key_bounds", key_bounds, kInt32));
    args->query_segments = static_cast<const int*>(query_segments.untyped_data());
    args->key_segments = static_cast<const int*>(key_segments.untyped_data());
    args->key_bounds = static_cast<const int4*>(key_bounds.untyped_data());
  }
  RETURN_IF_ERROR(parse_logits_operand("bias", bias, *args, &args->bias));
  if (!is_absent(bias) && bias.element_type() != ffi::DataType::F32) {
    RETURN_IF_ERROR(check_dtype("bias", bias, q.element_type()));
  }
  args->is_bias_float32 = bias.element_type() == ffi::DataType::F32;
  RETURN_IF_ERROR(
      parse_logits_operand("explicit_mask", explicit_mask, *args, &args->explicit_mask));
  if (!is_absent(explicit_mask)) {
    RETURN_IF_ERROR(check_dtype("explicit_mask", explicit_mask, ffi::DataType::S8));
  }
  if (options.dropout_threshold < 0 || options.dropout_threshold > 65535) {
    return ffi::Error::InvalidArgument("dropout_threshold must be in 0 .. 65535");
  }
  RETURN_IF_ERROR(check_optional("dropout_seeds", dropout_seeds, {2, args->batch, args->heads},
                                 ffi::DataType::U32));
  args->dropout_seeds = data_or_null<const uint32_t>(dropout_seeds);
  args->dropout_threshold = static_cast<uint32_t>(options.dropout_threshold);
  args->keep_probability = 1.0f - static_cast<float>(options.dropout_threshold) / 65536.0f;
  return ffi::Error::Success();
}

// Counts the blocks of a launch over args.tiles tiles of each of `heads` heads.
inline ffi::Error count_blocks(const AttentionArgs& args, int heads, int64_t* blocks) {
  *blocks = int64_t{args.tiles} * args.batch * heads;
  if (*blocks <= INT32_MAX) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("there are too many sequences and heads for one launch");
}

// Calls `f` with a value of the C++ type of `dtype` and, as a constant, the smallest compiled head
// size that holds the heads. Only three sizes are compiled, to keep the library small.
template <typename F>
ffi::Error for_dtype_and_head(const AttentionArgs& args, ffi::DataType dtype, const F& f) {
  const int size = std::max(args.head_size, args.value_size);
  if (dtype == ffi::DataType::F32) {
    if (size <= 64) return f(float{}, std::integral_constant<int, 64>{});
    return f(float{}, std::integral_constant<int, kLargestHeadOfFloat32>{});
  }
  const auto for_head = [&](auto type) {
    if (size <= 64) return f(type, std::integral_constant<int, 64>{});
    if (size <= 128) return f(type, std::integral_constant<int, 128>{});
    return f(type, std::integral_constant<int, 256>{});
  };
  return dtype == ffi::DataType::F16 ? for_head(__half{}) : for_head(__nv_bfloat16{});
}
