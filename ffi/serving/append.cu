// Writes the keys and values of new tokens into a cache, in place. One launch rotates the keys,
// rounds or quantises keys and values, and looks up the page of each token.
//
// A warp writes one head of a token's keys or values, and lane l its columns l, l + 32, ...
#include <cstdint>
#include <string>

#include "common/handler.h"
#include "common/operands.h"
#include "common/rounded_bytes.cuh"
#include "serving/pages.h"

namespace {

constexpr int kWarps = 4;
constexpr int kMaxHead = 512;
constexpr unsigned kAllLanes = 0xffffffffu;

// New keys or values, and the pages into which they are written.
struct Side {
  const void* tokens;  // [tokens, heads, size]
  void* pages;
  float* scale;  // scales of each token and head if args.chooses, else [heads]; nullptr for floats
  Strides strides;
  int size;
};

struct AppendArgs {
  Side key;
  Side value;
  const float* cos;  // [angles, pairs], nullptr where nothing is rotated
  const float* sin;
  const int* lengths;    // [sequences]: tokens before the new ones; ragged batch: including them
  const int* counts;     // valid tokens [sequences], or null; ragged: token bounds [sequences + 1]
  const int* sequences;  // [1]: number of sequences of a ragged batch, or nullptr for all
  const int* table;      // page table, [sequences, most_pages]; nullptr: sequence b has page b
  const int* layer;      // index of the layer, [1]; nullptr for 0
  Strides scale_strides;
  int tokens;           // new tokens of all sequences
  int sequence_tokens;  // new tokens of each sequence, 0 for a ragged batch
  int batch;
  int heads;
  int angles;
  int pairs;
  int most_pages;
  int page_size;
  int layer_pages;
  int layers;
  Dtype dtype;  // dtype of new tokens
  Dtype kept_dtype;
  Kept kept;
  bool interleaved;
  bool is_ring;
  bool chooses;  // whether to compute a scale for each token and head
};

// Returns a token's page and its index in the page; the page is -1 if the token is not written.
// Whole warps must call it.
__device__ __forceinline__ int2 place_of(const AppendArgs& args, int token) {
  int sequence, position;
  if (args.sequence_tokens > 0) {
    sequence = token / args.sequence_tokens;
    const int t = token % args.sequence_tokens;
    const int count = args.counts == nullptr
                          ? args.sequence_tokens
                          : min(max(args.counts[sequence], 0), args.sequence_tokens);
    position = args.lengths[sequence] + t;
    if (t >= count || position < 0) return {-1, 0};
    if (args.is_ring) {
      // If there are more new tokens than the ring holds, only the last ones are written.
      if (t < count - args.page_size) return {-1, 0};
      position %= args.page_size;
    }
  } else {
    const int used =
        args.sequences == nullptr ? args.batch : min(max(*args.sequences, 0), args.batch);
    int before = 0;  // sequences that end before the token
    for (int b = threadIdx.x % 32; b < used; b += 32) before += args.counts[b + 1] <= token ? 1 : 0;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      before += __shfl_xor_sync(kAllLanes, before, lanes);
    }
    sequence = min(before, args.batch - 1);
    position = token - args.counts[sequence + 1] + args.lengths[sequence];
    if (token < args.counts[0] || token >= args.counts[used] || position < 0) return {-1, 0};
  }
  // The division is avoided where possible: it takes longer than the rest of this function.
  const int slot = position < args.page_size ? 0 : position / args.page_size;
  if (slot >= args.most_pages) return {-1, 0};
  int page = sequence;
  if (args.table != nullptr) {
    page = args.table[sequence * args.most_pages + slot];
    // Except in a ragged batch, a negative entry counts from the layer's last page.
    if (args.sequence_tokens > 0 && page < 0) page += args.layer_pages;
  }
  const int first = first_page(args.layer, args.layer_pages, args.layers);
  if (page < 0 || page >= args.layer_pages || first < 0) return {-1, 0};
  return {first + page, position - slot * args.page_size};
}

// Loads value `column` of a head. The first 2 args.pairs columns are rotated and rounded to T.
template <typename T>
__device__ __forceinline__ float rotated(const AppendArgs& args, const T* head, int column,
                                         int token) {
  float x[1];
  load_as_float<T>(head, column, x);
  const int pairs = args.pairs;
  if (args.cos == nullptr || column >= 2 * pairs) return x[0];
  const int pair = args.interleaved ? column / 2 : column % pairs;
  const bool is_second = args.interleaved ? column % 2 == 1 : column >= pairs;
  const int distance = args.interleaved ? 1 : pairs;
  float y[1];
  load_as_float<T>(head, is_second ? column - distance : column + distance, y);
  const int64_t angle = static_cast<int64_t>(token % args.angles) * pairs + pair;
  const float sin = is_second ? args.sin[angle] : -args.sin[angle];
  x[0] = x[0] * args.cos[angle] + y[0] * sin;
  Vector<T, 1> once;
  pack(x, once);
  unpack(once, x);
  return x[0];
}

template <typename T>
__device__ __forceinline__ void store(void* pages, int64_t place, float x) {
  const float one[1] = {x};
  Vector<T, 1> packed;
  pack(one, packed);
  store_vector(static_cast<T*>(pages) + place, packed);
}

template <int kEach>
__global__ void __launch_bounds__(32 * kWarps)
    append_tokens(const __grid_constant__ AppendArgs args) {
  const uint32_t warp = blockIdx.x * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const bool is_value = warp % 2 == 1;
  const int token = static_cast<int>(warp / 2 / static_cast<uint32_t>(args.heads));
  if (token >= args.tokens) return;
  const int head = static_cast<int>(warp / 2) - token * args.heads;
  const Side& side = is_value ? args.value : args.key;

  // These loads are in flight while the token's page is looked up.
  float x[kEach] = {};
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    const T* const from = static_cast<const T*>(side.tokens) +
                          (static_cast<int64_t>(token) * args.heads + head) * side.size;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int column = lane + 32 * i;
      if (column >= side.size) continue;
      if (is_value) {
        float one[1];
        load_as_float<T>(from, column, one);
        x[i] = one[0];
      } else {
        x[i] = rotated<T>(args, from, column, token);
      }
    }
  });
  const int2 place = place_of(args, token);
  if (place.x < 0) return;
  const int64_t at =
      place.x * side.strides.page + place.y * side.strides.place + head * side.strides.head;
  if (args.kept == Kept::kFloats) {
    with_type(args.kept_dtype, [&](auto type) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int column = lane + 32 * i;
        if (column < side.size) store<decltype(type)>(side.pages, at + column, x[i]);
      }
    });
    return;
  }
  const auto format = static_cast<Format>(static_cast<int>(args.kept) - 1);
  const float limit = largest_of(format);
  float scale;
  if (args.chooses) {
    // Bits of a float without its sign: as an integer, a NaN is larger than all numbers.
    uint32_t largest = 0;
#pragma unroll
    for (const float value : x) largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
    scale = scale_of(largest_of_warp(largest), 1.0f / limit);
    const Strides& strides = args.scale_strides;
    if (lane == 0) {
      side.scale[place.x * strides.page + place.y * strides.place + head * strides.head] = scale;
    }
  } else {
    scale = side.scale[head];
    // Comparisons of this form are false for NaN.
    if (!(scale > 0.0f && scale < INFINITY)) scale = __uint_as_float(0x7fffffffu);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int column = lane + 32 * i;
    if (column < side.size) {
      static_cast<uint8_t*>(side.pages)[at + column] = rounded(x[i], scale, limit, format);
    }
  }
}

ffi::Error check_side(const char* name, const ffi::AnyBuffer& tokens, const ffi::AnyBuffer& pages,
                      const ffi::AnyBuffer& written, bool heads_first, int heads_of_pages,
                      Kept kept) {
  const std::string of = name;
  const auto shape = tokens.dimensions(), pool = pages.dimensions();
  if (shape.size() != 3 || pool.size() != 4 || !dtype_of(tokens) || shape[2] > kMaxHead ||
      pool[3] != shape[2] || pool[heads_first ? 0 : 2] != heads_of_pages * shape[1] ||
      (kept == Kept::kFloats ? !dtype_of(pages) : !has_bytes(pages))) {
    return ffi::Error::InvalidArgument(of + " of shape " + to_string(shape) +
                                       " does not fit pages of shape " + to_string(pool));
  }
  RETURN_IF_ERROR(check_like("written " + of, written, pages));
  if (pages.untyped_data() != written.untyped_data()) {
    return ffi::Error::InvalidArgument("pages of " + of + " are not written in place");
  }
  return ffi::Error::Success();
}

ffi::Error append(cudaStream_t stream, ffi::AnyBuffer key, ffi::AnyBuffer value, ffi::AnyBuffer cos,
                  ffi::AnyBuffer sin, ffi::AnyBuffer lengths, ffi::AnyBuffer counts,
                  ffi::AnyBuffer sequences, ffi::AnyBuffer table, ffi::AnyBuffer layer,
                  ffi::AnyBuffer key_pages, ffi::AnyBuffer value_pages, ffi::AnyBuffer key_scale,
                  ffi::AnyBuffer value_scale, ffi::Result<ffi::AnyBuffer> new_keys,
                  ffi::Result<ffi::AnyBuffer> new_values, ffi::Result<ffi::AnyBuffer> new_key_scale,
                  ffi::Result<ffi::AnyBuffer> new_value_scale, bool heads_first, bool is_ring,
                  bool interleaved, int32_t sequence_tokens, int32_t layer_pages, int32_t kind) {
  const auto kept = static_cast<Kept>(kind);
  const bool combined = is_absent(value_pages);
  if (kind < 0 || kind > static_cast<int>(Kept::kE5m2) || (combined && heads_first) ||
      (combined && kept != Kept::kFloats)) {
    return ffi::Error::InvalidArgument("this kind of pages is not known");
  }
  RETURN_IF_ERROR(
      check_side("key", key, key_pages, *new_keys, heads_first, combined ? 2 : 1, kept));
  if (combined) {
    RETURN_IF_ERROR(check_like("value", value, key));
  } else {
    RETURN_IF_ERROR(check_side("value", value, value_pages, *new_values, heads_first, 1, kept));
    RETURN_IF_ERROR(check_dtype("value_pages", value_pages, key_pages.element_type()));
  }
  const auto shape = key.dimensions(), pool = key_pages.dimensions();
  const int64_t tokens = shape[0], heads = shape[1];
  if (value.dimensions()[0] != tokens || value.dimensions()[1] != heads ||
      value.element_type() != key.element_type()) {
    return ffi::Error::InvalidArgument("value has shape " + to_string(value.dimensions()) +
                                       ", which does not fit key of shape " + to_string(shape));
  }
  const int64_t pages = pool[heads_first ? 1 : 0], page_size = pool[heads_first ? 2 : 1];
  const int64_t batch = lengths.element_count();
  RETURN_IF_ERROR(check_integers("lengths", lengths, {batch}));
  AppendArgs args = {};
  const bool is_ragged = sequence_tokens == 0;
  if (is_ragged ? is_ring : batch * sequence_tokens != tokens || sequence_tokens < 0) {
    return ffi::Error::InvalidArgument("sequence_tokens does not fit the tokens");
  }
  if (!is_absent(counts) || is_ragged) {
    RETURN_IF_ERROR(check_integers("counts", counts, {is_ragged ? batch + 1 : batch}));
  }
  if (!is_absent(sequences)) RETURN_IF_ERROR(check_integers("sequences", sequences, {1}));
  if (!is_absent(layer)) RETURN_IF_ERROR(check_integers("layer", layer, {1}));
  int64_t most_pages = 0;
  RETURN_IF_ERROR(check_table(table, batch, &most_pages));
  if (!is_absent(cos)) {
    const int64_t angles = cos.dimensions()[0], pairs = cos.element_count() / angles;
    RETURN_IF_ERROR(check_float32("cos", cos, {angles, pairs}));
    RETURN_IF_ERROR(check_float32("sin", sin, {angles, pairs}));
    if (2 * pairs > shape[2] || tokens % angles != 0) {
      return ffi::Error::InvalidArgument("cos has shape " + to_string(cos.dimensions()) +
                                         ", which does not fit key of shape " + to_string(shape));
    }
    args.angles = static_cast<int>(angles);
    args.pairs = static_cast<int>(pairs);
  }
  args.key = {key.untyped_data(), key_pages.untyped_data(), nullptr, strides_of(pool, heads_first),
              static_cast<int>(shape[2])};
  args.value = {value.untyped_data(), (combined ? key_pages : value_pages).untyped_data(), nullptr,
                strides_of((combined ? key_pages : value_pages).dimensions(), heads_first),
                static_cast<int>(value.dimensions()[2])};
  args.kept = kept;
  args.dtype = *dtype_of(key);
  if (kept == Kept::kFloats) {
    args.kept_dtype = *dtype_of(key_pages);
  } else {
    const auto scales = key_scale.dimensions();
    args.chooses = scales.size() == 3;
    if (args.chooses) {
      RETURN_IF_ERROR(check_float32("key_scale", key_scale, {pool[0], pool[1], pool[2]}));
      if (key_scale.untyped_data() != new_key_scale->untyped_data() ||
          value_scale.untyped_data() != new_value_scale->untyped_data()) {
        return ffi::Error::InvalidArgument("scales are not written in place");
      }
      args.scale_strides = strides_of(scales, heads_first);
    } else {
      RETURN_IF_ERROR(check_float32("key_scale", key_scale, {heads}));
    }
    RETURN_IF_ERROR(check_like("value_scale", value_scale, key_scale));
    args.key.scale = static_cast<float*>(key_scale.untyped_data());
    args.value.scale = static_cast<float*>(value_scale.untyped_data());
  }
  if (combined) {
    args.key.strides.head *= 2;
    args.value.strides.head *= 2;
    const int64_t value_bytes = (args.kept_dtype == Dtype::kFloat32 ? 4 : 2) * shape[2];
    args.value.pages = static_cast<uint8_t*>(args.value.pages) + value_bytes;
  }
  if (layer_pages < 1 || pages % layer_pages != 0 || pages > INT32_MAX || page_size > INT32_MAX ||
      (is_absent(table) && batch > layer_pages) || tokens > INT32_MAX || batch < 1 ||
      batch * most_pages > INT32_MAX || tokens * heads > INT32_MAX) {
    return ffi::Error::InvalidArgument("pages of shape " + to_string(pool) +
                                       " do not fit the tokens, or are too many");
  }
  args.cos = data_or_null<float>(cos);
  args.sin = data_or_null<float>(sin);
  args.lengths = static_cast<const int*>(lengths.untyped_data());
  args.counts = data_or_null<int>(counts);
  args.sequences = data_or_null<int>(sequences);
  args.table = data_or_null<int>(table);
  args.layer = data_or_null<int>(layer);
  args.tokens = static_cast<int>(tokens);
  args.sequence_tokens = sequence_tokens;
  args.batch = static_cast<int>(batch);
  args.heads = static_cast<int>(heads);
  args.most_pages = static_cast<int>(most_pages);
  args.page_size = static_cast<int>(page_size);
  args.layer_pages = layer_pages;
  args.layers = static_cast<int>(pages / layer_pages);
  args.interleaved = interleaved;
  args.is_ring = is_ring;
  if (tokens * heads == 0) return ffi::Error::Success();
  const Launch launch = {dim3(static_cast<unsigned>(divide_up(2 * tokens * heads, kWarps))),
                         32 * kWarps, 0};
  const int size = std::max(args.key.size, args.value.size);
  if (size <= 64) return launch_kernel(append_tokens<2>, args, launch, stream);
  if (size <= 128) return launch_kernel(append_tokens<4>, args, launch, stream);
  if (size <= 256) return launch_kernel(append_tokens<8>, args, launch, stream);
  return launch_kernel(append_tokens<kMaxHead / 32>, args, launch, stream);
}

}  // namespace

DEFINE_HANDLER(jaxfused_append, append,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // key
                   .Arg<ffi::AnyBuffer>()  // value
                   .Arg<ffi::AnyBuffer>()  // cos
                   .Arg<ffi::AnyBuffer>()  // sin
                   .Arg<ffi::AnyBuffer>()  // lengths
                   .Arg<ffi::AnyBuffer>()  // counts
                   .Arg<ffi::AnyBuffer>()  // sequences
                   .Arg<ffi::AnyBuffer>()  // table
                   .Arg<ffi::AnyBuffer>()  // layer
                   .Arg<ffi::AnyBuffer>()  // key_pages
                   .Arg<ffi::AnyBuffer>()  // value_pages
                   .Arg<ffi::AnyBuffer>()  // key_scale
                   .Arg<ffi::AnyBuffer>()  // value_scale
                   .Ret<ffi::AnyBuffer>()  // new_keys
                   .Ret<ffi::AnyBuffer>()  // new_values
                   .Ret<ffi::AnyBuffer>()  // new_key_scale
                   .Ret<ffi::AnyBuffer>()  // new_value_scale
                   .Attr<bool>("heads_first")
                   .Attr<bool>("is_ring")
                   .Attr<bool>("interleaved")
                   .Attr<int32_t>("sequence_tokens")
                   .Attr<int32_t>("layer_pages")
                   .Attr<int32_t>("kind"),
               {ffi::Traits::kCmdBufferCompatible});
