"""The load generator: what it sends, and that its figures are those of the samples it keeps."""

import json
import random
import statistics

import pytest

from paged.__main__ import main
from paged.bench.serve import Sample, arrivals, length, percentiles, summary
from tests.servers import make_llm, serving


def test_arrivals_are_a_poisson_process():
    rng = random.Random(1)
    times = arrivals(50, 100, rng)
    gaps = [b - a for a, b in zip(times, times[1:])]
    assert times == sorted(times) and 0 < times[0] and times[-1] < 100
    assert len(times) == pytest.approx(5000, rel=0.05)
    # Gaps as long as they are spread, and none knows of the one before.
    assert statistics.stdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.06)
    assert abs(statistics.correlation(gaps[1:], gaps[:-1])) < 0.05
    assert arrivals(1e-9, 1, rng) == [0.0]


def test_lengths_are_log_normal_within_their_bounds():
    rng = random.Random(2)
    lengths = [length(100, 0.5, 1000, rng) for _ in range(4000)]
    assert statistics.median(lengths) == pytest.approx(100, rel=0.05)
    above = sum(value > 100 * 2.718**0.5 for value in lengths) / 4000
    assert above == pytest.approx(0.159, abs=0.02)  # beyond one sigma
    assert length(100, 0, 1000, rng) == 100 and length(100, 5, 120, rng) <= 120
    assert min(length(1, 5, 9, rng) for _ in range(50)) == 1


def test_percentiles():
    values = list(range(1, 101))
    random.Random(0).shuffle(values)
    assert percentiles(values) == [50, 95, 99]
    assert percentiles([7]) == [7, 7, 7] and percentiles([]) == []
    assert percentiles([1, 2]) == [1, 2, 2]


def test_a_summary_of_samples_known_by_hand():
    samples = [
        Sample(0.0, 5, 3, [1.0, 1.5, 2.0], 200),
        Sample(1.0, 5, 1, [1.5], 200),
        Sample(1.0, 5, 5, [4.0, 6.0], 200),  # two tokens a piece, but for the first
        Sample(2.0, 5, 9, [], 429),
        Sample(2.0, 5, 9, [3.0], 0)
    ]
    found = summary(samples, first_limit=1.0, token_limit=0.5)
    assert (found["requests"], found["done"], found["lost"]) == (5, 3, 2)
    assert found["seconds"] == 6.0 and found["tokens_per_s"] == 9 / 6
    assert found["goodput_per_s"] == 2 / 6
    assert found["first_token_s"] == [1.0, 3.0, 3.0]
    assert found["per_token_s"] == [0.5, 0.5, 0.5]
    assert found["between_s"] == [0.5, 2.0, 2.0]
    assert summary([], 1, 1)["tokens_per_s"] == 0.0


@pytest.mark.parametrize("plain", [False, True])
def test_a_record_of_a_real_server(tmp_path, capsys, plain):
    path = tmp_path / "load.json"
    llm = make_llm(max_num_seqs=2)
    with serving(llm, keys=["k"], max_requests=6) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("paged.bench.serve.VOCABULARY", 250)
        assert main([
            "bench", "serve", "--url", server.url + "/v1/", "--api-key", "k", "--rates", "5,60",
            "--seconds", "0.5", "--prompt-tokens", "9", "--output-tokens", "8", "--most-tokens",
            "20", "--output",
            str(path), "--conditions", "a test", *["--plain"] * plain
        ]) == 0
        server.wait_until_empty()
    record = json.loads(path.read_text())
    shown = capsys.readouterr().out
    assert record["conditions"] == "a test" and record["model"]["id"] == "tiny"
    assert [level["rate"] for level in record["levels"]] == [5, 60]
    for level in record["levels"]:
        samples = [Sample(**sample) for sample in level["samples"]]
        assert summary(samples, 1.0, 0.1) == {name: level[name] for name in summary([], 1, 1)}
        for sample in samples:
            assert sample.status in (200, 429) and sample.pieces == sorted(sample.pieces)
            assert not sample.pieces or sample.pieces[0] >= sample.due
            assert sample.status == 429 or len(sample.pieces) <= sample.output_tokens + 1
        assert f"{level['tokens_per_s']:.1f}" in shown
    busy = record["levels"][1]
    assert busy["lost"] > 0, "the queue was never full"
    assert 0 < busy["client_cpu_share"]


@pytest.mark.parametrize("argv, words",
                         [(["--rates", "1,x"], "--rates is '1,x'"),
                          (["--rates", "0"], "--rates is '0'"),
                          (["--seconds", "-1"], "--seconds is -1.0"),
                          (["--output-tokens", "0"], "--output-tokens is 0"),
                          (["--sigma", "nan"], "--sigma is nan"),
                          (["--url", "http://127.0.0.1:9/v1"], "no server of OpenAI"),
                          (["--output", "/nowhere/x.json"], "cannot be written")])
def test_mistakes_are_sentences(argv, words, capsys):
    assert main(["bench", "serve", *argv]) == 2
    assert words in capsys.readouterr().err
