import torch
import triton
import triton.language as tl


@triton.jit
def store_kernel(k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_token, k_head, k_dim, v_token,
                 v_head, v_dim, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                 COLUMNS: tl.constexpr):
    """Program t copies the K and V of token t into its slot, all heads side by side."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    keep = (slot >= 0) & (column < NUM_HEADS * HEAD_DIM)
    head, dim = column // HEAD_DIM, column % HEAD_DIM
    k = tl.load(k_ptr + token * k_token + head * k_head + dim * k_dim, mask=keep)
    v = tl.load(v_ptr + token * v_token + head * v_head + dim * v_dim, mask=keep)
    tl.store(k_cache_ptr + slot * (NUM_HEADS * HEAD_DIM) + column, k, mask=keep)
    tl.store(v_cache_ptr + slot * (NUM_HEADS * HEAD_DIM) + column, v, mask=keep)


def store(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
          slots: torch.Tensor) -> None:
    """Write the K and V of new tokens into their slots, in place; slot -1 is skipped."""
    tokens, heads, head_dim = k.shape
    if tokens:
        store_kernel[(tokens,)](k, v, k_cache, v_cache, slots, *k.stride(), *v.stride(),
                                NUM_HEADS=heads, HEAD_DIM=head_dim, COLUMNS=triton.next_power_of_2(
                                    heads * head_dim))
