"""Steps by kernels: their callers, compared with the reference, and the kernels on a GPU."""

import functools
import os
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfused
from jaxfused import dispatch, optim
from jaxfused.ops.optimizer import optimizer_step_cuda
from jaxfused.optim import eight_bit
from jaxfused.optim.eight_bit import is_coded
from jaxfused.runtime import cuda_library
from tests.support import optimizer_kernels
from tests.support.lowering import kernels_in, lowered
from tests.support.optim_training import assert_same_bits, make_grads, make_params

pytestmark = pytest.mark.exhaustive

EXTRAS = dict(ema_decay=0.9, compute_dtype=jnp.bfloat16, loss_scale=8.0)
CASES = [
    ("adamw", dict(weight_decay=0.1), {}, dict(max_norm=1.0)),
    ("adamw", dict(weight_decay=0.1, mask=lambda t: jax.tree.map(jnp.ndim, t)), {}, {}),
    ("adamw", dict(nesterov=True, eps_root=1e-6), EXTRAS, dict(max_norm=1.0)),
    ("adam", dict(mu_dtype=jnp.bfloat16), {}, dict(skip_nonfinite=True)),
    ("lion", dict(weight_decay=0.1), EXTRAS, {}),
    ("lion", {}, {}, dict(max_norm=1e9, skip_nonfinite=True)),
    ("sgd", {}, dict(ema_decay=0.5), {}),
    ("sgd", dict(momentum=0.9, nesterov=True), EXTRAS, dict(max_norm=2.0)),
    ("lamb", dict(weight_decay=0.1), {}, dict(max_norm=1.0)),
    ("lamb", {}, EXTRAS, dict(skip_nonfinite=True)),
    ("adamw8bit", {}, {}, dict(max_norm=1.0)),
    ("adamw8bit", dict(nesterov=True), EXTRAS, {}),
    ("adamw", {}, dict(rounding_seed=7), dict(max_norm=1.0)),
    ("lion", {}, dict(rounding_seed=7, ema_decay=0.9), {}),
    ("lamb", {}, dict(rounding_seed=7), {}),
]


NAMES = [f"{case[0]}-{number}" for number, case in enumerate(CASES)]


@pytest.fixture
def stood_in(monkeypatch):
    """Makes steps take the kernels' path, with jax.numpy in the place of the kernels."""
    with optimizer_kernels.stood_in_for(monkeypatch):
        yield


@pytest.fixture
def lowerable(monkeypatch):
    """Pretends that the library is loaded, so that steps can be lowered for a GPU."""
    monkeypatch.setattr(cuda_library, "why_unavailable", lambda: None)
    monkeypatch.setattr(cuda_library, "register", lambda: None)
    with dispatch.assume(optimizer_kernels.HOPPER):
        yield
    jax.clear_caches()


def large_params():
    """Returns leaves that adamw8bit codes, in blocks of one axis and of several, and bfloat16."""
    tree = make_params()
    tree["rows"] = jax.random.normal(jax.random.key(1), (12, 512))
    tree["merged"] = jax.random.normal(jax.random.key(2), (3, 16, 96))
    tree["bf"] = jax.random.normal(jax.random.key(3), (20, 768), jnp.bfloat16)
    return tree


def train(case, implementation, params=large_params, grads=make_grads, steps=4):
    """Takes steps: one has a NaN if such steps are skipped, and in one a leaf has no gradient."""
    name, options, extras, how = case
    tx = getattr(optim, name)(optax.linear_schedule(0.1, 0.0, 10), **options)
    params = params()
    state = tx.init_step(params, **extras) if extras else tx.init(params)
    for i in range(steps):
        g = grads(params, i)
        if i == 2 and ("loss_scale" in extras or "skip_nonfinite" in how):
            g["dense"]["w"] = g["dense"]["w"] * np.float32(np.nan)
        if i == 3:
            g["dense"]["b"] = None
        params, state = tx.step(g, state, params, implementation=implementation, **how)
    return params, state


def decoded(tree):
    """Returns a tree with its 8-bit moments decoded, as float64, so that they can be told apart."""
    return jax.tree.map(
        lambda leaf: np.float64(eight_bit.decode(leaf)) if is_coded(leaf) else leaf,
        tree,
        is_leaf=is_coded,
    )


def assert_close(actual, expected, tolerance=2e-5, few=0.0, other_codes=0.0):
    """Asserts closeness, except for some numbers that rounding may change.

    `few` is the share of numbers of 16 or 8 bits that may be far off, and `other_codes` that of the
    parameters. An 8-bit moment halfway between two codes may take either, which changes its parameter's
    step.
    """
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    actual, expected = decoded(actual), decoded(expected)
    for (path, a), e in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        # Roundings to 8 or 16 bits may differ, and so may all that follows from them.
        name = jax.tree_util.keystr(path)
        coarse = a.dtype.itemsize != 4 or re.search(r"bf|hf", name)
        t = max(tolerance, 2e-2) if coarse else tolerance
        a, e = np.float64(a), np.float64(e)
        unit = np.max(np.abs(e), initial=0.0) if "mu" in name or "nu" in name else 1.0
        far = ~np.isclose(a, e, rtol=t, atol=t * unit)
        stepped = not coarse and name.startswith(("[0]", "[1].ema"))
        assert not stepped or np.isclose(a, e, rtol=1e-2, atol=1e-2).all(), name
        allowed = few * a.size if coarse else other_codes * a.size * stepped
        assert far.sum() <= allowed, (
            f"{name}: {far.sum()} of {a.size}, {a[far][:3]}, not {e[far][:3]}"
        )


# --- what calls the kernels, against the reference ------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_as_the_reference(stood_in, case):
    # Optax multiplies a 16-bit momentum in its own dtype.
    tolerance = 1e-2 if "mu_dtype" in case[1] else 2e-5
    # In 16 bits Optax rounds after each operation, which may flip the sign that lion takes.
    few = 0.02 if case[0] == "lion" else 0.0
    assert_close(train(case, "cuda"), train(case, "xla"), tolerance, few)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_lambs_step_is_as_long_as_the_leaf(stood_in, dtype):
    """A second moment that is 0 in float16 must not change the direction after its norm is taken."""
    params = jax.random.normal(jax.random.key(0), (4000,), dtype)
    grads = (1e-3 * jax.random.normal(jax.random.key(1), (4000,))).astype(dtype)
    tx = optim.lamb(0.5)
    before = np.float64(params)
    params, _ = tx.step(grads, tx.init(params), params, implementation="cuda")
    moved = np.linalg.norm(np.float64(params) - before) / np.linalg.norm(before)
    np.testing.assert_allclose(moved, 0.5, rtol=1e-2)


def test_kernels_come_first(stood_in):
    with dispatch.recorded() as choices:
        train(CASES[0], None)
    assert {choice.implementation for choice in choices} == {"cuda"}
    assert {choice.stage for choice in choices} == {"adam step"}


def test_explain_lists_a_step(stood_in):
    tx = optim.lion(0.1)
    params = {"a": jnp.ones((3, 5)), "b": jnp.ones(7), "c": jnp.ones(2, jnp.bfloat16)}
    report = jaxfused.explain(tx.step, params, tx.init(params), params)
    [(choice, count)] = report.calls
    assert (choice.stage, choice.implementation, count) == ("lion step", "cuda", 1)
    assert [(s.shape, s.dtype) for s in choice.operands] == [((22,), "float32"), ((2,), "bfloat16")]


def test_under_vmap_the_reference_runs(stood_in):
    tx = optim.adamw(0.1)
    params = jnp.arange(15.0).reshape(3, 5)
    state = jax.vmap(tx.init)(params)

    def step(implementation):
        f = functools.partial(tx.step, max_norm=1.0, implementation=implementation)
        return jax.jit(jax.vmap(f))(2 * params, state, params)

    assert_close(step("cuda"), step("xla"))


def test_differentiated_the_reference_runs(stood_in):
    tx = optim.adamw(0.1, eps_root=1e-3)

    def gradient(implementation):
        def loss(params):
            new, _ = tx.step(params**2, tx.init(params), params, implementation=implementation)
            return jnp.sum(new**2)

        return jax.jit(jax.grad(loss))(jnp.arange(1.0, 4.0))

    assert_close(gradient("cuda"), gradient("xla"))


def test_nothing_to_update(stood_in):
    tx = optim.adamw(0.1)
    empty = {"a": jnp.zeros((0, 3)), "b": None}
    state = tx.init_step(empty, **EXTRAS)
    params, state = tx.step(jax.tree.map(jnp.copy, empty), state, empty, max_norm=1.0)
    assert params["a"].shape == (0, 3) and int(state.skipped) == 0
    assert int(state.optimizer[0].count) == 1


# --- several devices ------------------------------------------------------------------------------

SHARDED = """
import contextlib
import chex, jax, jax.numpy as jnp, numpy as np, pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jaxfused
from jaxfused import optim
from tests.support import optimizer_kernels
from tests.ops.optimizer.test_optimizer_kernels import EXTRAS, assert_close

specs = {"w": P("data", "model"), "b": P("model"), "replicated": P(), "odd": P(), "s": P()}
shapes = {"w": (8, 4), "b": (4,), "replicated": (3,), "odd": (3, 5), "s": ()}
host = {k: np.ones(shape, np.float32) for k, shape in shapes.items()}
grads = [
    {k: v * (i + np.arange(v.size, dtype=np.float32).reshape(v.shape)) for k, v in host.items()}
    for i in range(3)
]

def train(tx, put, implementation):
    params = put(host)
    state = tx.init_step(params, **EXTRAS)
    for g in grads:
        params, state = tx.step(put(g), state, params, max_norm=1.0, implementation=implementation)
    return params, state

with optimizer_kernels.stood_in_for(pytest.MonkeyPatch()):
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
        put = lambda tree: {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in tree.items()}
        explicit = axis_type == AxisType.Explicit
        for tx in (optim.adamw(0.1), optim.lamb(0.1)):
            with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
                params, state = train(tx, put, "cuda")
            for tree in (params, state.ema, state.compute, state.optimizer[0].mu):
                for k, v in put(host).items():
                    assert tree[k].sharding.is_equivalent_to(v.sharding, v.ndim), (k, tree[k])
            whole = train(tx, lambda tree: jax.tree.map(jnp.array, tree), "xla")
            assert_close(*jax.device_get(((params, state), whole)))
        if not explicit:
            report = jaxfused.explain(tx.step, put(grads[0]), tx.init(put(host)), put(host))
            [(choice, _)] = report.calls
            # A device has 4 of w, 2 of b and all others.
            assert choice.by_partitioner and choice.operands[0].shape == (4 + 2 + 3 + 15 + 1,)

    # Random bits and blocks of 8 bits do not depend on how the arrays are split: all bits are the same.
    specs = {
        "within": P("data", "model"), "merged": P("data"), "last": P(None, None, "model"),
        "bf1": P("model", "data"), "bf2": P(None, "data", "model"), "bf3": P("model", None, "data"),
    }
    shapes = {
        "within": (16, 512), "merged": (4, 32, 40), "last": (4, 2, 1536),
        "bf1": (6, 20), "bf2": (3, 8, 10), "bf3": (2, 5, 12),
    }
    host = {
        k: np.random.default_rng(0).normal(size=shape).astype(jnp.bfloat16 if "bf" in k else np.float32)
        for k, shape in shapes.items()
    }
    grads = [{k: np.roll(v, i) for k, v in host.items()} for i in range(1, 4)]
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
        put = lambda tree: {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in tree.items()}
        explicit = axis_type == AxisType.Explicit
        tx = optim.adamw8bit(0.1)
        results = []
        for place in (put, lambda tree: jax.tree.map(jnp.array, tree)):
            with jax.set_mesh(mesh) if explicit and place is put else contextlib.nullcontext():
                params = place(host)
                state = tx.init_step(params, rounding_seed=5)
                for g in grads:
                    params, state = tx.step(place(g), state, params, implementation="cuda")
                results.append(jax.device_get((params, state)))
                for k, v in host.items():
                    assert params[k].sharding.is_equivalent_to(place(host)[k].sharding, v.ndim), k
        chex.assert_trees_all_equal(*results)

    tx = optim.adamw(0.1)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    # What is the same on all devices stays so: out_specs say it, and jax.shard_map checks it.
    def local(w, b, x):
        params = {"w": w, "b": b}
        g = {"w": w * x.sum(), "b": jax.lax.psum(b * x.sum(), "d")}
        return tx.step(g, tx.init(params), params)[0]

    in_specs, out_specs = (P("d"), P(), P("d")), {"w": P("d"), "b": P()}
    spread = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    new = jax.jit(spread)(*(np.arange(1, 1 + n, dtype=np.float32) for n in (16, 3, 8)))
    np.testing.assert_allclose(new["w"], np.arange(1, 17) * (1 - 1e-5) - 0.1, rtol=1e-4)
    np.testing.assert_allclose(new["b"], np.arange(1, 4) * (1 - 1e-5) - 0.1, rtol=1e-4)

    params = {"w": jnp.ones((8, 3))}
    state = jax.pmap(tx.init)(params)
    step = jax.pmap(lambda g, s, p: tx.step(g, s, p, max_norm=1.0)[0])
    np.testing.assert_allclose(step(params, state, params)["w"], 0.9, rtol=1e-3)
print("same")
"""


@pytest.mark.exhaustive
@pytest.mark.long
def test_on_shards():
    result = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "8",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout == "same\n", result.stderr


# --- the program ----------------------------------------------------------------------------------


def tree_of(count, shape=(8, 4)):
    return {f"p{i:04}": jax.ShapeDtypeStruct(shape, jnp.float32) for i in range(count)}


@pytest.mark.parametrize(
    ("name", "how", "kernels"),
    [
        ("adamw", {}, ["optimizer_step"]),
        ("adamw", dict(max_norm=1.0), ["gradient_norm", "optimizer_step"]),
        ("sgd", dict(skip_nonfinite=True), ["gradient_norm", "optimizer_step"]),
        ("lamb", dict(max_norm=1.0), ["gradient_norm", "optimizer_step", "optimizer_step"]),
    ],
)
def test_few_kernels(lowerable, name, how, kernels):
    tx, params = getattr(optim, name)(1e-3), tree_of(optimizer_step_cuda.LEAVES_A_CALL)
    text = lowered(
        functools.partial(tx.step, **how), params, jax.eval_shape(tx.init, params), params
    )
    assert kernels_in(text) == [f"jaxfused_{kernel}" for kernel in kernels]


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 5000])
def test_trees_of_any_size(lowerable, count):
    tx, params = optim.adamw(1e-3), tree_of(count)
    text = lowered(tx.step, params, jax.eval_shape(tx.init, params), params)
    assert len(kernels_in(text)) == -(-count // optimizer_step_cuda.LEAVES_A_CALL)


@pytest.mark.parametrize(
    ("name", "extras", "aliases"),
    [("adamw", {}, 3), ("adamw", EXTRAS, 5), ("lion", {}, 2), ("sgd", {}, 1), ("lamb", {}, 2 + 1)],
)
def test_arrays_are_written_in_place(lowerable, name, extras, aliases):
    tx, params = getattr(optim, name)(1e-3), tree_of(6)
    state = jax.eval_shape(lambda p: tx.init_step(p, **extras) if extras else tx.init(p), params)
    text = lowered(functools.partial(tx.step, max_norm=1.0), params, state, params)
    assert text.count("#stablehlo.output_operand_alias<") == 6 * aliases


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int8])
def test_other_dtypes_are_the_references(stood_in, dtype):
    tx = optim.sgd(0.1)
    params, grads = ({"a": jnp.ones(2), "b": jnp.ones(2, dtype)} for _ in range(2))
    with pytest.raises(ValueError, match=f"an array of the tree has dtype {jnp.dtype(dtype)}"):
        tx.step(grads, tx.init(params), params, implementation="cuda")
    with dispatch.recorded() as choices:
        tx.step(grads, tx.init(params), params)
    assert [choice.implementation for choice in choices] == ["xla"]


def test_a_transformation_of_the_users_own(stood_in):
    theirs = optax.sgd(0.1)
    tx = optim.FusedTransformation(theirs.init, theirs.update)
    with pytest.raises(ValueError, match="formula of this transformation is not in the kernels"):
        tx.step(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2), implementation="cuda")
    params, _ = tx.step(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))
    np.testing.assert_allclose(params, 0.9, rtol=1e-6)


def test_without_a_gpu():
    tx = optim.sgd(0.1)
    with pytest.raises(
        ValueError, match=r"step: implementation='cuda' cannot run here: it needs an"
    ):
        tx.step(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2), implementation="cuda")


# --- the kernels, on a GPU ------------------------------------------------------------------------


def odd_params():
    """Returns leaves of the sizes where tiles and vectors end, in each dtype."""
    tree = make_params()
    sizes = [1, 3, 1023, 1024, 1025, (257, 129), (4096, 40)]
    for i, size in enumerate(sizes):
        tree[f"a{i}"] = jax.random.normal(jax.random.key(i), np.atleast_1d(size))
    tree["bf"] = jax.random.normal(jax.random.key(7), (300, 7), jnp.bfloat16)
    tree["bf_blocks"] = jax.random.normal(jax.random.key(9), (20, 768), jnp.bfloat16)
    tree["hf"] = jax.random.normal(jax.random.key(8), (4000,), jnp.float16)
    return tree


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_kernels(monkeypatch, case):
    """Compares with the same arithmetic in jax.numpy, and with a second run bit for bit."""
    actual = jax.device_get(train(case, "cuda", params=odd_params))
    assert_same_bits(jax.device_get(train(case, "cuda", params=odd_params)), actual)
    jax.clear_caches()
    with optimizer_kernels.stood_in_for(monkeypatch):
        expected = jax.device_get(train(case, "cuda", params=odd_params))
    name, *_ = case
    if name != "lion":
        tolerance = 1e-2 if "mu_dtype" in case[1] else 2e-5
        assert_close(actual, expected, tolerance, other_codes=1e-4 * (name == "adamw8bit"))
        return
    # The sign of a sum that nearly cancels may differ.
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        far = ~np.isclose(np.float64(a), np.float64(e), rtol=1e-2, atol=1e-2)
        assert far.sum() <= 1e-3 * far.size, far.sum()


@pytest.mark.gpu
def test_no_array_is_copied():
    tx, params = optim.adamw(1e-3), {"a": jnp.ones((512, 512)), "b": jnp.ones(77)}
    state = tx.init_step(params, **EXTRAS)

    def train(params, state, xs):
        def body(carry, x):
            params, state = carry
            grads = jax.tree.map(lambda p: x * jnp.cos(p), params)
            return tx.step(grads, state, params, max_norm=1.0, implementation="cuda"), None

        return jax.lax.scan(body, (params, state), xs)[0]

    step = functools.partial(tx.step, max_norm=1.0, implementation="cuda")
    for program in (
        jax.jit(lambda g, p, s: step(g, s, p), donate_argnums=(1, 2)).lower(params, params, state),
        jax.jit(train, donate_argnums=(0, 1)).lower(params, state, jnp.ones(4)),
    ):
        text = program.compile().as_text()
        assert not re.findall(r"(?:f32|bf16)\[\d\S* copy(?:-start)?\(.*", text)
