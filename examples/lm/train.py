"""Trains a language model on bytes: `python -m examples.lm.train`, `--help` for the flags.

Without --data it learns the sources of Python's own library, on two CPU cores for about five minutes;
with `--data DIR` the text files of a folder. It prints the bits per byte of held-out files, compared
with xz, and writes samples.
"""

import argparse
import ast
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from examples import flags, processes, runs, training
from examples.errors import ExampleError, run_command
from examples.lm import sizes
from examples.lm.data import START, TOKENS, Rows, Texts, packed, read_texts
from examples.lm.engine import Engine, Text
from examples.lm.model import LanguageModel
from examples.lm.steps import Sampling
from examples.multi_gpu import launch, mesh
from examples.placement import ONE_DEVICE, OneDevice
from examples.runs import Run, State

_LIBRARY_DEFAULTS = dict(
    model="lm-byte",
    length=256,
    epochs=8,
    epoch_rows=512,
    batch_size=16,
    learning_rate=4e-3,
    warmup_epochs=0.5,
    weight_decay=0.1,
    held_out=0.04,
    evaluate_every=2,
    checkpoint_every=2,
    samples=100,
    workers=0,
)
_FOLDER_DEFAULTS = dict(
    _LIBRARY_DEFAULTS,
    model="lm-85m",
    length=2048,
    epochs=4,
    epoch_rows=None,
    batch_size=32,
    learning_rate=6e-4,
    checkpoint_every=1,
    evaluate_every=1,
)
_SAMPLES_AT_ONCE = 50


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    parser = make_parser("examples.lm.train", out="runs/lm")
    mesh.add_flags(parser)
    launch.start(parser.parse_args(argv))
    args = parse_flags(parser, argv)
    config = sizes.MODELS[args.model]
    options = dict(heads=config.key_heads, tokens=args.length, layers=config.layers)
    train(args, mesh.placement(args.mesh, is_causal=True, **options))


def train(args: argparse.Namespace, placement: OneDevice = ONE_DEVICE) -> None:
    """Trains as the flags say, on the devices of `placement`."""
    texts = read_texts(args.data, held_out=args.held_out)
    learned, held_out = (
        Rows(packed(part), args.length, args.batch_size, placement.rows(args.batch_size), args.seed)
        for part in (texts.train, texts.held_out)
    )
    if learned.count < 1:
        raise ExampleError(
            f"the texts to learn must have at least {2 * args.length + 1} tokens, two rows of --length"
            f" {args.length}, but have {len(learned.tokens)}; pass a shorter --length, or more texts."
        )
    epoch_rows = min(args.epoch_rows or learned.count, learned.count)
    epoch_steps = training.steps_per_epoch(args, epoch_rows, unit="rows")
    graphdef, params = create(args, placement)
    run = _open_run(args, texts)
    optimizer = training.make_optimizer(args, epoch_steps)
    state = dict(params=params, opt_state=placement.init(optimizer.init, params))
    compressed = texts.compressed()
    if processes.is_first():
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        sizes_of = (sum(map(len, part)) / 1e6 for part in (texts.train, texts.held_out))
        print(
            f"{args.model}: {count:,} parameters, {args.dtype} on {placement}; texts of"
            " {:.1f} MB to learn and {:.2f} MB held out".format(*sizes_of),
            file=sys.stderr,
        )
    train_step = training.make_train_step(
        sizes.make_loss(graphdef),
        optimizer,
        seed=args.seed,
        clip_norm=args.clip_norm,
        placement=placement,
    )
    sums_of = placement.predict(sizes.make_sums(graphdef))

    def evaluate(state: State) -> dict[str, float]:
        stream = processes.in_step(map(held_out.in_order, held_out.batches))
        sums = sum(np.asarray(sums_of(state["params"], b["text"])).sum(axis=0) for b in stream)
        return dict(bits_per_byte=float(sums[0] / sums[1] / math.log(2)))

    state, result = training.fit(
        run,
        state,
        train_step,
        learned,
        args=args,
        epoch_steps=epoch_steps,
        evaluate=evaluate,
        unit="rows",
    )
    if not processes.is_first():
        return
    result = report(args, run, result, compressed)
    if args.samples and placement is ONE_DEVICE:
        model = nnx.merge(graphdef, state["params"])
        run.finish(result | save_samples(args, sample(model, args)))


def report(
    args: argparse.Namespace,
    run: Run,
    result: dict[str, float],
    compressed: dict[str, float],
) -> dict[str, float]:
    """Draws the curve; prints, saves and returns the model's quality and the training's speed."""
    speed = result["rows_per_second"] * args.length
    whole = result | {"tokens_per_second": round(speed, 1)} | compressed
    run.finish(whole)
    training.save_curve(
        args.out / "curve.png", run.records(), metric="bits_per_byte", label="held-out bits a byte"
    )
    others = ", ".join(f"{name} {bits:.3f}" for name, bits in compressed.items())
    print(
        f"held-out text takes {result['bits_per_byte']:.3f} bits a byte ({others}), trained at"
        f" {speed:,.0f} tokens/s; see {args.out}/curve.png and {args.out}/metrics.json"
    )
    return whole


def sample(model: LanguageModel, args: argparse.Namespace) -> list[str]:
    """Returns documents that the model writes, up to --length tokens."""
    slots = min(args.samples, _SAMPLES_AT_ONCE)
    engine = Engine(model, [START], slots=slots, length=args.length, chunk=1)
    texts = [
        Text([START], args.length - 1, Sampling(temperature=args.temperature, seed=i))
        for i in range(args.samples)
    ]
    for text in texts:
        engine.submit(text)
    while engine.is_busy:
        engine.step()
    return [
        bytes(token for token in text.tokens if token < START).decode(errors="replace")
        for text in texts
    ]


def save_samples(args: argparse.Namespace, texts: Sequence[str]) -> dict[str, float]:
    """Writes the samples; prints and returns the share that is Python, if the data is its library."""
    path = args.out / "samples.txt"
    path.write_text(("\n" + "-" * 100 + "\n").join(texts))
    if args.data is not None:
        print(f"see {path} for {len(texts)} samples")
        return {}
    share = float(np.mean([parses(text) for text in texts]))
    print(f"{share:.0%} of {len(texts)} samples are Python, up to their last statement; see {path}")
    return dict(samples_that_parse=share)


def parses(text: str) -> bool:
    """Returns whether a text is valid Python up to its last statement, which may be cut short."""
    lines = text.splitlines(keepends=True)
    last = max((i for i, line in enumerate(lines) if line[0] not in " \t\n#)]}"), default=0)
    whole = "".join(lines[:last])
    try:
        with warnings.catch_warnings(action="ignore"):
            return bool(ast.parse(whole).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def create(
    args: argparse.Namespace, placement: OneDevice = ONE_DEVICE
) -> tuple[nnx.GraphDef, dict]:
    """Returns the model of the flags, as its structure and its initial parameters."""

    def build() -> LanguageModel:
        return LanguageModel(
            sizes.config_of(args.model, vocabulary=args.vocabulary),
            dtype=args.dtype,
            precision=args.precision,
            rngs=nnx.Rngs(args.seed),
        )

    tokens = jax.ShapeDtypeStruct((1, args.length), np.int32)
    return training.create(build, tokens, placement=placement)


def make_parser(module: str, *, out: str) -> argparse.ArgumentParser:
    """Returns the parser of a training, started by `python -m module`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description="Trains a language model on Python's library, or on a folder of texts.",
        epilog="Defaults are those of Python's library. With --data they are: "
        + ", ".join(f"{name} {value}" for name, value in _FOLDER_DEFAULTS.items()),
    )
    flags.add_flags(parser, out=out)
    parser.set_defaults(**_LIBRARY_DEFAULTS)
    texts = parser.add_argument_group("data")
    texts.add_argument("--data", type=Path, metavar="DIR", help="a folder of texts")
    texts.add_argument(
        "--length", type=flags.whole(2), metavar="TOKENS", help="of a row (%(default)s)"
    )
    texts.add_argument(
        "--epoch-rows",
        type=flags.whole(1),
        metavar="ROWS",
        help="that count as an epoch (%(default)s; all, if there is no number)",
    )
    texts.add_argument(
        "--held-out",
        type=flags.number(above=0, below=1),
        metavar="SHARE",
        help="of the files (%(default)s)",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", choices=sizes.MODELS, metavar="NAME", help=", ".join(sizes.MODELS)
    )
    model.add_argument(
        "--vocabulary",
        type=flags.whole(TOKENS),
        default=TOKENS,
        metavar="TOKENS",
        help="rows of the embedding, of which bytes use 257: a larger one costs what that of a"
        " tokenizer would (%(default)s)",
    )
    model.add_argument(
        "--precision", choices=("fp8",), help="of the blocks' products (that of --dtype)"
    )
    samples = parser.add_argument_group("samples")
    samples.add_argument(
        "--samples",
        type=flags.whole(0),
        metavar="N",
        help="to write at the end, without --mesh (%(default)s)",
    )
    samples.add_argument(
        "--temperature", type=flags.number(least=0), default=0.5, help="of samples (%(default)s)"
    )
    return parser


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags, with the defaults of the data that they name."""
    if parser.parse_args(argv).data is not None:
        parser.set_defaults(**_FOLDER_DEFAULTS)
    args = flags.parse_flags(parser, argv)
    # The folder of a resumed run comes from config.json, as text.
    args.data = None if args.data is None else Path(args.data)
    return args


def _open_run(args: argparse.Namespace, texts: Texts) -> Run:
    if not args.resume:
        config = dict(flags=flags.saved_flags(args), data=texts.fingerprint)
        return Run.start(args.out, config)
    run = Run.load(args.out)
    run.check_program("examples.lm.train", "epoch_rows")
    runs.note_other_data(run, texts.fingerprint, unit="texts")
    return run


if __name__ == "__main__":
    run_command(main)
