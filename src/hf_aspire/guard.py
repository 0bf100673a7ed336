"""Keeps speculation from being slower than plain decoding, by what both were measured to do. Pure Python."""

from __future__ import annotations

from .cost_model import WARMUP_STEPS, CostModel

# A window of speculation is judged when it holds so many rounds, whose tokens then average to about a tenth of their
# mean, one per row at least, and so many steps.
WINDOW_ROUNDS, WINDOW_STEPS = 48, 12
# Shares of a window's rounds that must hold drafts (else its steps are of plain decoding, more or less), and of its
# steps that must have been timed.
LEAST_DRAFTED = 0.25
LEAST_TIMED = 0.75
# Plain decoding is measured where speculation is faster than its predicted rate by less than this. Predicted from
# steps that draft and verify, plain steps come out too dear, by a quarter for 27 requests of 32k tokens (8B shape,
# H200); up to a factor of two, every loss is found at once, and any after so many steps.
DOUBTFUL = 2.0
MEASURED_BY = 512
# Plain steps that are enough, at most so many to get them (three of a new shape are not timed, and on a GPU outcomes
# come up to two steps late), and how long they are good for.
PROBED, PROBE_STEPS, GOOD_FOR = 2, 8, 512
# Steps of plain decoding after speculation lost; twice as many each time that it loses again, up to a limit.
HOLD, LONGEST_HOLD = 128, 2048


class Guard:
    """Decides when the whole batch decodes plainly.

    Costs are fitted to the steps that happen (`CostModel`), and say little about steps that do not. So whether to
    speculate at all is decided by the tokens per second and row of both, over windows of steps.

    Args:
        cost: Knows how long steps took, in earlier calls too, and that this one begins. A fixed one does not, and
            nothing is guarded then.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._hold = HOLD
        self._left = 0  # steps of plain decoding to come
        self._probing = False
        self._enough = 0  # plain steps at which a probe ends
        self._doubted = 0.0  # the rate that made it
        self._plain_steps, self._since_plain = 0, GOOD_FOR
        self._usual = cost.steps + WARMUP_STEPS  # a call's first steps may compile, and know no acceptance yet
        self._restart(0)

    def observe(self, drafted: int, accepted: int) -> None:
        """Counts a verify or decode row."""
        self._rounds += 1
        self._drafted += drafted > 0
        self._tokens += accepted + 1
        self._row_steps += drafted + 1

    def holds(self, batch: int, context: float) -> bool:
        """Whether every row of the next step is to decode, or to verify what it holds.

        Args:
            batch: Rows.
            context: KV tokens that their full rows read.
        """
        self._since_plain = 0 if self._cost.plain_steps > self._plain_steps else self._since_plain + 1
        self._plain_steps = self._cost.plain_steps
        changed = abs(batch - self._batch) > self._batch // 10
        if self._probing and changed:  # what made the probe was of another batch
            self._probing, self._left = False, 0
        if self._probing and self._plain_steps >= self._enough:
            self._left = 0
        if self._left:
            self._left -= 1
            self._restart(batch)
            return True
        if changed:
            self._restart(batch)
            return False  # nothing was heard of this step yet
        if self._probing:
            self._probing = False
            return self._loses(self._doubted, batch, context)
        rate = self._rate(batch)
        if rate is None:
            return False
        doubtful = rate * self._cost.plain_seconds(batch, context) < DOUBTFUL
        doubtful |= self._plain_steps == 0 and self._since_plain >= GOOD_FOR + MEASURED_BY
        if self._since_plain >= GOOD_FOR and doubtful:
            self._probing, self._doubted, self._left = True, rate, PROBE_STEPS - 1
            self._enough, self._since_plain = self._plain_steps + PROBED, 0
            return True
        return self._plain_steps > 0 and self._loses(rate, batch, context)

    def _loses(self, rate: float, batch: int, context: float) -> bool:
        """Whether plain decoding is faster, which it then is for a while."""
        if rate * self._cost.plain_seconds(batch, context) >= 1:
            self._hold = HOLD
            return False
        self._left, self._hold = self._hold - 1, min(2 * self._hold, LONGEST_HOLD)
        return True

    def _rate(self, batch: int) -> float | None:
        """Tokens per second and row of a full window, which ends there; None where there is none.

        Tokens per step and row are those of the rounds that ended: drafts under way are neither paid nor credited.
        """
        self._steps += 1
        if self._rounds < max(WINDOW_ROUNDS, batch) or self._steps < WINDOW_STEPS:
            return None
        seconds, timed = self._cost.elapsed - self._started, self._cost.steps - self._first
        rate = None
        # Steps that captured a graph are not timed, but their tokens were counted.
        drafts, usual = self._drafted >= LEAST_DRAFTED * self._rounds, self._first >= self._usual
        if drafts and usual and timed >= LEAST_TIMED * self._steps:
            rate = self._tokens / self._row_steps * timed / seconds
        self._restart(batch)
        return rate

    def _restart(self, batch: int) -> None:
        self._batch = batch
        self._rounds = self._drafted = self._tokens = self._steps = self._row_steps = 0
        self._started, self._first = self._cost.elapsed, self._cost.steps
