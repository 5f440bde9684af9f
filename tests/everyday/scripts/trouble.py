"""What a test asks of a script that is otherwise as people write it: rank 1 fails, once in a run.

TROUBLE is `kill`, `exception`, `hang`, or empty.
"""

import os
import signal
import time
from pathlib import Path


def comes(step: int, *kinds: str) -> bool:
    """Kill this process or sleep without end at step 41; return whether the script has to raise.

    `kinds` are those that may come here, by default all.
    """
    kind = os.environ.get("TROUBLE", "")
    if step != 41 or os.environ.get("RANK") != "1" or kind not in (kinds or ("kill", "exception", "hang")):
        return False
    try:
        Path("trouble_came").touch(exist_ok=False)
    except FileExistsError:
        return False
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(10_000)
    return True
