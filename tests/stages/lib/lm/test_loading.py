"""Models whose logits are more than states times head are refused; the GPU and dtype of a stage."""

import json
import os

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import AutoModelForImageTextToText, LlamaForCausalLM

from docs.bench.families import random_model
from stages.lib.core.errors import BadInput
from stages.lib.core.launch import hide_processes
from stages.lib.core.model_folders import read_config
from stages.lib.core.params import Params
from stages.lib.core.params.shared import Dtype, ModelParams
from stages.lib.lm import loading
from stages.lib.lm.loading import resolve_dtype, setup_torch, use_one_gpu

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    ("visible", "gpus", "used"),
    [("", 2, "0"), ("3,1", 2, "3"), ("5", 1, "5"), ("", 1, "")],
)
def test_a_stage_uses_one_gpu(monkeypatch, visible, gpus, used):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not visible:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    setup_torch(Params())
    assert os.environ.get("CUDA_VISIBLE_DEVICES", "") == used


def test_torch_has_no_more_threads_than_the_cores_that_it_may_use(monkeypatch):
    """joblib reads the affinity, a container's CPU quota and this variable."""
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")
    torch.set_num_threads(2)
    setup_torch(Params())
    assert torch.get_num_threads() == 1
    setup_torch(Params(model={"threads": 2}))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as tests/conftest.py
    assert threads == 2


def test_leftovers_of_launchers_reach_no_trainer(monkeypatch):
    """A trainer of one process, in a shell of `srun`, `mpirun` or `accelerate launch`."""
    leftovers = {"OMPI_COMM_WORLD_SIZE": "2", "PMI_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"}
    leftovers |= {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.1", "SLURM_NTASKS": "2"}
    leftovers |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    for name, value in leftovers.items():
        monkeypatch.setenv(name, value)
    hide_processes()
    accelerator = Accelerator(cpu=True)
    assert (accelerator.num_processes, accelerator.gradient_accumulation_steps) == (1, 1)
    assert accelerator.distributed_type == "NO"
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(("visible", "used"), [("", "1"), ("3,GPU-7f", "GPU-7f")])
def test_each_process_of_a_stage_uses_the_gpu_of_its_number(monkeypatch, visible, used):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("RONDO_AGENT", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not visible:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    use_one_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == used
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BadInput, match="process 2 of this stage has no GPU, since 1 can be seen"):
        use_one_gpu()


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_no_emulated_bfloat16(monkeypatch, native, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: native or including_emulation,
    )
    assert resolve_dtype(Dtype.auto) is dtype


@pytest.mark.parametrize(
    ("cuda", "installed", "dtype", "expected"),
    [
        (False, True, "bfloat16", "grouped"),
        (True, True, "bfloat16", "flash_attention_2"),
        (True, True, "float32", "sdpa"),  # FlashAttention has no float32
        (True, False, "bfloat16", "sdpa"),
    ],
)
def test_attention_by_device(monkeypatch, cuda, installed, dtype, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(loading, "is_flash_attn_2_available", lambda: installed)
    assert loading.resolve_attention(ModelParams(dtype=dtype)) == expected
    assert loading.resolve_attention(ModelParams(attn_implementation="eager")) == "eager"


@pytest.mark.parametrize(
    ("installed", "flash", "sdpa", "setting", "expected"),
    [
        (True, True, True, "auto", "flash_attention_2"),
        (True, False, True, "auto", "sdpa"),
        (True, False, False, "auto", "eager"),
        (False, True, True, "auto", "sdpa"),
        (False, True, False, "auto", "eager"),  # as Gemma 2
        (True, False, True, "flash_attention_2", "flash_attention_2"),  # transformers refuses it
    ],
)
def test_a_model_gets_an_attention_that_its_code_can_do(
    monkeypatch, tiny_folder, installed, flash, sdpa, setting, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(loading, "is_flash_attn_2_available", lambda: installed)
    monkeypatch.setattr(LlamaForCausalLM, "_supports_flash_attn", flash)
    monkeypatch.setattr(LlamaForCausalLM, "_supports_sdpa", sdpa)
    params = ModelParams(dtype="bfloat16", attn_implementation=setting)
    kind, config = loading.AutoModelForCausalLM, loading.load_config(tiny_folder)
    assert loading.supported_attention(kind, config, params) == expected


@pytest.mark.parametrize(
    ("setting", "expected"), [("auto", "sdpa"), ("grouped", "grouped"), ("eager", "eager")]
)
def test_on_a_cpu_a_model_with_its_own_attention_gets_sdpa(
    monkeypatch, tiny_folder, setting, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kind, config = loading.AutoModelForCausalLM, loading.load_config(tiny_folder)
    params = ModelParams(attn_implementation=setting)
    if setting == "auto":
        assert loading.supported_attention(kind, config, params) == "grouped"
    monkeypatch.setattr(LlamaForCausalLM, "_supports_attention_backend", False)
    assert loading.supported_attention(kind, config, params) == expected


def test_a_size_per_layer_is_no_damage(tmp_path):
    config = {"intermediate_size": [96, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == config
    (tmp_path / "config.json").write_text('{"intermediate_size": [96, 0]}')
    with pytest.raises(BadInput, match=r"intermediate_size is \[96, 0\], expected 1 to"):
        read_config(tmp_path)


@pytest.mark.parametrize("family", ["gemma3", "mistral3", "qwen3_5"])
def test_the_language_model_of_one_of_texts_and_images_has_its_numbers(tmp_path, family):
    whole = AutoModelForImageTextToText.from_pretrained(random_model(family, tmp_path)).eval()
    model = loading.load_language_model_of(tmp_path, ModelParams(dtype=Dtype.float32))
    ids = torch.arange(5, 25).view(2, 10)
    torch.testing.assert_close(model(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-4)
    assert not [name for name in model.state_dict() if "vision" in name or "visual" in name]


def test_a_language_model_is_no_reward_model(tiny_folder):
    """Its score head would be random; only training starts with such a head."""
    with pytest.raises(BadInput, match=r"score\.weight is missing in its weights"):
        loading.load_reward_model(tiny_folder, ModelParams())
    assert loading.load_sequence_classifier(tiny_folder, ModelParams()).score.out_features == 1


@pytest.mark.parametrize("name", ["flash_attention_2", "flash2"])  # not installed, a typo
def test_an_attention_that_is_not_there_is_refused_by_its_key(tiny_folder, name):
    with pytest.raises(BadInput, match=rf"^model\.attn_implementation is {name}, .*`auto`$"):
        loading.load_causal_lm(tiny_folder, ModelParams(attn_implementation=name))


def test_models_load_with_the_attention_that_they_support(monkeypatch, tiny_folder):
    monkeypatch.setattr(loading, "resolve_attention", lambda params: "flash_attention_2")
    monkeypatch.setattr(LlamaForCausalLM, "_supports_flash_attn", False)
    model = loading.load_causal_lm(tiny_folder, ModelParams())
    assert model.config._attn_implementation == "sdpa"


def test_what_earlier_work_left_in_the_heap_is_freed_before_a_model_is_loaded(
    monkeypatch, tiny_folder
):
    steps: list[str] = []
    load = loading.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(loading, "trim_heap", lambda: steps.append("trimmed"))
    monkeypatch.setattr(
        loading.AutoModelForCausalLM,
        "from_pretrained",
        lambda *args, **kwargs: steps.append("loaded") or load(*args, **kwargs),
    )
    loading.load_causal_lm(tiny_folder, ModelParams())
    assert steps == ["trimmed", "loaded"]
