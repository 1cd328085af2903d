"""fuse as a transformation: its nesting, its report, and the code that it leaves alone."""

import itertools
import sys

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
from jaxfused import dispatch
from jaxfused.fusion import report
from jaxfused.fusion.recognisers import norm as norms
from tests.support.arrays import put
from tests.support.fused import assert_fuses, assert_left_alone, counts, fusion, normal
from tests.support.grids import parametrize

D, F = 16, 32


def params(seed=0, features=D, hidden=F):
    shapes = {"s": (features,), "b": (features,), "w1": (features, hidden)}
    shapes |= {"b1": (hidden,), "w2": (hidden, features), "b2": (features,)}
    arrays = {k: normal(seed + i, *s, scale=0.3) for i, (k, s) in enumerate(shapes.items())}
    return arrays | {"s": arrays["s"] + 1}


def stacked():
    return jax.tree.map(lambda *a: put(np.stack(a)), *(params(10 * i) for i in range(3)))


def norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * scale + bias


def block(p, x):
    h = norm(x, p["s"], p["b"])
    return x + jax.nn.gelu(h @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


BLOCK = {"layer_norm": 1, "mlp": 1}
X = normal(99, 4, 5, D)


def in_a_scan(ps, x):
    return jax.lax.scan(lambda x, p: (block(p, x), x.mean()), x, ps)


def in_a_checkpoint(ps, x):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    step = jax.checkpoint(lambda x, p: (block(p, x), None), policy=policy)
    return jax.lax.scan(step, x, ps, reverse=True)[0]


def in_a_loop(ps, x):
    return jax.lax.fori_loop(0, 3, lambda i, x: block(jax.tree.map(lambda a: a[1], ps), x), x)


def in_a_branch(ps, x):
    p = jax.tree.map(lambda a: a[0], ps)
    return jax.lax.cond(x.sum() > 0, lambda x: block(p, x), lambda x: x, x)


def in_jits(ps, x):
    p = jax.tree.map(lambda a: a[0], ps)
    return jax.jit(lambda x: jax.jit(block)(p, x) + 1)(x)


def under_vmap(ps, x):
    return jax.vmap(block)(ps, x[:3])


def per_vector(ps, x):
    p = jax.tree.map(lambda a: a[0], ps)
    return jax.vmap(jax.vmap(lambda x: block(p, x)))(x)


@pytest.mark.parametrize(
    "f", [in_a_scan, in_a_checkpoint, in_a_loop, in_a_branch, in_jits, per_vector]
)
def test_it_looks_into(f):
    assert counts(f, stacked(), X) == BLOCK

    def both(f):
        def loss(*args):
            return sum(jnp.sin(y).sum() for y in jax.tree.leaves(f(*args)))

        return lambda *args: (f(*args), jax.grad(loss, (0, 1))(*args))

    ours, plain = (jax.jit(both(g))(stacked(), X) for g in (jaxfused.fuse(f), f))
    chex.assert_trees_all_close(ours, plain, rtol=2e-5, atol=2e-5)


def test_weights_of_a_batch_are_no_vectors():
    """Under `vmap` over the parameters, each example has its own scale."""
    ours, plain = jaxfused.fuse(under_vmap)(stacked(), X), under_vmap(stacked(), X)
    np.testing.assert_allclose(ours, plain, atol=1e-5)


def transformed(transform):
    return {
        "jit": jax.jit,
        "vmap": lambda f: jax.vmap(f, (None, 0)),
        "grad": lambda f: jax.grad(lambda p, x: jnp.sin(f(p, x)).sum()),
        "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda p, x: jnp.sin(f(p, x)).sum())),
        "jvp": lambda f: lambda p, x: jax.jvp(f, (p, x), (p, x))[1],
        "linearize": lambda f: lambda p, x: jax.linearize(lambda x: f(p, x), x)[1](x),
        "scan": lambda f: lambda p, x: jax.lax.scan(lambda c, x: (f(p, x + c), c), x[0], x),
        "grad of vmap": lambda f: jax.grad(lambda p, x: jax.vmap(f, (None, 0))(p, x).sum()),
        "vmap of grad": lambda f: jax.vmap(jax.grad(lambda p, x: f(p, x).sum()), (None, 0)),
    }[transform]


@pytest.mark.parametrize(
    "transform",
    [
        "jit",
        "vmap",
        "grad",
        "checkpoint",
        "jvp",
        "linearize",
        "scan",
        "grad of vmap",
        "vmap of grad",
    ],
)
def test_it_works_under(transform):
    apply = transformed(transform)
    ours, plain = (apply(f)(params(), X) for f in (jaxfused.fuse(block), block))
    chex.assert_trees_all_close(ours, plain, rtol=2e-5, atol=2e-5)


def test_explain_takes_what_is_no_array_as_fuse_does():
    """Flags, names and functions, as in modules of Equinox, are static."""

    def f(layer, x, kind):
        y = layer["activation"](x @ layer["w"])
        return (x + y if layer["is_residual"] and kind == "residual" else y), kind

    layer = {"w": normal(0, D, D), "activation": jax.nn.gelu, "is_residual": True}
    assert jaxfused.fuse(f)(layer, X, "residual")[1] == "residual"
    explained = jaxfused.explain(jaxfused.fuse(f), layer, X, kind="residual")
    assert explained.fusions[0].counts() == {"linear": 1}


@pytest.mark.parametrize("named", [{"tpu": 2.0}, {"tpu": 2.0, "cpu": 3.0}])
def test_branches_of_other_platforms_stay_what_they_are(named):
    """Branches of other platforms need not even compile here."""

    def on_tpu(x):
        kernel = lambda x_ref, y_ref: y_ref.__setitem__(..., x_ref[...])  # noqa: E731
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def f(p, x):
        branches = {n: lambda x, c=c: norm(x, p["s"], p["b"]) * c for n, c in named.items()}
        branches["tpu"] = lambda x: on_tpu(norm(x, p["s"], p["b"]))
        return jax.lax.platform_dependent(x, default=lambda x: norm(x, p["s"], p["b"]), **branches)

    assert counts(f, params(), X) == {"layer_norm": 1}
    for g in (jax.jit, lambda f: f, jax.vmap):
        ours, plain = (
            g(lambda x: h(params(), x))(X)  # noqa: B023
            for h in (jaxfused.fuse(f), f)
        )
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), multiprocessors=132)


def of_a_gpu():
    """Returns arguments of a size for which kernels are chosen."""
    arguments = jax.eval_shape(lambda: (params(features=768, hidden=3072), jnp.zeros((4096, 768))))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), arguments)


def test_on_a_gpu_jvp_says_what_it_needs():
    def tangent(p, x):
        return jax.jvp(lambda x: jaxfused.fuse(block)(p, x), (x,), (x,))

    with dispatch.assume(H200):
        traced = jax.jit(tangent).trace(*of_a_gpu())
        with pytest.raises(
            TypeError, match=r"layer_norm on a GPU has no forward mode.*pass implementation='xla'"
        ):
            traced.lower(lowering_platforms=("cuda",))


def test_kernels_run_what_was_found():
    with dispatch.assume(H200):
        explained = jaxfused.explain(jaxfused.fuse(block), *of_a_gpu())
    assert explained.fusions[0].counts() == BLOCK
    assert {choice.stage.split()[0] for choice, _ in explained.calls} == {"layer_norm", "mlp"}


def test_what_has_no_kernel_on_a_gpu_stays_the_programs_own():
    """Attention in float32 with heads of seven features runs in XLA on any GPU."""
    x = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.float16)
    odd = jax.ShapeDtypeStruct((2, 64, 4, 7), jnp.float32)
    with dispatch.assume(H200):
        assert counts(jax.nn.dot_product_attention, x, x, x) == {"dot_product_attention": 1}
        found = fusion(jax.nn.dot_product_attention, odd, odd, odd)
    assert found.counts() == {}
    assert "XLA is to run it on this GPU" in str(found)


def test_it_looks_into_programs_whose_types_are_sharded():
    """Recognising an activation by its derivative and choosing kernels both work on sharded types."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))

    def f(x, w):
        return jax.nn.relu(x @ w) @ w.T

    with jax.set_mesh(mesh):
        x, w = jax.device_put((X, jnp.ones((X.shape[-1], 64))), (P("data"), P()))
        assert counts(f, x, w) == {"mlp": 1}
        np.testing.assert_allclose(jaxfused.fuse(f)(x, w), f(x, w), rtol=1e-5)
        with dispatch.assume(H200):
            of_kernels = [
                jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=a.sharding)
                for shape, a in (((4096, 768), x), ((768, 3072), w))
            ]
            assert counts(f, *of_kernels) == {"mlp": 1}


def of_heads(x):
    x = jnp.einsum("bhqk,bkhd->bqhd", jnp.einsum("bqhd,bkhd->bhqk", x, x), x)
    h = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return h.reshape(*x.shape[:2], -1) * jnp.arange(float(D)) + 1.0


def of_patches(x):
    w = jnp.ones((4, 2, x.shape[-1], D))
    return jax.lax.conv_general_dilated(
        x, w, (4, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.parametrize(
    ("f", "found"), [(of_heads, "group_norm"), (of_patches, "linear")], ids=("heads", "patches")
)
def test_several_axes_are_cut_or_merged_where_types_split_one(f, found):
    """Axes that types split can be reshaped one at a time only."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    batch = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((8, 8, 4, 4), jnp.float32, sharding=batch)
    with jax.sharding.use_abstract_mesh(mesh):
        assert counts(f, x) == {found: 1}
        y, expected = jax.eval_shape(lambda x: (jaxfused.fuse(f)(x), f(x)), x)
    assert (y.shape, y.sharding.spec) == (expected.shape, expected.sharding.spec)


def test_an_operator_runs_under_the_mesh_of_its_place():
    """Within `auto_axes`, the operations of a program have types without shardings."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))

    def f(q, k, v):
        attend = jax.sharding.auto_axes(
            lambda q, k, v: jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v, out_sharding=P("data")
        )
        return attend(q, k, v)

    with jax.set_mesh(mesh):
        args = [jax.device_put(normal(i, 2, 5, 8), P("data")) for i in range(3)]
        assert counts(f, *args) == {"dot_product_attention": 1}
        np.testing.assert_allclose(jaxfused.fuse(f)(*args), f(*args), rtol=1e-5, atol=1e-5)


def test_bodies_with_shardings_of_their_own_are_reported():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, P())
    jitted = jax.jit(block, in_shardings=everywhere)
    assert_left_alone(jitted, params(), X, because="put fuse inside it")
    mapped = jax.shard_map(block, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    assert_left_alone(mapped, params(), X, because="a jax.shard_map is left as it is")


def test_an_operator_that_refuses_leaves_the_program_as_it_is(monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("layer_norm: not today")

    monkeypatch.setattr(norms, "layer_norm", refuse)
    found = fusion(block, params(), X)
    assert found.counts() == {"mlp": 1}
    assert "it refused: layer_norm: not today" in str(found)
    np.testing.assert_allclose(jaxfused.fuse(block)(params(), X), block(params(), X), atol=1e-5)
    on_gpu = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), (params(), X))
    with dispatch.assume(H200):
        assert "it refused: layer_norm: not today" in str(fusion(block, *on_gpu))


def test_a_bias_that_no_operator_takes_leaves_the_program_as_it_is():
    """Types that split the second of two axes do not let them be merged."""
    mesh = AbstractMesh((2,), ("model",), axis_types=(AxisType.Explicit,))

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def f(x, w, bias):
        return jnp.einsum("btd,dhk->bthk", x, w) + bias

    args = (
        array(P(), 8, 64, D),
        array(P(None, None, "model"), D, 2, 64),
        array(P(None, "model"), 2, 64),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        for device in (dispatch.current_device(), H200):
            with dispatch.assume(device):
                assert jax.eval_shape(jaxfused.fuse(f), *args) == jax.eval_shape(f, *args)


# --- rules ----------------------------------------------------------------------------------------


def test_a_differentiated_program_is_left_alone():
    f = jax.grad(lambda p, x: block(p, x).sum())
    assert_left_alone(f, params(), X, because="differentiated already")


def test_what_is_not_replaced_has_the_same_bits():
    def f(key, x):
        y = jnp.cumsum(jnp.sort(x), 0)
        return jax.random.normal(key, x.shape) * y, jax.nn.softmax(y), jnp.argmax(x), x @ x.T

    assert_left_alone(f, jax.random.key(0), normal(0, 8, 8))


def test_effects_stay_in_their_order(capfd):
    def f(p, x):
        jax.debug.print("first {}", x.sum() > 0, ordered=True)
        y = block(p, x)
        jax.debug.print("second {}", y.sum() > 0, ordered=True)
        return y

    jax.block_until_ready(jax.jit(jaxfused.fuse(f))(params(), X))
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert out.index("first") < out.index("second")


def test_names_and_constraints_are_looked_through():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def f(p, x):
        h = checkpoint_name(norm(x, p["s"], p["b"]), "normed")
        z = jax.lax.with_sharding_constraint(h @ p["w1"] + p["b1"], sharding)
        h = checkpoint_name(jax.nn.gelu(z), "hidden")
        return h @ p["w2"] + p["b2"]

    assert_fuses(f, params(), X, into=BLOCK)


def test_without_leaves_out_an_operator_a_site_or_a_line():
    found = fusion(block, params(), X)
    line = found.found[0].line
    assert line.endswith(f":{norm.__code__.co_firstlineno + 3}"), line
    for left_out in ("layer_norm", "layer_norm#0", line, line.rpartition("/")[2]):
        assert counts(block, params(), X, without=(left_out,)) == {"mlp": 1}, left_out
    without_mlp = fusion(block, params(), X, without=("mlp",))
    assert without_mlp.counts() == {"layer_norm": 1, "linear": 2}
    assert "mlp#0 was left out by `without`" in str(without_mlp)
    with pytest.raises(ValueError, match="pass \\('mlp',\\)"):
        jaxfused.fuse(block, without="mlp")


def test_explain_says_where_and_what():
    text = str(jaxfused.explain(jaxfused.fuse(block), params(), X))
    assert "fuse(block) found 1 x layer_norm, 1 x mlp:" in text
    assert f"test_fuse.py:{block.__code__.co_firstlineno + 2}" in text
    assert "layer_norm runs on 'xla'" in text


def test_arguments_that_are_no_arrays_are_what_they_are():
    def f(x, *, train, names=("a",), scale=2):
        assert train is True
        assert names == ("a",)
        return {"y": x * scale, "z": None}

    np.testing.assert_array_equal(jaxfused.fuse(f)(X, train=True)["y"], X * 2)
    assert jaxfused.fuse(f)(X, train=True)["z"] is None


def test_results_that_are_no_arrays_are_what_they_are():
    def f(x):
        return {"y": x * 2, "name": "block", "layers": 3, "zero": jnp.zeros(())}

    result = jaxfused.fuse(f)(X)
    assert (result["name"], result["layers"]) == ("block", 3)
    assert isinstance(result["zero"], jax.Array)
    np.testing.assert_array_equal(result["y"], X * 2)


def test_of_an_empty_batch_nothing_is_replaced():
    empty = jnp.zeros((0, *X.shape[1:]))
    assert counts(block, params(), empty) == {}
    assert jaxfused.fuse(block)(params(), empty).shape == empty.shape


def test_numpy_arrays_and_shapes_are_arrays():
    assert jaxfused.fuse(lambda x: x + 1)(np.ones(3, np.float32)).dtype == jnp.float32
    assert counts(block, *jax.eval_shape(lambda: (params(), X))) == BLOCK


def test_arrays_that_are_closed_over_have_their_gradients():
    def loss(fuse, p):
        return fuse(lambda x: block(p, x))(X).sum()

    ours = jax.grad(lambda p: loss(jaxfused.fuse, p))(params())
    plain = jax.grad(lambda p: loss(lambda f: f, p))(params())
    chex.assert_trees_all_close(ours, plain, rtol=1e-4, atol=1e-4)


# --- libraries ------------------------------------------------------------------------------------


class LinenBlock(nn.Module):
    """A Transformer block of stock layers."""

    dtype: str
    dropout: float = 0.0
    fast: bool = True

    @nn.compact
    def __call__(self, x, mask=None, *, deterministic=True):
        drop = nn.Dropout(self.dropout, deterministic=deterministic)
        y = nn.LayerNorm(dtype=self.dtype, use_fast_variance=self.fast)(x)
        y = nn.MultiHeadDotProductAttention(4, dtype=self.dtype)(y, mask=mask)
        x = x + drop(y)
        y = nn.LayerNorm(dtype=self.dtype, use_fast_variance=self.fast)(x)
        y = nn.Dense(4 * x.shape[-1], dtype=self.dtype)(y)
        y = drop(nn.gelu(y, approximate=False))
        return x + drop(nn.Dense(x.shape[-1], dtype=self.dtype)(y))


LINEN_BLOCK = {"layer_norm": 2, "dot_product_attention": 1, "qkv_projection": 1, "mlp": 1}


def linen_params(model, x):
    tree = model.init(jax.random.key(0), x)
    leaves, treedef = jax.tree.flatten(tree)
    moved = [a + normal(i, *a.shape, scale=0.1) for i, a in enumerate(leaves)]
    return jax.tree.unflatten(treedef, moved)


@parametrize(
    ("causal", "dtype"),
    list(itertools.product([False, True], ["float32", "bfloat16"])),
    quick=(2,),
)
def test_a_stock_linen_block(causal, dtype):
    x = normal(0, 2, 6, 32, dtype=dtype)
    tree = linen_params(LinenBlock(dtype), x)

    def f(tree, x):
        # The layers compute in x's dtype, so that there is a float64 truth.
        model = LinenBlock(str(x.dtype))
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2])) if causal else None
        return model.apply(tree, x, mask)

    assert_fuses(f, tree, x, into=LINEN_BLOCK)


def test_an_active_dropout_of_linen_keeps_its_bits():
    x = normal(0, 2, 6, 32)
    model = LinenBlock("float32", dropout=0.5)
    tree = linen_params(model, x)

    def f(tree, x):
        return model.apply(tree, x, deterministic=False, rngs={"dropout": jax.random.key(7)})

    found = counts(f, tree, x)
    assert found["layer_norm"] == 2
    assert found["dot_product_attention"] == 1
    np.testing.assert_allclose(jaxfused.fuse(f)(tree, x), f(tree, x), atol=1e-5)


class NnxBlock(nnx.Module):
    def __init__(self, dtype, rngs):
        keywords = dict(dtype=dtype, rngs=rngs)
        self.norm1 = nnx.LayerNorm(32, **keywords)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, **keywords)
        self.norm2 = nnx.RMSNorm(32, **keywords)
        self.up = nnx.Linear(32, 64, **keywords)
        self.down = nnx.Linear(64, 32, **keywords)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.silu(self.up(self.norm2(x))))


@parametrize("dtype", ["float32", "bfloat16"], quick=(0,))
def test_a_stock_nnx_block(dtype):
    model, stock = (NnxBlock(dtype, nnx.Rngs(0)) for _ in range(2))
    x = normal(0, 2, 6, 32, dtype=dtype)
    with report.recorded() as reports:
        y = jaxfused.fuse(model)(x)
    assert reports[0].counts() == {
        "dot_product_attention": 1,
        "layer_norm": 1,
        "rms_norm": 1,
        "qkv_projection": 1,
        "mlp": 1,
    }
    tolerance = 1e-5 if dtype == "float32" else 0.05
    np.testing.assert_allclose(*(np.asarray(a, float) for a in (y, stock(x))), atol=tolerance)
    assert float(model.calls[...]) == 1

    def step(f):
        def loss(model):
            return f(model)(x).astype(jnp.float32).sum()

        return nnx.jit(nnx.value_and_grad(loss))

    value, gradient = step(jaxfused.fuse)(model)
    expected, plain = step(lambda model: model)(stock)
    assert float(model.calls[...]) == 2
    np.testing.assert_allclose(value, expected, rtol=0.02)
    scale = max(float(jnp.abs(a).max()) for a in jax.tree.leaves(plain))
    chex.assert_trees_all_close(
        jax.tree.leaves(gradient), jax.tree.leaves(plain), atol=scale * tolerance
    )


def test_an_argument_that_is_a_module_of_nnx_is_written_back():
    model = NnxBlock("float32", nnx.Rngs(0))
    jaxfused.fuse(lambda model, x: model(x))(model, normal(0, 2, 6, 32))
    assert float(model.calls[...]) == 1


def test_a_variable_that_is_an_argument_is_written_back():
    calls = nnx.Variable(jnp.zeros(()))

    def f(state, x):
        state["calls"][...] += 1
        return x * state["the same"][...]

    state = {"calls": calls, "the same": calls}
    np.testing.assert_array_equal(jaxfused.fuse(f)(state, X), X)
    np.testing.assert_array_equal(jaxfused.fuse(f)(state, X), 2 * X)
    assert calls[...] == 2


class Sowing(nnx.Module):
    def __init__(self):
        self.dropout = nnx.Dropout(0.5)
        self.old = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "x", x)
        return x


def test_intermediates_are_captured_around_the_call_or_within():
    for forward in (
        nnx.capture(jaxfused.fuse(lambda model, x: model(x)), nnx.Intermediate),
        jaxfused.fuse(nnx.capture(lambda model, x: model(x), nnx.Intermediate)),
    ):
        _, captured = forward(Sowing(), X)
        np.testing.assert_array_equal(captured["x"][0], X)


def test_what_a_call_adds_to_an_object_or_takes_from_it_stays_so():
    def f(model, x):
        model.new = nnx.Param(x)
        model.eval()
        del model.old
        return x

    model = Sowing()
    jaxfused.fuse(f)(model, X)
    np.testing.assert_array_equal(model.new[...], X)
    assert model.dropout.deterministic and not hasattr(model, "old")


def test_an_object_of_a_trace_around_may_stand_beside_one_that_changes():
    model, outer = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones(()))

    def loss(model, x):
        return jaxfused.fuse(lambda model, outer, x: jnp.sum(model(x) * outer[...]))(
            model, outer, x
        )

    gradient = nnx.grad(loss, argnums=1)(model, X)
    assert model.rngs.count[...] == 1 and float(jnp.max(gradient)) == 2


def test_random_streams_of_nnx_go_on_where_the_call_left_them():
    dropout = nnx.Dropout(0.5)
    ours, stock = nnx.Rngs(3), nnx.Rngs(3)

    def f(x, rngs):
        return dropout(x, rngs=rngs)

    for _ in range(2):
        np.testing.assert_array_equal(jaxfused.fuse(f)(X, ours), f(X, stock))
    assert ours.default.count[...] == stock.default.count[...] == 2


@pytest.mark.exhaustive
def test_finding_costs_little_for_many_layers():
    """Finding is linear in the operations, by calls of functions: times depend on other processes."""
    x = jnp.zeros((2, 6, 32), jnp.bfloat16)

    def calls(layers):
        model = nn.Sequential([LinenBlock("bfloat16") for _ in range(layers)])
        tree = jax.eval_shape(model.init, jax.random.key(0), x)
        made = 0

        def count(frame, event, argument):
            nonlocal made
            made += event == "call"

        sys.setprofile(count)
        try:
            found = counts(model.apply, tree, x)
        finally:
            sys.setprofile(None)
        assert found == {name: layers * count for name, count in LINEN_BLOCK.items()}
        return made

    calls(1)  # This fills JAX's caches.
    assert calls(8) < 5 * calls(2)
