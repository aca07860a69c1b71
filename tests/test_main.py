"""The command line: a mistake ends in one sentence and status 2, an interruption in 130, neither in
a traceback."""

import json
import subprocess
import sys

import pytest
import torch

from paged.__main__ import main
from tests.test_llm import loaded  # noqa: F401 - a fixture


@pytest.fixture
def tiny(loaded, monkeypatch):  # noqa: F811
    """A command line whose models are all the small random one."""
    monkeypatch.setattr("paged.llm.load", lambda *args, **named: loaded)


def test_generate_streams_and_tells_its_times(tiny, capsys):
    assert main(
        ["generate", "hello", "--raw", "--max-tokens", "4", "--stats", "--num-blocks", "40"]) == 0
    out, err = capsys.readouterr()
    assert len(out.strip()) in (3, 4) and "ms" in err and "attention: " in err
    assert err.startswith("ready after ") and "weights 0.0 s, pool 0.0 s" in err
    assert main(
        ["generate", "hello", "--raw", "--max-tokens", "4", "--num-blocks", "40", "--quiet"]) == 0
    assert capsys.readouterr() == (out, "")


def test_generate_takes_what_the_sentences_name(tiny, capsys):
    argv = [
        "generate", "hello", "--raw", "--max-tokens", "4", "--max-model-len", "7", "--enforce-eager"
    ]
    assert main([*argv, "--gpu-memory-utilization", "0.5", "--attention-backend", "reference"]) == 2
    assert "max_model_len is 7" in capsys.readouterr().err
    for option in (["--gpu-memory-utilization",
                    "2"], ["--max-num-batched-tokens",
                           "0"], ["--max-num-seqs", "0"], ["--attention-backend", "fast"]):
        assert main([*argv, *option]) == 2
        assert f"{option[0][2:].replace('-', '_')} is " in capsys.readouterr().err


def test_revision_and_tokenizer_reach_the_loader(loaded, monkeypatch):  # noqa: F811
    asked = []
    monkeypatch.setattr("paged.llm.load", lambda model, *args, **named: asked.append(
        (model, named)) or loaded)
    argv = ["generate", "hello", "--raw", "--max-tokens", "1", "--num-blocks", "40", "--quiet"]
    assert main([*argv, "--model", "a/b", "--revision", "v1.0", "--tokenizer", "a/c"]) == 0
    assert main([*argv, "--model", "a/b"]) == 0
    assert asked == [("a/b", dict(revision="v1.0", tokenizer="a/c")),
                     ("a/b", dict(revision=None, tokenizer=None))]


def test_memory_that_runs_out_is_a_sentence(tiny, capsys, monkeypatch):

    def full(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("paged.runner.ModelRunner.execute", full)
    argv = ["generate", "hello", "--raw", "--max-tokens", "4", "--quiet", "--num-blocks", "40"]
    assert main(argv) == 2
    sentence = (
        "paged: there is no room for a step of up to 2048 tokens beside a pool of 40 blocks "
        "(0.00 GiB)")
    assert capsys.readouterr().err.startswith(sentence)
    monkeypatch.setattr("paged.__main__._load", lambda args: full(None, None))
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith(
        "paged: CUDA out of memory. Tried to allocate 2.00 GiB. Free")


def test_generate_reads_standard_input(tiny, capsys, monkeypatch):
    import io
    main(["generate", "hello", "--system", "be", "--max-tokens", "4"])
    want = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    assert main(["generate", "-", "--system", "be", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out == want


def test_trace_prints_and_saves(tiny, capsys, tmp_path):
    path = tmp_path / "events.jsonl"
    assert main(
        ["trace", "hello", "help", "--max-tokens", "3", "--save",
         str(path), "--num-blocks", "40"]) == 0
    out = capsys.readouterr().out
    for name in ("SCHEDULE_PREFILL", "SCHEDULE_DECODE", "KV_BLOCK_ALLOCATE", "KV_BLOCK_RELEASE",
                 "STATE_TRANSITION"):
        assert name in out
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert events[0]["event"] == "MODEL_WEIGHTS_LOADED"


@pytest.mark.parametrize("argv, words", [
    (["generate", "hi", "--model", "no/such/directory"], "no/such/directory"),
    (["generate", "hi", "--model", "missing.gguf"], "missing.gguf"),
    (["generate", "hi", "--block-size", "0"], "block_size is 0"),
    (["generate", "hi", "--num-blocks", "0"], "num_blocks is 0"),
    (["generate", "hi", "--max-tokens", "0"], "max_tokens is 0"),
    (["generate", "hi", "--temperature", "-1"], "temperature is -1"),
    (["generate", "hi", "--device", "cuda:7"], "cuda:7"),
    (["generate", "hi", "--dtype", "int3"], "int3"),
    (["generate", "hi", "--revision", "main"], "revision is 'main'"),
    (["generate", "hi", "--model", "a/b", "--revision", "a b"], "revision is 'a b'"),
    (["generate", "hi", "--tokenizer", "no/such/directory"], "tokenizer is 'no/such/directory'"),
    (["generate", "hi", "--device", "mps"], "device is 'mps'"),
    (["generate", "hi", "--raw", "--system", "be kind"], "--system"),
    (["trace", "hi", "--save", "no/such/directory/events"], "no/such/directory/events"),
    (["trace", "hi", "--metrics", "."], ". cannot be written"),
])
def test_mistakes_are_sentences(argv, words, capsys):
    assert main(argv) == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("paged: ") and words in err and len(err.splitlines()) == 1


def test_a_terminal_without_the_characters_shows_question_marks(tiny, monkeypatch):
    import io
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout",
                        io.TextIOWrapper(written, encoding="ascii", write_through=True))
    monkeypatch.setattr("tests.test_llm.Letters.token_bytes",
                        lambda self, token: "\N{GRINNING FACE}".encode())
    assert main(["generate", "hi", "--raw", "--max-tokens", "2"]) == 0
    assert written.getvalue().strip() in (b"?", b"??")


def test_impossible_prompts_are_sentences(tiny, capsys):
    assert main(["generate", "", "--raw"]) == 2
    assert "empty" in capsys.readouterr().err
    assert main(["generate", "a" * 300, "--raw"]) == 2
    assert "max_model_len" in capsys.readouterr().err


def test_a_directory_without_weights(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    assert main(["generate", "hi", "--model", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_ctrl_c(tiny, capsys, monkeypatch):

    def interrupted(self, batch):
        raise KeyboardInterrupt

    monkeypatch.setattr("paged.runner.ModelRunner.execute", interrupted)
    assert main(["generate", "hello", "--raw", "--max-tokens", "5"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_nothing_is_a_question_for_help(capsys):
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out


def test_a_request_that_fails_is_a_sentence(tiny, capsys, monkeypatch):
    from paged.batch import RowOutput
    monkeypatch.setattr("paged.runner.ModelRunner.execute",
                        lambda self, batch: [RowOutput(error="the logits hold NaN")])
    assert main(["generate", "hello", "--raw", "--max-tokens", "5", "--quiet"]) == 2
    assert capsys.readouterr().err == "paged: the logits hold NaN\n"


def test_help_and_unknown_arguments():
    for argv in ([], ["--help"], ["generate", "--help"], ["bench", "--help"], ["models", "--help"]):
        assert subprocess.run([sys.executable, "-m", "paged", *argv],
                              capture_output=True).returncode == 0
    done = subprocess.run([sys.executable, "-m", "paged", "generate", "hi", "--modle", "x"],
                          capture_output=True, text=True)
    assert done.returncode == 2 and "--modle" in done.stderr and "Traceback" not in done.stderr


def test_models_tells_what_can_be_loaded(capsys):
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "SmolLM2-135M-Instruct" in out and "Qwen3ForCausalLM" in out
