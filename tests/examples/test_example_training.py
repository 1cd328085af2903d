"""examples/training.py and examples/images.py: the shared code of the examples, without a model.

The "training" here is a running sum. It is exact, compiles at once, and is wrong as soon as a step, a
batch or a checkpoint is lost or repeated.
"""

import argparse
import itertools
import json
import os
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

from examples import optimizers, runs, training
from examples.errors import ExampleError, Stopped, run_command
from examples.flags import add_flags, parse_flags, saved_flags
from examples.images import Loader, epoch_indices, find_images, read_image
from examples.optimizers import OPTIMIZERS
from examples.runs import Run
from jaxfused.optim import eight_bit
from tests.support.grids import parametrize
from tests.support.loader_batches import power

STEPS, EPOCH_STEPS = 12, 4


def flags(**changed):
    values = dict(
        epochs=STEPS // EPOCH_STEPS,
        batch_size=2,
        workers=0,
        evaluate_every=1,
        checkpoint_every=1,
    )
    return argparse.Namespace(**{**values, **changed})


def initial():
    # Large enough that a checkpoint written in the background would see donated buffers.
    return dict(params={"total": jnp.zeros((512, 512))}, opt_state=jnp.int32(0))


def make_batch(step):
    return dict(value=np.float32(step + 1))


@jax.jit
def add(state, batch, step):
    total = state["params"]["total"] * 1.5 + batch["value"]
    state = dict(params={"total": total}, opt_state=state["opt_state"] + 1)
    return state, dict(loss=total[0, 0] + step)


donating_add = jax.jit(add, donate_argnums=0)


def evaluate(state):
    return dict(test_total=float(state["params"]["total"][0, 0]))


def fit(run, *, step=donating_add, make_batch=make_batch, **changed):
    return training.fit(
        run,
        initial(),
        step,
        make_batch,
        args=flags(**changed),
        epoch_steps=EPOCH_STEPS,
        evaluate=evaluate,
    )


def expected():
    total = 0.0
    for step in range(STEPS):
        total = total * 1.5 + step + 1
    return total


# --- loop and checkpoints -------------------------------------------------------------------------


def test_a_run_leaves_its_result_metrics_and_newest_checkpoints(tmp_path):
    run = Run.start(tmp_path / "run", dict(classes=["a"]))
    state, result = fit(run)
    assert state["params"]["total"][3, 5] == expected()
    assert result["test_total"] == expected() and result["steps"] == STEPS
    assert json.loads((tmp_path / "run/metrics.json").read_text()) == result
    assert [r["step"] for r in run.records() if "loss" in r] == list(range(1, STEPS + 1))
    assert [r["step"] for r in run.records() if "test_total" in r] == [4, 8, 12]
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["12", "8"]


def test_checkpoints_hold_the_state_of_their_step_although_later_steps_donate_it(tmp_path):
    run = Run.start(tmp_path, {})
    fit(run)
    before = Run.load(tmp_path / "checkpoints/8").restore(initial())
    total = 0.0
    for step in range(8):
        total = total * 1.5 + step + 1
    np.testing.assert_array_equal(before["params"]["total"], np.full((512, 512), total))
    assert before["opt_state"] == 8


@pytest.mark.parametrize("stop_after", [1, 6, 8])
def test_resume_equals_uninterrupted(tmp_path, stop_after):
    whole = Run.start(tmp_path / "whole", {})
    fit(whole)

    def interrupted(step):
        if step == stop_after - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return make_batch(step)

    with pytest.raises(Stopped, match=f"Step {stop_after} of 12 is saved; .*--resume"):
        fit(Run.start(tmp_path / "parts", {}), make_batch=interrupted)
    resumed = Run.load(tmp_path / "parts")
    assert resumed.latest_step == stop_after
    state, _ = fit(resumed)
    assert state["params"]["total"][0, 0] == expected()
    assert resumed.records() == whole.records()


def test_resume_after_a_crash_repeats_the_lost_steps_once(tmp_path):
    whole = Run.start(tmp_path / "whole", {})
    fit(whole)

    def dies(state, batch, step):
        if step == 7:
            raise RuntimeError("as if killed")
        return donating_add(state, batch, step)

    with pytest.raises(RuntimeError):
        fit(Run.start(tmp_path / "parts", {}), step=dies)
    metrics = tmp_path / "parts/metrics.jsonl"
    assert [r["step"] for r in Run.load(tmp_path / "parts").records()][-1] == 6
    metrics.write_text(metrics.read_text() + '{"step": 7, "lo')
    resumed = Run.load(tmp_path / "parts")
    assert resumed.latest_step == 4
    fit(resumed)
    assert resumed.records() == whole.records()


def test_unreadable_data_saves_the_steps_before_it(tmp_path):
    def broken(step):
        if step == 6:
            raise ExampleError("every image must be readable, but x.png is not.")
        return make_batch(step)

    with pytest.raises(ExampleError, match=r"x\.png is not\. Step 6 of 12 is saved"):
        fit(Run.start(tmp_path, {}), make_batch=broken)
    assert fit(Run.load(tmp_path))[0]["params"]["total"][0, 0] == expected()


def test_a_loss_that_is_not_finite_stops_the_run_and_is_never_saved(tmp_path):
    def poisoned(step):
        return dict(value=np.float32(np.nan if step == 5 else 1))

    with pytest.raises(ExampleError, match=r"is nan at step 6; .*up to step 4 are good"):
        fit(Run.start(tmp_path, {}), make_batch=poisoned)
    assert Run.load(tmp_path).latest_step == 4


# --- errors of the run directory ------------------------------------------------------------------


def test_a_run_is_never_overwritten(tmp_path):
    Run.start(tmp_path, dict(classes=["a"]))
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(ExampleError, match=r"holds a run; pass --resume to continue it"):
        Run.start(tmp_path, dict(classes=["b"]))
    assert (tmp_path / "config.json").read_text() == before


def test_a_directory_of_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ExampleError, match=r"holds other files; pass another --out"):
        Run.start(tmp_path, {})


def test_an_out_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ExampleError, match=r"must be writable, but .*file/run is not \(Not a dir"):
        Run.start(tmp_path / "file/run", {})


def test_nothing_to_load_is_named(tmp_path):
    with pytest.raises(ExampleError, match=r"config\.json cannot be read"):
        Run.load(tmp_path / "none")
    with pytest.raises(ExampleError, match="has none yet"):
        Run.start(tmp_path / "new", {}).restore(initial())


def test_a_checkpoint_of_other_arrays_is_refused_by_the_name_of_the_first(tmp_path):
    run = Run.start(tmp_path, {})
    fit(run)
    other = dict(params={"total": jnp.zeros((3,))}, opt_state=jnp.int32(0))
    with pytest.raises(
        ExampleError, match=r"float32\[512, 512\] for 'total' where the model has float32\[3\]"
    ):
        run.restore(other)
    renamed = dict(params={"sum": jnp.zeros((512, 512))}, opt_state=jnp.int32(0))
    with pytest.raises(ExampleError, match=r"has none for 'sum' where"):
        run.restore(renamed)


def test_part_of_a_checkpoint_can_be_restored(tmp_path):
    run = Run.start(tmp_path, {})
    fit(run)
    restored = Run.load(tmp_path).restore(dict(params=initial()["params"]))
    assert list(restored) == ["params"]
    assert restored["params"]["total"][0, 0] == expected()


def test_a_damaged_checkpoint_is_named(tmp_path):
    fit(Run.start(tmp_path, {}))
    for path in (tmp_path / "checkpoints/12/params").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(ExampleError, match=r"must be readable, but .*checkpoints/12 is not"):
        Run.load(tmp_path).restore(initial())


# --- flags and commands ---------------------------------------------------------------------------


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_flags(parser, out="runs/x")
    defaults = dict(
        epochs=3,
        batch_size=2,
        optimizer="adamw",
        learning_rate=0.1,
        warmup_epochs=1.0,
        weight_decay=0.0,
    )
    parser.set_defaults(**defaults)
    return parse_flags(parser, argv)


def test_resume_takes_the_flags_of_the_run_and_refuses_others(tmp_path):
    out = str(tmp_path / "run")
    args = parse("--out", out, "--seed", "7", "--workers", "3")
    Run.start(args.out, dict(flags=saved_flags(args)))
    resumed = parse("--out", out, "--resume", "--workers", "1")
    assert resumed.seed == 7 and resumed.workers == 1 and resumed.dtype == args.dtype
    with pytest.raises(ExampleError, match=r"started with --seed 7 and now got --seed 8"):
        parse("--out", out, "--resume", "--seed", "8")


@pytest.mark.parametrize(
    ("flag", "value", "rule"),
    [
        ("--epochs", "0", "an integer from 1 up"),
        ("--batch-size", "two", "an integer from 1 up"),
        ("--learning-rate", "0", "a finite number above 0"),
        ("--learning-rate", "nan", "a finite number above 0"),
        ("--weight-decay", "-1", "a finite number from 0 up"),
    ],
)
def test_impossible_flags_are_refused(capsys, flag, value, rule):
    with pytest.raises(SystemExit) as exit_:
        parse(flag, value)
    assert exit_.value.code == 2
    assert f"argument {flag}: must be {rule}, but is '{value}'" in capsys.readouterr().err


def test_flags_that_do_not_fit_the_data_or_each_other_are_refused():
    with pytest.raises(ExampleError, match="--batch-size is 9 and there are 8 training images"):
        training.steps_per_epoch(parse("--batch-size", "9"), 8)
    with pytest.raises(ExampleError, match="--warmup-epochs is 3 and --epochs is 3"):
        training.steps_per_epoch(parse("--warmup-epochs", "3"), 8)
    assert training.steps_per_epoch(parse("--batch-size", "3"), 8) == 2


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (
            ExampleError("a must be b, but is c; pass d."),
            2,
            "error: a must be b, but is c; pass d.\n",
        ),
        (Stopped("Stopped."), 130, "Stopped.\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_commands_end_with_a_sentence_and_a_code(capsys, raised, code, said):
    def main():
        raise raised

    with pytest.raises(SystemExit) as exit_:
        run_command(main)
    assert exit_.value.code == code
    assert capsys.readouterr().err == said


@parametrize("name", [n for n, entry in OPTIMIZERS.items() if entry.decay], quick=(0,))
def test_weight_decay_reaches_kernels_only(name):
    args = argparse.Namespace(
        optimizer=name,
        learning_rate=0.1,
        warmup_epochs=0.0,
        epochs=1,
        clip_norm=1.0,
        weight_decay=0.5,
    )
    optimizer = training.make_optimizer(args, epoch_steps=10)
    params = {
        "positions": jnp.ones((1, 4, 2)),
        "blocks": {"norm": {"scale": jnp.ones((3, 2))}, "mlp": {"kernel": jnp.ones((3, 2, 2))}},
        "head": {"kernel": jnp.ones((2, 5)), "bias": jnp.ones(5)},
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zeros, jax.jit(optimizer.init)(params), params)
    moved = jax.tree.map(lambda u: bool(jnp.any(u != 0)), updates)
    assert moved == {
        "positions": False,
        "blocks": {"norm": {"scale": False}, "mlp": {"kernel": True}},
        "head": {"kernel": name != "muon", "bias": False},  # Muon decays its matrices.
    }


def test_the_learning_rate_warms_up_and_falls_to_zero():
    args = argparse.Namespace(
        optimizer="adamw",
        learning_rate=0.1,
        warmup_epochs=2.0,
        epochs=10,
        clip_norm=1.0,
        weight_decay=1.0,
    )
    optimizer = training.make_optimizer(args, epoch_steps=5)
    params = {"kernel": jnp.ones(())}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    rates = []
    for _ in range(51):
        updates, state = update({"kernel": jnp.zeros(())}, state, params)
        rates.append(-float(updates["kernel"]))  # without a gradient, the update is rate * decay
    assert rates[0] == 0 and np.argmax(rates) == 10
    np.testing.assert_allclose(rates[10], 0.1, rtol=1e-6)
    np.testing.assert_allclose(rates[30], 0.05, rtol=1e-5)
    np.testing.assert_allclose(rates[50], 0, atol=1e-9)


def test_a_step_clips_the_gradients_and_reports_their_norm():
    args = argparse.Namespace(
        optimizer="adamw",
        learning_rate=0.1,
        warmup_epochs=0.0,
        epochs=1,
        clip_norm=1.0,
        weight_decay=0.0,
    )
    optimizer = training.make_optimizer(args, epoch_steps=10)
    step = training.make_train_step(
        lambda params, batch, key: 100 * params["kernel"].sum(), optimizer, seed=0, clip_norm=2.0
    )
    params = {"kernel": jnp.ones(4)}
    state, metrics = step(dict(params=params, opt_state=optimizer.init(params)), {}, 0)
    assert metrics["gradient_norm"] == 200
    (mean,) = optax.tree.get(state["opt_state"], "mu").values()
    np.testing.assert_allclose(mean, 0.1 * 2.0 / np.sqrt(4), rtol=1e-6)


@parametrize("name", list(OPTIMIZERS), quick=(0, 6))
def test_a_checkpoint_of_a_stack_is_read_by_layers_of_their_own(tmp_path, name):
    """Moments of every kind: in 8 bits, in float32 for small leaves, factored, placeholders."""
    rng = np.random.default_rng(0)
    optimizer = training.make_optimizer(
        argparse.Namespace(
            **dict(optimizer=name, learning_rate=0.1, weight_decay=0.0, warmup_epochs=0.0),
            **dict(epochs=1, clip_norm=1.0),
        ),
        epoch_steps=10,
    )

    def random(like):
        if jnp.issubdtype(like.dtype, jnp.floating):
            return rng.uniform(0.1, 1, like.shape).astype(like.dtype)
        return rng.integers(0, 100, like.shape).astype(like.dtype)

    def state_of(blocks):
        params = {"blocks": blocks, "head": {"kernel": jnp.ones((128, 256))}}
        return dict(params=params, opt_state=optimizer.init(params))

    layer = {"up": {"kernel": jnp.ones((128, 192)), "bias": jnp.ones(2048)}, "scale": jnp.ones(3)}
    old = state_of(jax.tree.map(lambda p: jnp.stack([p] * 3), layer))
    old = jax.tree.map(random, old)
    run = Run.start(tmp_path / "run", {})
    with run.finished_writes():
        run.save(1, jax.tree.map(jnp.asarray, old))
    apart = state_of(dict.fromkeys(range(3), layer))
    new = run.restore(apart)

    def is_moment(tree):
        return isinstance(tree, eight_bit.EightBitMoment)

    def values(state):
        decoded = jax.tree.map(eight_bit.decode, state, is_leaf=is_moment)
        return {name: np.asarray(a) for name, a in runs._flat(decoded).items()}

    read, saved = values(new), values(old)
    assert read.keys() == values(apart).keys()
    for path, array in read.items():
        number = re.search(r"\bblocks\.(\d)\.", path)
        stack = saved[path if number is None else path.replace(number[0], "blocks.")]
        wanted = stack if number is None or stack.shape == array.shape else stack[int(number[1])]
        np.testing.assert_array_equal(array, wanted, err_msg=path)
    buffers = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(new) if a.size]
    assert len(set(buffers)) == len(buffers)  # Each buffer is donated to the next step.


def test_a_stack_of_another_model_is_refused(tmp_path):
    run = Run.start(tmp_path / "run", {})
    with run.finished_writes():
        run.save(1, dict(params={"blocks": {"kernel": jnp.ones((3, 2, 2))}}))
    for blocks, size in ((2, 2), (4, 2), (3, 1)):
        like = {"blocks": {i: {"kernel": jnp.ones((size, 2))} for i in range(blocks)}}
        with pytest.raises(ExampleError, match="must hold the arrays of the model"):
            run.restore(dict(params=like))


def small_model():
    """Parameters that optimizers treat differently: a stack, a convolution, 8-bit moments."""
    return {
        "blocks": {"kernel": jnp.full((2, 16, 8), 0.5), "bias": jnp.zeros((2, 8))},
        "conv": {"kernel": jnp.full((3, 3, 2, 4), 0.5)},
        "embed": {"kernel": jnp.full((64, 128), 0.5)},
        "norm": {"scale": jnp.ones(8)},
    }


def train_small_model(run, args, *, stop_after=None):
    optimizer = training.make_optimizer(args, EPOCH_STEPS)

    def loss_of(params, batch, key):
        del key
        return sum(jnp.mean((p - batch["value"]) ** 2) for p in jax.tree.leaves(params))

    def make_batch(step):
        if stop_after is not None and step == stop_after - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return dict(value=np.float32(2))

    params = small_model()
    return training.fit(
        run,
        dict(params=params, opt_state=jax.jit(optimizer.init)(params)),
        training.make_train_step(loss_of, optimizer, seed=0, clip_norm=args.clip_norm),
        make_batch,
        args=args,
        epoch_steps=EPOCH_STEPS,
        evaluate=lambda state: dict(test_total=float(optax.tree.norm(state["params"]))),
    )


def flags_of(name, **changed):
    values = dict(optimizer=name, learning_rate=0.05, warmup_epochs=0.0, clip_norm=1.0)
    values |= dict(weight_decay=0.1 if OPTIMIZERS[name].decay else 0.0)
    return flags(**{**values, **changed})


@parametrize("name", [*OPTIMIZERS], quick=())
def test_every_optimizer_continues_from_its_checkpoint(tmp_path, name):
    args = flags_of(name)
    whole = Run.start(tmp_path / "whole", {})
    train_small_model(whole, args)
    losses = [r["loss"] for r in whole.records() if "loss" in r]
    assert losses[-1] < losses[0]
    with pytest.raises(Stopped, match="Step 6 of 12"):
        train_small_model(Run.start(tmp_path / "parts", {}), args, stop_after=6)
    resumed = Run.load(tmp_path / "parts")
    train_small_model(resumed, args)
    assert resumed.records() == whole.records()


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    train_small_model(Run.start(tmp_path, {}), flags_of("adamw"))
    with pytest.raises(
        ExampleError,
        match=r"hold the arrays of the optimizer, but .*; pass the --optimizer that the run was",
    ):
        train_small_model(Run.load(tmp_path), flags_of("lion"))


def test_a_run_keeps_its_optimizer(tmp_path):
    out = str(tmp_path / "run")
    args = parse("--out", out, "--optimizer", "lion")
    Run.start(args.out, dict(flags=saved_flags(args)))
    resumed = parse("--out", out, "--resume")
    assert (resumed.optimizer, resumed.learning_rate) == ("lion", args.learning_rate)
    with pytest.raises(ExampleError, match="--optimizer lion and now got --optimizer muon"):
        parse("--out", out, "--resume", "--optimizer", "muon")


def test_a_run_from_before_there_was_a_choice_goes_on_with_adamw(tmp_path):
    out = str(tmp_path / "run")
    args = parse("--out", out)
    saved = saved_flags(args)
    del saved["optimizer"]
    Run.start(args.out, dict(flags=saved))
    assert parse("--out", out, "--resume").optimizer == "adamw"
    with pytest.raises(ExampleError, match="--optimizer adamw and now got --optimizer lion"):
        parse("--out", out, "--resume", "--optimizer", "lion")


def test_defaults_are_the_optimizers_own():
    plain, sgd = parse(), parse("--optimizer", "sgd")
    assert sgd.learning_rate == OPTIMIZERS["sgd"].rate * plain.learning_rate
    assert sgd.weight_decay == 0
    assert parse("--optimizer", "sgd", "--learning-rate", "0.3").learning_rate == 0.3
    with pytest.raises(ExampleError, match=r"sgd has no weight decay, but --weight-decay is 0\.1"):
        optimizers.make("sgd", optax.constant_schedule(1.0), 0.1)


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (0.02, r"adamw takes \S+ of the 1e\+05 ms of a step"),
        (0, "a step of adamw ta"),
        (1e9, "a step of adamw ta"),
    ],
)
def test_the_optimizers_share_is_a_sentence(rate, said):
    optimizer = training.make_optimizer(flags_of("adamw"), EPOCH_STEPS)
    params = small_model()
    state = dict(params=params, opt_state=jax.jit(optimizer.init)(params))
    share = training.optimizer_share(
        optimizer, state, args=flags_of("adamw"), images_per_second=rate
    )
    assert re.match(said, share)


def test_the_curve_is_a_picture(tmp_path):
    records = [dict(step=s, loss=1 / s) for s in range(1, 200)]
    records += [dict(step=s, test_accuracy=s / 200) for s in (100, 199)]
    training.save_curve(
        tmp_path / "curve.png", records, metric="test_accuracy", label="held-out accuracy"
    )
    with Image.open(tmp_path / "curve.png") as image:
        assert image.size == (1200, 480)


# --- images and batches ---------------------------------------------------------------------------


def test_an_epoch_sees_every_image_once_and_each_epoch_another_order():
    def epoch(number, seed):
        steps = range(4 * number, 4 * number + 4)
        return np.concatenate(
            [epoch_indices(s, size=12, batch_size=3, seed=seed) for s in steps]
        ).tolist()

    assert sorted(epoch(0, 0)) == list(range(12))
    orders = [epoch(number, seed) for number, seed in itertools.product((0, 1), (0, 1))]
    assert len({tuple(order) for order in orders}) == 4
    assert epoch(1, 1) == orders[3]


def test_workers_make_the_batches_in_order_and_elsewhere():
    with Loader(power, 2) as loader:
        abandoned = loader.batches(range(100, 200))
        next(abandoned)
        abandoned.close()
        made = list(loader.batches(range(8)))
    assert [b["value"][0] for b in made] == [s**2 for s in range(8)]
    assert os.getpid() not in {int(b["worker"]) for b in made}


@pytest.mark.parametrize(
    ("bad", "message"), [(9, r"nine is refused"), (99, r"but one was killed.*fewer --workers")]
)
def test_errors_of_workers_arrive(bad, message):
    with Loader(power, 1) as loader, pytest.raises(ExampleError, match=message):
        list(loader.batches([1, bad, 2]))


def test_a_broken_image_is_named(tmp_path):
    path = tmp_path / "broken.png"
    Image.new("RGB", (64, 64), "red").save(path)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ExampleError, match=r"but .*broken\.png is not \(.*; replace or delete it"):
        read_image(path, "RGB")
    path.write_text("no image")
    with pytest.raises(ExampleError, match=r"broken\.png is not"):
        read_image(path, "RGB")
    with pytest.raises(ExampleError, match=r"gone\.png is not \(.*No such file"):
        read_image(tmp_path / "gone.png", "RGB")


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_32_bits_are_refused(tmp_path, dtype):
    path = tmp_path / "a.tiff"
    Image.fromarray(np.full((2, 3), 1, dtype)).save(path)
    with pytest.raises(ExampleError, match=r"a\.tiff is not \(its pixels have 32 bits"):
        read_image(path, "RGB")


def test_images_come_upright_in_8_bits_and_sorted(tmp_path):
    turned = Image.new("L", (4, 2))
    exif = turned.getexif()
    exif[0x0112] = 6  # orientation: rotate by 90 degrees
    turned.save(tmp_path / "b.jpg", exif=exif)
    Image.fromarray(np.array([[0, 32768, 65535]], np.uint16)).save(tmp_path / "a.png")
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".a.png").touch()
    assert [p.name for p in find_images(tmp_path)] == ["a.png", "b.jpg"]
    assert read_image(tmp_path / "b.jpg", "RGB").size == (2, 4)
    assert np.asarray(read_image(tmp_path / "a.png", "L")).tolist() == [[0, 128, 255]]
