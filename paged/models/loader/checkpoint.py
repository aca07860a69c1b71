"""A checkpoint that was opened and not yet read: its config, what reads its tensors, its tokenizer,
what ends a text, and what its author samples with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged.models.config import ModelConfig
from paged.models.loader.configs import boolean, from_huggingface
from paged.models.loader.ends import ends_by_text, turn_end
from paged.models.loader.gguf_config import from_gguf
from paged.models.loader.json_file import read_json
from paged.models.loader.token_files import tokenizer_of
from paged.models.loader.tokenizer import Tokenizer
from paged.models.loader.weight_files import Readers, safetensors
from paged.sampling import SamplingParams


@dataclass
class Checkpoint:
    """What is known before a weight is read."""

    config: ModelConfig
    readers: Readers
    tokenizer: Tokenizer | None
    eos_token_ids: set[int]
    dtype: str | None  # that of the weights, where it says one
    generation_defaults: dict[str, Any]


def open_directory(path: Path) -> Checkpoint:
    """Open a Hugging Face directory. Raises FileNotFoundError and ValueError."""
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"{path} is no Hugging Face model directory: it has no config.json.")
    raw, generation = read_json(path / "config.json"), read_json(path / "generation_config.json")
    config = from_huggingface(raw)
    readers, tokenizer = safetensors(path), tokenizer_of(path)
    eos = generation.get("eos_token_id")
    eos = raw.get("eos_token_id") if eos is None else eos
    ends = {
        _token_id(f"The eos_token_id of {path}", token, config.vocab_size)
        for token in (eos if isinstance(eos, list) else [eos]) if token is not None
    }
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    if dtype is not None and not isinstance(dtype, str):
        raise ValueError(f"The dtype of {path} is {dtype!r}: it must be the name of one.")
    return Checkpoint(config, readers, tokenizer, ends | ends_of(tokenizer, config.vocab_size),
                      dtype, generation_defaults(generation, path / "generation_config.json"))


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file. Raises ValueError."""
    # Only here: other checkpoints do not need the gguf library
    from paged.models.loader.gguf_file import GGUFFile
    from paged.models.loader.gguf_tokenizer import tokenizer_in

    file = GGUFFile(path)
    config = from_gguf(file.fields, file.names)
    tokenizer = tokenizer_in(file.fields)
    ends = {
        _token_id(f"The {name}_token_id of {path}", file.fields[f"tokenizer.ggml.{name}_token_id"],
                  config.vocab_size)
        for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
        if f"tokenizer.ggml.{name}_token_id" in file.fields
    }
    ends |= ends_by_text(file.fields["tokenizer.ggml.tokens"],
                         file.fields.get("tokenizer.ggml.token_type"))
    sampling = {
        name: file.fields[f"general.sampling.{theirs}"]
        for name, theirs in {"temperature": "temp", "top_p": "top_p", "top_k": "top_k"}.items()
        if f"general.sampling.{theirs}" in file.fields
    }
    return Checkpoint(config, file.tensors(config), tokenizer,
                      ends | ends_of(tokenizer, config.vocab_size), None,
                      generation_defaults(sampling, path))


def generation_defaults(values: dict[str, Any], source: Path) -> dict[str, Any]:
    """temperature, top_p and top_k of a generation config, those that it sets; none where it says
    that the model does not sample. Raises ValueError, naming the file, for what they cannot be."""
    if values.get("do_sample") is not None and not boolean(values, "do_sample"):
        return {}
    found = {
        name: values[name]
        for name in ("temperature", "top_p", "top_k") if values.get(name) is not None
    }
    for name, value in found.items():
        try:
            SamplingParams(**{name: value})
        except ValueError as error:
            raise ValueError(f"{source} sets what cannot be: {error}.") from None
    return found


def ends_of(tokenizer: Tokenizer | None, vocab_size: int) -> set[int]:
    """What the tokenizer knows to end a text: its eos_token, and what its template closes turns
    with."""
    if tokenizer is None:
        return set()
    return {
        token
        for token in (tokenizer.eos_token_id, turn_end(tokenizer))
        if token is not None and token < vocab_size
    }


def _token_id(name: str, value: Any, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ValueError(f"{name} is {value!r}: it must be a token id of a vocabulary of "
                         f"{vocab_size}, or a list of them.")
    return value
