"""Who holds what after a fork, who pays for a copy, and failures that leave no trace."""


def cases():
    yield "a fork takes no block from the pool", """
        pool = BlockPool(3)
        table = pool.allocate(3)
        pool.fork(table)                    # → [0, 1, 2]
        pool.num_free()                     # → 0
        pool.ref_cnt                        # → [2, 2, 2]
    """
    yield "a fork is a table of its own", """
        pool = BlockPool(4)
        parent = pool.allocate(2)
        child = pool.fork(parent)
        child += pool.allocate(1)
        parent                              # → [0, 1]
        child                               # → [0, 1, 2]
    """
    yield "forks of forks add up", """
        pool = BlockPool(3)
        parent = pool.allocate(1)
        child = pool.fork(parent)
        pool.fork(child)                    # → [0]
        pool.fork(parent)                   # → [0]
        pool.ref_cnt                        # → [4, 0, 0]
    """
    yield "a fork of an empty table", """
        pool = BlockPool(2)
        pool.fork([])                       # → []
        pool.ref_cnt                        # → [0, 0]
    """
    yield "blocks are free when the last table lets go", """
        pool = BlockPool(3)
        parent = pool.allocate(2)
        child = pool.fork(parent)
        pool.free(parent)
        pool.num_free()                     # → 1
        pool.ref_cnt                        # → [1, 1, 0]
        pool.free(child)
        pool.num_free()                     # → 3
    """
    yield "a fork over a free block is an error and changes nothing", """
        pool = BlockPool(3)
        pool.allocate(2)                    # → [0, 1]
        pool.fork([0, 1, 2])                # raises ValueError
        pool.ref_cnt                        # → [1, 1, 0]
        pool.num_free()                     # → 1
    """
    yield "a block with one holder is written in place", """
        pool = BlockPool(3)
        table = pool.allocate(2)
        pool.copy_on_write(table, 0)        # → None
        table                               # → [0, 1]
        pool.ref_cnt                        # → [1, 1, 0]
        pool.num_free()                     # → 1
    """
    yield "a write into a free block is an error and changes nothing", """
        pool = BlockPool(3)
        table = pool.allocate(2)
        pool.free([1])
        pool.copy_on_write(table, 1)        # raises ValueError
        table                               # → [0, 1]
        pool.ref_cnt                        # → [1, 0, 0]
        pool.num_free()                     # → 2
    """
    yield "only the written block is copied", """
        pool = BlockPool(6)
        parent = pool.allocate(3)
        child = pool.fork(parent)
        pool.copy_on_write(child, 1)        # → (1, 3)
        child                               # → [0, 3, 2]
        parent                              # → [0, 1, 2]
        pool.ref_cnt                        # → [2, 1, 2, 1, 0, 0]
    """
    yield "the parent may be the one who writes first", """
        pool = BlockPool(3)
        parent = pool.allocate(1)
        child = pool.fork(parent)
        pool.copy_on_write(parent, 0)       # → (0, 1)
        parent                              # → [1]
        child                               # → [0]
        pool.copy_on_write(child, 0)        # → None
    """
    yield "three holders: two copies, and the last one keeps the block", """
        pool = BlockPool(4)
        one = pool.allocate(1)
        two = pool.fork(one)
        three = pool.fork(one)
        pool.copy_on_write(two, 0)          # → (0, 1)
        pool.ref_cnt                        # → [2, 1, 0, 0]
        pool.copy_on_write(one, 0)          # → (0, 2)
        pool.copy_on_write(three, 0)        # → None
        pool.ref_cnt                        # → [1, 1, 1, 0]
    """
    yield "a copy with no free block is an error and changes nothing", """
        pool = BlockPool(2)
        parent = pool.allocate(2)
        child = pool.fork(parent)
        pool.copy_on_write(child, 1)        # raises MemoryError
        child                               # → [0, 1]
        parent                              # → [0, 1]
        pool.ref_cnt                        # → [2, 2]
        pool.num_free()                     # → 0
    """
    yield "a full pool does not stop a write that needs no copy", """
        pool = BlockPool(2)
        table = pool.allocate(2)
        pool.copy_on_write(table, 1)        # → None
    """
    yield "after everything is freed the pool is whole", """
        pool = BlockPool(4)
        parent = pool.allocate(2)
        child = pool.fork(parent)
        pool.copy_on_write(child, 1)        # → (1, 2)
        pool.free(parent)
        pool.free(child)
        pool.num_free()                     # → 4
        sorted(pool.allocate(4))            # → [0, 1, 2, 3]
    """
