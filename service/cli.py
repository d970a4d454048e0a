"""`tessera`: the command line. Each command lives in a module that is imported only when it runs,

because what one needs (torch, Ray) is seconds and hundreds of megabytes to the others.
"""

import importlib
from typing import Any

import typer
import typer.core
import typer.main

COMMANDS = {
    "serve": "service.command.serve:serve",
    "fetch": "service.command.fetch:fetch",
    "generate": "service.command.generate:generate",
    "bench": "service.bench.cli:bench",
    "backends": "service.command.backends:backends",
    "models": "service.command.models:models",
}


class CommandsOnDemand(typer.core.TyperGroup):
    """Resolves a command's name to its module when the command is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        target = COMMANDS.get(cmd_name)
        if target is None:
            return None
        module, _, attribute = target.partition(":")
        single = typer.Typer(add_completion=False)
        single.command(cmd_name)(getattr(importlib.import_module(module), attribute))
        return typer.main.get_command(single)


app = typer.Typer(
    cls=CommandsOnDemand, add_completion=False, no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def tessera() -> None:
    """Serve large language models: an inference engine behind Ray Serve."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
