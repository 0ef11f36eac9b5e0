"""A pool: planner and arena in one process, which is what a small engine uses.

An engine with worker processes holds a `Planner` in the scheduler and an `Arena` in each worker instead, and sends
plans between them (examples/replace_static_pool.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .arena import Arena
from .errors import InvalidArgumentError, format_bytes, refuse_copy
from .layout import Layout
from .plan import StepPlan
from .planner import Planner

if TYPE_CHECKING:
    import torch

__all__ = ["Pool", "occupancy", "picture"]


def occupancy(planner: Planner, columns: int) -> npt.NDArray[np.float64]:
    """Return what share of each of `columns` equal byte ranges each kind occupies.

    Returns:
        `[kinds + 1, columns]` float64 in 0..1; the last row is reserved bytes. O(live cells + columns).
    """
    edges = np.linspace(0, planner.arena_bytes, columns + 1)
    width = planner.arena_bytes / columns
    rows = [_covered(planner.live_cells(kind.name)[0], kind.stride_bytes, edges) for kind in planner.layout.kinds]
    rows.append(np.clip(planner.layout.null_bytes - edges[:-1], 0, width))
    return np.stack(rows) / width


def _covered(cells: npt.NDArray[np.int32], stride: int, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Bytes of the cells (ascending) between neighbouring edges: differences of the bytes covered below each edge."""
    starts = cells.astype(np.float64) * stride
    below = np.searchsorted(starts, edges, side="left")  # cells that start below each edge
    covered = below * float(stride)
    partial = below > 0
    last = starts[np.maximum(below - 1, 0)] if len(starts) else np.zeros_like(edges)
    covered -= np.where(partial, np.clip(last + stride - edges, 0, stride), 0)
    return np.diff(covered)


def picture(planner: Planner, columns: int = 96, rows: int = 4) -> str:
    """Draw the arena as text: one character a byte range, a letter for the kind that fills most of it.

    Capitals fill more than half of their range, small letters less; `.` is free and `0` the null cell.
    """
    shares = occupancy(planner, columns * rows)
    letters = _letters(planner.layout)
    cells = []
    for column in range(columns * rows):
        kind = int(np.argmax(shares[:, column]))
        share = shares[kind, column]
        letter = (*letters, "0")[kind]
        cells.append("." if share <= 0 else letter if share > 0.5 else letter.lower())
    stats = planner.stats()
    lines = ["".join(cells[row * columns : (row + 1) * columns]) for row in range(rows)]
    legend = "  ".join(
        f"{letter} {name} {kind.live} live, {kind.placeable} more fit"
        for letter, (name, kind) in zip(letters, stats.kinds.items(), strict=True)
    )
    lines.append(f"{legend}  {format_bytes(stats.free_bytes)} of {format_bytes(stats.arena_bytes)} free")
    return "\n".join(lines)


def _letters(layout: Layout) -> list[str]:
    """One letter a kind: the first letter of its name that is still free."""
    taken: list[str] = []
    for name in layout.names:
        wanted = [{"full": "P"}.get(name, name[0].upper()), *name.upper(), *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
        taken.append(next(letter for letter in wanted if letter.isalpha() and letter not in taken))
    return taken


class Pool:
    """A planner and the arena that it plans for.

    >>> pool = Pool(Layout.simple({"state": 4096, "full": 512}), 1 << 16)
    >>> handles = pool.planner.allocate({"full": 3, "state": 1})
    >>> pool.step().sequence
    0
    >>> pool.arena.tables["full"][handles.numpy()].tolist()
    [7, 6, 5, -1]
    """

    __slots__ = ("arena", "planner")
    __reduce__ = refuse_copy

    def __init__(self, layout: Layout, arena_bytes: int, *, device: str | torch.device = "cpu") -> None:
        """Plan and hold `arena_bytes` bytes on `device`. Errors as in `Planner` and `Arena`."""
        self.planner = Planner(layout, arena_bytes)
        self.arena = Arena(layout, arena_bytes, device=device)

    @property
    def layout(self) -> Layout:
        """What the cells hold."""
        return self.planner.layout

    def step(self, step: int = 0, *, stream: Any = None) -> StepPlan | None:
        """Seal what was planned and apply it, at the head of an engine step.

        Args:
            step: the engine's own number.
            stream: the CUDA stream that the step's forward runs on; the current one by default.

        Returns:
            The plan that was applied, None when there was nothing to do.
        """
        if stream is not None and self.arena.device.type != "cuda":  # before the seal: a sealed plan must be applied
            raise InvalidArgumentError(f"a stream was given, but the arena is on {self.arena.device}; leave it out")
        plan = self.planner.seal(step)
        if plan is not None:
            self.arena.apply(plan, stream=stream)
        return plan

    def __str__(self) -> str:
        return picture(self.planner)

    def __repr__(self) -> str:
        return f"Pool({self.planner!r}, device={self.arena.buffer.device})"

    def plot(self, path: str | Path, *, columns: int = 128, rows: int = 24) -> Path:
        """Write a picture of the arena as an image, one colour a kind. Needs matplotlib.

        Args:
            path: where to; the ending chooses the format.
            columns, rows: the arena is cut into `columns * rows` equal byte ranges, row by row from byte 0.

        Raises:
            InvalidArgumentError: columns or rows is below 1.
            ImportError: matplotlib is missing (`pip install unifiedpool[plots]`).
        """
        if columns < 1 or rows < 1:
            raise InvalidArgumentError(f"columns={columns} and rows={rows} must be at least 1")
        import matplotlib

        matplotlib.use("Agg", force=False)
        from matplotlib import pyplot
        from matplotlib.patches import Patch

        shares = occupancy(self.planner, columns * rows)
        colours = np.array([matplotlib.colors.to_rgb(colour) for colour in (*_COLOURS[: len(shares) - 1], "#555555")])
        free = np.clip(1 - shares.sum(axis=0), 0, 1)
        image = (shares.T @ colours + free[:, None]).clip(0, 1).reshape(rows, columns, 3)
        figure, axes = pyplot.subplots(figsize=(11, 4.2), layout="constrained")
        axes.imshow(image, aspect="auto", interpolation="nearest")
        per_row = self.planner.arena_bytes / rows
        ticks = list(range(0, rows, max(1, rows // 6)))
        axes.set_yticks(ticks, [format_bytes(int(tick * per_row)) for tick in ticks])
        axes.set_xticks([])
        axes.set_ylabel("offset of the row's first byte")
        axes.set_title(repr(self.planner), fontsize=10)
        stats = self.planner.stats()
        legend = [
            Patch(color=tuple(colour), label=f"{name}: {kind.live} live")
            for colour, (name, kind) in zip(colours, stats.kinds.items(), strict=False)
        ]
        legend += [Patch(color=tuple(colours[-1]), label="null cell"), Patch(fc="white", ec="#999999", label="free")]
        axes.legend(handles=legend, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=len(legend), frameon=False)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        return Path(path)


_COLOURS = ("#d1495b", "#edae49", "#00798c", "#7a5195", "#66a182", "#8d6a4f")
