"""The judges that can label: by name in `load_judge`. Another one is a class with the methods of
stages.preferences.Judge.
"""

from stages.endpoint import Endpoint
from stages.judge_params import JudgeName
from stages.jurors import Lexicon
from stages.params import Params
from stages.preferences import Judge


def load_judge(params: Params) -> Judge:
    if params.annotate.judge is JudgeName.endpoint:
        return Endpoint(params.annotate.endpoint)
    return Lexicon(params.evaluate.tie_margin)
