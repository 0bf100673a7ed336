"""The smallest real use: `python examples/quickstart.py [MODEL]`.

MODEL is a hub name or a directory; without it, the packaged SmolLM2 is used. `load_model` is a shortcut for
AutoModelForCausalLM and AutoTokenizer; any model and tokenizer of Transformers will do.
"""

import inspect
import json
import sys

import hf_aspire
from hf_aspire.commands.models import load_model

hf_aspire.enable()  # from here on, every model knows generate(..., assistant="aspire")

loaded = load_model(sys.argv[1] if len(sys.argv) > 1 else None)
prompts = [
    "What is a heap, and what is it good for?",
    inspect.getsource(json) + "\n\nExplain what this Python module does.",
]
inputs = loaded.batch(prompts)  # padded on the left, as for plain generate
output = loaded.model.generate(
    **inputs, max_new_tokens=32, do_sample=False, assistant="aspire", return_dict_in_generate=True
)

for row in output.sequences[:, inputs["input_ids"].shape[1] :]:
    print(loaded.tokenizer.decode(row, skip_special_tokens=True), end="\n\n")
print(output.aspire_stats.summary())
