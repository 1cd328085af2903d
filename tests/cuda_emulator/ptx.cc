// The instructions of PTX that the kernels use in asm statements.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "emulator_internal.h"

namespace cuda_emulator {
namespace {

template <typename T>
T read(const Operand& operand) {
  T value;
  std::memcpy(&value, &operand.value, sizeof value);
  return value;
}

template <typename T>
void write(Operand& operand, T value) {
  if (operand.bytes != sizeof value) fail("a result has another size than its operand");
  std::memcpy(operand.result, &value, sizeof value);
}

// --- arithmetic ----------------------------------------------------------------------------------

// `operation %0, %0` and `operation %0, %1`, the second with kFrom = 1.
template <int kFrom, double (*kFunction)(double)>
void unary(Operand* operands) {
  write(operands[0], static_cast<float>(kFunction(read<float>(operands[kFrom]))));
}

double power_of_two(double x) { return std::exp2(x); }
double logarithm(double x) { return std::log2(x); }
double reciprocal(double x) { return 1.0 / x; }
double root(double x) { return std::sqrt(x); }

float largest(float x, float y) { return std::isnan(x) || std::isnan(y) ? NAN : std::max(x, y); }

uint32_t rounded_to_tf32(uint32_t bits) {
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits & 0xffffe000u;
  return (bits + 0x1000u) & 0xffffe000u;  // to the nearest, ties away from zero
}

template <__nv_fp8_interpretation_t kKind>
void four_bytes(Operand* operands) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte =
        __nv_cvt_float_to_fp8(read<float>(operands[1 + i]), __NV_SATFINITE, kKind);
    word |= byte << 8 * i;
  }
  write(operands[0], word);
}

// --- products of a warp --------------------------------------------------------------------------

struct Half {
  static constexpr int kWordValues = 2;
  static float value(uint32_t word, int i) { return all()[word >> 16 * i & 0xffff]; }
  // The value of each of the 65536 bit patterns.
  static const std::vector<float>& all() {
    static const auto values = [] {
      std::vector<float> values(1 << 16);
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = __half2float(__half(__half_raw{static_cast<uint16_t>(i)}));
      }
      return values;
    }();
    return values;
  }
};
struct Bfloat16 {
  static constexpr int kWordValues = 2;
  static float value(uint32_t word, int i) {
    return bits<float>(static_cast<uint32_t>(word >> 16 * i << 16));
  }
};
struct Tf32 {
  static constexpr int kWordValues = 1;
  static float value(uint32_t word, int) { return bits<float>(word & 0xffffe000u); }
};
struct Int8 {
  static constexpr int kWordValues = 4;
  static int32_t value(uint32_t word, int i) { return static_cast<int8_t>(word >> 8 * i); }
};
// d = a b + c of pairs of 16-bit floats; the product and the sum are exact in float64.
template <typename T>
void multiply_add_pairs(Operand* operands) {
  uint32_t pair = 0;
  for (int i = 0; i < 2; ++i) {
    double numbers[3];
    for (int j = 0; j < 3; ++j) numbers[j] = T::value(read<uint32_t>(operands[1 + j]), i);
    const double sum = numbers[0] * numbers[1] + numbers[2];
    const uint16_t rounded = std::is_same_v<T, Half> ? bits<uint16_t>(__double2half(sum))
                                                     : bits<uint16_t>(__double2bfloat16(sum));
    pair |= static_cast<uint32_t>(rounded) << 16 * i;
  }
  write(operands[0], pair);
}

template <__nv_fp8_interpretation_t kKind>
struct Float8 {
  static constexpr int kWordValues = 4;
  static float value(uint32_t word, int i) {
    const auto byte = static_cast<__nv_fp8_storage_t>(word >> 8 * i);
    return Half::all()[__nv_cvt_fp8_to_halfraw(byte, kKind).x];
  }
};

// d [16, 8] += a [16, K] @ b [K, 8], K = 8 words of a's rows. Lane 4 g + t has the rows g and g + 8 of
// a and d, and column g of b; the operands are d (4), a (4) and b (2).
template <typename T, typename Sum>
void multiply(const Lanes& lanes) {
  constexpr int kWord = T::kWordValues, kDepth = 8 * kWord;
  Sum a[16][kDepth], b[kDepth][8], d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto* operands = static_cast<const Operand*>(lanes.of[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < kWord; ++i) {
        const int k = (4 * half + t) * kWord + i;
        a[g][k] = T::value(read<uint32_t>(operands[4 + 2 * half]), i);
        a[g + 8][k] = T::value(read<uint32_t>(operands[5 + 2 * half]), i);
        b[k][g] = T::value(read<uint32_t>(operands[8 + half]), i);
      }
    }
  }
  for (int row = 0; row < 16; ++row) {
    Sum sums[8] = {};
    for (int k = 0; k < kDepth; ++k) {
      for (int column = 0; column < 8; ++column) sums[column] += a[row][k] * b[k][column];
    }
    std::copy(sums, sums + 8, d[row]);
  }
  for (int lane = 0; lane < 32; ++lane) {
    auto* operands = static_cast<Operand*>(lanes.of[lane]);
    for (int i = 0; i < 4; ++i) {
      write(operands[i], read<Sum>(operands[i]) + d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
  }
}

template <typename T, typename Sum>
void mma(Operand* operands) {
  static const char here = 0;
  together(&here, 0xffffffffu, multiply<T, Sum>, operands);
}

// --- matrices of 8 rows of 16 bytes --------------------------------------------------------------

template <bool kTransposed>
void load_matrices(Operand* operands) {
  static const char here = 0;
  const auto load = [](const Lanes& lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      auto* operands = static_cast<Operand*>(lanes.of[lane]);
      for (int matrix = 0; matrix < 4; ++matrix) {
        const auto row = [&](int r) {
          const auto* of = static_cast<const Operand*>(lanes.of[8 * matrix + r]);
          const auto address = read<uint32_t>(of[4]);
          if (address % 16 != 0) fail("ldmatrix reads a row that is no multiple of 16 bytes");
          return static_cast<const uint16_t*>(shared_pointer(address));
        };
        uint16_t pair[2];
        for (int i = 0; i < 2; ++i) {
          pair[i] = kTransposed ? row(lane % 4 * 2 + i)[lane / 4] : row(lane / 4)[lane % 4 * 2 + i];
        }
        write(operands[matrix], bits<uint32_t>(pair));
      }
    }
  };
  together(&here, 0xffffffffu, load, operands);
}

void widen_e4m3(Operand* operands) {
  const auto word = read<uint32_t>(operands[2]);
  for (int i = 0; i < 2; ++i) {
    const auto bytes = static_cast<__nv_fp8x2_storage_t>(word >> 16 * i);
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(bytes, __NV_E4M3);
    write(operands[i], static_cast<uint32_t>(pair.x) | static_cast<uint32_t>(pair.y) << 16);
  }
}

void transpose(Operand* operands) {
  static const char here = 0;
  const auto exchange = [](const Lanes& lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      uint16_t pair[2];
      for (int i = 0; i < 2; ++i) {
        // Value (row, lane / 4), which lane 4 row + lane / 8 has.
        const int row = lane % 4 * 2 + i;
        const auto* of = static_cast<const Operand*>(lanes.of[4 * row + lane / 8]);
        pair[i] = static_cast<uint16_t>(read<uint32_t>(of[1]) >> lane / 4 % 2 * 16);
      }
      write(static_cast<Operand*>(lanes.of[lane])[0], bits<uint32_t>(pair));
    }
  };
  together(&here, 0xffffffffu, exchange, operands);
}

template <int kWords>
void load_shared(Operand* operands) {
  const auto address = read<uint32_t>(operands[kWords]);
  if (address % (4 * kWords) != 0) fail("a load from shared memory is not aligned");
  const auto* from = static_cast<const uint32_t*>(shared_pointer(address));
  for (int i = 0; i < kWords; ++i) write(operands[i], from[i]);
}

template <int kWords>
void store_shared(Operand* operands) {
  const auto address = read<uint32_t>(operands[0]);
  if (address % (4 * kWords) != 0) fail("a store to shared memory is not aligned");
  auto* to = static_cast<uint32_t*>(shared_pointer(address));
  for (int i = 0; i < kWords; ++i) to[i] = read<uint32_t>(operands[1 + i]);
}

// --- copies that arrive later --------------------------------------------------------------------

void carry_out(const Copy& copy) {
  void* to = shared_pointer(copy.to);
  if (copy.from) {
    std::memcpy(to, copy.from, copy.bytes);
  } else {
    std::memset(to, 0, copy.bytes);
  }
}

template <uint32_t kBytes, bool kMayBeZeros>
void copy_async(Operand* operands) {
  const void* from = read<const void*>(operands[1]);
  const auto to = read<uint32_t>(operands[0]);
  if (kMayBeZeros && read<uint32_t>(operands[2]) == 0) from = nullptr;
  if (to % kBytes != 0 || reinterpret_cast<uintptr_t>(from) % kBytes != 0) {
    fail("an asynchronous copy is not aligned");
  }
  fiber().open.push_back({to, from, kBytes});
}

void commit(Operand*) {
  Fiber& mine = fiber();
  mine.groups.push_back(std::move(mine.open));
  mine.open.clear();
}

template <int kPending>
void wait_groups(Operand*) {
  auto& groups = fiber().groups;
  while (static_cast<int>(groups.size()) > kPending) {
    for (const Copy& copy : groups.front()) carry_out(copy);
    groups.erase(groups.begin());
  }
}

// --- barriers in shared memory -------------------------------------------------------------------

// The 8 bytes of an mbarrier.
struct Mbarrier {
  uint8_t phase;
  uint8_t pending;  // arrivals that the phase still waits for
  uint16_t arrivals;
  int32_t bytes;  // announced bytes minus arrived bytes; may be negative
};
static_assert(sizeof(Mbarrier) == 8);

Mbarrier& barrier_at(uint32_t address) {
  if (address % 8 != 0) fail("a barrier in shared memory is not aligned");
  return *static_cast<Mbarrier*>(shared_pointer(address));
}

void end_phase(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.pending = static_cast<uint8_t>(barrier.arrivals);
}

void init_barrier(Operand* operands) {
  const auto arrivals = read<uint32_t>(operands[1]);
  barrier_at(read<uint32_t>(operands[0])) = {0, static_cast<uint8_t>(arrivals),
                                             static_cast<uint16_t>(arrivals), 0};
}

void arrive(Operand* operands) {
  Mbarrier& barrier = barrier_at(read<uint32_t>(operands[0]));
  if (barrier.pending == 0) fail("more threads arrive at a barrier than it waits for");
  barrier.pending--;
  end_phase(barrier);
}

void arrive_expect(Operand* operands) {
  Mbarrier& barrier = barrier_at(read<uint32_t>(operands[0]));
  if (barrier.pending == 0) fail("more threads arrive at a barrier than it waits for");
  barrier.bytes += read<uint32_t>(operands[1]);
  barrier.pending--;
  end_phase(barrier);
}

void wait_parity(Operand* operands) {
  const auto address = read<uint32_t>(operands[0]);
  struct Waiting {
    Mbarrier* barrier;
    uint32_t address, parity;
  } waiting = {&barrier_at(address), address, read<uint32_t>(operands[1])};
  const auto done = [](void* argument) {
    const Waiting& at = *static_cast<Waiting*>(argument);
    auto& copies = thread().block->bulk_copies;
    for (size_t i = 0; i < copies.size();) {
      if (copies[i].barrier != at.address) {
        ++i;
        continue;
      }
      carry_out(copies[i].copy);
      at.barrier->bytes -= copies[i].copy.bytes;
      copies.erase(copies.begin() + i);
      end_phase(*at.barrier);
    }
    return (at.barrier->phase & 1u) != at.parity;
  };
  wait_until("a barrier in shared memory", done, &waiting);
}

void bulk_copy(Operand* operands) {
  const Copy copy = {read<uint32_t>(operands[0]), read<const void*>(operands[1]),
                     read<uint32_t>(operands[2])};
  if (copy.to % 16 != 0 || reinterpret_cast<uintptr_t>(copy.from) % 16 != 0 ||
      copy.bytes % 16 != 0) {
    fail("a bulk copy is not aligned");
  }
  thread().block->bulk_copies.push_back({copy, read<uint32_t>(operands[3])});
}

// --- counters of blocks ---------------------------------------------------------------------------

void count_up(Operand* operands) { ++*read<uint32_t*>(operands[0]); }

void wait_for_count(Operand* operands) {
  const auto done = [](void* argument) {
    const auto* operands = static_cast<const Operand*>(argument);
    return *read<const uint32_t*>(operands[0]) >= read<uint32_t>(operands[1]);
  };
  wait_until("a counter of other blocks", done, operands);
}

// --- clusters ------------------------------------------------------------------------------------

void cluster_rank(Operand* operands) { write(operands[0], thread().block->rank); }

void map_address(Operand* operands) {
  write(operands[0],
        address_in_block(read<uint32_t>(operands[1]), read<uint32_t>(operands[2])));
}

void store_reporting(Operand* operands) {
  *static_cast<float*>(shared_pointer(read<uint32_t>(operands[0]))) = read<float>(operands[1]);
  Mbarrier& barrier = barrier_at(read<uint32_t>(operands[2]));
  barrier.bytes -= sizeof(float);
  end_phase(barrier);
}

// --- the table -----------------------------------------------------------------------------------

struct Entry {
  std::string_view text;  // how the statement begins
  Instruction instruction;
};

const Entry kEntries[] = {
    {"ex2.approx.ftz.f32 %0, %0", unary<0, power_of_two>},
    {"ex2.approx.ftz.f32 %0, %1", unary<1, power_of_two>},
    {"lg2.approx.ftz.f32 %0, %1", unary<1, logarithm>},
    {"rcp.approx.ftz.f32 %0, %0", unary<0, reciprocal>},
    {"rcp.approx.ftz.f32 %0, %1", unary<1, reciprocal>},
    {"sqrt.approx.ftz.f32 %0, %1", unary<1, root>},
    {"max.NaN.f32 %0, %0, 0f00000000",
     [](Operand* o) { write(o[0], largest(read<float>(o[0]), 0.0f)); }},
    {"max.NaN.f32 %0, %1, %2",
     [](Operand* o) { write(o[0], largest(read<float>(o[1]), read<float>(o[2]))); }},
    {"cvt.rna.tf32.f32",
     [](Operand* o) { write(o[0], rounded_to_tf32(read<uint32_t>(o[1]))); }},
    {"{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32", four_bytes<__NV_E4M3>},
    {"{\n.reg .b16 low, high;\ncvt.rn.satfinite.e5m2x2.f32", four_bytes<__NV_E5M2>},
    {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", mma<Half, float>},
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", mma<Bfloat16, float>},
    {"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", mma<Tf32, float>},
    {"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", mma<Int8, int32_t>},
    {"mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", mma<Float8<__NV_E4M3>, float>},
    {"mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32", mma<Float8<__NV_E5M2>, float>},
    // Turing's instructions, which multiply parts of the same operands.
    {"{\nmma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", mma<Half, float>},
    {"{\nmma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32", mma<Int8, int32_t>},
    {"fma.rn.bf16x2 %0, %1, %2, %3", multiply_add_pairs<Bfloat16>},
    {"fma.rn.f16x2 %0, %1, %2, %3", multiply_add_pairs<Half>},
    {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", load_matrices<false>},
    {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", load_matrices<true>},
    {"{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2", widen_e4m3},
    {"movmatrix.sync.aligned.m8n8.trans.b16 %0, %1", transpose},
    {"ld.shared.b32 %0, [%1]", load_shared<1>},
    {"ld.shared.u8 %0, [%1]",
     [](Operand* o) {
       write(o[0], uint32_t{*static_cast<const uint8_t*>(shared_pointer(read<uint32_t>(o[1])))});
     }},
    {"ld.shared.v2.b32", load_shared<2>},
    {"ld.shared.v4.b32", load_shared<4>},
    {"st.shared.b32", store_shared<1>},
    {"st.shared.v4.b32", store_shared<4>},
    {"cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2", copy_async<16, true>},
    {"cp.async.cg.shared.global [%0], [%1], 16, %2", copy_async<16, true>},
    {"cp.async.cg.shared.global [%0], [%1], 16;", copy_async<16, false>},
    {"cp.async.ca.shared.global [%0], [%1], 4;", copy_async<4, false>},
    {"cp.async.commit_group", commit},
    {"cp.async.wait_group 0", wait_groups<0>},
    {"cp.async.wait_group 1", wait_groups<1>},
    {"cp.async.wait_group 2", wait_groups<2>},
    {"cp.async.wait_group 3", wait_groups<3>},
    {"cp.async.wait_all", [](Operand*) { copy_all(fiber()); }},
    {"bar.sync %0, %1",
     [](Operand* o) { barrier(read<int>(o[0]), read<int>(o[1])); }},
    {"mbarrier.init.shared::cta.b64 [%0], %1", init_barrier},
    {"mbarrier.arrive.shared::cta.b64 _, [%0]", arrive},
    {"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1", arrive_expect},
    {"{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity", wait_parity},
    {"cp.async.bulk.shared::cluster.global", bulk_copy},
    // Memory accesses are in program order here, and there is no cache.
    {"fence.", [](Operand*) {}},
    {"prefetch.global.L2", [](Operand*) {}},
    {"red.release.gpu.global.add.u32 [%0], 1", count_up},
    {"{\n.reg .pred done;\n.reg .u32 seen;\nagain:\nld.acquire.gpu.global.u32", wait_for_count},
    {"createpolicy.", [](Operand* o) { write(o[0], uint64_t{0}); }},
    {"mov.u32 %0, %%cluster_ctarank", cluster_rank},
    {"mapa.shared::cluster.u32", map_address},
    {"barrier.cluster.arrive", [](Operand*) { cluster_arrive(); }},
    {"barrier.cluster.wait", [](Operand*) { cluster_wait(); }},
    {"st.async.weak.shared::cluster", store_reporting},
    {"ld.shared::cluster.f32",
     [](Operand* o) {
       write(o[0], *static_cast<const float*>(shared_pointer(read<uint32_t>(o[1]))));
     }},
};

}  // namespace

void copy_all(Fiber& fiber) {
  for (const auto& group : fiber.groups) {
    for (const Copy& copy : group) carry_out(copy);
  }
  for (const Copy& copy : fiber.open) carry_out(copy);
  fiber.groups.clear();
  fiber.open.clear();
}

Instruction instruction(const char* ptx) {
  for (const Entry& entry : kEntries) {
    if (std::string_view(ptx).substr(0, entry.text.size()) == entry.text) return entry.instruction;
  }
  std::fprintf(stderr, "cuda_emulator: ptx.cc does not have %s\n", ptx);
  std::abort();
}

}  // namespace cuda_emulator
