"""Protects a recording on a GPU: it says what the one on the CPU says, beat by beat.

The CPU's own recording is held by tests/test_theatre.py. Here the scene that moves most, by swap,
runs over a small random model, in step: a runner that runs ahead learns its tokens a step later.
"""

import pytest

from paged.config import EngineConfig, Speedups
from paged.lab.theatre import SCENES, Recorder, states
from paged.lab.theatre.scenes import Words
from paged.models.decoder import random_decoder
from paged.startup import cache_spec, make_runner
from tests.small_models import TINY_MODELS


def recorded(device: str, backend: str = "auto", graphs: bool = True) -> list[tuple]:
    """(step, event, its fields, the state after it) of every beat, without what a clock and
    rounding decide: seconds, and the digits of K."""
    scene, recorder, words = SCENES["swap"], Recorder(), Words()
    sizes = scene.sizes
    config = EngineConfig(**sizes, max_model_len=sizes["num_blocks"] * sizes["block_size"])
    decoder = random_decoder(TINY_MODELS["qwen3"], seed=1, device=device)
    runner = make_runner(decoder, cache_spec(decoder, config.block_size), config, backend,
                         Speedups(graphs=graphs, run_ahead=False), use_tqdm=False)
    engine = recorder.engine(config, runner, words)
    for arrival in scene.arrivals:
        engine.add_request(words.encode(arrival.prompt), arrival.params, arrival.name)
    while engine.has_unfinished():
        engine.step()
        engine.check_integrity()
    recording = recorder.recording("Swap")
    assert not any(beat["fields"].get("wrong") for beat in recording["beats"])
    beats = []
    for beat, state in zip(recording["beats"], states(recording)):
        fields = {name: value for name, value in beat["fields"].items() if name != "seconds"}
        cells = [cell and cell[0] for cell in state["slots"]]
        assert all(cell is None or len(cell[1]) == 12 for cell in state["slots"]), "K was read"
        beats.append((beat["step"], beat["event"], fields, state | {"slots": cells}))
    return beats


def assert_same(got: list[tuple], want: list[tuple]) -> None:
    for number, (mine, theirs) in enumerate(zip(got, want), 1):
        assert mine == theirs, f"beat {number}"
    assert len(got) == len(want)


def test_every_backend_on_the_cpu_gives_one_recording():
    want = recorded("cpu", "reference")
    assert {"SWAP_OUT", "SWAP_IN", "MOVE", "WRITE", "READ", "SAMPLE"} <= {beat[1] for beat in want}
    assert_same(recorded("cpu"), want)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_the_recording_on_a_gpu_is_the_cpus(graphs):
    assert_same(recorded("cuda", graphs=graphs), recorded("cpu"))
