// Depthwise convolution on tensor cores, with stride 1 and values of 16 bits.
//
// For one channel and one row of its kernel, a convolution along the columns of an image is a
// product with a banded matrix: 16 adjacent columns of the input times
//     band[k, n] = weight[k - n] where 0 <= k - n < width of the kernel, else 0
// are 8 adjacent columns of the output, for kernels of up to 9 columns. A block is 8 columns of
// kPhases rows of the output, and a tile has 16 blocks, adjacent or in several images. A
// tensor-core product multiplies the same row of all 16 blocks' input windows by the band. Row p of
// a window contributes to the output rows (phases) p, p - 1, ... of its block, so its fragment is
// loaded once for all rows of the kernel.
//
// In memory the channels of a pixel are contiguous, while a product needs contiguous columns of a
// channel. So a tile's input is transposed on its way to shared memory, where each channel has a
// plane of rows. A warp computes a channel at a time and replaces its plane by the results:
// rounded, or in float32 if a residual is still to be added. They are transposed back when stored.
//
// The gradient of the weights (wgrad) multiplies 16 columns of x by 8 columns of dy over the 16
// blocks of a tile. Sums along the diagonals of that 16 x 8 product are the gradient of a row of
// the kernel. A thread block keeps them in registers over its tiles and writes its sums, which the
// caller adds in the order of the thread blocks.

#include <cmath>

#include "common/mma.cuh"
#include "common/vector.cuh"
#include "depthwise_conv.h"

// On Turing the kernels are empty, so the functions that they call are unused.
#pragma nv_diag_suppress 177

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kBlocks = 16;       // blocks of a tile
constexpr int kBlockColumns = 8;  // output columns of a block
constexpr int kBandColumns = 16;  // input columns of a block
constexpr int kGranule = 16;      // bytes of 8 values of a plane, one row of an 8 x 8 matrix
constexpr int kMostColumns = kBandColumns + 1 - kBlockColumns;  // limit on the columns of a kernel

constexpr int kOctets = 2;  // groups of 8 channels in a thread block
constexpr int kChannels = 8 * kOctets;
// Threads that copy the same channels, each one quad (four columns) at a time.
constexpr int kSlots = kThreads / kOctets;
// Extra bytes between the planes of the two octets, because adjacent lanes store the same column of
// both, which must be in different banks.
constexpr int kSkew = 128 / kOctets;
// Quads (four columns of eight channels) of the next tile that a thread copies ahead of time.
constexpr int kRounds = 3;
constexpr int kRequestedBytes = kRounds * 4 * kThreads * 16;

// Sizes known at compile time: rows of a kernel and of a block. With kRequestsAhead, a thread block
// copies the input of its next tile ahead, if that is small enough for shared memory.
template <int kKernelRows, int kBlockRows, bool kRequestsAhead>
struct Size {
  static constexpr int kHeight = kKernelRows, kPhases = kBlockRows;
  static constexpr bool kAhead = kRequestsAhead;
  static constexpr int kRows = kPhases + kHeight - 1;  // input rows of a block
  // Bytes between two blocks' sums. The odd number of rows spreads eight blocks over all banks.
  static constexpr int kSumsPitch = (kPhases | 1) * kBlockColumns * 4;
  static constexpr int kGradientPitch = (kPhases | 1) * kGranule;
  static_assert(kSumsPitch == 2 * kGradientPitch);
  // Bytes of a channel's plane, which holds the input of a tile and then its results.
  static constexpr int kPlane = kBlocks * kSumsPitch + (kAhead ? 0 : 256);
  static constexpr int kPlanesBytes = kChannels * kPlane + kOctets * kSkew;
  // Quads (four columns) of a tile's output, for each channel.
  static constexpr int kQuadsOut = kBlocks * kPhases * 2;
};

// Division of the output into tiles, and the layout of a plane of a tile's input.
struct Tiling {
  int images, row_bits, column_bits;  // the blocks of a tile: images * 2^row_bits * 2^column_bits
  int down, across, count;            // tiles down and across an image, and of all images
  int first, rows;                    // input rows of a tile that may contain non-zeros
  // Bytes between rows, padding after each block's rows, and bytes between images in a plane.
  int row_pitch, pad, image_pitch;

  // Returns the quads (four columns) of a tile's input, rounded up to whole 8 x 8 matrices.
  __host__ __device__ int quads_in() const { return images * rows * (row_pitch / 8); }
};

struct ConvArgs {
  ConvOperands operands;
  Tiling tiling;
  int width;           // columns of the kernel
  int channel_groups;  // thread blocks of a tile, each with kChannels channels
};

struct WeightsArgs : WeightsOperands {  // each worker (blocks of the same tiles) has its own sums
  Tiling tiling;
  int width, channel_groups;
};

// First image, row and column of a tile in the output.
struct Place {
  int image, row, column;

  template <typename S>
  static __device__ __forceinline__ Place at(const Tiling& tiling, int tile) {
    const int rest = tile / tiling.across;
    return {rest / tiling.down * tiling.images,
            (rest % tiling.down << tiling.row_bits) * S::kPhases,
            (tile % tiling.across << tiling.column_bits) * kBlockColumns};
  }
};

// --- to and from planes --------------------------------------------------------------------------

// Returns the offset, in bytes of a channel's plane, of the first value of a block's input window
// (kBandColumns columns of S::kRows rows).
template <typename S>
__device__ __forceinline__ int block_offset(const Tiling& tiling, int block) {
  const int row = block & ((1 << tiling.row_bits) - 1);
  const int column = block >> tiling.row_bits & ((1 << tiling.column_bits) - 1);
  const int image = block >> (tiling.row_bits + tiling.column_bits);
  return image * tiling.image_pitch + row * (S::kPhases * tiling.row_pitch + tiling.pad) +
         column * kGranule;
}

// Returns the offset in bytes of row `row` of an input window from the window's beginning.
template <typename S>
__device__ __forceinline__ int row_offset(const Tiling& tiling, int row) {
  return (row - tiling.first) * tiling.row_pitch + row / S::kPhases * tiling.pad;
}

// The copies of one thread: eight adjacent channels, four columns (a quad) at a time.
struct Part {
  int octet, slot;
  int channel;  // first of the eight channels
  bool exists;  // whether the image has the thread's channels

  __device__ __forceinline__ Part(const ConvShape& shape, int first_channel)
      : octet(threadIdx.x % kOctets),
        slot(threadIdx.x / kOctets),
        channel(first_channel + octet * 8),
        exists(channel < shape.channels) {}
};

// A quad: the position of four adjacent columns in a tile and in a plane, packed in a word. A
// thread block lists its quads once for all its tiles.
class Quad {
 public:
  __device__ __forceinline__ explicit Quad(uint32_t word) : word_(word) {}
  __device__ __forceinline__ Quad(int image, int row, int quad, int place)
      : word_(static_cast<uint32_t>(image << 28 | row << 20 | quad << 14 | place)) {}

  __device__ __forceinline__ uint32_t word() const { return word_; }
  __device__ __forceinline__ int image() const { return word_ >> 28; }
  __device__ __forceinline__ int row() const { return word_ >> 20 & 255; }
  __device__ __forceinline__ int column() const { return word_ >> 12 & 252; }
  __device__ __forceinline__ int place() const { return word_ & 16383; }

 private:
  uint32_t word_;
};

// Lists the quads of a tile's input, with their offsets in a plane in units of 8 bytes.
template <typename S>
__device__ __forceinline__ void list_input(const Tiling& tiling, uint32_t* quads) {
  const int of_row = tiling.row_pitch / 8;
  for (int i = threadIdx.x; i < tiling.quads_in(); i += kThreads) {
    const int line = i / of_row, quad = i % of_row;
    const int image = line / tiling.rows, row = line % tiling.rows + tiling.first;
    const int place = (image * tiling.image_pitch + row_offset<S>(tiling, row)) / 8 + quad;
    quads[i] = Quad(image, row, quad, place).word();
  }
}

// Lists the quads of a tile's output, with offsets in units of 16 bytes (float32 sums) or 8 (dy).
template <typename S>
__device__ __forceinline__ void list_output(const Tiling& tiling, uint32_t* quads) {
  for (int i = threadIdx.x; i < S::kQuadsOut; i += kThreads) {
    const int block = i / (2 * S::kPhases), phase = i / 2 % S::kPhases, quad = i % 2;
    const int row = block & ((1 << tiling.row_bits) - 1);
    const int column = block >> tiling.row_bits & ((1 << tiling.column_bits) - 1);
    const int image = block >> (tiling.row_bits + tiling.column_bits);
    quads[i] = Quad(image, row * S::kPhases + phase, column * 2 + quad,
                    block * (S::kSumsPitch / 16) + phase * 2 + quad)
                   .word();
  }
}

// Hides from the compiler how a value was computed, so that it is not computed again at each use.
template <typename V>
__device__ __forceinline__ V held(V value) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(V) == 8) {
    asm("" : "+l"(value));
  } else {
    asm("" : "+r"(value));
  }
#endif
  return value;
}

// A tile's view of images with channels last, from a lane's first channel on.
template <typename T>
class View {
 public:
  // The view has only the first `columns` columns of the tile.
  __device__ __forceinline__ View(T* data, int images, int height, int width, int channels,
                                  const Place& place, int columns)
      : data_(data),
        pitch_(held(channels * static_cast<int>(sizeof(T)))),
        image_pitch_(height * width),
        row_pitch_(width),
        images_(held(images - place.image)),
        row_(max(-place.row, 0)),
        rows_(held(max(height - place.row - row_, 0))),
        column_(held(max(-place.column, 0))),
        columns_(held(max(min(width - place.column, columns) - column_, 0))) {
    const int pixel = (place.image * height + place.row) * width + place.column;
    first_ = held(static_cast<int64_t>(pixel) * pitch_);
  }

  __device__ __forceinline__ bool has_row(const Quad& quad) const {
    return quad.image() < images_ &&
           static_cast<unsigned>(quad.row() - row_) < static_cast<unsigned>(rows_);
  }
  __device__ __forceinline__ bool has_column(const Quad& quad, int i) const {
    return static_cast<unsigned>(quad.column() - column_ + i) < static_cast<unsigned>(columns_);
  }
  // Returns the byte offset of a quad's first column.
  __device__ __forceinline__ int64_t at(const Quad& quad) const {
    const int pixel = quad.image() * image_pitch_ + quad.row() * row_pitch_ + quad.column();
    return first_ + static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(pitch_)) *
                                         static_cast<uint32_t>(pixel));
  }
  __device__ __forceinline__ T* at(int64_t first, int i) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return reinterpret_cast<T*>(reinterpret_cast<Byte*>(data_) + first + i * pitch_);
  }

 private:
  T* data_;
  int64_t first_;  // byte offset of the tile's first pixel, which may lie outside the images
  int pitch_;      // bytes of a pixel
  int image_pitch_, row_pitch_;
  int images_, row_, rows_, column_, columns_;
};

template <typename T>
__device__ __forceinline__ View<T> output_view(T* data, const ConvShape& shape,
                                               const Place& place) {
  return View<T>(data, shape.images, shape.out_height, shape.out_width, shape.channels, place,
                 INT32_MAX);
}

// Quads that a thread has in flight at a time.
constexpr int kBatch = 2;

// Calls `use(quad, columns)` for a thread's quads of the list, with its eight channels of the four
// columns. Pixels outside the images are zeros.
template <typename T, typename F>
__device__ __forceinline__ void load_quads(const View<const T>& view, const uint32_t* quads,
                                           int count, const Part& part, const F& use) {
#pragma unroll 1
  for (int first = part.slot; first < count; first += kBatch * kSlots) {
    Vector<T, 8> columns[kBatch][4];
    uint32_t words[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = first + i * kSlots;
      words[i] = index < count ? quads[index] : 0;
      const Quad quad(words[i]);
      const bool inside = index < count && view.has_row(quad);
      const int64_t first_column = view.at(quad);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        columns[i][j] = {};
        if (inside && view.has_column(quad, j)) {
          columns[i][j] = load_vector<T, 8>(view.at(first_column, j));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * kSlots < count) use(Quad(words[i]), columns[i]);
    }
  }
}

// Stores eight channels of a quad to the channels' planes.
template <int kPlane, typename T>
__device__ __forceinline__ void scatter(char* to, const Vector<T, 8> (&columns)[4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t half = i % 2 == 0 ? 0x5410 : 0x7632;
    *reinterpret_cast<uint2*>(to + i * kPlane) =
        make_uint2(__byte_perm(columns[0].values[i / 2], columns[1].values[i / 2], half),
                   __byte_perm(columns[2].values[i / 2], columns[3].values[i / 2], half));
  }
}

template <typename T>
__device__ __forceinline__ View<const T> input_view(const T* data, const ConvShape& shape,
                                                    const Tiling& tiling, const Place& place,
                                                    int width) {
  return View<const T>(data, shape.images, shape.height, shape.width, shape.channels,
                       {place.image, place.row - shape.top, place.column - shape.left},
                       (kBlockColumns << tiling.column_bits) + width - 1);
}

// Transposes the input of a tile into planes.
template <typename T, typename S>
__device__ __forceinline__ void load_input(const Tiling& tiling, const ConvShape& shape,
                                           const void* x, const Place& place, int width,
                                           const uint32_t* quads, const Part& part, char* planes) {
  if (!part.exists) return;
  const T* const data = static_cast<const T*>(x) + part.channel;
  char* const own = planes + part.octet * (8 * S::kPlane + kSkew);
  load_quads<T>(input_view(data, shape, tiling, place, width), quads, tiling.quads_in(), part,
                [&](const Quad& quad, const Vector<T, 8>(&columns)[4]) {
                  scatter<S::kPlane>(own + quad.place() * 8, columns);
                });
}

// Returns the shared address of a vector that this thread copies ahead.
__device__ __forceinline__ uint32_t requested_at(uint32_t requested, int round, int column) {
  return requested + ((round * 4 + column) * kThreads + threadIdx.x) * 16;
}

// Starts the copies of a tile's input. Each thread copies the vectors that it transposes itself.
template <typename T>
__device__ __forceinline__ void request_input(const Tiling& tiling, const ConvShape& shape,
                                              const void* x, const Place& place, int width,
                                              const uint32_t* quads, const Part& part,
                                              uint32_t requested) {
  if (!part.exists) return;
  const T* const data = static_cast<const T*>(x) + part.channel;
  const View<const T> view = input_view(data, shape, tiling, place, width);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int index = part.slot + i * kSlots;
    if (index >= tiling.quads_in()) continue;
    const Quad quad(quads[index]);
    const bool inside = view.has_row(quad);
    const int64_t first = view.at(quad);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool exists = inside && view.has_column(quad, j);
      const T* const from = exists ? view.at(first, j) : data;
      async_copy_or_zero<true>(requested_at(requested, i, j), from, exists);
    }
  }
}

// Waits for the copies of request_input, and transposes them into planes.
template <typename T, typename S>
__device__ __forceinline__ void transpose_input(const Tiling& tiling, const uint32_t* quads,
                                                const Part& part, uint32_t requested,
                                                char* planes) {
  async_copies_wait_all();
  if (!part.exists) return;
  char* const own = planes + part.octet * (8 * S::kPlane + kSkew);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int index = part.slot + i * kSlots;
    if (index >= tiling.quads_in()) continue;
    Vector<T, 8> columns[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      reinterpret_cast<uint4&>(columns[j]) = load_shared_16(requested_at(requested, i, j));
    }
    scatter<S::kPlane>(own + Quad(quads[index]).place() * 8, columns);
  }
}

// --- convolution ---------------------------------------------------------------------------------

// The weights of a thread block's channels in shared memory. A lane's part of the band is two
// adjacent weights, which begin at an odd or even column and are in one word:
//     [channel, kernel row, odd, 6], where word j has the weights 2 j - odd and the next one,
// and the last word is zero, for the lanes outside the band.
template <typename T, typename S>
struct Band {
  static constexpr int kWords = kMostColumns / 2 + 2;
  static constexpr int kBytes = kChannels * S::kHeight * 2 * kWords * 4;

  static __device__ __forceinline__ void fill(const ConvArgs& args, int first_channel,
                                              uint32_t* words) {
    const ConvOperands& operands = args.operands;
    const int channels = operands.shape.channels;
    const auto* const weights = static_cast<const uint16_t*>(operands.weights.data) + first_channel;
#pragma unroll 2
    for (int i = threadIdx.x; i < kBytes / 4; i += kThreads) {
      const int channel = i % kChannels, rest = i / kChannels;
      const int word = rest % kWords, odd = rest / kWords % 2, row = rest / (2 * kWords);
      uint32_t both = 0;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = 2 * word - odd + j;
        if (column < 0 || column >= args.width || first_channel + channel >= channels) continue;
        const int tap = row * args.width + column;
        const int from = operands.turned ? S::kHeight * args.width - 1 - tap : tap;
        both |= static_cast<uint32_t>(weights[static_cast<int64_t>(from) * channels + channel])
                << (16 * j);
      }
      words[((channel * S::kHeight + row) * 2 + odd) * kWords + word] = both;
    }
  }

  // Loads a lane's part of a channel's bands, one for each row of the kernel.
  static __device__ __forceinline__ void load(const uint32_t* words, int channel,
                                              uint32_t (&band)[S::kHeight][2]) {
    const int g = threadIdx.x % 32 / 4, first = threadIdx.x % 4 * 2 - g;  // first + g is even
    const uint32_t* const own = words + channel * S::kHeight * 2 * kWords + g % 2 * kWords;
    const auto word = [&](int weight) {
      return weight < -1 || weight >= kMostColumns ? kWords - 1 : (weight + g % 2) / 2;
    };
    const int upper = word(first), lower = word(first + 8);
#pragma unroll
    for (int row = 0; row < S::kHeight; ++row) {
      band[row][0] = own[row * 2 * kWords + upper];
      band[row][1] = own[row * 2 * kWords + lower];
    }
  }
};

// Adds one channel's convolution, over a tile's 16 blocks, to `sums`. `window` is the shared
// address that this lane gives to ldmatrix. With kSome, it skips window rows that are outside the
// image.
template <typename T, typename S, bool kSome>
__device__ __forceinline__ void convolve(const Tiling& tiling, uint32_t window,
                                         const uint32_t (&band)[S::kHeight][2],
                                         float (&sums)[S::kPhases][4]) {
#pragma unroll
  for (int row = 0; row < S::kRows; ++row) {
    if (kSome && (row < tiling.first || row >= tiling.first + tiling.rows)) continue;
    uint32_t a[4];
    load_matrices(a, window + row_offset<S>(tiling, row));
#pragma unroll
    for (int phase = 0; phase < S::kPhases; ++phase) {
      const int kernel_row = row - phase;
      if (kernel_row < 0 || kernel_row >= S::kHeight) continue;
      multiply_add<T>(sums[phase], a, band[kernel_row][0], band[kernel_row][1]);
    }
  }
}

template <typename T, typename S>
__device__ __forceinline__ void add_residual(const ConvArgs& args, const Place& place,
                                             const uint32_t* quads, const Part& part,
                                             char* planes) {
  if (!part.exists) return;
  const T* const residual = static_cast<const T*>(args.operands.residual) + part.channel;
  char* const own = planes + part.octet * (8 * S::kPlane + kSkew);
  load_quads<T>(output_view(residual, args.operands.shape, place), quads, S::kQuadsOut, part,
                [&](const Quad& quad, const Vector<T, 8>(&columns)[4]) {
                  float values[4][8];
#pragma unroll
                  for (int i = 0; i < 4; ++i) unpack(columns[i], values[i]);
                  char* const sums = own + quad.place() * 16;
#pragma unroll
                  for (int i = 0; i < 8; ++i) {
                    float4& four = *reinterpret_cast<float4*>(sums + i * S::kPlane);
                    four = make_float4(four.x + values[0][i], four.y + values[1][i],
                                       four.z + values[2][i], four.w + values[3][i]);
                  }
                });
}

// Stores a tile's sums and their activation. Each thread stores the elements to which it added the
// residual, so that no barrier is needed.
template <typename T, typename S>
__device__ __forceinline__ void store_output(const ConvArgs& args, const Place& place,
                                             const uint32_t* quads, const Part& part,
                                             const char* planes) {
  const ConvOperands& operands = args.operands;
  if (!part.exists) return;
  const char* const own = planes + part.octet * (8 * S::kPlane + kSkew);
  const auto y = output_view(static_cast<T*>(operands.y) + part.channel, operands.shape, place);
  const auto z = output_view(static_cast<T*>(operands.z) + part.channel, operands.shape, place);
#pragma unroll 1
  for (int i = part.slot; i < S::kQuadsOut; i += kSlots) {
    const Quad quad(quads[i]);
    if (!y.has_row(quad)) continue;
    float sums[4][8];
    const char* const from = own + quad.place() * 16;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float4 four = *reinterpret_cast<const float4*>(from + j * S::kPlane);
      sums[0][j] = four.x;
      sums[1][j] = four.y;
      sums[2][j] = four.z;
      sums[3][j] = four.w;
    }
    const auto store = [&](const View<T>& view) {
      const int64_t first = view.at(quad);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Vector<T, 8> octet;
        pack(sums[j], octet);
        if (view.has_column(quad, j)) store_vector(view.at(first, j), octet);
      }
    };
    if (operands.z != nullptr) store(z);
    if (operands.activation != Activation::kNone) {
      activate(operands.activation, reinterpret_cast<float (&)[32]>(sums));
    }
    store(y);
  }
}

// Stores a tile's results, which are already rounded, from planes laid out like those of dy.
template <typename T, typename S>
__device__ __forceinline__ void store_rounded(const ConvArgs& args, const Place& place,
                                              const uint32_t* quads, const Part& part,
                                              const char* planes) {
  const ConvOperands& operands = args.operands;
  if (!part.exists) return;
  const char* const own = planes + part.octet * (8 * S::kPlane + kSkew);
  const auto y = output_view(static_cast<T*>(operands.y) + part.channel, operands.shape, place);
#pragma unroll 2
  for (int i = part.slot; i < S::kQuadsOut; i += kSlots) {
    const Quad quad(quads[i]);
    if (!y.has_row(quad)) continue;
    uint2 channels[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      channels[j] = *reinterpret_cast<const uint2*>(own + quad.place() * 8 + j * S::kPlane);
    }
    const int64_t first = y.at(quad);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t half = j % 2 == 0 ? 0x5410 : 0x7632;
      Vector<T, 8> octet;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint2 &low = channels[2 * k], &high = channels[2 * k + 1];
        octet.values[k] =
            j < 2 ? __byte_perm(low.x, high.x, half) : __byte_perm(low.y, high.y, half);
      }
      if (y.has_column(quad, j)) store_vector(y.at(first, j), octet);
    }
  }
}

// With kPlain there is neither a residual nor z (y before its activation), and the sums are rounded
// before they are transposed. Otherwise they stay in float32, and the residual is added to them.
template <typename T, typename S, bool kPlain>
__global__ void __launch_bounds__(kThreads, S::kAhead || S::kPhases > 7 ? 2 : 3)
    depthwise_conv_mma_kernel(const __grid_constant__ ConvArgs args) {
  extern __shared__ uint4 shared[];
  if constexpr (kHasProducts<__nv_bfloat16>) {
    const Tiling& tiling = args.tiling;
    const ConvShape& shape = args.operands.shape;
    uint32_t* const words = reinterpret_cast<uint32_t*>(shared);
    uint32_t* const quads_out = words + Band<T, S>::kBytes / 4;
    char* const planes = reinterpret_cast<char*>(quads_out + S::kQuadsOut);
    char* const requested = planes + S::kPlanesBytes;
    auto* const quads_in =
        reinterpret_cast<uint32_t*>(requested + (S::kAhead ? kRequestedBytes : 0));
    const int first_channel = blockIdx.x % args.channel_groups * kChannels;
    const int worker = blockIdx.x / args.channel_groups;
    const int workers = gridDim.x / args.channel_groups;
    Band<T, S>::fill(args, first_channel, words);
    list_input<S>(tiling, quads_in);
    list_output<S>(tiling, quads_out);
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, q = lane % 4;
    // Offset of the row of a matrix whose address this lane passes to ldmatrix.
    const int window = block_offset<S>(tiling, lane % 16) + lane / 16 * kGranule;
    const Part part(shape, first_channel);
    const auto request = [&](int tile) {
      if (tile >= tiling.count) return;
      request_input<T>(tiling, shape, args.operands.x, Place::at<S>(tiling, tile), args.width,
                       quads_in, part, shared_address(requested));
    };
    if constexpr (S::kAhead) request(worker);
#pragma unroll 1
    for (int tile = worker; tile < tiling.count; tile += workers) {
      const Place place = Place::at<S>(tiling, tile);
      if constexpr (S::kAhead) {
        transpose_input<T, S>(tiling, quads_in, part, shared_address(requested), planes);
        request(tile + workers);
      } else {
        load_input<T, S>(tiling, shape, args.operands.x, place, args.width, quads_in, part, planes);
      }
      __syncthreads();
#pragma unroll 1
      for (int channel = warp; channel < kChannels; channel += kWarps) {
        if (first_channel + channel >= shape.channels) break;
        char* const plane = planes + channel * S::kPlane + channel / 8 * kSkew;
        uint32_t band[S::kHeight][2];
        Band<T, S>::load(words, channel, band);
        float bias[1];
        load_or_zero(args.operands.bias, first_channel + channel, bias);
        float sums[S::kPhases][4];
#pragma unroll
        for (int phase = 0; phase < S::kPhases; ++phase) {
#pragma unroll
          for (float& sum : sums[phase]) sum = bias[0];
        }
        const uint32_t address = shared_address(plane) + window;
        if (tiling.row_bits == 0 && tiling.rows < S::kRows) {
          convolve<T, S, true>(tiling, address, band, sums);
        } else {
          convolve<T, S, false>(tiling, address, band, sums);
        }
        __syncwarp();
        if constexpr (kPlain) {
          if (args.operands.activation != Activation::kNone) {
            activate(args.operands.activation, reinterpret_cast<float (&)[S::kPhases * 4]>(sums));
          }
          char* const to = plane + g * S::kGradientPitch + q * 4;
#pragma unroll
          for (int phase = 0; phase < S::kPhases; ++phase) {
            char* const upper = to + phase * kGranule;
            *reinterpret_cast<uint32_t*>(upper) = rounded_pair<T>(sums[phase][0], sums[phase][1]);
            *reinterpret_cast<uint32_t*>(upper + 8 * S::kGradientPitch) =
                rounded_pair<T>(sums[phase][2], sums[phase][3]);
          }
        } else {
          char* const to = plane + g * S::kSumsPitch + q * 8;
#pragma unroll
          for (int phase = 0; phase < S::kPhases; ++phase) {
            char* const upper = to + phase * (kBlockColumns * 4);
            *reinterpret_cast<float2*>(upper) = make_float2(sums[phase][0], sums[phase][1]);
            *reinterpret_cast<float2*>(upper + 8 * S::kSumsPitch) =
                make_float2(sums[phase][2], sums[phase][3]);
          }
        }
      }
      __syncthreads();
      if constexpr (kPlain) {
        store_rounded<T, S>(args, place, quads_out, part, planes);
      } else {
        if (args.operands.residual != nullptr) {
          add_residual<T, S>(args, place, quads_out, part, planes);
        }
        store_output<T, S>(args, place, quads_out, part, planes);
      }
      __syncthreads();
    }
  }
}

// --- gradient of the weights ---------------------------------------------------------------------

// Transposes a tile of dy into planes, block after block.
template <typename T, typename S>
__device__ __forceinline__ void load_gradient(const WeightsArgs& args, const Place& place,
                                              const uint32_t* quads, const Part& part,
                                              char* planes) {
  constexpr int kPlane = kBlocks * S::kGradientPitch;
  if (!part.exists) return;
  const T* const dy = static_cast<const T*>(args.dy) + part.channel;
  char* const own = planes + part.octet * (8 * kPlane + kSkew);
  load_quads<T>(output_view(dy, args.shape, place), quads, S::kQuadsOut, part,
                [&](const Quad& quad, const Vector<T, 8>(&columns)[4]) {
                  scatter<kPlane>(own + quad.place() * 8, columns);
                });
}

// Adds one channel's products of x and dy to `bands`, one for each row of the kernel, and its sums
// of dy to `total`. `window` (in x) and `gradient` (in dy) are this lane's addresses for ldmatrix.
template <typename T, typename S, bool kSome>
__device__ __forceinline__ void multiply(const Tiling& tiling, uint32_t window, uint32_t gradient,
                                         float (&bands)[S::kHeight][4], float (&total)[4]) {
  constexpr uint32_t kOnes = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;
  const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
  uint32_t dy[(S::kPhases + 1) / 2][4];  // fragments of two phases each
#pragma unroll
  for (int i = 0; i < (S::kPhases + 1) / 2; ++i) {
    load_transposed(dy[i], gradient + 2 * i * kGranule);
  }
#pragma unroll
  for (int row = 0; row < S::kRows; ++row) {
    if (row < S::kPhases) {
      multiply_add<T>(total, ones, dy[row / 2][row % 2 * 2], dy[row / 2][row % 2 * 2 + 1]);
    }
    if (kSome && (row < tiling.first || row >= tiling.first + tiling.rows)) continue;
    uint32_t x[4];
    load_transposed(x, window + row_offset<S>(tiling, row));
#pragma unroll
    for (int phase = 0; phase < S::kPhases; ++phase) {
      const int kernel_row = row - phase;
      if (kernel_row < 0 || kernel_row >= S::kHeight) continue;
      multiply_add<T>(bands[kernel_row], x, dy[phase / 2][phase % 2 * 2],
                      dy[phase / 2][phase % 2 * 2 + 1]);
    }
  }
}

// Bytes of a channel's products in float32, whose diagonals are summed in shared memory.
template <typename S>
constexpr int kBandsBytes = (S::kHeight * kBandColumns + 1) * kBlockColumns * 4;

// Writes a channel's gradients of the weights (sums along diagonals) and of the bias.
template <typename S>
__device__ __forceinline__ void write_sums(const WeightsArgs& args, int worker, int channel,
                                           const float (&bands)[S::kHeight][4],
                                           const float (&total)[4], float* own) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  __syncwarp();
#pragma unroll
  for (int row = 0; row < S::kHeight; ++row) {
    float* const band = own + row * kBandColumns * kBlockColumns + g * kBlockColumns + 2 * q;
    *reinterpret_cast<float2*>(band) = make_float2(bands[row][0], bands[row][1]);
    *reinterpret_cast<float2*>(band + 8 * kBlockColumns) =
        make_float2(bands[row][2], bands[row][3]);
  }
  float* const last = own + S::kHeight * kBandColumns * kBlockColumns;
  if (g == 0) *reinterpret_cast<float2*>(last + 2 * q) = make_float2(total[0], total[1]);
  __syncwarp();
  if (channel >= args.shape.channels) return;
  const int taps = S::kHeight * args.width;
  for (int tap = lane; tap <= taps; tap += 32) {
    const int row = tap / args.width, column = tap % args.width;
    const float* const from =
        own + row * kBandColumns * kBlockColumns + (tap < taps ? column * kBlockColumns : 0);
    const int step = tap < taps ? kBlockColumns + 1 : 1;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlockColumns; ++i) sum += from[i * step];
    args.sums[(static_cast<int64_t>(worker) * (taps + 1) + tap) * args.shape.channels + channel] =
        sum;
  }
}

// Bytes of the planes of dy. The last fragment of a plane may reach one row beyond its end.
template <typename S>
constexpr int kGradientsBytes =
    kChannels * kBlocks * S::kGradientPitch + kOctets * kSkew + kGranule;

template <typename T, typename S>
__global__ void __launch_bounds__(kThreads, 2)
    depthwise_conv_mma_weights_kernel(const __grid_constant__ WeightsArgs args) {
  extern __shared__ uint4 shared[];
  if constexpr (kHasProducts<__nv_bfloat16>) {
    constexpr int kOwn = kChannels / kWarps;  // channels of a warp
    constexpr int kGradientPlane = kBlocks * S::kGradientPitch;
    const Tiling& tiling = args.tiling;
    uint32_t* const quads_out = reinterpret_cast<uint32_t*>(shared);
    char* const planes = reinterpret_cast<char*>(quads_out + S::kQuadsOut);
    char* const gradients = planes + S::kPlanesBytes;
    auto* const quads_in = reinterpret_cast<uint32_t*>(gradients + kGradientsBytes<S>);
    const int first_channel = blockIdx.x % args.channel_groups * kChannels;
    const int worker = blockIdx.x / args.channel_groups;
    const int workers = gridDim.x / args.channel_groups;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int window = block_offset<S>(tiling, lane % 8 + lane / 16 * 8) + lane / 8 % 2 * kGranule;
    const int gradient = (lane % 16) * S::kGradientPitch + lane / 16 * kGranule;
    const Part part(args.shape, first_channel);
    float bands[kOwn][S::kHeight][4] = {}, total[kOwn][4] = {};
    list_input<S>(tiling, quads_in);
    list_output<S>(tiling, quads_out);
    __syncthreads();
#pragma unroll 1
    for (int tile = worker; tile < tiling.count; tile += workers) {
      const Place place = Place::at<S>(tiling, tile);
      load_gradient<T, S>(args, place, quads_out, part, gradients);
      load_input<T, S>(tiling, args.shape, args.x, place, args.width, quads_in, part, planes);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int channel = warp + i * kWarps, skew = channel / 8 * kSkew;
        const uint32_t x = shared_address(planes + channel * S::kPlane + skew) + window;
        const uint32_t dy = shared_address(gradients + channel * kGradientPlane + skew) + gradient;
        if (tiling.row_bits == 0 && tiling.rows < S::kRows) {
          multiply<T, S, true>(tiling, x, dy, bands[i], total[i]);
        } else {
          multiply<T, S, false>(tiling, x, dy, bands[i], total[i]);
        }
      }
      __syncthreads();
    }
    float* const own = reinterpret_cast<float*>(planes + warp * kBandsBytes<S>);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      write_sums<S>(args, worker, first_channel + warp + i * kWarps, bands[i], total[i], own);
    }
  }
}

// --- launch --------------------------------------------------------------------------------------

// Tiling of the output that the caller asks for.
struct Config {
  int64_t block_rows, images, blocks_down, blocks_across;
};

// Returns the exponent of a power of two up to 16, or -1 for any other number.
int bits_of(int64_t number) {
  for (int bits = 0; bits <= 4; ++bits) {
    if (number == int64_t{1} << bits) return bits;
  }
  return -1;
}

// Returns the bank conflicts of reading a tile: the largest number of 16-byte rows in the same
// banks, for each half of the tile's 16 blocks, and summed over both.
int conflicts(const Tiling& tiling, int row_step) {
  int found = 0;
  for (int half = 0; half < 2; ++half) {
    int rows[8] = {};
    for (int i = 0; i < 8; ++i) {
      const int block = half * 8 + i;
      const int row = block & ((1 << tiling.row_bits) - 1);
      const int column = block >> tiling.row_bits & ((1 << tiling.column_bits) - 1);
      const int image = block >> (tiling.row_bits + tiling.column_bits);
      const int bytes =
          image * tiling.image_pitch + row * (row_step + tiling.pad) + column * kGranule;
      ++rows[bytes / kGranule % 8];
    }
    found += *std::max_element(rows, rows + 8);
  }
  return found;
}

template <typename S>
ffi::Error plan_tiling(const ConvShape& shape, int64_t width, const Config& config,
                       Tiling* tiling) {
  if (shape.channels % 8 != 0) {
    return ffi::Error::InvalidArgument("depthwise_conv_mma: channels must be a multiple of 8");
  }
  tiling->row_bits = bits_of(config.blocks_down);
  tiling->column_bits = bits_of(config.blocks_across);
  const int image_bits = bits_of(config.images);
  if (tiling->row_bits < 0 || tiling->column_bits < 0 || image_bits < 0 ||
      tiling->row_bits + tiling->column_bits + image_bits != 4) {
    return ffi::Error::InvalidArgument(
        "depthwise_conv_mma: a tile must have 16 blocks, in powers of two");
  }
  if (width < 1 || width > kMostColumns) {
    return ffi::Error::InvalidArgument("depthwise_conv_mma: a kernel must have 1 to " +
                                       std::to_string(kMostColumns) + " columns");
  }
  const int rows = static_cast<int>(config.blocks_down) * S::kPhases;
  const int columns = static_cast<int>(config.blocks_across) * kBlockColumns;
  tiling->images = static_cast<int>(config.images);
  tiling->down = divide_up(shape.out_height, rows);
  tiling->across = divide_up(shape.out_width, columns);
  const double count =
      std::ceil(double(shape.images) / tiling->images) * tiling->down * double(tiling->across);
  if (count > INT32_MAX / 2) {
    return ffi::Error::InvalidArgument("depthwise_conv_mma: x is too large");
  }
  tiling->count = static_cast<int>(count);
  tiling->first = 0;
  tiling->rows = rows + S::kHeight - 1;
  if (tiling->row_bits == 0 && tiling->down == 1) {
    tiling->first = std::min(shape.top, S::kHeight - 1);
    tiling->rows = std::min(shape.top + shape.height, tiling->rows) - tiling->first;
  }
  tiling->row_pitch = (static_cast<int>(config.blocks_across) + 1) * kGranule;
  const int pads_of_image = (tiling->first + tiling->rows - 1) / S::kPhases;
  int fewest = INT32_MAX, best_pad = 0, best_pitch = 0;
  for (int pad = 0; pad < (tiling->row_bits > 0 ? 8 : 1); ++pad) {
    for (int after = 0; after < (image_bits > 0 ? 8 : 1); ++after) {
      tiling->pad = pad * kGranule;
      tiling->image_pitch =
          tiling->rows * tiling->row_pitch + (pads_of_image * pad + after) * kGranule;
      if (tiling->images * tiling->image_pitch > S::kPlane) continue;
      const int found = conflicts(*tiling, S::kPhases * tiling->row_pitch);
      if (found > fewest || (found == fewest && tiling->image_pitch >= best_pitch)) continue;
      fewest = found;
      best_pad = tiling->pad;
      best_pitch = tiling->image_pitch;
    }
  }
  if (fewest == INT32_MAX) {
    return ffi::Error::InvalidArgument("depthwise_conv_mma: the input of a tile is too large");
  }
  tiling->pad = best_pad;
  tiling->image_pitch = best_pitch;
  return ffi::Error::Success();
}

ffi::Error check_shared(int bytes, const Device& device) {
  if (bytes <= device.shared_bytes) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("depthwise_conv_mma: a tile needs " + std::to_string(bytes) +
                                     " bytes of shared memory, and this GPU has " +
                                     std::to_string(device.shared_bytes));
}

// Bytes that CUDA reserves of an SM's shared memory for each thread block.
constexpr int kReserved = 1024;

template <typename T, typename S>
int shared_bytes(const Tiling& tiling) {
  return Band<T, S>::kBytes + S::kPlanesBytes + (S::kAhead ? kRequestedBytes : 0) +
         4 * (tiling.quads_in() + S::kQuadsOut);
}

template <typename T, typename S, bool kPlain>
ffi::Error launch_conv(ConvArgs args, const Device& device, cudaStream_t stream) {
  const ConvShape& shape = args.operands.shape;
  const Tiling& tiling = args.tiling;
  Launch launch = {dim3(1), kThreads, shared_bytes<T, S>(tiling)};
  RETURN_IF_ERROR(check_shared(launch.shared_bytes, device));
  const auto kernel = depthwise_conv_mma_kernel<T, S, kPlain>;
  RETURN_IF_ERROR(allow_shared_memory(kernel, device));
  int resident = 1;
  RETURN_IF_ERROR(resident_blocks(kernel, launch, &resident));
  args.channel_groups = divide_up(shape.channels, kChannels);
  // The fewest workers for which none has more tiles than it would with `most` workers.
  const int most = std::max(1, resident * device.multiprocessors / args.channel_groups);
  const int workers = divide_up(tiling.count, divide_up(tiling.count, most));
  launch.grid = dim3(static_cast<unsigned>(workers) * args.channel_groups);
  return launch_kernel(kernel, args, launch, stream);
}

template <typename T, typename S>
ffi::Error launch_conv(const ConvArgs& args, const Device& device, cudaStream_t stream) {
  if (args.operands.residual == nullptr && args.operands.z == nullptr) {
    return launch_conv<T, S, true>(args, device, stream);
  }
  return launch_conv<T, S, false>(args, device, stream);
}

template <typename T, typename S>
ffi::Error launch_weights(WeightsArgs args, const Config& config, int64_t workers,
                          cudaStream_t stream) {
  Tiling& tiling = args.tiling;
  RETURN_IF_ERROR(plan_tiling<S>(args.shape, args.width, config, &tiling));
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  args.channel_groups = divide_up(args.shape.channels, kChannels);
  if (workers * args.channel_groups > INT32_MAX / 2) {
    return ffi::Error::InvalidArgument("depthwise_conv_mma: there are too many thread blocks");
  }
  static_assert(kWarps * kBandsBytes<S> <= S::kPlanesBytes);
  const Launch launch = {
      dim3(static_cast<unsigned>(workers * args.channel_groups)), kThreads,
      S::kPlanesBytes + kGradientsBytes<S> + 4 * (tiling.quads_in() + S::kQuadsOut)};
  RETURN_IF_ERROR(check_shared(launch.shared_bytes, device));
  const auto kernel = depthwise_conv_mma_weights_kernel<T, S>;
  RETURN_IF_ERROR(allow_shared_memory(kernel, device));
  return launch_kernel(kernel, args, launch, stream);
}

// Calls `f` with the Size of blocks of config.block_rows rows.
template <int kHeight, typename F>
ffi::Error with_block(const Config& config, const F& f) {
  if (config.block_rows == 7) return f(Size<kHeight, 7, false>{});
  if (config.block_rows == 8) return f(Size<kHeight, 8, false>{});
  return ffi::Error::InvalidArgument(
      "depthwise_conv_mma: there are blocks of 7 and 8 rows, not of " +
      std::to_string(config.block_rows));
}

template <typename F>
ffi::Error with_size(Dtype dtype, int64_t height, const Config& config, const F& f) {
  const auto with_dtype = [&](auto size) {
    using S = decltype(size);
    if (dtype == Dtype::kBfloat16) return f(__nv_bfloat16{}, S{});
    if (dtype == Dtype::kFloat16) return f(__half{}, S{});
    return ffi::Error::InvalidArgument("depthwise_conv_mma: x must be bfloat16 or float16");
  };
  if (height == 5) return with_block<5>(config, with_dtype);
  if (height == 7) return with_block<7>(config, with_dtype);
  return ffi::Error::InvalidArgument("depthwise_conv_mma: there is no kernel of " +
                                     std::to_string(height) + " rows");
}

ffi::Error conv(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer weights, ffi::AnyBuffer bias,
                ffi::AnyBuffer residual, ffi::Result<ffi::AnyBuffer> y,
                ffi::Result<ffi::AnyBuffer> z, int64_t height, int64_t width, int64_t top,
                int64_t left, bool turned, std::string_view activation, int64_t block_rows,
                int64_t images, int64_t blocks_down, int64_t blocks_across) {
  ConvArgs args = {};
  RETURN_IF_ERROR(parse_conv_operands(x, weights, bias, residual, *y, *z, height * width, top, left,
                                      turned, activation, &args.operands));
  RETURN_IF_ERROR(check_dtype("weights", weights, x.element_type()));
  args.width = static_cast<int>(std::clamp<int64_t>(width, 0, kMostColumns + 1));
  const Config config = {block_rows, images, blocks_down, blocks_across};
  return with_size(*dtype_of(x), height, config, [&](auto type, auto size) {
    if (is_absent(*y)) return ffi::Error::Success();
    using T = decltype(type);
    using S = decltype(size);
    const ConvShape& shape = args.operands.shape;
    Device device;
    RETURN_IF_ERROR(current_device(&device));
    if constexpr (S::kPhases == 7) {
      using Ahead = Size<S::kHeight, S::kPhases, true>;
      const bool fits =
          plan_tiling<Ahead>(shape, args.width, config, &args.tiling).success() &&
          args.tiling.quads_in() <= kRounds * kSlots &&
          2 * (shared_bytes<T, Ahead>(args.tiling) + kReserved) <= device.shared_bytes + kReserved;
      if (fits) return launch_conv<T, Ahead>(args, device, stream);
    }
    RETURN_IF_ERROR(plan_tiling<S>(shape, args.width, config, &args.tiling));
    return launch_conv<T, S>(args, device, stream);
  });
}

ffi::Error conv_weights(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer dy,
                        ffi::Result<ffi::AnyBuffer> sums, int64_t height, int64_t width,
                        int64_t top, int64_t left, int64_t block_rows, int64_t images,
                        int64_t blocks_down, int64_t blocks_across) {
  WeightsArgs args = {};
  RETURN_IF_ERROR(parse_weights_operands(x, dy, *sums, height * width, top, left, &args));
  args.width = static_cast<int>(std::clamp<int64_t>(width, 0, kMostColumns + 1));
  const Config config = {block_rows, images, blocks_down, blocks_across};
  return with_size(*dtype_of(x), height, config, [&](auto type, auto size) {
    using S = decltype(size);
    if (is_absent(*sums)) return ffi::Error::Success();
    return launch_weights<decltype(type), S>(args, config, args.parts, stream);
  });
}

}  // namespace

DEFINE_HANDLER(jaxfused_depthwise_conv_mma, conv,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // weights
                   .Arg<ffi::AnyBuffer>()  // bias
                   .Arg<ffi::AnyBuffer>()  // residual
                   .Ret<ffi::AnyBuffer>()  // y
                   .Ret<ffi::AnyBuffer>()  // z
                   .Attr<int64_t>("height")
                   .Attr<int64_t>("width")
                   .Attr<int64_t>("top")
                   .Attr<int64_t>("left")
                   .Attr<bool>("turned")
                   .Attr<std::string_view>("activation")
                   .Attr<int64_t>("block_rows")
                   .Attr<int64_t>("images")
                   .Attr<int64_t>("blocks_down")
                   .Attr<int64_t>("blocks_across"));

DEFINE_HANDLER(jaxfused_depthwise_conv_mma_weights, conv_weights,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // dy
                   .Ret<ffi::AnyBuffer>()  // sums
                   .Attr<int64_t>("height")
                   .Attr<int64_t>("width")
                   .Attr<int64_t>("top")
                   .Attr<int64_t>("left")
                   .Attr<int64_t>("block_rows")
                   .Attr<int64_t>("images")
                   .Attr<int64_t>("blocks_down")
                   .Attr<int64_t>("blocks_across"));
