"""examples/lm: the models against transformers' own, configs, checkpoints and caches.

tests/recorded/record_lm.py ran transformers, with parameters that depend on their names;
tests/recorded/lm.npz has the config.json that it saved, and its logits.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfused
from examples.errors import ExampleError
from examples.lm.config import Rope, read_config
from examples.lm.loading import quantized
from examples.lm.quantized import quantized_kernel
from examples.lm.weights import assemble, load_model
from jaxfused.quantization import QuantizedLayer
from jaxfused.quantization.checkpoints import safetensors_file
from tests.recorded.values import load
from tests.support.grids import parametrize

ROWS = load("lm.npz")


def arrays_of(row):
    """Returns the arrays of a recorded model as a checkpoint has them."""
    return {name: lambda name=name: row[name] for name in row.shapes}


def model_of(row, **changes):
    config = read_config(row.options["config"] | changes)
    return assemble(config, arrays_of(row), dtype=jnp.float32)


def shallow(row):
    """Returns the first two layers of a recorded model."""
    config = row.options["config"] | dict(num_hidden_layers=2, layer_types=None)
    arrays = arrays_of(row)
    deeper = {name for name in arrays if ".2." in name or ".3." in name}
    kept = {name: read for name, read in arrays.items() if name not in deeper}
    return assemble(read_config(config), kept, dtype=jnp.float32)


@nnx.jit
def logits_of(model, tokens):
    return model.logits(model(tokens)[0])


@nnx.jit
def step(model, tokens, cache, count):
    features, cache = model(tokens, cache=cache, counts=count)
    return model.logits(features), cache


@parametrize("name", list(ROWS), quick=(0, 4, 5, 7))
def test_logits_are_those_of_transformers(name):
    row = ROWS[name]
    expected = row.results["y"]
    assert np.std(expected) > 0.1
    found = logits_of(model_of(row), jnp.array(row.options["tokens"]))
    np.testing.assert_allclose(found, expected, atol=3e-5 * np.abs(expected).max())


@parametrize("name", ["Llama 3", "Gemma 2", "Gemma 3", "SmolLM3", "gpt-oss"], quick=())
def test_a_cache_changes_nothing(name):
    row = ROWS[name]
    model, tokens = model_of(row), np.array(row.options["tokens"])
    cache = model.empty_cache(batch=2, length=12, chunk=4)
    found = []
    # The second sequence is one token behind, and four tokens are read of which three count.
    padded = np.pad(tokens, ((0, 0), (0, 4)))
    counts = np.array([4, 3])
    logits, cache = step(model, padded[:, :4], cache, counts)
    found.append(logits[0, :4])
    for i in range(4, 12):
        at = np.array([i, i - 1])
        logits, cache = step(model, padded[np.arange(2), at][:, None], cache, np.ones(2, int))
        found.append(logits[0])
        np.testing.assert_allclose(logits[1, 0], row.results["y"][1, i - 1], atol=1e-4)
    assert cache[0].lengths.tolist() == [12, 11]
    np.testing.assert_allclose(np.concatenate(found), row.results["y"][0], atol=1e-4)


# --- configs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "older"),
    [
        (
            "Llama 3",
            dict(
                rope_parameters=None,
                rope_theta=5e5,
                rope_scaling=dict(
                    rope_type="llama3",
                    factor=8.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=16,
                ),
                head_dim=None,
                torch_dtype="bfloat16",
            ),
        ),
        (
            "Gemma 3",
            dict(
                rope_parameters=None,
                layer_types=None,
                _sliding_window_pattern=None,
                sliding_window_pattern=6,
                rope_theta=1e6,
                rope_local_base_freq=1e4,
                rope_scaling=None,
                tie_word_embeddings=None,
            ),
        ),
        ("Gemma 2", dict(rope_parameters=None, rope_theta=1e4, layer_types=None)),
        ("Qwen2 with windows", dict(rope_parameters=None, rope_theta=1e4, layer_types=None)),
        ("SmolLM3", dict(no_rope_layers=None, rope_parameters=None, rope_theta=2e6)),
    ],
)
def test_keys_of_transformers_4_are_read(name, older):
    config = ROWS[name].options["config"]
    without = {key: value for key, value in (config | older).items() if value is not None}
    if name != "Llama 3":
        assert read_config(without) == read_config(config)
    assert read_config(config | older) == read_config(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model_type="phi3"), "must be one of llama.*but config.json has 'phi3'"),
        (dict(num_local_experts=8), "num_local_experts=8, which models of"),
        (dict(attn_logit_softcapping=9.0), "attn_logit_softcapping=9.0, which models of"),
        (
            dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5)),
            "partial_rotary_factor must be 1, .* 4 of 8 features",
        ),
        (dict(num_key_value_heads=3), "num_key_value_heads must divide .* 3 and 4"),
        (dict(pruned_heads={"0": [1]}), "pruned_heads=.* computes only {}"),
        (dict(model_type="bert"), "model_type must be one of llama, qwen2, .* but .* 'bert'"),
        (dict(residual_scale=0.5), "has residual_scale=0.5, which models of 'llama' are not known"),
        (dict(rope_interleaved=True), "rope_interleaved=True, which changes the results"),
        (dict(hidden_act="tanh"), "activation must be one of silu, .* but .* 'tanh'"),
        (dict(vocab_size=None), "positive integer as vocab_size, but has None"),
        (dict(rms_norm_eps=-1.0), "positive number as rms_norm_eps, but has -1.0"),
        (dict(rms_norm_eps=10**400), "positive number as rms_norm_eps, but has 1000"),
        (dict(hidden_size=10**400), "positive integer as hidden_size, but has 1000"),
        (dict(model_type="gemma3", text_config=5), "model_type must be one of llama"),
        (dict(model_type="smollm3", no_rope_layers=5), "no_rope_layers is 5; pass a list"),
        (dict(model_type="smollm3", no_rope_layers=[1]), "no_rope_layers has 1 numbers"),
        (
            dict(tie_word_embeddings="false"),
            "true or false as tie_word_embeddings, but has 'false'",
        ),
        (dict(model_type=["llama"]), r"model_type must be one of llama, .* \['llama'\]"),
        (dict(layer_types=4, sliding_window=4), "layer_types must name .* but is 4"),
        (dict(rope_parameters=dict(rope_type="odd", rope_theta=1.0)), "rope_type is 'odd'"),
        (
            dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)),
            "asks for a DynamicNTKRope",
        ),
        (dict(layer_types=["chunked"] * 4, sliding_window=4), "layer_types must name .* 'chunked'"),
        (dict(sliding_window=4), "says nothing of which layers have it; add layer_types"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes, message):
    with pytest.raises(ExampleError, match=message):
        read_config(ROWS["Llama 3"].options["config"] | changes)


def test_what_all_files_of_transformers_4_may_have_changes_nothing():
    config = ROWS["Llama 3"].options["config"]
    more = dict(
        num_beams=1, length_penalty=1.0, pruned_heads={}, torchscript=False, tokenizer_class="T"
    )
    assert read_config(config | more) == read_config(config)


def test_gemma_3s_own_files_say_only_what_is_not_the_default():
    """The text_config of google/gemma-3-4b-it has these keys alone."""
    text = dict(
        hidden_size=2560,
        intermediate_size=10_240,
        model_type="gemma3_text",
        num_hidden_layers=34,
        rope_scaling=dict(factor=8.0, rope_type="linear"),
        sliding_window=1024,
    )
    config = read_config(dict(model_type="gemma3", text_config=text, vision_config={}))
    assert (config.vocabulary, config.heads, config.key_heads) == (262_208, 8, 4)
    assert config.windows[:6] == (1024,) * 5 + (None,)
    assert config.ropes[0] == Rope(256, 1e4, None)
    assert config.ropes[5] == Rope(256, 1e6, jaxfused.LinearRope(8.0))


def test_gemma_3s_attention_has_no_cap():
    config = ROWS["Gemma 3"].options["config"]
    found = read_config(config | dict(attn_logit_softcapping=9.0, final_logit_softcapping=3.0))
    assert (found.attention_cap, found.final_cap) == (None, 3.0)
    both = dict(layer_types=None, sliding_window_pattern=2, _sliding_window_pattern=6)
    assert read_config(config | both).windows[:4] == (found.windows[0], None) * 2


def test_smollm3s_layers_without_a_rotation_have_its_window():
    config = ROWS["SmolLM3"].options["config"]
    on = dict(use_sliding_window=True, sliding_window=4, layer_types=None)
    found = read_config(config | on)
    assert [window is not None for window in found.windows] == [r is None for r in found.ropes]
    assert any(found.windows)


def test_qwens_window_is_4096_where_its_file_only_switches_it_on():
    config = {k: v for k, v in ROWS["Qwen3"].options["config"].items() if k != "sliding_window"}
    config = config | dict(use_sliding_window=True, max_window_layers=1, layer_types=None)
    windows = read_config(config).windows
    assert windows == (None,) + (4096,) * (len(windows) - 1)
    assert not any(read_config(config | dict(use_sliding_window=False)).windows)


# --- checkpoints ----------------------------------------------------------------------------------


def test_arrays_must_be_those_of_the_config():
    row = ROWS["Qwen3"]
    config, arrays = read_config(row.options["config"]), arrays_of(row)
    name = "model.layers.1.mlp.up_proj.weight"
    missing = {key: read for key, read in arrays.items() if key != name}
    for given, message in [
        (missing, "must hold 'layers.1.mlp.up_proj.weight', but does not"),
        (arrays | {"model.layers.1.odd": lambda: 0}, "'layers.1.odd' has none"),
        (arrays | {name: lambda: np.zeros((4, 32))}, r"must make an array of \[32, 48\]"),
    ]:
        with pytest.raises(ExampleError, match=message):
            assemble(config, given, dtype=jnp.float32)


def test_a_tied_head_is_the_embedding_unless_the_file_has_another():
    row = ROWS["Gemma 2"]
    config, arrays = read_config(row.options["config"]), arrays_of(row)
    assert config.is_tied
    embedding = arrays["model.embed_tokens.weight"]
    head = {"lm_head.weight": embedding}
    alone = {k: read for k, read in arrays.items() if read is not embedding}
    tokens = jnp.array(row.options["tokens"])[:, :4]
    other = {"lm_head.weight": lambda: -embedding()}
    same, swapped, untied = (
        logits_of(assemble(config, found, dtype=jnp.float32), tokens)
        for found in (arrays | head, alone | head, arrays | other)
    )
    np.testing.assert_array_equal(same, swapped)
    np.testing.assert_allclose(untied, -same, atol=1e-5)


def test_the_decoder_of_a_model_of_text_and_images_is_read():
    row = ROWS["Gemma 3"]
    whole = {"language_model." + name: read for name, read in arrays_of(row).items()}
    whole["vision_tower.embeddings.weight"] = whole["multi_modal_projector.scale"] = None
    config = read_config(dict(model_type="gemma3", text_config=row.options["config"]))
    found = assemble(config, whole, dtype=jnp.float32)
    expected = assemble(config, arrays_of(row), dtype=jnp.float32)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, nnx.state(found), nnx.state(expected)))


def test_files_of_several_shards_are_read(tmp_path):
    row = ROWS["Qwen2"]
    config = row.options["config"] | dict(quantization_config=None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    arrays = {name: read() for name, read in arrays_of(row).items()}
    # Of 16 bits NumPy has no dtype of its own.
    arrays |= {"model.norm.weight": arrays["model.norm.weight"].astype(jnp.bfloat16)}
    names = sorted(arrays)
    files = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in files.items():
        safetensors_file.write(tmp_path / file, {name: arrays[name] for name in part}, {})
    index = {name: file for file, part in files.items() for name in part}
    index_file = tmp_path / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": index}))
    found = load_model(tmp_path, dtype=jnp.float32)
    expected = assemble(
        found.config, {k: lambda v=v: v for k, v in arrays.items()}, dtype=jnp.float32
    )
    assert jax.tree.all(jax.tree.map(jnp.array_equal, nnx.state(found), nnx.state(expected)))

    file = tmp_path / "b.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ExampleError, match=r"b\.safetensors has .* it is truncated"):
        load_model(tmp_path, dtype=jnp.float32)


def test_experts_stay_in_mxfp4(tmp_path):
    """As in OpenAI's files: 32 codes of 4 bits with an exponent, [experts, outputs, inputs]."""
    row = ROWS["gpt-oss"]
    config = row.options["config"] | dict(quantization_config=dict(quant_method="mxfp4"))
    random = np.random.default_rng(0)
    stored = {name: row[name] for name in row.shapes}
    floats = dict(stored)
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2) * np.repeat([1, -1], 8)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = random.integers(121, 125, blocks.shape[:-1], np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = codes[np.stack([blocks & 15, blocks >> 4], axis=-1)].reshape(
            *blocks.shape[:-1], 32
        )
        values = values * np.exp2(scales[..., None] - 127.0)
        floats[name] = values.reshape(experts, outputs, inputs).swapaxes(1, 2).astype(np.float32)
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors_file.write(tmp_path / "model.safetensors", stored, {})
    model = load_model(tmp_path, dtype=jnp.float32)
    assert isinstance(model.blocks[0].mlp.gate_up.get_value(), jaxfused.QuantizedArray)
    wide = assemble(
        read_config(row.options["config"]),
        {name: lambda name=name: floats[name] for name in floats},
        dtype=jnp.float32,
    )
    tokens = jnp.array(row.options["tokens"])
    expected = logits_of(wide, tokens)
    np.testing.assert_allclose(logits_of(model, tokens), expected, atol=1e-4)
    # Few rows take the weights of their experts alone.
    np.testing.assert_allclose(logits_of(model, tokens[:1, :2]), expected[:1, :2], atol=1e-4)


@parametrize("dtype", ["int8", "int4"], quick=(0,))
def test_a_quantised_checkpoint_stays_quantised(tmp_path, dtype):
    """Layers that are one here, and layers with an order of inputs, equal their dequantised weights."""
    row = ROWS["Qwen2"]
    arrays = {name: read() for name, read in arrays_of(row).items()}
    whole, floats = dict(arrays), dict(arrays)
    for name in (name for name in arrays if name.endswith("proj.weight")):
        q = jaxfused.quantize(jnp.array(arrays[name].T), dtype)
        floats[name] = np.asarray(q.dequantize().T)
        layer = name.removesuffix(".weight")
        del whole[name]
        bias = whole.pop(f"{layer}.bias", None)
        whole[layer] = QuantizedLayer(q, None, None if bias is None else jnp.array(bias))
    (tmp_path / "config.json").write_text(json.dumps(row.options["config"]))
    jaxfused.quantization.save(tmp_path, whole)
    model = load_model(tmp_path, dtype=jnp.float32)
    assert model.blocks[0].qkv.kernel.array.dtype == dtype
    assert quantized(model, "int8") is model
    config = read_config(row.options["config"])
    plain = assemble(config, {k: lambda v=v: v for k, v in floats.items()}, dtype=jnp.float32)
    tokens = jnp.array(row.options["tokens"])
    found, expected = logits_of(model, tokens), logits_of(plain, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_layers_with_one_order_of_inputs_are_one_kernel():
    rng = np.random.default_rng(0)
    orders = [jnp.array(rng.permutation(64)) for _ in range(2)]
    layers = [
        QuantizedLayer(jaxfused.quantize(jnp.array(rng.normal(size=(64, n)), "float32")), order)
        for n, order in ((8, orders[0]), (16, orders[0]), (8, orders[1]))
    ]
    kernel = quantized_kernel(layers[:2])
    x = jnp.array(rng.normal(size=(3, 64)), "float32")
    both = jnp.concatenate([layer(x) for layer in layers[:2]], axis=-1)
    y = jaxfused.quantized_matmul(kernel.inputs(x, None), kernel.array)
    np.testing.assert_allclose(y, both, rtol=1e-5, atol=1e-5)
    assert quantized_kernel([layers[0], None]) is None
    assert quantized_kernel(layers[1:]) is None


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ExampleError, match=r"must hold a readable config\.json"):
        load_model(tmp_path, dtype=jnp.float32)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ExampleError, match=r"readable config\.json.*recursion depth"):
        load_model(tmp_path, dtype=jnp.float32)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ExampleError, match="must hold an object, but holds a list"):
        load_model(tmp_path, dtype=jnp.float32)
