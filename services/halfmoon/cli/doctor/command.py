"""`halfmoon doctor`: from settings to an exit code."""

import asyncio
import sys

import msgspec
from rich.console import Console

from halfmoon.cli.connection import NotConnected, connected
from halfmoon.cli.doctor.examine import Effort, Progress, examine
from halfmoon.cli.doctor.report import Check, Report, Verdict
from halfmoon.cli.doctor.screen import print_report
from halfmoon.config import CommonConfig

EXIT_WELL = 0
EXIT_ILL = 1


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


async def _examine(config: CommonConfig, effort: Effort, progress: Progress) -> Report:
    try:
        async with connected(config, "doctor") as bus:
            return await examine(bus, effort, progress)
    except NotConnected as error:
        return Report(checks=(Check(name="NATS", verdict=Verdict.BAD, detail=str(error)),))
