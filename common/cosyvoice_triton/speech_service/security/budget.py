"""One budget of memory for everything that has begun to arrive and is not answered yet: bodies and WebSocket messages.

Each has a limit of its own, but a thousand connections may have begun one.
"""

# Of each request, so that texts are served whatever else arrives: the longest text takes 16 KiB. All
# connections (1,024) have 64 MiB together.
FREE_BYTES = 64 << 10


class ByteBudget:
    """So many bytes, shared by all connections of a service. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class Claim:
    """What one request or message holds of a budget."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._held = 0

    def covers(self, size: int) -> bool:
        """Return whether the budget has `size` bytes for this request; it then holds them, in place of those before."""
        wanted = max(size - FREE_BYTES, 0)
        if self._budget.used - self._held + wanted > self._budget.limit:
            return False
        self._budget.used += wanted - self._held
        self._held = wanted
        return True

    def release(self) -> None:
        """Give everything back."""
        self._budget.used -= self._held
        self._held = 0
