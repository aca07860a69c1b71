"""Which files of a directory are the model, and which tensor is read from which of them.

An index, where there is one, names a file for each tensor; what else lies in those files or in the
directory is no part of the model: a stale copy, another format, an adapter. Without an index the
model is `model.safetensors`, or the only weight file there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from paged.models.loader.json_file import read_json


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape, and what reads it, or a cut of it."""

    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], torch.Tensor]

    def __call__(self, cut: tuple[slice, ...] = ()) -> torch.Tensor:
        return self.read(cut)


Readers = dict[str, Stored]  # by a tensor's Hugging Face name

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")  # looked for only to say what to do with them


def safetensors(directory: Path) -> Readers:
    """A function for each tensor of the model in a directory, which reads it.

    Raises FileNotFoundError for files that are not there, and ValueError for an index or a file
    that is damaged, and where nothing says which of several files is the model.
    """
    index = directory / INDEX
    if index.is_file():
        return _named_by(index)
    path = _only_file(directory)
    return _tensors(path, list(_open(path).keys()))


def some(names: list[str]) -> str:
    """A few names of a list, for a sentence."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _named_by(index: Path) -> Readers:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{index} names no weight files (it has no weight_map): download the model again.")
    tensors: dict[str, list[str]] = {}  # by file
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain(name):
            raise ValueError(
                f"{index} places {tensor} in {name!r}: it must be the name of a .safetensors file "
                "in the same directory.")
        tensors.setdefault(name, []).append(tensor)
    readers: Readers = {}
    for name, names in sorted(tensors.items()):
        path = index.parent / name
        if not path.is_file():
            raise FileNotFoundError(
                f"{index} names {name}, which is missing: download the model again.")
        readers |= _tensors(path, names)
    return readers


def _is_plain(name: str) -> bool:
    """Whether this is the name of a file, which leads to no other directory on any system."""
    return name.lower().endswith(".safetensors") and not set(name) & set("/\\:\0")


def _only_file(directory: Path) -> Path:
    if (directory / WHOLE).is_file():
        return directory / WHOLE
    names = sorted(file.name for file in directory.iterdir()
                   if file.suffix.lower() == ".safetensors" and file.is_file())
    adapters = [name for name in names if name.lower().startswith("adapter")]
    names = [name for name in names if name not in adapters]
    if len(names) == 1:
        return directory / names[0]
    if names:
        raise ValueError(
            f"{directory} holds {len(names)} weight files ({some(names)}) and neither {WHOLE} nor "
            f"{INDEX}, which would say what the model is: download the model again.")
    others = sorted(
        file.name for file in directory.iterdir() if file.suffix.lower() in OTHER_WEIGHTS)
    said = f"{directory} holds a config.json and no weights in .safetensors files"
    if adapters:
        raise FileNotFoundError(f"{said} but those of an adapter ({some(adapters)}), which changes "
                                "a model and is none: merge it into its model and save that.")
    if others:
        raise FileNotFoundError(f"{said} (only {some(others)}): save it with save_pretrained, or "
                                "name the .gguf file itself.")
    raise FileNotFoundError(f"{said}: download the model again.")


def _tensors(path: Path, names: list[str]) -> Readers:
    opened = _open(path)
    absent = sorted(set(names) - set(opened.keys()))
    if absent:
        raise ValueError(f"{path} lacks {some(absent)}, which the index places in it: download "
                         "the model again.")

    def stored(name: str) -> Stored:

        def read(cut: tuple[slice, ...]) -> torch.Tensor:
            return opened.get_slice(name)[cut] if cut else opened.get_tensor(name)

        return Stored(tuple(opened.get_slice(name).get_shape()), read)

    return {name: stored(name) for name in names}


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}): download the model "
                         "again.") from error
