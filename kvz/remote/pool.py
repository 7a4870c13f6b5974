"""Threads for requests that a process can leave behind when it is interrupted."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from kvz.formats.errors import SourceError

T = TypeVar("T")
P = ParamSpec("P")
#: A thread that gets bytes ends this soon; one whose server is silent is left alone.
_CLOSE_S = 1.0
_CLOSED = "was closed while it was read or written"


class RequestPool:
    """Runs functions on a few threads, started when they are needed.

    The threads of :mod:`concurrent.futures` would keep a process until the server answers or the
    request times out, also after Ctrl-C; and a thread that waits for a future can be interrupted,
    where one that waits inside of obstore cannot.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._tasks = queue.SimpleQueue()
        self._num_idle = 0
        self._lock = threading.Lock()
        self._closed = False
        # a thread that comes back from a request while the interpreter is taken down would crash it
        atexit.register(self.close)

    def submit(
        self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs
    ) -> Future[T]:
        """Run the function on a thread of the pool, after what was submitted before."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(SourceError(_CLOSED))
                return future
            self._tasks.put((future, lambda: function(*arguments, **options)))
            if self._num_idle < self._tasks.qsize() and len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._work, name="kvz-request", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def run(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """The same, and wait for what it returns or raises."""
        return self.submit(function, *arguments, **options).result()

    def close(self) -> None:
        """Start nothing more, and wait a little for what is under way.

        Who waits for what was not started gets SourceError.
        """
        atexit.unregister(self.close)
        with self._lock:
            self._closed = True
            with contextlib.suppress(queue.Empty):
                while (task := self._tasks.get_nowait()) is not None:
                    if task[0].set_running_or_notify_cancel():
                        task[0].set_exception(SourceError(_CLOSED))
            for _ in self._threads:
                self._tasks.put(None)
        end = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._lock:
                self._num_idle += 1
            task = self._tasks.get()
            with self._lock:
                self._num_idle -= 1
            if task is None:
                return
            future, function = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            # what a finished task holds must not live until the next one comes
            del task, future, function
