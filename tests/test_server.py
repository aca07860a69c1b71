"""The server and OpenAI's interface: its own client is the test, over a small random model.

Protects that answers, whole and streamed, are those of `LLM`, and what else there is to look at.
"""

import asyncio
import json
import shutil
import subprocess

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paged import SamplingParams
from paged.server.answers import LEAST, Answer, best
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
