"""`rondo audit-reward` on reward models, a function, a server and a judge whose faults are planned.

    python docs/bench/audit_models.py            # after `make run`: makes the models, audits each
    python docs/bench/audit_models.py swapped    # one of them

It prints a Markdown table; what each is says what its audit should find. The reward models are
trained on the pairs of round r0, and all are audited on its held-out pairs. `length` and `swapped`
have other labels; `encoder` is a small BERT with words as tokens, trained by a loop of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import requests
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from stages.lib.core.files import ASSETS, read_json, stage_dir
from stages.lib.core.http_session import retrying_session
from stages.lib.core.params import load_params
from stages.lib.core.recorder import MetricLogger
from stages.lib.core.rows import SIDES, PreferencePair, read_rows
from stages.lib.data.splits import calibration_demonstrations
from stages.lib.lm.loading import load_tokenizer, setup_torch
from stages.lib.lm.saving import save_model
from stages.reward.__main__ import RewardModelTrainer, make_hard_negatives

ROUND, MODELS = "r0", Path(".rondo/audited")
PAIRS = stage_dir(ROUND, "prepare") / "data/pairs_eval.jsonl"
SFT = stage_dir(ROUND, "sft") / "model"
COLUMNS = {
    "reward.accuracy_low": "accuracy",
    "reward.accuracy - reward.baseline_tfidf": "above TF-IDF",
    "battery.length_correlation_partial": "length",
    "battery.worst_probe": "corrupted",
    "battery.worst_flip": "edited",
    "battery.worst_ending": "ending",
    "battery.best_of_n.rise_low": "best of 16",
}
EPOCHS, BATCH = 20, 32  # of the encoder

Relabel = Callable[[list[PreferencePair]], list[PreferencePair]]


def swapped(rows: list[PreferencePair]) -> list[PreferencePair]:
    return [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]


def longer_is_better(rows: list[PreferencePair]) -> list[PreferencePair]:
    """Pairs of equal lengths are left out."""
    others = [row for row in rows if len(row["chosen"]) < len(row["rejected"])]
    return [row for row in rows if len(row["chosen"]) > len(row["rejected"])] + swapped(others)


def train(relabel: Relabel, folder: Path, number: int = 0) -> None:
    """A reward model as the reward stage trains it, on other pairs; `number` changes the seed."""
    params = load_params()
    setup_torch(params)
    tokenizer = load_tokenizer(ASSETS / "model")
    people = calibration_demonstrations(ROUND, params.seed)
    trainer = RewardModelTrainer(params, tokenizer, people, MetricLogger("reward", ROUND))
    rows = relabel(read_rows(PreferencePair, training_pairs()))
    rows += make_hard_negatives(rows, params)
    save_model(trainer.train(rows, SFT, False, params.seed + number), tokenizer, folder)


def training_pairs() -> Path:
    return stage_dir(ROUND, "annotate") / "data/pairs_train.jsonl"


def train_encoder(folder: Path) -> None:
    """A BERT of two layers on words, by the Bradley-Terry loss."""
    torch.manual_seed(0)
    rows = read_rows(PreferencePair, training_pairs())
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    texts = (f"{row['prompt']}{row[side]}" for row in rows for side in SIDES)
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=special))
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=1,
        pad_token_id=0,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(EPOCHS):
        for indices in torch.randperm(len(rows)).split(BATCH):
            batch = [rows[int(i)] for i in indices]
            chosen, rejected = (
                model(
                    **tokenizer(
                        [str(row["prompt"]) for row in batch],
                        [row[side] for row in batch],
                        padding=True,
                        return_tensors="pt",
                    )
                ).logits
                for side in SIDES
            )
            optimizer.zero_grad()
            (-torch.nn.functional.logsigmoid(chosen - rejected).mean()).backward()
            optimizer.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def own_server() -> Iterator[str]:
    with server(["rondo", "serve-reward", ROUND, "--port", "8123"], "http://127.0.0.1:8123/health"):
        yield "http://127.0.0.1:8123/get_reward"


@contextmanager
def chat_server() -> Iterator[str]:
    """The model before SFT, which is an instruct model, as judge by transformers' own server."""
    command = ["transformers", "serve", str(ASSETS / "model"), "--port", "8124"]
    with server(command, "http://127.0.0.1:8124/v1/models"):
        yield "http://127.0.0.1:8124/v1"


@contextmanager
def server(command: list[str], health: str) -> Iterator[None]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with subprocess.Popen(command, env=os.environ | {"PATH": path}) as process:
        try:
            for _ in range(60):
                try:
                    if retrying_session(health, "").get(health, timeout=5).ok:
                        break
                except requests.RequestException:
                    pass
            yield
        finally:
            process.terminate()


TITLES = {
    "own": "Rondo's, of r0",
    "second": "Rondo's, of r1",
    "swapped": "trained on swapped labels",
    "length": "trained to prefer the longer text",
    "encoder": "a BERT with its own tokenizer",
    "lexicon": "a function: VADER's sentiment",
    "longest": "a function: the number of characters",
    "server": "r0's by `rondo serve-reward`",
    "judge": "the model before SFT as judge",
}
NAMED = {
    "own": str(stage_dir(ROUND, "reward") / "model"),
    "second": str(stage_dir("r1", "reward") / "model"),
    "lexicon": "stages.lib.judging.lexicon:sentiment",
    "longest": "docs.bench.audit_models:characters",
}
MADE: dict[str, Callable[[Path], None]] = {
    "swapped": partial(train, swapped),
    "length": partial(train, longer_is_better),
    "encoder": train_encoder,
}
SERVED = {"server": own_server, "judge": chat_server}


def characters(_: list[str], responses: list[str]) -> list[float]:
    return [float(len(text)) for text in responses]


def audit(named: str, out: Path) -> None:
    """Run the command; exit code 3 is a result."""
    rubric = "The better response continues the text with more positive sentiment."
    options = [
        *("--pairs", str(PAIRS), "--judge", "lexicon", "--out", str(out), "--max-minutes", "15"),
        *("--policy", str(SFT), "--set", "annotate.endpoint.model=assets/model"),
        *("--set", f"annotate.endpoint.rubric={json.dumps(rubric)}"),
    ]
    rondo = Path(sys.executable).with_name("rondo")
    code = subprocess.run([rondo, "audit-reward", named, *options]).returncode
    if code not in (0, 3):
        raise SystemExit(code)


def main() -> None:
    rows = [f"| audited | {' | '.join(COLUMNS.values())} | fails |"]
    rows.append("|---" * (len(COLUMNS) + 2) + "|")
    for name in sys.argv[1:] or TITLES:
        out, folder = MODELS / f"{name}-audit", MODELS / name
        if name in MADE and not folder.exists():
            MADE[name](folder)
        with SERVED[name]() if name in SERVED else nullcontext(NAMED.get(name, str(folder))) as it:
            audit(it, out)
        lines = {line["metric"]: line for line in read_json(out / "audit.json")["lines"]}
        values = [lines[metric]["value"] for metric in COLUMNS]
        cells = ["-" if value is None else f"{value:.2f}" for value in values]
        failed = sum(line["outcome"] == "FAIL" for line in lines.values())
        rows.append(f"| {TITLES[name]} | {' | '.join(cells)} | {failed} |")
        print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
