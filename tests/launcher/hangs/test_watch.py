"""A rank that hangs is blamed, in time; no one is in 1,000 simulated runs with all that takes long in training."""

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import pytest
from testbed.present import present
from testbed.seeds import Seeds

from launcher.agent.observation.signs_of_life import PHASES
from launcher.hangs.watch import BUSY, FACTOR, QUIET_S, Blame, HangPolicy, HangWatch
from launcher.protocol.reports import Evidence
from launcher.protocol.two_way import START, STEPS, Heartbeat

RUNS, CHUNKS = 1000, 10
KEPT = (2079230491,)  # seeds that have once shown an error
STEP, EVALUATION, SAVE = range(PHASES)
BEAT_S, LATER_BEAT_S = 1.0, 10.0  # of a long pause: fewer, for the test's sake
TORCH = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"
COLLECTIVE, USER = (TORCH, "all_reduce"), ("/home/me/train.py", "step")


def stack(line: int, *frames: tuple[str, str]) -> str:
    lines = [f'  File "{file}", line {line} in {function}' for file, function in frames]
    return "\n".join(["Current thread 0x1 (most recent call first):", *lines, ""])


@dataclass
class Rank:
    """What a look at it finds. It is silent since `since`."""

    rank: int
    since: float = 0.0
    phase: int = STEP
    steps: int = 0
    state: str = "S"
    cpu_s: float = 0.0
    works: float = 0.0  # cores that it and its children use
    line: int = 1
    waits: bool = True  # in a collective
    at_disk: bool = False
    traced: bool = False
    longest_s: list[float] = field(default_factory=lambda: [0.0] * (START + 1))

    def signs(self, now: float, steps: int = 1) -> None:
        if self.steps:
            self.longest_s[self.phase] = max(self.longest_s[self.phase], now - self.since)
        self.since, self.steps = now, self.steps + steps

    def found(self, now: float) -> Evidence:
        frames = (COLLECTIVE, USER) if self.waits else (USER,)
        return Evidence(
            number=1, attempt=0, rank=self.rank, pid=100 + self.rank, state=self.state, waits_in="", rss_bytes=1,
            cpu_s=self.cpu_s, stack="" if self.state == "T" else stack(self.line, *frames),
            silent_s=now - self.since, phase=self.phase, steps=self.steps, tree_cpu_s=self.cpu_s,
            at_disk=self.at_disk, traced=self.traced,
        )  # fmt: skip


class World:
    """Ranks of one run on a clock of their own. `blame` is the first one."""

    def __init__(self, ranks: int, policy: HangPolicy | None = None) -> None:
        self.now = 0.0
        self.ranks = [Rank(rank) for rank in range(ranks)]
        self.blame: Blame | None = None
        self.looks = 0
        self._watch = HangWatch(policy or HangPolicy(acts=True))

    def steps(self, count: int, step_s: float) -> None:
        """Let all make steps; the heartbeats between them are those of the end."""
        self.now += count * step_s
        for rank in self.ranks:
            if rank.steps:
                rank.since = max(rank.since, self.now - max(step_s, BEAT_S))
            rank.signs(self.now, count)
        self.beat()

    def pause(self, duration_s: float) -> None:
        """Let time pass in which no one makes a step."""
        began = self.now
        while (left_s := began + duration_s - self.now) > 1e-6 and self.blame is None:
            passed_s = min(BEAT_S if self.now - began < 10 else LATER_BEAT_S, left_s)
            self.now += passed_s
            for rank in self.ranks:
                rank.cpu_s += passed_s * rank.works
            self.beat()

    def beat(self) -> None:
        watched = [rank for rank in self.ranks if rank.steps or rank.phase == START]
        oldest = min(watched, key=lambda rank: rank.since, default=None)
        beat = Heartbeat(
            time=self.now, silent_s=0 if oldest is None else self.now - oldest.since,
            silent_in=0 if oldest is None else oldest.phase,
            longest_s=[max(rank.longest_s[phase] for rank in self.ranks) for phase in range(START + 1)],
            stopped=[rank.rank for rank in self.ranks if rank.state == "T" and not rank.traced],
        )  # fmt: skip
        self._watch.heard("a", beat)
        if self._watch.wants_look(self.now):
            self.looks += 1
            self.blame = self._watch.looked([each.found(self.now) for each in self.ranks], self.now)

    def hung(self) -> list[int] | None:
        """Return the ranks that are blamed; None if there is no blame."""
        return None if self.blame is None else [each.rank for each in self.blame.hung]

    def back(self) -> None:
        """All go on."""
        for rank in self.ranks:
            rank.waits, rank.works, rank.at_disk, rank.phase, rank.state = True, 0.0, False, STEP, "S"
            rank.signs(self.now)
        self.beat()


# ---- what takes long, and is none ----------------------------------------------------------------------------


def evaluation(world: World, chance: random.Random) -> None:
    """One rank evaluates, or all do: in a phase that ddp knows, or in a loop of the script's own."""
    alone, known = chance.random() < 0.5, chance.random() < 0.5
    for rank in world.ranks if not alone else world.ranks[:1]:
        rank.waits, rank.works, rank.phase = False, chance.uniform(0.1, 4), EVALUATION if known else STEP
        if known:
            rank.signs(world.now, 0)
    world.pause(min(1500.0, chance.lognormvariate(4, 1)))  # torch itself ends a collective that takes 1800 s
    for rank in world.ranks:
        rank.signs(world.now, 0)
    world.back()


def save(world: World, chance: random.Random) -> None:
    """Rank 0 saves, to a disk that may be slow, by ddp.Checkpoint or by torch.save; the others wait."""
    first, known = world.ranks[0], chance.random() < 0.5
    first.waits, first.phase = False, SAVE if known else STEP
    first.signs(world.now, 0)
    first.works = 0.9
    world.pause(chance.uniform(0.1, 20))  # to make it
    first.works, first.at_disk = 0.002, not known or chance.random() < 0.5
    world.pause(min(1200.0, chance.lognormvariate(3, 1.5)))  # to write it: with FUSE, in no state D
    first.signs(world.now, 0)
    world.back()


def slow_storage(world: World, chance: random.Random) -> None:
    """The data of one rank come late: its loader's processes are at a disk, or wait for a server, which is busy."""
    rank = chance.choice(world.ranks)
    rank.waits = False
    if chance.random() < 0.5:
        rank.at_disk = True
        world.pause(min(1500.0, chance.lognormvariate(3, 1.5)))
    else:
        world.pause(chance.uniform(0, 60))  # as long as storage clients wait before they try again
        rank.works, rank.line = 0.05, rank.line + 1
        world.pause(chance.uniform(0, 50))
    world.back()


def compilation(world: World, chance: random.Random) -> None:
    """The model is compiled again, by children that use the CPU; some are done earlier than others, and wait."""
    for rank in world.ranks:
        rank.waits, rank.works = chance.random() < 0.5, 1.0
    for rank in world.ranks:
        rank.works = 0.0 if rank.waits else 1.0
    world.pause(min(1500.0, chance.lognormvariate(4, 1)))
    world.back()


def stopped_by_hand(world: World, chance: random.Random) -> None:
    """All are stopped, or one has a debugger attached, for as long as a person likes."""
    if chance.random() < 0.5:
        for rank in world.ranks:
            rank.state = "T"
    else:
        rank = chance.choice(world.ranks)
        rank.waits, rank.traced, rank.state = False, True, "t"
    world.pause(chance.uniform(1, 5000))
    for rank in world.ranks:
        rank.traced = False
    world.back()


LONG: tuple[Callable[[World, random.Random], None], ...] = (
    evaluation, save, slow_storage, compilation, stopped_by_hand,
)  # fmt: skip


def train(chance: random.Random, *, pauses: Sequence[Callable[[World, random.Random], None]] = LONG) -> World:
    world = World(chance.choice((2, 3, 4, 8)))
    step_s = 10 ** chance.uniform(-2.5, 1.5)
    for rank in world.ranks:
        rank.waits = chance.random() < 0.5
    world.pause(chance.uniform(0, 2000))  # imports, data, the first step
    for rank in world.ranks:
        rank.waits = True
    for _ in range(chance.randrange(3, 12)):
        world.steps(chance.randrange(3, 500), step_s)
        chance.choice(pauses)(world, chance)
        world.steps(3, step_s)
    return world


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_one_is_blamed_in_simulated_runs(chunk: int, seeds: Seeds) -> None:
    for seed in seeds(RUNS // CHUNKS, kept=KEPT[chunk::CHUNKS]):
        world = train(random.Random(seed))
        assert world.blame is None, f"seed {seed}: {world.blame}"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_rank_that_hangs_is_blamed_and_no_other(chunk: int, seeds: Seeds) -> None:
    for seed in seeds(RUNS // 4 // CHUNKS):
        chance = random.Random(seed)
        world = train(chance, pauses=[each for each in LONG if each is not stopped_by_hand])
        world.steps(10, 0.05)
        hung = chance.choice(world.ranks)
        hung.waits, began = False, world.now
        longest_s = max(rank.longest_s[STEP] for rank in world.ranks)
        limit_s = max(QUIET_S, FACTOR * longest_s)
        world.pause(2 * limit_s)
        assert world.hung() == [hung.rank], f"seed {seed}"
        took_s = world.now - began
        assert limit_s - LATER_BEAT_S <= took_s <= limit_s + QUIET_S / 2 + 2 * LATER_BEAT_S, (
            f"seed {seed}: after {took_s} s of {limit_s}"
        )


# ---- one at a time -------------------------------------------------------------------------------------------


@pytest.fixture
def world() -> World:
    made = World(4)
    made.steps(100, 0.05)
    return made


def test_a_stopped_rank_is_blamed_at_once(world: World) -> None:
    world.ranks[2].state = "T"
    world.pause(2)
    blame = present(world.blame)
    assert (world.hung(), blame.is_stopped, blame.waiting) == ([2], True, 3)


@pytest.mark.parametrize("steps", [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, STEPS], [STEPS, STEPS, 0, STEPS]])
def test_a_rank_stopped_in_its_first_steps_is_blamed_at_once(steps: list[int]) -> None:
    world = World(4)
    for rank, made in zip(world.ranks, steps, strict=True):
        rank.signs(0, made)
    world.ranks[2].state = "T"
    world.pause(2)
    assert (world.hung(), present(world.blame).waiting) == ([2], 3)


def test_ranks_all_stopped_before_their_first_steps_are_left_alone() -> None:
    world = World(4)
    for rank in world.ranks:
        rank.state = "T"
    world.pause(100)
    assert world.blame is None


def test_a_replaced_rank_is_blamed_where_it_stops_or_idles_long(world: World) -> None:
    other = deepcopy(world)
    for each in (world, other):
        each.ranks[2] = Rank(2, since=each.now, phase=START)
        each.ranks[0].longest_s[START] = 30.0
    world.ranks[2].state = "T"
    world.pause(2)
    assert world.hung() == [2]
    other.ranks[2].waits = False
    other.pause(FACTOR * 30 - 10)
    assert other.hung() is None
    other.pause(20 + QUIET_S)
    assert other.hung() == [2]


def test_a_stopped_rank_is_blamed_while_another_is_replaced() -> None:
    world = World(4)
    world.steps(2, 0.1)
    world.ranks[1] = Rank(1, since=world.now, phase=START)
    world.ranks[2].state = "T"
    world.pause(10)
    assert world.hung() == [2]


def test_a_rank_that_goes_on_before_the_look_is_left_alone(world: World) -> None:
    world.ranks[2].state = "T"
    for rank in world.ranks[:2]:
        rank.traced = True  # the others too, in another way
    world.ranks[3].state = "T"
    world.pause(100)
    assert world.blame is None


def test_a_rank_that_works_is_left_alone_until_torch_s_timeout(world: World) -> None:
    world.ranks[1].waits, world.ranks[1].works = False, 0.5
    world.pause(BUSY * QUIET_S - 60)
    assert world.hung() is None
    world.pause(60 + QUIET_S + LATER_BEAT_S)
    assert world.hung() == [1]


@pytest.mark.parametrize("also", ["works", "at_disk", "traced"])
def test_who_waits_for_one_that_works_is_not_blamed(world: World, also: str) -> None:
    world.ranks[1].waits = world.ranks[2].waits = False
    setattr(world.ranks[2], also, True)
    world.pause(5 * QUIET_S)
    assert world.blame is None


def test_one_whose_line_changes_is_left_alone(world: World) -> None:
    world.ranks[1].waits = False
    for line in range(100):
        world.ranks[1].line = line
        world.pause(5)
    assert world.blame is None


def test_where_all_wait_for_each_other_no_rank_is_named(world: World) -> None:
    world.pause(BUSY * QUIET_S - 10)
    assert world.hung() is None
    world.pause(10 + QUIET_S + LATER_BEAT_S)
    assert world.hung() == []


@pytest.mark.parametrize(
    ("phase", "longest_s", "is_hang"), [(EVALUATION, 0.0, False), (EVALUATION, 4.0, True), (SAVE, 4.0, False)]
)
def test_the_first_evaluation_and_each_save_have_longer(
    world: World, phase: int, longest_s: float, is_hang: bool
) -> None:
    world.ranks[0].longest_s[phase] = longest_s
    for rank in world.ranks:
        rank.phase = phase
    world.ranks[1].waits = False
    world.pause(5 * QUIET_S)
    assert (world.blame is not None) is is_hang


def test_a_script_without_ddp_is_watched_by_its_output(world: World) -> None:
    watch = HangWatch(HangPolicy(acts=True, quiet_s=10))
    for rank in world.ranks:
        rank.steps, rank.since = 0, 0.0
    world.ranks[3].waits = False
    blamed = []
    for now in range(8, 30):
        watch.heard("a", Heartbeat(float(now), silent_s=now, longest_s=[0.5, 0.0, 0.0]))
        if watch.wants_look(now):
            blamed.append(watch.looked([each.found(now) for each in world.ranks], now))
    assert blamed[0] is None
    assert [each.rank for each in present(blamed[1]).hung] == [3]


def test_what_was_learned_holds_in_the_next_attempt() -> None:
    watch = HangWatch(HangPolicy(acts=True, quiet_s=10))
    watch.heard("a", Heartbeat(0.0, longest_s=[50.0, 0.0, 0.0]))
    watch.begin()
    for silent_s, wants in ((499.0, False), (500.0, True)):
        watch.heard("a", Heartbeat(0.0, silent_s=silent_s, longest_s=[0.0, 0.0, 0.0]))
        assert watch.wants_look(1000.0) is wants
