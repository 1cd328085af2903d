"""jaxfused.parallel's layers: the numbers of one device, by each layout and kind of axis; overlap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
from jaxfused import dispatch, parallel
from tests.support import eight_devices
from tests.support.dataflow import products_beside
from tests.support.grids import pairwise
from tests.support.lowering import kernels

on_eight_devices = pytest.mark.skipif(
    jax.device_count() < eight_devices.DEVICES, reason="needs eight devices"
)
B, T, D, F, N, K, H = 2, 32, 8, 32, 16, 8, 4


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() == eight_devices.DEVICES, reason="this is that process")
def test_on_eight_devices():
    eight_devices.assert_passes(__file__, "exhaustive")


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.5, dtype)


def mlp_alone(x, w1, b1, w2, b2, residual):
    return jaxfused.mlp(x, w1, b1, w2, b2, residual=residual)


def mlp_shared(x, w1, b1, w2, b2, residual, **how):
    return parallel.mlp(x, w1, b1, w2, b2, residual=residual, **how)


def gated_alone(x, w_gate, w_up, w_down, b_gate, b_up, b_down, residual):
    biases = dict(b_gate=b_gate, b_up=b_up, b_down=b_down)
    return jaxfused.gated_mlp(x, w_gate, w_up, w_down, residual=residual, **biases)


def gated_shared(x, w_gate, w_up, w_down, b_gate, b_up, b_down, residual, **how):
    biases = dict(b_gate=b_gate, b_up=b_up, b_down=b_down)
    return parallel.gated_mlp(x, w_gate, w_up, w_down, residual=residual, **biases, **how)


def linear_alone(x, w, bias, residual):
    return jaxfused.linear(x, w, bias, residual=residual, activation="gelu_tanh")


def linear_shared(split, x, w, bias, residual, **how):
    given = dict(residual=residual, activation="gelu_tanh", split=split)
    return parallel.linear(x, w, bias, **given, **how)


def tables(tokens):
    return jaxfused.rope_tables(jnp.arange(tokens), H)


def qkv_alone(x, w_q, w_k, w_v, b_q, b_k, b_v, scale):
    w = jnp.concatenate([w.reshape(D, -1) for w in (w_q, w_k, w_v)], axis=1)
    bias = jnp.concatenate([b.reshape(-1) for b in (b_q, b_k, b_v)])
    cos, sin = tables(x.shape[-2])
    given = dict(heads=N, key_heads=K, q_scale=scale, k_scale=scale, cos=cos, sin=sin)
    return jaxfused.qkv_projection(x, w, bias, **given)


def qkv_shared(x, w_q, w_k, w_v, b_q, b_k, b_v, scale, **how):
    cos, sin = tables(x.shape[-2])
    given = dict(b_q=b_q, b_k=b_k, b_v=b_v, q_scale=scale, k_scale=scale, cos=cos, sin=sin)
    return parallel.qkv_projection(x, w_q, w_k, w_v, **given, **how)


CALLS = {
    "mlp": (mlp_alone, mlp_shared, ((B, T, D), (D, F), (F,), (F, D), (D,), (B, T, D))),
    "gated_mlp": (
        gated_alone,
        gated_shared,
        ((B, T, D), (D, F), (D, F), (F, D), (F,), (F,), (D,), (B, T, D)),
    ),
    "columns": (
        linear_alone,
        functools.partial(linear_shared, "columns"),
        ((B, T, D), (D, F), (F,), (B, T, F)),
    ),
    "rows": (
        linear_alone,
        functools.partial(linear_shared, "rows"),
        ((B, T, F), (F, D), (D,), (B, T, D)),
    ),
    "qkv_projection": (
        qkv_alone,
        qkv_shared,
        ((B, T, D), (D, N, H), (D, K, H), (D, K, H), (N, H), (K, H), (K, H), (H,)),
    ),
}


def operands(name, tokens=T, dtype="float32"):
    shapes = [
        tuple(
            tokens if size == T and len(shape) == 3 and i == 1 else size
            for i, size in enumerate(shape)
        )
        for shape in CALLS[name][2]
    ]
    return [normal(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]


def with_gradients(f, *args):
    """Returns the results of `f` and the gradients to all arguments."""
    results, pullback = jax.vjp(f, *args)

    def cotangent(y):
        dy = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype)
        of = jax.typeof(y).sharding
        return jax.reshard(dy, of) if of.mesh.explicit_axes else dy

    return results, pullback(jax.tree.map(cotangent, results))


def mesh_of(size, axis_type=AxisType.Auto):
    return jax.make_mesh((8 // size, size), ("data", "model"), axis_types=(axis_type,) * 2)


def assert_same_numbers(got, expected, tolerance=3e-5):
    for ours, one in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        one = np.asarray(one, np.float64)
        error = np.abs(np.asarray(ours, np.float64) - one).max()
        assert error <= tolerance * (1 + np.abs(one).max()), (one.shape, error)


@on_eight_devices
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "axis_type", "size", "sequence_parallel"),
    pairwise([*CALLS], [AxisType.Auto, AxisType.Explicit], [8, 2, 1], [True, False]),
)
def test_numbers_are_those_of_one_device(name, axis_type, size, sequence_parallel):
    alone, shared, _ = CALLS[name]
    args = operands(name)
    spec = P("data") if axis_type == AxisType.Auto and size == 4 else None
    how = dict(axis_name="model", sequence_parallel=sequence_parallel, spec=spec)
    expected = jax.jit(functools.partial(with_gradients, alone))(*args)
    with jax.set_mesh(mesh_of(size, axis_type)):
        f = jax.jit(functools.partial(with_gradients, functools.partial(shared, **how)))
        got = f(*args)
        assert_same_numbers(got, expected)
        for first, again in zip(jax.tree.leaves(got), jax.tree.leaves(f(*args)), strict=True):
            np.testing.assert_array_equal(first, again)


@on_eight_devices
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_batch_may_be_split_too(name, axis_type):
    alone, shared, _ = CALLS[name]
    args = operands(name)
    mesh = mesh_of(4, axis_type)
    args[0] = jax.device_put(args[0], NamedSharding(mesh, P("data")))
    how = dict(axis_name="model", sequence_parallel=True, spec=P("data"))
    expected = with_gradients(alone, *operands(name))
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(with_gradients, functools.partial(shared, **how)))(*args)
    assert_same_numbers(got, expected)


@on_eight_devices
@pytest.mark.exhaustive
@pytest.mark.parametrize("save", ["hidden", "inputs"])
@pytest.mark.parametrize("name", ["mlp", "gated_mlp"])
def test_what_is_saved_changes_no_number(name, save):
    alone, shared, _ = CALLS[name]
    args = operands(name)
    expected = with_gradients(alone, *args)
    with jax.set_mesh(mesh_of(4)):
        for sequence_parallel in (True, False):
            how = dict(axis_name="model", sequence_parallel=sequence_parallel, save=save)
            f = functools.partial(shared, **how)
            assert_same_numbers(jax.jit(functools.partial(with_gradients, f))(*args), expected)


@on_eight_devices
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CALLS)
def test_float64_keeps_its_digits(name):
    alone, shared, _ = CALLS[name]
    args = operands(name)
    with jax.enable_x64(True):
        args = [jnp.asarray(np.asarray(a), "float64") for a in args]
        expected = jax.jit(functools.partial(with_gradients, alone))(*args)
        with jax.set_mesh(mesh_of(2)):
            f = functools.partial(shared, axis_name="model")
            got = jax.jit(functools.partial(with_gradients, f))(*args)
    assert_same_numbers(got, expected, 1e-12)


@on_eight_devices
@pytest.mark.exhaustive
def test_bfloat16_is_as_near_as_one_device_is():
    """Against float64, in the ring and in parts of the rows."""
    name = "gated_mlp"
    alone, shared, _ = CALLS[name]
    args = operands(name, 2048, "bfloat16")
    with jax.enable_x64(True):
        truth = with_gradients(
            functools.partial(alone), *(jnp.asarray(np.asarray(a), "float64") for a in args)
        )
    plain = jax.jit(functools.partial(with_gradients, alone))(*args)
    for sequence_parallel in (True, False):
        with jax.set_mesh(mesh_of(8)):
            how = dict(axis_name="model", sequence_parallel=sequence_parallel)
            f = functools.partial(with_gradients, functools.partial(shared, **how))
            got = jax.jit(f)(*args)
        for true, one, ours in zip(*map(jax.tree.leaves, (truth, plain, got)), strict=True):
            true = np.asarray(true)
            errors = [
                np.sqrt(np.mean((np.asarray(a, np.float64) - true) ** 2)) for a in (one, ours)
            ]
            assert errors[1] <= 2 * errors[0] + 2.0**-8 * np.sqrt(np.mean(true**2))


@on_eight_devices
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_few_rows_a_device_lower_to_kernels_and_run(name, rows, with_library):
    """Under Explicit axes, for a GPU and on the CPU; no program asks for NVLink's multicast."""
    _, shared, _ = CALLS[name]
    with jax.set_mesh(mesh_of(8, AxisType.Explicit)):
        for sequence_parallel in (True, False):
            how = dict(axis_name="model", sequence_parallel=sequence_parallel)
            f = functools.partial(with_gradients, functools.partial(shared, **how))
            y, _ = jax.jit(f)(*operands(name, rows * 8))
            assert all(np.isfinite(np.asarray(a)).all() for a in jax.tree.leaves(y))
            with dispatch.assume(with_library):
                launched = kernels(f, *operands(name, rows * 8, "bfloat16"))
            assert not [line for line in launched if "multicast" in str(line)]


@on_eight_devices
@pytest.mark.exhaustive
def test_tokens_that_have_no_halves_go_one_way_round():
    args = [normal(0, B, 24, D), *operands("columns")[1:2]]
    with jax.set_mesh(mesh_of(8)):
        y = parallel.linear(*args, axis_name="model", split="columns", sequence_parallel=True)
    np.testing.assert_allclose(y, jaxfused.linear(*args), atol=1e-5)


@on_eight_devices
@pytest.mark.exhaustive
def test_in_the_callers_shard_map_and_pmap():
    x, w_gate, w_up, w_down, *_ = operands("gated_mlp")
    expected = jaxfused.gated_mlp(x, w_gate, w_up, w_down)
    f = functools.partial(parallel.gated_mlp, axis_name="model", sequence_parallel=True)
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    specs = (P(None, "model"),) * 3 + (P("model"),)
    for checked in (True, False):
        mapped = jax.shard_map(
            f, mesh=mesh, in_specs=specs, out_specs=P(None, "model"), check_vma=checked
        )
        np.testing.assert_allclose(jax.jit(mapped)(x, w_gate, w_up, w_down), expected, atol=1e-5)
    parts = [jnp.stack(jnp.split(a, 8, axis=1)) for a in (x, w_gate, w_up)]
    y = jax.pmap(f, axis_name="model")(*parts, jnp.stack(jnp.split(w_down, 8)))
    np.testing.assert_allclose(jnp.concatenate([*y], axis=1), expected, atol=1e-5)


def hlo(f, mesh, specs, *args):
    with jax.set_mesh(mesh):
        put = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
        return jax.jit(f).lower(*put).as_text("hlo")


@on_eight_devices
@pytest.mark.exhaustive
def test_permutes_of_the_ring_run_beside_products():
    """All but one of the last sums on their way home; in the backward that one too."""
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    args = operands("gated_mlp")[:4]
    specs = [P(None, "model")] * 3 + [P("model")]
    f = functools.partial(parallel.gated_mlp, axis_name="model", sequence_parallel=True)
    beside = products_beside(hlo(f, mesh, specs, *args), "collective-permute")
    hops = 3  # of x, twice; the sums make one more
    assert len(beside) == 2 * (hops + hops + 1) and beside[:2] == [0, 2]
    text = hlo(backward_of(f), mesh, [specs[0], *specs], args[0], *args)
    beside = products_beside(text, "collective-permute")
    assert len(beside) >= 2 * (3 * hops + 1) and beside[0] == 2


def backward_of(f):
    def backward(dy, *args):
        _, pullback = jax.vjp(f, *args)
        return pullback(dy)

    return backward


@on_eight_devices
@pytest.mark.exhaustive
def test_sums_of_parts_run_beside_products():
    """With whole rows: three of the four sums of y, and that of x's gradient."""
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    args = operands("gated_mlp", 1024)[:4]
    specs = [P()] + [P(None, "model")] * 2 + [P("model")]
    f = functools.partial(parallel.gated_mlp, axis_name="model")
    assert products_beside(hlo(f, mesh, specs, *args), "all-reduce") == [0, 1, 2, 3]
    text = hlo(backward_of(f), mesh, [P(), *specs], args[0], *args)
    assert products_beside(text, "all-reduce") == [2]


def test_one_device():
    with jax.set_mesh(jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))):
        for name in ("gated_mlp", "columns"):
            alone, shared, _ = CALLS[name]
            args = operands(name)
            f = functools.partial(shared, axis_name="model", sequence_parallel=True)
            assert_same_numbers(jax.jit(f)(*args), jax.jit(alone)(*args))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(axis_name="rows"), r"axis_name is 'rows', but the mesh here has the axes"),
        (dict(axis_name=()), r"axis_name is \(\); pass the name of a mesh axis, or a tuple"),
        (dict(axis_name=None), r"axis_name is None; pass the name of a mesh axis, or a tuple"),
        (dict(spec=P("model")), r"are split by \('model',\), and axis_name is 'model'"),
        (dict(w_up=None), r"w_up is None, but it is an array"),
        (dict(w_up=jnp.ones((D, 3))), r"w_up has shape \(8, 3\)"),
        (dict(w_down=jnp.ones((3, D))), r"w_down has shape \(3, 8\), but the hidden layer has 32"),
        (dict(activation="sine"), r"activation='sine' is not known"),
    ],
)
def test_messages(change, message):
    names = ("x", "w_gate", "w_up", "w_down")
    given = dict(zip(names, operands("gated_mlp")[:4], strict=True), axis_name="model") | change
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        parallel.gated_mlp(**given)


@on_eight_devices
@pytest.mark.exhaustive
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["gated_mlp", "columns", "qkv_projection"])
def test_several_axes_count_as_one(name, axis_type):
    alone, shared, _ = CALLS[name]
    args, axes = operands(name), ("data", "model")
    expected = jax.jit(functools.partial(with_gradients, alone))(*args)
    f = functools.partial(shared, axis_name=axes, sequence_parallel=True)
    with jax.set_mesh(mesh_of(2, axis_type)):
        got = jax.jit(functools.partial(with_gradients, f))(*args)
        assert_same_numbers(got, expected)
        with pytest.raises(ValueError, match=r"axis_name is \('data', 'rows'\), but the mesh here"):
            shared(*args, axis_name=("data", "rows"))
        inside = functools.partial(shared, axis_name=axes)
        mapped = jax.shard_map(
            inside, in_specs=(P(),) * len(args), out_specs=P(), axis_names={"data"}
        )
        with pytest.raises(ValueError, match=r"only \['data'\] are mapped here; map all"):
            jax.jit(mapped)(*args)


@on_eight_devices
@pytest.mark.exhaustive
def test_sizes_that_devices_cannot_share():
    x, w, *_ = operands("columns")
    with jax.set_mesh(mesh_of(8)):
        with pytest.raises(ValueError, match=r"\(2, 30, 8\) has 30 tokens, but 'model' has 8"):
            parallel.linear(
                x[:, :30], w, axis_name="model", split="columns", sequence_parallel=True
            )
        with pytest.raises(ValueError, match=r"\(8, 30\) has 30 features, but 'model' has 8"):
            parallel.linear(x, w[:, :30], axis_name="model", split="columns")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=jnp.ones(D)), r"x has shape \(8,\), but tokens and features are its last axes"),
        (dict(x=jnp.ones(())), r"x has shape \(\), but tokens and features"),
        (dict(w=jnp.ones(D)), r"w has shape \(8,\), but x has 8 features"),
        (dict(w=jnp.ones((2, D, F))), r"w has shape \(2, 8, 32\), but x has 8 features"),
        (dict(bias=jnp.ones((1, F))), r"bias has shape \(1, 32\), but w has 32 features"),
        (dict(bias=jnp.ones(D)), r"bias has shape \(8,\), but w has 32 features"),
        (dict(residual=jnp.ones((T, F))), r"residual has shape \(32, 32\), but x has shape"),
        (dict(spec=P("rows")), r"spec is .*'rows'.*, but the mesh here has the axes"),
    ],
)
def test_messages_name_the_callers_shapes(change, message):
    given = dict(x=normal(0, B, T, D), w=normal(1, D, F), axis_name="model", split="columns")
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        parallel.linear(**given | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=jnp.ones(D)), r"x has shape \(8,\), but tokens and features are its last axes"),
        (dict(w_q=jnp.ones((D, N * H))), r"w_q has shape \(8, 64\)"),
        (dict(w_q=jnp.ones((D, 3, H))), "there are 3 query and 8 key heads"),
        (dict(cos=jnp.ones(2), sin=jnp.ones(2)), r"cos has shape \(2,\)"),
        (
            dict(cos=jnp.ones((1, T, 2)), sin=jnp.ones((1, T, 2))),
            rf"pass cos of shape \({B}, {T}, 2\)",
        ),
    ],
)
def test_messages_of_heads(change, message):
    w = jnp.ones((D, K, H))
    given = dict(x=jnp.ones((B, T, D)), w_q=w, w_k=w, w_v=w, axis_name="model")
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        parallel.qkv_projection(**given | change)


@on_eight_devices
@pytest.mark.exhaustive
@pytest.mark.parametrize("split", ["columns", "rows"])
@pytest.mark.parametrize("shape", [(B, 0, D), (0, T, D)])
def test_empty_operands(split, shape):
    """Their programs are compiled as a whole."""
    with jax.set_mesh(mesh_of(8)):
        f = functools.partial(
            parallel.linear, axis_name="model", split=split, sequence_parallel=True
        )
        y, (dx, dw) = with_gradients(f, jnp.ones(shape), jnp.ones((shape[-1], F)))
        assert y.shape == (*shape[:-1], F) and not y.any()
        assert dx.shape == shape and dw.shape == (shape[-1], F) and not dw.any()


@on_eight_devices
@pytest.mark.exhaustive
def test_a_batch_that_devices_cannot_share():
    x, w, *_ = operands("columns")
    message = r"x has shape \(1, 32, 8\), but 2 devices of 'data'"
    with jax.set_mesh(mesh_of(4)), pytest.raises(ValueError, match=message):
        parallel.linear(x[:1], w, axis_name="model", split="columns", spec=P("data"))


def test_empty_rows():
    x, w, *_ = operands("columns")
    with jax.set_mesh(jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))):
        f = functools.partial(parallel.linear, axis_name="model", split="columns")
        for sequence_parallel in (True, False):
            of = functools.partial(f, sequence_parallel=sequence_parallel)
            y, (dx, dw) = with_gradients(of, x[:0], w)
            assert y.shape == (0, T, F) and dx.shape == (0, T, D) and not dw.any()
