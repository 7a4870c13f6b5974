"""The report of ``kvz inspect`` as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvz.cli.text import aligned, count, format_nbytes, printable, shortened
from kvz.contents import Identity, LayerGroup, StoredPart
from kvz.inspection import CodecUse, Inspection

_LABEL_LEN = 10
_DIGEST_LEN = 12
_VALUE_LEN = 80
#: Lines for tensors outside of layers, and for metadata; the JSON report has all of them.
_MAX_LINES = 20


def lines(found: Inspection) -> Iterator[str]:
    """The report, line by line."""
    loss = "lossless" if found.lossless else f"lossy: {printable(found.lossy)}"
    yield f"{printable(found.path)}: kvz archive, {loss}"
    version, reader = found.format_version, found.reader_version
    yield _field(
        "format",
        f"{version[0]}.{version[1]} (needs a reader of {reader[0]}.{reader[1]}), "
        f"written by {shortened(found.writer, _VALUE_LEN) or 'unknown'}",
    )
    yield _field(
        "size",
        f"{format_nbytes(found.nbytes)} for {format_nbytes(found.original_nbytes)}, "
        f"ratio {found.ratio:.3f}, {found.bits_per_element:.3f} bits per element, "
        f"{count(found.num_tensors, 'tensor')}, {count(found.num_sections, 'section')}",
    )
    if found.anchor_nbytes is not None:
        yield _field(
            "anchors",
            f"the first {format_nbytes(found.anchor_nbytes)}, "
            f"{found.anchor_bits_per_element:.3f} bits per element",
        )
    if found.costs:
        each = [
            f"{cost.what} {format_nbytes(cost.nbytes)} in {count(cost.num_requests, 'request')}"
            for cost in found.costs
        ]
        yield _field("transfers", ", ".join(each))
    yield from _identity_lines(found.identity, found.problem)
    shown = [f"{key}: {value}" for key, value in found.metadata.items()]
    yield from _limited("metadata", [shortened(line, _VALUE_LEN) for line in shown])
    yield from _limited("layers", [_layer_line(group) for group in found.layers], None)
    yield from _limited(
        "tensors",
        [
            f"{shortened(t.name, _VALUE_LEN)} {list(t.shape)} {t.dtype}, {t.codec}"
            + (f", {t.count} of them" if t.count > 1 else "")
            for t in found.others
        ],
    )
    yield ""
    yield from _byte_table(found)
    for codec in found.codecs:
        if codec.tags is not None:
            shares = ", ".join(f"{n} {share:.2%}" for n, share in codec.tags.shares.items())
            yield f"tags of {codec.tags.num_groups} groups: {shares}"


def _field(label: str, text: str) -> str:
    return f"{label:<{_LABEL_LEN}}{text}"


def _limited(label: str, texts: list[str], limit: int | None = _MAX_LINES) -> Iterator[str]:
    for i, text in enumerate(texts[:limit]):
        yield _field(label if i == 0 else "", text)
    if limit is not None and len(texts) > limit:
        yield _field("", f"and {len(texts) - limit} more (--json has all)")


def _digest(text: str | None) -> str:
    return "unknown" if text is None else shortened(text[:_DIGEST_LEN], _DIGEST_LEN)


def _identity_lines(identity: Identity | None, problem: str | None) -> Iterator[str]:
    if problem is not None:
        yield _field("identity", f"not readable: {printable(problem)}")
    elif identity is None:
        yield _field("identity", "none: nothing says which model and tokens this cache is of")
    if identity is None:
        return
    names = [identity.model_type, identity.architecture, identity.dtype]
    yield _field(
        "model",
        " ".join(shortened(name, _VALUE_LEN) for name in names if name is not None)
        + f", weights {_digest(identity.weights)}, config {_digest(identity.config_hash)}",
    )
    if identity.rope:
        yield _field("rope", shortened(_rope(identity.rope), 2 * _VALUE_LEN))
    batch = "" if identity.batch in (None, 1) else f" in each of {identity.batch} sequences"
    yield _field(
        "tokens", f"{identity.num_tokens}{batch}, sha256 {_digest(identity.tokens_sha256)}"
    )
    if identity.kv_heads is not None:
        first, end, total = identity.kv_heads
        whole = (first, end) == (0, total)
        yield _field("kv heads", f"all {total}" if whole else f"{first} to {end - 1} of {total}")
    if identity.origin is not None:
        yield _field("origin", shortened(identity.origin, _VALUE_LEN))


def _rope(rope: Mapping[str, Any]) -> str:
    facts = [f"pairs {rope.get('pairing')}", f"rotary_dim {rope.get('rotary_dim')}"]
    parameters = rope.get("parameters")
    if isinstance(parameters, dict):
        facts += [f"{key} {value}" for key, value in parameters.items()]
    return ", ".join(facts)


def _layer_line(group: LayerGroup) -> str:
    numbers = f"{group.first}" if group.first == group.last else f"{group.first}-{group.last}"
    window = "" if group.window is None else f" window {group.window}"
    kind = "" if group.kind is None else f"{group.kind}{window}, "
    # states of other kinds are in the list of tensors
    absent = "nothing stored" if group.kind == "empty" else "no keys or values"
    return f"{numbers}: {kind}{_parts(group.parts) or absent}"


def _parts(parts: tuple[StoredPart, ...]) -> str:
    """Key and value, together when they are alike; nothing when there is neither."""
    named: dict[str, list[str]] = {}
    for part in parts:
        named.setdefault(f"{list(part.shape)} {part.dtype}", []).append(part.part)
    shown = [f"{'/'.join(names)} {what}" for what, names in named.items()]
    return ", ".join(shown)


def _codec_label(codec: CodecUse) -> str:
    config = []
    for key, value in codec.config.items():
        text = "/".join(str(v) for v in value) if isinstance(value, list) else str(value)
        config.append(f" {key}={text}")
    return shortened(codec.name + "".join(config), _VALUE_LEN)


def _byte_table(found: Inspection) -> list[str]:
    rows = [("stored as", "tensors", "bytes", "share", "bits/element", "ratio")]

    def share(nbytes: int) -> str:
        return f"{nbytes / found.nbytes:.2%}"

    for codec in found.codecs:
        stored = codec.stored_nbytes
        ratio = f"{codec.original_nbytes / stored:.3f}" if stored else "-"
        bits = f"{codec.bits_per_element:.3f}"
        label = _codec_label(codec)
        rows.append((label, str(codec.num_tensors), str(stored), share(stored), bits, ratio))
        if [stream.name for stream in codec.streams] == [codec.name]:
            continue
        for use in codec.streams:
            per_element = f"{use.bits_per_element:.3f}"
            rows.append((f"  {use.name}", "", str(use.nbytes), share(use.nbytes), per_element, ""))
    overhead = found.overhead
    for name, nbytes in (
        ("head", overhead.head_nbytes),
        ("frames", overhead.frames_nbytes),
        ("index, trailer", overhead.index_nbytes),
    ):
        rows.append((name, "", str(nbytes), share(nbytes), "", ""))
    rows.append(("file", str(found.num_tensors), str(found.nbytes), "", "", f"{found.ratio:.3f}"))
    return aligned(rows, "<>>>>>")
