"""examples/lm/serve: requests, answers, streams, and clients that misbehave, without a network.

The application is called as an ASGI server calls it.
"""

import asyncio
import contextlib
import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.whole import soak
from examples.errors import ExampleError
from examples.listening import listen, url_of
from examples.lm import loading, serve
from examples.lm.engine import Engine, Text
from examples.lm.requests import read_request
from examples.lm.serve import Server
from examples.lm.worker import Worker
from tests.examples.test_example_lm import ROWS, shallow

VOCABULARY = 50
WORDS = [bytes([97 + i % 26]) for i in range(48)] + [b"\xf0\x9f", b"\x98\x80"]


class Letters:
    """A tokenizer whose tokens are letters, and two of them the halves of an emoji."""

    ends = frozenset()

    def encode(self, text):
        return [ord(letter) % 26 for letter in text]

    def encode_chat(self, messages):
        if messages[-1]["role"] == "assistant":
            raise ExampleError("the last message must be the user's.")
        return self.encode("".join(message["content"] for message in messages))

    def bytes_of(self, token):
        return WORDS[token]

    name_of = bytes_of


@pytest.fixture(scope="module")
def model():
    return shallow(ROWS["Qwen2"])


@contextlib.contextmanager
def serving(model, *, most=8, patience=15.0):
    pytest.importorskip("starlette", reason="it is in the extra lm")
    engine = Engine(model, (), slots=2, length=32, chunk=8, page_size=4)
    with Worker(engine, most=most) as worker:
        server = Server(worker, Letters(), name="tiny", vocabulary=VOCABULARY, patience=patience)
        yield SimpleNamespace(app=server.app, worker=worker, engine=engine)


async def call(server, path, body=None, *, method="POST", leave_after=None, seconds_of_a_read=0.0):
    """Returns (status, headers, parts of the body); the client may leave after some parts."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    scope = dict(
        type="http", method=method, path=path, raw_path=path.encode(), query_string=b"",
        headers=[(b"content-type", b"application/json")], http_version="1.1",
    )  # fmt: skip
    gone, asked, sent = asyncio.Event(), [], []

    async def receive():
        if not asked:
            asked.append(True)
            return dict(type="http.request", body=data, more_body=False)
        await gone.wait()
        return dict(type="http.disconnect")

    async def send(message):
        sent.append(message)
        await asyncio.sleep(seconds_of_a_read)
        if leave_after is not None and len(sent) > leave_after:
            gone.set()
            await asyncio.sleep(0.05)

    if leave_after == 0:
        gone.set()
    await server.app(scope, receive, send)
    head, *parts = sent
    headers = {name.decode(): value.decode() for name, value in head["headers"]}
    return head["status"], headers, [part["body"] for part in parts if part.get("body")]


def ask(server, path, body=None, **options):
    status, _, parts = asyncio.run(call(server, path, body, **options))
    return status, json.loads(b"".join(parts))


def chat(content="hello", **fields):
    fields = dict(model="tiny", temperature=0, max_tokens=8) | fields
    return dict(messages=[dict(role="user", content=content)], **fields)


def events(parts):
    found = b"".join(parts).decode().split("\n\n")
    assert found.pop() == ""
    return [json.loads(e[6:]) if e != "data: [DONE]" else None for e in found if e[0] != ":"]


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server(model):
    with serving(model) as server:
        yield server


@pytest.fixture(scope="module")
def answer(server):
    status, answer = ask(server, CHAT, chat())
    assert status == 200
    return answer


def test_an_answer_has_all_its_fields(answer):
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert answer["usage"] == dict(
        prompt_tokens=5,
        completion_tokens=8,
        total_tokens=13,
        prompt_tokens_details=dict(cached_tokens=0),
    )
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert choice["message"]["role"] == "assistant"
    assert 4 <= len(choice["message"]["content"]) <= 8


def test_a_stream_has_the_same_text(server, answer):
    body = chat(stream=True, stream_options=dict(include_usage=True))
    status, headers, parts = asyncio.run(call(server, CHAT, body))
    assert (status, headers["content-type"][:17]) == (200, "text/event-stream")
    *chunks, usage, done = events(parts)
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert done is None
    assert usage["choices"] == []
    cached = dict(prompt_tokens_details=dict(cached_tokens=4))
    assert usage["usage"] == answer["usage"] | cached
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk.keys() >= {"id", "created", "model"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == dict(role="assistant", content="")
    content = "".join(choice["delta"].get("content", "") for choice in choices)
    assert content == answer["choices"][0]["message"]["content"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [
        "length"
    ]


def test_completions_go_on_with_a_text_or_tokens(server, answer):
    body = dict(model="tiny", prompt="hello", temperature=0, max_tokens=8)
    _, text = ask(server, TEXT, body)
    assert text["choices"][0]["text"] == answer["choices"][0]["message"]["content"]
    tokens = Letters().encode("hello")
    assert ask(server, TEXT, body | dict(prompt=tokens))[1]["choices"] == text["choices"]
    _, _, parts = asyncio.run(call(server, TEXT, body | dict(stream=True)))
    assert (
        "".join(e["choices"][0]["text"] for e in events(parts)[:-1]) == text["choices"][0]["text"]
    )


def test_a_stop_string_ends_the_text_before_it(server, answer):
    content = answer["choices"][0]["message"]["content"]
    _, stopped = ask(server, CHAT, chat(stop=content[2:4]))
    (choice,) = stopped["choices"]
    assert choice["message"]["content"] == content[: content.index(content[2:4])]
    assert choice["finish_reason"] == "stop"
    # What the engine wrote before it was told does not count.
    again = [ask(server, CHAT, chat(stop=content[2:4]))[1]["usage"] for _ in range(3)]
    counts = {usage["completion_tokens"] for usage in [stopped["usage"], *again]}
    assert len(counts) == 1


def test_several_answers_are_those_of_the_next_seeds(server):
    body = chat(temperature=2, seed=7)
    _, several = ask(server, CHAT, body | dict(n=3))
    apart = [ask(server, CHAT, body | dict(seed=7 + i))[1] for i in range(3)]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    for choice, alone in zip(several["choices"], apart, strict=True):
        assert choice["message"] == alone["choices"][0]["message"]
    usage = {k: several["usage"][k] for k in ("prompt_tokens", "completion_tokens")}
    assert usage == dict(prompt_tokens=5, completion_tokens=24)
    stop = several["choices"][1]["message"]["content"][1]
    _, _, parts = asyncio.run(call(server, CHAT, body | dict(n=3, stream=True, stop=stop)))
    chunks = [event["choices"][0] for event in events(parts)[:-1]]
    assert [chunk["index"] for chunk in chunks[:3]] == [0, 1, 2]
    for i, choice in enumerate(several["choices"]):
        own = [chunk for chunk in chunks if chunk["index"] == i]
        content = "".join(chunk["delta"].get("content", "") for chunk in own)
        assert content == choice["message"]["content"].split(stop)[0]
        assert [chunk["finish_reason"] for chunk in own if chunk["finish_reason"]] == [
            "stop" if stop in choice["message"]["content"] else "length"
        ]


def test_several_prompts_are_answered_in_order(server):
    body = dict(model="tiny", temperature=0, max_tokens=5, echo=True)
    _, both = ask(server, TEXT, body | dict(prompt=["abc", "hello"], n=2, best_of=2))
    apart = [
        ask(server, TEXT, body | dict(prompt=p))[1] for p in ("abc", Letters().encode("hello"))
    ]
    # An answer begins with the prompt as it was sent, or as its tokens say it.
    prompts = "abc", b"".join(map(Letters().bytes_of, Letters().encode("hello"))).decode()
    texts = [
        answer["choices"][0]["text"].removeprefix(p)
        for p, answer in zip(prompts, apart, strict=True)
    ]
    assert [len(text) for text in texts] == [5, 5]
    expected = ["abc" + texts[0]] * 2 + ["hello" + texts[1]] * 2
    assert [choice["text"] for choice in both["choices"]] == expected
    assert both["usage"]["prompt_tokens"] == 8
    assert both["usage"]["completion_tokens"] == 20


def test_log_probabilities_are_the_models(server, model):
    body = chat(logprobs=True, top_logprobs=3)
    _, answer = ask(server, CHAT, body)
    content = answer["choices"][0]["logprobs"]["content"]
    tokens = Letters().encode("hello")
    logits_of = nnx.jit(lambda model, tokens: model.logits(model(tokens)[0])[0])
    for entry in content:
        logits = logits_of(model, np.pad(tokens, (0, 32 - len(tokens)))[None])[len(tokens) - 1]
        expected, best = jax.lax.top_k(jax.nn.log_softmax(logits), 3)
        np.testing.assert_allclose(entry["logprob"], expected[0], atol=1e-5)
        found = [top["logprob"] for top in entry["top_logprobs"]]
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert [bytes(top["bytes"]) for top in entry["top_logprobs"]] == [WORDS[i] for i in best]
        assert bytes(entry["bytes"]) == WORDS[best[0]]
        tokens.append(int(best[0]))
    _, _, parts = asyncio.run(call(server, CHAT, body | dict(stream=True)))
    chunks = [event["choices"][0] for event in events(parts)[:-1]]
    pieces = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"]]
    assert [
        [round(entry["logprob"], 5) for entry in entries]
        for entries in (content, [entry for piece in pieces for entry in piece])
    ] == [[round(entry["logprob"], 5) for entry in content]] * 2

    older = dict(model="tiny", prompt="hello", temperature=0, max_tokens=8, logprobs=2)
    (choice,) = ask(server, TEXT, older)[1]["choices"]
    found = choice["logprobs"]
    np.testing.assert_allclose(
        found["token_logprobs"], [entry["logprob"] for entry in content], atol=1e-5
    )
    assert [len(top) for top in found["top_logprobs"]] == [2] * 8
    places = [*found["text_offset"], len(choice["text"])]
    for token, begin, end in zip(found["tokens"], places, places[1:], strict=False):
        assert token == choice["text"][begin:end] or token.startswith("bytes:")


def test_log_probabilities_end_before_a_stop_string(server, answer):
    content = answer["choices"][0]["message"]["content"]
    _, stopped = ask(server, CHAT, chat(stop=content[2:4], logprobs=True))
    (choice,) = stopped["choices"]
    told = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert told.decode() == choice["message"]["content"]
    assert {len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]} == {0}


def test_a_bias_decides_the_token(server):
    _, answer = ask(server, CHAT, chat(logit_bias={"3": 100, "4": 50.0}, temperature=1))
    assert answer["choices"][0]["message"]["content"] == "d" * 8
    never = {str(i): -100 for i in range(50) if i % 26 != 4}
    _, answer = ask(server, CHAT, chat(logit_bias=never))
    assert answer["choices"][0]["message"]["content"] == "e" * 8


def test_seeds_repeat_an_answer_whatever_else_is_asked(server):
    async def both():
        bodies = [chat("a", temperature=2, seed=7), *(chat("b", temperature=2) for _ in range(5))]
        return await asyncio.gather(*(call(server, CHAT, body) for body in bodies))

    together = json.loads(b"".join(asyncio.run(both())[0][2]))["choices"]
    assert ask(server, CHAT, chat("a", temperature=2, seed=7))[1]["choices"] == together


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "must be JSON, but is not"),
        (b"\xff", "must be JSON, but is not"),
        (b"[" * 100_000, "must be JSON, but is not"),
        (b"[]", "must be a JSON object, but is a list"),
        (b" " * (4 * 2**20 + 1), "at most 4194304 bytes"),
        ({}, "messages must be a list"),
        (dict(messages=[]), "messages must be a list"),
        (dict(messages=[dict(role="tool", content="x")]), "role is one of system"),
        (dict(messages=["x"]), "role is one of system"),
        (dict(messages=[dict(role="user", content=[dict(type="image_url")])]), "must be text"),
        (dict(messages=[dict(role="user")]), "content must be a string, but is a NoneType"),
        (
            dict(model="tiny", messages=[dict(role="assistant", content="x")]),
            "last message must be the user's",
        ),
        (chat("\ud800"), "half of a surrogate pair"),
        (chat("x" * 40), "at most 32 tokens, and one each, but the prompt has 40"),
        (chat(""), "but the prompt has 0"),
        (chat(max_tokens=8, max_completion_tokens=9), "send one of them"),
        (chat(max_tokens=30), "max_tokens is 30"),
        (chat(max_tokens=0), "max_tokens must be at least 1"),
        (chat(max_tokens=10**30), "must be an integer of 64 bits"),
        (chat(temperature=-1), "temperature must be a number from 0 to 2"),
        (chat(temperature=float("nan")), "temperature must be a number"),
        (chat(temperature=10**400), "temperature must be a number from 0 to 2, but is 1000"),
        (chat(top_p="1"), "top_p must be a number"),
        (chat(seed=True), "seed must be an integer"),
        (chat(stop=["a"] * 17), "at most 16 strings"),
        (chat(stop=[1]), "stop must be a string"),
        (dict(messages=[dict(role=["user"], content="x")]), "role is one of system"),
        (
            dict(messages=[dict(role="assistant", content="x", tool_calls=[{}])]),
            "messages[0] has 'tool_calls'",
        ),
        (chat(n=129), "n must be at most 128"),
        (chat(n=9), "at most 8 answers, but asks for 9"),
        (chat(tools=[{}]), "tools is"),
        (chat(response_format=dict(type="json_object")), "response_format is"),
        (chat(logit_bias=[1]), "logit_bias must be an object"),
        (chat(logit_bias={"50": 2}), "tokens from 0 to 49"),
        (chat(logit_bias={"1": 200}), "numbers from -100 to 100, but has '1': 200"),
        (chat(logit_bias=dict.fromkeys(map(str, range(301)), 1)), "at most 300 tokens"),
        (chat(logprobs=1), "logprobs must be a bool"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs must be at most 20"),
        (chat(top_logprobs=2), "top_logprobs is 2, but logprobs is not true"),
        (chat(echo=True), "'echo' is no field"),
        (chat(stream_options=dict(include_usage=True)), "stream_options are for streams"),
        (chat(stream=True, stream_options=dict(usage=True)), "'usage' is no field of stream_opt"),
        (chat(stream=True, stream_options=dict(include_usage=1)), "include_usage must be a bool"),
        (chat(temprature=1), "'temprature' is no field"),
        (chat(stream="yes"), "stream must be a bool"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(server, body, message):
    status, answer = ask(server, CHAT, body)
    assert status == 400
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, chat(model="other"), 404),
        ("/v1/models/other", None, 404),
        ("/v2", None, 404),
        (TEXT, dict(model="tiny", prompt=["a", 1]), 400),
        (TEXT, dict(model="tiny", prompt=[]), 400),
        (TEXT, dict(model="tiny", prompt=["a"] * 129), 400),
        (TEXT, dict(model="tiny", prompt=[1, 50]), 400),
        (TEXT, dict(model="tiny", prompt="a", best_of=2), 400),
        (TEXT, dict(model="tiny", prompt="a", logprobs=6), 400),
        (TEXT, dict(model="tiny", prompt="a", echo=True, logprobs=1), 400),
    ],
)
def test_what_is_not_there_is_an_error(server, path, body, status):
    method = "GET" if body is None else "POST"
    found, answer = ask(server, path, body, method=method)
    assert found == status
    assert answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (None, "smollm2"),
        ("a/Qwen3-0.6B", "Qwen3-0.6B"),
        ("a/Qwen3-0.6B-Q8_0.gguf", "Qwen3-0.6B-Q8_0"),
    ],
)
def test_a_model_has_its_files_name(path, name):
    assert serve._name_of(None if path is None else Path(path)) == name


def test_a_port_in_use_is_told_before_a_model_is_loaded(monkeypatch):
    pytest.importorskip("uvicorn", reason="it is in the extra lm")
    monkeypatch.delattr(loading, "load")
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(
            ExampleError, match=f"127.0.0.1:{port} is not .Address already in use.;"
        ):
            serve.main(["--port", str(port)])


def test_a_model_without_the_tokenizers_tokens_is_told(server):
    with pytest.raises(
        ExampleError, match="from 0 to 49, as the model has them, but are from 3 to 50"
    ):
        server.engine.submit(Text([3, 50], 4))


def test_models_and_health_are_told(server):
    assert ask(server, "/v1/models", method="GET")[1]["data"][0]["id"] == "tiny"
    assert ask(server, "/v1/models/tiny", method="GET")[0] == 200
    assert ask(server, "/health", method="GET") == (200, dict(texts=0))
    assert asyncio.run(call(server, CHAT, method="GET"))[0] == 405


def test_fields_that_change_nothing_are_taken():
    body = chat(user="me", store=False, n=1, tools=[], logprobs=False, max_tokens=None, top_k=3)
    body |= dict(best_of=None, logit_bias={}, response_format=dict(type="text"))
    asked = read_request(body, is_chat=True, vocabulary=VOCABULARY)
    assert (asked.most, asked.sampling.top_k, asked.stops) == (None, 3, ())
    parts = [dict(type="text", text="a"), dict(type="text", text="b")]
    developer = dict(role="developer", content=parts)
    asked = read_request(dict(messages=[developer]), is_chat=True, vocabulary=VOCABULARY)
    assert asked.messages == [dict(role="system", content="ab")]
    assert asked.sampling.temperature == 1.0


async def settled(server):
    """Waits until no text is left in the server nor in its engine."""
    for _ in range(200):
        if not server.worker.texts and not server.engine.is_busy:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{server.worker.texts} texts are left")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave_after", [0, 1, 3])
def test_clients_that_leave_make_room(server, stream, leave_after, answer):
    async def leave():
        body = chat(max_tokens=27, stream=stream)
        await asyncio.gather(*(call(server, CHAT, body, leave_after=leave_after) for _ in range(8)))
        await settled(server)

    asyncio.run(leave())
    assert ask(server, CHAT, chat())[1]["choices"] == answer["choices"]


def test_a_request_that_is_cancelled_when_the_server_stops_is_told_so(server):
    async def stop():
        task = asyncio.create_task(call(server, CHAT, chat(max_tokens=20)))
        while not server.worker.texts:
            await asyncio.sleep(0.001)
        task.cancel()
        return await task

    status, _, parts = asyncio.run(stop())
    assert status == 503 and b"the server is stopping" in b"".join(parts)
    asyncio.run(settled(server))


def test_a_client_that_does_not_read_is_cut_off(model):
    async def never_reads(server):
        with pytest.raises(TimeoutError):
            await call(server, CHAT, chat(max_tokens=20, stream=True), seconds_of_a_read=5.0)
        await settled(server)

    with serving(model, patience=0.1) as server:
        asyncio.run(never_reads(server))


def test_a_full_server_says_when_to_come_again(server):
    async def crowd():
        calls = (call(server, CHAT, chat(max_tokens=27)) for _ in range(20))
        return await asyncio.gather(*calls)

    answers = asyncio.run(crowd())
    assert {status for status, *_ in answers} == {200, 429}
    assert [status for status, *_ in answers].count(200) >= 8
    refused = next(answer for answer in answers if answer[0] == 429)
    assert refused[1]["retry-after"] == "1"


def test_many_streams_have_each_its_own_text(model, server):
    def body(i):
        return chat("abc"[i % 3] * (1 + i % 5), stream=True, seed=i, temperature=1)

    async def crowd():
        with serving(model, most=64) as server:
            found = await asyncio.gather(*(call(server, CHAT, body(i)) for i in range(24)))
            await settled(server)
            return found

    def content(answer):
        return [event["choices"][0]["delta"] for event in events(answer[2])[:-1]]

    together = asyncio.run(crowd())
    for i in range(0, 24, 5):
        assert content(together[i]) == content(asyncio.run(call(server, CHAT, body(i))))


def test_a_stream_without_news_shows_that_it_lives(model):
    with serving(model, patience=1e-4) as server:
        _, _, parts = asyncio.run(call(server, CHAT, chat(stream=True)))
    assert b": ping\n\n" in parts
    assert events(parts)[-1] is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_fails_ends_all_answers(model, monkeypatch, stream):
    with serving(model) as server:
        steps = iter(range(6))

        def step(engine, step=Engine.step):
            if next(steps, None) is None:
                raise RuntimeError("out of memory")
            return step(engine)

        monkeypatch.setattr(Engine, "step", step)
        if stream:
            with pytest.raises(Exception, match="out of memory"):
                asyncio.run(call(server, CHAT, chat(max_tokens=20, stream=True)))
        else:
            status, answer = ask(server, CHAT, chat(max_tokens=20))
            assert (status, "out of memory" in answer["error"]["message"]) == (500, True)
        for path, body in ((CHAT, chat()), ("/health", None)):
            status, answer = ask(server, path, body, method="POST" if body else "GET")
            assert (status, "out of memory" in answer["error"]["message"]) == (503, True)
        assert server.worker.texts == 0


# --- the official client, over a real connection --------------------------------------------------


@contextlib.contextmanager
def listening(app):
    """Runs the application on a port of its own, and yields its address."""
    uvicorn = pytest.importorskip("uvicorn", reason="it is in the extra lm")
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=running.run, kwargs=dict(sockets=[listener]), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        running.should_exit = True
        thread.join()
        listener.close()


def openai_of():
    return pytest.importorskip("openai", reason="it is in the extra test")


@pytest.fixture(scope="module")
def client(server):
    openai = openai_of()
    with listening(server.app) as url:
        yield openai.OpenAI(base_url=url, api_key="any", max_retries=0)


@pytest.mark.exhaustive
def test_the_official_client_reads_answers(client, answer):
    text = answer["choices"][0]["message"]["content"]
    body = chat()
    whole = client.chat.completions.create(**body)
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "length"
    chunks = list(client.chat.completions.create(**body, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    # An answer that the limit has cut off is an error for `stream`.
    usage = dict(include_usage=True)
    with client.chat.completions.stream(**body, stop=text[3], stream_options=usage) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        last = stream.get_final_completion()
    assert "".join(pieces) == last.choices[0].message.content == text[: text.index(text[3])]
    assert last.choices[0].finish_reason == "stop"
    assert last.usage.total_tokens > last.usage.completion_tokens > 0
    options = dict(n=2, logprobs=True, top_logprobs=2, logit_bias={"3": -1}, seed=1)
    whole = client.chat.completions.create(**body, **options)
    with client.chat.completions.stream(**body | dict(stop="#"), **options) as stream:
        told = []
        try:
            for event in stream:
                told += event.content if event.type == "logprobs.content.delta" else []
        except openai_of().LengthFinishReasonError:
            pass  # It says so at the end of a choice, before the other one's.
    for choice in whole.choices:
        assert len(choice.logprobs.content) == 8
        assert {len(entry.top_logprobs) for entry in choice.logprobs.content} == {2}
    assert told
    older = client.completions.create(
        model="tiny", prompt=["hello", "ab"], max_tokens=4, logprobs=2, logit_bias={"3": -1}
    )
    assert [len(choice.logprobs.tokens) for choice in older.choices] == [4, 4]
    assert older.usage.prompt_tokens == 7
    chunks = client.completions.create(model="tiny", prompt="hello", max_tokens=4, stream=True)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.exhaustive
def test_the_official_client_is_told_what_is_wrong(client):
    openai = openai_of()
    with pytest.raises(openai.BadRequestError, match="must be a number from 0 to 2"):
        client.chat.completions.create(**chat(temperature=3))
    with pytest.raises(openai.BadRequestError, match="at most 32 tokens"):
        client.chat.completions.create(**chat("a" * 40))
    with pytest.raises(openai.NotFoundError, match="'other' was asked for"):
        client.chat.completions.create(**chat(model="other"))


@pytest.mark.exhaustive
def test_the_official_client_may_leave_a_stream(client, server, answer):
    with client.chat.completions.create(**chat(max_tokens=20), stream=True) as stream:
        next(iter(stream))
    again = client.chat.completions.create(**chat())
    assert again.choices[0].message.content == answer["choices"][0]["message"]["content"]
    asyncio.run(settled(server))


# --- load -----------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", [[], ["--batch-invariant"]])
def test_a_server_under_load_loses_nothing(tmp_path, flags):
    pytest.importorskip("uvicorn", reason="it is in the extra lm")
    sizes = ["--seconds", "3", "--streams", "6", "--texts", "4"]
    assert soak.main([*sizes, *flags, "--out", str(tmp_path)]) == 0
    (section,) = json.loads((tmp_path / "cpu.json").read_text())["benchmarks"].values()
    row = section["row"]
    assert row["problems"] == []
    assert row["requests"]["stream"] > 0
    assert row["pages"]["free"] == row["pages"]["all"]


def test_only_almost_equal_tokens_excuse_another_text():
    asked = soak.Asked(dict(temperature=0), "abcd", [(0, 3.0), (1, 0.4), (3, 2.0)])
    assert not asked.is_near_tie("xbcd")
    assert asked.is_near_tie("axcd")
    assert asked.is_near_tie("ab")
    assert not asked.is_near_tie("abcx")
    counts, flags = soak.Counts(), SimpleNamespace(batch_invariant=False)
    soak._compare(asked, "abcd", flags, counts)
    soak._compare(asked, "abxd", flags, counts)
    assert counts.near_ties == 1
    with pytest.raises(ValueError, match="that was no near tie"):
        soak._compare(asked, "abcx", flags, counts)
    with pytest.raises(ValueError, match="was 'abcd' alone"):
        soak._compare(asked, "abxd", SimpleNamespace(batch_invariant=True), counts)
