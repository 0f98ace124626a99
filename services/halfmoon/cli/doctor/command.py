"""`halfmoon doctor`: from settings to an exit code."""

import asyncio
import sys

import msgspec
from rich.console import Console

from halfmoon.bus.errors import BusError
from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.cli.doctor.examine import Effort, Progress, examine
from halfmoon.cli.doctor.report import Check, Report, Verdict
from halfmoon.cli.doctor.screen import print_report
from halfmoon.cli.up.servers import read_nats_url
from halfmoon.config import CommonConfig

EXIT_WELL = 0
EXIT_ILL = 1
_CONNECT_S = 3.0


def run_doctor(config: CommonConfig, effort: Effort, console: Console, *, as_json: bool) -> int:
    """Examine, print, and say by the exit code whether all is well."""
    status = Console(stderr=True)
    with status.status("connecting", spinner="dots") as spinner:
        report = asyncio.run(_examine(config, effort, spinner.update))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        sys.stdout.buffer.flush()
    else:
        print_report(console, report)
    return EXIT_WELL if report.is_well else EXIT_ILL


def nats_url(config: CommonConfig) -> str:
    """The one that is set; where none is, that of the system which runs on this machine's data directory."""
    default = CommonConfig().nats_url
    return config.nats_url if config.nats_url != default else read_nats_url(config.data_dir) or default


async def _examine(config: CommonConfig, effort: Effort, progress: Progress) -> Report:
    settings = NatsSettings(
        url=nats_url(config),
        name="halfmoon-doctor",
        user=config.nats_user,
        password=config.nats_password,
        credentials=config.nats_credentials,
        connect_timeout_s=min(_CONNECT_S, config.nats_connect_timeout_s),
    )
    try:
        bus = await NatsBus.connect(settings)
    except BusError as error:
        detail = f"{error}: set HALFMOON_NATS_URL, or --data-dir of the system that `halfmoon up` runs"
        return Report(checks=(Check(name="NATS", verdict=Verdict.BAD, detail=detail),))
    try:
        return await examine(bus, effort, progress)
    finally:
        await bus.close()
