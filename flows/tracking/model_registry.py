"""The champion in MLflow: versions and aliases of the registered model `rondo-policy`.

A version is a policy, identified by its DVC md5, with the evidence as tags; its files are those of
its LoggedModel (model_upload.py). A policy whose gate passed or was approved becomes `champion` if
nothing speaks against it (`obstacle`), and the champion before it becomes `previous`. Another
policy becomes `challenger`, if it is the newest. After that only a person moves the aliases (`rondo
promote`).
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

from flows.core.locks import digests
from flows.core.tables import interval
from flows.tracking.model_upload import DIGEST, STORED
from flows.tracking.records import Promotion
from stages.gate.approvals import Rollback, check_reason, rollback_path
from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash, write_json
from stages.lib.core.renamed import current_metrics

NAME, CHAMPION, PREVIOUS, CHALLENGER = "rondo-policy", "champion", "previous", "challenger"
EQUAL = 0.5  # the win rate of two equally good policies
ABOUT = (
    "Policies that reached the promotion gate, with the numbers of the gate. "
    'To load the champion: `mlflow.pyfunc.load_model("models:/rondo-policy@champion")`. '
    "DVC has the weights, too: tags `path` and `md5`."
)


def promote(
    client: MlflowClient, experiment: str, run_id: str, promotion: Promotion, gate_ended: int
) -> None:
    """Register a policy; make it champion if there is no `obstacle`, else challenger.

    A second call with the same policy changes nothing. A policy does not become champion if a later
    one is champion already (its record was sent late), nor after a rollback of this policy.

    Args:
        run_id: MLflow's run of the promotion gate.
        gate_ended: when the gate ended, in milliseconds since the epoch.

    Raises:
        MlflowException: the policy's LoggedModel does not exist yet, because the record of its
            evaluation has not been sent.
    """
    if not client.search_registered_models(f"name = '{NAME}'"):
        client.create_registered_model(NAME, description=ABOUT)
    known = client.search_model_versions(f"name = '{NAME}' AND tags.md5 = '{promotion.digest}'")
    version = known[0] if known else _register(client, experiment, run_id, promotion, gate_ended)
    by_alias = versions_by_alias(client)
    champion, previous, challenger = (
        by_alias.get(alias) for alias in (CHAMPION, PREVIOUS, CHALLENGER)
    )
    evidence = _evidence(promotion, gate_ended)
    if obstacle(evidence, champion):
        if max(map(_gate_time, by_alias.values()), default="") < _gate_time(version):
            _set_alias(client, CHALLENGER, version)
        return
    if _differs(version, evidence):
        # A person has approved the challenger since, or the project has adopted it.
        _tag(client, version, evidence)
        version = client.get_model_version(NAME, str(version.version))
    if challenger and challenger.version == version.version:
        client.delete_registered_model_alias(NAME, CHALLENGER)
    if "rollback.reason" in version.tags:
        return
    # Records that could not be sent arrive later, in any order: the gate's time decides.
    if _gate_time(champion) < _gate_time(version):
        if champion:
            _set_alias(client, PREVIOUS, champion)
        _set_alias(client, CHAMPION, version)
    elif _gate_time(previous) < _gate_time(version) < _gate_time(champion):
        _set_alias(client, PREVIOUS, version)


def obstacle(evidence: Mapping[str, str], champion: ModelVersion | None) -> str:
    """The reason why a policy does not become champion by itself; empty if there is none.

    A policy becomes champion if its gate passed and it was compared with this champion, or follows
    it in the same project with the same base model, data and evaluation. A trial (an isolated run)
    has to win the comparison. What a person has approved becomes champion.

    Args:
        evidence: the tags of the policy's version.
        champion: the current champion, None if there is none.
    """
    if evidence.get("passed_or_approved") == str(False):
        return "its promotion gate failed"
    if champion is None or "approval.by" in evidence:
        return ""
    isolated, champion_tags = evidence.get("isolated") == str(True), tags_of(champion)
    if evidence.get("md5.champion") == champion_tags["md5"]:
        low = json.loads(evidence.get("evaluate.win_rate_champion_low", "null"))
        won = low is not None and low >= EQUAL
        return "it did not beat the champion" if isolated and not won else ""
    if isolated:
        return "it is the result of an isolated run"
    if evidence.get("project") != champion_tags.get("project"):
        return "the champion is of another project"
    if evidence.get("lineage") != champion_tags.get("lineage"):
        return "the champion has another base model, data set or evaluation"
    return ""


def _differs(version: ModelVersion, evidence: Mapping[str, str]) -> bool:
    """Whether the version was registered with another verdict, or by an isolated run."""
    known = tags_of(version)
    # older versions lack these tags
    defaults = {"passed_or_approved": str(True), "isolated": str(False)}
    return any(known.get(key, value) != evidence.get(key, value) for key, value in defaults.items())


def tags_of(version: ModelVersion) -> dict[str, str]:
    """The tags of a version; names of older versions of Rondo become today's."""
    tags: dict[str, str] = current_metrics(dict(version.tags))
    return tags


def _gate_time(version: ModelVersion | None) -> str:
    """When its gate ended, in ISO 8601; without a version the empty string, before any time."""
    return tags_of(version).get("gate_ended", "") if version else ""


def _register(
    client: MlflowClient, experiment: str, run_id: str, promotion: Promotion, gate_ended: int
) -> ModelVersion:
    """Create a version from the LoggedModel that evaluate's record created.

    An MLflow server does not accept a local path as the source of a version.
    """
    models = client.search_logged_models([experiment], f"tags.md5 = '{promotion.digest}'")
    if not models:
        raise MlflowException(
            f"{promotion.evidence['path']} cannot be registered yet: "
            "the record of its evaluation has not been sent",
            RESOURCE_DOES_NOT_EXIST,  # not the server's failure: other records are sent first
        )
    # one whose files are there, else one whose files follow
    model = max(models, key=lambda model: (STORED in model.tags, DIGEST in model.tags)).model_id
    tags = _evidence(promotion, gate_ended)
    return client.create_model_version(NAME, f"models:/{model}", run_id, tags=tags, model_id=model)


def _evidence(promotion: Promotion, gate_ended: int) -> dict[str, str]:
    time = datetime.fromtimestamp(gate_ended / 1000, UTC).isoformat(timespec="milliseconds")
    return promotion.evidence | {
        "passed_or_approved": str(promotion.passed_or_approved),
        "gate_ended": time,
    }


def _tag(client: MlflowClient, version: ModelVersion, tags: dict[str, str]) -> None:
    for key, value in tags.items():
        client.set_model_version_tag(NAME, str(version.version), key, value)


def versions_by_alias(client: MlflowClient) -> dict[str, ModelVersion]:
    """The champion, previous and challenger versions; an alias that is not set is left out."""
    models = client.search_registered_models(f"name = '{NAME}'")
    aliases = models[0].aliases if models else {}
    return {
        alias: client.get_model_version(NAME, str(aliases[alias]))
        for alias in (CHAMPION, PREVIOUS, CHALLENGER)
        if alias in aliases
    }


def _set_alias(client: MlflowClient, alias: str, version: ModelVersion) -> None:
    client.set_registered_model_alias(NAME, alias, str(version.version))


def promote_by_hand(client: MlflowClient, version: int, by: str, reason: str) -> None:
    """Make a version champion; `by` and `reason` become its tags.

    Raises:
        BadInput: there is no reason or no such version, or it is the champion already.
    """
    check_reason(reason, "won the comparison on our own prompts")
    known = client.search_model_versions(f"name = '{NAME}'")
    chosen = next((candidate for candidate in known if int(candidate.version) == version), None)
    if chosen is None:
        versions = ", ".join(map(str, sorted(int(candidate.version) for candidate in known)))
        raise BadInput(f"{NAME} has no version {version}; versions: {versions or 'none'}")
    by_alias = versions_by_alias(client)
    champion, challenger = by_alias.get(CHAMPION), by_alias.get(CHALLENGER)
    if champion and int(champion.version) == version:
        raise BadInput(f"version {version} of {NAME} is the champion already")
    _tag(client, chosen, _decision("promoted", by, reason))
    if challenger and challenger.version == chosen.version:
        client.delete_registered_model_alias(NAME, CHALLENGER)
    _make_champion(client, chosen, champion)


def _decision(verb: str, by: str, reason: str) -> dict[str, str]:
    """Tags of a version: who decided what, when and why."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {f"{verb}.at": now, f"{verb}.by": by, f"{verb}.reason": reason}


def _make_champion(
    client: MlflowClient, version: ModelVersion, champion: ModelVersion | None
) -> None:
    """Make a version champion, and the one before previous; undo a rollback of its policy."""
    if champion:
        _set_alias(client, PREVIOUS, champion)
    _set_alias(client, CHAMPION, version)
    if _is_here(version):
        rollback_path(version.tags["round"]).unlink(missing_ok=True)


def roll_back(client: MlflowClient, by: str, reason: str) -> None:
    """Swap champion and previous; `by` and `reason` become tags of the former champion.

    A second call undoes the first one; it does not go back to older versions.

    Raises:
        BadInput: there is no reason, no champion, or no champion before it.
    """
    check_reason(reason, "one ending for all prompts, found by reading samples")
    by_alias = versions_by_alias(client)
    _check_champion(by_alias)
    champion, previous = by_alias[CHAMPION], by_alias.get(PREVIOUS)
    if previous is None or previous.version == champion.version:
        raise BadInput(
            f"nothing to roll back to: version {champion.version} of {NAME} is the only champion "
            "so far; train a better policy instead"
        )
    _tag(client, champion, _decision("rollback", by, reason))
    _make_champion(client, previous, champion)
    # If `previous` is the newer one, this call undoes a rollback. A policy whose files are not in
    # this folder is no champion of a round here. Else stage `champion` of later rounds reads it.
    if _is_here(champion) and _gate_time(previous) < _gate_time(champion):
        policy = file_hash(Path(champion.tags["path"]))
        rollback = Rollback(by=by, reason=reason, policy=policy)
        write_json(rollback_path(champion.tags["round"]), rollback.model_dump())


def _is_here(version: ModelVersion) -> bool:
    """Whether the files of a policy in this folder are those of the version."""
    path = version.tags["path"]
    return Path(path).exists() and digests(version.tags["round"]).get(path) == version.tags["md5"]


def _check_champion(by_alias: dict[str, ModelVersion]) -> None:
    if CHAMPION not in by_alias:
        raise BadInput(
            f"MLflow has no champion of {NAME}: a policy becomes champion when its promotion gate "
            "passes in `rondo run`, or when a person approves it (gates.promote.policy `ask`, "
            "`rondo approve promote ROUND`); `warn` is not enough"
        )


def describe(client: MlflowClient) -> str:
    """Champion, previous and challenger with their evidence, as text for a terminal.

    Raises:
        BadInput: there is no champion.
    """
    by_alias = versions_by_alias(client)
    _check_champion(by_alias)
    lines = [line for alias, version in by_alias.items() for line in _lines(alias, version)]
    if challenger := by_alias.get(CHALLENGER):
        lines.append(
            f"  not champion: {obstacle(tags_of(challenger), by_alias[CHAMPION])}; "
            f"`rondo promote {challenger.version} --reason ...` makes it champion"
        )
    return "\n".join(lines)


def _lines(alias: str, version: ModelVersion) -> list[str]:
    tags = {
        key: tags_of(version).get(key, "-")
        for key in ("round", "gate_ended", "path", "md5", "revision", "seed")
    }
    result = "not promoted" if alias == CHALLENGER else "promoted"
    lines = [
        f"{alias}: version {version.version}, {tags['round']}, {result} {tags['gate_ended']:.16}",
        f"  win rate against SFT {_format_metric(version.tags, 'win_rate')}",
        "  win rate against the champion before "
        f"{_format_metric(version.tags, 'win_rate_champion')}",
        f"  {tags['path']}, md5 {tags['md5']}, git {tags['revision']}, seed {tags['seed']}",
    ]
    if "approval.reason" in version.tags:
        by, reason = version.tags["approval.by"], version.tags["approval.reason"]
        lines.append(f"  approved by {by}: {reason}")
    for tag, verb in (("promoted", "promoted"), ("rollback", "rolled back")):
        if f"{tag}.reason" in version.tags:
            time, by, reason = (version.tags[f"{tag}.{key}"] for key in ("at", "by", "reason"))
            lines.append(f"  {verb} {time:.16} by {by}: {reason}")
    return lines


def _format_metric(tags: dict[str, Any], name: str) -> str:
    mean, low, high = (
        json.loads(tags.get(f"evaluate.{name}{end}", "null")) for end in ("", "_low", "_high")
    )
    return "not measured" if mean is None else interval(mean, low, high)
