"""Going on from caches of the zoo, in this process or, run as a script, in one of its own."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import zoo

NUM_NEW = 32
NUM_TOKENS = 43


def prompt(padded: bool) -> tuple[Any, Any]:
    """Token ids and mask, `[1, 43]`, or `[2, 43]` with padding on the left of the first."""
    import torch

    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 128, (2 if padded else 1, NUM_TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :9] = 0
    return ids, mask


def go_on(model: Any, cache: Any, mask: Any, logits: Any) -> dict[str, Any]:
    """The next tokens and the hash of the logits after the last of them."""
    import torch

    from kvz import hf
    from kvz.restoring import greedy

    tokens = greedy(model, cache, logits, NUM_NEW, attention_mask=mask)
    mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
    final = hf.feed(model, cache, tokens[:, -1:], mask, mask.shape[1] - 1)
    data = final.contiguous().view(torch.uint8).numpy().tobytes()
    return {"tokens": tokens.tolist(), "logits": hashlib.sha256(data).hexdigest()}


def main(folder: Path) -> None:
    """Restore each `NAME.VARIANT.CODEC.kvz` of a folder, go on, and write `results.json`."""
    from kvz.restoring import restore

    results: dict[str, Any] = {}
    models: dict[str, Any] = {}
    for path in sorted(folder.glob("*.kvz")):
        name = path.name.partition(".")[0]
        if name not in models:
            models = {name: zoo.build(name)}
        restored = restore(path, models[name])
        results[path.name] = go_on(
            models[name], restored.cache, restored.attention_mask, restored.next_token_logits
        )
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
