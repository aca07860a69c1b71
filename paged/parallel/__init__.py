"""One model on several cards, each with a part of it: tensor parallelism (Shoeybi et al. 2019).

    shard    which part of the weights a rank holds
    sums     what ranks compute together: sums of partial products, logits put together
    ranks    the processes: how they find each other, talk, and end together
    runner   a batch goes to every rank, and the tokens come from the first
    worker   the rank that rank 0 starts on its own machine
"""
