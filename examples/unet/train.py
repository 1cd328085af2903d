"""Trains a U-Net to segment: `python -m examples.unet.train`, `--help` for the flags.

Without --data it learns cell nuclei from three quarters of a microscope's image, on any CPU in about
a minute; with `--data DIR` it learns the images in DIR/images and their masks in DIR/masks.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx

import jaxfused
from examples import augmentation, flags, runs, training
from examples.errors import run_command
from examples.images import Batch, Loader
from examples.runs import Run, State
from examples.training import to_float
from examples.unet import dataset
from examples.unet.model import UNet
from examples.unet.picture import PICTURED, save_picture
from examples.unet.tiles import predict_rows
from jaxfused import augment

_NUCLEI_DEFAULTS = dict(
    base=12,
    levels=3,
    groups=4,
    crop=64,
    crops=128,
    held_out=0.25,
    epochs=20,
    batch_size=8,
    learning_rate=3e-3,
    warmup_epochs=1.0,
    weight_decay=0.01,
    evaluate_every=1,
    checkpoint_every=5,
    workers=0,
)
_FOLDER_DEFAULTS = dict(
    base=64,
    levels=5,
    groups=32,
    crop=256,
    crops=1,
    held_out=0.1,
    epochs=100,
    batch_size=32,
    learning_rate=1e-3,
    warmup_epochs=5.0,
    weight_decay=0.01,
    evaluate_every=5,
    checkpoint_every=5,
    workers=min(os.cpu_count() or 1, 16),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    args = _flags(argv)
    data = load_data(args)
    epoch_steps = training.steps_per_epoch(args, data.train_size)
    graphdef, params = create(args, channels=data.channels, size=args.crop)
    run = _open_run(args, data)

    optimizer = training.make_optimizer(args, epoch_steps)
    state = dict(params=params, opt_state=jax.jit(optimizer.init)(params))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(
        f"U-Net of {args.base} to {args.base * 2 ** (args.levels - 1)} channels: {count:,}"
        f" parameters, {args.dtype} on {jax.devices()[0].device_kind}; {data.train_size} crops of"
        f" {args.crop} x {args.crop} pixels an epoch, {data.held_out.images} held-out images",
        file=sys.stderr,
    )

    chain = None
    if args.augment is not None:
        chain = augmentation.of_masks(args.augment, turn=not args.no_turn, dtype=args.dtype)

    def loss_of(params: dict, batch: Batch, key: jax.Array) -> jax.Array:
        if chain is None:
            images, masks = to_float(batch["image"], args.dtype), batch["mask"]
        else:
            changed = chain(key, augment.Batch(batch["image"], masks=batch["mask"]))
            images, masks = changed.images, changed.masks
        logits = nnx.merge(graphdef, params)(images)
        return jaxfused.segmentation_loss(logits, masks)

    predict = make_predict(graphdef, dtype=args.dtype)

    def segmented(state: State, batch: Batch) -> np.ndarray:
        """Returns the probabilities of a whole image, computed as in `examples.unet.predict`."""
        rows = predict_rows(
            batch["image"],
            lambda tiles: predict(state["params"], tiles),
            tile=args.crop,
            overlap=args.crop // 2,
            batch_size=args.batch_size,
        )
        return np.concatenate(list(rows))

    with Loader(data.held_out, args.workers) as loader:

        def evaluate(state: State) -> dict[str, float]:
            batches = loader.batches(range(data.held_out.images))
            return scores((segmented(state, batch) >= 0.5, batch["mask"]) for batch in batches)

        state, result = training.fit(
            run,
            state,
            training.make_train_step(loss_of, optimizer, seed=args.seed, clip_norm=args.clip_norm),
            data.train_batch,
            args=args,
            epoch_steps=epoch_steps,
            evaluate=evaluate,
        )
        shown = loader.batches(range(min(PICTURED, data.held_out.images)))
        save_picture(
            args.out / "predictions.png", [(batch, segmented(state, batch)) for batch in shown]
        )
    training.save_curve(
        args.out / "curve.png", run.records(), metric="test_dice", label="held-out Dice"
    )
    print(
        f"held-out Dice {result['test_dice']:.4f}, IoU {result['test_iou']:.4f} on"
        f" {data.held_out.images} images, trained at {result['images_per_second']:,.0f} crops/s;"
        f" see {args.out}/curve.png, {args.out}/predictions.png and {args.out}/metrics.json"
    )
    print(
        training.optimizer_share(
            optimizer, state, args=args, images_per_second=result["images_per_second"]
        )
    )


def create(flags: argparse.Namespace, *, channels: int, size: int) -> tuple[nnx.GraphDef, dict]:
    """Returns structure and initial parameters of a run's model, for squares of `size` pixels."""

    def build() -> UNet:
        return UNet(
            base=flags.base,
            levels=flags.levels,
            groups=flags.groups,
            channels=channels,
            dtype=flags.dtype,
            rngs=nnx.Rngs(flags.seed),
        )

    return training.create(build, jax.ShapeDtypeStruct((1, size, size, channels), flags.dtype))


def make_predict(graphdef: nnx.GraphDef, *, dtype: str) -> Callable[[dict, np.ndarray], jax.Array]:
    """Returns a jitted function (params, uint8 images) -> foreground probability at each pixel."""

    @jax.jit
    def predict(params: dict, images: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(nnx.merge(graphdef, params)(to_float(images, dtype)))

    return predict


def scores(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    r"""Returns Dice and IoU of the foreground, over the pixels of all images together.

    .. math:: \text{Dice} = \frac{2 |P \cap T|}{|P| + |T|}, \quad
              \text{IoU} = \frac{|P \cap T|}{|P \cup T|}

    Both scores are 1 if there is no foreground and none was predicted.

    Args:
      pairs: pairs of a prediction and its truth, both [H, W], not 0 in the foreground.
    """
    both = predicted = true = 0
    for prediction, truth in pairs:
        both += int(np.count_nonzero(np.logical_and(prediction, truth)))
        predicted += int(np.count_nonzero(prediction))
        true += int(np.count_nonzero(truth))
    if predicted + true == 0:
        return dict(test_dice=1.0, test_iou=1.0)
    return dict(test_dice=2 * both / (predicted + true), test_iou=both / (predicted + true - both))


def _flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.unet.train",
        description="Trains a U-Net on an image of cell nuclei, or on a folder of images and masks.",
        epilog="Defaults are those of the nuclei. With --data they are: "
        + ", ".join(f"{name} {value}" for name, value in _FOLDER_DEFAULTS.items()),
    )
    flags.add_flags(parser, out="runs/unet")
    parser.set_defaults(**_NUCLEI_DEFAULTS)
    images = parser.add_argument_group("data")
    images.add_argument(
        "--data", type=Path, metavar="DIR", help="a folder with images/ and masks/, alike in names"
    )
    images.add_argument(
        "--crop", type=flags.whole(1), metavar="PIXELS", help="height and width (%(default)s)"
    )
    images.add_argument(
        "--crops", type=flags.whole(1), help="of each image in an epoch (%(default)s)"
    )
    images.add_argument(
        "--held-out",
        type=flags.number(above=0, below=1),
        metavar="SHARE",
        help="of the image's width, or of the folder's images (%(default)s)",
    )
    images.add_argument("--no-turn", action="store_true", help="neither turn nor mirror crops")
    augmentation.add_flag(images)
    model = parser.add_argument_group("model")
    model.add_argument(
        "--base", type=flags.whole(1), help="channels of the first level (%(default)s)"
    )
    model.add_argument(
        "--levels",
        type=flags.whole(1),
        help="resolutions, each of twice the channels (%(default)s)",
    )
    model.add_argument("--groups", type=flags.whole(1), help="of the norms (%(default)s)")
    if parser.parse_args(argv).data is not None:
        parser.set_defaults(**_FOLDER_DEFAULTS)
    return flags.parse_flags(parser, argv)


def load_data(args: argparse.Namespace) -> dataset.Data:
    """Loads the images of the flags."""
    shared = dict(
        batch_size=args.batch_size,
        seed=args.seed,
        crop=args.crop,
        crops=args.crops,
        turn=not args.no_turn,
        plain=args.augment is not None,
        held_out=args.held_out,
    )
    return dataset.nuclei(**shared) if args.data is None else dataset.folder(args.data, **shared)


def _open_run(args: argparse.Namespace, data: dataset.Data) -> Run:
    if not args.resume:
        config = dict(flags=flags.saved_flags(args), channels=data.channels, data=data.fingerprint)
        return Run.start(args.out, config)
    run = Run.load(args.out)
    runs.note_other_data(run, data.fingerprint)
    return run


if __name__ == "__main__":
    run_command(main)
