"""Tables of measured choices, their use by calls, and the tuner with a fake bench."""

import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

import jaxfused
from jaxfused import __main__, dispatch
from jaxfused.explanation import basis, traced
from jaxfused.ops.conv import conv as conv_operator
from jaxfused.ops.conv import dense_conv_regimes
from jaxfused.ops.norm import layer_norm
from jaxfused.runtime import lowering, runner, table
from jaxfused.tuning import bench, command, tuner
from jaxfused.tuning.bench import Candidate
from pallas_kernels.gemm.matmul import MatmulConfig
from tests.runtime.test_runner import H200, KERNELS
from tests.support.choices import chosen
from tests.support.grids import parametrize

USER_PATH = table.user_path
DEVICE = dispatch.Device("gpu", "NVIDIA Test 1g", (9, 0), 132)
BF16 = jnp.bfloat16


@pytest.fixture
def users_folder(monkeypatch, tmp_path):
    """Makes a user's folder without a file."""
    monkeypatch.setattr(table, "user_path", lambda device: tmp_path / table.file_name(device))
    table.load.cache_clear()
    yield tmp_path
    table.load.cache_clear()


@pytest.fixture
def device(users_folder):
    """Assumes a GPU without a shipped table, and a user's folder without a file."""
    with dispatch.assume(DEVICE):
        yield DEVICE


def array(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def norm(rows, features=768, epsilon=1e-6):
    options = layer_norm.NormOptions("layer_norm", True, epsilon, 0.0, None, None)
    operands = (array(rows, features), None, array(features), array(features), None)
    return layer_norm._Forward(options, save_statistics=False), operands


ROW = runner.configs(norm(64)[0], "pallas", DEVICE, norm(64)[1])[0]


def ranking_of(kernel, operands, *candidates):
    return {
        table.Key.of(kernel, operands): tuple(
            table.Ranked(name, table.config_text(config), 10.0 + i)
            for i, (name, config) in enumerate(candidates)
        )
    }


def save(device, entries):
    """Writes the user's file, as a tuner in another process would."""
    table.write(table.user_path(device), device, entries)
    table.load.cache_clear()


# --- files ----------------------------------------------------------------------------------------


def test_entries_of_every_kernel_survive_a_file(device):
    entries = {}
    for kernel, operands in KERNELS:
        configs = [
            (name, config)
            for name in ("pallas", "cuda", "xla")
            for config in runner.configs(kernel, name, device, operands)
        ]
        assert len({table.config_text(config) for _, config in configs[:-1]}) >= len(configs) - 2
        entries |= ranking_of(kernel, operands, *configs)
    save(device, entries)
    measured = table.load(device)
    assert measured.entries == entries
    assert measured.digest == table.Table(entries).digest
    for kernel, operands in KERNELS:
        key = table.Key.of(kernel, operands)
        assert measured.find(kernel, operands) == (entries[key], True, key.operands)
    # One line for each entry, one for the header and one for the end.
    lines = table.user_path(device).read_text().splitlines()
    assert len(lines) == len(entries) + 2


def test_the_users_entries_come_before_the_shipped_ones(device, monkeypatch, tmp_path):
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped")
    table.write(
        table.SHIPPED / table.file_name(device),
        device,
        ranking_of(*norm(64), ("cuda", None)) | ranking_of(*norm(128), ("cuda", None)),
    )
    save(device, ranking_of(*norm(64), ("xla", None)))
    found = [table.load(device).find(*norm(rows)).ranking[0].implementation for rows in (64, 128)]
    assert found == ["xla", "cuda"]
    assert [file.entries for file in table.load(device).files] == [2, 1]


SHIPPED = sorted(table.SHIPPED.glob("*"))


def owner_of(path):
    content = json.loads(path.read_text())
    capability = tuple(content["compute_capability"])
    return dispatch.Device("gpu", content["device"], capability, content["multiprocessors"])


def test_entries_from_before_query_offset_are_found(tmp_path):
    """Attention's stages had one operand less: no `query_offset` after the lengths of keys."""
    shipped = table.SHIPPED / "nvidia-h200-132.json"
    content = json.loads(shipped.read_text())
    for entry in content["entries"]:
        if entry["kernel"].startswith("dot_product_attention"):
            place = 7 if entry["kernel"].endswith("forward") else 11
            assert entry["operands"].pop(place) is None
    path = tmp_path / "old.json"
    path.write_text(json.dumps(content))
    assert table.read(path, H200) == table.read(shipped, H200)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_table_is_of_this_version_and_named_by_its_device(path):
    assert path.name == table.file_name(owner_of(path))
    assert table.read(path, owner_of(path))


FLOATS = {"< 0.0": -1.0, "0.0": 0.0, "> 0.0": 1.0}


def rebuilt(stage, statics):
    """Returns a stage of the class of `stage` with the statics of an entry.

    Raises TypeError if the class lacks one of the fields, or needs another one.
    """
    values = {}
    for name, value in statics.items():
        like = getattr(stage, name, None)
        if dataclasses.is_dataclass(like):
            value = rebuilt(like, value)
        elif isinstance(like, np.dtype):
            value = np.dtype(value)
        elif isinstance(value, str):
            value = FLOATS.get(value, value)
        values[name] = tuple(value) if isinstance(value, list) else value
    return type(stage)(**values)


def stage_of(key, operands):
    """Returns the stage of today's operators that matches an entry, or None if no call can match it."""
    statics = json.loads(key.statics)
    # The name of a layer, and the operator of a gradient of weights, are fields.
    named = (statics.get("name"), f"{statics.get('op')} weight gradient")
    for like, _ in KERNELS:
        if key.kernel in (like.name, *named):
            try:
                stage = rebuilt(like, statics)
            except TypeError:
                continue
            if table.Key.of(stage, operands) == key:
                return stage
    return None


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_each_shipped_entry_is_of_a_stage_of_today_and_its_configs_are_legal(path):
    """An entry that no call can match would silently never be used."""
    device = owner_of(path)
    for key, ranking in table.read(path, device).items():
        operands = [None if o is None else array(*o[1], dtype=o[0]) for o in key.operands]
        stage = stage_of(key, operands)
        assert stage is not None, f"no call can match {key}"
        letters = stage.axes(*operands).operands
        for names, operand in zip(letters, operands, strict=True):
            assert operand is None or len(names) == operand.ndim
        reasons = stage.why_not(device, *operands)
        for ranked in ranking:
            # The test does not need a built CUDA library.
            assert ranked.implementation == "cuda" or reasons[ranked.implementation] is None
            configs = runner.configs(stage, ranked.implementation, device, operands)
            assert ranked.config in (None, *map(table.config_text, configs)), (key, ranked)


def step_of_vit_b16():
    """Returns a training step whose stages the shipped table has, and its arguments."""
    from benchmarks.whole import end_to_end_jax

    workload = end_to_end_jax.workloads()["vit-b16"]
    program = workload.programs["ours"]()
    of_key = functools.partial(jax.eval_shape, key=jax.eval_shape(lambda: jax.random.key(0)))
    return program.step, of_key(program.init), of_key(workload.make_batch)


def projection_of_vit_b16_on_eight_devices():
    """Returns the gradient of the step's projection, which splits weights on several devices."""
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))

    def operand(*shape, dtype, axis=None):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def loss(x, w, bias):
        q, k, v = jaxfused.qkv_projection(x, w, bias, heads=12)
        return jnp.sum(q.astype(jnp.float32) + k.astype(jnp.float32) + v.astype(jnp.float32))

    return (
        jax.grad(loss, (0, 1, 2)),
        operand(8 * 256, 197, 768, dtype=BF16, axis="data"),
        operand(768, 2304, dtype=jnp.float32),
        operand(2304, dtype=jnp.float32),
    )


def layers_of_vit_b16_with_their_own_biases():
    """Returns the gradient of layers that each add their own bias, as in many models.

    The step did so when the table was measured; since then its norms add most biases.
    """

    def loss(delta, stream, scale, bias, w1, b1, w2, b2, patches, w, b):
        embedded = jaxfused.linear(patches, w, b)
        y, stream = jaxfused.layer_norm(delta, scale, bias, residual=stream)
        y = jaxfused.mlp(y, w1, b1, w2, b2, activation="gelu_erf", save="hidden")
        token, _ = jaxfused.layer_norm(y[:, 0], scale, bias, residual=stream[:, 0])
        return sum(jnp.sum(a.astype(jnp.float32)) for a in (embedded, y, token))

    tokens, wide = (256, 197, 768), jnp.float32
    return (
        jax.grad(loss, tuple(range(11))),
        *(array(*tokens, dtype=BF16) for _ in range(2)),
        *(array(768, dtype=wide) for _ in range(2)),
        *(array(*shape, dtype=wide) for shape in ((768, 3072), (3072,), (3072, 768), (768,))),
        array(256, 196, 768, dtype=BF16),
        *(array(*shape, dtype=wide) for shape in ((768, 768), (768,))),
    )


@pytest.mark.usefixtures("users_folder")
def test_a_step_of_vit_b16_finds_the_shipped_entries():
    with dispatch.assume(H200):
        calls = [
            choice
            for program in (
                step_of_vit_b16(),
                projection_of_vit_b16_on_eight_devices(),
                layers_of_vit_b16_with_their_own_biases(),
            )
            for choice, _ in traced(*program)[0]
        ]
    found = {table.Key.of(c.kernel, c.operands) for c in calls if c.source == "table"}
    assert found <= set(table.load(H200).entries)
    assert len(found) >= 15


def test_the_users_file_is_in_the_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert USER_PATH(DEVICE) == Path("/cache/jaxfused/tuning/nvidia-test-1g-132.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert USER_PATH(DEVICE).parent == Path.home() / ".cache/jaxfused/tuning"


def corrupted(name, value):
    def change(content):
        return json.dumps(json.loads(content) | {name: value})

    return change


def entry(**fields):
    """Returns an entry that is right except for the given fields."""
    return [dict(kernel="k", statics={}, operands=[["float32", [2]]], ranking=[]) | fields]


REFUSALS = {
    "it cannot be read as JSON": lambda content: content[:-5],
    "it is no table of measured choices": lambda content: "[1, 2]",
    "it has format 7, and this version reads 2": corrupted("format", 7),
    "it was written by jaxfused 0.0.9": corrupted("jaxfused", "0.0.9"),
    "its device is 'NVIDIA Other'": corrupted("device", "NVIDIA Other"),
    r"its compute capability is \[8, 0\]": corrupted("compute_capability", [8, 0]),
    "its multiprocessors is 7": corrupted("multiprocessors", 7),
    "it has no list of entries": corrupted("entries", {}),
    "entry 0 is not a kernel": corrupted("entries", [3]),
    r"entry 0 .*'2' is no int": corrupted("entries", entry(operands=[["float32", ["2"]]])),
    r"entry 0 .*'fast' is no list": corrupted("entries", entry(ranking="fast")),
    r"entry 0 .*7 is no dict": corrupted("entries", entry(ranking=[["cuda", 7, 1.0]])),
    r"entry 0 .*KeyError": corrupted("entries", [{"kernel": "k"}]),
    r"entry 0 .*IndexError": corrupted("entries", entry(operands=[[]])),
    r"entry 0 .*OverflowError": corrupted("entries", entry(ranking=[["cuda", None, 10**400]])),
    r"it cannot be read as JSON \(maximum recursion": lambda text: "[" * 100_000,
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_a_file_that_is_not_what_it_should_be_is_refused_and_kept(device, sentence):
    save(device, ranking_of(*norm(64), ("xla", None)))
    path = table.user_path(device)
    path.write_text(REFUSALS[sentence](path.read_text()))
    before = path.read_text()
    with pytest.warns(UserWarning, match=f"is not used, because {sentence}"):
        measured = table.load(device)
    assert not measured.entries
    assert re.search(sentence, str(jaxfused.explain(jaxfused.layer_norm, array(64, 768))))
    assert any(re.search(sentence, line) for line in __main__.measured_choices(device))
    with pytest.raises(table.Refused, match=sentence):
        table.write(path, device, {})
    with pytest.raises(table.Refused, match="delete it, or move it away"):
        tune(jaxfused.layer_norm, array(64, 768))
    assert path.read_text() == before


def test_writing_adds_to_what_was_saved_and_leaves_it_whole_if_it_fails(device, monkeypatch):
    save(device, ranking_of(*norm(64), ("xla", None)))
    save(device, ranking_of(*norm(128), ("cuda", None)))
    path = table.user_path(device)
    before = path.read_text()
    assert len(table.load(device).entries) == 2

    def fail(*args):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        table.write(path, device, ranking_of(*norm(256), ("cuda", None)))
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


def test_processes_that_write_at_once_lose_nothing(device, tmp_path):
    path = tmp_path / "table.json"
    program = f"""
import sys
from pathlib import Path
from jaxfused import dispatch
from jaxfused.runtime import table
device = {device!r}
for i in range(10):
    key = table.Key("k", "{{}}", (("float32", (int(sys.argv[1]), i)),))
    table.write(Path({str(path)!r}), device, {{key: (table.Ranked("xla", None, 1.0),)}})
"""
    program = program.replace("Device(", "dispatch.Device(")
    writers = [subprocess.Popen([sys.executable, "-c", program, str(i)]) for i in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert len(table.read(path, device)) == 30


@pytest.mark.parametrize("home", [None, "of another user"])
def test_without_a_home_that_can_be_read_there_is_no_table(device, monkeypatch, home):
    """No home folder can be read, like in a container with an unknown user id."""
    monkeypatch.setattr(table, "user_path", USER_PATH)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(table, "SHIPPED", Path("nowhere"))

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    if home is None:
        monkeypatch.setattr(Path, "home", no_home)
    else:
        monkeypatch.setattr(Path, "exists", refuse)
        monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    table.load.cache_clear()
    assert not table.load(device).entries
    jax.eval_shape(jaxfused.layer_norm, array(64, 768))
    assert __main__.measured_choices(device)
    with pytest.raises(table.Refused, match="XDG_CACHE_HOME"):
        tune(jaxfused.layer_norm, array(64, 768))


def test_what_cannot_be_written_is_said_before_and_reported_after_all(
    device, tmp_path, monkeypatch
):
    (tmp_path / "a file").write_text("")
    with pytest.raises(table.Refused, match=r"cannot be written .*name another file"):
        tune(jaxfused.layer_norm, array(64, 768), path=tmp_path / "a file" / "table.json")

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match=r"could not be written .*No space"):
        report = tune(jaxfused.layer_norm, array(64, 768), path=tmp_path / "table.json")
    assert report.path is None and report.stages


# --- digest ---------------------------------------------------------------------------------------


def test_the_digest_is_that_of_the_choices(device):
    one, two = (
        ranking_of(*norm(rows), ("pallas", MatmulConfig()), ("xla", None)) for rows in (64, 128)
    )
    digest = table.Table(one | two).digest
    assert table.Table(two | one).digest == digest
    slower = {key: tuple(r._replace(microseconds=99.0) for r in v) for key, v in one.items()}
    assert table.Table(slower | two) == table.Table(one | two)
    turned = {key: ranking[::-1] for key, ranking in one.items()}
    other_config = ranking_of(*norm(64), ("pallas", MatmulConfig(stages=3)), ("xla", None))
    for different in (one, turned | two, other_config | two):
        assert table.Table(different).digest != digest


def test_another_table_is_another_key_of_jaxs_caches(device):
    """Inner functions of an operator are traced anew, without `jax.clear_caches`."""
    kernel, operands = norm(64)
    args = tuple(o for o in operands if o is not None)
    old = runner.Runner(None, device)
    assert old == runner.Runner(None, device)
    for name in ("xla", "pallas"):
        save(device, ranking_of(kernel, operands, (name, None if name == "xla" else ROW)))
        assert old != runner.Runner(None, device)
        assert jax.make_jaxpr(jaxfused.layer_norm)(*args) and chosen(
            jaxfused.layer_norm, *args
        ) == {"layer_norm forward": name}


@pytest.mark.parametrize("same", (True, False))
def test_processes_compare_their_tables_even_while_tracing(device, monkeypatch, same):
    digest = np.frombuffer(bytes.fromhex(table.Table({}).digest), np.uint8)

    def gather(mine):
        # Calls a jitted function on a value that must not be traced, as the real function does.
        assert np.array_equal(jax.jit(lambda x: x)(mine), digest)
        return np.stack([digest, digest if same else digest[::-1]])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    trace = jax.jit(lambda x: jaxfused.layer_norm(x)).trace
    if same:
        trace(array(64, 768))
    else:
        with pytest.raises(RuntimeError, match=r"that of process 0 is 4f53cda18c2b and .* 1 is "):
            trace(array(64, 768))
    with pytest.raises(RuntimeError, match="measures in one process, but this is one of 2"):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        jaxfused.tune(jaxfused.layer_norm, array(64, 768))


# --- choice ---------------------------------------------------------------------------------------


def choice_of(f, *args):
    [(choice, _)] = jaxfused.explain(f, *args).calls
    return choice


@pytest.mark.usefixtures("built_library")
def test_a_choice_follows_the_table(device):
    kernel, operands = norm(4096)
    *_, config = runner.configs(kernel, "cuda", device, operands)
    args = tuple(o for o in operands if o is not None)
    before = choice_of(jaxfused.layer_norm, *args)
    assert (before.source, before.config) == ("model", None)
    ranked = (("cuda", config), ("pallas", None), ("xla", None))
    save(device, ranking_of(kernel, operands, *ranked))
    choice = choice_of(jaxfused.layer_norm, *args)
    assert (choice.implementation, choice.config, choice.source) == ("cuda", config, "table")
    text = str(jaxfused.explain(jaxfused.layer_norm, *args))
    assert "layer_norm forward runs on 'cuda' (measured): bfloat16[4096, 768]" in text
    assert "measured: 'cuda' 10.0 us, 'pallas' 11.0 us (+10%), 'xla' 12.0 us (+20%)" in text
    assert f"by {config}" in text
    assert f"{table.load(device).digest[:12]}, 1 entries" in text
    assert str(table.user_path(device)) in text

    def named(*args):
        return jaxfused.layer_norm(*args, implementation="pallas")

    assert choice_of(named, *args).source == "table"
    save(device, ranking_of(kernel, operands, ranked[0]))
    assert choice_of(named, *args)[2:] != before[2:]
    assert choice_of(named, *args).source == "named"


def test_what_is_not_legal_or_cannot_run_is_passed_over(device):
    kernel, operands = norm(4096)
    args = tuple(o for o in operands if o is not None)
    *_, legal = runner.configs(kernel, "pallas", device, operands)
    ranked = [
        ("cudnn", None),
        ("pallas", MatmulConfig()),
        ("xla", MatmulConfig()),
        ("pallas", legal),
    ]
    save(device, ranking_of(kernel, operands, *ranked))
    choice = choice_of(jaxfused.layer_norm, *args)
    assert (choice.implementation, choice.config) == ("pallas", legal)
    save(device, ranking_of(kernel, operands, *ranked[:-1]))
    assert choice_of(jaxfused.layer_norm, *args).source == "model"


@pytest.mark.exhaustive
def test_a_config_of_the_table_reaches_the_kernel(device):
    """The kernel is traced as if its config were passed."""
    kernel, operands = norm(4096)
    args = tuple(o for o in operands if o is not None)
    config = runner.configs(kernel, "pallas", device, operands)[1]

    def launched(f, *args):
        """Returns the text of the kernel, the only one with references to memory."""
        text = without_addresses(jax.make_jaxpr(f)(*args))
        [start] = [m.start() for m in re.finditer(r"lambda a:Ref<gmem>", text)]
        depth, end = 1, start
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        return re.sub(r"\s+", " ", text[start:end])

    def passed(x, scale, bias):
        return kernel.run("pallas", device, x, None, scale, bias, None, config=config)[0]

    def called(*args):
        return jaxfused.layer_norm(*args, implementation="pallas")

    assert launched(called, *args) != launched(passed, *args)
    save(device, ranking_of(kernel, operands, ("pallas", config)))
    jax.clear_caches()
    assert launched(called, *args) == launched(passed, *args)


@dataclasses.dataclass(frozen=True)
class OldOptions:
    is_causal: bool


@dataclasses.dataclass(frozen=True)
class NewOptions(OldOptions):
    window: int | None = None
    rate: float = 0.1


@dataclasses.dataclass(frozen=True)
class OldStage:
    options: OldOptions
    name = "stage"


@dataclasses.dataclass(frozen=True)
class NewStage(OldStage):
    saves: bool = False


def test_a_new_field_with_a_default_leaves_entries_as_they_were():
    old = table.Key.of(OldStage(OldOptions(True)), (array(64),))
    new = NewStage(NewOptions(True))
    assert table.Key.of(new, (array(64),)) == old
    changes = {"window": 2, "rate": 0.0}
    others = [
        dataclasses.replace(new, options=dataclasses.replace(new.options, **{name: value}))
        for name, value in changes.items()
    ]
    others.append(dataclasses.replace(new, saves=True))
    assert len({old, *(table.Key.of(other, (array(64),)) for other in others)}) == 4
    # All rates give the same constant of the kernel.
    other_rate = NewStage(NewOptions(True, rate=0.2))
    assert table.Key.of(other_rate, (array(64),)) == old


@pytest.mark.parametrize("rows", (64, 67))
def test_a_constant_of_the_kernel_is_no_part_of_the_key(device, rows):
    """An epsilon does not change a kernel's time, but saving statistics does."""
    kernel, operands = norm(rows)
    assert table.Key.of(*norm(rows, epsilon=1e-5)) == table.Key.of(kernel, operands)
    saving = dataclasses.replace(kernel, save_statistics=True)
    assert table.Key.of(saving, operands) != table.Key.of(kernel, operands)


def test_the_nearest_neighbour_within_bounds(device):
    entries = {}
    for i, rows in enumerate((1, 1000, 1024, 1030, 4096)):
        entries |= ranking_of(*norm(rows), (f"implementation {i}", None))
    measured = table.Table(entries)

    def found(*args):
        result = measured.find(*norm(*args))
        return result and (result.ranking[0].implementation[-1], result.exact)

    assert found(1024) == ("2", True)
    assert found(1026) == ("2", False)
    assert found(1029) == ("3", False)
    assert found(int(4096 * 2**0.09)) == ("4", False)
    # Not found: too far, one row, another width, and widths whose accesses differ.
    assert found(int(4096 * 2**0.11)) is None
    assert found(2) is None
    assert found(1024, 1536) is None
    assert found(1024, 776) is None
    assert found(1024, 736) is None
    # An axis counts once, even if three operands have it.
    kernel, (x, *_others) = norm(1026)
    assert measured.find(kernel, (x, x, *_others[1:])) is None


def test_neighbours_in_use(device):
    save(device, ranking_of(*norm(4096), ("xla", None)))
    scale = array(768)
    near = choice_of(jaxfused.layer_norm, array(4100, 768), scale, scale)
    assert (near.implementation, near.source) == ("xla", "neighbour")
    text = str(jaxfused.explain(jaxfused.layer_norm, array(4100, 768), scale, scale))
    assert "runs on 'xla' (measured at near shapes)" in text
    assert "measured at bfloat16[4096, 768], bfloat16[768], bfloat16[768]: 'xla' 10.0 us" in text
    assert choice_of(jaxfused.layer_norm, array(8192, 768), scale, scale).source == "model"


def stage_of_program(name, f, *args):
    """Returns the choice of the first stage of this name in a program."""
    return next(choice for choice, _ in traced(f, *args)[0] if choice.stage == name)


def gradients_of(f):
    """Returns the function that computes the gradients of `f` to all of its arguments."""

    def gradients(*args):
        results, vjp = jax.vjp(f, *args)
        return vjp(jax.tree.map(jnp.ones_like, results))

    return gradients


# Stages whose arrays are laid out for what will run another stage: the program, the other stage and
# what a table's entry makes of it, and the stage with a field that follows.
LAYOUTS = {
    "cotangents of qkv_projection are concatenated for XLA's gradient of x": (
        gradients_of(functools.partial(jaxfused.qkv_projection, heads=8)),
        (array(4096, 512), array(512, 1536)),
        ("qkv_projection input gradient", "xla"),
        ("qkv_projection weight gradient", "count", 1),
    ),
    "those of gated_mlp stay apart for a kernel": (
        gradients_of(lambda x, w, v: jaxfused.gated_mlp(x, w, None, v)),
        (array(512, 2048), array(2048, 4096), array(2048, 2048)),
        ("gated_mlp input gradient", "pallas"),
        ("gated_mlp hidden gradient", "joined", False),
    ),
    "a kernel that takes statistics gives way to XLA": (
        functools.partial(conv_operator.run, window={}, statistics=True),
        (array(8, 32, 32, 128), array(3, 3, 128, 128)),
        ("conv dense forward with statistics", "xla"),
        ("conv dense forward", "save_preactivation", False),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_made_for_what_the_table_says_will_run(device, name):
    f, args, (other, implementation), (stage, field, value) = LAYOUTS[name]
    before = stage_of_program(other, f, *args)
    assert before.implementation != implementation
    assert all(
        getattr(c.kernel, field) != value for c, _ in traced(f, *args)[0] if c.stage == stage
    )
    save(device, ranking_of(before.kernel, before.operands, (implementation, None)))
    assert getattr(stage_of_program(stage, f, *args).kernel, field) == value


# --- configs --------------------------------------------------------------------------------------


def without_addresses(program):
    return re.sub(r"0x[0-9a-f]+", "", str(program))


WITH_CONFIGS = [k for k in KERNELS if isinstance(k[0], runner.HasConfigs)]


@parametrize(
    "kernel_and_operands",
    WITH_CONFIGS,
    # The quick cases: statistics of rows, and attention.
    quick=(2, 32),
    ids=lambda kernel: kernel[0].name.replace(" ", "_"),
)
def test_configs_are_legal_and_the_first_is_the_default(device, kernel_and_operands):
    kernel, operands = kernel_and_operands
    configs = runner.configs(kernel, "pallas", device, operands)
    assert len(set(configs)) == len(configs) > 1

    def traced(config):
        run = kernel.run
        return jax.make_jaxpr(lambda *args: run("pallas", device, *args, config=config))(*operands)

    assert without_addresses(traced(None)) == without_addresses(traced(configs[0]))
    for config in configs[1:]:
        traced(config)


# --- the tuner ------------------------------------------------------------------------------------


class FakeBench:
    """Measures nothing: a candidate takes `microseconds`, and each new one compiles in a second."""

    def __init__(self, microseconds):
        self.microseconds = microseconds
        self.submitted: list[tuple[bench.Work, Candidate]] = []
        self.now = 0.0

    def submit(self, work, candidate):
        self.submitted.append((work, candidate))
        self.now += 1.0

    def wait(self):
        self.now += 0.5

    def measure(self, work, candidates):
        assert all((work, c) in self.submitted for c in candidates)
        return {c: self.microseconds(work, c) for c in candidates}

    def close(self):
        pass


def tune(f, *args, fake=None, seconds=1e9, path=None):
    fake = fake or FakeBench(lambda work, candidate: 10.0)
    return tuner.run(
        f, args, fake, seconds=seconds, path=path, progress=False, clock=lambda: fake.now
    )


def block(x, scale, w):
    heads = x.reshape(*x.shape[:-1], 2, -1)
    x = x + jaxfused.dot_product_attention(heads, heads, heads).reshape(x.shape)
    y = jaxfused.layer_norm(x, scale)
    return jaxfused.mlp(y, w, None, w.T, residual=x)


def gradients(x, scale, w):
    def loss(x, scale, w):
        for _ in range(3):
            x = block(x, scale, w)
        return jnp.sum(x.astype(jnp.float32))

    return jax.grad(loss, (0, 1, 2))(x, scale, w)


BLOCK = (array(4, 64, 128), array(128), array(128, 256))
STAGES = {
    "dot_product_attention forward",
    "dot_product_attention backward",
    "layer_norm forward",
    "layer_norm backward",
    "mlp first layer",
    "mlp last layer",
    "mlp hidden gradient",
    "mlp weight gradient",
}


def test_tune_finds_the_stages_of_a_program_and_makes_them_its_choice(device):
    """Each stage gets the last measured config of its second implementation."""
    numbers = itertools.count()
    fast = {}

    def microseconds(work, candidate):
        if candidate.implementation == "xla":
            return 30.0
        fast[work] = max(fast.get(work, (0, None)), (next(numbers), candidate), key=lambda f: f[0])
        return 20.0 - next(numbers) / 1e4

    step = jax.jit(gradients)
    step.trace(*BLOCK)
    report = tune(step, *BLOCK, fake=FakeBench(microseconds))
    assert {stage.choice.stage for stage in report.stages} == STAGES
    assert {stage.count for stage in report.stages} == {3}
    assert report.path == table.user_path(device)
    # The table is also used by later processes, and by functions that were compiled before.
    kept = jaxfused.explain(step, *BLOCK)
    for choice, _ in kept.calls:
        assert choice.source == "table"
        assert choice.config is None or choice.implementation != "xla"
    text = str(report)
    assert "tuned 9 stages on NVIDIA Test 1g" in text
    assert "3 x layer_norm forward: bfloat16[256, 128], bfloat16[128]" in text
    assert str(report.path) in text


def test_tune_keeps_the_default_where_another_is_hardly_faster(device):
    x = array(4096, 768)
    before = choice_of(jaxfused.layer_norm, x)
    default = before.implementation

    def times(gain):
        return lambda work, c: 100.0 if c.implementation == default else 100.0 * (1 - gain)

    for gain, is_default in ((0.015, True), (0.03, False)):
        report = tune(jaxfused.layer_norm, x, fake=FakeBench(times(gain)))
        [stage] = report.stages
        assert (stage.ranking[0].implementation == default) == is_default
        assert (choice_of(jaxfused.layer_norm, x).implementation == default) == is_default
        table.user_path(device).unlink()
        table.load.cache_clear()


@pytest.mark.usefixtures("built_library")
def test_tune_drops_what_fails_and_says_so(device):
    def microseconds(work, candidate):
        if candidate.implementation == "cuda":
            return "its results are off by 7 times what is allowed"
        return 50.0 if candidate.implementation == "xla" else 10.0

    report = tune(jaxfused.layer_norm, array(4096, 768), fake=FakeBench(microseconds))
    [stage] = report.stages
    assert {c.implementation for c in stage.dropped} == {"cuda"}
    assert {c.implementation for c in stage.ranking} == {"pallas", "xla"}
    assert "dropped 'cuda' ForwardConfig(" in str(report)
    # XLA has one config, None, and configs of a slow implementation are not tried.
    ranking = table.load(device).find(stage.work.kernel, stage.work.operands).ranking
    assert [r.implementation for r in ranking] == ["pallas"] * 4 + ["xla"]


def test_tune_compares_within_a_round(device):
    """Clocks fall, so that the second round measures longer times, for its reference too."""
    fake = FakeBench(lambda work, c: 10.0 * (1 + fake.now // 4) - (0.3 if fake.now > 4 else 0.0))
    fake.microseconds = lambda work, c: 10.0 if fake.now < 4 else 20.0
    report = tune(jaxfused.layer_norm, array(4096, 768), fake=fake)
    [stage] = report.stages
    assert set(stage.microseconds.values()) == {10.0}


@pytest.mark.parametrize("fastest", ("pallas", "xla", "neither"))
def test_tune_corrects_a_call_wrongly_left_to_xla(device, monkeypatch, fastest):
    """A rule is planted by which cuDNN is faster, and the operator leaves the call to XLA."""
    why = lambda *call, **of: "the test says so"  # noqa: E731
    monkeypatch.setattr(dense_conv_regimes, "why_cudnn", why)
    conv = functools.partial(jaxfused.conv, activation="relu")
    args = array(8, 28, 28, 128), array(3, 3, 128, 128)
    before = choice_of(conv, *args)
    assert before.implementation == "xla" and before.kernel is None
    text = str(jaxfused.explain(conv, *args))
    assert "not 'pallas': cuDNN is faster at a convolution of this shape" in text
    assert "conv dense forward, 'xla' first: the test says so" in text
    # Forward mode works where XLA runs all stages.
    jax.eval_shape(lambda *args: jax.jvp(conv, args, args), *args)
    fake = FakeBench(lambda work, c: 20.0 if c.implementation != fastest != "neither" else 10.0)
    assert {stage.choice.stage for stage in tune(conv, *args, fake=fake).stages} == {
        "conv dense forward",
        "conv dense input gradient",
        "conv dense weight gradient",
    }
    after = {
        (choice.stage, choice.implementation) for choice, _ in traced(gradients_of(conv), *args)[0]
    }
    if fastest != "pallas":
        assert after == {("conv", "xla")}
    if fastest == "xla":
        text = str(jaxfused.explain(conv, *args))
        assert "conv dense forward, measured: 'xla' 10.0 us, 'pallas' 20.0 us (+100%)" in text
    if fastest == "pallas":
        assert {implementation for stage, implementation in after if "dense" in stage} == {"pallas"}


def quantized_conv(x, w):
    images = jaxfused.quantize(x, axis=-1, per_tensor=True)
    weights = jaxfused.quantize(w.reshape(-1, w.shape[-1]))
    return jaxfused.quantized_conv(images, weights, kernel_size=3, out_dtype=BF16)


# Calls that a rule of the operator leaves to XLA: the operator, its operands, another implementation and
# the stages.
LEFT_TO_XLA = {
    "rope of halves": (
        lambda q: jaxfused.rope(q, positions=jnp.arange(256)),
        (array(2, 256, 12, 64),),
        "pallas",
        {"rope"},
    ),
    "linear without an epilogue": (
        jaxfused.linear,
        (array(20480, 2048), array(2048, 2048)),
        "pallas",
        {"linear forward", "linear weight gradient"},
    ),
    "linear of a few rows": (
        jaxfused.linear,
        (array(4, 512), array(512, 512)),
        "pallas",
        {"linear forward", "linear input gradient", "linear weight gradient"},
    ),
    "a depthwise window of 5 x 5 at stride 2": (
        functools.partial(jaxfused.conv, feature_group_count=64, strides=2, activation="silu"),
        (array(2, 32, 32, 64, dtype=jnp.float32), array(5, 5, 1, 64)),
        "cuda",
        {"conv depthwise forward", "conv depthwise weight gradient"},
    ),
    "conv of few channels and pixels": (
        functools.partial(jaxfused.conv, strides=2, activation="relu"),
        (array(2, 64, 64, 3), array(7, 7, 3, 64)),
        "pallas",
        {"conv dense forward", "conv dense input gradient", "conv dense weight gradient"},
    ),
}


@pytest.mark.usefixtures("with_library")
@pytest.mark.parametrize("is_overruled", (True, False))
@parametrize("name", LEFT_TO_XLA, quick=(0, 1, 3))
def test_tune_overrules_what_leaves_calls_to_xla(device, name, is_overruled):
    f, args, other, stages = LEFT_TO_XLA[name]
    fastest = other if is_overruled else "xla"
    [(before, _)] = traced(gradients_of(f), *args)[0]
    assert before.implementation == "xla" and before.kernel is None
    fake = FakeBench(lambda work, c: 10.0 if c.implementation == fastest else 20.0)
    assert {stage.choice.stage for stage in tune(f, *args, fake=fake).stages} == stages
    after = {
        (choice.stage, choice.implementation) for choice, _ in traced(gradients_of(f), *args)[0]
    }
    if is_overruled:
        assert after >= {(stage, other) for stage in stages}
    else:
        assert after == {(before.stage, "xla")}
        assert "measured: 'xla' 10.0 us" in str(jaxfused.explain(f, *args))


@pytest.mark.parametrize("is_overruled", (True, False))
def test_tune_overrules_a_quantised_conv_of_few_pixels(device, is_overruled):
    args = array(2, 16, 16, 128), array(3, 3, 128, 128)
    before = traced(quantized_conv, *args)[0]
    assert "quantized_conv forward" not in {choice.stage for choice, _ in before}
    assert "the kernel was timed with windows" in str(jaxfused.explain(quantized_conv, *args))
    fastest = "pallas" if is_overruled else "xla"
    fake = FakeBench(lambda work, c: 10.0 if c.implementation == fastest else 20.0)
    tuned = tune(quantized_conv, *args, fake=fake).stages
    assert "quantized_conv forward" in {stage.choice.stage for stage in tuned}
    after = {choice.stage: choice.implementation for choice, _ in traced(quantized_conv, *args)[0]}
    assert after.get("quantized_conv forward") == ("pallas" if is_overruled else None)


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("is_overruled", (True, False))
def test_tune_overrules_how_xla_sums(device, is_overruled):
    """Transforms are expected to be faster, and measured to be slower where they are overruled."""
    conv = functools.partial(jaxfused.conv, feature_group_count=64)
    args = array(4, 96, 96, 64), array(31, 31, 1, 64)
    before = choice_of(conv, *args)
    assert before.stage == "conv by Fourier transforms"
    assert re.search("transforms are XLA's, expected to take .* us", str(before.reasons))
    fake = FakeBench(lambda work, c: 10.0 if c.config.transformed != is_overruled else 20.0)
    [stage] = tune(conv, *args, fake=fake).stages
    assert stage.choice.stage == before.stage and len(stage.ranking) == 2
    after = choice_of(conv, *args)
    if is_overruled:
        assert after.stage == "conv" and after.implementation == "xla"
    else:
        assert after.stage == before.stage and "were measured to be faster" in str(after.reasons)


OPERATORS = sorted(__main__.EXAMPLES)


@pytest.mark.usefixtures("with_library")
@parametrize("op", OPERATORS, quick=[OPERATORS.index("max_pool")])
def test_explain_names_what_decided_for_every_operator(device, op):
    """Where several implementations can run a stage, times or a rule decided, unless one was named."""
    example = __main__.EXAMPLES[op]
    for choice, _ in traced(example.value_and_gradients, example.shapes, example.others)[0]:
        able = [name for name, reason in choice.reasons.items() if reason is None]
        if len(able) > 1 and choice.source != "named":
            text = " ".join(basis(choice))
            assert "first that can run" not in text
            assert re.search(r"expected: .* us|first: \w+", text), (choice.stage, text)


@parametrize("seconds", (0.0, 5.0, 20.0, 60.0), quick=(1,))
def test_tune_ends_in_time(device, seconds):
    """A candidate takes one second, and the end of a round half a second."""
    fake = FakeBench(lambda work, candidate: 10.0)
    report = tune(gradients, *BLOCK, fake=fake, seconds=seconds)
    assert seconds <= report.seconds <= seconds + 1.5 or not any(s.waiting for s in report.stages)
    # Stages that were not reached are not in the table.
    assert (report.path is None) == (seconds == 0.0)
    assert len(fake.submitted) == len(set(fake.submitted))
    if seconds == 0.0:
        assert "nothing was written" in str(report)


def test_tune_writes_elsewhere_without_changing_what_runs(device, tmp_path):
    fake = FakeBench(lambda work, c: 10.0 if c.implementation == "xla" else 20.0)
    x = array(4096, 768)
    out = tmp_path / "elsewhere" / "table.json"
    report = tune(jaxfused.layer_norm, x, fake=fake, path=out)
    assert report.path == out and table.read(out, device)
    assert choice_of(jaxfused.layer_norm, x).source == "model"


def test_tune_measures_the_shards_that_kernels_see(device):
    batch = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(batch, jax.sharding.PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((4096, 768), BF16, sharding=sharding)
    [stage] = tune(jaxfused.layer_norm, x).stages
    assert stage.work.operands[0].shape == (512, 768)


def test_tune_and_explain_list_what_runs(device):
    """JAX traces forwards that save nothing, but runs those that save; a loop runs its body often."""

    def loss(x, scale):
        def body(x, _):
            return jaxfused.layer_norm(x, scale), None

        x, _ = jax.lax.scan(body, x, length=12)
        return jnp.sum(x.astype(jnp.float32))

    gradient, args = jax.grad(loss), (array(4096, 768), array(768))
    stages = tune(gradient, *args).stages
    found = [(stage.choice.stage, stage.count) for stage in stages]
    assert found == [("layer_norm forward", 12), ("layer_norm backward", 12)]
    assert stages[0].work.kernel.save_statistics
    assert list(chosen(gradient, *args)) == ["layer_norm forward", "layer_norm backward"]
    sources = [choice.source for choice, _ in jaxfused.explain(gradient, *args).calls]
    assert sources == ["table", "table"]


def test_what_jax_strips_of_results_is_still_listed(device):
    """`jax.checkpoint` drops results that the gradient does not need from a stage that runs again."""

    def loss(x, w):
        y = jax.checkpoint(lambda x: jaxfused.mlp(x, w, None, w.T, activation="gelu_tanh"))(x)
        return jnp.sum(y.astype(jnp.float32))

    found = chosen(jax.grad(loss), array(64, 128), array(128, 256))
    assert "mlp hidden gradient" in found and "mlp first layer" in found


def test_progress_is_lines_without_a_terminal(capsys):
    show = tuner._Progress(60.0, True)
    for elapsed in (1.0, 6.0, 7.0, 12.0):
        show(elapsed, "measured rope")
    show.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["tune: 6 s, measured rope", "tune: 12 s, measured rope"]


def test_tune_needs_a_gpu():
    with pytest.raises(RuntimeError, match="NVIDIA GPU, but JAX would run on 'cpu'"):
        jaxfused.tune(jaxfused.layer_norm, array(64, 768))


# --- the bench ------------------------------------------------------------------------------------


def lengths_and_segments():
    """Returns operands of attention for which random numbers would be invalid."""
    from jaxfused.ops.attention import attention_stages

    options = attention_stages.Options(False, None, 0.125, None, 0.1)
    q, ids = array(2, 64, 2, 1, 64), array(2, 64, dtype=jnp.int32)
    lengths = array(2, dtype=jnp.int32)
    explicit = array(1, 1, 1, 64, 64, dtype=jnp.int8)
    seeds = array(2, 2, 2, 1, dtype=jnp.uint32)
    key = array(2, 64, 2, 64)
    return options, attention_stages.Arrays(
        q, key, key, None, None, lengths, lengths, None, ids, ids, explicit, seeds
    )


def test_examples_fit_together(device):
    from jaxfused.ops.attention import attention_stages
    from pallas_kernels.attention.logits import saved_length

    options, arrays = lengths_and_segments()
    cpu = dispatch.Device("cpu", "cpu", None, 0)
    lse = array(2, 2, 1, saved_length(64), dtype=jnp.float32)
    backward = bench.Work(
        attention_stages.Backward(options),
        (arrays.query, lse, arrays.query, lse, *arrays.operands()),
        cpu,
    )
    examples = jax.jit(bench._examples, static_argnums=0)(backward, jnp.uint32(0))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), tuple(examples)) == jax.tree.map(
        lambda a: (a.shape, a.dtype), backward.operands
    )
    made = attention_stages.Arrays.of(*examples[4:])
    assert list(made.key_lengths) == [64, 64]
    assert np.all(np.diff(made.key_segments) >= 0) and np.all(made.explicit == 1)
    # The output and the log-sum-exp come from the forward.
    forward = attention_stages.Forward(options)
    output, saved = jax.jit(lambda made: forward.run("xla", cpu, *made.operands()))(made)
    np.testing.assert_allclose(np.float32(examples[0]), np.float32(output), rtol=0.02, atol=0.02)
    np.testing.assert_allclose(examples[1], saved, rtol=1e-3, atol=1e-3)


def test_the_bench_tells_wrong_results_from_roundings(monkeypatch):
    monkeypatch.setattr(lowering, "KERNELS_RUN_EVERYWHERE", True)
    monkeypatch.setattr(bench, "_times", lambda calls, sets: dict.fromkeys(calls, 10.0))
    monkeypatch.setattr(bench.timing, "input_sets", lambda size: 1)
    kernel, operands = norm(64)

    class Other(layer_norm._Forward):
        def run(self, implementation, device, *operands, config=None):
            y, *others = super().run("xla", device, *operands)
            if implementation == "raises":
                raise ValueError("it does\nnot run")
            wrong = {"close": y * 1.004, "wrong": y * 1.1, "nan": y.at[0, 0].set(jnp.nan), "xla": y}
            return wrong[implementation], *others

    names = ("xla", "close", "wrong", "nan", "raises")
    work = bench.Work(Other(kernel.options, False), operands, dispatch.current_device())
    gpu = bench.GpuBench()
    for name in names:
        gpu.submit(work, Candidate(name))
    gpu.wait()
    measured = gpu.measure(work, [Candidate(name) for name in names])
    gpu.close()
    assert measured[Candidate("xla")] == measured[Candidate("close")] == 10.0
    assert measured[Candidate("wrong")].startswith("its results are off by ")
    assert measured[Candidate("nan")] == "its results are off by inf times what is allowed"
    assert measured[Candidate("raises")] == "ValueError: it does"


# --- the command ----------------------------------------------------------------------------------

SCRIPT = """
import jax, jax.numpy as jnp, jaxfused

def program():
    return jaxfused.layer_norm, (jax.ShapeDtypeStruct((64, 768), jnp.bfloat16),)

def takes_one(x, y=2):
    return program()

def returns_none():
    pass
"""


def test_the_command_finds_the_program(tmp_path, monkeypatch, capsys):
    (tmp_path / "a_step_to_tune.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    for name in (f"{tmp_path}/a_step_to_tune.py:program", "a_step_to_tune:program"):
        f, args = command.load_program(name)()
        assert f is jaxfused.layer_norm and args[0].shape == (64, 768)
        tuned = []
        monkeypatch.setattr(
            command, "tune", lambda f, *args, tuned=tuned, **kw: tuned.append((f, args, kw))
        )
        assert __main__.main(["tune", name, "--seconds", "5", "--out", "there.json"]) == 0
        [(tuned_f, tuned_args, keywords)] = tuned
        assert tuned_f is f and tuned_args == args
        assert keywords == {"seconds": 5.0, "path": Path("there.json")}
    refused = {
        "program": "a place and a function",
        "no.py:f": "no script",
        "nosuch.module:f": "there is no module 'nosuch'",
        "json:nothere": "has none of that name",
        "json:__name__": "has str there",
        "a_step_to_tune:takes_one": "takes x, but it is called without arguments",
        "a_step_to_tune:returns_none": "must return (f, args)",
    }
    for name, sentence in refused.items():
        assert command.main([name]) == 1
        assert sentence in capsys.readouterr().err
    assert __main__.main(["tun"]) == 2


@pytest.mark.exhaustive
def test_the_command_says_that_there_is_no_gpu(tmp_path):
    (tmp_path / "step.py").write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, "-m", "jaxfused", "tune", f"{tmp_path}/step.py:program"],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 1
    assert result.stderr.startswith("tune: it measures on an NVIDIA GPU")


def test_the_report_names_the_files(device):
    assert "python -m jaxfused tune" in "\n".join(__main__.measured_choices(device))
    save(device, ranking_of(*norm(64), ("xla", None)))
    text = "\n".join(__main__.measured_choices(device))
    assert f"{table.user_path(device)} (1 entries)" in text
    assert table.load(device).digest[:12] in text


@pytest.mark.usefixtures("with_library")
@parametrize("op", OPERATORS, quick=[OPERATORS.index("block_sparse_matmul")])
def test_every_operator_can_be_tuned(device, op):
    """The stages name candidates for their operands, and no bench has to be there for that."""
    example = __main__.EXAMPLES[op]
    arrays = [
        [jnp.zeros(array.shape, array.dtype) for array in arrays]
        for arrays in (example.shapes, example.others)
    ]
    tune(example.value_and_gradients, *arrays)
