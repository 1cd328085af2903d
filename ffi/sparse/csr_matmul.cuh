// A sparse matrix in rows (CSR) times a dense one, with sums in float32 in the order of the
// entries; the first entry of each row; and a dense copy of the matrix.
//
// A team of threads computes a slice of 256 bytes of a row of the product, from the rows of b that
// the row's entries name. The grid computes one slice of all rows before the next. Entries outside
// of the matrix add nothing.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/rows.cuh"

struct CsrArgs {
  const int* starts;   // first entry of each row, and the number of entries, [rows + 1]
  const int* columns;  // [entries]
  const void* values;  // [entries]
  const void* b;       // [depth, width]
  void* y;             // [rows, width]
  int entries;
  int rows;
  int depth;
  int width;
  int log_lanes;   // a team has 2^log_lanes threads, up to 32
  int is_aligned;  // whether columns and values start at multiples of 16 bytes
};

struct StartsArgs {
  const int* rows;  // [entries], or rows and columns, [entries, 2]
  int* starts;      // [count]
  int* columns;     // [entries], or nullptr where the columns are not given
  int entries;
  int count;   // rows of the matrix, and 1
  int stride;  // 1, or 2 for rows and columns
  int depth;   // columns of the matrix; negative ones count from the last
};

constexpr int kCsrThreads = 128;

// The entries of one row: `first` to `end - 1`, limited to entries that exist.
struct RowOfEntries {
  int first;
  int end;
};

__device__ __forceinline__ RowOfEntries entries_of(const int* starts, int row, int entries) {
  return {max(starts[row], 0), min(starts[row + 1], entries)};
}

// Loads the columns and values of kCount entries from `first` on, a multiple of kCount. Entries of
// other rows get column -1.
template <typename T, int kCount>
__device__ __forceinline__ void load_entries(const CsrArgs& args, const RowOfEntries& own,
                                             int first, int (&columns)[kCount],
                                             float (&values)[kCount]) {
  if (args.is_aligned && first <= args.entries - kCount) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const int4 four = *reinterpret_cast<const int4*>(args.columns + first + i);
      columns[i] = four.x, columns[i + 1] = four.y;
      columns[i + 2] = four.z, columns[i + 3] = four.w;
    }
    load_as_float<T>(args.values, first, values);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int entry = min(first + i, args.entries - 1);
      float value[1];
      columns[i] = args.columns[entry];
      load_as_float<T>(args.values, entry, value);
      values[i] = value[0];
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (first + i < own.first || first + i >= own.end) columns[i] = -1;
  }
}

// Zeros that take the place of a row of b for entries of another row or outside of the matrix.
__device__ const uint4 csr_zeros = {};

// kTogether: entries whose rows of b are loaded together, a multiple of 4.
template <typename T, int kVec, int kTogether>
__global__ void __launch_bounds__(kCsrThreads) csr_rows(CsrArgs args) {
  const int team = threadIdx.x >> args.log_lanes, rank = threadIdx.x - (team << args.log_lanes);
  const int row = blockIdx.x * (kCsrThreads >> args.log_lanes) + team;
  const int column = ((blockIdx.y << args.log_lanes) + rank) * kVec;
  if (row >= args.rows || column >= args.width) return;
  const char* b = reinterpret_cast<const char*>(static_cast<const T*>(args.b) + column);
  const uint32_t row_bytes = args.width * sizeof(T);
  const RowOfEntries own = entries_of(args.starts, row, args.entries);
  float sums[kVec] = {};
  // Groups begin at multiples of kTogether, so that their loads are aligned.
  const int begin = own.first < own.end ? own.first / kTogether * kTogether : own.end;
  for (int first = begin; first < own.end; first += kTogether) {
    int columns[kTogether];
    float values[kTogether];
    Vector<T, kVec> parts[kTogether];
    load_entries<T>(args, own, first, columns, values);
    bool all_exist = true;
#pragma unroll
    for (const int k : columns) {
      all_exist = all_exist && static_cast<unsigned>(k) < static_cast<unsigned>(args.depth);
    }
    // The branch makes nvcc issue all loads before the sums, instead of sums between them.
    if (all_exist) {
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        parts[n] =
            load_vector<T, kVec>(b + uint64_t{static_cast<uint32_t>(columns[n])} * row_bytes);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const bool exists = static_cast<unsigned>(columns[n]) < static_cast<unsigned>(args.depth);
        const void* part = b + uint64_t{static_cast<uint32_t>(columns[n])} * row_bytes;
        parts[n] = load_vector<T, kVec>(exists ? part : &csr_zeros);
        values[n] = exists ? values[n] : 0.0f;
      }
    }
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      float part[kVec];
      unpack(parts[n], part);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sums[i] = fmaf(values[n], part[i], sums[i]);
    }
  }
  Vector<T, kVec> out;
  pack(sums, out);
  store_vector(static_cast<T*>(args.y) + int64_t{row} * args.width + column, out);
}

// Finds the first entry of each row, where rows never decrease: a warp for each number of `starts`
// divides the range that holds it by 33 in each step. All threads copy the columns first.
__global__ void __launch_bounds__(kCsrThreads) row_starts(StartsArgs args) {
  const int64_t thread = int64_t{blockIdx.x} * kCsrThreads + threadIdx.x;
  const int64_t row = int64_t{blockIdx.x} * (kCsrThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (args.columns != nullptr) {
    const int64_t threads = int64_t{gridDim.x} * kCsrThreads;
    for (int64_t entry = thread; entry < args.entries; entry += threads) {
      const int column = args.rows[2 * entry + 1];
      args.columns[entry] = column < 0 ? column + args.depth : column;
    }
  }
  if (row >= args.count) return;
  int low = 0, high = args.entries;  // the first entry of `row` or more is in [low, high]
  while (low < high) {
    const int step = (high - low + 32) / 33;
    const int at = low + (lane + 1) * step - 1;
    const bool is_before = at < high && args.rows[int64_t{at} * args.stride] < row;
    const int passed = __popc(__ballot_sync(0xffffffffu, is_before));
    low += passed * step;
    if (passed < 32) high = min(high, low + step - 1);
  }
  if (lane == 0) args.starts[row] = low;
}

constexpr int kDenseThreads = 256;
constexpr int kDenseBytes = 16384;  // of a row, in shared memory

// Writes the matrix with its zeros, [rows, depth]. No two entries may have one place.
template <typename T, int kVec>
__global__ void __launch_bounds__(kDenseThreads) dense_rows(CsrArgs args) {
  constexpr int kPart = kDenseBytes / sizeof(T);
  __shared__ uint4 memory[kDenseBytes / 16];
  T* numbers = reinterpret_cast<T*>(memory);
  const int row = blockIdx.x, first = blockIdx.y * kPart;
  const int count = min(kPart, args.depth - first);
  const RowOfEntries own = entries_of(args.starts, row, args.entries);
  for (int i = threadIdx.x; i < kDenseBytes / 16; i += kDenseThreads) {
    memory[i] = {};
  }
  __syncthreads();
  for (int entry = own.first + threadIdx.x; entry < own.end; entry += kDenseThreads) {
    const int64_t at = int64_t{args.columns[entry]} - first;
    if (at >= 0 && at < count) numbers[at] = static_cast<const T*>(args.values)[entry];
  }
  __syncthreads();
  T* out = static_cast<T*>(args.y) + int64_t{row} * args.depth + first;
  for (int i = threadIdx.x * kVec; i < count; i += kDenseThreads * kVec) {
    store_vector(out + i, load_vector<T, kVec>(numbers + i));
  }
}
