"""The wheel and the source distribution hold everything, and a build that cannot work says why."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = (".*", "build", "dist", "out", "*.egg-info", "*.so", "__pycache__", "*.stamp")


def run(*command: str | Path, cwd: Path, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with more environment variables; show what it printed when it fails."""
    environment = {**os.environ, "PYTHONPATH": "", **variables}
    result = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert not check or result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that building leaves nothing behind in it."""
    copy = tmp_path_factory.mktemp("tree") / "unifiedpool"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return copy


@pytest.fixture(scope="module")
def sdist(tree: Path) -> Path:
    """The source distribution."""
    run(sys.executable, "setup.py", "-q", "sdist", cwd=tree)
    (archive,) = (tree / "dist").glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution as an installer would."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, sdist, cwd=folder)
    (archive,) = folder.glob("*.whl")
    return archive


def test_packages_listed_completely() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = set(re.findall(r'"([\w.]+)"', text.split("\npackages = [", 1)[1].split("]")[0]))
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in [*(ROOT / "unifiedpool").rglob("__init__.py"), ROOT / "unifiedpool/kernels/__init__.py"]
    }
    assert listed == found


def test_sdist_holds_what_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    sources = {f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir() if path.suffix in {".c", ".h", ".py"}}
    assert sources <= names
    assert {"LICENSE", "README.md", "Makefile", "constraints.txt", "kernels/__init__.py", "tests/conftest.py"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_wheel_works_for_every_later_python(wheel: Path) -> None:
    assert "-cp310-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "unifiedpool").rglob("*.py")}
    modules |= {f"unifiedpool/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
    assert modules | {"unifiedpool/_up_native.abi3.so", "unifiedpool/py.typed"} <= names


def test_wheel_imports_with_its_own_extension(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = (
        "import unifiedpool, unifiedpool.kernels, unifiedpool._up_native as native\n"
        "from unifiedpool import Layout, Planner\n"
        "planner = Planner(Layout.simple({'state': 4096, 'full': 256}), 1 << 16)\n"
        "print(len(planner.allocate({'full': 3, 'state': 1})), native.__file__)\n"
    )
    result = run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    count, file = result.stdout.split()
    assert (count, Path(file).parent) == ("4", tmp_path / "unifiedpool")


def test_missing_compiler_says_what_to_install(tree: Path) -> None:
    result = run(
        sys.executable, "setup.py", "-q", "build_ext", "--force", "--build-lib", "nowhere", cwd=tree, check=False,
        CC="no-such-compiler",
    )  # fmt: skip
    assert result.returncode != 0
    assert "the C compiler 'no-such-compiler' was not found" in result.stderr
    assert "apt install build-essential python3-dev" in result.stderr


def test_kernels_refuse_a_second_copy(tree: Path) -> None:
    result = run(sys.executable, "-c", "from kernels import naive", cwd=tree, check=False)
    assert "import unifiedpool.kernels, not kernels" in result.stderr
    assert run(sys.executable, "-c", "import kernels.naive", cwd=tree, check=False).returncode != 0
