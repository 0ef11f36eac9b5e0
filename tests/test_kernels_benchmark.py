"""benchmarks/gpu.py without a GPU: its checks, its attention kernel, its steps, and a dry run of the whole script."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# Whichever test imports the kernels first decides for all of them.
os.environ["TRITON_INTERPRET"] = "1"

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

gpu: Any = importlib.import_module("gpu")

pytestmark = [
    pytest.mark.filterwarnings("ignore::unifiedpool.layout.PaddingWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def test_dry_run_walks_through_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--json", str(path)])
    assert gpu.main() == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in written["rows"]}
    assert "gpu" not in written and "dry run" in written["benchmark"]
    assert rows["kernels that differ from their references"]["value"] == 0
    assert rows["decode attention agrees with torch's"]["ok"] and rows["host synchronisations in ten steps"]["ok"]
    # A dry run measures nothing, so nothing that it timed is judged.
    assert [
        row["name"] for row in written["rows"] if row["target"] is not None and row["unit"] not in ("checks", "calls")
    ] == ["decode attention agrees with torch's"]
    for part in ("copy_cells / plain copy", "track_cells / plain copy", "tables, batch", "page-major", "token-major"):
        assert any(part in name for name in rows), part


def test_checks_notice_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = gpu.copy_cells._launch
    monkeypatch.setattr(
        gpu.copy_cells, "_launch", lambda source, target, rows, strides: launch(source, target, rows[:1], strides)
    )
    results = next(gpu.check_kernels(torch.device("cpu"), 0))
    assert results == ("copy_cells, two kinds", False)


def test_full_sizes_judge_what_the_targets_name() -> None:
    sizes = gpu.Sizes.full(quick=True, free_bytes=130 << 30)
    assert [name for name, *_, judged in sizes.copies if judged] == ["1.5 MB pages", "77 MB states"]
    assert sizes.batches == (1, 64, 256)
    small = gpu.Sizes.full(quick=True, free_bytes=20 << 30)
    assert max(2 * stride * count for _, stride, count, _ in small.copies) < 4 << 30


def test_without_a_gpu_or_an_interpreter_the_script_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 2
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run"])
    assert gpu.main() == 2
    told = capsys.readouterr().err
    assert "no CUDA device here" in told and "TRITON_INTERPRET=1" in told
