"""The settings that engines need where they differ from the defaults."""

NEEDED = {
    "engine": "openrlhf",
    "kl_control": "fixed",
    "init_from": "sft",
    "missing_eos_penalty": 0.0,
    "lora": {"r": 0},
    "critic_lora": {"r": 0},
}
VERL = {name: value for name, value in NEEDED.items() if name != "missing_eos_penalty"} | {
    "engine": "verl"
}
NEMO_RL = NEEDED | {"engine": "nemo_rl"}
