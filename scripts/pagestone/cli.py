"""The command line: assembles the commands of every room and turns errors into exit codes.

0 done; 1 the data is not right; 2 the request is not right; 3 the machine failed (space, I/O, memory), or we did; 130
interrupted; 141 whoever read our output went away. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from typing import Any

import typer

from pagestone import __version__
from pagestone.convert import commands as convert_commands
from pagestone.formats.errors import MachineError, PagestoneError, RequestError
from pagestone.formats.text import clipped
from pagestone.reader import commands as reader_commands
from pagestone.validate import commands as validate_commands

UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What the command line library raises for words it does not understand; its home differs between versions."""

STDOUT = "standard output"
INTERRUPTED, READER_GONE = 130, 141
"""Exit codes as shells report them: 128 and the signal, SIGINT or SIGPIPE. 0 would make a success of it."""
DEBUG = "PAGESTONE_DEBUG"
"""With this variable set, errors that nobody foresaw come with their traceback."""

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
reader_commands.register(app, validate_commands.opener)
validate_commands.register(app)
COMMANDS = frozenset(str(command.name) for command in app.registered_commands)


def main() -> None:
    """Run the command line and exit with its code; an error is one message, never a traceback."""
    _prepare_streams()
    try:
        code = int(app(standalone_mode=False) or 0)
        sys.stdout.flush()
    except BaseException as error:
        code = _report(error)
    for stream in (sys.stdout, sys.stderr):
        _settle(stream)
    sys.exit(code)


# -- the standard streams ---------------------------------------------------------------------------------------------


class _Stdout(io.TextIOWrapper):
    """stdout whose errors name it, as those of files do."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            error.filename = STDOUT
            raise

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            error.filename = STDOUT
            raise


def _prepare_streams() -> None:
    """Make stdin, stdout and stderr usable, whatever the caller did to them.

    One that was closed is as /dev/null; its number is taken at once, for the next file to be opened would get it, and
    what a library says on stderr would land in a container. Characters the encoding has not are written as escapes.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))
    out = sys.stdout
    if type(out) is io.TextIOWrapper:  # and not what stands for it in a test
        encoding, lines, at_once = out.encoding, out.line_buffering, out.write_through
        ours = _Stdout(out.detach(), encoding, "backslashreplace", line_buffering=lines, write_through=at_once)
        sys.stdout = ours
        setattr(sys, "__stdout__", ours)  # noqa: B010 - its old one has lost its buffer; type checkers call it final
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")


def _settle(stream: Any) -> None:
    """Flush; what cannot be written goes nowhere, or the interpreter would complain of it at its end."""
    try:
        stream.flush()
    except (OSError, ValueError):
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        except (OSError, ValueError):  # a stream without a number, as tests have them
            pass


def _say(*lines: str) -> None:
    """Lines for people on stderr, if it still takes them: saying what went wrong must not change the exit code."""
    try:
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        _settle(sys.stderr)


# -- errors -----------------------------------------------------------------------------------------------------------


def _report(error: BaseException) -> int:
    """Say what happened in the project's words; the exit code."""
    if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 2
    if isinstance(error, (SystemExit, BrokenPipeError)):  # the command line library makes the first of the second
        return READER_GONE
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):  # the second is what Ctrl-C becomes on its way
        _say("interrupted")
        return INTERRUPTED
    if (
        isinstance(error, UsageError) and type(error).__name__ == "NoArgsIsHelpError"
    ):  # no word at all was given: it shows the help
        text = io.StringIO()
        error.show(file=text)
        _say(text.getvalue().rstrip("\n"))
        return int(error.exit_code)
    said = error if isinstance(error, PagestoneError) else _unforeseen(error)
    if os.environ.get(DEBUG) and said is not error:
        _say("".join(traceback.format_exception(error)).rstrip("\n"))
    _say(f"error: {said}")
    return said.exit_code


def _unforeseen(error: BaseException) -> PagestoneError:
    """An error that no room put into words: of the request's form, of the machine, or a fault of ours."""
    if isinstance(error, UsageError):
        return _misused(error)
    if isinstance(error, OSError):
        remedies = {
            errno.ENOSPC: "free space there, then run the same command again; finished work is kept",
            errno.EACCES: "check the permissions of it and of the directories above",
            errno.EPERM: "check the permissions of it and of the directories above",
            errno.EIO: "the disk reports an I/O error: check it and its log before anything else",
            errno.EMFILE: "raise the limit of open files (ulimit -n) and run again",
        }
        other = "mend the cause, then run the same command again; finished work is kept"
        remedy = remedies.get(error.errno or 0, other)
        if error.filename == STDOUT:  # no work of the command's: the words went nowhere
            remedy = "send the output to where it can be written, then run the same command again"
        return MachineError(
            error.strerror or str(error) or type(error).__name__, code="E0901",
            file=error.filename or "a file that the system does not name", remedy=remedy,
        )  # fmt: skip
    if isinstance(error, MemoryError):
        return MachineError("out of memory", code="E0902", remedy="use fewer --workers, or free memory")
    return MachineError(
        f"{type(error).__name__}: {error}: a fault of pagestone {__version__}, not of your data", code="E0007",
        file=_place(error), remedy=f"report it with this message, your command and what {DEBUG}=1 adds to it",
    )  # fmt: skip


def _misused(error: Any) -> RequestError:
    """What the command line library refuses, in our form: a word or an option that is not there, lacks or is wrong."""
    command = next((word for word in sys.argv[1:] if word in COMMANDS), None)
    message = clipped(error.format_message().rstrip("."), 1000)
    return RequestError(
        message[:1].lower() + message[1:], code="E0008",
        remedy=f"see: pagestone {command} --help" if command else "see: pagestone --help",
    )  # fmt: skip


def _place(error: BaseException) -> str | None:
    """`convert/plan.py, line 88`: the innermost place in our own code that an error came through.

    Told by the names of modules: where the files lie depends on how the package was installed.
    """
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        package, dot, module = str(frame.f_globals.get("__name__")).partition(".")
        if package == __package__ and dot:
            place = f"{module.replace('.', '/')}.py, line {line}"
    return place


if __name__ == "__main__":
    main()
