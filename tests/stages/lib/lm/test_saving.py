"""A saved model is nothing but that model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.lora import add_adapters
from stages.lib.lm.saving import save_trained


class Tokenizer:
    """Saves nothing."""

    def save_pretrained(self, _: Path) -> None:
        pass


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_what_a_killed_process_has_left_is_no_part_of_it(
    tiny_lm: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    models: dict[str, Callable[[], Any]] = {
        "adapter": lambda: add_adapters(tiny_lm(), LoraParams(r=2), "CAUSAL_LM"),
        "model": tiny_lm,
    }
    folders = [tmp_path / name for name in ("new", "again")]
    left = folders[1] / ".adapter_config.json.125fb7c1.tmp"
    left.parent.mkdir()
    left.write_text('{"alpha_pattern": ')
    for folder in folders:
        save_trained(models[kind](), Tokenizer(), folder)  # type: ignore[arg-type]
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1] and names[0]
