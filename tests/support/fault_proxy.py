"""A proxy before an HTTP server that counts what goes through and does harm when told to.

Each request goes over connections of its own, which are closed after the answer.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_PIECE_NBYTES = 32 << 10
_HANG_S = 60.0
_LATE_S = 5e-3


@dataclass
class Exchange:
    """A request and how many bytes of the answer's body went to the client.

    ``start``, ``stop``: of the object's bytes that were answered; None where it was not a range.
    """

    method: str
    path: str
    status: int = 0
    start: int | None = None
    stop: int | None = None
    nbytes: int = 0
    done: threading.Event = field(default_factory=threading.Event, repr=False)


@dataclass
class Fault:
    """What is done to the next ``times`` exchanges that ``where`` (method, path) is true of.

    ``kind``: "reset", "short" or "hang" after ``nbytes`` of the answer's body; "503" instead of an
    answer; "slow": ``seconds`` between pieces; "corrupt": the byte at ``offset`` of the object is
    changed; "less": the server is asked for 100 bytes less, and its answer says so; "refuse": the
    connection is reset before the request is passed on; "drop": passed on, but its answer is not.
    ``skip``: exchanges that are left alone before.
    """

    kind: str
    times: int = 1
    skip: int = 0
    nbytes: int = 0
    offset: int = 0
    seconds: float = 0.0
    where: Callable[[str, str], bool] = lambda method, path: True


@dataclass
class FaultProxy:
    """Listens on a loopback port of its own. ``before``: called with each request's number.

    ``bits_per_second``: of the bodies of answers, of all connections together.
    """

    upstream: int
    faults: list[Fault] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    before: Callable[[int, str, str], None] | None = None
    bits_per_second: float | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._link_free_at = 0.0
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        """Refuse connections from now on, and end those that hang."""
        if self._closing.is_set():
            return
        self._closing.set()
        # a plain close would leave the accept that is under way waiting
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @property
    def num_requests(self) -> int:
        return len(self.exchanges)

    @property
    def nbytes(self) -> int:
        """Bytes of bodies that went to clients."""
        for exchange in self.exchanges:
            exchange.done.wait(5)
        return sum(exchange.nbytes for exchange in self.exchanges)

    def clear(self) -> None:
        """Forget what was counted and the faults that are left."""
        self.exchanges.clear()
        self.faults.clear()
        self.before = None

    def _wait_for_link(self, nbytes: int) -> None:
        """Until the link that all connections share has carried this, too."""
        if self.bits_per_second is None:
            return
        with self._lock:
            # by the clock: what a sleep is late the next one makes up for
            start = max(self._link_free_at, time.monotonic() - _LATE_S)
            self._link_free_at = start + 8 * nbytes / self.bits_per_second
            delay = self._link_free_at - time.monotonic()
        if delay > 0:
            time.sleep(delay)

    # -- one connection

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            head, rest = _read_head(client)
            if not head:
                return
            method, path = head.split(b" ", 2)[:2]
            exchange = Exchange(method.decode(), path.decode())
            with self._lock:
                number = len(self.exchanges)
                self.exchanges.append(exchange)
                fault = self._due(exchange)
            with contextlib.suppress(OSError):
                self._exchange(client, head, rest, exchange, number, fault)
            exchange.done.set()

    def _exchange(
        self,
        client: socket.socket,
        head: bytes,
        rest: bytes,
        exchange: Exchange,
        number: int,
        fault: Fault | None,
    ) -> None:
        if self.before is not None:
            self.before(number, exchange.method, exchange.path)
        if self._closing.is_set() or (fault and fault.kind == "refuse"):
            return _reset(client)
        body = _read_body(client, head, rest)
        if fault and fault.kind == "503":
            exchange.status = 503
            client.sendall(
                b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            return None
        if fault and fault.kind == "less":
            head = re.sub(rb"(?<=-)\d+(?=\r\n)", lambda end: b"%d" % (int(end[0]) - 100), head)
        with socket.create_connection(("127.0.0.1", self.upstream)) as server:
            server.sendall(_closing_head(head) + body)
            answer, rest = _read_head(server)
            if fault and fault.kind == "drop":
                return _reset(client)
            self._relay(client, server, answer, rest, exchange, fault)
        return None

    def _due(self, exchange: Exchange) -> Fault | None:
        for fault in self.faults:
            if not fault.times or not fault.where(exchange.method, exchange.path):
                continue
            if fault.skip:
                fault.skip -= 1
                return None
            fault.times -= 1
            return fault
        return None

    def _relay(
        self,
        client: socket.socket,
        server: socket.socket,
        head: bytes,
        piece: bytes,
        exchange: Exchange,
        fault: Fault | None,
    ) -> None:
        exchange.status = int(head.split(b" ", 2)[1])
        found = re.search(rb"(?i)content-range: *bytes (\d+)-(\d+)/", head)
        if found is not None:
            exchange.start, exchange.stop = int(found[1]), int(found[2]) + 1
        client.sendall(_closing_head(head))
        while True:
            if fault is not None and exchange.status < 300:
                piece = _harm(piece, fault, exchange)
            if piece:
                client.sendall(piece)
                exchange.nbytes += len(piece)
            if fault is not None and exchange.status < 300:
                if fault.kind == "slow":
                    time.sleep(fault.seconds)
                elif fault.kind in ("reset", "short", "hang") and exchange.nbytes >= fault.nbytes:
                    if fault.kind == "hang":
                        exchange.done.set()
                        self._closing.wait(_HANG_S)
                    return _reset(client) if fault.kind == "reset" else None
            self._wait_for_link(len(piece))
            piece = server.recv(_PIECE_NBYTES)
            if not piece:
                return None


def _harm(piece: bytes, fault: Fault, exchange: Exchange) -> bytes:
    if fault.kind in ("reset", "short", "hang"):
        return piece[: max(0, fault.nbytes - exchange.nbytes)]
    if fault.kind == "corrupt":
        i = fault.offset - (exchange.start or 0) - exchange.nbytes
        if 0 <= i < len(piece):
            return piece[:i] + bytes([piece[i] ^ 0x10]) + piece[i + 1 :]
    return piece


def _read_head(stream: socket.socket) -> tuple[bytes, bytes]:
    """A head with its empty line, and what came of the body with it; nothing at the end."""
    data = b""
    while b"\r\n\r\n" not in data:
        try:
            piece = stream.recv(_PIECE_NBYTES)
        except ConnectionError:
            piece = b""
        if not piece:
            return b"", b""
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", rest


def _read_body(client: socket.socket, head: bytes, rest: bytes) -> bytes:
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    length = 0 if found is None else int(found[1])
    body = bytearray(rest)
    while len(body) < length:
        piece = client.recv(min(1 << 20, length - len(body)))
        if not piece:
            raise ConnectionResetError("the client went away")
        body += piece
    return bytes(body)


def _closing_head(head: bytes) -> bytes:
    kept = re.sub(rb"(?i)\r\n(connection|keep-alive):[^\r]*", b"", head[:-2])
    return kept + b"Connection: close\r\n\r\n"


def _reset(client: socket.socket) -> None:
    """Close a connection so that the other side gets ECONNRESET."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
