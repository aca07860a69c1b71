"""Deliberate faults of the block logic: each replaces a method by a wrong one, and the oracle must notice."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

from paged.block_pool import BlockPool
from paged.prefix_cache import PrefixCache
from paged.scheduler import Scheduler

match, root = PrefixCache.match, PrefixCache.root
admit, build_batch = Scheduler._admit, Scheduler._build_batch
preempt, release = Scheduler._preempt, Scheduler._release


def match_whole_prompt(self, token_ids, salt=None):
    return match(self, [*token_ids, 0], salt)                 # with one token more, the last can match


def forget_only_the_block(self, block):
    self._record_of.pop(block, None)                          # its record still lists the block


def find_by_own_tokens(self, parent, tokens, hash):
    for records in self._records.values():
        for record in records:
            if record.tokens == tokens:                       # whatever stands before them
                return record
    return None


def register_at_admission(self, request):
    admitted = admit(self, request)
    if admitted:                                              # the whole prompt, and not only the first chunk
        held = len(request.block_table) * self.block_size
        self.register_computed(request, min(request.num_prompt_tokens, held))
    return admitted


def count_hits_as_free(self, hits):
    return self.pool.num_free()


def see_the_whole_prompt(self):
    batch = build_batch(self)
    batch.seq_lens = [max(seq_len, request.num_prompt_tokens)
                      for seq_len, request in zip(batch.seq_lens, batch.requests)]
    return batch


def write_without_copying(self, block_table, index):
    return block_table[index], block_table[index]             # a copy onto itself


def copy_without_contents(self):
    batch = build_batch(self)
    batch.block_copies = []                                   # a new block, and nobody fills it
    return batch


def queue_at_the_end(self, victim):
    preempt(self, victim)
    self.waiting.remove(victim)
    self.waiting.append(victim)


def free_twice(self, request):
    release(self, request)
    if self.running:
        self.pool.free(self.running[0].block_table[-1:])      # a block of somebody else


def share_across_tenants(self, salt=None):
    return root(self)


MUTATIONS = {
    "the whole prompt is cached": (PrefixCache, "match", match_whole_prompt),
    "stale hash": (PrefixCache, "forget", forget_only_the_block),
    "unchained hash": (PrefixCache, "_find", find_by_own_tokens),
    "hash before compute": (Scheduler, "_admit", register_at_admission),
    "hits counted as free": (Scheduler, "_free_beside", count_hits_as_free),
    "a chunk sees too much": (Scheduler, "_build_batch", see_the_whole_prompt),
    "missing copy-on-write": (BlockPool, "copy_on_write", write_without_copying),
    "copy without contents": (Scheduler, "_build_batch", copy_without_contents),
    "preempted to the end of the queue": (Scheduler, "_preempt", queue_at_the_end),
    "freed twice": (Scheduler, "_release", free_twice),
    "tenants share": (PrefixCache, "root", share_across_tenants),
}


@contextmanager
def mutated(name: str):
    """The package with this fault in it."""
    with patch.object(*MUTATIONS[name]):
        yield
