"""python -m paged chat: history, interruptions and the end of a conversation."""

import signal
import threading
from dataclasses import replace

import pytest

from paged import SamplingParams
from paged.__main__ import main
from paged.chat import Conversation
from paged.runner import ModelRunner
from tests.servers import make_llm, make_loaded

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with make_llm() as llm:
        yield llm


@pytest.fixture
def typed(monkeypatch):
    """A function that runs the command on lines; an exception among them is raised."""
    monkeypatch.setattr("paged.llm.load", lambda *arguments, **options: make_loaded())

    def run(lines, *argv: str) -> int:
        waiting = iter(lines)

        def read(prompt: str = "") -> str:
            line = next(waiting, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        return main([
            "chat", "--quiet", "--num-blocks", "64", "--max-tokens", "5", "--temperature", "0",
            *argv
        ])

    return run


def test_each_answer_knows_what_was_said(llm):
    conversation, said = Conversation(llm, GREEDY, "be kind"), []
    for question in ("one", "two"):
        said += [{"role": "user", "content": question}]
        (wanted,) = llm.chat([{"role": "system", "content": "be kind"}, *said], GREEDY,
                             use_tqdm=False)
        pieces = list(conversation.ask(question))
        assert "".join(pieces) == wanted.outputs[0].text and len(pieces) > 1
        said += [{"role": "assistant", "content": wanted.outputs[0].text}]
    assert conversation.messages[1:] == said
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "be kind"}]


def test_what_is_stopped_stays_and_what_is_refused_does_not(llm):
    conversation = Conversation(llm, replace(GREEDY, max_tokens=300))
    answer = conversation.ask("one")
    pieces = [next(answer), next(answer)]
    answer.close()
    assert conversation.messages[1] == {"role": "assistant", "content": "".join(pieces)}
    before = list(conversation.messages)
    with pytest.raises(ValueError, match="max_model_len"):
        list(conversation.ask("x" * 600))
    assert conversation.messages == before
    assert not llm.engine.has_unfinished()
    left = 512 - len(llm.tokenizer.chat([*before, {"role": "user", "content": "y" * 200}]))
    list(conversation.ask("y" * 200))  # more than there is room for: what there is room for
    ids = llm.tokenizer.encode(conversation.messages[-1]["content"])
    assert 0 < left < 300 and len(ids) >= left - 3  # cut characters are written in three bytes


def test_lines_until_the_end(typed, capsys):
    assert typed(["", "hel\\", "lo", KeyboardInterrupt(), "again", "/new", "hello"]) == 0
    shown = capsys.readouterr().out
    with make_llm() as llm:
        wanted = [
            llm.chat([{"role": "user", "content": text}], replace(GREEDY, ignore_eos=False),
                     use_tqdm=False)[0].outputs[0].text for text in ("hel\nlo", "hello")
        ]
    assert shown.startswith(wanted[0] + "\n") and shown.endswith(f"\n{wanted[1]}\n\n")


def test_ctrl_c_stops_the_answer_and_not_the_program(typed, capsys, monkeypatch):
    execute, steps = ModelRunner.execute, []

    def interrupting(self, batch):
        steps.append(batch)
        if len(steps) == 4:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return execute(self, batch)

    monkeypatch.setattr(ModelRunner, "execute", interrupting)
    assert typed(["one", "two"], "--max-tokens", "200") == 0
    assert "(stopped)" in capsys.readouterr().err and 4 < len(steps) < 390


def test_too_long_is_a_sentence_and_the_conversation_goes_on(typed, capsys):
    assert typed(["x" * 600, "hello"]) == 0
    shown = capsys.readouterr()
    assert "max_model_len is 512" in shown.err and len(shown.out) > 3
