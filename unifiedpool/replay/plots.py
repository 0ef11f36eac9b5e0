"""Plots of a replay's report. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidArgumentError

__all__ = ["check_plots", "plot_report"]

_PARTS = (
    ("running_kv", "KV of running requests", "#1f77b4"),
    ("running_states", "states of running requests", "#d62728"),
    ("cached_kv", "cached KV", "#aec7e8"),
    ("cached_states", "cached states", "#ff9896"),
    ("window_kv", "window KV", "#2ca02c"),
    ("page_tails", "tails of pages", "#7f7f7f"),
    ("padding", "padding", "#c7c7c7"),
)


def check_plots(folder: str | Path) -> None:
    """Check, before a long run, that `plot_report` can write; makes the folder.

    Raises:
        InvalidArgumentError: matplotlib is missing, or the folder cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgumentError("plots need matplotlib: pip install 'unifiedpool[plots]'")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidArgumentError(f"cannot write plots to {str(folder)!r}: {error.strerror}") from None


def plot_report(report: dict[str, Any], folder: str | Path) -> list[Path]:
    """Draw memory over time by kind, concurrency over time, and hit rate against memory.

    Without a run of the server's own memory size there is nothing over time to draw.

    Args:
        report: of `run_replay`.
        folder: where the SVG files go; made when missing.

    Returns:
        The files.

    Raises:
        InvalidArgumentError: matplotlib is missing, or the folder cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidArgumentError("plots need matplotlib: pip install 'unifiedpool[plots]'") from None
    folder = Path(folder)
    size = report["server"]["cache_bytes"]
    # A run that was interrupted at once has no series.
    runs = [run for run in report["runs"] if run["cache_bytes"] == size and run["series"]]
    figures = [("memory", _memory(Figure, runs, size)), ("concurrency", _concurrency(Figure, runs))] if runs else []
    figures.append(("hit_rate", _hit_rate(Figure, report["runs"])))
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures:
            figure.savefig(folder / f"{name}.svg")
            written.append(folder / f"{name}.svg")
    except OSError as error:
        raise InvalidArgumentError(f"cannot write plots to {str(folder)!r}: {error.strerror}") from None
    return written


def _memory(figure_class: Any, runs: Sequence[dict[str, Any]], size: int) -> Any:
    figure = figure_class(figsize=(10, 1 + 2.2 * len(runs)), layout="constrained")
    for index, run in enumerate(runs):
        axes = figure.add_subplot(len(runs), 1, index + 1)
        series = run["series"]
        labels, colours = [label for _, label, _ in _PARTS], [colour for _, _, colour in _PARTS]
        stacks = [[value / size for value in series[part]] for part, _, _ in _PARTS]
        axes.stackplot(series["t"], stacks, labels=labels, colors=colours)
        axes.set_ylim(0, 1)
        axes.set_ylabel(run["policy"])
        if index == 0:
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8)
    axes.set_xlabel("seconds")
    return figure


def _concurrency(figure_class: Any, runs: Sequence[dict[str, Any]]) -> Any:
    figure = figure_class(figsize=(10, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for run in runs:
        upper.plot(run["series"]["t"], run["series"]["running"], label=run["policy"], linewidth=1)
        lower.plot(run["series"]["t"], run["series"]["waiting"], linewidth=1)
    upper.set_ylabel("running requests")
    lower.set_ylabel("waiting requests")
    lower.set_xlabel("seconds")
    upper.legend(fontsize=8)
    return figure


def _hit_rate(figure_class: Any, runs: Sequence[dict[str, Any]]) -> Any:
    figure = figure_class(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for policy in dict.fromkeys(run["policy"] for run in runs):
        points = sorted((r["cache_bytes"] / 2**30, r["tokens"]["hit_rate"]) for r in runs if r["policy"] == policy)
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=policy)
    axes.set_xlabel("cache memory per GPU (GiB)")
    axes.set_ylabel("token hit rate")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure
