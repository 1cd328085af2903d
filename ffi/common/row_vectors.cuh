// The vectors of a row that may start anywhere in memory.
//
// Threads access vectors that start at multiples of 16 bytes, so the first and the last vector of a
// row may also hold values of adjacent rows.
#pragma once

#include <cstdint>

// The vectors that overlap a row. The first one holds `shift` values before the row.
template <int kVec>
struct RowVectors {
  int64_t first;
  int shift;
  int count;
  int inner;        // first vector that holds only the row
  unsigned inners;  // number of vectors that hold only the row

  __device__ RowVectors(int64_t row, int features) {
    const int64_t start = row * features;
    first = start / kVec;
    shift = static_cast<int>(start - first * kVec);
    count = (shift + features - 1) / kVec + 1;
    inner = shift == 0 ? 0 : 1;
    inners = max((shift + features) / kVec - inner, 0);
  }

  __device__ __forceinline__ int column(int j) const { return j * kVec - shift; }

  // Whether vector `j` holds only values of the row.
  __device__ __forceinline__ bool is_inner(int j) const {
    return static_cast<unsigned>(j - inner) < inners;
  }
};

// Returns the largest number of vectors that overlap one row.
inline int most_vectors(int64_t features, int vec) {
  return static_cast<int>(features % vec == 0 ? features / vec : (features + vec - 2) / vec + 1);
}
