"""How a model is placed: in which dtype, and whether there is room for it."""

from __future__ import annotations

import torch

from paged.device import enough_memory
from paged.memory import GiB
from paged.models.config import ModelConfig
from paged.models.decoder import Decoder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def room_for_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype):
    """`enough_memory` for the weights of a model."""
    size = sum(weight.nbytes for weight in Decoder(config, "meta", dtype).parameters())
    return enough_memory(f"{size / GiB:.2f} GiB of weights in {str(dtype).removeprefix('torch.')}",
                         "Choose a smaller model or a narrower dtype, or free the device", device)


def choose_dtype(wanted: str | torch.dtype, device: torch.device,
                 stored: str | None) -> torch.dtype:
    """The dtype that is wanted; for "auto" float32 on the CPU, elsewhere the checkpoint's own, and
    bfloat16 where it names none.

    A card before Ampere (a T4) has no bfloat16 arithmetic and would emulate it: there float16 takes
    its place. Raises ValueError for a dtype that is not supported.
    """
    if wanted == "auto":
        wanted = "float32" if device.type == "cpu" else stored or "bfloat16"
        if (str(wanted).removeprefix("torch.") == "bfloat16" and device.type == "cuda"
                and torch.cuda.get_device_capability(device)[0] < 8):
            wanted = "float16"
    dtype = wanted if isinstance(wanted, torch.dtype) else DTYPES.get(str(wanted))
    if dtype is None or dtype not in DTYPES.values():
        raise ValueError(
            f"The dtype {wanted!r} is not supported; use 'auto', {', '.join(map(repr, DTYPES))}.")
    return dtype
