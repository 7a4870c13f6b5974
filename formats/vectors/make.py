"""Write the golden files: ``python formats/vectors/make.py`` from the top of the checkout.

``good/`` holds archives that must decode to the stated tensors for ever, ``bad/`` archives that
must be rejected with the stated error. ``manifest.json`` lists both. Nothing is ever overwritten: a
new vector is added to the tables below, an old one stays as it is. What a lossy archive decodes to,
whole (``sha256``) and, if it has any, by its anchors (``anchor_sha256``), is what the reader of
tests/support that was written from the specification makes of it, not what kvz does.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import spec_reader  # noqa: E402
import tiny_archive  # noqa: E402
from archive_builder import Archive  # noqa: E402
from safetensors_file import safetensors_bytes  # noqa: E402

Listing = list[tuple[str, str, list[int], bytes]]
METADATA = {"kvz": "{}", "ключ": "värde"}


# -- inputs, without a random generator, so that they can be stated in any language


def bf16(shape: list[int], exponent: Callable[[int, int, int], int]) -> bytes:
    """BF16 ``[1, heads, tokens, head_dim]``: exponent by (head, token, channel).

    Sign and mantissa of element i are ``37 * i mod 256``, sign in the highest bit.
    """
    _, heads, tokens, head_dim = shape
    out = bytearray()
    cells = ((h, t, c) for h in range(heads) for t in range(tokens) for c in range(head_dim))
    for i, (h, t, c) in enumerate(cells):
        packed = 37 * i % 256
        out += struct.pack("<H", (packed & 0x80) << 8 | exponent(h, t, c) << 7 | packed & 0x7F)
    return bytes(out)


def level(h: int, t: int, c: int) -> int:
    """Exponents of a cache: a level per channel; every spread from one value to all of them."""
    spread = (1, 3, 6, 14, 90)[(c + t // 8) % 5]
    return 100 + (7 * c + 3 * h) % 11 + (5 * t + c) % spread


def narrow(h: int, t: int, c: int) -> int:
    """Sixteen neighbouring exponents and, rarely, others."""
    return 112 + (3 * t + c) % 16 if (t * 64 + c) % 97 else (t + c) % 256


def gaps(h: int, t: int, c: int) -> int:
    """Sixteen even exponents, a few odd ones."""
    return 2 * ((3 * t + c) % 16) + 100 + ((t * 64 + c) % 89 == 0)


def everywhere(h: int, t: int, c: int) -> int:
    """No structure: what no codec makes smaller."""
    return (t * t * 31 + c * c * 17 + 101 * t * c + 13 * h) % 256


def near(h: int, t: int, c: int) -> int:
    """A level per channel that hardly moves."""
    return 121 + (3 * c + h) % 5 + (5 * t + c) % 3


def near_with_nan(h: int, t: int, c: int) -> int:
    """The same, with one NaN: head 1, token 100, channel 4."""
    return 255 if (h, t, c) == (1, 100, 4) else near(h, t, c)


def keys(shape: list[int], exponent: Callable[[int, int, int], int]) -> Listing:
    return [("layers.0.key", "BF16", shape, bf16(shape, exponent))]


def keys_and_values(shape: list[int]) -> Listing:
    """Keys with a NaN, values without."""
    values = ("layers.0.value", "BF16", shape, bf16(shape, near))
    return [*keys(shape, near_with_nan), values]


def ramp(nbytes: int) -> bytes:
    return bytes(i * i % 251 for i in range(nbytes))


EVERY_DTYPE: Listing = [
    *((d, d, [3, 5], ramp(15)) for d in ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0")),
    *((d, d, [3, 5], ramp(15)) for d in ("F8_E4M3FNUZ", "F8_E5M2FNUZ")),
    *((d, d, [3, 5], ramp(30)) for d in ("U16", "I16", "F16", "BF16")),
    *((d, d, [3, 5], ramp(60)) for d in ("U32", "I32", "F32")),
    *((d, d, [3, 5], ramp(120)) for d in ("U64", "I64", "F64", "C64")),
    ("scalar", "F32", [], ramp(4)),
    ("empty", "F32", [2, 0, 3], b""),
    ("имя 名", "U8", [1], b"\x01"),
]


def mixed(itemsize: int) -> bytes:
    """200 elements: the lowest byte is never the same (one byte wide: repeats), others hardly move.

    Byte i of the former is ``x[0] = 0, x[i + 1] = (5 * x[i] + 3) mod 256``.
    """
    low = bytearray(200)
    for i in range(1, 200):
        low[i] = (5 * low[i - 1] + 3) % 256 if itemsize > 1 else i % 7
    return b"".join(
        bytes([byte]) + bytes([i // 100]) * (itemsize - 1) for i, byte in enumerate(low)
    )


MIXED: Listing = [
    *((d, d, [200], mixed(1)) for d in ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0")),
    *((d, d, [200], mixed(1)) for d in ("F8_E4M3FNUZ", "F8_E5M2FNUZ")),
    *((d, d, [200], mixed(2)) for d in ("U16", "I16", "F16", "BF16")),
    *((d, d, [200], mixed(4)) for d in ("U32", "I32", "F32")),
    *((d, d, [200], mixed(8)) for d in ("U64", "I64", "F64", "C64")),
]


@dataclass(frozen=True)
class Good:
    """An archive that ``kvz.compress`` makes of a listing.

    ``chunk_nbytes``: chunks of about this size, for a small file of several. ``by_earlier``: an
    earlier encoder made it; today's would choose other scales.
    """

    pins: str
    codec: str
    listing: Listing
    options: dict[str, str] = field(default_factory=dict)
    chunk_nbytes: int | None = None
    by_earlier: bool = False

    @property
    def is_lossy(self) -> bool:
        return self.codec in ("lynx", "pnmix")

    @property
    def is_progressive(self) -> bool:
        return self.codec == "lynx"

    def compress(self, target: Path, *, threads: int = 1) -> None:
        """Write the archive; the source lies beside it for a moment."""
        import kvz
        import kvz.layout

        source = target.with_suffix(".source")
        source.write_bytes(safetensors_bytes(self.listing, METADATA))
        chunk_nbytes = self.chunk_nbytes or kvz.layout.TARGET_CHUNK_NBYTES
        with mock.patch.object(kvz.layout, "TARGET_CHUNK_NBYTES", chunk_nbytes):
            kvz.compress(source, target, self.codec, codec_options=self.options, threads=threads)
        source.unlink()


def _gaac(windows: str, axis: str) -> dict[str, str]:
    return {"windows": windows, "axis": axis}


GOOD: dict[str, Good] = {
    "gaac-234-token": Good(
        "all four tags, a vector of 32 columns and a rest, a tile of 3 tokens",
        "gaac", keys([1, 2, 19, 40], level), _gaac("2/3/4", "token"),
    ),
    "gaac-34-token": Good(
        "plane 2 of every group", "gaac", keys([1, 2, 19, 40], level), _gaac("3/4", "token")
    ),
    "gaac-234-channel": Good(
        "groups along channels, the last row of a tile cut off",
        "gaac", keys([1, 2, 19, 39], level), _gaac("2/3/4", "channel"),
    ),
    "gaac-34-channel": Good(
        "groups along channels, plane 2 of every group",
        "gaac", keys([1, 2, 19, 39], level), _gaac("3/4", "channel"),
    ),
    "gaac-blocks": Good(
        "several offsets: tiles of 256 columns, two to a block",
        "gaac", keys([1, 1, 33, 256], level), _gaac("2/3/4", "token"),
    ),
    "gaac-raw-chunk": Good(
        "a chunk that encoding would make larger is stored RAW",
        "gaac", keys([1, 1, 16, 16], everywhere),
    ),
    "splitzip-run": Good(
        "16 neighbouring exponents, escapes in two blocks",
        "splitzip", keys([1, 1, 131, 64], narrow),
    ),
    "splitzip-gaps": Good(
        "a codebook with gaps, an odd number of elements", "splitzip", keys([1, 1, 33, 63], gaps)
    ),
    "zstd-planes": Good(
        "compressed and stored planes of every dtype", "zstd", MIXED, {"level": "3"}
    ),
    "raw-every-dtype": Good(
        "RAW sections of every dtype, a scalar, no elements", "raw", EVERY_DTYPE
    ),
    "lynx-linear": Good(
        "linear code, odd head_dim, two chunks, exact tokens, short last pages, one in `raw`",
        "lynx", keys([1, 2, 104, 9], near_with_nan),
        {"page_tokens": "32", "group_tokens": "16", "exact_tokens": "2"}, chunk_nbytes=2048,
    ),
    "lynx-paper": Good(
        "companded code, a short last group",
        "lynx", keys([1, 2, 43, 16], near), {"preset": "paper"},
    ),
    "lynx-token": Good(
        "groups along the channels of a token, an odd number of tokens, two pages",
        "lynx", keys([1, 2, 33, 40], near),
        {"grouping": "token", "page_tokens": "32", "group_tokens": "16", "exact_tokens": "1"},
    ),
    "pnmix-paper": Good(
        "fp16 scales, interleaved pairs of half a head, an exact tail, a group of keys in `raw`",
        "pnmix", keys_and_values([1, 2, 107, 16]),
        {"preset": "paper", "values": "2", "group_tokens": "20", "sink_tokens": "4",
         "criterion": "k_norm", "rope": "interleaved", "rotary_dim": "8"},
        by_earlier=True,
    ),
    "pnmix-page": Good(
        "bytes as scales, no pairs, odd head_dim, chunks, short last pages, a group in `raw`",
        "pnmix", keys_and_values([1, 2, 104, 9]),
        {"values": "4", "group_tokens": "12", "page_tokens": "24", "sink_tokens": "3",
         "criterion": "k_range", "high_bits": "5", "low_bits": "2", "salient": "0.3"},
        chunk_nbytes=2048, by_earlier=True,
    ),
    "pnmix-fitted": Good(
        "fp16 scales, interleaved pairs of half a head, an exact tail, fitted levels",
        "pnmix", keys_and_values([1, 2, 107, 16]),
        {"preset": "paper", "values": "2", "group_tokens": "20", "sink_tokens": "4",
         "criterion": "k_norm", "rope": "interleaved", "rotary_dim": "8"},
    ),
    "pnmix-fitted-page": Good(
        "bytes as scales, odd head_dim, chunks, fitted levels of 1 and 4 bits",
        "pnmix", keys_and_values([1, 2, 104, 9]),
        {"values": "4", "group_tokens": "12", "page_tokens": "24", "sink_tokens": "3",
         "criterion": "k_range", "high_bits": "4", "low_bits": "1", "salient": "0.3"},
        chunk_nbytes=2048,
    ),
}  # fmt: skip

#: Built by hand from the worked examples of the specification.
HAND_MADE = "every-codec"
HAND_MADE_PINS = "the worked examples of all codec pages; a tensor of two chunks"
#: It was bad as long as readers were of format 0.1.
READER_0_2 = "lowest-reader-0.2"
READER_0_2_PINS = "the hand-made archive with 0.2 as the lowest reader version"


# -- bad files: the hand-made one with one thing changed


def _set(section: int, payload: bytes) -> Callable[[Archive], None]:
    def change(archive: Archive) -> None:
        archive.sections[section].payload = payload

    return change


def _prelude(**fields: Any) -> Callable[[Archive], None]:
    return lambda archive: setattr(archive, "prelude", fields)


def _tensor(number: int, **fields: Any) -> Callable[[Archive], None]:
    def change(archive: Archive) -> None:
        archive.head["tensors"][number].update(fields)

    return change


def _unknown_codec(archive: Archive) -> None:
    archive.head["codecs"][3]["name"] = "brotli"


def _twice(archive: Archive) -> None:
    archive.sections.insert(5, archive.sections[5])


def _swapped(archive: Archive) -> None:
    archive.sections[5], archive.sections[6] = archive.sections[6], archive.sections[5]


def _late_codebook(archive: Archive) -> None:
    archive.sections[0], archive.sections[1] = archive.sections[1], archive.sections[0]


def _without(section: int) -> Callable[[Archive], None]:
    def change(archive: Archive) -> None:
        del archive.sections[section]

    return change


def _padding(archive: Archive) -> None:
    archive.sections[1].gap = 1


def _replaced(streams: list[bytes], index: int, stream: bytes) -> bytes:
    return tiny_archive.streams(*streams[:index], stream, *streams[index + 1 :])


_GAAC, _SPLITZIP = tiny_archive.GAAC_STREAMS, tiny_archive.SPLITZIP_STREAMS


@dataclass(frozen=True)
class Bad:
    """What is changed in the hand-made archive, and the error that a reader must raise."""

    change: Callable[[Archive], None]
    error: str
    message: str


BAD: dict[str, Bad] = {
    "magic": Bad(_prelude(magic=b"KVZ\0\0\0\0\0"), "NotKvzFile", "not a kvz file"),
    "text-mode": Bad(_prelude(magic=b"\x89KVZ\n\x1a\n\0"), "NotKvzFile", "text-mode transfer"),
    "newest-reader": Bad(
        _prelude(reader_version=(65535, 65535)),
        "UnsupportedVersion", "needs a reader of format 65535.65535",
    ),
    "unknown-feature": Bad(_prelude(features=4), "UnsupportedFeature", "needs features 0x4"),
    "prelude-reserved": Bad(
        _prelude(reserved=b"\1" + bytes(23)), "InvalidField", "reserved bytes 36..60"
    ),
    "head-too-long": Bad(_prelude(head_length=1 << 40), "LimitExceeded", "exceeds 67108864"),
    "unknown-codec": Bad(_unknown_codec, "UnknownCodec", "codec 'brotli' is not known"),
    "tensor-too-large": Bad(_tensor(4, shape=[1 << 48, 2]), "LimitExceeded", "bytes exceed"),
    "codec-of-another-dtype": Bad(
        _tensor(0, dtype="I16"), "InvalidField", "codec gaac does not hold I16"
    ),
    "codebook-missing": Bad(_without(0), "InvalidField", "'layers.0.key' has no codebook"),
    "codebook-late": Bad(_late_codebook, "InvalidField", "codebook"),
    "chunk-missing": Bad(_without(6), "InvalidField", "lists 4 chunks, the head needs 5"),
    "chunk-twice": Bad(_twice, "InvalidField", "lists 6 chunks, the head needs 5"),
    "chunks-swapped": Bad(_swapped, "InvalidField", "chunk 0 of r twice or out of order"),
    "padding": Bad(_padding, "InvalidField", "padding before byte"),
    "raw-length": Bad(_set(5, b"\1\2"), "InvalidField", "raw section has 2 bytes, must have 3"),
    "gaac-base-too-high": Bad(
        _set(0, b"\1\0\0\xf1"), "InvalidField", "a window that reaches beyond exponent 255"
    ),
    "gaac-spare-tag-bit": Bad(
        _set(1, _replaced(_GAAC, 3, b"\x06\x00")), "InvalidField", "a tag has a value"
    ),
    "gaac-offset": Bad(_set(1, _replaced(_GAAC, 4, b"\1\0\0\0")), "InvalidField", "escape offset"),
    "gaac-escapes-short": Bad(
        _set(1, _replaced(_GAAC, 3, b"\x02\x02")), "InvalidField", "more escapes than there are"
    ),
    "gaac-escapes-long": Bad(
        _set(1, _replaced(_GAAC, 5, b"\xff\0")), "InvalidField", "the number of escapes"
    ),
    "splitzip-codebook": Bad(
        _set(2, bytes([*range(15), 14])), "InvalidField", "must be 16 ascending exponents"
    ),
    "splitzip-position": Bad(
        _set(3, _replaced(_SPLITZIP, 3, b"\3\0")), "InvalidField", "outside its block"
    ),
    "splitzip-offset": Bad(
        _set(3, _replaced(_SPLITZIP, 2, struct.pack("<2I", 1, 1))), "InvalidField", "escape offset"
    ),
    "splitzip-length": Bad(
        _set(3, _replaced(_SPLITZIP, 2, bytes(8))), "InvalidField", "must have 48 bytes"
    ),
    "zstd-planes-short": Bad(
        _set(4, tiny_archive.ZSTD_PAYLOAD[:-1]), "InvalidField", "planes end at byte 12"
    ),
    "zstd-plane-length": Bad(
        _set(4, struct.pack("<2I", 1 << 31 | 1, 1 << 31 | 3) + b"\x7f\1\2\3"),
        "InvalidField", "stored plane has 1 bytes, must have 2",
    ),
}  # fmt: skip


def bad_bytes(name: str) -> bytes:
    """A bad archive."""
    archive = tiny_archive.tiny()
    BAD[name].change(archive)
    return archive.to_bytes()


def damaged() -> dict[str, tuple[bytes, str, str]]:
    """Bad files that no builder makes: name -> (bytes, error, message)."""
    whole = tiny_archive.tiny().to_bytes()
    payload = whole.index(tiny_archive.ZSTD_PAYLOAD)
    flipped = bytearray(whole)
    flipped[payload] ^= 1
    return {
        "no-trailer": (whole[:-64], "TruncatedFile", "incomplete"),
        "cut-in-a-section": (whole[: payload + 3], "TruncatedFile", "incomplete"),
        "flipped-bit": (bytes(flipped), "ChecksumMismatch", "chunk 0 of z"),
        "bytes-after": (whole + b"\0", "TruncatedFile", "bytes follow the trailer"),
    }


class Changed(SystemExit):
    """A golden file or its entry would change."""


def _write(path: Path, data: bytes) -> None:
    if path.exists():
        if path.read_bytes() != data:
            raise Changed(f"{path} exists with other bytes: it stays, and nothing more is written")
        return
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


def _extend_manifest(entries: dict[str, list[dict[str, Any]]]) -> None:
    """Add new entries; those that are there must be the same."""
    path = FOLDER / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else {"good": [], "bad": []}
    for kind, news in entries.items():
        known = {entry["name"]: entry for entry in manifest[kind]}
        for entry in news:
            if known.setdefault(entry["name"], entry) != entry:
                raise Changed(f"{path}: the entry of {entry['name']} would change")
        manifest[kind] = list(known.values())
    path.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


def hand_made() -> dict[str, tuple[bytes, str]]:
    """Good files of the builder: name -> (bytes, what it pins)."""
    newer = tiny_archive.tiny()
    _prelude(reader_version=(0, 2))(newer)
    return {
        HAND_MADE: (tiny_archive.tiny().to_bytes(), HAND_MADE_PINS),
        READER_0_2: (newer.to_bytes(), READER_0_2_PINS),
    }


def _sha256(values: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(raw).hexdigest() for name, raw in values.items()}


def second_reader_sha256(archive: bytes, *, anchor_only: bool) -> dict[str, str]:
    """Tensor -> SHA-256 of what tests/support/spec_reader.py decodes."""
    _, tensors = spec_reader.decode_file(archive, anchor_only=anchor_only)
    return _sha256({name: raw for name, (_, _, raw) in tensors.items()})


def _expected(good: Good, target: Path) -> dict[str, dict[str, str]]:
    if not good.is_lossy:
        return {"sha256": _sha256({name: raw for name, _, _, raw in good.listing})}
    archive = target.read_bytes()
    expected = {"sha256": second_reader_sha256(archive, anchor_only=False)}
    if good.is_progressive:
        expected["anchor_sha256"] = second_reader_sha256(archive, anchor_only=True)
    return expected


def _good_entries() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for name, good in GOOD.items():
        target = FOLDER / "good" / f"{name}.kvz"
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            good.compress(target)
        fixed = {"name": name, "pins": good.pins, "codec": good.codec, "options": good.options}
        entries.append({**fixed, **_expected(good, target)})
    for name, (data, pins) in hand_made().items():
        _write(FOLDER / "good" / f"{name}.kvz", data)
        hashes = _sha256(tiny_archive.VALUES)
        entries.append({"name": name, "pins": pins, "sha256": hashes})
    return entries


def main() -> None:
    """Write the vectors that are not there yet and add them to the manifest."""
    bad = {name: (bad_bytes(name), b.error, b.message) for name, b in BAD.items()}
    entries = []
    for name, (data, error, message) in {**bad, **damaged()}.items():
        _write(FOLDER / "bad" / f"{name}.kvz", data)
        entries.append({"name": name, "error": error, "message": message})
    _extend_manifest({"good": _good_entries(), "bad": entries})


if __name__ == "__main__":
    main()
