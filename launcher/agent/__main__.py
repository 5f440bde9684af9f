"""`python -m launcher.agent [KEY SCRIPT]` is the agent of one host; these say what may be kept warm for it.

Where something is, an agent forked from that takes its place: `guard ORDERS` and `agent ORDERS`, the number of
an open file, are then the two halves of one (workers/keeper.py). With `--simulated`, it starts the agents of simulated
hosts.
Each imports no more than it needs: these are the milliseconds until a run begins.
"""

import os
import sys

if "DTRAIN_FILE_LIMIT" in os.environ:
    from launcher.machine.processes import take_file_limit

    take_file_limit()

match sys.argv[1:]:
    case ["guard", orders]:
        from launcher.agent.cleanup import guard

        guard.main_lent(int(orders))
    case ["agent", orders]:
        from launcher.agent import main

        main.main_lent(int(orders))
    case ["--simulated", script]:
        from launcher.agent.simulated import serve

        serve(script)
    case [key, script]:
        from launcher.agent.warm.handover import hand_over

        cold = hand_over(key, script)
        from launcher.agent import main

        main.main(key, cold)
    case _:
        from launcher.agent import main

        main.main()
