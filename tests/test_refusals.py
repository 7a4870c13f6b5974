"""A cache of anything else is refused with exit code 5, the field and both values named."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import WORDS, prompt_ids, save_model, tiny_gemma, tiny_llama  # noqa: E402

import kvz  # noqa: E402
from kvz.capturing import Capture, capture, capture_cache  # noqa: E402
from kvz.cli import errors, main  # noqa: E402
from kvz.formats.errors import IdentityMismatch, KvzError  # noqa: E402
from kvz.layers.containers import read_cache  # noqa: E402
from kvz.restoring import restore  # noqa: E402


def archive(captured: Capture, path: Path) -> Path:
    captured.save(path.with_suffix(".safetensors"), overwrite=True)
    kvz.compress(path.with_suffix(".safetensors"), path, overwrite=True)
    return path


def edited(captured: Capture, **members: Any) -> Capture:
    document = {**json.loads(captured.metadata["kvz"]), **members}
    return Capture(captured.tensors, {"kvz": json.dumps(document)}, None)


def document_of(captured: Capture) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(captured.metadata["kvz"])
    return document


Run = Callable[..., tuple[Any, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(errors, "clean_up_on_termination", lambda: None)

    def call(*arguments: str | Path) -> tuple[Any, str, str]:
        capsys.readouterr()  # what saving a model printed
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return (ended.value.code, *capsys.readouterr())

    return call


def assert_exit_5(run: Run, path: Path, model: Path, named: str, *options: str) -> None:
    """Both commands refuse in one line that matches `named`."""
    for command in ("generate", "verify"):
        code, stdout, stderr = run(command, path, "--model", model, *options)
        assert code == 5, stderr
        assert stdout == ""
        assert stderr.count("\n") == 1
        assert re.search(named, stderr), stderr


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Capture]:
    """A folder with `model` and `c.kvz`, and the capture."""
    folder = tmp_path_factory.mktemp("llama")
    model = tiny_llama()
    save_model(model, folder / "model")
    captured = capture(model, prompt_ids(1, 30))
    archive(captured, folder / "c.kvz")
    return folder, captured


def test_the_model_itself_is_accepted(llama: tuple[Path, Capture], run: Run) -> None:
    folder, _ = llama
    code, stdout, stderr = run("verify", folder / "c.kvz", "--model", folder / "model")
    assert (code, stderr) == (0, "")
    assert stdout.endswith(", belongs to the model\n")


@pytest.mark.parametrize(
    ("name", "build", "named"),
    [
        ("weights", lambda: tiny_llama(seed=1), r"weights: file \w{12}\.\.\., model \w{12}\.\.\."),
        (
            "theta",
            lambda: tiny_llama(rope_theta=20000.0),
            r"rope_parameters\.rope_theta: file 10000, model 20000",
        ),
        (
            "scaling",
            lambda: tiny_llama(rope_scaling={"rope_type": "linear", "factor": 2.0}),
            r"rope_parameters\.factor: file absent, model 2; .*file default, model linear",
        ),
        ("heads", lambda: tiny_llama(num_key_value_heads=4), "num_key_value_heads: file 2, model"),
    ],
)
def test_another_model_is_5(
    llama: tuple[Path, Capture], run: Run, name: str, build: Callable[[], Any], named: str
) -> None:
    folder, _ = llama
    other = save_model(build(), folder / name)
    assert_exit_5(run, folder / "c.kvz", other, named)


def test_another_dtype_is_5(llama: tuple[Path, Capture], run: Run) -> None:
    folder, _ = llama
    named = "dtype: file BF16, model F32"
    assert_exit_5(run, folder / "c.kvz", folder / "model", named, "--dtype", "float32")


def test_another_prompt_is_5(llama: tuple[Path, Capture], run: Run) -> None:
    folder, captured = llama
    ids = captured.tensors["input_ids"][0].tolist()
    for changed, code in ((ids, 0), ([*ids[:7], ids[7] ^ 1, *ids[8:]], 5), (ids[:-1], 5)):
        (folder / "prompt").write_text(" ".join(WORDS[i] for i in changed))
        options = ("--model", folder / "model", "--prompt-file", folder / "prompt")
        found = run("verify", folder / "c.kvz", *options)
        assert found[0] == code
        if code:
            where = "30 tokens" if len(changed) == 29 else f"file {ids[7]}, prompt {ids[7] ^ 1}"
            assert where in found[2]


def test_other_tokens_in_the_file_are_5(llama: tuple[Path, Capture], run: Run) -> None:
    folder, captured = llama
    ids = captured.tensors["input_ids"].clone()
    ids[0, 3] ^= 1
    other = Capture({**captured.tensors, "input_ids": ids}, captured.metadata, None)
    path = archive(other, folder / "tokens.kvz")
    assert_exit_5(run, path, folder / "model", r"tokens\.sha256: metadata says \w+, input_ids")


def test_a_lone_shard_is_5(llama: tuple[Path, Capture], run: Run) -> None:
    folder, captured = llama
    path = archive(edited(captured, shard={"kv_heads": [0, 1, 2]}), folder / "shard.kvz")
    assert_exit_5(run, path, folder / "model", "kv heads 0 to 1 of 2; restore needs all of them")


def test_one_layer_of_another_window_is_5(tmp_path: Path, run: Run) -> None:
    model = tiny_gemma()
    folder = save_model(model, tmp_path / "model")
    captured = capture(model, prompt_ids(1, 50))
    document = document_of(captured)

    def with_window(packed: dict[str, Any]) -> dict[str, Any]:
        """The first of two sliding layers gets a window of 20."""
        packed = copy.deepcopy(packed)
        wider = {**packed["kinds"][0], "window": 20}
        if "num_tokens" in wider:
            wider["num_tokens"] = 19
        packed["kinds"].append(wider)
        packed["runs"][:1] = [[len(packed["kinds"]) - 1, 1], [0, 1]]
        return packed

    identity = document["identity"]
    other = {**identity, "layers": with_window(identity["layers"])}
    path = archive(edited(captured, identity=other), tmp_path / "identity.kvz")
    assert_exit_5(run, path, folder, r"layers\.0\.window: file 20, model 16")
    path = archive(edited(captured, layers=with_window(document["layers"])), tmp_path / "l.kvz")
    code, _, stderr = run("generate", path, "--model", folder)
    assert code == 5
    assert "layer 0: file sliding with window 20, model sliding with window 16" in stderr
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    other_model = save_model(tiny_gemma(layer_types=types), tmp_path / "types")
    assert_exit_5(run, archive(captured, tmp_path / "c.kvz"), other_model, "layer_types: file")


def test_fp8_without_a_scale_is_5(tmp_path: Path, run: Run) -> None:
    model = tiny_llama()
    folder = save_model(model, tmp_path / "model")
    try:
        cache = transformers.QuantizedCache("fp8", config=model.config)
    except ValueError:
        pytest.skip("this transformers has no FP8 cache")
    ids = prompt_ids(1, 30)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=True, cache=cache).logits[:, -1]
    captured = capture_cache(model, cache, ids, next_token_logits=logits)
    whole = archive(captured, tmp_path / "whole.kvz")
    assert run("generate", whole, "--model", folder, "--max-new-tokens", "3")[0] == 0
    tensors = {n: t for n, t in captured.tensors.items() if n != "layers.1.value_scale"}
    assert len(tensors) == len(captured.tensors) - 1
    path = archive(Capture(tensors, captured.metadata, None), tmp_path / "c.kvz")
    code, stdout, stderr = run("generate", path, "--model", folder)
    assert (code, stdout) == (5, "")
    assert "tensor layers.1.value_scale is missing: file none, metadata has it" in stderr


def test_names_versions_and_moved_folders_are_accepted(
    llama: tuple[Path, Capture], tmp_path: Path, run: Run
) -> None:
    _, captured = llama
    moved = save_model(tiny_llama(), tmp_path / "moved")
    config = json.loads((moved / "config.json").read_text())
    config.update(_name_or_path="somebody/else", transformers_version="4.40.0")
    (moved / "config.json").write_text(json.dumps(config))
    versions = {"kvz": "0.0.1", "torch": "2.0", "transformers": "4.40.0"}
    path = archive(edited(captured, versions=versions), tmp_path / "renamed.kvz")
    code, stdout, stderr = run("verify", path, "--model", moved)
    assert (code, stderr) == (0, "")
    assert "belongs to the model" in stdout


def test_force_warns_of_what_it_overrides(llama: tuple[Path, Capture], run: Run) -> None:
    folder, _ = llama
    other = save_model(tiny_llama(seed=1), folder / "forced")
    options = ("--force", "--max-new-tokens", "3", "--json")
    code, stdout, stderr = run("generate", folder / "c.kvz", "--model", other, *options)
    assert code == 0
    assert re.fullmatch(r"kvz: warning: .*c\.kvz: overridden: weights: file .*, model .*\n", stderr)
    document = json.loads(stdout)
    assert len(document["token_ids"]) == 3
    assert len(document["overridden"]) == 1


@pytest.mark.parametrize(
    "refused", [lambda: tiny_llama(seed=1), lambda: tiny_llama(rope_theta=2e4)]
)
def test_a_refused_restore_leaves_live_caches_and_models_alone(
    llama: tuple[Path, Capture], refused: Callable[[], Any]
) -> None:
    folder, _ = llama
    model = refused()
    live = capture(model, prompt_ids(1, 20)).cache
    before = read_cache(live, model.dtype)
    held = [{name: t.clone() for name, t in parts.items()} for parts in before.tensors]
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(IdentityMismatch):
        restore(folder / "c.kvz", model)
    after = read_cache(live, model.dtype)
    assert after.layers == before.layers
    for ours, theirs in zip(after.tensors, held, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items())


# Replays


def test_a_replay_on_the_same_machine_is_exact(llama: tuple[Path, Capture], run: Run) -> None:
    folder, _ = llama
    given = ("verify", folder / "c.kvz", "--model", folder / "model", "--replay")
    code, stdout, stderr = run(*given, "12", "--json")
    assert (code, stderr) == (0, "")
    replay = json.loads(stdout)["files"][0]["replay"]
    assert replay["num_positions"] == 12
    assert replay["num_exact"] == replay["num_tensors"] == 6
    code, stdout, _ = run(*given, "999")
    assert (
        stdout.splitlines()[1] == "replayed 30 positions: 6 tensors compared, all equal to the bit"
    )


def changed_keys(captured: Capture, factor: float) -> Capture:
    tensors = dict(captured.tensors)
    tensors["layers.1.key"] = (tensors["layers.1.key"].float() * factor).bfloat16()
    return Capture(tensors, captured.metadata, None)


def test_a_replay_tolerates_rounding_and_says_so(llama: tuple[Path, Capture], run: Run) -> None:
    folder, captured = llama
    path = archive(changed_keys(captured, 1.01), folder / "near.kvz")
    code, stdout, _ = run("verify", path, "--model", folder / "model", "--replay", "30")
    assert code == 0
    assert "5 equal to the bit" in stdout
    assert re.search(r"largest difference 0\.0\d+ in layers\.1\.key, bound 0\.088", stdout)


def test_a_replay_finds_numbers_of_another_cache(llama: tuple[Path, Capture], run: Run) -> None:
    folder, captured = llama
    path = archive(changed_keys(captured, 1.2), folder / "far.kvz")
    code, stdout, stderr = run("verify", path, "--model", folder / "model", "--replay", "30")
    assert (code, stdout) == (5, "")
    assert re.search(r"layers\.1\.key: the model's differs by 0\.2 of its norm", stderr)
    # a replay looks at what it was asked for only
    assert run("verify", path, "--model", folder / "model")[0] == 0


def test_a_replay_of_windows_needs_the_whole_prompt(tmp_path: Path) -> None:
    from kvz.replaying import verify_model

    model = tiny_gemma()
    captured = capture(model, prompt_ids(1, 50), chunk_tokens=16)
    some = verify_model(captured, model, replay=20)
    assert some is not None
    assert (some.num_tensors, some.num_exact, some.skipped) == (2, 2, (0, 1, 3))
    whole = verify_model(captured, model, replay=50)
    assert whole is not None
    assert (whole.num_tensors, whole.num_exact, whole.skipped) == (8, 8, ())
    windows = tiny_gemma(layer_types=["sliding_attention"] * 4)
    with pytest.raises(KvzError, match="no layer holds the first 20 tokens"):
        verify_model(capture(windows, prompt_ids(1, 50), chunk_tokens=16), windows, replay=20)


@pytest.mark.parametrize("option", [("--replay", "3"), ("--prompt-file", "p")])
def test_options_of_a_model_need_one(llama: tuple[Path, Capture], run: Run, option: Any) -> None:
    code, _, stderr = run("verify", llama[0] / "c.kvz", *option)
    assert (code, "need --model" in stderr) == (2, True)


# Prefixes


def test_going_on_from_a_prefix_is_going_on_from_it(llama: tuple[Path, Capture], run: Run) -> None:
    folder, captured = llama
    model = tiny_llama()
    ids = captured.tensors["input_ids"]
    live = captured.cache
    from kvz.restoring import Restored, continue_from

    cropped = transformers.DynamicCache()
    for layer_idx, layer in enumerate(live.layers):
        cropped.update(layer.keys[:, :, :13], layer.values[:, :, :13], layer_idx)
    prefix = Restored(cropped, ids[:, :13], torch.ones_like(ids[:, :13]), None)
    expected = continue_from(prefix, model, 5, [5, 9])
    given = ("generate", folder / "c.kvz", "--model", folder / "model", "--max-new-tokens", "5")
    code, stdout, stderr = run(*given, "--tokens", ":13", "--prompt", "w5 w9", "--json")
    assert (code, stderr) == (0, "")
    assert json.loads(stdout)["token_ids"] == expected
    code, _, stderr = run(*given, "--tokens", ":31", "--prompt", "w5")
    assert (code, "a prefix of 30 tokens has 0 to 30 of them, not 31" in stderr) == (2, True)
    code, _, stderr = run(*given, "--tokens", ":13")
    assert (code, "give a prompt" in stderr) == (2, True)
    assert run(*given, "--tokens", "3:13", "--prompt", "w5")[0] == 2
    whole, none = (run(*given, "--tokens", t, "--prompt", "w5") for t in (":30", ":0"))
    assert (whole[0], none[0]) == (0, 0)


# Metadata that was tampered with


@pytest.mark.parametrize(
    ("cache", "named"),
    [
        ("StaticCache", "must name its class"),
        ({"class": "StaticCache", "max_cache_len": 1 << 40}, "max_cache_len must be 1 to"),
        ({"class": "StaticCache", "max_cache_len": "64"}, "max_cache_len must be 1 to"),
        ({"class": "StaticCache", "max_cache_len": 8}, "layer 0: file full .* model static"),
        ({"class": "SecretCache"}, "the file holds a SecretCache"),
        ({"class": "StaticCache", "max_cache_len": 8, "evil": 1}, "no StaticCache for|layer 0"),
        ({"class": "EncoderDecoderCache"}, "lacks its self or cross part"),
        ({"class": "DynamicCache", "num_self_layers": -1}, "num_self_layers must be >= 0"),
    ],
)
def test_caches_described_wrongly_are_refused(
    llama: tuple[Path, Capture], cache: Any, named: str
) -> None:
    with pytest.raises(KvzError, match=named):
        restore(edited(llama[1], cache=cache), tiny_llama())


def test_state_that_contradicts_its_counts_is_refused(llama: tuple[Path, Capture]) -> None:
    captured = llama[1]
    tensors = {
        name: t[:, :, :20].contiguous() if name.endswith((".key", ".value")) else t
        for name, t in captured.tensors.items()
    }
    layers = copy.deepcopy(document_of(captured)["layers"])
    for batch, named in ((1, "key has shape .* metadata says 30 tokens"), (2, "a batch of 1")):
        state = {part: ["BF16", [batch, 2, 20, 16]] for part in ("key", "value")}
        layers["kinds"][0]["state"] = state
        changed = Capture(tensors, edited(captured, layers=layers).metadata, None)
        with pytest.raises(KvzError, match=named):
            restore(changed, tiny_llama())
