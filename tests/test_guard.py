"""When the whole batch decodes plainly, from what steps were measured to take."""

from __future__ import annotations

from hf_aspire.cost_model import WARMUP_STEPS, CostModel, StepCost
from hf_aspire.guard import GOOD_FOR, HOLD, LONGEST_HOLD, MEASURED_BY, PROBE_STEPS, PROBED, WINDOW_STEPS, Guard

BATCH, CONTEXT = 16, 16 * 30_000.0
PRIOR = StepCost(2e-3, 1e-5, 3e-8)
PLAIN = CostModel(PRIOR, fixed=True).seconds(BATCH, CONTEXT)


class Loop:
    """Steps of rounds of three drafts, all kept, of a quarter of the batch each, at a pace relative to plain steps."""

    def __init__(self, fixed: bool = False, read: float = CONTEXT / 2) -> None:
        self.cost = CostModel(PRIOR, fixed)
        self.read = read
        self.guard = Guard(self.cost)
        for _ in range(WARMUP_STEPS):
            self.cost.observe(2 * BATCH, read, PLAIN)

    def plain_step(self, seconds: float = PLAIN) -> None:
        for _ in range(BATCH):
            self.guard.observe(0, 0)
        self.cost.observe(BATCH, CONTEXT, seconds, plain=True)

    def step(self, pace: float, batch: int = BATCH, timed: bool = True) -> bool:
        """Runs a step as the guard wants it, a speculating one at `pace` times plain's rate; whether it was held.

        By the prior, a plain step takes `PLAIN / prior(read)` as long as a speculating one.
        """
        if self.guard.holds(batch, CONTEXT):
            self.plain_step()
            return True
        for _ in range(batch // 4):
            self.guard.observe(3, 3)
        if timed:
            self.cost.observe(2 * batch, self.read, PLAIN / pace)
        return False

    def run(self, pace: float, steps: int) -> list[bool]:
        return [self.step(pace) for _ in range(steps)]


def lengths(held: list[bool]) -> list[int]:
    """Lengths of the stretches that were held."""
    runs = "".join("x" if each else " " for each in held).split()
    return [len(run) for run in runs]


def test_speculation_that_loses_is_held_twice_as_long_each_time() -> None:
    loop = Loop()
    loop.plain_step()
    held = lengths(loop.run(0.8, 6000))
    assert held[:5] == [HOLD, 2 * HOLD, 4 * HOLD, 8 * HOLD, 16 * HOLD] and 16 * HOLD == LONGEST_HOLD
    assert set(held[5:-1]) <= {LONGEST_HOLD}


def test_speculation_that_wins_is_never_held_for_longer_than_a_probe() -> None:
    loop = Loop()
    loop.plain_step()
    assert not any(loop.run(1.2, GOOD_FOR - 1))
    assert lengths(loop.run(1.2, 3 * GOOD_FOR)) == [PROBED] * 3


def test_a_win_forgets_losses() -> None:
    loop = Loop()
    loop.plain_step()
    assert lengths(loop.run(0.8, WINDOW_STEPS + HOLD + 2)) == [HOLD]
    loop.run(1.5, 3 * WINDOW_STEPS)
    assert lengths(loop.run(0.8, 3 * WINDOW_STEPS + HOLD))[0] == HOLD


def test_plain_decoding_is_measured_where_the_gain_is_doubtful() -> None:
    steps = WINDOW_STEPS + PROBED + 20
    assert lengths(Loop().run(1.8, steps)) == [PROBED]
    held = Loop().run(0.9, steps)
    assert lengths(held) == [steps - held.index(True)], "what was measured before the probe is judged behind it"
    assert not any(Loop(read=CONTEXT / 8).run(0.9, steps)), "plain steps would have to be three times too dear"


def test_a_probe_that_times_nothing_ends_and_is_not_repeated_soon() -> None:
    loop = Loop()
    held = 0
    for _ in range(GOOD_FOR):
        if loop.guard.holds(BATCH, CONTEXT):
            held += 1
        else:
            for _ in range(BATCH // 4):
                loop.guard.observe(3, 3)
            loop.cost.observe(2 * BATCH, CONTEXT / 2, PLAIN / 1.5)
    assert held == PROBE_STEPS


def test_a_probe_waits_for_shapes_to_be_captured_and_for_outcomes_that_come_two_steps_late() -> None:
    loop, planned = Loop(), 1
    while not loop.guard.holds(BATCH, CONTEXT):
        for _ in range(BATCH // 4):
            loop.guard.observe(3, 3)
        loop.cost.observe(2 * BATCH, CONTEXT / 2, PLAIN / 1.4)
    while loop.guard.holds(BATCH, CONTEXT):
        planned += 1
        if planned - 2 > 3:
            loop.plain_step()
    assert loop.cost.plain_steps == PROBED


def test_plain_decoding_is_measured_once_in_a_long_call_whatever_the_gain() -> None:
    assert lengths(Loop(read=CONTEXT / 8).run(3.0, 2 * MEASURED_BY)) == [PROBED]


def test_drafts_under_way_are_neither_paid_nor_credited() -> None:
    """All rows draft for seven steps and verify in the eighth; windows end wherever they do."""
    loop = Loop()
    loop.plain_step()
    for step in range(400):
        assert not loop.guard.holds(BATCH, CONTEXT)
        if step % 8 == 7:
            for _ in range(BATCH):
                loop.guard.observe(7, 7)
        loop.cost.observe(2 * BATCH, CONTEXT / 2, PLAIN / 1.05)


def test_outcomes_that_come_a_step_late_make_no_loss() -> None:
    loop, late = Loop(), 0
    loop.plain_step()
    for _ in range(200):
        assert not loop.guard.holds(BATCH, CONTEXT)
        for _ in range(late):
            loop.guard.observe(3, 3)
        if late:
            loop.cost.observe(2 * BATCH, CONTEXT / 2, PLAIN / 1.02)
        late = BATCH // 4


def test_a_probe_of_another_batch_is_dropped() -> None:
    loop = Loop()
    while not loop.step(1.4):
        pass
    held = [loop.step(1.4, batch=BATCH // 4) for _ in range(HOLD)]
    assert sum(held) <= PROBE_STEPS


def test_what_was_not_timed_or_holds_no_drafts_or_another_batch_is_not_judged() -> None:
    loop = Loop()
    loop.plain_step()
    assert not any(loop.step(0.5, timed=step % 2 == 0) for step in range(60))
    assert not any(loop.step(0.5, batch=8 + 8 * (step // 11 % 2)) for step in range(66))
    loop = Loop()
    for _ in range(60):
        assert not loop.guard.holds(BATCH, CONTEXT)
        loop.plain_step(2 * PLAIN)
    assert not any(Loop(fixed=True).run(0.5, 100))
