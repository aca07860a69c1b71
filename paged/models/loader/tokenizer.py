"""Text to token ids and back, and conversations to prompts.

A Tokenizer does not change once it is made, so threads may share one.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import tokenizers
from tokenizers import AddedToken

from paged.models.loader import chat_template as templates
from paged.models.loader.messages import check_conversation, check_objects, check_text, rewrite

PRIVATE = range(0xE000, 0xF900)
"""Characters that mean nothing by themselves."""


class Tokenizer:
    """A tokenizer of the library `tokenizers`, its special tokens and its chat templates.

    Args:
        backend: encodes and decodes; it must not be changed after.
        chat_templates: by name; "default" is used where none is asked for.
        named_tokens: what templates call bos_token, eos_token, ...
    """

    def __init__(self, backend: tokenizers.Tokenizer, chat_templates: dict[str, str],
                 named_tokens: dict[str, str]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._templates = chat_templates
        self._named_tokens = named_tokens
        added = backend.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self._special_ids = {index for index, token in added.items() if token.special}
        self._special_texts = {self._added[index] for index in self._special_ids}
        # The longest first: where two begin, the library takes the longer one too.
        contents = sorted(filter(None, self._added.values()), key=len, reverse=True)
        self._tokens_in_text = re.compile("|".join(map(re.escape, contents)) or "(?!)")
        self._byte_level = "ByteLevel" in str(backend.decoder)
        self.eos_token_id = backend.token_to_id(named_tokens.get("eos_token", ""))
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)
        self._renamed = lru_cache(maxsize=2)(self._rename_special_tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Special tokens written in it are read as such, so that a prompt
        may follow a template by hand; a model that wants a beginning-of-text token gets it, unless
        add_special_tokens says no. Raises ValueError for text that is not valid Unicode."""
        check_text("The prompt", text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def chat(self, messages: list[dict[str, Any]], **options) -> list[int]:
        """Token ids of a conversation, up to where the answer begins. Arguments are those of
        `render`.

        The text is what transformers renders, and it is encoded once and whole, so that the pieces
        are those of transformers. But for one thing, on purpose: a special token that someone wrote
        in a message (its content, its tool calls, the tools, the documents) stays the characters it
        is written with, so that no message can end itself and begin another. transformers reads it
        as the token.

        Raises ValueError on malformed messages, and where the model has no chat template or its
        template objects.
        """
        text = self.render(messages, **options)
        all_text = self._backend.encode_special_tokens  # a setting of few models
        foreign = set() if all_text else self._foreign_tokens(text, messages, options)
        if not foreign:
            return self._backend.encode(text, add_special_tokens=False).ids
        # The template's special tokens get other names, and those of the messages are text.
        backend, names, ids = self._renamed(_unused_character(text))
        renamed = self._tokens_in_text.sub(
            lambda found: found[0]
            if found.start() in foreign else names.get(found[0], found[0]), text)
        return [
            ids.get(index, index) for index in backend.encode(renamed, add_special_tokens=False).ids
        ]

    def render(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
               documents: list[dict[str, Any]] | None = None, chat_template: str | None = None,
               add_generation_prompt: bool | None = None, continue_final_message: bool = False,
               chat_template_kwargs: dict[str, Any] | None = None) -> str:
        """The text of a conversation, as transformers' `apply_chat_template` renders it.

        Args:
            messages: [{"role": ..., "content": ...}, ...]. A content is text, or a list of
                {"type": "text", "text": ...}; an assistant's message with tool_calls needs none.
            tools: what the model may call, as JSON schemas.
            documents: what it may quote from, as objects with title and text.
            chat_template: the name of one of the model's templates, or a template.
            add_generation_prompt: end with what begins an answer; None does, unless the last
                message is continued.
            continue_final_message: end where the last message's content ends.
            chat_template_kwargs: more variables for the template, as enable_thinking.

        Raises ValueError as `chat` does.
        """
        check_conversation(messages)
        check_objects("tools", tools)
        check_objects("documents", documents)
        variables = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(variables, dict) or set(variables) & set(templates.OURS):
            raise ValueError(
                f"chat_template_kwargs is {variables!r}: it must be a dict of variables beside "
                f"{', '.join(templates.OURS)}.")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message ends the prompt within the last message, and "
                             "add_generation_prompt begins another: choose one.")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        write = templates.render_continued if continue_final_message else templates.render_flat
        return write(self._template(chat_template, tools), messages, self._named_tokens, tools,
                     documents, bool(add_generation_prompt), variables)

    def token_at_start(self, text: str) -> str | None:
        """The added token that a text begins with, special or not, if it begins with one."""
        found = self._tokens_in_text.match(text)
        return found[0] if found else None

    def added_id(self, token: str, special: bool) -> int | None:
        """Id of an added token, or None if it has to be special and is not."""
        if special and token not in self._special_texts:
            return None
        return self._backend.token_to_id(token)

    def _template(self, wanted: str | None, tools: list | None) -> str:
        """transformers' choice: one that is asked for, tool_use where there are tools, default."""
        names = self._templates
        if wanted is not None and not isinstance(wanted, str):
            raise ValueError(f"chat_template is {wanted!r}: it must be a template, or the name of "
                             "one of the model's.")
        if wanted is not None:
            return names.get(wanted, wanted)
        if tools is not None and "tool_use" in names:
            return names["tool_use"]
        if "default" in names:
            return names["default"]
        if names:
            raise ValueError(f"This model has the chat templates {', '.join(names)} and none by "
                             "default: choose one by chat_template.")
        raise ValueError(
            "This model has no chat template: give the prompt as a string or as token ids.")

    def _foreign_tokens(self, text: str, messages: list, options: dict[str, Any]) -> set[int]:
        """Where in the text of a conversation special tokens stand that its messages brought along.

        The conversation is rendered again with a mark in the place of the first character of each
        of them, which leaves all lengths as they are: where a mark comes out, they stand.
        """
        given = {"messages": messages} | {
            name: options[name]
            for name in ("tools", "documents") if options.get(name) is not None
        }
        written: list[str] = []

        def noted(part: str) -> str:
            written.append(part)
            return part

        rewrite(given, noted)
        found = [
            special for part in written for special in self._tokens_in_text.findall(part)
            if special in self._special_texts
        ]
        if not found:
            return set()
        mark = _unused_character(text + "".join(written))

        def marked(match: re.Match) -> str:
            special = match[0] in self._special_texts
            return mark + match[0][1:] if special else match[0]

        again = rewrite(given, lambda part: self._tokens_in_text.sub(marked, part))
        second = self.render(**options | again)
        places = {at for at, character in enumerate(second) if character == mark}
        if len(second) != len(text) or any(
                one != two for at, (one, two) in enumerate(zip(text, second)) if at not in places):
            raise ValueError(
                f"A message holds the special token {found[0]!r}, and the model's chat template "
                "depends on it, so that it cannot be told from the template's own: write it "
                "otherwise.")
        return places

    def _rename_special_tokens(
            self, private: str) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[int, int]]:
        """A tokenizer like ours whose special tokens have names between two private characters;
        these names, and our ids of its added tokens."""
        settings = json.loads(self._backend.to_str())
        added, settings["added_tokens"] = settings["added_tokens"], []
        names = {
            token["content"]: f"{private}{index}{private}"
            for index, token in enumerate(added) if token["special"]
        }
        model = settings["model"]
        if isinstance(model["vocab"], list):  # Unigram would find them among its pieces
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        backend = tokenizers.Tokenizer.from_str(json.dumps(settings))
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        contents = [names.get(token["content"], token["content"]) for token in added]
        backend.add_tokens([
            AddedToken(content, **{flag: token[flag]
                                   for flag in flags}) for content, token in zip(contents, added)
        ])
        ids = {
            at: token["id"]
            for content, token in zip(contents, added)
            if (at := backend.token_to_id(content)) is not None
        }
        return backend, names, ids

    def _token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes a token stands for: none for an id that has no token, or for a special one
        that is skipped."""
        token = self._backend.id_to_token(token_id)
        if token is None or skip_special_tokens and token_id in self._special_ids:
            return b""
        if self._byte_level:
            # An added token is text, and so is an entry that was never merged from bytes.
            if token_id in self._added or not _BYTE_OF.keys() >= set(token):
                return token.encode()
            return bytes(_BYTE_OF[character] for character in token)
        if re.fullmatch("<0x[0-9A-F]{2}>", token):  # SentencePiece: a byte with no token of its own
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


def _unused_character(text: str) -> str:
    """One that means nothing by itself, and that a text does not hold."""
    there = set(text)
    return next(character for character in map(chr, PRIVATE) if character not in there)


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
