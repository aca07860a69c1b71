"""The server and OpenAI's interface: its own client is the test, over a small random model.

Protects that answers, whole and streamed, are those of `LLM`; that each field of the interface is
honoured or refused by name; and the form of every error.
"""

import asyncio
import json
import shutil
import subprocess
from dataclasses import fields
from typing import get_type_hints

import httpx
import openai
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from prometheus_client.parser import text_string_to_metric_families

from paged import SamplingParams
from paged.server.answers import LEAST, Answer, best
from paged.server.fields import REFUSED, SAMPLING, ChatBody, CompletionBody
from tests.servers import serving

HELLO = [{"role": "user", "content": "hello"}]
GREEDY = dict(model="tiny", temperature=0)


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running
        running.wait_until_empty()


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_a_conversation_is_that_of_llm_chat(server, client):
    (wanted,) = server.llm.chat(HELLO, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    answer = client.chat.completions.create(messages=HELLO, max_tokens=9, **GREEDY)
    (choice,) = answer.choices
    (completion,) = wanted.outputs
    assert choice.message.content == completion.text and choice.message.role == "assistant"
    assert choice.finish_reason == completion.finish_reason
    assert answer.object == "chat.completion" and answer.model == "tiny"
    assert answer.usage.prompt_tokens == len(wanted.prompt_token_ids)
    assert answer.usage.completion_tokens == len(completion.token_ids)


def test_a_stream_adds_up_and_ends_with_its_usage(server, client):
    """Random weights write bytes that are no text, and characters in pieces."""
    asked = dict(messages=HELLO, max_tokens=40, n=3, seed=5, model="tiny", temperature=1,
                 extra_body={"ignore_eos": True})
    whole = client.chat.completions.create(**asked)
    texts, reasons, last = ["", "", ""], [None] * 3, None
    chunks = list(
        client.chat.completions.create(**asked, stream=True,
                                       stream_options={"include_usage": True}))
    for chunk in chunks[:-1]:
        assert chunk.usage is None and chunk.object == "chat.completion.chunk"
        assert chunk.id == chunks[0].id
        for choice in chunk.choices:
            assert reasons[choice.index] is None, "something follows the end"
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    last = chunks[-1]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length"] * 3 and len(set(texts)) == 3
    assert last.choices == [] and last.usage.completion_tokens == 3 * 40
    assert "".join(texts).count("\ufffd") > 3 and len(chunks) > 40
    roles = [c.delta.role for chunk in chunks[:-1] for c in chunk.choices if c.delta.role]
    assert roles == ["assistant"] * 3


def test_the_asynchronous_client(server):

    async def run():
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)

        async def streamed(prompt):
            stream = await client.completions.create(prompt=prompt, max_tokens=12, stream=True,
                                                     **GREEDY)
            return "".join([chunk.choices[0].text async for chunk in stream])

        prompts = [f"number {i}" for i in range(8)]
        texts = await asyncio.gather(*map(streamed, prompts))
        await client.close()
        return prompts, texts

    prompts, texts = asyncio.run(run())
    wanted = server.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12),
                                 use_tqdm=False)
    assert texts == [output.outputs[0].text for output in wanted]


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_of_every_form(server, client, stream):
    ids = server.llm.tokenizer.encode("three")
    for prompts, number in ((["one", "two", "three"], 3), (ids, 1), ([ids, ids + ids], 2)):
        answer = client.completions.create(prompt=prompts, max_tokens=4, n=2, echo=True, seed=3,
                                           model="tiny", temperature=1, stream=stream)
        texts = [""] * (2 * number)
        for part in answer if stream else [answer]:
            for choice in part.choices:
                texts[choice.index] += choice.text
        several = [prompts] if prompts is ids else prompts
        wanted = server.llm.generate(several, SamplingParams(n=2, max_tokens=4, seed=3),
                                     use_tqdm=False)
        assert texts == [
            (prompt if isinstance(prompt, str) else server.llm.tokenizer.decode(prompt))
            + completion.text for prompt, output in zip(several, wanted)
            for completion in output.outputs
        ]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(server, client, stream):
    params = SamplingParams(temperature=0, max_tokens=7, logprobs=2)
    (wanted,) = server.llm.chat(HELLO, params, use_tqdm=False)
    answer = client.chat.completions.create(messages=HELLO, max_tokens=7, logprobs=True,
                                            top_logprobs=2, stream=stream, **GREEDY)
    entries = [
        entry for part in (answer if stream else [answer]) for choice in part.choices
        if choice.logprobs for entry in choice.logprobs.content
    ]
    (completion,) = wanted.outputs
    assert [bytes(entry.bytes) for entry in entries] == [
        server.llm.tokenizer.token_bytes(token) for token in completion.token_ids
    ]
    for entry, token, known in zip(entries, completion.token_ids, completion.logprobs):
        assert entry.logprob == pytest.approx(known[token])
        assert [other.logprob for other in entry.top_logprobs] == pytest.approx(
            sorted(known.values(), reverse=True)[:2])
    (wanted,) = server.llm.generate(["abc"], params, use_tqdm=False)
    answer = client.completions.create(prompt="abc", max_tokens=7, logprobs=2, stream=stream,
                                       echo=True, **GREEDY)
    parts = [choice for part in (answer if stream else [answer]) for choice in part.choices]
    text = "".join(choice.text for choice in parts)
    shown = [choice.logprobs for choice in parts if choice.logprobs]
    offsets = [offset for some in shown for offset in some.text_offset]
    assert len(offsets) == 3 + 7 and offsets[:4] == [0, 1, 2, 3] and offsets == sorted(offsets)
    for offset, name in zip(offsets, (name for some in shown for name in some.tokens)):
        # What was left of a character that nothing completed stands before it.
        assert name.startswith("bytes:") or text[offset:].lstrip("\ufffd").startswith(name)


def test_best_of_shows_the_likeliest(server, client):
    params = SamplingParams(n=5, max_tokens=6, seed=1, logprobs=0)
    (wanted,) = server.llm.generate(["abc"], params, use_tqdm=False)
    answer = client.completions.create(prompt="abc", model="tiny", temperature=1, n=2, best_of=5,
                                       seed=1, max_tokens=6)
    means = {c.text: c.cumulative_logprob / len(c.token_ids) for c in wanted.outputs}
    assert [choice.text for choice in answer.choices] == sorted(means, key=lambda t: -means[t])[:2]
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in wanted.outputs)
    assert answer.choices[0].logprobs is None


def test_stop_strings_are_never_shown_and_never_taken_back(server, client):
    whole = server.complete("abc", max_tokens=30).json()["choices"][0]["text"]
    stop = next(whole[i:i + 2] for i in range(8, 28) if "\ufffd" not in whole[i:i + 2])
    wanted = whole[:whole.index(stop)]
    answer = client.completions.create(prompt="abc", max_tokens=30, stop=[stop, "\n\n\n\n"],
                                       **GREEDY)
    pieces = list(
        client.completions.create(prompt="abc", max_tokens=30, stop=stop, stream=True, **GREEDY))
    assert answer.choices[0].text == wanted and answer.choices[0].finish_reason == "stop"
    assert "".join(piece.choices[0].text for piece in pieces) == wanted
    assert pieces[-1].choices[0].finish_reason == "stop"


# ── fields ────────────────────────────────────────────────────────────────────────────────────────

ASKED = {  # a value of each field that asks for something
    "audio": {"voice": "alloy", "format": "wav"}, "function_call": "auto", "functions": [{
        "name": "f"
    }], "metadata": {"a": "b"}, "modalities": ["text", "audio"],
    "moderation": {"model": "m"}, "parallel_tool_calls": True, "prediction": {
        "type": "content", "content": "x"
    }, "prompt_cache_key": "k", "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h", "reasoning_effort": "low", "response_format": {
        "type": "json_object"
    }, "service_tier": "priority", "store": True, "suffix": "end", "tool_choice": "auto",
    "tools": [{"type": "function", "function": {"name": "f"}}], "verbosity": "low",
    "web_search_options": {}, "best_of": 2, "echo": True, "frequency_penalty": 0.5, "logit_bias": {
        "65": 5
    }, "logprobs": True, "max_completion_tokens": 3, "max_tokens": 3, "n": 2,
    "presence_penalty": 0.5, "safety_identifier": "me", "seed": 1, "stop": [
        "x"
    ], "stream_options": {"include_usage": True}, "temperature": 0.5, "top_p": 0.5, "user": "me",
    "top_logprobs": 1, "messages": HELLO, "prompt": "abc", "model": "tiny", "stream": True
}
TOGETHER = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
def test_every_field_of_the_interface_is_honoured_or_refused_by_name(server, chat):
    theirs = chat_params if chat else completion_params
    names = set(get_type_hints(theirs.CompletionCreateParamsStreaming))
    path = "/v1/chat/completions" if chat else "/v1/completions"
    ours = (ChatBody if chat else CompletionBody).model_fields
    base = {"model": "tiny", "max_tokens": 2} | ({"messages": HELLO} if chat else {"prompt": "a"})
    assert len(names) > 15
    for name in sorted(names):
        body = base | {name: ASKED[name]} | TOGETHER.get(name, {})
        if name == "max_completion_tokens":
            del body["max_tokens"]
        if name == "logprobs" and not chat:
            body[name] = 1
        answer = server.post(path, **body)
        if name in ours:
            assert answer.status_code == 200, (name, answer.text)
        else:
            assert answer.status_code == 400, (name, answer.text)
            error = answer.json()["error"]
            assert error["param"] == name and name in error["message"]
            assert error["code"] == "unsupported_parameter"
            assert set(error) == {"message", "type", "param", "code"}


def test_all_of_sampling_can_be_asked_for():
    names = {field.name for field in fields(SamplingParams)}
    assert SAMPLING | {"n", "max_tokens", "logprobs"} == names


def test_what_asks_for_nothing_is_no_reason_to_refuse(server):
    nothing = {name: values[0] for name, (values, _) in REFUSED.items() if values}
    nulls = dict.fromkeys(["tools", "logit_bias", "seed", "stop", "response_format"])
    assert server.chat(**nothing | nulls).status_code == 200
    message = {
        "role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": [],
        "audio": None, "function_call": None
    }
    messages = HELLO + [message] + HELLO
    assert server.post("/v1/chat/completions", model="tiny", messages=messages,
                       max_tokens=2).status_code == 200


def test_what_fields_do(server):
    """Each changes what it should, as far as a small model can show it."""
    text = server.complete(max_tokens=12).json()["choices"][0]["text"]
    assert server.complete(max_tokens=12, temperature=1,
                           top_k=1).json()["choices"][0]["text"] == text
    assert server.complete(max_tokens=12, temperature=2,
                           seed=2).json()["choices"][0]["text"] != text
    assert server.complete(max_tokens=12, temperature=1, top_p=1e-6,
                           top_k=-1).json()["choices"][0]["text"] == text
    assert server.complete(max_tokens=12,
                           repetition_penalty=50).json()["choices"][0]["text"] != text
    answer = server.complete(max_tokens=12, stop_token_ids=list(range(256))).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] in range(256)
    assert answer["usage"]["completion_tokens"] == 1
    developer, system = (server.post("/v1/chat/completions", model="tiny", max_tokens=9,
                                     temperature=0, messages=[{"role": role, "content": "x"}])
                         for role in ("developer", "system"))
    assert developer.json()["choices"] == system.json()["choices"]
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    answer = server.post("/v1/chat/completions", model="tiny", messages=begun, max_tokens=2,
                         temperature=0, continue_final_message=True).json()
    assert answer["usage"]["prompt_tokens"] == len(
        server.llm.tokenizer.chat(begun, continue_final_message=True))
    long = [{"role": "user", "content": "x" * 470}]
    prompt = len(server.llm.tokenizer.chat(long))
    answer = server.post("/v1/chat/completions", model="tiny", messages=long, temperature=0,
                         ignore_eos=True).json()  # as much as there is room for
    assert answer["usage"]["completion_tokens"] == 512 - prompt + 1 > 5


def test_what_the_fields_beyond_the_interface_do(server):
    text = server.complete(max_tokens=8).json()["choices"][0]["text"]
    wanted = server.llm.tokenizer.encode("Q")[0]

    def of(**more) -> dict:
        answer = server.complete(**dict(max_tokens=8) | more)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    assert of(logit_bias={str(wanted): 100})["text"] == "QQQQQQQQ"
    assert set(of(allowed_token_ids=server.llm.tokenizer.encode("xy"))["text"]) <= set("xy")
    assert "Q" not in of(logit_bias={str(wanted): 100}, bad_words=["Q"])["text"]
    stopped = of(logit_bias={str(wanted): 100}, stop="QQ", include_stop_str_in_output=True)
    assert stopped["text"] == "QQ" and stopped["stop_reason"] == "QQ"
    assert of(logit_bias={str(wanted): 100}, stop="QQ", min_tokens=5)["text"].startswith("QQQ")
    ended = dict(logit_bias={"257": 100}, ignore_eos=False)
    assert of(**ended)["text"] == "" and of(**ended)["stop_reason"] == 257
    assert of(**ended, skip_special_tokens=False, include_stop_str_in_output=True)["text"] == "</s>"
    assert of(prompt="zzzabc", truncate_prompt_tokens=3)["text"] == text
    assert of(prompt="zzzabc", truncate_prompt_tokens=3, echo=True)["text"] == "abc" + text


@pytest.mark.parametrize("most", [0, 3])
def test_a_prompt_is_scored(server, client, most):
    """What evaluations ask: the log-probability of each token of a prompt."""
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=1, prompt_logprobs=1)
    (wanted,) = server.llm.generate(["a prompt"], params, use_tqdm=False)
    answer = client.completions.create(prompt="a prompt", max_tokens=most, echo=True, logprobs=1,
                                       **GREEDY)
    shown, (completion,) = answer.choices[0].logprobs, wanted.outputs
    tokens = wanted.prompt_token_ids + completion.token_ids[:most]
    known = (wanted.prompt_logprobs + completion.logprobs)[:len(tokens)]
    assert shown.token_logprobs[0] is None and shown.top_logprobs[0] is None
    assert shown.token_logprobs[1:] == pytest.approx(
        [logprobs[token] for token, logprobs in zip(tokens[1:], known[1:])])
    assert shown.tokens[:8] == list("a prompt") and shown.text_offset[:8] == list(range(8))
    assert answer.choices[0].text == "a prompt" + completion.text * bool(most)
    assert answer.usage.completion_tokens == most and len(shown.tokens) == len(tokens)
    answer = server.chat(prompt_logprobs=1).json()["choices"][0]
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) > 5
    assert all("decoded_token" in entry for entry in answer["prompt_logprobs"][1].values())
    assert server.chat(prompt_logprobs=1, stream=True).json()["error"]["param"] == "prompt_logprobs"
    assert server.complete(max_tokens=0).json()["error"]["param"] == "max_tokens"


# ── errors ────────────────────────────────────────────────────────────────────────────────────────

BAD = [
    (b"", 400, None),
    (b"{", 400, None),
    (b"[]", 400, None),
    (b"3", 400, None),
    (b"[" * 100_000, 400, None),
    (b"\xff\xfe", 400, None),
    (b'{"model": "tiny"}', 400, "messages"),
    (b'{"messages": []}', 400, "model"),
] + [(json.dumps({"model": "tiny", "messages": HELLO} | more).encode(), status, param)
     for more, status, param in
     (({"model": "other"}, 404, "model"), ({"messages": "hi"}, 400, "messages"),
      ({"messages": []}, 400, "messages"), ({"messages": [{"role": "user"}]}, 400, None),
      ({"messages": [{"role": "boss", "content": "x"}]}, 400, None),
      ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
       "messages.0.content"),
      ({"messages": HELLO + [{"role": "assistant", "content": "", "audio": {"id": "1"}}]}, 400,
       "messages.1.audio"),
      ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}, 400,
       "messages.0.tool_calls"), ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, None),
      ({"\ud800": 1}, 400, None), ({"n": 0}, 400, "n"), ({"n": True}, 400, "n"),
      ({"n": 10**6}, 400, "n"), ({"temperature": -1}, 400, "temperature"),
      ({"temperature": float("nan")}, 400, "temperature"),
      ({"temperature": "1"}, 400, "temperature"), ({"top_p": 0}, 400, "top_p"),
      ({"max_tokens": 0}, 400, "max_tokens"), ({"max_tokens": 10**30}, 400, "max_tokens"),
      ({"max_tokens": 5000}, 400, "messages"),
      ({"max_tokens": 1, "max_completion_tokens": 2}, 400, "max_completion_tokens"),
      ({"seed": 2**63}, 400, "seed"), ({"stop": ["x"] * 17}, 400, "stop"),
      ({"stop": [""]}, 400, "stop"), ({"stop": "x" * 1001}, 400, "stop"),
      ({"stop": 7}, 400, "stop"), ({"top_logprobs": 2}, 400, "top_logprobs"),
      ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
      ({"stream_options": {}}, 400, "stream_options"),
      ({"stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x"),
      ({"stream": True, "stream_options": {"include_obfuscation": True}}, 400, "stream_options"),
      ({"stream": "yes"}, 400, "stream"), ({"colour": "red"}, 400, "colour"),
      ({"frequency_penalty": 3}, 400, "frequency_penalty"),
      ({"chat_template": "{{ 1 }}"}, 400, "chat_template"),
      ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
      ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "messages"))]


@pytest.mark.parametrize("body, status, param", BAD, ids=lambda value: str(value)[:60])
def test_a_bad_body_is_an_error_that_names_its_field(server, body, status, param):
    answer = httpx.post(server.url + "/v1/chat/completions", content=body, timeout=60,
                        headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["param"] == param, error
    assert error["message"] and error["code"]


@pytest.mark.parametrize("more, param", [({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"),
                                         ({"prompt": [1.5]}, "prompt"), ({"prompt": ""}, "prompt"),
                                         ({"prompt": [-1]}, None), ({"prompt": [258]}, None),
                                         ({"prompt": ["a", 1]}, "prompt"),
                                         ({"best_of": 1, "n": 2}, "best_of"),
                                         ({"best_of": 3, "stream": True}, "best_of"),
                                         ({"logprobs": 21}, "logprobs"),
                                         ({"prompt": ["a"] * 9000}, None)])
def test_bad_completions(server, more, param):
    answer = server.complete(**more)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_errors_of_the_client(client):
    with pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert found.value.code == "model_not_found" and found.value.param == "model"
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(messages=HELLO, tools=ASKED["tools"], **GREEDY)
    assert found.value.param == "tools"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x")


# ── the other rooms ───────────────────────────────────────────────────────────────────────────────


def test_models_and_health(server, client):
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.object == "model" and model.max_model_len == 512
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    for path, status in (("/nothing", 404), ("/v1/chat/completions", 405)):
        answer = httpx.get(server.url + path)
        assert answer.status_code == status and answer.json()["error"]["message"]


def test_metrics():
    with serving() as server:
        for _ in range(2):
            assert server.complete("a long enough prompt", n=2).status_code == 200
        server.complete(max_tokens=0)
        text = httpx.get(server.url + "/metrics").text
        engine = server.llm.engine
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {(sample.name, *sample.labels.values()): sample.value
              for family in families.values()
              for sample in family.samples}
    assert values["paged_requests_total", "length"] == 4
    assert values["paged_requests_refused_total", "400"] == 1
    assert values[
        "paged_prompt_tokens_total",
    ] == 40 and values[
        "paged_output_tokens_total",
    ] == 24
    assert values[
        "paged_cached_prompt_tokens_total",
    ] == 16  # of the second: 4 of 5 blocks
    assert values[
        "paged_prefix_hit_ratio",
    ] == 16 / 40
    assert values[
        "paged_blocks_free",
    ] == values[
        "paged_blocks",
    ] == engine.config.num_blocks
    assert values[
        "paged_requests_running",
    ] == values[
        "paged_requests_waiting",
    ] == 0
    for name in ("queue_time", "time_to_first_token", "time_per_output_token", "request"):
        assert families[f"paged_{name}_seconds"].type == "histogram"
        assert values[
            f"paged_{name}_seconds_count",
        ] == 2


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server):
    body = json.dumps({
        "model": "tiny", "prompt": "abc", "max_tokens": 5, "temperature": 0, "ignore_eos": True,
        "stream": True
    })
    run = subprocess.run(["curl", "-sN", server.url + "/v1/completions", "--json", body],
                         capture_output=True, timeout=60)
    events = run.stdout.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(e.startswith("data: ") for e in events[:-1])
    chunks = [json.loads(event[6:]) for event in events[:-2]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == server.complete(max_tokens=5).json()["choices"][0]["text"]


# ── answers, by themselves ────────────────────────────────────────────────────────────────────────


def test_log_probabilities_that_json_does_not_know():
    from paged.request import CompletionOutput, RequestMetrics, RequestOutput
    completion = CompletionOutput(0, "é", token_ids=[0, 1, 2], finish_reason="length",
                                  logprobs=[{0: -float("inf"), 1: -1.0}, {1: -2.0}, {2: 0.0}])
    output = RequestOutput("0", [5], [completion], RequestMetrics(0.0), True)
    tokens = [b"\xc3", b"\xa9", b""]
    answer = Answer(False, "m", lambda token, name=False: tokens[token], 1).whole([output])
    shown = answer["choices"][0]["logprobs"]
    assert shown["token_logprobs"] == [LEAST, -2.0, 0.0]
    assert shown["tokens"] == [r"bytes:\xc3", r"bytes:\xa9", "token_id:2"]
    assert shown["top_logprobs"][0] == {r"bytes:\xa9": -1.0, r"bytes:\xc3": LEAST}
    assert shown["text_offset"] == [0, 0, 1]
    json.dumps(answer, allow_nan=False)


def test_the_best_have_the_highest_log_probability_a_token():
    from paged.request import CompletionOutput
    some = [
        CompletionOutput(i, token_ids=[0] * n, cumulative_logprob=sum_)
        for i, (n, sum_) in enumerate([(2, -4.0), (4, -4.0), (1, -3.0)])
    ]
    assert [c.index for c in best(some, 2)] == [1, 0]
    assert [c.index for c in best(some, 3)] == [0, 1, 2]
