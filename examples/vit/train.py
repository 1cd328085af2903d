"""Trains a Vision Transformer: `python -m examples.vit.train`, `--help` for the flags.

Without --data it learns the handwritten digits that scikit-learn ships, on any CPU in about two
minutes; with `--data DIR` it learns the images in DIR/train/CLASS and DIR/val/CLASS, or DIR/CLASS.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import optax
from flax import nnx

import jaxfused
from examples import augmentation, flags, processes, runs, training
from examples.errors import ExampleError, run_command
from examples.images import Batch, Loader
from examples.multi_gpu import launch, mesh
from examples.placement import ONE_DEVICE, OneDevice
from examples.runs import Run, State
from examples.training import make_train_step, to_float
from examples.vit import data as vit_data
from examples.vit.model import MODELS, VisionTransformer
from examples.vit.sheet import save_sheet
from jaxfused import augment

_DIGITS_DEFAULTS = dict(
    model="vit-digits",
    pool="mean",
    image_size=8,
    epochs=80,
    batch_size=32,
    learning_rate=5e-3,
    warmup_epochs=5.0,
    weight_decay=0.05,
    drop_path=0.0,
    held_out=0.2,
    evaluate_every=2,
    checkpoint_every=20,
    workers=0,
)
_FOLDER_DEFAULTS = dict(
    model="vit-s16",
    pool="token",
    image_size=224,
    epochs=90,
    batch_size=256,
    learning_rate=1e-3,
    warmup_epochs=5.0,
    weight_decay=0.1,
    drop_path=0.1,
    held_out=0.1,
    evaluate_every=1,
    checkpoint_every=1,
    workers=min(os.cpu_count() or 1, 16),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    parser = make_parser("examples.vit.train", out="runs/vit")
    mesh.add_flags(parser)
    launch.start(parser.parse_args(argv))
    args = parse_flags(parser, argv)
    size = MODELS[args.model]
    tokens = (args.image_size // size.patch) ** 2 + (args.pool == "token")
    train(args, mesh.placement(args.mesh, heads=size.heads, tokens=tokens))


class Create(Protocol):
    """Function that makes the model of the flags: its structure and its initial parameters."""

    def __call__(
        self,
        args: argparse.Namespace,
        *,
        channels: int,
        classes: int,
        placement: OneDevice = ONE_DEVICE,
    ) -> tuple[nnx.GraphDef, dict]: ...


def train(
    args: argparse.Namespace, placement: OneDevice = ONE_DEVICE, *, create: Create | None = None
) -> None:
    """Trains as the flags say, on the devices of `placement`; `create` makes another model."""
    create = create_vit if create is None else create
    data = load_data(args, rows=placement.rows(args.batch_size))
    epoch_steps = training.steps_per_epoch(args, data.train_size)
    channels, classes = data.channels, len(data.classes)
    graphdef, params = create(args, channels=channels, classes=classes, placement=placement)
    run = _open_run(args, data)
    labels = data.held_out.labels

    optimizer = training.make_optimizer(args, epoch_steps)
    state = dict(params=params, opt_state=placement.init(optimizer.init, params))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    if processes.is_first():
        print(
            f"{args.model}: {count:,} parameters, {args.dtype} on {placement};"
            f" {data.train_size} training and {len(labels)} held-out images of {classes} classes",
            file=sys.stderr,
        )

    loss_of = make_loss(
        graphdef, label_smoothing=args.label_smoothing, dtype=args.dtype, chain=make_chain(args)
    )
    train_step = make_train_step(
        loss_of, optimizer, seed=args.seed, clip_norm=args.clip_norm, placement=placement
    )
    predict = make_predict(graphdef, dtype=args.dtype, placement=placement)

    def held_out_logits(state: State) -> np.ndarray:
        stream = processes.in_step(loader.batches(data.held_out.batches))
        logits = np.concatenate([predict(state["params"], batch["image"]) for batch in stream])
        return logits[: len(labels)]

    def evaluate(state: State) -> dict[str, float]:
        logits = held_out_logits(state)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        accuracy = np.mean(logits.argmax(axis=-1) == labels)
        return dict(test_loss=float(losses.mean()), test_accuracy=float(accuracy))

    with Loader(data.held_out, args.workers) as loader:
        state, result = training.fit(
            run,
            state,
            train_step,
            data.train_batch,
            args=args,
            epoch_steps=epoch_steps,
            evaluate=evaluate,
        )
        logits = held_out_logits(state)
    share = training.optimizer_share(
        optimizer,
        state,
        args=args,
        images_per_second=result["images_per_second"],
        placement=placement,
    )
    if not processes.is_first():
        return
    save_sheet(args.out / "predictions.png", data, logits)
    training.save_curve(
        args.out / "curve.png", run.records(), metric="test_accuracy", label="held-out accuracy"
    )
    print(
        f"held-out accuracy {result['test_accuracy']:.2%} on {len(labels)} images,"
        f" trained at {result['images_per_second']:,.0f} images/s; see {args.out}/curve.png,"
        f" {args.out}/predictions.png and {args.out}/metrics.json"
    )
    print(share)


def create_vit(
    args: argparse.Namespace,
    *,
    channels: int,
    classes: int,
    placement: OneDevice = ONE_DEVICE,
) -> tuple[nnx.GraphDef, dict]:
    """Returns the model of the flags, as its structure and its initial parameters.

    Raises:
      ExampleError: the model is no Vision Transformer, or refuses its sizes.
    """
    if args.model not in MODELS:
        raise ExampleError(
            f"the model must be one of {', '.join(MODELS)}, but it is {args.model}; use the programs of"
            " examples.classify, or another run."
        )

    def build() -> VisionTransformer:
        return VisionTransformer(
            MODELS[args.model],
            image_size=args.image_size,
            channels=channels,
            classes=classes,
            pool=args.pool,
            dropout=args.dropout,
            drop_path=args.drop_path,
            dtype=args.dtype,
            precision=args.precision,
            unroll=args.unroll,
            rngs=nnx.Rngs(args.seed),
        )

    images = jax.ShapeDtypeStruct((1, args.image_size, args.image_size, channels), args.dtype)
    return training.create(build, images, placement=placement)


def make_chain(args: argparse.Namespace) -> augment.Chain | None:
    """Returns the chain of `--augment`, or None."""
    if args.augment is None:
        return None
    return augmentation.of_classes(
        args.augment,
        crop=None if args.data is None else args.image_size,
        least_crop=args.least_crop,
        flip=not args.no_flip,
        dtype=args.dtype,
    )


def make_loss(
    graphdef: nnx.GraphDef,
    *,
    label_smoothing: float,
    dtype: str,
    chain: augment.Chain | None = None,
) -> Callable[[dict, Batch, jax.Array], jax.Array]:
    """Returns a function (params, batch, key) -> the mean cross-entropy of augmented images."""

    def loss_of(params: dict, batch: Batch, key: jax.Array) -> jax.Array:
        if chain is None:
            images = to_float(batch["image"], dtype)
        else:
            key, own = jax.random.split(key)
            images = chain(own, batch["image"])
        logits = nnx.merge(graphdef, params)(images, key=key)
        return jaxfused.softmax_cross_entropy(
            logits, batch["label"], label_smoothing=label_smoothing
        )

    return loss_of


def make_predict(graphdef: nnx.GraphDef, *, dtype: str, placement: OneDevice = ONE_DEVICE):
    """Returns a compiled function (params, uint8 images) -> logits."""

    def predict(params: dict, images: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(to_float(images, dtype))

    return placement.predict(predict)


def make_parser(
    module: str,
    *,
    out: str,
    models: Mapping[str, Any] = MODELS,
    description: str = "Trains a Vision Transformer on handwritten digits, or on a folder of images.",
) -> argparse.ArgumentParser:
    """Returns the parser of a training of one of `models`, started by `python -m module`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        epilog="Defaults are those of the digits. With --data they are: "
        + ", ".join(f"{name} {value}" for name, value in _FOLDER_DEFAULTS.items()),
    )
    flags.add_flags(parser, out=out)
    parser.set_defaults(**_DIGITS_DEFAULTS)
    images = parser.add_argument_group("data")
    images.add_argument("--data", type=Path, metavar="DIR", help="a folder of images by class")
    images.add_argument("--image-size", type=flags.whole(1), metavar="PIXELS")
    images.add_argument(
        "--held-out",
        type=flags.number(above=0, below=1),
        metavar="SHARE",
        help="of each class, where there is no DIR/val (%(default)s)",
    )
    images.add_argument(
        "--least-crop",
        type=flags.number(above=0, below=1),
        default=0.25,
        metavar="SHARE",
        help="smallest area of a random crop, with --data (%(default)s)",
    )
    images.add_argument("--no-flip", action="store_true", help="never mirror, with --data")
    augmentation.add_flag(images)
    model = parser.add_argument_group("model")
    model.add_argument("--model", choices=models, metavar="NAME", help=", ".join(models))
    model.add_argument(
        "--pool", choices=("token", "mean"), help="where the class is read (%(default)s)"
    )
    share = flags.number(least=0, below=1)
    model.add_argument("--dropout", type=share, default=0.0)
    model.add_argument("--drop-path", type=share, help="stochastic depth (%(default)s)")
    model.add_argument("--label-smoothing", type=share, default=0.1)
    model.add_argument(
        "--precision", choices=("fp8",), help="of the blocks' products (that of --dtype)"
    )
    model.add_argument(
        "--unroll",
        type=flags.whole(1),
        metavar="BLOCKS",
        help="compile this many blocks and loop over them (all, without a loop: the fastest)",
    )
    return parser


def parse_flags(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    *,
    folder_model: str = str(_FOLDER_DEFAULTS["model"]),
) -> argparse.Namespace:
    """Returns the flags, with the defaults of the data that they name."""
    if parser.parse_args(argv).data is not None:
        parser.set_defaults(**{**_FOLDER_DEFAULTS, "model": folder_model})
    return flags.parse_flags(parser, argv)


def load_data(args: argparse.Namespace, *, rows: slice = slice(None)) -> vit_data.Data:
    """Loads the images that the flags name, `rows` of each batch."""
    shared = dict(
        batch_size=args.batch_size,
        seed=args.seed,
        image_size=args.image_size,
        held_out=args.held_out,
        rows=rows,
    )
    if args.data is None:
        return vit_data.digits(**shared)
    decoded = None if args.augment is None else augmentation.decoded_size(args.image_size)
    return vit_data.folder(
        args.data, **shared, least_crop=args.least_crop, flip=not args.no_flip, decoded=decoded
    )


def _open_run(args: argparse.Namespace, data: vit_data.Data) -> Run:
    if not args.resume:
        config = dict(
            flags=flags.saved_flags(args),
            classes=data.classes,
            channels=data.channels,
            data=data.fingerprint,
        )
        return Run.start(args.out, config)
    run = Run.load(args.out)
    check_classes(run, data)
    runs.note_other_data(run, data.fingerprint)
    return run


def check_classes(run: Run, data: vit_data.Data) -> None:
    """Raises ExampleError if the data's classes are not those of the run's training."""
    saved = tuple(run.config["classes"])
    if data.classes != saved:
        raise ExampleError(
            f"a run keeps its classes, but {run.directory} was trained on {len(saved)}"
            f" ({_some(saved)}) and the data has {len(data.classes)} ({_some(data.classes)}); pass"
            " the --data of the run, or another --out to start a new run."
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


if __name__ == "__main__":
    run_command(main)
