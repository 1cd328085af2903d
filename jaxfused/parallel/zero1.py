"""zero1: an optimizer split over devices: each has a part of the state and updates its parameters."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfused.optim import ema, stepping
from jaxfused.optim.transformation import FusedTransformation, from_optax
from jaxfused.parallel.shard_axis import axis_to_share
from jaxfused.runtime import sharding
from jaxfused.runtime.sharding import AxisName

_OP = "parallel.zero1"
_MOST_COMPILED = 8
"""Largest number of jitted functions that an optimizer caches, one for each set of options."""


def zero1(
    tx: optax.GradientTransformation,
    *,
    axis_name: AxisName = "data",
    mesh: jax.sharding.Mesh | None = None,
    param_specs: Any = None,
) -> "ShardedTransformation":
    r"""An optimizer whose state and work are split over the devices of a data parallel axis (ZeRO-1).

    Devices sum gradients by a reduce-scatter, take the step on their own part of parameters and state,
    and gather the new parameters: as many bytes as the sum of the gradients, 1 / n of the state's
    memory, and 1 / n of the step's time on n devices. Results are those of `tx`, which may be any
    transformation, also one with a norm over all gradients or over a layer.

    A leaf is split along its longest axis that n divides and that `param_specs` does not split.
    Leaves without one are replicated. The state's arrays have the shapes that `tx` gives them, so that a
    checkpoint of them is restored into any number of devices, and with or without `zero1`.

    Args:
      tx: one of `jaxfused.optim`, whose `step` it then has, or of Optax.
      axis_name: the mesh axis, Auto or Explicit, that splits the batch, or a tuple of several.
      mesh: the mesh; by default that of `jax.set_mesh`, or of the types of the arrays.
      param_specs: a tree like the parameters of PartitionSpecs: how other axes of the mesh split them,
        as `flax.nnx.get_partition_spec` reads from a state's metadata. Leaves that `axis_name` splits
        already stay so. By default as Explicit types say. Types on Auto axes do not: there as the
        parameters lay in the last call outside of `jax.jit`, of `init` for example; with no such call
        they are replicated, which gathers those that are split.

    Returns:
      A `jaxfused.optim.FusedTransformation` with a method more: `specs(params)` returns the
      PartitionSpecs of each device's part, for `out_specs` of gradients from
      `mean_gradients(..., scatter=True)` or for restoring a checkpoint.

    Raises:
      ValueError: the mesh has no such axis, or it is mapped by `jax.shard_map` where a method is called.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> mesh = jax.make_mesh(
      ...     (jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> opt = jaxfused.parallel.zero1(jaxfused.optim.adamw(0.1), mesh=mesh)
      >>> params = {"w": jnp.ones((3, 16 * jax.device_count()))}
      >>> state = opt.init(params)
      >>> params, state = jax.jit(opt.step)(params, state, params)
      >>> opt.specs(params)["w"] == jax.P(None, "data")
      True

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    2020, https://arxiv.org/abs/1910.02054; Xu et al., "Automatic Cross-Replica Sharding of Weight Update
    in Data-Parallel Training", 2020, https://arxiv.org/abs/2004.13336.
    """
    inner = tx if isinstance(tx, FusedTransformation) else from_optax(tx)
    placed = _Placed(axis_name, mesh, param_specs)

    def init(params: optax.Params) -> Any:
        return placed.initialised(inner.init, {}, params)

    def update_parts(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return inner.update(updates, state, params, **extra_args)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        trees = (updates, state) if params is None else (updates, state, params)
        return placed.run(update_parts, extra_args, *trees)

    sharded = ShardedTransformation(init, update)
    sharded.inner, sharded.placed = inner, placed
    return sharded


class ShardedTransformation(FusedTransformation):
    """A `FusedTransformation` from `zero1`, whose state is split over devices."""

    inner: FusedTransformation
    placed: "_Placed"

    def step(
        self,
        grads: optax.Updates,
        state: Any,
        params: optax.Params,
        *,
        max_norm: float | jax.Array | None = None,
        skip_nonfinite: bool = False,
        implementation: str | None = None,
    ) -> tuple[optax.Params, Any]:
        """Takes the step of `FusedTransformation.step`, each device on its own part.

        Outside of `jax.jit` `state` and `params` are donated as there, once they lie where the step puts
        them: from the first step on the state of `init`, from the second on parameters from one device.
        """
        options = dict(
            max_norm=max_norm, skip_nonfinite=skip_nonfinite, implementation=implementation
        )
        if stepping.is_outside_of_traces():
            stepping.check_donated(grads, (params, state))
        return self.placed.run(self.inner.step, options, grads, state, params, donates=True)

    def init_step(
        self,
        params: optax.Params,
        *,
        ema_decay: ema.Decay | None = None,
        compute_dtype: Any = None,
        loss_scale: float | None = None,
        growth_interval: int = 2000,
        rounding_seed: int | None = None,
    ) -> stepping.StepState:
        """Returns the state of `FusedTransformation.init_step`, split over the devices."""
        options = dict(
            ema_decay=ema_decay,
            compute_dtype=compute_dtype,
            loss_scale=loss_scale,
            growth_interval=growth_interval,
            rounding_seed=rounding_seed,
        )
        return self.placed.initialised(self.inner.init_step, options, params)

    def specs(self, params: optax.Params) -> Any:
        """Returns the PartitionSpecs of each device's part of the parameters."""
        self.placed.see(params)
        found = self.placed.specs_of(params, params, shared=True)
        return jax.tree.map_with_path(lambda path, _: found[path], params)


@dataclass(frozen=True)
class _Alone:
    """A function that returns the one result of `f` as a tuple."""

    f: Callable[..., Any]

    def __call__(self, *args: Any, **options: Any) -> tuple[Any]:
        return (self.f(*args, **options),)


@dataclass(frozen=True)
class _Placed:
    """Shardings of parameters and optimizer state over a mesh axis."""

    axis_name: AxisName
    mesh: jax.sharding.Mesh | None
    param_specs: Any
    compiled: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Jitted functions of the last calls outside of jit, since `jax.jit` compiles each new closure."""
    seen: dict[Any, list[P]] = field(default_factory=dict, compare=False, repr=False)
    """PartitionSpecs of parameters, by their structure and shapes, as last seen outside of jit."""

    def initialised(self, init: Callable[..., Any], options: dict[str, Any], params: Any) -> Any:
        """Returns `init(params, **options)`, of which each device computes and stores its part only."""
        return self._in_auto_axes(_Alone(init), options, (True,), params)[0]

    def run(
        self,
        f: Callable[..., tuple[Any, Any]],
        options: dict[str, Any],
        *trees: Any,
        donates: bool = False,
    ) -> tuple[Any, ...]:
        """Returns `f(*trees, **options)`: a tree sharded like the parameters, and a state that is split.

        Args:
          f: an update or a step.
          options: the keyword arguments of `f`.
          *trees: gradients, a state, and the parameters if `f` takes them.
          donates: whether the buffers of the last two are donated, outside of `jax.jit`.
        """
        return self._in_auto_axes(f, options, (False, True), *trees, donates=donates)

    def _in_auto_axes(
        self,
        f: Callable[..., Any],
        options: dict[str, Any],
        shared: tuple[bool, ...],
        *trees: Any,
        donates: bool = False,
    ) -> tuple[Any, ...]:
        """Returns `f(*trees, **options)`; results are split over devices where `shared` is True.

        XLA chooses the shardings within `f`, because not all transformations run on Explicit axes:
        Adafactor combines a row's moment with a column's, and both may be split.
        """
        like = trees[-1] if len(trees) != 2 else trees[0]
        if len(trees) != 2:
            self.see(like)
        leaves = jax.tree.leaves(like)
        mesh = self._mesh(leaves)
        placed = replace(self, mesh=mesh, param_specs=self._param_specs(like))
        explicit = mesh.explicit_axes
        call = functools.partial(f, **options)
        donated = (
            placed._donated(like, *trees) if donates and stepping.is_outside_of_traces() else ()
        )
        make = functools.partial(placed._jitted, call, shared, explicit, donated, like, *trees)
        every = jax.tree.leaves(trees)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in (*every, *jax.tree.leaves(options))):
            return make()(*trees)
        shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in every)
        structure = jax.tree.structure(trees)
        given = tuple((name, type(value), value) for name, value in options.items())
        key = (f, given, structure, shapes, explicit, donated, mesh, *placed.param_specs)
        # Arrays that lie on no mesh, and results that depend on no array, have this one's devices.
        alone = explicit and jax.sharding.get_abstract_mesh().empty
        with jax.set_mesh(mesh) if alone else contextlib.nullcontext():
            try:
                known = self.compiled.get(key)
            except TypeError:  # An option such as an array has no hash.
                return make()(*trees)
            if known is None:
                known = make()
                if len(self.compiled) >= _MOST_COMPILED:
                    self.compiled.pop(next(iter(self.compiled)))
                self.compiled[key] = known
            return known(*trees)

    def _jitted(
        self,
        f: Callable[..., Any],
        shared: tuple[bool, ...],
        explicit: Any,
        donated: tuple[int, ...],
        like: Any,
        *trees: Any,
    ) -> Callable[..., tuple[Any, ...]]:
        """Returns the jitted function that splits the trees, calls `f`, and shards its results."""
        shapes = jax.tree.map(_without_sharding, like)

        # Within `auto_axes` the mesh has other types of axes.
        inside = replace(self, mesh=None) if explicit else self

        def on_parts(*trees: Any) -> tuple[Any, ...]:
            results = f(*(inside._put(tree, shapes, shared=True) for tree in trees))
            return tuple(
                inside._put(result, shapes, shared=share)
                for result, share in zip(results, shared, strict=True)
            )

        if not explicit:
            return jax.jit(on_parts, donate_argnums=donated)
        abstract = jax.eval_shape(f, *jax.tree.map(_without_sharding, trees))
        out = tuple(
            self._shardings(result, shapes, shared=share)
            for result, share in zip(abstract, shared, strict=True)
        )
        on_auto_axes = jax.sharding.auto_axes(on_parts, axes=explicit, out_sharding=out)
        return jax.jit(on_auto_axes, donate_argnums=donated)

    def _donated(self, like: Any, grads: Any, state: Any, params: Any) -> tuple[int, ...]:
        """Returns which of (grads, state, params) have the shardings of a step's results.

        These are donated. JAX warns of donated arrays whose memory no result can use.
        """
        del grads
        shapes = jax.tree.map(_without_sharding, like)
        size = self._mesh(jax.tree.leaves(like)).size

        def lies_there(tree: Any, shared: bool) -> bool:
            wanted = jax.tree.leaves(self._shardings(tree, shapes, shared=shared))
            return all(
                isinstance(leaf, jax.Array)
                and len(leaf.sharding.device_set) == size
                and leaf.sharding.shard_shape(leaf.shape) == to.shard_shape(leaf.shape)
                for leaf, to in zip(jax.tree.leaves(tree), wanted, strict=True)
            )

        there = {1: lies_there(state, True), 2: lies_there(params, False)}
        return tuple(number for number, is_there in there.items() if is_there)

    def specs_of(self, tree: Any, params: Any, *, shared: bool) -> dict[Any, P]:
        """Returns the PartitionSpec of each leaf's path in a tree of parameters or of a state.

        A leaf of a state is split like the parameter whose path is the end of its own path, if their
        shapes agree.
        """
        mesh = self._mesh(jax.tree.leaves(params))
        of_params = {
            path: (jnp.shape(leaf), spec)
            for (path, leaf), spec in zip(
                jax.tree.leaves_with_path(params), self._param_specs(params), strict=True
            )
        }
        found = {}
        for path, leaf in jax.tree.leaves_with_path(tree):
            ends = (of_params.get(path[i:]) for i in range(len(path) + 1))
            shape, spec = next(filter(None, ends), (None, P()))
            if shape != jnp.shape(leaf):
                spec = P()
            taken = {name for entry in spec for name in sharding.names_of(entry)}
            free = tuple(n for n in sharding.names_of(self.axis_name) if n not in taken)
            size = sharding.devices_along(mesh, free)
            axis = axis_to_share(jnp.shape(leaf), size, shared and bool(free), spec)
            if axis is not None:
                entries = [*spec, *[None] * (jnp.ndim(leaf) - len(spec))]
                entries[axis] = free if len(free) > 1 else free[0]
                spec = P(*entries)
            found[path] = spec
        return found

    def _param_specs(self, params: Any) -> list[P]:
        leaves = jax.tree.leaves(params)
        if self.param_specs is not None:
            is_spec = lambda leaf: leaf is None or isinstance(leaf, P)  # noqa: E731
            specs = jax.tree.leaves(self.param_specs, is_leaf=is_spec)
            if len(specs) != len(leaves):
                raise ValueError(
                    f"{_OP}: param_specs has {len(specs)} leaves and the parameters {len(leaves)}; pass"
                    " a PartitionSpec for each."
                )
            return [P() if spec is None else spec for spec in specs]
        mesh = self._mesh(leaves)
        if mesh.explicit_axes:
            return [self._typed_spec(leaf) for leaf in leaves]
        return self.seen.get(_key(mesh, params)) or [P()] * len(leaves)

    def see(self, params: Any) -> None:
        """Remembers how parameters are sharded, if they are arrays on Auto axes outside of `jax.jit`."""
        leaves = jax.tree.leaves(params)
        if all(_is_placed(leaf) for leaf in leaves):
            mesh = self._mesh(leaves)
            self.seen[_key(mesh, params)] = [_spec_on(mesh, leaf) for leaf in leaves]

    def _typed_spec(self, leaf: Any) -> P:
        """Returns the PartitionSpec of a leaf's type with Explicit axes, without `axis_name`."""
        of = jax.typeof(leaf).sharding
        if not of.mesh.explicit_axes:
            return P()
        ours = sharding.names_of(self.axis_name)
        others = (tuple(n for n in sharding.names_of(e) if n not in ours) for e in of.spec)
        return P(*(names or None for names in others))

    def _mesh(self, leaves: Sequence[Any]) -> Any:
        mesh = sharding.mesh_to_map(
            _OP, self.axis_name, *leaves, remedy="pass mesh", mesh=self.mesh
        )
        if mesh is None:
            raise ValueError(
                f"{_OP}: {self.axis_name!r} is mapped here, where each device has its own gradients"
                " only; call it under jax.jit, outside of jax.shard_map and jax.pmap."
            )
        return mesh

    def _put(self, tree: Any, params: Any, *, shared: bool) -> Any:
        """Returns the tree split over the devices if `shared`, else sharded like the parameters."""
        shardings = self._shardings(tree, params, shared=shared)
        return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)

    def _shardings(self, tree: Any, params: Any, *, shared: bool) -> Any:
        mesh = self._mesh(jax.tree.leaves(params))
        specs = self.specs_of(tree, params, shared=shared)
        return jax.tree.map_with_path(lambda path, _: NamedSharding(mesh, specs[path]), tree)


def _key(mesh: Any, params: Any) -> Any:
    shapes = tuple(map(jnp.shape, jax.tree.leaves(params)))
    return jax.tree.structure(params), shapes, tuple(mesh.shape.items())


def _is_placed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def _spec_on(mesh: Any, leaf: Any) -> P:
    """Returns the PartitionSpec of an array that is sharded over the mesh; P() for other arrays."""
    placed = getattr(leaf, "sharding", None)
    if isinstance(placed, NamedSharding) and placed.mesh.shape == mesh.shape:
        return placed.spec
    return P()


def _without_sharding(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(array), jnp.result_type(array))
