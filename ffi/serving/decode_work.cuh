// Division of attention over a cache among warps, by the lengths that the sequences have on the
// device.
//
// The work is a list of tiles of 16 keys: those of the first sequence, of the next one, and so on.
// A slot is `quota` consecutive tiles of this list, which may belong to several sequences. A slot
// has one warp for each unit, which is up to 16 query rows of a key head. The partial output of a
// slot for a sequence has the number slot + sequence, which is unique, since both only grow along
// the list.
#pragma once

#include <cstdint>

constexpr int kTileKeys = 16;
// Fewest tiles of a slot: with fewer, merging the partial outputs would take too long.
constexpr int kLeastTiles = 2;
constexpr unsigned kAllLanes = 0xffffffffu;

struct Sequences {
  const int* lengths;  // keys of each sequence, [batch], or nullptr for those up to its last query
  const int* offsets;  // position of the first query among the keys, [batch]
  const int* counts;   // queries of each sequence, [batch], or nullptr for all
  int batch;
  int tokens;    // queries of a sequence without counts
  int capacity;  // most keys of a sequence
  int window;    // keys that a query attends to, including its own; 0 for all
  int slots;     // number of slots (runs of tiles), of which the last may be empty

  __device__ __forceinline__ int length(int sequence) const {
    const int added = counts == nullptr ? tokens : counts[sequence];
    const int keys = lengths == nullptr ? offsets[sequence] + added : lengths[sequence];
    return min(max(keys, 0), capacity);
  }

  // Returns the first tile of a sequence with a key that one of its queries attends to.
  __device__ __forceinline__ int first_tile(int sequence) const {
    return window == 0 ? 0 : max(offsets[sequence] + 1 - window, 0) / kTileKeys;
  }

  __device__ __forceinline__ int tiles(int sequence) const {
    const int end = (length(sequence) + kTileKeys - 1) / kTileKeys;
    return max(end - first_tile(sequence), 0);
  }
};

__device__ __forceinline__ int sum_of_lanes(int x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAllLanes, x, lanes);
  return x;
}

// Division of the key tiles of all sequences among slots; whole warps call its functions.
struct TileList {
  int total = 0;
  int quota = 1;  // consecutive tiles of a slot

  __device__ __forceinline__ explicit TileList(const Sequences& sequences) {
    const int lane = threadIdx.x % 32;
    for (int b = lane; b < sequences.batch; b += 32) total += sequences.tiles(b);
    total = sum_of_lanes(total);
    quota = max((total + sequences.slots - 1) / sequences.slots, kLeastTiles);
  }

  // Returns the sequence of tile `number` of the list, and how many tiles precede that sequence.
  __device__ __forceinline__ int2 find(const Sequences& sequences, int number) const {
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int first = 0;; first += 32) {
      const int own = first + lane < sequences.batch ? sequences.tiles(first + lane) : 0;
      int until = own;  // tiles of this lane's sequence and of the lanes before it
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int other = __shfl_sync(kAllLanes, until, max(lane - lanes, 0));
        if (lane >= lanes) until += other;
      }
      const bool is_before = before + until <= number;
      const int sum = __shfl_sync(kAllLanes, until, 31);
      if (before + sum > number) {
        return {first + sum_of_lanes(is_before ? 1 : 0),
                before + sum_of_lanes(is_before ? own : 0)};
      }
      before += sum;
    }
  }

  // Returns the number of tiles in the list before those of a sequence.
  __device__ __forceinline__ int before(const Sequences& sequences, int sequence) const {
    int sum = 0;
    for (int b = threadIdx.x % 32; b < sequence; b += 32) sum += sequences.tiles(b);
    return sum_of_lanes(sum);
  }
};
