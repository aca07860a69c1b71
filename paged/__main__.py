"""The command line: python -m paged generate | chat | serve | batch | trace | theatre | bench |
models."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys

from paged.options import add_model_options, add_sampling_options, load

BENCHMARKS = {
    "kernels": "attention kernels against the bandwidth of the card",
    "prefix": "hit rate and cost of the prefix caches, without a model",
    "scheduler": "cost of scheduling and block logic, without a model",
    "workload": "tokens a second, end to end",
    "products": "a layer's matrix products, ours against the library's, at many sizes",
    "engines": "the same prompts through any installed engine",
    "sums": "sums over ranks, in each of their ways, at many sizes",
    "fleet": "requests routed to many replicas, simulated without a model",
    "cache_dtype": "what fewer bits for K and V cost in answers, on a CPU",
    "peer": "decoding beside transformers' generate, in one run",
    "serve": "a server of OpenAI's interface under a rising load of requests",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status. A user's mistake ends in one sentence, not in a
    traceback."""
    argv = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without emoji shows ? and goes on
        sys.stdout.reconfigure(errors="replace")
    try:
        if argv[:1] == ["bench"] and argv[1:2] and argv[1] in BENCHMARKS:
            return importlib.import_module(f"paged.bench.{argv[1]}").main(argv[2:]) or 0
        if not argv:
            _parser().print_help()
            return 0
        args = _parser().parse_args(argv)
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, MemoryError, ImportError) as error:
        print(f"paged: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # PyTorch's, which may not be imported here
            raise
        print(
            f"paged: {str(error).splitlines()[0]} Free the device, or lower what takes memory: "
            "see --help", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    from paged import chat
    from paged.lab.theatre import command as theatre
    from paged.offline import command as batch
    from paged.server import command as server
    parser = argparse.ArgumentParser(prog="python -m paged",
                                     description="A paged-attention inference engine.")
    commands = parser.add_subparsers(required=True, metavar="command")

    generate = commands.add_parser(
        "generate", help="complete a prompt and stream the text",
        description="Complete a prompt and stream the text to standard output.")
    generate.add_argument("prompt", help="the prompt; - reads it from standard input")
    generate.add_argument("--system", help="a system message to go before it")
    generate.add_argument("--raw", action="store_true",
                          help="continue the prompt as it is, without a chat template")
    add_model_options(generate)
    add_sampling_options(generate)
    generate.add_argument("--stats", action="store_true",
                          help="print times and block counts to standard error")
    generate.set_defaults(run=_generate)

    trace = commands.add_parser(
        "trace", help="run prompts together and print what the engine did",
        description="Run prompts together and print every event, step by step.")
    trace.add_argument("prompts", nargs="+", metavar="prompt")
    trace.add_argument("--system", help="a system message that all prompts share")
    trace.add_argument("--raw", action="store_true",
                       help="continue the prompts as they are, without a chat template")
    trace.add_argument("--save", metavar="FILE", help="also save the events, as JSON lines")
    trace.add_argument("--metrics", metavar="FILE",
                       help="also save the figures of steps and requests, as JSON")
    add_model_options(trace)
    add_sampling_options(trace)
    trace.set_defaults(run=_trace)

    chat.add_command(commands, add_model_options, load)
    server.add_command(commands, add_model_options, load)
    batch.add_command(commands)
    theatre.add_command(commands)

    bench = commands.add_parser("bench", help="measure",
                                description="Measure; each benchmark has a --help.")
    bench.add_argument("benchmark", choices=BENCHMARKS,
                       help="; ".join(f"{k}: {v}" for k, v in BENCHMARKS.items()))
    bench.set_defaults(run=lambda args: None)  # the benchmarks parse their own options

    models = commands.add_parser("models", help="what can be loaded")
    models.set_defaults(run=_models)
    return parser


def _load(args, trace=None):
    """The LLM and the SamplingParams that the options describe."""
    from paged.sampling import SamplingParams
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature,
                            top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    return load(args, trace), params


def _prompt(args, text: str):
    if args.raw and args.system:
        raise ValueError(
            "--system goes through the chat template, which --raw leaves out: use one of the two")
    if args.raw:
        return text
    system = [{"role": "system", "content": args.system}] if args.system else []
    return system + [{"role": "user", "content": text}]


def _generate(args) -> None:
    prompt = _prompt(args, sys.stdin.read() if args.prompt == "-" else args.prompt)
    llm, params = _load(args)
    output = None
    for output in llm.stream(prompt, params):
        print(output.outputs[0].new_text, end="", flush=True)
    print()
    if output is not None and output.outputs[0].error:
        raise ValueError(output.outputs[0].error)
    if args.stats and output is not None:
        from paged.metrics import request_summary
        print(f"{request_summary(output)}\nattention: {llm.runner.attention.name}", file=sys.stderr)


def _trace(args) -> None:
    from paged.bench.common import check_output
    from paged.metrics import request_summary, save, step_table, summary_text
    from paged.trace import Trace
    for path in (args.save, args.metrics):
        check_output(path)
    trace = Trace()
    prompts = [_prompt(args, text) for text in args.prompts]
    llm, params = _load(args, trace)
    outputs = llm.generate(prompts, params, use_tqdm=not args.quiet)
    print("\n".join(trace.lines()) + "\n\n" + step_table(trace))
    for output in outputs:
        print(f"\n{request_summary(output)}\n{output.outputs[0].text}")
    print(f"\n{summary_text(trace, outputs)}")
    if args.save:
        trace.save(args.save)
        print(f"\n{len(trace.events)} events saved to {args.save}")
    if args.metrics:
        save(args.metrics, trace, outputs)
        print(f"\nthe figures of {len(outputs)} requests saved to {args.metrics}")


def _models(args) -> None:
    from paged.models.config import ARCHITECTURES
    from paged.models.loader.default_model import FILE, cache_directory
    path = cache_directory() / FILE
    print("default    SmolLM2-135M-Instruct, "
          + (f"cached at {path}" if path.exists() else "fetched when first used"))
    print(f"others     a directory, Hub id or .gguf file of {', '.join(ARCHITECTURES.values())}")


if __name__ == "__main__":
    sys.exit(main())
