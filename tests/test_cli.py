"""The `unifiedpool` command: what it prints, writes and refuses, and with which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unifiedpool.cli import app
from unifiedpool.model_spec import PRESETS
from unifiedpool.traces import generate_trace, write_trace

K3 = ("kimi-k3", "--tp", "8", "--state-dtype", "bfloat16", "--page", "16")


def run(*arguments: str, code: int = 0) -> str:
    """Run the command in this process and return what it printed."""
    result = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(app, [*arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_plan_prints_document_numbers() -> None:
    text = run("plan", *K3, "--cache", "29270458368", "--slots", "80")
    for part in ("27,648 B a token", "221.6 MiB on all GPUs", "conv_state size: 0.14GB, ssm_state size: 2.05GB",
                 "#tokens: 974656, KV size: 25.10 GB", "max_running_requests=16"):  # fmt: skip
        assert part in text


def test_plan_json_goes_to_stdout_alone() -> None:
    report = json.loads(run("plan", *K3, "--cache", "60GiB", "--lengths", "4k,1m", "--json", "-"))
    assert report["schema"] == 1
    assert [row["tokens"] for row in report["lengths"]] == [4096, 1 << 20]


def test_plan_takes_memory_and_weights() -> None:
    report = json.loads(run("plan", *K3, "--memory", "141GB", "--weights", "70GB", "--json", "-"))
    assert report["server"]["cache_bytes"] == 71 * 10**9


def test_plan_writes_plot_and_json(tmp_path: Path) -> None:
    plot, data = tmp_path / "fit.svg", tmp_path / "fit.json"
    run("plan", "gemma3-27b", "--cache", "40GiB", "--plot", str(plot), "--json", str(data))
    assert plot.read_text(encoding="utf-8").lstrip().startswith("<?xml")
    assert json.loads(data.read_text(encoding="utf-8"))["model"]["name"] == "gemma3-27b"


@pytest.mark.parametrize("model", PRESETS)
def test_plan_runs_every_preset(model: str) -> None:
    assert "Requests that fit" in run("plan", model, "--cache", "60GiB", "--lengths", "4k")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("plan", "kimi-k9", "--cache", "60GiB"), 1, "neither a file nor a preset"),
        (("plan", *K3), 2, "how much memory"),
        (("plan", *K3, "--cache", "60parsec"), 2, "is no size"),
        (("plan", *K3, "--cache", "60GiB", "--memory", "80GB"), 2, "either --cache"),
        (("plan", *K3, "--cache", "60GiB", "--lengths", "many"), 2, "no context length"),
        (("plan", *K3, "--cache", "1MiB"), 1, "do not hold one request"),
        (("plan", *K3, "--memory", "80GB", "--weights", "90GB"), 1, "leave nothing"),
        (("plan", *K3, "--cache", "60GiB", "--strategy", "best"), 1, "is unknown"),
        (("plan", *K3, "--cache", "60GiB", "--plot", "fit.unknown"), 1, "cannot write the plot"),
        (("plan",), 2, "Missing argument"),
        (("explode",), 2, "No such command"),
    ],
)
def test_bad_use_is_refused_with_code(arguments: tuple[str, ...], code: int, message: str) -> None:
    assert message in " ".join(run(*arguments, code=code).split())


@pytest.mark.parametrize("option", ["--json", "--plots"])
def test_replay_refuses_a_path_it_cannot_write_before_the_run(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr("unifiedpool.cli.run_replay", never)
    trace, file = tmp_path / "t.jsonl", tmp_path / "file"
    write_trace(generate_trace(2), trace)
    file.write_text("kept", encoding="utf-8")
    bad = [file / "below", Path("/dev/null/below")] + (
        [tmp_path, tmp_path / "no" / "r.json"] if option == "--json" else [file]
    )
    for path in bad:
        text = run("replay", str(trace), "--model", "qwen3-next-80b", "--cache", "2GiB", option, str(path), code=1)
        assert "error: cannot write" in text
        assert path.name in text
    assert file.read_text(encoding="utf-8") == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "t.jsonl"]


def test_replay_leaves_no_report_of_a_run_that_was_refused(tmp_path: Path) -> None:
    trace, report = tmp_path / "t.jsonl", tmp_path / "r.json"
    write_trace(generate_trace(2), trace)
    command = ("replay", str(trace), "--model", "qwen3-next-80b", "--cache", "2GiB", "--policies", "best")
    run(*command, "--json", str(report), code=1)
    assert not report.exists()
    report.write_text("kept", encoding="utf-8")
    run(*command, "--json", str(report), code=1)
    assert report.read_text(encoding="utf-8") == "kept"
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "not yet.json")
    run(*command, "--json", str(link), code=1)
    assert link.is_symlink()


def test_config_without_a_field_names_it(tmp_path: Path) -> None:
    config = {**PRESETS["qwen3-next-80b"]}
    del config["num_hidden_layers"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert "num_hidden_layers" in run("plan", str(path), "--cache", "60GiB", code=1)


def test_env_lists_versions_and_presets() -> None:
    report = json.loads(run("env", "--json", "-"))
    assert report["native"]["built"]
    assert report["presets"] == list(PRESETS)
    assert "C core" in run("env")


def test_module_runs_and_help_shows_examples() -> None:
    command = [sys.executable, "-m", "unifiedpool", "plan", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Examples" in result.stdout
