"""The whole job on real models: capture, compress, verify, inspect, restore elsewhere, bench.

For each model: prefill a prompt and go on for 64 greedy tokens in this process (the uninterrupted
run); save the cache as it was after the prompt; run it through the command line; restore the
archive into the model in a new process and go on there. Both must give the same tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import models
import prompts

NEW_TOKENS = 64


def kvz(*arguments: str | Path) -> None:
    """Run a kvz command in its own process and show it."""
    print("\n$ kvz", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "kvz", *map(str, arguments)], check=True)


def generate(archive: Path, model_file: Path) -> list[int]:
    """What ``kvz generate`` goes on with, in its own process."""
    options = ("--model", str(model_file), "--max-new-tokens", str(NEW_TOKENS), "--json")
    print("\n$ kvz generate", archive, *options, flush=True)
    command = [sys.executable, "-m", "kvz", "generate", str(archive), *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    answer = json.loads(done.stdout)
    print(answer["text"], flush=True)
    tokens: list[int] = answer["token_ids"]
    return tokens


def uninterrupted(model_file: Path, num_tokens: int, capture_file: Path) -> list[int]:
    """Capture ``num_tokens`` of prose to a file, then go on from the live cache."""
    import torch

    import kvz
    from kvz.cli.models import stop_ids
    from kvz.hf import load_model
    from kvz.restoring import greedy

    model, tokenizer = load_model(str(model_file))
    ids = tokenizer(prompts.docs())["input_ids"][:num_tokens]
    captured = kvz.capture(model, torch.tensor([ids]))
    captured.save(capture_file, overwrite=True)
    tokens = greedy(
        model,
        captured.cache,
        captured.tensors["next_token_logits"],
        NEW_TOKENS,
        attention_mask=captured.tensors["attention_mask"],
        stop_ids=stop_ids(model),
    )
    found: list[int] = tokens[0].tolist()
    return found


def run_model(name: str, num_tokens: int, folder: Path) -> bool:
    try:
        model_file = models.MODELS[name]()
    except FileNotFoundError as error:
        print(f"{name}: left out ({error})")
        return True
    capture, archive = folder / f"{name}.safetensors", folder / f"{name}.kvz"
    print(f"\n== {name}: {num_tokens} tokens of prose, then {NEW_TOKENS} greedy ones", flush=True)
    expected = uninterrupted(model_file, num_tokens, capture)
    kvz("compress", capture, "-o", archive, "-f")
    kvz("verify", archive, "--against", capture)
    kvz("inspect", archive)
    same = generate(archive, model_file) == expected
    print(f"\n{name}: restored in another process, the next {len(expected)} tokens", end=" ")
    print("equal those of the uninterrupted run" if same else "DIFFER")
    kvz("bench", capture, "--rounds", "5")
    return same


def run_sample(folder: Path) -> bool:
    """Without a model: the capture that lies beside this script."""
    capture = Path(__file__).with_name("smollm2-docs.safetensors")
    archive, restored = folder / "sample.kvz", folder / "sample.safetensors"
    kvz("compress", capture, "-o", archive, "-f")
    kvz("verify", archive, "--against", capture)
    kvz("inspect", archive)
    kvz("decompress", archive, "-o", restored, "-f")
    same = restored.read_bytes() == capture.read_bytes()
    print("\nsample: restored byte for byte" if same else "\nsample: restored file DIFFERS")
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(models.MODELS), help="default: all")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the prompt")
    parser.add_argument("--folder", type=Path, help="keep the files here; default: temporary")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = [run_sample(folder)]
        results += [run_model(name, arguments.tokens, folder) for name in arguments.models]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
