"""The sum over the ranks against the whole product; who keeps what; the bias once."""

import torch


def data(tokens, outputs, inputs, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, inputs, generator=g), torch.randn(
        outputs, inputs, generator=g), torch.randn(outputs, generator=g))


def whole(tokens, outputs, inputs):
    x, weight, bias = data(tokens, outputs, inputs)
    return x @ weight.T + bias


def summed(piece_of_rank, partial_product, tokens, outputs, inputs, world_size):
    """The ranks' parts added up; each rank has its own inputs and nothing else."""
    x, weight, bias = data(tokens, outputs, inputs)
    per_rank = inputs // world_size
    total = torch.zeros(tokens, outputs)
    for rank in range(world_size):
        own = slice(rank * per_rank, (rank + 1) * per_rank)
        hidden = torch.full_like(weight, torch.nan)  # a rank's checkpoint has its columns only
        hidden[:, own] = weight[:, own]
        piece, its_bias = piece_of_rank(hidden, bias.clone(), world_size, rank)
        part = partial_product(x[:, own].clone(), piece, its_bias)
        assert part.shape == total.shape, f"a part is {list(part.shape)}, not {list(total.shape)}"
        total += part
    return total


def sizes(piece_of_rank, outputs, inputs, world_size):
    _, weight, bias = data(1, outputs, inputs)
    return [
        list(piece_of_rank(weight, bias, world_size, rank)[0].shape) for rank in range(world_size)
    ]


def cases():
    yield "one rank has everything", """
        summed(piece_of_rank, partial_product, 3, 5, 8, 1)              # → whole(3, 5, 8)
    """
    yield "the sum over 2, 4 and 8 ranks is the whole product", """
        summed(piece_of_rank, partial_product, 3, 5, 8, 2)              # → whole(3, 5, 8)
        summed(piece_of_rank, partial_product, 3, 5, 8, 4)              # → whole(3, 5, 8)
        summed(piece_of_rank, partial_product, 3, 5, 8, 8)              # → whole(3, 5, 8)
    """
    yield "numbers that are no powers of two", """
        summed(piece_of_rank, partial_product, 1, 7, 21, 3)             # → whole(1, 7, 21)
        summed(piece_of_rank, partial_product, 2, 3, 35, 5)             # → whole(2, 3, 35)
    """
    yield "as many outputs as inputs", """
        summed(piece_of_rank, partial_product, 2, 6, 6, 3)              # → whole(2, 6, 6)
    """
    yield "a rank keeps its columns, and every column is kept once", """
        sizes(piece_of_rank, 5, 12, 4)                                  # → [[5, 3]] * 4
        _, w, b = data(1, 3, 6)
        torch.cat([piece_of_rank(w, b, 3, rank)[0] for rank in range(3)], dim=1)    # → w
    """
    yield "a token of zeros is the bias", """
        w, b = torch.ones(2, 4), torch.tensor([1.0, -2.0])
        zeros = torch.zeros(1, 2)
        parts = [partial_product(zeros, *piece_of_rank(w, b, 2, rank)) for rank in range(2)]
        sum(parts)                                                  # → torch.tensor([[1.0, -2.0]])
    """
    yield "no token at all", """
        list(summed(piece_of_rank, partial_product, 0, 5, 8, 2).shape)  # → [0, 5]
    """
    yield "inputs that cannot be dealt out evenly", """
        piece_of_rank(torch.ones(4, 9), torch.ones(4), 2, 0)            # raises ValueError
        piece_of_rank(torch.ones(4, 2), torch.ones(4), 4, 0)            # raises ValueError
    """
    yield "a rank that does not exist", """
        piece_of_rank(torch.ones(4, 8), torch.ones(4), 2, 2)            # raises ValueError
        piece_of_rank(torch.ones(4, 8), torch.ones(4), 2, -1)           # raises ValueError
    """
    yield "weights and bias stay as they were", """
        x, w, b = data(2, 3, 4)
        part = partial_product(x[:, :2], *piece_of_rank(w, b, 2, 0))
        w, b                                                            # → data(2, 3, 4)[1:]
    """
