"""Filling a decoder: every tensor it has must arrive, and every tensor of the checkpoint must have
a place.

Weights are copied, tensor by tensor, from the mapped file into the fused weights of the decoder.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from paged.models.config import ModelConfig
from paged.models.decoder import Decoder, put
from paged.models.loader.weight_files import Readers, some

# What Llama 3 divides its rotary frequencies by, in GGUF files
ROTARY_DIVISORS = "rope_freqs.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
STORED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def settle_head(config: ModelConfig, readers: Readers) -> ModelConfig:
    """The config with tie_word_embeddings as the checkpoint has it; `readers` loses what is double.

    A config may say that the output layer reuses the embedding table, and the file hold an output
    layer all the same. If the two are equal, one is enough. If they differ, the file is right, and
    the output layer its own. If only the output layer is there, it is both. transformers decides
    alike (`tie_weights`).
    """
    if not config.tie_word_embeddings or HEAD not in readers:
        return config
    if EMBEDDING not in readers:
        readers[EMBEDDING] = readers.pop(HEAD)
        return config
    head, embedding = readers[HEAD](), readers[EMBEDDING]()
    if head.dtype != embedding.dtype:
        head, embedding = head.double(), embedding.double()
    if torch.equal(head, embedding):
        del readers[HEAD]
        return config
    return replace(config, tie_word_embeddings=False)


def check_layers(config: ModelConfig, readers: Readers, source: Path) -> None:
    """Raise ValueError where the config has more layers than the file: before they are made."""
    found = {name.split(".")[2] for name in readers if name.startswith("model.layers.")}
    if config.num_layers > len(found):
        raise ValueError(
            f"The checkpoint {source} holds {len(found)} layers, and its config says "
            f"{config.num_layers}: it is incomplete, or its config belongs to another model.")


def fill(decoder: Decoder, readers: Readers, source: Path, use_tqdm: bool) -> int:
    """Copy every tensor, or what the decoder's part has of it, to its place; returns how many.
    Names are compared first, so that a wrong checkpoint fails at once. Raises ValueError."""
    places, part = decoder.checkpoint_tensors(), decoder.part
    whole = places if part is None else Decoder(part.whole, "meta").checkpoint_tensors()
    divisors = readers.pop(ROTARY_DIVISORS, None)
    # Frequencies follow from the config, and older files carry them all the same.
    unused = [
        name for name in readers if name not in places and not name.endswith("rotary_emb.inv_freq")
    ]
    missing = [name for name in places if name not in readers]
    if missing:
        raise ValueError(
            f"The checkpoint {source} lacks {len(missing)} of {len(places)} tensors "
            f"({some(missing)}): it is incomplete, or its config belongs to another model.")
    if unused:
        raise ValueError(
            f"The checkpoint {source} holds {len(unused)} tensors too many for a "
            f"{decoder.config.architecture} model ({some(unused)}): its config belongs to "
            "another model.")
    if divisors is not None:
        values = divisors().float()
        if values.shape != decoder.frequencies.shape or not bool((values > 0).all()):
            raise ValueError(
                f"{ROTARY_DIVISORS} in {source} must be {len(decoder.frequencies)} numbers above "
                f"0, one a pair of a head; its shape is {list(values.shape)}.")
        decoder.frequencies /= values.to(decoder.frequencies.device)
    for name, place in tqdm(places.items(), desc="Loading weights", unit="tensor", delay=1,
                            disable=not use_tqdm, dynamic_ncols=True):
        if readers[name].shape != whole[name].shape:
            raise ValueError(
                f"{name} in {source} has shape {list(readers[name].shape)}, and the config asks "
                f"for {list(whole[name].shape)}.")
        tensor = readers[name](() if part is None else part.cut(name))
        if tensor.dtype not in STORED:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name} in {source} is stored as {dtype}: quantized weights are not read; use the "
                "unquantized checkpoint.")
        put(place, tensor)
    return len(places)
