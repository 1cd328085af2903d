// A product of few rows of x with quantised weights that go from global memory to registers.
//
// A warp has 16 columns for each of its column tiles and every so many lines of 128 bytes of them.
// Nothing passes through shared memory and no warp waits for another one before its sums are there,
// so that all threads of a multiprocessor together keep 16 bytes for each of their registers' rows
// on the way. x is read from the caches, in the order in which a thread's weights lie.
#pragma once

#include <cstdint>
#include <type_traits>

#include "quantized_place.cuh"
#include "quantized_weights.cuh"

constexpr int kLineBytes = 128;  // of a column's weights, that a warp takes one after the other
constexpr int kPieceBytes = 64;  // of them that the four threads of a row load at a time

// Loads 16 bytes that nobody reads again; the L2 cache fetches the line around them.
__device__ __forceinline__ uint4 load_once(const uint8_t* global) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(global));
  return value;
}

template <typename T, Weights kWeights, bool kGroups, int kRowTiles, int kColumnTiles>
class Stream {
  using Conversion = Converter<T, kWeights>;
  static constexpr int kPiece = kPieceBytes * (kWeights == Weights::kInt4 ? 2 : 1);  // features
  static constexpr int kColumns = 2 * kColumnTiles;  // of a thread, 8 apart
  // Scales take registers too.
  static constexpr int kLoads = kRowTiles >= 4 ? 4 : kGroups ? 8 - 2 * kRowTiles : 8;
  static constexpr int kStages = kLoads / kColumnTiles < 2 ? 2 : kLoads / kColumnTiles;

  // What a thread has loaded of a piece of its columns.
  struct Loaded {
    uint4 values[kColumns];
    float scales[kGroups ? kColumns : 1];
  };

 public:
  __device__ Stream(const LinearArgs& args, const BlockPlace& place)
      : args_(args),
        values_(place.second ? args.values[1] : args.values[0]),
        scale_(place.second ? args.scale[1] : args.scale[0]),
        pieces_of_group_(kGroups ? args.group / kPiece : 1),
        q_(place.lane % 4),
        g_(place.lane / 4),
        first_column_(place.warp_column + g_),
        last_column_(place.columns - 1),
        sum_warp_(place.sum_warp) {
    // Of rows that do not exist it reads the last one, as nobody reads their sums.
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const int row = place.row_start + min(tile * 8 + g_, place.rows - 1);
      x_[tile] = static_cast<const T*>(args.x) + static_cast<int64_t>(row) * args.features;
    }
  }

  __device__ __forceinline__ void run() {
    const int lines = (args_.row_bytes + kLineBytes - 1) / kLineBytes;
    const int own = (lines - sum_warp_ + args_.sum_warps - 1) / args_.sum_warps;
    const int pieces = own * (kLineBytes / kPieceBytes);
    Loaded ring[kStages];
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) load(ring[stage], stage, pieces);
    for (int first = 0; first < pieces; first += kStages) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        if (first + stage >= pieces) continue;
        multiply(ring[stage], place_of(first + stage));
        load(ring[stage], first + stage + kStages, pieces);
      }
    }
  }

  // Writes the sums to shared memory.
  __device__ __forceinline__ void store(const BlockPlace& place, float* found) const {
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          found[place.place_of_sum(tile * 8 + 2 * q_ + i % 2, column * 16 + g_ + i / 2 * 8)] =
              kGroups ? sums_[column][tile][i] : of_group_[column][tile][i];
        }
      }
    }
  }

 private:
  // Returns the first byte of a row in the warp's piece of this number.
  __device__ __forceinline__ int place_of(int piece) const {
    constexpr int kPieces = kLineBytes / kPieceBytes;
    const int line = piece / kPieces * args_.sum_warps + sum_warp_;
    return line * kLineBytes + piece % kPieces * kPieceBytes;
  }

  // What lies beyond the last column or the last feature is something else instead, as those
  // columns are not stored and there x is 0.
  __device__ __forceinline__ void load(Loaded& to, int piece, int pieces) const {
    if (piece >= pieces) return;
    const int start = place_of(piece);
    const int from = min(start + q_ * 16, args_.row_bytes - 16);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = min(first_column_ + i * 8, last_column_);
      to.values[i] = load_once(values_ + static_cast<int64_t>(column) * args_.row_bytes + from);
      if constexpr (kGroups) {
        const int number = min(start, args_.row_bytes - kPieceBytes) / kPieceBytes;
        const int group = pieces_of_group_ == 1 ? number : number / pieces_of_group_;
        to.scales[i] = scale_[static_cast<int64_t>(group) * (last_column_ + 1) + column];
      }
    }
  }

  __device__ __forceinline__ void multiply(const Loaded& loaded, int start) {
    const int feature = start / kPieceBytes * kPiece;
#pragma unroll
    for (int chunk = 0; chunk < kPiece / kChunk; ++chunk) {
      uint32_t b[kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) load_x(x_[tile], feature, chunk, b[tile]);
#pragma unroll
      for (int column = 0; column < kColumnTiles; ++column) {
        uint32_t upper[4], lower[4];
        convert(loaded.values[2 * column], chunk, upper);
        convert(loaded.values[2 * column + 1], chunk, lower);
        const uint32_t first[4] = {upper[0], lower[0], upper[1], lower[1]};
        const uint32_t last[4] = {upper[2], lower[2], upper[3], lower[3]};
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          multiply_add<T>(of_group_[column][tile], first, b[tile][0], b[tile][1]);
          multiply_add<T>(of_group_[column][tile], last, b[tile][2], b[tile][3]);
        }
      }
    }
    if constexpr (kGroups) {
#pragma unroll
      for (int column = 0; column < kColumnTiles; ++column) {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& sum = sums_[column][tile][i];
            sum = fmaf(loaded.scales[2 * column + i / 2], of_group_[column][tile][i], sum);
            of_group_[column][tile][i] = 0.0f;
          }
        }
      }
    }
  }

  // Loads what the thread needs of a row of x in a chunk, in the order of its weights.
  __device__ __forceinline__ void load_x(const T* from, int feature, int chunk,
                                         uint32_t (&b)[4]) const {
    if constexpr (kWeights == Weights::kInt4) {
      const int own = min(feature, args_.features - kPiece) + chunk * kChunk + q_ * 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = *reinterpret_cast<const uint32_t*>(from + own + i * 8);
      if (feature >= args_.features) b[0] = b[1] = b[2] = b[3] = 0;
    } else {
      const int own = feature + q_ * 16 + chunk * 8;
      uint4 found = *reinterpret_cast<const uint4*>(from + min(own, args_.features - 8));
      if (own >= args_.features) found = {};
      b[0] = found.x, b[1] = found.y, b[2] = found.z, b[3] = found.w;
    }
  }

  __device__ __forceinline__ void convert(const uint4& values, int chunk,
                                          uint32_t (&out)[4]) const {
    const uint32_t all[4] = {values.x, values.y, values.z, values.w};
    if constexpr (kWeights == Weights::kInt4) {
      const uint32_t words[1] = {all[chunk]};
      Conversion::convert(words, Conversion::offset(0), args_.code, out);
    } else {
      const uint32_t words[2] = {all[2 * chunk], all[2 * chunk + 1]};
      if constexpr (std::is_same_v<Conversion, Converter<__nv_bfloat16, Weights::kInt8>>) {
        Conversion::convert(words, args_.code, out);
      } else {
        Conversion::convert(words, Conversion::offset(0), args_.code, out);
      }
    }
  }

  const LinearArgs& args_;
  const uint8_t* values_;
  const float* scale_;
  const T* x_[kRowTiles];  // a row of each
  int pieces_of_group_;
  int q_, g_;
  int first_column_, last_column_, sum_warp_;
  float sums_[kGroups ? kColumnTiles : 1][kRowTiles][4] = {};  // of groups that have ended
  float of_group_[kColumnTiles][kRowTiles][4] = {};            // of the group so far, or of all
};
