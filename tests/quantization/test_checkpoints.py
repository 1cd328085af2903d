"""Checkpoints of other libraries: recorded ones bit for bit, and what is refused."""

import functools
import json
import os
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxfused
import jaxfused.nnx
from jaxfused.quantization import from_tensors, load, with_kernels
from jaxfused.quantization.checkpoints import safetensors_file
from jaxfused.quantization.checkpoints.files import config_of, tensors_of
from jaxfused.quantization.checkpoints.load import planned
from tests.support.checkpoints import ULPS, digest, layer_in, weights_in
from tests.support.grids import parametrize


@functools.cache
def recorded():
    with np.load(Path(__file__).parents[1] / "recorded" / "formats.npz") as arrays:
        return dict(arrays)


NAMES = sorted({key.split("/")[0] for key in recorded()} - ULPS.keys())
QUICK = ("compressed-tensors-int4-asym", "gptqmodel-order-asym-g32", "autoawq-gemm-g32")


def put_files(name, folder):
    for key, content in recorded().items():
        of, file = key.split("/")
        if of == name and file != "expected":
            (folder / file).write_bytes(content.tobytes())


@parametrize("name", NAMES, quick=[i for i, name in enumerate(NAMES) if name in QUICK])
def test_recorded_checkpoints_bit_for_bit(name, tmp_path):
    put_files(name, tmp_path)
    dtype, right = recorded()[f"{name}/expected"]
    assert digest(weights_in(layer_in(tmp_path), jnp.dtype(str(dtype)))) == right


# --- what a checkpoint may be ---------------------------------------------------------------------

INT8 = dict(
    quant_method="compressed-tensors",
    format="int-quantized",
    ignore=["lm_head"],
    config_groups={
        "g": dict(targets=["Linear"], weights=dict(num_bits=8, type="int", strategy="channel"))
    },
)


def int8(n=8, k=16, scale=0.5):
    return dict(
        weight=np.arange(n * k, dtype=np.int8).reshape(n, k),
        weight_scale=np.full((n, 1), scale, np.float32),
    )


def named(layer, tensors):
    return {f"{layer}.{part}": a for part, a in tensors.items()}


def save(folder, *files, config=INT8, index=None):
    for i, tensors in enumerate(files):
        safetensors_file.write(folder / f"model-{i}.safetensors", tensors, {})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(dict(quantization_config=config)))
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=index)))


def test_shards_names_and_other_tensors(tmp_path):
    up, down = named("m.up", int8()), named("m.down", int8(4, 8))
    more = {"lm_head.weight": np.ones((2, 2), np.float32), "m.k_scale": np.float32(3).reshape(1)}
    index = dict.fromkeys(up, "model-0.safetensors")
    index |= dict.fromkeys((*down, *more), "model-1.safetensors")
    save(tmp_path, up, down | more, index=index)
    seen = []
    found = load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert found.keys() == {"m.up", "m.down", *more}
    assert found["m.up"].array.shape == (16, 8) and found["m.k_scale"] == 3
    assert seen[-1][0] == seen[-1][1] and sorted(seen) == seen and len(seen) == 4
    assert load(tmp_path, prefix="m.down").keys() == {"m.down"}
    one = load(tmp_path / "model-0.safetensors")
    assert one.keys() == {"m.up"}
    kernel = one["m.up"].kernel
    np.testing.assert_array_equal(kernel.array.dequantize(), 0.5 * int8()["weight"].T)
    left_out = {**INT8, "modules_to_not_convert": ["up"]}
    assert isinstance(load(tmp_path, config=left_out)["m.up.weight"], jax.Array)


def test_configs_of_old_files(tmp_path):
    for file, name in (
        ("quantize_config.json", "autogptq-4bit"),
        ("quant_config.json", "autoawq-gemm-g32"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        put_files(name, folder)
        own = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert own.pop("quant_method") in name
        (folder / "config.json").write_text("{}")
        (folder / file).write_text(json.dumps(own))
        assert load(folder)["up"].array.dtype == "int4"


def test_layers_by_their_names(tmp_path):
    groups = dict(INT8["config_groups"])
    groups["named"] = dict(
        targets=["re:.*down"], weights=dict(groups["g"]["weights"], strategy="x")
    )
    config = {**INT8, "config_groups": groups, "ignore": ["re:.*gate"]}
    save(tmp_path, named("m.up", int8()) | named("m.gate", int8()), config=config)
    found = load(tmp_path)
    assert isinstance(found["m.gate.weight"], jax.Array) and found["m.up"].array.dtype == "int8"
    with pytest.raises(ValueError, match="layer 'down': the config has strategy 'x'"):
        from_tensors(int8(), config, name="down")


def test_one_layer_of_tensors():
    layer = from_tensors(int8() | dict(bias=np.ones(8, np.float32)), INT8)
    x = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    y = jax.jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(y, x @ (0.5 * int8()["weight"].T) + 1, rtol=1e-5)
    with pytest.raises(ValueError, match=r"are those of 2 quantised layers \('a', 'b'\)"):
        from_tensors(named("a", int8()) | named("b", int8()), INT8)


@pytest.mark.parametrize("zero", [None, -3])
@pytest.mark.parametrize("form", ["pack-quantized", "int-quantized"])
def test_one_scale_and_zero_point_for_a_whole_matrix(form, zero):
    """The two have no axis of outputs in the strategy "tensor" of compressed-tensors 0.18.0."""
    codes = np.random.default_rng(0).integers(-8, 8, (5, 24)).astype(np.int8)
    parts = dict(weight_scale=np.array([0.5], np.float32), weight=codes)
    if zero is not None:
        parts["weight_zero_point"] = np.array([zero], np.int8)
    if form == "pack-quantized":
        words = (parts.pop("weight") + 8).astype(np.uint32).reshape(5, 3, 8) << np.arange(0, 32, 4)
        parts["weight_packed"] = words.sum(-1).astype(np.uint32).view(np.int32)
        parts["weight_shape"] = np.array([5, 24])
    args = dict(num_bits=8 if form == "int-quantized" else 4, type="int", strategy="tensor")
    groups = {"group_0": dict(targets=["Linear"], weights=args)}
    config = dict(quant_method="compressed-tensors", format=form, config_groups=groups)
    weights = from_tensors(parts, config).dequantize().T
    np.testing.assert_array_equal(weights, 0.5 * (codes.astype(np.float32) - (zero or 0)))


def test_permuted_inputs(tmp_path):
    put_files("gptqmodel-order-asym-g32", tmp_path)
    layer = layer_in(tmp_path)
    weights = np.asarray(layer.dequantize())
    x = np.random.default_rng(0).normal(size=(2, weights.shape[0])).astype(np.float32)
    np.testing.assert_allclose(layer(x), x @ weights, rtol=1e-4, atol=1e-3)
    model = jaxfused.nnx.MLP(weights.shape[0], weights.shape[1], rngs=nnx.Rngs(0))
    found = with_kernels(model, {"up": layer}).up(x)
    np.testing.assert_allclose(found, x @ weights, rtol=1e-4, atol=1e-3)
    shapes = nnx.eval_shape(
        lambda: jaxfused.nnx.MLP(weights.shape[0], weights.shape[1], rngs=nnx.Rngs(0))
    )
    assert with_kernels(shapes, {"up": layer}).up.kernel.permutation is layer.permutation
    for kernels, message in (
        ({"down": layer}, r"kernel for 'down' has shape .*, but the layer's has"),
        ({"mlp/up": layer}, r"'mlp/up' is the path of no linear layer.*'down', 'up'"),
        ({"up": jnp.ones((8, 16))}, "the kernel for 'up' is a ArrayImpl; pass what load returns"),
    ):
        with pytest.raises(ValueError, match=f"with_kernels: .*{message}"):
            with_kernels(model, kernels)


def test_placement_on_shards(tmp_path):
    put_files("compressed-tensors-int4-sym", tmp_path)
    mesh = jax.make_mesh((1,), ("m",))
    rows, columns = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("m",), (None, "m")))
    array = load(tmp_path, sharding=lambda name, shape: rows)["up"].array
    assert array.values.sharding.spec == PartitionSpec(None, "m")
    assert array.scale.sharding.spec == PartitionSpec("m", None)
    assert load(tmp_path, sharding=columns)["up"].array.values.sharding.spec[0] == "m"
    with pytest.raises(ValueError, match="sharding returned a int for 'up'"):
        load(tmp_path, sharding=lambda name, shape: 3)


# --- what is refused ------------------------------------------------------------------------------


def cut(folder):
    file = folder / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def header(change):
    def of(folder):
        file = folder / "model-0.safetensors"
        content = file.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        text = change(content[8 : 8 + size])
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])

    return of


def indexed(name):
    return lambda folder: (folder / "model.safetensors.index.json").write_text(
        json.dumps(dict(weight_map={"a.weight": name}))
    )


def link(folder):
    target = folder.parent / f"{folder.name}-elsewhere.safetensors"
    (folder / "model-0.safetensors").rename(target)
    (folder / "model-0.safetensors").symlink_to(target)


def pickled(folder):
    (folder / "model-0.safetensors").rename(folder / "pytorch_model.bin")


def config(**changes):
    return lambda folder: (folder / "config.json").write_text(
        json.dumps(dict(quantization_config={**INT8, **changes}))
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut, "bytes of tensors, but its header is about .* truncated"),
        (lambda f: (f / "model-0.safetensors").write_bytes(b"123"), "has 3 bytes, too few"),
        (
            lambda f: (f / "model-0.safetensors").write_bytes(b"\xff" * 64),
            "truncated or no safetensors",
        ),
        (header(lambda text: text.replace(b'"shape"', b'"shapf"')), "of shape None"),
        (header(lambda text: text.replace(b"[8, 16]", b"[8, 17]")), r"of 136 bytes, but at bytes"),
        (header(lambda text: text.replace(b"[8, 16]", b"[-8,-16]")), "which are no sizes"),
        (header(lambda text: text.replace(b"[8, 16]", b"[0, %d]" % 2**62)), "than arrays have"),
        (header(lambda text: text.replace(b'"I8"', b'"I3"')), "of dtype 'I3', not one of"),
        (header(lambda text: b"[" * 100_000), "no JSON of distinct names"),
        (header(lambda text: text.replace(b"a.weight_scale", b"a.weight")), "a name occurs twice"),
        (indexed("../elsewhere.safetensors"), "leads out of the folder"),
        (indexed("/etc/passwd"), "leads out of the folder"),
        (indexed("missing.safetensors"), "does not exist"),
        (indexed("pytorch_model.bin"), "is a pickle, which runs code"),
        (link, "no file in the checkpoint's folder"),
        (pickled, "pytorch_model.bin, a pickle, which runs code"),
        (lambda f: (f / "config.json").unlink(), "no config.json with a quantization_config"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is no JSON"),
        (config(quant_method="unheard"), "quant_method 'unheard', but gptq, .* are read; pass"),
        (config(quant_method="aqlm"), "a codebook of vectors"),
        (config(format="marlin-24"), "layer 'a': the config has format 'marlin-24'"),
        (config(config_groups={}), "no group of the config has it as a target"),
    ],
)
def test_damaged_and_hostile_checkpoints(change, words, tmp_path):
    save(tmp_path, named("a", int8()))
    change(tmp_path)
    with pytest.raises(ValueError, match=f"^load: .*{words}"):
        load(tmp_path)


def test_links_of_the_hubs_cache_are_followed(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "0a1b", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save(blobs, named("a", int8()))
    for file in list(blobs.iterdir()):
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    (tmp_path / "model").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "model"):
        assert load(folder).keys() == {"a"}
    assert load(snapshot / "model-0.safetensors").keys() == {"a"}


def test_no_device_is_read(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no file in the checkpoint's folder"):
        load(tmp_path, config=INT8)
    with pytest.raises(ValueError, match="does not exist"):
        load(tmp_path / "nowhere")


def renamed(*names):
    """Returns a change of a GGUF file's names, each with the one that takes its place."""

    def text(name):
        return struct.pack("<Q", len(name)) + name.encode()

    def change(content):
        for old, new in names:
            content = content.replace(text(old), text(new))
        return content

    return change


UP, NORM = "blk.0.ffn_up.weight", "output_norm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            renamed((UP, "blk.000.ffn_up0.weight"), (NORM, "blk.000.ffn_up0")),
            "has a layer 'blk.000.ffn_up0' and a tensor of this name",
        ),
        (renamed((NORM, "blk.0.ffn_up.bias"), ("a", "aa")), r"has shape \(4,\), but its layer has"),
        (lambda c: c[:-64], "truncated or damaged"),
        (lambda c: c[:40], "ends within its header"),
        (lambda c: c[:10], "too few bytes"),
        (lambda c: b"GGML" + c[4:], "no GGUF file of version 2 or 3"),
        (lambda c: c[:8] + b"\xff" * 8 + c[16:], "which no GGUF file has|ends within|are read"),
        (
            lambda c: c.replace(
                struct.pack("<IQQI", 2, 512, 8, 2), struct.pack("<IQQI", 2, 512, 8, 9)
            ),
            "of type 9, but F32, .* are read",
        ),
        (
            lambda c: c.replace(
                struct.pack("<IQQI", 2, 512, 8, 2), struct.pack("<IQQI", 2, 511, 8, 2)
            ),
            r"of shape \(8, 511\) in blocks of 32",
        ),
    ],
)
def test_damaged_gguf(change, words, tmp_path):
    put_files("gguf-q4_0", tmp_path)
    file = tmp_path / "model.gguf"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=f"^load: .*({words})"):
        load(file)


def test_what_files_hold_as_it_is_stored(tmp_path):
    put_files("gguf-q4_0", tmp_path)
    metadata = jaxfused.quantization.read_metadata(tmp_path / "model.gguf")
    assert metadata["general.architecture"] == "llama"
    assert metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    content = (tmp_path / "model.gguf").read_bytes()
    texts = struct.pack("<IQ", 8, 2) + b"".join(struct.pack("<Q", 1) + t for t in (b"a", b"b"))
    numbers = struct.pack("<IQ9h", 3, 9, *range(-4, 5))
    (tmp_path / "model.gguf").write_bytes(content.replace(texts, numbers))
    metadata = jaxfused.quantization.read_metadata(tmp_path / "model.gguf")
    assert metadata["tokenizer.ggml.tokens"] == list(range(-4, 5))
    arrays = {"w": np.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "n": np.array(5)}
    safetensors_file.write(tmp_path / "model.safetensors", arrays, {"made": "here"})
    found = jaxfused.quantization.read_tensors(tmp_path)
    assert found["w"].dtype == jnp.bfloat16 and found["n"] == 5
    np.testing.assert_array_equal(found["w"], arrays["w"])
    assert jaxfused.quantization.read_metadata(tmp_path) == {"made": "here"}
    same = {"layers.0.wq": arrays["w"]}
    safetensors_file.write(tmp_path / "consolidated.safetensors", same, {"made": "elsewhere"})
    assert jaxfused.quantization.read_tensors(tmp_path).keys() == arrays.keys()


def test_a_split_gguf(tmp_path):
    put_files("gguf-q4_0", tmp_path)
    for i in (1, 2):
        content = (tmp_path / "model.gguf").read_bytes()
        part = content.replace(b"blk.0", f"blk.{i}".encode()).replace(
            b"output", b"0utput" if i > 1 else b"output"
        )
        (tmp_path / f"m-{i:05d}-of-00002.gguf").write_bytes(part)
    found = load(tmp_path / "m-00002-of-00002.gguf")
    assert {"blk.1.ffn_up", "blk.2.ffn_up", "output_norm.weight"} < found.keys()
    (tmp_path / "m-00002-of-00002.gguf").write_bytes((tmp_path / "model.gguf").read_bytes())
    (tmp_path / "m-00001-of-00002.gguf").write_bytes((tmp_path / "model.gguf").read_bytes())
    with pytest.raises(ValueError, match=r"has tensor .*, which another part has too"):
        load(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    with pytest.raises(ValueError, match=r"m-00001-of-00002\.gguf does not exist"):
        load(tmp_path / "m-00002-of-00002.gguf")


GPTQ = dict(quant_method="gptq", bits=4, group_size=8, sym=True)


def gptq(**changes):
    right = dict(
        qweight=np.zeros((2, 8), np.int32),
        qzeros=np.zeros((2, 1), np.int32),
        scales=np.ones((2, 8), np.float16),
        g_idx=np.arange(16, dtype=np.int32) // 8,
    )
    return right | changes


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        (gptq(scales=np.full((2, 8), np.nan, np.float16)), GPTQ, r"scales is NaN at \(0, 0\)"),
        (gptq(scales=np.ones((3, 8), np.float16)), GPTQ, r"scales has shape \(3, 8\).*\(2, 8\)"),
        (gptq(qzeros=np.zeros((2, 2), np.int32)), GPTQ, "qzeros has shape"),
        (gptq(qweight=np.zeros((2, 8), np.int64)), GPTQ, "qweight has dtype int64.* int32"),
        (gptq(g_idx=np.zeros(16, np.int32)), GPTQ, "g_idx has group numbers 0 to 0"),
        (gptq(g_idx=np.zeros(15, np.int32)), GPTQ, r"g_idx has shape \(15,\)"),
        (gptq(), {**GPTQ, "bits": 5}, "the config has bits 5, but it has to be one of 2, 3, 4, 8"),
        (gptq(), {**GPTQ, "group_size": 0}, "group_size is 0"),
        (gptq(), {**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (dict(qweight=gptq()["qweight"]), GPTQ, "it has qweight, but no scales"),
        (int8(scale=np.nan), INT8, r"weight_scale is NaN at \(0, 0\)"),
        (int8() | dict(weight_scale=np.ones((4, 1), np.float32)), INT8, r"scales \(8, 1\)"),
        ({}, INT8, "those of 0 quantised layers"),
        (int8(), {**INT8, "ignore": ["re:("]}, r"pattern '\(', which cannot be read"),
        (int8(), "int8", "config is a str; pass the quantization_config"),
    ],
)
def test_layers_that_are_not_as_the_config_says(tensors, config, words):
    with pytest.raises(ValueError, match=f"^from_tensors: .*{words}"):
        from_tensors(tensors, config)


# --- what is written ------------------------------------------------------------------------------


def written_and_read(folder, array, bias):
    layer = jaxfused.quantization.QuantizedLayer(array, bias=bias)
    jaxfused.quantization.save(folder, {"m.up": layer, "norm": jnp.ones(3)})
    found = load(folder)
    assert found["norm"].shape == (3,)
    return layer, found["m.up"]


@parametrize(
    "options",
    [
        dict(dtype="int4", group_size=128, layout="columns"),
        dict(dtype="int4", group_size=64, symmetric=False),
        dict(dtype="int8"),
        dict(dtype="int8", group_size=64, symmetric=False),
        dict(dtype="float8_e4m3fn", per_tensor=True),
        dict(dtype="float8_e4m3fn", group_size=(128, 4)),
    ],
    quick=(0,),
)
def test_saved_layers_are_loaded_again(options, tmp_path):
    w = np.random.default_rng(0).normal(size=(256, 12)).astype(np.float32)
    bias = jnp.arange(12.0)
    layer, found = written_and_read(tmp_path, jaxfused.quantize(w, **options), bias=bias)
    np.testing.assert_array_equal(found.dequantize(), layer.dequantize())
    np.testing.assert_array_equal(found.bias, bias)
    x = np.random.default_rng(0).normal(size=(2, 256)).astype(np.float32)
    np.testing.assert_allclose(found(x), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["__metadata__", 1])
def test_names_are_those_that_safetensors_have(name, tmp_path):
    with pytest.raises(ValueError, match=r"save: an array has the name .* pass it under another"):
        jaxfused.quantization.save(tmp_path, {name: np.ones(2)})


def test_bytes_of_the_other_order_are_turned(tmp_path):
    jaxfused.quantization.save(tmp_path, {"n": np.arange(3, dtype=">i4")})
    assert jaxfused.quantization.read_tensors(tmp_path)["n"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("given", ["s", None, np.ones(2, complex), np.array([{}])])
def test_what_is_no_array_of_numbers_is_not_written(given, tmp_path):
    with pytest.raises(ValueError, match=r"save: .l. is a .* of dtype .*; pass one"):
        jaxfused.quantization.save(tmp_path, {"l": given})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", "[]", "is no JSON object"),
        ("model.safetensors.index.json", "{}", "model.safetensors.index.json, which would be read"),
    ],
)
def test_what_the_folder_has_must_fit(name, text, words, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"^save: .*{words}"):
        jaxfused.quantization.save(tmp_path, {"l": jaxfused.quantize(jnp.ones((4, 4)))})
    assert sorted(tmp_path.iterdir()) == [tmp_path / name]


def test_no_tensor_replaces_another(tmp_path):
    layers = {"l": jaxfused.quantize(jnp.ones((4, 4))), "l.weight": np.ones(2)}
    with pytest.raises(ValueError, match=r"save: two arrays would be written as 'l\.weight'"):
        jaxfused.quantization.save(tmp_path, layers)


def test_what_is_mapped_from_a_folder_is_written_to_it_again(tmp_path):
    jaxfused.quantization.save(tmp_path, {"norm": np.arange(10_000.0)})
    stored = jaxfused.quantization.read_tensors(tmp_path)
    jaxfused.quantization.save(tmp_path, {**stored, "more": np.ones(3)})
    again = jaxfused.quantization.read_tensors(tmp_path)
    assert again.keys() == {"norm", "more"}
    for norm in (stored["norm"], again["norm"]):
        np.testing.assert_array_equal(norm, np.arange(10_000.0))


def test_what_has_no_format_is_not_written(tmp_path):
    q = jaxfused.quantize(jnp.ones((64, 4)), group_size=32, layout="rows")
    offset = jaxfused.QuantizedArray(q.values, q.scale, None, -2, offset=q.scale)
    for array, words in (
        (offset, "it has offsets"),
        (jaxfused.QuantizedArray(q.values, q.scale, None, -2, group_size=40), "last group of 40"),
        (jaxfused.quantization.QuantizedLayer(q, jnp.arange(64)), "it has a permutation"),
        (jaxfused.quantize(jnp.ones((4, 4)), axis=-1), "it has axis -1"),
        (jaxfused.quantize(jnp.ones((4, 4)), group_size=(2, 2)), r"scales have shape \(2, 2\)"),
    ):
        with pytest.raises(ValueError, match=f"^save: layer 'm' cannot be written .*{words}"):
            jaxfused.quantization.save(tmp_path, {"m": array})


CHANGES = (
    lambda a: a[:-1],
    lambda a: a[..., :-1],
    lambda a: a[None],
    lambda a: a[:0],
    lambda a: a.reshape(-1),
    lambda a: np.swapaxes(a, 0, -1).copy(),
    lambda a: a.astype(np.float64),
)
IN_TENSORS = [name for name in NAMES if not name.startswith("gguf")]


@parametrize("name", IN_TENSORS, quick=[IN_TENSORS.index("transformers-metal-4bit")])
def test_changed_tensors_are_refused_with_a_sentence_or_read(name, tmp_path):
    """Every change of a tensor's shape or dtype is found before a layer is built, or does no harm."""
    put_files(name, tmp_path)
    tensors, metadata = tensors_of("load", tmp_path)
    config = {"metadata": metadata, **config_of("load", tmp_path)}
    refused = 0
    for part, array in tensors.items():
        for change in CHANGES if array.ndim else CHANGES[2:3]:
            try:
                plans, _ = planned("load", {**tensors, part: change(array)}, config)
            except ValueError as error:
                assert str(error).startswith("load: ")
                refused += 1
                continue
            for build, _ in plans.values():
                build()
    assert refused > len(tensors)
