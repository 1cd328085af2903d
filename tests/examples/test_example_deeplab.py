"""DeepLabV3 of examples/unet against torchvision's, and the files that its weights come from."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfused.nnx
from examples.errors import ExampleError
from examples.unet.deeplab import DEEPLABS, DeepLabSize, DeepLabV3
from examples.unet.torchvision_weights import assemble, load_deeplab, torch_name
from jaxfused.quantization.checkpoints import safetensors_file
from tests.recorded import deeplab, values

SMALL = DeepLabSize((1, 2, 1, 2), width=4, head=4, rates=(2, 3))


@functools.cache
def state_dict(size, *, classes=3, auxiliary=False):
    """Returns a state dict as torchvision lays it out, by the names of our own arrays."""
    model = nnx.eval_shape(
        lambda: DeepLabV3(size, channels=3, classes=classes, auxiliary=auxiliary, rngs=nnx.Rngs(0))
    )
    arrays = {}
    for path, like in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model))):
        name = torch_name(jax.tree_util.keystr(path, simple=True, separator="."))
        shape = like.shape
        if len(shape) == 4:
            shape = shape[3], shape[2], *shape[:2]
        elif len(shape) == 2:
            shape = (*shape[::-1], 1, 1)
        arrays[name] = deeplab.array(name, shape)
    arrays["backbone.bn1.num_batches_tracked"] = np.array(7)
    return arrays


@pytest.mark.exhaustive
def test_files_say_how_large_the_model_is(tmp_path):
    arrays = state_dict(SMALL, auxiliary=True)
    np.savez(tmp_path / "w.npz", **arrays)
    safetensors_file.write(tmp_path / "w.safetensors", arrays, {})
    a, b = (
        load_deeplab(f"{tmp_path}/w.{suffix}", rates=(2, 3)) for suffix in ("npz", "safetensors")
    )
    np.testing.assert_array_equal(
        a.stages[1][1].second.conv.kernel[...],
        arrays["backbone.layer2.1.conv2.weight"].transpose(2, 3, 1, 0),
    )
    np.testing.assert_array_equal(
        a.pooled.norm.var[...], arrays["classifier.0.convs.4.2.running_var"]
    )
    leaves = [jax.tree.leaves(nnx.state(model)) for model in (a, b)]
    assert all(np.array_equal(*pair) for pair in zip(*leaves, strict=True))
    assert len(leaves[0]) == len(arrays) - 1 and a.auxiliary_head is not None
    assert assemble(state_dict(SMALL), rates=(2, 3)).auxiliary_head is None


def test_arrays_are_those_of_torchvision():
    shapes = values.load("segmentation.npz")["DeepLabV3"].shapes
    ours = nnx.eval_shape(
        lambda: DeepLabV3(
            DEEPLABS["deeplabv3-resnet50"],
            channels=3,
            classes=5,
            auxiliary=True,
            rngs=nnx.Rngs(0),
        )
    )
    found = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(ours)))
    names = {torch_name(jax.tree_util.keystr(p, simple=True, separator=".")) for p, _ in found}
    assert names == set(shapes)


def test_faults_of_a_state_dict_are_named(tmp_path):
    def refused(message, **changes):
        arrays = state_dict(SMALL) | changes
        kept = {name: array for name, array in arrays.items() if array is not None}
        with pytest.raises(ExampleError, match=message):
            assemble(kept, rates=(2, 3))

    missing = "backbone.layer2.0.bn3.running_mean"
    refused(f"but {re.escape(missing)} is missing", **{missing: None})
    refused("fc.weight has no place", **{"fc.weight": np.zeros((2, 2))})
    shape = {"classifier.1.weight": np.zeros((4, 5, 3, 3), np.float32)}
    refused(r"\[4, 5, 3, 3\] where the model has \[4, 4, 3, 3\]", **shape)
    refused("this one has .*bias, ", **{"backbone.conv1.weight": None})

    for name, content in (
        ("w.pth", b""),
        ("w.npz", b"no"),
        ("w.safetensors", b"{"),
        ("x.npz", None),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ExampleError, match=f"weights must be .*{name}.* is .*; save"):
            load_deeplab(tmp_path / name)
    np.savez(tmp_path / "pickled.npz", a=np.array([{}], object))
    with pytest.raises(ExampleError, match=r"pickled\.npz is not"):
        load_deeplab(tmp_path / "pickled.npz")


@pytest.mark.exhaustive
@pytest.mark.long
def test_logits_are_torchvisions():
    rows = values.load("segmentation.npz")
    row = rows["DeepLabV3"]
    model = assemble({name: deeplab.array(name, shape) for name, shape in row.shapes.items()})
    folded = nnx.clone(model)
    jaxfused.nnx.fold_batch_norms(folded)
    run = nnx.jit(lambda model, images: model.with_auxiliary(images))
    for name, sizes in (("DeepLabV3", (65, 97)), ("DeepLabV3 of whole factors", (64, 96))):
        images = rows[name].input("images", (2, 3, *sizes)).transpose(0, 2, 3, 1)
        for each in (model, folded):
            for key, ours in zip(("out", "aux"), run(each, jnp.asarray(images)), strict=True):
                wanted = rows[name].results[key].transpose(0, 2, 3, 1)
                error = np.abs(np.asarray(ours)[:, ::8, ::8] - wanted).max()
                assert error < 1e-5 * np.abs(wanted).max(), (name, key, error)
