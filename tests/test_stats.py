"""Figures, summary and picture of a call, from synthetic records whose totals are known."""

import builtins
from pathlib import Path

import pytest

from hf_aspire.config import AspireConfig
from hf_aspire.request import RowKind
from hf_aspire.stats import AspireStats, StatsRecorder
from hf_aspire.timeline import RowRecord


def prefill(request: int, queries: int, last: bool = True) -> RowRecord:
    return RowRecord(request, RowKind.PREFILL, queries, committed=int(last))


def draft(request: int) -> RowRecord:
    return RowRecord(request, RowKind.DRAFT, 1)


def verify(request: int, drafted: int, accepted: int, committed: int | None = None) -> RowRecord:
    kept = accepted + 1 if committed is None else committed
    return RowRecord(request, RowKind.VERIFY, drafted + 1, drafted, accepted, kept)


def decode(request: int) -> RowRecord:
    return RowRecord(request, RowKind.DECODE, 1, committed=1)


def record(prompts: list[int], steps: list[tuple[float, float, list[RowRecord]]]) -> AspireStats:
    recorder = StatsRecorder(AspireConfig(), prompts)
    for start, end, rows in steps:
        recorder.step(start, end, rows)
    return recorder.finish()


@pytest.fixture
def stats() -> AspireStats:
    """Row 0 keeps 1 of 2 drafts, then stops after 2 of 2; row 1 keeps 1 of 1, then decodes plainly."""
    return record(
        [900, 20],
        [
            (50.0, 51.0, [prefill(0, 512, last=False)]),
            (51.0, 53.0, [prefill(0, 388), prefill(1, 20)]),
            (53.0, 53.5, [draft(0), draft(1)]),
            (53.5, 54.0, [draft(0), verify(1, 1, 1)]),
            (54.0, 54.5, [verify(0, 2, 1), decode(1)]),
            (54.5, 55.0, [draft(0)]),
            (55.0, 55.5, [draft(0)]),
            (55.5, 57.0, [verify(0, 2, 2, committed=2)]),
        ],
    )


def test_counts_per_request(stats: AspireStats) -> None:
    assert stats.prompt_tokens == [900, 20]
    assert stats.rounds == [[(2, 1), (2, 2)], [(1, 1), (0, 0)]]
    assert (stats.drafted, stats.accepted, stats.committed) == ([4, 1], [3, 1], [5, 4])
    # One token from the prompt and one per round on top of what was accepted, less the one that a stop cut off.
    assert [1 + sum(accepted + 1 for _, accepted in rounds) for rounds in stats.rounds] == [5 + 1, 4]


def test_counts_per_step(stats: AspireStats) -> None:
    assert (stats.forwards, stats.steps, stats.mixed_steps) == (8, 6, 1)
    assert (stats.rows_drafted, stats.rows_verified, stats.rows_decoded) == (5, 3, 1)
    assert [len(step.rows) for step in stats.timeline] == [1, 2, 2, 2, 2, 1, 1, 1]
    assert (stats.timeline[0].start, stats.timeline[-1].end) == (0.0, 7.0)


def test_rates(stats: AspireStats) -> None:
    assert stats.acceptance_rate == pytest.approx(4 / 5)
    assert stats.tokens_per_verify == pytest.approx((2 + 2 + 2) / 3)
    assert (stats.seconds, stats.prefill_seconds) == pytest.approx((7.0, 3.0))
    assert stats.tokens_per_second == pytest.approx(9 / 7)
    assert stats.decode_tokens_per_second == pytest.approx(7 / 4)
    assert stats.forwards_per_token == pytest.approx(8 / 9)


def test_a_late_prompt_restarts_the_decode_rate_and_counts_as_prefill() -> None:
    late = record(
        [4, 4], [(0, 1, [prefill(0, 4)]), (1, 2, [decode(0), prefill(1, 4)]), (2, 4, [decode(0), decode(1)])]
    )
    assert (late.forwards, late.steps) == (3, 2)
    assert late.prefill_seconds == pytest.approx(2.0)
    assert late.decode_tokens_per_second == pytest.approx(2 / 2)


def test_a_recorder_is_readable_while_it_counts() -> None:
    recorder = StatsRecorder(AspireConfig(), [3])
    recorder.step(0.0, 1.0, [prefill(0, 3)])
    assert recorder.stats.committed == [1]
    recorder.step(1.0, 2.0, [verify(0, 2, 1)])
    assert (recorder.stats.committed, recorder.stats.tokens_per_second) == ([3], pytest.approx(1.5))


def test_plain_decoding_has_no_acceptance() -> None:
    plain = record([4], [(0, 1, [prefill(0, 4)]), (1, 2, [decode(0)])])
    assert (plain.acceptance_rate, plain.tokens_per_verify, plain.mixed_steps) == (0.0, 0.0, 0)
    assert "no drafts" in plain.summary()


def test_summary_shows_every_request_and_the_totals(stats: AspireStats) -> None:
    lines = stats.summary().splitlines()
    assert lines[2].split() == ["0", "900", "5", "2", "1.50", "75.0%"]
    assert lines[3].split() == ["1", "20", "4", "1", "1.00", "100.0%"]
    totals = " ".join(lines[4:])
    for words in (
        "batch of 2: 9 new tokens in 7.00 s",
        "1.3 tokens/s",
        "8 forwards (0.89 per token)",
        "1 of them mixed",
    ):
        assert words in totals
    assert "80.0% of 5 drafts accepted, 2.00 tokens per check" in totals


@pytest.mark.parametrize("rounds", [1, 40])
def test_plot_writes_a_picture_with_every_bar(rounds: int, tmp_path: Path) -> None:
    steps = [(0.0, 1.0, [prefill(0, 8), prefill(1, 8)])]
    for index in range(rounds):
        time = 1.0 + 2 * index
        steps += [(time, time + 1, [draft(0), decode(1)]), (time + 1, time + 2, [verify(0, 1, index % 2), draft(1)])]
    stats = record([8, 8], steps)
    stats.plot(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    stats.plot(tmp_path / "timeline.svg")
    picture = (tmp_path / "timeline.svg").read_text()
    assert "<!-- 0/1 -->" in picture
    assert ("<!-- 1/1 -->" in picture) == (rounds > 1)
    assert ("Close-up" in picture) == (rounds > 1)


def test_plot_of_a_call_without_steps(tmp_path: Path) -> None:
    record([3], []).plot(tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0


def test_plot_names_the_extra_without_matplotlib(
    stats: AspireStats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"hf-aspire\[demo\]"):
        stats.plot(tmp_path / "timeline.png")
