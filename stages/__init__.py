"""The programs of the pipeline: each reads params.yaml and files, and writes files.

Nothing here knows of Prefect, DVC or MLflow.
"""

import os
import warnings

# A stage's output is a log that is read line by line: no progress bars, no notices. Read by these
# libraries when imported.
for _name, _value in {
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)
# transformers renames an option that TRL still sets under its old name.
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
