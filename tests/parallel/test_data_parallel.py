"""mean_gradients and zero1: numbers, rounding, memory, and states that any number of devices reads."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
from jaxfused import parallel
from tests.support import eight_devices
from tests.support.compilation import no_compilation

on_eight_devices = pytest.mark.skipif(
    jax.device_count() < eight_devices.DEVICES, reason="needs eight devices"
)
pytestmark = pytest.mark.exhaustive
WHOLE = P()


@pytest.mark.long
@pytest.mark.skipif(jax.device_count() == eight_devices.DEVICES, reason="this is that process")
def test_on_eight_devices():
    eight_devices.assert_passes(__file__, "exhaustive")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# --- mean_gradients -------------------------------------------------------------------------------


def gradients():
    """Returns the gradients of eight devices, along the first axis of each leaf."""
    blocks = [{"w": normal(i, 8, 16, 24), "b": normal(9 + i, 8, 5), "none": None} for i in range(2)]
    return {"blocks": blocks, "head": normal(7, 8, 7)}


def exact(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64).mean(0), tree)


def own(tree):
    return jax.tree.map(lambda a: a[0], tree)


def on_devices(f, out_specs=WHOLE):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda tree: f(own(tree)), mesh=mesh, in_specs=P("data"), out_specs=out_specs
    )
    return jax.jit(mapped)(gradients())


mean = functools.partial(parallel.mean_gradients, axis_name="data")


@on_eight_devices
def test_means_in_float32_and_in_16_bits():
    expected = exact(gradients())
    chex.assert_trees_all_close(on_devices(mean), expected, rtol=1e-5, atol=1e-6)
    # Each number is rounded once where it is sent, and the mean once more.
    rounded = on_devices(lambda g: mean(g, bfloat16=True))
    chex.assert_trees_all_close(rounded, expected, atol=3 * 2.0**-8)
    again = on_devices(lambda g: mean(g, bfloat16=True))
    chex.assert_trees_all_equal(rounded, again)
    optimizer = parallel.zero1(optax.sgd(0.1), mesh=jax.make_mesh((8,), ("data",)))
    specs = optimizer.specs(own(gradients()))
    assert specs["blocks"][0]["w"] == P(None, "data") and specs["head"] == P()
    for bfloat16 in (False, True):
        f = functools.partial(mean, scatter=True, bfloat16=bfloat16)
        chex.assert_trees_all_close(on_devices(f, specs), expected, atol=3 * 2.0**-8)


@on_eight_devices
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scatter", [False, True])
def test_sums_of_16_bits_neither_overflow_nor_lose_small_numbers(dtype, scatter):
    """The mean is that of float64, rounded once, where a float16 sum of the devices is infinite."""
    sizes = np.logspace(-7, np.log10(6e4), 24)
    tree = {"w": jnp.asarray(sizes * (1 + normal(0, 8, 16, 24) / 32), dtype), "b": normal(1, 8, 5)}
    tree["layer"] = {"scale": jnp.full((8, 5), 6e4, dtype)}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"w": P(None, "data") if scatter else P(), "b": P(), "layer": P()}
    f = lambda tree: mean(own(tree), scatter=scatter)  # noqa: E731
    means = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=specs))(tree)
    expected = jax.tree.map(lambda a, m: a.astype(m.dtype), exact(tree), means)
    for name in ("w", "layer"):
        chex.assert_trees_all_close(means[name], expected[name], rtol=1e-6)
    assert means["w"].dtype == dtype
    chex.assert_trees_all_close(means["b"], expected["b"], rtol=1e-5, atol=1e-6)


@on_eight_devices
def test_several_axes_count_as_one():
    """Gradients are summed over both, and a state is split by both, or by that which is free."""
    both = ("data", "fsdp")
    mesh = jax.make_mesh((2, 4), both, axis_types=(AxisType.Auto,) * 2)
    for options in ({}, dict(bfloat16=True), dict(scatter=True)):
        f = functools.partial(parallel.mean_gradients, axis_name=both, **options)
        opt = parallel.zero1(jaxfused.optim.adamw(0.1), axis_name=both, mesh=mesh)
        specs = opt.specs(own(gradients())) if options.get("scatter") else P()
        mapped = jax.shard_map(
            lambda t, f=f: f(own(t)), mesh=mesh, in_specs=P(both), out_specs=specs
        )
        got = jax.jit(mapped)(gradients())
        chex.assert_trees_all_close(got, exact(gradients()), atol=3 * 2.0**-8)
    params, grads = {"w": normal(0, 8, 16)}, {"w": normal(1, 8, 16)}
    inner = jaxfused.optim.adamw(0.1)
    expected, _ = inner.step(grads, inner.init(params), {"w": params["w"] + 0})
    for spec, of_state in ((P(), P(None, both)), (P("fsdp"), P("fsdp", "data"))):
        opt = parallel.zero1(inner, axis_name=both, mesh=mesh, param_specs={"w": spec})
        placed = {"w": put(mesh, params["w"], spec)}
        new, state = jax.jit(opt.step)(grads, opt.init(placed), placed)
        assert state[0].mu["w"].sharding.spec == of_state
        chex.assert_trees_all_close(new, expected, rtol=1e-5)


@on_eight_devices
def test_nothing_is_lost_by_random_rounding_or_error_feedback():
    tree, steps = gradients(), 64
    expected = exact(tree)
    totals = jax.tree.map(np.zeros_like, expected)
    step = jax.jit(
        jax.shard_map(
            lambda tree, key: mean(own(tree), bfloat16=True, key=key),
            mesh=jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)),
            in_specs=(P("data"), P()),
            out_specs=P(),
        )
    )
    for i in range(steps):
        totals = jax.tree.map(np.add, totals, step(tree, jax.random.key(i)))
    chex.assert_trees_all_close(jax.tree.map(lambda a: a / steps, totals), expected, atol=2e-3)

    def with_error(tree, error):
        means, error = mean(own(tree), bfloat16=True, error=own(error))
        return means, jax.tree.map(lambda a: a[None], error)

    step = jax.jit(
        jax.shard_map(
            with_error,
            mesh=jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)),
            in_specs=P("data"),
            out_specs=(P(), P("data")),
        )
    )
    error, totals = jax.tree.map(jnp.zeros_like, tree), jax.tree.map(np.zeros_like, expected)
    for _ in range(steps):
        means, error = step(tree, error)
        totals = jax.tree.map(np.add, totals, means)
    chex.assert_trees_all_close(jax.tree.map(lambda a: a / steps, totals), expected, atol=3e-4)


@on_eight_devices
def test_a_gradient_that_is_not_finite_spoils_one_step():
    def two_steps(tree):
        spoilt = tree["head"].at[0].set(jnp.inf)
        error = {"head": jnp.zeros_like(spoilt)}
        _, error = mean({"head": spoilt}, bfloat16=True, error=error)
        return mean({"head": tree["head"]}, bfloat16=True, error=error)[0]

    expected = exact({"head": gradients()["head"]})
    chex.assert_trees_all_close(on_devices(two_steps), expected, atol=6 * 2.0**-8)


@on_eight_devices
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("bfloat16", [False, True])
def test_leaves_without_numbers(bfloat16, scatter):
    f = lambda g: mean({"e": g["head"][:0]}, bfloat16=bfloat16, scatter=scatter)  # noqa: E731
    assert on_devices(f)["e"].shape == (0,)


@on_eight_devices
def test_each_layer_has_collectives_of_its_own():
    """Two layers and the head: three exchanges and three gathers, in 16 bits."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(
        lambda tree: mean(own(tree), bfloat16=True), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    text = jax.jit(f).lower(gradients()).as_text()
    assert text.count("stablehlo.all_to_all") == 3 and text.count("stablehlo.all_gather") == 3
    assert "stablehlo.all_reduce" not in text


@on_eight_devices
def test_under_pmap():
    means = jax.pmap(lambda g: mean(g, bfloat16=True), axis_name="data")(gradients())
    chex.assert_trees_all_close(own(means), exact(gradients()), atol=3 * 2.0**-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(axis_name="rows"), "no axis 'rows' is mapped here; call it within"),
        (dict(key=jax.random.key(0), bfloat16=False), "key was passed, but without bfloat16"),
        (dict(error={"w": jnp.zeros(3)}), r"error has leaves .*pass the error that the last"),
        (dict(grads={"w": jnp.ones((1, 2), int)}), r"grads\['w'\] is of int32; pass a tree"),
    ],
)
def test_messages(change, message):
    given = dict(grads={"w": jnp.ones((1, 2))}, axis_name="data", bfloat16=True) | change
    grads = given.pop("grads")
    with pytest.raises(ValueError, match=message):
        jax.vmap(lambda g: parallel.mean_gradients(g, **given), axis_name="data")(grads)


# --- zero1 ----------------------------------------------------------------------------------------


def model():
    return {
        "layer_0": {"w": normal(0, 16, 24), "b": normal(1, 24)},
        "layer_1": {"w": normal(2, 24, 8), "b": normal(3, 3)},
    }


def loss(params, x):
    first, second = params["layer_0"], params["layer_1"]
    h = jnp.tanh(x @ first["w"] + first["b"])
    return jnp.mean((h @ second["w"]) ** 2) + jnp.sum(second["b"] ** 2)


def train(optimizer, params, state, x, steps=3):
    @jax.jit
    def step(params, state):
        return optimizer.step(jax.grad(loss)(params, x), state, params, max_norm=0.5)

    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def put(mesh, tree, spec=WHOLE):
    return jax.device_put(tree, NamedSharding(mesh, spec))


OPTIMIZERS = {
    "adamw": lambda: jaxfused.optim.adamw(0.1),
    "lamb": lambda: jaxfused.optim.lamb(0.1),
    "muon": lambda: jaxfused.optim.muon(0.1),
    "adamw8bit": lambda: jaxfused.optim.adamw8bit(0.1),
    "adafactor": lambda: jaxfused.optim.adafactor(0.1, min_dim_size_to_factor=4),
}


@on_eight_devices
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_numbers_are_those_of_one_device(name, axis_type):
    optimizer, x = OPTIMIZERS[name](), normal(5, 32, 16)
    expected, _ = train(optimizer, model(), optimizer.init(model()), x)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    shared = parallel.zero1(OPTIMIZERS[name]())
    with jax.set_mesh(mesh):
        params = put(mesh, model())
        params, state = train(shared, params, shared.init(params), put(mesh, x, P("data")))
    chex.assert_trees_all_close(params, expected, rtol=2e-4, atol=2e-5)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params))
    assert any("data" in str(leaf.sharding.spec) for leaf in jax.tree.leaves(state))


@on_eight_devices
def test_an_optimizer_of_optax_by_its_update_and_outside_of_jit():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    shared, params = parallel.zero1(inner, mesh=mesh), put(mesh, model())
    state, plain = shared.init(params), inner.init(model())
    grads = jax.grad(loss)(model(), normal(5, 32, 16))
    updates, state = shared.update(put(mesh, grads), state, params)
    expected, _ = inner.update(grads, plain, model())
    chex.assert_trees_all_close(updates, expected, rtol=1e-5)
    assert state[1][0].mu["layer_0"]["w"].sharding.spec == P(None, "data")


@on_eight_devices
def test_a_device_has_an_eighth_of_the_state_and_of_its_step():
    """In bytes of the compiled program: of two moments seven eighths are elsewhere."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = {"w": jnp.zeros((256, 512)), "b": jnp.zeros(512)}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    memory = {}
    with jax.set_mesh(mesh):
        placed = put(mesh, params)
        for name, optimizer in (
            ("whole", jaxfused.optim.adamw(0.1)),
            ("shared", parallel.zero1(jaxfused.optim.adamw(0.1))),
        ):
            state = optimizer.init(placed)
            step = jax.jit(optimizer.step).lower(placed, state, placed)
            memory[name] = step.compile().memory_analysis().argument_size_in_bytes
    saved = memory["whole"] - memory["shared"]
    assert abs(saved - 2 * size * 7 / 8) <= 64, memory


@on_eight_devices
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_saved_state_is_restored_by_any_number_of_devices(tmp_path, devices):
    x = normal(5, 32, 16)

    def mesh_of(count):
        return jax.make_mesh(
            (count,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count]
        )

    def continued(count, params, state):
        shared = parallel.zero1(jaxfused.optim.adamw(0.1), mesh=mesh_of(count))
        return train(shared, params, state, put(mesh_of(count), x, P("data")))

    eight = mesh_of(8)
    params = put(eight, model())
    state = parallel.zero1(jaxfused.optim.adamw(0.1), mesh=eight).init(params)
    params, state = continued(8, params, state)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (params, state))
    expected, _ = continued(8, params, state)
    mesh = mesh_of(devices)
    like = put(mesh, model())
    target = (like, parallel.zero1(jaxfused.optim.adamw(0.1), mesh=mesh).init(like))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        params, state = checkpointer.restore(tmp_path / "state", target)
    assert len(jax.tree.leaves(state)[1].sharding.device_set) == devices
    chex.assert_trees_all_close(continued(devices, params, state)[0], expected, atol=1e-5)


@on_eight_devices
def test_parameters_that_another_axis_splits_stay_split():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params = {"up": normal(0, 8, 16), "down": normal(1, 16, 8)}
    specs = {"up": P(None, "model"), "down": P("model")}
    placed = {name: put(mesh, a, specs[name]) for name, a in params.items()}
    inner = jaxfused.optim.adamw(0.1)
    shared = parallel.zero1(jaxfused.optim.adamw(0.1), mesh=mesh, param_specs=specs)
    new, state = jax.jit(shared.step)(placed, shared.init(placed), placed)
    expected, _ = inner.step(params, inner.init(params), {k: a + 0 for k, a in params.items()})
    chex.assert_trees_all_close(new, expected, rtol=1e-5)
    assert new["up"].sharding.spec == P(None, "model")
    assert state[0].mu["up"].sharding.spec == P("data", "model")
    assert state[0].mu["down"].sharding.spec == P("model", "data")


@on_eight_devices
@pytest.mark.parametrize("named", [False, True])
def test_parameters_stay_where_init_saw_them(named):
    """Within jit Auto axes do not say how parameters are split; a step gathers none over "model"."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = {"up": P(None, "model"), "down": P("model"), "own": P("data")}
    params = {"up": normal(0, 8, 16), "down": normal(1, 16, 8), "own": normal(2, 8, 8)}
    placed = {name: put(mesh, a, specs[name]) for name, a in params.items()}
    more = dict(param_specs=specs) if named else {}
    shared = parallel.zero1(jaxfused.optim.adamw(0.1), mesh=mesh, **more)
    state = shared.init(placed)
    step = jax.jit(shared.step)
    text = step.lower(placed, state, placed).compile().as_text()
    gathered = [
        line.split(" all-gather(")[0] for line in text.splitlines() if " all-gather(" in line
    ]
    assert len(gathered) == 2 and all("[8,8]" in result for result in gathered)
    new, state = step(placed, state, placed)
    for name, spec in specs.items():
        assert new[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    assert state[0].mu["up"].sharding.spec == P("data", "model")
    inner = jaxfused.optim.adamw(0.1)
    expected, _ = inner.step(params, inner.init(params), jax.tree.map(jnp.copy, params))
    chex.assert_trees_all_close(new, expected, rtol=1e-5)


@on_eight_devices
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_step_outside_of_jit_is_in_place(axis_type):
    """State and parameters that lie on the mesh are donated, but not within a gradient."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    shared = parallel.zero1(jaxfused.optim.adamw(0.1), mesh=mesh)
    with jax.set_mesh(mesh):
        grads, params = put(mesh, model()), put(mesh, model())
        state = shared.init(params)
        new, new_state = shared.step(grads, state, params)
        old = [*jax.tree.leaves(params), *jax.tree.leaves(state)]
        assert all(leaf.is_deleted() for leaf in old)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(grads))
        shared.update(grads, new_state, new)
        jax.grad(lambda g: shared.step(g, new_state, new)[0]["layer_0"]["w"].sum())(grads)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((new, new_state)))
    # Parameters of one device are not in the place of the results. The norm, an array, has no hash.
    params = model()
    read = jax.device_get(shared.init(params))
    shared.step(model(), read, params, max_norm=jnp.float32(1.0))
    assert not params["layer_0"]["w"].is_deleted()


@on_eight_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_step_outside_of_jit_compiles_once(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    shared = parallel.zero1(jaxfused.optim.adamw(0.1), mesh=mesh)
    params, grads = put(mesh, model()), put(mesh, model())
    with jax.set_mesh(mesh):
        state = shared.init(params)
        for i in range(3):
            with no_compilation() if i else contextlib.nullcontext():
                params, state = shared.step(grads, state, params, max_norm=0.5)


@on_eight_devices
def test_parameters_that_the_axis_itself_splits_stay_so():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params, specs = {"w": normal(0, 8, 16)}, {"w": P("data", None)}
    placed = {"w": put(mesh, params["w"], specs["w"])}
    inner = jaxfused.optim.adamw(0.1)
    shared = parallel.zero1(inner, mesh=mesh, param_specs=specs)
    new, state = jax.jit(shared.step)(placed, shared.init(placed), placed)
    expected, _ = inner.step(params, inner.init(params), {"w": params["w"] + 0})
    chex.assert_trees_all_close(new, expected, rtol=1e-5)
    for array in (new["w"], state[0].mu["w"]):
        assert array.sharding.shard_shape(array.shape) == (1, 16)


def test_messages_of_zero1():
    params = {"w": jnp.ones((2, 8))}
    shared = parallel.zero1(optax.sgd(0.1))
    with pytest.raises(ValueError, match="axis_name is 'data', but the mesh here has the axes"):
        shared.init(params)
    with pytest.raises(ValueError, match="'data' is mapped here, where each device has its own"):
        jax.vmap(lambda p: shared.init(p), axis_name="data")(params)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    given = parallel.zero1(optax.sgd(0.1), mesh=mesh, param_specs={"w": P(), "b": P()})
    with pytest.raises(ValueError, match="param_specs has 2 leaves and the parameters 1"):
        given.init(params)
