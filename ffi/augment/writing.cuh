// Writes the pixels of a block's tile of a result to global memory.
#pragma once

#include "augment/steps.cuh"
#include "common/vector.cuh"

// 2^23. A byte added to it becomes the last bits of the float32 sum's mantissa.
constexpr float kBias = 8388608.0f;

// Returns the level nearest to a value, ties to even, plus kBias.
__device__ __forceinline__ float biased_level(float value) {
  return __fmul_rn(__saturatef(value), 255.0f) + kBias;
}

// Values of a thread in the result's dtype, as words.
template <typename Out, int kSize>
struct Words {
  static constexpr int kBytes = kSize * static_cast<int>(sizeof(Out));
  // The widest vectors that hold values of one thread only.
  using Part = std::conditional_t<kBytes % 16 == 0, uint4,
                                  std::conditional_t<kBytes % 8 == 0, uint2, uint32_t>>;
  union {
    uint32_t words[kBytes / 4];
    Part parts[kBytes / sizeof(Part)];
  };

  __device__ __forceinline__ explicit Words(const float* values) {
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) {
      if constexpr (std::is_same_v<Out, float>) {
        words[i] = __float_as_uint(values[i]);
      } else if constexpr (sizeof(Out) == 2) {
        Vector<Out, 2> pair;
        pack({values[2 * i], values[2 * i + 1]}, pair);
        words[i] = pair.values[0];
      } else {
        uint32_t levels[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) levels[k] = __float_as_uint(biased_level(values[4 * i + k]));
        words[i] = __byte_perm(__byte_perm(levels[0], levels[1], 0x40),
                               __byte_perm(levels[2], levels[3], 0x40), 0x5410);
      }
    }
  }
};

// A tile of a result.
struct Tile {
  int image, row, column;
  int rows, columns;  // size of the part inside the result
  char* first;        // first pixel of the tile

  __device__ explicit Tile(const Args& args) {
    image = args.tiles.quotient(blockIdx.x);
    const int tile = blockIdx.x - image * args.tiles.divisor();
    const int down = args.tiles_across.quotient(tile);
    row = down * kTile;
    column = (tile - down * args.tiles_across.divisor()) * kTile;
    rows = min(kTile, args.out_height - row);
    columns = min(kTile, args.out_width - column);
    const int64_t pixel = (int64_t{image} * args.out_height + row) * args.out_width + column;
    first = static_cast<char*>(args.y) + pixel * args.pixel_bytes;
  }
};

template <typename Out, int kChannels>
__device__ __forceinline__ void put(const float (&values)[kHeld][kChannels], int quad,
                                    uint4* stage) {
  using Mine = Words<Out, kPixels * kChannels>;
  using Part = typename Mine::Part;
  constexpr int kParts = sizeof(Mine) / sizeof(Part);
  const Mine mine(&values[quad * kPixels][0]);
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    reinterpret_cast<Part*>(stage)[threadIdx.x % 32 * kParts + i] = mine.parts[i];
  }
}

template <typename Unit>
__device__ __forceinline__ void copy(char* line, const char* staged, int bytes) {
  const int count = bytes / static_cast<int>(sizeof(Unit));
#pragma unroll 1
  for (int i = threadIdx.x % kQuads; i < count; i += kQuads) {
    reinterpret_cast<Unit*>(line)[i] = reinterpret_cast<const Unit*>(staged)[i];
  }
}

// Writes a warp's pixels. Every kQuads threads have two lines of the tile, which are staged in
// shared memory (`stage`) one after the other.
template <int kChannels>
__device__ __forceinline__ void write(const Args& args, const Tile& tile, int line, int lines_apart,
                                      const float (&values)[kHeld][kChannels], uint4* stage) {
  const int first =
      threadIdx.x % 32 / kQuads * kTile;  // first pixel of the thread's line in `stage`
  const char* staged = reinterpret_cast<const char*>(stage) + first * args.pixel_bytes;
  const int pitch = args.out_width * args.pixel_bytes;
#pragma unroll
  for (int quad = 0; quad < kHeld / kPixels; ++quad) {
    switch (args.out_type) {
      case Type::kUint8:
        put<uint8_t>(values, quad, stage);
        break;
      case Type::kFloat32:
        put<float>(values, quad, stage);
        break;
      case Type::kBfloat16:
        put<__nv_bfloat16>(values, quad, stage);
        break;
      case Type::kFloat16:
        put<__half>(values, quad, stage);
        break;
    }
    __syncwarp();
    const int at = line + quad * lines_apart;
    const int bytes = at < tile.rows ? tile.columns * args.pixel_bytes : 0;
    char* out = tile.first + int64_t{at} * pitch;
    switch (args.unit) {
      case 16:
        copy<uint4>(out, staged, bytes);
        break;
      case 4:
        copy<uint32_t>(out, staged, bytes);
        break;
      case 2:
        copy<uint16_t>(out, staged, bytes);
        break;
      default:
        copy<uint8_t>(out, staged, bytes);
    }
    __syncwarp();
  }
}
