"""The command line: python -m paged generate | chat | serve | trace | theatre |
bench | models."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys

BENCHMARKS = {
    "kernels": "attention kernels against the bandwidth of the card",
    "prefix": "hit rate and cost of the prefix caches, without a model",
    "scheduler": "cost of scheduling and block logic, without a model",
    "workload": "tokens a second, end to end",
    "products": "a layer's matrix products, ours against the library's, at many sizes",
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
    _add_model_options(generate)
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
    _add_model_options(trace)
    trace.set_defaults(run=_trace)

    chat.add_command(commands, _add_engine_options, _open)
    server.add_command(commands, _add_engine_options, _open)
    theatre.add_command(commands)

    bench = commands.add_parser("bench", help="measure",
                                description="Measure; each benchmark has a --help.")
    bench.add_argument("benchmark", choices=BENCHMARKS,
                       help="; ".join(f"{k}: {v}" for k, v in BENCHMARKS.items()))
    bench.set_defaults(run=lambda args: None)  # the benchmarks parse their own options

    models = commands.add_parser("models", help="what can be loaded")
    models.set_defaults(run=_models)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=256,
                        help="tokens generated at most (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="likeliest tokens kept; 0 keeps all")
    parser.add_argument("--top-p", type=float, default=1.0, help="probability kept (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (%(default)s)")
    _add_engine_options(parser)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="default",
        help="Hugging Face directory, Hub id, .gguf file, or 'default' (%(default)s)")
    parser.add_argument("--device", default="auto",
                        help="cpu, cuda, cuda:1 and so on, or auto (%(default)s)")
    parser.add_argument("--dtype", default="auto",
                        help="float32, bfloat16, float16 or auto (%(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block (%(default)s)")
    parser.add_argument("--num-blocks", type=int,
                        help="blocks in the pool (as many as the memory allows)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE",
                        help="share of the card's memory that may be in use (%(default)s)")
    parser.add_argument(
        "--max-model-len", type=int, metavar="TOKENS",
        help="tokens of a request, prompt and output (what the model was trained for)")
    parser.add_argument("--max-num-seqs", type=int, default=256, metavar="REQUESTS",
                        help="requests that run at once (%(default)s)")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="TOKENS",
                        help="tokens of one step (8192 on a GPU, 2048 on a CPU)")
    parser.add_argument("--attention-backend", default="auto", metavar="NAME",
                        help="auto, triton, flash, torch or reference (%(default)s)")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--preemption", choices=("recompute", "swap"), default="recompute",
                        help="what happens to a request that must give way (%(default)s)")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", metavar="DTYPE",
        help="of K and V in the cache: float32, bfloat16, float16, or auto, the "
        "model's (%(default)s)")
    parser.add_argument("--quiet", action="store_true",
                        help="no progress bars, and no times of start-up")


def _load(args, trace=None):
    """The LLM and the SamplingParams that the options describe."""
    from paged.sampling import SamplingParams
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature,
                            top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    return _open(args, trace), params


def _open(args, trace=None):
    """The LLM that the options describe."""
    from paged.llm import LLM
    from paged.trace import NO_TRACE
    names = ("device", "dtype", "block_size", "num_blocks", "gpu_memory_utilization",
             "max_model_len", "max_num_seqs", "max_num_batched_tokens", "attention_backend",
             "enforce_eager", "preemption", "kv_cache_dtype")
    llm = LLM(args.model, **{name: getattr(args, name)
                             for name in names}, trace=trace or NO_TRACE, use_tqdm=not args.quiet)
    if not args.quiet:
        phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in llm.start_up.items())
        print(f"ready after {sum(llm.start_up.values()):.1f} s: {phases}", file=sys.stderr)
    return llm


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
