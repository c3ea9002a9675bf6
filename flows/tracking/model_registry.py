"""Which policy is champion: versions and aliases of MLflow's registered model `rondo-policy`.

A version is a policy, known by its DVC md5, with the evidence as tags; its weights stay with DVC.
The newest one that its promotion gate did not let through is `challenger`. Once it passes, or a
person lets it through, it becomes `champion`, and the champion before `previous`. After that only a
person moves these two.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from flows.core.tables import interval
from flows.tracking.records import Promotion, digests
from stages.gate.approvals import Rollback, taken_back_path
from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash, write_json

NAME, CHAMPION, PREVIOUS, CHALLENGER = "rondo-policy", "champion", "previous", "challenger"
ABOUT = "Policies that came to the promotion gate, and what it saw. Their weights are with DVC: tags `path` and `md5`."


def promote(
    client: MlflowClient, experiment: str, run_id: str, promotion: Promotion, opened: int
) -> None:
    """Register a policy, and make it champion, or challenger where nobody vouches for it; a second
    time nothing changes.

    It does not become champion where a later one is, since its record had to wait, nor after a
    person has taken it back. `run_id`: the run of its gate, which ended at `opened` (milliseconds
    since the epoch).

    Raises:
        MlflowException: its LoggedModel is not there, since evaluate's record waits too.
    """
    if not client.search_registered_models(f"name = '{NAME}'"):
        client.create_registered_model(NAME, description=ABOUT)
    known = client.search_model_versions(f"name = '{NAME}' AND tags.md5 = '{promotion.digest}'")
    version = known[0] if known else _register(client, experiment, run_id, promotion, opened)
    held = holders(client)
    champion, previous, challenger = (held.get(alias) for alias in (CHAMPION, PREVIOUS, CHALLENGER))
    if version.tags.get("vouched") == str(False):
        if not promotion.vouched:
            if _opened(challenger) < _opened(version):
                _give(client, CHALLENGER, version)
            return
        _tag(client, version, _evidence(promotion, opened))  # a person has let it through since
        version = client.get_model_version(NAME, str(version.version))
    if challenger and challenger.version == version.version:
        client.delete_registered_model_alias(NAME, CHALLENGER)
    if "rollback.reason" in version.tags:
        return
    if _opened(champion) < _opened(version):
        if champion:
            _give(client, PREVIOUS, champion)
        _give(client, CHAMPION, version)
    elif (
        _opened(previous) < _opened(version) < _opened(champion)
    ):  # records that waited come in any order
        _give(client, PREVIOUS, version)


def _opened(version: ModelVersion | None) -> str:
    """When its gate spoke, in ISO 8601; before any time where there is none."""
    return str(version.tags.get("gate_opened", "")) if version else ""


def _register(
    client: MlflowClient, experiment: str, run_id: str, promotion: Promotion, opened: int
) -> ModelVersion:
    """A server takes no local path as source, but the LoggedModel that evaluate's record has made."""
    models = client.search_logged_models(
        [experiment], f"tags.md5 = '{promotion.digest}'", max_results=1
    )
    if not models:
        raise MlflowException(
            f"{promotion.evidence['path']} can be registered when the record of its evaluation has come"
        )
    model = models[0].model_id
    return client.create_model_version(
        NAME, f"models:/{model}", run_id, tags=_evidence(promotion, opened), model_id=model
    )


def _evidence(promotion: Promotion, opened: int) -> dict[str, str]:
    moment = datetime.fromtimestamp(opened / 1000, UTC).isoformat(timespec="milliseconds")
    return promotion.evidence | {"vouched": str(promotion.vouched), "gate_opened": moment}


def _tag(client: MlflowClient, version: ModelVersion, tags: dict[str, str]) -> None:
    for key, value in tags.items():
        client.set_model_version_tag(NAME, str(version.version), key, value)


def holders(client: MlflowClient) -> dict[str, ModelVersion]:
    """The versions that are champion, previous and challenger, as far as there are any."""
    models = client.search_registered_models(f"name = '{NAME}'")
    aliases = models[0].aliases if models else {}
    return {
        alias: client.get_model_version(NAME, str(aliases[alias]))
        for alias in (CHAMPION, PREVIOUS, CHALLENGER)
        if alias in aliases
    }


def _give(client: MlflowClient, alias: str, version: ModelVersion) -> None:
    client.set_registered_model_alias(NAME, alias, str(version.version))


def roll_back(client: MlflowClient, by: str, reason: str) -> None:
    """Champion and previous change places; why and who are tags of the version that is champion no
    more.

    So a second call takes the first one back: it does not go on to older versions.

    Raises:
        BadInput: no reason, no champion, or none before it.
    """
    if not reason.strip():
        raise BadInput(
            '--rollback needs --reason: say why, e.g. --reason "one ending for all prompts, seen by hand"'
        )
    held = holders(client)
    _check_champion(held)
    if PREVIOUS not in held or held[PREVIOUS].version == held[CHAMPION].version:
        raise BadInput(
            f"nothing to roll back to: version {held[CHAMPION].version} of {NAME} is the only champion there was; improve on it"
        )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    _tag(client, held[CHAMPION], {"rollback.at": now, "rollback.by": by, "rollback.reason": reason})
    _give(client, CHAMPION, held[PREVIOUS])
    _give(client, PREVIOUS, held[CHAMPION])
    _tell_the_next_round(held, by, reason)


def _tell_the_next_round(before: dict[str, ModelVersion], by: str, reason: str) -> None:
    """Later rounds of this folder meet the champion that is one now (stages/gate/champion.py),
    where these policies are its rounds'.
    """
    here = {alias: version.tags["round"] for alias, version in before.items() if _is_here(version)}
    if CHAMPION in here and _opened(before[PREVIOUS]) < _opened(
        before[CHAMPION]
    ):  # else it takes a rollback back
        word = Rollback(by=by, reason=reason, policy=file_hash(Path(before[CHAMPION].tags["path"])))
        write_json(taken_back_path(here[CHAMPION]), word.model_dump())
    if PREVIOUS in here:
        taken_back_path(here[PREVIOUS]).unlink(missing_ok=True)


def _is_here(version: ModelVersion) -> bool:
    path = version.tags["path"]
    return Path(path).exists() and digests(version.tags["round"]).get(path) == version.tags["md5"]


def _check_champion(held: dict[str, ModelVersion]) -> None:
    if CHAMPION not in held:
        raise BadInput(
            f"MLflow has no champion of {NAME}: a policy becomes it when its promotion gate passes in `rondo run`, or when a person "
            "approves (gates.promote.policy `ask`, `rondo approve promote ROUND`); `warn` is not enough"
        )


def told(client: MlflowClient) -> str:
    """Champion, previous and challenger with their evidence, for a terminal.

    Raises:
        BadInput: there is no champion.
    """
    held = holders(client)
    _check_champion(held)
    return "\n".join(line for alias, version in held.items() for line in _lines(alias, version))


def _lines(alias: str, version: ModelVersion) -> list[str]:
    tags = {
        key: version.tags.get(key, "-")
        for key in ("round", "gate_opened", "path", "md5", "revision", "seed")
    }
    spoke = "not promoted" if alias == CHALLENGER else "gate opened"
    lines = [
        f"{alias}: version {version.version}, {tags['round']}, {spoke} {tags['gate_opened']:.16}",
        f"  win rate against SFT {_measured(version.tags, 'win_rate')}",
        f"  win rate against the champion before {_measured(version.tags, 'win_rate_champion')}",
        f"  {tags['path']}, md5 {tags['md5']}, git {tags['revision']}, seed {tags['seed']}",
    ]
    if "approval.reason" in version.tags:
        lines.append(
            f"  approved by {version.tags['approval.by']}: {version.tags['approval.reason']}"
        )
    if "rollback.reason" in version.tags:
        when, who = version.tags["rollback.at"], version.tags["rollback.by"]
        lines.append(f"  taken back {when:.16} by {who}: {version.tags['rollback.reason']}")
    return lines


def _measured(tags: dict[str, Any], name: str) -> str:
    mean, low, high = (
        json.loads(tags.get(f"evaluate.{name}{end}", "null")) for end in ("", "_low", "_high")
    )
    return "not measured" if mean is None else interval(mean, low, high)
