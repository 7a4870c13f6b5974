"""Codecs on disk, by the names of :data:`kvz.formats.ids.CODEC_NAMES`.

:func:`stream_nbytes` says what each byte of a codec's sections does, from their lengths alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvz.formats.codecs import gaac, lynx, splitzip
from kvz.formats.codecs.spans import STREAM_ALIGNMENT, check_fits, place
from kvz.formats.errors import InvalidField

Shape = tuple[int, int, int]
#: Payload lengths of sections of one shape, int64.
Lengths = NDArray[np.int64]
StreamSizes = dict[str, int]


def stream_nbytes(
    codec: str, config: Mapping[str, Any], shape: Shape, lengths: Lengths, *, is_first: bool = False
) -> StreamSizes:
    """Bytes by stream, all sections together; what aligns the streams is ``padding``.

    ``lengths`` are those of the payloads of one or more ENCODED or ANCHOR sections, each of a chunk
    of ``shape``; ``config`` is that of the head; ``is_first``: they are the first chunks of their
    tensors. Raises InvalidField when a payload is shorter than the shape requires.
    """
    if codec == "lynx":
        sizes = _lynx(config, shape, lengths, is_first=is_first)
    else:
        sizes = _STREAMS[codec](config, shape, lengths)
    sizes["padding"] = int(lengths.sum()) - sum(sizes.values())
    return {name: nbytes for name, nbytes in sizes.items() if nbytes}


def _gaac(fields: Mapping[str, Any], shape: Shape, lengths: Lengths) -> StreamSizes:
    config = gaac.GaacConfig.from_dict(fields)
    spans = gaac.streams(shape, config, int(lengths.min()))
    fixed, escapes = spans[:-1], spans[-1]
    sizes = {span.name: span.nbytes * lengths.size for span in fixed}
    return {**sizes, "escapes": int((lengths - escapes.offset).clip(min=0).sum())}


def _splitzip(_: Mapping[str, Any], shape: Shape, lengths: Lengths) -> StreamSizes:
    num_elements = shape[0] * shape[1] * shape[2]
    fixed = splitzip.fixed_streams(num_elements)
    check_fits(fixed, int(lengths.min()))
    sizes = {span.name: span.nbytes * lengths.size for span in fixed}
    tails = lengths - splitzip.escape_streams(num_elements, 0)[0].offset
    return {**sizes, "escapes": splitzip.ESCAPE_NBYTES * int(_num_escapes(tails).sum())}


def _lynx(
    fields: Mapping[str, Any], shape: Shape, lengths: Lengths, *, is_first: bool
) -> StreamSizes:
    config = lynx.LynxConfig.from_dict(fields)
    fixed = lynx.fixed_streams(shape, config, is_first=is_first)
    check_fits(fixed, int(lengths.min()))
    sizes = {span.name: span.nbytes * lengths.size for span in fixed}
    # pages as they are start where a stream of no bytes would
    start = place([("raw", 0)], fixed[-1].end)[0].offset
    return {**sizes, "raw_pages": int((lengths - start).clip(min=0).sum())}


def _num_escapes(tails: Lengths) -> Lengths:
    """Escapes of splitzip sections, from the bytes after the fixed streams."""
    # positions, padding to the next stream, exponents: more escapes never take fewer bytes
    counts = tails // splitzip.ESCAPE_NBYTES
    for _ in range(STREAM_ALIGNMENT // splitzip.ESCAPE_NBYTES):
        aligned = -(-2 * counts // STREAM_ALIGNMENT) * STREAM_ALIGNMENT
        counts = np.where(aligned + counts > tails, counts - 1, counts)
    if (counts < 0).any():
        raise InvalidField("a splitzip section is shorter than its offsets require")
    return counts


def _whole(name: str) -> Callable[[Mapping[str, Any], Shape, Lengths], StreamSizes]:
    return lambda config, shape, lengths: {name: int(lengths.sum())}


_STREAMS: dict[str, Callable[[Mapping[str, Any], Shape, Lengths], StreamSizes]] = {
    "raw": _whole("raw"),
    "zstd": _whole("zstd"),
    "splitzip": _splitzip,
    "gaac": _gaac,
}
