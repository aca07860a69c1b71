"""The engine on a real card: graphs at the edges of their sizes, long contexts, dtypes, and memory
that runs out.

Protects what only a GPU can show. The judge is the engine on the CPU, with the same small random
model in float32: greedy tokens are its tokens, unless its own logits of the two are closer than
    rounding.
"""

import gc
import importlib.util
import json
import re
from contextlib import suppress
from functools import cache

import pytest
import torch

from paged import LLM, Engine, EngineConfig, PagedKVCache, SamplingParams
from paged.__main__ import main
from paged.attention import triton_backend
from paged.config import Speedups
from paged.kernels.products import product, qkv_product
from paged.memory import GiB, MiB
from paged.models.decoder import Decoder, random_decoder
from paged.models.fused import NARROW, FusedModel
from paged.models.loader import Loaded
from paged.models.loader.default_model import FILE, cache_directory
from paged.seats import Prepared
from paged.startup import cache_spec, make_runner
from tests.caches import fill_with_nan
from tests.engines import run
from tests.small_models import TINY_MODELS, huggingface_model, logits_of
from tests.test_llm import Letters

pytestmark = pytest.mark.gpu
GPU = "cuda"
PROMPTS = [[(7 * i * i + 13 * j + 5) % 150 for j in range(length)]
           for i, length in enumerate((19, 5, 33, 12))]
PROMPTS[3][:9] = PROMPTS[0][:9]  # two of them begin alike
DRAWN = SamplingParams(temperature=1.1, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2,
                       seed=5, max_tokens=9)


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens)


@cache
def decoder_on(device, model="qwen3"):
    return random_decoder(TINY_MODELS[model], seed=1, device=device)


def engine_on(device, model="qwen3", speedups=Speedups(), backend="auto", kv_cache_dtype="auto",
              **config):
    """The engine that `LLM` would build there, over a cache full of NaN; `engine.sizes` notes its
    steps."""
    config = EngineConfig(**(dict(num_blocks=64, block_size=4, max_num_seqs=4,
                                  max_num_batched_tokens=64, max_model_len=200) | config))
    decoder = decoder_on(device, model)
    spec = cache_spec(decoder, config.block_size, kv_cache_dtype)
    runner = make_runner(decoder, spec, config, backend, speedups, use_tqdm=False)
    fill_with_nan(runner.kv)
    engine = Engine(config, runner)
    engine.sizes, launch = [], engine.launch

    def noting(batch):
        engine.sizes.append((len(batch.input_ids), len(batch.request_ids)))
        return launch(batch)

    engine.launch = noting
    return engine


def answers(engine, requests, later=(), one_by_one=False):
    """The tokens of every completion of (prompt, params) requests, those of `later` arriving after
    three steps."""
    outputs, ids = {}, []
    for request in requests:
        ids.append(engine.add_request(*request))
        if one_by_one:
            outputs |= run(engine, 3000)
    for _ in range(3 if later else 0):
        outputs |= {output.request_id: output for output in engine.step()}
    ids += [engine.add_request(*request) for request in later]
    outputs |= run(engine, 3000)
    return [[completion.token_ids for completion in outputs[i].outputs] for i in ids]


def assert_same(requests, got, want, model="qwen3", rounding=1e-4):
    """Token for token; at temperature 0 a step where the CPU's logits of both tokens are equal but
    for rounding may go either way, and ends the comparison of its request."""
    assert len(got) == len(want) == len(requests)
    for (prompt, params), (mine, *_), (theirs, *_) in zip(requests, got, want):
        assert len(mine) == len(theirs)
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), None)
        if at is not None:
            logits = logits_of(decoder_on("cpu", model), prompt + theirs[:at])[-1]
            gap = (logits[mine[at]] - logits[theirs[at]]).abs().item()
            assert params.temperature == 0 and gap < rounding, (
                f"{mine} and {theirs} part at {at}, by {gap}")


# ── captured sizes ────────────────────────────────────────────────────────────────────────────────

SHAPE = dict(max_num_seqs=64, num_blocks=800, max_num_batched_tokens=300, max_model_len=320,
             enable_prefix_caching=False)


@pytest.fixture(scope="module")
def large():
    return engine_on(GPU, **SHAPE)


def test_decode_batches_around_every_captured_size(large):
    requests = [([i, 2 * i + 1, 7], greedy(3 + i % 4)) for i in range(64)]
    want = answers(engine_on("cpu", **SHAPE), requests)
    captured = large.runner.decode_sizes
    assert captured[-1] == 64 and len(large.runner._steps) > len(captured)
    for size in sorted({size + more
                        for size in captured
                        for more in (-1, 0, 1)} & set(range(1, 65))):
        large.sizes.clear()
        assert_same(requests[:size], answers(large, requests[:size]), want[:size])
        assert (size, size) in large.sizes


@pytest.mark.parametrize("decoding, prompt", [
    *[(3, size + more - 3) for size in (16, 64, 128, 256)
      for more in (-1, 0, 1)], *[(size + more - 2, 2) for size in (16, 64)
                                 for more in (-1, 0, 1) if size + more - 2 < 64]
])
def test_mixed_steps_around_the_captured_sizes(large, decoding, prompt):
    """Few decodes beside a chunk, and as many rows as a step of this size can have."""
    requests = [([i, prompt % 150], greedy(8)) for i in range(decoding)]
    later = [([(3 * j + decoding) % 170 for j in range(prompt)], greedy(4))]
    large.sizes.clear()
    got = answers(large, requests, later)
    assert (decoding + prompt, decoding + 1) in large.sizes
    assert_same(requests + later, got, answers(engine_on("cpu", **SHAPE), requests, later))


@pytest.mark.parametrize("name", ["graphs", "narrow_products", "run_ahead", "fused"])
def test_each_speedup_switched_off(name):
    requests = [(prompt, params) for prompt in PROMPTS for params in (greedy(9), DRAWN)]
    engine = engine_on(GPU, speedups=Speedups(**{name: False}))
    assert_same(requests, answers(engine, requests), answers(engine_on("cpu"), requests))


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_all_layers_in_one_kernel(cache):
    """Programs that wait for each other, in graphs of every size that one kernel serves."""
    requests = [([3 * i + 1, i, 7], greedy(5 + i)) for i in range(33)]
    engine = engine_on(GPU, speedups=Speedups(persistent=True), kv_cache_dtype=cache, **SHAPE)
    cpu = engine_on("cpu", kv_cache_dtype=cache, **SHAPE)
    assert_same(requests, answers(engine, requests), answers(cpu, requests),
                rounding=0.1 if cache == "fp8" else 1e-4)


@pytest.mark.parametrize("settings", [
    dict(kv_cache_dtype="bfloat16"),
    dict(kv_cache_dtype="fp8"),
    dict(backend="torch"),
    dict(backend="reference")
])
def test_other_caches_and_backends_run_fused(settings):
    """Whoever cannot run in graphs runs without, fused and ahead; bf16 keys flip near ties, FP8
    keys sooner."""
    requests = [(prompt, greedy(9)) for prompt in PROMPTS]
    engine = engine_on(GPU, **settings)
    assert engine.runs_ahead and engine.runner.fused
    assert engine.runner.use_graphs == ("backend" not in settings)
    cpu = {"kv_cache_dtype": settings["kv_cache_dtype"]} if "kv_cache_dtype" in settings else {}
    assert_same(requests, answers(engine, requests), answers(engine_on("cpu", **cpu), requests),
                rounding=0.1 if cpu.get("kv_cache_dtype") == "fp8" else 1e-4)


@pytest.mark.parametrize("model", TINY_MODELS)
def test_every_architecture(model):
    requests = [(prompt, greedy(9)) for prompt in PROMPTS]
    assert_same(requests, answers(engine_on(GPU, model), requests),
                answers(engine_on("cpu", model), requests), model)


@pytest.mark.parametrize("longest, lengths", [(61, (1, 30, 60, 61)), (64, (1, 63, 64)),
                                              (2048, (2039, 2048))])
def test_requests_that_run_to_the_longest_context(longest, lengths):
    shape = dict(max_model_len=longest, num_blocks=-(-longest // 16) * len(lengths), block_size=16)
    requests = [([(5 * j + length) % 170 for j in range(length)], greedy(longest + 1 - length))
                for length in lengths]
    gpu = engine_on(GPU, **shape)
    got = answers(gpu, requests)
    assert [len(tokens) for (tokens,) in got] == [longest + 1 - length for length in lengths]
    assert_same(requests, got, answers(engine_on("cpu", **shape), requests))
    with pytest.raises(ValueError, match=f"max_model_len is {longest}"):
        gpu.add_request([1, 2], greedy(longest))


# ── how a request is served never shows in what it gets ───────────────────────────────────────────


@pytest.fixture(scope="module", params=[greedy(9), DRAWN], ids=["greedy", "drawn"])
def requests(request):
    return [(prompt, request.param) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def alone(requests):
    """Every request by itself on the CPU, its prompt in one piece, nothing cached."""
    return answers(engine_on("cpu", enable_prefix_caching=False), requests, one_by_one=True)


@pytest.mark.parametrize("one_by_one", [True, False], ids=["alone", "batched"])
def test_alone_and_batched(requests, alone, one_by_one):
    assert_same(requests, answers(engine_on(GPU), requests, one_by_one=one_by_one), alone)


@pytest.mark.parametrize("budget", [1, 2, 7, 16, 33])
def test_whole_and_in_chunks(requests, alone, budget):
    assert_same(requests,
                answers(engine_on(GPU, max_num_batched_tokens=budget, max_num_seqs=2), requests),
                alone)


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_cold_and_warm(requests, alone, prefix_cache):
    engine = engine_on(GPU, prefix_cache=prefix_cache)
    both = answers(engine, requests + requests, one_by_one=True)
    assert_same(requests + requests, both, alone + alone)
    assert len(engine.prefix_cache) > 10


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_by_either_policy(requests, alone, preemption, caching):
    engine = engine_on(GPU, num_blocks=12, preemption=preemption, max_num_batched_tokens=16,
                       enable_prefix_caching=caching)
    assert_same(requests, answers(engine, requests), alone)
    assert engine.scheduler.num_preemptions > 0


def test_an_abort_in_the_middle_leaves_the_others_alone(requests, alone):
    engine = engine_on(GPU)
    ids = [engine.add_request(*request) for request in requests]
    outputs = {}
    for _ in range(4):
        outputs |= {output.request_id: output for output in engine.step()}
    assert engine.abort(ids[1])
    outputs |= run(engine)
    got = [[outputs[i].outputs[0].token_ids] for i in ids]
    for kept in (0, 2, 3):
        assert_same([requests[kept]], [got[kept]], [alone[kept]])


@pytest.mark.parametrize("num_blocks", [64, 10])
def test_samples_of_one_request_and_of_several_with_their_seeds(num_blocks):
    params = dict(temperature=1.0, max_tokens=8)
    engine = engine_on(GPU, num_blocks=num_blocks)
    for length in (11, 12, 13):
        prompt = PROMPTS[2][:length]
        (together,) = answers(engine, [(prompt, SamplingParams(n=4, seed=20, **params))])
        apart = answers(engine, [(prompt, SamplingParams(seed=20 + i, **params)) for i in range(4)])
        assert [[tokens] for tokens in together] == apart and len(set(map(tuple, together))) == 4


def test_a_seed_draws_the_same_whatever_shares_the_batch():
    seeded = PROMPTS[1], SamplingParams(temperature=1.0, seed=3, max_tokens=12)
    engine = engine_on(GPU)
    (want,) = answers(engine, [seeded])
    for others in range(1, 4):
        crowd = [(prompt, SamplingParams(max_tokens=3 + i))
                 for i, prompt in enumerate(PROMPTS[:others])]
        assert answers(engine, crowd + [seeded])[-1] == want


# ── logits ────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def fused_logits(decoder, token_ids, narrow, first):
    """Logits [N, vocab] of a sequence through fused kernels and a paged cache: `first` tokens, then
    one at a time."""
    c = decoder.config
    kv = PagedKVCache(c.num_layers, 8, 4, c.num_kv_heads, c.head_dim, decoder.embedding.dtype, GPU)
    kv.data.fill_(float("nan"))
    fused, rows = FusedModel(decoder, kv, 32, narrow), []
    for start, end in zip([0, *range(first, len(token_ids))], range(first, len(token_ids) + 1)):
        positions = torch.arange(start, end, dtype=torch.int32, device=GPU)
        slots = (7 - positions.long() // 4) * 4 + positions % 4  # the table is 7, 6, 5, …

        def attend(layer, q):
            return triton_backend.run(q, kv.k[layer], kv.v[layer], [[7, 6, 5, 4, 3, 2, 1, 0]],
                                      [end], [0, end - start], c.head_dim**-0.5)

        ids = torch.tensor(token_ids[start:end], dtype=torch.int32, device=GPU)
        x = torch.nn.functional.embedding(ids, decoder.embedding)
        step = Prepared(x, x.float().square().sum(1, keepdim=True), positions, slots, None)
        x = decoder.run(x, fused.operations(step, attend))
        rows.append(fused.logits(x).float().cpu())
    return torch.cat(rows)


@pytest.mark.parametrize("tokens", [1, 17, 64, 128])
def test_products_at_the_shapes_of_a_real_model(tokens):
    """bfloat16 and full tiles, as no small model has them; the same bits in every replay of a
    graph."""

    def random(*shape):
        return torch.randn(*shape, device=GPU).bfloat16()

    x, mixed, weight = random(tokens, 1024), random(tokens, 2048), random(1024, 2048) / 45
    gate_up, qkv, ones = random(6144, 1024) / 32, random(4096, 1024) / 32, torch.ones(
        128, device=GPU).bfloat16()
    caches, slots = torch.zeros(2, 9, 16, 8, 128, device=GPU).bfloat16(), torch.arange(
        tokens, device=GPU)
    positions = torch.arange(tokens, device=GPU, dtype=torch.int32)
    still = torch.cat((torch.ones(1, 64), torch.zeros(1, 64)), 1).repeat(tokens,
                                                                         1).to(GPU)  # turns nothing

    def layer():
        total, squares = product(mixed, weight, residual=x)
        q = qkv_product(total, squares, qkv, None, positions, slots, still, ones, ones, 1e-6,
                        *caches, 16)
        return total, product(total, gate_up, 1e-6, squares, silu=True), q, caches.clone()

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layer()
    graph.replay()
    first = [part.clone() for part in got]
    total = (mixed.float() @ weight.float().T + x.float()).bfloat16().float()
    normed = torch.nn.functional.rms_norm(total, (1024,), eps=1e-6)
    gate, up = (normed @ gate_up.float().T).split(3072, 1)
    heads = (normed @ qkv.float().T).view(tokens, 32, 128)
    turned = torch.nn.functional.rms_norm(heads[:, :24], (128,), eps=1e-6)
    for part, want in zip(
        (*got[:3], *got[3].flatten(1, 2)[:, :tokens]),
        (total, torch.nn.functional.silu(gate) * up, turned[:, :16], turned[:, 16:], heads[:,
                                                                                           24:])):
        assert (part.float() - want).norm() < 1e-2 * want.norm()
    for _ in range(20):
        graph.replay()
        assert all(map(torch.equal, got, first))


@pytest.mark.parametrize("narrow", [0, NARROW])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2),
                                              (torch.float16, 4e-3)])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_logits_are_those_of_transformers(model, dtype, tolerance, narrow):
    prompt = [3, 17, 92, 5, 41, 88, 120, 7, 7, 150, 2, 31, 64]
    theirs = huggingface_model(TINY_MODELS[model])
    ours = Decoder(TINY_MODELS[model], GPU, dtype)
    for name, place in ours.checkpoint_tensors().items():
        place.copy_(theirs.state_dict()[name])
    with torch.no_grad():
        want = theirs(torch.tensor([prompt])).logits[0]
    for first in (13, 6):
        got = fused_logits(ours, prompt, narrow, first)
        assert (got - want).norm() / want.norm() < tolerance
        if dtype == torch.float32:
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


# ── start-up and memory ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def loaded():
    """The small model on the card, and a card that is empty again afterwards."""
    clean()
    yield Loaded(decoder_on(GPU), TINY_MODELS["qwen3"], Letters(), {3}, 0)
    clean()


def clean():
    gc.collect()
    torch.cuda.empty_cache()


def fill_card():
    """Tensors that leave less than 16 MiB of the card free."""
    clean()
    tensors = []
    for size in (GiB, 16 * MiB):
        with suppress(torch.OutOfMemoryError):
            while True:
                tensors.append(torch.empty(size, dtype=torch.uint8, device=GPU))
    return tensors


def test_start_up_says_what_it_does_and_how_long_it_took(loaded, capsys):
    free, total = torch.cuda.mem_get_info()
    small = dict(gpu_memory_utilization=(total - free + GiB) / total, max_num_seqs=8,
                 max_num_batched_tokens=256)
    llm = LLM(loaded, **small)
    assert list(llm.start_up) == ["weights", "warm-up", "pool and graphs"]
    assert llm.budget.num_blocks == llm.engine.config.num_blocks == llm.runner.kv.num_blocks
    assert llm.budget.num_blocks * llm.budget.block_bytes < GiB
    err = capsys.readouterr().err
    assert "Warming up, compiling kernels: 100%" in err and "Capturing graphs: 100%" in err
    del llm
    clean()
    llm = LLM(loaded, use_tqdm=False, **small)
    assert llm.generate("hello", greedy(4),
                        use_tqdm=False)[0].finished and capsys.readouterr().err == ""


def test_the_command_line_traces_a_gpu(loaded, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("paged.llm.load", lambda *args, **named: loaded)
    path = tmp_path / "events.jsonl"
    argv = [
        "trace", "hello", "help", "--device", GPU, "--num-blocks", "64", "--max-tokens", "5",
        "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--save",
        str(path), "--metrics",
        str(tmp_path / "metrics.json")
    ]
    assert main(argv) == 0
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert events[0]["device"].startswith(GPU) and events[0]["card"] == torch.cuda.get_device_name()
    assert {"SCHEDULE_PREFILL", "SCHEDULE_DECODE", "STEP",
            "STATE_TRANSITION"} <= {event["event"]
                                    for event in events}
    out, err = capsys.readouterr()
    assert "SCHEDULE_DECODE" in out and "ready after" in err


def test_a_pool_that_does_not_fit_is_a_sentence(loaded):
    with pytest.raises(
            MemoryError,
            match=r"a pool of 1000000000 blocks .* GiB are free on cuda.*: lower num_blocks"):
        LLM(loaded, num_blocks=10**9, use_tqdm=False)


def test_a_pool_that_leaves_no_room_for_graphs_is_a_sentence(loaded):
    num_blocks = (torch.cuda.mem_get_info()[0] - 6 * MiB) // cache_spec(loaded.decoder,
                                                                        16).block_bytes
    with pytest.raises(MemoryError, match="(?i)a pool of .* GiB.*lower num_blocks"):
        LLM(loaded, num_blocks=num_blocks, max_num_batched_tokens=8192, use_tqdm=False)


def test_a_second_engine_on_a_full_card_is_a_sentence(loaded):
    rest = fill_card()
    with pytest.raises((MemoryError, ValueError), match="no room for .*free the card"):
        LLM(loaded, use_tqdm=False)
    del rest
    clean()
    assert LLM(loaded, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=64,
               use_tqdm=False).generate("hello", greedy(4), use_tqdm=False)[0].finished


def test_weights_that_do_not_fit_are_a_sentence(loaded, tmp_path):
    huggingface_model(TINY_MODELS["llama"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 2**30}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
            MemoryError,
            match=r"no room for \d+\.\d\d GiB of weights in float32: .* GiB are free on cuda"):
        LLM(str(tmp_path), device=GPU, use_tqdm=False)


def test_a_step_that_runs_out_of_memory_is_a_sentence_and_the_engine_goes_on(loaded):
    llm = LLM(loaded, num_blocks=600, max_num_seqs=32, max_num_batched_tokens=8192,
              enforce_eager=True, use_tqdm=False)
    prompts = [[i, *range(100), *range(149)] for i in range(32)]
    llm.generate([prompts[0]], greedy(3), use_tqdm=False)  # its kernels are compiled
    rest, launch, failures = fill_card(), llm.engine.launch, []

    def noting(batch):
        try:
            return launch(batch)
        except Exception as error:
            failures.append(error)
            raise

    llm.engine.launch = noting
    try:  # those that fit alone come to their end
        outputs = llm.generate(prompts, greedy(3), use_tqdm=False)
        errors = [output.outputs[0].error for output in outputs]
    except MemoryError as error:
        errors = [str(error)]
    sentence = "a step of up to 8192 tokens beside a pool of 600 blocks .* GiB .* Lower"
    assert failures and all(error is None or re.search(sentence, error) for error in errors)
    del rest, failures[:]
    clean()
    assert len(llm.generate(prompts, greedy(3), use_tqdm=False)) == 32
    assert llm.engine.block_pool.num_free() == 600


def test_the_default_model_answers_as_on_the_cpu():
    if not (cache_directory() / FILE).exists() or importlib.util.find_spec("gguf") is None:
        pytest.skip(f"needs {FILE} in {cache_directory()}, and the gguf package to read it")
    questions = [[{"role": "user", "content": text}]
                 for text in ("What is the capital of France?", "Count to five.",
                              "Why is the sky blue?")]
    texts = []
    for device in ("cpu", GPU):
        llm = LLM("default", device=device, dtype="float32", num_blocks=64, max_num_seqs=4,
                  max_num_batched_tokens=256, use_tqdm=False)
        texts.append([
            output.outputs[0].text for output in llm.generate(questions, greedy(20), use_tqdm=False)
        ])
    assert texts[0] == texts[1] and texts[0][0] == "The capital of France is Paris."
