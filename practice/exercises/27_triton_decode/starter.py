import torch
import triton
import triton.language as tl


@triton.jit
def decode_kernel(q_ptr, k_ptr, v_ptr, out_ptr, tables_ptr, seq_lens_ptr, scale, table_stride,
                  NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                  BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr):
    """Program (r, h): the query heads of request r that share KV head h, over all of r's
    context."""
    pass


def paged_decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                 block_tables: torch.Tensor, seq_lens: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of one query a request, [requests, num_heads, head_dim], over its paged context."""
    requests, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    out = torch.zeros_like(q)
    decode_kernel[(requests, num_kv_heads)](q, k_cache, v_cache, out, block_tables, seq_lens, scale,
                                            block_tables.stride(0), NUM_KV_HEADS=num_kv_heads,
                                            GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
                                            TILE=32, ROWS=max(16, triton.next_power_of_2(group)))
    return out
