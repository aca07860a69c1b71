"""Beam search gives what brute force gives, shares what can be shared, and leaves nothing behind.

On the oracle, so every read of every beam is checked, beside other requests, under preemption and
abort.
"""

import pytest

from paged import LLM, BeamSearchParams, Engine, EngineConfig, SamplingParams, Trace
from paged.lab.oracle import OracleRunner, distribution, truth
from paged.metrics import summary
from paged.models.decoder import random_decoder
from paged.models.loader import Loaded
from tests.beams import brute_force
from tests.caches import kept
from tests.engines import make_engine, run
from tests.small_models import TINY_LLAMA, logits_of

PROMPT = [3, 1, 4, 1, 5]


class Bytes:
    """A tokenizer of one character a token."""

    def token_bytes(self, token):
        return chr(token).encode()


def search(engine, prompt=PROMPT, **params):
    request_id = engine.add_request(prompt, BeamSearchParams(**params))
    return run(engine)[request_id]


def found(output) -> list[tuple]:
    return [(c.token_ids, pytest.approx(c.cumulative_logprob)) for c in output.outputs]


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_same_as_brute_force(width, length_penalty, block_size):
    for end in ([], [0], [1, 2]):
        engine = make_engine(num_blocks=100, block_size=block_size)
        output = search(engine, beam_width=width, max_tokens=7, length_penalty=length_penalty,
                        stop_token_ids=end)
        assert brute_force(PROMPT, width, 7, end, distribution, length_penalty) == found(output)
        for completion in output.outputs:
            assert completion.finish_reason == ("stop"
                                                if completion.token_ids[-1] in end else "length")


def test_ends_as_soon_as_nothing_better_can_come():
    long = make_engine(num_blocks=400)
    output = search(long, beam_width=2, max_tokens=150, length_penalty=0.0, stop_token_ids=[0, 1])
    assert brute_force(PROMPT, 2, 150, [0, 1], distribution, 0.0) == found(output)
    assert len(long.runner.batches) < 30


def test_width_one_is_greedy():
    engine = make_engine()
    output = search(engine, beam_width=1, max_tokens=5)
    tokens = list(PROMPT)
    for _ in range(5):
        likeliest = distribution(tokens)
        tokens.append(max(likeliest, key=likeliest.get))
    assert output.outputs[0].token_ids == tokens[len(PROMPT):]
    assert not any(batch.block_copies for batch in engine.runner.batches)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False])
def test_beside_other_requests_and_under_pressure(preemption, caching):
    """The pool holds the beams alone, or some of them with the others: beams are preempted and come
    back."""
    engine = make_engine(num_blocks=16, block_size=2, max_num_batched_tokens=7,
                         preemption=preemption, enable_prefix_caching=caching)
    engine.add_request([7, 7, 7], SamplingParams(max_tokens=14))
    engine.add_request([9, 8], SamplingParams(max_tokens=12))
    ids = [
        engine.add_request(PROMPT + [i], BeamSearchParams(beam_width=3, max_tokens=5))
        for i in range(3)
    ]
    outputs = run(engine)
    for i, request_id in enumerate(ids):
        assert brute_force(PROMPT + [i], 3, 5, [], distribution) == found(outputs[request_id])
    assert outputs["0"].outputs[0].token_ids == truth([7, 7, 7], 14)
    assert sum(outputs[request_id].metrics.num_preemptions for request_id in ids) > 0


def test_common_prefixes_are_held_once_and_the_saving_is_reported():
    trace = Trace()
    config = EngineConfig(num_blocks=200, block_size=4)
    engine = Engine(config, OracleRunner(200, 4), trace=trace)
    output = search(engine, prompt=list(range(40)), beam_width=4, max_tokens=12)
    assert 0.5 < output.metrics.memory_saved < 0.75  # 10 blocks of the prompt, shared by four
    assert summary(trace)["memory_saved_by_sharing"] == pytest.approx(output.metrics.memory_saved,
                                                                      abs=0.05)
    # The prompt once, then a token a beam and step
    assert engine.runner.num_computed_tokens == 40 + 4 * 11


def test_at_most_one_block_is_copied_for_each_beam_that_forks():
    engine = make_engine(num_blocks=60, block_size=4)
    search(engine, beam_width=3, max_tokens=9)
    for batch in engine.runner.batches:
        assert len(batch.block_copies) <= 2
    assert sum(len(batch.block_copies) for batch in engine.runner.batches) > 0


def test_seats_are_kept_for_beams_to_come():
    """Half of the tokens end a text: two beams follow the prompt, three the token after it, and
    nobody else takes the third seat meanwhile."""
    engine = make_engine(num_blocks=60, max_num_seqs=3)
    params = dict(beam_width=3, max_tokens=7, stop_token_ids=[0, 1])
    request_id = engine.add_request(PROMPT, BeamSearchParams(**params))
    for prompt in ([9], [8], [7]):
        engine.add_request(prompt, SamplingParams(max_tokens=6))
    assert brute_force(PROMPT, 3, 7, [0, 1], distribution) == found(run(engine)[request_id])


def test_abort_at_every_moment():
    for steps in range(8):
        engine = make_engine(num_blocks=20, block_size=2)
        request_id = engine.add_request(PROMPT, BeamSearchParams(beam_width=2, max_tokens=6))
        other = engine.add_request([9], SamplingParams(max_tokens=9))
        for _ in range(steps):
            engine.step()
        if engine.abort(request_id):
            engine.check_integrity()
        assert run(engine)[other].outputs[0].token_ids == truth([9], 9)


@pytest.mark.parametrize("error", [None, "the card is gone"])
def test_an_aborted_or_failed_search_shows_the_beams_it_had(error):
    for steps in range(1, 5):
        engine = Engine(EngineConfig(num_blocks=60, block_size=2), OracleRunner(60, 2), Bytes())
        request_id = engine.add_request(PROMPT, BeamSearchParams(beam_width=3, max_tokens=9))
        for _ in range(steps):
            (output,) = engine.step()
        assert engine.abort(request_id, error)
        assert brute_force(PROMPT, 3, steps, [], distribution) == found(output)
        for index, completion in enumerate(output.outputs):
            assert (completion.index, completion.error) == (index, error)
            assert completion.finish_reason == ("error" if error else "abort")
            assert completion.text == bytes(completion.token_ids).decode("latin-1")


def test_a_failed_step_begins_the_search_again():
    for failing in range(1, 7):
        engine = make_engine(num_blocks=20, block_size=2)
        launch, steps = engine.launch, []

        def fail(batch, launch=launch, steps=steps, failing=failing):
            steps.append(batch)
            if len(steps) == failing:
                raise RuntimeError("device lost")
            return launch(batch)

        engine.launch = fail
        request_id = engine.add_request(PROMPT, BeamSearchParams(beam_width=2, max_tokens=6))
        with pytest.raises(RuntimeError):
            while engine.has_unfinished():
                engine.step()
        output = run(engine)[request_id]
        assert brute_force(PROMPT, 2, 6, [], distribution) == found(output)


@pytest.mark.parametrize("params, word", [(dict(beam_width=0), "beam_width"),
                                          (dict(beam_width=1.5), "beam_width"),
                                          (dict(n=2), "n is 2"),
                                          (dict(temperature=0.7), "temperature"),
                                          (dict(top_k=3), "top_k"), (dict(stop="x"), "stop"),
                                          (dict(length_penalty=float("nan")), "length_penalty"),
                                          (dict(logprobs=3), "logprobs")])
def test_params_that_make_no_sense_are_refused(params, word):
    with pytest.raises(ValueError, match=word):
        BeamSearchParams(**params)


def test_beams_that_can_never_fit_are_refused():
    """They wait for each other, so all must fit at once; without a cache nothing is sure to be
    shared."""
    engine = make_engine(num_blocks=8, block_size=2, max_num_seqs=4)
    with pytest.raises(ValueError, match="in 3 beams need 9 blocks.*8"):
        engine.add_request(PROMPT, BeamSearchParams(beam_width=3, max_tokens=2))
    with pytest.raises(ValueError, match="beam_width=5.*4"):
        engine.add_request([1], BeamSearchParams(beam_width=5, max_tokens=2))
    search(engine, beam_width=2, max_tokens=4)


def test_a_runner_without_logprobs_is_an_error():

    class Runner:

        def execute(self, batch):
            return [0] * len(batch.request_ids)

    engine = Engine(EngineConfig(num_blocks=8), Runner())
    engine.add_request([1], BeamSearchParams(beam_width=2, max_tokens=3))
    with pytest.raises(ValueError, match="log-probabilities"):
        engine.step()
    engine.reset()
    assert engine.block_pool.num_free() == 8


@pytest.mark.parametrize("kv_cache_dtype, close", [("auto", 1e-4), ("fp8", 0.05)])
def test_llm_gives_text_and_scores(kv_cache_dtype, close):

    class Letters:

        def token_bytes(self, token):
            return bytes([97 + token % 26])

    decoder = random_decoder(TINY_LLAMA, seed=2)
    end = set(range(0, TINY_LLAMA.vocab_size, 9))
    llm = LLM(Loaded(decoder, TINY_LLAMA, Letters(), end, 0), device="cpu", block_size=4,
              num_blocks=64, kv_cache_dtype=kv_cache_dtype)
    cache = llm.runner.kv.spec.dtype

    def distribution(tokens):
        logits = logits_of(decoder, tokens, lambda rows: kept(rows, cache))[-1]
        return dict(enumerate(logits.log_softmax(-1).tolist()))

    prompts = [[1, 2, 3, 4, 5, 6], [9, 8, 7]]
    outputs = llm.beam_search(prompts, beam_width=3, max_tokens=5, use_tqdm=False)
    for prompt, output in zip(prompts, outputs):
        best = brute_force(prompt, 3, 5, end, distribution)
        for completion, (tokens, logprob) in zip(output.outputs, best, strict=True):
            assert completion.token_ids == tokens
            assert completion.cumulative_logprob == pytest.approx(logprob, abs=close)
            visible = tokens[:-1] if completion.finish_reason == "stop" else tokens
            assert completion.text == "".join(chr(97 + token % 26) for token in visible)
        assert 0 < output.metrics.memory_saved < 1
    assert any(c.finish_reason == "stop" for output in outputs for c in output.outputs)
