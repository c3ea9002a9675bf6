import re
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

TAKES_400_MB = """
from stages.lib.core.stage import stage_main
def stage(params, round_):
    print(sum(bytearray(400_000_000)[::4096]))
stage_main("example", stage)
"""


def test_the_last_line_of_a_stage_is_its_peak_of_memory(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    taken_here = bytearray(600_000_000)  # the peak of this process is not the stage's
    del taken_here
    output = subprocess.run(
        [sys.executable, "-c", TAKES_400_MB, "--round", "r1"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    match = re.fullmatch(r"0\n\[example@r1\] peak memory: (\d\.\d\d) GB\n", output)
    assert match
    assert 0.4 < float(match[1]) < 0.8  # the interpreter and pydantic take less than 0.4
