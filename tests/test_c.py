"""The C core under sanitizers: white-box tests, the lock-step fuzzer, and proof that both can fail.

Soak: `pytest --soak tests/test_c.py` runs 10^8 operations on two cores in some ten minutes. By hand:

    cc -std=c11 -O2 -g -Icsrc tests/c/fuzz_grids.c csrc/grids.c csrc/plan.c -o fuzz_grids && ./fuzz_grids SEED OPS
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not shutil.which(os.environ.get("CC", "cc")), reason="no C compiler")

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
CORE = (CSRC / "grids.c", CSRC / "plan.c")
FUZZER = ROOT / "tests" / "c" / "fuzz_grids.c"
WHITE_BOX = ROOT / "tests" / "c" / "test_grids.c"
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
CANARIES = (
    "loses a move",
    "merges phases",
    "allows one too many",
    "loses a table change",
    "loses a zero",
    "writes to a wrong destination",
    "changes something when it refuses",
    "zeroes a live cell",
)
# Bugs planted in the core: (what, regular expression of one line or part, what stands there instead).
MUTANTS = (
    ("a larger cell does not become dirty", r"if \(sign > 0\) larger->dirty\[[^;]*;", ""),
    ("a smaller cell does not become dirty", r"up_words_set_range\(g->kind\[j\]\.dirty,[^;]*;", ";"),
    ("a moved cell stays dirty", r"own->dirty\[to\] &= ~destinations;", ""),
    ("pinned cells count as movable", r"own->num_live - own->num_pinned", "own->num_live"),
    ("a pinned window may be opened", r"larger->window\[t\] \^= WINDOW_PINNED;", ""),
    ("a write forgets an earlier read", r"if \(g->read\[dst \+ i\] >= level\) [^;]*;", ""),
    ("a read forgets an earlier write", r"if \(reads && g->wrote\[src \+ i\] >= level\) [^;]*;", ""),
    ("a failed batch stays marked", r"while \(i-- > 0\) words\[handles\[i\]\] &= ~HANDLE_MARKED;", ""),
    ("an evacuated handle's table change is lost", r"handle_changed\(g, h\);(?=\s*record\(g, UP_OP_MOVE, j)", ""),
    ("a window is not looked at again", r"mark_stale\(larger, t\);(?=\s*window_update)", ""),
    (
        "the last bit of a range is lost",
        r"w == last \? \(int\)\(\(hi - 1\) & 63\) \+ 1 :",
        "w == last ? (hi - 1) & 63 :",
    ),
    ("promises are not counted", r"\(promised \? g->count\[k\]\.reserved : 0\)", "0"),
    ("straddling bytes are not held", r"hold_below\(g, old, straddling, [01]\);", ""),
)


def compiler() -> str:
    return os.environ.get("CC", "cc")


def build(out: Path, sources: Sequence[Path], *flags: str) -> Path:
    """Compile and link; warnings are errors."""
    command = [compiler(), "-std=c11", "-Wall", "-Wextra", "-Werror", "-g", f"-I{CSRC}", *flags]
    done = subprocess.run([*command, *map(str, sources), "-o", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def run(*command: str | int | Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    environment["ASAN_OPTIONS"] = "detect_leaks=1"
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=timeout, env=environment
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("c")


@pytest.fixture(scope="session")
def white_box(folder: Path) -> Path:
    return build(folder / "test_grids", [WHITE_BOX, CSRC / "plan.c"], "-O0", *SANITIZE)


@pytest.fixture(scope="session")
def fuzzer(folder: Path) -> Path:
    return build(folder / "fuzz_grids", [FUZZER, *CORE], "-O1", *SANITIZE)


@pytest.fixture(scope="session")
def core_objects(folder: Path) -> list[Path]:
    return [build(folder / f"{source.stem}.o", [source], "-O1", "-c") for source in CORE]


@pytest.fixture(scope="session")
def fuzzer_object(folder: Path) -> Path:
    return build(folder / "fuzzer.o", [FUZZER], "-O1", "-c")


def fuzz_in_parallel(fuzzer: Path, seeds: Sequence[int], operations: int, every: int = 1) -> list[str]:
    """Run one fuzzer a seed, all at once; return their last words."""
    runs = [
        subprocess.Popen(
            [str(fuzzer), str(seed), str(operations), "--every", str(every)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for seed in seeds
    ]
    outputs = [each.communicate()[0] for each in runs]
    for each, output in zip(runs, outputs, strict=True):
        assert each.returncode == 0, output
    return outputs


def test_white_box_under_sanitizers_passes(white_box: Path) -> None:
    done = run(white_box)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("test_") >= 15


@pytest.mark.parametrize(
    ("what", "report"),
    [("overflow", "AddressSanitizer: heap-buffer-overflow"), ("undefined", "runtime error"), ("leak", "LeakSanitizer")],
)
def test_planted_fault_is_caught_by_the_sanitizers(white_box: Path, what: str, report: str) -> None:
    assert run(white_box, "--plant", "nothing").returncode == 0
    done = run(white_box, "--plant", what)
    assert done.returncode != 0
    assert report in done.stderr


def test_fuzzer_under_sanitizers_agrees_with_the_byte_map(fuzzer: Path, seed: int) -> None:
    outputs = fuzz_in_parallel(fuzzer, [2 * seed, 2 * seed + 1], 500_000, every=4)
    assert all("agree with the model" in output for output in outputs)


def test_fuzzer_same_seed_gives_the_same_digest_in_every_process(fuzzer: Path, seed: int) -> None:
    one, again, other = fuzz_in_parallel(fuzzer, [seed + 9, seed + 9, seed + 10], 20_000)
    assert one == again
    assert one != other


@pytest.mark.parametrize("number", range(1, len(CANARIES) + 1), ids=[name.replace(" ", "-") for name in CANARIES])
def test_fuzzer_with_a_lying_core_fails(folder: Path, core_objects: list[Path], number: int) -> None:
    canary = build(folder / f"canary{number}", [FUZZER, *core_objects], "-O0", f"-DUP_CANARY={number}")
    done = run(canary, 1, 100_000, "--quiet", timeout=60)
    assert done.returncode == 1, done.stdout
    assert "FAILED: seed 1" in done.stdout


def test_fuzzer_shrinks_a_failure_to_a_few_operations(folder: Path, core_objects: list[Path]) -> None:
    canary = build(folder / "shrinks", [FUZZER, *core_objects], "-O0", "-DUP_CANARY=1")
    done = run(canary, 3, 100_000, timeout=120)
    shrunk = re.search(r"shrunk to (\d+) of (\d+) operations", done.stdout)
    assert shrunk, done.stdout
    assert int(shrunk[1]) <= min(12, int(shrunk[2]))


def mutated(pattern: str, instead: str) -> str | None:
    """Return bitset.h and grids.c as one source with the bug, or None where the code has changed."""
    header, source = (CSRC / "bitset.h").read_text(), (CSRC / "grids.c").read_text()
    text = source.replace('#include "bitset.h"', header)
    changed, count = re.subn(pattern, instead, text)
    return changed if count else None


@pytest.mark.parametrize(("what", "pattern", "instead"), MUTANTS, ids=[m[0].replace(" ", "-") for m in MUTANTS])
def test_fuzzer_with_a_bug_planted_in_the_core_fails(
    folder: Path, fuzzer_object: Path, what: str, pattern: str, instead: str
) -> None:
    source = mutated(pattern, instead)
    if source is None:
        pytest.skip(f"the core has changed: write the mutant {what!r} anew")
    path = folder / f"{re.sub('[^a-z]', '_', what)}.c"
    path.write_text(source)
    mutant = build(path.with_suffix(""), [fuzzer_object, path, CSRC / "plan.c"], "-O0", "-w")
    done = run(mutant, 1, 400_000, "--quiet", timeout=120)
    assert done.returncode == 1, f"{what}: {done.stdout}"


def test_fuzzer_most_planted_bugs_still_apply() -> None:
    assert sum(mutated(pattern, instead) is not None for _, pattern, instead in MUTANTS) >= len(MUTANTS) - 3


@pytest.mark.soak
def test_fuzzer_hundred_million_operations_agree_with_the_byte_map(folder: Path, seed: int) -> None:
    fast = build(folder / "soak", [FUZZER, *CORE], "-O2")
    fuzz_in_parallel(fast, [1000 + 2 * seed, 1001 + 2 * seed], 50_000_000)
