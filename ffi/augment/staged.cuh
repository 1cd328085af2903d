// Reads values of a result from a box of a uint8 image in shared memory, with one word per pixel.
//
// Read from global memory, a warp's pixels would take a cycle for each cache line (one for each row
// of the image) and each byte that a lane loads. In shared memory they lie in different banks.
#pragma once

#include "augment/direct.cuh"
#include "augment/writing.cuh"

// Returns a position mirrored at both ends into 0 .. count - 1.
__device__ __forceinline__ int mirrored(int place, int count) {
  if (place >= 0 && place < count) return place;
  const int period = max(2 * (count - 1), 1);
  const int within = abs(place) % period;
  return min(within, period - within);
}

// A tile of a result, with the pixels around it that a blur needs. Without a blur it is a whole
// tile, even if a part of it lies beyond the result.
struct Region {
  int first_row, first_column;
  int rows, columns;
  int end_row, end_column;  // size of the result

  // Returns the number of columns, rounded up to whole quads.
  __device__ __forceinline__ int width() const { return round_up(columns, kPixels); }

  // Returns the row of the result for row `i` of the region. With a blur, rows beyond an edge of
  // the image's result are mirrored; values further out are not used.
  template <bool kBlur>
  __device__ __forceinline__ int row(int i, const Map& map) const {
    if constexpr (!kBlur) return first_row + i;
    return inside(mirrored(first_row + i, static_cast<int>(map.result(1))), first_row, rows,
                  end_row);
  }
  template <bool kBlur>
  __device__ __forceinline__ int column(int i, const Map& map) const {
    if constexpr (!kBlur) return first_column + i;
    return inside(mirrored(first_column + i, static_cast<int>(map.result(0))), first_column,
                  columns, end_column);
  }
  template <bool kBlur>
  __device__ __forceinline__ int last_row() const {
    return kBlur ? min(first_row + rows, end_row) - 1 : first_row + rows - 1;
  }
  template <bool kBlur>
  __device__ __forceinline__ int last_column() const {
    return kBlur ? min(first_column + columns, end_column) - 1 : first_column + columns - 1;
  }

 private:
  static __device__ __forceinline__ int inside(int place, int first, int count, int end) {
    return max(min(place, min(first + count, end) - 1), max(first, 0));
  }
};

// Positions in the result of adjacent pixels of a region.
template <bool kBlur>
struct Within {
  const Region& region;
  const Map& map;
  int line, place;

  __device__ __forceinline__ int row() const { return region.row<kBlur>(line, map); }
  __device__ __forceinline__ int column(int i) const {
    return region.column<kBlur>(place + i, map);
  }
};

enum class Reading { kDirect, kInPlace, kNearest, kBetweenFour, kUpright };

// The box of an image's pixels that a region of the result depends on.
struct Box {
  Reading reading;  // method of reading; kDirect if the pixels are not in shared memory
  int left, top, width, height;
  int pitch;           // words between the starts of rows
  int taps_x, taps_y;  // kUpright only: pixels along x and y that a value depends on
  // Lines and columns of the visible pixels (in the image and the map's window), counted from the
  // box's corner; other pixels get the fill colour.
  int first_line, last_line, first_column, last_column;
  bool is_whole;   // whether all pixels are visible
  int64_t corner;  // offset in bytes of the box's first pixel, which may lie outside the image
};

// Sets the box to the pixels from (left, top) to (right, bottom), and returns whether they fit.
__device__ inline bool fits(const Args& args, float left, float top, float right, float bottom,
                            Box* box) {
  // The negated test is also true if a bound is NaN.
  if (!(left > -1e6f && top > -1e6f && right < 1e6f && bottom < 1e6f)) return false;
  box->left = static_cast<int>(left) & ~3;
  box->top = static_cast<int>(top);
  box->width = static_cast<int>(right) - box->left + 1;
  box->height = static_cast<int>(bottom) - box->top + 1;
  // With a pitch of an odd multiple of 8 words, reads of four rows have few bank conflicts.
  box->pitch = ((box->width + 7) & ~15) + 8;
  if (int64_t{box->pitch} * box->height > args.room.box) box->pitch = (box->width + 3) & ~3;
  return int64_t{box->pitch} * box->height <= args.room.box;
}

// Sets which pixels of a box are visible, and the offset of its first pixel.
template <int kChannels>
__device__ inline void set_seen(const Args& args, const Map& map, int image, Box* box) {
  int first_column = 0, last_column = args.width - 1, first_row = 0, last_row = args.height - 1;
  if (args.reads) {
    last_column = static_cast<int>(map.source(0)) - 1;
    last_row = static_cast<int>(map.source(1)) - 1;
    if (!args.drops) {
      const auto limited = [](float place) { return fminf(fmaxf(place, -1.0f), 2e6f); };
      first_column = max(static_cast<int>(ceilf(limited(map.first(0)))), 0);
      first_row = max(static_cast<int>(ceilf(limited(map.first(1)))), 0);
      last_column = min(last_column, static_cast<int>(floorf(limited(map.last(0)))));
      last_row = min(last_row, static_cast<int>(floorf(limited(map.last(1)))));
    }
  }
  box->first_column = first_column - box->left;
  box->last_column = last_column - box->left;
  box->first_line = first_row - box->top;
  box->last_line = min(last_row - box->top, box->height - 1);
  box->is_whole = box->first_column <= 0 && box->last_column >= round_up(box->width, kPixels) - 1 &&
                  box->first_line <= 0 && box->last_line == box->height - 1;
  const int64_t row = int64_t{image} * args.height + box->top;
  box->corner = (row * args.width + box->left) * kChannels;
}

template <bool kBlur, int kChannels>
__device__ inline Box box_of(const Args& args, const Map& map, const Region& region) {
  Box box = {};
  box.reading = Reading::kDirect;
  const int first_row = max(region.first_row, 0), first_column = max(region.first_column, 0);
  const int last_row = region.last_row<kBlur>(), last_column = region.last_column<kBlur>();
  if (!args.reads) {
    // Without a blur the pixels are read from global memory.
    if (!kBlur || fits(args, first_column, first_row, last_column, last_row, &box)) {
      box.reading = Reading::kInPlace;
    }
    return box;
  }
  float x[4], y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    map.move(i / 2 ? last_row : first_row, i % 2 ? last_column : first_column, &x[i], &y[i]);
  }
  if (args.drops && args.interpolation != kNearest) {
    const Axis left(args, map, 0, fminf(x[0], x[3])), right(args, map, 0, fmaxf(x[0], x[3]));
    const Axis top(args, map, 1, fminf(y[0], y[3])), bottom(args, map, 1, fmaxf(y[0], y[3]));
    box.taps_x = static_cast<int>(ceilf(2.0f * left.reach));
    box.taps_y = static_cast<int>(ceilf(2.0f * top.reach));
    if (box.taps_x <= args.taps && box.taps_y <= args.taps &&
        fits(args, floorf(left.place - left.reach) + 1.0f, floorf(top.place - top.reach) + 1.0f,
             floorf(right.place - right.reach) + box.taps_x,
             floorf(bottom.place - bottom.reach) + box.taps_y, &box) &&
        int64_t{box.height} * region.width() * kChannels <= args.room.middle) {
      box.reading = Reading::kUpright;
    }
    return box;
  }
  const bool is_plain = args.interpolation == kBilinear && map.radius(0, args.widest) == 1.0f &&
                        map.radius(1, args.widest) == 1.0f;
  if (!args.fill_is_bytes || (!is_plain && args.interpolation != kNearest)) return box;
  // The tile's corners in the image; a wholly visible tile becomes a convex quadrilateral.
  // Positions computed within it have rounding errors, so the box gets the margins below.
  const float left = fminf(fminf(x[0], x[1]), fminf(x[2], x[3]));
  const float right = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  const float top = fminf(fminf(y[0], y[1]), fminf(y[2], y[3]));
  const float bottom = fmaxf(fmaxf(y[0], y[1]), fmaxf(y[2], y[3]));
  const bool are_finite = x[0] + x[1] + x[2] + x[3] + y[0] + y[1] + y[2] + y[3] < 1e30f;
  const float error = 0.01f + 2e-6f * fmaxf(fmaxf(-left, right), fmaxf(-top, bottom));
  const float more = is_plain ? 1.0f + error : 0.5f + error;
  if (are_finite && fits(args, floorf(left - error), floorf(top - error), floorf(right + more),
                         floorf(bottom + more), &box)) {
    box.reading = is_plain ? Reading::kBetweenFour : Reading::kNearest;
  }
  return box;
}

constexpr uint32_t kBiasBits = 0x4b000000u;  // bits of kBias

// Returns a pixel as a word of shared memory. With 1 or 3 channels its top byte is that of kBias.
template <int kChannels>
__device__ __forceinline__ uint32_t as_word(uint32_t bytes) {
  if constexpr (kChannels == 4) return bytes;
  return __byte_perm(bytes, kBiasBits, kChannels == 1 ? 0x7440 : 0x7210);
}

// Returns four bytes of the images; bytes outside of them are 0.
static __device__ __noinline__ uint32_t bytes_near(const uint8_t* from, const uint8_t* first,
                                                   const uint8_t* end) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    if (from + i >= first && from + i < end) word |= uint32_t{from[i]} << (8 * i);
  }
  return word;
}

// Four adjacent pixels of a row, as they are in global memory.
template <int kChannels>
struct Quad {
  uint32_t words[kChannels + 1];
  int before;  // bytes in `words` before the first pixel

  // With kWords, the pixels are whole words of the images. Otherwise bytes beyond the images are 0.
  template <bool kWords>
  __device__ __forceinline__ void load(const Args& args, const uint8_t* from) {
    if constexpr (kWords) {
      before = 0;
#pragma unroll
      for (int k = 0; k < kChannels; ++k) words[k] = reinterpret_cast<const uint32_t*>(from)[k];
      return;
    }
    const uint8_t* first = static_cast<const uint8_t*>(args.x);
    const uint8_t* end = first + args.bytes;
    before = reinterpret_cast<uintptr_t>(from) % 4;
    const uint8_t* aligned = from - before;
    if (aligned >= first && aligned + 4 * (kChannels + 1) <= end) {
#pragma unroll
      for (int k = 0; k < kChannels; ++k) {
        words[k] = reinterpret_cast<const uint32_t*>(aligned)[k];
      }
      if (before != 0) words[kChannels] = reinterpret_cast<const uint32_t*>(aligned)[kChannels];
    } else {
      before = 0;
#pragma unroll
      for (int k = 0; k < kChannels; ++k) words[k] = bytes_near(from + 4 * k, first, end);
    }
  }

  // Returns the four pixels in one word each, in the format of `as_word`.
  __device__ __forceinline__ uint4 pixels() const {
    uint32_t w[kChannels];
#pragma unroll
    for (int k = 0; k < kChannels; ++k) w[k] = words[k];
    if (before != 0) {
#pragma unroll
      for (int k = 0; k < kChannels; ++k) {
        w[k] = __byte_perm(words[k], words[k + 1], 0x3210u + 0x1111u * before);
      }
    }
    if constexpr (kChannels == 1) {
      return make_uint4(as_word<1>(w[0]), as_word<1>(w[0] >> 8), as_word<1>(w[0] >> 16),
                        as_word<1>(w[0] >> 24));
    } else if constexpr (kChannels == 3) {
      return make_uint4(as_word<3>(w[0]), as_word<3>(__byte_perm(w[0], w[1], 0x0543)),
                        as_word<3>(__byte_perm(w[1], w[2], 0x0432)), as_word<3>(w[2] >> 8));
    } else {
      return make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
};

constexpr int kBatch = 6;  // quads that a thread loads before it stores them

// Copies a box into shared memory. With kWords it loads whole words of the images; with kWhole no
// pixel is fill.
template <bool kWords, bool kWhole, int kChannels>
__device__ __forceinline__ void stage(const Args& args, const Box& box, uint32_t* words) {
  const int quads = (box.width + 3) / 4;
  const int bits = min(max(32 - __clz(quads - 1), 3), 7), across = 1 << bits;
  const int row_step = kThreads >> bits, first_line = static_cast<int>(threadIdx.x) >> bits;
  const int pitch = row_step * args.width * kChannels;
  const uint32_t fill = as_word<kChannels>(args.fill_word);
  for (int quad = threadIdx.x & (across - 1); quad < quads; quad += across) {
    const int first = box.first_column - 4 * quad, last = box.last_column - 4 * quad;
    const int begin = kWhole ? 0 : first <= 3 && last >= 0 ? box.first_line : box.height;
    const int end = kWhole ? box.height - 1 : box.last_line;
    const uint8_t* from = static_cast<const uint8_t*>(args.x) + box.corner +
                          (first_line * args.width + 4 * quad) * kChannels;
    uint32_t* to = words + first_line * box.pitch + 4 * quad;
    uint32_t seen[kPixels];  // all bits set for a visible pixel, else none
#pragma unroll
    for (int k = 0; k < kPixels; ++k) seen[k] = kWhole || (first <= k && k <= last) ? ~0u : 0u;
    const auto shown = [&](uint32_t pixel, int k) { return (pixel & seen[k]) | (fill & ~seen[k]); };
    for (int line = first_line; line < box.height; line += kBatch * row_step) {
      Quad<kChannels> loaded[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int at = line + k * row_step;
        if ((kWhole || at >= begin) && at <= end) loaded[k].template load<kWords>(args, from);
        from += pitch;
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int at = line + k * row_step;
        if (at >= box.height) break;
        uint4 pixels = make_uint4(fill, fill, fill, fill);
        if (kWhole || (at >= begin && at <= end)) {
          const uint4 p = loaded[k].pixels();
          pixels = make_uint4(shown(p.x, 0), shown(p.y, 1), shown(p.z, 2), shown(p.w, 3));
        }
        *reinterpret_cast<uint4*>(to) = pixels;
        to += row_step * box.pitch;
      }
    }
  }
}

// Returns a channel of a pixel plus kBias, in which the channel is the last bits of the mantissa.
template <int kChannels>
__device__ __forceinline__ float biased(uint32_t word, int channel) {
  if constexpr (kChannels == 1) return __uint_as_float(word);
  if constexpr (kChannels == 3) return __uint_as_float(__byte_perm(word, 0, 0x3440u + channel));
  return __uint_as_float(__byte_perm(word, kBiasBits, 0x7440u + channel));
}

constexpr float kScale = 1.0f / 255.0f;

// Returns scale * (biased - kBias), rounded once.
__device__ __forceinline__ float unbiased(float biased, float scale) {
  return fmaf(biased, scale, -kBias * scale);
}

// Sets `values` to a pixel's channels, scaled to 0 to 1.
template <int kChannels>
__device__ __forceinline__ void values_of(uint32_t word, float (&values)[kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) values[c] = unbiased(biased<kChannels>(word, c), kScale);
}

// Loads adjacent pixels of floats in shared memory, with vectors of 16 bytes.
template <int kCount, int kChannels>
__device__ __forceinline__ void load_floats(const float* from, float (&pixels)[kCount][kChannels]) {
  static_assert(kCount * kChannels % 4 == 0);
  float* values = &pixels[0][0];
#pragma unroll
  for (int i = 0; i < kCount * kChannels; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    values[i] = four.x;
    values[i + 1] = four.y;
    values[i + 2] = four.z;
    values[i + 3] = four.w;
  }
}

template <int kCount, int kChannels>
__device__ __forceinline__ void store_floats(const float (&pixels)[kCount][kChannels], float* to) {
  static_assert(kCount * kChannels % 4 == 0);
  const float* values = &pixels[0][0];
#pragma unroll
  for (int i = 0; i < kCount * kChannels; i += 4) {
    *reinterpret_cast<float4*>(to + i) =
        make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
  }
}

// Adds `weight` times a pixel's channels, which are 0 to 255, to `sums`.
template <int kChannels>
__device__ __forceinline__ void add_levels(uint32_t word, float weight, float (&sums)[kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) sums[c] += weight * (biased<kChannels>(word, c) - kBias);
}

// The four pixels around a position, for bilinear interpolation.
struct Between {
  uint32_t upper_left, upper_right, lower_left, lower_right;
  float share_x, share_y;  // weights of the right and of the lower pixels

  __device__ __forceinline__ Between(const Box& box, const uint32_t* words, float x, float y) {
    // The sums are rounded down to whole numbers, which are the last bits of their mantissas.
    constexpr float kFloor = 1.5f * kBias;
    constexpr int kBits = 0x4b400000;
    const float left = __fmaf_rd(x, 1.0f, kFloor), top = __fmaf_rd(y, 1.0f, kFloor);
    share_x = x - (left - kFloor);
    share_y = y - (top - kFloor);
    const uint32_t* upper = words + (__float_as_int(top) - (kBits + box.top)) * box.pitch +
                            (__float_as_int(left) - (kBits + box.left));
    const uint32_t* lower = upper + box.pitch;
    upper_left = upper[0];
    upper_right = upper[1];
    lower_left = lower[0];
    lower_right = lower[1];
  }

  // Interpolates with weights in float32; the values are from 0 to 1.
  template <int kChannels>
  __device__ __forceinline__ void precisely(float (&values)[kChannels]) const {
    const auto along_row = [&](uint32_t left, uint32_t right, int c) {
      // Differences of two biased values are exact.
      const float first = biased<kChannels>(left, c), second = biased<kChannels>(right, c);
      return share_x * (second - first) + (first - kBias);
    };
    const float share = share_y * kScale;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const float above = along_row(upper_left, upper_right, c);
      const float below = along_row(lower_left, lower_right, c);
      values[c] = share * (below - above) + kScale * above;
    }
  }

  // Interpolates with weights of 15 bits along rows; the values are from 0 to 1.
  static constexpr float kShares = 32768.0f;
  template <int kChannels>
  __device__ __forceinline__ void quickly(float (&values)[kChannels]) const {
    // Weight of the right pixels in the upper half of the word, of the left ones in the lower half.
    const uint32_t share = __float_as_uint(share_x * kShares + kBias) - kBiasBits;
    const uint32_t shares = share * 65535u + 32768u;
    // Sums are below 2^23, so they fit the last bits of a float32's mantissa too.
    const auto along_row = [&](uint32_t left, uint32_t right, float (&sums)[4]) {
      const uint32_t low = __byte_perm(left, right, 0x5140);
      sums[0] = __uint_as_float(__dp2a_lo(shares, low, kBiasBits));
      if constexpr (kChannels > 1) {
        const uint32_t high = __byte_perm(left, right, 0x7362);
        sums[1] = __uint_as_float(__dp2a_hi(shares, low, kBiasBits));
        sums[2] = __uint_as_float(__dp2a_lo(shares, high, kBiasBits));
        if constexpr (kChannels > 3) {
          sums[3] = __uint_as_float(__dp2a_hi(shares, high, kBiasBits));
        }
      }
    };
    const float lower = share_y * (kScale / kShares);
    float above[4], below[4];
    along_row(upper_left, upper_right, above);
    along_row(lower_left, lower_right, below);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      values[c] = lower * (below[c] - above[c]) + unbiased(above[c], kScale / kShares);
    }
  }
};

// Weights of the pixels that each column (or row) of a region depends on.
struct Table {
  int entries;
  uint32_t* words;

  __device__ int& first(int i) const { return reinterpret_cast<int*>(words)[i]; }
  // Sum of the normalised weights of pixels inside the image; the remaining weight is the fill's.
  __device__ float& share(int i) const { return reinterpret_cast<float*>(words)[entries + i]; }
  __device__ float& weight(int i, int tap) const {
    return reinterpret_cast<float*>(words)[(2 + tap) * entries + i];
  }

  // Sets entry `i`: the first pixel, the normalised weights times `scale`, and their sum inside the
  // image.
  __device__ void set(const Axis& axis, int taps, float scale, int i) const {
    const float start = floorf(axis.place - axis.reach) + 1.0f;
    float total = 0.0f, covered = 0.0f;
    for (int k = 0; k < taps; ++k) {
      const float seen = axis.seen(start + k, &total);
      weight(i, k) = seen;
      covered += seen;
    }
    const float inverse = total == 0.0f ? 1.0f : 1.0f / total;
    for (int k = 0; k < taps; ++k) weight(i, k) *= inverse * scale;
    first(i) = static_cast<int>(start);
    share(i) = covered * inverse;
  }
};

// Filters the rows of a box for each column of a region, into [row of the box, column, channel].
template <int kTaps, int kChannels>
__device__ __forceinline__ void filter_rows(const Box& box, const uint32_t* words,
                                            const Table& table, float* middle) {
  const int columns = table.entries;
  const int at_once = kThreads / columns;
  const int first_row = threadIdx.x / columns, column = threadIdx.x % columns;
  if (first_row >= at_once) return;
  const int taps = kTaps > 0 ? kTaps : box.taps_x;
  float weights[kTaps > 0 ? kTaps : 1];
  if constexpr (kTaps > 0) {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) weights[k] = table.weight(column, k);
  }
  const uint32_t* from = words + table.first(column) - box.left;
  for (int row = first_row; row < box.height; row += at_once) {
    float sums[kChannels] = {};
#pragma unroll
    for (int k = 0; k < taps; ++k) {
      const float weight = kTaps > 0 ? weights[kTaps > 0 ? k : 0] : table.weight(column, k);
      add_levels(from[row * box.pitch + k], weight, sums);
    }
#pragma unroll
    for (int c = 0; c < kChannels; ++c) middle[(row * columns + column) * kChannels + c] = sums[c];
  }
}

template <int kChannels>
__device__ __forceinline__ void filter_rows(const Box& box, const uint32_t* words,
                                            const Table& table, float* middle) {
  switch (box.taps_x) {
    case 2:
      return filter_rows<2, kChannels>(box, words, table, middle);
    case 3:
      return filter_rows<3, kChannels>(box, words, table, middle);
    case 4:
      return filter_rows<4, kChannels>(box, words, table, middle);
    default:
      return filter_rows<0, kChannels>(box, words, table, middle);
  }
}

// Filters the results of `filter_rows` along columns, for the pixels of a thread.
template <int kTaps, int kChannels>
__device__ __forceinline__ void filter_columns(const Box& box, const Table& across,
                                               const Table& down, const float* middle, int line,
                                               int place, float (&values)[kPixels][kChannels]) {
  const int pitch = across.entries * kChannels;
  const float* from = middle + (down.first(line) - box.top) * pitch + place * kChannels;
  const int taps = kTaps > 0 ? kTaps : box.taps_y;
#pragma unroll
  for (int k = 0; k < taps; ++k) {
    const float weight = down.weight(line, k);
    float row[kPixels][kChannels];
    load_floats(from + k * pitch, row);
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) values[i][c] += weight * row[i][c];
    }
  }
}

template <int kChannels>
__device__ __forceinline__ void read_upright(const Args& args, const Box& box, const Table& across,
                                             const Table& down, const float* middle, int line,
                                             int place, float (&values)[kPixels][kChannels]) {
  if (box.taps_y == 2) {
    filter_columns<2>(box, across, down, middle, line, place, values);
  } else if (box.taps_y == 3) {
    filter_columns<3>(box, across, down, middle, line, place, values);
  } else {
    filter_columns<0>(box, across, down, middle, line, place, values);
  }
  if (args.fill_is_bytes && args.fill_word == 0) return;
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    fill_with(args, kScale * (1.0f - across.share(place + i) * down.share(line)), values[i]);
  }
}
