"""The `octavo` command: serve, run, pull, bench, doctor. Errors are one line on stderr, never a traceback."""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from octavo import __version__
from octavo.errors import OctavoError

EXIT_USAGE = 2
EXIT_INTERRUPT = 130


# In the order of a user's first day. Each has a module of its own, which is read when the command is wanted.
COMMANDS = ("serve", "run", "pull", "bench", "doctor")


class _Group(click.Group):
    """Loads commands on demand and suggests the nearest name for a wrong one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"octavo.cli.{cmd_name}"), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(COMMANDS)}."
            raise click.UsageError(f"No such command {name[:40]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Group,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, "-V", "--version", prog_name="octavo", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Serve language models from a paged KV cache, with outputs that never depend on the load.

    MODEL is an alias (smollm2-135m), a .gguf file, a directory with safetensors, or a Hugging Face repository.

    \b
    First steps:
      octavo serve smollm2-135m          an OpenAI-compatible server on http://127.0.0.1:8000
      octavo run smollm2-135m            chat in the terminal
      octavo run smollm2-135m "Hello"    one answer
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 2 wrong flag, configuration or model, 130 interrupted."""
    logging.basicConfig(level=logging.WARNING, format="octavo: %(levelname)s: %(message)s", stream=sys.stderr)
    sys.exit(_call(list(sys.argv[1:] if argv is None else argv)))


def _call(argv: list[str]) -> int:
    try:
        result = cli.main(argv, prog_name="octavo", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        return _complain(error.format_message())
    except OctavoError as error:
        return _complain(str(error))
    except (KeyboardInterrupt, click.Abort):
        click.echo(err=True)
        return EXIT_INTERRUPT
    except BrokenPipeError:
        # The reader of our output went away (`octavo bench | head`): nothing is left to say, not even at exit.
        sys.stdout = None
        return EXIT_USAGE


def _complain(message: str) -> int:
    line = " ".join(message.split())
    click.echo(f"octavo: error: {line[:1].lower() + line[1:] if line.startswith('No such') else line}", err=True)
    return EXIT_USAGE
