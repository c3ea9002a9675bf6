"""The judges that can label: by name in `load_judge`. Another one is a class with the methods of
stages.lib.judging.pairwise.Judge.
"""

from stages.lib.core.params import Params
from stages.lib.core.params.judging import JudgeName
from stages.lib.judging.endpoint import Endpoint
from stages.lib.judging.pairwise import Judge
from stages.lib.judging.pointwise import Lexicon


def load_judge(params: Params) -> Judge:
    if params.annotate.judge is JudgeName.endpoint:
        return Endpoint(params.annotate.endpoint)
    return Lexicon(params.evaluate.tie_margin)
