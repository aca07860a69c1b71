"""The device: which one, what is free on it, what to say when memory runs out, what a card can
do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

from paged.memory import GiB


def why_no_triton(device: torch.device) -> str | None:
    """None when Triton's kernels run on this device, else one sentence saying why not."""
    if find_spec("triton") is None:
        return "the triton package is not installed (it comes with PyTorch for CUDA on Linux)"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return ("kernels run on a GPU; with TRITON_INTERPRET=1 set before Python starts, on the "
                "CPU too, slowly")
    return None


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


class Card(NamedTuple):
    """What the shape of a launch depends on.

    Attributes:
        processors: multiprocessors.
        capability: the major compute capability: 7 Turing (T4), 8 Ampere and Ada, 9 Hopper. From 8
            on copies to shared memory pass by the registers; from 9 on a kernel may start while the
            one before it ends.
        shared_memory: bytes of shared memory that a program may use.
        l2_cache: bytes that all of them share.
    """

    processors: int
    capability: int
    shared_memory: int
    l2_cache: int = 50 << 20

    @property
    def starts_early(self) -> bool:
        """Whether it has programmatic dependent launch."""
        return self.capability >= 9

    @property
    def converts_fp8(self) -> bool:
        """Whether one instruction makes two numbers of FP8 float16; Ada (8.9) has it too, and is
        not told apart here."""
        return self.capability >= 9


@cache
def device_properties(device: torch.device) -> Card:
    """The card of a device; in the interpreter 4 processors with the memory of an H200, which start
    nothing early."""
    if device.type != "cuda":
        return Card(4, 8, 227 * 1024)
    properties = torch.cuda.get_device_properties(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    import triton  # only where there are kernels

    shared = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return Card(properties.multi_processor_count, properties.major, shared,
                properties.L2_cache_size)
