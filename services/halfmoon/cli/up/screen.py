"""What a person sees while the system comes up, and once it is there."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from halfmoon.cli.up.plan import Endpoints, ProcessSpec, UpOptions
from halfmoon.cli.up.process import ChildProcess


class UpConsole(Console):
    """Where nobody reads any more (`halfmoon up | head`), the system goes on all the same."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # What Python flushes at its end must go somewhere too.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class StartScreen:
    """One bar per process while they start. On a pipe, one line per process once it serves."""

    def __init__(self, console: Console, names: list[str]) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {name: self._progress.add_task(name, total=1.0, state="") for name in names}
        self._done: set[str] = set()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()

    def show(self, name: str, progress: float) -> None:
        state = "serving" if progress >= 1.0 else "loading" if progress > 0.0 else "starting"
        self._progress.update(self._tasks[name], completed=progress, state=state)
        if progress >= 1.0 and name not in self._done:
            self._done.add(name)
            if not self._console.is_terminal:
                self._console.print(f"{name}: serving")


@contextmanager
def bar(console: Console, description: str) -> Iterator["Bar"]:
    """A progress bar for one long step, such as a download."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        yield Bar(progress, progress.add_task(description, total=1.0))


class Bar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def set(self, fraction: float) -> None:
        self._progress.update(self._task, completed=fraction)

    def say(self, description: str) -> None:
        """Name the step that runs now."""
        self._progress.update(self._task, description=description)


def system_table(
    options: UpOptions, endpoints: Endpoints, specs: list[ProcessSpec], children: list[ChildProcess]
) -> Table:
    """What runs where."""
    pids = {child.name: str(child.pid) for child in children}
    table = Table(title=f"halfmoon · {options.model_name} · engine {_engine(options)}", title_justify="left")
    for column in ("process", "node", "pid", "address"):
        table.add_column(column)
    table.add_row("nats", "", pids.get("nats", ""), endpoints.nats_url)
    table.add_row("etcd", "", pids.get("etcd", ""), endpoints.etcd_url)
    for spec in specs:
        address = f"http://127.0.0.1:{options.port}/v1" if spec.service == "gateway" else ""
        table.add_row(spec.name, spec.node or "", pids.get(spec.name, ""), address)
    return table


def curl_to_paste(options: UpOptions) -> str:
    return (
        f"curl http://127.0.0.1:{options.port}/v1/chat/completions -H 'content-type: application/json' -d '"
        f'{{"model": "{options.model_name}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}], '
        f'"max_tokens": 48}}\''
    )


def _engine(options: UpOptions) -> str:
    return "sim (simulated: no model is run)" if options.engine == "sim" else options.engine
