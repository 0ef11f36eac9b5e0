"""Under `make asan`: the extension is instrumented, so an overflow that somebody plants does not go unseen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.native

PLANTED = """
from unifiedpool import Handles, Layout, Planner
planner = Planner(Layout.simple({"full": 256}), 1 << 16)
out = Handles(4)
out._native.capacity = 64  # a lie: C now writes past the end
planner.allocate({"full": 64}, out)
"""


@pytest.mark.skipif(os.environ.get("UNIFIEDPOOL_SANITIZED") != "1", reason="only in the instrumented build (make asan)")
def test_planted_overflow_is_caught() -> None:
    result = subprocess.run([sys.executable, "-c", PLANTED], capture_output=True, text=True)
    assert result.returncode != 0
    assert "heap-buffer-overflow" in result.stderr
