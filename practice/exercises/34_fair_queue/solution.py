class FairQueue:
    """Requests of several tenants; who has been served least is next."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[str]] = {}  # only tenants that have something waiting
        self._served: dict[str, int] = {}
        self._level = 0

    def add(self, tenant: str, request: str) -> None:
        """A request of a tenant waits."""
        if tenant not in self._waiting:
            least = min((self._served[other] for other in self._waiting), default=self._level)
            self._served[tenant] = max(self._served.get(tenant, 0), least)
            self._waiting[tenant] = []
        self._waiting[tenant].append(request)

    def next(self) -> tuple[str, str] | None:
        """Take out the next request: (tenant, request), or None if nobody waits."""
        if not self._waiting:
            return None
        tenant = min(self._waiting, key=self._served.__getitem__)  # the first of equals
        self._level = self._served[tenant]
        request = self._waiting[tenant].pop(0)
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        return tenant, request

    def charge(self, tenant: str, tokens: int) -> None:
        """So many tokens were computed for a tenant."""
        if tokens < 0:
            raise ValueError(f"tokens is {tokens}: nothing that was computed is given back")
        self._served[tenant] = self._served.get(tenant, 0) + tokens
