"""Loading a model: from a Hugging Face directory, the Hub, a GGUF file, or the default one.

Weights are copied, tensor by tensor, from the mapped file into the fused weights of the decoder.
Every tensor the decoder has must arrive, and every tensor of the checkpoint must have a place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from paged.device import enough_memory, use_device
from paged.memory import GiB
from paged.models import config as configs
from paged.models.config import ModelConfig
from paged.models.decoder import Decoder
from paged.models.loader import default_model
from paged.models.loader.json_file import read_json
from paged.models.loader.tokenizer import Tokenizer

Readers = dict[str, Callable[[], torch.Tensor]]  # a tensor's Hugging Face name, and what reads it
# Its config, its readers, its tokenizer, the ids that end a text, and the name of its dtype, if it
# says one.
Checkpoint = tuple[ModelConfig, Readers, Tokenizer | None, set[int], str | None]
# What Llama 3 divides its rotary frequencies by, in GGUF files
ROTARY_DIVISORS = "rope_freqs.weight"
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")  # looked for only to say what to do with them
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED = (*DTYPES.values(), torch.float64)


@dataclass
class Loaded:
    """A model that is ready to run."""

    decoder: Decoder
    config: ModelConfig
    # None where a directory holds no tokenizer: then prompts are token ids
    tokenizer: Tokenizer | None
    eos_token_ids: set[int]  # any of these ends a text
    num_weights: int  # tensors that were read from the checkpoint


def load(model: str, device: str | torch.device = "cpu", dtype: str | torch.dtype = "auto",
         use_tqdm: bool = True) -> Loaded:
    """Load `model`: "default", a Hugging Face directory, a .gguf file, or the id of a model on the
    Hub.

    dtype "auto" is float32 on the CPU and the checkpoint's own elsewhere (bfloat16 where it names
    none, and for GGUF files); use_tqdm shows a bar when loading takes longer than a second. Raises
    FileNotFoundError for what is not there, ValueError for what cannot be run, MemoryError for what
    has no room, and ConnectionError where a network is needed and missing.
    """
    if not isinstance(model, (str, Path)):
        raise ValueError(
            f"The model is {model!r}: give a Hugging Face directory, a .gguf file, a Hub id or "
            "'default'.")
    device = use_device(device)
    path = default_model.default_model() if model == "default" else Path(model).expanduser()
    if path.is_file() and path.suffix != ".gguf":
        raise ValueError(
            f"{model} is a file, and not a .gguf file; name the directory of the model.")
    if not model or not path.exists():
        path = _download(str(model))
    config, readers, tokenizer, eos_token_ids, stored = (_open_gguf if path.is_file() else
                                                         _open_directory)(path)
    dtype = _dtype(dtype, device, stored)
    with room_for_weights(config, device, dtype):
        decoder = Decoder(config, device, dtype)
        num_weights = _fill(decoder, readers, path, use_tqdm)
        decoder.pack()
    return Loaded(decoder, config, tokenizer, eos_token_ids, num_weights)


def room_for_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype):
    """`enough_memory` for the weights of a model."""
    size = sum(weight.nbytes for weight in Decoder(config, "meta", dtype).parameters())
    return enough_memory(f"{size / GiB:.2f} GiB of weights in {str(dtype).removeprefix('torch.')}",
                         "Choose a smaller model or a narrower dtype, or free the device", device)


def _open_gguf(path: Path) -> Checkpoint:
    # Only here: other checkpoints do not need the gguf library
    from paged.models.loader.gguf_file import GGUFFile

    file = GGUFFile(path)
    config = configs.from_gguf(file.fields, file.names)
    ends = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    eos_token_ids = {file.fields[name] for name in ends if name in file.fields}
    return config, file.tensors(config), Tokenizer.from_gguf(file.fields), eos_token_ids, None


def _open_directory(path: Path) -> Checkpoint:
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"{path} is no Hugging Face model directory: it has no config.json.")
    raw = read_json(path / "config.json")
    config, readers, tokenizer = configs.from_huggingface(raw), _safetensors(
        path), Tokenizer.from_directory(path)
    eos = read_json(path / "generation_config.json").get("eos_token_id", raw.get("eos_token_id"))
    eos_token_ids = set(eos) if isinstance(eos, list) else {eos}
    if not all(isinstance(token, int | None) for token in eos_token_ids):
        raise ValueError(
            f"The eos_token_id of {path} is {eos!r}: it must be a token id or a list of them.")
    if tokenizer is not None:
        eos_token_ids.add(tokenizer.eos_token_id)
    known = {token for token in eos_token_ids if token is not None}
    return config, readers, tokenizer, known, raw.get("dtype") or raw.get("torch_dtype")


def _fill(decoder: Decoder, readers: Readers, source: Path, use_tqdm: bool) -> int:
    """Copy every tensor to its place. Names are compared first, so that a wrong checkpoint fails at
    once."""
    places = decoder.checkpoint_tensors()
    if ROTARY_DIVISORS in readers:
        decoder.frequencies /= readers.pop(ROTARY_DIVISORS)().to(decoder.frequencies.device)
    unused = [
        name for name in readers if name not in places and not _is_redundant(name, decoder.config)
    ]
    missing = [name for name in places if name not in readers]
    if missing:
        raise ValueError(
            f"The checkpoint {source} lacks {len(missing)} of {len(places)} tensors "
            f"({_some(missing)}): it is incomplete, or its config belongs to another model.")
    if unused:
        raise ValueError(
            f"The checkpoint {source} holds {len(unused)} tensors too many for a "
            f"{decoder.config.architecture} model ({_some(unused)}): its config belongs to "
            "another model.")
    for name, place in tqdm(places.items(), desc="Loading weights", unit="tensor", delay=1,
                            disable=not use_tqdm, dynamic_ncols=True):
        tensor = readers[name]()
        if tensor.shape != place.shape:
            raise ValueError(
                f"{name} in {source} has shape {list(tensor.shape)}, and the config asks for "
                f"{list(place.shape)}.")
        if tensor.dtype not in STORED:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name} in {source} is stored as {dtype}: quantized weights are not read; use the "
                "unquantized checkpoint.")
        place.copy_(tensor)
    return len(places)


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that checkpoints carry although they follow from others."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight"
                                                    and config.tie_word_embeddings)


def _safetensors(directory: Path) -> Readers:
    """The tensors of all weight files of a directory; an index says which files belong to the
    model."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(
                f"{index} names no weight files (it has no weight_map): download the model "
                "again.")
        files = [directory / name for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        others = sorted(file.name for file in directory.iterdir() if file.suffix in OTHER_WEIGHTS)
        raise FileNotFoundError(
            f"{directory} holds a config.json and no weights in .safetensors files"
            + (f" (only {_some(others)}): save it with save_pretrained, or name the .gguf file "
               "itself." if others else ": download the model again."))
    readers: Readers = {}
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(
                f"{index} names {file.name}, which is missing: download the model again.")
        try:
            opened = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{file} is not a whole safetensors file ({error}): download the model "
                "again.") from error
        readers |= {
            name: lambda opened=opened, name=name: opened.get_tensor(name)
            for name in opened.keys()
        }
    return readers


def _download(model: str) -> Path:
    """Fetch a model from the Hugging Face Hub into its own cache; only what is read here, only
    once."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+",
                        model) or model.startswith(".") or model.endswith(".gguf"):
        raise FileNotFoundError(
            f"There is no model at {model!r}: give a Hugging Face directory, a .gguf "
            "file, a Hub id like 'Qwen/Qwen3-0.6B', or 'default'.")
    from huggingface_hub import errors, snapshot_download

    try:
        wanted = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
        return Path(snapshot_download(model, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except errors.GatedRepoError as error:
        raise ValueError(
            f"The Hub gives {model!r} only to those who have accepted its terms: do so on its "
            "page, log in with `hf auth login`, and try again.") from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"There is no directory {model!r} here and no such model on the Hugging Face "
            "Hub; check the name (a private model needs `hf auth login`).") from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise ConnectionError(
            f"{model!r} is no directory here, and the Hugging Face Hub cannot be reached "
            "to download it: connect to a network, or name a local directory, a .gguf "
            "file or 'default'.") from error


def _dtype(wanted: str | torch.dtype, device: torch.device, stored: str | None) -> torch.dtype:
    if wanted == "auto":
        wanted = "float32" if device.type == "cpu" else stored or "bfloat16"
    dtype = wanted if isinstance(wanted, torch.dtype) else DTYPES.get(str(wanted))
    if dtype is None or dtype not in DTYPES.values():
        raise ValueError(
            f"The dtype {wanted!r} is not supported; use 'auto', {', '.join(map(repr, DTYPES))}.")
    return dtype


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
