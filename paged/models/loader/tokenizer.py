"""Text to token ids and back, and conversations to prompts, for Hugging Face directories and GGUF
files."""

from __future__ import annotations

import json
import re
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from paged.models.loader.json_file import read_json

ROLES = ("system", "developer", "user", "assistant", "tool")

# How each family cuts text into words before byte pairs are merged, by its name in a GGUF file:
# whether digits stand alone first, and the pattern of a word (None: GPT-2's own, which is built
# in).
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+")
_QWEN2 = _LLAMA3.replace("{1,3}", "")  # a digit is a word
_GGUF_WORDS = {
    "gpt-2": (False, None), "smollm": (True, None), "llama-bpe": (False, _LLAMA3),
    "qwen2": (False, _QWEN2), "deepseek-r1-qwen": (False, _QWEN2)
}


class Tokenizer:
    """A byte-pair tokenizer, its special tokens and its chat template."""

    def __init__(self, backend: tokenizers.Tokenizer, template: str | None,
                 named_tokens: dict[str, str]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._template = template
        self._named_tokens = named_tokens  # what templates call bos_token, eos_token, ...
        added = backend.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self._special_ids = {index for index, token in added.items() if token.special}
        contents = sorted((self._added[index] for index in self._special_ids), key=len,
                          reverse=True)
        self._special = re.compile(
            "(" + ("|".join(map(re.escape, contents)) or "(?!)") + ")")  # (?!): nothing
        self._byte_level = "ByteLevel" in str(backend.decoder)
        self.eos_token_id = backend.token_to_id(named_tokens.get("eos_token", ""))
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer | None:
        """The tokenizer of a Hugging Face model directory, or None if there is none. Raises
        ValueError."""
        config = read_json(directory / "tokenizer_config.json")
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {entry.get("name"): entry.get("template")
                        for entry in template}.get("default")
        if (directory / "chat_template.jinja").is_file():
            template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
        if (file := directory / "tokenizer.json").is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises nothing narrower
                raise ValueError(f"{file} cannot be read ({error}): download it again.") from error
        elif (directory / "tokenizer.model").is_file() or (directory / "vocab.json").is_file():
            try:  # older forms, which transformers converts
                from transformers import AutoTokenizer

                backend = AutoTokenizer.from_pretrained(directory).backend_tokenizer
            except Exception as error:  # a missing package, or whatever the conversion meets
                reason = str(error).strip().split("\n")[0]
                raise ValueError(
                    f"{directory} has no tokenizer.json, and transformers cannot make one from "
                    f"its older files ({reason}): save the tokenizer again with a recent "
                    "transformers.") from error
        else:
            return None
        named = {
            name: value.get("content", "") if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        return cls(backend, template, named)

    @classmethod
    def from_gguf(cls, fields: dict[str, Any]) -> Tokenizer:
        """The tokenizer in the metadata of a GGUF file. Raises ValueError on a kind that is not
        supported."""
        kind, words = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
        if kind != "gpt2" or words not in _GGUF_WORDS:
            raise ValueError(
                f"The GGUF file's tokenizer ({kind!r}, words {words!r}) is not supported, only "
                f"'gpt2' with one of {', '.join(_GGUF_WORDS)}: use the Hugging Face directory.")
        tokens = fields["tokenizer.ggml.tokens"]
        merges = [tuple(pair.split(" ")) for pair in fields.get("tokenizer.ggml.merges", ())]
        try:
            model = models.BPE(vocab={token: index
                                      for index, token in enumerate(tokens)}, merges=merges,
                               ignore_merges=words == "llama-bpe")
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"The GGUF file's tokenizer is damaged ({error}): download it again.") from error
        backend = tokenizers.Tokenizer(model)
        digits, pattern = _GGUF_WORDS[words]
        steps: list[pre_tokenizers.PreTokenizer] = []
        if digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if pattern:
            steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        backend.decoder = decoders.ByteLevel()
        if pattern == _QWEN2:
            backend.normalizer = normalizers.NFC()
        kinds = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
        control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
        added = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 4]
        backend.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in control])
        backend.add_tokens([AddedToken(token, normalized=False) for token in added])
        ids = {
            "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"
        }
        named = {
            name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
            for name, key in ids.items() if f"tokenizer.ggml.{key}_token_id" in fields
        }
        if fields.get("tokenizer.ggml.add_bos_token", words == "llama-bpe"):
            bos = named["bos_token"]
            backend.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
        return cls(backend, fields.get("tokenizer.chat_template"), named)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. Special tokens written in it are read as such, so that a prompt
        may follow a template by hand; a model that wants a beginning-of-text token gets it. Raises
        ValueError for text that is not valid Unicode."""
        _check_text("The prompt", text)
        return self._backend.encode(text).ids

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, [{"role": ..., "content": ...}, ...], up to where the answer
        begins.

        The content of a message is text and nothing else: a special token written in it stays the
        characters it is written with, so that no message can end itself and begin another. Raises
        ValueError on malformed messages, and where the model has no chat template or its template
        objects.
        """
        _check(messages)
        written = "".join(message["content"] for message in messages)
        mark = next(
            character for character in map(chr, range(0xE000, 0xF900)) if character not in written)

        def broken(content: str) -> str:
            return self._special.sub(lambda found: found[0][0] + mark + found[0][1:], content)

        text = self._render(
            [{**message, "content": broken(message["content"])} for message in messages])
        if mark not in text:
            return self._backend.encode(text, add_special_tokens=False).ids
        token_ids: list[int] = []
        for i, piece in enumerate(self._special.split(text)):  # text, special token, text, ...
            if i % 2:
                token_id = self._backend.token_to_id(piece)
                assert token_id is not None, f"{piece!r} is a special token and has no id"
                token_ids.append(token_id)
            else:
                token_ids += self._encode_text(piece.replace(mark, ""))
        return token_ids

    def _encode_text(self, text: str) -> list[int]:
        self._backend.encode_special_tokens = True
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        finally:
            self._backend.encode_special_tokens = False

    def _render(self, messages: list[dict[str, str]]) -> str:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if not self._template:
            raise ValueError(
                "This model has no chat template: give the prompt as a string or as token ids.")

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = refuse
        try:
            template = environment.from_string(self._template)
            return template.render(messages=messages, add_generation_prompt=True,
                                   **self._named_tokens)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(
                f"The model's chat template cannot render these messages: {error}") from error

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for: none for a special token, or for an id that has no
        token."""
        if token_id in self._added:
            return b"" if token_id in self._special_ids else self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return bytes(_BYTE_OF[character] for character in token)
        if re.fullmatch("<0x[0-9A-F]{2}>", token):  # SentencePiece: a byte with no token of its own
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


def _check(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            "A conversation is a list of at least one message, each a dict with 'role' and "
            f"'content'; got {messages!r}.")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(
                f"Message {i} must be a dict with 'role' and 'content'; got {message!r}.")
        if message["role"] not in ROLES:
            raise ValueError(
                f"Message {i} has the role {message['role']!r}; known are {', '.join(ROLES)}.")
        if not isinstance(message["content"], str):
            raise ValueError(
                f"The content of message {i} must be a string; got {message['content']!r}.")
        _check_text(f"The content of message {i}", message["content"])


def _check_text(name: str, text: str) -> None:
    """Refuse halves of surrogate pairs: what bytes that are not UTF-8 become on a command line."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not valid Unicode at character {error.start} ({text[error.start]!r}): give "
            "it in UTF-8.") from None


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: itself where it is
    printable in Latin-1, and otherwise the next free character from 256 on (Radford et al.
    2019)."""
    printable = [
        byte for first, last in ("!~", "¡¬", "®ÿ") for byte in range(ord(first),
                                                                     ord(last) + 1)
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte
            for byte in printable} | {chr(256 + i): byte
                                      for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
