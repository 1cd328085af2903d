"""Kernels of adafactor and muon: their callers, compared with Optax, and the kernels on a GPU."""

import contextlib
import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxfused import dispatch, optim
from jaxfused.ops.optimizer import adafactor_cuda, gradient_norm_cuda, momentum, muon_cuda
from jaxfused.optim import newton_schulz
from jaxfused.runtime import cuda_library
from tests.support import optimizer_kernels
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels
from tests.support.tolerances import assert_accurate

SHAPES = {
    "wide": (16, 20),
    "tall": (24, 8),
    "square": (8, 8),
    "layers": (3, 6, 10),
    "four axes": (2, 3, 6, 4),
    "not the last axes": (6, 4, 2, 3),
    "ragged": (70, 515),
    "vector": (7,),
    "none": None,
    "empty": (0, 3),
}


def make(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {
        name: None if shape is None else put(rng.normal(size=shape), dtype)
        for name, shape in SHAPES.items()
    }


# --- what the kernels compute, in jax.numpy -------------------------------------------------------


def sums_of_squares(gradients, parameters):
    lines, totals = [], []
    for i, g in enumerate(gradients):
        squares = jnp.square(g.astype(jnp.float32))
        lines += [squares.sum(-1).ravel(), squares.sum(-2).ravel()]
        p = parameters[i].astype(jnp.float32) if parameters else jnp.zeros(())
        totals.append(jnp.stack([squares.sum(), jnp.square(p).sum()]))
    return jnp.concatenate(lines), jnp.stack(totals)


def new_moments(scalars, lines, rows, columns, counts, normalizes_columns):
    decay, rest, factor, eps = scalars
    new, sums, first = ([], []), [], 0
    for *moments, of_leaf, kind in zip(rows, columns, counts, normalizes_columns, strict=True):
        for m, count, found in zip(moments, of_leaf, new, strict=True):
            squares = lines[first : first + m.size].reshape(m.shape)
            first += m.size
            found.append((decay * m + rest * (squares * factor / count + eps)).astype(m.dtype))
        sums.append(new[kind][-1].astype(jnp.float32).sum(-1).ravel())
    return *new, jnp.concatenate(sums)


def updates_squared(gradients, rows, columns):
    wide = [[a.astype(jnp.float32) for a in arrays] for arrays in (gradients, rows, columns)]
    sums = [
        (g**2 / r[..., None] / c[..., None, :]).sum((-1, -2)).ravel()
        for g, r, c in zip(*wide, strict=True)
    ]
    return jnp.concatenate(sums)


def momentum_both_ways(scalars, gradients, momenta, *, dtype, is_factor):
    del is_factor
    call = momentum._Call(len(gradients), dtype)
    wide, tall, squares, *new = call.by_reference(scalars, *gradients, *momenta)
    return wide, tall, squares, new


@contextlib.contextmanager
def stood_in_for(monkeypatch):
    """Makes steps take the kernels' path, with jax.numpy in the place of the kernels."""
    for function in (sums_of_squares, new_moments, updates_squared):
        monkeypatch.setattr(adafactor_cuda, function.__name__, function)
    monkeypatch.setattr(muon_cuda, "momentum_both_ways", momentum_both_ways)
    monkeypatch.setattr(gradient_norm_cuda, "sum_of_squares", optimizer_kernels.sum_of_squares)
    monkeypatch.setattr(cuda_library, "why_unavailable", lambda: None)
    with dispatch.assume(optimizer_kernels.HOPPER):
        yield
    jax.clear_caches()


@pytest.fixture
def stood_in(monkeypatch):
    with stood_in_for(monkeypatch):
        yield


@pytest.fixture
def lowerable(monkeypatch):
    """Pretends that the library is loaded, so that steps can be lowered for a GPU."""
    monkeypatch.setattr(cuda_library, "why_unavailable", lambda: None)
    monkeypatch.setattr(cuda_library, "register", lambda: None)
    with dispatch.assume(optimizer_kernels.HOPPER):
        yield
    jax.clear_caches()


def train(tx, implementation, make=make, steps=3, **how):
    params = make()
    state = tx.init(params)
    for i in range(steps):
        grads = make(i + 1)
        if i == 1:
            grads["square"] = None
        params, state = tx.step(grads, state, params, implementation=implementation, **how)
    return params, state


def assert_close(actual, expected, tolerance=1e-4):
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance / 10)


# --- adafactor ------------------------------------------------------------------------------------

ADAFACTOR = [
    ({}, dict(max_norm=1.0)),
    (dict(momentum=0.9, weight_decay_rate=1e-3), {}),
    (dict(clipping_threshold=None, multiply_by_parameter_scale=False), dict(max_norm=1e3)),
    (dict(learning_rate=None, decay_offset=-1, eps=1e-3), dict(max_norm=1.0)),
]


def make_adafactor(options):
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    return optim.adafactor(**{"learning_rate": schedule, "min_dim_size_to_factor": 4, **options})


@parametrize(("options", "how"), ADAFACTOR, quick=(0,))
def test_adafactor_as_optax(stood_in, options, how):
    tx = make_adafactor(options)
    assert_close(train(tx, "cuda", **how), train(tx, "xla", **how))


@pytest.mark.exhaustive
def test_adafactors_rules(stood_in):
    """Batches and derivatives equal the reference's, also to values that are closed over."""
    params = {"w": make()["wide"], "v": make()["vector"]}

    def loss(rate, grads, implementation):
        tx = optim.adafactor(rate, min_dim_size_to_factor=4)
        new, _ = tx.step(
            grads,
            tx.init(params),
            jax.tree.map(jnp.copy, params),
            max_norm=1.0,
            implementation=implementation,
        )
        return sum(jnp.sum(jnp.sin(p)) for p in new.values())

    grads = jax.tree.map(lambda p: jnp.cos(3 * p), params)
    batch = jax.tree.map(lambda g: jnp.stack([g, 2 * g]), grads)
    for f in (
        lambda name: jax.grad(loss, argnums=(0, 1))(0.1, grads, name),
        lambda name: jax.vmap(lambda g: loss(0.1, g, name))(batch),
    ):
        assert_close(f("cuda"), f("xla"))


def test_adafactor_reads_gradients_thrice(lowerable):
    """Two kernels read the gradients, and then the kernel that writes the parameters."""
    tx, params = optim.adafactor(0.1), {"w": jnp.ones((128, 256)), "b": jnp.ones(128)}
    step = lambda g, s, p: tx.step(g, s, p, max_norm=1.0)  # noqa: E731
    found = kernels(step, params, tx.init(params), params)
    names = ["sums", "moments", "updates"]
    assert found == [f"jaxfused_factored_{name}" for name in names]


SHARDED = """
import contextlib
import jax, jax.numpy as jnp, numpy as np, pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxfused import optim
from tests.ops.optimizer import test_matrix_optimizer_kernels as tests
from tests.ops.optimizer.test_matrix_optimizer_kernels import assert_close

specs = {"wide": P("data", "model"), "tall": P(None, "data"), "layers": P("model"), "vector": P()}
shapes = {"wide": (16, 20), "tall": (24, 8), "layers": (4, 6, 10), "vector": (7,)}
random = np.random.default_rng(0)
host = {k: random.normal(size=s).astype(np.float32) for k, s in shapes.items()}
grads = {k: np.cos(3 * v) for k, v in host.items()}

def train(tx, put, implementation):
    params = put(host)
    state = tx.init(params)
    for _ in range(2):
        params, state = tx.step(put(grads), state, params, max_norm=1.0, implementation=implementation)
    return params, state

with tests.stood_in_for(pytest.MonkeyPatch()):
    tx = optim.adafactor(0.1, min_dim_size_to_factor=4)
    whole = train(tx, lambda tree: jax.tree.map(jnp.array, tree), "xla")
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
        put = lambda tree: {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in tree.items()}
        explicit = axis_type == AxisType.Explicit
        with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
            params, state = train(tx, put, "cuda")
        for k, v in put(host).items():
            assert params[k].sharding.is_equivalent_to(v.sharding, v.ndim), (k, params[k])
        assert_close(*jax.device_get(((params, state), whole)))
"""


def run_on_shards(program):
    flags = "--xla_force_host_platform_device_count=8"
    env = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)


@pytest.mark.exhaustive
def test_adafactor_on_shards():
    run_on_shards(SHARDED)


# --- muon -----------------------------------------------------------------------------------------

MUON = [
    ({}, dict(max_norm=1.0)),
    (dict(nesterov=False, consistent_rms=0.2, weight_decay=0.1), {}),
    (dict(bias_correction=False, clamp_norm=True, ns_steps=3), {}),
    (dict(mu_dtype=jnp.bfloat16, ns_coeffs="quintic"), dict(max_norm=1.0)),
]


@parametrize(("options", "how"), MUON, quick=(0,))
def test_muon_as_the_reference(stood_in, monkeypatch, options, how):
    """Matrices of one shape, their transposes and stacks are one batch, with products both ways."""
    module = sys.modules[optim.muon.__module__]
    numbers = optax.contrib.MuonDimensionNumbers

    def of_rank(tree):
        known = {2: numbers(), 3: numbers(1, 2)}
        return jax.tree.map(lambda leaf: known.get(leaf.ndim) if leaf.size else None, tree)

    def matrices(seed=0):
        rng = np.random.default_rng(seed)
        shapes = {
            "a": (8, 12),
            "b": (12, 8),
            "c": (2, 8, 12),
            "square": (8, 8),
            "d": (4, 16),
            "v": (5,),
        }
        return {k: put(rng.normal(size=shape), jnp.float32) for k, shape in shapes.items()}

    tx = optim.muon(0.02, muon_weight_dimension_numbers=of_rank, **options)
    expected = train(tx, "xla", matrices, **how)
    jax.clear_caches()
    monkeypatch.setattr(module, "why_not_both_ways", lambda *_: None)
    calls = []
    kernel = newton_schulz.orthogonalize_both_ways
    monkeypatch.setattr(
        newton_schulz,
        "orthogonalize_both_ways",
        lambda *args, **options: calls.append(args[0].shape) or kernel(*args, **options),
    )
    actual = train(tx, "cuda", matrices, **how)
    assert (4, 8, 12) in calls and (1, 8, 8) in calls and (1, 4, 16) in calls
    assert_close(actual, expected, 2e-2 if "mu_dtype" in options else 1e-4)


SHARDED_MUON = """
import contextlib
import jax, jax.numpy as jnp, numpy as np, pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from jaxfused import optim
from tests.ops.optimizer import test_matrix_optimizer_kernels as tests
from tests.ops.optimizer.test_matrix_optimizer_kernels import assert_close

specs = {
    "tall": P("data"), "wide": P("data"), "other": P(None, "data"), "square": P(("data", "model")),
    "conv": P(None, None, "model", "data"), "layers": P(None, "data", "model"), "vector": P("data"),
}
shapes = {
    "tall": (24, 16), "wide": (16, 24), "other": (16, 24), "square": (16, 16),
    "conv": (3, 3, 4, 16), "layers": (4, 8, 16), "vector": (8,),
}
random = np.random.default_rng(0)
host = {k: random.normal(size=s).astype(np.float32) for k, s in shapes.items()}
grads = {k: np.cos(3 * v) for k, v in host.items()}
numbers = {k: MuonDimensionNumbers() for k in shapes} | {
    "conv": MuonDimensionNumbers((0, 1, 2), 3), "layers": MuonDimensionNumbers(1, 2), "vector": None
}
tx = optim.muon(0.1, weight_decay=0.1, muon_weight_dimension_numbers=numbers)

def train(put, implementation):
    params = put(host)
    state = tx.init(params)
    for _ in range(2):
        how = dict(max_norm=1.0, implementation=implementation)
        params, state = tx.step(put(grads), state, params, **how)
    return params, state

whole = train(lambda tree: jax.tree.map(jnp.array, tree), "xla")
with tests.stood_in_for(pytest.MonkeyPatch()):
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
        put = lambda tree: {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in tree.items()}
        explicit = axis_type == AxisType.Explicit
        with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
            params, state = train(put, "cuda")
        for k, v in put(host).items():
            assert params[k].sharding.is_equivalent_to(v.sharding, v.ndim), (k, params[k])
        assert_close(*jax.device_get(((params, state), whole)))
"""


@pytest.mark.exhaustive
def test_muon_on_shards():
    """Matrices are split along different axes, with Auto and Explicit axes."""
    run_on_shards(SHARDED_MUON)


def test_muons_program_is_of_kernels(lowerable):
    """A group of matrices has one momentum kernel, and none of its products is XLA's."""
    params = {"a": jnp.zeros((512, 1024)), "b": jnp.zeros((1024, 512)), "c": jnp.zeros(64)}
    tx = optim.muon(0.1, ns_steps=5)
    found = kernels(lambda g, s, p: tx.step(g, s, p, max_norm=1.0), params, tx.init(params), params)
    assert found.count("jaxfused_muon_momentum") == 1
    products = {"symmetric_product", "product_both_ways"}
    assert set(found) == {"jaxfused_gradient_norm", "jaxfused_muon_momentum", *products}


@pytest.mark.exhaustive
def test_muons_norm_has_rules(stood_in):
    """Batches and derivatives equal those of the sum in jax.numpy."""
    grads = {"w": make()["wide"], "v": make()["vector"]}
    batch = jax.tree.map(lambda g: jnp.stack([g, 2 * g]), grads)

    def loss(grads, implementation):
        tx = optim.muon(0.1)
        params = jax.tree.map(jnp.ones_like, grads)
        how = dict(max_norm=1.0, implementation=implementation)
        new, _ = tx.step(grads, tx.init(params), params, **how)
        return sum(jnp.sum(jnp.sin(3 * p)) for p in new.values())

    for f in (
        lambda name: jax.grad(loss)(grads, name),
        lambda name: jax.vmap(lambda g: loss(g, name))(batch),
    ):
        assert_close(f("cuda"), f("xla"))


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("options", "how"), ADAFACTOR)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_adafactors_kernels(monkeypatch, dtype, options, how):
    """Compares with the same arithmetic in jax.numpy, and with a second run bit for bit.

    Sums in another order round some parameters of 16 bits to a neighbour, so that these are judged by
    the same training in float32.
    """
    tx = make_adafactor(options)

    def trained(wide):
        """Returns what several trainings end with, as one tree."""

        def draw(number):
            def of_dtype(seed=0):
                tree = make(10 * number + seed, dtype)
                return jax.tree.map(lambda a: a.astype(jnp.float32), tree) if wide else tree

            return jax.device_get(train(tx, "cuda", of_dtype, **how))

        return jax.tree.map(lambda *leaves: np.stack(leaves), *map(draw, range(4)))

    actual, again = trained(wide=False), trained(wide=False)
    chex.assert_trees_all_equal(actual, again)
    jax.clear_caches()
    for function in (sums_of_squares, new_moments, updates_squared):
        monkeypatch.setattr(adafactor_cuda, function.__name__, function)
    expected, truth = trained(wide=False), trained(wide=True)
    jax.clear_caches()
    if dtype == jnp.float32:
        chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)
        return
    others = (jax.tree.leaves(tree) for tree in (expected, truth))
    for (path, leaf), plain, true in zip(jax.tree.leaves_with_path(actual), *others, strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            np.testing.assert_array_equal(leaf, plain)
            continue
        # Averages in float32 are of parameters in 16 bits, and no more exact than these.
        narrow = (jnp.asarray(array, dtype) for array in (leaf, plain))
        assert_accurate(jax.tree_util.keystr(path), *narrow, np.asarray(true, np.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("momentum_dtype", [jnp.float32, jnp.bfloat16])
def test_the_momentums_kernel(dtype, momentum_dtype):
    """Wide and tall matrices, stacks, and sides that are no multiple of a tile."""
    shapes = [(1, 64, 200), (2, 64, 200), (1, 200, 64)]
    rng = np.random.default_rng(0)
    gradients = [put(rng.normal(size=shape), jnp.float32) for shape in shapes]
    momenta = [put(rng.normal(size=shape), momentum_dtype) for shape in shapes]
    scalars = jnp.array([0.9, 0.1, 0.5, 1.25, 0.75])
    call = momentum._Call(len(shapes), jnp.dtype(dtype))
    expected = call.by_reference(scalars, *gradients, *momenta)
    actual = jax.jit(call.by_kernel)(scalars, *gradients, *momenta)
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape and a.dtype == e.dtype
        coarse = 1e-3 if a.dtype == jnp.float32 else 2e-2
        np.testing.assert_allclose(np.float64(a), np.float64(e), rtol=coarse, atol=1e-4)
    np.testing.assert_array_equal(actual[0].mT, actual[1])
