"""Inspect's own checks of a sandbox provider, unmodified: pytest runs this file inside Inspect's venv."""
from collections.abc import AsyncIterator

import pytest_asyncio
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from dsec.faces.inspect import DsecConfig


@pytest_asyncio.fixture(loop_scope="function")
async def sandbox_env() -> AsyncIterator[SandboxEnvironment]:
    """A new sandbox for each check, as a user who is not root: what root may not do is part of the checks."""
    kind = registry_find_sandboxenv("dsec")  # by the entry point
    config = DsecConfig(user="1000:1000", workdir="/tmp")
    made = await kind.sample_init("self_check", config, {})
    try:
        yield made["default"]
    finally:
        await kind.sample_cleanup("self_check", config, made, False)
