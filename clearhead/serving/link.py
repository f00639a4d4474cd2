"""A link between the engines' process and a front end: pickled messages over a pair of Unix sockets.

Both ends are processes of this server, so that unpickling is safe. Any thread may send. A send never blocks: what does not fit
into the socket waits in a buffer, and the event loop sends it.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
from collections.abc import Callable
from typing import Any

HEAD = 4  # bytes of a message's length
PIECE = 1 << 20  # bytes that are received at once


class Link:
    """One end. `receive` is called with each message, in the event loop; `ended`, once, when the other end has gone."""

    def __init__(self, ours: socket.socket, receive: Callable[[Any], object], ended: Callable[[], object]) -> None:
        ours.setblocking(False)
        self.socket, self.receive, self.ended = ours, receive, ended
        self.loop, self.lock = asyncio.get_running_loop(), threading.Lock()
        self.unsent, self.partial, self.is_open = bytearray(), bytearray(), True
        self.loop.add_reader(ours, self._read)

    def send(self, message: Any) -> None:
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        data = len(content).to_bytes(HEAD, "big") + content
        with self.lock:
            if not self.is_open:
                return
            waits = bool(self.unsent)
            n = 0 if waits else self._try(data)
            self.unsent += data[n:]
            if self.unsent and not waits:
                self.loop.call_soon_threadsafe(self._watch)

    def close(self) -> None:
        with self.lock:
            self.is_open = False
        self.loop.remove_reader(self.socket)
        self.loop.remove_writer(self.socket)
        self.socket.close()

    def _try(self, data: bytes | bytearray) -> int:
        """Send as much as fits; returns how much that was."""
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the other end has gone, which the reader will notice
            return len(data)

    def _watch(self) -> None:
        if self.is_open:
            self.loop.add_writer(self.socket, self._flush)

    def _flush(self) -> None:
        with self.lock:
            del self.unsent[: self._try(self.unsent)]
            if not self.unsent:
                self.loop.remove_writer(self.socket)

    def _read(self) -> None:
        try:
            data = self.socket.recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self.loop.call_soon(self.ended)
            return
        self.partial += data
        while len(self.partial) >= HEAD:
            end = HEAD + int.from_bytes(self.partial[:HEAD], "big")
            if end > len(self.partial):
                break
            message = pickle.loads(memoryview(self.partial)[HEAD:end])
            del self.partial[:end]
            self.loop.call_soon(self.receive, message)  # each on its own: an error concerns no other message
