"""The command line of the judge."""

import argparse
from difflib import get_close_matches
from pathlib import Path

from practice.catalog import find, load_exercises

ANSWERS = Path(__file__).resolve().parent / "answers"


class Refused(Exception):
    """A command that cannot be carried out; the text says why and what to do instead."""


class Parser(argparse.ArgumentParser):
    """Refuses like every command: a sentence, under --json too, and no SystemExit in a notebook."""

    def error(self, message):
        raise Refused(f"{message} (`{self.prog} --help` explains)")


def seconds(text):
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 3600:  # NaN is not either
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds, above 0 and up to 3600")
    return number


def parse(arguments, about):
    """The options of the command line. An exercise alone means `run`, nothing at all `progress`."""
    common = Parser(prog="judge.py", add_help=False, allow_abbrev=False)
    common.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    common.add_argument("--answers", default=str(ANSWERS), metavar="FOLDER",
                        help="where your answers live (default: practice/answers)")
    common.add_argument("--seconds", type=seconds,
                        help="time limit of a case, instead of the default")
    options, rest = common.parse_known_args(arguments)

    parser = Parser(prog="judge.py", description=about, parents=[common], allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in ("progress", "list", "all", "doctor"):
        commands.add_parser(name)
    for name in ("start", "run", "watch", "hint", "solution"):
        commands.add_parser(name).add_argument("exercise", nargs="?")
    commands.choices["hint"].add_argument("number", nargs="?", type=int)
    commands.add_parser("reset").add_argument("exercise")
    commands.add_parser("check").add_argument("exercise", nargs="*")
    commands.add_parser("grade").add_argument("exercise")
    commands.choices["grade"].add_argument("file", nargs="?")
    commands.add_parser("export").add_argument("file")
    commands.add_parser("import").add_argument("file")
    commands.choices["import"].add_argument(
        "--replace", action="store_true",
        help="put imported answers in the place of different ones")
    exercises = load_exercises()
    if not rest:
        rest = ["progress"]
    elif not rest[0].startswith("-") and rest[0] not in commands.choices:
        try:
            find(exercises, rest[0])
        except LookupError as error:
            close = get_close_matches(rest[0], [*commands.choices, *(e.name for e in exercises)], 1)
            raise Refused(f"there is no command {rest[0]!r}; did you mean {close[0]}?"
                          if close and close[0] in commands.choices else str(error)) from None
        rest = ["run", *rest]
    parser.parse_args(rest, options)
    return options
