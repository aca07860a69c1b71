"""A step is data: what a batch holds, that it can be run elsewhere, and what a runner may return.

Protects the seam between scheduler and runner: nothing alive crosses it, in either direction.
"""

import dataclasses
import multiprocessing
import pickle

import pytest

from paged import Engine, EngineConfig, SamplingParams
from paged.batch import RowOutput
from paged.lab.oracle import OracleRunner, truth
from paged.models.decoder import random_decoder
from paged.startup import cache_spec, make_runner
from tests.engines import make_engine, run
from tests.small_models import TINY_LLAMA

CONFIG = EngineConfig(num_blocks=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=16,
                      max_model_len=64)
REQUESTS = [([5, 6, 7, 8, 9, 10, 11], SamplingParams(temperature=0, max_tokens=6)),
            ([5, 6, 7, 8, 9], SamplingParams(seed=3, top_p=0.9, n=2, max_tokens=5, logprobs=1)),
            ([1] * 20, SamplingParams(seed=4, repetition_penalty=1.3, max_tokens=9))]


def tiny_runner():
    decoder = random_decoder(TINY_LLAMA, seed=2)
    return make_runner(decoder, cache_spec(decoder, CONFIG.block_size), CONFIG, use_tqdm=False)


def serve(runner) -> list:
    engine = Engine(CONFIG, runner)
    ids = [engine.add_request(*request) for request in REQUESTS]
    outputs = run(engine)
    return [[(c.token_ids, c.logprobs) for c in outputs[i].outputs] for i in ids]


def plain(value) -> bool:
    """Whether this is made of lists, tuples, dicts, numbers and strings, and the two dataclasses of
    a batch."""
    if dataclasses.is_dataclass(value):
        return type(value).__module__ == "paged.batch" and all(map(plain, vars(value).values()))
    if isinstance(value, (list, tuple)):
        return all(map(plain, value))
    if isinstance(value, dict):
        return all(map(plain, [*value, *value.values()]))
    return type(value) in (int, float, bool, str)


def elsewhere(connection) -> None:
    """A process that knows nothing but batches."""
    runner = tiny_runner()
    while True:
        batch = connection.recv()
        if batch is None:
            return
        connection.send(runner.execute(batch))


class Remote:
    """A runner whose steps are run by another process."""

    needs_lists = False

    def __init__(self, connection):
        self.connection = connection

    def execute(self, batch):
        assert plain(batch), batch
        assert not batch.slot_mapping and not batch.block_tables, "lists that nobody reads"
        self.connection.send(batch)
        return self.connection.recv()


def test_a_batch_is_run_in_another_process():
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=elsewhere, args=(there,))
    process.start()
    try:
        for there_, here_ in zip(serve(Remote(here)), serve(tiny_runner())):
            for (tokens, logprobs), (same, close) in zip(there_, here_):
                assert tokens == same and len(logprobs or ()) == len(close or ())
                for one, other in zip(logprobs or (), close or ()):  # another number of threads
                    assert one == pytest.approx(other, abs=1e-4)
        here.send(None)
        process.join(300)
        assert process.exitcode == 0
    finally:
        process.kill()


def test_the_specification_is_data_too_and_stays_as_it_was():
    kept = []

    class Keeps(OracleRunner):

        def execute(self, batch):
            assert plain(batch)
            kept.append((batch, pickle.dumps(batch)))
            return super().execute(batch)

    engine = Engine(CONFIG, Keeps(16, 4))
    for prompt, _ in REQUESTS[:2]:
        engine.add_request([token % 4 for token in prompt], SamplingParams(max_tokens=6))
    run(engine)
    for batch, as_it_was in kept:
        assert pickle.dumps(batch) == as_it_was, "what a runner was given has changed under it"
        assert batch.slot_mapping and batch.positions and batch.block_tables


class Several(OracleRunner):
    """Guesses up to two more tokens of every request, always rightly."""

    def execute(self, batch):
        results = []
        for request, token in zip(list(self.engine.scheduler.scheduled), super().execute(batch)):
            known = [t for t in request.token_ids if t >= 0] + [token]
            results.append([token, *truth(known, 2)])
        return results


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 7])
def test_a_step_may_give_several_tokens(max_tokens):
    engine = Engine(CONFIG, Several(16, 4))
    prompts = [[1, 2, 3, 0, 1], [2], [1, 2, 3, 0, 1, 3, 3]]
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=max_tokens)) for prompt in prompts]
    steps, outputs = 0, {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
        steps += 1
    for request_id, prompt in zip(ids, prompts):
        assert outputs[request_id].outputs[0].token_ids == truth(prompt, max_tokens)
    assert steps == -(-max_tokens // 3) + (max_tokens > 1 and len(prompts[2]) > 16)


def test_several_tokens_from_a_runner_that_is_ahead_are_refused():

    class Ahead(Several):
        runs_ahead = True

        def launch(self, batch):
            return self.execute(batch)

        def collect(self, results):
            return results

    engine = Engine(CONFIG, Ahead(16, 4))
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=9))
    with pytest.raises(ValueError, match="3 tokens for a request whose next step is already"):
        while engine.has_unfinished():
            engine.step()


@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize("n", [1, 3])
def test_a_row_that_fails_ends_its_request_and_no_other(failing, n):

    class OneFails(OracleRunner):
        steps = 0

        def execute(self, batch):
            results = super().execute(batch)
            self.steps += 1
            if self.steps > failing and "bad" in batch.request_ids:
                results[batch.request_ids.index("bad")] = RowOutput(error="no number came out")
            return results

    engine = make_engine(num_blocks=20)
    engine.runner = runner = OneFails(20, 4)
    runner.watch(engine)
    engine.launch = runner.execute
    good = engine.add_request([3, 2, 1], SamplingParams(max_tokens=8))
    engine.add_request([1, 2, 3, 3], SamplingParams(max_tokens=8, n=n), "bad")
    outputs = run(engine)
    assert outputs[good].outputs[0].token_ids == truth([3, 2, 1], 8)
    completion, *others = outputs["bad"].outputs
    assert completion.finish_reason == "error" and completion.error == "no number came out"
    assert completion.token_ids == truth([1, 2, 3, 3], 8)[:failing]
    for other in others:  # those that forked before go on, those that wait for it cannot
        assert other.finish_reason == ("length" if failing else "error")
        if failing:
            assert other.token_ids == truth([1, 2, 3, 3], 8, other.index)
