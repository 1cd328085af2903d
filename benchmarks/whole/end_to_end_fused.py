"""Steps whose speed under `jaxfused.fuse` has a bar (target ratio): an Evoformer block, ResNet-50.

Both are plain Flax. A block's step is its forward and all of its gradients, without an optimizer; that
of ResNet-50 trains. Gradients of both variants are held against stock's in float32 before anything is
timed.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.whole import end_to_end_jax
from benchmarks.whole.end_to_end_jax import Batch, Network, Program, State, Workload
from examples.classify.resnet import RESNETS, ResNetSize

_UNIT = 2**-8
"""Unit in the last place of bfloat16, by which fused gradients may be further off than stock's twice."""


def workloads() -> dict[str, Workload]:
    made = [
        evoformer("evoformer", EvoformerSize()),
        resnet("resnet-50-128", RESNETS["resnet-50"], batch=128),
    ]
    return {workload.name: workload for workload in made}


def resnet(name: str, size: ResNetSize, **sizes: Any) -> Workload:
    """Returns `end_to_end_jax.resnet` with batch norm, with its bars."""
    made = end_to_end_jax.resnet(name, size, "batch_norm", **sizes)
    return replace(made, must=1.25, aim=1.35)


# --- the Evoformer block --------------------------------------------------------------------------


@dataclass(frozen=True)
class EvoformerSize:
    """Sizes of a block and of its inputs.

    These are m [1, sequences, residues, width] and z [1, residues, residues, pair_width].
    """

    residues: int = 256
    sequences: int = 128
    width: int = 256
    pair_width: int = 128
    heads: int = 8
    pair_heads: int = 4
    head_size: int = 32
    outer: int = 32
    """Width of the two factors of the outer product."""
    factor: int = 4
    """Hidden width of a transition over its width."""


def evoformer(name: str, size: EvoformerSize) -> Workload:
    """Returns the workload of an Evoformer block; its batch is the cotangents of m and z."""

    def arrays(key: jax.Array) -> Batch:
        keys = jax.random.split(key)
        m = (1, size.sequences, size.residues, size.width)
        z = (1, size.residues, size.residues, size.pair_width)
        return tuple(
            jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, (m, z), strict=True)
        )

    def network(dtype: Any) -> Network:
        block = Evoformer(size, dtype)

        def init(key: jax.Array) -> tuple[Any, Any]:
            inputs = arrays(key)
            return {"block": block.init(key, *inputs)["params"], "inputs": inputs}, ()

        def loss(params: Any, averages: Any, batch: Batch) -> tuple[jax.Array, Any]:
            outputs = block.apply({"params": params["block"]}, *params["inputs"])
            pairs = zip(outputs, batch, strict=True)
            return sum(jnp.sum(y.astype(jnp.float32) * dy) for y, dy in pairs), averages

        return Network(init, loss)

    def program(around: Callable[[Any], Any]) -> Program:
        return _gradients_alone(network(jnp.bfloat16), around)

    return Workload(
        name,
        arrays,
        {
            "fused": functools.partial(program, jaxfused.fuse),
            "stock": functools.partial(program, lambda loss: loss),
        },
        lambda: network(jnp.bfloat16).forward_flops(arrays),
        network=network,
        must=1.5,
    )


def _gradients_alone(network: Network, around: Callable[[Any], Any]) -> Program:
    """Returns a step that keeps the parameters; the optimizer's place in the state has the gradients."""
    of_loss = jax.value_and_grad(around(network.loss), has_aux=True)

    def init(key: jax.Array) -> State:
        params, averages = network.init(key)
        return params, jax.tree.map(jnp.zeros_like, params), averages

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        params, _, averages = state
        (value, averages), gradients = of_loss(params, averages, batch)
        return (params, gradients, averages), value

    return Program(init, step)


class Evoformer(nn.Module):
    """One block of Jumper et al., 2021, supplementary algorithm 6, without dropout and masks."""

    size: EvoformerSize
    dtype: Any

    @nn.compact
    def __call__(self, m: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        size, dtype = self.size, self.dtype
        m, z = m.astype(dtype), z.astype(dtype)

        def norm(x: jax.Array) -> jax.Array:
            return nn.LayerNorm(epsilon=1e-5, dtype=dtype)(x)

        def bias_of(x: jax.Array, heads: int) -> jax.Array:
            """Returns logits to add, [1, 1, heads, residues, residues], of normalised pairs."""
            bias = nn.Dense(heads, use_bias=False, dtype=dtype)(x)
            return jnp.moveaxis(bias, -1, 1)[:, None]

        def transition(x: jax.Array) -> jax.Array:
            width = x.shape[-1]
            hidden = nn.relu(nn.Dense(size.factor * width, dtype=dtype)(norm(x)))
            return nn.Dense(width, dtype=dtype)(hidden)

        attend = functools.partial(GatedAttention, size.head_size, dtype)
        m = m + attend(size.heads)(norm(m), bias_of(norm(z), size.heads))
        columns = norm(m).swapaxes(1, 2)
        m = m + attend(size.heads)(columns, None).swapaxes(1, 2)
        m = m + transition(m)
        z = z + OuterProductMean(size, dtype)(norm(m))
        for equation in ("bikc,bjkc->bijc", "bkic,bkjc->bijc"):  # outgoing edges, then incoming
            z = z + TriangleProduct(equation, dtype)(norm(z))
        x = norm(z)
        z = z + attend(size.pair_heads)(x, bias_of(x, size.pair_heads))
        x = norm(z.swapaxes(1, 2))
        z = z + attend(size.pair_heads)(x, bias_of(x, size.pair_heads)).swapaxes(1, 2)
        return m, z + transition(z)


class GatedAttention(nn.Module):
    """Attention of each row of x [1, R, T, C] to itself, gated by a sigmoid of x (algorithm 7)."""

    head_size: int
    dtype: Any
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array | None) -> jax.Array:
        heads = (self.heads, self.head_size)
        project = functools.partial(nn.DenseGeneral, heads, use_bias=False, dtype=self.dtype)
        q, k, v = project()(x), project()(x), project()(x)
        gate = nn.sigmoid(nn.DenseGeneral(heads, dtype=self.dtype)(x))
        logits = jnp.einsum("brqhc,brkhc->brhqk", self.head_size**-0.5 * q, k)
        if bias is not None:
            logits = logits + bias
        weights = jax.nn.softmax(logits, axis=-1)
        y = gate * jnp.einsum("brhqk,brkhc->brqhc", weights, v)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), dtype=self.dtype)(y)


class OuterProductMean(nn.Module):
    """Pairs from the mean over sequences of an outer product (algorithm 10)."""

    size: EvoformerSize
    dtype: Any

    @nn.compact
    def __call__(self, m: jax.Array) -> jax.Array:
        a, b = (nn.Dense(self.size.outer, dtype=self.dtype)(m) for _ in range(2))
        outer = jnp.einsum("bsic,bsjd->bijcd", a, b / m.shape[1])
        outer = outer.reshape(*outer.shape[:3], -1)
        return nn.Dense(self.size.pair_width, dtype=self.dtype)(outer)


class TriangleProduct(nn.Module):
    """Multiplicative update of pairs by the other two edges of triangles (algorithms 11 and 12)."""

    equation: str
    dtype: Any

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        dense = functools.partial(nn.Dense, z.shape[-1], dtype=self.dtype)
        a, b = (nn.sigmoid(dense()(z)) * dense()(z) for _ in range(2))
        x = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype)(jnp.einsum(self.equation, a, b))
        return nn.sigmoid(dense()(z)) * dense()(x)


# --- the check ------------------------------------------------------------------------------------


def errors(workload: Workload) -> dict[str, float]:
    """Compares gradients of stock, and of it under `fuse`, with stock's in float32.

    The error of an array is the norm of its difference, divided by its norm, or by the median norm of
    all arrays if that is larger: some gradients are 0, as that of a shift of all of a query's logits.

    Returns:
      The largest error of "stock" and "fused", and "excess", by which an error under `fuse` is more
      than twice stock's and a unit in the last place, or 0.
    """
    assert workload.network is not None
    exact, network = workload.network(jnp.float32), workload.network(jnp.bfloat16)
    params, averages = jax.jit(lambda key: _moved(network.init(key)))(jax.random.key(2))
    batch = jax.jit(workload.make_batch)(jax.random.key(1))

    def lower(loss: Any, given: Any) -> Any:
        return jax.jit(jax.grad(loss, has_aux=True)).lower(given, averages, batch)

    wide = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    with jax.default_matmul_precision("highest"):
        lowered = [lower(exact.loss, wide)]
    lowered += [lower(loss, params) for loss in (network.loss, jaxfused.fuse(network.loss))]
    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda program: program.compile(), lowered))
    arguments = (wide, params, params)
    truth, stock, fused = (
        jax.tree.leaves(run(given, averages, batch)[0])
        for run, given in zip(compiled, arguments, strict=True)
    )
    return {name: float(value) for name, value in _judged(truth, stock, fused).items()}


def _moved(state: tuple[Any, Any]) -> tuple[Any, Any]:
    """Moves parameters at random: a head of zeros, as ResNets begin with, has no gradients below."""
    params, averages = state
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    moves = (
        0.02 * jax.random.normal(key, a.shape, a.dtype) for key, a in zip(keys, leaves, strict=True)
    )
    leaves = [a + move for a, move in zip(leaves, moves, strict=True)]
    return jax.tree.unflatten(tree, leaves), averages


@jax.jit
def _judged(
    truth: list[jax.Array], stock: list[jax.Array], fused: list[jax.Array]
) -> dict[str, jax.Array]:
    norms = jnp.stack([jnp.linalg.norm(t.ravel()) for t in truth])
    lengths = jnp.maximum(norms, jnp.median(norms))

    def errors_of(given: list[jax.Array]) -> jax.Array:
        pairs = zip(given, truth, strict=True)
        return jnp.stack([jnp.linalg.norm((g - t).ravel()) for g, t in pairs]) / lengths

    of_stock, of_fused = errors_of(stock), errors_of(fused)
    excess = jnp.maximum(of_fused - 2 * of_stock - _UNIT, 0.0)
    return {"stock": of_stock.max(), "fused": of_fused.max(), "excess": excess.max()}
