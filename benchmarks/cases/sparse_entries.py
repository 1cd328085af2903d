"""sparse_matmul beside cuSPARSE, JAX's sparse products and the dense product of the same precision."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import sparse

import jaxfused
from benchmarks.run.case import Arrays, Bar, Case, functions

DENSITIES = (0.001, 0.01, 0.015, 0.02, 0.05)
_SHAPES = tuple(
    (8192, 512, density, dtype) for dtype in ("float32", "bfloat16") for density in DENSITIES
)
_DENSE_RUNS = 1 / 64
"""Share of entries from which `sparse_matmul` runs as a dense product, of float32 in TF32."""
_NUMBERS = (((1,), (0,)), ((), ()))


def cases(quick: bool = False, shapes: Sequence[Sequence[Any]] | None = None) -> list[Case]:
    return [_case(*shape) for shape in shapes or _SHAPES[: 2 if quick else None]]


def _case(side: int, columns: int, density: float, dtype: str) -> Case:
    """Returns the case of a square matrix with entries at random places, times [side, columns]."""
    count, size = int(density * side * side), jnp.dtype(dtype).itemsize

    def make_inputs(key: jax.Array) -> Arrays:
        of_places, of_data, of_b = jax.random.split(key, 3)
        place = jnp.sort(jax.random.choice(of_places, side * side, (count,), replace=False))
        rows, at = place // side, place % side
        data = jax.random.normal(of_data, (count,), dtype)
        b = jax.random.normal(of_b, (side, columns), dtype)
        starts = jnp.searchsorted(rows, jnp.arange(side + 1), method="sort").astype(jnp.int32)
        dense = jnp.zeros((side, side), dtype).at[rows, at].set(data)
        return data, jnp.stack([rows, at], axis=1), at, starts, b, dense

    def coo(data: jax.Array, places: jax.Array) -> sparse.BCOO:
        return sparse.BCOO(
            (data, places), shape=(side, side), indices_sorted=True, unique_indices=True
        )

    def ours(data, places, at, starts, b, dense, *, implementation):
        del at, starts, dense
        return jaxfused.sparse_matmul(coo(data, places), b, implementation=implementation)

    def of_jax(data, places, at, starts, b, dense):
        # Without a wider type JAX rounds each partial sum.
        del at, starts, dense
        y = sparse.bcoo_dot_general(
            coo(data, places), b, dimension_numbers=_NUMBERS, preferred_element_type=jnp.float32
        )
        return y.astype(b.dtype)

    def of_jax_csr(data, places, at, starts, b, dense):
        del places, dense
        matrix = sparse.BCSR((data, at, starts), shape=(side, side))
        y = sparse.bcsr_dot_general(
            matrix, b, dimension_numbers=_NUMBERS, preferred_element_type=jnp.float32
        )
        return y.astype(b.dtype)

    def product(precision: Any) -> Any:
        return lambda data, places, at, starts, b, dense: jnp.matmul(dense, b, precision=precision)

    peers = {"xla": of_jax, "jax_csr": of_jax_csr, "dense": product("highest")}
    if dtype == "float32":
        peers["dense_tf32"] = product(None)
    return Case(
        name=f"sparse_matmul {dtype} {density:.1%}",
        shape=(side, columns),
        make_inputs=make_inputs,
        # Values and places are read, b and the result pass once.
        bytes=count * (size + 8) + 2 * side * columns * size,
        bars=_bars(density, dtype),
        dtype=dtype,
        sets=8,
        **functions(ours, peers, {"cusparse": _cusparse}, differentiable=0, cotangents=0),
    )


def _bars(density: float, dtype: str) -> tuple[Bar, ...]:
    of_jax = (Bar("xla", must=1.0), Bar("jax_csr", must=1.0))
    is_wide = dtype == "float32"
    same = "dense_tf32" if is_wide and density >= _DENSE_RUNS else "dense"
    bars = (*of_jax, Bar(same, must=3.0 if density <= 0.001 else 1.0))
    if is_wide and same == "dense":
        bars += (Bar("dense_tf32", aim=1.0),)
    if is_wide and density == 0.01:
        bars += (Bar("cusparse", must=1.2),)
    return bars


def _cusparse() -> Any:
    import torch

    def run(data, places, at, starts, b, dense):
        del places
        return torch.sparse_csr_tensor(starts, at, data, size=dense.shape) @ b

    return run
