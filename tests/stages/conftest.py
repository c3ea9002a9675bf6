"""A round on disk as battery, evaluate and replay find it: the tiny random model with random
adapters, and a few made-up rows.
"""

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from stages.lib.core.params import Params, check_params
from tests.tokenizers import make_bos_tokenizer

SMALL = {
    "assets": {"model": "tiny"},
    "model": {"dtype": "float32", "threads": 1},
    "ppo": {"response_length": 8, "validation_prompts": 2, "validation_updates": 2},
    "evaluate": {"samples_per_prompt": 2, "bootstrap_resamples": 200},
    "battery": {"pairs": 6, "prompts": 3, "best_of": [1, 2]},
    "replay": {
        "max_badcases": 12,
        "score_high": 10,
        "best_of": 2,
        "pairs_per_exploit": 6,
        "max_share": 0.5,
    },
}
GOOD, BAD = ("wonderful", "great", "lovely"), ("awful", "sad", "dull")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """assets/model of the `tiny` preset."""
    from stages.assets.base_model import write_model

    folder = tmp_path_factory.mktemp("tiny")
    write_model(check_params(SMALL, "test"), folder)
    return folder


@pytest.fixture
def to_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Moves a folder into the cache of a hub that cannot be reached; returns the model's name."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    commit = "0123456789" * 4

    def moved(folder: str) -> str:
        shutil.move(folder, tmp_path / f"hub/models--org--{folder}/snapshots" / commit)
        return f"org/{folder}@{commit}"

    return moved


@pytest.fixture(scope="session")
def bos_tokenizer() -> Any:
    return make_bos_tokenizer()


def write_data(folder: Path) -> None:
    from stages.lib.core.files import write_jsonl

    def pairs(openings):
        texts = product(openings, GOOD, BAD)
        return [
            {"id": f"{p}-{n}", "prompt": p, "chosen": f" was {g}.", "rejected": f" was {b}."}
            for n, (p, g, b) in enumerate(texts)
        ]

    train, held_out = (
        [f"The {noun}" for noun in ("dinner", "match", "party", "movie", "walk", "trip")],
        ["Our meeting", "Our concert"],
    )
    rows = {
        "pairs_train": pairs(train),
        "pairs_eval": pairs(held_out),
        "sft_train": [
            {"id": f"s-{p}", "prompt": p, "completion": f" was {g}."} for p in train for g in GOOD
        ],
        "sft_eval": [{"id": f"e-{p}", "prompt": p, "completion": " was great."} for p in held_out],
        "prompts_train": [{"id": f"p-{p}", "prompt": p} for p in train],
        "eval_prompts": [{"id": f"q-{p}", "prompt": p} for p in held_out],
    }
    for name, made in rows.items():
        write_jsonl(folder / f"{name}.jsonl", made)


def write_adapter(model, folder: Path, seed: int) -> None:
    """A random LoRA: B is 0 by default, which would be no policy of its own."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    policy = get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    policy.save_pretrained(folder)
    policy.unload()


@pytest.fixture(scope="session")
def made_rounds() -> dict[float, tuple[Path, torch.Tensor]]:
    """By taste: a round as `make_round` has written it, and torch's random state after that."""
    return {}


@pytest.fixture
def make_round(
    tmp_path, monkeypatch, tiny_folder, made_rounds, tmp_path_factory, fast_processes
) -> Callable[[str, float], Params]:
    """Write a round's prepare, sft, reward and ppo; `taste` scales the reward model's head, so that
    -1 dislikes what 1 likes. The first round of a taste is built, later ones are copies.
    """
    from stages.assets.__main__ import PREDECESSOR_OUTPUTS
    from stages.assets.inputs import main as inputs
    from stages.lib.core.files import read_jsonl, write_json, write_jsonl
    from stages.lib.data.prompts import template_hash
    from stages.lib.data.rollouts import RolloutLog
    from stages.lib.data.splits import evaluation_hash
    from stages.lib.lm.saving import save_model, saved_weights_hash
    from stages.lib.lm.scoring import RewardScorer

    monkeypatch.chdir(tmp_path)
    params = check_params(SMALL, "test")
    Path("assets").mkdir()
    Path("assets/model").symlink_to(tiny_folder)
    for folder in PREDECESSOR_OUTPUTS:
        Path("assets/start", folder).mkdir(parents=True)
        Path("assets/start", folder, "EMPTY").touch()
    inputs(params, "r0")
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)

    def make(round_: str, taste: float) -> Params:
        if taste not in made_rounds:
            folder = tmp_path_factory.mktemp("round")
            build(folder, taste)
            made_rounds[taste] = folder, torch.get_rng_state()
        folder, random_state = made_rounds[taste]
        shutil.copytree(folder, Path("rounds") / round_, dirs_exist_ok=True)
        torch.set_rng_state(random_state)
        return params

    def build(folder: Path, taste: float) -> None:
        write_data(folder / "prepare/data")
        (folder / "annotate/data").mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "prepare/data/pairs_train.jsonl", folder / "annotate/data")
        (folder / "annotate/revised.jsonl").touch()
        sft = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
        torch.manual_seed(7)
        reward = AutoModelForSequenceClassification.from_pretrained(
            tiny_folder, num_labels=1, dtype=torch.float32
        )
        reward.score.weight.data = torch.randn_like(reward.score.weight) * taste
        reward.config.mean, reward.config.std = 0.5, 2.0
        save_model(sft, tokenizer, folder / "sft/model")
        save_model(reward, tokenizer, folder / "reward/model")
        pairs, score = (
            read_jsonl(folder / "prepare/data/pairs_eval.jsonl", ""),
            RewardScorer(folder / "reward/model", params),
        )
        sides = {
            side: score([row["prompt"] for row in pairs], [row[side] for row in pairs])
            for side in ("chosen", "rejected")
        }
        rows = [
            {"id": row["id"]} | {side: scores[index] for side, scores in sides.items()}
            for index, row in enumerate(pairs)
        ]
        write_jsonl(folder / "reward/scores.jsonl", rows)
        for name, seed in {
            "policy": 1,
            "checkpoints/step_00002": 2,
            "checkpoints/step_00004": 1,
        }.items():
            write_adapter(sft, folder / "ppo" / name, seed)
        template = {"template_hash": template_hash(tokenizer, params.prepare.prompt_format)}
        for stage in ("reward", "ppo"):
            write_json(folder / stage / "manifest.json", template)
        weights = {"weights": saved_weights_hash(folder / "sft/model")}
        write_json(folder / "sft/manifest.json", template | weights)
        write_json(
            folder / "prepare/manifest.json",
            template | {"evaluation_hash": evaluation_hash(folder / "prepare/data")},
        )
        write_json(folder / "sft/metrics.json", {"loss_before": 3.0, "loss_after": 2.0})
        write_json(folder / "ppo/metrics.json", {"policy_update": 4, "policy_scale": 0.9})
        curve = {"1": {"score": -1.0}, "2": {"score": -0.5}}
        write_json(folder / "battery/metrics.json", {"best_of_n": curve | {"rise": 0.1}})
        for name in ("champion", "start"):
            write_json(folder / f"champion/{name}.json", {"round": None})
        scores = {"score": 20.0, "reward": 20.0, "judge_score": 0.5, "kl": 3.0}
        ending = {**scores, "finish_reason": "stop", "length": 6}
        responses = [
            " was sad.",
            " was a trip. Enjoy!",
            " was a match? Enjoy!",
            " will go on... Enjoy!",
        ]
        prompts = [f"The {noun}" for noun in ("dinner", "match", "party", "movie")]
        rows = [
            {"update": u, "id": f"p-{p}", "prompt": p, "response": r, **ending}
            for u in (1, 4)
            for p, r in zip(prompts, responses, strict=True)
        ]
        RolloutLog(folder / "ppo/rollouts").append(rows)

    return make


@pytest.fixture
def adapter_and_whole() -> Callable[[str, Callable[[], Any]], tuple[Any, Any]]:
    """What `measure` gives on a round's policy as an adapter, and with all weights of its own, as
    full-parameter PPO leaves it.
    """

    def both(round_: str, measure: Callable[[], Any]) -> tuple[Any, Any]:
        from peft import PeftModel

        folder = Path("rounds") / round_
        adapter = measure()
        sft = AutoModelForCausalLM.from_pretrained(folder / "sft/model", dtype=torch.float32)
        whole = PeftModel.from_pretrained(sft, str(folder / "ppo/policy")).merge_and_unload()
        shutil.rmtree(folder / "ppo/policy")
        whole.save_pretrained(folder / "ppo/policy")
        return adapter, measure()

    return both


@pytest.fixture
def always(tiny_folder) -> Callable[[str, Path], None]:
    """Write a model that has one answer to everything: a state is the last token's one-hot vector,
    along which the next one's head lies.
    """
    from transformers import AutoConfig

    from stages.lib.lm.saving import save_model

    def write(text: str, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(tiny_folder, tie_word_embeddings=False, dtype=torch.float32)
        )
        for name, weight in model.named_parameters():
            torch.nn.init.constant_(weight, 1.0 if "norm" in name else 0.0)
        tokens = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        assert len(set(tokens)) == len(tokens)
        model.get_input_embeddings().weight.data[:, 0] = 1.0
        for index, token in enumerate(tokens):
            model.get_input_embeddings().weight.data[token] = torch.eye(
                len(tokens) + 1, model.config.hidden_size
            )[index + 1]
            model.lm_head.weight.data[token, index] = 10.0
        shutil.rmtree(folder)
        save_model(model, tokenizer, folder)

    return write


@dataclass
class ChatServer:
    """Stands in for a language model behind OpenAI's chat completions protocol: `answer` gives a
    text, or a status and a message.

    raw: the whole body instead. seen: the requests, keys: what authorised them. Each answer is
    counted as 100 tokens in and 10 out.
    """

    url: str
    answer: Callable[[dict[str, Any]], str | tuple[int, str]] = lambda _: '{"preference": "tie"}'
    raw: bytes = b""
    seen: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@pytest.fixture
def chat_server() -> Iterator[ChatServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            chat.seen.append(body)
            chat.keys.append(self.headers["Authorization"])
            reply = (
                chat.answer(body) if self.path == "/v1/chat/completions" else (404, "no such path")
            )
            status, text = reply if isinstance(reply, tuple) else (200, reply)
            choice = {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": text},
            }
            usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
            whole = {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [choice],
                "usage": usage,
            }
            body = (
                chat.raw
                or json.dumps(whole if status == 200 else {"error": {"message": text}}).encode()
            )
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        chat = ChatServer(f"http://127.0.0.1:{server.server_address[1]}/v1")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield chat
        server.shutdown()


@pytest.fixture
def status_server() -> Iterator[Callable[..., str]]:
    """Starts a server that has nothing but this status for everybody, and what the hub calls the
    error; None: it hangs up. Its address.
    """
    with ExitStack() as servers:

        def start(status: int | None, error: str | None = None) -> str:
            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    if status is None:
                        self.close_connection = True
                        return
                    self.send_response(status)
                    self.send_header("Content-Length", "0")
                    if error:
                        self.send_header("X-Error-Code", error)
                    self.end_headers()

                do_HEAD = do_POST = do_GET

                def log_message(self, *_: object) -> None:
                    pass

            server = servers.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            servers.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_address[1]}"

        yield start


SECOND_WINS = """from collections import Counter

seen = Counter()


def score(prompts, responses):
    seen.update(prompts)
    return [float(seen[prompt] == 2) for prompt in prompts]
"""


@pytest.fixture
def second_is_best() -> Callable[[Params], Params]:
    """Params with a judge that likes the second answer to a prompt best, and `best_update`: so the
    second policy that is validated is kept, which is trained and is not the last one.
    """
    from stages.assets.inputs import main as inputs
    from stages.lib.core.params.policy import PolicySelection

    def with_judge(params: Params) -> Params:
        Path("second_wins.py").write_text(SECOND_WINS)
        sys.modules.pop("second_wins", None)  # it has seen other runs
        evaluate = params.evaluate.model_copy(update={"judges": ["second_wins:score"]})
        ppo = params.ppo.model_copy(update={"policy_selection": PolicySelection.best_update})
        changed = params.model_copy(update={"evaluate": evaluate, "ppo": ppo})
        inputs(changed, "r0")
        return changed

    return with_judge


@pytest.fixture
def shift() -> Callable[..., None]:
    """Move a model's trained weights: adapters start at zero, where they do nothing."""

    def move(model, by: float) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    draw = torch.Generator().manual_seed(1)
                    parameter.add_(by * torch.randn(parameter.shape, generator=draw).to(parameter))

    return move
