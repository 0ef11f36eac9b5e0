"""The shape of the code: imports go downwards, modules say what is public, and the examples in the text are true."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "unifiedpool"

# A module may import those of the lines above its own, and of its own line only within one package.
LEVELS = (
    ("errors",),
    ("_up_native",),
    ("_native",),
    ("kernels",),
    ("traces",),
    ("layout",),
    ("model_spec",),
    ("plan",),
    ("planner",),
    ("arena",),
    ("picture",),
    ("pool",),
    ("prefix_cache",),
    ("sizing",),
    ("integrations",),
    ("static_pool",),
    ("engine",),
    ("replay",),
    ("cli",),
    ("__main__",),
)
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
LAZY = ("torch", "triton", "transformers", "matplotlib")


def modules() -> list[Path]:
    """Every Python file of the package, `kernels` under the name it is imported by."""
    return sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").rglob("*.py")})


def dotted(path: Path) -> str:
    """Return the name under which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the modules of this package that a file imports when it runs, those inside functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        else:
            yield from imported(node, package)


def part_of(name: str) -> str | None:
    """Return the part of the package that a dotted name lies in, None for another package."""
    parts = name.split(".")
    return parts[1] if parts[0] == "unifiedpool" and len(parts) > 1 else None


@pytest.mark.parametrize("path", [path for path in modules() if path != PACKAGE / "__init__.py"], ids=dotted)
def test_imports_go_downwards(path: Path) -> None:
    name = dotted(path)
    own = part_of(name)
    assert own in LEVEL_OF, f"{name} has no place in LEVELS"
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for target in imported(ast.parse(path.read_text(encoding="utf-8")), package):
        part = part_of(target)
        if part is None or part == own:
            continue
        assert part in LEVEL_OF, f"{name} imports {target} through the package; import the module that defines it"
        assert LEVEL_OF[part] < LEVEL_OF[own], f"{name} imports {target}, which stands above it"
        assert own != "kernels" or part == "errors", f"{name} imports {target}; kernels stand on torch and errors alone"


@pytest.mark.parametrize("path", [path for path in modules() if not path.stem.startswith("_")], ids=dotted)
def test_module_says_what_is_public(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{dotted(path)} has no docstring"
    names = {
        target.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    assert "__all__" in names


@pytest.mark.parametrize("path", [path for path in modules() if path.stem != "__main__"], ids=dotted)
def test_public_names_exist(path: Path) -> None:
    module = importlib.import_module(dotted(path))
    missing = [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)]
    assert not missing


def test_import_loads_nothing_heavy() -> None:
    script = f"import sys, unifiedpool; print([name for name in {LAZY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("path", [path for path in modules() if ">>> " in path.read_text(encoding="utf-8")], ids=dotted)
def test_docstring_examples_hold(path: Path) -> None:
    failed, _ = doctest.testmod(importlib.import_module(dotted(path)), optionflags=doctest.ELLIPSIS)
    assert failed == 0


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_document_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document's Python blocks run in order, in one namespace; `<!-- not run -->` before a block leaves it out."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    text = path.read_text(encoding="utf-8")
    for match in re.finditer(r"(<!-- not run -->\s*)?^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        if match[1]:
            continue
        where = f"{path.name}:{text[: match.start(2)].count(chr(10)) + 1}"
        if ">>> " in match[2]:
            test = doctest.DocTestParser().get_doctest(match[2], namespace, where, str(path), 0)
            result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, clear_globs=False)
            namespace.update(test.globs)
            assert result.failed == 0
        else:
            exec(compile(match[2], where, "exec"), namespace)
