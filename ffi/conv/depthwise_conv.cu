// Depthwise convolution: each channel has one kernel of its own, and pixels are channels last.
//
// A lane has a pair of channels; a warp computes 64 channels of a strip: a few adjacent columns of
// the output, and some or all of its rows. With at most 32 or 16 channels, a half or a quarter of a
// warp has a strip of its own. A lane loops over the rows of its strip. Each input row is loaded
// once, ahead of its use, and multiplied by all rows of the kernel. Registers hold a sum for each
// row of the kernel, and each step completes the oldest sum. An addition writes to the register of
// the next older sum, so that no moves are needed. The loop fits the instruction cache, unlike a
// patch of the output with all its products unrolled, and warps never wait for each other.
//
// A large kernel computes for so long per row that the next row can be loaded to registers
// meanwhile. A small kernel is bound by memory, so the rows of a few steps are copied ahead to
// shared memory.
//
// The gradient of the weights (wgrad) loops over rows in the same way, with the newest rows of dy
// and a sum for each weight in registers. Each block writes its sums, and the caller adds them in
// the order of the blocks.

#include <cmath>

#include "common/ptx.cuh"
#include "common/vector.cuh"
#include "depthwise_conv.h"

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;

// Division of the output of a group of channels into strips.
struct Strips {
  int across;  // strips next to each other
  int down;    // strips below each other, of almost equal height
  int count;   // strips of all images
};

struct ConvArgs : ConvOperands {
  Strips strips;
};

struct WeightsArgs : WeightsOperands {  // part blockIdx.x of `sums` is of blocks with that index
  Strips strips;
};

// A kernel's size and stride, a strip's columns and lanes, and what follows from them.
template <int kHigh, int kWide, int kStep, int kStripColumns, int kStripLanes = 32>
struct Kernel {
  static constexpr int kHeight = kHigh, kWidth = kWide, kStride = kStep, kColumns = kStripColumns;
  static constexpr int kTaps = kHeight * kWidth;
  // Output rows of earlier steps to which a step still adds; a step reads kStride input rows.
  static constexpr int kOlder = (kHeight - 1) / kStride;
  static constexpr int kInputs = (kColumns - 1) * kStride + kWidth;  // input columns of a strip
  // Whether the weights stay in registers, or are read from shared memory a row at a time.
  static constexpr bool kFewWeights = kTaps <= 9;
  static constexpr int kLanes = kStripLanes;
  static constexpr int kChannels = 2 * kLanes;
  static constexpr int kStrips = kThreads / kLanes;  // strips that a block works on at a time

  static __device__ __forceinline__ int lane() { return threadIdx.x % kLanes; }
  static __device__ __forceinline__ int strip() { return threadIdx.x / kLanes; }
  // Gap between strips in shared memory, in units of 16 bytes, so that they use different banks.
  template <typename T>
  static constexpr int kApart = kLanes < 32 ? kChannels * static_cast<int>(sizeof(T)) / 16 : 0;

  static __device__ __forceinline__ void sync() {
    __syncwarp(kLanes == 32 ? 0xffffffffu
                            : ((1u << kLanes % 32) - 1) << (threadIdx.x % 32 / kLanes * kLanes));
  }
};

// Loads for a row of weights; each fetches two taps of two channels.
template <typename K>
constexpr int kPairs = (K::kWidth + 1) / 2;

// A strip's image, column and rows [begin, end) in the output.
struct Strip {
  int image, column, begin, end;

  template <typename K>
  static __device__ __forceinline__ Strip at(const ConvShape& shape, const Strips& strips,
                                             int index) {
    Strip strip;
    strip.column = index % strips.across * K::kColumns;
    const int rest = index / strips.across;
    const int piece = rest % strips.down;
    strip.image = rest / strips.down;
    strip.begin = static_cast<int>(int64_t{shape.out_height} * piece / strips.down);
    strip.end = static_cast<int>(int64_t{shape.out_height} * (piece + 1) / strips.down);
    return strip;
  }
};

// Hides from the compiler how a value was computed, so that it stays in a register instead of being
// computed again.
__device__ __forceinline__ int held(int value) {
  asm("" : "+r"(value));
  return value;
}

// Returns the address of pixel `i` of a row whose pixels are `pitch` bytes apart, in one
// instruction.
__device__ __forceinline__ const char* pixel(const char* row, int i, uint32_t pitch) {
  return row + static_cast<uint64_t>(pitch) * static_cast<uint32_t>(i);
}

__device__ __forceinline__ char* pixel(char* row, int i, uint32_t pitch) {
  return row + static_cast<uint64_t>(pitch) * static_cast<uint32_t>(i);
}

// Rows of an image from some column on, for a block's channels. Pixels outside count as zeros.
template <typename T, int kPixels, int kChannels>
struct Pixels {
  const char* first;  // start of row 0, in the block's first channel
  int height;
  int64_t row_pitch;
  uint32_t pitch;
  int begin, end;  // pixels that lie inside the image
  int channels;    // channels of the image from the block's first one on

  __device__ __forceinline__ Pixels(const void* data, int image, int height, int width,
                                    int channels, int column)
      : first(reinterpret_cast<const char*>(
            static_cast<const T*>(data) +
            (static_cast<int64_t>(image) * height * width + column) * channels +
            blockIdx.y * kChannels)),
        height(height),
        row_pitch(static_cast<int64_t>(width) * channels * static_cast<int>(sizeof(T))),
        pitch(held(channels * static_cast<int>(sizeof(T)))),
        begin(max(-column, 0)),
        end(min(width - column, kPixels)),
        channels(channels - static_cast<int>(blockIdx.y) * kChannels) {}

  __device__ __forceinline__ bool has_row(int row) const { return row >= 0 && row < height; }
};

// A lane's channels of kPixels pixels of some rows, loaded into registers one step ahead.
template <typename T, typename K, int kPixels, int kRows>
class RowsInRegisters {
  using Source = Pixels<T, kPixels, K::kChannels>;

 public:
  static constexpr int kBytes = 16;  // shared memory is not used, but an array cannot be empty
  static constexpr int kAhead = 1;   // steps by which loads are ahead of their use

  __device__ __forceinline__ RowsInRegisters(const Source& pixels, char*) : pixels_(pixels) {
    pixels_.first += 2 * K::lane() * static_cast<int>(sizeof(T));
    if (2 * K::lane() >= pixels_.channels) pixels_.end = 0;
  }

  // Starts to load kRows rows from `row` on; those from `end` on are zeros.
  __device__ __forceinline__ void request(int row, int end) {
#pragma unroll
    for (int s = 0; s < kRows; ++s) load(row + s, end, next_[s]);
  }

  // Unpacks the oldest requested rows.
  __device__ __forceinline__ void take(float (&out)[kRows][kPixels][2]) {
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) unpack(next_[s][i], out[s][i]);
    }
  }

 private:
  __device__ __forceinline__ void load(int row, int end, Vector<T, 2> (&out)[kPixels]) const {
    const char* const from = pixels_.first + row * pixels_.row_pitch;
    const bool inside = pixels_.has_row(row) && row < end;
    if (inside && pixels_.begin == 0 && pixels_.end == kPixels) {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) out[i] = load_vector<T, 2>(pixel(from, i, pixels_.pitch));
    } else {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        out[i] = Vector<T, 2>{};
        if (inside && i >= pixels_.begin && i < pixels_.end) {
          out[i] = load_vector<T, 2>(pixel(from, i, pixels_.pitch));
        }
      }
    }
  }

  Source pixels_;
  Vector<T, 2> next_[kRows][kPixels];
};

// A strip's channels of kPixels pixels of some rows, copied to shared memory some steps ahead. The
// caller commits a group of copies with each step's requests. Before take(), it waits for the
// oldest group and synchronises the strip's lanes.
template <typename T, typename K, int kPixels, int kRows>
class RowsInShared {
  using Source = Pixels<T, kPixels, K::kChannels>;
  static constexpr int kPixelBytes = K::kChannels * static_cast<int>(sizeof(T));
  static constexpr int kStepBytes = kRows * kPixels * kPixelBytes;
  static constexpr int kLaneBytes = 2 * static_cast<int>(sizeof(T));
  static constexpr int kCopiesOfPixel = kPixelBytes / 16;
  static constexpr int kPixelsAtOnce = K::kLanes / kCopiesOfPixel;
  static constexpr int kCopies = (kPixels + kPixelsAtOnce - 1) / kPixelsAtOnce;

 public:
  // Steps copied ahead. kAhead + 1 steps take as many bytes in 16 bits as in 32.
  static constexpr int kAhead = sizeof(T) == 2 ? 3 : 1;
  static constexpr int kBytes = (kAhead + 1) * kStepBytes;

  __device__ __forceinline__ RowsInShared(const Source& pixels, char* shared)
      : pixels_(pixels), shared_(shared) {
    const int lane = K::lane();
    whole_ = pixels_.pitch % 16 == 0;
    if (whole_) {
      pixels_.first += lane % kCopiesOfPixel * 16;
      if (lane % kCopiesOfPixel * 16 >= pixels_.channels * static_cast<int>(sizeof(T))) {
        pixels_.end = 0;
      }
    } else {
      pixels_.first += lane * kLaneBytes;
      if (2 * lane >= pixels_.channels) pixels_.end = 0;
    }
  }

  __device__ __forceinline__ void request(int row, int end) {
    char* const to = shared_ + newest_ * kStepBytes;
    newest_ = newest_ == kAhead ? 0 : newest_ + 1;
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      const bool inside = pixels_.has_row(row + s) && row + s < end;
      const char* const from = pixels_.first + (row + s) * pixels_.row_pitch;
      if (whole_) {
        copy_whole(to + s * kPixels * kPixelBytes, from, inside);
      } else {
        copy_pairs(to + s * kPixels * kPixelBytes, from, inside);
      }
    }
  }

  __device__ __forceinline__ void take(float (&out)[kRows][kPixels][2]) {
    const char* const from = shared_ + oldest_ * kStepBytes + K::lane() * kLaneBytes;
    oldest_ = oldest_ == kAhead ? 0 : oldest_ + 1;
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        unpack(load_vector<T, 2>(from + (s * kPixels + i) * kPixelBytes), out[s][i]);
      }
    }
  }

 private:
  __device__ __forceinline__ bool has(int i, bool inside) const {
    return inside && i >= pixels_.begin && i < pixels_.end;
  }

  // Copies 16 bytes per lane, of several pixels at once.
  __device__ __forceinline__ void copy_whole(char* to, const char* from, bool inside) const {
    const int lane = K::lane();
#pragma unroll
    for (int n = 0; n < kCopies; ++n) {
      const int i = lane / kCopiesOfPixel + n * kPixelsAtOnce;
      if (i >= kPixels) continue;
      const bool exists = has(i, inside);
      const auto address = static_cast<uint32_t>(
          __cvta_generic_to_shared(to + i * kPixelBytes + lane % kCopiesOfPixel * 16));
      async_copy_or_zero(address, exists ? pixel(from, i, pixels_.pitch) : pixels_.first, exists);
    }
  }

  // Copies a lane's own two channels, for pixels that are not 16-byte aligned.
  __device__ __forceinline__ void copy_pairs(char* to, const char* from, bool inside) const {
#pragma unroll 1
    for (int i = 0; i < kPixels; ++i) {
      char* const own = to + i * kPixelBytes + K::lane() * kLaneBytes;
      const bool exists = has(i, inside);
#pragma unroll
      for (int part = 0; part < kLaneBytes; part += 4) {
        if (exists) {
          async_copy<4>(own + part, pixel(from, i, pixels_.pitch) + part);
        } else {
          *reinterpret_cast<uint32_t*>(own + part) = 0;
        }
      }
    }
  }

  Source pixels_;
  char* shared_;
  bool whole_;
  int newest_ = 0, oldest_ = 0;
};

template <typename T, typename K, int kPixels, int kRows>
using Reader = std::conditional_t<K::kFewWeights, RowsInShared<T, K, kPixels, kRows>,
                                  RowsInRegisters<T, K, kPixels, kRows>>;

// The block's weights in shared memory: [kernel row, pair of taps, lane, 2 taps of 2 channels].
template <typename K>
class Weights {
 public:
  __device__ __forceinline__ Weights(const ConvArgs& args, float4* shared) : shared_(shared) {
    const int channel = blockIdx.y * K::kChannels + 2 * K::lane();
    for (int i = K::strip(); i < K::kHeight * kPairs<K>; i += K::kStrips) {
      float taps[2][2] = {};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = i % kPairs<K> * 2 + j;
        if (column >= K::kWidth || channel >= args.shape.channels) continue;
        const int tap = i / kPairs<K> * K::kWidth + column;
        const int from = args.turned ? K::kTaps - 1 - tap : tap;
        load_parameter(args.weights, from * args.shape.channels + channel, taps[j]);
      }
      shared[i * K::kLanes + K::lane()] =
          make_float4(taps[0][0], taps[0][1], taps[1][0], taps[1][1]);
    }
    __syncthreads();
    if constexpr (K::kFewWeights) {
#pragma unroll
      for (int ky = 0; ky < K::kHeight; ++ky) load(ky, few_[ky]);
    }
  }

  __device__ __forceinline__ void row(int ky, float (&out)[kPairs<K> * 2][2]) const {
    if constexpr (K::kFewWeights) {
#pragma unroll
      for (int i = 0; i < kPairs<K> * 2; ++i) {
        out[i][0] = few_[ky][i][0];
        out[i][1] = few_[ky][i][1];
      }
    } else {
      load(ky, out);
    }
  }

 private:
  __device__ __forceinline__ void load(int ky, float (&out)[kPairs<K> * 2][2]) const {
#pragma unroll
    for (int i = 0; i < kPairs<K>; ++i) {
      const float4 pair = shared_[(ky * kPairs<K> + i) * K::kLanes + K::lane()];
      out[2 * i][0] = pair.x;
      out[2 * i][1] = pair.y;
      out[2 * i + 1][0] = pair.z;
      out[2 * i + 1][1] = pair.w;
    }
  }

  const float4* shared_;
  float few_[K::kFewWeights ? K::kHeight : 1][kPairs<K> * 2][2];
};

// A lane's position in the output, and the operations before a row is stored.
template <typename T, typename K>
class Output {
 public:
  __device__ __forceinline__ Output(const ConvArgs& args, const Strip& strip, int channel)
      : args_(args),
        pitch_(held(args.shape.channels * static_cast<int>(sizeof(T)))),
        // A lane without a channel stores nothing.
        columns_(channel < args.shape.channels ? args.shape.out_width - strip.column : 0) {
    const ConvShape& shape = args.shape;
    at_ = (((static_cast<int64_t>(strip.image) * shape.out_height + strip.begin) * shape.out_width +
            strip.column) *
               shape.channels +
           channel) *
          static_cast<int>(sizeof(T));
  }

  // Adds the residual, stores z if it is a result, applies the activation and stores the next row.
  __device__ __forceinline__ void finish(float (&sums)[K::kColumns][2]) {
    if (args_.residual != nullptr) add_residual(sums);
    if (args_.z != nullptr) store(args_.z, sums);
    if (args_.activation != Activation::kNone) {
      activate(args_.activation, reinterpret_cast<float (&)[K::kColumns * 2]>(sums));
    }
    store(args_.y, sums);
    at_ += static_cast<int64_t>(args_.shape.out_width) * pitch_;
  }

 private:
  __device__ __forceinline__ void add_residual(float (&sums)[K::kColumns][2]) const {
    const char* const from = static_cast<const char*>(args_.residual) + at_;
    Vector<T, 2> row[K::kColumns];
#pragma unroll
    for (int i = 0; i < K::kColumns; ++i) {
      row[i] = Vector<T, 2>{};
      if (i < columns_) row[i] = load_vector<T, 2>(pixel(from, i, pitch_));
    }
#pragma unroll
    for (int i = 0; i < K::kColumns; ++i) {
      float pair[2];
      unpack(row[i], pair);
      sums[i][0] += pair[0];
      sums[i][1] += pair[1];
    }
  }

  __device__ __forceinline__ void store(void* data, const float (&sums)[K::kColumns][2]) const {
    char* const to = static_cast<char*>(data) + at_;
    Vector<T, 2> row[K::kColumns];
#pragma unroll
    for (int i = 0; i < K::kColumns; ++i) pack(sums[i], row[i]);
    if (columns_ >= K::kColumns) {
#pragma unroll
      for (int i = 0; i < K::kColumns; ++i) store_vector(pixel(to, i, pitch_), row[i]);
    } else {
#pragma unroll
      for (int i = 0; i < K::kColumns; ++i) {
        if (i < columns_) store_vector(pixel(to, i, pitch_), row[i]);
      }
    }
  }

  const ConvArgs& args_;
  uint32_t pitch_;
  int columns_;
  int64_t at_;  // byte offset of the next row
};

// Resident blocks of an SM that the compiler must leave registers for. An output element of a row
// takes a register for each row of the kernel; a float32 input pair takes two while in flight.
template <typename T, typename K>
constexpr int kResident = K::kFewWeights                                                        ? 4
                          : K::kHeight * K::kColumns > 49 || (sizeof(T) == 4 && K::kHeight > 5) ? 2
                                                                                                : 3;

template <typename T, typename K>
__global__ void __launch_bounds__(kThreads, kResident<T, K>)
    depthwise_conv_kernel(const __grid_constant__ ConvArgs args) {
  __shared__ float4 shared[K::kHeight * kPairs<K> * K::kLanes];
  const ConvShape& shape = args.shape;
  const Weights<K> weights(args, shared);
  const int index = blockIdx.x * K::kStrips + K::strip();
  if (index >= args.strips.count) return;
  const Strip strip = Strip::at<K>(shape, args.strips, index);
  const int channel = blockIdx.y * K::kChannels + 2 * K::lane();
  float bias[2] = {0.0f, 0.0f};
  if (channel < shape.channels) load_or_zero(args.bias, channel, bias);
  using Input = Reader<T, K, K::kInputs, K::kStride>;
  __shared__ uint4 on_their_way[K::kStrips][Input::kBytes / 16 + K::template kApart<T>];
  Input input({args.x, strip.image, shape.height, shape.width, shape.channels,
               strip.column * K::kStride - shape.left},
              reinterpret_cast<char*>(on_their_way[K::strip()]));
  Output<T, K> output(args, strip, channel);

  const int end = strip.end + K::kOlder;
  const auto request = [&](int step) {
    if (step < end) input.request(step * K::kStride - shape.top, end * K::kStride - shape.top);
    if constexpr (K::kFewWeights) async_copies_commit();
  };
  // In float32 each kernel row has a sum of its own: one sum of 49 products would round more.
  constexpr bool kRowsApart = std::is_same_v<T, float>;
  // sums[j] is for the output row that began j steps ago; a step completes the oldest one.
  float sums[K::kOlder + 1][K::kColumns][2] = {}, complete[K::kColumns][2];
  const auto advance = [&](int step, auto guarded) {
    float values[K::kStride][K::kInputs][2];
    if constexpr (K::kFewWeights) {
      async_copies_wait(Input::kAhead - 1);
      K::sync();
    }
    input.take(values);
    request(step + Input::kAhead);
    // The oldest sum is first, so that its register is free when the next younger sum moves there.
#pragma unroll
    for (int j = K::kOlder; j >= 0; --j) {
      if (decltype(guarded)::value && (step - j < strip.begin || step - j >= strip.end)) continue;
      float row[K::kColumns][2];
#pragma unroll
      for (int i = 0; i < K::kColumns; ++i) {
        row[i][0] = j == 0 ? bias[0] : kRowsApart ? 0.0f : sums[j][i][0];
        row[i][1] = j == 0 ? bias[1] : kRowsApart ? 0.0f : sums[j][i][1];
      }
#pragma unroll
      for (int s = 0; s < K::kStride; ++s) {
        const int ky = j * K::kStride + s;
        if (ky >= K::kHeight) continue;
        float taps[kPairs<K> * 2][2];
        weights.row(ky, taps);
#pragma unroll
        for (int kx = 0; kx < K::kWidth; ++kx) {
#pragma unroll
          for (int i = 0; i < K::kColumns; ++i) {
            row[i][0] += values[s][i * K::kStride + kx][0] * taps[kx][0];
            row[i][1] += values[s][i * K::kStride + kx][1] * taps[kx][1];
          }
        }
      }
      float (&next_row)[K::kColumns][2] = j == K::kOlder ? complete : sums[j + 1];
#pragma unroll
      for (int i = 0; i < K::kColumns; ++i) {
        next_row[i][0] = kRowsApart && j > 0 ? sums[j][i][0] + row[i][0] : row[i][0];
        next_row[i][1] = kRowsApart && j > 0 ? sums[j][i][1] + row[i][1] : row[i][1];
      }
    }
  };
#pragma unroll
  for (int ahead = 0; ahead < Input::kAhead; ++ahead) request(strip.begin + ahead);
#pragma unroll 1
  for (int step = strip.begin; step < end; ++step) {
    // Tests of the row are left out if all sums belong to the strip, or if there are few products.
    if (K::kFewWeights || (step >= strip.begin + K::kOlder && step < strip.end)) {
      advance(step, std::false_type{});
    } else {
      advance(step, std::true_type{});
    }
    if (step >= strip.begin + K::kOlder) output.finish(complete);
  }
}

template <typename T, typename K>
__global__ void __launch_bounds__(kThreads, K::kFewWeights ? 3 : 2)
    depthwise_weights_kernel(const __grid_constant__ WeightsArgs args) {
  using X = Reader<T, K, K::kInputs, K::kStride>;
  using Dy = Reader<T, K, K::kColumns, 1>;
  __shared__ float2 totals[K::kTaps + 1][K::kLanes];
  __shared__ uint4 on_their_way[K::kStrips][(X::kBytes + Dy::kBytes) / 16 + K::template kApart<T>];
  const ConvShape& shape = args.shape;
  const int lane = K::lane();
  const int channel = blockIdx.y * K::kChannels + 2 * lane;
  float sums[K::kTaps + 1][2] = {};
#pragma unroll 1
  for (int index = blockIdx.x * K::kStrips + K::strip(); index < args.strips.count;
       index += gridDim.x * K::kStrips) {
    const Strip strip = Strip::at<K>(shape, args.strips, index);
    K::sync();  // all lanes have read the previous strip's rows
    X x_rows({args.x, strip.image, shape.height, shape.width, shape.channels,
              strip.column * K::kStride - shape.left},
             reinterpret_cast<char*>(on_their_way[K::strip()]));
    Dy dy_rows(
        {args.dy, strip.image, shape.out_height, shape.out_width, shape.channels, strip.column},
        reinterpret_cast<char*>(on_their_way[K::strip()]) + X::kBytes);
    // Steps from `end` on would multiply only rows of x below the image, which are zeros.
    const int end = min(strip.end + K::kOlder, (shape.height - 1 + shape.top) / K::kStride + 1);
    const auto request = [&](int step) {
      if (step < end) {
        // The rows of dy below `strip.end` belong to another strip.
        dy_rows.request(step, strip.end);
        x_rows.request(step * K::kStride - shape.top, end * K::kStride - shape.top);
      }
      if constexpr (K::kFewWeights) async_copies_commit();
    };
    // dy[j] is the row of dy that was taken j steps ago.
    float dy[K::kOlder + 1][K::kColumns][2] = {};
#pragma unroll
    for (int ahead = 0; ahead < X::kAhead; ++ahead) request(strip.begin + ahead);
    // Unrolled by two, so that the rows of dy move between registers half as often.
#pragma unroll 2
    for (int step = strip.begin; step < end; ++step) {
#pragma unroll
      for (int j = K::kOlder; j > 0; --j) {
#pragma unroll
        for (int i = 0; i < K::kColumns; ++i) {
          dy[j][i][0] = dy[j - 1][i][0];
          dy[j][i][1] = dy[j - 1][i][1];
        }
      }
      if constexpr (K::kFewWeights) {
        async_copies_wait(X::kAhead - 1);
        K::sync();
      }
      float x[K::kStride][K::kInputs][2], newest[1][K::kColumns][2];
      x_rows.take(x);
      dy_rows.take(newest);
      request(step + X::kAhead);
#pragma unroll
      for (int i = 0; i < K::kColumns; ++i) {
        dy[0][i][0] = newest[0][i][0];
        dy[0][i][1] = newest[0][i][1];
      }
#pragma unroll
      for (int i = 0; i < K::kColumns; ++i) {
        sums[K::kTaps][0] += dy[0][i][0];
        sums[K::kTaps][1] += dy[0][i][1];
      }
#pragma unroll
      for (int ky = 0; ky < K::kHeight; ++ky) {
        const int j = ky / K::kStride, s = ky % K::kStride;
#pragma unroll
        for (int i = 0; i < K::kColumns; ++i) {
#pragma unroll
          for (int kx = 0; kx < K::kWidth; ++kx) {
            sums[ky * K::kWidth + kx][0] += x[s][i * K::kStride + kx][0] * dy[j][i][0];
            sums[ky * K::kWidth + kx][1] += x[s][i * K::kStride + kx][1] * dy[j][i][1];
          }
        }
      }
    }
  }

  // Adds up the strips' sums, always in the same order.
#pragma unroll 1
  for (int turn = 0; turn < K::kStrips; ++turn) {
    if (K::strip() == turn) {
#pragma unroll
      for (int tap = 0; tap <= K::kTaps; ++tap) {
        float2 total = turn == 0 ? make_float2(0.0f, 0.0f) : totals[tap][lane];
        totals[tap][lane] = make_float2(total.x + sums[tap][0], total.y + sums[tap][1]);
      }
    }
    __syncthreads();
  }
  if (channel >= shape.channels) return;
  for (int tap = K::strip(); tap <= K::kTaps; tap += K::kStrips) {
    float* const to =
        args.sums + (static_cast<int64_t>(blockIdx.x) * (K::kTaps + 1) + tap) * shape.channels;
    *reinterpret_cast<float2*>(to + channel) = totals[tap][lane];
  }
}

// --- launch --------------------------------------------------------------------------------------

// Returns how many strips to cut a height into, with the least `cost(strips, rows of a strip)`.
template <typename F>
int cheapest_division(int height, const F& cost) {
  int best = 1;
  double least = cost(1, height);
  for (int down = 2; down <= std::min(height, 1024); ++down) {
    const double found = cost(down, divide_up(height, down));
    if (found < least) {
      least = found;
      best = down;
    }
  }
  return best;
}

ffi::Error check_count(double count) {
  if (count <= INT32_MAX / 2) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("depthwise_conv: x is too large");
}

// Launch of a kernel, and its estimated cost relative to other plans.
template <typename K>
struct Plan {
  Strips strips;
  Launch launch;
  double cost;
};

template <typename T, typename K>
ffi::Error plan_conv(const ConvShape& shape, const Device& device, Plan<K>* plan) {
  const int groups = divide_up(shape.channels, K::kChannels);
  plan->launch = {dim3(1), kThreads, 0};
  int resident = 1;
  RETURN_IF_ERROR(resident_blocks(depthwise_conv_kernel<T, K>, plan->launch, &resident));
  Strips& strips = plan->strips;
  strips.across = divide_up(shape.out_width, K::kColumns);
  const auto cost = [&](int down, int rows) {
    const double blocks =
        std::ceil(double(shape.images) * strips.across * down / K::kStrips) * groups;
    // An SM with fewer blocks than it can hold takes about as long as a full one. A strip's first
    // and last steps compute half the products, and a step's overhead is about that of two columns.
    const double turns = std::max<double>(std::ceil(blocks / device.multiprocessors), resident);
    return turns * (rows + 0.5 * K::kOlder + 1.0) * (K::kColumns + 2);
  };
  strips.down = cheapest_division(shape.out_height, cost);
  plan->cost = cost(strips.down, divide_up(shape.out_height, strips.down));
  const double count = double(shape.images) * strips.across * strips.down;
  RETURN_IF_ERROR(check_count(count));
  strips.count = static_cast<int>(count);
  plan->launch.grid = dim3(divide_up(strips.count, K::kStrips), groups);
  return ffi::Error::Success();
}

template <typename T, typename K>
ffi::Error launch_conv(ConvArgs args, const Plan<K>& plan, cudaStream_t stream) {
  args.strips = plan.strips;
  return launch_kernel(depthwise_conv_kernel<T, K>, args, plan.launch, stream);
}

template <typename T, typename K>
ffi::Error launch_weights(WeightsArgs args, int64_t blocks, cudaStream_t stream) {
  const ConvShape& shape = args.shape;
  const int groups = divide_up(shape.channels, K::kChannels);
  Strips& strips = args.strips;
  strips.across = divide_up(shape.out_width, K::kColumns);
  const double of_row = double(shape.images) * strips.across;
  strips.down = cheapest_division(shape.out_height, [&](int down, int rows) {
    return std::ceil(of_row * down / (blocks * K::kStrips)) * (rows + K::kOlder + 1);
  });
  RETURN_IF_ERROR(check_count(of_row * strips.down));
  strips.count = static_cast<int>(of_row * strips.down);
  return launch_kernel(depthwise_weights_kernel<T, K>, args,
                       {dim3(static_cast<unsigned>(blocks), groups), kThreads, 0}, stream);
}

ffi::Error check_channels(const ConvShape& shape) {
  if (shape.channels <= 64 * 65535) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("depthwise_conv: x has too many channels");
}

template <int kHigh, int kWide, int kStep>
struct Size {
  static constexpr int kHeight = kHigh, kWidth = kWide, kStride = kStep;
};

template <typename F>
ffi::Error with_size(int64_t height, int64_t width, int64_t stride, const F& f) {
  if (height == 3 && width == 3 && stride == 1) return f(Size<3, 3, 1>{});
  if (height == 3 && width == 3 && stride == 2) return f(Size<3, 3, 2>{});
  if (height == 5 && width == 5 && stride == 1) return f(Size<5, 5, 1>{});
  if (height == 5 && width == 5 && stride == 2) return f(Size<5, 5, 2>{});
  if (height == 7 && width == 7 && stride == 1) return f(Size<7, 7, 1>{});
  return ffi::Error::InvalidArgument("depthwise_conv: there is no kernel of " +
                                     std::to_string(height) + " x " + std::to_string(width) +
                                     " with stride " + std::to_string(stride));
}

// Lanes of a strip: fewer if the kernel is bound by memory and most lanes would be idle.
template <typename S, typename F>
ffi::Error with_lanes(int64_t channels, const F& f) {
  if constexpr (S::kHeight == 3) {
    if (channels <= 16) return f(std::integral_constant<int, 8>{});
    if (channels <= 32) return f(std::integral_constant<int, 16>{});
  }
  return f(std::integral_constant<int, 32>{});
}

ffi::Error conv(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer weights, ffi::AnyBuffer bias,
                ffi::AnyBuffer residual, ffi::Result<ffi::AnyBuffer> y,
                ffi::Result<ffi::AnyBuffer> z, int64_t height, int64_t width, int64_t stride,
                int64_t top, int64_t left, bool turned, std::string_view activation) {
  ConvArgs args = {};
  RETURN_IF_ERROR(parse_conv_operands(x, weights, bias, residual, *y, *z, height * width, top, left,
                                      turned, activation, &args));
  RETURN_IF_ERROR(check_channels(args.shape));
  return with_size(height, width, stride, [&](auto size) {
    using S = decltype(size);
    if (is_absent(*y)) return ffi::Error::Success();
    Device device;
    RETURN_IF_ERROR(current_device(&device));
    return with_dtype(*dtype_of(x), [&](auto type) {
      using T = decltype(type);
      return with_lanes<S>(args.shape.channels, [&](auto lanes) {
        constexpr int kColumns = S::kStride == 1 ? 8 : 4;
        using K = Kernel<S::kHeight, S::kWidth, S::kStride, kColumns, lanes()>;
        Plan<K> plan;
        RETURN_IF_ERROR((plan_conv<T, K>(args.shape, device, &plan)));
        if constexpr (S::kHeight == 7) {
          // With 49 products per output, columns beyond the image waste much time, and the width of
          // many images is 7 times a power of two.
          using Narrow = Kernel<S::kHeight, S::kWidth, S::kStride, 7>;
          Plan<Narrow> narrow;
          RETURN_IF_ERROR((plan_conv<T, Narrow>(args.shape, device, &narrow)));
          if (narrow.cost <= plan.cost) return launch_conv<T, Narrow>(args, narrow, stream);
        }
        return launch_conv<T, K>(args, plan, stream);
      });
    });
  });
}

ffi::Error conv_weights(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer dy,
                        ffi::Result<ffi::AnyBuffer> sums, int64_t height, int64_t width,
                        int64_t stride, int64_t top, int64_t left) {
  WeightsArgs args = {};
  RETURN_IF_ERROR(parse_weights_operands(x, dy, *sums, height * width, top, left, &args));
  RETURN_IF_ERROR(check_channels(args.shape));
  return with_size(height, width, stride, [&](auto size) {
    using S = decltype(size);
    if (is_absent(*sums)) return ffi::Error::Success();
    return with_dtype(*dtype_of(x), [&](auto type) {
      return with_lanes<S>(args.shape.channels, [&](auto lanes) {
        constexpr bool kWide = S::kHeight * S::kWidth <= 9 && S::kStride == 1;
        using K = Kernel<S::kHeight, S::kWidth, S::kStride, kWide ? 8 : 4, lanes()>;
        return launch_weights<decltype(type), K>(args, args.parts, stream);
      });
    });
  });
}

}  // namespace

DEFINE_HANDLER(jaxfused_depthwise_conv, conv,
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
                   .Attr<int64_t>("stride")
                   .Attr<int64_t>("top")
                   .Attr<int64_t>("left")
                   .Attr<bool>("turned")
                   .Attr<std::string_view>("activation"));

DEFINE_HANDLER(jaxfused_depthwise_conv_weights, conv_weights,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // dy
                   .Ret<ffi::AnyBuffer>()  // sums
                   .Attr<int64_t>("height")
                   .Attr<int64_t>("width")
                   .Attr<int64_t>("stride")
                   .Attr<int64_t>("top")
                   .Attr<int64_t>("left"));
