"""The champion in MLflow: versions and aliases of the registered model `rondo-policy`.

A version is a policy, identified by its DVC md5, with the evidence as tags; its files are those of
its LoggedModel (model_upload.py). The champion is that of the rounds' files
(stages/gate/champion.py): the alias `champion` follows them, as far as the policy is of a run in
the folder of the project that has the alias (`obstacle`). The champion before it becomes
`previous`. Another policy becomes `challenger`, if it is the newest.
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
from flows.core.verdicts import read_gate
from flows.tracking.model_upload import DIGEST, STORED
from flows.tracking.records import Promotion
from stages.gate.approvals import Rollback, check_reason, rollback_path
from stages.gate.verdict import passed_or_approved
from stages.lib.core.champion import ChampionRecord
from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash, stage_dir, write_json
from stages.lib.core.params import load_params

NAME, CHAMPION, PREVIOUS, CHALLENGER = "rondo-policy", "champion", "previous", "challenger"
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
    one is champion already (its record was sent late).

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
    if champion and champion.version == version.version:
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

    The rounds of the project decide, by gates and people. The champion's project is the one with
    its tag, or one whose own champion it is: a clone that goes on with its rounds. Isolated runs
    belong to no project before a person adopts them.

    Args:
        evidence: the tags of the policy's version.
        champion: the current champion, None if there is none.
    """
    if evidence.get("passed_or_approved") == str(False):
        return "its promotion gate failed, or a person chose another champion"
    if champion is None:
        return ""
    if evidence.get("isolated") == str(True):
        return "it is the result of an isolated run"
    champion_tags = tags_of(champion)
    goes_on = evidence.get("md5.champion") == champion_tags["md5"]
    if not goes_on and evidence.get("project") != champion_tags.get("project"):
        return "the champion is of another project"
    return ""


def _differs(version: ModelVersion, evidence: Mapping[str, str]) -> bool:
    """Whether the version was registered with another verdict, or by an isolated run."""
    known = tags_of(version)
    # older versions lack these tags
    defaults = {"passed_or_approved": str(True), "isolated": str(False)}
    return any(known.get(key, value) != evidence.get(key, value) for key, value in defaults.items())


def tags_of(version: ModelVersion) -> dict[str, str]:
    return dict(version.tags)


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
        BadInput: there is no reason or no such version, it is the champion already, or its files
            are not in this folder.
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
    _make_champion(client, chosen, champion, by, reason)
    _tag(client, chosen, _decision("promoted", by, reason))
    if challenger and challenger.version == chosen.version:
        client.delete_registered_model_alias(NAME, CHALLENGER)


def _decision(verb: str, by: str, reason: str) -> dict[str, str]:
    """Tags of a version: who decided what, when and why."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {f"{verb}.at": now, f"{verb}.by": by, f"{verb}.reason": reason}


def _make_champion(
    client: MlflowClient, version: ModelVersion, champion: ModelVersion | None, by: str, reason: str
) -> None:
    """Make a version champion of this folder's rounds; MLflow's aliases follow.

    Raises:
        BadInput: its files are not in this folder.
    """
    _choose(version, by, reason)
    if champion and champion.version != version.version:
        _set_alias(client, PREVIOUS, champion)
    _set_alias(client, CHAMPION, version)


def roll_back(client: MlflowClient, by: str, reason: str) -> None:
    """Swap champion and previous; `by` and `reason` become tags of the former champion.

    A second call undoes the first one; it does not go back to older versions.

    Raises:
        BadInput: there is no reason, no champion, or no champion before it in this folder.
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
    _make_champion(client, previous, champion, by, reason)
    _tag(client, champion, _decision("rollback", by, reason))


def _choose(version: ModelVersion, by: str, reason: str) -> None:
    """Make a version champion after the last round of this folder, for the rounds that follow.

    Raises:
        BadInput: its files are not in this folder.
    """
    round_, known = version.tags["round"], digests(version.tags["round"])
    policy, sft = version.tags["path"], str(stage_dir(round_, "sft") / "model")
    paths = {policy: version.tags["md5"], sft: version.tags.get("md5.sft") or known.get(sft)}
    rounds = list(load_params().rounds)
    for path, md5 in paths.items():
        if round_ not in rounds or not Path(path).exists() or known.get(path) != md5:
            raise BadInput(
                f"version {version.version} of {NAME} is not in this folder: {path} is not the one "
                f"with md5 {md5}, so that later rounds could neither be compared with it nor start "
                "from it. Next: find its commit with `git log --all -S MD5 -- dvc.lock rounds` (an "
                "isolated run: its branch runs/RUN), `git merge` or `git checkout` it and run `dvc "
                "checkout`, then promote it; or promote it in its own project's folder"
            )
    policies = {name: stage_dir(name, "ppo") / "policy" for name in rounds}
    ended = (name for name in rounds if policies[name].exists() and read_gate(name, "promote"))
    last = max(round_, *ended, key=rounds.index)
    verdict = read_gate(last, "promote")
    if last == round_ and verdict and passed_or_approved(verdict):
        rollback_path(last).unlink(missing_ok=True)  # it is champion by its gate
        return
    hashes = {path: file_hash(Path(path)) for path in paths}
    choice = Rollback(
        by=by,
        reason=reason,
        policy=file_hash(policies[last]),
        champion=ChampionRecord(round=round_, hashes=hashes),
    )
    write_json(rollback_path(last), choice.model_dump(exclude_defaults=True))


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
