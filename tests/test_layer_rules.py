"""Who may import whom, what is packaged, and what importing kvz costs."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("kvz", "formats", "kernels")
#: The only modules that may know transformers.
TRANSFORMERS_MODULES = {"kvz/hf.py", "kvz/capturing.py", "kvz/restoring.py"}
HEAVY = ("torch", "numba", "llvmlite", "transformers", "triton", "zstandard", "obstore")


def sources(room: str) -> list[Path]:
    """The room's modules, without the links inside kvz/ and the script that makes the vectors."""
    paths = [
        path
        for path in sorted((ROOT / room).rglob("*.py"))
        if not {"formats", "kernels", "vectors"} & set(path.relative_to(ROOT / room).parts[:-1])
    ]
    assert paths
    return paths


def imports(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            # `from kvz.formats import container` imports a module, too
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def importers_of(package: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in sources(room)
        if any(is_within(name, package) for name in imports(path))
    }


def test_formats_import_only_the_standard_library_and_numpy() -> None:
    for path in sources("formats"):
        for name in imports(path):
            top = name.partition(".")[0]
            allowed = top in sys.stdlib_module_names or top == "numpy"
            assert allowed or is_within(name, "kvz.formats"), f"{path.name} imports {name}"


def test_kernels_know_neither_formats_nor_the_rest() -> None:
    allowed = {
        "reference": {"numpy"},
        "cpu": {"numpy", "numba", "llvmlite"},
        "gpu": {"numpy", "torch", "triton"},
    }
    for path in sources("kernels"):
        room = path.relative_to(ROOT / "kernels").parts[0]
        for name in imports(path):
            top = name.partition(".")[0]
            known = top in sys.stdlib_module_names or top in allowed[room]
            assert known or is_within(name, "kvz.kernels"), f"{path} imports {name}"


@pytest.mark.parametrize(
    ("package", "folder"),
    [("triton", "kernels/gpu/"), ("numba", "kernels/cpu/"), ("llvmlite", "kernels/cpu/")],
)
def test_compilers_stay_in_their_room(package: str, folder: str) -> None:
    users = importers_of(package)
    assert users
    assert all(path.startswith(folder) for path in users)


def test_transformers_is_known_to_capture_and_restore_only() -> None:
    users = importers_of("transformers")
    assert users
    assert users <= TRANSFORMERS_MODULES


def test_object_stores_are_known_to_kvz_remote_only() -> None:
    users = importers_of("obstore")
    assert users
    assert all(path.startswith("kvz/remote/") for path in users)


def test_every_folder_with_modules_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["setuptools"]["packages"])
    folders = set()
    for room in ROOMS:
        for path in sources(room):
            parts = path.parent.relative_to(ROOT).parts
            folders.add(".".join(parts if room == "kvz" else ("kvz", *parts)))
    assert folders <= packages
    assert packages - folders == {"kvz.formats", "kvz.kernels"} - folders


def test_rooms_at_the_top_are_no_packages() -> None:
    # a top-level package `kernels` would shadow the one that transformers looks for
    for room in ("formats", "kernels"):
        assert not (ROOT / room / "__init__.py").exists()
        assert (ROOT / "kvz" / room).resolve() == ROOT / room


def run_python(script: str, cwd: Path) -> str:
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" if cwd == ROOT else ""
    result = subprocess.run(
        [sys.executable, "-c", path + script], capture_output=True, text=True, cwd=cwd, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_no_top_level_package_named_kernels_is_ours(tmp_path: Path) -> None:
    script = "import importlib.util as u; s = u.find_spec('kernels'); print(s and s.origin)"
    origin = run_python(script, tmp_path)
    assert str(ROOT) not in origin


@pytest.mark.parametrize("module", ["kvz", "kvz.cli", "kvz.archive", "kvz.formats.head"])
def test_import_loads_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    assert run_python(script, ROOT) == ""


def test_every_export_of_kvz_resolves() -> None:
    import kvz

    for name in kvz.__all__:
        assert getattr(kvz, name) is not None
    assert set(kvz._EXPORTS) | {"__version__"} == set(kvz.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvz.nothing


def test_annotations_are_postponed_in_every_module() -> None:
    for room in ROOMS:
        for path in sources(room):
            body = ast.parse(path.read_text()).body
            if any(not isinstance(node, ast.Expr) for node in body):
                assert "__future__.annotations" in imports(path), path
