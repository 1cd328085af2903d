"""expert_parallel_mlp on eight devices: values and gradients of one device, dropping, axes, messages."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
import jaxfused.linen
from tests.support import eight_devices
from tests.support.arrays import put

on_eight_devices = pytest.mark.skipif(jax.device_count() < eight_devices.DEVICES, reason="devices")
TOKENS, D, F, EXPERTS, K = 48, 8, 16, 16, 3


def operands(dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = ((TOKENS, D), (EXPERTS, D, F), (EXPERTS, D, F), (EXPERTS, F, D))
    x, *w = (put(0.5 * rng.normal(size=shape), dtype) for shape in shapes)
    # Experts that are used unevenly, and some choices of none.
    indices = np.minimum(
        rng.integers(-1, EXPERTS + 1, (TOKENS, K)), rng.integers(3, 20, (TOKENS, K))
    )
    weights = put(rng.uniform(size=(TOKENS, K)), "float32")
    return [x, weights, put(indices, "int32"), *w]


def with_gradients(f, x, weights, indices, *w):
    def loss(x, weights, *w):
        y = f(x, weights, indices, *w)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    (_, y), grads = jax.value_and_grad(loss, argnums=tuple(range(5)), has_aux=True)(x, weights, *w)
    return y, grads


OPTIONS = {
    "all_gather": {},
    "all_to_all": dict(method="all_to_all"),
    "on the input": dict(method="all_to_all", weight_on="input"),
}


@on_eight_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_of_one_device(name, axis_type):
    args, options = operands(), OPTIONS[name]
    of_one = {k: v for k, v in options.items() if k != "method"}
    one = jax.jit(
        functools.partial(with_gradients, functools.partial(jaxfused.expert_mlp, **of_one))
    )
    expected = one(*args)
    mesh = jax.make_mesh((8,), ("e",), axis_types=(axis_type,))
    f = functools.partial(jaxfused.expert_parallel_mlp, axis_name="e", **options)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, P("e"))) for a in args]
        actual = jax.jit(functools.partial(with_gradients, f))(*placed)
    chex.assert_trees_all_close(*map(jax.device_get, (actual, expected)), rtol=1e-5, atol=1e-5)


@on_eight_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("axis_name", "spec", "shape"),
    [
        ("e", P("data"), (TOKENS,)),
        ("e", P(("data", "e")), (TOKENS,)),
        ("e", P("data", "e"), (4, TOKENS // 4)),
        ("e", P("data", None), (8, TOKENS // 8)),
        (("data", "e"), None, (TOKENS,)),
    ],
)
def test_tokens_that_several_axes_split(axis_name, spec, shape, axis_type):
    """Experts are split by `axis_name`, tokens by the axes of `spec` or of their types too."""
    x, weights, indices, *w = operands()
    rows = [a.reshape(*shape, -1) for a in (x, weights, indices)]
    expected = jax.jit(functools.partial(with_gradients, jaxfused.expert_mlp))(*rows, *w)
    mesh = jax.make_mesh((2, 4), ("data", "e"), axis_types=(axis_type,) * 2)
    f = functools.partial(jaxfused.expert_parallel_mlp, axis_name=axis_name)
    if axis_type == AxisType.Auto:
        f = functools.partial(f, spec=spec)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, spec or P())) for a in rows]
        actual = jax.jit(functools.partial(with_gradients, f))(*placed, *w)
    assert len({str(shard.index) for shard in actual[0].addressable_shards}) == 8
    chex.assert_trees_all_close(*map(jax.device_get, (actual, expected)), rtol=1e-5, atol=1e-5)


@on_eight_devices
def test_rows_beyond_the_capacity_are_dropped():
    """Each device sends every other one at most its share of rows, in the order of their experts."""
    args = operands()
    mesh = jax.make_mesh((8,), ("e",), axis_types=(AxisType.Auto,))
    f = functools.partial(jaxfused.expert_parallel_mlp, axis_name="e", capacity_factor=1.0)
    with jax.set_mesh(mesh):
        y, grads = jax.jit(functools.partial(with_gradients, f))(*args)
    indices = np.array(args[2]).reshape(8, -1, K)
    room = -(-indices[0].size // 8)
    for own in indices:
        for device in range(8):
            choices = [
                (e, j, t) for (t, j), e in np.ndenumerate(own) if e >= 0 and e // 2 == device
            ]
            for _, j, t in sorted(choices)[room:]:
                own[t, j] = -1
    assert (indices != np.array(args[2]).reshape(indices.shape)).any()
    args[2] = put(indices.reshape(-1, K), "int32")
    expected = jax.jit(functools.partial(with_gradients, jaxfused.expert_mlp))(*args)
    chex.assert_trees_all_close(*map(jax.device_get, ((y, grads), expected)), rtol=1e-5, atol=1e-5)


@on_eight_devices
@pytest.mark.parametrize("method", ["all_gather", "all_to_all"])
def test_within_a_shard_map_over_two_axes(method):
    """Tokens are split by both axes, experts by one."""
    x, weights, indices, *w = operands("bfloat16")
    mesh = jax.make_mesh((2, 4), ("data", "e"), axis_types=(AxisType.Auto,) * 2)
    f = functools.partial(jaxfused.expert_parallel_mlp, axis_name="e", method=method)
    tokens = P(("data", "e"))
    run = jax.shard_map(
        f, mesh=mesh, in_specs=(tokens, tokens, tokens, P("e"), P("e"), P("e")), out_specs=tokens
    )
    y = jax.jit(run)(x, weights, indices, *w)
    expected = jaxfused.expert_mlp(x, weights, indices, *w)
    chex.assert_trees_all_close(*(np.float32(a) for a in (y, expected)), rtol=2e-2, atol=1e-2)


@on_eight_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_module_splits_its_experts(axis_type):
    x = put(np.random.default_rng(1).normal(size=(8, 3, D)), "float32")
    options = dict(router=functools.partial(jaxfused.router, k=2, normalise="sum"))
    alone = jaxfused.linen.MoE(F, EXPERTS, **options)
    variables = alone.init(jax.random.key(0), x)
    mesh = jax.make_mesh((8,), ("e",), axis_types=(axis_type,))
    parallel = jaxfused.linen.MoE(F, EXPERTS, expert_axis="e", **options)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("e")))
        whole = jax.device_put(variables, NamedSharding(mesh, P()))
        y = jax.jit(parallel.apply)(whole, placed)
    chex.assert_trees_all_close(jax.device_get(y), alone.apply(variables, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(axis_name="e"), "axis_name is 'e', but the mesh here has the axes"),
        (dict(axis_name=()), "axis_name is \\(\\); pass the name of a mesh axis"),
        (dict(axis_name="e", method="ring"), "method is 'ring'"),
        (dict(axis_name="e", capacity_factor=0.0), "capacity_factor is 0.0"),
        (dict(axis_name="e", capacity_factor=1.0, method="all_gather"), "drops no token"),
        (dict(axis_name="e", activation="swish"), "activation='swish'"),
    ],
)
def test_messages(options, message):
    with pytest.raises(ValueError, match=f"expert_parallel_mlp: .*{message}"):
        jaxfused.expert_parallel_mlp(*operands(), **options)


def test_quantised_experts_are_refused_by_the_operator_that_takes_them():
    *others, w_down = operands()
    with pytest.raises(ValueError, match=r"w_down is a QuantizedArray .*jaxfused.expert_mlp"):
        jaxfused.expert_parallel_mlp(*others, jaxfused.quantize(w_down), axis_name="e")


def test_one_device_is_a_mesh_too():
    mesh = jax.make_mesh((1,), ("e",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    args = operands()
    with jax.set_mesh(mesh):
        y = jaxfused.expert_parallel_mlp(*args, axis_name="e", method="all_to_all")
    np.testing.assert_allclose(y, jaxfused.expert_mlp(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() > 1, reason="runs the cases of eight devices")
def test_on_eight_devices():
    eight_devices.assert_passes(__file__, "not gpu")
