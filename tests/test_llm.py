"""LLM: prompts of every form, streaming, progress, refusals and interruptions, on a small random
model.

Protects the interface that notebooks and users call. The default model itself is at the end.
"""

import gc
import signal
import threading
import weakref
from dataclasses import fields, replace
from inspect import signature

import pytest
import torch

from paged import LLM, SamplingParams, Trace
from paged.models.decoder import random_decoder
from paged.models.loader import Loaded
from tests.small_models import TINY_LLAMA

GREEDY = SamplingParams(temperature=0, max_tokens=5)


class Letters:
    """A tokenizer of one letter a token: token i is chr(97 + i % 26)."""

    def encode(self, text):
        return [(ord(letter) - 97) % 26 for letter in text]

    def token_bytes(self, token):
        return bytes([97 + token % 26])

    def chat(self, messages, **options):
        return self.encode(self.render(messages, **options))

    def render(self, messages, add_generation_prompt=None, continue_final_message=False, tools=None,
               chat_template_kwargs=None):
        text = "".join(message["role"][0] + message["content"] for message in messages)
        if tools:
            text = f"t{len(tools)}" + text
        for name, value in (chat_template_kwargs or {}).items():
            text += name + value
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        return text + "a" * add_generation_prompt


@pytest.fixture(scope="module")
def loaded():
    return Loaded(random_decoder(TINY_LLAMA), TINY_LLAMA, Letters(), {3}, 0)


@pytest.fixture
def llm(loaded):
    return LLM(loaded, device="cpu", block_size=4, num_blocks=64)


def test_prompts_of_every_form(llm):
    by_ids = llm.generate([0, 1, 2], GREEDY, use_tqdm=False)
    by_text = llm.generate("abc", GREEDY, use_tqdm=False)
    assert by_ids[0].outputs[0].token_ids == by_text[0].outputs[0].token_ids
    text = "".join(chr(97 + t % 26) for t in by_text[0].outputs[0].token_ids)
    assert by_text[0].outputs[0].text in (text, text[:-1])  # the end-of-sequence token is no text
    chat = [{"role": "user", "content": "abc"}]
    one, two = llm.generate(chat, GREEDY, use_tqdm=False), llm.generate(
        [chat, "uabca", [20, 0, 1, 2, 0], {"prompt_token_ids": [20, 0, 1, 2, 0]}], GREEDY,
        use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in one + two}) == 1
    assert [output.prompt_token_ids for output in two] == [[20, 0, 1, 2, 0]] * 4
    assert [output.prompt for output in two] == ["uabca", "uabca", None, None]
    (alone,) = llm.generate({"prompt_token_ids": [20, 0, 1, 2, 0]}, GREEDY, use_tqdm=False)
    assert alone.prompt_token_ids == [20, 0, 1, 2, 0]
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_one_params_a_prompt(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 4)]
    outputs = llm.generate(["abc", "abd"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 4]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate(["abc"], params, use_tqdm=False)


def test_stream_gives_what_generate_gives(llm):
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    (whole,) = llm.generate("hello", params, use_tqdm=False)
    pieces = [output.outputs[0].new_text for output in llm.stream("hello", params)]
    assert "".join(pieces) == whole.outputs[0].text and len(pieces) == 9


def test_closing_a_stream_early_aborts_its_request(llm):
    stream = llm.stream("hello", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished()
    assert llm.engine.block_pool.num_free() == 64


def test_a_refused_prompt_runs_none_and_leaves_none(llm):
    with pytest.raises(ValueError, match="empty"):
        llm.generate(["abc", ""], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished()
    for prompts, words in [("a" * 300, "max_model_len"), ([[999]], "999"), (["abc", 5], "prompt"),
                           ([["abc"]], "prompt")]:
        with pytest.raises((ValueError, TypeError), match=words):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    assert llm.engine.block_pool.num_free() == 64


def test_every_completion_of_a_stream_shows_its_new_text_once(llm):
    params = SamplingParams(n=3, temperature=1.5, max_tokens=12, seed=1, stop=["a", "q"])
    texts = ["", "", ""]
    for output in llm.stream("abc", params):
        for completion in output.outputs:  # one has ended long before another
            texts[completion.index] += completion.new_text
    (whole,) = llm.generate("abc", params, use_tqdm=False)
    assert texts == [completion.text for completion in whole.outputs]
    assert len({len(completion.token_ids) for completion in whole.outputs}) > 1


def test_streams_in_turn_and_around_generate_lose_nothing(llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    whole = [
        output.outputs[0].text for output in llm.generate(["abc", "xyz"], params, use_tqdm=False)
    ]
    outputs = zip(llm.stream("abc", params), llm.stream("xyz", params))
    texts = ["".join(output.outputs[0].new_text for output in seen) for seen in zip(*outputs)]
    assert texts == whole
    stream = llm.stream("abc", params)
    seen = [next(stream)]
    llm.generate("c", SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False)
    with pytest.raises(ValueError):
        llm.generate(["c", ""], params, use_tqdm=False)  # leaves the stream alone
    seen += stream
    assert "".join(output.outputs[0].new_text for output in seen) == whole[0]
    assert not llm.engine.has_unfinished()


def test_a_stream_is_refused_when_it_is_asked_for(llm):
    for prompt in ([], "a" * 300, [999]):
        with pytest.raises(ValueError):
            llm.stream(prompt, GREEDY)
    assert not llm.engine.has_unfinished()


def test_token_ids_of_any_kind(llm):
    import numpy as np
    (expected,) = llm.generate([0, 1, 2], GREEDY, use_tqdm=False)
    ids = np.array([0, 1, 2])
    for prompts in (ids, list(ids), [ids], torch.tensor([0, 1, 2]), [torch.tensor(
        [0, 1, 2])], range(3), [(0, 1, 2)]):
        (output,) = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.prompt_token_ids == [0, 1, 2]


@pytest.mark.parametrize("prompts", [
    None, 5.0, b"abc", {"role": "user", "content": "a"}, {"a"}, [None], [1.5], [1, "a"], ["a", 1],
    [[1, {}]]
])
def test_what_is_no_prompt_is_a_sentence(llm, prompts):
    with pytest.raises(ValueError, match="prompt"):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="sampling_params is 5"):
        llm.generate("a", 5, use_tqdm=False)


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_without_memory_is_a_sentence_and_the_engine_goes_on(llm, stream, monkeypatch):

    def full(batch):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(llm.engine, "launch", full)
    with pytest.raises(
            MemoryError,
            match="no room for a step of up to 2048 tokens beside a pool of 64 blocks .*Lower"):
        list(llm.stream("abc", GREEDY)) if stream else llm.generate("abc", GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert not llm.engine.has_unfinished()
    assert llm.generate("abc", GREEDY, use_tqdm=False)[0].finished


def test_given_weights_stay_where_they_are(loaded):
    assert LLM(loaded, num_blocks=8).runner.kv.data.device == loaded.decoder.embedding.device
    loaded = Loaded(random_decoder(TINY_LLAMA, device="meta"), TINY_LLAMA, None, set(), 0)
    with pytest.raises(ValueError,
                       match="device is 'cpu' and the weights that were given lie on 'meta'"):
        LLM(loaded, device="cpu", num_blocks=8)


@pytest.mark.parametrize("failed_step", range(1, 6))
def test_a_step_that_fails_once_costs_time_and_nothing_else(llm, failed_step, monkeypatch):
    params = replace(GREEDY, logprobs=2, n=2, temperature=1, seed=1)
    want = llm.generate(["abc", "xyz"], params, use_tqdm=False)
    steps = iter(range(1, 100))
    update = llm.runner.seats.update

    def fails_once(batch):
        if next(steps) == failed_step:
            raise RuntimeError("device lost")
        return update(batch)

    monkeypatch.setattr(llm.runner.seats, "update", fails_once)
    got = llm.generate(["abc", "xyz"], params, use_tqdm=False)
    assert next(steps) > failed_step
    for one, two in zip(got, want):
        for mine, theirs in zip(one.outputs, two.outputs):
            assert (mine.token_ids, mine.text) == (theirs.token_ids, theirs.text)
            assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-4)
            assert len(mine.logprobs) == len(mine.token_ids)
        assert one.metrics.num_output_tokens == two.metrics.num_output_tokens


def test_ctrl_c_leaves_the_engine_empty_and_usable(llm, monkeypatch):
    want = llm.generate(["abc", "xyz"], GREEDY, use_tqdm=False)
    steps = []
    update = llm.runner.seats.update

    def interrupted(batch):
        steps.append(batch)
        if len(steps) == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return update(batch)

    monkeypatch.setattr(llm.runner.seats, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc", SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
    monkeypatch.undo()
    assert len(
        steps) < 199 and not llm.engine.has_unfinished() and llm.engine.block_pool.num_free() == 64
    got = llm.generate(["abc", "xyz"], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]


def test_stop_strings_and_eos(llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    text = llm.generate("hello", params, use_tqdm=False)[0].outputs[0].text
    stop = text[4:6]
    (output,) = llm.generate(
        "hello", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop),
        use_tqdm=False)
    assert output.outputs[0].text == text[:text.index(stop)]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop


def test_what_ended_it(llm):
    (whole,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
                            use_tqdm=False)
    assert whole.outputs[0].stop_reason is None
    end = whole.outputs[0].token_ids[4]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, stop_token_ids=[end])
    (output,) = llm.generate("hello", params, use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", end)


def test_log_probabilities_add_up(llm):
    for params in (SamplingParams(logprobs=0, seed=3, n=2), SamplingParams(
            temperature=0, logprobs=2)):
        (output,) = llm.generate("hello", params, use_tqdm=False)
        for completion in output.outputs:
            chosen = zip(completion.logprobs, completion.token_ids, strict=True)
            assert completion.cumulative_logprob == sum(of[token] for of, token in chosen) < 0
    (output,) = llm.generate("hello", GREEDY, use_tqdm=False)
    assert output.outputs[0].cumulative_logprob is None


# ── what users expect ─────────────────────────────────────────────────────────────────────────────


def test_chat(llm):
    question = [{"role": "user", "content": "abc"}]
    half = [*question, {"role": "assistant", "content": "sure"}]
    for messages, options, prompt in [(question, {}, "uabca"),
                                      (half, dict(continue_final_message=True), "uabcasure"),
                                      (question, dict(add_generation_prompt=False), "uabc"),
                                      (question,
                                       dict(chat_template_kwargs={"think": "no"}), "uabcthinknoa"),
                                      (question, dict(tools=[{}, {}]), "t2uabca")]:
        (output,) = llm.chat(messages, GREEDY, use_tqdm=False, **options)
        (want,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.prompt == prompt
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
    outputs = llm.chat([question, half], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["uabca", "uabcasurea"]
    for wrong in ("abc", ["abc"], [0, 1], [question, "abc"]):
        with pytest.raises(ValueError, match="messages is "):
            llm.chat(wrong, GREEDY, use_tqdm=False)


def test_the_checkpoint_says_how_it_samples_unless_it_is_told_not_to(loaded):
    loaded = replace(loaded, generation_defaults={"temperature": 0.6, "top_k": 20})
    small = dict(device="cpu", block_size=4, num_blocks=32)
    by_default = LLM(loaded, **small)
    assert by_default.default_sampling_params == SamplingParams(temperature=0.6, top_k=20)
    assert LLM(loaded, generation_config="none",
               **small).default_sampling_params == (SamplingParams())
    seen, add = [], by_default.engine.add_checked_request
    by_default.engine.add_checked_request = lambda ids, params, **named: (seen.append(params) or
                                                                          add(ids, params, **named))
    by_default.generate("abc", use_tqdm=False)
    assert list(by_default.stream("abc"))[-1].finished
    by_default.generate("abc", GREEDY, use_tqdm=False)
    assert seen == [by_default.default_sampling_params] * 2 + [GREEDY]
    with pytest.raises(ValueError, match="generation_config is 'vllm': choose auto or none"):
        LLM(loaded, generation_config="vllm", **small)


def test_abort_from_a_stream_keeps_what_there_is(llm):
    stream = llm.stream("abc", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    first = next(stream)
    assert llm.abort(first.request_id) is True and llm.abort(first.request_id) is False
    (last,) = stream
    assert last.finished and last.outputs[0].finish_reason == "abort"
    assert last.outputs[0].token_ids and not first.finished
    assert llm.engine.block_pool.num_free() == 64


def test_reset_prefix_cache(llm):
    prompts = ["abcdefghij"]
    assert llm.generate(prompts, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate(prompts, GREEDY, use_tqdm=False)[0].num_cached_tokens == 8
    stream = llm.stream("hello", replace(GREEDY, max_tokens=9, ignore_eos=True))
    next(stream)
    llm.reset_prefix_cache()
    assert llm.generate(prompts, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    (whole,) = llm.generate("hello", replace(GREEDY, max_tokens=9, ignore_eos=True), use_tqdm=False)
    assert list(stream)[-1].outputs[0].token_ids == whole.outputs[0].token_ids


def test_close(loaded):
    threads = set(threading.enumerate())
    with LLM(loaded, device="cpu", block_size=4, num_blocks=32) as llm:
        stream = llm.stream("abc", SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
        runner = weakref.ref(llm.runner)
    assert next(stream).outputs[0].finish_reason == "abort"
    assert runner() is None and not set(threading.enumerate()) - threads
    llm.close()
    for use in (lambda: llm.generate("a"), lambda: llm.stream("a"), lambda: llm.abort("0"),
                llm.reset_prefix_cache):
        with pytest.raises(ValueError, match="this LLM has been closed"):
            use()


def test_an_llm_that_is_forgotten_takes_its_thread_and_its_pool_along(loaded):
    threads = set(threading.enumerate())
    llm = LLM(loaded, device="cpu", block_size=4, num_blocks=32)
    llm.generate("abc", GREEDY, use_tqdm=False)
    assert set(threading.enumerate()) - threads
    runner = weakref.ref(llm.runner)
    del llm
    gc.collect()
    assert runner() is None and not set(threading.enumerate()) - threads


def test_what_is_left_out_is_refused_by_name(loaded):
    from paged import llm, sampling
    assert not set(llm.LEFT_OUT.split()) & set(signature(LLM).parameters)
    assert not set(sampling.LEFT_OUT.split()) & {field.name for field in fields(SamplingParams)}
    for make in (lambda: LLM(loaded, device="cpu", quantization="awq"),
                 lambda: SamplingParams(structured_outputs={})):
        with pytest.raises(ValueError, match="(quantization|structured_outputs) is left out of"):
            make()


@pytest.mark.parametrize("more", [{"revision": "main"}, {"tokenizer": "a/b"}])
def test_a_given_model_takes_neither_a_revision_nor_a_tokenizer(loaded, more):
    for model in (loaded, lambda *arguments: pytest.fail("it was loaded")):
        with pytest.raises(ValueError, match="revision and tokenizer are for models that are"):
            LLM(model, device="cpu", **more)


def test_sizes_are_checked_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("paged.llm.load", lambda *args: pytest.fail("it was loaded"))
    for kwargs, words in [({"block_size": 0}, "block_size is 0"),
                          ({"num_blocks": -1}, "num_blocks is -1"),
                          ({"max_num_seqs": 0}, "max_num_seqs"),
                          ({"max_num_batched_tokens": 0}, "max_num_batched"),
                          ({"gpu_memory_utilization": 0}, "gpu_memory_utilization is 0"),
                          ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization is 1.01"),
                          ({"gpu_memory_utilization": "1"}, "gpu_memory_utilization is '1'"),
                          ({"attention_backend": "fast"}, "fast"), ({"device": "gpu"}, "gpu"),
                          ({"preemption": "drop"}, "drop")]:
        with pytest.raises(ValueError, match=words):
            LLM("default", **kwargs)
    with pytest.raises(TypeError, match="blocksize"):
        LLM("default", blocksize=16)


def test_a_model_length_beyond_the_models_own_or_the_pool_is_refused(loaded):
    with pytest.raises(ValueError, match="max_model_len is 257; the model was trained for 256"):
        LLM(loaded, device="cpu", max_model_len=257)
    with pytest.raises(ValueError, match="max_model_len is 33, and a pool of 8 blocks of 4 holds"):
        LLM(loaded, device="cpu", max_model_len=33, num_blocks=8, block_size=4)


def test_all_of_the_model_the_pool_and_the_card_may_be_asked_for(loaded):
    whole = LLM(loaded, device="cpu", max_model_len=256, num_blocks=64, block_size=4,
                gpu_memory_utilization=1)
    assert whole.engine.config.max_model_len == 256


def test_both_prefix_caches_serve(loaded, llm):
    prompts = ["abcdefghij", "abcdefghxy"]
    tree = LLM(loaded, device="cpu", block_size=4, num_blocks=64, prefix_cache="radix")
    want, got = (engine.generate(prompts, GREEDY, use_tqdm=False) for engine in (llm, tree))
    assert [(o.outputs[0].token_ids, o.num_cached_tokens)
            for o in got] == [(o.outputs[0].token_ids, o.num_cached_tokens) for o in want]
    with pytest.raises(ValueError, match="prefix_cache is 'trie'"):
        LLM(loaded, device="cpu", num_blocks=8, prefix_cache="trie")


def test_the_pool_takes_what_a_cpu_can_use(loaded):
    trace = Trace()
    llm = LLM(loaded, device="cpu", block_size=4, max_num_seqs=2, trace=trace)
    assert llm.engine.config.num_blocks == 2 * 256 // 4
    assert [event["event"]
            for event in trace.events] == ["MODEL_WEIGHTS_LOADED", "KV_BUDGET_ESTIMATE"]


def test_an_impossible_pool_is_a_sentence(loaded):
    with pytest.raises(MemoryError, match="lower num_blocks"):
        LLM(loaded, device="cpu", num_blocks=10**13)


def test_a_backend_that_cannot_run_here_is_refused_at_once(loaded):
    if torch.cuda.is_available():
        pytest.skip("it may run here")
    with pytest.raises(ValueError, match="'flash' cannot run here"):
        LLM(loaded, device="cpu", num_blocks=8, attention_backend="flash")


def test_preemption_by_swapping_gives_the_same_text(loaded):
    prompts = ["abcdefgh", "ijklmnop", "qrstuvwx"]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    roomy = LLM(loaded, device="cpu", block_size=4, num_blocks=64).generate(
        prompts, params, use_tqdm=False)
    for preemption in ("recompute", "swap"):
        tight = LLM(loaded, device="cpu", block_size=4, num_blocks=10, preemption=preemption)
        outputs = tight.generate(prompts, params, use_tqdm=False)
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in roomy]


@pytest.mark.default_model
def test_the_default_model_answers():
    torch.set_num_threads(2)
    llm = LLM("default", num_blocks=64)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.generate(question, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
    (again,) = llm.generate(question, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert again.num_cached_tokens >= 16 and again.outputs[0].text == output.outputs[0].text
