"""Functions that wrap a jax.shard_map compile nothing at a second call outside of jax.jit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
from jaxfused import dispatch, parallel
from jaxfused.runtime import runner
from tests.support import eight_devices
from tests.support.compilation import no_compilation

on_eight_devices = pytest.mark.skipif(
    jax.device_count() < eight_devices.DEVICES, reason="needs eight devices"
)
X, W, W_DOWN = (2, 32, 8), (8, 32), (32, 8)
HOPPER = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() == eight_devices.DEVICES, reason="this is that process")
def test_on_eight_devices():
    eight_devices.assert_passes(__file__, "not gpu")


def of_layers(sequence_parallel):
    how = dict(axis_name="m", sequence_parallel=sequence_parallel)
    return {
        "mlp": (lambda x, u, d: parallel.mlp(x, u, None, d, **how), (X, W, W_DOWN)),
        "gated_mlp": (lambda x, u, d: parallel.gated_mlp(x, u, u, d, **how), (X, W, W_DOWN)),
        "columns": (functools.partial(parallel.linear, split="columns", **how), (X, W)),
        "rows": (functools.partial(parallel.linear, split="rows", **how), ((2, 32, 32), W_DOWN)),
        "qkv_projection": (
            functools.partial(parallel.qkv_projection, **how),
            (X, (8, 16, 4), (8, 8, 4), (8, 8, 4)),
        ),
    }


def attention(method, q, k, v):
    return jaxfused.context_parallel_attention(
        q, k, v, axis_name="m", method=method, is_causal=True
    )


def experts(method, x, up, down):
    weights, indices = jaxfused.router(jnp.ones((32, 8)), 2)
    return jaxfused.expert_parallel_mlp(
        x, weights, indices, up, up, down, axis_name="m", method=method
    )


CALLS = {
    **of_layers(False),
    **{f"{name} in a ring": call for name, call in of_layers(True).items()},
    **{
        f"attention by {method}": (functools.partial(attention, method), ((2, 32, 8, 4),) * 3)
        for method in ("all_gather", "all_to_all", "ring")
    },
    **{
        f"experts by {method}": (
            functools.partial(experts, method),
            ((32, 8), (8, 8, 16), (8, 16, 8)),
        )
        for method in ("all_gather", "all_to_all")
    },
}


def both(f, args):
    """Returns results and gradients of a function, and its results under jax.vmap."""
    y, pullback = jax.vjp(f, *args)
    in_axes = (0, *(None,) * (len(args) - 1))
    return y, pullback(y), f(*args), jax.vmap(f, in_axes)(jnp.stack([args[0]] * 2), *args[1:])


def arrays(name):
    return [
        jnp.asarray(np.random.default_rng(i).normal(size=s), "float32")
        for i, s in enumerate(CALLS[name][1])
    ]


OF_EXPLICIT = ("mlp", "columns in a ring", "attention by ring", "experts by all_to_all")


@on_eight_devices
@pytest.mark.parametrize(
    ("name", "axis_type"),
    [
        *((name, AxisType.Auto) for name in CALLS),
        *((name, AxisType.Explicit) for name in OF_EXPLICIT),
    ],
)
def test_no_second_call_compiles(name, axis_type):
    f, args = CALLS[name][0], arrays(name)
    with jax.set_mesh(jax.make_mesh((8,), ("m",), axis_types=(axis_type,))):
        first = both(f, args)
        with no_compilation():
            second = both(f, args)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def one_device(axis_type=AxisType.Auto):
    return jax.make_mesh((1,), ("m",), axis_types=(axis_type,), devices=jax.devices()[:1])


def test_one_device_is_a_mesh_too():
    f, args = CALLS["rows"][0], arrays("rows")
    with jax.set_mesh(one_device()):
        first = both(f, args)
        with no_compilation():
            second = both(f, args)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("is_placed", [True, False])
def test_a_mesh_of_explicit_axes_that_is_given_need_not_be_set(is_placed):
    """The mesh comes with the arrays, or as an argument; `jax.make_mesh` makes such axes."""
    mesh, (x, w) = one_device(AxisType.Explicit), arrays("rows")
    expected = x @ w
    if is_placed:
        x, w = (jax.device_put(a, NamedSharding(mesh, P())) for a in (x, w))
        y = parallel.linear(x, w, axis_name="m", split="rows")
        np.testing.assert_allclose(y, expected, rtol=1e-5)
    y = parallel.fsdp_layer(jnp.matmul, x, w, axis_name="m", in_specs=(P(),), mesh=mesh)
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    opt, updated = parallel.zero1(optax.sgd(0.5, 0.9), axis_name="m", mesh=mesh), w / 2
    with pytest.raises(ValueError, match="step: one array has two places"):
        opt.step(w, opt.init(w), w)
    np.testing.assert_allclose(opt.step(w + 0, opt.init(w), w)[0], updated)


@pytest.mark.exhaustive
def test_every_call_is_recorded():
    """A second call, which compiles nothing, has the first one's choices, those of gradients too."""
    f, args = CALLS["rows"][0], arrays("rows")
    with jax.set_mesh(one_device()):
        jax.vjp(f, *args)[1](args[0][..., :8])
        records = []
        for _ in range(2):
            with dispatch.recorded() as choices:
                y, pullback = jax.vjp(f, *args)
                pullback(y)
            records.append([(c.stage, c.implementation) for c in choices])
        gradient = jax.grad(lambda *args: jnp.sum(f(*args)))
        reports = [str(jaxfused.explain(gradient, *args)) for _ in range(2)]
    assert records[0] == records[1]
    assert {stage for stage, _ in records[0]} >= {"parallel linear", "linear weight gradient"}
    assert reports[0] == reports[1]


def test_an_assumed_device_and_replaced_limits_are_asked_again(monkeypatch):
    f, args = CALLS["rows"][0], arrays("rows")
    seen = []
    choose = runner.Runner.choice_on_shard

    def noted(self, *operands):
        seen.append(self.device)
        return choose(self, *operands)

    with jax.set_mesh(one_device()):
        f(*args)
        monkeypatch.setattr(runner.Runner, "choice_on_shard", noted)
        f(*args)
        assert not seen
        with dispatch.assume(HOPPER):
            f(*args)
        assert {*seen} == {HOPPER}
        runner.forget()
        f(*args)
        assert dispatch.current_device() in seen


@pytest.mark.exhaustive
@on_eight_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_operators_on_split_rows_compile_once(axis_type):
    mesh = jax.make_mesh((8,), ("m",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("m")))
        w = jnp.ones((8, 128))

        def f(x, w):
            return jaxfused.ragged_dot(x, w[None], jnp.array([16]))

        def run():
            y, pullback = jax.vjp(f, x, w)
            return pullback(y)

        run()
        with no_compilation():
            run()
