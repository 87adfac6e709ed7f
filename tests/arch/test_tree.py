"""The tree stays as designed: import directions, one home for each third-party package, short files, documented fields."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "onegraph"
FILES = sorted(SOURCE.rglob("*.py"))

# A package may import those of a lower rank, and itself.
RANK = {"cli": 5, "__main__": 6, "train": 4, "dreamer": 3, "act": 3, "stepper": 2, "optim": 2, "data": 2, "envs": 2, "nn": 2,
        "config": 1, "specs": 0}  # fmt: skip
# Same rank, and still needed: the stepper steps an optimizer and its targets.
ALLOWED = {("stepper", "optim")}

# Where a package of the core or of an extra may be imported. gymnasium is the interface of the whole envs package.
HOMES = {
    "tyro": {"cli/arguments.py"},
    "rich": {"train/log.py"},
    "tensorboard": {"train/log.py"},
    "wandb": {"train/log.py"},
    "matplotlib": {"train/plot.py"},
    "imageio": {"train/video.py"},
    "imageio_ffmpeg": {"train/video.py"},
}
ANYWHERE = {"torch", "tensordict", "numpy", "onegraph"}
SHARED = {"gymnasium": "envs/"}
ENV_PACKAGES = {"shimmy", "dm_control", "mujoco", "ale_py", "crafter", "cv2"}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted module, only for type checkers) of every import in a file."""
    tree = ast.parse(path.read_text())
    typing_only: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing_only.update(child for stmt in node.body for child in ast.walk(stmt))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in typing_only
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write onegraph.<module>"
            yield str(node.module), node in typing_only


def part(name: str) -> str:
    return name.split(".")[1] if "." in name else "__init__"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_import_directions(path: Path) -> None:
    relative = path.relative_to(SOURCE)
    here = relative.parts[0].removesuffix(".py")
    if here == "__init__":
        return  # names every public module, lazily: see test_help_is_fast_and_needs_no_torch
    for module, typing_only in imports(path):
        if module.split(".")[0] != "onegraph" or typing_only or module == "onegraph":
            continue
        there = part(module)
        fine = there == here or RANK[there] < RANK[here] or (here, there) in ALLOWED
        assert fine, f"{relative} imports {module}: imports point downward only ({here} is not above {there})"
    if here == "envs":
        assert not any(m.split(".")[0] == "torch" for m, _ in imports(path)), f"{relative} imports torch"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_third_party_packages_have_one_home(path: Path) -> None:
    relative = path.relative_to(SOURCE).as_posix()
    for module, typing_only in imports(path):
        top = module.split(".")[0]
        if top in sys.stdlib_module_names or top in ANYWHERE or top == "__future__" or typing_only:
            continue
        if top in SHARED:
            assert relative.startswith(SHARED[top]), f"{relative} imports {top}"
        elif top in ENV_PACKAGES:
            assert relative.startswith("envs/"), f"{relative} imports {top}"
        else:
            assert relative in HOMES.get(top, ()), f"{relative} imports {top}; give the package one home"


def test_each_environment_package_has_one_home() -> None:
    homes: dict[str, set[str]] = {}
    for path in FILES:
        for module, _ in imports(path):
            if module.split(".")[0] in ENV_PACKAGES:
                homes.setdefault(module.split(".")[0], set()).add(path.name)
    assert all(len(files) == 1 for files in homes.values()), homes


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_are_short_and_plain(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400, f"{path} is longer than 400 lines; split it by job"
    assert text.isascii(), f"{path} holds characters outside ASCII"
    assert path.stem not in ("utils", "common", "helpers")
    if path.stat().st_size:
        assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring that says its job"


def test_no_output_or_sync_below_the_loop() -> None:
    for folder in ("nn", "dreamer", "stepper"):
        for path in sorted((SOURCE / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    assert not called.endswith(".item"), f"{path}:{node.lineno}: {called}"
                    assert called != "print", f"{path}:{node.lineno}"
                    assert not called.startswith("logging."), f"{path}:{node.lineno}: {called}"


def test_help_is_fast_and_needs_no_torch() -> None:
    code = (
        "import sys, onegraph.cli as c\n"
        "assert c.main(['--help']) == 0\n"
        "assert 'torch' not in sys.modules and 'gymnasium' not in sys.modules, 'heavy import'\n"
    )
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5, f"onegraph --help took {min(seconds):.2f} s"


def test_config_fields_are_documented() -> None:
    from onegraph.dreamer.config import DreamerConfig
    from onegraph.envs.config import EnvConfig
    from onegraph.train.config import ReplayConfig, TrainConfig

    for cls in (DreamerConfig, EnvConfig, ReplayConfig, TrainConfig):
        doc = cls.__doc__ or ""
        for field in dataclasses.fields(cls):
            assert re.search(rf"^\s+{field.name}: \S", doc, re.M), f"{cls.__name__}.{field.name} is not documented"


def test_public_names_resolve() -> None:
    import onegraph

    assert set(onegraph.__all__) == set(onegraph._HOMES)
    for name in onegraph.__all__:
        assert getattr(onegraph, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = onegraph.nothing


def test_no_machine_paths_in_tracked_files() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    pattern = re.compile(r"(^|[\s\"'`(=])/(root|home|work)/")
    for name in tracked:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".yaml", ".txt", ".json", "") and path.is_file():
            text = path.read_text(errors="ignore")
            assert not pattern.search(text) or name == "tests/arch/test_tree.py", f"{name} names a path of one machine"
