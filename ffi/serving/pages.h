// Pages of a cache. A page has places for a number of tokens, and a sequence has one or more pages
// of the same array. A contiguous cache has one page for each sequence.
#pragma once

#include <cstdint>
#include <string>

#include "common/handler.h"

// Formats of a cache's values: floats of 16 or 32 bits, or 8 bits with scales.
enum class Kept : int32_t { kFloats, kInt8, kE4m3, kE5m2 };

// Strides between pages, between the tokens of a page, and between heads, in elements.
struct Strides {
  int64_t page;
  int64_t place;
  int64_t head;
};

// Returns the strides of pages [pages, places, heads, ...] or, with `heads_first`, [heads, pages,
// places, ...], with a last axis or without it.
inline Strides strides_of(ffi::AnyBuffer::Dimensions shape, bool heads_first) {
  const int64_t inner = shape.size() == 4 ? shape[3] : 1;
  if (heads_first) return {shape[2] * inner, inner, shape[1] * shape[2] * inner};
  return {shape[1] * shape[2] * inner, shape[2] * inner, inner};
}

inline ffi::Error check_integers(std::string_view name, const ffi::AnyBuffer& x,
                                 std::initializer_list<int64_t> shape) {
  RETURN_IF_ERROR(check_shape(name, x, shape));
  return check_dtype(name, x, ffi::DataType::S32);
}

// Checks a page table, [batch, pages]. Sets the most pages of a sequence: 1 without a table.
inline ffi::Error check_table(const ffi::AnyBuffer& table, int64_t batch, int64_t* most_pages) {
  *most_pages = 1;
  if (is_absent(table)) return ffi::Error::Success();
  if (table.dimensions().size() != 2) {
    return ffi::Error::InvalidArgument("table must have 2 axes");
  }
  *most_pages = table.dimensions()[1];
  return check_integers("table", table, {batch, *most_pages});
}

// Whether an array has values of 8 bits; float8 may be passed as uint8.
inline bool has_bytes(const ffi::AnyBuffer& x) {
  switch (x.element_type()) {
    case ffi::DataType::S8:
    case ffi::DataType::U8:
    case ffi::DataType::F8E4M3FN:
    case ffi::DataType::F8E5M2:
      return true;
    default:
      return false;
  }
}

// Returns the first page of layer *layer (0 if null); layers follow each other in the array. A
// negative index counts from the end. Returns -1 for a layer that does not exist.
__device__ __forceinline__ int first_page(const int* layer, int layer_pages, int layers) {
  if (layer == nullptr) return 0;
  const int number = *layer < 0 ? *layer + layers : *layer;
  return number < 0 || number >= layers ? -1 : number * layer_pages;
}
