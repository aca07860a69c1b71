"""The comparison of the prefix caches: both find the same, and small blocks find more."""

import json

import pytest

from paged.bench import prefix


@pytest.mark.parametrize("load", prefix.LOADS)
def test_hit_rates(load):
    rates = {(cache, size): prefix.measure(prefix.LOADS[load], cache, size)["hit_rate"]
             for cache in ("hash", "radix")
             for size in (16, 4)}
    assert rates["hash", 16] == rates["radix", 16] and rates["hash", 4] == rates["radix", 4]
    assert rates["hash", 4] > rates["hash", 16] > 0.75


def test_prints_and_saves(tmp_path, capsys):
    prefix.main(["--block-sizes", "32", "--save", str(tmp_path / "prefix.json")])
    assert capsys.readouterr().out.count("radix") == 3
    saved = json.loads((tmp_path / "prefix.json").read_text())["measurements"]
    assert len(saved) == 6 and all(row["seconds"] > 0 for row in saved)
