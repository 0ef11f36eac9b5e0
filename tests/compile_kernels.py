"""Compile every kernel ahead of time, as its host wrapper would launch it, for GPUs that need not be there.

    python tests/compile_kernels.py [--targets sm_90,gfx942] [--kernels copy_cells_kernel,...] [--json PATH] [--table]

Each scenario calls a wrapper with arguments of real shapes; in place of the launch, the kernel is compiled with the
very signature, alignments and constants that Triton would derive from those arguments. The report says, per kernel and
target, which widths of memory access the code has, how many registers, and what was spilled.

Run it in a process of its own and without TRITON_INTERPRET: an interpreted kernel cannot be compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from unifiedpool.kernels import (
    _support,
    backend,
    commit_conv_windows,
    copy_cells,
    copy_rows,
    page_tables,
    replay_states,
    track_states,
    write_kv,
)

__all__ = ["COPY_LIKE", "READING_STATES", "SCENARIOS", "TARGETS", "Compiled", "compile_all", "markdown"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one compiled kernel looks like.

    Attributes:
        scenario: name of the call that led to it.
        kernel: name of the function.
        target: "sm_90", ...
        registers: of a thread (vector registers on gfx942).
        spills: bytes of local memory on NVIDIA, spilled vector registers on AMD.
        loads, stores: number of memory instructions by width in bits.
    """

    scenario: str
    kernel: str
    target: str
    registers: int
    spills: int
    loads: dict[str, int]
    stores: dict[str, int]


def _lazy(size: int) -> Tensor:
    """Bytes of an arena that is too large for 32-bit offsets, which Triton looks at. Never written, so never there."""
    raw = torch.empty(max(size, 3 << 30) + 256, dtype=torch.uint8)
    return raw[-raw.data_ptr() % 256 :][:size]


def _index(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _copy_cells(stride: int) -> None:
    arena = _lazy(8 * stride)
    copy_cells.copy_cells(arena, arena, [copy_cells.CellPairs(stride, [1, 2], [3, 4])])


def _zero_cells() -> None:
    copy_cells.zero_cells(_lazy(1 << 20), 24 << 10, [3])


def _copy_rows() -> None:
    arena = _lazy(1 << 22)
    view = arena.view(torch.bfloat16).view(-1, 16, 8, 128)
    rows = _index(17, 19, dtype=torch.int64)
    copy_rows.copy_rows(arena, copy_rows.RowParts.of(arena, [view]), rows, rows - 1, _index(0, 2))


def _track(states: Tensor) -> None:
    track_states.track_states(states, torch.zeros(256, dtype=torch.bool), *torch.arange(512).int().view(2, 256))


def _track_envelopes() -> None:
    mask = torch.zeros(256, dtype=torch.bool)
    track_states.track_cells(_lazy(1 << 22), 1 << 12, mask, *torch.arange(512).int().view(2, 256))


def _track_views() -> None:
    _track(torch.as_strided(_lazy(1 << 24).view(torch.bfloat16), (520, 3, 2560), (8192, 2624, 1)))


def _track_many_lanes() -> None:
    lanes = torch.arange(4096, dtype=torch.int32)
    track_states.track_cells(_lazy(1 << 26), 1 << 13, torch.zeros(4096, dtype=torch.bool), lanes, lanes)


def _track_odd_run() -> None:
    _track(torch.as_strided(_lazy(1 << 20).view(torch.bfloat16), (520, 15), (64, 1)))


def _commit_words() -> None:
    conv, windows = _lazy(1 << 22).view(torch.bfloat16), torch.zeros(4, 3, 1536, 3, dtype=torch.bfloat16)
    slots = torch.as_strided(conv, (16, 1536, 3), (65536, 3, 1))
    commit_conv_windows.commit_conv_windows(slots, windows, _index(0, 1, 2), _index(3, 4, 5))


def _commit_elements() -> None:
    conv, rows = _lazy(1 << 22).view(torch.bfloat16), torch.zeros(4, 1536, 8, dtype=torch.bfloat16)
    windows = commit_conv_windows.overlapping_windows(rows, 3)
    slots = torch.as_strided(conv, (16, 1536, 3), (65536, 3, 1))
    commit_conv_windows.commit_conv_windows(slots, windows, _index(0, 1, 2), _index(3, 4, 5))


def _rings(per_channel: bool, state_dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor]:
    heads, length, dim = 12, 16, 128
    key_heads = heads if per_channel else heads // 2
    state = torch.as_strided(_lazy(16 << 20).view(state_dtype), (4, heads, dim, dim), (1 << 20, dim * dim, dim, 1))
    values, keys = torch.zeros(4, length, heads, dim).bfloat16(), torch.zeros(4, length, key_heads, dim).bfloat16()
    gates = torch.zeros(4, length, heads, dim) if per_channel else torch.zeros(4, length, heads)
    return state, (values, keys, gates), torch.zeros(4, length, heads)


def _replay(per_channel: bool, state_dtype: torch.dtype) -> None:
    state, ring, beta = _rings(per_channel, state_dtype)
    two = _index(0, 1)
    replay_states.replay_states(state, *ring, beta, slots=two, start=two, count=two)


def _outputs(per_channel: bool) -> None:
    state, ring, _ = _rings(per_channel, torch.bfloat16)
    two = _index(0, 1)
    query, out = torch.zeros(2, 12, 128).bfloat16(), torch.zeros(2, 12, 128).bfloat16()
    replay_states.replay_outputs(state, *ring, query, out, slots=two, start=two, count=two, scale=0.088)


def _tables() -> Tensor:
    return torch.zeros(3, 8192, dtype=torch.int32)


def _update_tables() -> None:
    page_tables.update_tables(_tables(), torch.zeros(600, 4, dtype=torch.int32))


def _build_tables(count: int) -> None:
    out = page_tables.BatchTables.allocate(lanes=count, width=2048, tokens=count)
    handles, lanes = torch.zeros(count, 2048, dtype=torch.int32), torch.ones(count, dtype=torch.int32)
    starts = torch.arange(count + 1, dtype=torch.int32)
    page_tables.build_tables(
        _tables(), _index(1), handles, lanes, starts, out, page_size=64, state_handles=lanes, state_kind=0, pad=0
    )


def _translate() -> None:
    handles = torch.zeros(64, 256, dtype=torch.int32)
    page_tables.translate(handles, _tables()[1], torch.empty_like(handles), 0)


def _map_slots() -> None:
    handles = torch.zeros(64, 256, dtype=torch.int32)
    page_tables.map_slots(handles, handles.long(), _tables()[1], 64, torch.empty(64, 256, dtype=torch.int64))


def _write(source: torch.dtype, target: torch.dtype, *, hnd: bool = False) -> None:
    caches = []
    for _ in range(2):
        cache = _lazy((16 * 64 * 8 * 128 + 128) * target.itemsize * 8).view(target)
        strides = (16 * 8 * 128 + 128, 128, 16 * 128, 1) if hnd else (16 * 8 * 128 + 128, 8 * 128, 128, 1)
        caches.append(torch.as_strided(cache, (8, 16, 8, 128), strides))
    rows = torch.zeros(3, 8, 128, dtype=source)
    scale = torch.ones(1) if source != target else None
    slots = _index(17, 18, 90, dtype=torch.int64)
    write_kv.write_kv(rows, rows, *caches, slots, key_scale=scale, value_scale=scale)


def _write_mla() -> None:
    cache = torch.as_strided(_lazy(1 << 20).view(torch.bfloat16), (8, 64, 576), (64 * 576 + 128, 576, 1))
    latent, rope = torch.zeros(2, 512).bfloat16(), torch.zeros(2, 64).bfloat16()
    write_kv.write_mla(latent, rope, cache, _index(70, 90, dtype=torch.int64))


BF16, FP32, FP8, FP8_5 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
SCENARIOS: dict[str, Callable[[], None]] = {
    "copy cells of 24 KB": lambda: _copy_cells(24 << 10),
    "copy cells of 256 B": lambda: _copy_cells(256),
    "zero cells": _zero_cells,
    "copy rows": _copy_rows,
    "track envelopes": _track_envelopes,
    "track strided views": _track_views,
    "track 30-byte runs": _track_odd_run,
    "track 4,096 lanes": _track_many_lanes,
    "commit conv windows": _commit_words,
    "commit conv windows, overlapping": _commit_elements,
    "fold GDN, fp32 state": lambda: _replay(False, FP32),
    "fold KDA, bf16 state": lambda: _replay(True, BF16),
    "outputs GDN": lambda: _outputs(False),
    "outputs KDA": lambda: _outputs(True),
    "update tables": _update_tables,
    "build tables, 256 lanes": lambda: _build_tables(256),
    "build tables, 4,096 lanes": lambda: _build_tables(4096),
    "translate": _translate,
    "map slots": _map_slots,
    "write KV bf16": lambda: _write(BF16, BF16),
    "write KV bf16, HND": lambda: _write(BF16, BF16, hnd=True),
    "write KV bf16 to e4m3": lambda: _write(BF16, FP8),
    "write KV fp32 to e5m2, HND": lambda: _write(FP32, FP8_5, hnd=True),
    "write MLA bf16": _write_mla,
}
# What moves rows whose strides are multiples of 16 bytes has to do so in 128-bit loads and stores, ...
COPY_LIKE = (
    "copy cells of 24 KB",
    "copy cells of 256 B",
    "zero cells",
    "copy rows",
    "track envelopes",
    "track strided views",
    "track 4,096 lanes",
    "commit conv windows",
    "write KV bf16",
    "write KV bf16, HND",
    "write KV bf16 to e4m3",
    "write KV fp32 to e5m2, HND",
    "write MLA bf16",
)
# ... and what reads states, in 128-bit loads.
READING_STATES = ("fold GDN, fp32 state", "fold KDA, bf16 state", "outputs GDN", "outputs KDA")


Launch = tuple["JITFunction[Any]", tuple[Any, ...], dict[str, Any]]


@contextmanager
def _launches_kept_in(launches: list[Launch], warp_threads: int) -> Iterator[None]:
    def run(self: JITFunction[Any], *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        launches.append((self, args, kwargs))

    # The kernels were imported to be compiled; the wrappers only have to believe that they may launch on CPU tensors.
    with (
        mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}),
        backend.use("triton"),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(_support, "WARP_THREADS", warp_threads),
    ):
        yield


def _specialized(kernel: JITFunction[Any], args: tuple[Any, ...], kwargs: dict[str, Any], target: GPUTarget) -> Any:
    compiler = make_backend(target)
    bound, specialization, options = create_function_from_signature(kernel.signature, kernel.params, compiler)(
        *args, **kwargs
    )
    packed, signature, constants, attributes = kernel._pack_args(compiler, kwargs, bound, specialization, options)
    return ASTSource(kernel, signature, constants, attributes), packed.__dict__


def compile_all(targets: list[str], scenarios: list[str]) -> Iterator[Compiled]:
    """Compile the scenarios for the targets."""
    for scenario in scenarios:
        for name in targets:
            launches: list[Launch] = []
            with _launches_kept_in(launches, TARGETS[name].warp_size):
                SCENARIOS[scenario]()
            assert launches, f"{scenario} launched nothing"
            kernel, args, kwargs = launches[0]
            source, options = _specialized(kernel, args, kwargs, TARGETS[name])
            built = triton.compile(source, target=TARGETS[name], options=options)
            read = _read_amd if name.startswith("gfx") else _read_nvidia
            yield Compiled(scenario, kernel.__name__, name, **read(built.asm))


def _read_nvidia(asm: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": found["REG"],
        "spills": found["LOCAL"] + found["STACK"],
        "loads": _widths_of_ptx(asm["ptx"], "ld"),
        "stores": _widths_of_ptx(asm["ptx"], "st"),
    }


def _widths_of_ptx(ptx: str, operation: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for vector, bits in re.findall(rf"\b{operation}\.global(?:\.\w+)*?(?:\.v(\d))?\.[busf](\d+)", ptx):
        width = str(int(vector or 1) * int(bits))
        counts[width] = counts.get(width, 0) + 1
    return counts


def _read_amd(asm: Any) -> dict[str, Any]:
    text = asm["amdgcn"]

    def number(key: str) -> int:
        match = re.search(rf"\.{key}:\s+(\d+)", text)
        assert match, f"no {key} in the code object's metadata"
        return int(match[1])

    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count") + number("sgpr_spill_count") + number("private_segment_fixed_size"),
        "loads": _widths_of_gcn(text, "load"),
        "stores": _widths_of_gcn(text, "store"),
    }


def _widths_of_gcn(text: str, operation: str) -> dict[str, int]:
    bits = {"dwordx4": 128, "dwordx2": 64, "dwordx3": 96, "dword": 32, "ushort": 16, "short": 16, "ubyte": 8, "byte": 8}
    counts: dict[str, int] = {}
    for name in re.findall(rf"\b(?:global|buffer|flat)_{operation}_([a-z]+\d?)", text):
        if name in bits:
            counts[str(bits[name])] = counts.get(str(bits[name]), 0) + 1
    return counts


def markdown(rows: list[Compiled]) -> str:
    """The table of docs/kernels.md: registers, and the widest load and store, of every kernel and target."""
    targets = list(dict.fromkeys(row.target for row in rows))
    lines = [f"| call | kernel | {' | '.join(targets)} |", "|---|---|" + "---:|" * len(targets)]
    for scenario in dict.fromkeys(row.scenario for row in rows):
        found = {row.target: row for row in rows if row.scenario == scenario}
        cells = []
        for target in targets:
            row = found[target]
            widest = [max(map(int, widths), default=0) for widths in (row.loads, row.stores)]
            cells.append(f"{row.registers} ({widest[0]}/{widest[1]})" + (f" spills {row.spills}" if row.spills else ""))
        lines.append(f"| {scenario} | `{next(iter(found.values())).kernel}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Compile and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated, of " + ", ".join(TARGETS))
    parser.add_argument("--scenarios", default=";".join(SCENARIOS), help="semicolon-separated")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true", help="print the table for the documentation")
    chosen = parser.parse_args()
    rows = list(compile_all(chosen.targets.split(","), chosen.scenarios.split(";")))
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    print(markdown(rows) if chosen.table else "\n".join(map(str, rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
