"""How likely the next draft of a request is accepted, estimated online. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

# Bounds of every estimate. At 0 a request could never try again; at 1 a draft's expected gain would not fall with
# depth, and one lucky streak would send every draft to the cap.
LOWEST, HIGHEST = 0.01, 0.995
# What a prior is worth, in judged drafts: of a request against the pool, and of the pool against the configured prior.
# It is p (1 - p) / variance for acceptances p that differ between requests by about 0.1 (8 to 16 for p = 0.9 to 0.8).
PRIOR_TRIALS = 8.0
# Weight of the past in the pool after each verified round: it remembers the last 50 rounds of the whole batch, ten
# times as long as a request remembers its own (smoothing 0.8).
POOL_MEMORY = 0.98
# Share of its evidence that a request loses in one plain decoding step, and that the pool loses in one step in which
# everybody decodes plainly. At 1 / 200 the retries of requests whose drafts do not pay stay below 5 % of all rows and
# 1 % of the time (tests/test_scheduler.py), and it takes some hundred tokens to notice that drafting pays again.
FADING = 1 / 200


@dataclass(slots=True)
class _Evidence:
    """Drafts that were judged, and those of them that were accepted; both fade, so neither is whole."""

    accepted: float = 0.0
    judged: float = 0.0

    def add(self, accepted: int, judged: int, memory: float) -> None:
        self.accepted = memory * self.accepted + accepted
        self.judged = memory * self.judged + judged

    def fade(self) -> None:
        self.accepted *= 1 - FADING
        self.judged *= 1 - FADING

    def estimate(self, prior: float) -> float:
        """Mean of the beta distribution that starts as `PRIOR_TRIALS` trials at the prior."""
        return (self.accepted + PRIOR_TRIALS * prior) / (self.judged + PRIOR_TRIALS)


class AcceptanceEstimator:
    """Acceptance per request, from its own recent rounds and a prior pooled over the batch.

    A verified round of d drafts, a of them accepted, judged min(a + 1, d): what lies behind a rejection shows nothing.
    Its observation is a / min(a + 1, d), as in ASPIRE's scheduler (arXiv 2609.17943). Two things differ from a
    smoothed average of observations, both own reasoning:

    - A round weighs as much as the drafts it judged. Averaged alike, the early rejections of long drafts count too
      much: the mean observation of drafts of 3 is 0.33 at a true acceptance of 0.5.
    - Evidence is small (smoothing 0.8 remembers five rounds), so it is completed by the pool's.

    Simulated throughput is 98 % of that at the known acceptance instead of 94 % (mean of 8 cases, batch 8;
    `pytest -s -k several tests/test_acceptance.py` prints it).

    Plain decoding judges nothing. There the evidence fades, so that the estimate relaxes towards the prior and a
    request tries again one day; the first to try tells the others through the pool.

    Args:
        prior: Acceptance before anything was verified, in (0, 1).
        smoothing: Weight of the past in a request's evidence after each round, in [0, 1).
    """

    def __init__(self, prior: float, smoothing: float) -> None:
        self._prior = prior
        self._smoothing = smoothing
        self._pool = _Evidence()
        self._requests: dict[int, _Evidence] = {}
        self._relaxed: set[int] = set()  # decoded plainly in the step that is counted now

    def estimate(self, request: int) -> float:
        """Probability that the next draft is accepted given that those before it were, in [0.01, 0.995].

        A request of which nothing is known is at the pooled prior.
        """
        pooled = self._pool.estimate(self._prior)
        evidence = self._requests.get(request)
        estimate = pooled if evidence is None else evidence.estimate(pooled)
        return min(max(estimate, LOWEST), HIGHEST)

    def observe(self, request: int, drafted: int, accepted: int) -> None:
        """Learns from one verified round; one without drafts shows nothing and is ignored.

        Args:
            request: Identity of the request.
            drafted: Drafts verified.
            accepted: How many of them were accepted, 0 to `drafted`.

        Raises:
            ValueError: `accepted` is not in 0 to `drafted`.
        """
        if not 0 <= accepted <= drafted:
            raise ValueError(f"got {accepted} accepted drafts, expected 0 to {drafted}, as many as were drafted")
        if drafted == 0:
            return
        judged = min(accepted + 1, drafted)
        self._requests.setdefault(request, _Evidence()).add(accepted, judged, self._smoothing)
        self._pool.add(accepted, judged, POOL_MEMORY)
        self._relaxed.clear()

    def relax(self, request: int) -> None:
        """One plain decoding step: the estimate moves a little towards the pooled prior.

        A request that comes by twice without an observation in between shows that everybody decoded plainly in the
        meantime: then the pooled prior moves towards the configured one, once per step whatever the batch size.
        """
        if request in self._relaxed:
            self._relaxed.clear()
            self._pool.fade()
        self._relaxed.add(request)
        if request in self._requests:
            self._requests[request].fade()

    def forget(self, request: int) -> None:
        """Drops a finished request; another one under its identity starts at the pooled prior."""
        self._requests.pop(request, None)
        self._relaxed.discard(request)
