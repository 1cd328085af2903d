// One pass of augmentation: a resampling by a map of each image, pointwise steps on colours, and
// for uint8 images a blur and further steps.
//
// This is CUDA C because every value gathers pixels from addresses of its own, which the tiles of
// Mosaic GPU do not express. A block has a tile of a result. An image's map and its steps are data:
// a block reads them once, and its threads take the same branches.

#include <cmath>

#include "augment/byte_pass.cuh"
#include "augment/direct_pass.cuh"
#include "common/handler.h"
#include "common/operands.h"

namespace {

std::optional<Type> type_of(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::U8:
      return Type::kUint8;
    case ffi::DataType::F32:
      return Type::kFloat32;
    case ffi::DataType::BF16:
      return Type::kBfloat16;
    case ffi::DataType::F16:
      return Type::kFloat16;
    default:
      return std::nullopt;
  }
}

struct Options {
  int64_t interpolation;
  bool reads, drops, precise;
  float widest;
  ffi::Span<const float> fill;
};

ffi::Error parse(const ffi::AnyBuffer& x, const ffi::AnyBuffer& maps, const ffi::AnyBuffer& rows,
                 int64_t height, int64_t width, const Options& options, Args* args) {
  const auto shape = x.dimensions(), steps = rows.dimensions();
  if (shape.size() != 4 || !type_of(x) || (shape[3] != 1 && shape[3] != 3 && shape[3] != 4)) {
    return ffi::Error::InvalidArgument(
        "x must be uint8, float32, bfloat16 or float16 with axes image, row, column and 1, 3 or 4"
        " channels");
  }
  for (const int64_t size : {shape[1], shape[2], height, width}) {
    if (size < 1 || size > 1 << 20) {
      return ffi::Error::InvalidArgument("an axis of " + std::to_string(size) +
                                         " is not between 1 and 2^20");
    }
  }
  RETURN_IF_ERROR(check_float32("maps", maps, {shape[0], kMapSize}));
  if (steps.size() != 3 || steps[1] > kMaxSteps) {
    return ffi::Error::InvalidArgument("rows must have axes image, step, value, and at most " +
                                       std::to_string(kMaxSteps) + " steps");
  }
  RETURN_IF_ERROR(check_float32("rows", rows, {shape[0], steps[1], kStepSize}));
  if (options.fill.size() != 4 || options.interpolation < kNearest ||
      options.interpolation > kBicubic || !(options.widest >= 1.0f)) {
    return ffi::Error::InvalidArgument(
        "augment: fill has 4 values, interpolation is 0 to 2 and the kernel is 1 or wider");
  }
  if (!options.reads && (height != shape[1] || width != shape[2])) {
    return ffi::Error::InvalidArgument("augment: images that are not resampled keep their size");
  }
  *args = {};
  args->height = static_cast<int>(shape[1]);
  args->width = static_cast<int>(shape[2]);
  args->out_height = static_cast<int>(height);
  args->out_width = static_cast<int>(width);
  const int tiles_across = (args->out_width + kTile - 1) / kTile;
  args->tiles_across = Divider(tiles_across);
  args->tiles = Divider(tiles_across * ((args->out_height + kTile - 1) / kTile));
  args->steps = args->steps_before = static_cast<int>(steps[1]);
  args->interpolation = static_cast<int>(options.interpolation);
  args->reads = options.reads;
  args->drops = options.drops;
  args->is_precise = options.precise;
  args->widest = options.widest;
  args->bytes = static_cast<int64_t>(x.size_bytes());
  args->fill_is_bytes = true;
  for (int c = 0; c < 4; ++c) {
    const float fill = args->fill[c] = options.fill[c];
    const bool is_byte = fill >= 0.0f && fill <= 255.0f && fill == std::floor(fill);
    args->fill_is_bytes = args->fill_is_bytes && is_byte;
    if (is_byte) args->fill_word |= static_cast<uint32_t>(fill) << (8 * c);
  }
  args->x = x.untyped_data();
  args->has_words = args->width % kPixels == 0 && reinterpret_cast<uintptr_t>(args->x) % 4 == 0;
  args->maps = static_cast<const float*>(maps.untyped_data());
  args->rows = data_or_null<const float>(rows);
  return ffi::Error::Success();
}

// Sets `args->room`, the sizes of arrays in a block's shared memory; returns their bytes plus
// `fixed`.
int set_room(int channels, int fixed, bool blurs, const Device& device, Args* args) {
  const int64_t columns = round_up(kTile + 2 * args->reach_x, kPixels);
  const int64_t lines = kTile + 2 * args->reach_y;
  const int64_t blurred = blurs ? lines * kTile * channels : 0;
  const int64_t region = blurs ? lines * columns * channels : 0;
  const bool is_upright = args->reads && args->drops && args->interpolation != kNearest;
  int64_t box = 0, middle = 0, table = 0;
  args->taps = 0;
  if (is_upright) {
    const double reach = (args->interpolation == kBicubic ? 2.0 : 1.0) * args->widest;
    const int64_t taps = static_cast<int64_t>(std::ceil(std::min(2.0 * reach, 64.0)));
    // Most pixels of the image per pixel of the result. With antialiasing they are at most the
    // interpolation kernel's radius, `widest`.
    const double step = std::min(std::max(1.25, double{args->widest}), 64.0);
    const auto span = [&](int64_t size) {
      return static_cast<int64_t>(std::ceil((size - 1) * step)) + taps + 1;
    };
    box = round_up(span(columns) + 3, int64_t{4}) * span(lines);
    middle = span(lines) * columns * channels;
    table = (2 + taps) * (columns + lines);
    args->taps = static_cast<int>(taps);
  } else if (args->reads) {
    // A box of twice a tile's width and height covers usual angles and scales.
    box = 4 * round_up(columns + 3, int64_t{4}) * lines;
  } else if (blurs) {
    box = (columns + 3 + 15) * lines;
  }
  const int64_t most = (device.shared_bytes - fixed) / 4;
  if (box + std::max(middle, blurred) + region + table > most) box = middle = table = 0;
  if (table == 0) args->taps = 0;
  // Values that are read directly from global memory are staged in the box's memory too.
  if (args->reads || blurs) box = std::max<int64_t>(box, kThreads * kPixels * channels);
  middle = std::max(middle, blurred);
  box = round_up(box, int64_t{4});
  args->room = {static_cast<int>(box), static_cast<int>(middle), static_cast<int>(region),
                static_cast<int>(table)};
  return fixed + static_cast<int>(4 * (box + middle + region + table));
}

template <typename T, bool kCounts>
ffi::Error launch(const ffi::AnyBuffer& x, const Args& args, cudaStream_t stream) {
  const Launch grid = {dim3(static_cast<unsigned>(x.dimensions()[0] * args.tiles.divisor())),
                       kThreads, 0};
  switch (x.dimensions()[3]) {
    case 1:
      return launch_kernel(image_pass_kernel<T, 1, kCounts>, args, grid, stream);
    case 3:
      return launch_kernel(image_pass_kernel<T, 3, kCounts>, args, grid, stream);
    default:
      return launch_kernel(image_pass_kernel<T, 4, kCounts>, args, grid, stream);
  }
}

template <int kChannels, Reading kOnly, bool kCounts, bool kBlur>
ffi::Error launch_bytes(const ffi::AnyBuffer& x, Args args, cudaStream_t stream) {
  Device device;
  RETURN_IF_ERROR(current_device(&device));
  const auto kernel = byte_pass_kernel<kChannels, kOnly, kCounts, kBlur>;
  RETURN_IF_ERROR(allow_shared_memory(kernel, device));
  const int shared_bytes = set_room(kChannels, sizeof(Shared<kChannels>), kBlur, device, &args);
  const unsigned blocks = static_cast<unsigned>(x.dimensions()[0] * args.tiles.divisor());
  return launch_kernel(kernel, args, Launch{dim3(blocks), kThreads, shared_bytes}, stream);
}

// Launches, for images of three channels, the kernel compiled for the way in which they are read. A
// kernel for all ways would have more code and fewer registers for values.
template <bool kCounts, bool kBlur>
ffi::Error launch_colours(const ffi::AnyBuffer& x, const Args& args, cudaStream_t stream) {
  if (args.reads && args.interpolation != kNearest && args.drops) {
    return launch_bytes<3, Reading::kUpright, kCounts, kBlur>(x, args, stream);
  }
  if (args.reads && args.interpolation == kBilinear) {
    return launch_bytes<3, Reading::kBetweenFour, kCounts, kBlur>(x, args, stream);
  }
  return launch_bytes<3, Reading::kDirect, kCounts, kBlur>(x, args, stream);
}

template <bool kCounts, bool kBlur>
ffi::Error launch_bytes(const ffi::AnyBuffer& x, const Args& args, cudaStream_t stream) {
  switch (x.dimensions()[3]) {
    case 1:
      return launch_bytes<1, Reading::kDirect, kCounts, kBlur>(x, args, stream);
    case 3:
      return launch_colours<kCounts, kBlur>(x, args, stream);
    default:
      return launch_bytes<4, Reading::kDirect, kCounts, kBlur>(x, args, stream);
  }
}

template <bool kCounts>
ffi::Error launch_of(const ffi::AnyBuffer& x, const Args& args, cudaStream_t stream) {
  if (x.dimensions()[0] > INT32_MAX / args.tiles.divisor()) {
    return ffi::Error::InvalidArgument("the images are too large for one launch");
  }
  switch (*type_of(x)) {
    case Type::kUint8:
      if constexpr (!kCounts) {
        if (args.blurs != nullptr) return launch_bytes<false, true>(x, args, stream);
      }
      return launch_bytes<kCounts, false>(x, args, stream);
    case Type::kFloat32:
      return launch<float, kCounts>(x, args, stream);
    case Type::kBfloat16:
      return launch<__nv_bfloat16, kCounts>(x, args, stream);
    default:
      return launch<__half, kCounts>(x, args, stream);
  }
}

// Writes the results y of the images x. `blurs`, if present, has the weights along columns and then
// those along rows, or the factor of sharpening; that filter follows the first `steps_before`
// steps.
ffi::Error image_pass(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer maps,
                      ffi::AnyBuffer rows, ffi::AnyBuffer statistics, ffi::AnyBuffer blurs,
                      ffi::Result<ffi::AnyBuffer> y, int64_t interpolation, bool reads, bool drops,
                      bool precise, float widest, ffi::Span<const float> fill, int64_t steps_before,
                      int64_t reach_y, int64_t reach_x, bool sharpens) {
  const auto out = y->dimensions();
  if (out.size() != 4 || !type_of(*y)) {
    return ffi::Error::InvalidArgument(
        "y must be uint8, float32, bfloat16 or float16 with axes image, row, column, channel");
  }
  Args args;
  RETURN_IF_ERROR(parse(x, maps, rows, out[1], out[2],
                        {interpolation, reads, drops, precise, widest, fill}, &args));
  const auto shape = x.dimensions();
  RETURN_IF_ERROR(check_shape("y", *y, {shape[0], out[1], out[2], shape[3]}));
  if (is_absent(*y)) return ffi::Error::Success();
  if (!is_absent(blurs)) {
    if (std::min(reach_y, reach_x) < 0 || std::max(reach_y, reach_x) > kMaxBlur ||
        steps_before < 0 || steps_before > args.steps || *type_of(x) != Type::kUint8) {
      return ffi::Error::InvalidArgument("augment: a blur reaches over " +
                                         std::to_string(kMaxBlur) +
                                         " pixels of uint8 images at the most");
    }
    if (sharpens && (reach_y != 1 || reach_x != 1)) {
      return ffi::Error::InvalidArgument("augment: sharpening reaches over one pixel");
    }
    RETURN_IF_ERROR(
        check_float32("blurs", blurs, {shape[0], sharpens ? 1 : 2 * (reach_y + reach_x + 1)}));
    args.sharpens = sharpens;
    args.blurs = static_cast<const float*>(blurs.untyped_data());
    args.steps_before = static_cast<int>(steps_before);
    args.reach_y = static_cast<int>(reach_y);
    args.reach_x = static_cast<int>(reach_x);
    args.region_quads = Divider(round_up(kTile + 2 * args.reach_x, kPixels) / kPixels);
  }
  if (!is_absent(statistics)) {
    const auto sizes = statistics.dimensions();
    if (sizes.size() != 2 || (sizes[1] != kSums && sizes[1] != kSums + 3 * 256)) {
      return ffi::Error::InvalidArgument("augment: statistics have 7 or 775 values an image");
    }
    RETURN_IF_ERROR(check_float32("statistics", statistics, {shape[0], sizes[1]}));
    args.statistics = static_cast<const float*>(statistics.untyped_data());
    args.statistics_size = static_cast<int>(sizes[1]);
  }
  args.y = y->untyped_data();
  args.out_type = *type_of(*y);
  const int channels = static_cast<int>(shape[3]);
  args.pixel_bytes = channels * static_cast<int>(y->size_bytes() / y->element_count());
  const bool has_vectors = int64_t{args.out_width} * args.pixel_bytes % 16 == 0 &&
                           reinterpret_cast<uintptr_t>(args.y) % 16 == 0;
  args.unit = has_vectors ? 16 : args.pixel_bytes / channels;
  return launch_of<false>(x, args, stream);
}

// Writes statistics of results of size [height, width] before the step that needs them: sums of
// gray and extremes for each tile and, with counts, the number of pixels of each level.
ffi::Error image_statistics(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer maps,
                            ffi::AnyBuffer rows, ffi::Result<ffi::AnyBuffer> sums,
                            ffi::Result<ffi::AnyBuffer> counts, int64_t height, int64_t width,
                            int64_t interpolation, bool reads, bool drops, bool precise,
                            float widest, ffi::Span<const float> fill) {
  Args args;
  RETURN_IF_ERROR(parse(x, maps, rows, height, width,
                        {interpolation, reads, drops, precise, widest, fill}, &args));
  const auto shape = x.dimensions();
  RETURN_IF_ERROR(check_float32("sums", *sums, {shape[0], args.tiles.divisor(), kSums}));
  if (is_absent(*sums)) return ffi::Error::Success();
  if (!is_absent(*counts)) {
    RETURN_IF_ERROR(check_shape("counts", *counts, {shape[0], shape[3] == 1 ? 1 : 3, 256}));
    RETURN_IF_ERROR(check_dtype("counts", *counts, ffi::DataType::S32));
    args.counts = static_cast<int*>(counts->untyped_data());
    RETURN_IF_ERROR(check_cuda(cudaMemsetAsync(args.counts, 0, counts->size_bytes(), stream),
                               "cudaMemsetAsync"));
  }
  args.sums = static_cast<float*>(sums->untyped_data());
  return launch_of<true>(x, args, stream);
}

}  // namespace

DEFINE_HANDLER(jaxfused_image_pass, image_pass,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // maps
                   .Arg<ffi::AnyBuffer>()  // rows
                   .Arg<ffi::AnyBuffer>()  // statistics
                   .Arg<ffi::AnyBuffer>()  // blurs
                   .Ret<ffi::AnyBuffer>()  // y
                   .Attr<int64_t>("interpolation")
                   .Attr<bool>("reads")
                   .Attr<bool>("drops")
                   .Attr<bool>("precise")
                   .Attr<float>("widest")
                   .Attr<ffi::Span<const float>>("fill")
                   .Attr<int64_t>("steps_before")
                   .Attr<int64_t>("reach_y")
                   .Attr<int64_t>("reach_x")
                   .Attr<bool>("sharpens"));

DEFINE_HANDLER(jaxfused_image_statistics, image_statistics,
               ffi::Ffi::Bind()
                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                   .Arg<ffi::AnyBuffer>()  // x
                   .Arg<ffi::AnyBuffer>()  // maps
                   .Arg<ffi::AnyBuffer>()  // rows
                   .Ret<ffi::AnyBuffer>()  // sums
                   .Ret<ffi::AnyBuffer>()  // counts
                   .Attr<int64_t>("height")
                   .Attr<int64_t>("width")
                   .Attr<int64_t>("interpolation")
                   .Attr<bool>("reads")
                   .Attr<bool>("drops")
                   .Attr<bool>("precise")
                   .Attr<float>("widest")
                   .Attr<ffi::Span<const float>>("fill"));
