"""Protects the figures of the memory budget, the batch and the whole run that the book reproduces.

Qwen3-0.6B on an H20, blocks of 256 tokens, a pool of 3,053: two prompts of 430 and 433 tokens that
share more than 256. The scheduler and the trace are the real ones; a runner that checks every row
stands for the model.
"""

import itertools

import pytest

from paged import Engine, EngineConfig, SamplingParams, Trace, slot_mapping_for
from paged.lab.oracle import OracleRunner
from paged.memory import GiB, MiB, kv_bytes_per_token, num_blocks_in_budget

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 28, 8, 128, 256, 3053
BLOCK_BYTES = BLOCK_SIZE * kv_bytes_per_token(LAYERS, KV_HEADS, HEAD_DIM)

COMMON = [i % 251 for i in range(300)]
PROMPTS = [COMMON + [i % 7 for i in range(130)], COMMON + [i % 11 for i in range(133)]]


class Recorder(OracleRunner):
    """Keeps a copy of every batch."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def execute(self, batch):
        self.seen.append({
            name: list(getattr(batch, name))
            for name in ("slot_mapping", "positions", "query_start_loc", "seq_lens")
        } | {"block_tables": [list(table) for table in batch.block_tables]})
        return super().execute(batch)


@pytest.fixture(scope="module")
def run():
    """The whole run: (batches, trace, outputs)."""
    trace, runner = Trace(), Recorder(NUM_BLOCKS, BLOCK_SIZE)
    engine = Engine(
        EngineConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_batched_tokens=16_384),
        runner, trace=trace)
    for prompt in PROMPTS:
        engine.add_request(prompt, SamplingParams(max_tokens=8))
    outputs = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    assert engine.block_pool.num_free() == NUM_BLOCKS
    return runner.seen, trace, [outputs[name] for name in sorted(outputs)]


# ── pool and budget ───────────────────────────────────────────────────────────────────────────────


def test_the_kv_tensor_and_its_blocks():
    torch = pytest.importorskip("torch")
    from paged import PagedKVCache

    kv = PagedKVCache(LAYERS, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16,
                      device="meta")
    assert tuple(kv.data.shape) == (2, 28, 3053, 256, 8, 128)
    assert kv.data.nbytes == 89_636_470_784  # and not 89,640,468,480
    assert kv.block_bytes == BLOCK_BYTES == 29_360_128 == 28 * MiB
    assert kv.data.numel() > 2**31  # offsets need 64 bits


def test_one_allocation_of_which_each_layer_holds_a_view():
    torch = pytest.importorskip("torch")
    from paged import PagedKVCache

    kv = PagedKVCache(3, 5, 4, 2, 6)
    first, end = kv.data.data_ptr(), kv.data.data_ptr() + kv.data.nbytes
    assert all(first <= view.data_ptr() < end for view in kv.k + kv.v)
    kv.k[1][2, 3] = torch.full((2, 6), 7.0)
    assert kv.data[0, 1, 2, 3].eq(7).all()


def budget(total=95.085, used=1.66, peak=1.599, current=1.16) -> int:
    return num_blocks_in_budget(total * GiB, 0.9, used * GiB, peak * GiB, current * GiB,
                                BLOCK_BYTES)


def test_the_budget_gives_3052_blocks_from_the_rounded_inputs_and_3053_within_their_rounding():
    assert budget() == 3052
    half = {"total": 0.0005, "used": 0.005, "peak": 0.0005, "current": 0.005}
    rounded = {"total": 95.085, "used": 1.66, "peak": 1.599, "current": 1.16}
    corners = {
        budget(**{name: rounded[name] + sign * half[name]
                  for name, sign in zip(half, signs)})
        for signs in itertools.product((-1, 1), repeat=4)
    }
    assert min(corners) <= 3052 and max(corners) >= 3053


def test_a_checkpoint_of_qwen3_has_311_keys():
    pytest.importorskip("torch")
    from paged.models.config import ModelConfig
    from paged.models.decoder import Decoder

    config = ModelConfig(architecture="qwen3", vocab_size=151_936, hidden_size=1024,
                         intermediate_size=3072, num_layers=28, num_heads=16, num_kv_heads=8,
                         head_dim=128, qk_norm=True, tie_word_embeddings=True,
                         max_position_embeddings=40_960)
    assert len(Decoder(
        config, device="meta").checkpoint_tensors()) + 1 == 311  # and the tied lm_head.weight


# ── the batch ─────────────────────────────────────────────────────────────────────────────────────


def test_the_prefill_batch(run):
    batch = run[0][0]
    assert batch["block_tables"] == [[0, 1], [0, 2]]
    assert batch["slot_mapping"] == [*range(430), *range(512, 689)]
    assert batch["slot_mapping"][430:] == slot_mapping_for([0, 2], range(256, 433), 256)
    assert batch["query_start_loc"] == [0, 430, 607]
    assert batch["seq_lens"] == [430, 433]
    assert batch["positions"] == [*range(430), *range(256, 433)]
    (event,) = run[1].select("PREPARE_PREFILL")
    assert event["cu_seqlens_q"] == [0, 430, 607] and event["cu_seqlens_k"] == [0, 430, 863]
    assert (event["num_slots"], event["first_slot"], event["last_slot"]) == (607, 0, 688)
    assert [output.num_cached_tokens for output in run[2]] == [0, 256]


def test_the_first_decode_batch(run):
    batch = run[0][1]
    assert batch["seq_lens"] == [431, 434] and sum(batch["seq_lens"]) == 865
    assert batch["slot_mapping"] == [430, 689]
    assert batch["query_start_loc"] == [0, 1, 2]


def test_865_is_both_lengths_after_the_first_sampled_token(run):
    """863 keys of the prefill and one sampled token each; not 607 new tokens and some overhead."""
    decode = run[1].select("PREPARE_DECODE")[0]
    assert decode["cu_seqlens_k"] == [0, 431, 865]
    assert 865 == 863 + 2 == 431 + 434


# ── from end to end ───────────────────────────────────────────────────────────────────────────────


def test_the_blocks_of_the_run_in_order(run):
    events = [(e["step"], e["event"].removeprefix("KV_BLOCK_"), e["block"], e["free"])
              for e in run[1].events if "block" in e]
    assert events == [(1, "ALLOCATE", 0, 3052), (1, "ALLOCATE", 1, 3051), (1, "REUSE", 0, 3051),
                      (1, "ALLOCATE", 2, 3050), (8, "RELEASE", 1, 3051), (8, "RELEASE", 2, 3052),
                      (8, "RELEASE", 0, 3053)]
    assert run[1].select("KV_BLOCK_REUSE")[0]["ref_cnt"] == 2


def test_one_prefill_step_and_seven_decode_steps(run):
    names = [event["event"] for event in run[1].events if event["event"].startswith("SCHEDULE")]
    assert names == ["SCHEDULE_PREFILL"] + 7 * ["SCHEDULE_DECODE"]
    assert all(event["free"] == 3050 for event in run[1].select("SCHEDULE_DECODE"))
    assert all(len(output.outputs[0].token_ids) == 8 for output in run[2])


def test_the_states_of_both_requests(run):
    for request in ("0", "1"):
        states = [
            event["after"] for event in run[1].select("STATE_TRANSITION")
            if event["request"] == request
        ]
        assert states == ["waiting", "running", "finished"]


def test_the_same_run_from_a_prefix_that_is_already_free():
    """One request after the other: the common block is taken back out of the free queue."""
    trace = Trace()
    engine = Engine(EngineConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
                    OracleRunner(NUM_BLOCKS, BLOCK_SIZE), trace=trace)
    for prompt in PROMPTS:
        engine.add_request(prompt, SamplingParams(max_tokens=8))
        while engine.has_unfinished():
            (output,) = engine.step()
    assert output.num_cached_tokens == 256
    assert [(e["block"], e["ref_cnt"]) for e in trace.select("KV_BLOCK_REACTIVATE")] == [(0, 1)]
