// A sparse matrix in rows (CSR) times a dense one, with sums in float32 in the order of the
// entries.
//
// `csr_rows` gives each row of the result to a team of threads, which reads the rows of b that the
// row's entries name. What it reads grows with the entries. `csr_panels` has a block of 256 rows
// share b, which passes through shared memory whole, in panels of 128 rows: it reads b once for
// each block, which is less where a block's rows name most rows of b. It takes columns in rising
// order.
//
// Entries whose column lies outside of the matrix add nothing.
#pragma once

#include <climits>
#include <cstdint>

#include "common/ptx.cuh"
#include "common/rows.cuh"

struct CsrArgs {
  const int* starts;   // [rows + 1], the first entry of each row, and the end of the last
  const int* columns;  // [entries]
  const void* values;  // [entries]
  const void* b;       // [depth, width]
  void* y;             // [rows, width]
  int rows;
  int depth;
  int width;
  int lanes;  // threads of a row's team in csr_rows: a power of 2 up to 32
};

constexpr int kCsrThreads = 128;
constexpr int kTogether = 4;  // entries whose loads are in flight together

// Adds some columns of kCount rows of b, each times its value, to `sums`, in their order.
template <typename T, int kVec, int kVectors, int kCount>
__device__ __forceinline__ void add_rows(const CsrArgs& args, const int (&rows)[kCount],
                                         const float (&values)[kCount], int column, int stride,
                                         float (&sums)[kVectors][kVec]) {
  const T* b = static_cast<const T*>(args.b);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column + v * stride >= args.width) continue;
    Vector<T, kVec> parts[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      parts[n] = load_vector<T, kVec>(b + int64_t{rows[n]} * args.width + column + v * stride);
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      float part[kVec];
      unpack(parts[n], part);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sums[v][i] = fmaf(values[n], part[i], sums[v][i]);
    }
  }
}

template <typename T>
__device__ __forceinline__ float value_at(const CsrArgs& args, int entry) {
  float value[1];
  load_as_float<T>(args.values, entry, value);
  return value[0];
}

template <typename T, int kVec, int kVectors>
__global__ void __launch_bounds__(kCsrThreads) csr_rows(CsrArgs args) {
  const int teams = kCsrThreads / args.lanes;
  const int row = blockIdx.x * teams + threadIdx.x / args.lanes;
  if (row >= args.rows) return;
  const int stride = args.lanes * kVec;
  const int column = blockIdx.y * stride * kVectors + threadIdx.x % args.lanes * kVec;
  float sums[kVectors][kVec] = {};
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
    add_rows<T>(args, rows, values, column, stride, sums);
  }
  for (; entry < end; ++entry) {
    const int rows[1] = {args.columns[entry]};
    const float values[1] = {value_at<T>(args, entry)};
    if (static_cast<unsigned>(rows[0]) < static_cast<unsigned>(args.depth)) {
      add_rows<T>(args, rows, values, column, stride, sums);
    }
  }
  T* y = static_cast<T*>(args.y) + int64_t{row} * args.width;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column + v * stride < args.width) {
      Vector<T, kVec> out;
      pack(sums[v], out);
      store_vector(y + column + v * stride, out);
    }
  }
}

// --- panels of b ---------------------------------------------------------------------------------

constexpr int kPanelColumns = 128;  // of b, four for each lane of a warp
constexpr int kPanelWarps = 16;
constexpr int kPanelThreads = 32 * kPanelWarps;
constexpr int kWarpRows = 16;
constexpr int kPanelRows = kPanelWarps * kWarpRows;  // of the result, in a block
constexpr int kPanelStages = 2;
constexpr int kAhead = 4;  // entries of a row in a panel that are loaded together

template <typename T>
constexpr int kPanelDepth = 512 / sizeof(T);  // rows of b in a panel

template <typename T>
constexpr int kPanelBytes = kPanelDepth<T> * kPanelColumns * sizeof(T);

// Starts the copies of a panel of b, with zeros beyond its end.
template <typename T>
__device__ __forceinline__ void copy_panel(const CsrArgs& args, unsigned char* shared, int first,
                                           int column) {
  constexpr int kVec = 16 / sizeof(T);
  constexpr int kVectors = kPanelColumns / kVec;
  const uint32_t address = shared_address(shared);
  for (int i = threadIdx.x; i < kPanelDepth<T> * kVectors; i += kPanelThreads) {
    const int row = first + i / kVectors, at = column + i % kVectors * kVec;
    const bool exists = row < args.depth && at < args.width;
    const T* b = static_cast<const T*>(args.b);
    async_copy_or_zero(address + i * 16, exists ? b + int64_t{row} * args.width + at : b, exists);
  }
  async_copies_commit();
}

// The entries of one row that lie in a panel; each of a warp's first lanes has those of a row.
template <typename T>
struct PanelEntries {
  int next;  // the first entry that was not yet taken
  int end;
  int count = 0;  // of entries in the panel, which end before `next`
  int columns[kAhead];
  float values[kAhead];

  // Takes the entries with columns before `limit`.
  __device__ __forceinline__ void take(const CsrArgs& args, int limit) {
    count = 0;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      columns[i] = next + i < end ? args.columns[next + i] : INT_MAX;
      values[i] = columns[i] < limit ? value_at<T>(args, next + i) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) count += columns[i] < limit;
    if (count == kAhead) {
      while (next + count < end && args.columns[next + count] < limit) ++count;
    }
    next += count;
  }
};

template <typename T>
__device__ __forceinline__ void add_from_panel(const unsigned char* panel, int row, float value,
                                               float (&sums)[4]) {
  float part[4];
  const T* b = reinterpret_cast<const T*>(panel) + row * kPanelColumns;
  load_as_float<T, 4>(b, threadIdx.x % 32 * 4, part);
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = fmaf(value, part[i], sums[i]);
}

template <typename T>
__global__ void __launch_bounds__(kPanelThreads) csr_panels(CsrArgs args) {
  extern __shared__ __align__(16) unsigned char panels[];
  constexpr int kDepth = kPanelDepth<T>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_row = blockIdx.x * kPanelRows + warp * kWarpRows;
  const int column = blockIdx.y * kPanelColumns;
  const int own = first_row + lane;
  const bool has_row = lane < kWarpRows && own < args.rows;
  PanelEntries<T> entries;
  entries.next = has_row ? args.starts[own] : 0;
  entries.end = has_row ? args.starts[own + 1] : 0;
  // Negative columns, which come first, lie outside of the matrix.
  while (entries.next < entries.end && args.columns[entries.next] < 0) ++entries.next;
  float sums[kWarpRows][4] = {};
  const int count = (args.depth + kDepth - 1) / kDepth;
  copy_panel<T>(args, panels, 0, column);
  for (int index = 0; index < count; ++index) {
    unsigned char* panel = panels + index % kPanelStages * kPanelBytes<T>;
    const int first = index * kDepth;
    if (index + 1 < count) {
      copy_panel<T>(args, panels + (index + 1) % kPanelStages * kPanelBytes<T>, first + kDepth,
                    column);
      async_copies_wait(1);
    } else {
      async_copies_wait(0);
    }
    __syncthreads();
    entries.take(args, min(first + kDepth, args.depth));
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const int of_row = __shfl_sync(0xffffffffu, entries.count, r);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i >= of_row) break;
        const int at = __shfl_sync(0xffffffffu, entries.columns[i], r);
        const float value = __shfl_sync(0xffffffffu, entries.values[i], r);
        add_from_panel<T>(panel, at - first, value, sums[r]);
      }
      if (of_row > kAhead) {
        const int end = __shfl_sync(0xffffffffu, entries.next, r);
        for (int entry = end - of_row + kAhead; entry < end; ++entry) {
          add_from_panel<T>(panel, args.columns[entry] - first, value_at<T>(args, entry), sums[r]);
        }
      }
    }
    __syncthreads();
  }
  const int at = column + lane * 4;
  if (at >= args.width) return;
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    if (first_row + r < args.rows) {
      Vector<T, 4> out;
      pack(sums[r], out);
      store_vector(static_cast<T*>(args.y) + int64_t{first_row + r} * args.width + at, out);
    }
  }
}
