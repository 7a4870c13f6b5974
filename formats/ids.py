"""Numbers that are written into files. They are literal, and none is ever reused."""

from __future__ import annotations

from enum import IntEnum

#: The newest version of the container that this code reads.
FORMAT_VERSION = (0, 2)
#: Required-feature bits that this reader knows.
KNOWN_FEATURES = 0


class SectionKind(IntEnum):
    """What a section holds (spec/container.md, "Section kinds")."""

    CODEBOOK = 1
    RAW = 2
    ENCODED = 3
    ANCHOR = 4
    RESIDUAL = 5
    INDEX = 0xFFFF


#: Codec names as they stand in the head.
CODEC_NAMES = ("raw", "zstd", "splitzip", "gaac", "lynx", "pnmix")
#: Codecs whose chunks are an ANCHOR section and, later in the file, a RESIDUAL section.
PROGRESSIVE_CODECS = frozenset({"lynx"})
#: Codecs whose decoded values are not those that were encoded.
LOSSY_CODECS = frozenset({"lynx", "pnmix"})
#: The version of the format that brought a codec, where it is not the first.
CODEC_VERSIONS = {"lynx": (0, 2), "pnmix": (0, 2)}
#: The version of a file without any of these.
FIRST_VERSION = (0, 1)

#: The key of a safetensors header that is not a tensor.
METADATA_KEY = "__metadata__"
#: Safetensors dtype name -> bytes per element.
DTYPE_NBYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
#: Dtypes whose most significant bit is a sign that the byte-plane split moves out of the way.
SIGNED_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
