"""fsdp_layer: numbers of one device, the collectives of each layer, and memory."""

import functools
import re

import chex
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused.linen
import jaxfused.nnx
from benchmarks.whole.parallel_hlo import received_bytes
from jaxfused.parallel import fsdp_layer
from tests.support import eight_devices

on_eight_devices = pytest.mark.skipif(
    jax.device_count() < eight_devices.DEVICES, reason="needs eight devices"
)
pytestmark = pytest.mark.exhaustive
D, LAYERS = 64, 3
SPECS = {"up": P(None, "fsdp"), "down": P("fsdp"), "scale": P()}


@pytest.mark.long
@pytest.mark.skipif(jax.device_count() == eight_devices.DEVICES, reason="this is that process")
def test_on_eight_devices():
    eight_devices.assert_passes(__file__, "exhaustive")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / 8, jnp.float32)


def model():
    return [
        {"up": normal(i, D, 4 * D), "down": normal(9 + i, 4 * D, D), "scale": 1 + normal(i, D)}
        for i in range(LAYERS)
    ]


def layer(params, x, shift):
    # A cast and a part of a parameter are made again in the backward, not saved.
    up, down = (params[name].astype(x.dtype) for name in ("up", "down"))
    hidden = jnp.tanh(jnp.concatenate([x @ up[:, :D], x @ up[:, D:]], axis=-1))
    return x + params["scale"].astype(x.dtype) * (hidden @ down) + shift


def loss(run, params, x, shift):
    for each in params:
        x = run(each, x, shift)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def of_mesh(sizes, axis_type=AxisType.Auto, **options):
    """Returns the mesh, the compiled loss and gradients, and the operands as they lie there."""
    names = ("data", "fsdp")[-len(sizes) :]
    mesh = jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(sizes))
    rows = P(names)
    options = dict(in_specs=(rows, P()), out_specs=rows) | options
    run = jax.jit(functools.partial(fsdp_layer, layer, **options))

    def put(array, spec):
        return jax.device_put(array, NamedSharding(mesh, spec))

    params = [{name: put(a, SPECS[name]) for name, a in each.items()} for each in model()]
    f = jax.jit(jax.value_and_grad(functools.partial(loss, run), argnums=(0, 1)))
    return mesh, f, (params, put(normal(7, 16, D), rows), put(normal(8, D), P()))


@on_eight_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
@pytest.mark.parametrize("given", [True, False])
def test_numbers_are_those_of_one_device(sizes, axis_type, given):
    expected = jax.jit(jax.value_and_grad(functools.partial(loss, layer), argnums=(0, 1)))(
        model(), normal(7, 16, D), normal(8, D)
    )
    mesh, f, operands = of_mesh(sizes, axis_type, param_specs=SPECS if given else None)
    with jax.set_mesh(mesh):
        result = f(*operands)
    chex.assert_trees_all_close(jax.device_get(result), expected, rtol=1e-5, atol=1e-6)
    for each in result[1][0]:
        assert each["up"].sharding.is_equivalent_to(NamedSharding(mesh, SPECS["up"]), 2)
        assert each["down"].sharding.is_equivalent_to(NamedSharding(mesh, SPECS["down"]), 2)


def shapes_of(text, kind):
    """Returns the shapes of all results of collectives of a kind."""
    lines = [line for line in text.splitlines() if re.search(rf" {kind}\(", line)]
    results = [line.split("=", 1)[1].split(kind)[0] for line in lines]
    return [shape for result in results for shape in re.findall(r"\[([\d,]*)\]", result)]


@on_eight_devices
@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_parameters_are_gathered_twice_and_gradients_scattered_before_other_axes_sum_them(sizes):
    mesh, f, operands = of_mesh(sizes, param_specs=SPECS)
    with jax.set_mesh(mesh):
        text = f.lower(*operands).compile().as_text()
    part = D // sizes[-1]
    for whole in (f"{D},{4 * D}", f"{4 * D},{D}"):
        assert shapes_of(text, "all-gather").count(whole) == 2 * LAYERS, whole
        assert whole not in shapes_of(text, "all-reduce")
    scattered = shapes_of(text, "reduce-scatter")
    assert len(scattered) == 2 * LAYERS
    assert {np.prod([*map(int, shape.split(","))]) for shape in scattered} == {part * 4 * D}
    if len(sizes) == 1:
        # 2 (n - 1) / n of the parameters in float32, and once of the gradients.
        numbers = LAYERS * 8 * D * D * 7 / 8
        received = received_bytes(text, 8)
        assert received["all-gather"] == 2 * 4 * numbers
        assert received["reduce-scatter"] == 4 * numbers


@on_eight_devices
def test_gathered_in_16_bits_the_gradient_stays_in_32():
    mesh, f, operands = of_mesh((8,), param_specs=SPECS, dtype=jnp.bfloat16)
    with jax.set_mesh(mesh):
        text = f.lower(*operands).as_text()
        _, (grads, _) = f(*operands)
    assert re.findall(r'"stablehlo.all_gather".*?-> tensor<(\w+)>', text, re.S)
    assert all("bf16" in t for t in re.findall(r"all_gather.*?\) -> tensor<(\w+)>", text))
    # The parameters are rounded, as a layer in bfloat16 rounds them itself, and nothing else is.
    rounded = [
        {k: a.astype(jnp.bfloat16).astype(a.dtype) if a.ndim > 1 else a for k, a in each.items()}
        for each in model()
    ]
    expected = jax.jit(jax.grad(functools.partial(loss, layer)))(
        rounded, normal(7, 16, D), normal(8, D)
    )
    chex.assert_trees_all_close(jax.device_get(grads), expected, rtol=1e-5, atol=1e-6)


@on_eight_devices
@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_gradients_that_travel_in_16_bits_are_summed_in_32(sizes, dtype):
    options = dict(param_specs=SPECS, dtype=dtype)
    mesh, exact, operands = of_mesh(sizes, **options)
    _, f, _ = of_mesh(sizes, bfloat16=True, **options)
    with jax.set_mesh(mesh):
        text = f.lower(*operands).as_text()
        _, (grads, _) = f(*operands)
        _, (expected, _) = exact(*operands)
    sent = re.findall(r"stablehlo.all_to_all.*?-> tensor<[\dx]*(\w+)>", text)
    assert sent == ["bf16"] * 2 and "reduce_scatter" not in text
    for each, of_32 in zip(grads, expected, strict=True):
        for name in ("up", "down"):
            # Each device's part is rounded once; the sum of eight is not.
            norm = np.linalg.norm(each[name] - of_32[name]) / np.linalg.norm(of_32[name])
            assert 2**-12 < norm < 2**-8, name
        np.testing.assert_allclose(each["scale"], of_32["scale"], rtol=1e-2)


@on_eight_devices
def test_a_device_holds_its_part_and_the_gradients_of_one_layer():
    """Memory grows by an eighth of the gradients of each layer, and by its rows."""

    def bytes_of(layers):
        mesh, f, (params, x, shift) = of_mesh((8,), param_specs=SPECS)
        with jax.set_mesh(mesh):
            compiled = f.lower((params * layers)[:layers], x, shift).compile()
        memory = compiled.memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    whole = 4 * 8 * D * D
    assert bytes_of(9) - bytes_of(3) < 6 * whole / 6


@on_eight_devices
def test_within_the_callers_own_shard_map():
    mesh, _, (params, x, shift) = of_mesh((8,))

    def gradients(params, x, shift):
        run = functools.partial(fsdp_layer, layer, param_specs=SPECS)
        # The mean over all devices is the sum of their shares.
        return jax.grad(lambda p: loss(run, p, x, shift) / 8)(params)

    mapped = jax.shard_map(
        gradients,
        mesh=mesh,
        in_specs=([SPECS] * LAYERS, P("fsdp"), P()),
        out_specs=[SPECS] * LAYERS,
    )
    expected = jax.jit(jax.grad(functools.partial(loss, layer)))(
        model(), normal(7, 16, D), normal(8, D)
    )
    grads = jax.jit(mapped)(params, x, shift)
    chex.assert_trees_all_close(jax.device_get(grads), expected, rtol=1e-5, atol=1e-6)


class OfNnx(flax.nnx.Module):
    def __init__(self, rngs):
        init = flax.nnx.initializers.lecun_normal()
        split = flax.nnx.with_partitioning(init, (None, "fsdp"))
        self.up = jaxfused.nnx.Linear(D, 4 * D, kernel_init=split, activation="silu", rngs=rngs)
        split = flax.nnx.with_partitioning(init, ("fsdp", None))
        self.down = flax.nnx.Linear(4 * D, D, kernel_init=split, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.up(x))


class OfLinen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        init = flax.linen.initializers.lecun_normal()
        split = flax.linen.with_partitioning(init, (None, "fsdp"))
        y = jaxfused.linen.Dense(4 * D, kernel_init=split, activation="silu")(x)
        split = flax.linen.with_partitioning(init, ("fsdp", None))
        return x + flax.linen.Dense(D, kernel_init=split)(y)


def of_nnx():
    module = OfNnx(flax.nnx.Rngs(0))
    graphdef, state = flax.nnx.split(module)
    return (
        lambda state, x: flax.nnx.merge(graphdef, state)(x),
        state,
        flax.nnx.get_partition_spec(state),
    )


def of_linen():
    variables = OfLinen().init(jax.random.key(0), jnp.ones((1, D)))
    specs = flax.linen.get_partition_spec(variables)
    return OfLinen().apply, flax.linen.unbox(variables), specs


@on_eight_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("make", [of_nnx, of_linen])
def test_layers_of_flax_by_their_own_metadata(make, axis_type):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(axis_type,))
    x = normal(7, 16, D)
    # Flax would place the parameters itself, one by one; here fsdp_layer does.
    with flax.nnx.use_eager_sharding(False):
        f, params, specs = make()
    leaves = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, P))
    assert sum("fsdp" in str(spec) for spec in leaves) == 2
    with jax.set_mesh(mesh), flax.nnx.use_eager_sharding(False):

        def loss(params, x):
            return jnp.mean(fsdp_layer(f, params, x, param_specs=specs) ** 2)

        grads = jax.jit(jax.grad(loss))(params, jax.device_put(x, NamedSharding(mesh, P("fsdp"))))
    expected = jax.grad(lambda params: jnp.mean(f(params, x) ** 2))(params)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(expected), leaves, strict=True)
    for grad, one, spec in pairs:
        np.testing.assert_allclose(grad, one, rtol=1e-4, atol=1e-6)
        assert grad.sharding.is_equivalent_to(NamedSharding(mesh, spec), grad.ndim)


def test_messages():
    params = {"w": jnp.ones((8, 8))}
    mesh = jax.make_mesh((1, 1), ("fsdp", "model"), axis_types=(AxisType.Auto,) * 2)
    run = functools.partial(fsdp_layer, lambda p, x: x @ p["w"], params, jnp.ones((2, 8)))
    with pytest.raises(ValueError, match="axis_name is 'rows', but the mesh here has the axes"):
        run(axis_name="rows", mesh=mesh)
    for spec in (P("fsdp", "model"), P("model"), P(("fsdp", "model")), P(None, None, "fsdp")):
        with pytest.raises(ValueError, match=r"of shape \(8, 8\) has the PartitionSpec .* one of"):
            run(param_specs={"w": spec}, mesh=mesh)
    with pytest.raises(ValueError, match="param_specs has 2 leaves and the parameters 1"):
        run(param_specs=[P(), P()], mesh=mesh)
    with pytest.raises(ValueError, match=r"'rows' is mapped here, .* pass param_specs"):
        jax.vmap(lambda x: fsdp_layer(jnp.dot, x, axis_name="rows"), axis_name="rows")(jnp.ones(3))
