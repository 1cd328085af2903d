"""fsdp_layer: a layer whose parameters are split over devices, and gathered while the layer runs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import linear_call
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfused.parallel.shard_axis import axis_to_share
from jaxfused.runtime import sharding
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.sharding import AxisName

_OP = "parallel.fsdp_layer"


def fsdp_layer(
    f: Callable[..., Any],
    params: Any,
    *arrays: Any,
    axis_name: AxisName = "fsdp",
    param_specs: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Any:
    r"""A layer `f(params, *arrays)` with parameters and gradients split over devices (FSDP, ZeRO-3).

    Each device gathers the layer's parameters, runs `f` on its own rows, and frees the gathered copies;
    the backward gathers them again. Gradients are summed by a reduce-scatter. A device thus stores its
    part of all parameters and gradients, and unsplit ones of a single layer only. Of a parameter of p
    numbers each of n devices receives 2 (n - 1) / n p numbers of `dtype`, and of its gradient
    (n - 1) / n p numbers of 32 bits.

    Everything else that the backward reads is saved, as without this function. A network of layers calls
    it once for each, under one `jax.jit` for all, so that equal layers are traced once.

    Args:
      f: function of a tree of whole parameters and of arrays, that maps each row of a batch by itself.
      params: a tree of parameters; within `jax.shard_map` over `axis_name` a device's parts of them.
      *arrays: trees of the other arguments; within `jax.shard_map` a device's own rows.
      axis_name: the mesh axis, Auto or Explicit, that splits parameters, or a tuple of several.
      param_specs: a tree like `params` of PartitionSpecs, as `flax.nnx.get_partition_spec` reads from a
        state's metadata, in which no other axis splits one. By default the longest axis that n divides
        is split, as by `zero1(...).specs`.
      in_specs: PartitionSpecs of the arrays, as `jax.shard_map` takes them, one for each; by default
        `axis_name` splits the first axis of all.
      out_specs: those of the results; by default `axis_name` splits the first axis of all.
      dtype: of parameters while they are gathered, such as jnp.bfloat16 if `f` casts them to it before
        anything else: then nothing is lost. By default their own.
      mesh: the mesh; by default that of `jax.set_mesh`, or of the types of the arrays.

    Returns:
      The results of `f`, split as `out_specs` says.

    Raises:
      ValueError: the mesh has no such axis, or a specification does not fit a parameter.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> n = jax.device_count()
      >>> mesh = jax.make_mesh((n,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> layer = lambda params, x: x + jnp.tanh(x @ params["w"])
      >>> def loss(params, x):
      ...     return jnp.mean(jaxfused.parallel.fsdp_layer(layer, params, x) ** 2)
      >>> with jax.set_mesh(mesh):
      ...     grads = jax.jit(jax.grad(loss))({"w": jnp.ones((8 * n, 8 * n))}, jnp.ones((n, 8 * n)))
      >>> grads["w"].sharding.shard_shape((8 * n, 8 * n)) == (8, 8 * n)
      True

    Forward-mode differentiation of it is that of `f`.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    2020, https://arxiv.org/abs/1910.02054; Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully
    Sharded Data Parallel", 2023, https://arxiv.org/abs/2304.11277.
    """
    leaves = jax.tree.leaves(params)
    treedef: Any = jax.tree.structure(params)
    mesh = sharding.mesh_to_map(_OP, axis_name, *leaves, remedy="pass mesh", mesh=mesh)
    if mesh is None:
        size = lax.axis_size(axis_name)
        if param_specs is None:
            raise ValueError(
                f"{_OP}: {axis_name!r} is mapped here, and the parts do not say which of their axes is"
                " split; pass param_specs."
            )
    else:
        size = sharding.devices_along(mesh, axis_name)
    specs = _specs(leaves, param_specs, axis_name, size)
    axes = [_split_axis(leaf, spec, axis_name) for leaf, spec in zip(leaves, specs, strict=True)]

    def run(leaves: Sequence[jax.Array], *arrays: Any) -> Any:
        rows = jax.tree.leaves(arrays)
        others = tuple(sorted(sharding.varying(*rows) - {*sharding.names_of(axis_name)}))
        whole = [
            leaf if axis is None else _gathered(leaf, rows, axis, axis_name, others, dtype)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        return f(treedef.unflatten(whole), *arrays)

    shapes = [
        _whole_shape(leaf, axis, 1 if mesh is not None else size)
        for leaf, axis in zip(leaves, axes, strict=True)
        if axis is not None
    ]
    run = jax.checkpoint(run, policy=saved_unless_gathered(shapes))
    if mesh is None:
        return run(leaves, *arrays)
    rows = P(axis_name)
    in_specs = (rows,) * len(arrays) if in_specs is None else tuple(in_specs)
    operands, operand_specs = (leaves, *arrays), (specs, *in_specs)
    if mesh.explicit_axes:
        operands = tuple(map(functools.partial(_resharded, mesh), operands, operand_specs))
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=operand_specs,
        out_specs=rows if out_specs is None else out_specs,
    )(*operands)


def _resharded(mesh: Any, tree: Any, spec: Any) -> Any:
    shardings = jax.tree.broadcast(jax.tree.map(functools.partial(NamedSharding, mesh), spec), tree)
    return jax.tree.map(jax.sharding.reshard, tree, shardings)


def saved_unless_gathered(shapes: Sequence[tuple[int, ...]]) -> Callable[..., bool]:
    """Returns the policy of `jax.checkpoint` that saves all but gathered parameters of these shapes.

    The cast, slice or reordering of an array of such a shape is not saved either; if that array is no
    parameter after all, it is computed again from a saved one.
    """
    known = {*shapes}

    def policy(primitive: Any, *operands: Any, **_: Any) -> bool:
        if primitive.name == "linear_call":
            return False
        return primitive.name not in _COPIES or operands[0].shape not in known

    return policy


_COPIES = {"convert_element_type", "transpose", "reshape", "slice", "squeeze", "split", "copy"}
"""Primitives whose results are cheap to compute again."""


def _specs(leaves: Sequence[Any], given: Any, axis_name: AxisName, size: int) -> list[P]:
    """Returns the PartitionSpec of each parameter."""
    if given is None:
        axes = [axis_to_share(jnp.shape(leaf), size) for leaf in leaves]
        return [P() if a is None else P(*[None] * a, axis_name) for a in axes]
    specs = jax.tree.leaves(given, is_leaf=lambda leaf: leaf is None or isinstance(leaf, P))
    if len(specs) != len(leaves):
        raise ValueError(
            f"{_OP}: param_specs has {len(specs)} leaves and the parameters {len(leaves)}; pass a"
            " PartitionSpec for each."
        )
    return [P() if spec is None else spec for spec in specs]


def _split_axis(leaf: Any, spec: P, axis_name: AxisName) -> int | None:
    """Returns the axis of a parameter that is split, or None."""
    wanted = sharding.names_of(axis_name)
    entries = [sharding.names_of(entry) for entry in spec]
    split = [axis for axis, entry in enumerate(entries) if entry]
    if not split:
        return None
    if len(split) > 1 or entries[split[0]] != wanted or split[0] >= jnp.ndim(leaf):
        raise ValueError(
            f"{_OP}: a parameter of shape {jnp.shape(leaf)} has the PartitionSpec {spec}, but one of its"
            f" axes at most may be split, by {axis_name!r} alone; pass such a one."
        )
    return split[0]


def _whole_shape(leaf: Any, axis: int | None, times: int) -> tuple[int, ...]:
    shape = [*jnp.shape(leaf)]
    if axis is not None:
        shape[axis] *= times
    return tuple(shape)


def _gathered(
    part: jax.Array,
    rows: Sequence[jax.Array],
    axis: int,
    axis_name: AxisName,
    others: tuple[str, ...],
    dtype: Any,
) -> jax.Array:
    """All-gathers a parameter; its gradient is reduce-scattered, then summed over the axes `others`.

    The device's part is made to vary over `others` before the gather, so that the sum over `others` is
    one of the parts' gradients, not of the whole parameter's. The gather waits for the rows; otherwise
    XLA would gather the parameters of all layers at the start.
    """

    def gather(rows: Any, part: jax.Array) -> jax.Array:
        part, _ = lax.optimization_barrier((part, rows))
        sent = part if dtype is None else part.astype(dtype)
        sent = lax.pcast(sent, others, to="varying") if others else sent
        return lax.all_gather(sent, axis_name, axis=axis, tiled=True).astype(part.dtype)

    def scatter(_: Any, gradient: jax.Array) -> jax.Array:
        wide = gradient.astype(accumulator_dtype(gradient.dtype))
        wide = lax.psum_scatter(wide, axis_name, scatter_dimension=axis, tiled=True)
        wide = lax.psum(wide, others) if others else wide
        return wide.astype(gradient.dtype)

    return linear_call(gather, scatter, jax.tree.map(lax.stop_gradient, rows), part)
