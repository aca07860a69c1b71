Request = tuple[list[int], int, int, list[int]]  # (token_ids, num_computed, num_new, block_table)


def build_batch(requests: list[Request], block_size: int) -> dict[str, list[int]]:
    """The tokens of all requests as flat lists, with the lengths that tell them apart."""
    raise NotImplementedError
