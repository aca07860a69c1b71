import torch
import triton
import triton.language as tl


@triton.jit
def slots_kernel(tables_ptr, starts_ptr, positions_ptr, slots_ptr, table_stride,
                 BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Program r writes the slots of request r, TILE rows at a time."""
    pass


def compute_slots(block_tables: torch.Tensor, query_start_loc: torch.Tensor,
                  positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots of all rows of a batch, int64."""
    slots = torch.full_like(positions, -1, dtype=torch.int64)
    requests = block_tables.shape[0]
    if requests:
        slots_kernel[(requests,)](block_tables, query_start_loc, positions, slots,
                                  block_tables.stride(0), BLOCK_SIZE=block_size, TILE=16)
    return slots
