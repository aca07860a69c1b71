"""Collects the victims and puts them in front youngest first."""

def make_room(name: str, needed: int, running: dict[str, list[int]], free: list[int],
              waiting: list[str]) -> bool:
    """Give a running request `needed` more blocks, preempting the youngest as far as needed."""
    if name not in running:
        raise ValueError(f"{name} is not running")
    victims = []
    while len(free) < needed:
        victim, table = running.popitem()               # the youngest
        free.extend(reversed(table))
        victims.append(victim)
        if victim == name:
            waiting[:0] = victims
            return False
    waiting[:0] = victims
    running[name] += free[:needed]
    del free[:needed]
    return True
