"""Reading a GGUF file: its metadata, and its tensors dequantized and under their Hugging Face
names."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from paged.models.config import ModelConfig
from paged.models.loader.weight_files import Readers, Stored

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFile:
    """An open GGUF file: `fields` is its metadata, `names` the names of its tensors. Raises
    ValueError."""

    def __init__(self, path: Path) -> None:
        try:
            reader = _Reader(path)
            self.fields: dict[str, Any] = {
                name: field.contents()
                for name, field in reader.fields.items()
            }
        except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} is not a whole GGUF file ({error}): download it again.") from error
        if self.fields.get("split.count", 1) > 1:
            raise ValueError(
                f"{path} is one of {self.fields['split.count']} parts; merge them into one file "
                "with llama-gguf-split --merge.")
        self.path = path
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.names = set(self._tensors)

    def tensors(self, config: ModelConfig) -> Readers:
        """What reads each tensor, under the tensor's Hugging Face name."""
        return {
            _huggingface_name(name): Stored(tuple(int(size) for size in reversed(tensor.shape)),
                                            partial(self._read, name, config))
            for name, tensor in self._tensors.items()
        }

    def _read(self, name: str, config: ModelConfig, cut: tuple[slice, ...] = ()) -> torch.Tensor:
        stored = self._tensors[name]
        try:
            values = torch.tensor(gguf.dequantize(stored.data, stored.tensor_type))
        except NotImplementedError as error:
            raise ValueError(
                f"{name} in {self.path} is quantized as {stored.tensor_type.name}, which the "
                "gguf package cannot read; use a file of another quantization.") from error
        if config.architecture == "llama" and (part := re.search(r"attn_([qk])\.", name)):
            # Such files interleave each head's halves, so that the partner of a number stands
            # beside it (0, d/2, 1, d/2 + 1, ...). The decoder keeps the halves apart.
            heads = config.num_heads if part[1] == "q" else config.num_kv_heads
            if values.shape[0] % (2 * heads) == 0:  # else the wrong shape is told when it is used
                pairs = values.view(heads, -1, 2, *values.shape[1:])
                values = pairs.transpose(1, 2).reshape(values.shape)
        return values[cut]


class _Reader(gguf.GGUFReader):

    def _get(self, *arguments, **options):
        # A vocabulary is a hundred thousand small reads, and slices of a plain array cost a third
        # of what slices of a memmap cost.
        if isinstance(self.data, np.memmap):
            self.data = np.asarray(self.data)
        return super()._get(*arguments, **options)


def _huggingface_name(name: str) -> str:
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(\w+)", name)  # blk.3.attn_q.weight
    if found is None or found[2] not in _NAMES:
        return name
    block = "" if found[1] is None else f"model.layers.{found[1]}."
    return f"{block}{_NAMES[found[2]]}.{found[3]}"
