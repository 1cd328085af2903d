// A sparse matrix in rows (CSR) times a dense one, with sums in float32 in the order of the
// entries.
//
// A team of up to 32 threads computes some columns of a row of the result, and reads the rows of b
// to which the row's entries point. The first columns of all rows are computed before the next
// columns, so that these columns of b stay in L2. Entries outside of the matrix add nothing.
#pragma once

#include <cstdint>

#include "common/rows.cuh"

struct CsrArgs {
  const int* starts;   // first entry of each row, and the number of entries, [rows + 1]
  const int* columns;  // [entries]
  const void* values;  // [entries]
  const void* b;       // [depth, width]
  void* y;             // [rows, width]
  int rows;
  int depth;
  int width;
  int lanes;  // threads of a team: a power of 2 up to 32
};

constexpr int kCsrThreads = 128;
constexpr int kTogether = 4;  // entries whose loads are in flight together

// Adds kCount rows of b, each times its entry's value, to `sums`, of the kVec columns from `column`
// on, in the order of the entries.
template <typename T, int kVec, int kCount>
__device__ __forceinline__ void add_rows(const CsrArgs& args, const int (&rows)[kCount],
                                         const float (&values)[kCount], int column,
                                         float (&sums)[kVec]) {
  const T* b = static_cast<const T*>(args.b) + column;
  Vector<T, kVec> parts[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    parts[n] = load_vector<T, kVec>(b + int64_t{rows[n]} * args.width);
  }
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    float part[kVec];
    unpack(parts[n], part);
#pragma unroll
    for (int i = 0; i < kVec; ++i) sums[i] = fmaf(values[n], part[i], sums[i]);
  }
}

template <typename T>
__device__ __forceinline__ float value_at(const CsrArgs& args, int entry) {
  float value[1];
  load_as_float<T>(args.values, entry, value);
  return value[0];
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kCsrThreads) csr_rows(CsrArgs args) {
  const int teams = kCsrThreads / args.lanes;
  const int row = blockIdx.x * teams + threadIdx.x / args.lanes;
  const int column = (blockIdx.y * args.lanes + threadIdx.x % args.lanes) * kVec;
  if (row >= args.rows || column >= args.width) return;
  float sums[kVec] = {};
  const int end = args.starts[row + 1];
  int entry = args.starts[row];
  for (; entry + kTogether <= end; entry += kTogether) {
    int rows[kTogether];
    float values[kTogether];
    bool exist = true;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      rows[i] = args.columns[entry + i];
      values[i] = value_at<T>(args, entry + i);
      exist = exist && static_cast<unsigned>(rows[i]) < static_cast<unsigned>(args.depth);
    }
    if (!exist) break;
    add_rows<T>(args, rows, values, column, sums);
  }
  for (; entry < end; ++entry) {
    const int rows[1] = {args.columns[entry]};
    const float values[1] = {value_at<T>(args, entry)};
    if (static_cast<unsigned>(rows[0]) < static_cast<unsigned>(args.depth)) {
      add_rows<T>(args, rows, values, column, sums);
    }
  }
  Vector<T, kVec> out;
  pack(sums, out);
  store_vector(static_cast<T*>(args.y) + int64_t{row} * args.width + column, out);
}
