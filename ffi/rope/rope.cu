// The rotation of queries and keys in one pass over both, and the rotation back, its gradient.
//
// A head is cut into slots. A slot that rotates is a vector of kVec values in each half of the
// rotating features (kVec pairs), or one vector of kVec / 2 interleaved pairs. Slots of features
// that do not rotate follow, with as many vectors each. A thread holds its slot's cosines and sines
// in registers and uses them for several heads, whose loads are all in flight together.

#include "common/handler.h"
#include "common/vector.cuh"

namespace {

constexpr int kThreads = 256;
struct Heads {
  const void* in;
  void* out;
  int count;
};

struct RopeArgs {
  Heads q;
  Heads k;
  const float* cos;
  const float* sin;
  uint32_t rows;
  uint32_t table_rows;  // row r has the angles r % table_rows
  int head_size;
  int pairs;        // pairs of a head
  uint32_t groups;  // threads among which the heads of a row are divided, for each slot
  uint32_t slots;   // slots of a head
  float sine_sign;  // -1 rotates back
};

// Heads that a thread loads at the same time, so that it has 128 bytes in flight.
template <bool kInterleaved>
constexpr int kHeadsOfThread = kInterleaved ? 8 : 4;

// Rotates the interleaved pairs of `vector`.
template <typename T, int kVec>
__device__ __forceinline__ void rotate_neighbours(const float (&cos)[kVec],
                                                  const float (&sin)[kVec],
                                                  Vector<T, kVec>& vector) {
  float values[kVec];
  unpack(vector, values);
#pragma unroll
  for (int i = 0; i < kVec / 2; ++i) {
    const float x = values[2 * i], y = values[2 * i + 1];
    values[2 * i] = x * cos[i] - y * sin[i];
    values[2 * i + 1] = y * cos[i] + x * sin[i];
  }
  pack(values, vector);
}

// Rotates pairs whose values are at the same index of `first` and `second`.
template <typename T, int kVec>
__device__ __forceinline__ void rotate_halves(const float (&cos)[kVec], const float (&sin)[kVec],
                                              Vector<T, kVec>& first, Vector<T, kVec>& second) {
  float x[kVec], y[kVec];
  unpack(first, x);
  unpack(second, y);
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float x_i = x[i];
    x[i] = x_i * cos[i] - y[i] * sin[i];
    y[i] = y[i] * cos[i] + x_i * sin[i];
  }
  pack(x, first);
  pack(y, second);
}

// Whether a vector holds interleaved pairs; a vector of one value holds only half of a pair.
template <int kVec, bool kInterleaved>
constexpr bool kNeighbours = kInterleaved && kVec > 1;

template <typename T, int kVec, bool kInterleaved>
__global__ void __launch_bounds__(kThreads) rope_rows(const __grid_constant__ RopeArgs args) {
  constexpr int kHeads = kHeadsOfThread<kInterleaved>;
  constexpr bool kOneVector = kNeighbours<kVec, kInterleaved>;
  constexpr int kPairs = kOneVector ? kVec / 2 : kVec;
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  const int slot = index % args.slots;
  const int group = index / args.slots % args.groups;
  const uint32_t row = index / args.slots / args.groups;
  if (row >= args.rows) return;

  // First features of the slot's two vectors in a head.
  const int rotating = args.pairs / kPairs;
  const bool rotates = slot < rotating;
  int first = slot * kVec;
  int second = first + args.pairs;
  if (kInterleaved && !kOneVector) {
    first = 2 * slot;
    second = first + 1;
  }
  if (!rotates) {
    first = 2 * args.pairs + (slot - rotating) * kVec;
    second = first + static_cast<int>(args.slots - rotating) * kVec;
  }
  const bool has_second = !kOneVector && (rotates || second < args.head_size);

  const auto address = [&](int head, auto* q, auto* k) {
    const bool is_q = head < args.q.count;
    const int64_t heads = is_q ? args.q.count : args.k.count;
    const int64_t place = (row * heads + (is_q ? head : head - args.q.count)) * args.head_size;
    return (is_q ? q : k) + place;
  };
  const int heads = args.q.count + args.k.count;
  Vector<T, kVec> a[kHeads], b[kHeads];
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    const int head = group + j * args.groups;
    if (head >= heads) break;
    const T* in = address(head, static_cast<const T*>(args.q.in), static_cast<const T*>(args.k.in));
    a[j] = load_streaming<T, kVec>(in + first);
    if (has_second) b[j] = load_streaming<T, kVec>(in + second);
  }

  float cos[kVec], sin[kVec];  // only the first kPairs are used
  if (rotates) {
    constexpr int kPart = kPairs < 4 ? kPairs : 4;
    const int64_t place = static_cast<int64_t>(row % args.table_rows) * args.pairs + slot * kPairs;
#pragma unroll
    for (int i = 0; i < kPairs; i += kPart) {
      const auto c = load_vector<float, kPart>(args.cos + place + i);
      const auto s = load_vector<float, kPart>(args.sin + place + i);
#pragma unroll
      for (int l = 0; l < kPart; ++l) {
        cos[i + l] = c.values[l];
        sin[i + l] = s.values[l] * args.sine_sign;
      }
    }
  }

#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    const int head = group + j * args.groups;
    if (head >= heads) break;
    T* out = address(head, static_cast<T*>(args.q.out), static_cast<T*>(args.k.out));
    if (rotates) {
      if constexpr (kOneVector) {
        rotate_neighbours(cos, sin, a[j]);
      } else {
        rotate_halves(cos, sin, a[j], b[j]);
      }
    }
    store_streaming(out + first, a[j]);
    if (has_second) store_streaming(out + second, b[j]);
  }
}

template <typename T, int kVec>
ffi::Error launch_rope(RopeArgs args, bool interleaved, cudaStream_t stream) {
  const bool one_vector = interleaved && kVec > 1;
  const int slot_pairs = one_vector ? kVec / 2 : kVec;
  const int passed_on = (args.head_size - 2 * args.pairs) / kVec;
  args.slots = args.pairs / slot_pairs + divide_up(passed_on, one_vector ? 1 : 2);
  const int thread_heads = interleaved ? kHeadsOfThread<true> : kHeadsOfThread<false>;
  args.groups = divide_up(args.q.count + args.k.count, thread_heads);
  const uint64_t threads = uint64_t{args.rows} * args.groups * args.slots;
  if (threads > UINT32_MAX - kThreads) {
    return ffi::Error::InvalidArgument("q and k have too many elements for one launch");
  }
  const auto kernel = interleaved ? rope_rows<T, kVec, true> : rope_rows<T, kVec, false>;
  return launch_kernel(kernel, args, {dim3(divide_up(threads, kThreads)), kThreads, 0}, stream);
}

// Launches the kernel with the widest vectors, of at most kVec values, whose size divides both the
// head size and the number of rotating features (half of it, if pairs are not interleaved).
template <typename T, int kVec = 16 / sizeof(T)>
ffi::Error launch_widest(const RopeArgs& args, bool interleaved, cudaStream_t stream) {
  if constexpr (kVec > 1) {
    const int rotating = interleaved ? 2 * args.pairs : args.pairs;
    if (rotating % kVec != 0 || args.head_size % kVec != 0 ||
        !are_aligned({args.q.in, args.q.out, args.k.in, args.k.out, args.cos, args.sin})) {
      return launch_widest<T, kVec / 2>(args, interleaved, stream);
    }
  }
  return launch_rope<T, kVec>(args, interleaved, stream);
}

ffi::Error check_heads(std::string_view name, const ffi::AnyBuffer& x, const ffi::AnyBuffer& q) {
  if (x.dimensions().size() != 4 || !dtype_of(x)) {
    return ffi::Error::InvalidArgument(
        std::string(name) +
        " must be float32, bfloat16 or float16 with axes batch, length, heads, head size");
  }
  const auto like = q.dimensions();
  RETURN_IF_ERROR(check_shape(name, x, {like[0], like[1], x.dimensions()[2], like[3]}));
  return check_dtype(name, x, q.element_type());
}

ffi::Error check_table(std::string_view name, const ffi::AnyBuffer& table,
                       std::initializer_list<int64_t> shape) {
  RETURN_IF_ERROR(check_shape(name, table, shape));
  return check_dtype(name, table, ffi::DataType::F32);
}

// Rotates q and k; k and k_rotated may be absent.
ffi::Error rope(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer cos,
                ffi::AnyBuffer sin, ffi::Result<ffi::AnyBuffer> q_rotated,
                ffi::Result<ffi::AnyBuffer> k_rotated, bool interleaved, bool inverse) {
  RETURN_IF_ERROR(check_heads("q", q, q));
  const auto shape = q.dimensions();
  RETURN_IF_ERROR(check_heads("q_rotated", *q_rotated, q));
  RETURN_IF_ERROR(check_shape("q_rotated", *q_rotated, {shape[0], shape[1], shape[2], shape[3]}));
  RopeArgs args = {};
  if (!is_absent(k)) {
    RETURN_IF_ERROR(check_heads("k", k, q));
    RETURN_IF_ERROR(check_heads("k_rotated", *k_rotated, q));
    RETURN_IF_ERROR(
        check_shape("k_rotated", *k_rotated, {shape[0], shape[1], k.dimensions()[2], shape[3]}));
    args.k = {k.untyped_data(), k_rotated->untyped_data(), static_cast<int>(k.dimensions()[2])};
  }
  if (cos.dimensions().size() != 3 || 2 * cos.dimensions()[2] > shape[3] ||
      (cos.dimensions()[0] != 1 && cos.dimensions()[0] != shape[0])) {
    return ffi::Error::InvalidArgument("cos has shape " + to_string(cos.dimensions()) +
                                       ", which does not fit q of shape " + to_string(shape));
  }
  const int64_t batch = cos.dimensions()[0], pairs = cos.dimensions()[2];
  RETURN_IF_ERROR(check_table("cos", cos, {batch, shape[1], pairs}));
  RETURN_IF_ERROR(check_table("sin", sin, {batch, shape[1], pairs}));
  if (shape[0] * shape[1] > INT32_MAX || shape[2] * shape[3] > INT32_MAX) {
    return ffi::Error::InvalidArgument("q of shape " + to_string(shape) + " is too large");
  }
  if (is_absent(q)) return ffi::Error::Success();
  args.q = {q.untyped_data(), q_rotated->untyped_data(), static_cast<int>(shape[2])};
  args.cos = static_cast<const float*>(cos.untyped_data());
  args.sin = static_cast<const float*>(sin.untyped_data());
  args.rows = static_cast<uint32_t>(shape[0] * shape[1]);
  args.table_rows = static_cast<uint32_t>(batch * shape[1]);
  args.head_size = static_cast<int>(shape[3]);
  args.pairs = static_cast<int>(pairs);
  args.sine_sign = inverse ? -1.0f : 1.0f;
  switch (*dtype_of(q)) {
    case Dtype::kFloat32:
      return launch_widest<float>(args, interleaved, stream);
    case Dtype::kBfloat16:
      return launch_widest<__nv_bfloat16>(args, interleaved, stream);
    default:
      return launch_widest<__half>(args, interleaved, stream);
  }
}

}  // namespace

DEFINE_HANDLER(jaxfused_rope, rope,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // q
                   .Arg<ffi::AnyBuffer>()  // k
                   .Arg<ffi::AnyBuffer>()  // cos
                   .Arg<ffi::AnyBuffer>()  // sin
                   .Ret<ffi::AnyBuffer>()  // q_rotated
                   .Ret<ffi::AnyBuffer>()  // k_rotated
                   .Attr<bool>("interleaved")
                   .Attr<bool>("inverse"));
