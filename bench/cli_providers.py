"""The list of providers below a command's help."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from . import arguments


class WithProviders(TyperCommand):
    """Says, after its options, which providers there are and why each does not run: looked for when help is asked."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from .machine import describe
        from .providers import listing

        super().format_help(ctx, formatter)
        console = arguments.console()
        console.print("Providers, of --baseline; by default all but tree and switch:")
        for name, text in listing(describe().num_gpus):
            console.print(f"  {name:20} {text}", highlight=False)
