"""`python -m pagestone`."""

from pagestone.cli import main

main()
