"""What the tests of the edge on a fake backend share."""
from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.unit.edge_fake import FakeEdge, config


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A test's own directory, gone after it: sockets and journals must not be left for the leak check of the run."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture
async def edge(home: Path) -> AsyncIterator[FakeEdge]:
    """One that admits."""
    made = FakeEdge(config(home))
    await made.start()
    yield made
    await made.close(stop_sandboxes=True)
