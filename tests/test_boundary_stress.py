"""examples/boundary_stress.py runs, and sees what it claims to see."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.native

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "boundary_stress.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("boundary_stress", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["boundary_stress"] = module
    spec.loader.exec_module(module)
    return module


def run(stress: object, operations: int) -> None:
    for call in range(operations):
        stress.call()  # type: ignore[attr-defined]
        if call % 16 == 15:
            stress.step()  # type: ignore[attr-defined]


def test_boundary_stress_collides_and_agrees(
    example: ModuleType, seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["boundary_stress.py", "--operations", "400", "--seed", str(seed)])
    assert example.main() == 0
    printed = capsys.readouterr().out
    assert "400 operations in" in printed and "refusals" in printed and "DIFFERENCE" not in printed


def test_boundary_stress_same_seed_makes_the_same_calls(example: ModuleType) -> None:
    digests = []
    for _ in range(2):
        stress = example.Stress(2 << 20, 3)
        run(stress, 160)
        digests.append(stress.planner.digest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("fault", ["byte", "table", "answer", "owner"])
def test_boundary_stress_with_a_planted_fault_reports_it(
    example: ModuleType, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stress = example.Stress(2 << 20, 4)
    run(stress, 160)
    if fault == "byte":
        cells = stress.planner.live_cells("full")[0]
        stress.arena.cell_bytes("full", int(cells[0]))[-1] ^= 1
    elif fault == "table":
        stress.arena.tables["full"][int(stress.planner.live_cells("full")[1][0])] += 1
    elif fault == "answer":
        monkeypatch.setattr(type(stress.planner), "can_allocate", lambda self, demand: True)
    else:
        stress.planner.allocate({"state": 1} if stress.planner.can_allocate({"state": 1}) else {"full": 1})
    with pytest.raises(example.Difference):
        run(stress, 300)
