"""Import a script's packages in a process that stays warm: `dtrain warm --start`.

Started by cli/hosts/warm.py as an agent would be, as `python -m launcher.agent.warm.start KEY`, with a Prepare as JSON
on its standard input. It prints why nothing stays warm, or nothing if a process does.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys

from launcher.agent.cleanup.run_tag import RunTag
from launcher.agent.host_facts import find_resources, likely_workers
from launcher.agent.warm.folder import prefix_of
from launcher.agent.warm.surroundings import find_surroundings
from launcher.agent.workers.warm_start import ForkServer, Warmth
from launcher.decode import decode_dataclass
from launcher.machine import processes
from launcher.protocol.commands import Prepare

LIFE_S = 600  # limit, whatever hangs


def main(key: str) -> None:
    surroundings = find_surroundings()
    signal.alarm(LIFE_S)
    processes.adopt_orphans()
    prepare = decode_dataclass(Prepare, json.load(sys.stdin))
    os.environ.update(prepare.export)
    selector = selectors.DefaultSelector()
    fork_server = ForkServer(RunTag.new(), selector, Warmth(prefix_of(key), surroundings))
    fork_server.prepare(prepare, likely_workers(prepare.workers, find_resources(prepare.part, prepare.parts)))
    while fork_server.is_loading:
        for chosen, _ in selector.select():
            chosen.data()
    print(fork_server.keep(prepare))
    fork_server.kill()


if __name__ == "__main__":
    main(sys.argv[1])
