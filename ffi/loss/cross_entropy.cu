// softmax_cross_entropy over rows of logits, as jaxfused/ops/loss/cross_entropy_xla.py defines it.
//
// A row is reduced to five numbers (see Statistic), from which XLA computes the loss of a token.
// The gradient of a row follows from these numbers and from the logits:
//
//   dlogits = pull softmax(logits) - push target - spread   (coefficients: see RowGradient).
//
// A kernel that is given the cotangents of the losses writes the gradient while the row is still in
// L2 or in shared memory: of a block, or of a cluster of blocks for a long row.
//
// A row may start anywhere in memory. Threads access vectors that start at multiples of 16 bytes,
// so the first and the last vector of a row may also hold values of adjacent rows.

#include <cfloat>
#include <climits>
#include <cmath>

#include "common/handler.h"
#include "common/mma.cuh"
#include "common/operands.h"
#include "common/ptx.cuh"
#include "common/row_vectors.cuh"
#include "common/rows.cuh"

namespace {

// Special labels: a row labelled kIgnored has no loss, and the class of kElsewhere is on another
// device. Any other label that is no class makes the row's results NaN.
constexpr int kIgnored = -1;
constexpr int kElsewhere = -2;

constexpr float kLog2e = 1.4426950408889634f;
constexpr int kMaxClusterBlocks = 8;
constexpr int kMaxThreads = 512;
constexpr int kMaxKeepingThreads = 256;  // threads, if a block keeps a row in shared memory
// Rows that an SM's shared memory should hold: while one is summed, the others are in flight.
constexpr int kRowsInFlight = 3;
constexpr int kWarpRowThreads = 256;  // threads of a block in which each warp has its own row
constexpr int kPlaces = kMaxClusterBlocks * kMaxThreads / kWarpSize;
// Vectors of a thread whose loads are in flight together, for rows that are not in shared memory.
constexpr int kUnroll = 4;
// Parts of a row that are copied to shared memory one by one: a part is read while later ones are
// in flight.
constexpr int kParts = 4;

// Statistics of a row, in their order in memory. kLogSum is log(sum(exp(logit - maximum))), kPicked
// is sum(target * (logit - maximum)) before label smoothing, kMean is mean(logit - maximum), and
// kTotal is sum(target).
enum Statistic { kMaximum, kLogSum, kPicked, kMean, kTotal, kStatistics };

// The labels: one class for each row, or a distribution over the classes.
struct Labels {
  const int* classes;
  Parameter soft;
};

struct LossOptions {
  float smoothing;
  float z_loss;
  float cap;          // 0 means no cap
  float inverse_cap;  // 1 / cap
};

// Forms of the loss, compiled separately because branches at run time would cost registers.
enum class Form {
  kPlain,    // labels are classes; no smoothing, no cap
  kSmooth,   // labels are classes, smoothed; no cap
  kGeneral,  // soft labels or a cap, and every other option
};

struct LossArgs {
  const void* logits;
  Labels labels;
  LossOptions options;
  // Forward: cotangents of the losses, [rows]. Backward, [rows, 3]: cotangents of kLogSum, of
  // kPicked times -1, and of kMean times -1 / classes.
  const float* coefficients;
  float* statistics;  // Statistics of all rows, [rows, kStatistics]; read in the backward
  void* dlogits;
  int64_t rows;
  int features;
  // Forward: most vectors of a row that one block reads. Backward: threads that share a part of a
  // row.
  int slice;
  // Forward: blocks that share a row. Backward: parts of a row.
  int cluster;
};

// Caps the logit to (-cap, cap).
template <typename T>
__device__ __forceinline__ float capped(float logit, const LossOptions& options) {
  const float x = logit * options.inverse_cap;
  if constexpr (sizeof(T) == 2) {
    // This tanh has an error of 2^-23, far less than the rounding of a 16-bit logit.
    return options.cap * (1.0f - __fdividef(2.0f, exp2_fast(x * (2.0f * kLog2e)) + 1.0f));
  } else {
    return options.cap * tanhf(x);
  }
}

// --- sums over a row -----------------------------------------------------------------------------

// Computes exp(logit - maximum) with one FMA and one exp2, as 2^power(logit). Because `bias` is
// rounded, power(maximum) is not quite 0; this error is the slip. Sums, rather than each term, are
// multiplied by 2^-slip.
class Exponent {
 public:
  __device__ __forceinline__ explicit Exponent(float maximum) {
    // Beyond 1e38, adjacent float32 values are so far apart that exp of their difference is 0 with
    // any scale; this scale keeps `bias` finite.
    scale = fabsf(maximum) < 1e38f ? kLog2e : 0x1p-10f;
    bias = -maximum * scale;
  }

  __device__ __forceinline__ float power(float logit) const { return fmaf(logit, scale, bias); }

  float scale;
  float bias;
};

// Sums over some elements of a row, relative to their maximum.
template <Form kForm>
struct RowSums {
  enum { kExp, kDistance, kCount, kSoft, kSoftTotal };
  static constexpr int kSums = kForm == Form::kPlain ? 1 : kForm == Form::kSmooth ? 3 : 5;
  // A finite start, because the distance of -inf from a logit of -inf would be NaN.
  float maximum = -FLT_MAX;
  float sums[kSums] = {};

  // Makes the sums relative to a larger maximum.
  __device__ __forceinline__ void raise(float to) {
    const float distance = maximum - to;
    sums[kExp] *= exp2_fast(distance * kLog2e);
    if constexpr (kForm != Form::kPlain) {
      if (sums[kCount] != 0.0f) sums[kDistance] += sums[kCount] * distance;
    }
    if constexpr (kForm == Form::kGeneral) {
      if (sums[kSoftTotal] != 0.0f) sums[kSoft] += sums[kSoftTotal] * distance;
    }
    maximum = to;
  }

  // Combines the sums of the lanes of a warp.
  __device__ __forceinline__ void join_lanes() {
    float most = maximum;
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
    }
    raise(most);
    add_over_lanes(kWarpSize, sums);
  }
};

// Adds logits to a row's sums, vector by vector. Until finished() corrects them, the sums contain
// the rounding error of the exponent (`slip`, see Exponent).
template <Form kForm>
class RowAdder {
  using Sums = RowSums<kForm>;

 public:
  __device__ RowAdder() : exponent_(sums_.maximum) {}

  // Makes the sums relative to `most`, if larger; to be called before adding logits up to `most`.
  __device__ __forceinline__ void raise(float most) {
    if (!(most > sums_.maximum)) return;  // also for a NaN
    take_out_slip();
    sums_.raise(most);
    exponent_ = Exponent(most);
    put_in_slip();
  }

  // Adds logits. Those for which owns(i) is false do not belong to the row, and must be -inf.
  template <int kSize, typename Owns>
  __device__ __forceinline__ void add(const float (&logits)[kSize], bool owns_all,
                                      const Owns& owns) {
    float powers[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) powers[i] = exponent_.power(logits[i]);
    if constexpr (kForm != Form::kPlain) {
      if (owns_all) {
        sums_.sums[Sums::kDistance] += sum_of(powers);
        sums_.sums[Sums::kCount] += kSize;
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if (!owns(i)) continue;
          sums_.sums[Sums::kDistance] += powers[i];
          sums_.sums[Sums::kCount] += 1.0f;
        }
      }
    }
#pragma unroll
    for (float& power : powers) power = exp2_fast(power);
    sums_.sums[Sums::kExp] += sum_of(powers);
  }

  // Adds soft labels (`shares`) and their products with logits that `add` has already added. A
  // label of 0 adds 0, even if the logit is -inf.
  template <int kSize>
  __device__ __forceinline__ void add_soft(const float (&logits)[kSize],
                                           const float (&shares)[kSize]) {
    float products[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      products[i] = shares[i] == 0.0f ? 0.0f : shares[i] * (logits[i] - sums_.maximum);
    }
    sums_.sums[Sums::kSoft] += sum_of(products);
    sums_.sums[Sums::kSoftTotal] += sum_of(shares);
  }

  __device__ __forceinline__ Sums finished() {
    take_out_slip();
    return sums_;
  }

 private:
  __device__ __forceinline__ void take_out_slip() {
    const float slip = exponent_.power(sums_.maximum);
    sums_.sums[Sums::kExp] *= exp2_fast(-slip);
    if constexpr (kForm != Form::kPlain) {
      const float slips = sums_.sums[Sums::kCount] * slip;
      sums_.sums[Sums::kDistance] = (sums_.sums[Sums::kDistance] - slips) / exponent_.scale;
    }
  }

  __device__ __forceinline__ void put_in_slip() {
    const float slip = exponent_.power(sums_.maximum);
    sums_.sums[Sums::kExp] *= exp2_fast(slip);
    if constexpr (kForm != Form::kPlain) {
      const float slips = sums_.sums[Sums::kCount] * slip;
      sums_.sums[Sums::kDistance] = sums_.sums[Sums::kDistance] * exponent_.scale + slips;
    }
  }

  Sums sums_;
  Exponent exponent_;
};

// Combines the sums of the warps of a block, or of a cluster of blocks.
template <Form kForm>
class WarpJoin {
  static constexpr int kValues = RowSums<kForm>::kSums + 1;

 public:
  static constexpr int kFloats = 2 * kValues * kPlaces;
  static constexpr int kBarriers = 2;

  __device__ WarpJoin(float* places, uint64_t* barriers, int cluster)
      : places_(places), barriers_(barriers), cluster_(cluster) {
    if (cluster == 1) return;
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < kBarriers; ++i) mbarrier_init(barriers + i);
      mbarrier_init_fence();
    }
    // A block of the cluster must have started before others store into its memory.
    cluster_sync();
  }

  __device__ __forceinline__ void operator()(RowSums<kForm>& row) {
    row.join_lanes();
    const int warps = blockDim.x / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    const int rank = cluster_ > 1 ? cluster_rank() : 0;
    const int place = rank * warps + threadIdx.x / kWarpSize;
    // Successive calls alternate between two halves of the memory, so that one barrier per call
    // suffices: a thread that overwrites a value has passed the barrier of the call in between, and
    // so have all threads that read that value.
    float* own = places_ + turn_ * kValues * kPlaces;
    const int used = cluster_ * warps;
    if (cluster_ == 1) {
      if (lane == 0) write(own + place, row);
      __syncthreads();
    } else {
      // A cluster barrier would also wait for the stores of the previous row's gradient, which take
      // long. These mbarriers count only what other blocks store here.
      uint64_t* const barrier = barriers_ + turn_;
      if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, used * kValues * sizeof(float));
      if (lane < cluster_) {
        const uint32_t address = cluster_address(own + place, lane);
        const uint32_t report = cluster_address(barrier, lane);
        cluster_store(address, row.maximum, report);
#pragma unroll
        for (int i = 0; i < kValues - 1; ++i) {
          cluster_store(address + (i + 1) * kPlaces * sizeof(float), row.sums[i], report);
        }
      }
      __syncwarp();
      mbarrier_wait(barrier, phase_);
    }
    turn_ ^= 1;
    if (turn_ == 0) phase_ ^= 1;
    row = read(own, lane, used);
    for (int other = lane + kWarpSize; other < used; other += kWarpSize) {
      RowSums<kForm> more = read(own, other, used);
      const float most = fmaxf(row.maximum, more.maximum);
      row.raise(most);
      more.raise(most);
#pragma unroll
      for (int i = 0; i < kValues - 1; ++i) row.sums[i] += more.sums[i];
    }
    row.join_lanes();
  }

 private:
  static __device__ __forceinline__ void write(float* place, const RowSums<kForm>& row) {
    place[0] = row.maximum;
#pragma unroll
    for (int i = 0; i < kValues - 1; ++i) place[(i + 1) * kPlaces] = row.sums[i];
  }

  static __device__ __forceinline__ RowSums<kForm> read(const float* own, int place, int used) {
    RowSums<kForm> row;
    if (place >= used) return row;
    row.maximum = own[place];
#pragma unroll
    for (int i = 0; i < kValues - 1; ++i) row.sums[i] = own[place + (i + 1) * kPlaces];
    return row;
  }

  float* places_;
  uint64_t* barriers_;
  int cluster_;
  int turn_ = 0;
  uint32_t phase_ = 0;
};

// --- vectors of a row ----------------------------------------------------------------------------

// Returns the largest value of some vectors; 16-bit values are compared in pairs.
template <typename T, int kVec, int kGroup>
__device__ __forceinline__ float largest_of_vectors(const Vector<T, kVec> (&packed)[kGroup]) {
  if constexpr (sizeof(T) == 2 && kVec > 1) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Pair most = reinterpret_cast<const Pair&>(packed[0].values[0]);
#pragma unroll
    for (int i = 1; i < kGroup * kVec / 2; ++i) {
      const uint32_t& pair = packed[i / (kVec / 2)].values[i % (kVec / 2)];
      most = __hmax2(most, reinterpret_cast<const Pair&>(pair));
    }
    Vector<T, 2> pair;
    pair.values[0] = reinterpret_cast<const uint32_t&>(most);
    float values[2];
    unpack(pair, values);
    return fmaxf(values[0], values[1]);
  } else {
    float most[kGroup];
#pragma unroll
    for (int u = 0; u < kGroup; ++u) {
      float values[kVec];
      unpack(packed[u], values);
      most[u] = largest_of(values);
    }
    return largest_of(most);
  }
}

// Reads vectors of a row: caps logits, reads soft labels, and masks values of adjacent rows.
template <typename T, int kVec, Form kForm>
class RowReader {
 public:
  __device__ RowReader(const Labels& labels, const LossOptions& options, int features,
                       const RowVectors<kVec>& vectors)
      : labels_(labels), options_(options), features_(features), vectors_(vectors) {}

  __device__ __forceinline__ bool is_inner(int j) const { return vectors_.is_inner(j); }

  // Adds vectors that lie wholly in the row to the row's sums (`adder`); there must be no soft
  // labels.
  template <int kGroup>
  __device__ __forceinline__ void add_inner(const Vector<T, kVec> (&packed)[kGroup],
                                            RowAdder<kForm>& adder) const {
    static_assert(kForm != Form::kGeneral);
    adder.raise(largest_of_vectors(packed));
#pragma unroll
    for (int u = 0; u < kGroup; ++u) {
      float logits[kVec];
      unpack(packed[u], logits);
      adder.add(logits, true, [](int) { return true; });
    }
  }

  __device__ __forceinline__ void add(int j, const Vector<T, kVec>& packed,
                                      RowAdder<kForm>& adder) const {
    float logits[kVec];
    read(packed, logits);
    const int column = vectors_.column(j);
    const bool inner = is_inner(j);
    const auto owns = [&](int i) { return inner || (column + i >= 0 && column + i < features_); };
    float most;
    if (!inner) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) logits[i] = owns(i) ? logits[i] : -INFINITY;
      most = largest_of(logits);
    } else if (kForm == Form::kGeneral) {
      most = largest_of(logits);
    } else {
      const Vector<T, kVec> one[1] = {packed};
      most = largest_of_vectors(one);
    }
    adder.raise(most);
    adder.add(logits, inner, owns);
    if constexpr (kForm == Form::kGeneral) {
      if (labels_.soft.data == nullptr) return;
      float labels[kVec];
      shares(j, labels);
      adder.add_soft(logits, labels);
    }
  }

  __device__ __forceinline__ void read(const Vector<T, kVec>& packed, float (&logits)[kVec]) const {
    unpack(packed, logits);
    if constexpr (kForm == Form::kGeneral) {
      if (options_.cap != 0.0f) {
#pragma unroll
        for (float& logit : logits) logit = capped<T>(logit, options_);
      }
    }
  }

  // Returns the soft labels of vector `j`; those beyond the row are 0.
  __device__ __forceinline__ void shares(int j, float (&out)[kVec]) const {
    if (is_inner(j)) {
      load_parameter_at(j, out);
      return;
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const int column = vectors_.column(j) + i;
      out[i] = column < 0 || column >= features_ ? 0.0f : soft_label(column);
    }
  }

 private:
  __device__ __forceinline__ void load_parameter_at(int j, float (&out)[kVec]) const {
    with_type(labels_.soft.dtype, [&](auto type) {
      using L = decltype(type);
      load_as_float<L>(static_cast<const L*>(labels_.soft.data) + (vectors_.first + j) * kVec, 0,
                       out);
    });
  }

  __device__ __forceinline__ float soft_label(int column) const {
    float value[1];
    with_type(labels_.soft.dtype, [&](auto type) {
      using L = decltype(type);
      const int64_t start = vectors_.first * kVec + vectors_.shift;
      load_as_float<L>(static_cast<const L*>(labels_.soft.data) + start, column, value);
    });
    return value[0];
  }

  Labels labels_;
  LossOptions options_;
  int features_;
  RowVectors<kVec> vectors_;
};

// Coefficients of the gradient of a row.
struct RowGradient {
  Exponent exponent;
  float pull;    // factor of 2^exponent.power(logit)
  float push;    // factor of the target, subtracted
  float spread;  // subtracted for each class

  // Computes the coefficients of a row from the cotangent `coefficient` of its loss.
  __device__ RowGradient(const LossOptions& options, int features, float coefficient,
                         float row_maximum, float sum, float total)
      : exponent(row_maximum) {
    const float kept = 1.0f - options.smoothing;
    const float lse = row_maximum + logf(sum);
    const float by_lse = kept * total + options.smoothing + 2.0f * options.z_loss * lse;
    pull = coefficient * by_lse / sum * exp2_fast(-exponent.power(row_maximum));
    push = coefficient * kept;
    spread = coefficient * options.smoothing / static_cast<float>(features);
  }

  // Computes the coefficients of a row from the cotangents in LossArgs::coefficients.
  __device__ RowGradient(const float* statistics, const float* cotangents)
      : exponent(statistics[kMaximum]), push(cotangents[1]), spread(cotangents[2]) {
    // If no logit of a shard is finite, its log-sum is -inf, its cotangent 0, and pull must stay 0.
    const float slip = exponent.power(statistics[kMaximum]);
    pull = cotangents[0];
    if (pull != 0.0f) pull *= exp2_fast(-fmaf(statistics[kLogSum], kLog2e, slip));
  }

  // Returns the gradient of a (capped) logit without the target's term.
  __device__ __forceinline__ float before_push(float logit) const {
    return fmaf(exp2_fast(exponent.power(logit)), pull, -spread);
  }
};

// Stores those values of vector `j` that belong to the row; `out` is the row's first vector.
template <typename T, int kVec, Form kForm>
__device__ __forceinline__ void store_row_vector(const RowReader<T, kVec, kForm>& reader,
                                                 const RowVectors<kVec>& vectors, int features,
                                                 int j, const float (&values)[kVec], T* out) {
  T* const place = out + static_cast<int64_t>(j) * kVec;
  if (reader.is_inner(j)) {
    Vector<T, kVec> packed;
    pack(values, packed);
    store_streaming<T, kVec>(place, packed);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const int column = vectors.column(j) + i;
    if (column < 0 || column >= features) continue;
    const float value[1] = {values[i]};
    Vector<T, 1> packed;
    pack(value, packed);
    store_vector(place + i, packed);
  }
}

// Computes vector `j` of a row's gradient, to which only the term of a class label is added later.
template <typename T, int kVec, Form kForm>
__device__ __forceinline__ void compute_gradient(const RowReader<T, kVec, kForm>& reader,
                                                 const LossArgs& args, const RowGradient& row,
                                                 int j, const Vector<T, kVec>& packed,
                                                 float (&values)[kVec]) {
  reader.read(packed, values);
#pragma unroll
  for (float& value : values) value = row.before_push(value);
  if constexpr (kForm == Form::kGeneral) {
    if (args.labels.soft.data == nullptr) return;
    float shares[kVec];
    reader.shares(j, shares);
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] -= row.push * shares[i];
  }
}

// Writes those values of vector `j` of the gradient that belong to the row.
template <typename T, int kVec, Form kForm>
__device__ __forceinline__ void write_gradient(const RowReader<T, kVec, kForm>& reader,
                                               const RowVectors<kVec>& vectors,
                                               const LossArgs& args, const RowGradient& row,
                                               int label, int j, const Vector<T, kVec>& packed,
                                               T* row_start) {
  float values[kVec];
  compute_gradient(reader, args, row, j, packed, values);
  const int column = vectors.column(j);
  if (static_cast<unsigned>(label - column) < static_cast<unsigned>(kVec)) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] -= column + i == label ? row.push : 0.0f;
  }
  if (kForm == Form::kGeneral && args.options.cap != 0.0f) {
    float logits[kVec];
    reader.read(packed, logits);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float share = logits[i] * args.options.inverse_cap;
      values[i] *= fmaf(-share, share, 1.0f);
    }
  }
  store_row_vector(reader, vectors, args.features, j, values, row_start);
}

// --- forward, with or without the gradient -------------------------------------------------------

// Label of a row and cotangent of its loss, loaded one row ahead.
struct RowRequest {
  int label = kIgnored;
  float coefficient = 0.0f;

  __device__ RowRequest(const LossArgs& args, int64_t row) {
    if (row >= args.rows) return;
    label = args.labels.classes == nullptr ? kElsewhere : args.labels.classes[row];
    if (args.coefficients != nullptr) coefficient = args.coefficients[row];
  }
};

__device__ __forceinline__ bool is_missing(int label, int features) {
  return label >= features || label < kElsewhere;
}

template <Form kForm>
__device__ __forceinline__ void write_statistics(const RowSums<kForm>& sums, bool soft, int label,
                                                 float label_logit, int features, float* out) {
  using Sums = RowSums<kForm>;
  const bool ignored = label == kIgnored;
  float picked = label >= 0 ? label_logit - sums.maximum : 0.0f;
  float total = label >= 0 ? 1.0f : 0.0f;
  float mean = 0.0f;
  if constexpr (kForm != Form::kPlain) {
    mean = sums.sums[Sums::kDistance] / static_cast<float>(features);
  }
  if constexpr (kForm == Form::kGeneral) {
    if (soft) {
      picked = sums.sums[Sums::kSoft];
      total = sums.sums[Sums::kSoftTotal];
    }
  }
  if (is_missing(label, features)) picked = nanf("");
  out[kMaximum] = ignored ? 0.0f : sums.maximum;
  out[kLogSum] = ignored ? 0.0f : logf(sums.sums[Sums::kExp]);
  out[kPicked] = ignored ? 0.0f : picked;
  out[kMean] = ignored ? 0.0f : mean;
  out[kTotal] = ignored ? 0.0f : total;
}

// The vectors of a row that a warp keeps in shared memory, `turns` for each lane. They are adjacent
// in the row, so that one lane can copy a part of them at once. No other warp uses these slots, so
// the warp needs no block barrier.
template <typename T, int kVec>
class WarpSlots {
 public:
  using Pack = Vector<T, kVec>;
  // Bytes of a block's mbarriers, a multiple of a vector's size.
  static constexpr int kBarrierBytes = kMaxKeepingThreads / kWarpSize * kParts * sizeof(uint64_t);

  // A row is copied in kParts parts. Each but the last has a multiple of `group` vectors per lane.
  __device__ WarpSlots(Pack* slots, uint64_t* barriers, int turns, int group)
      : slots_(slots),
        own_(shared_address(slots) + lane() * sizeof(Pack)),
        barriers_(barriers),
        turns_(turns),
        part_turns_(round_up(divide_up(turns, kParts), group)) {}

  // Initialises the mbarriers. Must be called once before the first copy.
  __device__ __forceinline__ void start() const {
    if constexpr (kHasBulkCopies) {
      if (lane() == 0) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) mbarrier_init(barriers_ + part);
        mbarrier_init_fence();
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ int begin(int part) const { return min(part * part_turns_, turns_); }
  __device__ __forceinline__ int end(int part) const { return begin(part + 1); }

  // Starts to copy a part of the `count` vectors at `source`, once all lanes have read the part
  // that the copy overwrites.
  __device__ __forceinline__ void fetch(int part, const T* source, int count) {
    if constexpr (kHasBulkCopies) {
      __syncwarp();
      if (lane() != 0) return;
      const int first = begin(part) * kWarpSize;
      const int size = max(min(count, end(part) * kWarpSize) - first, 0) * int{sizeof(Pack)};
      mbarrier_arrive_expect(barriers_ + part, size);
      if (size > 0) bulk_copy(slots_ + first, source + first * kVec, size, barriers_ + part);
    } else {
      for (int turn = begin(part); turn < end(part); ++turn) {
        const int i = turn * kWarpSize + lane();
        if (i < count) async_copy<sizeof(Pack)>(slots_ + i, source + i * kVec);
      }
      async_copies_commit();
    }
  }

  // Waits for a part. The parts of a row must be waited for in order.
  __device__ __forceinline__ void wait(int part) {
    if constexpr (kHasBulkCopies) {
      mbarrier_wait(barriers_ + part, phase_);
      if (part == kParts - 1) phase_ ^= 1;
    } else {
      async_copies_wait(min(kParts - 1 - part, 2));
    }
  }

  __device__ __forceinline__ Pack load(int turn) const {
    Pack packed;
    reinterpret_cast<uint4&>(packed) =
        load_shared_16(own_ + turn * kWarpSize * static_cast<int>(sizeof(Pack)));
    return packed;
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }

  Pack* slots_;
  uint32_t own_;
  uint64_t* barriers_;
  int turns_;
  int part_turns_;
  uint32_t phase_ = 0;
};

enum class Mode {
  kStatistics,  // no gradient
  kTwice,       // reads a row again for its gradient
  kResident,    // keeps the row in shared memory
};

constexpr int row_threads(bool warp, Mode mode) {
  if (warp) return kWarpRowThreads;
  return mode == Mode::kResident ? kMaxKeepingThreads : kMaxThreads;
}

// Resident blocks of an SM that the compiler must leave registers for.
constexpr int row_blocks(Form form, bool warp, Mode mode) {
  if (form == Form::kGeneral) return 2;
  if (warp) return mode == Mode::kTwice ? 2 : 4;
  return mode == Mode::kResident ? kRowsInFlight : 2;
}

// Computes statistics of rows and, except in Mode::kStatistics, their gradient. A team of threads
// (a warp with kWarp, else a block or a cluster) computes a row at a time. With Mode::kResident, a
// part of the next row is copied once the gradient of the same part of this row is written.
template <typename T, int kVec, Form kForm, bool kWarp, Mode kMode>
__global__ void __launch_bounds__(row_threads(kWarp, kMode), row_blocks(kForm, kWarp, kMode))
    forward_rows(const __grid_constant__ LossArgs args) {
  constexpr bool kGradient = kMode != Mode::kStatistics;
  constexpr bool resident = kMode == Mode::kResident;
  // Vectors that a lane reads together; they share one maximum and one test for the row's ends.
  constexpr int kGroup = kForm == Form::kGeneral || kWarp ? 1 : kForm == Form::kSmooth ? 2 : 4;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  using Pack = Vector<T, kVec>;
  using Join = WarpJoin<kForm>;
  using Slots = WarpSlots<T, kVec>;
  const T* const logits = static_cast<const T*>(args.logits);
  const int threads = kWarp ? kWarpSize : blockDim.x;
  const int thread = kWarp ? threadIdx.x % kWarpSize : threadIdx.x;
  const int cluster = kWarp ? 1 : args.cluster;
  const int rank = cluster > 1 ? cluster_rank() : 0;
  const int teams = kWarp ? blockDim.x / kWarpSize : 1;
  const int64_t step = kWarp ? static_cast<int64_t>(gridDim.x) * teams : gridDim.x / cluster;
  const int64_t first_row = kWarp
                                ? static_cast<int64_t>(blockIdx.x) * teams + threadIdx.x / kWarpSize
                                : blockIdx.x / cluster;

  const int warp = threadIdx.x / kWarpSize;
  const int turns = divide_up(args.slice, threads);  // vectors of a thread
  unsigned char* shared = shared_memory;
  uint64_t* const slot_barriers = reinterpret_cast<uint64_t*>(shared) + warp * kParts;
  if (resident) shared += Slots::kBarrierBytes;
  uint64_t* const join_barriers = reinterpret_cast<uint64_t*>(shared);
  if (!kWarp) shared += Join::kBarriers * sizeof(uint64_t);
  Join join_warps(reinterpret_cast<float*>(shared), join_barriers, cluster);
  if (!kWarp) shared += Join::kFloats * sizeof(float);

  // Indices of vectors in the row. If resident, the warp holds the vectors from `warp_j` on in
  // shared memory. Otherwise the thread reads the vectors from `first_j` on in steps of `threads`.
  // Both end before `ends_at`.
  const int warp_j = rank * args.slice + (kWarp ? 0 : warp * turns * kWarpSize);
  const int lane_j = warp_j + threadIdx.x % kWarpSize;
  const int first_j = rank * args.slice + thread;
  const auto ends_at = [&](const RowVectors<kVec>& vectors) {
    return min((rank + 1) * args.slice, vectors.count);
  };
  Slots slots(reinterpret_cast<Pack*>(shared) + warp * turns * kWarpSize, slot_barriers, turns,
              kGroup);
  if (resident) slots.start();
  const auto fetch = [&](int part, const RowVectors<kVec>& vectors, int end) {
    slots.fetch(part, logits + (vectors.first + warp_j) * kVec, end - warp_j);
  };

  RowRequest request(args, first_row);
  if (resident && first_row < args.rows) {
    const RowVectors<kVec> vectors(first_row, args.features);
    for (int part = 0; part < kParts; ++part) fetch(part, vectors, ends_at(vectors));
  }

  for (int64_t row = first_row; row < args.rows; row += step) {
    const RowVectors<kVec> vectors(row, args.features);
    const int end = ends_at(vectors);
    const RowReader<T, kVec, kForm> reader(args.labels, args.options, args.features, vectors);
    const T* const row_logits = logits + vectors.first * kVec;
    T* const row_dlogits = static_cast<T*>(args.dlogits) + vectors.first * kVec;
    const int label = request.label;
    const float coefficient = request.coefficient;
    const RowRequest next_request(args, row + step);
    const bool ignored = label == kIgnored;
    // Calls `use_group` with groups of vectors inside the row, and `use` with other vectors.
    const int inner_end = min(end, vectors.inner + static_cast<int>(vectors.inners));
    const auto for_each_group = [&](int part, const auto& use_group, const auto& use) {
      const int part_end = slots.end(part);
      for (int turn = slots.begin(part); turn < part_end; turn += kGroup) {
        const int j = lane_j + turn * kWarpSize;
        if (kGroup > 1 && turn + kGroup <= part_end && j >= vectors.inner &&
            j + (kGroup - 1) * kWarpSize < inner_end) {
          Pack packed[kGroup];
#pragma unroll
          for (int u = 0; u < kGroup; ++u) packed[u] = slots.load(turn + u);
          use_group(j, packed);
          continue;
        }
#pragma unroll 1
        for (int t = turn; t < min(turn + kGroup, part_end); ++t) {
          const int j = lane_j + t * kWarpSize;
          if (j < end) use(j, slots.load(t));
        }
      }
    };

    RowSums<kForm> sums;
    float label_logit = 0.0f;
    if (!ignored) {
      if (label >= 0 && label < args.features) {
        float value[1];
        unpack(load_vector<T, 1>(row_logits + vectors.shift + label), value);
        const bool caps = kForm == Form::kGeneral && args.options.cap != 0.0f;
        label_logit = caps ? capped<T>(value[0], args.options) : value[0];
      }
      RowAdder<kForm> adder;
      if constexpr (resident) {
#pragma unroll 1
        for (int part = 0; part < kParts; ++part) {
          slots.wait(part);
          for_each_group(
              part,
              [&](int, const Pack(&packed)[kGroup]) {
                if constexpr (kForm != Form::kGeneral) reader.add_inner(packed, adder);
              },
              [&](int j, const Pack& packed) { reader.add(j, packed, adder); });
        }
      } else {
        for (int turn = 0; turn < turns; turn += kUnroll) {
          Pack packed[kUnroll];
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            const int j = first_j + (turn + u) * threads;
            if (j < end) packed[u] = load_vector<T, kVec>(row_logits + int64_t{j} * kVec);
          }
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            const int j = first_j + (turn + u) * threads;
            if (j < end) reader.add(j, packed[u], adder);
          }
        }
      }
      sums = adder.finished();
      if (kWarp) {
        sums.join_lanes();
      } else {
        join_warps(sums);
      }
    } else if (resident) {
      for (int part = 0; part < kParts; ++part) slots.wait(part);
    }
    if (thread == 0 && rank == 0) {
      write_statistics(sums, args.labels.soft.data != nullptr, label, label_logit, args.features,
                       args.statistics + row * kStatistics);
    }

    if constexpr (kGradient) {
      float total = 1.0f;
      if constexpr (kForm == Form::kGeneral) {
        if (args.labels.soft.data != nullptr) total = sums.sums[RowSums<kForm>::kSoftTotal];
      }
      RowGradient gradient(args.options, args.features, coefficient, sums.maximum,
                           sums.sums[RowSums<kForm>::kExp], total);
      if (is_missing(label, args.features)) gradient.pull = nanf("");
      const RowVectors<kVec> next_vectors(row + step, args.features);
      const int next_end = row + step < args.rows ? ends_at(next_vectors) : 0;
      const auto write = [&](int j, const Pack& packed) {
        if (ignored) {
          const float zeros[kVec] = {};
          store_row_vector(reader, vectors, args.features, j, zeros, row_dlogits);
        } else {
          write_gradient(reader, vectors, args, gradient, label, j, packed, row_dlogits);
        }
      };
      if constexpr (resident) {
        const auto write_group = [&](int j, const Pack(&packed)[kGroup]) {
          T* const place = row_dlogits + int64_t{j} * kVec;
#pragma unroll
          for (int u = 0; u < kGroup; ++u) {
            Pack rounded = {};
            if (!ignored) {
              float values[kVec];
              compute_gradient(reader, args, gradient, j, packed[u], values);
              pack(values, rounded);
            }
            store_streaming<T, kVec>(place + u * kWarpSize * kVec, rounded);
          }
        };
#pragma unroll 1
        for (int part = 0; part < kParts; ++part) {
          for_each_group(part, write_group, write);
          if (row + step < args.rows) fetch(part, next_vectors, next_end);
        }
        // Groups are written without the label's term. The thread that stored the gradient of the
        // label's logit stores it again with that term, so that groups need not be compared with
        // the label.
        if (kGroup > 1 && label >= 0 && label < args.features) {
          const int ahead = (vectors.shift + label) / kVec - lane_j;
          if (ahead >= 0 && ahead < turns * kWarpSize && ahead % kWarpSize == 0) {
            const float value[1] = {gradient.before_push(label_logit) - gradient.push};
            Vector<T, 1> rounded;
            pack(value, rounded);
            store_vector(row_dlogits + vectors.shift + label, rounded);
          }
        }
      } else {
        for (int turn = 0; turn < turns; turn += kUnroll) {
          Pack packed[kUnroll];
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            const int j = first_j + (turn + u) * threads;
            if (j < end && !ignored) {
              packed[u] = load_vector<T, kVec>(row_logits + int64_t{j} * kVec);
            }
          }
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            const int j = first_j + (turn + u) * threads;
            if (j < end) write(j, packed[u]);
          }
        }
      }
    }
    request = next_request;
  }
}

// --- backward ------------------------------------------------------------------------------------

constexpr int kBackwardThreads = 256;

// Writes dlogits from saved statistics. args.slice adjacent threads (a team) have a part of a row,
// with kUnroll vectors per thread.
template <typename T, int kVec, Form kForm>
__global__ void __launch_bounds__(kBackwardThreads)
    backward_rows(const __grid_constant__ LossArgs args) {
  const int threads = args.slice;
  const int teams = kBackwardThreads / threads;
  const int parts = args.cluster;
  const int64_t team = static_cast<int64_t>(blockIdx.x) * teams + threadIdx.x / threads;
  const int64_t row = team / parts;
  if (row >= args.rows) return;
  const RowVectors<kVec> vectors(row, args.features);
  const RowReader<T, kVec, kForm> reader(args.labels, args.options, args.features, vectors);
  const T* const row_logits = static_cast<const T*>(args.logits) + vectors.first * kVec;
  T* const row_dlogits = static_cast<T*>(args.dlogits) + vectors.first * kVec;
  const int first = static_cast<int>(team % parts) * kUnroll * threads + threadIdx.x % threads;
  const int label = args.labels.classes == nullptr ? kElsewhere : args.labels.classes[row];
  if (label == kIgnored) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const float zeros[kVec] = {};
      const int j = first + u * threads;
      if (j < vectors.count)
        store_row_vector(reader, vectors, args.features, j, zeros, row_dlogits);
    }
    return;
  }
  Vector<T, kVec> packed[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int j = first + u * threads;
    if (j < vectors.count) {
      packed[u] = load_streaming<T, kVec>(row_logits + static_cast<int64_t>(j) * kVec);
    }
  }
  RowGradient gradient(args.statistics + row * kStatistics, args.coefficients + row * 3);
  if (is_missing(label, args.features)) gradient.pull = nanf("");
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int j = first + u * threads;
    if (j < vectors.count) {
      write_gradient(reader, vectors, args, gradient, label, j, packed[u], row_dlogits);
    }
  }
}

// --- rows times factors, in place ----------------------------------------------------------------

struct ScaleArgs {
  void* x;
  const float* factors;  // [rows]
  int64_t rows;
  int64_t features;
};

constexpr int kScaleThreads = 256;

// Multiplies rows in place. A block first tests the factors of its rows, because usually all are 1.
template <typename T, int kVec>
__global__ void __launch_bounds__(kScaleThreads)
    scale_rows(const __grid_constant__ ScaleArgs args) {
  const int64_t values = args.rows * args.features;
  const int64_t vectors = (values + kVec - 1) / kVec;
  const int64_t begin = vectors * blockIdx.x / gridDim.x;
  const int64_t end = vectors * (blockIdx.x + 1) / gridDim.x;
  if (begin == end) return;
  const int64_t last_row = (min(end * kVec, values) - 1) / args.features;
  bool changes = false;
  for (int64_t row = begin * kVec / args.features + threadIdx.x; row <= last_row;
       row += kScaleThreads) {
    changes |= !(args.factors[row] == 1.0f);
  }
  if (!__syncthreads_or(changes)) return;
  T* const x = static_cast<T*>(args.x);
  int64_t row = -1, row_end = 0;
  float factor = 1.0f;
  // Loads the factor of the row that holds value `place`, unless it is the current row.
  const auto reach = [&](int64_t place) {
    if (place < row_end) return;
    row = place / args.features;
    row_end = (row + 1) * args.features;
    factor = args.factors[row];
  };
  const int64_t last = min(end * kVec, values);
  for (int64_t j = begin + threadIdx.x; j < end; j += kUnroll * kScaleThreads) {
    Vector<T, kVec> packed[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t start = (j + u * kScaleThreads) * kVec;
      if (start + kVec <= last) packed[u] = load_vector<T, kVec>(x + start);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t start = (j + u * kScaleThreads) * kVec;
      if (start >= last) break;
      reach(start);
      if (start + kVec <= row_end) {
        float part[kVec];
        unpack(packed[u], part);
#pragma unroll
        for (float& value : part) value *= factor;
        pack(part, packed[u]);
        store_streaming<T, kVec>(x + start, packed[u]);
        continue;
      }
      for (int64_t place = start; place < min(start + kVec, values); ++place) {
        reach(place);
        float value[1];
        unpack(load_vector<T, 1>(x + place), value);
        value[0] *= factor;
        Vector<T, 1> one;
        pack(value, one);
        store_vector(x + place, one);
      }
    }
  }
}

// --- launch --------------------------------------------------------------------------------------

// Options of the forward's launch. `cluster` is the number of blocks in a cluster, 0 to let the
// launch choose it, or -1 to read rows twice instead of keeping them in shared memory.
struct ForwardConfig {
  int cluster;
  int threads;  // limit on the threads of a block
};

// kWarpVectors: most vectors of a lane if each warp has its own row. kKeptVectors: vectors of a
// thread if a block keeps a row in shared memory; more if the block would need too many threads.
constexpr int kWarpVectors = 8;
constexpr int kKeptVectors = 16;

// Returns the bytes of shared memory of a block that reads `slice` vectors of a row; with `keeps`,
// these vectors stay in it.
template <typename T, int kVec, Form kForm>
int row_bytes(bool keeps, int slice, int threads) {
  using Join = WarpJoin<kForm>;
  constexpr int kJoinBytes = Join::kBarriers * sizeof(uint64_t) + Join::kFloats * sizeof(float);
  if (!keeps) return kJoinBytes;
  using Slots = WarpSlots<T, kVec>;
  const int vectors = divide_up(slice, threads) * threads;
  return Slots::kBarrierBytes + kJoinBytes + vectors * int{sizeof(typename Slots::Pack)};
}

// Returns how many blocks share a row, each with bytes(blocks) of shared memory; 0 if the row does
// not fit the largest cluster and must be read twice.
template <typename Bytes>
int choose_cluster(const Bytes& bytes, const Device& device) {
  constexpr int kReserved = 1024;  // bytes that CUDA reserves for each block
  const int most = device.clusters ? kMaxClusterBlocks : 1;
  const int all = device.shared_bytes + kReserved;
  for (int cluster = 1; cluster <= most; cluster *= 2) {
    if (kRowsInFlight * (bytes(cluster) + kReserved) <= all) return cluster;
  }
  return (device.clusters ? 1 : 2) * (bytes(most) + kReserved) <= all ? most : 0;
}

int choose_threads(int vectors, int of_thread, int most) {
  return std::clamp(round_up(divide_up(vectors, of_thread), kWarpSize), 2 * kWarpSize, most);
}

// Returns the threads of a block that keeps `slice` vectors of a row in shared memory.
int keeping_threads(int slice, int most) {
  return choose_threads(slice, kKeptVectors, std::min(most, kMaxKeepingThreads));
}

template <typename T, int kVec, Form kForm, Mode kMode>
ffi::Error launch_warp_rows(LossArgs args, const Device& device, cudaStream_t stream) {
  constexpr int kWarps = kWarpRowThreads / kWarpSize;
  using Slots = WarpSlots<T, kVec>;
  const int warp_bytes = round_up(args.slice, kWarpSize) * int{sizeof(typename Slots::Pack)};
  const int kept_bytes = Slots::kBarrierBytes + kWarps * warp_bytes;
  Launch launch = {dim3(1), kWarpRowThreads, kMode == Mode::kResident ? kept_bytes : 0};
  const auto kernel = forward_rows<T, kVec, kForm, true, kMode>;
  RETURN_IF_ERROR(allow_shared_memory(kernel, device));
  int resident = 0;
  RETURN_IF_ERROR(resident_blocks(kernel, launch, &resident));
  const int64_t blocks = (args.rows + kWarps - 1) / kWarps;
  launch.grid = dim3(std::min<int64_t>(blocks, int64_t{resident} * device.multiprocessors));
  return launch_kernel(kernel, args, launch, stream);
}

template <typename T, int kVec, Form kForm, Mode kMode>
ffi::Error launch_block_rows(const LossArgs& args, int most_threads, const Device& device,
                             cudaStream_t stream) {
  constexpr bool kKeeps = kMode == Mode::kResident;
  const int threads = kKeeps ? keeping_threads(args.slice, most_threads)
                             : choose_threads(args.slice, kUnroll, most_threads);
  Launch launch = {dim3(args.cluster), threads,
                   row_bytes<T, kVec, kForm>(kKeeps, args.slice, threads), args.cluster};
  const auto kernel = forward_rows<T, kVec, kForm, false, kMode>;
  RETURN_IF_ERROR(allow_shared_memory(kernel, device));
  int resident = 0;
  if (args.cluster > 1) {
    RETURN_IF_ERROR(resident_clusters(kernel, launch, stream, &resident));
    resident *= args.cluster;
  } else {
    RETURN_IF_ERROR(resident_blocks(kernel, launch, &resident));
    resident *= device.multiprocessors;
  }
  launch.grid = dim3(std::min<int64_t>(args.rows * args.cluster, resident));
  return launch_kernel(kernel, args, launch, stream);
}

template <typename T, int kVec, Form kForm>
ffi::Error launch_forward(LossArgs args, const ForwardConfig& config, const Device& device,
                          cudaStream_t stream) {
  // kSmooth is compiled only for blocks that keep their row in shared memory; others use kGeneral.
  constexpr Form kOtherForm = kForm == Form::kSmooth ? Form::kGeneral : kForm;
  const int vectors = most_vectors(args.features, kVec);
  const bool gradient = args.dlogits != nullptr;
  args.cluster = 1;
  args.slice = vectors;
  const bool in_warps = vectors <= kWarpVectors * kWarpSize && config.cluster <= 0;
  if constexpr (kVec * sizeof(T) == 16) {  // copies to shared memory need 16 bytes
    if (gradient && in_warps && config.cluster == 0) {
      return launch_warp_rows<T, kVec, kOtherForm, Mode::kResident>(args, device, stream);
    }
    if (gradient && config.cluster >= 0) {
      const auto bytes = [&](int cluster) {
        const int slice = divide_up(vectors, cluster);
        return row_bytes<T, kVec, kForm>(true, slice, keeping_threads(slice, config.threads));
      };
      const int cluster = config.cluster > 0 ? config.cluster : choose_cluster(bytes, device);
      if (cluster > 0) {
        args.cluster = cluster;
        args.slice = divide_up(vectors, cluster);
        if (bytes(cluster) > device.shared_bytes) {
          return ffi::Error::InvalidArgument("a row of " + std::to_string(args.features) +
                                             " logits does not fit clusters of " +
                                             std::to_string(cluster) + " blocks");
        }
        return launch_block_rows<T, kVec, kForm, Mode::kResident>(args, config.threads, device,
                                                                  stream);
      }
    }
  }
  const auto launch = [&](auto mode) {
    if (in_warps) return launch_warp_rows<T, kVec, kOtherForm, mode()>(args, device, stream);
    return launch_block_rows<T, kVec, kOtherForm, mode()>(args, config.threads, device, stream);
  };
  if (gradient) return launch(std::integral_constant<Mode, Mode::kTwice>{});
  return launch(std::integral_constant<Mode, Mode::kStatistics>{});
}

template <typename T, int kVec, Form kForm>
ffi::Error launch_backward(LossArgs args, cudaStream_t stream) {
  const int vectors = most_vectors(args.features, kVec);
  args.slice = kWarpSize;
  while (args.slice < kBackwardThreads && args.slice * kUnroll < vectors) args.slice *= 2;
  args.cluster = divide_up(vectors, kUnroll * args.slice);
  const int teams = kBackwardThreads / args.slice;
  const int64_t blocks = (args.rows * args.cluster + teams - 1) / teams;
  if (blocks > INT_MAX) return ffi::Error::InvalidArgument("logits have too many elements");
  return launch_kernel(backward_rows<T, kVec, kForm>, args,
                       {dim3(static_cast<unsigned>(blocks)), kBackwardThreads, 0}, stream);
}

// Calls `launch` with a value of the logits' type, and two compile-time constants: the length of a
// vector and the kernel's form.
template <typename F>
ffi::Error with_kernel(Dtype dtype, bool aligned, Form form, const F& launch) {
  const auto of_type = [&](auto type) {
    using One = std::integral_constant<int, 1>;
    using Full = std::integral_constant<int, 16 / sizeof(type)>;
    using General = std::integral_constant<Form, Form::kGeneral>;
    if (!aligned) return launch(type, One{}, General{});
    switch (form) {
      case Form::kPlain:
        return launch(type, Full{}, std::integral_constant<Form, Form::kPlain>{});
      case Form::kSmooth:
        return launch(type, Full{}, std::integral_constant<Form, Form::kSmooth>{});
      default:
        return launch(type, Full{}, General{});
    }
  };
  switch (dtype) {
    case Dtype::kFloat32:
      return of_type(float{});
    case Dtype::kBfloat16:
      return of_type(__nv_bfloat16{});
    default:
      return of_type(__half{});
  }
}

// --- handlers ------------------------------------------------------------------------------------

ffi::Error check_matrix(std::string_view name, const ffi::AnyBuffer& x) {
  if (x.dimensions().size() != 2 || !dtype_of(x)) {
    return ffi::Error::InvalidArgument(std::string(name) +
                                       " must be a matrix of float32, bfloat16 or float16");
  }
  const int64_t features = x.dimensions()[1], rows = x.dimensions()[0];
  if (features < 1 || features > kMaxRows) {
    return ffi::Error::InvalidArgument(std::string(name) + " has " + std::to_string(features) +
                                       " features; 1 to " + std::to_string(kMaxRows) +
                                       " are supported");
  }
  if (rows > kMaxRows) {
    return ffi::Error::InvalidArgument(std::string(name) + " has " + std::to_string(rows) +
                                       " rows; at most " + std::to_string(kMaxRows) +
                                       " are supported");
  }
  return ffi::Error::Success();
}

// Parses the operands that forward and backward share; one of `classes` and `soft` must be absent.
ffi::Error parse_loss(const ffi::AnyBuffer& logits, const ffi::AnyBuffer& classes,
                      const ffi::AnyBuffer& soft, float cap, LossArgs* args) {
  RETURN_IF_ERROR(check_matrix("logits", logits));
  const int64_t rows = logits.dimensions()[0], features = logits.dimensions()[1];
  args->logits = logits.untyped_data();
  args->rows = rows;
  args->features = static_cast<int>(features);
  args->options.cap = cap;
  args->options.inverse_cap = 1.0f / cap;
  args->labels.soft = {nullptr, Dtype::kFloat32};
  if (!(cap >= 0.0f)) return ffi::Error::InvalidArgument("soft_cap must not be negative");
  if (is_absent(soft)) {
    RETURN_IF_ERROR(check_shape("classes", classes, {rows}));
    RETURN_IF_ERROR(check_dtype("classes", classes, ffi::DataType::S32));
    args->labels.classes = static_cast<const int*>(classes.untyped_data());
    return ffi::Error::Success();
  }
  if (!is_absent(classes)) {
    return ffi::Error::InvalidArgument("labels are classes or soft labels, not both");
  }
  RETURN_IF_ERROR(check_shape("soft", soft, {rows, features}));
  const auto dtype = dtype_of(soft);
  if (!dtype) return ffi::Error::InvalidArgument("soft must be float32, bfloat16 or float16");
  args->labels.soft = {soft.untyped_data(), *dtype};
  return ffi::Error::Success();
}

ffi::Error cross_entropy_forward(cudaStream_t stream, ffi::AnyBuffer logits, ffi::AnyBuffer classes,
                                 ffi::AnyBuffer soft, ffi::AnyBuffer coefficients,
                                 ffi::Result<ffi::AnyBuffer> dlogits,
                                 ffi::Result<ffi::AnyBuffer> statistics, float label_smoothing,
                                 float z_loss, float soft_cap, int64_t cluster, int64_t threads) {
  LossArgs args = {};
  RETURN_IF_ERROR(parse_loss(logits, classes, soft, soft_cap, &args));
  RETURN_IF_ERROR(check_float32("statistics", *statistics, {args.rows, kStatistics}));
  args.statistics = static_cast<float*>(statistics->untyped_data());
  args.options.smoothing = label_smoothing;
  args.options.z_loss = z_loss;
  if (!is_absent(*dlogits)) {
    RETURN_IF_ERROR(check_like("dlogits", *dlogits, logits));
    RETURN_IF_ERROR(check_float32("coefficients", coefficients, {args.rows}));
    args.coefficients = static_cast<const float*>(coefficients.untyped_data());
    args.dlogits = dlogits->untyped_data();
  }
  if (cluster < -1 || cluster > kMaxClusterBlocks || (cluster & (cluster - 1) && cluster > 0)) {
    return ffi::Error::InvalidArgument("cluster must be -1, 0, 1, 2, 4 or 8");
  }
  if (threads < 2 * kWarpSize || threads > kMaxThreads || threads % kWarpSize != 0) {
    return ffi::Error::InvalidArgument("threads must be a multiple of 32 from 64 to 512");
  }
  if (is_absent(logits)) return ffi::Error::Success();
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  if (cluster > 1 && !device.clusters) {
    return ffi::Error::InvalidArgument("this GPU has no clusters of blocks");
  }
  const ForwardConfig config = {static_cast<int>(cluster), static_cast<int>(threads)};
  const bool general = args.labels.soft.data != nullptr || soft_cap != 0.0f;
  const Form other = label_smoothing != 0.0f ? Form::kSmooth : Form::kPlain;
  return with_kernel(
      *dtype_of(logits), are_aligned({args.logits, args.dlogits, args.labels.soft.data}),
      general ? Form::kGeneral : other, [&](auto type, auto vec, auto form) {
        return launch_forward<decltype(type), vec(), form()>(args, config, device, stream);
      });
}

ffi::Error cross_entropy_backward(cudaStream_t stream, ffi::AnyBuffer logits,
                                  ffi::AnyBuffer classes, ffi::AnyBuffer soft,
                                  ffi::AnyBuffer statistics, ffi::AnyBuffer cotangents,
                                  ffi::Result<ffi::AnyBuffer> dlogits, float soft_cap) {
  LossArgs args = {};
  RETURN_IF_ERROR(parse_loss(logits, classes, soft, soft_cap, &args));
  RETURN_IF_ERROR(check_float32("statistics", statistics, {args.rows, kStatistics}));
  RETURN_IF_ERROR(check_float32("cotangents", cotangents, {args.rows, 3}));
  RETURN_IF_ERROR(check_like("dlogits", *dlogits, logits));
  args.statistics = static_cast<float*>(statistics.untyped_data());
  args.coefficients = static_cast<const float*>(cotangents.untyped_data());
  args.dlogits = dlogits->untyped_data();
  if (is_absent(logits)) return ffi::Error::Success();
  const bool general = args.labels.soft.data != nullptr || soft_cap != 0.0f;
  return with_kernel(*dtype_of(logits),
                     are_aligned({args.logits, args.dlogits, args.labels.soft.data}),
                     general ? Form::kGeneral : Form::kPlain, [&](auto type, auto vec, auto form) {
                       // Smoothing changes only `spread`, so it needs no other kernel.
                       constexpr Form kForm = form() == Form::kSmooth ? Form::kPlain : form();
                       return launch_backward<decltype(type), vec(), kForm>(args, stream);
                     });
}

ffi::Error scale_rows_in_place(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer factors,
                               ffi::Result<ffi::AnyBuffer> y) {
  RETURN_IF_ERROR(check_matrix("x", x));
  RETURN_IF_ERROR(check_like("y", *y, x));
  const int64_t rows = x.dimensions()[0], features = x.dimensions()[1];
  RETURN_IF_ERROR(check_float32("factors", factors, {rows}));
  if (is_absent(x)) return ffi::Error::Success();
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  if (x.untyped_data() != y->untyped_data()) {
    // XLA may pass a slice of another array as x, which is then not y's buffer.
    RETURN_IF_ERROR(check_cuda(cudaMemcpyAsync(y->untyped_data(), x.untyped_data(), x.size_bytes(),
                                               cudaMemcpyDeviceToDevice, stream),
                               "cudaMemcpyAsync"));
  }
  const ScaleArgs args = {y->untyped_data(), static_cast<const float*>(factors.untyped_data()),
                          rows, features};
  return with_kernel(
      *dtype_of(x), are_aligned({args.x}), Form::kPlain, [&](auto type, auto vec, auto) {
        return launch_kernel(scale_rows<decltype(type), vec()>, args,
                             {dim3(8 * device.multiprocessors), kScaleThreads, 0}, stream);
      });
}

}  // namespace

DEFINE_HANDLER(jaxfused_cross_entropy_forward, cross_entropy_forward,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // logits
                   .Arg<ffi::AnyBuffer>()  // classes
                   .Arg<ffi::AnyBuffer>()  // soft
                   .Arg<ffi::AnyBuffer>()  // coefficients
                   .Ret<ffi::AnyBuffer>()  // dlogits
                   .Ret<ffi::AnyBuffer>()  // statistics
                   .Attr<float>("label_smoothing")
                   .Attr<float>("z_loss")
                   .Attr<float>("soft_cap")
                   .Attr<int64_t>("cluster")
                   .Attr<int64_t>("threads"));

DEFINE_HANDLER(jaxfused_cross_entropy_backward, cross_entropy_backward,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // logits
                   .Arg<ffi::AnyBuffer>()  // classes
                   .Arg<ffi::AnyBuffer>()  // soft
                   .Arg<ffi::AnyBuffer>()  // statistics
                   .Arg<ffi::AnyBuffer>()  // cotangents
                   .Ret<ffi::AnyBuffer>()  // dlogits
                   .Attr<float>("soft_cap"));

DEFINE_HANDLER(jaxfused_scale_rows, scale_rows_in_place,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()    // x
                   .Arg<ffi::AnyBuffer>()    // factors
                   .Ret<ffi::AnyBuffer>());  // y
