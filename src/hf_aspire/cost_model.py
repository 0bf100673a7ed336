"""How long a step takes, as a function of what it computes and reads; fitted online. Numpy only."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
# base, per_token, per_kv_token, and (hinge, increase of the slope there) where there is one
Coefficients = tuple[float, float, float, tuple[tuple[int, float], ...]]

# Query tokens at which the cost of one more may rise. Matrix products take the time of reading the weights until
# about 256 tokens on an H100 or H200 and are linear after; smaller devices and CPUs bend earlier.
HINGES = (64, 256)
# The prior alone decides until so many steps were seen: the first ones compile, capture graphs and fill caches.
WARMUP_STEPS = 10
# Steps from one solution to the next, unless the level changes: solving takes as long as choosing 40 draft lengths.
SOLVED_EVERY = 4
# Weight of the past after each step: the fit remembers about 1 / (1 - 0.99) = 100 steps, enough to average 5 % noise
# over five coefficients down to about 1 %, and short against the growth of a context.
MEMORY = 0.99
# Strength of the pull to the prior, in observations. A roofline knows each coefficient to about 50 % of itself once
# the common factor is right, and one step is noisy by about 10 % of itself: (0.1 / 0.5)^2.
RIDGE = 0.04
# How far the slopes may be off the prior, at least: on some devices products take longer than reading the weights from
# about 16 query tokens on, and one more token costs a sixteenth of reading them there.
BOUND_BY_PRODUCTS = 16
# No coefficient falls below this share of the rescaled prior, so that no step is ever predicted to be free, not even a
# kind that was never seen.
LEAST_SHARE = 0.01
# A step counts as at most so many times faster than predicted. Slow outliers (a pause, a recompilation) weigh little
# by themselves, because errors are relative; but a step whose end was noticed late makes the next one look short, and
# short steps weigh much. A kind of step that really is faster is learned in a few observations instead of one.
MOST_FASTER = 1.5
# Drift: the median error of the last 5 steps is beyond a factor 1.3. Two outliers of any size cannot move a median of
# 5 that far, 10 % noise does about once in a million steps, and a real change shows after 3 steps.
DRIFT_STEPS = 5
DRIFT_FACTOR = 1.3
# What is counted of a step at most, in predicted times: pauses of the machine are not the steps' doing.
MOST_ELAPSED = 3.0
# Plain steps whose median says how long the next one takes.
PLAIN_STEPS = 5
# Observations that the past is worth after a drift, or in a new call: it still separates the coefficients until there
# is something newer, and a dozen new steps outweigh it.
KEPT = 2.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step's time as a linear function: `base + per_token * T + per_kv_token * KV`.

    Args:
        base: Seconds that every step takes: reading the weights, launching kernels.
        per_token: Seconds per query token.
        per_kv_token: Seconds per KV token read, over all layers.
        launching: The part of the base that launching kernels takes; more tokens never add to it.

    Raises:
        ValueError: A coefficient is negative or not finite, all are zero, or `launching` exceeds the base.
    """

    base: float
    per_token: float
    per_kv_token: float
    launching: float = 0.0

    def __post_init__(self) -> None:
        coefficients = astuple(self)
        if not all(0 <= value < math.inf for value in coefficients) or sum(coefficients) == 0:
            raise ValueError(f"StepCost: got {coefficients}, expected finite seconds >= 0, not all zero")
        if self.launching > self.base:
            raise ValueError(f"StepCost: got {self.launching} s of launching, expected at most the base {self.base} s")


class CostModel:
    """tau(T, KV) = f(T) + beta KV with f piecewise linear and convex, fitted to the steps as they happen.

    The coefficients w (base, slope of f, its increase at each hinge, beta) minimise, over the steps seen,

        sum MEMORY^age (tau / seconds - 1)^2 + RIDGE sum ((w_j - s p_j) / (s scale_j))^2

    subject to w >= LEAST_SHARE s p (own reasoning). Errors are relative, so that short draft steps weigh as much as
    long verifications, and a step that took twenty times too long weighs a four-hundredth. p is the prior and s the
    one factor that fits s p to the same steps best: a roofline is often off by a constant, but T and KV hardly vary
    in steady state, where only the prior can tell the coefficients apart. scale is how far a coefficient may be off:
    as far as it is large (a per_kv_token of zero stays zero), for the slopes at least the base without its launches
    / BOUND_BY_PRODUCTS. As w >= 0, the prediction never falls with T or KV.

    When the level changes (another process on the device, a lower clock), a drift test rescales what was learned by
    the change it sees and lets new steps outweigh it soon.

    Steps of plain decoding are another regime: nothing is scored, no lists are made, and the host has less to do. How
    long they take is a multiple of the prior, the median of the last few.

    Args:
        prior: Costs assumed before `WARMUP_STEPS` steps were seen, and the direction that the data leave open.
        fixed: Keep to the prior for good; `observe` does nothing then.

    Raises:
        ValueError: The prior's base is zero, and it is not fixed: the fit has no scale then.
    """

    def __init__(self, prior: StepCost, fixed: bool = False) -> None:
        if prior.base == 0 and not fixed:
            raise ValueError(f"CostModel: got {prior}, expected a base > 0 to start the fit from (or fixed=True)")
        self.steps = 0
        """Steps observed; 0 for good when `fixed`."""
        self.elapsed = 0.0
        """Seconds that they took, without pauses."""
        self.plain_steps = 0
        """Those of plain decoding in this call."""
        self._fixed = fixed
        self._given = prior
        self._plain: deque[float] = deque(maxlen=PLAIN_STEPS)  # seconds / prior
        slope = max(prior.per_token, (prior.base - prior.launching) / BOUND_BY_PRODUCTS)
        self._scale: Array = np.array([prior.base, slope, *(slope for _ in HINGES), prior.per_kv_token])
        known = np.array([prior.base, prior.per_token, *(0.0 for _ in HINGES), prior.per_kv_token])
        self._prior: Array = np.divide(known, self._scale, out=np.zeros_like(known), where=self._scale > 0)
        # Normal equations of the relative errors, with coefficients in units of `scale`. The right-hand side also
        # serves as the sum of rows, since every row's target is 1.
        self._matrix: Array = np.zeros((len(known), len(known)))
        self._vector: Array = np.zeros(len(known))
        self._weight = 0.0  # observations in them, forgotten ones discounted
        self._free = np.ones(len(known), dtype=bool)  # coefficients that the last solution left above their least
        self._errors: deque[float] = deque(maxlen=DRIFT_STEPS)  # log(seconds / predicted)
        # None: to be solved when next asked for
        self._coefficients: Coefficients | None = (prior.base, prior.per_token, prior.per_kv_token, ())

    def seconds(self, tokens: float, kv_tokens: float) -> float:
        """Predicted time of a step.

        Args:
            tokens: Query tokens in the step.
            kv_tokens: KV tokens that its rows read, summed over rows.
        """
        base, per_token, per_kv_token, bends = self.fit
        seconds = base + per_token * tokens + per_kv_token * kv_tokens
        for hinge, bend in bends:
            if tokens > hinge:
                seconds += bend * (tokens - hinge)
        return seconds

    @property
    def per_kv_token(self) -> float:
        """Predicted seconds per KV token: what `seconds` rises by, whatever the query tokens."""
        return self.fit[2]

    @property
    def fit(self) -> Coefficients:
        """What predictions are made of: they are the same while this is."""
        return self._coefficients or self._solve()

    def plain_seconds(self, tokens: float, kv_tokens: float) -> float:
        """Predicted time of a step in which every row decodes; arguments as in `seconds`.

        Until this call has measured one, not more than the fit says: what is too dear is never measured.
        """
        seconds = math.inf
        if self._plain:
            seconds = sorted(self._plain)[len(self._plain) // 2] * self._prior_seconds(tokens, kv_tokens)
        return seconds if self.plain_steps else min(seconds, self.seconds(tokens, kv_tokens))

    def begin_call(self) -> None:
        """What was learned in earlier calls, of other batches and contexts, is soon outweighed by new steps."""
        self.plain_steps = 0
        if self._weight:
            self._lighten()

    def observe(self, tokens: int, kv_tokens: float, seconds: float, plain: bool = False) -> None:
        """Learns from one step; leave prefill steps out, they are another regime.

        Args:
            tokens: Query tokens in the step.
            kv_tokens: KV tokens that its rows read, summed over rows.
            seconds: What it took.
            plain: Whether every row decoded, and none was scored.

        Raises:
            ValueError: The step was empty or took no time, or a number is not finite.
        """
        if self._fixed:
            return
        if not (tokens >= 1 and 0 <= kv_tokens < math.inf and 0 < seconds < math.inf):
            raise ValueError(f"got {tokens} tokens, {kv_tokens} KV tokens and {seconds} seconds for a step")
        if plain:
            if self.plain_steps == 0:
                self._plain.clear()
            self.plain_steps += 1
            self._plain.append(seconds / self._prior_seconds(tokens, kv_tokens))
        self.steps += 1
        counted = seconds
        if self.steps > WARMUP_STEPS:
            predicted = self.seconds(tokens, kv_tokens)
            counted = min(seconds, MOST_ELAPSED * predicted)
            self._errors.append(math.log(seconds / predicted))
            self._follow_drift()
            seconds = max(seconds, self.seconds(tokens, kv_tokens) / MOST_FASTER)
        self.elapsed += counted
        row = np.array([1.0, tokens, *(max(tokens - hinge, 0) for hinge in HINGES), kv_tokens]) * self._scale / seconds
        self._discount(MEMORY)
        self._matrix += np.outer(row, row)
        self._vector += row
        self._weight += 1
        if self.steps >= WARMUP_STEPS and (self.steps - WARMUP_STEPS) % SOLVED_EVERY == 0:
            self._coefficients = None

    def _prior_seconds(self, tokens: float, kv_tokens: float) -> float:
        return self._given.base + self._given.per_token * tokens + self._given.per_kv_token * kv_tokens

    def _discount(self, factor: float) -> None:
        self._matrix *= factor
        self._vector *= factor
        self._weight *= factor

    def _follow_drift(self) -> None:
        """If most recent steps were off by a common factor, moves the past to the new level and lightens it."""
        if len(self._errors) < DRIFT_STEPS:
            return
        error = sorted(self._errors)[DRIFT_STEPS // 2]
        if abs(error) < math.log(DRIFT_FACTOR):
            return
        level = math.exp(error)
        self._matrix /= level**2
        self._vector /= level
        self._lighten()
        self._coefficients = None

    def _lighten(self) -> None:
        self._discount(min(1.0, KEPT / self._weight))
        self._errors.clear()

    def _solve(self) -> Coefficients:
        # In units of u = w / (factor scale) the ridge is RIDGE |u - prior|^2.
        factor = float(self._prior @ self._vector / (self._prior @ self._matrix @ self._prior))
        matrix = factor**2 * self._matrix
        matrix.flat[:: len(matrix) + 1] += RIDGE
        least = LEAST_SHARE * self._prior
        wanted = factor * self._vector + RIDGE * self._prior - matrix @ least
        above = _nonnegative_solution(matrix, wanted, self._free)
        base, per_token, *bends, per_kv_token = (factor * self._scale * (least + above)).tolist()
        rising = tuple((hinge, bend) for hinge, bend in zip(HINGES, bends, strict=True) if bend > 0)
        self._coefficients = (base, per_token, per_kv_token, rising)
        return self._coefficients


def _nonnegative_solution(matrix: Array, vector: Array, free: npt.NDArray[np.bool_]) -> Array:
    """Minimises x' M x / 2 - v' x over x >= 0, for a positive definite M of a few rows.

    Murty's principal pivoting: of the coordinates on the wrong side (a free one negative, a zero one that would fall
    the objective if raised), the last changes sides, until there is none. It ends after at most 2^n solves wherever it
    begins (K. G. Murty, Note on a Bard-type scheme for solving the complementarity problem, Opsearch 1974), and after
    one where that is right, as from one step to the next nearly always.

    Args:
        matrix: M.
        vector: v.
        free: Coordinates that are taken to be positive at first; afterwards those that are.
    """
    tolerance = 1e-9 * float(np.abs(vector).max())
    for _ in range(2 ** len(vector)):
        solution = np.zeros_like(vector)
        solution[free] = np.linalg.solve(matrix[free][:, free], vector[free])
        descent = vector - matrix @ solution
        wrong = np.flatnonzero(np.where(free, solution < 0, descent > tolerance))
        if len(wrong) == 0:
            break
        free[wrong[-1]] ^= True
    return np.maximum(solution, 0)
