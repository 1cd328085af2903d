"""mean_gradients: the mean over devices of each layer's gradients, sent in 16 bits on request."""

import re
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused.parallel.shard_axis import axis_to_share
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import python_numbers
from jaxfused.runtime.dropout import murmur
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.sharding import AxisName
from jaxfused.runtime.stochastic_rounding import leaf_seeds, random_halves, round_to_bfloat16

_OP = "parallel.mean_gradients"


@python_numbers
def mean_gradients(
    grads: Any,
    axis_name: AxisName,
    *,
    bfloat16: bool = False,
    key: Any = None,
    error: Any = None,
    scatter: bool = False,
    bucket: Any = None,
) -> Any:
    r"""The mean of gradients over the devices of a mesh axis, each layer's by its own collectives.

    .. math:: \bar g = \frac{1}{n} \sum_\text{devices} g

    The sums of a layer wait for its gradients only, and so overlap the backward of the layers before it.
    Call it within `jax.shard_map` or `jax.pmap`, on gradients that the devices have not summed:
    differentiate by parameters that vary over the axis, as `jax.lax.pcast(params, axis_name,
    to="varying")` has them.

    Gradients of 16 bits are summed in float32, in the order of the devices, and the mean is sent back in
    16 bits: 4 (n - 1) / n bytes for each number, where a sum in float32 takes 8 (n - 1) / n. With
    `bfloat16` wider ones are rounded, and sent so too. Rounding errors need not be lost:

    - `key` rounds at random (stochastic rounding), with other random bits on each device.
    - `error` is the rounding error of the device's last call, added before rounding (error feedback).

    Args:
      grads: a tree of the device's own gradients, of floats.
      axis_name: the mapped axis, or a tuple of several.
      bfloat16: whether gradients are sent in bfloat16.
      key: of `jax.random`, another one at each step; None to round to the nearest.
      error: a tree like `grads` in float32, of zeros at the first step; each device keeps its own. What
        a gradient that is not finite left is dropped.
      scatter: whether a device gets its shard of each mean only, by a reduce-scatter, along the axis
        that `zero1` splits; of leaves without such an axis it gets the whole mean.
      bucket: function from the path of a leaf, as `jax.tree.leaves_with_path` has it, to its layer. By
        default the path up to the first number in it, or else its first name.

    Returns:
      The means, of grads' dtypes; with `error` the pair (means, new error).

    Raises:
      ValueError: the axis is not mapped here, `key` or `error` come without `bfloat16`, or the error is
        not like the gradients.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
      >>> def gradients(w, x):
      ...     w = jax.lax.pcast(w, "data", to="varying")
      ...     grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
      ...     return jaxfused.parallel.mean_gradients(grads, "data", bfloat16=True)
      >>> x = jnp.ones((2 * jax.device_count(), 3))
      >>> mapped = jax.shard_map(gradients, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
      >>> mapped(jnp.ones(3), x)
      Array([6., 6., 6.], dtype=float32)

    Source: for error feedback, Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes", 2019, https://arxiv.org/abs/1901.09847; for buckets, Li et al., "PyTorch
    Distributed: Experiences on Accelerating Data Parallel Training", 2020,
    https://arxiv.org/abs/2006.15704.
    """
    _check(grads, axis_name, bfloat16, key, error)
    size = lax.axis_size(axis_name)
    paths = jax.tree.leaves_with_path(grads)
    treedef: Any = jax.tree.structure(grads)
    leaves = [jnp.asarray(leaf) for _, leaf in paths]
    kept: list[Any] = [None] * len(leaves) if error is None else treedef.flatten_up_to(error)
    words = None if key is None else _own_words(key, axis_name)
    sent, errors = [], []
    for i, (leaf, old) in enumerate(zip(leaves, kept, strict=True)):
        if not bfloat16:
            sent.append(leaf)
            continue
        wide = leaf.astype(accumulator_dtype(leaf.dtype))
        wide = wide if old is None else wide + old
        seeds = None if words is None else leaf_seeds(words, i, "first_moment")
        sent.append(_narrow(wide, seeds))
        errors.append(wide - sent[-1].astype(wide.dtype))
    layer_of = _layer_of if bucket is None else bucket
    layers: dict[Hashable, list[int]] = {}
    means = [*leaves]
    for i, (path, leaf) in enumerate(paths):
        axis = axis_to_share(leaf.shape, size, scatter)
        if leaf.size == 0 or sent[i].dtype.itemsize > 2:
            means[i] = _mean(leaf, axis_name, axis)
        elif axis is None:
            layers.setdefault((layer_of(path), sent[i].dtype), []).append(i)
        else:
            parts = lax.all_to_all(sent[i][None], axis_name, axis + 1, 0, tiled=True)
            means[i] = in_order(parts) / size
    for members in layers.values():
        seeds = None if words is None else leaf_seeds(words, members[0], "second_moment")
        found, lost = _mean_in_16_bits([sent[i] for i in members], axis_name, seeds)
        for i, mean, cut_off in zip(members, found, lost, strict=True):
            means[i] = mean
            if bfloat16:
                errors[i] = errors[i] + cut_off
    result = treedef.unflatten(
        [m.astype(leaf.dtype) for m, leaf in zip(means, leaves, strict=True)]
    )
    # Errors that are not finite are dropped, so that they spoil one step only.
    errors = [jnp.where(jnp.isfinite(lost), lost, 0) for lost in errors]
    return result if error is None else (result, treedef.unflatten(errors))


def _check(grads: Any, axis_name: AxisName, bfloat16: bool, key: Any, error: Any) -> None:
    if not sharding.is_mapped(axis_name):
        raise ValueError(
            f"{_OP}: no axis {axis_name!r} is mapped here; call it within jax.shard_map or jax.pmap over"
            " that axis."
        )
    for name, given in dict(key=key, error=error).items():
        if given is not None and not bfloat16:
            raise ValueError(
                f"{_OP}: {name} was passed, but without bfloat16 nothing is rounded; pass bfloat16=True,"
                f" or leave {name} out."
            )
    for path, leaf in jax.tree.leaves_with_path(grads):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"{_OP}: grads{jax.tree_util.keystr(path)} is of {jnp.result_type(leaf)}; pass a tree"
                " of floats."
            )
    if error is not None:
        shapes, of_error = (jax.tree.map(jnp.shape, tree) for tree in (grads, error))
        if shapes != of_error:
            raise ValueError(
                f"{_OP}: error has leaves {of_error}, but grads {shapes}; pass the error that the last"
                " call returned, or zeros like grads."
            )


def _layer_of(path: Sequence[Any]) -> Hashable:
    """Returns the path up to the first name with a number in it, or else its first name."""
    names = [jax.tree_util.keystr((entry,), simple=True) for entry in path]
    numbered = [i for i, name in enumerate(names) if re.search(r"\d", name)]
    return tuple(names[: numbered[0] + 1 if numbered else 1])


def _own_words(key: Any, axis_name: AxisName) -> jax.Array:
    """Returns two words of random bits, which differ from device to device."""
    words = jax.random.bits(key, (2,), jnp.uint32)
    return words ^ murmur(lax.axis_index(axis_name).astype(jnp.uint32))


def _narrow(wide: jax.Array, seeds: jax.Array | None) -> jax.Array:
    """Returns `wide` in bfloat16, rounded at random if there are seeds, else to the nearest."""
    if seeds is None:
        return wide.astype(jnp.bfloat16)
    return round_to_bfloat16(wide.astype(jnp.float32), random_halves(seeds, wide.shape))


def _mean(leaf: jax.Array, axis_name: AxisName, axis: int | None) -> jax.Array:
    """Returns the mean over devices, or the device's shard of it along an axis."""
    size = lax.axis_size(axis_name)
    if axis is None:
        return lax.psum(leaf, axis_name) / size
    return lax.psum_scatter(leaf, axis_name, scatter_dimension=axis, tiled=True) / size


def in_order(parts: jax.Array) -> jax.Array:
    """Returns the sum of an array along the first axis, in its order and in float32."""
    total = parts[0].astype(jnp.float32)
    for part in parts[1:]:
        total = total + part.astype(jnp.float32)
    return total


def _mean_in_16_bits(
    leaves: Sequence[jax.Array], axis_name: AxisName, seeds: jax.Array | None
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the means of arrays of one 16-bit dtype, sent as one, and the means' rounding errors.

    A device's errors are those of the part of the means that it rounded, times the number of devices,
    and zeros elsewhere: in the next mean over devices, each error then counts once.
    """
    size = lax.axis_size(axis_name)
    flat = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
    parts = jnp.pad(flat, (0, -flat.size % size)).reshape(size, -1)
    own = in_order(lax.all_to_all(parts, axis_name, 0, 0, tiled=True)) / size
    narrow = own.astype(flat.dtype) if seeds is None else _narrow(own, seeds)
    mean = lax.all_gather(narrow, axis_name, tiled=True, to="invarying")
    cut_off = size * (own - narrow.astype(own.dtype))
    lost = jnp.where(
        jnp.arange(size)[:, None] == lax.axis_index(axis_name), cut_off[None], 0
    ).reshape(-1)
    ends = [0]
    for leaf in leaves:
        ends.append(ends[-1] + leaf.size)

    def apart(joined: jax.Array) -> list[jax.Array]:
        return [
            joined[start:end].reshape(leaf.shape)
            for leaf, start, end in zip(leaves, ends, ends[1:], strict=False)
        ]

    return apart(mean), apart(lost)
