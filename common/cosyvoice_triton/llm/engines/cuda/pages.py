"""The one owner of the pages in which keys and values are kept."""

from collections.abc import Sequence

SCRATCH = 0  # never given away: rows without a request write to it


class Pages:
    def __init__(self, count: int) -> None:
        """`count`: of all pages, the scratch page included."""
        self._count = count
        self._free = list(range(count - 1, SCRATCH, -1))
        self._used: set[int] = set()

    @property
    def total(self) -> int:
        return self._count - 1

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or none of them if fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Raises AssertionError for one that is not taken: two sequences would write to it."""
        assert self._used.issuperset(pages) and len(set(pages)) == len(pages), f"pages {pages} are not all taken"
        self._used.difference_update(pages)
        self._free.extend(pages)
