"""`halfmoon record`: writes the requests of a running system to a file, for as long as it is told to."""

import asyncio
import secrets
import signal
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from halfmoon.bus.errors import BusError
from halfmoon.cli.connection import NotConnected, connected
from halfmoon.config import CommonConfig
from halfmoon.planner.recorder import Recorder
from halfmoon.planner.recording_file import RecordingFile
from halfmoon.traces.recording import BlockHasher

_KEY_BYTES = 32
_REFRESH_S = 0.25


class RecordError(Exception):
    """Nothing can be recorded; the message says why."""


async def record(config: CommonConfig, out: Path, duration_s: float, console: Console) -> int:
    """Until the time is over, or Ctrl-C; the number of requests. Raises `RecordError`."""
    try:
        async with connected(config, "record") as bus:
            with RecordingFile(out) as file:
                recorder = Recorder(bus, BlockHasher(secrets.token_bytes(_KEY_BYTES)), file.write)
                await recorder.open()
                try:
                    await _listen(recorder, duration_s, console)
                finally:
                    await recorder.close()
    except FileExistsError:
        raise RecordError(f"{out} exists, and isn't written over: name another file") from None
    except OSError as error:
        raise RecordError(f"{out} can't be written: {error.strerror}") from None
    except (BusError, NotConnected) as error:
        raise RecordError(str(error)) from None
    if recorder.num_missed or recorder.counts.num_disconnects:
        console.print(
            f"missed: {recorder.num_missed} messages; connection lost {recorder.counts.num_disconnects} times",
            style="yellow",
        )
    return recorder.counts.num_requests


async def _listen(recorder: Recorder, duration_s: float, console: Console) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    began_s = time.monotonic()
    columns = (TextColumn("recording"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    try:
        with Progress(
            *columns, TextColumn("{task.fields[found]}"), console=console, disable=not console.is_terminal
        ) as progress:
            task = progress.add_task("recording", total=duration_s, found="")
            while not stop.is_set() and (passed_s := time.monotonic() - began_s) < duration_s:
                counts = recorder.counts
                found = f"{counts.num_requests:,} requests, {counts.prompt_tokens:,} prompt tokens"
                progress.update(task, completed=passed_s, found=found)
                try:
                    await asyncio.wait_for(stop.wait(), min(_REFRESH_S, duration_s - passed_s))
                except TimeoutError:
                    continue
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
