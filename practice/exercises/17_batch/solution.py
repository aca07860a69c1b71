Request = tuple[list[int], int, int, list[int]]  # (token_ids, num_computed, num_new, block_table)


def build_batch(requests: list[Request], block_size: int) -> dict[str, list[int]]:
    """The tokens of all requests as flat lists, with the lengths that tell them apart."""
    batch = {
        "input_ids": [], "positions": [], "slot_mapping": [], "cu_seqlens_q": [0], "seq_lens": [],
        "cu_seqlens_k": [0]
    }
    for token_ids, num_computed, num_new, block_table in requests:
        end = num_computed + num_new
        if end > len(token_ids):
            raise ValueError(f"token {end - 1} is to be computed, and there are {len(token_ids)}")
        if end > len(block_table) * block_size:
            raise ValueError(f"token {end - 1} has no block in a table of {len(block_table)}")
        positions = range(num_computed, end)
        batch["input_ids"] += token_ids[num_computed:end]
        batch["positions"] += positions
        batch["slot_mapping"] += [
            block_table[p // block_size] * block_size + p % block_size for p in positions
        ]
        batch["cu_seqlens_q"].append(batch["cu_seqlens_q"][-1] + num_new)
        batch["seq_lens"].append(end)
        batch["cu_seqlens_k"].append(batch["cu_seqlens_k"][-1] + end)
    return batch
