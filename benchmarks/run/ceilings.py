"""Measures what this GPU can do at most: the rates of a copy, of reads and of a matrix product."""

import statistics
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from benchmarks.run import peers, timing

_COPY_BYTES = 512 * 2**20
_GEMM_SIZE = 8192
# Ring buffers to try: elements of 2 bytes per chunk, chunks per CTA, CTAs per SM.
_RINGS = ((8192, 8, 1), (8192, 12, 1), (8192, 6, 2), (4096, 12, 2))


def bulk_copy(x: jax.Array, *, chunk: int, slots: int, ctas: int, writes: bool = True) -> jax.Array:
    """Copies x through shared memory by TMA bulk copies, without registers, in a persistent kernel.

    x: [chunks, chunk]; each CTA has a ring of `slots` chunks. Without `writes` all chunks are read, and
    only the last one of each CTA is written, to [ctas, chunk].
    """
    chunks = x.shape[0]

    def body(x_gmem, y_gmem, ring_smem, loaded):
        cta = lax.axis_index("cta")
        steps = lax.div(jnp.int32(chunks - 1) - cta, jnp.int32(ctas)) + 1

        def load(step, slot):
            plgpu.copy_gmem_to_smem(
                x_gmem.at[cta + step * ctas],
                ring_smem.at[slot],
                loaded.at[slot],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

        for slot in range(slots):

            @pl.when(slot < steps)
            def _(slot=slot):
                load(slot, slot)

        def copy(step, _):
            slot = lax.rem(step, jnp.int32(slots))
            plgpu.barrier_wait(loaded.at[slot])
            free = step
            if writes:
                plgpu.copy_smem_to_gmem(ring_smem.at[slot], y_gmem.at[cta + step * ctas])
                # Only this step's store may still read its slot; the previous step's is free again.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                free = step - 1

            @pl.when((free >= 0) & (free + slots < steps))
            def _():
                load(free + slots, lax.rem(free, jnp.int32(slots)))

        lax.fori_loop(0, steps, copy, None)
        if not writes:
            plgpu.copy_smem_to_gmem(
                ring_smem.at[lax.rem(steps - 1, jnp.int32(slots))], y_gmem.at[cta]
            )
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape if writes else (ctas, chunk), x.dtype),
        scratch_types=[
            plgpu.SMEM((slots, chunk), x.dtype),
            plgpu.Barrier(num_barriers=slots),
        ],
        grid=(ctas,),
        grid_names=("cta",),
    )(x)


def measure() -> dict[str, float | str]:
    """Returns rates: bulk_copy, device_copy, stream, copy (the best of them) in GB/s, gemm in TFLOP/s.

    bulk_read is the rate, in GB/s, of a kernel that only reads.
    A rate that fails is left out, with its error under "<name>_error".
    """
    result: dict[str, float | str] = {}
    copies = {
        "bulk_copy": partial(_bulk_rate, writes=True),
        "device_copy": _device_copy_rate,
        "stream": _stream_rate,
    }
    for name, rate in (copies | {"bulk_read": partial(_bulk_rate, writes=False)}).items():
        try:
            result[name] = rate()
        except Exception as error:
            result[f"{name}_error"] = peers.describe(error)
    measured = [result[name] for name in copies if name in result]
    if measured:
        result["copy"] = max(measured)
    try:
        result["gemm"] = _gemm_rate()
    except Exception as error:
        result["gemm_error"] = peers.describe(error)
    return result


def _bulk_rate(writes: bool) -> float:
    multiprocessors = jax.devices()[0].core_count
    flat = jax.random.normal(jax.random.key(0), (_COPY_BYTES // 2,), jnp.bfloat16)
    best = 0.0
    for chunk, slots, per_multiprocessor in _RINGS:
        x = flat.reshape(-1, chunk)
        ctas = per_multiprocessor * multiprocessors
        ring = dict(chunk=chunk, slots=slots, ctas=ctas)
        copy = jax.jit(partial(bulk_copy, **ring, writes=writes))
        y = x if writes else jnp.roll(x[-ctas:], len(x) % ctas, axis=0)
        if not bool((copy(x) == y).all()):
            raise RuntimeError(f"the copy with {slots} slots of {chunk} elements is not the input")
        median = statistics.median(timing.cupti(copy, [(x,)]).microseconds)
        best = max(best, (1 + writes) * _COPY_BYTES / median / 1e3)
    return best


def _device_copy_rate() -> float:
    x = jax.random.normal(jax.random.key(1), (_COPY_BYTES // 2,), jnp.bfloat16)
    median = statistics.median(timing.wall(jax.jit(jnp.copy), [(x,)]).microseconds)
    return 2 * _COPY_BYTES / median / 1e3


def _stream_rate() -> float:
    """Returns the rate of XLA's kernel for -x: many small CTAs, which go to whichever SM is free."""
    x = jax.random.normal(jax.random.key(1), (_COPY_BYTES // 2,), jnp.bfloat16)
    median = statistics.median(timing.cupti(jax.jit(jnp.negative), [(x,)]).microseconds)
    return 2 * _COPY_BYTES / median / 1e3


def _gemm_rate() -> float:
    shape = (_GEMM_SIZE, _GEMM_SIZE)
    a, b = (jax.random.normal(k, shape, jnp.bfloat16) for k in jax.random.split(jax.random.key(2)))
    median = statistics.median(timing.cupti(jax.jit(jnp.dot), [(a, b)]).microseconds)
    return 2 * _GEMM_SIZE**3 / median / 1e6
