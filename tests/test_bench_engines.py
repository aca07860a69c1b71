"""The harness that runs the same prompts through several engines.

Protects that every engine is asked for the same thing and that the record says what was measured.
Engines that are not installed here are stood in for by modules that answer as theirs do.
"""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from paged.__main__ import main as command_line
from paged.bench import engines

TINY = (16, 24, 4, 2, 8, True)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(engines.SHAPES, "Qwen3-0.6B", TINY)


def test_the_workloads_are_the_published_ones():
    first = engines.work("W1")
    assert sum(map(len, first.prompts)) == 142_827 and sum(first.max_tokens) == 133_966
    assert engines.work("W6f") == engines.Work(first.prompts[:128], first.max_tokens[:128],
                                               {"top_p": 0.95, "top_k": 50})
    assert engines.work("W1p") == first._replace(max_tokens=[1] * 256)
    fourth = engines.work("W4")
    assert len({tuple(prompt[:2000]) for prompt in fourth.prompts}) == 1
    assert len(fourth.prompts) == 1000 and set(fourth.max_tokens) == {128}
    assert all(2050 <= len(prompt) <= 2150 for prompt in fourth.prompts)
    assert [len(prompt) for prompt in engines.work("n3x5").prompts] == [16] * 3
    assert engines.work("h3x7x5").max_tokens == [5] * 3
    assert len(engines.work("h3x7x5").prompts[2]) == 7


@pytest.mark.parametrize("name", ["W2", "W6tp", "n0x5", "n3", "h3x5", "", "W1pp"])
def test_an_unknown_workload_is_a_sentence(name):
    with pytest.raises(ValueError, match="there is no workload"):
        engines.work(name)


@pytest.mark.parametrize("engine", ["paged", "transformers"])
def test_an_installed_engine_is_measured_and_recorded(engine, tmp_path, capsys):
    if engine == "transformers":
        pytest.importorskip("transformers")
    path = tmp_path / "record.json"
    assert not engines.main([
        "--engine", engine, "--device", "cpu", "--layers", "1", "--workloads", "n3x2", "h2x5x3",
        "h2x5x3p", "--runs", "1", "--output",
        str(path)
    ])
    record = json.loads(path.read_text())
    assert record["engine"] == engine and record["version"] and record["torch"]
    assert {name: run["output"]
            for name, run in record["runs"].items()} == {"n3x2": 6, "h2x5x3": 6, "h2x5x3p": 2}
    assert all(
        len(run["tokens_per_s"]) == len(run["seconds"]) == 1 for run in record["runs"].values())


def stand_in(name):
    """A module that answers as the engine's does, and what it was asked."""
    asked = []

    def outputs(prompts, counts):
        asked.append((prompts, counts))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * n)]) for n in counts]

    class LLM:

        def __init__(self, *args, **flags):
            asked.append(flags)

        def generate(self, prompts=None, params=None, use_tqdm=None, **named):
            if name == "sglang":
                counts = [each["max_new_tokens"] for each in named["sampling_params"]]
                outputs(named["input_ids"], counts)
                return [{"meta_info": {"completion_tokens": n}} for n in counts]
            found = outputs(prompts, [each.max_tokens for each in params])
            return found if name == "vllm" else [{"token_ids": each.outputs[0].token_ids}
                                                 for each in found]

    return SimpleNamespace(LLM=LLM, Engine=LLM, SamplingParams=SimpleNamespace), asked


@pytest.mark.parametrize("name, module, model", [("vllm", "vllm", None), ("sglang", "sglang", None),
                                                 ("nano-vllm", "nanovllm", "somewhere")])
def test_other_engines_get_the_same_prompts(name, module, model, monkeypatch):
    fake, asked = stand_in(name)
    monkeypatch.setitem(sys.modules, module, fake)
    setting = engines.Setting(engines.shape("Qwen3-0.6B", 1), model, model or "folder",
                              torch.device("cpu"), torch.float32, 32, 4, 16)
    generate, flags = engines.ENGINES[name][1](setting)
    assert flags.items() <= asked[0].items() and (flags.get("load_format") == "dummy") == (
        model is None), "weights are random where no checkpoint is named"
    asked_for = engines.work("n2x3")
    assert generate(asked_for) == 6
    prompts = [p["prompt_token_ids"] if isinstance(p, dict) else p for p in asked[1][0]]
    assert (prompts, asked[1][1]) == (asked_for.prompts, asked_for.max_tokens)


def test_an_engine_that_ends_early_is_no_measurement():
    with pytest.raises(RuntimeError, match="5 tokens came where 6"):
        engines.measure(lambda work: 5, engines.work("n2x3"), 1)


def test_refusals(capsys):
    assert command_line(["bench", "engines", "--engine", "nano-vllm"]) != 0
    assert "nano-vllm is not installed" in capsys.readouterr().err
    assert command_line(["bench", "engines", "--runs", "0"]) != 0
    assert "--runs" in capsys.readouterr().err
