"""The engines that can be `ppo.engine`, by name."""

from stages.lib.core.params.engine_settings import EngineSettings
from stages.lib.core.params.nemo_rl import NEMO_RL
from stages.lib.core.params.openrlhf import OPENRLHF
from stages.lib.core.params.verl import VERL

ENGINES: dict[str, EngineSettings] = {
    settings.name: settings for settings in (OPENRLHF, VERL, NEMO_RL)
}
