"""Makes lowering fail if a kernel's copy to global memory would not be clipped at an axis's end.

Mosaic GPU of JAX 0.11 stores a block by a plain copy of bytes, if the block has no swizzle and its place
in the array is one run of bytes. Such a copy is clipped only at the end of the array: values beyond the
end of an inner axis overwrite the numbers that follow. Mosaic's interpreter clips every copy, as TMA
does.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from jax.experimental.mosaic.gpu import dialect as mosaic_gpu
from jax.experimental.mosaic.gpu import launch_context, utils
from jaxlib.mlir import ir

_CONTEXT = launch_context.LaunchContext


@contextmanager
def refused() -> Iterator[None]:
    """Makes lowering a kernel with such a copy raise, within this context."""
    copy = _CONTEXT.async_copy

    @functools.wraps(copy)
    def checked(self, *, src_ref, dst_ref, **options):
        is_store = utils.is_smem_ref(ir.MemRefType(src_ref.type))
        is_plain = options.get("swizzle") in (None, mosaic_gpu.SwizzlingMode.kNoSwizzle)
        by_tma = options.get("reduction_op") or options.get("gmem_transform")
        if is_store and is_plain and not by_tma:
            _check(ir.MemRefType(dst_ref.type), options.get("gmem_slice", ()))
        return copy(self, src_ref=src_ref, dst_ref=dst_ref, **options)

    with mock.patch.object(_CONTEXT, "async_copy", checked):
        yield


def _check(array: ir.MemRefType, places) -> None:
    shape, (strides, _) = tuple(array.shape), array.get_strides_and_offset()
    _, block, _ = utils.parse_indices(places, shape, check_oob=False)
    run = 1
    for length, stride in zip(reversed(block), reversed(strides), strict=True):
        if length != 1 and stride != run:
            return
        run *= length
    # The first axis longer than 1 may end anywhere: the array ends there too.
    within = next((axis for axis, length in enumerate(shape) if length > 1), len(shape)) + 1
    for length, of_block in zip(shape[within:], block[within:], strict=True):
        if length % of_block:
            raise ValueError(
                f"A copy of {tuple(block)} numbers to an array {shape} in global memory must not end"
                " beyond an axis: Mosaic GPU stores it as one run of bytes, and writes what is beyond"
                " over the numbers that follow; copy rows one by one, or from swizzled memory."
            )
