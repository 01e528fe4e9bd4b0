"""The command line: assembles the commands of every room and turns errors into exit codes.

0 done; 1 the data is not right; 2 the request is not right; 3 the machine failed (space, I/O, memory); 130 interrupted.
Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import sys

import typer

from pagestone import __version__
from pagestone.convert import commands as convert_commands
from pagestone.formats.errors import PagestoneError
from pagestone.reader import commands as reader_commands
from pagestone.validate import commands as validate_commands

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
        app(standalone_mode=True)
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
