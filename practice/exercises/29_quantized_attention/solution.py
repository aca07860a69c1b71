import torch


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_scales: torch.Tensor,
           v_scales: torch.Tensor, block_table: list[int], length: int,
           scale: float) -> torch.Tensor:
    """Attention of one new token over the first `length` tokens of its block table."""
    if length == 0:
        return torch.zeros_like(q)

    def rows(x):  # a byte for a byte: not every device can index float8
        bits = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
        taken = bits[block_table].flatten(0, 1)[:length]
        return (taken.view(x.dtype) if bits is not x else taken).float()

    keys, values, key_scales, value_scales = map(rows, (k, v, k_scales, v_scales))
    num_kv_heads, head_dim = keys.shape[1:]
    grouped = q.view(num_kv_heads, -1, head_dim)
    scores = torch.einsum("hgd,khd->hgk", grouped, keys) * scale
    scores = scores * key_scales.T[:, None]
    weights = scores.softmax(dim=-1)
    weights = weights * value_scales.T[:, None]
    return torch.einsum("hgk,khd->hgd", weights, values).reshape(q.shape)
