class FairQueue:
    """Requests of several tenants; who has been served least is next."""

    def __init__(self) -> None:
        raise NotImplementedError

    def add(self, tenant: str, request: str) -> None:
        """A request of a tenant waits."""
        raise NotImplementedError

    def next(self) -> tuple[str, str] | None:
        """Take out the next request: (tenant, request), or None if nobody waits."""
        raise NotImplementedError

    def charge(self, tenant: str, tokens: int) -> None:
        """So many tokens were computed for a tenant."""
        raise NotImplementedError
