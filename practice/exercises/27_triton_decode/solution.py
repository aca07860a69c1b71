import torch
import triton
import triton.language as tl


@triton.jit
def decode_kernel(q_ptr, k_ptr, v_ptr, out_ptr, tables_ptr, seq_lens_ptr, scale, table_stride,
                  NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                  BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr):
    """Program (r, h): the query heads of request r that share KV head h, over all of r's
    context."""
    request, kv_head = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + request)
    row, dim = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + row
    q_at = (request * NUM_KV_HEADS * GROUP + head[:, None]) * HEAD_DIM + dim[None, :]
    real = (row < GROUP)[:, None]
    q = tl.load(q_ptr + q_at, mask=real, other=0.0)

    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for first in range(0, seq_len, TILE):
        position = first + tl.arange(0, TILE)
        inside = position < seq_len
        block = tl.load(tables_ptr + request * table_stride + position // BLOCK_SIZE, mask=inside,
                        other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        at = (slot[:, None] * NUM_KV_HEADS + kv_head) * HEAD_DIM + dim[None, :]
        k = tl.load(k_ptr + at, mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + at, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, -float("inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        fix = tl.exp(largest - new)
        weights = tl.exp(scores - new[:, None])
        total = total * fix + tl.sum(weights, 1)
        acc = acc * fix[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new
    acc = tl.where(total[:, None] > 0, acc / tl.maximum(total, 1e-30)[:, None], 0.0)
    tl.store(out_ptr + q_at, acc.to(out_ptr.dtype.element_ty), mask=real)


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
