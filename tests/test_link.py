"""The modelled link: right bytes, at the right time."""

from __future__ import annotations

import io
import math
import time

import numpy as np
import pytest

from kvz.files import read_exactly
from kvz.formats.errors import ConfigError
from kvz.link import over_link

DATA = np.random.default_rng(0).integers(0, 256, 500_001, np.uint8).tobytes()


@pytest.mark.parametrize("speed", [40e6, 1e9, math.inf])
@pytest.mark.parametrize("size", [1, 999, 100_000, -1])
def test_bytes_arrive_as_they_were_sent(speed: float, size: int) -> None:
    data = DATA[:5000] if size == 1 else DATA
    with over_link(io.BytesIO(data), speed) as stream:
        parts = [stream.read()] if size < 0 else list(iter(lambda: stream.read(size), b""))
    assert b"".join(parts) == data


def test_a_stream_takes_as_long_as_its_link() -> None:
    stream = over_link(io.BytesIO(DATA), 20e6, latency_s=0.05)
    start = time.monotonic()
    stream.read(1)
    first = time.monotonic() - start
    rest = read_exactly(stream, len(DATA) - 1)
    took = time.monotonic() - start
    assert rest.tobytes() == DATA[1:]
    expected = 0.05 + len(DATA) * 8 / 20e6
    assert 0.05 <= first < 0.05 + 0.1
    # never early; late only by what the machine is busy with
    assert expected <= took < expected + 0.25


def test_a_slow_reader_does_not_hold_up_the_link() -> None:
    stream = over_link(io.BytesIO(DATA), 20e6)
    stream.read(1)
    time.sleep(len(DATA) * 8 / 20e6)
    start = time.monotonic()
    stream.read()
    assert time.monotonic() - start < 0.1


def test_closing_the_link_closes_what_it_reads() -> None:
    source = io.BytesIO(DATA)
    over_link(source, 1e9).close()
    assert source.closed


@pytest.mark.parametrize("given", [(0.0, 0.0), (-1.0, 0.0), (math.nan, 0.0), (1e9, -1.0)])
def test_links_without_sense_are_refused(given: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="no link has"):
        over_link(io.BytesIO(DATA), *given)
