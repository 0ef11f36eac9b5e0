"""What every test shares: the seed (printed, `--seed N` repeats a run) and the `soak` switch."""

from __future__ import annotations

import random

import hypothesis
import pytest

hypothesis.settings.register_profile("unifiedpool", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=5_000, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    parser.addoption("--seed", type=int, default=0, help="seed of the random tests")
    parser.addoption("--soak", action="store_true", help="also run the tests that take minutes to hours")


def pytest_configure(config: pytest.Config) -> None:
    """Choose how long Hypothesis looks."""
    soak = config.getoption("--soak")
    hypothesis.settings.load_profile("soak" if soak else "unifiedpool")


def pytest_report_header(config: pytest.Config) -> str:
    """Say which seed this run uses."""
    return f"seed: {config.getoption('--seed')} (--seed N repeats a run)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests unless they were asked for."""
    if config.getoption("--soak"):
        return
    skip = pytest.mark.skip(reason="long: --soak runs it")
    for item in items:
        if "soak" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed; pytest shows it beside a failure."""
    value = int(request.config.getoption("--seed"))
    print(f"seed {value}")
    return value


@pytest.fixture
def rng(seed: int) -> random.Random:
    """A generator of the run's seed."""
    return random.Random(seed)
