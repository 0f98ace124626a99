"""`halfmoon sim run`: from options to an exit code."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from halfmoon.sim.arrivals import Arrivals
from halfmoon.sim.errors import SimError
from halfmoon.sim.options import SimOptions
from halfmoon.sim.plot import check_plot, draw
from halfmoon.sim.profiles.hardware import hardware_profile
from halfmoon.sim.profiles.machine import Machine, machine
from halfmoon.sim.profiles.measured import MEASURED, measured
from halfmoon.sim.profiles.models import model_profile
from halfmoon.sim.report import record, sentences
from halfmoon.sim.simulation import Simulation

EXIT_REFUSED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What comes out, and how."""

    as_json: bool = False
    plot: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What instances are made of."""

    model: str
    hardware: str
    dtype: str = "bfloat16"
    gpus: int | None = None


def run_sim(arrivals: Arrivals, options: SimOptions, assumed: Assumed, shown: Shown) -> int:
    try:
        options.check()
        chunk_tokens = arrivals.check()
        simulation = Simulation(options, _machine(assumed, arrivals), chunk_tokens)
        if shown.plot is not None:
            check_plot(shown.plot)
        _run(simulation, arrivals)
        found = record(simulation, arrivals)
        files = draw(found, shown.plot) if shown.plot is not None else []
    except SimError as error:
        typer.echo(f"halfmoon sim: {error}", err=True)
        return EXIT_REFUSED
    if shown.as_json:
        typer.echo(json.dumps(found))
    else:
        typer.echo("\n".join(sentences(found)))
        typer.echo("assumptions:\n" + "\n".join(f"- {each}" for each in found["assumptions"]))
    for file in files:
        typer.echo(f"drawn: {file}", err=True)
    return 0


def _machine(assumed: Assumed, arrivals: Arrivals) -> Machine:
    if assumed.hardware == MEASURED:
        return measured(arrivals.path, only=arrivals.only)
    hardware = hardware_profile(assumed.hardware)
    if assumed.gpus is not None:
        hardware = replace(hardware, num_gpus=assumed.gpus)
    return machine(model_profile(assumed.model, assumed.dtype), hardware)


def _run(simulation: Simulation, arrivals: Arrivals) -> None:
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[at]}"))
    console = Console(stderr=True)
    is_seen = console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not is_seen) as bar:
        task = bar.add_task("", total=arrivals.count(), at="")
        simulation.run(
            arrivals,
            lambda done, now_s: bar.update(task, completed=done, at=f"virtual time {now_s:,.0f} s"),
        )
