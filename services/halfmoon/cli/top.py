"""`halfmoon top`: a live look at a running system, over its NATS."""

import asyncio
import signal
import sys
import time

import msgspec
from rich.console import Console
from rich.live import Live

from halfmoon.bus.codec import Decoder
from halfmoon.bus.errors import BusError, Undecodable
from halfmoon.bus.protocol import Bus, BusMessage
from halfmoon.cli.connection import NotConnected, connected
from halfmoon.cli.top_board import Board, Snapshot
from halfmoon.cli.top_screen import screen
from halfmoon.config import CommonConfig
from halfmoon.schemas import subjects
from halfmoon.schemas.members import HEARTBEAT_INTERVAL_S, Heartbeat
from halfmoon.schemas.splits import HalfEnded

MIN_WIDTH = 130
"""Columns of a single look that goes to a file or a pipe."""
LISTEN_S = 4 * HEARTBEAT_INTERVAL_S
"""Before a single look: everybody has been heard, and what was measured meanwhile."""


def run_top(config: CommonConfig, console: Console, *, once: bool, as_json: bool, interval_s: float) -> int:
    """The exit code: 0, or 1 where there is nothing to look at, which is said."""
    try:
        return asyncio.run(_run(config, console, once=once or as_json, as_json=as_json, interval_s=interval_s))
    except (BusError, NotConnected) as error:
        Console(stderr=True).print(f"halfmoon top: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1


async def _run(config: CommonConfig, console: Console, *, once: bool, as_json: bool, interval_s: float) -> int:
    async with connected(config, "top") as bus:
        board = Board(time.monotonic())
        await _listen(bus, board)
        await asyncio.sleep(LISTEN_S)
        if not once:
            await _show(board, console, interval_s)
            return 0
        _print(board.snapshot(time.monotonic()), console, as_json=as_json)
    return 0


def _print(snapshot: Snapshot, console: Console, *, as_json: bool) -> None:
    if not as_json:
        wide = console if console.is_terminal else Console(width=max(console.width, MIN_WIDTH))
        wide.print(screen(snapshot))
        return
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(snapshot), indent=2) + b"\n")
    sys.stdout.buffer.flush()


async def _listen(bus: Bus, board: Board) -> None:
    """What can't be read is of a later version: it isn't shown."""
    beats: Decoder[Heartbeat] = Decoder(Heartbeat)
    ends: Decoder[HalfEnded] = Decoder(HalfEnded)

    async def on_beat(message: BusMessage) -> None:
        try:
            board.hear(beats.decode(message.data, message.headers), time.monotonic())
        except Undecodable:
            return

    async def on_end(message: BusMessage) -> None:
        try:
            board.ended(ends.decode(message.data, message.headers), time.monotonic())
        except Undecodable:
            return

    await bus.subscribe(subjects.HEARTBEAT_ALL, on_beat)
    await bus.subscribe(subjects.ENDED_ALL, on_end)


async def _show(board: Board, console: Console, interval_s: float) -> None:
    """Until Ctrl-C."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while not stop.is_set():
                live.update(screen(board.snapshot(time.monotonic())), refresh=True)
                try:
                    await asyncio.wait_for(stop.wait(), interval_s)
                except TimeoutError:
                    continue
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
