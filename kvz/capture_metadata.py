"""The JSON document that a capture carries in its safetensors metadata under the key `kvz`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvz.formats.errors import IdentityMismatch, InvalidField, UnsupportedVersion

METADATA_KEY = "kvz"
SCHEMA_VERSION = 1
#: Columns of the prompt that one row of a capture's pair norms is the mean of.
PAIR_NORM_BLOCK = 1024

# Far above any model of today; keeps a hostile run length from becoming an allocation.
MAX_LAYERS = 4096

# Optional members at their default cost no bytes in the document.
_LAYER_DEFAULTS: dict[str, Any] = {
    "window": None,
    "num_tokens": 0,
    "cumulative_length": 0,
    "options": {},
    "state": None,
}

# What a layer holds after it has seen cumulative_length tokens.
_ALL, _WINDOW, _STATIC_WINDOW, _SOME, _NONE = "all", "window", "static window", "some", "none"
_HELD = {
    "full": _ALL,
    "sliding": _WINDOW,
    "empty": _NONE,
    "evicted": _SOME,
    "indexed": _ALL,
    "minimax_m3_sparse": _ALL,
    "linear": _NONE,
    "hybrid": _ALL,
    "hybrid_sliding": _WINDOW,
    "heavily_compressed": _WINDOW,
    "compressed_sparse": _WINDOW,
    "reference_sliding": _SOME,
    "static": _ALL,
    "static_sliding": _STATIC_WINDOW,
    "static_indexed": _ALL,
    "static_minimax_m3_sparse": _ALL,
    "static_hybrid": _ALL,
    "static_hybrid_sliding": _STATIC_WINDOW,
    "fp8": _ALL,
    "hqq": _ALL,
}
LAYER_KINDS = tuple(_HELD)
_WINDOWED_KINDS = frozenset(
    {kind for kind, held in _HELD.items() if held in (_WINDOW, _STATIC_WINDOW)}
    | {"reference_sliding"}
)


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One cache layer.

    kind: one of `LAYER_KINDS`: "full", "sliding" (keeps the last `window` - 1 tokens), "empty"
    (caches nothing), "evicted" (a full layer that holds some of the tokens it has seen), ...
    window: of the kinds that slide, else None.
    num_tokens: tokens that the layer's keys and values hold.
    cumulative_length: tokens that the layer has seen; the next token's cache position.
    options: JSON scalars that the layer was made with or counts besides.
    state: dtype and shape of each of its tensors; None for key and value
    `[batch, kv_heads, num_tokens, head_dim]` in the model's dtype, and nothing else.
    """

    kind: str
    window: int | None = None
    num_tokens: int = 0
    cumulative_length: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.kind not in LAYER_KINDS:
            raise InvalidField(f"layer kind must be one of {LAYER_KINDS}, got {self.kind!r}")
        counts = [self.num_tokens, self.cumulative_length]
        if self.kind in _WINDOWED_KINDS:
            counts.append(self.window if self.window is not None else -1)
        elif self.window is not None:
            raise InvalidField(f"a {self.kind} layer has no window, got {self.window!r}")
        if any(type(count) is not int or count < 0 for count in counts):
            raise InvalidField(f"layer counts must be integers >= 0, got {self}")
        if self.num_tokens not in self._tokens_held():
            held = self._tokens_held()
            raise InvalidField(
                f"a {self.kind} layer after {self.cumulative_length} tokens holds "
                f"{held[0] if len(held) == 1 else f'up to {held[-1]}'}, got {self.num_tokens}"
            )
        if not isinstance(self.options, Mapping):
            raise InvalidField(f"layer options must be an object, got {self.options!r}")
        if self.state is not None:
            _check_state(self.state)

    def _tokens_held(self) -> range:
        """Numbers of tokens that a layer of this kind can hold after `cumulative_length`."""
        held, seen = _HELD[self.kind], self.cumulative_length
        if held == _NONE:
            return range(1)
        if held == _SOME:
            return range(seen + 1)
        if held == _STATIC_WINDOW and self.window is not None:
            seen = min(seen, self.window)
        elif held == _WINDOW and self.window is not None and self.window > 1:
            # transformers slices with [-window + 1:], which keeps everything for a window of one
            seen = min(seen, self.window - 1)
        return range(seen, seen + 1)


def _check_state(state: object) -> None:
    valid = isinstance(state, Mapping) and all(
        isinstance(name, str)
        and isinstance(entry, (list, tuple))
        and len(entry) == 2
        and isinstance(entry[0], str)
        and isinstance(entry[1], (list, tuple))
        and all(type(size) is int and size >= 0 for size in entry[1])
        for name, entry in state.items()
    )
    if not valid:
        raise InvalidField(f"layer state must map names to [dtype, shape], got {state!r}")


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


def read_shard(document: Mapping[str, Any]) -> tuple[int, int, int]:
    """Which kv heads a file holds: first, end (not included) and of how many.

    Raises InvalidField when the document's shard does not say so.
    """
    heads = document["shard"].get("kv_heads")
    if (
        not isinstance(heads, list)
        or len(heads) != 3
        or any(type(head) is not int for head in heads)
        or not 0 <= heads[0] <= heads[1] <= heads[2]
    ):
        raise InvalidField(f"kvz metadata: shard.kv_heads must be [first, end, of], got {heads!r}")
    return heads[0], heads[1], heads[2]
