"""The tokenizer of a Hugging Face directory, out of the files that several versions of transformers
have written it to.

`tokenizer.json` holds the tokenizer. Tokens that were added to it, and what templates call the
special ones, may also stand in `tokenizer_config.json`, or, where that has no
`added_tokens_decoder`, in `special_tokens_map.json` and `added_tokens.json`. Which counts when is
what transformers does (`PreTrainedTokenizerBase._from_pretrained`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

from paged.models.loader.configs import boolean
from paged.models.loader.json_file import read_json
from paged.models.loader.tokenizer import Tokenizer

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
            "mask_token")
LIST, OLD_LIST = "extra_special_tokens", "additional_special_tokens"  # since transformers 5; before


def tokenizer_of(directory: Path) -> Tokenizer | None:
    """The tokenizer of a model directory, or None if there is none. Raises ValueError."""
    config = _settings(directory)
    if (directory / "tokenizer.json").is_file():
        backend = _read(directory / "tokenizer.json")
        if (str(config.get("tokenizer_class")).removesuffix("Fast") == "LlamaTokenizer"
                and read_json(directory / "config.json").get("model_type") != "mistral"):
            _place_spaces(backend, config)
        _add_tokens(backend, config, directory)
        named = {name: token.content for name, token in _named(config, directory).items()}
        if boolean(config, "split_special_tokens"):
            backend.encode_special_tokens = True
    elif any((directory / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        backend, named = _converted(directory)
    else:
        return None
    return Tokenizer(backend, _templates(directory), named)


def _place_spaces(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Put a space before a text only, where the file puts one behind each special token as well.

    Files of Llama's SentencePiece tokenizer were written so until the mistake was seen; since
    transformers 5, `legacy` has to be asked for. And a text that begins with a space gets none.
    """
    both = [{"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
    steps = backend.normalizer and json.loads(backend.normalizer.__getstate__())
    if not steps or backend.pre_tokenizer is not None or steps.get("normalizers") != both:
        return
    scheme = "always" if boolean(config, "legacy") else "first"
    if config.get("add_prefix_space") is not None and not boolean(config, "add_prefix_space"):
        scheme = "never"
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme,
                                                     split=False)


def _settings(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, with what older files add to it."""
    config = read_json(directory / "tokenizer_config.json")
    if OLD_LIST in config:
        config.setdefault(LIST, config.pop(OLD_LIST))
    if "added_tokens_decoder" in config:
        return config
    for name, value in read_json(directory / "special_tokens_map.json").items():
        if name == LIST and isinstance(value, list) and isinstance(config.get(LIST), list):
            config[LIST] += [token for token in value if token not in config[LIST]]
        elif name == OLD_LIST:
            config.setdefault(LIST, value)
        else:
            config[name] = value
    special = {
        token.content
        for name, token in _named(config, directory).items() if name in STANDARD
    }
    special |= {token.content for token in _listed(config, directory)}
    config["added_tokens_decoder"] = {
        index: {"content": token, "normalized": token not in special, "special": token in special}
        for token, index in read_json(directory / "added_tokens.json").items()
    }
    return config


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], directory: Path) -> None:
    """Add the tokens that the settings name and tokenizer.json does not hold."""
    decoder = config["added_tokens_decoder"]
    if not isinstance(decoder, dict):
        raise ValueError(f"The added_tokens_decoder of {directory} is no object of tokens by id.")
    by_id = {}
    for index, value in decoder.items():
        if isinstance(index, bool) or not str(index).isdecimal():
            raise ValueError(f"An added token of {directory} has the id {index!r}: it must be an "
                             "integer.")
        by_id[int(index)] = _token(value, directory)
    there = backend.get_added_tokens_decoder().values()
    same, known = {repr(token) for token in there}, {token.content for token in there}
    named = _named(config, directory)
    new = []
    for token in (token for _, token in sorted(by_id.items()) if repr(token) not in same):
        token.special = token.special or token.content in {name.content for name in named.values()}
        new.append(token)
    for token in (*named.values(), *_listed(config, directory)):
        if token.content not in known | {token.content for token in new}:
            new.append(token)
    backend.add_tokens(new)
    for index, token in by_id.items():
        if token.content not in known and backend.token_to_id(token.content) != index:
            raise ValueError(
                f"{directory} gives the added token {token.content!r} the id {index}, and its "
                f"tokenizer.json leaves it {backend.token_to_id(token.content)}: save the "
                "tokenizer again with a recent transformers.")


def _named(config: dict[str, Any], directory: Path) -> dict[str, AddedToken]:
    """The special tokens that have a name: bos_token, eos_token, and any other `..._token`."""
    extra = config.get(LIST)
    values = dict.fromkeys(STANDARD) | config | (extra if isinstance(extra, dict) else {})
    return {
        name: _token(value, directory, special=True)
        for name, value in values.items() if name.endswith("_token") and value is not None and (
            name in STANDARD or isinstance(value, (str, dict)))
    }


def _listed(config: dict[str, Any], directory: Path) -> list[AddedToken]:
    """The special tokens without a name."""
    tokens = config.get(LIST) or []
    if isinstance(tokens, dict):  # by name: `_named` has them
        return []
    if not isinstance(tokens, list):
        raise ValueError(f"The special tokens of {directory} are {tokens!r}: they must be a list.")
    return [_token(token, directory, special=True) for token in tokens]


def _token(value: Any, directory: Path, special: bool = False) -> AddedToken:
    """A token that is written as its text, or as an object with its text and flags."""
    written = {"content": value, "normalized": False} if isinstance(value, str) else value
    if not isinstance(written, dict) or not isinstance(written.get("content"), str):
        raise ValueError(f"A token of {directory} is {value!r}: it must be a text, or an object "
                         "with its content.")
    flags = {name: written[name] for name in FLAGS if name in written}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise ValueError(f"The token {written['content']!r} of {directory} has the flags {flags}: "
                         "each must be true or false.")
    return AddedToken(written["content"], **flags | ({"special": True} if special else {}))


def _read(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} cannot be read ({error}): download it again.") from error


def _converted(directory: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """What transformers makes of older files, and its names of special tokens."""
    try:
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(directory)
        return theirs.backend_tokenizer, dict(theirs.special_tokens_map)
    except Exception as error:  # a missing package, or whatever the conversion meets
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{directory} has no tokenizer.json, and transformers cannot make one from "
            f"its older files ({reason}): save the tokenizer again with a recent "
            "transformers.") from error


def _templates(directory: Path) -> dict[str, str]:
    """Chat templates by name. Files of their own come before what tokenizer_config.json says."""
    found = {}
    if (directory / "chat_template.jinja").is_file():
        found["default"] = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if found:
        return found
    written = read_json(directory / "tokenizer_config.json").get("chat_template")
    if written is None:
        return {}
    if isinstance(written, str):
        return {"default": written}
    if isinstance(written, list) and all(isinstance(entry, dict) for entry in written):
        written = {entry.get("name"): entry.get("template") for entry in written}
    found = written if isinstance(written, dict) else {}
    if not found or not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise ValueError(f"The chat_template of {directory} is {str(written)[:40]!r}: it must be a "
                         "text, or a list of objects with a name and a template.")
    return found
