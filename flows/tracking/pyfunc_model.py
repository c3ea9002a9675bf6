"""The code of Rondo's models in MLflow: a policy or SFT model generates, a reward model scores.

MLflow stores this file with each model (models from code), and in `code` the modules of `stages`
that it imports. So the model computes what the stages compute, on a machine without this project.
The weights are in the model's folder `weights`; those that an adapter adapts are in the LoggedModel
of its SFT model.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlflow
from mlflow.models import ModelConfig, set_model
from mlflow.pyfunc.model import PythonModel, PythonModelContext
from pandas import DataFrame

# torch and `stages` are imported where they are used: MLflow runs this file when it saves a model.

WEIGHTS = "weights"  # subfolder of a model


class _Model(PythonModel):
    """Settings are sections of params.yaml: those of the run that trained the model."""

    tokenizer: Any

    def load_context(self, context: PythonModelContext) -> None:
        from stages.lib.core.params import check_params

        config = context.model_config
        sections = {name: config[name] for name in config.keys() - {"task", "sft_model"}}
        self.params = check_params(sections, "the model's settings")
        whole = trained = Path(__file__).parent / WEIGHTS
        with TemporaryDirectory() as folder:
            if config["sft_model"]:
                uri = f"models:/{config['sft_model']}"
                whole = Path(mlflow.artifacts.download_artifacts(uri, dst_path=folder), WEIGHTS)
            self.load(whole, trained)

    def load(self, whole: Path, trained: Path) -> None:
        """Load the model: `whole` has a whole model with its tokenizer, `trained` the adapter for
        it, or is the same folder.
        """
        raise NotImplementedError

    def encode(self, prompt: Any, response: str | None, max_length: int | None = None) -> Any:
        from stages.lib.data.prompts import encode

        messages = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
        prompt_format = self.params.prepare.prompt_format
        return encode(self.tokenizer, messages, response, prompt_format, max_length)


class TextGenerator(_Model):
    """Samples a response per prompt as the evaluation does: with its random numbers."""

    def load(self, whole: Path, trained: Path) -> None:
        from stages.lib.lm.loading import load_policy, load_tokenizer

        self.tokenizer = load_tokenizer(whole)
        self.model = load_policy(whole, trained, self.params.model)

    def predict(  # type: ignore[override]
        self, model_input: DataFrame, params: dict[str, Any] | None = None
    ) -> list[str]:
        """A response per prompt.

        Args:
            model_input: column `prompt`, a text or messages.
            params: `max_new_tokens`, `temperature`, and `seed`, which numbers the evaluation's
                samples: 1000 * seed of params.yaml is its first sample.
        """
        import torch

        from stages.lib.data.prompts import decode
        from stages.lib.lm.end_tokens import end_tokens
        from stages.lib.lm.generation import generate

        sampling = params or {}
        responses = generate(
            self.model,
            [self.encode(prompt, None)[0] for prompt in model_input["prompt"]],
            response_length=sampling["max_new_tokens"],
            temperature=sampling["temperature"],
            generator=torch.Generator().manual_seed(sampling["seed"]),
            ends=end_tokens(self.model, self.tokenizer),
        )
        return decode(self.tokenizer, responses)


class ResponseScorer(_Model):
    """Scores responses as the reward stage does: calibrated, all members of an ensemble."""

    def load(self, whole: Path, trained: Path) -> None:
        from stages.lib.lm.loading import load_any_tokenizer, load_reward_model

        self.tokenizer = load_any_tokenizer(whole)
        self.model = load_reward_model(trained, self.params.model)

    def predict(self, model_input: DataFrame) -> list[float]:  # type: ignore[override]
        """A score per row, in standard deviations above the mean of the demonstrations.

        Args:
            model_input: columns `prompt`, a text or messages, and `response`.
        """
        from stages.lib.lm.scoring import calibrate_scores, reward_scores

        encoded = (
            self.encode(prompt, response, self.params.reward.max_length)
            for prompt, response in zip(model_input["prompt"], model_input["response"], strict=True)
        )
        sequences = [prompt + response for prompt, response in encoded]
        scores = calibrate_scores(reward_scores(self.model, sequences), self.model)
        return list(map(float, scores))


set_model(TextGenerator() if ModelConfig().get("task") == "generate" else ResponseScorer())
