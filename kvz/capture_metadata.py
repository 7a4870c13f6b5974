"""The JSON document that a capture carries in its safetensors metadata under the key `kvz`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvz.formats.errors import IdentityMismatch, InvalidField, UnsupportedVersion

METADATA_KEY = "kvz"
SCHEMA_VERSION = 1

# Far above any model of today; keeps a hostile run length from becoming an allocation.
MAX_LAYERS = 4096

LAYER_KINDS = ("full", "sliding", "empty")
# Optional members at their default cost no bytes in the document.
_LAYER_DEFAULTS = {"window": None, "num_tokens": 0, "cumulative_length": 0}


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One cache layer.

    kind: "full", "sliding" (keeps the last `window` - 1 tokens) or "empty" (caches nothing).
    num_tokens: tokens that the layer's tensors hold.
    cumulative_length: tokens that the layer has seen; the next token's cache position.
    """

    kind: str
    window: int | None = None
    num_tokens: int = 0
    cumulative_length: int = 0

    def __post_init__(self) -> None:
        if self.kind not in LAYER_KINDS:
            raise InvalidField(f"layer kind must be one of {LAYER_KINDS}, got {self.kind!r}")
        counts = [self.num_tokens, self.cumulative_length]
        if self.kind == "sliding":
            counts.append(self.window if self.window is not None else -1)
        elif self.window is not None:
            raise InvalidField(f"a {self.kind} layer has no window, got {self.window!r}")
        if any(type(count) is not int or count < 0 for count in counts):
            raise InvalidField(f"layer counts must be integers >= 0, got {self}")
        if self.num_tokens != self.expected_tokens():
            raise InvalidField(
                f"a {self.kind} layer after {self.cumulative_length} tokens holds "
                f"{self.expected_tokens()}, got {self.num_tokens}"
            )

    def expected_tokens(self) -> int:
        """Tokens that a layer of this kind holds after `cumulative_length` tokens."""
        if self.kind == "empty":
            return 0
        if self.kind == "sliding" and self.window is not None and self.window > 1:
            return min(self.cumulative_length, self.window - 1)
        # transformers slices with [-window + 1:], which keeps everything for a window of one
        return self.cumulative_length


def pack_layers(layers: Iterable[LayerRecord]) -> dict[str, Any]:
    """Distinct records once, then `[record index, count]` runs in layer order."""
    records: list[LayerRecord] = []
    runs: list[list[int]] = []
    for layer in layers:
        if layer not in records:
            records.append(layer)
        index = records.index(layer)
        if runs and runs[-1][0] == index:
            runs[-1][1] += 1
        else:
            runs.append([index, 1])
    kinds = [
        {k: v for k, v in asdict(record).items() if k == "kind" or v != _LAYER_DEFAULTS[k]}
        for record in records
    ]
    return {"kinds": kinds, "runs": runs}


def unpack_layers(packed: object) -> tuple[LayerRecord, ...]:
    """Inverse of `pack_layers`.

    Raises InvalidField when the structure is not that of `pack_layers`.
    """
    try:
        records = [LayerRecord(**kind) for kind in packed["kinds"]]  # type: ignore[index]
        runs = [(index, count) for index, count in packed["runs"]]  # type: ignore[index]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidField(f"kvz metadata: layers are malformed ({error})") from None
    for index, count in runs:
        if type(index) is not int or type(count) is not int:
            raise InvalidField(f"kvz metadata: layer run {[index, count]!r} is not two integers")
        if not 0 <= index < len(records) or count < 1:
            raise InvalidField(f"kvz metadata: layer run {[index, count]} has no record or layer")
    if sum(count for _, count in runs) > MAX_LAYERS:
        raise InvalidField(f"kvz metadata: more than {MAX_LAYERS} layers")
    return tuple(records[index] for index, count in runs for _ in range(count))


def canonical_json(value: object) -> str:
    """The one JSON text of a value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def encode_metadata(document: Mapping[str, Any]) -> dict[str, str]:
    """Safetensors metadata holding `document` with the schema version added."""
    return {METADATA_KEY: canonical_json({"schema": SCHEMA_VERSION, **document})}


def decode_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The kvz document of a capture or archive.

    Raises IdentityMismatch when there is none, InvalidField when it is not a JSON object with
    the members that a restore needs and UnsupportedVersion when its schema is another.
    """
    if METADATA_KEY not in metadata:
        raise IdentityMismatch(
            f"no {METADATA_KEY!r} metadata: nothing says which model and tokens this cache is of"
        )
    try:
        document = json.loads(metadata[METADATA_KEY])
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"kvz metadata is not JSON: {error}") from None
    if not isinstance(document, dict) or type(document.get("schema")) is not int:
        raise InvalidField("kvz metadata has no integer member 'schema'")
    if document["schema"] != SCHEMA_VERSION:
        raise UnsupportedVersion(
            f"kvz metadata has schema {document['schema']}, this reader knows {SCHEMA_VERSION}"
        )
    for member in ("identity", "layers", "shard", "tokens"):
        if not isinstance(document.get(member), dict):
            raise InvalidField(f"kvz metadata has no object {member!r}")
    return document
