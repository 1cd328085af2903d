"""Adds what Mosaic's GPU interpreter of JAX 0.11.2 lacks for the kernels.

For attention: stores to an accumulator of WGMMA, and products whose left operand is in registers. The
kernels multiply an accumulator between two products, and the weights never leave the registers. For
products: memory that copies and instructions address under two layouts, and the memory of another CTA of
a cluster. For all kernels: copies must be aligned. Operations on single registers are restated in
jax.numpy.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu import core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.state import primitives
from jax._src.state.types import AbstractRef
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import store, warps
from pallas_kernels.gemm import column_sums, dequantize, interleaved_rope
from pallas_kernels.hopper import COPY_BYTES


def prepare(monkeypatch) -> None:
    """Adds what all kernels need, for one test."""
    share_unions(monkeypatch)
    align_copies(monkeypatch)
    fill_before_the_start(monkeypatch)
    reach_into_clusters(monkeypatch)
    turn_neighbours(monkeypatch)
    store_pieces(monkeypatch)


def share_unions(monkeypatch) -> None:
    """Gives the members of a `RefUnion` the same memory, for one test.

    The interpreter gives each member separate memory, as JAX promises nothing about how they overlap. On
    a GPU a block one swizzled piece wide has the same bytes with and without tiles, and with its rows as
    one axis or as several. Members of equal shape become one array, so that races between them are
    found; members of other shapes but equal size are views of the first one's memory.
    """

    def members_of(aval):
        members = jaxpr_interpret.union_members(aval)
        return members, [jaxpr_interpret._member_inner_aval(member) for member in members]

    def resolve(aval, keys, transforms):
        if not isinstance(aval, core.AbstractRefUnion):
            return keys, transforms
        extract, *rest = transforms
        members, logical = members_of(aval)
        named = logical[[member.transforms[0] for member in members].index(extract)]
        return keys[logical.index(named)], tuple(rest)

    def tag(token, keys, groups):
        del groups
        memory = gpu_callbacks._get_shared_memory()
        first, *others = (gpu_callbacks.HostAllocationKey.from_array(key) for key in keys)
        content = memory.mem[first].content
        for other in others:
            buffer = memory.mem[other]
            if buffer.shape != content.shape and np.prod(buffer.shape) == content.size:
                buffer._content = content.reshape(buffer.shape)
        return token

    monkeypatch.setattr(jaxpr_interpret, "resolve_ref", resolve)
    monkeypatch.setattr(
        gpu_callbacks,
        "_tag_ref_union",
        lambda token, keys, alias_group_idxs: tag(token, keys, alias_group_idxs),
    )


def fill_before_the_start(monkeypatch) -> None:
    """Makes copies from before an array's start read zeros, as from beyond its end, for one test."""
    shared = gpu_callbacks.memory.GPUSharedMemory
    read = shared.get_buffer_content

    def read_from(self, key, access, *args, **kwargs):
        before = [isinstance(r, slice) and r.start < 0 for r in access.range]
        if not any(before):
            return read(self, key, access, *args, **kwargs)
        inside = tuple(
            slice(0, max(0, r.stop), r.step) if negative else r
            for r, negative in zip(access.range, before, strict=True)
        )
        found, described, clock = read(
            self, key, dataclasses.replace(access, range=inside), *args, **kwargs
        )
        filled = np.zeros(access.shape, described.dtype)
        if found is not None:
            kept = [r for r in access.range if isinstance(r, slice)]
            starts = [max(0, -r.start) for r in kept]
            filled[tuple(slice(a, a + n) for a, n in zip(starts, found.shape, strict=True))] = found
        return filled, described, clock

    monkeypatch.setattr(shared, "get_buffer_content", read_from)


def align_copies(monkeypatch) -> None:
    """Makes misaligned copies fail as on a GPU, for one test.

    A copy must begin at a multiple of 16 bytes of the last axis in global memory, else a GPU raises an
    illegal instruction, and at a multiple of 128 bytes in shared memory, else a misaligned address. The
    interpreter alone would run it.
    """
    task = gpu_callbacks.AsyncCopyTask
    initialize = task.__init__

    def initialize_aligned(self, **arguments):
        initialize(self, **arguments)
        is_load = isinstance(self, gpu_callbacks.AsyncCopyGmemToSmemTask)
        source, destination = (
            (self.src_allocation_key, self.src_access),
            (self.dst_allocation_key, self.dst_access),
        )
        (key, access), shared = (source, destination) if is_load else (destination, source)
        buffer = gpu_callbacks._get_shared_memory().buffer_shape_and_dtype
        dtype = buffer(key).dtype
        if (place := _bytes_before(buffer(shared[0]), shared[1])) % COPY_BYTES:
            raise ValueError(
                f"A copy must begin at a multiple of {COPY_BYTES} bytes of shared memory, and this one"
                f" begins {place} bytes after the start of its array; give the array longer rows."
            )
        last = access.range[-1]
        start = last.start if isinstance(last, slice) else last
        if start * np.dtype(dtype).itemsize % 16:
            raise ValueError(
                "A copy must begin at a multiple of 16 bytes along the last axis of the array in global"
                f" memory, got element {start} of {dtype}; copy from an aligned element on."
            )

    monkeypatch.setattr(task, "__init__", initialize_aligned)


def _bytes_before(buffer, access) -> int:
    """Returns the bytes of an array before the first copied number, with its rows in order.

    If rows are cut into tiles, a copy begins with a whole tile, and the count is the same.
    """
    starts = [r.start if isinstance(r, slice) else r for r in access.range]
    numbers = 0
    for start, length in zip(starts, buffer.shape, strict=True):
        numbers = numbers * length + start
    return numbers * np.dtype(buffer.dtype).itemsize


def reach_into_clusters(monkeypatch) -> None:
    """Lets a CTA read the shared memory of another CTA of its cluster, for one test.

    CTAs allocate the same arrays in the same order, so that only the CTA differs in their keys.
    """
    resolve_union = jaxpr_interpret.resolve_ref
    fields = [field.name for field in dataclasses.fields(gpu_callbacks.HostAllocationKey)]

    def resolve(aval, key, transforms):
        key, transforms = resolve_union(aval, key, transforms)
        kept = []
        for transform in transforms:
            if isinstance(transform, core.ClusterRefTransform):
                (block,) = transform.idxs  # The CTA's index: clusters have one axis here.
                key = key.at[fields.index("block_id")].set(block)
            else:
                kept.append(transform)
        return key, tuple(kept)

    monkeypatch.setattr(jaxpr_interpret, "resolve_ref", resolve)


def complete(monkeypatch) -> None:
    """Adds what attention needs, for one test."""
    interpreter = jaxpr_interpret.JaxprInterpreter
    of_references = interpreter._interpret_wgmma_ref_p

    def interpret_product(self, eqn, token, get_operands):
        if isinstance(eqn.invars[1].aval, AbstractRef):
            return of_references(self, eqn, token, get_operands)
        accumulator, left, right, *leaves = get_operands()
        transforms = jax.tree.unflatten(
            eqn.params["b_transforms_tree"] or jax.tree.structure([]), leaves
        )
        right, transforms = jaxpr_interpret.resolve_ref(eqn.invars[2].aval, right, transforms)
        token = gpu_callbacks.callback.io_callback(
            functools.partial(_multiply, source_info=eqn.source_info),
            gpu_callbacks.TOKEN_SHAPE_DTYPE,
            token,
            self.mesh_location,
            self.thread,
            accumulator,
            left,
            right,
            transforms,
        )
        return token, []

    monkeypatch.setattr(interpreter, "_interpret_wgmma_ref_p", interpret_product)

    def store(self, tracer, index, value):
        primitives.ref_swap(tracer, index, value)

    monkeypatch.setattr(core.WGMMAAbstractAccumulatorRef, "_setitem", store)


@gpu_callbacks.fail_on_exception
def _multiply(
    token, mesh_location, thread, accumulator, left, right, transforms, *, source_info=None
):
    """Adds left @ right to the accumulator, with the interpreter's own reads and writes."""
    memory = gpu_callbacks._get_shared_memory()
    info = gpu_callbacks.memory.GPULoggingInfo(mesh_location, thread, source_info)
    accumulator, right = map(gpu_callbacks.HostAllocationKey.from_array, (accumulator, right))
    transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    whole = memory.access(accumulator, ())

    def read(buffer, place):
        content, _, _ = memory.get_buffer_content(buffer, place, thread, logging_info=info)
        return content

    total = read(accumulator, whole)
    factor = read(right, memory.access(right, transforms)).astype(total.dtype)
    total = total + np.asarray(left).astype(total.dtype) @ factor
    memory.store_buffer_content(accumulator, whole, total, thread, logging_info=info)
    return token


def upcast_integers(monkeypatch) -> None:
    """Restates in jax.numpy how kernels dequantise integer weights in registers, for one test."""

    def floats(unsigned, shifts, scales):
        def of_columns(numbers):
            numbers = jnp.stack(numbers, axis=1).astype(jnp.float32)
            return jnp.repeat(numbers, unsigned.shape[1] // numbers.shape[1], axis=1)

        dtype = shifts[0].dtype
        exact = (unsigned / dequantize.unit(dtype) + of_columns(shifts)).astype(dtype)
        return (exact * of_columns(scales)).astype(dtype) if scales else exact

    def from_bytes(stored, shifts, scales=()):
        return floats(stored.astype(jnp.int32) + dequantize.ADDED_TO_BYTES, shifts, scales)

    def from_words(words, shifts, scales=(), half=None):
        n, count = words.shape
        pairs = jnp.stack([(words >> (4 * pair)) & 0x000F000F for pair in range(4)])
        # Axes: run of a word, half of the run, row, thread, word of the thread, odd or even.
        both = jax.lax.bitcast_convert_type(pairs, jnp.int16).reshape(2, 2, n, count // 4, 4, 2)
        unsigned = both.transpose(2, 4, 0, 1, 3, 5).reshape(n, 8 * count)
        if half is not None:
            unsigned = unsigned[:, half * 4 * count : (half + 1) * 4 * count]
        return floats(unsigned, shifts, scales)

    def e2m1(codes):
        exponent, mantissa = (codes >> 1) & 3, (codes & 1) * 0.5
        size = jnp.where(exponent == 0, mantissa, (1 + mantissa) * (1 << exponent) * 0.5)
        return jnp.where(codes & 8, -size, size)

    def from_codes(stored, entries, scales, half, dtype):
        codes = stored[...][:, half * 32 : (half + 1) * 32].astype(jnp.int32)
        if entries is None:
            numbers = e2m1(jnp.stack([codes & 15, codes >> 4], axis=-1)).astype(dtype)
        else:
            pairs = jnp.take(entries[...][:, 0], codes)
            numbers = jax.lax.bitcast_convert_type(pairs, dtype)
        numbers = numbers.reshape(codes.shape[0], -1)
        if not scales:
            return numbers
        each = jnp.repeat(jnp.stack(scales, axis=1), numbers.shape[1] // len(scales), axis=1)
        return numbers * each

    monkeypatch.setattr(dequantize, "from_codes", from_codes)
    monkeypatch.setattr(dequantize, "from_bytes", from_bytes)
    monkeypatch.setattr(dequantize, "from_words", from_words)


def turn_neighbours(monkeypatch) -> None:
    """Restates in jax.numpy how a kernel rotates pairs in its registers, for one test."""

    def turned(x, angles, is_fixed, *, layout=None):
        del layout
        pairs, turns = (array.reshape(len(x), -1, 2) for array in (x, angles * (1 - is_fixed)))
        first, second = pairs[..., 0], pairs[..., 1]
        cos, sin = (turns[..., 0] + is_fixed).astype(x.dtype), turns[..., 1].astype(x.dtype)
        both = (first * cos - second * sin, second * cos + first * sin)
        return jnp.stack(both, axis=-1).reshape(x.shape)

    monkeypatch.setattr(interleaved_rope, "turned", turned)


def store_pieces(monkeypatch) -> None:
    """Restates in plain Pallas how a kernel stores pieces and commits them, for one test."""

    def store_piece(ref, value):
        ref[...] = value

    def commit_stores():
        plgpu.commit_smem()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def of_warps(values):
        rows, columns = values.shape
        return jnp.sum(values.reshape(rows // 64, 4, 16, columns), axis=(0, 2))

    def store_registers(ref, value, layout):
        del layout
        ref[...] = value

    def store_swizzled(ref, value, layout):
        del layout
        ref[...] = value

    monkeypatch.setattr(warps, "await_all", lambda: None)
    monkeypatch.setattr(column_sums, "of_warps", of_warps)
    monkeypatch.setattr(store, "store_registers", store_registers)
    monkeypatch.setattr(store, "store_piece", store_piece)
    monkeypatch.setattr(store, "store_swizzled", store_swizzled)
    monkeypatch.setattr(store, "commit_stores", commit_stores)
