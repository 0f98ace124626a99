"""How operators' commands reach a running system: over its NATS."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import typer

from halfmoon.bus.errors import BusError
from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.cli.up.servers import read_nats_url
from halfmoon.config import CommonConfig, ConfigError, load_config

_CONNECT_S = 5.0


def operator_config(url: str | None, data_dir: Path | None) -> CommonConfig:
    """What was given on the command line, over the settings. Ends the command with a line where they are wrong."""
    chosen: dict[str, object] = {} if url is None else {"nats_url": url}
    if data_dir is not None:
        chosen["data_dir"] = data_dir
    try:
        return load_config(CommonConfig, "up", os.environ, overrides=chosen)
    except ConfigError as error:
        typer.echo(f"halfmoon: {error}", err=True)
        raise typer.Exit(2) from None


class NotConnected(Exception):
    """There is no NATS where one was looked for; the message says what to do."""


@asynccontextmanager
async def connected(config: CommonConfig, command: str) -> AsyncIterator[NatsBus]:
    """A connection for `halfmoon COMMAND`, closed at the end. Raises `NotConnected`."""
    settings = NatsSettings(
        url=nats_url(config),
        name=f"halfmoon-{command}",
        user=config.nats_user,
        password=config.nats_password,
        credentials=config.nats_credentials,
        connect_timeout_s=min(_CONNECT_S, config.nats_connect_timeout_s),
    )
    try:
        bus = await NatsBus.connect(settings)
    except BusError as error:
        hint = "for a system that `halfmoon up` runs, give its --data-dir"
        raise NotConnected(f"{error}; {hint}") from None
    try:
        yield bus
    finally:
        await bus.close()


def nats_url(config: CommonConfig) -> str:
    """The one that is set; where none is, that of the system which runs on this machine's data directory."""
    default = CommonConfig().nats_url
    return config.nats_url if config.nats_url != default else read_nats_url(config.data_dir) or default
