"""`python -m pagestone`, and the command `pagestone`: what runs before the command line is there."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it in one word and with 130 also while it is being imported."""
    try:
        from pagestone.cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
