"""The capture under samples/: real keys and values for tests that need them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

PATH = Path(__file__).parents[2] / "samples" / "smollm2-docs.safetensors"


def cut(path: Path, *, layers: int, tokens: int) -> Path:
    """Write the first layers and tokens of the capture to ``path``; keys and values only."""
    data = PATH.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    entries, payload = {}, b""
    for layer in range(layers):
        for part in ("key", "value"):
            name = f"layers.{layer}.{part}"
            (batch, heads, stored, head_dim), (begin, _) = (
                header[name][field] for field in ("shape", "data_offsets")
            )
            assert header[name]["dtype"] == "BF16"
            assert stored >= tokens
            start = len(payload)
            for row in range(batch * heads):
                position = 8 + length + begin + 2 * row * stored * head_dim
                payload += data[position : position + 2 * tokens * head_dim]
            entries[name] = {
                "dtype": "BF16",
                "shape": [batch, heads, tokens, head_dim],
                "data_offsets": [start, len(payload)],
            }
    document = {"__metadata__": {"cut": "ü"}, **entries}
    encoded = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + payload)
    return path
