"""Codecs on disk, by the names of :data:`kvz.formats.ids.CODEC_NAMES`.

:func:`stream_nbytes` says what each byte of a codec's sections does, from their lengths alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvz.formats.codecs import gaac, lynx, pnmix, splitzip
from kvz.formats.codecs.spans import STREAM_ALIGNMENT, Span, check_fits
from kvz.formats.codecs.spans import place as place_streams
from kvz.formats.errors import InvalidField

#: Codecs of which a chunk's streams depend on where in its tensor it lies.
PLACED_CODECS = frozenset({"pnmix"})

Shape = tuple[int, int, int]
#: Payload lengths of sections of one shape, int64.
Lengths = NDArray[np.int64]
StreamSizes = dict[str, int]


class Place(NamedTuple):
    """Where a chunk lies: its first token, those that its tensor has, and the tensor's codebook."""

    start: int
    num_tokens: int
    codebook: bytes


def stream_nbytes(
    codec: str,
    config: Mapping[str, Any],
    shape: Shape,
    lengths: Lengths,
    *,
    place: Place | None = None,
) -> StreamSizes:
    """Bytes by stream, all sections together; what aligns the streams is ``padding``.

    ``lengths`` are those of the payloads of one or more ENCODED or ANCHOR sections, each of a chunk
    of ``shape``; ``config`` is that of the head. ``place`` is needed for :data:`PLACED_CODECS`, and
    for ``lynx`` of the first chunk of a tensor; then there is one section. Raises InvalidField when
    a payload is shorter than the shape requires.
    """
    if codec == "lynx":
        sizes = _lynx(config, shape, lengths, is_first=place is not None and place.start == 0)
    elif codec in PLACED_CODECS and place is not None:
        sizes = _pnmix(config, shape, lengths, place)
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
    return {**sizes, "raw_pages": _after(fixed, lengths)}


def _pnmix(fields: Mapping[str, Any], shape: Shape, lengths: Lengths, where: Place) -> StreamSizes:
    config = pnmix.config_from_dict(fields)
    geometry = pnmix.Geometry.of(shape, config, where.start, where.num_tokens)
    if isinstance(config, pnmix.KeyConfig):
        salient = pnmix.salient_channels(where.codebook, shape[0], shape[2], config)
        fixed = pnmix.key_streams(geometry, config, int(salient.sum()))
    else:
        fixed = pnmix.value_streams(geometry, config)
    check_fits(fixed, int(lengths.min()))
    sizes = {span.name: span.nbytes * lengths.size for span in fixed}
    return {**sizes, "raw_groups": _after(fixed, lengths)}


def _after(fixed: Sequence[Span], lengths: Lengths) -> int:
    """Bytes of a last stream whose length nothing but the section's tells."""
    start = place_streams([("last", 0)], fixed[-1].end)[0].offset
    return int((lengths - start).clip(min=0).sum())


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
