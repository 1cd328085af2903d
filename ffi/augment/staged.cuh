// Reads values of a result from a box of a uint8 image in shared memory, with one word per pixel.
//
// In global memory a warp's pixels lie in as many cache lines as rows of the image, each of which
// takes a cycle for every byte that a lane loads; in shared memory they lie in banks.
#pragma once

#include "augment/direct.cuh"

// Divides numbers below 2^16 by a constant.
class Divider {
 public:
  __device__ explicit Divider(int divisor)
      : divisor_(divisor), inverse_(divisor > 1 ? 0xffffffffu / divisor + 1 : 0) {}
  __device__ __forceinline__ int quotient(int n) const {
    return divisor_ > 1 ? static_cast<int>(__umulhi(static_cast<uint32_t>(n), inverse_)) : n;
  }

 private:
  int divisor_;
  uint32_t inverse_;
};

// Returns a position mirrored at both ends into 0 .. count - 1.
__device__ __forceinline__ int mirrored(int place, int count) {
  if (place >= 0 && place < count) return place;
  const int period = max(2 * (count - 1), 1);
  const int within = abs(place) % period;
  return min(within, period - within);
}

// A tile of a result, with the pixels around it that a blur needs.
struct Region {
  int first_row, first_column;
  int rows, columns;
  int end_row, end_column;  // size of the result

  // Returns the row of the image for row `i` of the region; rows beyond an edge are mirrored.
  // Values beyond an image that is smaller than its array are not used.
  __device__ __forceinline__ int row(int i, int count) const {
    return inside(mirrored(first_row + i, count), first_row, rows, end_row);
  }
  __device__ __forceinline__ int column(int i, int count) const {
    return inside(mirrored(first_column + i, count), first_column, columns, end_column);
  }

 private:
  static __device__ __forceinline__ int inside(int place, int first, int count, int end) {
    return max(min(place, min(first + count, end) - 1), max(first, 0));
  }
};

enum class Reading { kDirect, kInPlace, kNearest, kBetweenFour, kUpright };

// The pixels of an image that a region depends on.
struct Box {
  Reading reading;  // method of reading; kDirect if the pixels are not in shared memory
  int left, top, width, height;
  int pitch;           // words between the starts of rows
  int taps_x, taps_y;  // kUpright only: pixels along x and y that a value depends on
};

// Sets the box to the pixels from (left, top) to (right, bottom), and returns whether they fit.
__device__ inline bool fits(const Args& args, float left, float top, float right, float bottom,
                            Box* box) {
  // The negated test is also true of NaN.
  if (!(left > -1e6f && top > -1e6f && right < 1e6f && bottom < 1e6f)) return false;
  box->left = static_cast<int>(left) & ~3;
  box->top = static_cast<int>(top);
  box->width = static_cast<int>(right) - box->left + 1;
  box->height = static_cast<int>(bottom) - box->top + 1;
  // If rows are whole multiples of 32 banks, lanes conflict only if their columns share a bank.
  box->pitch = (box->width + 31) & ~31;
  if (int64_t{box->pitch} * box->height > args.room.box) box->pitch = (box->width + 3) & ~3;
  return int64_t{box->pitch} * box->height <= args.room.box;
}

template <int kChannels>
__device__ inline Box box_of(const Args& args, const Map& map, const Region& region) {
  Box box = {};
  box.reading = Reading::kDirect;
  const int first_row = max(region.first_row, 0), first_column = max(region.first_column, 0);
  const int last_row = min(region.first_row + region.rows, region.end_row) - 1;
  const int last_column = min(region.first_column + region.columns, region.end_column) - 1;
  if (!args.reads) {
    if (fits(args, first_column, first_row, last_column, last_row, &box)) {
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
        int64_t{box.height} * region.columns * kChannels <= args.room.middle) {
      box.reading = Reading::kUpright;
    }
    return box;
  }
  const bool is_plain = args.interpolation == kBilinear && map.radius(0, args.widest) == 1.0f &&
                        map.radius(1, args.widest) == 1.0f;
  if (!args.fill_is_bytes || (!is_plain && args.interpolation != kNearest)) return box;
  // The tile's corners in the image; a wholly visible tile becomes a convex quadrilateral.
  // Positions within it are rounded, hence the margins below.
  const float left = fminf(fminf(x[0], x[1]), fminf(x[2], x[3]));
  const float right = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  const float top = fminf(fminf(y[0], y[1]), fminf(y[2], y[3]));
  const float bottom = fmaxf(fmaxf(y[0], y[1]), fmaxf(y[2], y[3]));
  const bool are_finite = x[0] + x[1] + x[2] + x[3] + y[0] + y[1] + y[2] + y[3] < 1e30f;
  if (are_finite && fits(args, floorf(left) - 1.0f, floorf(top) - 1.0f, floorf(right) + 2.0f,
                         floorf(bottom) + 2.0f, &box)) {
    box.reading = is_plain ? Reading::kBetweenFour : Reading::kNearest;
  }
  return box;
}

// Copies a box into shared memory, four pixels of a row at a time. Pixels outside the window get
// the fill.
template <int kChannels>
__device__ __forceinline__ void stage(const Args& args, const Map& map, const Box& box,
                                      const uint8_t* image, uint32_t* words) {
  int first_column = 0, last_column = args.width - 1, first_row = 0, last_row = args.height - 1;
  if (args.reads) {
    last_column = static_cast<int>(map.source(0)) - 1;
    last_row = static_cast<int>(map.source(1)) - 1;
    if (!args.drops) {
      first_column = static_cast<int>(ceilf(fminf(fmaxf(map.first(0), 0.0f), 2e6f)));
      first_row = static_cast<int>(ceilf(fminf(fmaxf(map.first(1), 0.0f), 2e6f)));
      last_column =
          min(last_column, static_cast<int>(floorf(fmaxf(fminf(map.last(0), 2e6f), -1.0f))));
      last_row = min(last_row, static_cast<int>(floorf(fmaxf(fminf(map.last(1), 2e6f), -1.0f))));
    }
  }
  const int quads = (box.width + 3) / 4;
  const Divider by_quads(quads);
  const uint8_t* end = static_cast<const uint8_t*>(args.x) + args.bytes;
  for (int i = threadIdx.x; i < box.height * quads; i += kThreads) {
    const int line = by_quads.quotient(i), quad = i - line * quads;
    const int row = box.top + line, column = box.left + 4 * quad;
    uint32_t p[4] = {args.fill_word, args.fill_word, args.fill_word, args.fill_word};
    if (row >= first_row && row <= last_row && column + 3 >= first_column &&
        column <= last_column) {
      const uint8_t* from = image + (int64_t{row} * args.width + column) * kChannels;
      const int before = reinterpret_cast<uintptr_t>(from) % 4;
      if (column >= first_column && column + 3 <= last_column &&
          (kChannels != 3 || from + 16 <= end)) {
        if constexpr (kChannels == 4) {
#pragma unroll
          for (int k = 0; k < 4; ++k) p[k] = reinterpret_cast<const uint32_t*>(from)[k];
        } else if constexpr (kChannels == 3) {
          const uint32_t* aligned = reinterpret_cast<const uint32_t*>(from - before);
          uint32_t a = aligned[0], b = aligned[1], c = aligned[2];
          if (before != 0) {
            const uint32_t d = aligned[3], shifts = 0x3210u + 0x1111u * before;
            a = __byte_perm(a, b, shifts);
            b = __byte_perm(b, c, shifts);
            c = __byte_perm(c, d, shifts);
          }
          p[0] = a;  // the fourth byte is not used
          p[1] = __byte_perm(a, b, 0x0543);
          p[2] = __byte_perm(b, c, 0x0432);
          p[3] = c >> 8;
        } else {
#pragma unroll
          for (int k = 0; k < 4; ++k) p[k] = from[k];
        }
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (column + k < first_column || column + k > last_column) continue;
          p[k] = 0;
#pragma unroll
          for (int c = 0; c < kChannels; ++c) p[k] |= uint32_t{from[k * kChannels + c]} << (8 * c);
        }
      }
    }
    *reinterpret_cast<uint4*>(words + line * box.pitch + 4 * quad) =
        make_uint4(p[0], p[1], p[2], p[3]);
  }
}

// The float32 2^23: a byte placed in the last bits of its mantissa adds the byte's value.
constexpr float kBias = 8388608.0f;
__device__ __forceinline__ float biased(uint32_t word, int byte) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + byte));
}

template <int kChannels>
__device__ __forceinline__ void levels_of(uint32_t word, float (&values)[kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) values[c] = biased(word, c) - kBias;
}

// Adds `weight` times a pixel.
template <int kChannels>
__device__ __forceinline__ void add_levels(uint32_t word, float weight, float (&sums)[kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) sums[c] += weight * (biased(word, c) - kBias);
}

// Interpolates bilinearly between four pixels.
template <int kChannels>
__device__ __forceinline__ void read_between(const Box& box, const uint32_t* words, float x,
                                             float y, float (&values)[kChannels]) {
  const float left = floorf(x), top = floorf(y);
  const float share_x = x - left, share_y = y - top;
  const uint32_t* upper =
      words + (static_cast<int>(top) - box.top) * box.pitch + static_cast<int>(left) - box.left;
  const uint32_t* lower = upper + box.pitch;
  const uint32_t a = upper[0], b = upper[1], c = lower[0], d = lower[1];
#pragma unroll
  for (int k = 0; k < kChannels; ++k) {
    // Differences of two biased values are exact.
    const float upper_left = biased(a, k), lower_left = biased(c, k);
    const float above = share_x * (biased(b, k) - upper_left) + (upper_left - kBias);
    const float below = share_x * (biased(d, k) - lower_left) + (lower_left - kBias);
    values[k] = share_y * (below - above) + above;
  }
}

// Weights of the pixels that each column (or row) of a region depends on.
struct Table {
  int entries;
  uint32_t* words;

  __device__ int& first(int i) const { return reinterpret_cast<int*>(words)[i]; }
  // Sum of the weights of pixels that show the image; the rest is fill.
  __device__ float& share(int i) const { return reinterpret_cast<float*>(words)[entries + i]; }
  __device__ float& weight(int i, int tap) const {
    return reinterpret_cast<float*>(words)[(2 + tap) * entries + i];
  }

  __device__ void set(const Axis& axis, int taps, int i) const {
    const float start = floorf(axis.place - axis.reach) + 1.0f;
    float total = 0.0f, covered = 0.0f;
    for (int k = 0; k < taps; ++k) {
      const float seen = axis.seen(start + k, &total);
      weight(i, k) = seen;
      covered += seen;
    }
    const float inverse = total == 0.0f ? 1.0f : 1.0f / total;
    for (int k = 0; k < taps; ++k) weight(i, k) *= inverse;
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

// Filters the results of `filter_rows` along a column, for a pixel of a region.
template <int kTaps, int kChannels>
__device__ __forceinline__ void filter_column(const Box& box, const Table& across,
                                              const Table& down, const float* middle, int row,
                                              int column, float (&values)[kChannels]) {
  const int pitch = across.entries * kChannels;
  const float* from = middle + (down.first(row) - box.top) * pitch + column * kChannels;
  const int taps = kTaps > 0 ? kTaps : box.taps_y;
#pragma unroll
  for (int k = 0; k < taps; ++k) {
    const float weight = down.weight(row, k);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) values[c] += weight * from[k * pitch + c];
  }
}

template <int kChannels>
__device__ __forceinline__ void read_upright(const Args& args, const Box& box, const Table& across,
                                             const Table& down, const float* middle, int row,
                                             int column, float (&values)[kChannels]) {
  if (box.taps_y == 2) {
    filter_column<2>(box, across, down, middle, row, column, values);
  } else if (box.taps_y == 3) {
    filter_column<3>(box, across, down, middle, row, column, values);
  } else {
    filter_column<0>(box, across, down, middle, row, column, values);
  }
  fill_with(args, 1.0f - across.share(column) * down.share(row), values);
}
