"""Every example runs, says what it should, and refuses what makes no sense."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unifiedpool.engine import SamplingParams, StaticPool, StubRunner
from unifiedpool.pool import Pool

pytest.importorskip("transformers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def run(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run an example as a user does, from somewhere else."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def call(name: str, *arguments: str) -> int:
    """Run an example inside this process: no second start of torch and transformers."""
    module = importlib.import_module(name)
    before, sys.argv = sys.argv, [f"{name}.py", *arguments]
    try:
        return int(module.main() or 0)
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv = before


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples are importable, and write into a folder of their own."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_help_says_how(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(name, "--help") == 0
    assert capsys.readouterr().out.startswith("usage")


@pytest.mark.parametrize("arguments", [("--seconds", "2"), ("--operations", "500", "--seed", "3", "--arena-mib", "1")])
def test_boundary_stress_short_runs_verify(arguments: tuple[str, ...]) -> None:
    assert call("boundary_stress", *arguments) == 0


@pytest.mark.parametrize(
    "arguments",
    [("--seconds", "0"), ("--seconds", "nan"), ("--operations", "-5"), ("--arena-mib", "nan"), ("--arena-mib", "9e9")],
)
def test_boundary_stress_impossible_arguments_refused(arguments: tuple[str, ...]) -> None:
    assert call("boundary_stress", *arguments) == 2


def test_mixed_requests_interrupted_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("mixed_requests"), "compare_pools", stop)
    assert call("mixed_requests") == 130
    assert "interrupted" in capsys.readouterr().out


def test_mixed_requests_quick_serves_identical_tokens_and_more_at_once(tmp_path: Path) -> None:
    result = run("mixed_requests", "--quick", "--json", "out.json", "--plot", "out.png", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    one_by_one, static, best, unified = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert one_by_one["mean_running"] == 1.0
    for run_ in (static, best, unified):
        assert run_["identical"] + run_["near_ties"] == 40
        assert run_["different"] == 0
    assert static["moved_bytes"] == best["moved_bytes"] == 0
    assert unified["mean_running"] >= best["mean_running"] >= static["mean_running"]
    assert unified["mean_running_queued"] >= 1.5 * static["mean_running_queued"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "tokens" in result.stdout and "unified" in result.stdout


def test_mixed_requests_default_mix_holds_half_as_many_again() -> None:
    """The claim, on the schedule alone: it depends on lengths, never on tokens."""
    example = importlib.import_module("mixed_requests")
    options = example.parse([])
    model, _ = example.load_model(options.model, torch.float32, options.seed)
    layout = example.make_layout(model, options.page_size)
    setting = example.size_up(model, layout, options, options.requests)
    work = [([0] * lengths.prompt, lengths) for lengths in setting.mix]
    best = example.best_ratio(layout, setting.arena_bytes, {}, setting.mix, setting.config)
    means = []
    for pool in (
        StaticPool(layout, setting.arena_bytes, ratio=0.9),
        StaticPool(layout, setting.arena_bytes, ratio=best),
        Pool(layout, setting.arena_bytes),
    ):
        means.append(example.serve(pool, StubRunner(), work, setting.config, SamplingParams())[1].mean_running)
    static, best_static, unified = means
    print(f"mean running: static {static:.2f}, best static ({best:.2f}) {best_static:.2f}, unified {unified:.2f}")
    assert unified >= 1.5 * static
    assert unified >= best_static >= static


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "gemma3", "--requests", "6"),  # no states: nothing to split
        ("--model", "lfm2", "--requests", "7", "--dtype", "bfloat16", "--page-size", "1", "--chunk", "5"),
        ("--requests", "3", "--states", "4", "--temperature", "0.7", "--seed", "9", "--scale", "100"),
    ],
)
def test_mixed_requests_odd_arguments_run(arguments: tuple[str, ...], tmp_path: Path) -> None:
    assert call("mixed_requests", *arguments) == 0
    assert (tmp_path / "out" / "mixed_requests.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--requests", "0"), "at least 1"),
        (("--model", "no_such_model"), "none of"),
        (("--scale", "-1"), "above 0"),
        (("--dtype", "int8"), "invalid choice"),
        (("--requests", "2", "--states", "1"), "Error"),
        (("--requests", "2", "--ratio", "0"), "ratio"),
        (("--ratio", "nan"), "finite number"),
        (("--requests", "2", "--temperature", "-1"), "temperature"),
        (("--json", f"{__file__}/out.json"), "cannot write"),
        (("--plot", f"{__file__}/out.png"), "cannot write"),
    ],
)
def test_mixed_requests_impossible_arguments_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("mixed_requests", *arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.out + shown.err


def test_replace_static_pool_shows_the_change_and_checks_every_byte(tmp_path: Path) -> None:
    result = run("replace_static_pool", "--quick", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "+     self.planner = Planner(layout, arena_bytes)" in result.stdout
    assert "torch in the scheduler: False" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--no-diff", "--requests", "3", "--page-size", "7", "--states", "12"), 0),
        (("--no-diff", "--requests", "0"), 2),
        (("--no-diff", "--requests", "20", "--states", "2"), 2),
    ],
)
def test_replace_static_pool_odd_arguments(arguments: tuple[str, ...], code: int) -> None:
    assert call("replace_static_pool", *arguments) == code


@pytest.mark.parametrize(
    ("arguments", "least"),
    [
        (("--chats", "3", "--forks", "2", "--turns", "3"), 0.8),
        (("--model", "gpt_oss", "--chats", "2", "--turns", "2"), 0.4),
        (("--arena-kib", "320", "--chats", "2", "--turns", "2"), 0.0),  # little room: what runs comes first
    ],
)
def test_chat_sessions_quick_saves_prefill_and_gives_identical_tokens(
    arguments: tuple[str, ...], least: float, tmp_path: Path
) -> None:
    assert call("chat_sessions", "--outputs", "4", "--json", "out.json", *arguments) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    off, on = report["runs"]
    assert report["different"] == 0
    assert on["prefill_tokens"] <= (1 - least) * off["prefill_tokens"]
    assert all(turn["cached_tokens"] == 0 for turn in off["turns"])
    for turn in on["turns"] if least else ():
        # All of the turn before, but for the answer's last token, which nothing was computed from.
        assert turn["turn"] == 1 or turn["cached_tokens"] >= 0.8 * turn["prompt_tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--turns", "0"), "at least 1"),
        (("--model", "no_such_model"), "invalid choice"),
        (("--forks", "-1"), "at least 0"),
        (("--arena-kib", "64"), "CapacityError"),
        (("--chunk", "8"), "less than a page"),
    ],
)
def test_chat_sessions_impossible_arguments_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("chat_sessions", *arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.out + shown.err
