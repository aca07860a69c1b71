def make_room(name: str, needed: int, running: dict[str, list[int]], free: list[int],
              waiting: list[str]) -> bool:
    """Give a running request `needed` more blocks, preempting the youngest as far as needed."""
    if name not in running:
        raise ValueError(f"{name} is not running")
    while len(free) < needed:
        victim, table = running.popitem()  # the youngest
        free.extend(reversed(table))
        waiting.insert(0, victim)
        if victim == name:
            return False
    running[name] += free[:needed]
    del free[:needed]
    return True
