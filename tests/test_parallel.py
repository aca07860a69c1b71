"""Two and four ranks say what one says, on small float32 models over gloo: tokens equal, logits to
1e-4.

Protects the cut of a model (uneven vocabularies, replicated KV heads, every bias), the sums that
put it together, and the batches that travel: the whole list of `test_equivalences`, rank by rank.
The ranks of a size are started once, and run one runner after the other.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from paged import EngineConfig, SamplingParams
from paged.config import Speedups
from paged.engine import Engine
from paged.models.config import ModelConfig
from paged.models.decoder import Decoder, random_decoder
from paged.parallel.ranks import RankLost, join
from paged.parallel.runner import RankedRunner
from paged.parallel.runner import serve as serve_rank
from paged.parallel.shard import Part, heads_of_rank
from paged.parallel.sums import way_of_sum
from paged.sampling import BeamSearchParams
from paged.startup import cache_spec, make_runner
from tests.engines import run
from tests.small_models import TINY_MODELS, TINY_QWEN3
from tests.test_equivalences import DRAWN, GREEDY, PROMPTS, LogitsRunner, assert_same, serve

BIASED = ModelConfig(architecture="llama", vocab_size=211, hidden_size=72, intermediate_size=100,
                     num_layers=2, num_heads=8, num_kv_heads=4, head_dim=10, attention_bias=True,
                     output_bias=True, mlp_bias=True, max_position_embeddings=256)
MODELS = {"qwen3": TINY_QWEN3, "biased": BIASED}
ROOT = Path(__file__).resolve().parents[1]


def part_of_runner(model, config, speedups, ranks):
    """The runner of a rank, which keeps its logits unless it has speedups."""
    part = Part(MODELS[model], ranks.rank, ranks.size)
    decoder = random_decoder(MODELS[model], seed=1, device=ranks.device, part=part)
    if speedups is None:
        return LogitsRunner(decoder, config)
    spec = cache_spec(decoder, config.block_size)
    return make_runner(decoder, spec, config, speedups=speedups, use_tqdm=False)


def start(size, device="cpu"):
    return join(size, torch.device(device), other_rank, {"size": size, "device": device})


def other_rank(size, device):
    """What the other ranks run: a runner for every order."""
    ranks = start(size, device)
    with ranks.together():
        while (order := ranks.receive()) is not None:
            serve_rank(part_of_runner(*order, ranks), ranks)
    ranks.close()


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request):
    ranks = start(request.param)
    yield ranks
    ranks.close()


class KeepsLogits(RankedRunner):

    def execute(self, batch):
        results = super().execute(batch)
        self.runner.keep(batch)
        return results


def ranked(ranks, model="qwen3", speedups=None):
    """Makes a runner over the ranks, for `serve`."""

    def make(config):
        ranks.send((model, config, speedups))
        mine = part_of_runner(model, config, speedups, ranks)
        return (KeepsLogits if speedups is None else RankedRunner)(mine, ranks)

    return make


def serve_on(ranks, requests, model="qwen3", **options):
    served = serve(requests, make=ranked(ranks, model), **options)
    ranks.send(None)
    return served


def serve_whole(requests, model="qwen3", **options):
    decoder = random_decoder(MODELS[model], seed=1)
    return serve(requests, make=lambda config: LogitsRunner(decoder, config), **options)


REQUESTS = list(zip(PROMPTS, (GREEDY, DRAWN, DRAWN, GREEDY)))


@pytest.fixture(scope="module")
def alone():
    """On one card, every request by itself, nothing cached."""
    return serve_whole(REQUESTS, one_by_one=True, enable_prefix_caching=False)


# ── as one ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "options",
    [{"block_size": 1, "num_blocks": 200}, {"max_num_batched_tokens": 7, "max_num_seqs": 2}],
    ids=str)
def test_batched_in_chunks_and_in_blocks_of_any_size(ranks, alone, options):
    assert_same(serve_on(ranks, REQUESTS, **options), alone)


def test_every_bias_is_added_once(ranks):
    assert_same(serve_on(ranks, REQUESTS, "biased"), serve_whole(REQUESTS, "biased"))


def test_penalties_and_rules(ranks):
    asked = SamplingParams(temperature=0.9, seed=3, max_tokens=8, presence_penalty=0.7,
                           frequency_penalty=0.4, repetition_penalty=1.2, logit_bias={5: 3.0},
                           min_tokens=4, stop_token_ids=[5, 9])
    requests = [(prompt, asked) for prompt in PROMPTS]
    assert_same(serve_on(ranks, requests), serve_whole(requests))


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_cold_and_warm(ranks, alone, prefix_cache):
    """Two requests whose prompts begin alike, and the first one again."""
    several = [REQUESTS[number] for number in (0, 3, 0)]
    served = serve_on(ranks, several, one_by_one=True, prefix_cache=prefix_cache)
    for name, like in (("0", "0"), ("1", "3"), ("2", "0")):
        assert_same({(like, 0): served[name, 0]}, {(like, 0): alone[like, 0]})
    assert len(served["engine"].prefix_cache) > 5


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_by_either_policy(ranks, alone, preemption):
    served = serve_on(ranks, REQUESTS, num_blocks=12, preemption=preemption,
                      max_num_batched_tokens=16)
    assert_same(served, alone)
    assert served["engine"].scheduler.num_preemptions > 0


def test_samples_that_share_their_prompt(ranks):
    params = dict(temperature=1.0, max_tokens=8, logprobs=0)
    requests = [(PROMPTS[2][:11], SamplingParams(n=4, seed=20, **params))]
    want = serve_whole(requests)
    tight = serve_on(ranks, requests, num_blocks=10)
    assert_same(tight, want)
    assert tight["engine"].scheduler.num_preemptions > 0


def outputs_of(make, config, *requests):
    engine = Engine(config, make(config))
    for prompt, params in requests:
        engine.add_request(prompt, params)
    return [[(c.token_ids, c.cumulative_logprob, c.logprobs) for c in output.outputs]
            for output in run(engine).values()]


def test_beams_and_logprobs(ranks):
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=100)
    requests = [(PROMPTS[0], BeamSearchParams(beam_width=3, max_tokens=6)),
                (PROMPTS[1], SamplingParams(temperature=0.8, seed=1, max_tokens=5, logprobs=3))]
    decoder = random_decoder(TINY_QWEN3, seed=1)
    want = outputs_of(lambda config: LogitsRunner(decoder, config), config, *requests)
    got = outputs_of(ranked(ranks), config, *requests)
    ranks.send(None)
    assert len(want[0]) == 3
    for mine, whole in zip(got, want, strict=True):
        for (tokens, total, logprobs), (same, close, likely) in zip(mine, whole, strict=True):
            assert tokens == same and total == pytest.approx(close, abs=1e-4)
            for one, other in zip(logprobs or (), likely or (), strict=True):
                assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("model, speedups, prompts, max_tokens",
                         [("qwen3", Speedups(run_ahead=True), PROMPTS, 9),
                          ("biased", Speedups(fused=True, run_ahead=True), [[5, 3], [8]], 4)],
                         ids=["ahead", "fused"])
def test_ahead_and_with_fused_operations(ranks, model, speedups, prompts, max_tokens):
    """Tokens that no rank has read yet; and the fused operations, in the interpreter, as graphs
    would run them."""
    if speedups.fused:
        pytest.importorskip("triton", reason="the package triton is not installed")
    config = EngineConfig(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=16,
                          max_model_len=64)
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=max_tokens)
    decoder = random_decoder(MODELS[model], seed=1)
    want = outputs_of(
        lambda config: make_runner(decoder, cache_spec(decoder, 4), config, speedups=Speedups()),
        config, *[(prompt, params) for prompt in prompts])
    got = outputs_of(ranked(ranks, model, speedups), config,
                     *[(prompt, params) for prompt in prompts])
    ranks.send(None)
    assert got == want


def test_one_that_dies_takes_all_with_it(ranks):
    """In the middle of a run, the last one; no rank is left, whatever it waits for. The last test
    of these ranks."""
    processes = list(ranks._processes.values())
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=100)
    engine = Engine(config, ranked(ranks)(config))
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=50))
    engine.step()
    processes[-1].kill()
    with pytest.raises(RankLost, match=f"rank {ranks.size - 1} of {ranks.size} was ended by "
                       f"SIGKILL"):
        while True:
            engine.step()
    for process in processes:
        assert process.wait(10) in (1, -9)


# ── the cut ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("model", [*TINY_MODELS, "biased"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_the_parts_put_together_are_the_whole(model, size):
    """Every row and column is on one rank, K and V on those whose queries use them."""
    config = (TINY_MODELS | MODELS)[model]
    try:
        parts = [Part(config, rank, size) for rank in range(size)]
    except ValueError as error:
        assert "choose a tensor_parallel_size" in str(error) and str(size) in str(error)
        assert (config.num_heads % size or config.intermediate_size % size
                or config.num_kv_heads % size and size % config.num_kv_heads)
        return
    whole = {
        name: torch.arange(place.numel()).view(place.shape)
        for name, place in Decoder(config, "meta").checkpoint_tensors().items()
    }
    for name, values in whole.items():
        cuts = [values[part.cut(name)] for part in parts]
        if "k_proj" in name or "v_proj" in name:
            copies = max(1, size // config.num_kv_heads)
            for first in range(0, size, copies):
                assert all(torch.equal(cuts[first], cut) for cut in cuts[first:first + copies])
            cuts = cuts[::copies]
        columns = values.dim() == 2 and ("o_proj" in name or "down_proj" in name)
        together = cuts[0] if "norm" in name else torch.cat(cuts, int(columns))
        assert torch.equal(together, values), name
    for part in parts:
        for name, place in Decoder(part.config, "meta").checkpoint_tensors().items():
            cut = whole[name][part.cut(name)]
            assert cut.shape[1:] == place.shape[1:] and len(cut) <= len(place), name


def test_heads_are_dealt_out_as_in_the_exercise():
    (path,) = (ROOT / "practice" / "exercises").glob("*_shard_heads/solution.py")
    spec = importlib.util.spec_from_file_location("shard_heads", path)
    exercise = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exercise)
    for heads, kv_heads, size in [(8, 2, 1), (8, 2, 2), (8, 2, 4), (8, 2, 8), (32, 8, 4), (9, 3, 3),
                                  (8, 2, 3), (6, 2, 3), (12, 6, 4)]:
        for rank in range(-1, size + 1):
            try:
                want = exercise.heads_of_rank(heads, kv_heads, size, rank)
            except ValueError:
                with pytest.raises(ValueError):
                    heads_of_rank(heads, kv_heads, size, rank)
            else:
                assert heads_of_rank(heads, kv_heads, size, rank) == want


def test_the_way_of_a_sum_is_the_fastest_that_was_measured():
    """Within a tenth of the fastest, for every size in the table of `sums`."""
    table = {
        1: (11.0, 7.0, 7.1), 8: (11.5, 7.3, 8.1), 32: (13.0, 9.1, 8.5), 128: (18.8, 14.3, 11.1),
        256: (31.8, 19.9, 14.1), 2048: (78, 98, 60)
    }
    for tokens, times in table.items():
        way = way_of_sum(tokens * 4096 * 2, 2)
        assert times[("nccl", "one-shot", "two-shot").index(way)] < 1.1 * min(times), tokens
    assert way_of_sum(1 << 30, 2) == "nccl"
