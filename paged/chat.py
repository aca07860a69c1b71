"""python -m paged chat: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace

from paged.call import Checked
from paged.llm import LLM
from paged.sampling import SamplingParams

DESCRIPTION = """\
Talk to a model. Enter sends; a line that ends with \\ goes on in the next one. Ctrl-C stops the
answer and keeps what there is of it; /new begins anew; Ctrl-D ends.
"""


def add_command(commands, add_engine_options, open_llm) -> None:
    """Add `chat` to the subcommands of the command line."""
    parser = commands.add_parser("chat", help="talk to a model", description=DESCRIPTION,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", help="a system message to go before everything")
    parser.add_argument("--max-tokens", type=int, default=1024,
                        help="tokens of an answer at most (%(default)s)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (what the model asks for)")
    parser.add_argument("--top-k", type=int,
                        help="likeliest tokens kept; 0 keeps all (what the model asks for)")
    parser.add_argument("--top-p", type=float, help="probability kept (what the model asks for)")
    parser.add_argument("--seed", type=int, help="of the draws (another one each time)")
    add_engine_options(parser)
    parser.set_defaults(run=lambda args: run(args, open_llm(args)))


def run(args, llm: LLM) -> None:
    """Read, answer, and begin again, until the input ends."""
    names = ("max_tokens", "temperature", "top_k", "top_p", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    conversation = Conversation(llm, replace(llm.default_sampling_params, **given), args.system)
    if sys.stdin.isatty():
        try:
            import readline  # noqa: F401  arrow keys, and the lines before
        except ImportError:  # on Windows
            pass
        print("Ctrl-C stops an answer, /new begins anew, Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            text = _read()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # an empty line, as in a shell
            print()
            continue
        if text.strip() == "/new":
            conversation.clear()
        elif text.strip():
            _answer(conversation, text)


def _read() -> str:
    lines = [input("> " if sys.stdin.isatty() else "")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… " if sys.stdin.isatty() else ""))
    return "\n".join(lines)


def _answer(conversation: Conversation, text: str) -> None:
    try:
        with closing(conversation.ask(text)) as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print("\n(stopped)", file=sys.stderr)
    except ValueError as error:  # a conversation that has become too long, above all
        print(f"paged: {error}", file=sys.stderr)


class Conversation:
    """What has been said so far.

    Args:
        params: of each answer, which gets less where the model's context leaves less.
        system: a message to go before everything.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None):
        self.llm, self.params, self.system = llm, params, system
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> Generator[str, None, None]:
        """Say something; yields the pieces of the answer. If the iterator is closed, or Ctrl-C
        strikes, what has been answered stays in the conversation; what is refused (ValueError), or
        was not answered at all, does not."""
        messages = [*self.messages, {"role": "user", "content": text}]
        said: list[str] = []
        try:
            with closing(self.llm.follow(self._request(messages))) as outputs:
                for output in outputs:
                    said.append(output.outputs[0].new_text)
                    yield said[-1]
                    if output.outputs[0].error:
                        raise ValueError(output.outputs[0].error)
        finally:
            if any(said):
                answer = {"role": "assistant", "content": "".join(said)}
                self.messages = [*messages, answer]

    def _request(self, messages: list[dict]) -> Checked:
        (request,) = self.llm.check([messages], replace(self.params, max_tokens=1))
        room = self.llm.engine.config.max_model_len - len(request.token_ids) + 1
        return request._replace(
            params=replace(self.params, max_tokens=min(self.params.max_tokens, room)))
