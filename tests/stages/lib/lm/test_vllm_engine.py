"""VllmEngine with a stand-in for vLLM itself, which needs a GPU."""

import copy
import inspect
import math
from functools import partial

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from trl.generation import vllm_client

from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.params.shared import LoraParams, ModelParams
from stages.lib.lm.end_tokens import EndTokens
from stages.lib.lm.lora import adapter_disabled, add_adapters
from stages.lib.lm.packing import unwrap_peft
from stages.lib.lm.vllm_engine import VllmEngine, check_output_layer, sampling_engine, sum_of_head
from tests.stages.lib.lm import vllm_stand_in

PROMPTS = [[5 + i, 6, 7][: 1 + i % 3] for i in range(8)]
ENDS = [2, 9, 10]
REAL_CLIENT = vllm_client.VLLMClient
USED = ModelParams(use_vllm=True)


@pytest.fixture
def vllm(monkeypatch):
    return vllm_stand_in.install(monkeypatch)


@pytest.fixture
def build(tiny_lm, tmp_path, shift, vllm):
    """A model that vLLM can load from disk, with adapters that are not zero; `r` 0: none."""

    def make(seed=0, spread=0.3, **lora):
        model = tiny_lm(seed, spread)
        folder = tmp_path / f"model-{seed}"
        model.save_pretrained(folder)
        model.name_or_path = str(folder)
        model = add_adapters(model, LoraParams(**{"r": 4, **lora}), "CAUSAL_LM").eval()
        if lora.get("r", 4):
            shift(model, 0.1)
        return model

    return make


def sampled(engine, model, seed=0, temperature=0.7):
    return engine.sample(
        model,
        PROMPTS,
        response_length=6,
        temperature=temperature,
        generator=torch.Generator().manual_seed(seed),
        ends=EndTokens(ENDS[0], tuple(ENDS[1:])),
    )


def expected(model, seed=0, temperature=0.7):
    """Each prompt alone, with its own seed from the generator."""
    seeds = torch.randint(2**31, (len(PROMPTS),), generator=torch.Generator().manual_seed(seed))
    return [
        vllm_stand_in.sample(model, [prompt], 6, temperature, number, ENDS)[0]
        for prompt, number in zip(PROMPTS, seeds.tolist(), strict=True)
    ]


def test_the_stand_in_for_trls_client_has_its_signatures():
    # taken when this file was imported, before a test puts the stand-in there
    assert REAL_CLIENT.__module__ == "trl.generation.vllm_client"
    for name in (
        "__init__",
        "init_communicator",
        "update_named_params",
        "reset_prefix_cache",
        "generate",
    ):
        signatures = [
            [
                (p.name, p.default)
                for p in inspect.signature(getattr(kind, name)).parameters.values()
            ]
            for kind in (REAL_CLIENT, vllm_stand_in.VLLMClient)
        ]
        assert signatures[0] == signatures[1]


def test_adapters_are_handed_over_and_the_weights_under_them_once(vllm, build, shift):
    policy, engine = build(top_layers=1), VllmEngine(USED)
    before = copy.deepcopy(policy.state_dict())
    first = sampled(engine, policy)
    assert first == expected(policy)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())
    shift(policy, 0.5)
    assert sampled(engine, policy) == expected(policy) != first
    assert sampled(engine, policy, seed=1) == expected(policy, seed=1)
    [llm] = vllm.engines
    assert llm.loads == 1 and llm.options["max_lora_rank"] == 16
    numbers = [request.lora_int_id for _, request in llm.requests]
    assert numbers == [1] * 8 + [2] * 8 + [3] * 8
    # adapters of earlier calls do not fill the disk
    assert [path.name for path in engine.adapter.folder.parent.iterdir()] == ["3"]


def test_without_its_adapter_the_reference_is_sampled(vllm, build):
    policy, engine = build(), VllmEngine(USED)
    assert sampled(engine, policy) == expected(policy)
    with adapter_disabled(policy) as reference:
        assert sampled(engine, reference) == expected(reference)
    assert vllm.engines[0].requests[-1][1] is None and vllm.engines[0].loads == 1
    assert sampled(engine, policy) == expected(policy)


@pytest.mark.parametrize("lora", [{"r": 0}, {"r": 4}])
def test_another_model_replaces_the_weights(vllm, build, lora):
    engine, models = VllmEngine(USED), [build(seed, **lora) for seed in (0, 1)]
    for model in (*models, models[0]):
        assert sampled(engine, model) == expected(model)
    assert vllm.engines[0].loads == 3


@pytest.mark.parametrize("lora", [{"r": 0}, {"r": 4}])
def test_a_fused_optimizer_changes_what_is_sampled(vllm, build, lora):
    model, engine = build(**lora), VllmEngine(USED)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, fused=True)  # as in stages/ppo/trainer
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    first = sampled(engine, model)
    optimizer.step()
    assert sampled(engine, model) == expected(model) != first


def test_each_prompt_has_its_own_random_numbers_from_the_generator(vllm, build):
    policy, engine = build(), VllmEngine(USED)
    first = sampled(engine, policy)
    assert sampled(engine, policy) == first
    assert sampled(engine, policy, seed=1) != first
    seeds = [params.seed for params, _ in vllm.engines[0].requests]
    assert len(set(seeds)) == 16 and seeds[:8] == seeds[8:16]


def test_the_settings_of_vllm(vllm, build):
    policy = build(r=20)
    engine = VllmEngine(USED.model_copy(update={"vllm_gpu_memory_utilization": 0.4}))
    sampled(engine, policy, temperature=0.5)
    [llm] = vllm.engines
    assert llm.options["gpu_memory_utilization"] == 0.4
    assert llm.options["max_lora_rank"] == 32  # the next that vLLM allows
    assert llm.options["max_model_len"] == policy.config.max_position_embeddings
    [temperature] = {params.temperature for params, _ in llm.requests}
    assert temperature == 0.5 and llm.model.dtype is torch.float32


def test_vllms_seed_does_not_change_other_random_numbers(vllm, build):
    model, state = build(r=0), torch.get_rng_state()
    sampled(VllmEngine(USED), model)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("lora", [{"r": 20}, {"target_modules": ["embed_tokens", "q_proj"]}])
def test_adapters_that_vllm_cannot_read_are_merged(vllm, build, capsys, lora):
    engine = VllmEngine(USED)
    sampled(engine, build(seed=1))  # vLLM is started for rank 16
    policy = build(**lora)
    before = copy.deepcopy(policy.state_dict())
    assert sampled(engine, policy) == expected(policy)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())
    assert vllm.engines[0].requests[-1][1] is None
    reason = "rank 20 is above 16" if "r" in lora else "embed_tokens is none"
    assert reason in capsys.readouterr().out


def test_adapters_of_a_model_without_lora_in_vllm_are_merged(vllm, tmp_path, shift, capsys):
    vllm.without_lora = True
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3
    )
    model = GPT2LMHeadModel(config).eval()  # its layers are Conv1D, with transposed weights
    model.save_pretrained(tmp_path)
    model.name_or_path = str(tmp_path)
    policy = add_adapters(model, LoraParams(r=4), "CAUSAL_LM").eval()
    shift(policy, 0.1)
    engine = VllmEngine(USED)
    for loads in (1, 2):
        assert sampled(engine, policy) == expected(policy)
        assert vllm.engines[0].loads == loads and not vllm.engines[0].options["enable_lora"]
        shift(policy, 0.1)
    assert "adapters are merged, because vLLM has no LoRA for GPT2LMHead" in capsys.readouterr().out


def test_a_server_gets_merged_weights(vllm, build, shift, monkeypatch, tiny_lm, capsys):
    monkeypatch.setattr(vllm.VLLMClient, "model_of_server", tiny_lm(seed=5))
    policy = build(top_layers=1)
    address = {"vllm_mode": "server", "vllm_server_base_url": "http://127.0.0.1:8000"}
    engine = VllmEngine(ModelParams(use_vllm=True, **address))
    for update in range(2):
        responses = sampled(engine, policy)
        assert responses == [
            vllm.sample(policy, [prompt], 6, 0.7, 8 * update + i + 1, ENDS)[0]
            for i, prompt in enumerate(PROMPTS)
        ]
        shift(policy, 0.3)
    [client] = vllm.engines
    assert (client.base_url, str(client.device), client.loads) == (
        address["vllm_server_base_url"],
        "cpu",
        2,
    )
    assert "a server gets whole weights" in capsys.readouterr().out


@pytest.mark.parametrize("error", [0.11, -0.11, math.nan])
def test_samples_of_other_weights_are_an_error(vllm, build, error):
    policy, engine = build(), VllmEngine(USED)
    sampled(engine, policy)
    vllm.engines[0].error = error
    with pytest.raises(RondoError, match=r"differ by (0\.11|nan) nats per token"):
        sampled(engine, policy)


@pytest.mark.parametrize(
    ("first", "later", "limit"),
    [
        (0.004, 0.0119, None),  # three times 0.004 is 0.012
        (0.004, 0.0121, 0.012),
        (0.0, 0.0099, None),  # in float32
        (0.0, 0.0101, 0.01),
        (0.04, 0.099, None),  # 0.1 at most
        (0.04, 0.101, 0.1),
    ],
)
def test_the_first_log_ratio_limits_the_later_ones(vllm, build, first, later, limit):
    policy, engine = build(), VllmEngine(USED)
    engine.backend = engine.start(policy)
    vllm.engines[0].error, start = first, engine.backend
    engine.backend = None
    engine.start = lambda model: start
    sampled(engine, policy)
    vllm.engines[0].error = later
    if limit is None:
        sampled(engine, policy)
    else:
        with pytest.raises(RondoError, match=rf"\(at most {limit}\)"):
            sampled(engine, policy)


@pytest.mark.parametrize(
    ("tied", "r", "mode", "other", "refused"),
    [
        (True, 0, "colocate", False, False),  # the weights that vLLM has loaded
        (True, 4, "colocate", False, False),
        (True, 4, "colocate", True, True),  # that of another model, which was trained as a whole
        (False, 0, "colocate", True, False),
        (True, 0, "server", True, False),  # on a GPU
    ],
)
def test_an_output_layer_that_vllm_would_not_take_is_refused(build, tied, r, mode, other, refused):
    model = unwrap_peft(build(r=r))
    model.config.tie_word_embeddings = tied
    params = ModelParams(
        use_vllm=True, vllm_mode=mode, vllm_server_base_url="http://127.0.0.1:8000"
    )
    loaded = sum_of_head(unwrap_peft(build(seed=1)) if other else model)
    if refused:
        with pytest.raises(BadInput, match=r"model\.use_vllm.*keeps the output.*ppo\.lora\.r"):
            check_output_layer(params, model, loaded)
    else:
        check_output_layer(params, model, loaded)


def test_a_model_whose_output_layer_would_stay_is_not_sampled(vllm, build):
    model, engine = build(r=0), VllmEngine(USED)
    model.config.tie_word_embeddings = True
    sampled(engine, model)
    received = len(vllm.engines[0].requests)
    model.get_output_embeddings().weight.data[0, 0] += 0.01
    with pytest.raises(BadInput, match="keeps the output layer"):
        sampled(engine, model)
    assert len(vllm.engines[0].requests) == received > 0


def test_weights_that_do_not_arrive_are_an_error(vllm, build, monkeypatch):
    policy, engine = build(), VllmEngine(USED)
    sampled(engine, policy)
    monkeypatch.setattr(vllm.LLM, "load", lambda self, weights: None)
    with pytest.raises(RondoError, match="check that vLLM received all weights"):
        sampled(engine, build(seed=1))


def test_log_probabilities_are_those_of_the_responses(vllm, build):
    policy, engine = build(), VllmEngine(USED)
    responses = sampled(engine, policy)
    # by transformers' own forward pass
    expected_values = []
    for prompt, response in zip(PROMPTS, responses, strict=True):
        logits = policy(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.7
        rows = logits.log_softmax(-1)
        expected_values += rows.gather(1, torch.tensor(response)[:, None]).squeeze(1).tolist()
    assert engine.logprobs == pytest.approx(expected_values, abs=1e-5)


def test_no_prompts_start_no_engine(vllm, build):
    engine, policy = VllmEngine(USED), build()
    generator, ends = torch.Generator(), EndTokens(2)
    sample = partial(engine.sample, response_length=6, temperature=1.0, ends=ends)
    assert sample(policy, [], generator=generator) == [] and not vllm.engines


def test_one_engine_per_process_and_none_by_default(vllm):
    assert sampling_engine(ModelParams()) is None
    assert sampling_engine(USED) is sampling_engine(ModelParams(use_vllm=True))
    other = ModelParams(use_vllm=True, vllm_gpu_memory_utilization=0.5)
    assert sampling_engine(other).params.vllm_gpu_memory_utilization == 0.5


def test_without_vllm_the_next_step_is_named(monkeypatch):
    monkeypatch.setattr("stages.lib.lm.vllm_engine.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"model\.use_vllm: vLLM is not installed; install it"):
        VllmEngine(USED)
