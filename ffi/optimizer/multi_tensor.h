// Parsing of the arrays of a parameter tree's leaves from a handler's operands.
#pragma once

#include <optional>
#include <string>

#include "common/handler.h"
#include "multi_tensor.cuh"

// Fills `leaves` from `arrays`, which has for each leaf one array (gradient, parameter, ...) per
// bit of `streams`. `results` must be the same buffers, in the same order, for the bits of
// `written` only. `coded` says which arrays are 8-bit codes or scales; nullptr means none.
inline ffi::Error parse_leaves(const ffi::RemainingArgs& arrays, const ffi::RemainingRets& results,
                               uint32_t streams, uint32_t written, ffi::Span<const int64_t> decays,
                               int tile, const Coded* coded, Leaves* leaves) {
  int per_leaf = 0, results_per_leaf = 0;
  for (int stream = 0; stream < kMaxStreams; ++stream) {
    per_leaf += has_stream(streams, stream);
    results_per_leaf += has_stream(streams & written, stream);
  }
  const size_t count = decays.size();
  if (count > kMaxLeaves) {
    return ffi::Error::InvalidArgument(std::to_string(count) + " leaves are more than the " +
                                       std::to_string(kMaxLeaves) + " of one launch");
  }
  if (arrays.size() != count * per_leaf || results.size() != count * results_per_leaf) {
    return ffi::Error::InvalidArgument(
        std::to_string(count) + " leaves have another number of arrays or results than " +
        std::to_string(arrays.size()) + " and " + std::to_string(results.size()));
  }
  leaves->streams = streams;
  leaves->count = static_cast<int>(count);
  int64_t tiles = 0;
  size_t next = 0, next_result = 0;
  for (size_t i = 0; i < count; ++i) {
    Leaf& leaf = leaves->leaves[i];
    leaf.first_tile = static_cast<uint32_t>(tiles);
    leaf.decays = decays[i] != 0;
    leaf.aligned = true;
    leaf.size = -1;
    for (int stream = 0; stream < kMaxStreams; ++stream) {
      if (!has_stream(streams, stream)) continue;
      const auto array = arrays.get<ffi::AnyBuffer>(next++);
      if (!array.has_value()) return array.error();
      const Coded kind = coded == nullptr ? Coded::kNo : coded[stream];
      const std::optional<Dtype> dtype = kind == Coded::kCodes ? Dtype::kFloat32 : dtype_of(*array);
      const std::string name = "array " + std::to_string(next - 1);
      if (!dtype) {
        return ffi::Error::InvalidArgument(name + " must be float32, bfloat16 or float16");
      }
      if (kind == Coded::kCodes && ffi::ByteWidth(array->element_type()) != 1) {
        return ffi::Error::InvalidArgument(name + " must have values of 8 bits");
      }
      if (kind == Coded::kScales) RETURN_IF_ERROR(check_dtype(name, *array, ffi::DataType::F32));
      if (i == 0) leaves->dtypes[stream] = *dtype;
      if (leaves->dtypes[stream] != *dtype) {
        return ffi::Error::InvalidArgument(name + " has another dtype than that of the first leaf");
      }
      const int64_t count_here = static_cast<int64_t>(array->element_count());
      const int64_t size = kind == Coded::kScales ? count_here * kBlockValues : count_here;
      if (leaf.size < 0) leaf.size = size;
      if (leaf.size != size) {
        return ffi::Error::InvalidArgument(name + " has another size than its leaf");
      }
      leaf.data[stream] = array->untyped_data();
      leaf.aligned = leaf.aligned && are_aligned({array->untyped_data()});
      if (!has_stream(written, stream)) continue;
      const auto result = results.get<ffi::AnyBuffer>(next_result++);
      if (!result.has_value()) return result.error();
      if ((*result)->untyped_data() != array->untyped_data()) {
        return ffi::Error::InvalidArgument(name + " is not updated in place");
      }
    }
    tiles += (leaf.size + tile - 1) / tile;
  }
  if (tiles > INT32_MAX) return ffi::Error::InvalidArgument("the leaves are too large");
  leaves->tiles = static_cast<uint32_t>(tiles);
  return ffi::Error::Success();
}
