"""The theatre: a run of the engine, recorded, as linked panels to play and step through.

    from paged.lab.theatre import Recorder, theatre
    recorder = Recorder()
    engine = recorder.engine_of(llm)
    engine.add_request(llm.tokenizer.encode("The capital of France is"), SamplingParams())
    while engine.has_unfinished():
        engine.step()
    theatre(recorder.recording("My run"))
"""

from paged.lab.theatre.last_steps import LastSteps
from paged.lab.theatre.recorder import Recorder, states
from paged.lab.theatre.scenes import SCENES, all_recordings, default_model, play
from paged.lab.theatre.show import page, scene, theatre

__all__ = [
    "SCENES", "LastSteps", "Recorder", "all_recordings", "default_model", "page", "play", "scene",
    "states", "theatre"
]
