"""The scenes of the book: short scripts, run by the real engine in pools that are far too small.

    recording = play(SCENES["fork"], model)                  # of paged.models.loader.load
    recording = play(SCENES["fork"])                         # words that a hash chooses
"""

from __future__ import annotations

import hashlib
import math
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain

from paged.batch import Batch, RowOutput
from paged.config import EngineConfig
from paged.engine import Engine
from paged.lab.faults import faults, planted
from paged.lab.theatre.recorder import Recorder
from paged.request import RequestOutput
from paged.sampling import BeamSearchParams, SamplingParams

MOST_STEPS = 60  # a fault may keep an engine from ever ending


@dataclass(frozen=True)
class Arrival:
    """A request of a script: after which step it comes, its name, its prompt, how it is sampled."""

    step: int
    name: str
    prompt: str
    params: SamplingParams
    salt: str | None = None


@dataclass(frozen=True)
class Scene:
    """A script.

    Attributes:
        slug: its name in addresses.
        title, line: what its tab says, and what it is about.
        sizes: of the engine, arguments of EngineConfig.
        arrivals: who comes when.
        faults: names of faults of *How paged engines break* that show in it; each with what the
            script must have otherwise (fields of Scene) for the fault to show.
    """

    slug: str
    title: str
    line: str
    sizes: dict
    arrivals: tuple[Arrival, ...]
    faults: dict[str, dict] = field(default_factory=dict)


def _scene(slug: str, title: str, line: str, *arrivals, faults=None, **sizes) -> Scene:
    return Scene(slug, title, line, _SIZES | sizes, arrivals, faults or {})


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


_SIZES = dict(num_blocks=8, block_size=4, max_num_seqs=3, max_num_batched_tokens=16)
_CROWD = (Arrival(0, "A", "one two three four five six seven",
                  _greedy(6)), Arrival(0, "B", "The cat sat on the",
                                       _greedy(6)), Arrival(0, "C", "Spring, summer,", _greedy(4)))
_TOWNS = "Paris is in France. Rome is in Italy. "

SCENES = {
    scene.slug: scene
    for scene in (
        _scene("first-prompt", "First prompt",
               "Five tokens become K and V in two blocks, and an answer begins.",
               Arrival(0, "A", "The capital of France is", _greedy(3)), max_num_seqs=2),
        _scene("growth", "Growth",
               "One token a step: most steps need no block, and now and then one does.",
               Arrival(0, "A", "The opposite of hot is", _greedy(9))),
        _scene(
            "block-life", "The life of a block",
            "Blocks are handed out, filled, shared, copied, freed, and handed out again.",
            Arrival(0, "X", "We hold these truths to be self-evident, that", _greedy(3)),
            Arrival(1, "A", "Four score and seven years",
                    SamplingParams(n=2, max_tokens=5, temperature=0.7, seed=3, ignore_eos=True)),
            Arrival(5, "C", "To be or not to be, that is the", _greedy(
                2)), enable_prefix_caching=False),
        _scene(
            "shared-prefix", "Shared prefix",
            "B begins like A. Their common blocks are held twice, and computed once.",
            Arrival(0, "A", _TOWNS + "Madrid is in", _greedy(4)),
            Arrival(2, "B", _TOWNS + "Berlin is in", _greedy(3)), faults={
                "unchained hash": dict(
                    line=
                    "C begins like B and goes on like A: the same words, after another country.",
                    arrivals=(
                        Arrival(0, "A", "We live in Germany and our capital city is", _greedy(2)),
                        Arrival(2, "B", "We live in China now", _greedy(1)),
                        Arrival(3, "C", "We live in China and our capital city is", _greedy(2))))
            }),
        _scene(
            "fork", "Fork and copy",
            "One prompt, two answers: they share its blocks, and copy one before they write to it.",
            Arrival(0, "A", "The best thing about rain is",
                    SamplingParams(n=2, max_tokens=5, temperature=0.7, seed=3, ignore_eos=True)),
            faults={"missing copy-on-write": {}, "copy without contents": {}
                    }, enable_prefix_caching=False),
        _scene(
            "preemption", "Preemption",
            "Three requests grow in a pool for two. The youngest gives way, and computes again.", *
            _CROWD, faults={
                "freed twice": {}, "preempted to the end of the queue": dict(
                    line="B gives way while C still waits. Who is let in next?", sizes=_SIZES
                    | dict(num_blocks=5, max_num_seqs=2), arrivals=(
                        Arrival(0, "A", "one two three four five six", _greedy(6)),
                        Arrival(0, "B", "The cat sat on the", _greedy(6)),
                        Arrival(1, "C", "Spring, summer,", _greedy(2))))
            }, num_blocks=6),
        _scene("swap", "Swap",
               "The same crowd, but whoever gives way takes its K and V to host memory.", *_CROWD,
               num_blocks=6, preemption="swap", num_host_blocks=4),
        _scene("eviction", "Eviction",
               "A freed block can be found until it is handed out for something else.",
               Arrival(0, "A", "Tell me about the old city of Rome now", _greedy(2)),
               Arrival(2, "B", "Tell me about the old city of Paris now", _greedy(1)),
               Arrival(3, "C", "Twelve eggs, some flour, a little milk and salt make", _greedy(2)),
               Arrival(5, "D", "Tell me about the old city of Rome now", _greedy(
                   2)), faults={"stale hash": {}}, num_blocks=5),
        _scene(
            "chunked-prefill", "Chunked prefill",
            "A long prompt comes in pieces, so that those who decode need not wait.",
            Arrival(0, "A", "Once upon a time", _greedy(8)),
            Arrival(2, "B", "A recipe for bread: take flour, water, salt and yeast, mix", _greedy(
                3)), faults={"a chunk sees too much": {}}, max_num_batched_tokens=8),
        _scene(
            "beam-search", "Beam search",
            "Two beams compete. The one that is continued twice forks, the other lets go.",
            Arrival(0, "A", "My dog likes to",
                    BeamSearchParams(beam_width=2, max_tokens=5,
                                     ignore_eos=True)), enable_prefix_caching=False),
    )
}


def play(scene: Scene, model=None, fault: str | None = None) -> dict:
    """Run a scene and return its recording.

    Args:
        model: a Loaded model (`paged.models.loader.load`), on the CPU in float32 to be repeatable;
            None runs `WordModel`, which is none.
        fault: a name of `paged.lab.faults`, planted while the scene runs. The recording then says
            under "fault" what a user sees and should have seen.
    """
    if fault is not None:
        scene = replace(scene, **scene.faults.get(fault, {}))
    recorder, outputs, error, broken = _run(scene, model, fault)
    recording = recorder.recording(scene.title, scene.line, scene.slug)
    recording["outputs"] = outputs
    if fault is not None:
        should = _run(scene, model, None)[1]
        wrong = next((beat["say"].removeprefix("Wrong: ")
                      for beat in recording["beats"] if beat["fields"].get("wrong")), None)
        recording["fault"] = {
            "name": fault, "why": (faults()[fault][2].__doc__ or "").strip(), "error": error,
            "verdict": wrong or broken or "No read is wrong.",
            "rows": [[name, text, outputs.get(name, "")] for name, text in should.items()]
        }
    return recording


def _run(scene: Scene, model, fault: str | None) -> tuple[Recorder, dict, str | None, str | None]:
    """What was recorded, every completion's text, the error that a user sees, and what
    check_integrity finds."""
    recorder, error, broken = Recorder(), None, None
    with planted(fault) if fault is not None else nullcontext():
        engine = _engine(scene, model, recorder)
        completions: dict[str, RequestOutput] = {}
        waiting = list(scene.arrivals)
        while waiting or engine.has_unfinished():
            while waiting and waiting[0].step <= recorder.step:
                arrival = waiting.pop(0)
                engine.add_request(engine.tokenizer.encode(arrival.prompt), arrival.params,
                                   arrival.name, arrival.salt)
                completions[arrival.name] = engine.output(arrival.name)
            try:
                engine.step()
            except Exception as problem:
                if fault is None:
                    raise
                error = f"{type(problem).__name__}: {problem}"
                recorder.failed(problem)
                break
            try:
                engine.check_integrity()
            except AssertionError as problem:
                if fault is None:
                    raise
                broken = broken or f"check_integrity: {problem}"
            if recorder.step >= MOST_STEPS:
                error = f"no end: {MOST_STEPS} steps, and still there is something to do"
                break
    outputs = {}
    for name, output in completions.items():
        for i, completion in enumerate(output.outputs):
            outputs[name if i == 0 else f"{name}.{i}"] = engine.tokenizer.decode(
                completion.token_ids)
    return recorder, outputs, error, broken


def _engine(scene: Scene, model, recorder: Recorder) -> Engine:
    sizes = dict(scene.sizes)
    config = EngineConfig(**sizes, max_model_len=sizes["num_blocks"] * sizes["block_size"])
    if model is None:
        return recorder.engine(config, WordModel(), Words())
    from paged.llm import LLM
    sizes.pop("num_host_blocks", None)
    llm = LLM(model, device="cpu", enforce_eager=True, use_tqdm=False, **sizes)
    runner = llm.engine.runner
    runner.kv.data.zero_()  # what nobody wrote is the same in every run
    return recorder.engine(config, runner, llm.tokenizer, eos_token_ids=llm.engine.eos_token_ids,
                           vocab_size=llm.engine.vocab_size)


class Words:
    """A tokenizer for WordModel: a token is a word."""

    def __init__(self):
        self._words: list[str] = []

    def encode(self, text: str) -> list[int]:
        """Ids of the words."""
        for word in text.split():
            if word not in self._words:
                self._words.append(word)
        return [self._words.index(word) for word in text.split()]

    def decode(self, token_ids: list[int]) -> str:
        """The words of ids; one that no prompt had is a number."""
        return " ".join(self._words[t] if t < len(self._words) else f"w{t}" for t in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The word, with a space before it."""
        return f" {self.decode([token_id])}".encode()


class WordModel:
    """Stands in for a model: a hash of the tokens and positions of a step chooses the next word."""

    NUM_WORDS = 40

    def execute(self, batch: Batch) -> list[RowOutput]:
        """One token a request, with the chances of all words."""
        ends = batch.query_start_loc[1:]
        chances = [
            self._chances(batch.input_ids[end - 1], batch.positions[end - 1], name)
            for end, name in zip(ends, batch.request_ids)
        ]
        return [RowOutput([max(each, key=lambda word: each[word])], [each]) for each in chances]

    def _chances(self, token: int, position: int, name: str) -> dict[int, float]:
        digest = hashlib.blake2b(f"{token} {position} {name}".encode(),
                                 digest_size=self.NUM_WORDS).digest()
        total = sum(digest) + len(digest)
        return {
            word: math.log((weight + 1 + word / 1e3) / total)
            for word, weight in enumerate(digest)
        }


@cache
def default_model():
    """The book's default model on the CPU in float32, loaded once a process."""
    from paged.models.loader import load
    return load("default", device="cpu", dtype="float32", use_tqdm=False)


def all_recordings(model=None) -> list[dict]:
    """Every scene, each followed by its faults."""
    return list(
        chain.from_iterable(
            [play(scene, model), *(play(scene, model, fault) for fault in scene.faults)]
            for scene in SCENES.values()))
