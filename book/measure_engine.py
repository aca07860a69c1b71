"""Run the museum of the chapter *The engine* on a GPU: python book/measure_engine.py [--output
FILE]

The code is taken from the chapter itself, from its cells tagged `museum`; only the line that says
where the model runs is another one here. Run twice, the second run is recorded: every event of its
trace, and the answers.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import paged
from paged.bench.common import check_output, machine

CELL = re.compile(r"```\{code-cell\} ipython3\n:tags: \[(?:[^\]]*, )?museum\]\n\n(.*?)```",
                  re.DOTALL)
PLACE = 'place = dict(device="cpu", dtype="float32")'


def museum(chapter: Path, place: str) -> dict:
    """What the chapter's cells leave behind when they run with another `place`."""
    code = "\n".join(CELL.findall(chapter.read_text(encoding="utf-8")))
    if code.count(PLACE) != 1:
        raise ValueError(f"{chapter} is expected to say {PLACE} once, in a cell tagged museum")
    names = {name: getattr(paged, name) for name in ("LLM", "SamplingParams", "Trace")}
    names["table"] = lambda *args, **kwargs: None  # of what the chapter shows, nothing is needed
    exec(compile(code.replace(PLACE, place), str(chapter), "exec"), names)
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the record as JSON")
    args = parser.parse_args()
    check_output(args.output)
    if not torch.cuda.is_available():
        sys.exit("this measurement needs a CUDA device")
    place = 'place = dict(device="cuda", dtype="bfloat16")'
    for _ in range(2):
        names = museum(Path(__file__).with_name("engine.md"), place)
    answers = {name: output.outputs[0].text for name, output in sorted(names["outputs"].items())}
    record = machine("python book/measure_engine.py") | {
        "place": place, "attention": names["llm"].runner.attention.name, "answers": answers,
        "events": names["trace"].events
    }
    for event in names["trace"].select("STEP"):
        print(f"step {event['step']}: {1e3 * event['seconds']:.2f} ms")
    print(answers)
    if args.output:
        args.output.write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main()
