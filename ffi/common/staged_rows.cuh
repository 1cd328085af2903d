// Long misaligned rows: a block copies a row to shared memory in the aligned 16-byte pieces around
// it. Then its threads read the columns one by one.
#pragma once

#include "ptx.cuh"
#include "vector.cuh"

// Position of a row of a matrix among aligned 16-byte pieces.
template <typename T>
struct RowPieces {
  static constexpr int kVec = 16 / sizeof(T);

  int64_t start;  // index of the row's first value
  int64_t first;  // index of its first piece's first value
  int64_t total;  // values of the matrix
  int shift;      // values between `first` and `start`
  int features;

  __device__ __forceinline__ RowPieces(int64_t row, int64_t rows, int features)
      : start(row * features),
        first(start / kVec * kVec),
        total(rows * features),
        shift(static_cast<int>(start - first)),
        features(features) {}

  // Returns the largest number of pieces that a row may touch.
  static __host__ __device__ int most(int features) { return (features + 2 * kVec - 2) / kVec; }

  __device__ __forceinline__ int count() const { return (shift + features + kVec - 1) / kVec; }
  // Returns the column of a piece's first value; it is negative if that lies before the row.
  __device__ __forceinline__ int column(int piece) const { return piece * kVec - shift; }
  // Whether the whole piece lies in the matrix, and so may be copied.
  __device__ __forceinline__ bool in_matrix(int piece) const {
    return first + int64_t{piece + 1} * kVec <= total;
  }
  __device__ __forceinline__ bool in_row(int piece) const {
    return column(piece) >= 0 && column(piece) + kVec <= features;
  }
  __device__ __forceinline__ bool has(int column) const {
    return static_cast<unsigned>(column) < static_cast<unsigned>(features);
  }

  // Loads a piece, with zeros beyond the end of the matrix.
  __device__ __forceinline__ Vector<T, kVec> load(const void* data, int piece) const {
    const T* const from = static_cast<const T*>(data) + first + int64_t{piece} * kVec;
    if (in_matrix(piece)) return load_streaming<T, kVec>(from);
    float values[kVec] = {};
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (first + int64_t{piece} * kVec + i >= total) continue;
      float one[1];
      unpack(load_vector<T, 1>(from + i), one);
      values[i] = one[0];
    }
    Vector<T, kVec> packed;
    pack(values, packed);
    return packed;
  }

  // Stores the values of a piece that belong to the row.
  __device__ __forceinline__ void store(void* data, int piece,
                                        const Vector<T, kVec>& values) const {
    T* const to = static_cast<T*>(data) + first + int64_t{piece} * kVec;
    if (in_row(piece)) {
      store_vector(to, values);
      return;
    }
    float wide[kVec];
    unpack(values, wide);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (!has(column(piece) + i)) continue;
      const float one[1] = {wide[i]};
      Vector<T, 1> packed;
      pack(one, packed);
      store_vector(to + i, packed);
    }
  }

  // Starts to copy a piece to shared memory; async_copies_wait waits for it.
  __device__ __forceinline__ void copy(T* shared, const void* data, int piece) const {
    if (in_matrix(piece)) {
      async_copy<16>(shared + piece * kVec,
                     static_cast<const T*>(data) + first + int64_t{piece} * kVec);
    } else {
      store_vector(shared + piece * kVec, load(data, piece));
    }
  }
};

// Loads one value of type T as float32.
template <typename T>
__device__ __forceinline__ float value_at(const T* data) {
  float value[1];
  unpack(load_vector<T, 1>(data), value);
  return value[0];
}

template <typename T>
__device__ __forceinline__ void store_value(T* data, float value) {
  const float values[1] = {value};
  Vector<T, 1> packed;
  pack(values, packed);
  store_vector(data, packed);
}
