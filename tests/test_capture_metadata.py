from __future__ import annotations

import json
from typing import Any

import pytest

from kvz.capture_metadata import (
    LayerRecord,
    decode_metadata,
    encode_metadata,
    pack_layers,
    unpack_layers,
)
from kvz.formats.errors import IdentityMismatch, InvalidField, UnsupportedVersion

FULL = LayerRecord("full", None, 50, 50)
SLIDING = LayerRecord("sliding", 16, 15, 50)
MEMBERS: dict[str, Any] = {"identity": {}, "layers": {}, "shard": {}, "tokens": {}}


def test_equal_layers_are_packed_as_runs() -> None:
    packed = pack_layers([SLIDING, SLIDING, FULL, SLIDING, LayerRecord("empty")])
    assert packed == {
        "kinds": [
            {"kind": "sliding", "window": 16, "num_tokens": 15, "cumulative_length": 50},
            {"kind": "full", "num_tokens": 50, "cumulative_length": 50},
            {"kind": "empty"},
        ],
        "runs": [[0, 2], [1, 1], [0, 1], [2, 1]],
    }


def test_unpacked_layers_are_the_packed_ones() -> None:
    layers = (SLIDING, FULL, FULL, LayerRecord("empty"), SLIDING)
    assert unpack_layers(json.loads(json.dumps(pack_layers(layers)))) == layers


@pytest.mark.parametrize(
    "packed",
    [
        None,
        {},
        {"kinds": [{"kind": "full"}]},
        {"kinds": [{"kind": "full"}], "runs": [[1, 1]]},
        {"kinds": [{"kind": "full"}], "runs": [[-1, 1]]},
        {"kinds": [{"kind": "full"}], "runs": [[0, 0]]},
        {"kinds": [{"kind": "full"}], "runs": [[0, 4097]]},
        {"kinds": [{"kind": "full"}], "runs": [[0, 1e999]]},
        {"kinds": [{"kind": "full"}], "runs": [0]},
        {"kinds": [{"kind": "unheard_of"}], "runs": []},
        {"kinds": [{"kind": "full", "state": {"key": "BF16"}}], "runs": []},
        {"kinds": [{"kind": "full", "state": {"key": ["BF16", [-1]]}}], "runs": []},
        {"kinds": [{"kind": "full", "options": 1}], "runs": []},
        {"kinds": [{"kind": "evicted", "num_tokens": 5, "cumulative_length": 4}], "runs": []},
        {"kinds": [{"kind": "full", "colour": 1}], "runs": []},
        {"kinds": [{"kind": "full", "window": 4}], "runs": []},
        {"kinds": [{"kind": "sliding"}], "runs": []},
        {"kinds": [{"kind": "sliding", "window": "4"}], "runs": []},
        {"kinds": [{"kind": "full", "num_tokens": 3, "cumulative_length": 4}], "runs": []},
        {"kinds": [{"kind": "full", "num_tokens": -1, "cumulative_length": -1}], "runs": []},
        {
            "kinds": [{"kind": "sliding", "window": 4, "num_tokens": 4, "cumulative_length": 9}],
            "runs": [],
        },
        {"kinds": ["full"], "runs": []},
    ],
)
def test_malformed_layers_are_rejected(packed: Any) -> None:
    with pytest.raises(InvalidField):
        unpack_layers(packed)


def test_metadata_comes_back_with_its_schema() -> None:
    metadata = encode_metadata({**MEMBERS, "origin": "here"})
    assert decode_metadata(metadata) == {**MEMBERS, "origin": "here", "schema": 1}


def test_missing_metadata_is_an_identity_mismatch() -> None:
    with pytest.raises(IdentityMismatch, match="no 'kvz' metadata"):
        decode_metadata({"format": "pt"})


def test_another_schema_is_an_unsupported_version() -> None:
    with pytest.raises(UnsupportedVersion, match="schema 2, this reader knows 1"):
        decode_metadata({"kvz": json.dumps({**MEMBERS, "schema": 2})})


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema":true}', "[" * 100_000, '{"schema":1,"identity":[]}']
)
def test_metadata_that_is_no_document_is_rejected(text: str) -> None:
    with pytest.raises(InvalidField):
        decode_metadata({"kvz": text})
