def make_room(name: str, needed: int, running: dict[str, list[int]], free: list[int],
              waiting: list[str]) -> bool:
    """Give a running request `needed` more blocks, preempting the youngest as far as needed."""
    raise NotImplementedError
