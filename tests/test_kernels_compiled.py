"""Kernels compiled for GPUs that are not here: 128-bit accesses, no spills, and the table of registers in the docs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

# Whichever test imports the kernels first decides for all of them; they are compiled in a process of their own.
os.environ["TRITON_INTERPRET"] = "1"

from compile_kernels import COPY_LIKE, READING_STATES, SCENARIOS, TARGETS, Compiled, markdown

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """Every scenario on every target, compiled once in a process where kernels are not interpreted."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # shared by the workers: one compiles, the others wait
    result = folder / "compiled.json"
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "triton"), "PYTHONPATH": str(ROOT)}
    for name in ("TRITON_INTERPRET", "UNIFIEDPOOL_KERNELS"):
        environment.pop(name, None)
    with (folder / "compiled.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            command = [sys.executable, str(ROOT / "tests" / "compile_kernels.py"), "--json", str(result)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(result.read_text(encoding="utf-8"))
    return [Compiled(**row) for row in rows]


def test_every_kernel_compiles_for_every_target(compiled: list[Compiled]) -> None:
    assert {(row.scenario, row.target) for row in compiled} == {(s, t) for s in SCENARIOS for t in TARGETS}
    defined = set()
    for path in (ROOT / "kernels").glob("*.py"):
        defined |= set(re.findall(r"^def (\w+_kernel)\(", path.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {row.kernel for row in compiled} == defined


@pytest.mark.parametrize("target", TARGETS)
def test_copies_use_128_bit_loads_and_stores_only(target: str, compiled: list[Compiled]) -> None:
    rows = {row.scenario: row for row in compiled if row.target == target}
    for scenario in COPY_LIKE:
        row = rows[scenario]
        assert row.loads.get("128"), f"{scenario}: loads {row.loads}"
        assert set(row.stores) == {"128"}, f"{scenario}: stores {row.stores}"
    for scenario in READING_STATES:
        assert rows[scenario].loads.get("128"), f"{scenario}: loads {rows[scenario].loads}"


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_spilled_or_put_in_local_memory(target: str, compiled: list[Compiled]) -> None:
    spilled = {row.scenario: row.spills for row in compiled if row.target == target and row.spills}
    assert spilled == {}
    assert all(0 < row.registers <= 128 for row in compiled if row.target == target)


def test_table_in_the_documentation_is_what_was_compiled(compiled: list[Compiled]) -> None:
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    version = re.search(r"Triton (\d+\.\d+\.\d+)", text)
    assert version is not None
    if version[1] != triton.__version__:
        pytest.skip(f"the table is of Triton {version[1]}, this is {triton.__version__}")
    assert markdown(compiled) in text
