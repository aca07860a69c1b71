"""The scheduler benchmark runs, saves raw samples, and measures what it says: decodes of all
requests."""

import json

from paged.bench import scheduler


def test_prints_and_saves(tmp_path, capsys):
    scheduler.main([
        "--requests", "5", "--contexts", "20", "40", "--steps", "6", "--block-size", "4",
        "--prefix-cache", "radix", "--profile", "--save",
        str(tmp_path / "steps.json")
    ])
    assert "5 running requests" in capsys.readouterr().out
    record = json.loads((tmp_path / "steps.json").read_text())
    assert [(row["context"], row["staggered"]) for row in record["steps"]] == [(20, True),
                                                                               (20, False),
                                                                               (40, True),
                                                                               (40, False)]
    assert all(len(row["seconds"]) == 6 for row in record["steps"])


def test_every_step_decodes_every_request():
    engine = scheduler.decoding_engine(7, context=30, steps=8, block_size=4)
    for _ in range(6):
        assert len(engine.step()) == 7
    assert len({len(request.token_ids) % 4 for request in engine.scheduler.running}) == 4
