"""The end-to-end benchmarks: the workload is the published one, and both run and record what they say."""

import json

import paged.bench.peer as peer
import paged.bench.workload as workload
from paged.models.config import ModelConfig

TINY = ModelConfig("qwen3", vocab_size=10_001, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=4,
                   num_kv_heads=2, head_dim=8, qk_norm=True, tie_word_embeddings=True, max_position_embeddings=4096)


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
    monkeypatch.setattr(workload, "workload", lambda n: ([[1, 2, 3], [4, 5]], [
        workload.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=3)] * 2))
    monkeypatch.setattr(workload, "at_once", lambda llm, n, tokens, at_once=workload.at_once: at_once(llm, n, 2))
    path = tmp_path / "record.json"
    workload.main(["--device", "cpu", "--layers", "1", "--budget", "64", "--output", str(path)])
    record = json.loads(path.read_text())
    assert record["output_tokens"] == 6 and len(record["workload_tokens_per_s"]) == 2
    assert sum(tokens for tokens, _, _ in record["steps"]) == 5 + 2 * 2     # prompts, then all but the first token
    assert record["gaps"]["longest_ms"] >= record["gaps"]["median_ms"] > 0
    assert "workload_tokens_per_s" in capsys.readouterr().out


def test_the_peer_benchmark_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peer, "SMOLLM2", ModelConfig("llama", **{name: getattr(TINY, name) for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
        "tie_word_embeddings", "max_position_embeddings")}))
    path = tmp_path / "record.json"
    peer.main(["--device", "cpu", "--rounds", "2", "--prompt", "4", "--tokens", "3", "--output", str(path)])
    assert {len(samples) for samples in json.loads(path.read_text())["seconds"].values()} == {2}
    assert "times the speed" in capsys.readouterr().out
