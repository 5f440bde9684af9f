"""`python -m launcher.agent [KEY SCRIPT]` is the agent of one host; `--simulated` starts the agents of simulated hosts.

KEY and SCRIPT identify a process that may be kept warm on the host. If there is one, an agent forked from it replaces
this one: `guard ORDERS` and `agent ORDERS` are then its two processes, and ORDERS is the number of an open file
(workers/keeper.py). Each way imports no more than it needs: the milliseconds count until a run begins.
"""

import os
import sys

if "DTRAIN_FILE_LIMIT" in os.environ:
    from launcher.machine.processes import take_file_limit

    take_file_limit()

match sys.argv[1:]:
    case ["guard", orders]:
        from launcher.agent.cleanup import guard

        guard.main_forked(int(orders))
    case ["agent", orders]:
        from launcher.agent import main

        main.main_forked(int(orders))
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
