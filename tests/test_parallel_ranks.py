"""The processes of a model that is cut: started, joined by torchrun, refused in a sentence, and
ended together.

Protects users from a rank that is left behind, and from a wait without end when one dies. The model
is a small checkpoint in a directory, as each rank reads its own part of it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paged import LLM, SamplingParams
from paged.__main__ import main
from paged.models.config import ModelConfig
from paged.models.loader import Loaded, load, weight_files
from paged.parallel.ranks import Driver, RankLost, join
from tests.small_models import TINY_QWEN3, huggingface_model

SIZES = dict(device="cpu", block_size=4, num_blocks=64, max_num_seqs=4, use_tqdm=False)
DRAWN = SamplingParams(temperature=0.9, seed=3, max_tokens=12)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    huggingface_model(TINY_QWEN3).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def want(checkpoint):
    with LLM(str(checkpoint), **SIZES) as llm:
        return tokens(llm)


def tokens(llm):
    outputs = llm.generate(PROMPTS, DRAWN, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def assert_gone(pids, seconds=15):
    until = time.monotonic() + seconds
    while any(map(alive, pids)):
        assert time.monotonic() < until, f"of {pids} some are left"
        time.sleep(0.05)


# ── an LLM ────────────────────────────────────────────────────────────────────────────────────────


def test_two_ranks_answer_as_one_until_one_is_killed(checkpoint, want):
    """Then every request ends with a sentence, within seconds, and nothing is left."""
    with LLM(checkpoint, tensor_parallel_size=2, **SIZES) as llm:
        assert llm.runner.decoder.embedding.shape[0] == -(-TINY_QWEN3.vocab_size // 2)
        assert llm.runner.kv.num_kv_heads == TINY_QWEN3.num_kv_heads // 2
        assert tokens(llm) == want
        with pytest.raises(ValueError, match="belongs to a process group already"):
            LLM(checkpoint, tensor_parallel_size=2, **SIZES)
        pids = [process.pid for process in llm.ranks._processes.values()]
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        os.kill(pids[0], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(
                RankLost, match="rank 1 of 2 was ended by SIGKILL. Each rank holds a "
                "part of the model: make another LLM"):
            for _ in stream:
                pass
        with pytest.raises(RankLost, match="rank 1 of 2 was ended by SIGKILL"):
            tokens(llm)
        assert time.monotonic() - start < 10
    assert_gone(pids)
    assert not torch.distributed.is_initialized()


@pytest.mark.default_model
def test_three_ranks_of_the_default_model_answer():
    """Nine heads and three KV heads, from a GGUF file, of which each rank keeps a third."""
    with LLM("default", device="cpu", tensor_parallel_size=3, max_model_len=128, max_num_seqs=1,
             use_tqdm=False) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
        assert output.outputs[0].text == "The capital of France is Paris."
        assert llm.runner.kv.num_kv_heads == 1


SCRIPT = """
import sys
import threading
from paged import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], device="cpu", block_size=4, num_blocks=64, max_num_seqs=4,
              use_tqdm=False, tensor_parallel_size=2)
    if sys.argv[2:]:
        print("ready", *[process.pid for process in llm.ranks._processes.values()], flush=True)
        while True:
            llm.generate([[1, 2]], SamplingParams(max_tokens=200), use_tqdm=False)
    outputs = llm.generate({prompts}, SamplingParams(temperature=0.9, seed=3, max_tokens=12))
    print([output.outputs[0].token_ids for output in outputs])
""".replace("{prompts}", str(PROMPTS))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_ctrl_c_and_the_end_of_rank_0_leave_no_process(checkpoint, tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(checkpoint), "forever"], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        word, *pids = process.stdout.readline().split()
        assert word == "ready" and len(pids) == 1 and all(map(alive, pids))
        os.killpg(process.pid, how)  # as a terminal does
        said = process.communicate(timeout=60)[1]
        assert process.returncode == -how or process.returncode == 130
        if how is signal.SIGINT:
            assert said.count("Traceback") == 1 and said.rstrip().endswith("KeyboardInterrupt")
        assert_gone(pids)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_torchrun_on_two_machines(checkpoint, want, tmp_path):
    """Two agents with a process each, as on two machines: the tokens come from the first, once."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    nodes = [
        subprocess.Popen([
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank",
            str(node), "--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port",
            str(port),
            str(script),
            str(checkpoint)
        ], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env=os.environ | {"PYTHONPATH": str(ROOT)}) for node in range(2)
    ]
    try:
        said = [node.communicate(timeout=200) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    assert [out.strip() for out, _ in said] == [str(want), ""]


# ── refused, and failed ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True, None])
def test_a_size_that_is_none(checkpoint, size):
    with pytest.raises(ValueError, match="tensor_parallel_size is .* an integer of at least 1"):
        LLM(checkpoint, tensor_parallel_size=size, **SIZES)


def test_what_cannot_be_shared_is_refused_before_a_process_is_started(checkpoint, monkeypatch):
    monkeypatch.setattr("paged.parallel.ranks.start", None)
    whole = Loaded(None, TINY_QWEN3, None, set(), 0)
    with pytest.raises(
            ValueError, match="a model that is given is whole, and tensor_parallel_size "
            "is 2: give its name"):
        LLM(whole, tensor_parallel_size=2, **SIZES)
    with pytest.raises(ValueError, match="config.json is a file, and not a .gguf file"):
        LLM(checkpoint / "config.json", tensor_parallel_size=2, **SIZES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(
            ValueError, match="4 ranks need a GPU each and PyTorch sees 2: lower "
            "tensor_parallel_size"):
        LLM(checkpoint, tensor_parallel_size=4, device="cuda")
    with pytest.raises(ValueError, match="device is 'cuda:1' and tensor_parallel_size is 2"):
        LLM(checkpoint, tensor_parallel_size=2, device="cuda:1")
    for name, value in dict(RANK="0", WORLD_SIZE="4", MASTER_ADDR="here", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
            ValueError, match="torchrun has started 4 processes and "
            "tensor_parallel_size is 2: make them equal"):
        LLM(checkpoint, tensor_parallel_size=2, **SIZES)


def ends_early():
    os._exit(3)


def fails_later(said):
    ranks = join(2, torch.device("cpu"), fails_later, {})
    with ranks.together():
        assert ranks.receive() == "go"
        raise MemoryError(said)


def test_a_rank_that_ends_before_it_is_ready():
    with pytest.raises(RankLost, match="rank 1 of 2 ended with exit status 3 before it was ready"):
        join(2, torch.device("cpu"), ends_early, {})
    assert not torch.distributed.is_initialized()


def test_a_rank_that_fails_says_why():
    """While rank 0 waits for a sum, and at whatever it does next."""
    ranks = join(2, torch.device("cpu"), fails_later, {"said": "there is no room: lower it"})
    pids = [process.pid for process in ranks._processes.values()]
    try:
        sentence = "rank 1 of 2 failed: there is no room: lower it. Each rank holds a part"
        with pytest.raises(RankLost, match=sentence), ranks.together():
            ranks.send("go")
            torch.distributed.all_reduce(torch.zeros(1))
        with pytest.raises(RankLost, match=sentence), ranks.together():
            raise AssertionError("it was not even tried")
    finally:
        ranks.close()
    assert_gone(pids, 0)


def test_a_model_that_cannot_be_dealt_out(checkpoint):
    with pytest.raises(ValueError, match="4 query heads cannot be dealt out evenly to 3 ranks"):
        load(str(checkpoint), rank=0, num_ranks=3)


def test_the_benchmark_of_sums_records(tmp_path, capsys):
    path = tmp_path / "sums.json"
    assert main([
        "bench", "sums", "--device", "cpu", "--hidden", "8", "--repetitions", "2", "--output",
        str(path)
    ]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["tokens"] for row in rows] == [1, 8, 32, 128, 256, 512, 2048]
    assert all(len(row["gloo"]) == 2 and min(row["gloo"]) > 0 for row in rows)
    assert "2048" in capsys.readouterr().out
    assert main(["bench", "sums", "--tensor-parallel-size", "1"]) == 2


# ── each rank reads its part ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_reads_no_more_than_its_part(checkpoint, monkeypatch, rank):
    read = []
    stored = weight_files.Stored.__call__

    def noting(self, cut=()):
        tensor = stored(self, cut)
        read.append((self.shape, tensor.numel()))
        return tensor

    monkeypatch.setattr(weight_files.Stored, "__call__", noting)
    part = load(str(checkpoint), rank=rank, num_ranks=4)
    whole = sum(tensor.numel() for tensor in load_file(checkpoint / "model.safetensors").values())
    norms = sum(shape[0] for shape, _ in read if len(shape) == 1)
    copies = 2 * 2 * TINY_QWEN3.num_layers * TINY_QWEN3.head_dim * TINY_QWEN3.hidden_size
    mine = sum(number for _, number in read)
    assert mine <= norms + (whole - norms + copies) / 4 + TINY_QWEN3.hidden_size
    assert part.config == TINY_QWEN3 or part.config.vocab_size == TINY_QWEN3.vocab_size
    assert part.decoder.config.num_heads == 1 and part.decoder.config.num_kv_heads == 1


def test_a_tensor_of_the_wrong_shape_is_told_by_its_whole_shape(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text().replace(
        '"intermediate_size": 92', '"intermediate_size": 88'))
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    for rank in range(2):
        with pytest.raises(
                ValueError, match=r"gate_proj.* has shape \[92, 44\], and the config "
                r"asks for \[88, 44\]"):
            load(str(tmp_path), rank=rank, num_ranks=2)


def test_tokens_of_other_parts_are_zeros():
    """In the plain lookup and in the kernel, at the edges of a part, padding included."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    from paged.kernels.prepare import prepare
    from paged.seats import Seats
    from paged.seats import prepare as plain_prepare

    config = ModelConfig("llama", 10, 8, 8, 1, 2, 2, 4)
    table = torch.randn(4, config.hidden_size)
    ids = torch.tensor([3, 4, 7, 8, 0, -1], dtype=torch.int32)
    sizes = dict(dtype=torch.int32)
    rows = torch.arange(6, **sizes)
    for drawn in (5, 9):
        state = Seats(6, 2, 10, torch.device("cpu"))
        state.tokens[:] = drawn
        want = torch.zeros(6, config.hidden_size)
        for at, token in enumerate([3, 4, 7, 8, 0, drawn]):
            if 4 <= token < 8:
                want[at] = table[token - 4]
        of_step = (ids, rows, torch.full((6,), -1,
                                         **sizes), torch.ones(6, **sizes), torch.arange(7, **sizes))
        assert torch.equal(plain_prepare(*of_step, state, table, 4, 4).x, want)
        assert torch.equal(prepare(*of_step, state.tables, state.tokens, table, 4, 4)[0], want)


def test_two_threads_that_hang_up_at_once_close_each_connection_once():
    """Closed twice, a connection's number may be another file's by then."""
    driver, errors = Driver.__new__(Driver), []
    driver._ending = threading.Lock()

    def hang_up():
        try:
            driver._hang_up()
        except OSError as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            driver._connections = {rank: Pipe()[0] for rank in range(8)}
            threads = [threading.Thread(target=hang_up) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
