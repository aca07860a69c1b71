"""The two prompts of the chapter, chunks, decodes, and requests that ask for what is not there."""


def chapter_prefill():
    """Prompts of 430 and 433 tokens that share a block of 256; the second finds it in the cache."""
    one, other = list(range(430)), list(range(256)) + list(range(1000, 1177))
    return [(one, 0, 430, [0, 1]), (other, 256, 177, [0, 2])]


def cases():
    yield "the two prompts of the chapter: lengths", """
        batch = build_batch(chapter_prefill(), 256)
        batch["cu_seqlens_q"]                           # → [0, 430, 607]
        batch["cu_seqlens_k"]                           # → [0, 430, 863]
        batch["seq_lens"]                               # → [430, 433]
    """
    yield "the two prompts of the chapter: rows", """
        batch = build_batch(chapter_prefill(), 256)
        batch["slot_mapping"] == list(range(430)) + list(range(512, 689))       # → True
        batch["positions"] == list(range(430)) + list(range(256, 433))          # → True
        batch["input_ids"] == list(range(430)) + list(range(1000, 1177))        # → True
    """
    yield "the first decode after them", """
        batch = build_batch([(list(range(431)), 430, 1, [0, 1]),
                             (list(range(434)), 433, 1, [0, 2])], 256)
        batch["seq_lens"]                               # → [431, 434]
        batch["slot_mapping"]                           # → [430, 689]
        batch["cu_seqlens_q"]                           # → [0, 1, 2]
        batch["cu_seqlens_k"]                           # → [0, 431, 865]
    """
    yield "a chunk sees the keys up to its own end, not the whole prompt", """
        batch = build_batch([(list(range(12)), 0, 4, [5, 6, 7])], 4)
        batch["seq_lens"]                               # → [4]
        batch = build_batch([(list(range(12)), 4, 4, [5, 6, 7])], 4)
        batch["seq_lens"]                               # → [8]
        batch["input_ids"]                              # → [4, 5, 6, 7]
        batch["slot_mapping"]                           # → [24, 25, 26, 27]
    """
    yield "a chunk that begins and ends inside blocks", """
        batch = build_batch([([10, 11, 12, 13, 14, 15, 16], 2, 4, [3, 0, 1])], 3)
        batch["positions"]                              # → [2, 3, 4, 5]
        batch["slot_mapping"]                           # → [11, 0, 1, 2]
        batch["input_ids"]                              # → [12, 13, 14, 15]
    """
    yield "no requests", """
        batch = build_batch([], 4)
        batch["cu_seqlens_q"]                           # → [0]
        batch["cu_seqlens_k"]                           # → [0]
        batch["input_ids"]                              # → []
        batch["seq_lens"]                               # → []
    """
    yield "a request with nothing to do in this step keeps its place", """
        batch = build_batch([([1, 2], 2, 0, [0]), ([3, 4], 1, 1, [1])], 4)
        batch["cu_seqlens_q"]                           # → [0, 0, 1]
        batch["seq_lens"]                               # → [2, 2]
        batch["input_ids"]                              # → [4]
    """
    yield "three requests at three phases", """
        batch = build_batch([(list(range(37)), 36, 1, list(range(10))),
                             (list(range(5)), 0, 5, [10, 11]),
                             (list(range(20)), 12, 8, [12, 13, 14, 15, 16])], 4)
        batch["cu_seqlens_q"]                           # → [0, 1, 6, 14]
        batch["cu_seqlens_k"]                           # → [0, 37, 42, 62]
        batch["slot_mapping"]                           # → [36, 40, 41, 42, 43, 44,
                                                        #    60, 61, 62, 63, 64, 65, 66, 67]
    """
    yield "a table may be longer than needed, but not shorter", """
        build_batch([([1, 2, 3, 4], 0, 4, [5, 6])], 4)["slot_mapping"]          # → [20, 21, 22, 23]
        build_batch([([1, 2, 3, 4, 5], 4, 1, [5])], 4)  # raises ValueError
    """
    yield "a token past the end of the request", """
        build_batch([([1, 2, 3], 3, 1, [0])], 4)        # raises ValueError
    """
    yield "nothing that was passed in is changed", """
        tokens, table = [1, 2, 3], [4]
        build_batch([(tokens, 0, 3, table)], 4)["seq_lens"]                     # → [3]
        (tokens, table)                                 # → ([1, 2, 3], [4])
    """
