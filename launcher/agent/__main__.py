"""`python -m launcher.agent [KEY]` is the agent of one host; the key says what may be kept warm for it.

Where something is, an agent forked from that takes its place. `guard ORDERS` and `agent ORDERS` are then its two
halves (workers/keeper.py).
"""

import sys

words = sys.argv[1:]
cold = ""
if len(words) == 1:
    from launcher.agent.warm.handover import hand_over  # takes a tenth of the time of the rest

    cold = hand_over(words[0])

from launcher.agent.main import main, main_lent  # noqa: E402

if len(words) == 2:
    main_lent(*words)
main("".join(words), cold)
