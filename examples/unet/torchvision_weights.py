"""Parameters of a `DeepLabV3` from a state dict of torchvision, in a .safetensors or .npz file.

The state dict stores weights as [O, I, height, width]; here they are [height, width, I, O].
"""

import re
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxfused
from examples.errors import ExampleError
from examples.unet.deeplab import DeepLabSize, DeepLabV3

_COUNTER = "num_batches_tracked"
"""Suffix of the names of batch norms' counters, which only training reads."""


def load_deeplab(
    path: str | Path,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rates: tuple[int, ...] = (12, 24, 36),
) -> DeepLabV3:
    """Returns the model of a file that holds a state dict, such as that of `deeplabv3_resnet50`.

    The file says how many blocks and classes there are, and whether there is an auxiliary head.

    Args:
      path: ends in .safetensors or .npz, written from `model.state_dict()`. Files of torch.save are not
        read, because they are pickles, which may run any code.
      dtype: of the computation.
      rates: dilations of the head's windows; a state dict has only their number.

    Raises:
      ExampleError: the file cannot be read, or lacks an array, has one of another shape or too many.
    """
    return assemble(read_state_dict(path), dtype=dtype, rates=rates)


def read_state_dict(path: str | Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a .safetensors or .npz file by name.

    Raises:
      ExampleError: it is missing, broken or of another format.
    """
    path = Path(path)
    remedy = "save model.state_dict() with safetensors.torch.save_file, or with numpy.savez"
    suffix = path.suffix.lower()
    if suffix not in (".safetensors", ".npz"):
        raise ExampleError(
            f"weights must be a .safetensors or .npz file, since others may hold programs, but {path}"
            f" is none; {remedy}."
        )
    try:
        if suffix == ".safetensors":
            return jaxfused.quantization.read_tensors(path)
        with np.load(path, allow_pickle=False) as stored:
            return dict(stored)
    except Exception as error:  # NumPy's reader of zip files raises several exceptions.
        raise ExampleError(
            f"weights must be readable, but {path} is not ({' '.join(str(error).split())}); {remedy}."
        ) from error


def assemble(
    arrays: Mapping[str, np.ndarray],
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rates: tuple[int, ...] = (12, 24, 36),
) -> DeepLabV3:
    """Returns the model with the arrays of a state dict.

    Raises:
      ExampleError: it lacks an array, has one of another shape, or one that has no place.
    """
    arrays = {name: array for name, array in arrays.items() if not name.endswith(_COUNTER)}
    size, classes, auxiliary = _described(arrays, rates)
    channels = arrays["backbone.conv1.weight"].shape[1]
    model = nnx.eval_shape(
        lambda: DeepLabV3(
            size,
            channels=channels,
            classes=classes,
            auxiliary=auxiliary,
            dtype=dtype,
            rngs=nnx.Rngs(0),
        )
    )
    graphdef, shapes = nnx.split(model)
    used: set[str] = set()
    faults: list[str] = []

    def parameter(path: tuple, like: jax.ShapeDtypeStruct) -> np.ndarray:
        name = torch_name(jax.tree_util.keystr(path, simple=True, separator="."))
        used.add(name)
        if name not in arrays:
            faults.append(f"{name} is missing")
            return np.zeros(like.shape, like.dtype)
        array = arrays[name]
        if array.ndim == 4:
            array = array.transpose(2, 3, 1, 0)
        if len(like.shape) == 2 and array.shape[:2] == (1, 1):
            array = array[0, 0]
        if array.shape != like.shape:
            wanted = like.shape[2:][::-1] + like.shape[:2] if len(like.shape) == 4 else like.shape
            faults.append(
                f"{name} has shape {list(arrays[name].shape)} where the model has {list(wanted)}"
            )
            return np.zeros(like.shape, like.dtype)
        return array.astype(like.dtype)

    state = jax.tree_util.tree_map_with_path(parameter, nnx.to_pure_dict(shapes))
    faults += [f"{name} has no place" for name in arrays if name not in used]
    if faults:
        shown = "; ".join(faults[:20]) + (f"; and {len(faults) - 20} more" if faults[20:] else "")
        raise ExampleError(
            f"a state dict must hold the arrays of torchvision's DeepLabV3 over a ResNet, but {shown};"
            " pass that of deeplabv3_resnet50 or deeplabv3_resnet101."
        )
    nnx.replace_by_pure_dict(shapes, state)
    return nnx.merge(graphdef, shapes)


def _described(
    arrays: Mapping[str, np.ndarray], rates: tuple[int, ...]
) -> tuple[DeepLabSize, int, bool]:
    """Returns size, number of classes, and whether there is an auxiliary head, from names and shapes."""
    found = [re.fullmatch(r"backbone\.layer([1-4])\.(\d+)\.conv1\.weight", name) for name in arrays]
    blocks = [(int(match[1]), int(match[2])) for match in found if match]
    depths = tuple(sum(stage == i for stage, _ in blocks) for i in range(1, 5))
    stem, head = (
        arrays.get(name, np.zeros(0)).shape
        for name in ("backbone.conv1.weight", "classifier.4.weight")
    )
    if 0 in depths or len(stem) != 4 or len(head) != 4:
        raise ExampleError(
            "a state dict must be that of torchvision's DeepLabV3 over a ResNet with bottlenecks, with"
            " backbone.conv1.weight, backbone.layer1.0.conv1.weight to layer4 and classifier.4.weight,"
            f" but this one has {', '.join(list(arrays)[:4]) or 'no arrays'}, ...; pass that of"
            " deeplabv3_resnet50 or deeplabv3_resnet101."
        )
    auxiliary = any(name.startswith("aux_classifier.") for name in arrays)
    return DeepLabSize(depths, stem[0], head[1], rates), head[0], auxiliary


_PARTS = {"first": "1", "second": "2", "third": "3"}
_LAYERS = {
    "stem": ("backbone.conv1", "backbone.bn1"),
    "pooled": ("classifier.0.convs.4.1", "classifier.0.convs.4.2"),
    "project": ("classifier.0.project.0", "classifier.0.project.1"),
    "last": ("classifier.1", "classifier.2"),
    "auxiliary_last": ("aux_classifier.0", "aux_classifier.1"),
}
_HEADS = {"head": "classifier.4", "auxiliary_head": "aux_classifier.4"}
_ENDINGS = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}


def torch_name(path: str) -> str:
    """Returns torchvision's name of the array at a path such as "stages.0.1.first.conv.kernel"."""
    *owner, ending = path.split(".")
    ending = _ENDINGS[ending]
    if owner[0] in _HEADS:
        return f"{_HEADS[owner[0]]}.{ending}"
    *layer, part = owner
    if layer[0] == "stages":
        _, stage, block, name = layer
        prefix = f"backbone.layer{int(stage) + 1}.{block}"
        if name == "shortcut":
            pair = (f"{prefix}.downsample.0", f"{prefix}.downsample.1")
        else:
            pair = (f"{prefix}.conv{_PARTS[name]}", f"{prefix}.bn{_PARTS[name]}")
    elif layer[0] == "branches":
        pair = tuple(f"classifier.0.convs.{layer[1]}.{i}" for i in (0, 1))
    else:
        pair = _LAYERS[layer[0]]
    return f"{pair[part == 'norm']}.{ending}"
