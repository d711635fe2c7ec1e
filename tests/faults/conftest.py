"""Fault tests start nodes of their own: they kill them."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.harness import Node, start_node


@pytest.fixture
def own_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node that the test may kill and restart; everything of it is removed at the end."""
    node = start_node(tmp_path_factory.mktemp("own"))
    yield node
    node.destroy()
