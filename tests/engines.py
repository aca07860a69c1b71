"""Small engines on the oracle, and what the tests of scheduler and engine ask of them."""

from __future__ import annotations

from types import SimpleNamespace

from paged import Engine, EngineConfig, SamplingParams
from paged.lab.oracle import OracleRunner, truth


class RecordingOracle(OracleRunner):
    """The oracle, with a copy of every batch it was given."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.batches: list[SimpleNamespace] = []

    def execute(self, batch):
        starts = batch.query_start_loc
        self.batches.append(
            SimpleNamespace(
                request_ids=list(batch.request_ids), seq_lens=list(batch.seq_lens),
                positions=list(batch.positions), slot_mapping=list(batch.slot_mapping), num_tokens=[
                    starts[i + 1] - starts[i] for i in range(len(batch.request_ids))
                ], block_tables=[list(table) for table in batch.block_tables], block_copies=list(
                    batch.block_copies), swap_out=list(batch.swap_out), swap_in=list(
                        batch.swap_in)))
        return super().execute(batch)


def make_engine(num_blocks=8, block_size=4, max_num_seqs=8, max_num_batched_tokens=64,
                max_model_len=200, **config) -> Engine:
    """An engine on a RecordingOracle; its integrity is the caller's to check."""
    host_blocks = config.get("num_host_blocks") or num_blocks
    runner = RecordingOracle(num_blocks, block_size, host_blocks)
    return Engine(
        EngineConfig(num_blocks, block_size, max_num_seqs, max_num_batched_tokens, max_model_len,
                     **config), runner)


def run(engine: Engine, max_steps: int = 200) -> dict:
    """Step until nothing is left, checking the engine at every step; returns the outputs by request
    id."""
    outputs = {}
    for _ in range(max_steps):
        engine.check_integrity()
        if not engine.has_unfinished():
            assert engine.block_pool.num_free() == engine.config.num_blocks
            return outputs
        for output in engine.step():
            outputs[output.request_id] = output
    raise AssertionError(f"not done after {max_steps} steps: {engine.scheduler.running} run, "
                         f"{engine.scheduler.waiting} wait")


def generate(engine: Engine, *requests: tuple) -> list[list[int]]:
    """Run (prompt, max_tokens) requests that arrive together; returns their tokens, held to the
    truth."""
    ids = [
        engine.add_request(prompt, SamplingParams(max_tokens=max_tokens))
        for prompt, max_tokens in requests
    ]
    outputs = run(engine)
    tokens = [outputs[request_id].outputs[0].token_ids for request_id in ids]
    assert tokens == [truth(prompt, max_tokens) for prompt, max_tokens in requests]
    return tokens
