"""`python -m launcher` is `dtrain`."""

from launcher.cli.main import main

main()
