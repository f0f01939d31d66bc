"""Server-sent events out of a stream of bytes, however the network cuts it."""

from __future__ import annotations

from collections.abc import Iterator

DONE = "[DONE]"


class Events:
    """Collects bytes and gives the data of each complete event.

    Source: the event stream format of the HTML standard; of its fields only `data` matters here.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> Iterator[str]:
        """The data of every event that these bytes complete, decoded as UTF-8."""
        # a carriage return at the end may be the first half of a line end
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data).decode("utf-8", "replace")
                self._data = []
