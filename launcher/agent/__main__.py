"""`python -m launcher.agent` is the agent of one host."""

from launcher.agent.main import main

main()
