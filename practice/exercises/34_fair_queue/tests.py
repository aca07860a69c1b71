"""Order, ties, charges after the fact, absence, and equal shares in the long run."""


def shares(queue_class, costs, rounds=600):
    """Tokens that each tenant gets, who always have two requests waiting, of these costs."""
    queue, got = queue_class(), dict.fromkeys(costs, 0)
    for tenant in costs:
        for number in range(2):
            queue.add(tenant, f"{tenant}{number}")
    for number in range(rounds):
        tenant, _ = queue.next()
        got[tenant] += costs[tenant]
        queue.charge(tenant, costs[tenant])
        queue.add(tenant, f"{tenant}{number + 2}")
    return got


def cases():
    yield "nobody waits", """
        FairQueue().next()                              # → None
    """
    yield "one tenant keeps his order", """
        queue = FairQueue()
        for name in "abc": queue.add("red", name)
        queue.charge("red", 7)
        [queue.next() for _ in range(4)]                # → [("red", "a"), ("red", "b"),
                                                        #    ("red", "c"), None]
    """
    yield "among equals, whoever has been waiting longest", """
        queue = FairQueue()
        for tenant in ("red", "blue", "green"): queue.add(tenant, "1")
        queue.add("red", "2")
        [queue.next() for _ in range(2)]                # → [("red", "1"), ("red", "2")]
        queue.add("red", "3")
        [queue.next()[0] for _ in range(3)]             # → ["blue", "green", "red"]
    """
    yield "a flood does not crowd out a trickle", """
        queue = FairQueue()
        for number in range(100): queue.add("red", str(number))
        queue.next(); queue.charge("red", 5)
        queue.add("blue", "only")
        queue.charge("red", 1)
        queue.next()                                    # → ("blue", "only")
    """
    yield "charges count whenever they come", """
        queue = FairQueue()
        queue.add("red", "r1"); queue.add("blue", "b1")
        queue.next()                                    # → ("red", "r1")
        queue.charge("red", 3)
        queue.add("red", "r2")
        queue.charge("blue", 4)
        queue.next()                                    # → ("red", "r2")
    """
    yield "who comes back is raised to the fewest of those who wait", """
        queue = FairQueue()
        queue.charge("red", 50); queue.charge("green", 30); queue.charge("blue", 10)
        queue.add("green", "g1"); queue.add("red", "r1"); queue.add("blue", "b1")
        queue.charge("green", 1)
        [queue.next()[0] for _ in range(3)]             # → ["blue", "green", "red"]
        queue.add("red", "r2"); queue.add("blue", "b2"); queue.charge("blue", 25)
        [queue.next()[0] for _ in range(2)]             # → ["red", "blue"]
    """
    yield "who has more is not lowered", """
        queue = FairQueue()
        queue.charge("red", 90)
        queue.add("blue", "b1"); queue.add("blue", "b2"); queue.add("red", "r1")
        queue.next(); queue.charge("blue", 80)
        queue.next()                                    # → ("blue", "b2")
    """
    yield "an idle queue remembers its level", """
        queue = FairQueue()
        queue.charge("red", 500)
        queue.add("red", "r1")
        queue.next()                                    # → ("red", "r1")
        queue.charge("red", 1)
        queue.add("blue", "b1"); queue.add("blue", "b2")
        queue.charge("blue", 2)
        queue.add("red", "r2")
        queue.next()                                    # → ("blue", "b1")
        queue.charge("blue", 2)
        queue.next()                                    # → ("red", "r2")
    """
    yield "more of what waits does not raise", """
        queue = FairQueue()
        queue.add("blue", "b1"); queue.add("red", "r1")
        queue.charge("red", 100)
        queue.charge("green", 40)
        queue.add("green", "g1")
        queue.next()                                    # → ("blue", "b1")
        queue.add("green", "g2")
        [queue.next()[0] for _ in range(3)]             # → ["green", "green", "red"]
    """
    yield "equal shares in the long run, whatever the requests cost", """
        got = shares(FairQueue, {"red": 100, "blue": 7, "green": 33})
        max(got.values()) - min(got.values()) <= 200    # → True
    """
    yield "nothing is given back", """
        FairQueue().charge("red", -5)                   # raises ValueError
    """
