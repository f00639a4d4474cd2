"""A queue in which clients take turns, so that one with many requests does not keep another waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Each client's items keep their order; between two of one client, every other client that waits has one."""

    def __init__(self) -> None:
        self.clients: dict[str | None, deque[T]] = {}  # in the order of their turns; none is empty
        self.n = 0

    def __len__(self) -> int:
        return self.n

    def append(self, client: str | None, item: T) -> None:
        self.clients.setdefault(client, deque()).append(item)
        self.n += 1

    def heads(self) -> list[tuple[str | None, T]]:
        """The next item of each client, in the order of their turns."""
        return [(client, items[0]) for client, items in self.clients.items()]

    def pop(self, client: str | None) -> T:
        """Take the next item of this client. Its next turn comes after those of all others."""
        items = self.clients.pop(client)
        item = items.popleft()
        if items:
            self.clients[client] = items
        self.n -= 1
        return item

    def keep(self, client: str | None, is_kept: Callable[[T], bool]) -> None:
        """Drop this client's other items."""
        items = self.clients.get(client, deque[T]())
        kept = deque(item for item in items if is_kept(item))
        self.n -= len(items) - len(kept)
        if kept:
            self.clients[client] = kept
        else:
            self.clients.pop(client, None)

    def sort(self, key: Callable[[T], int]) -> None:
        """Put each client's items into another order."""
        self.clients = {client: deque(sorted(items, key=key)) for client, items in self.clients.items()}
