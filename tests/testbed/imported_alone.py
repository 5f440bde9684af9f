"""Imports modules, each as the first of ours in its process; their names come on the standard input.

    python -m testbed.imported_alone AHEAD WITHOUT

AHEAD are modules of others that are imported once for all, and WITHOUT those that no import may load; both with
commas. Says what fails, and how many were imported. A process is forked for each module, in which only its package is
imported, as Python does first. What the package itself imports needs no process of its own.
"""

import gc
import importlib
import os
import sys
import traceback

from testbed.fork_memory import share_memory

AHEAD, WITHOUT = (set(filter(None, word.split(","))) for word in sys.argv[1:])
NAMES = sys.stdin.read().split()


def import_all(names: list[str]) -> int:
    """Import modules of one package alone, and all below them; return how many there were."""
    gc.freeze()  # or each process copies what the collector looks at
    count = sum(import_one(name) for name in names if name in sys.modules)
    counts, writing = os.pipe()
    for name in names:
        if name in sys.modules:
            continue
        if not (pid := os.fork()):
            try:
                os.write(writing, b"%d\n" % import_one(name))
            finally:
                os._exit(1)
        os.waitpid(pid, 0)
    os.close(writing)
    with open(counts) as lines:
        return count + sum(map(int, lines))


def import_one(name: str) -> int:
    try:
        importlib.import_module(name)
    except BaseException as error:
        traceback.print_exc()
        print(f"{name}: {type(error).__name__}: {error}", flush=True)
    else:
        for loaded in sorted(WITHOUT & sys.modules.keys()):
            print(f"{name}: loads {loaded}", flush=True)
    return 1 + import_all([below for below in NAMES if below.rpartition(".")[0] == name])


for module in AHEAD:
    importlib.import_module(module)
gc.disable()
share_memory()
print(import_all([name for name in NAMES if "." not in name]), "modules")
