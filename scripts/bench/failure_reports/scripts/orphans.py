"""Each rank has three children, and one in a session of its own that listens (sglang#23627, EgoVerse#682)."""

import multiprocessing
import subprocess
import sys
import time

from failing import begin, note

LISTENER = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); time.sleep(600)"

if __name__ == "__main__":
    begin()
    for _ in range(3):
        multiprocessing.Process(target=time.sleep, args=(600,), daemon=True).start()
    subprocess.Popen([sys.executable, "-c", LISTENER], start_new_session=True)
    time.sleep(1)
    note("up")
    time.sleep(600)
