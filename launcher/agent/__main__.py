"""`python -m launcher.agent` is the agent of one host; with `--simulated`, what starts those of simulated hosts."""

import sys

from launcher.agent.main import main

if sys.argv[1:] == ["--simulated"]:
    from launcher.agent.simulated import serve

    serve()
else:
    main()
