"""Under `make asan`: the extension is instrumented, so an overflow that somebody plants does not go unseen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.native

PLANTED = """
from unifiedpool import Layout, Planner
from unifiedpool._native import ffi, lib
planner = Planner(Layout.simple({"full": 256}), 1 << 16)
planner.allocate({"full": 64})
cells, handles, count = ffi.new("int32_t[]", 4), ffi.new("int32_t[]", 64), ffi.new("int64_t *")
lib.up_live_cells(planner._grids, 0, cells, handles, 64, count)  # 64 is a lie: C writes past the end of cells
"""


@pytest.mark.skipif(os.environ.get("UNIFIEDPOOL_SANITIZED") != "1", reason="only in the instrumented build (make asan)")
def test_planted_overflow_is_caught() -> None:
    result = subprocess.run([sys.executable, "-c", PLANTED], capture_output=True, text=True)
    assert result.returncode != 0
    assert "heap-buffer-overflow" in result.stderr
