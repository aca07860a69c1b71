"""The end-to-end benchmarks: the workload is the published one, and both run and record what they
say."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import paged.bench.peer as peer
import paged.bench.steps as steps
import paged.bench.workload as workload
from paged.__main__ import main
from paged.models.config import ModelConfig

TINY = ModelConfig("qwen3", vocab_size=10_001, hidden_size=16, intermediate_size=24, num_layers=1,
                   num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True, tie_word_embeddings=True,
                   max_position_embeddings=4096)


def test_the_workload_has_the_published_size():
    prompts, params = workload.workload()
    assert len(prompts) == 256
    assert sum(map(len, prompts)) == 142_827
    assert sum(p.max_tokens for p in params) == 133_966
    assert all(p.temperature == 0.6 and p.ignore_eos for p in params)


def test_other_first_tokens_leave_nothing_to_the_prefix_cache():
    prompts, _ = workload.workload(4)
    other = workload.with_other_first_tokens(prompts, 1)
    assert all(a[0] != b[0] and a[1:] == b[1:] for a, b in zip(prompts, other))


def test_the_workload_benchmark_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(workload, "QWEN3_0_6B", TINY)
    path = tmp_path / "record.json"
    workload.main([
        "--device", "cpu", "--layers", "1", "--budget", "64", "--requests", "2", "--longest", "3",
        "--tokens", "2", "--kv-cache-dtype", "fp8", "--output",
        str(path)
    ])
    record = json.loads(path.read_text())
    assert record["kv_cache_dtype"] == "fp8" and "--kv-cache-dtype fp8" in record["command"]
    prompts, params = workload.workload(2, 1, 3)
    wanted = sum(p.max_tokens for p in params)
    assert record["output_tokens"] == wanted <= 6 and len(record["workload_tokens_per_s"]) == 2
    assert sum(tokens for tokens, _, _ in record["steps"]) == sum(map(len, prompts)) + wanted - 2
    assert record["gaps"]["longest_ms"] >= record["gaps"]["median_ms"] > 0 and record["gaps"][
        "prompt_tokens"] == 6
    assert set(record["start_up_phases_s"][0]) == {"weights", "pool"}
    assert "workload_tokens_per_s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, words",
    [(["workload", "--requests", "0"], "--requests is 0"),
     (["workload", "--tokens", "-1"], "--tokens is -1"),
     (["workload", "--output", "/nonexist/x.json"], "/nonexist/x.json cannot be written"),
     (["peer", "--output", "/nonexist/x.json"], "/nonexist/x.json cannot be written"),
     (["peer", "--rounds", "0"], "--rounds is 0"),
     (["workload", "--device", "xpu"], "device is 'xpu'"),
     (["workload", "--device", "cuda:99"], "'cuda:99' was asked for"),
     (["peer", "--device", "cuda:99"], "'cuda:99'")])
def test_mistakes_are_sentences_before_anything_is_measured(argv, words, capsys):
    assert main(["bench", *argv]) == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("paged: ") and words in err and len(err.splitlines()) == 1


def test_kernels_that_overlap_count_once():
    """A kernel that starts beside another one and waits for it adds only what it lasts longer."""

    def event(name, start, end, device=torch.autograd.DeviceType.CUDA):
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(
            start=start, end=end))

    events = [
        event("_product_kernel", 1002, 1012),
        event("_decode_kernel", 1000, 1010),
        event("nvjet", 1011, 1020),
        event("Memcpy DtoH", 1024, 1025),
        event("nvjet", 1013, 1014),
        event("cudaLaunchKernel", 0, 5000, torch.autograd.DeviceType.CPU)
    ]
    split = steps.kernel_split(events, steps=2)
    halves = {
        name: pytest.approx(us / 2e3)
        for name, us in (("attention", 10), ("products", 20), ("copies", 1))
    }
    assert split["kernels_ms"] == halves
    assert split["busy_ms"] == halves | {"products": pytest.approx(10 / 2e3)}
    assert split["profiled_ms"] == pytest.approx(25 / 2e3) and sum(
        split["busy_ms"].values()) <= split["profiled_ms"]
    assert ["_product_kernel", 0.5, pytest.approx(5e-3)] in split["top_kernels"]


def test_every_kernel_of_the_package_has_its_kind():
    sources = "".join(path.read_text() for path in Path(workload.__file__).parents[1].rglob("*.py"))
    kernels = set(re.findall(r"@triton\.jit.*\ndef (\w+_kernel)\(", sources))
    assert len(kernels) > 8
    assert {name for name in kernels if steps._kind(name) == "other"} == {"_prepare_kernel"}


def test_the_parts_of_a_step_on_the_clock():
    llm = workload.LLM(workload.random_model(TINY, "cpu", torch.float32), num_blocks=64)
    llm.engine.add_request([1, 2, 3], workload.SamplingParams(max_tokens=20, ignore_eos=True))
    split = steps.clock_split(llm.engine, 5)
    assert set(split["cpu_ms"]) == {"schedule", "launch", "collect", "update"}
    assert 0 < split["cpu_ms"]["schedule"] and sum(split["cpu_ms"].values()) <= split["step_ms"]
    assert llm.engine.launch == llm.runner.execute
    llm.engine.reset()


def test_the_peer_benchmark_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        peer, "SMOLLM2", peer.SMOLLM2 | {
            "vocab_size": 10_001, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "max_position_embeddings": 4096
        })
    path = tmp_path / "record.json"
    peer.main([
        "--device", "cpu", "--rounds", "2", "--prompt", "4", "--tokens", "3", "--output",
        str(path)
    ])
    assert {len(samples) for samples in json.loads(path.read_text())["seconds"].values()} == {2}
    assert "times the speed" in capsys.readouterr().out


def test_ablations_and_one_kernel_are_measured_one_by_one():
    with pytest.raises(ValueError, match="--ablations .* --persistent .* one, then the other"):
        workload.main(["--device", "cpu", "--ablations", "--persistent"])
