"""Small models with odd shapes, whose logits and tokens the tests hold against transformers.

Nothing is a power of two, heads are grouped by 3, 2 and 2, and hidden_size is not heads x head_dim
for Qwen3, as in its real checkpoints.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paged.models.config import ModelConfig

TINY_LLAMA = ModelConfig(architecture="llama", vocab_size=211, hidden_size=72,
                         intermediate_size=100, num_layers=3, num_heads=6, num_kv_heads=2,
                         head_dim=12, rms_norm_eps=1e-5, rope_theta=10_000.0,
                         max_position_embeddings=256)
TINY_QWEN2 = ModelConfig(architecture="qwen2", vocab_size=157, hidden_size=60, intermediate_size=84,
                         num_layers=2, num_heads=6, num_kv_heads=3, head_dim=10,
                         rope_theta=1_000_000.0, attention_bias=True, tie_word_embeddings=True,
                         max_position_embeddings=256)
TINY_QWEN3 = ModelConfig(architecture="qwen3", vocab_size=173, hidden_size=44, intermediate_size=92,
                         num_layers=3, num_heads=4, num_kv_heads=2, head_dim=14,
                         rope_theta=1_000_000.0, qk_norm=True, tie_word_embeddings=True,
                         max_position_embeddings=256)
TINY_MODELS = {"llama": TINY_LLAMA, "qwen2": TINY_QWEN2, "qwen3": TINY_QWEN3}


def plain_attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over one whole sequence: q [N, heads, head_dim], k and v [N, KV heads,
    head_dim]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def logits_of(decoder, token_ids: list[int], kept=lambda rows: rows) -> torch.Tensor:
    """Logits [N, vocab] of a sequence seen whole, over K and V as a cache would have kept them."""
    ids = torch.tensor(token_ids)

    def attend(layer, q, k, v):
        return plain_attention(layer, q, kept(k), kept(v))

    return decoder.logits(decoder(ids, torch.arange(len(token_ids)), attend))


def huggingface_model(config: ModelConfig, seed: int = 0):
    """The same model in transformers, with random weights (norms and biases too), in float32."""
    import transformers

    kinds = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
    names = {
        "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads"
    }
    same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps",
            "rope_theta", "rope_scaling", "tie_word_embeddings", "max_position_embeddings")
    arguments = {name: getattr(config, name) for name in same}
    arguments |= {theirs: getattr(config, ours) for theirs, ours in names.items()}
    kind = kinds[config.architecture]
    if kind == "Mistral":
        arguments["sliding_window"] = None
    elif kind in ("Llama", "Qwen3"):  # one switch for the biases of the attention
        arguments |= {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    theirs = getattr(transformers, f"{kind}Config")(**arguments, eos_token_id=None,
                                                    bos_token_id=None)
    model = getattr(transformers, f"{kind}ForCausalLM")(theirs).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * values if name.endswith("norm.weight") else 0.15 * values)
    return model
