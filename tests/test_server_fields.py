"""Every field of OpenAI's interface, and what is beyond it: honoured, or refused by name.

Protects that nothing that is asked for is ignored in silence, and the form of every error.
"""

import json
from dataclasses import fields
from typing import get_type_hints

import httpx
import openai
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from paged import SamplingParams
from paged.request import CompletionOutput, RequestMetrics, RequestOutput
from paged.server.asked import check_end
from paged.server.errors import ApiError
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


@pytest.mark.parametrize("skip, text", [({}, ""), ({"skip_special_tokens": True}, ""),
                                        ({"skip_special_tokens": False}, "</s></s></s>")])
def test_offsets_are_those_of_the_text(server, skip, text):
    """A special token that is no text takes no room in it."""
    shown = server.complete(max_tokens=3, logprobs=0, logit_bias={"257": 100}, **skip).json()
    (choice,) = shown["choices"]
    assert choice["text"] == text and choice["logprobs"]["tokens"] == ["</s>"] * 3
    assert choice["logprobs"]["text_offset"] == [i * len(text) // 3 for i in range(3)]


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


@pytest.mark.parametrize("reason, status", [("stop", None), ("length", None), ("abort", 503),
                                            ("error", 500)])
def test_an_answer_that_was_ended_early_is_an_error(reason, status):
    ends = [CompletionOutput(0, finish_reason="stop"), CompletionOutput(1, finish_reason=reason)]
    output = RequestOutput("0", [1], ends, RequestMetrics(0.0))
    try:
        check_end(output)
        assert status is None
    except ApiError as error:
        assert error.status == status


@pytest.mark.parametrize("stream", [False, True])
def test_as_many_candidates_as_answers_are_no_ranking(server, stream):
    assert server.complete(n=2, best_of=2, max_tokens=2, stream=stream).status_code == 200


def test_errors_of_the_client(client):
    with pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert found.value.code == "model_not_found" and found.value.param == "model"
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(messages=HELLO, tools=ASKED["tools"], **GREEDY)
    assert found.value.param == "tools"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x")
