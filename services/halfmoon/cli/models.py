"""Which model the command line works on."""

import os
from pathlib import Path

import typer
from rich.console import Console

from halfmoon.cli.up.screen import bar
from halfmoon.config import CommonConfig
from halfmoon.models import ModelFolder, ModelFolderError
from halfmoon.models.smollm2 import NAME, fetch


def resolve_model(
    given: Path | None, common: CommonConfig, console: Console, *, needs_weights: bool = True
) -> tuple[Path, str]:
    """The model's path and name: the one given, the one configured, or the default one, fetched where it isn't there.

    Ends the command with exit code 2 and a clear line where there is none.
    """
    try:
        path = given or common.model or _default(common, console)
        model = ModelFolder.open(path)
        if needs_weights:
            model.weight_files()
    except ModelFolderError as error:
        console.print(f"halfmoon: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    return path.absolute(), common.model_name or model.default_name


def _default(common: CommonConfig, console: Console) -> Path:
    models_dir = Path(os.environ.get("HALFMOON_MODELS_DIR", common.data_dir / "models"))
    steps: list[str] = []
    with bar(console, f"{NAME}: looking") as progress:

        def show(step: str, done: float) -> None:
            progress.say(f"{NAME}: {step}")
            progress.set(done)
            if not console.is_terminal and step not in steps:
                steps.append(step)
                console.print(f"{NAME}: {step}", highlight=False)

        return fetch(models_dir, show)
