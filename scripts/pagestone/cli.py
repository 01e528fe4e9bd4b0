"""The command line: assembles the commands of every room and turns errors into exit codes.

0 done; 1 the data is not right; 2 the request is not right; 3 the machine failed (space, I/O, memory); 130 interrupted.
Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from pagestone import __version__
from pagestone.convert import commands as convert_commands
from pagestone.formats.errors import PagestoneError
from pagestone.reader import commands as reader_commands
from pagestone.validate import commands as validate_commands

UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What the command line library raises for words it does not understand; its home differs between versions."""

app = typer.Typer(
    help="Mixture-of-Experts checkpoints as page-aligned containers whose experts are used straight from disk.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"pagestone {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print it.")) -> None:
    pass


convert_commands.register(app)
reader_commands.register(app)
validate_commands.register(app)


def main() -> None:
    """Run the command line and exit with its code; an error is one message, never a traceback."""
    try:
        sys.exit(app(standalone_mode=False))
    except UsageError as error:
        error.show()
        sys.exit(error.exit_code)
    except typer.Abort:  # what Ctrl-C becomes on its way through the command line library
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except PagestoneError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # whoever read our output has gone; say nothing, and keep the interpreter from flushing into the void
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        print(f"error: {error.filename or ''}: {error.strerror or error} (E0901)", file=sys.stderr)
        sys.exit(3)
    except MemoryError:
        print("error: out of memory (E0902)\n  what to do: use fewer --workers, or free memory", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
