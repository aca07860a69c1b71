"""python -m paged theatre: run a reader's own prompts, and write the run as one HTML file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DESCRIPTION = """\
Run prompts together in a small pool and write one HTML file that shows the run, beat by beat:
requests and their block tables, the K/V memory, the free queue, the scheduler, and the line of the
engine that runs. The file needs nothing else: open it in any browser, or send it to somebody.

    python -m paged theatre "The capital of France is" "The capital of Italy is"
    python -m paged theatre "one two three" "red green" --num-blocks 3 --preemption swap
    python -m paged theatre "The best thing about rain is" -n 2 --temperature 0.8
"""
# Every beat keeps what changed; beyond this the file is too long to be read, and slow to open.
MOST_TOKENS = 2_000
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def add_command(commands) -> None:
    """Add `theatre` to the subcommands of the command line."""
    parser = commands.add_parser("theatre", help="run prompts and write a page that shows the run",
                                 description=DESCRIPTION,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", metavar="prompt",
                        help="they arrive in this order, --every steps apart")
    parser.add_argument("-o", "--output", default="theatre.html", metavar="FILE",
                        help="the file to write (%(default)s)")
    parser.add_argument(
        "--model", default="default",
        help="Hugging Face directory, Hub id, .gguf file, or 'default' (%(default)s)")
    parser.add_argument("--chat", action="store_true",
                        help="put each prompt through the model's chat template (makes it longer)")
    parser.add_argument("--every", type=int, default=0, metavar="STEPS",
                        help="steps between two arrivals (%(default)s: all at once)")
    sampling = parser.add_argument_group("answers")
    sampling.add_argument("--max-tokens", type=int, default=6,
                          help="tokens generated for each prompt (%(default)s)")
    sampling.add_argument("-n", type=int, default=1, metavar="COPIES",
                          help="completions of each prompt, which share its blocks (%(default)s)")
    sampling.add_argument("--beam-width", type=int, metavar="BEAMS",
                          help="search with so many beams instead of sampling")
    sampling.add_argument("--temperature", type=float, default=0.0,
                          help="0 is greedy (%(default)s)")
    sampling.add_argument("--seed", type=int, default=0, help="of the draws (%(default)s)")
    sizes = parser.add_argument_group("the engine")
    sizes.add_argument("--num-blocks", type=int, default=8, help="blocks in the pool (%(default)s)")
    sizes.add_argument("--block-size", type=int, default=4, help="tokens a block (%(default)s)")
    sizes.add_argument("--max-num-seqs", type=int, default=4, metavar="REQUESTS",
                       help="requests that run at once (%(default)s)")
    sizes.add_argument("--max-num-batched-tokens", type=int, default=16, metavar="TOKENS",
                       help="tokens of one step; longer prompts come in chunks (%(default)s)")
    sizes.add_argument("--preemption", choices=("recompute", "swap"), default="recompute",
                       help="what happens to a request that must give way (%(default)s)")
    sizes.add_argument("--prefix-cache", choices=("hash", "radix", "off"), default="hash",
                       help="how common prefixes are found (%(default)s)")
    sizes.add_argument("--device", default="cpu", help="cpu, cuda or auto (%(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the prompts and write the page. ValueError and OSError say what is wrong in a
    sentence."""
    from paged.bench.common import check_output
    check_output(args.output)
    if args.every < 0:
        raise ValueError(f"--every is {args.every}: arrivals are 0 or more steps apart")
    if len(args.prompts) > len(NAMES):
        raise ValueError(f"{len(args.prompts)} prompts: the page has letters for {len(NAMES)}")
    params = _params(args)
    from paged.lab.theatre import Recorder, page
    from paged.llm import LLM
    from paged.trace import write_whole
    llm = LLM(args.model, device=args.device, num_blocks=args.num_blocks,
              block_size=args.block_size, max_num_seqs=args.max_num_seqs,
              max_num_batched_tokens=args.max_num_batched_tokens, preemption=args.preemption,
              enable_prefix_caching=args.prefix_cache != "off", enforce_eager=True,
              prefix_cache="hash" if args.prefix_cache == "off" else args.prefix_cache)
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"{args.model} has no tokenizer, and prompts are text: take a model with one")
    prompts = [
        tokenizer.chat([{"role": "user", "content": text}]) if args.chat else tokenizer.encode(text)
        for text in args.prompts
    ]
    total = sum(
        len(prompt) + args.max_tokens * max(args.n, args.beam_width or 1) for prompt in prompts)
    if total > MOST_TOKENS:
        raise ValueError(f"{total} tokens, prompts and answers together, make a page that nobody "
                         f"reads: stay below {MOST_TOKENS}")
    recorder = Recorder()
    engine = recorder.engine_of(llm)
    for prompt in prompts:
        engine.check_request(prompt, params)
    outputs, waiting = [], list(zip(NAMES, prompts))
    arrived = 0
    while waiting or engine.has_unfinished():
        while waiting and recorder.step >= arrived * args.every:
            name, prompt = waiting.pop(0)
            engine.add_request(prompt, params, name)
            outputs.append(engine.output(name))
            arrived += 1
        engine.step()
    recording = recorder.recording("Your run", " · ".join(args.prompts))
    write_whole(args.output, page([recording], f"paged theatre: {args.prompts[0]}"))
    for output, prompt in zip(outputs, args.prompts):
        for completion in output.outputs:
            print(f"{prompt}{completion.text or tokenizer.decode(completion.token_ids)}")
    steps, beats = recorder.step, len(recording["beats"])
    print(f"{beats} beats of {steps} steps: open {Path(args.output).resolve()} in a browser",
          file=sys.stderr)


def _params(args: argparse.Namespace):
    from paged.sampling import BeamSearchParams, SamplingParams
    if args.beam_width is None:
        return SamplingParams(n=args.n, max_tokens=args.max_tokens, temperature=args.temperature,
                              seed=args.seed)
    if args.n != 1 or args.temperature:
        raise ValueError(
            "--beam-width searches and does not sample: leave -n and --temperature out")
    return BeamSearchParams(beam_width=args.beam_width, max_tokens=args.max_tokens)
