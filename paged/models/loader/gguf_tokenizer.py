"""The tokenizer in the metadata of a GGUF file: byte-level BPE, or SentencePiece.

llama.cpp is the judge of what a missing key stands for (`llama-vocab.cpp`).
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from paged.models.loader.tokenizer import Tokenizer

# How each family cuts text into words before byte pairs are merged, by its name in a GGUF file:
# whether digits stand alone first, and the pattern of a word (None: GPT-2's own, which is built
# in).
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")  # a digit is a word
TEKKEN = (  # Mistral's since Nemo: a word ends where a capital follows a small letter
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
WORDS = {
    "gpt-2": (False, None), "smollm": (True, None), "llama-bpe": (False, LLAMA3),
    "llama3": (False, LLAMA3), "llama-v3": (False, LLAMA3), "qwen2": (False, QWEN2),
    "deepseek-r1-qwen": (False, QWEN2), "tekken": (False, TEKKEN)
}
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Where a word that is a token is not merged from its bytes, and texts begin with a token."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types
SPACE = "\u2581"  # how SentencePiece writes it
NAMES = {  # what templates call them, and what the file does
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
    "sep_token": "seperator", "mask_token": "mask", "cls_token": "cls"
}


def tokenizer_in(fields: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a file with these fields. Raises ValueError for a kind that is not
    supported, and for what is damaged."""
    kind = fields.get("tokenizer.ggml.model")
    words = fields.get("tokenizer.ggml.pre")
    if kind != "llama" and (kind != "gpt2" or words not in WORDS):
        raise ValueError(
            f"The GGUF file's tokenizer ({kind!r}, words {words!r}) is not supported, only "
            f"'llama', and 'gpt2' with one of {', '.join(WORDS)}: use the Hugging Face directory.")
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError("The GGUF file holds no tokens: download it again.")
    types = _one_each(fields, "token_type", [NORMAL] * len(tokens))
    for key in ("suppress_tokens", "precompiled_charsmap", "normalizer.lowercase",
                "normalizer.strip_accents"):
        if fields.get(f"tokenizer.ggml.{key}"):
            raise ValueError(f"The GGUF file's tokenizer sets {key}, which is not supported: use "
                             "the Hugging Face directory.")
    sentencepiece = kind == "llama"
    ids = _named_ids(fields, {"bos": 1, "eos": 2, "unknown": 0} if sentencepiece else {})
    named = {name: tokens[ids[theirs]] for name, theirs in NAMES.items() if theirs in ids}
    try:
        backend = (_sentencepiece(fields, tokens, types, named.get("unk_token"))
                   if sentencepiece else _byte_level(fields, tokens))
        backend.add_special_tokens([
            AddedToken(token, special=True, normalized=False) for token, type in zip(tokens, types)
            if type == CONTROL
        ])
        backend.add_tokens([
            AddedToken(token, normalized=False) for token, type in zip(tokens, types)
            if type == USER_DEFINED
        ])
    except ValueError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(
            f"The GGUF file's tokenizer is damaged ({error}): download it again.") from error
    _add_ends(backend, fields, named, sentencepiece or words in WHOLE_WORDS)
    return Tokenizer(backend, _templates(fields), named)


def _byte_level(fields: dict[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    words = fields["tokenizer.ggml.pre"]
    merges = [tuple(pair.split(" ", 1)) for pair in fields.get("tokenizer.ggml.merges", ())]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=words in WHOLE_WORDS))
    digits, pattern = WORDS[words]
    steps: list[pre_tokenizers.PreTokenizer] = []
    if digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pattern:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if pattern == QWEN2:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(fields: dict[str, Any], tokens: list[str], types: list[int],
                   unknown: str | None) -> tokenizers.Tokenizer:
    """Pieces with scores: the neighbours that make the piece of the highest score are joined first,
    and a character without a piece is spelled in bytes (Kudo and Richardson 2018).

    Joining by score is byte-pair encoding whose merges are ranked by the score of what they make.
    """
    scores = _one_each(fields, "scores", None)
    if scores is None:
        raise ValueError("The GGUF file's SentencePiece tokenizer has no scores: download it "
                         "again.")
    vocab = {token: index for index, token in enumerate(tokens)}
    pieces = {token for token, type in zip(tokens, types) if type in (NORMAL, USER_DEFINED, UNUSED)}
    merges = [(-score, -cut, token[:cut], token[cut:]) for token, score in zip(tokens, scores)
              if token in pieces for cut in range(1, len(token))
              if token[:cut] in pieces and token[cut:] in pieces]
    merges.sort(key=lambda merge: merge[:2])
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[merge[2:] for merge in merges], unk_token=unknown,
                   fuse_unk=True, byte_fallback=True))
    prefix = _switch(fields, "add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE)] * prefix
                                              + [normalizers.Replace(" ", SPACE)])
    return backend


def _one_each(fields: dict[str, Any], name: str, default: Any) -> Any:
    """A list with an entry for each token."""
    values, tokens = fields.get(f"tokenizer.ggml.{name}", default), fields["tokenizer.ggml.tokens"]
    if values is not None and (not isinstance(values, list) or len(values) != len(tokens)):
        raise ValueError(f"The GGUF file's tokenizer has {len(tokens)} tokens and another number "
                         f"of {name}: download it again.")
    return values


def _switch(fields: dict[str, Any], name: str, default: bool) -> bool:
    value = fields.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ValueError(f"The GGUF file sets tokenizer.ggml.{name} to {value!r}: it must be true "
                         "or false.")
    return value


def _named_ids(fields: dict[str, Any], defaults: dict[str, int]) -> dict[str, int]:
    """Ids of the tokens with a role, by the file's names of the roles."""
    ids, count = {}, len(fields["tokenizer.ggml.tokens"])
    for name in NAMES.values():
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        if index is None:
            if defaults.get(name, count) < count:
                ids[name] = defaults[name]
        elif isinstance(index, int) and 0 <= index < count:
            ids[name] = index
        else:
            raise ValueError(f"The GGUF file sets tokenizer.ggml.{name}_token_id to {index!r}; its "
                             f"tokenizer has {count} tokens: download it again.")
    return ids


def _add_ends(backend: tokenizers.Tokenizer, fields: dict[str, Any], named: dict[str, str],
              begins: bool) -> None:
    """Put the tokens around a text that the file asks for, and that it names."""
    wanted = {
        "bos_token": _switch(fields, "add_bos_token", begins), "eos_token": _switch(
            fields, "add_eos_token", False)
    }
    ends = {name: named[name] for name, asked in wanted.items() if asked and name in named}
    if ends:
        backend.post_processor = processors.TemplateProcessing(
            single=[
                *([ends["bos_token"]] if "bos_token" in ends else []), "$A",
                *([ends["eos_token"]] if "eos_token" in ends else [])
            ], special_tokens=[(token, backend.token_to_id(token)) for token in set(ends.values())])


def _templates(fields: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name."""
    key = "tokenizer.chat_template"
    found = {"default": fields[key]} if key in fields else {}
    found |= {
        name.removeprefix(key + "."): value
        for name, value in fields.items() if name.startswith(key + ".")
    }
    for name, template in found.items():
        if not isinstance(template, str):
            raise ValueError(f"The chat template {name!r} of the GGUF file is {template!r}: it "
                             "must be a text.")
    return found
