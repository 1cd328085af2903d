"""examples.unet.export: files that answer, on other machines, for images of any size, in few bits."""

import json
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from examples.errors import ExampleError
from examples.unet import artifact, export, network, segment, train
from examples.unet.artifact import Artifact
from examples.unet.runner import Runner, Stages, _parts, _windows
from jaxfused import dispatch
from tests.examples.test_example_unet import SHORT

SHAPES = ((1, 16, 24), (2, 32, 32))


@pytest.fixture(scope="module")
def net():
    model = train.UNet(base=4, levels=2, groups=2, channels=3, rngs=nnx.Rngs(0))
    half = (0.5,) * 3
    return network.Network(model, "U-Net", 3, ("background", "cell"), half, half, "float32")


@pytest.fixture(scope="module")
def file(net, tmp_path_factory):
    pytest.importorskip("flatbuffers", reason="it is in the extra examples")
    path = tmp_path_factory.mktemp("export") / "model.segment"
    artifact.write(path, net, precision="float32", shapes=SHAPES, say=lambda text: None)
    return path


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def direct(net, image):
    return [np.asarray(a[0]) for a in jax.jit(lambda x: net.answer(net.model, x))(image[None])]


def with_manifest(file, tmp_path, change):
    """Copies a file with another manifest."""
    path = tmp_path / "other.segment"
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "manifest.json":
                manifest = json.loads(data)
                change(manifest)
                data = json.dumps(manifest)
            new.writestr(name, data)
    return path


def test_a_file_answers_as_the_network(net, file):
    runner = Runner(Artifact(file))
    image = picture(32, 32)
    stages = Stages()
    found = runner.segment(image, stages)
    classes, sure = direct(net, image)
    np.testing.assert_array_equal(found.classes, classes)
    np.testing.assert_allclose(found.sure, sure.astype(int), atol=1)
    assert sure.min() >= 127 and len(np.unique(classes)) == 2
    assert list(stages.seconds) == ["prepare", "copy in", "load", "network", "copy out"]


@pytest.mark.exhaustive
def test_other_sizes_are_padded_or_cut_and_images_come_in_order(net, file):
    runner = Runner(Artifact(file))
    assert runner.size_for(16, 20) == (16, 24) and runner.size_for(17, 20) == (32, 32)
    assert runner.size_for(100, 3) == (32, 32)
    images = [picture(h, w, i) for i, (h, w) in enumerate(
        [(32, 32), (32, 32), (32, 32), (9, 5), (50, 70), (1, 1), (30, 32)]
    )]  # fmt: skip
    results = list(runner.segment_all(iter(images)))
    assert [r.classes.shape for r in results] == [image.shape[:2] for image in images]
    for image, result in zip(images[:3], results, strict=False):
        np.testing.assert_array_equal(result.classes, direct(net, image)[0])
    padded = np.pad(images[3], ((0, 7), (0, 19), (0, 0)), mode="symmetric")
    np.testing.assert_array_equal(results[3].classes, direct(net, padded)[0][:9, :5])
    # The whole image lies in tiles: in their middle they answer as one program of its size would.
    window = next(_windows((50, 70), (32, 32), 0.25))
    tile = images[4][window.top : window.top + 32, window.left : window.left + 32]
    kept = direct(net, tile)[0][window.rows, window.columns]
    np.testing.assert_array_equal(results[4].classes[window.rows, window.columns], kept)
    assert list(runner.segment_all([])) == []


@pytest.mark.parametrize(
    ("length", "tile", "overlap"), [(5, 8, 2), (8, 8, 2), (9, 8, 4), (50, 16, 5)]
)
def test_tiles_decide_on_every_pixel_once(length, tile, overlap):
    seen = []
    for start, kept in _parts(length, tile, overlap):
        assert start >= 0 and start <= kept.start < kept.stop <= start + tile
        seen += range(kept.start, kept.stop)
    assert seen == list(range(length))


def test_another_machine_or_version_is_refused_and_recompiles(net, file, tmp_path):
    def change(manifest):
        manifest["machine"] |= dict(jaxlib="0.0.1", device="NVIDIA T4")

    other = with_manifest(file, tmp_path, change)
    with pytest.raises(
        ExampleError, match=r"0\.0\.1 for jaxlib where .* NVIDIA T4 for .*--recompile"
    ):
        Artifact(other)
    image = picture(32, 32)
    found = Runner(Artifact(other, recompile=True)).segment(image)
    np.testing.assert_array_equal(found.classes, direct(net, image)[0])
    with zipfile.ZipFile(other) as stored:
        portable = jax.export.deserialize(bytearray(stored.read("portable/32x32")))
    assert portable.platforms == ("cpu", "cuda")
    assert "@mosaic_gpu" not in portable.mlir_module()


def test_broken_files_are_named(file, tmp_path):
    content = file.read_bytes()
    cases = {
        "gone": None,
        "text": b"no",
        "short": content[: len(content) // 2],
        "flipped": content.replace(b'"format": 1', b'"format": 7'),
    }
    with pytest.raises(ExampleError, match=r"format 1, but .* has 7; export it again"):
        Artifact(with_manifest(file, tmp_path, lambda m: m.update(format=7)))
    with pytest.raises(ExampleError, match=r"cannot be read .*description"):
        Artifact(with_manifest(file, tmp_path, lambda m: m.pop("description")))
    for name, data in cases.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(ExampleError, match=rf"{name} cannot be read .*; export it again"):
            Artifact(tmp_path / name)
    with pytest.raises(
        ExampleError, match=r"uint8 \[height, width, 3\] .* but got float64 \[4, 4, 3\]"
    ):
        Runner(Artifact(file)).segment(np.zeros((4, 4, 3)))


def test_kernels_are_narrowed_and_norms_stay(net):
    model = network.narrowed(net.model, jnp.bfloat16)
    assert model.down[0].first.conv.kernel[...].dtype == jnp.bfloat16
    assert model.down[0].first.norm.scale[...].dtype == jnp.float32


@pytest.mark.exhaustive
def test_images_in_and_masks_out(file, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for i in range(3):
        Image.fromarray(picture(20 + i, 40, i)).save(tmp_path / f"in/{i}.png")
    segment.main([str(file), str(tmp_path / "in"), "--out", str(tmp_path / "out")])
    assert "3 images" in capsys.readouterr().err
    for i in range(3):
        with Image.open(tmp_path / f"out/{i}.png") as mask:
            assert mask.size == (40, 20 + i) and set(np.unique(mask)) <= {0, 1}
    with pytest.raises(ExampleError, match=r"in/0\.png would both be 0\.png"):
        twice = [str(tmp_path / "in/0.png")] * 2
        segment.main([str(file), *twice, "--out", str(tmp_path / "out")])
    with pytest.raises(ExampleError, match=r"in/0\.png is both"):
        segment.main([str(file), str(tmp_path / "in"), "--out", str(tmp_path / "in")])


def test_impossible_exports_are_refused(tmp_path):
    def refused(message, *argv):
        with pytest.raises(ExampleError, match=message):
            export.main(["--out", str(tmp_path / "x.segment"), *argv])
        assert not (tmp_path / "x.segment").exists()

    refused("nowhere is missing", str(tmp_path / "nowhere"))
    (tmp_path / "w.npz").write_bytes(b"")
    refused("int8 chooses its scales by images", str(tmp_path / "w.npz"), "--precision", "int8")
    refused(r"w\.npz is not", str(tmp_path / "w.npz"))
    refused(r"w\.npz is both", str(tmp_path / "w.npz"), "--out", str(tmp_path / "w.npz"))
    with pytest.raises(SystemExit):
        export.main([str(tmp_path), "--size", "512"])


@pytest.mark.exhaustive
@pytest.mark.long
def test_int8_scores_as_bfloat16(made_once, tmp_path, capsys):
    pytest.importorskip("flatbuffers", reason="it is in the extra examples")
    run = str(made_once("nuclei", lambda out: train.main([*SHORT, "--out", str(out)])))
    found = {}
    for precision in ("bfloat16", "int8", "fp8"):
        capsys.readouterr()
        out = str(tmp_path / precision)
        flags = ["--precision", precision, "--calibrate", "2", "--batch-size", "8"]
        export.main([run, *flags, "--out", out])
        found[precision] = float(capsys.readouterr().out.rsplit("mean IoU ", 1)[1].split(",")[0])
    assert found["bfloat16"] > 0.8
    assert abs(found["int8"] - found["bfloat16"]) < 0.005
    assert abs(found["fp8"] - found["bfloat16"]) < 0.005


@pytest.mark.exhaustive
def test_the_portable_program_has_no_kernels():
    pytest.importorskip("flatbuffers", reason="it is in the extra examples")
    half, shape = (0.5,) * 3, (1, 64, 64, 3)
    model = nnx.eval_shape(
        lambda: train.UNet(
            base=64, levels=2, groups=32, channels=3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
        )
    )
    net = network.Network(model, "U-Net", 3, ("background", "cell"), half, half, "bfloat16")
    graphdef, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)

    def program(weights, images):
        return net.answer(nnx.merge(graphdef, jax.tree.unflatten(tree, weights)), images)

    images = jax.ShapeDtypeStruct(shape, jnp.uint8)
    with dispatch.assume(dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)):
        text = jax.jit(program).trace(leaves, images).lower(lowering_platforms=("cuda",)).as_text()
        portable = artifact._portable(program, leaves, shape[1:])
    assert "@mosaic_gpu" in text
    text = jax.export.deserialize(bytearray(portable)).mlir_module()
    assert "@mosaic_gpu" not in text and "@jaxfused" not in text
