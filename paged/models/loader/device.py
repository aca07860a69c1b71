"""Where a model is put: the device, and a sentence where its memory does not suffice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paged.memory import GiB
from paged.models.config import ModelConfig
from paged.models.decoder import Decoder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def use_device(device: str | torch.device) -> torch.device:
    """The device of that name ("auto": a GPU where there is one); a GPU with a number becomes the
    current one.

    Raises ValueError, with what there is to choose from, for a device that is not here.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}: choose cpu, cuda, cuda:1 and so on, or auto")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"The device {str(found)!r} was asked for and PyTorch sees no GPU: use 'cpu'.")
    if found.type == "cuda" and found.index is not None:
        last = torch.cuda.device_count() - 1
        if found.index > last:
            raise ValueError(
                f"The device {str(found)!r} was asked for and the last GPU that PyTorch sees is "
                f"'cuda:{last}': use that one, or one before it.")
        torch.cuda.set_device(found)  # for kernels, graphs, events and what they allocate
    return found


@contextmanager
def enough_memory(what: str, way_out: str, device: torch.device) -> Iterator[None]:
    """Where memory runs out inside, raise MemoryError: for what there is no room, what is free, the
    way out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise MemoryError(
            f"there is no room for {what}: {free_memory(device)}. {way_out}") from error


def room_for_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype):
    """`enough_memory` for the weights of a model."""
    size = sum(weight.nbytes for weight in Decoder(config, "meta", dtype).parameters())
    return enough_memory(f"{size / GiB:.2f} GiB of weights in {str(dtype).removeprefix('torch.')}",
                         "Choose a smaller model or a narrower dtype, or free the device", device)


def free_memory(device: torch.device) -> str:
    """What is free on a device, for a sentence."""
    if device.type != "cuda":
        return f"that much is not free on {device}"
    free, total = torch.cuda.mem_get_info(device)
    return f"{free / GiB:.2f} of {total / GiB:.2f} GiB are free on {device}"


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this is how PyTorch, cuBLAS, Triton or the CPU say that memory ran out, or follows
    from it."""
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in str(error)
                                                                           for word in words):
            return True
        error = error.__context__
    return False


def choose_dtype(wanted: str | torch.dtype, device: torch.device,
                 stored: str | None) -> torch.dtype:
    """The dtype that is wanted; for "auto" float32 on the CPU, elsewhere the checkpoint's own, and
    bfloat16 where it names none. Raises ValueError for one that is not supported."""
    if wanted == "auto":
        wanted = "float32" if device.type == "cpu" else stored or "bfloat16"
    dtype = DTYPES.get(str(wanted), wanted)
    if dtype not in DTYPES.values():
        raise ValueError(
            f"The dtype {wanted!r} is not supported; use 'auto', {', '.join(map(repr, DTYPES))}.")
    return dtype
