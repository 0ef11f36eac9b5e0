"""The seeded fuzzer of planner and arena, in its short form, and proof that it can fail."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fuzz import fuzz
from lockstep import without_first_move
from unifiedpool import StepPlan

pytestmark = pytest.mark.native


def test_fuzz_short_agrees_with_the_byte_map(seed: int) -> None:
    assert fuzz(seed, 3_000) >= 3_000


def without_last_zero(plan: StepPlan) -> StepPlan:
    zeroes = np.flatnonzero(plan.operations[:, 1] & 255 == 2)
    return replace(plan, operations=np.delete(plan.operations, zeroes[-1:], axis=0))


def without_first_change(plan: StepPlan) -> StepPlan:
    return replace(plan, changes=plan.changes[1:])


def in_one_phase(plan: StepPlan) -> StepPlan:
    operations = plan.operations.copy()
    operations[:, 0] = 0
    return replace(plan, operations=operations)


@pytest.mark.parametrize("spoil", [without_first_move, without_last_zero, without_first_change, in_one_phase])
def test_fuzz_with_spoilt_plans_fails_and_names_the_seed(spoil: object) -> None:
    with pytest.raises(AssertionError, match="seed 5, episode"):
        fuzz(5, 20_000, spoil=spoil)


def test_fuzz_shrinks_a_failure_to_a_few_operations() -> None:
    with pytest.raises(AssertionError) as failure:
        fuzz(6, 20_000, spoil=without_first_move)
    assert len(str(failure.value).splitlines()) < 12


@pytest.mark.soak
def test_fuzz_for_long_agrees_with_the_byte_map(seed: int) -> None:
    script = Path(__file__).with_name("fuzz.py")
    runs = [
        subprocess.Popen([sys.executable, str(script), "--seed", str(seed + i), "--operations", "500000"])
        for i in (100, 101)
    ]
    assert [each.wait() for each in runs] == [0, 0]
