"""A model directory for tests of programs that load one: a random Llama of 200 words and its tokenizer."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_aspire.commands.documents import long_text


def save_tiny_model(folder: Path) -> None:
    """Saves it, without a chat template and without a padding token."""
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(
        [long_text()], trainers.WordLevelTrainer(vocab_size=200, special_tokens=["<unk>", "</s>"])
    )
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=words.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
