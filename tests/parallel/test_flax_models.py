"""Flax models that their parameters' metadata split: the numbers of one device, in training too."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
import jaxfused.linen
import jaxfused.nnx
from jaxfused import parallel
from tests.support import eight_devices

on_eight_devices = pytest.mark.skipif(
    jax.device_count() < eight_devices.DEVICES, reason="needs eight devices"
)
each_axis_type = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
B, T, D, F, HEADS, CLASSES = 8, 16, 16, 64, 8, 32
RULES = (("embed", None), ("mlp", "model"), ("heads", "model"), ("kv", None), ("vocab", "model"))
INIT = nnx.initializers.lecun_normal()


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() == eight_devices.DEVICES, reason="this is that process")
def test_on_eight_devices():
    eight_devices.assert_passes(__file__, "not gpu")


class Block(nnx.Module):
    def __init__(self, rngs):
        split = nnx.with_partitioning
        self.norm = jaxfused.nnx.RMSNorm(D, rngs=rngs)
        self.attention = jaxfused.nnx.MultiHeadAttention(
            num_heads=HEADS,
            in_features=D,
            qkv_features=2 * D,
            decode=False,
            use_bias=False,
            kernel_init=split(INIT, ("embed", "heads", "kv")),
            out_kernel_init=split(INIT, ("heads", "kv", "embed")),
            rngs=rngs,
        )
        self.mlp = jaxfused.nnx.GatedMLP(
            D,
            F,
            kernel_init=split(INIT, ("embed", "mlp")),
            down_kernel_init=split(INIT, ("mlp", "embed")),
            rngs=rngs,
        )

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return self.mlp(self.norm(x), residual=x)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        head = nnx.with_partitioning(INIT, ("embed", "vocab"))
        self.head = jaxfused.nnx.Linear(D, CLASSES, kernel_init=head, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        split = nn.with_logical_partitioning
        attention = jaxfused.linen.MultiHeadAttention(
            num_heads=HEADS,
            qkv_features=2 * D,
            use_bias=False,
            kernel_init=split(INIT, ("embed", "heads", "kv")),
            out_kernel_init=split(INIT, ("heads", "kv", "embed")),
        )
        mlp = jaxfused.linen.GatedMLP(
            F,
            kernel_init=split(INIT, ("embed", "mlp")),
            down_kernel_init=split(INIT, ("mlp", "embed")),
        )
        x = x + attention(jaxfused.linen.RMSNorm()(x))
        return mlp(jaxfused.linen.LayerNorm()(x), residual=x), None


class LinenModel(nn.Module):
    """Two layers, scanned, whose activations are computed again in the backward."""

    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(
            nn.remat(LinenBlock),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = blocks()(x, None)
        head = nn.with_logical_partitioning(INIT, ("embed", "vocab"))
        return jaxfused.linen.Dense(CLASSES, kernel_init=head)(x)


def batch(dtype="float32"):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(B, T, D)), dtype)
    return x, jnp.asarray(rng.integers(0, CLASSES, (B, T)))


def loss_of(logits, labels):
    return jnp.mean(jaxfused.softmax_cross_entropy(logits, labels, reduction="none"))


def assert_same(got, expected, tolerance=3e-5):
    for ours, one in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        ours, one = (np.asarray(a, np.float64) for a in (ours, one))
        np.testing.assert_allclose(ours, one, atol=tolerance * (1e-3 + np.abs(one).max()), rtol=0)


def nnx_model(mesh):
    """Returns (loss, parameters on the mesh, their specs) of the model."""
    model = Model(nnx.Rngs(0))
    graphdef, params = nnx.split(model)

    def loss(params, x, labels):
        return loss_of(nnx.merge(graphdef, params)(x), labels)

    return loss, params, nnx.get_partition_spec(params)


def linen_model(mesh):
    model, (x, _) = LinenModel(), batch()

    def loss(params, x, labels):
        return loss_of(model.apply(params, x), labels)

    with jax.set_mesh(None):  # Under Explicit axes the constraints of Linen's boxes raise.
        specs = nn.logical_to_mesh(
            nn.get_partition_spec(jax.eval_shape(model.init, jax.random.key(0), x))
        )
        params = nn.unbox(model.init(jax.random.key(0), x))
    return (
        loss,
        jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), params, specs),
        specs,
    )


def meshes(axis_type):
    one = jax.make_mesh(
        (1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1]
    )
    return one, jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)


def split(mesh, *arrays):
    return [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in arrays]


@on_eight_devices
@each_axis_type
@pytest.mark.parametrize("make", [nnx_model, linen_model])
def test_training_is_that_of_one_device(make, axis_type, tmp_path):
    """Gradients, vmap, checkpoint, float64, zero1, mean_gradients, Orbax and export."""
    one, mesh = meshes(axis_type)
    with nn.logical_axis_rules(RULES), nnx.logical_axis_rules(RULES):
        with jax.set_mesh(one):
            loss, params, _ = make(one)
            expected = jax.jit(jax.value_and_grad(loss))(params, *batch())
            sgd = jaxfused.optim.sgd(0.1, momentum=0.9)
            copies = jax.tree.map(jnp.copy, params)
            stepped, _ = sgd.step(expected[1], sgd.init(params), copies, max_norm=1.0)
        with jax.set_mesh(mesh):
            loss, params, specs = make(mesh)
            x, labels = split(mesh, *batch())
            gradient = jax.value_and_grad(jax.checkpoint(loss))
            assert_same(jax.jit(gradient)(params, x, labels), expected)
            several = jax.jit(jax.vmap(jax.value_and_grad(loss), (0, None, None)))(
                jax.tree.map(lambda a: jnp.stack([0 * a, a]), params), x, labels
            )
            assert_same(jax.tree.map(lambda a: a[1], several), expected)
            with jax.enable_x64(True):
                wide = jax.tree.map(lambda a: a.astype("float64"), params)
                of_wide = jax.jit(gradient)(wide, x.astype("float64"), labels)
                assert {a.dtype.name for a in jax.tree.leaves(of_wide)} == {"float64"}
                assert_same(of_wide, expected)
            jax.export.export(jax.jit(gradient), platforms=["cuda"])(params, x, labels)

            opt = parallel.zero1(sgd, mesh=mesh, param_specs=specs)
            state = opt.init(params)

            @jax.jit
            def step(params, state, x, labels):
                grads = jax.grad(loss)(params, x, labels)
                return opt.step(grads, state, params, max_norm=1.0)

            new, state = step(params, state, x, labels)
            assert_same(new, stepped)
            for after, before in zip(jax.tree.leaves(new), jax.tree.leaves(params), strict=True):
                assert after.sharding.is_equivalent_to(before.sharding, after.ndim)

            def summed(params, x, labels):
                params = jax.tree.map(lambda a: jax.lax.pcast(a, "data", to="varying"), params)
                return parallel.mean_gradients(jax.grad(loss)(params, x, labels), "data")

            mapped = functools.partial(jax.shard_map, out_specs=P(), axis_names={"data"})
            means = jax.jit(mapped(summed, in_specs=(P(), P("data"), P("data"))))
            assert_same(means(params, x, labels), expected[1])

        plain = nnx.to_pure_dict(new) if isinstance(new, nnx.State) else new
        checkpointer = orbax.checkpoint.StandardCheckpointer()
        checkpointer.save(tmp_path / "model", plain)
        checkpointer.wait_until_finished()
        whole = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(one, P())),
            plain,
        )
        restored = checkpointer.restore(tmp_path / "model", whole)
        assert_same(restored, plain, 0.0)


@on_eight_devices
@each_axis_type
def test_an_nnx_optimizer_keeps_what_is_split(axis_type):
    _, mesh = meshes(axis_type)
    with nnx.logical_axis_rules(RULES), jax.set_mesh(mesh):
        model = Model(nnx.Rngs(0))
        specs = nnx.get_partition_spec(nnx.state(model, nnx.Param))
        opt = parallel.zero1(jaxfused.optim.adamw(1e-3), mesh=mesh, param_specs=specs)
        optimizer = nnx.Optimizer(model, opt, wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x, labels):
            gradient = nnx.grad(lambda model: loss_of(model(x), labels))
            optimizer.update(model, gradient(model))

        step(model, optimizer, *split(mesh, *batch()))
        gate = model.blocks[0].mlp.gate.kernel.get_value()
        assert gate.sharding.spec == P(None, "model")
        of_state = {a.sharding.spec for a in jax.tree.leaves(nnx.state(optimizer)) if a.ndim == 2}
        assert of_state == {P("data", "model"), P("model", "data")}


@on_eight_devices
@each_axis_type
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parallel_layers_take_a_modules_kernels(sequence_parallel, axis_type):
    """Stacked layers under lax.scan and jax.checkpoint, and under jax.vmap of the kernels."""
    one, mesh = meshes(axis_type)
    x, _ = batch()

    def last_of(mlp, x, states):
        def layer(x, params):
            return mlp(x, params), None

        return jnp.mean(jnp.sin(jax.lax.scan(jax.checkpoint(layer), x, states)[0]))

    def shared(x, params):
        return parallel.gated_mlp(
            x,
            *(params[name]["kernel"] for name in ("gate", "up", "down")),
            residual=x,
            axis_name="model",
            spec=P("data"),
            sequence_parallel=sequence_parallel,
        )

    def stacked():
        states = [nnx.to_pure_dict(nnx.state(block.mlp)) for block in Model(nnx.Rngs(0)).blocks]
        return jax.tree.map(lambda *arrays: jnp.stack(arrays), *states)

    with nnx.logical_axis_rules(RULES):
        with jax.set_mesh(one):
            states, graphdef = stacked(), nnx.graphdef(Model(nnx.Rngs(0)).blocks[0].mlp)
            alone = lambda x, params: nnx.merge(graphdef, params)(x, residual=x)  # noqa: E731
            expected = jax.jit(jax.value_and_grad(functools.partial(last_of, alone), (0, 1)))(
                x, states
            )
            each = jax.jit(jax.vmap(alone, (None, 0)))(x, states)
        with jax.set_mesh(mesh):
            states = stacked()
            tokens = "model" if sequence_parallel else None
            placed = jax.device_put(x, NamedSharding(mesh, P("data", tokens)))
            f = jax.jit(jax.value_and_grad(functools.partial(last_of, shared), (0, 1)))
            assert_same(f(placed, states), expected)
            assert_same(jax.jit(jax.vmap(shared, (None, 0)))(placed, states), each)


def test_linen_projections_of_logical_axes_are_made_on_a_mesh():
    """Flax's DenseGeneral constrains its flat kernel like the final one, which raises under a mesh."""
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    init = nn.with_logical_partitioning(INIT, ("embed", "heads", "kv"))
    layer = jaxfused.linen.DenseGeneral((HEADS, 2), kernel_init=init)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        params = layer.init(jax.random.key(0), jnp.ones((2, D)))["params"]
    kernel = params["kernel"]
    assert kernel.names == ("embed", "heads", "kv") and kernel.unbox().shape == (D, HEADS, 2)
    plain = jaxfused.linen.DenseGeneral((HEADS, 2), kernel_init=INIT)
    expected = plain.init(jax.random.key(0), jnp.ones((2, D)))["params"]["kernel"]
    np.testing.assert_array_equal(kernel.unbox(), expected)
