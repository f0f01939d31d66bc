"""A local OpenAI-compatible server with known delays and chunking, which writes down its own truth."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Script:
    """How one answer is streamed: tokens per chunk, and what is said around and between the chunks."""

    first_s: float = 0.02
    step_s: float = 0.01
    chunks: tuple[int, ...] = (1,) * 8
    role_line: bool = True
    # between the last text and usage; neither TTFT nor E2E may contain it
    usage_after_s: float = 0.0
    usage: bool = True
    # some servers send a choice without text along with usage
    empty_choice: bool = False
    fail_after: int | None = None
    drop_after: int | None = None
    status: int = 200
    # the event stream is written in pieces of so many bytes
    piece_bytes: int = 1 << 20
    words: str = "w"
    token_ids: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.chunks)


@dataclass
class Truth:
    """What the server did for one request, on the clock that the client reads."""

    body: dict[str, Any]
    received: float
    text_at: list[float] = field(default_factory=list)
    finished: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.text_at[0] - self.received

    @property
    def e2e_s(self) -> float:
        return self.finished - self.received

    def itl_s(self, tokens: int) -> float:
        return (self.finished - self.text_at[0]) / (tokens - 1)


Answer = Callable[[dict[str, Any]], Script]


class FakeServer:
    """Serves /v1/models, /metrics and the two completion paths from scripts."""

    def __init__(self, answer: Answer, metrics: Callable[[], str] | None = None) -> None:
        self.answer, self.metrics = answer, metrics
        self.truths: list[Truth] = []
        self.under_way = self.most_under_way = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                received = time.monotonic()
                headers = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if line)
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._route(head.split(" ")[1], content, received, writer)
        with contextlib.suppress(ConnectionError, OSError):
            writer.close()

    async def _route(self, path: str, content: bytes, received: float, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            await self._plain(writer, 200, json.dumps({"data": [{"id": "fake"}]}))
        elif path == "/metrics":
            await self._plain(writer, 200 if self.metrics else 404, self.metrics() if self.metrics else "")
        else:
            body = json.loads(content)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            try:
                await self._stream(writer, self.answer(body), Truth(body, received), "chat" in path)
            finally:
                self.under_way -= 1

    async def _plain(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        body = text.encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, script: Script, truth: Truth, chat: bool) -> None:
        self.truths.append(truth)
        if script.status != 200:
            return await self._plain(writer, script.status, '{"error": "busy"}')
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n")

        async def event(value: Any) -> None:
            data = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
            for start in range(0, len(data), script.piece_bytes):
                piece = data[start : start + script.piece_bytes]
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                await writer.drain()

        def choice(text: str, count: int = 0, finish: str | None = None) -> dict[str, Any]:
            said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            ids = {"token_ids": list(range(count))} if script.token_ids else {}
            return {"choices": [{"index": 0, "finish_reason": finish} | said | ids]}

        if script.role_line and chat:
            await event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(script.first_s)
        for number, count in enumerate(script.chunks):
            if number:
                await asyncio.sleep(script.step_s)
            if number == script.fail_after:
                await event({"error": {"message": "the engine died"}})
            if script.drop_after is not None and number == script.drop_after:
                writer.transport.abort()
                return None
            truth.text_at.append(time.monotonic())
            await event(choice(f"{script.words} " * count, count))
        truth.finished = time.monotonic()
        await event(choice("", finish="length"))
        await asyncio.sleep(script.usage_after_s)
        if script.usage and truth.body["stream_options"]["include_usage"]:
            usage = {"prompt_tokens": 5, "completion_tokens": script.tokens}
            empty = [{"index": 0, "delta": {}, "finish_reason": None}] if script.empty_choice else []
            await event({"choices": empty, "usage": usage})
        await event("[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return None


@contextlib.contextmanager
def running(server: FakeServer) -> Iterator[str]:
    """The server in a thread of its own; its base URL."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    port: list[int] = []

    async def begin() -> asyncio.Server:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        port.append(listening.sockets[0].getsockname()[1])
        ready.set()
        return listening

    def run() -> None:
        asyncio.set_event_loop(loop)
        listening = loop.run_until_complete(begin())
        loop.run_forever()
        listening.close()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield f"http://127.0.0.1:{port[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
