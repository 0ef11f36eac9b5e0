"""Reading, checking, describing, generating and writing request traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from test_cli import run
from unifiedpool.engine import Engine, StubRunner
from unifiedpool.errors import InvalidArgumentError
from unifiedpool.layout import Layout
from unifiedpool.pool import Pool
from unifiedpool.traces import TraceWriter, generate_trace, read_trace, write_trace

MOONCAKE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 10, "hash_ids": [1, 2]},
    {"timestamp": 500, "input_length": 1536, "output_length": 5, "hash_ids": [1, 3, 4]},
    {"timestamp": 2000, "input_length": 1100, "output_length": 7, "hash_ids": [1, 3, 5]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2024-05-10 00:00:00.009930+00:00,10,2
"""


def mooncake(path: Path, records: list[object]) -> Path:
    """Write records, or lines given as text."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_mooncake_is_read(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path / "t", [*MOONCAKE]))
    assert (trace.format, trace.block_tokens, trace.problems) == ("mooncake", 512, ())
    assert [request.arrival_s for request in trace.requests] == [0.0, 0.5, 2.0]
    assert trace.requests[1].keys == (1, 3, 4)
    # Block 1 recurs in the second, 1 and 3 in the third; the last token of a prompt is never reused.
    assert trace.summary().reusable_share == pytest.approx((512 + 1024) / 3636)


def test_azure_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(AZURE, encoding="utf-8")
    trace = read_trace(path)
    assert trace.format == "azure"
    assert trace.requests[1].arrival_s == pytest.approx(4.314579, abs=1e-6)
    assert (trace.requests[2].input_tokens, trace.requests[2].output_tokens) == (10, 2)


def test_gzip_is_read_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, MOONCAKE)).encode()))
    assert len(read_trace(path).requests) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: is not JSON"),
        ("[1]", "line 2: holds a list"),
        ('{"timestamp": 1, "input_length": 5, "hash_ids": [1]}', "line 2: has no field 'output_length'"),
        ('{"timestamp": 1, "input_length": -5, "output_length": 1, "hash_ids": []}', "'input_length' is -5"),
        ('{"timestamp": 1, "input_length": 1.5, "output_length": 1, "hash_ids": [1]}', "'input_length' is 1.5"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "'timestamp' is nan"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "holds 1 ids"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}', "list of integers"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 0, "hash_ids": [1]}', "'output_length' is 0"),
        ('{"timestamp": 1, "input_length": 5, "output_length": true, "hash_ids": [1]}', "'output_length' is True"),
    ],
)
def test_damaged_line_is_named_left_out_or_refused(tmp_path: Path, line: str, message: str) -> None:
    path = mooncake(tmp_path / "t", [MOONCAKE[0], line, MOONCAKE[1]])
    trace = read_trace(path)
    assert len(trace.requests) == 2
    assert message in str(trace.problems[0])
    with pytest.raises(InvalidArgumentError, match="line 2"):
        read_trace(path, strict=True)


@pytest.mark.parametrize(
    ("row", "message"),
    [("2023-11-16 18:15:46,5", "has 2 fields"), ("yesterday,5,5", "'TIMESTAMP' is 'yesterday'"),
     ("2023-11-16 18:15:46,five,5", "'ContextTokens' is 'five'"), ("2023-11-16 18:15:46,5,-1", "'GeneratedTokens'")],
)  # fmt: skip
def test_damaged_azure_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{AZURE}{row}\n", encoding="utf-8")
    trace = read_trace(path)
    assert len(trace.requests) == 3
    assert str(trace.problems[0]).startswith("line 5: ") and message in str(trace.problems[0])


def test_times_out_of_order_are_sorted_and_reported(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t", [MOONCAKE[2], MOONCAKE[0], MOONCAKE[1]])
    trace = read_trace(path)
    assert [request.line for request in trace.requests] == [2, 3, 1]
    assert [problem.line for problem in trace.problems] == [2, 3]
    with pytest.raises(InvalidArgumentError, match="line 2: arrives 2 s before"):
        read_trace(path, strict=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("hello\n", "line 1: no known format"),
        ("{}\n", "no known format"),
        ("TIMESTAMP,ContextTokens\n", "no column GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no usable"),
        ('{"unifiedpool_trace": 9, "block_tokens": 0}\n', "trace schema 9"),
        ('{"unifiedpool_trace": 1}\n', "block_tokens"),
    ],
)
def test_useless_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=message):
        read_trace(path)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot read"):
        read_trace(tmp_path / "nowhere")
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(InvalidArgumentError, match="cannot read"):
        read_trace(path)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_generated_trace_survives_a_file(tmp_path: Path, name: str) -> None:
    made = generate_trace(200, seed=3)
    write_trace(made, tmp_path / name)
    read = read_trace(tmp_path / name, strict=True)
    assert [request.keys for request in read.requests] == [request.keys for request in made.requests]
    assert read.summary().input_tokens == made.summary().input_tokens
    assert made == generate_trace(200, seed=3) != generate_trace(200, seed=4)


def test_generated_sessions_continue_each_other() -> None:
    trace = generate_trace(500, seed=1)
    assert trace.summary().reusable_share > 0.3
    assert all(len(r.keys) == (r.input_tokens + r.output_tokens) // 512 for r in trace.requests)


@pytest.mark.parametrize("target", ["mooncake", "azure", "jsonl"])
@pytest.mark.parametrize("source", ["mooncake", "azure", "jsonl"])
def test_conversion_keeps_lengths_and_times(tmp_path: Path, source: str, target: str) -> None:
    made = generate_trace(50)
    write_trace(made, tmp_path / "a", format=source)  # type: ignore[arg-type]
    first = read_trace(tmp_path / "a", strict=True)
    write_trace(first, tmp_path / "b", format=target)  # type: ignore[arg-type]
    second = read_trace(tmp_path / "b", strict=True)
    assert second.format == target
    for before, after in zip(made.requests, second.requests, strict=True):
        assert (after.input_tokens, after.output_tokens) == (before.input_tokens, before.output_tokens)
        assert after.arrival_s == pytest.approx(before.arrival_s, abs=0.002)


def test_conversion_from_mooncake_keeps_whole_blocks_only(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path / "t", [*MOONCAKE]))
    write_trace(trace, tmp_path / "u")
    keys = [request.keys for request in read_trace(tmp_path / "u", strict=True).requests]
    assert keys == [(1,), (1, 3, 4), (1, 3)]


def test_writer_gives_equal_ids_to_equal_prefixes_only(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", block_tokens=4) as writer:
        writer.add(1.0, [1, 2, 3, 4, 5, 6, 7, 8], [9])
        writer.add(0.0, [5, 6, 7, 8], [1])
        writer.add(2.0, [1, 2, 3, 4, 5, 6, 7, 9], [9])
    trace = read_trace(tmp_path / "t")
    assert [request.keys for request in trace.requests] == [(2,), (0, 1), (0, 3)]
    assert len(trace.problems) == 1  # finished out of order


def test_engine_records_what_finishes(tmp_path: Path) -> None:
    layout = Layout.simple({"state": 4096, "full": 512}, page_sizes={"full": 16})
    engine = Engine(StubRunner(), Pool(layout, 1 << 18))
    engine.run()
    before = engine.submit([1] * 8, max_new_tokens=2)
    with engine.record(tmp_path / "t.jsonl.gz", block_tokens=4):
        first = engine.submit([1, 2, 3, 4, 5], max_new_tokens=4)
        engine.submit([1, 2, 3, 4, 6], max_new_tokens=1)
        aborted = engine.submit([1, 2, 3, 4, 7], max_new_tokens=9)
        engine.step()
        engine.abort(aborted)
        engine.run()
    engine.submit([1, 2], max_new_tokens=1)
    engine.run()
    trace = read_trace(tmp_path / "t.jsonl.gz")
    lengths = sorted((request.input_tokens, request.output_tokens) for request in trace.requests)
    assert lengths == [(5, 1), (5, 4)]
    assert len({request.keys[0] for request in trace.requests}) == 1
    assert len(engine.outputs(first)) == 4 and len(engine.outputs(before)) == 2


def test_faster_and_head() -> None:
    trace = generate_trace(20)
    assert len(trace.head(5).requests) == 5
    assert trace.faster(2).requests[-1].arrival_s == pytest.approx(trace.requests[-1].arrival_s / 2)
    with pytest.raises(InvalidArgumentError, match="speed"):
        trace.faster(0)


def test_bad_generator_options_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="requests is 0"):
        generate_trace(0)
    with pytest.raises(InvalidArgumentError, match="rate"):
        generate_trace(5, rate=0)


def test_command_describes_generates_converts(tmp_path: Path) -> None:
    path = str(tmp_path / "g.jsonl.gz")
    assert "100 requests" in run("trace", "generate", path, "--requests", "100")
    report = json.loads(run("trace", "describe", path, "--json", "-"))
    assert (report["schema"], report["requests"], report["block_tokens"]) == (1, 100, 512)
    assert "no keys" in run("trace", "describe", str(azure_file(tmp_path)))
    run("trace", "convert", path, str(tmp_path / "c.csv"), "--to", "azure")
    assert read_trace(tmp_path / "c.csv").format == "azure"


def azure_file(folder: Path) -> Path:
    """An Azure trace."""
    path = folder / "azure.csv"
    path.write_text(AZURE, encoding="utf-8")
    return path


def test_command_reports_damage_by_line_and_exit_code(tmp_path: Path) -> None:
    path = str(mooncake(tmp_path / "t", [MOONCAKE[0], "{", MOONCAKE[1]]))
    assert "line 2: is not JSON" in run("trace", "describe", path, code=3)
    assert "line 2: is not JSON" in run("trace", "describe", path, "--strict", code=1)
    empty = tmp_path / "empty"
    empty.touch()
    assert "is empty" in run("trace", "describe", str(empty), code=1)
    assert "choose one of" in run("trace", "convert", path, "x", "--format", "csv", code=2)
