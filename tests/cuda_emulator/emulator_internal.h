// Shared parts of emulator.cc and ptx.cc: threads as fibers, blocks and warps.
#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "emulator.h"

namespace cuda_emulator {

// A pending copy to shared memory: it arrives only when a thread waits for it.
struct Copy {
  uint32_t to;
  const void* from;  // nullptr for zeros
  uint32_t bytes;
};

struct Fiber {
  Thread thread;
  bool lives = false;
  void* stack = nullptr;
  uint64_t cluster_phase = 0;     // phase of the cluster barrier at its last arrival
  std::vector<Copy> open;         // copies without a group yet
  std::vector<std::vector<Copy>> groups;  // groups of copies, the oldest first
};

struct Barrier {
  int arrived = 0;
  uint64_t phase = 0;
};

// Lanes that have arrived at an instruction that they execute together.
struct Meeting {
  const void* instruction = nullptr;
  Lanes lanes = {};
  uint64_t phase = 0;
};

struct Warp {
  Meeting of_all;
  std::map<uint32_t, Meeting> of_some;  // meetings by mask
};

// A bulk copy, which reports its bytes to a barrier in shared memory.
struct BulkCopy {
  Copy copy;
  uint32_t barrier;
};

struct Block {
  uint3 index;
  uint32_t rank;  // rank in its cluster
  int living;     // threads that have not ended
  int vote;
  std::array<Barrier, 16> barriers;
  std::vector<Warp> warps;
  std::vector<BulkCopy> bulk_copies;
};

Fiber& fiber();
Block& block_of_cluster(uint32_t rank);
// Returns the address in the cluster's block `rank` that corresponds to a shared address of this
// block.
uint32_t address_in_block(uint32_t address, uint32_t rank);

// Ends the launch with an error.
[[noreturn]] void fail(const std::string& why);
// Lets other threads run until `done(argument)`.
void wait_until(const char* what, bool (*done)(void*), void* argument);

void cluster_arrive();
void cluster_wait();

// Carries out all pending copies of the fiber.
void copy_all(Fiber& fiber);

}  // namespace cuda_emulator
