"""OpenAI's bodies: what is read, what is refused and under which name, and what an answer looks
like.

Protects the one place where the server and the files of requests agree.
"""

import json
import math
from dataclasses import replace

import pytest

from paged import LLM, SamplingParams
from paged.openai_format import (
    CHAT,
    TEXT,
    APIError,
    checked_requests,
    logprobs_of,
    read_body,
    response_body,
)
from paged.request import CompletionOutput
from tests.test_llm import loaded  # noqa: F401 - a fixture

MESSAGES = [{"role": "user", "content": "abc"}]
DEFAULTS = SamplingParams(temperature=0.5)


@pytest.fixture(scope="module")
def llm(loaded):  # noqa: F811
    with LLM(loaded, device="cpu", block_size=4, num_blocks=16) as llm:
        yield llm


def read(body, path=CHAT):
    if path == CHAT and "messages" not in body:
        body = {"messages": MESSAGES, **body}
    elif path == TEXT and "prompt" not in body:
        body = {"prompt": "abc", **body}
    return read_body(path, body, "tiny", DEFAULTS)


def answer(llm, body, path=CHAT):
    wanted = read_body(path, body, "tiny", replace(DEFAULTS, temperature=0))
    requests = checked_requests(wanted, llm)
    outputs = [
        llm.generate([request.token_ids], request.params, use_tqdm=False)[0] for request in requests
    ]
    return response_body(wanted, outputs, "id-1", "tiny", 1000, llm.tokenizer), outputs


def test_fields_become_sampling_params():
    wanted = read({
        "model": "tiny", "n": 2, "top_p": 0.5, "stop": ["x"], "seed": 3, "max_completion_tokens": 7,
        "top_k": 4, "min_p": 0.1, "presence_penalty": 1, "user": "me", "logprobs": True,
        "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True}
    })
    assert wanted.params == SamplingParams(n=2, temperature=0.5, top_p=0.5, stop=["x"], seed=3,
                                           max_tokens=7, top_k=4, min_p=0.1, presence_penalty=1,
                                           logprobs=2)
    assert (wanted.stream, wanted.include_usage, wanted.fill) == (True, True, False)
    assert read({"logprobs": True}).params.logprobs == 0
    assert read({"logprobs": False}).params.logprobs is None
    assert read({"logprobs": 3}, TEXT).params.logprobs == 3
    assert read({"max_tokens": 7}).params == read({"max_completion_tokens": 7}).params


def test_a_null_says_nothing():
    names = ("temperature", "stop", "logprobs", "max_tokens", "stream", "tools", "response_format",
             "model", "stream_options")
    assert read(dict.fromkeys(names)) == read({})
    assert read({}).params == replace(DEFAULTS, max_tokens=1) and read({}).fill
    assert not read({}, TEXT).fill and read({}, TEXT).params.max_tokens == 16


@pytest.mark.parametrize("prompt, prompts", [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]),
                                             ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])])
def test_prompts_of_every_form(prompt, prompts):
    assert read({"prompt": prompt}, TEXT).prompts == prompts


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("field, value", [("top_p", 3), ("temperature", "hot"), ("n", 0),
                                          ("stop", [1]), ("stop_token_ids", ["a"]),
                                          ("max_tokens", 1.5), ("stream", "yes"),
                                          ("stream_options", {"include_usage": True}),
                                          ("response_format", {"type": "json_object"}),
                                          ("functions", []), ("nonsense", 1), ("nonsense", None)])
def test_what_is_wrong_is_named(path, field, value):
    with pytest.raises(APIError) as caught:
        read({field: value}, path)
    error = caught.value.body["error"]
    assert caught.value.status == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == field and field in error["message"]


@pytest.mark.parametrize("path, field, value", [(CHAT, "prompt", "a"), (CHAT, "echo", False),
                                                (CHAT, "messages", []), (CHAT, "messages", "hi"),
                                                (CHAT, "messages", ["hi"]),
                                                (CHAT, "max_completion_tokens", 0),
                                                (CHAT, "top_logprobs", 2), (CHAT, "logprobs", 2),
                                                (CHAT, "add_generation_prompt", 1),
                                                (TEXT, "messages", MESSAGES), (TEXT, "prompt", []),
                                                (TEXT, "prompt", 3), (TEXT, "prompt", ["a", 1]),
                                                (TEXT, "prompt", [True]), (TEXT, "echo", True),
                                                (TEXT, "best_of", 2), (TEXT, "logprobs", True),
                                                (TEXT, "logprobs", 21), (TEXT, "top_logprobs", 2),
                                                (TEXT, "tools", [])])
def test_what_is_wrong_on_one_path_is_named(path, field, value):
    with pytest.raises(APIError) as caught:
        read({field: value}, path)
    assert caught.value.body["error"]["param"] == field


def test_what_contradicts_is_refused():
    for body, param in (({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"), ({
            "logprobs": True, "top_logprobs": 21
    }, "top_logprobs")):
        with pytest.raises(APIError) as caught:
            read(body)
        assert caught.value.body["error"]["param"] == param
    with pytest.raises(APIError) as caught:
        read({"model": "another"})
    assert caught.value.status == 404
    assert caught.value.body["error"]["code"] == "model_not_found"
    with pytest.raises(APIError, match="must be a JSON object"):
        read_body(CHAT, ["messages"], "tiny", DEFAULTS)


def test_the_options_of_a_template_arrive(llm):
    tools = [{"type": "function", "function": {"name": "f"}}]
    wanted = read({"tools": tools, "chat_template_kwargs": {"x": "y"}})
    assert checked_requests(wanted, llm)[0].prompt == "t1uabcxya"
    assert checked_requests(read({"tools": tools, "tool_choice": "none"}), llm)[0].prompt == "uabca"
    wanted = read({"continue_final_message": True})
    assert checked_requests(wanted, llm)[0].prompt == "uabc"


def test_a_chat_without_max_tokens_may_fill_the_engine(llm):
    (request,) = checked_requests(read({}), llm)
    longest = llm.engine.config.max_model_len
    assert len(request.token_ids) + request.params.max_tokens - 1 == longest == 64
    with pytest.raises(APIError, match="max_model_len") as caught:
        checked_requests(read({"messages": [{"role": "user", "content": "a" * 70}]}), llm)
    assert caught.value.body["error"]["param"] == "messages"
    with pytest.raises(APIError, match="raise max_model_len"):
        checked_requests(read({"max_tokens": 100}, TEXT), llm)


def test_a_chat_is_answered(llm):
    body, (output,) = answer(llm,
                             {"messages": MESSAGES, "max_tokens": 5, "ignore_eos": True, "n": 2})
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    for choice, completion in zip(body["choices"], output.outputs):
        assert choice == {
            "index": completion.index, "message": {"role": "assistant", "content": completion.text},
            "logprobs": None, "finish_reason": "length"
        }
    assert {name: body[name]
            for name in ("id", "object", "created", "model")} == {
                "id": "id-1", "object": "chat.completion", "created": 1000, "model": "tiny"
            }
    assert body["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens}
    }


def test_several_prompts_are_continued(llm):
    body, outputs = answer(
        llm, {"prompt": ["abc", "bca"], "max_tokens": 3, "n": 2, "ignore_eos": True}, TEXT)
    assert body["object"] == "text_completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    texts = [completion.text for output in outputs for completion in output.outputs]
    assert [choice["text"] for choice in body["choices"]] == texts
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (6, 12)


def test_logprobs_have_the_form_of_their_path(llm):
    asked = {"messages": MESSAGES, "max_tokens": 3, "ignore_eos": True, "logprobs": True}
    body, (output,) = answer(llm, asked | {"top_logprobs": 2})
    content = body["choices"][0]["logprobs"]["content"]
    for entry, token, found in zip(content, output.outputs[0].token_ids,
                                   output.outputs[0].logprobs):
        assert entry["bytes"] == list(llm.tokenizer.token_bytes(token))
        assert entry["token"].encode() == bytes(entry["bytes"])
        assert entry["logprob"] == found[token]
        assert [one["logprob"] for one in entry["top_logprobs"]] == sorted(found.values())[:-3:-1]
    assert len(content) == 3
    body, _ = answer(llm, asked)
    assert all(not entry["top_logprobs"] for entry in body["choices"][0]["logprobs"]["content"])
    body, (output,) = answer(
        llm, {"prompt": "abc", "max_tokens": 3, "ignore_eos": True, "logprobs": 2}, TEXT)
    found = body["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == body["choices"][0]["text"]
    assert found["text_offset"] == [0, 1, 2]
    assert [len(one) for one in found["top_logprobs"]] == [2, 2, 2]
    assert found["token_logprobs"] == [
        found[token]
        for token, found in zip(output.outputs[0].token_ids, output.outputs[0].logprobs)
    ]


def test_a_character_of_two_tokens_and_an_infinity_can_be_written(llm):

    class Halves:

        def token_bytes(self, token):
            return "é!".encode()[token:token + 1]

    completion = CompletionOutput(0, token_ids=[0, 1, 2], logprobs=[{0: -1.0}, {1: -math.inf},
                                                                    {2: -1.0}])
    wanted = read({"logprobs": 0}, TEXT)
    found = logprobs_of(completion, wanted, Halves())
    assert found is not None and found["text_offset"] == [0, 0, 1]
    assert json.loads(json.dumps(found, allow_nan=False))["token_logprobs"] == [-1.0, -9999.0, -1.0]
    assert logprobs_of(completion, wanted, Halves(), start=2) == {
        "tokens": ["!"], "token_logprobs": [-1.0], "top_logprobs": None, "text_offset": [1]
    }


def test_a_failed_request_is_an_error(llm):
    wanted = read({"max_tokens": 1})
    (request,) = checked_requests(wanted, llm)
    (output,) = llm.generate([request.token_ids], request.params, use_tqdm=False)
    output.outputs[0].finish_reason, output.outputs[0].error = "error", "the logits hold NaN"
    with pytest.raises(APIError, match="the logits hold NaN") as caught:
        response_body(wanted, [output], "id-1", "tiny", 1000, llm.tokenizer)
    assert caught.value.status == 500 and caught.value.body["error"]["type"] == "server_error"
