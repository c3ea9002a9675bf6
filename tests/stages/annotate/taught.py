"""An SFT model with known responses."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def teach(texts: list[str]) -> None:
    """Overfit the round's SFT model on `texts`: a random model writes bytes that the lexicon does
    not contain.
    """
    folder = Path("rounds/r0/sft/model")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    batch = tokenizer(
        [text + tokenizer.eos_token for text in texts], return_tensors="pt", padding=True
    )
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        model(**batch, labels=labels).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.save_pretrained(folder)
