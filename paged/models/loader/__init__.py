"""Loading a model: from a Hugging Face directory, the Hub, a GGUF file, or the default one.

    what           config                       weights                    text
    a directory    configs                      weight_files               token_files
    a GGUF file    gguf_config                  gguf_file                  gguf_tokenizer
    both           rope                         weights (into the decoder) tokenizer, chat_template,
                                                                           ends (of a text)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from paged.checks import whole_number
from paged.device import use_device
from paged.models.config import ModelConfig
from paged.models.decoder import Decoder
from paged.models.loader import default_model
from paged.models.loader.checkpoint import Checkpoint, ends_of, open_directory, open_gguf
from paged.models.loader.download import TOKENIZER, download, is_id
from paged.models.loader.placing import choose_dtype, room_for_weights
from paged.models.loader.rope import longest_positions
from paged.models.loader.token_files import tokenizer_of
from paged.models.loader.tokenizer import Tokenizer
from paged.models.loader.weights import check_layers, fill, settle_head
from paged.models.rotary import LENGTH_DEPENDENT
from paged.parallel.shard import Part

__all__ = ["Loaded", "find", "load", "room_for_weights"]


@dataclass
class Loaded:
    """A model that is ready to run."""

    decoder: Decoder
    config: ModelConfig  # of the whole model
    # None where a directory holds no tokenizer: then prompts are token ids
    tokenizer: Tokenizer | None
    eos_token_ids: set[int]  # any of these ends a text
    num_weights: int  # tensors that were read from the checkpoint
    # What its author samples with, in the names of SamplingParams: temperature, top_p, top_k
    generation_defaults: dict[str, Any] = field(default_factory=dict)


def load(model: str, device: str | torch.device = "cpu", dtype: str | torch.dtype = "auto",
         use_tqdm: bool = True, max_model_len: int | None = None, rank: int = 0, num_ranks: int = 1,
         revision: str | None = None, tokenizer: str | Tokenizer | None = None) -> Loaded:
    """Load `model`: "default", a Hugging Face directory, a .gguf file, or the id of a model on the
    Hub.

    A directory holds a dense Llama, Qwen2, Qwen2.5, Qwen3 or Mistral model without sliding windows,
    in .safetensors files; its rotary embedding may be scaled in any of the ways of
    `paged.models.rotary`. A GGUF file holds a model of the architectures llama (Mistral's too),
    qwen2 or qwen3.

    Args:
        device: "cpu", "cuda", "cuda:1" and so on, or "auto".
        dtype: "auto" is float32 on the CPU and the checkpoint's own elsewhere (bfloat16 where it
            names none, and for GGUF files).
        use_tqdm: show a bar when loading takes longer than a second.
        max_model_len: tokens of the longest request. Needed where the rotary embedding depends on
            them (dynamic and longrope scaling): it is fixed for this length, and
            `config.max_position_embeddings` says so. None takes the checkpoint's own.
        rank, num_ranks: load only the part of a rank, where several share the model.
        revision: of a model on the Hub, a branch, a tag or a commit; None is the newest.
        tokenizer: another one than the checkpoint's: a directory or a Hub id that has one (of its
            newest revision), or a Tokenizer.

    Raises FileNotFoundError for what is not there, ValueError for what cannot be run, MemoryError
    for what has no room, and ConnectionError where a network is needed and missing.
    """
    device = use_device(device)
    other = None if tokenizer is None else _other_tokenizer(tokenizer)
    path = find(model, revision)
    found: Checkpoint = (open_gguf if path.is_file() else open_directory)(path)
    if other is not None:
        found.tokenizer = other
        found.eos_token_ids |= ends_of(found.tokenizer, found.config.vocab_size)
    config = _fixed_for(settle_head(found.config, found.readers), max_model_len)
    check_layers(config, found.readers, path)
    dtype = choose_dtype(dtype, device, found.dtype)
    part = None if num_ranks == 1 else Part(config, rank, num_ranks)
    held = config if part is None else part.config
    with room_for_weights(held, device, dtype):
        decoder = Decoder(held, device, dtype, part)
        num_weights = fill(decoder, found.readers, path, use_tqdm)
        decoder.pack()
    return Loaded(decoder, config, found.tokenizer, found.eos_token_ids, num_weights,
                  found.generation_defaults)


def find(model: str, revision: str | None = None) -> Path:
    """Where a model lies that is named as for `load`; downloaded, if it is not here. Raises what
    `load` raises for a name."""
    if not isinstance(model, (str, Path)):
        raise ValueError(
            f"The model is {model!r}: give a Hugging Face directory, a .gguf file, a Hub id or "
            "'default'.")
    default, path = model == "default", Path(model).expanduser()
    if path.is_file() and path.suffix.lower() != ".gguf" and not default:
        raise ValueError(
            f"{model} is a file, and not a .gguf file; name the directory of the model.")
    there = default or (bool(model) and path.exists())
    if revision is not None and (there or not isinstance(revision, str)
                                 or not re.fullmatch(r"\w[\w./-]*", revision)):
        raise ValueError(f"revision is {revision!r}: it must be a branch, a tag or a commit of a "
                         f"model on the Hub" + (f", and {model} is here" if there else ""))
    if default:
        return default_model.default_model()
    return path if there else download(str(model), revision)


def _other_tokenizer(tokenizer: str | Tokenizer) -> Tokenizer:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    named = isinstance(tokenizer, (str, Path)) and str(tokenizer)
    path = Path(tokenizer).expanduser() if named else None
    if path is None or not (path.is_dir() or is_id(str(tokenizer))):
        raise ValueError(f"tokenizer is {tokenizer!r}: it must be a directory or a Hub id that has "
                         f"one, or a Tokenizer")
    found = tokenizer_of(path if path.is_dir() else download(str(tokenizer), wanted=TOKENIZER))
    if found is None:
        raise FileNotFoundError(f"{tokenizer} holds no tokenizer: no tokenizer.json, "
                                f"tokenizer.model or vocab.json")
    return found


def _fixed_for(config: ModelConfig, max_model_len: int | None) -> ModelConfig:
    """The config for requests of so many tokens: another one only where rotation depends on it."""
    scaling = config.rope_scaling
    if max_model_len is None or scaling is None or scaling["rope_type"] not in LENGTH_DEPENDENT:
        return config
    whole_number("max_model_len", max_model_len, least=1)
    longest = longest_positions(scaling, config.max_position_embeddings)
    return replace(config, max_position_embeddings=min(max_model_len, longest))
