"""`python -m covey` is the `covey` command."""

from covey.cli.main import main

main()
