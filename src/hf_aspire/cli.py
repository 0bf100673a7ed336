"""The `hf-aspire` command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.markup import escape

from .commands.answer import run_answer
from .commands.bench import Workload, run_bench
from .commands.demo import run_demo
from .commands.doctor import run_doctor
from .commands.documents import documents
from .commands.models import load_model, resolve_device
from .config import AspireConfig

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)

Model = Annotated[str | None, typer.Option(help="Hub name or directory; default: the packaged SmolLM2-135M-Instruct.")]
Gguf = Annotated[str | None, typer.Option(help="GGUF file: a path, or a file name within --model.")]
Device = Annotated[str, typer.Option(help="Torch device; auto: the first GPU, if there is one.")]
Dtype = Annotated[str, typer.Option(help="Dtype of the weights; auto: float32 on a CPU, else as saved.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Most new tokens per request.")]


@app.callback()
def main() -> None:
    """Lossless batched self-speculative decoding for Hugging Face Transformers."""
    transformers.logging.set_verbosity_error()


@app.command()
def demo(
    model: Model = None,
    gguf: Gguf = None,
    max_new_tokens: NewTokens = 96,
    picture: Annotated[Path, typer.Option(help="Where to write the timeline.")] = Path("demo_timeline.png"),
) -> None:
    """Answer four real documents in one batch: plain generate, ours without speculation, ASPIRE.

    Fails if any token differs, except where plain's own two best logits are closer than float32 can tell apart.
    """
    console = _console()
    with _readable_errors(console):
        loaded = load_model(model, gguf, device="cpu", dtype="float32")
        identical = run_demo(loaded, documents(), max_new_tokens, picture, console)
    raise typer.Exit(0 if identical else 1)


@app.command()
def generate(
    prompt_file: Annotated[list[Path], typer.Option(help="A prompt; repeat it for a batch.", exists=True)],
    model: Model = None,
    gguf: Gguf = None,
    max_new_tokens: NewTokens = 128,
    chat: Annotated[bool | None, typer.Option(help="Use the chat template; default: if there is one.")] = None,
    sample: Annotated[bool, typer.Option(help="Sample with the model's own settings; default: greedy.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the samples.")] = None,
    schedule: Annotated[str, typer.Option(help="AspireConfig.schedule.")] = AspireConfig.schedule,
    sparsity: Annotated[float, typer.Option(help="AspireConfig.sparsity.")] = AspireConfig.sparsity,
    min_pages: Annotated[int, typer.Option(help="AspireConfig.min_pages.")] = AspireConfig.min_pages,
    picture: Annotated[Path | None, typer.Option(help="Write the timeline to this file.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Continue prompts in one batch and print the texts and what it took. A single text is streamed."""
    console = _console()
    with _readable_errors(console):
        config = AspireConfig(
            schedule=schedule,
            sparsity=sparsity,
            min_pages=min_pages,
            recent_pages=min(AspireConfig.recent_pages, min_pages),
            seed=seed,
            progress=len(prompt_file) > 1,
        )
        loaded = load_model(model, gguf, device, dtype)
        prompts = [path.read_text(encoding="utf-8") for path in prompt_file]
        stats = run_answer(loaded, prompts, max_new_tokens, config, console, chat=chat, sample=sample)
        if picture is not None:
            stats.plot(picture)


@app.command()
def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer tokens and repetitions: minutes on two cores.")
    ] = False,
    model: Model = None,
    gguf: Gguf = None,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    context: Annotated[int, typer.Option(min=2, help="Prompt tokens per row.")] = 3000,
    max_new_tokens: Annotated[int | None, typer.Option(min=2, help="Default: 256, with --quick 48.")] = None,
    repetitions: Annotated[int | None, typer.Option(min=1, help="Default: 7, with --quick 3.")] = None,
    sample: Annotated[bool, typer.Option(help="Sample, so that the rows differ; default: greedy, all alike.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure decode tokens/s of plain generate, the autoregressive schedule and ASPIRE, in turns."""
    console = _console()
    with _readable_errors(console):
        loaded = load_model(model, gguf, device, dtype)
        new_tokens = max_new_tokens or (48 if quick else 256)
        turns = repetitions or (3 if quick else 7)
        run_bench(loaded, Workload(batch, context, new_tokens, turns, sample), console)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(help="Hub name or directory; only its configuration is read.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Show versions, device, backend, bandwidth, whether a model is supported and how many tokens fit."""
    console = _console()
    with _readable_errors(console):
        run_doctor(model, resolve_device(device), dtype, console)


def _console() -> Console:
    """A console that does not squeeze tables to 80 columns where it writes to a file or a log."""
    return Console() if sys.stdout.isatty() else Console(width=120)


@contextmanager
def _readable_errors(console: Console) -> Iterator[None]:
    """Errors that say what is wrong with the request are printed without a traceback."""
    try:
        yield
    except (ValueError, OSError, ImportError, torch.OutOfMemoryError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from error
