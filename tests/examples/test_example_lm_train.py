"""examples/lm/train: packed rows of text, the loss of documents, a short training, and its samples."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.errors import ExampleError
from examples.lm import chat, sizes, train
from examples.lm.config import Routed
from examples.lm.data import START, Rows, Texts, packed, read_texts
from examples.lm.model import LanguageModel
from tests.support.run_metrics import metrics

DOCUMENTS = (b"one", b"a longer one", b"x", b"the last")


def rows_of(documents, *, length=8, batch_size=2, part=slice(None)):
    return Rows(packed(documents), length, batch_size, part, seed=0)


def test_documents_are_packed_behind_one_another():
    assert packed((b"ab", b"c")).tolist() == [START, 97, 98, START, 99, START]


def test_a_pass_in_order_says_every_byte_once():
    rows = rows_of(DOCUMENTS)
    said = b""
    for batch in rows.batches:
        _, labels, _, _ = sizes.split(jnp.asarray(rows.in_order(batch)["text"]))
        said += bytes(int(label) for label in labels.ravel() if label >= 0)
    assert said == b"".join(DOCUMENTS)


def test_rows_are_drawn_anew_in_each_pass():
    rows = rows_of((bytes(range(200)),), batch_size=4)
    steps = rows.count // 4
    first, second = (
        np.concatenate([rows(step)["text"] for step in range(begin, begin + steps)])
        for begin in (0, steps)
    )
    assert first.shape == (4 * steps, 9)
    assert len(np.unique(first[:, 0])) == 4 * steps
    assert sorted(first[:, 0]) != sorted(second[:, 0])
    # The last token of a row is the first of the next.
    assert set(first[:, 0][1:]) & set(first[:, -1])


def test_processes_make_their_rows_of_the_same_batch():
    whole, mine = rows_of((bytes(200),)), rows_of((bytes(200),), part=slice(1, 2))
    np.testing.assert_array_equal(mine(3)["text"], whole(3)["text"][1:])
    np.testing.assert_array_equal(mine.in_order(1)["text"], whole.in_order(1)["text"][1:])


def test_tokens_know_their_document_and_their_place_in_it():
    text = jnp.array([[98, 99, START, 97, 98, START, START, 100, 101]])
    tokens, labels, segments, positions = sizes.split(text)
    assert tokens.tolist() == [[98, 99, START, 97, 98, START, START, 100]]
    assert labels.tolist() == [[99, -1, 97, 98, -1, -1, 100, 101]]
    assert segments.tolist() == [[0, 0, 1, 1, 1, 2, 3, 3]]
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0, 0, 1]]


SMALL = sizes._size(width=32, depth=1, heads=2, key_heads=1, hidden=48)


@pytest.fixture(scope="module")
def model():
    model = LanguageModel(SMALL, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    draw = np.random.default_rng(0).standard_normal
    params = jax.tree.map(lambda p: p + 0.2 * draw(p.shape, np.float32), nnx.to_pure_dict(params))
    return graphdef, params


def test_the_loss_of_a_packed_row_is_that_of_its_documents(model):
    graphdef, params = model
    sums = jax.jit(sizes.make_sums(graphdef))
    apart = 0
    for document in DOCUMENTS:
        row = packed((document,))
        row = np.pad(row, (0, 28 - len(row)), constant_values=START)
        apart += np.asarray(sums(params, row[None]))[0]
    row = packed(DOCUMENTS)
    together = np.asarray(
        sums(params, np.pad(row, (0, 32 - len(row)), constant_values=START)[None])
    )
    np.testing.assert_allclose(together[0], apart, rtol=1e-5)
    assert together[0, 1] == sum(map(len, DOCUMENTS))


def test_a_mixture_learns_packed_documents_and_balances_its_experts():
    routed = Routed(4, experts_of_token=2)
    config = sizes._size(width=32, depth=2, heads=2, key_heads=1, hidden=24, routed=routed)
    graphdef, params = nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)))
    row = packed(DOCUMENTS)
    batch = {"text": np.pad(row, (0, 33 - len(row)), constant_values=START)[None].repeat(2, 0)}
    loss_of = sizes.make_loss(graphdef)

    @jax.jit
    def step(params):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch, jax.random.key(0))
        return loss, gradients, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    first, gradients, params = step(params)
    entropy = jax.jit(sizes.make_sums(graphdef))(params, batch["text"]).sum(axis=0)
    assert first > entropy[0] / entropy[1]
    for name in ("router_kernel", "w_gate", "w_up", "w_down"):
        assert jnp.any(gradients["blocks"][1]["mlp"][name].get_value()), name
    for _ in range(5):
        loss, _, params = step(params)
    assert loss < first


# --- texts ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"{i} times two is {2 * i}, as all know.\n" * 8)
    (folder / "picture.png").write_bytes(b"\0")
    (folder / "empty.txt").write_bytes(b"")
    return folder


def test_files_are_held_out_by_their_names(folder, tmp_path):
    texts = read_texts(folder, held_out=0.2)
    assert len(texts.train) + len(texts.held_out) == 40
    assert 2 <= len(texts.held_out) <= 16
    shutil.copytree(folder, tmp_path / "other")
    (tmp_path / "other" / "41.txt").write_text("one more")
    more = read_texts(tmp_path / "other", held_out=0.2)
    assert {*texts.held_out} <= {*more.held_out}
    assert more.fingerprint != texts.fingerprint
    assert 0 < texts.compressed()["xz"] < 8


def test_a_folder_without_texts_is_refused(tmp_path):
    with pytest.raises(ExampleError, match=r"has 0 and 0 files of \.txt"):
        read_texts(tmp_path, held_out=0.5)
    with pytest.raises(ExampleError, match=r"there is no .*absent"):
        read_texts(tmp_path / "absent", held_out=0.5)


@pytest.mark.parametrize(
    ("text", "is_python"),
    [
        ("import os\n\ndef f():\n    return os\n\ndef g(a", True),
        ("import os\n\ndef f(:\n    return os\n\ndef g(a", False),
        ("x = (1,\n    2\n)\ny = 1", True),
        ("import os", False),  # There is nothing before the last statement.
        ("", False),
        ("a\0b\nc", False),
    ],
)
def test_samples_are_parsed_up_to_their_last_statement(text, is_python):
    assert train.parses(text) is is_python


# --- training -------------------------------------------------------------------------------------

FLAGS = ["--model", "small", "--length", "32", "--batch-size", "8", "--epoch-rows", "16"]
FLAGS += ["--epochs", "2", "--warmup-epochs", "0", "--samples", "3", "--held-out", "0.1"]
FLAGS += ["--learning-rate", "0.01"]


@pytest.fixture(scope="module", autouse=True)
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sizes.MODELS, "small", SMALL)
        yield


@pytest.fixture(scope="module")
def a_run(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "lm"
    train.main([*FLAGS, "--data", str(folder), "--out", str(out)])
    return out


def test_rows_that_the_texts_do_not_fill_are_refused(folder, tmp_path):
    args = [*FLAGS, "--data", str(folder), "--out", str(tmp_path / "lm"), "--length", "1000000"]
    with pytest.raises(ExampleError, match=r"at least 2000001 tokens.*shorter --length"):
        train.main(args)


def test_a_training_learns_and_says_how_much(a_run):
    losses = [record["loss"] for record in metrics(a_run) if "loss" in record]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.3
    result = json.loads((a_run / "metrics.json").read_text())
    assert 2 < result["bits_per_byte"] < 8
    assert result.keys() >= {"xz", "bz2", "tokens_per_second"}
    assert len((a_run / "samples.txt").read_text().split("-" * 100)) == 3
    assert (a_run / "curve.png").exists()


@pytest.mark.exhaustive
def test_what_was_trained_goes_on_with_a_text(a_run, capsys):
    flags = ["--model", str(a_run), "--length", "32", "--most", "9", "--format", "float"]
    chat.main(["7 times", *flags])
    printed = capsys.readouterr()
    assert 0 < len(printed.out) <= 10
    assert "8 tokens read and 9 written" in printed.err


@pytest.mark.exhaustive
def test_a_training_resumes_to_the_same_numbers(a_run, tmp_path):
    shutil.copytree(a_run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    train.main(["--resume", "--out", str(tmp_path / "run")])
    assert metrics(tmp_path / "run") == metrics(a_run)
    assert (tmp_path / "run" / "samples.txt").read_text() == (a_run / "samples.txt").read_text()


@pytest.mark.exhaustive
def test_a_training_in_float8_learns(folder, tmp_path):
    flags = ["--data", str(folder), "--out", str(tmp_path / "fp8"), "--precision", "fp8"]
    train.main([*FLAGS, *flags])
    losses = [record["loss"] for record in metrics(tmp_path / "fp8") if "loss" in record]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.exhaustive
def test_a_training_on_python_says_how_many_samples_parse(tmp_path, monkeypatch, capsys):
    learned = tuple(f"import os\n\nx = {i}\n".encode() * 20 for i in range(40))
    texts = Texts(learned, learned[:2], "few")
    monkeypatch.setattr(train, "read_texts", lambda folder, *, held_out: texts)
    out = tmp_path / "python"
    train.main([*FLAGS, "--samples", "4", "--out", str(out)])
    result = json.loads((out / "metrics.json").read_text())
    share = result["samples_that_parse"]
    assert share in (0, 0.25, 0.5, 0.75, 1)
    printed = capsys.readouterr().out
    assert f"{share:.0%} of 4 samples are Python" in printed
    assert f"xz {result['xz']:.3f}, bz2 {result['bz2']:.3f}" in printed


@pytest.mark.exhaustive
def test_pythons_library_has_texts():
    texts = read_texts(None, held_out=0.05)
    assert sum(map(len, texts.train)) > 5e6
    assert sum(map(len, texts.held_out)) > 1e5
