"""The pages in which keys and values are kept, and who has them."""

from collections.abc import Sequence

SCRATCH_PAGE = 0  # never allocated: rows without a request write to it


class PagePool:
    """Hands out pages by their numbers; the only owner of the free ones."""

    def __init__(self, count: int) -> None:
        """`count` is the number of all pages, the scratch page included."""
        self._count = count
        self._free = list(range(count - 1, SCRATCH_PAGE, -1))
        self._used: set[int] = set()

    @property
    def total(self) -> int:
        """Return the number of pages that can be allocated."""
        return self._count - 1

    @property
    def free(self) -> int:
        """Return the number of pages that are not allocated."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages, or None if fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Make pages free again. AssertionError for one that is not allocated: two sequences would write to it."""
        assert self._used.issuperset(pages) and len(set(pages)) == len(pages), f"pages {pages} are not all allocated"
        self._used.difference_update(pages)
        self._free.extend(pages)
