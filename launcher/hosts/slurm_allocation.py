"""SLURM's environment: the allocation, the step that this process is a task of, and the job.

Read from variables only, so that it works in a container without SLURM's commands; pure, except `task_has_terminal`,
and `step_title`, `is_cancelled` and `requeue` at the end. sources.py makes hosts of it, transport/srun.py starts agents
there.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from launcher.errors import UsageError
from launcher.hosts.host import Host, HostKind
from launcher.hosts.ranges import MAX_HOSTS, expand

_BATCH, _EXTERN, _INTERACTIVE = 0xFFFFFFFB, 0xFFFFFFFC, 0xFFFFFFFA  # numbers of steps that srun did not start
_SCONTROL_S = 30.0
_INSTEAD = "pass SLURM's own variables on as they are, or name the hosts with --hosts"


@dataclass(frozen=True)
class Node:
    """A node of the allocation. `tasks` is None if the user did not request several on a node.

    `group` is its component of a heterogeneous job; None in any other job.
    """

    name: str
    tasks: int | None = None
    group: int | None = None


@dataclass(frozen=True)
class Step:
    """The job step that this process is a task of: one of `tasks` that srun started on `nodes`.

    `interactive`: a shell with a terminal, which represents the whole allocation.
    """

    job: str
    rank: int
    tasks: int
    node_rank: int
    local_rank: int
    nodes: tuple[str, ...]
    tasks_per_node: tuple[int, ...]
    interactive: bool


@dataclass(frozen=True)
class Allocation:
    """The nodes that this process may use: the job's, or those of the `step` that it is a task of.

    `here` is the node that it runs on; None on a login node. Each task of a `step` runs dtrain.
    """

    job: str
    nodes: tuple[Node, ...]
    here: str | None = None
    step: Step | None = None


def task_has_terminal() -> bool:
    """Return whether the task of this process has a terminal; if a container hides it, whether this process has one."""
    from launcher.machine.processes import terminal_of

    found = _slurmstepd()
    number = None if found is None else terminal_of(found[1])
    if number is not None:
        return number != 0
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def find_allocation(
    env: Mapping[str, str], title: str | None = None, has_terminal: Callable[[], bool] = task_has_terminal
) -> Allocation | None:
    """Return the allocation in which this process runs, from arguments as for find_step. None outside of SLURM.

    Raises UsageError with variable and value if variables are not in SLURM's format or contradict each other.
    """
    job = _job(env)
    if job is None:
        return None
    here = env.get("SLURMD_NODENAME") or None
    step = find_step(env, title, has_terminal)
    if step is not None and not step.interactive:
        asked = len(step.nodes) < step.tasks
        counts = zip(step.nodes, step.tasks_per_node, strict=True)
        return Allocation(job, tuple(Node(name, tasks if asked else None) for name, tasks in counts), here, step)
    if "SLURM_HET_SIZE" in env or "SLURM_PACK_SIZE" in env:
        size = _number(env, "SLURM_HET_SIZE", "SLURM_PACK_SIZE")
        nodes = [node for group in range(min(size, MAX_HOSTS)) for node in _nodes(env, group, strict=True)]
    else:
        nodes = _nodes(env, None, strict=step is None)
    twice = [name for name, count in Counter(node.name for node in nodes).items() if count > 1]
    if twice:
        raise UsageError(
            f"the SLURM job {job} has the node {twice[0]} twice; request components that share no node, "
            f"or name the hosts with --hosts"
        )
    return Allocation(job, tuple(nodes), here)


def hosts_of(allocation: Allocation) -> tuple[Host, ...]:
    """Return the allocation's nodes as hosts, with slots as the user requested tasks, if several for a node.

    A single node that this process runs on needs no srun: its processes may use the same resources as this one.
    """
    alone = [node.name for node in allocation.nodes] == [allocation.here]
    kind = HostKind.LOCAL if alone else HostKind.SRUN
    return tuple(Host(node.name, kind, slots=node.tasks, max_slots=0) for node in allocation.nodes)


def find_step(
    env: Mapping[str, str], title: str | None = None, has_terminal: Callable[[], bool] = task_has_terminal
) -> Step | None:
    """Return the step of srun (or salloc) that this process is a task of; None in a batch script, or outside of SLURM.

    A job that was submitted from within a step inherits that step's variables. The `title` of the slurmstepd above this
    process, from step_title, distinguishes them; without it, variables that do not match each other are taken as
    inherited. A step that srun starts in a shell with a terminal inherits SLURM_PTY_PORT, which `has_terminal` decides.
    """
    job = _job(env)
    if job is None or not env.get("SLURM_STEP_NODELIST"):
        return None
    kind = "" if title is None else title.rpartition(".")[2]
    number = _number(env, "SLURM_STEP_ID", "SLURM_STEPID")
    if kind in ("batch", "extern") or (not kind and number in (_BATCH, _EXTERN)):
        return None
    interactive = kind == "interactive" if kind else number == _INTERACTIVE
    nodes = _names(env, "SLURM_STEP_NODELIST")
    counts = _counts(env, "SLURM_STEP_TASKS_PER_NODE", nodes)
    step = Step(
        job=job,
        rank=_number(env, "SLURM_PROCID"),
        tasks=sum(counts),
        node_rank=_number(env, "SLURM_NODEID"),
        local_rank=_number(env, "SLURM_LOCALID"),
        nodes=nodes,
        tasks_per_node=counts,
        interactive=interactive or (bool(env.get("SLURM_PTY_PORT")) and has_terminal()),
    )
    return step if kind or _fits(step, env) else None


def _fits(step: Step, env: Mapping[str, str]) -> bool:
    """Return whether the variables of a step may be those of this process's own step."""
    if step.node_rank >= len(step.nodes) or env.get("SLURMD_NODENAME") != step.nodes[step.node_rank]:
        return False
    here = env.get("SLURM_GTIDS", "").split(",")  # the ranks of the tasks on this node
    return len(here) == step.tasks_per_node[step.node_rank] and str(step.rank) in here


def slurm_run_id(env: Mapping[str, str]) -> str | None:
    """Return a run id for the job, kept when it is requeued: `slurm-1234`, or in an array `slurm-1200_7`."""
    job = _job(env)
    return None if job is None else f"slurm-{_array_task(env) or job}"


def restart_count(env: Mapping[str, str]) -> int:
    """Return how often SLURM has restarted the job."""
    return _number(env, "SLURM_RESTART_COUNT") if _job(env) and "SLURM_RESTART_COUNT" in env else 0


def cpu_limit(env: Mapping[str, str]) -> int | None:
    """Return how many processors of this node SLURM gives to the present step or batch script.

    Not every SLURM confines jobs to their processors. None outside of SLURM.
    """
    if not env.get("SLURMD_NODENAME") or not re.fullmatch(r"0*[1-9][0-9]{0,5}", env.get("SLURM_CPUS_ON_NODE", "")):
        return None
    return int(env["SLURM_CPUS_ON_NODE"])


def _job(env: Mapping[str, str]) -> str | None:
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")
    if job and not re.fullmatch(r"[0-9]{1,10}", job):
        raise UsageError(f"SLURM_JOB_ID is {job!r}, which is not the number of a job; {_INSTEAD}")
    return job or None


def _job_name(env: Mapping[str, str]) -> str | None:
    """Return the job's id for SLURM's commands: the number alone, if it is also the array's, means the whole array.

    A job that was submitted from within an array's task may inherit that array's variables, but has another number.
    """
    job = _job(env)
    return _array_task(env) or job if job == env.get("SLURM_ARRAY_JOB_ID") else job


def _array_task(env: Mapping[str, str]) -> str | None:
    array, task = env.get("SLURM_ARRAY_JOB_ID", ""), env.get("SLURM_ARRAY_TASK_ID", "")
    known = re.fullmatch("[0-9]{1,10}", array) and re.fullmatch("[0-9]{1,10}", task)
    return f"{array}_{task}" if known else None


def _nodes(env: Mapping[str, str], group: int | None, *, strict: bool) -> list[Node]:
    """Return the nodes of the job, or of a component of a heterogeneous one.

    Not `strict` in an interactive step, whose numbers of nodes and tasks are those of the step.
    """
    suffix = ""
    if group is not None:
        suffix = f"_HET_GROUP_{group}" if "SLURM_HET_SIZE" in env else f"_PACK_GROUP_{group}"  # the older name
    variable = "SLURM_JOB_NODELIST" + suffix
    if group is None and variable not in env:
        variable = "SLURM_NODELIST"  # SLURM's own older name
    names = _names(env, variable)
    if not strict:
        return [Node(name) for name in names]
    number = f"SLURM_JOB_NUM_NODES{suffix}"
    if number in env and _number(env, number) != len(names):
        raise UsageError(f"{number} is {env[number]}, but {variable}={env[variable]} has {len(names)}; {_INSTEAD}")
    counts = _counts(env, f"SLURM_TASKS_PER_NODE{suffix}", names)
    in_all, on_each = f"SLURM_NTASKS{suffix}", f"SLURM_NTASKS_PER_NODE{suffix}"
    # If no tasks were requested, SLURM counts processors, and the variables are of the job from which it was submitted.
    asked = (bool(env.get(in_all)) and _number(env, in_all) == sum(counts)) or (
        bool(env.get(on_each)) and _number(env, on_each) >= max(counts)
    )
    several = asked and len(names) < sum(counts)
    return [Node(name, count if several else None, group) for name, count in zip(names, counts, strict=True)]


def _names(env: Mapping[str, str], variable: str) -> tuple[str, ...]:
    text = env.get(variable, "")
    if text in ("", "(null)"):
        job = _job(env)
        raise UsageError(f"SLURM_JOB_ID is {job}, but {variable} is {text or 'not set'}; {_INSTEAD}")
    try:
        return expand(text)
    except UsageError as error:
        raise UsageError(f"{variable}={text}: {error}; {_INSTEAD}") from error


def _counts(env: Mapping[str, str], variable: str, names: tuple[str, ...]) -> tuple[int, ...]:
    """Parse `4(x2),2`, the tasks of each node; without a value, one each."""
    text = env.get(variable, "")
    if not text:
        return (1,) * len(names)
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"0*([1-9][0-9]{0,5})(?:\(x0*([1-9][0-9]{0,5})\))?", item)
        if match is None:
            raise UsageError(f"{variable} is {text!r}; it must be tasks by node, as in 4(x2),2; {_INSTEAD}")
        counts += [int(match[1])] * int(match[2] or 1)
        if len(counts) > MAX_HOSTS:
            break
    if len(counts) != len(names):
        raise UsageError(f"{variable}={text} is for {len(counts)} nodes, but there are {len(names)}; {_INSTEAD}")
    return tuple(counts)


def _number(env: Mapping[str, str], *variables: str) -> int:
    variable = next((name for name in variables if name in env), variables[0])
    text = env.get(variable, "")
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise UsageError(f"{variable} is {repr(text) if text else 'not set'}; it must be a number; {_INSTEAD}")
    return int(text)


def step_title() -> str | None:
    """Return the step of this process, from the title of the slurmstepd above it: `17.0`, `17.batch`.

    None if there is none above it, or a container hides it.
    """
    found = _slurmstepd()
    return None if found is None else found[0]


def _slurmstepd() -> tuple[str, int] | None:
    """Return the step in the title of the slurmstepd above this process, and the pid of the task below that."""
    from launcher.machine.processes import ancestors

    task = os.getpid()
    for pid in ancestors(task):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                match = re.match(rb"slurmstepd: \[([0-9][^\]\s]*\.[a-z0-9]+)\]", file.read(200))
        except OSError:  # hidden, or ended meanwhile
            match = None
        if match is not None:
            return match[1].decode(), task
        task = pid
    return None


def is_cancelled(env: Mapping[str, str]) -> bool:
    """Return whether the job was cancelled, as far as scontrol knows. Blocks."""
    problem, said = _scontrol(["--oneliner", "show", "job", _job_name(env) or ""])
    return problem is None and "JobState=CANCELLED" in said


def requeue(env: Mapping[str, str]) -> str | None:
    """Requeue the job, which also ends it as it runs now; return why that failed, or None. Blocks."""
    job = _job_name(env)
    return "this is no SLURM job: SLURM_JOB_ID is not set" if job is None else _scontrol(["requeue", job])[0]


def _scontrol(args: list[str]) -> tuple[str | None, str]:
    """Run scontrol; return why that failed, or None, and its output."""
    import subprocess

    typed = " ".join(["scontrol", *args])
    try:
        done = subprocess.run(
            ["scontrol", *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SCONTROL_S,
            start_new_session=True,
        )
    except OSError as error:
        return f"scontrol cannot be run here ({error.strerror}); where it can be run, type: {typed}", ""
    except subprocess.TimeoutExpired:
        return f"`{typed}` did not answer within {_SCONTROL_S:g} s", ""
    said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"status {done.returncode}"]
    problem = None if done.returncode == 0 else f"`{typed}` failed: {said[-1]}"
    return problem, done.stdout.decode("utf-8", "replace")
