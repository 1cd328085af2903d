"""examples/multi_gpu/mesh: data, fsdp, context and tensor parallel train to the numbers of one device.

Cases of several devices run in a process of eight, because devices must exist before JAX starts.
"""

import argparse
import dataclasses
import shutil

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from benchmarks.whole import parallel_absent
from benchmarks.whole.parallel_hlo import received_bytes
from examples import optimizers, training
from examples.errors import ExampleError
from examples.lm import train as lm
from examples.multi_gpu import mesh
from examples.multi_gpu.metadata import names, with_paths
from examples.multi_gpu.rules import spec
from examples.placement import ONE_DEVICE
from examples.runs import Run
from examples.vit import train as vit
from tests.support import eight_devices
from tests.support.run_metrics import assert_same_numbers, metrics

on_eight_devices = pytest.mark.skipif(
    jax.device_count() != eight_devices.DEVICES or jax.default_backend() != "cpu",
    reason="runs in the process that test_on_eight_devices starts",
)


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.skipif(jax.device_count() == eight_devices.DEVICES, reason="this is that process")
def test_on_eight_devices():
    eight_devices.assert_passes(__file__, "exhaustive", timeout=3600)


# --- what the names of axes mean ------------------------------------------------------------------

SIZES = dict(data=2, fsdp=2, context=1, tensor=4)


@pytest.mark.parametrize(
    ("named", "shape", "wanted"),
    (
        (("embed", "mlp"), (8, 12), P("fsdp", "tensor")),
        (("embed", "mlp"), (5, 8, 12), P(None, "fsdp", "tensor")),
        (("embed", "mlp"), (7, 10), P(None, None)),
        (("mlp", "heads"), (8, 8), P("tensor", None)),
        (("layers", "kv", None), (4, 4, 4), P(None, None, None)),
        (("batch", "length"), (8, 6), P(("data", "fsdp"), None)),
        ((("data", "fsdp"), "tensor"), (8, 8), P(("data", "fsdp"), "tensor")),
        (None, (64, 128), P(None, "fsdp")),
        (None, (129, 64), P(None, "fsdp")),
        (None, (4, 4), P(None, None)),
        (None, (65536,), P(None)),
    ),
)
def test_names_say_how_an_array_is_split(named, shape, wanted):
    assert spec(named, shape, SIZES) == wanted


def test_a_name_without_a_rule_is_refused_and_rules_may_be_the_users():
    with pytest.raises(
        ExampleError, match=r"'widht' has none .*; use one of batch, .* or add 'widht'"
    ):
        spec(("widht",), (8,), SIZES)
    assert spec(("width",), (8,), SIZES, {"width": "tensor"}) == P("tensor")


def parse(text):
    parser = argparse.ArgumentParser()
    mesh.add_flags(parser)
    return parser.parse_args(["--mesh", text]).mesh


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("data", "must be sizes of the axes data, fsdp, context, tensor, such as"),
        ("data=2,model=2", "but is 'data=2,model=2'"),
        ("data=2,data=2", "but is 'data=2,data=2'"),
        ("data=0", "but is 'data=0'"),
        ("data=-2", "but is 'data=-2'"),
        ("", "but is ''"),
        ("data=-1,fsdp=-1", "must have one -1 at most"),
    ),
)
def test_a_mesh_that_is_none_is_refused(text, message, capsys):
    with pytest.raises(SystemExit):
        parse(text)
    assert message in capsys.readouterr().err


def test_a_mesh_that_does_not_fit_is_refused():
    devices = jax.device_count()
    for text in (f"data={devices + 1}", f"data=-1,tensor={devices + 1}"):
        with pytest.raises(ExampleError, match=f"there are {devices}; pass sizes whose product"):
            mesh.placement(parse(text), heads=4, tokens=8)
    assert str(mesh.placement(parse("data=1"), heads=3, tokens=7)) == "a mesh of 1 cpu"


@on_eight_devices
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("text", "model", "message"),
    (
        ("tensor=2", dict(heads=3, tokens=8), "has 2 devices and the model has 3 heads"),
        ("context=2", dict(heads=4, tokens=17), "17 tokens for context=2, in 2 parts"),
        (
            "context=2",
            dict(heads=4, tokens=6, is_causal=True),
            "6 tokens for context=2, in 4 parts; .* multiple of 4",
        ),
    ),
)
def test_a_mesh_that_does_not_fit_the_model_is_refused(text, model, message):
    with pytest.raises(ExampleError, match=message):
        mesh.placement(text, **model)


# --- the numbers of one device --------------------------------------------------------------------

MESHES = (
    "data=2",
    "fsdp=2",
    "tensor=2",
    "context=2",
    "data=2,fsdp=2,tensor=2",
    "fsdp=2,context=2,tensor=2",
)
VIT = ["--epochs", "1", "--warmup-epochs", "0", "--batch-size", "128", "--held-out", "0.8"]
VIT += ["--pool", "mean", "--unroll", "1"]
LM = [
    "--model",
    "lm-byte",
    "--length",
    "32",
    "--epochs",
    "1",
    "--warmup-epochs",
    "0",
    "--seed",
    "1",
]
LM += ["--batch-size", "8", "--epoch-rows", "16", "--samples", "0", "--held-out", "0.3"]


@pytest.fixture(scope="module", autouse=True)
def two_blocks():
    """Makes the models shallow, so that they compile soon."""
    with pytest.MonkeyPatch.context() as patch:
        for models, name in ((vit.MODELS, "vit-digits"), (lm.sizes.MODELS, "lm-byte")):
            patch.setitem(models, name, dataclasses.replace(models[name], depth=2))
        yield


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"{i} times two is {2 * i}, as all know.\n" * (10 + i))
    return folder


@pytest.fixture(scope="module")
def programs(texts):
    return {"vit": (vit.main, VIT), "lm": (lm.main, ["--data", str(texts), *LM])}


@pytest.fixture(scope="module")
def one_device(programs, tmp_path_factory):
    """Returns the metrics of two steps and an evaluation of each program on one device."""
    runs = tmp_path_factory.mktemp("runs")
    for name, (main, flags) in programs.items():
        main([*flags, "--out", str(runs / name)])
    return {name: metrics(runs / name) for name in programs}


@on_eight_devices
@pytest.mark.exhaustive
@pytest.mark.parametrize("program", ("lm", "vit"))
@pytest.mark.parametrize("flag", MESHES)
def test_a_mesh_has_the_numbers_of_one_device(programs, one_device, tmp_path, program, flag):
    main, flags = programs[program]
    main([*flags, "--mesh", flag, "--out", str(tmp_path / "run")])
    assert_same_numbers(tmp_path / "run", one_device[program])


@on_eight_devices
@pytest.mark.exhaustive
def test_experts_that_a_batch_balances_have_the_numbers_of_one_device(programs, tmp_path):
    main, flags = programs["lm"]
    flags = [*flags, "--model", "lm-moe"]
    main([*flags, "--out", str(tmp_path / "one")])
    main([*flags, "--mesh", "data=2,fsdp=2", "--out", str(tmp_path / "run")])
    assert_same_numbers(tmp_path / "run", metrics(tmp_path / "one"))


@on_eight_devices
@pytest.mark.exhaustive
def test_a_mesh_has_the_same_bits_from_run_to_run(programs, tmp_path):
    main, flags = programs["lm"]
    for name in ("first", "second"):
        main([*flags, "--mesh", "fsdp=2,context=2,tensor=2", "--out", str(tmp_path / name)])
    assert metrics(tmp_path / "first") == metrics(tmp_path / "second")


# --- what is where --------------------------------------------------------------------------------


def state_of(place, optimizer, model="lm-byte", seed=0):
    args = argparse.Namespace(
        model=model, vocabulary=264, dtype="float32", precision=None, seed=seed, length=32
    )
    graphdef, params = lm.create(args, place)
    decay = 0.1 if optimizers.OPTIMIZERS[optimizer].decay else 0.0
    make = optimizers.make(optimizer, optax.constant_schedule(1e-3), decay)
    return graphdef, dict(params=params, opt_state=place.init(make.init, params))


@on_eight_devices
@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", tuple(optimizers.OPTIMIZERS))
def test_the_state_of_an_optimizer_is_split_with_the_parameters(optimizer):
    place = mesh.OnMesh(dict(data=2, fsdp=2, tensor=2))
    _, state = state_of(place, optimizer)
    kernel = state["params"]["blocks"][1]["mlp"]["down"]["kernel"]
    assert kernel.sharding.spec == P("tensor", "fsdp")
    assert state["params"]["embed"]["embedding"].sharding.spec == P("tensor", "fsdp")
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(192, 64)}
    moments = {
        path: leaf
        for path, leaf in with_paths(state["opt_state"])
        if leaf.shape == kernel.shape and "down" in path
    }
    assert moments or optimizer == "adafactor"
    for path, moment in moments.items():
        assert moment.sharding.is_equivalent_to(kernel.sharding, 2) or "gate" in path, path


@on_eight_devices
@pytest.mark.exhaustive
def test_a_checkpoint_is_restored_with_the_same_bits_on_any_other_mesh(tmp_path):
    places = [
        mesh.OnMesh(sizes)
        for sizes in (
            dict(data=2, fsdp=4),
            dict(fsdp=4, tensor=2),
            dict(tensor=1),
            dict(fsdp=2, context=2, tensor=2),
            dict(tensor=2),
        )
    ]
    _, state = state_of(places[0], "adamw")
    run = Run.start(tmp_path / "run", {})
    run.save(1, state)
    with run.finished_writes():
        pass
    wanted = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    for step, place in enumerate([*places[1:], places[0]], 2):
        _, like = state_of(place, "adamw", seed=7)
        restored = Run.load(tmp_path / "run").restore(like)
        for mine, array, truth in zip(
            jax.tree.leaves(like), jax.tree.leaves(restored), wanted, strict=True
        ):
            assert array.sharding == mine.sharding
            np.testing.assert_array_equal(array, truth)
        later = Run.load(tmp_path / "run")
        later.save(step, restored)
        with later.finished_writes():
            pass


@on_eight_devices
@pytest.mark.exhaustive
def test_a_run_goes_on_with_fewer_devices(programs, tmp_path):
    main, flags = programs["lm"]
    flags = [*flags, "--epochs", "2", "--checkpoint-every", "1"]
    main([*flags, "--out", str(tmp_path / "one")])
    run = tmp_path / "run"
    main([*flags, "--out", str(run), "--mesh", "data=2,fsdp=2,tensor=2"])
    shutil.rmtree(run / "checkpoints" / "4")
    main(["--out", str(run), "--resume", "--mesh", "fsdp=2"])
    assert_same_numbers(run, metrics(tmp_path / "one"))


@on_eight_devices
@pytest.mark.exhaustive
def test_fsdp_divides_parameters_gradients_and_state_and_sums_no_whole_gradient():
    """By the compiled step of six layers; its activations are small."""
    peaks = {}
    for devices in (1, 2, 8):
        step = parallel_absent.compiled("lm-12m", 6, jax.devices()[:devices])
        memory = step.memory_analysis()
        peaks[devices] = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        if devices > 1:
            received = received_bytes(step.as_text(), devices)
            assert received["reduce-scatter"] > 20 * received["all-reduce"]
    # One layer is whole on each device, of which there are six.
    assert peaks[2] < 0.55 * peaks[1] and peaks[8] < (1 / 8 + 1 / 24) * peaks[1], peaks


# --- models of users ------------------------------------------------------------------------------


class OfNnx(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(
            64, 128, kernel_init=nnx.with_partitioning(init, ("embed", "mlp")), rngs=rngs
        )
        self.down = nnx.Linear(
            128, 64, kernel_init=nnx.with_partitioning(init, ("tensor", "fsdp")), rngs=rngs
        )
        self.nameless = nnx.Linear(64, 64, rngs=rngs)
        self.named = nnx.Linear(64, 64, kernel_metadata=names(None, "mlp"), rngs=rngs)

    def __call__(self, x):
        return self.named(self.nameless(self.down(jax.nn.gelu(self.up(x)))))


class OfLinen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        init = flax.linen.initializers.lecun_normal()
        logical = flax.linen.with_logical_partitioning(init, ("embed", "mlp"))
        direct = flax.linen.with_partitioning(init, ("tensor", "fsdp"))
        x = jax.nn.gelu(flax.linen.Dense(128, kernel_init=logical, name="up")(x))
        x = flax.linen.Dense(64, kernel_init=direct, name="down")(x)
        return flax.linen.Dense(64, name="nameless")(x)


def of_nnx(place):
    model = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    graphdef, params = training.create(lambda: OfNnx(nnx.Rngs(0)), model, placement=place)
    return params, lambda params, x: nnx.merge(graphdef, params)(x)


def of_linen(place):
    x = jnp.zeros((8, 64))
    params = place.parameters(lambda: OfLinen().init(jax.random.key(0), x))
    return params, OfLinen().apply


@on_eight_devices
@pytest.mark.exhaustive
@pytest.mark.parametrize("make", (of_nnx, of_linen))
def test_a_model_is_split_as_its_own_metadata_say(make):
    def trained(place):
        params, apply = make(place)
        optimizer = optimizers.make("adamw", optax.constant_schedule(1e-2), 0.1)
        state = dict(params=params, opt_state=place.init(optimizer.init, params))

        def loss_of(params, batch, key):
            return jnp.mean(jnp.square(apply(params, batch["x"]) - batch["y"]))

        step = training.make_train_step(loss_of, optimizer, seed=0, clip_norm=1.0, placement=place)
        x, y = np.asarray(jax.random.normal(jax.random.key(1), (2, 16, 64)))
        losses = []
        for number in range(3):
            state, values = step(state, dict(x=x, y=y), number)
            losses.append(values["loss"])
        return state, losses

    state, losses = trained(mesh.OnMesh(dict(data=2, fsdp=2, tensor=2)))
    one, wanted = trained(ONE_DEVICE)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    params = state["params"].get("params", state["params"])
    assert params["up"]["kernel"].sharding.spec == P("fsdp", "tensor")
    assert params["down"]["kernel"].sharding.spec == P("tensor", "fsdp")
    assert "fsdp" in params["nameless"]["kernel"].sharding.spec
    for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=1e-6)
