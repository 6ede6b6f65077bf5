"""`python -m headwise.cli` is the command `headwise`."""

from headwise.cli import main

main()
