"""A small model with a real tokenizer, behind a server on this machine, for the tests."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paged import LLM
from paged.lab.serving import served
from paged.models.decoder import random_decoder
from paged.models.loader import Loaded
from paged.models.loader.tokenizer import Tokenizer as PagedTokenizer
from paged.server.app import Server
from tests.small_models import TINY_LLAMA

CONFIG = replace(TINY_LLAMA, vocab_size=258, max_position_embeddings=512)
EOS = 257
TEMPLATE = ("{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
            "{% if add_generation_prompt %}<s>assistant:{% endif %}")


def byte_tokenizer() -> PagedTokenizer:
    """Token i is the i-th letter of the byte alphabet; 256 and 257 are <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={letter: i
                          for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return PagedTokenizer(backend, {"default": TEMPLATE}, {"eos_token": "</s>"})


def make_loaded() -> Loaded:
    """Random weights, and bytes for tokens."""
    return Loaded(random_decoder(CONFIG), CONFIG, byte_tokenizer(), {EOS}, 0)


def make_llm(num_blocks: int = 256, **options) -> LLM:
    """The same in an engine with blocks of 4."""
    return LLM(make_loaded(), device="cpu", block_size=4, num_blocks=num_blocks, **options)


class Running:
    """A server that answers at `url`."""

    def __init__(self, llm: LLM, server: Server, url: str):
        self.llm, self.server, self.url = llm, server, url
        self.port = int(url.rpartition(":")[2])

    def post(self, path: str, timeout: float = 60, key: str | None = None,
             **body) -> httpx.Response:
        """The answer to a JSON body."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.post(self.url + path, json=body, timeout=timeout, headers=headers)

    def complete(self, prompt="abc", **body) -> httpx.Response:
        """POST /v1/completions; greedy, six tokens, unless the body says otherwise."""
        usual: dict = dict(model="tiny", temperature=0, max_tokens=6, ignore_eos=True)
        return self.post("/v1/completions", prompt=prompt, **usual | body)

    def chat(self, text="abc", **body) -> httpx.Response:
        """POST /v1/chat/completions, likewise."""
        usual: dict = dict(model="tiny", temperature=0, max_tokens=6, ignore_eos=True)
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", messages=messages, **usual | body)

    def connect(self, path: str, body: bytes, length: int | None = None) -> socket.socket:
        """A socket on which a request was sent and nothing was read."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        head = (f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body) if length is None else length}\r\n\r\n")
        connection.sendall(head.encode() + body)
        return connection

    def wait_until_empty(self, seconds: float = 60) -> None:
        """Nothing is left: no request, no place taken, every block free; AssertionError if not."""
        engine, deadline = self.llm.engine, time.monotonic() + seconds

        def empty() -> bool:
            return (not engine.has_unfinished() and not self.server.desk.num_sequences
                    and not self.server.door.num_open
                    and engine.block_pool.num_free() == engine.config.num_blocks)

        while not self.llm.owner.do(empty):
            assert time.monotonic() < deadline, "something is left"
            time.sleep(0.01)
        self.llm.owner.do(engine.check_integrity)
        assert not self.llm.owner._watched and not self.llm.owner._asking


@contextlib.contextmanager
def serving(llm: LLM | None = None, **options) -> Iterator[Running]:
    """A server in a thread of its own; `options` are those of `make_server`."""
    with (make_llm() if llm is None else llm) as llm, served(llm, "tiny",
                                                             **options) as (server, url):
        yield Running(llm, server, url)
