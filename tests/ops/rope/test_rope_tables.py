"""Tables of rope: scalings and configs of transformers, positions on several axes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from tests.recorded.values import load

ROPE = load("rope.npz")
"""Tables that transformers 5.23.0 computed from the same configs; tests/recorded/record_rope.py."""


@pytest.mark.parametrize("name", ROPE)
def test_tables_of_transformers(name):
    row = ROPE[name]
    layer_type = row.options["layer_type"]
    options = jaxfused.rope_from_config(row.options["config"], layer_type=layer_type)
    positions = jnp.asarray(row.options["positions"])
    rotary_dim = options.pop("rotary_dim")
    cos, sin = jaxfused.rope_tables(positions, rotary_dim, **options)
    # float32 frequencies are 6e-8 off, positions reach 4095, and transformers multiplies twice.
    np.testing.assert_allclose(cos, row.results["cos"], atol=1e-3 if positions[-1] > 999 else 1e-4)
    np.testing.assert_allclose(sin, row.results["sin"], atol=1e-3 if positions[-1] > 999 else 1e-4)
    np.testing.assert_allclose(cos[:3], row.results["cos"][:3], rtol=2e-6, atol=2e-6)


def test_yarn_of_gpt_oss_keeps_fractions():
    rotary_dim, theta, factor, length = 64, 150000.0, 32.0, 4096
    scaling = jaxfused.YarnRope(factor, length, truncate=False)
    plain = theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    # 8.09 and 17.40 are the pairs that turn 32 times and once within 4096 positions.
    ramp = np.clip((np.arange(32) - 8.0928) / (17.3980 - 8.0928), 0, 1)
    frequencies = scaling.frequencies(rotary_dim, theta)
    np.testing.assert_allclose(frequencies, plain * (1 - ramp + ramp / factor), rtol=1e-4)


def test_factors_of_deepseek():
    scaling = jaxfused.YarnRope(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert scaling.attention_factor() == 1.0
    np.testing.assert_allclose(scaling.logit_factor(), 1.3688879**2, rtol=1e-6)
    assert jaxfused.YarnRope(40.0, 4096).logit_factor() == 1.0
    # As in transformers, one of the two factors alone does not scale cos and sin.
    np.testing.assert_allclose(
        jaxfused.YarnRope(40.0, 4096, mscale=2.0).attention_factor(), 1.3688879, rtol=1e-6
    )


@pytest.mark.parametrize(
    "scaling",
    [
        jaxfused.DynamicNTKRope(4.0, 16),
        jaxfused.LongRope([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0], 16, 4.0),
    ],
)
def test_frequencies_that_depend_on_the_length(scaling):
    """The call's last position decides, in jit too, unless a length is given."""
    tables = jax.jit(lambda positions: jaxfused.rope_tables(positions, 8, scaling=scaling))
    found = {}
    for length in (16, 17, 40):
        named = dataclasses.replace(scaling, length=length)
        found[length] = tables(jnp.arange(length))[0]
        cos, _ = jaxfused.rope_tables(jnp.arange(length), 8, scaling=named)
        np.testing.assert_allclose(found[length], cos, atol=1e-5)
    assert np.abs(found[17][:16] - found[16]).max() > 0.01
    assert hash(scaling) == hash(dataclasses.replace(scaling))
    assert tables(jnp.zeros((2, 0), int))[0].shape == (2, 0, 4)


def test_proportional_turns_pairs_of_the_whole_head():
    x = np.random.RandomState(0).randn(1, 12, 2, 16).astype(np.float32)
    inverse = np.where(np.arange(8) < 4, 1e6 ** (-2 * np.arange(8) / 16), 0.0)
    cos, sin = (f(np.arange(12)[:, None] * inverse)[None, :, None] for f in (np.cos, np.sin))
    first, second = x[..., :8], x[..., 8:]
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    y = jaxfused.rope(x, theta=1e6, scaling=jaxfused.ProportionalRope(0.5))
    np.testing.assert_allclose(y, expected, atol=1e-5)


LLAMA = {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 9}},
            "alpha=9 is not a known",
        ),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, "rope_type is 'mrope'"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "needs max_position_embeddings"),
        ({"rope_theta": None}, "no rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0, but it is a positive number"),
        ({"rope_theta": []}, r"rope_theta is \[\], but it is a positive number"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'.* pass a dict"),
        ({"rope_scaling": {"type": []}}, r"rope_type is \[\]"),
        ({"hidden_size": None}, "pass head_size"),
        ({"rope_local_base_freq": 1e4}, "layer_type is None.*full_attention, sliding_attention"),
        ({"rope_parameters": {"full_attention": {}, "other": None}}, "layer_type is None"),
        ({"hidden_size": None, "text_config": LLAMA}, r"pass config\['text_config'\]"),
    ],
)
def test_configs_that_are_refused(config, message):
    with pytest.raises(ValueError, match=f"rope_from_config: .*{message}"):
        jaxfused.rope_from_config(LLAMA | config)


def test_a_number_of_features_by_name():
    """MiniMax M2 rotates 64 of the 128 features of a head."""
    config = {"head_dim": 128, "rotary_dim": 64, "rope_theta": 5e6}
    assert jaxfused.rope_from_config(config)["rotary_dim"] == 64


def test_larger_heads_of_some_layers():
    """Gemma 4 in both spellings: as it was published, and as transformers saves it."""
    kinds = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    config = {"head_dim": 16, "rope_parameters": kinds}
    saved = {"layer_types": ["sliding_attention", "full_attention"]}
    saved["per_layer_config"] = {"1": {"head_dim": 32}}
    for own in ({"global_head_dim": 32}, saved):
        for layer_type, size in (("full_attention", 32), ("sliding_attention", 16)):
            options = jaxfused.rope_from_config(config | own, layer_type=layer_type)
            assert options["rotary_dim"] == size
    saved["layer_types"].append("full_attention")
    saved["per_layer_config"]["2"] = {"head_dim": 64}
    with pytest.raises(ValueError, match=r"heads of \[32, 64\] features; pass head_size"):
        jaxfused.rope_from_config(config | saved, layer_type="full_attention")


def test_older_spellings():
    phi = LLAMA | {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    options = jaxfused.rope_from_config(phi | {"rope_scaling": {"type": "su", **factors}})
    assert options["scaling"] == jaxfused.LongRope([1.0] * 8, [2.0] * 8, 16, 4.0)
    modern = {"hidden_size": 64, "num_attention_heads": 4, "global_rope_theta": 1.6e5}
    modern["local_rope_theta"] = 1e4
    for layer_type, theta in (("full_attention", 1.6e5), ("sliding_attention", 1e4)):
        options = jaxfused.rope_from_config(modern, layer_type=layer_type)
        assert options == dict(rotary_dim=16, theta=theta, scaling=None)


MODEL = LLAMA | {"num_hidden_layers": 8}
LISTED = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("config", "still"),
    [
        ({"model_type": "smollm3"}, [3, 7]),
        ({"model_type": "smollm3", "no_rope_layer_interval": 3}, [2, 5]),
        ({"model_type": "llama4_text", "no_rope_layers": []}, [3, 7]),
        ({"model_type": "llama4_text", "no_rope_layers": [0, 1] * 4}, [0, 2, 4, 6]),
        ({"model_type": "cohere2", "sliding_window": 16}, [3, 7]),
        ({"model_type": "cohere2", "layer_types": LISTED}, [1, 3]),
        ({"model_type": "exaone4", "sliding_window": 16, "sliding_window_pattern": "LLG"}, [2, 5]),
        ({"model_type": "exaone4", "sliding_window": None}, []),
        ({"model_type": "granitemoehybrid", "position_embedding_type": "nope"}, [*range(8)]),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, [0]),
        ({"model_type": "gemma3_text", "rope_local_base_freq": 1e4}, []),
    ],
)
def test_layers_that_do_not_rotate(config, still):
    """The configurations and attention layers of transformers 5.23.0 say which layers rotate."""
    config = MODEL | config
    layers = range(len(config.get("layer_types", range(8))))
    found = [i for i in layers if jaxfused.rope_from_config(config, layer=i) is None]
    assert found == still


def test_layers_that_differ_are_to_be_named():
    with pytest.raises(ValueError, match="layer is 8, but the model has 8 layers; pass one"):
        jaxfused.rope_from_config(MODEL | {"model_type": "smollm3"}, layer=8)
    smollm, cohere = (MODEL | {"model_type": name} for name in ("smollm3", "cohere2"))
    for config in (smollm, cohere):
        with pytest.raises(
            ValueError, match=r"layers 3, 7 of this model do not rotate.*pass layer"
        ):
            jaxfused.rope_from_config(config)
    assert jaxfused.rope_from_config(cohere, layer_type="full_attention") is None
    assert jaxfused.rope_from_config(cohere, layer_type="sliding_attention")["theta"] == 1e4
    with pytest.raises(ValueError, match="layer 3 is of 'full_attention'; pass one"):
        jaxfused.rope_from_config(cohere, layer=3, layer_type="sliding_attention")
    beam = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": None}
    beam = MODEL | {"model_type": "beam", "rope_parameters": beam}
    assert jaxfused.rope_from_config(beam, layer_type="full_attention") is None
    hybrid = MODEL | {"layer_types": ["linear_attention", "full_attention"]}
    assert jaxfused.rope_from_config(hybrid)["rotary_dim"] == 16


def test_scaling_of_olmo_3_is_that_of_the_full_layers():
    scaling = {"rope_type": "linear", "factor": 4.0}
    config = MODEL | {"model_type": "olmo3", "rope_scaling": scaling}
    found = [jaxfused.rope_from_config(config, layer=i)["scaling"] for i in range(8)]
    assert [i for i, one in enumerate(found) if one == jaxfused.LinearRope(4.0)] == [3, 7]
    assert found.count(None) == 6
    with pytest.raises(ValueError, match="full_attention, sliding_attention; pass one"):
        jaxfused.rope_from_config(config)


# --- several axes ---------------------------------------------------------------------------------


def centred(n):
    return 2 * (np.arange(n) + 0.5) / n - 1


def test_axial_tables_of_dinov3():
    height, width, head = 3, 4, 16
    period = 100.0 ** (np.arange(4) / 4)
    rows, columns = (2 * np.pi * centred(n)[:, None] / period for n in (height, width))
    angles = np.concatenate([np.repeat(rows, width, 0), np.tile(columns, (height, 1))], 1)
    cos, sin = jaxfused.axial_rope_tables(
        positions=(centred(height), centred(width)), features=(8, 8), turns=True, prefix=5
    )
    assert cos.shape == sin.shape == (5 + height * width, head // 2)
    np.testing.assert_allclose(cos[5:], np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin[5:], np.sin(angles), atol=1e-5)
    np.testing.assert_array_equal(cos[:5], 1.0)
    np.testing.assert_array_equal(sin[:5], 0.0)


def test_axes_of_unlike_width_in_any_order():
    """Three axes with given positions per token, and a grid whose columns come first."""
    places = np.random.RandomState(0).randint(-5, 20, (2, 7, 3))
    cos, sin = jaxfused.axial_rope_tables(
        positions=places, features=(4, 6, 2), theta=50.0, prefix=2
    )
    assert cos.shape == (2, 9, 6)
    angles = np.concatenate(
        [
            places[..., axis, None] * 50.0 ** (-np.arange(0, width, 2) / width)
            for axis, width in enumerate((4, 6, 2))
        ],
        axis=-1,
    )
    np.testing.assert_allclose(cos[:, 2:], np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin[:, 2:], np.sin(angles), atol=1e-5)
    swapped, _ = jaxfused.axial_rope_tables(
        positions=(np.arange(3), np.arange(4)), features=(4, 6), order=(1, 0)
    )
    plain, _ = jaxfused.axial_rope_tables(positions=(np.arange(3), np.arange(4)), features=(4, 6))
    np.testing.assert_array_equal(swapped, np.concatenate([plain[:, 2:], plain[:, :2]], axis=-1))
    grid, _ = jaxfused.axial_rope_tables(3, 5, 16)
    given, _ = jaxfused.axial_rope_tables(
        positions=(jnp.arange(3), jnp.arange(5)), features=(8, 8), theta=100.0
    )
    np.testing.assert_array_equal(grid, given)


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_of_each_head(interleaved):
    """Learned frequencies [axes, heads, pairs], as in Mochi, and their gradients."""
    q = jax.random.normal(jax.random.key(0), (2, 6, 3, 8))
    places = np.random.RandomState(1).randn(6, 2).astype(np.float32)
    learned = np.random.RandomState(2).randn(2, 3, 4).astype(np.float32)

    def rotated(learned):
        cos, sin = jaxfused.axial_rope_tables(positions=places, frequencies=learned)
        assert cos.shape == (6, 3, 4)
        return jaxfused.rope(q, cos=cos, sin=sin, interleaved=interleaved)

    def expected(learned):
        angles = jnp.einsum("ta,ahp->thp", places, learned)
        pairs = (q[..., ::2], q[..., 1::2]) if interleaved else jnp.split(q, 2, axis=-1)
        turned = (pairs[0] + 1j * pairs[1]) * jnp.exp(1j * angles)
        join = jnp.stack if interleaved else jnp.concatenate
        return join([turned.real, turned.imag], axis=-1).reshape(q.shape)

    np.testing.assert_allclose(rotated(learned), expected(learned), atol=1e-5)
    gradient, truth = (
        jax.grad(lambda learned, f=f: jnp.sum(f(learned) ** 3))(learned)
        for f in (rotated, expected)
    )
    np.testing.assert_allclose(gradient, truth, rtol=1e-4, atol=1e-4)
    cos, sin = jaxfused.axial_rope_tables(positions=places, frequencies=learned)
    x, w = jnp.ones((2, 6, 5)), jax.random.normal(jax.random.key(1), (5, 9 * 8))
    plain = jaxfused.qkv_projection(x, w, heads=3)
    q_rotated, k_rotated, _ = jaxfused.qkv_projection(
        x, w, heads=3, cos=cos, sin=sin, interleaved=interleaved
    )
    for found, heads in ((q_rotated, plain[0]), (k_rotated, plain[1])):
        np.testing.assert_allclose(
            found, jaxfused.rope(heads, cos=cos, sin=sin, interleaved=interleaved), atol=1e-5
        )


def test_which_axes_tables_have():
    """Tables of rank 3 are [B, T, R/2] if that fits, else [T, N, R/2]; full rank is also accepted."""
    for heads, shape in ((3, (6, 3, 4)), (6, (6, 6, 4)), (6, (2, 6, 6, 4)), (6, (1, 6, 6, 4))):
        q, tables = jnp.ones((2, 6, heads, 8)), jnp.ones(shape)
        assert jaxfused.rope(q, cos=tables, sin=tables).shape == q.shape
    angles = np.random.RandomState(0).randn(4, 4, 2).astype(np.float32)
    q = jnp.ones((4, 4, 4, 4))
    own = jaxfused.rope(q, cos=angles, sin=angles)
    for index in range(4):
        np.testing.assert_array_equal(
            own[index], jaxfused.rope(q[index], cos=angles[index], sin=angles[index])
        )
    q = jnp.ones((2, 6, 4, 8))
    with pytest.raises(ValueError, match="k has 2; rotate q and k in two calls"):
        jaxfused.rope(q, q[:, :, :2], cos=jnp.ones((6, 4, 4)), sin=jnp.ones((6, 4, 4)))
    with pytest.raises(ValueError, match=r"rope: implementation='pallas'.*rotate all heads"):
        jaxfused.rope(q, cos=jnp.ones((6, 4, 4)), sin=jnp.ones((6, 4, 4)), implementation="pallas")


GRID = dict(positions=(np.arange(2), np.arange(3)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(height=2, width=3), "height, width and rotary_dim describe an image"),
        (dict(height=2, **GRID), "height, width or rotary_dim was passed with positions"),
        (GRID, "features is None, but positions have 2 axes"),
        (dict(features=(4,), **GRID), r"features is \(4,\)"),
        (dict(features=(4, 3), **GRID), r"features is \(4, 3\)"),
        (dict(features=(4, 4), order=(0, 0), **GRID), r"order is \(0, 0\)"),
        (dict(features=(4, 4), frequencies=np.ones((2, 4)), **GRID), "frequencies was passed with"),
        (dict(frequencies=np.ones((3, 4)), **GRID), r"frequencies has shape \(3, 4\)"),
        (dict(features=(4, 4), prefix=-1, **GRID), "prefix is -1"),
        (
            dict(positions=(np.ones((2, 2)),), features=(4,)),
            "each has the positions along one axis",
        ),
        (dict(positions=np.ones(3), features=(4,)), r"positions has shape \(3,\)"),
    ],
)
def test_axial_tables_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"axial_rope_tables: .*{message}"):
        jaxfused.axial_rope_tables(**arguments)
