"""What the acceptance benchmark compares, under which common setting, and what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_aspire import AspireConfig

FULL = "full"


@dataclass(frozen=True)
class Variant:
    """One way to draft: a context policy, its unit in tokens, and a budget in tokens that includes the newest ones.

    `full` (the control) reads the whole context through the same sparse path; its unit and budget, and the unit of
    `window`, mean nothing and are 0.
    """

    policy: str
    granularity: int
    budget: int


@dataclass(frozen=True)
class Setting:
    """What all variants share.

    Attributes:
        page_size: Tokens per page.
        recent_pages: Newest pages in every budget.
        round_drafts: Drafts of the round before, all accepted; its verify row makes the lists.
        depth: Drafts per position.
        temperature: Of drafts and targets.
        together: Positions measured in the same forwards.
        control_every: The control runs at every n-th position only: it reads about ten times as much as the others.
        model_text: Whether continuations are drawn from the model (full context) instead of being the text's own.
        seed: Of those draws.
    """

    page_size: int = 16
    recent_pages: int = 8
    round_drafts: int = 8
    depth: int = 16
    temperature: float = 0.8
    together: int = 20
    control_every: int = 5
    model_text: bool = False
    seed: int = 0

    @property
    def span(self) -> int:
        """Tokens used at a position: the last committed one, the round's drafts, and the forced continuation."""
        return 1 + self.round_drafts + self.depth

    @property
    def own_pages(self) -> int:
        """Pages that hold a position's span, wherever in its first page it begins."""
        return self.span // self.page_size + 2

    def config(self, variant: Variant) -> AspireConfig:
        """The variant as a configuration whose budget is a fixed number of tokens."""
        full = variant.policy == FULL
        return AspireConfig(
            page_size=self.page_size,
            sparsity=1.0 if full else 1e-9,
            min_pages=self.recent_pages if full else variant.budget // self.page_size,
            recent_pages=self.recent_pages,
            context="window" if full else variant.policy,
            granularity=variant.granularity or 1,
        )


@dataclass(frozen=True)
class Measured:
    """A variant on one text.

    Attributes:
        positions: Where.
        acceptance: `[positions, depth]`, sum(min(p, q)).
        tokens_read: KV tokens that a draft row reads, averaged over layers, depths and positions.
    """

    positions: list[int]
    acceptance: Tensor
    tokens_read: float


POLICIES = ("verify", "hybrid", "refresh", "window")


def grid(
    budgets: Sequence[int],
    granularities: Sequence[int],
    verify_budgets: Sequence[int],
    policies: Sequence[str] = POLICIES,
) -> list[Variant]:
    """Policies at every granularity and budget, and the control. Equal policies and budgets stand side by side.

    `verify` is always there with single tokens: the others are compared with it.
    `verify_budgets` are further ones of `verify` with single tokens: a policy with a refresh layer reads more than its
    budget, and is to be compared with one that reads as much.
    """
    scored = [
        Variant(policy, granularity, budget)
        for policy in POLICIES
        for budget in budgets
        for granularity in (granularities if policy in policies else (1,))
        if policy == "verify" or (policy in policies and policy != "window")
    ]
    further = [Variant("verify", 1, budget) for budget in verify_budgets if budget not in budgets]
    windows = [Variant("window", 0, budget) for budget in budgets if "window" in policies]
    return [*scored, *further, *windows, Variant(FULL, 0, 0)]
