"""What a host says of files that it was sent, with the paths of this machine."""

from launcher.controller.paths_here import with_paths_here
from launcher.protocol.reports import Evidence, Exited, Facts, Output

TREES = ["/home/me/.cache/dtrain/code/k/run/tree", "/home/me/.cache/dtrain/env/abc"]


def exited(where: str, text: str) -> Exited:
    error = {"type": "ValueError", "where": where}
    return Exited(0, 1, 2, 1, 0.5, False, "", error=error, error_file=text, time=1.0)


def test_errors_and_stacks_have_the_user_s_own_paths() -> None:
    here = exited("/work/train.py:3 in load", "/work/train.py and /venv/torch/nn.py")
    there = exited(f"{TREES[0]}/work/train.py:3 in load", f"{TREES[0]}/work/train.py and {TREES[1]}/venv/torch/nn.py")
    assert with_paths_here(there, TREES) == here


def test_a_message_without_such_paths_is_the_same() -> None:
    message = exited("/work/train.py:3 in load", "x")
    assert with_paths_here(message, TREES) is message


def test_lists_have_them_too() -> None:
    facts = Facts([], "", True, [0], 1, [f"the script {TREES[0]}/work/train.py does not exist"], 0.0)
    changed = with_paths_here(facts, TREES)
    assert isinstance(changed, Facts)
    assert changed.problems == ["the script /work/train.py does not exist"]


def test_of_a_worker_s_output_only_tracebacks_are_changed() -> None:
    frame = b'  File "%s/work/train.py", line 3, in load\n'
    tree = TREES[0].encode()
    there = Output(0, 2, frame % tree + b"saved to " + tree + b"/out/model.pt\n")
    here = with_paths_here(there, TREES)
    assert isinstance(here, Output)
    assert here.data == frame % b"" + b"saved to " + tree + b"/out/model.pt\n"


def test_stacks_of_evidence_are_changed() -> None:
    evidence = Evidence(1, 0, 0, 5, "R", "", 1, 0.1, stack=f'  File "{TREES[1]}/venv/torch/x.py", line 1 in f')
    changed = with_paths_here(evidence, TREES)
    assert isinstance(changed, Evidence)
    assert changed.stack == '  File "/venv/torch/x.py", line 1 in f'
