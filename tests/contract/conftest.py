"""Fixtures that several contracts share."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from halfmoon.schemas.splits import Role
from support.buses import BusMaker
from support.conductors import SPLIT_PAIR, OpenStage, Stage


@pytest.fixture
async def open_stage(bus_maker: BusMaker) -> AsyncIterator[OpenStage]:
    stage = Stage(bus_maker)

    async def open_it(*workers: tuple[str, Role, str], **settings: Any) -> Stage:
        return await stage.open(*(workers or SPLIT_PAIR), **settings)

    yield open_it
    await stage.close()
