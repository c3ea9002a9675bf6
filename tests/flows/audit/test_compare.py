"""Comparisons of small models, files and servers whose outcome is known."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.cli import exit_code
from stages.lib.core.params import Params
from stages.lib.lm.loading import load_causal_lm
from tests.stages.conftest import write_adapter

PROMPTS = [f"The {thing} {number}" for number in range(6) for thing in ("dinner", "song")]
SMALL = (
    *("--set=model.dtype=float32", "--set=ppo.response_length=5", "--set=model.threads=1"),
    "--set=evaluate.bootstrap_resamples=200",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, without a project: prompts, and responses of two models to them."""
    monkeypatch.chdir(tmp_path)
    topics = [{"prompt": prompt, "topic": prompt.split()[1]} for prompt in PROMPTS]
    write("prompts.jsonl", topics)
    # the second one is better about songs alone
    texts = {"plain": {}, "second": {"song": " was wonderful."}}
    for name, by_topic in texts.items():
        rows = [
            {"prompt": row["prompt"], "completion": by_topic.get(row["topic"], " was a thing.")}
            for row in topics
        ]
        write(f"{name}.jsonl", rows + rows)
    return tmp_path


def write(name: str, rows: list[dict[str, str]]) -> None:
    Path(name).write_text("\n".join(map(json.dumps, rows)))


def compare(*words: str) -> dict[str, Any]:
    """The metrics of the comparison."""
    assert exit_code(["compare-models", *words, "--prompts=prompts.jsonl", *SMALL]) == 0
    metrics: dict[str, Any] = json.loads(Path("comparison/comparison.json").read_text())["metrics"]
    return metrics


@pytest.mark.usefixtures("folder")
def test_the_second_file_wins_where_its_texts_are_better(capsys) -> None:
    metrics = compare("plain.jsonl", "second.jsonl", "--slice=topic")
    against = metrics["B_against_A"]
    assert against["win_rate"] == against["win_rate_lexicon"] == 0.75  # half of them won, half tied
    slices = {name: (one["win_rate"], one["prompts"]) for name, one in against["slices"].items()}
    assert slices == {"dinner": (0.5, 6), "song": (1.0, 6)}
    assert metrics["B"]["words"] == 2.5 and metrics["B"]["length"] is None
    printed = capsys.readouterr().out
    assert "B against A: wins 0.750 [" in printed
    assert "song, 6 prompts: wins 1.000 [1.000, 1.000]" in printed
    assert "at equal KL: not measured: KL needs --reference" in printed
    page = Path("comparison/comparison.html").read_text()
    assert "<ins>wonderful.</ins>" in page and page.count('data-show="won"') == 12


@pytest.fixture
def adapters(folder, tiny_folder) -> tuple[str, str]:
    """A small and a large change of the tiny model, and `back`, the opposite of the large one."""
    for name, factor in (("near", 0.1), ("far", 0.3), ("back", -0.3)):
        torch.manual_seed(0)
        model = load_causal_lm(tiny_folder, Params().model)
        write_adapter(model, folder / name, 0)
        path = folder / name / "adapter_model.safetensors"
        scale_adapter(path, factor)
    return "near", "far"


def scale_adapter(path: Path, factor: float) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    scaled = {
        name: weight * factor if "lora_B" in name else weight for name, weight in weights.items()
    }
    save_file(scaled, path, {"format": "pt"})


def test_kl_is_that_of_the_distributions_and_a_model_ties_with_itself(
    adapters, tiny_folder
) -> None:
    near, far = adapters
    base = str(tiny_folder)
    metrics = compare(near, far, f"--reference={base}", "--set=evaluate.samples_per_prompt=1")
    assert 0 < metrics["A"]["kl"] < metrics["B"]["kl"] and metrics["reference"]["kl"] == 0.0
    equal = metrics["equal_kl"]
    assert (equal["scaled"], equal["scale"] < 1) == ("B", True)
    assert equal["kl"] == pytest.approx(metrics["A"]["kl"], rel=0.1)
    # the near adapter is a third of the far one
    assert equal["scale"] == pytest.approx(1 / 3, rel=0.1)
    assert equal["win_rate"] == pytest.approx(0.5, abs=0.1)
    same = compare(far, far, f"--reference={base}", "--max-prompts=3")["B_against_A"]
    assert (same["win_rate"], same["win_rate_low"], same["prompts_needed"]) == (0.5, 0.5, None)


@pytest.fixture
def by_letters(folder, monkeypatch: pytest.MonkeyPatch) -> str:
    """A judge that hardly ever ties."""
    monkeypatch.syspath_prepend(folder)
    Path("letters.py").write_text(
        "def score(prompts, texts):\n    return [sum(map(ord, t)) % 97.0 for t in texts]"
    )
    return "letters:score"


def test_equal_kl_has_the_sides_of_the_whole_and_each_pass_its_own_numbers(
    adapters, by_letters, tiny_folder
) -> None:
    """Opposite changes have nearly the same KL, so scaling changes few of the outcomes."""
    metrics = compare("far", "back", f"--reference={tiny_folder}", f"--judge={by_letters}")
    direct, equal = (metrics[name]["win_rate"] for name in ("B_against_A", "equal_kl"))
    assert 0.5 != direct == pytest.approx(equal, abs=abs(direct - 0.5) / 2)
    outcomes = metrics["B_against_A"]["outcomes"]
    assert outcomes[: len(PROMPTS)] != outcomes[len(PROMPTS) :]


def test_a_model_of_other_tokens_has_no_kl(folder, tiny_folder) -> None:
    shutil.copytree(tiny_folder, "other")
    path = Path("other/tokenizer.json")
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    metrics = compare(str(tiny_folder), "other", f"--reference={tiny_folder}", "--max-prompts=2")
    assert (metrics["A"]["kl"], metrics["B"]["kl"]) == (0.0, None)
    assert "models with its tokens" in metrics["equal_kl"]["not_measured"]


def test_the_kl_of_a_model_is_that_of_transformers_logits(folder, tiny_folder) -> None:
    """Two words of the page: the exact KL at each token of a response, summed."""
    reference = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    other = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    torch.manual_seed(1)
    for weight in other.parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    other.save_pretrained(folder / "other")
    tokenizer.save_pretrained(folder / "other")
    words = ("other", str(tiny_folder), f"--reference={tiny_folder}", "--max-prompts=1")
    metrics = compare(*words, "--set=evaluate.samples_per_prompt=1")
    assert metrics["B"]["kl"] == 0.0 and metrics["B"] == metrics["reference"]
    assert "A_against_reference" in metrics and "B_against_reference" not in metrics
    assert metrics["equal_kl"] == {"not_measured": "one of them is the reference"}

    from stages.lib.core.params import check_params
    from stages.lib.lm.responses import responder

    settings = {"model": {"dtype": "float32"}, "ppo": {"response_length": 5}}
    [response] = responder(check_params(settings, "test"), tokenizer)(other, PROMPTS[:1], 0)
    ids = torch.tensor([response.prompt_ids + response.tokens])
    first = len(response.prompt_ids) - 1
    with torch.no_grad():
        p, q = (model(ids).logits[0, first:-1].log_softmax(-1) for model in (other, reference))
    assert metrics["A"]["kl"] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-4)


def test_a_chat_server_answers_with_seeds_and_lengths(folder, chat_server) -> None:
    chat_server.answer = lambda body: f" was great {body['seed']}."
    metrics = compare("plain.jsonl", f"{chat_server.url}#mine", "--set=seed=3")
    assert metrics["B_against_A"]["win_rate"] == 1.0
    request = chat_server.seen[0]
    assert (request["model"], request["max_tokens"], request["temperature"]) == ("mine", 5, 1.0)
    assert {one["seed"] for one in chat_server.seen} == {3000, 3001}
    assert len(chat_server.seen) == 2 * len(PROMPTS)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["plain.jsonl", "nowhere"], "B nowhere: no such file or folder here"),
        (["plain.jsonl", "http://localhost/v1"], "expected http://HOST/v1#MODEL"),
        (["plain.jsonl", "few.jsonl"], "few.jsonl: 1 responses to the prompt 'The dinner 0'"),
        (["plain.jsonl", "adapter"], "adapter: an adapter of gone, which is no folder here"),
        (["plain.jsonl", "classifier"], "config.json says BertForSequenceClassification, expected"),
        (
            ["empty", "plain.jsonl"],
            "empty: no config.json: expected the folder of a language model",
        ),
        (["plain.jsonl", "plain.jsonl", "--max-prompts=0"], "--max-prompts 0: expected at least 1"),
        (["plain.jsonl", "plain.jsonl", "--slice=topics"], "no column topics (--slice)"),
        (["plain.jsonl", "plain.jsonl", "--judge=nowhere"], "nowhere: no such file or folder"),
    ],
)
def test_what_cannot_be_compared_is_named(words, expected, capsys) -> None:
    write("few.jsonl", [{"prompt": PROMPTS[0], "completion": " was."}])
    for name in ("adapter", "classifier", "empty"):
        Path(name).mkdir()
    Path("classifier/config.json").write_text(
        '{"architectures": ["BertForSequenceClassification"]}'
    )
    Path("adapter/adapter_config.json").write_text('{"base_model_name_or_path": "gone"}')
    code = exit_code(["compare-models", *words, "--prompts", "prompts.jsonl", *SMALL])
    assert (code, Path("comparison").exists()) == (2, False)
    assert expected in capsys.readouterr().err
