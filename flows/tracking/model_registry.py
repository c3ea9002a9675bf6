"""The champion in MLflow: versions and aliases of the registered model `rondo-policy`.

A version is a policy, identified by its DVC md5, with the evidence as tags; its files are those of
its LoggedModel. The files of the rounds decide who is champion (stages/gate/champion.py), and the
alias `champion` follows them. The champion before it becomes `previous`, another new policy
`challenger`.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

from flows.core.locks import digests
from flows.core.tables import interval
from flows.core.verdicts import read_gate
from stages.gate.approvals import Rollback, check_reason, rollback_path
from stages.gate.verdict import passed_or_approved
from stages.lib.core.champion import ChampionRecord
from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash, stage_dir, write_json
from stages.lib.core.params import load_params

NAME, CHAMPION, PREVIOUS, CHALLENGER = "rondo-policy", "champion", "previous", "challenger"
NOT_CHOSEN = "its promotion gate failed, or a person chose another champion"
ABOUT = (
    "Policies that reached the promotion gate, with the numbers of the gate. "
    'To load the champion: `mlflow.pyfunc.load_model("models:/rondo-policy@champion")`. '
    "DVC has the weights, too: tags `path` and `md5`."
)


def register(
    client: MlflowClient, experiment: str, run_id: str, tags: Mapping[str, str], gate_ended: int
) -> None:
    """Make a policy a version, and a new one `challenger`; `follow` makes it champion.

    A second call with the same policy and verdict changes nothing. An isolated run changes no
    version that is registered.

    Args:
        run_id: MLflow's run of the promotion gate.
        tags: of the version: the policy and its evidence.
        gate_ended: when the gate ended, in milliseconds since the epoch.

    Raises:
        MlflowException: the policy's LoggedModel does not exist.
    """
    if not client.search_registered_models(f"name = '{NAME}'"):
        client.create_registered_model(NAME, description=ABOUT)
    time = datetime.fromtimestamp(gate_ended / 1000, UTC).isoformat(timespec="milliseconds")
    tags, path = {**tags, "gate_ended": time}, tags["path"]
    version = _version_of(client, tags["md5"])
    if version is None:
        # An MLflow server does not accept a local path as the source of a version.
        models = client.search_logged_models([experiment], f"tags.md5 = '{tags['md5']}'")
        if not models:
            message = f"{path} has no LoggedModel: its evaluation was not recorded"
            raise MlflowException(message, RESOURCE_DOES_NOT_EXIST)
        selected = [one for one in models if one.params.get("path") == path]
        model = max(selected or models, key=lambda one: MLFLOW_MODEL_IS_EXTERNAL not in one.tags)
        source, model_id = f"models:/{model.model_id}", model.model_id
        version = client.create_model_version(
            NAME, source, run_id, tags=tags, description=_about(tags), model_id=model_id
        )
        client.set_registered_model_alias(NAME, CHALLENGER, str(version.version))
    elif tags.get("isolated") != str(True) and any(
        version.tags.get(key) != tags.get(key) for key in ("passed_or_approved", "isolated")
    ):  # a person has approved it since, or the project has adopted it
        _tag(client, version, tags)


def follow(client: MlflowClient, digest: str, project: str | None, isolated: bool = False) -> None:
    """Let the alias `champion` follow the rounds of a folder.

    The alias of another project's champion stays, but for a clone that goes on with its rounds. An
    isolated run belongs to no project before a person adopts it.

    Args:
        digest: the md5 of their champion; empty if there is none.
        project: their project.
        isolated: whether they are those of an isolated run.
    """
    version = _version_of(client, digest)
    if version is None:
        return
    champion = versions_by_alias(client).get(CHAMPION)
    tags = version.tags | ({"project": project} if project else {})
    if not champion or not (isolated or obstacle(tags, champion)):
        _make_champion(client, version)


def obstacle(evidence: Mapping[str, str], champion: ModelVersion) -> str:
    """The reason why a policy does not become champion by itself; empty if there is none.

    Args:
        evidence: the tags of the policy's version.
        champion: the current champion.
    """
    if evidence.get("isolated") == str(True):
        return "it is the result of an isolated run"
    goes_on = evidence.get("md5.champion") == champion.tags["md5"]
    if not goes_on and evidence.get("project") != champion.tags.get("project"):
        return "the champion is of another project"
    return ""


def _make_champion(client: MlflowClient, version: ModelVersion) -> None:
    """Set the aliases; nothing if the version is the champion already."""
    by_alias = versions_by_alias(client)
    champion, challenger = by_alias.get(CHAMPION), by_alias.get(CHALLENGER)
    if champion and champion.version == version.version:
        return
    # Without a champion here, the one with which it was compared: MLflow was away since.
    previous = champion or _version_of(client, version.tags.get("md5.champion", ""))
    if previous:
        client.set_registered_model_alias(NAME, PREVIOUS, str(previous.version))
    if challenger and challenger.version == version.version:
        client.delete_registered_model_alias(NAME, CHALLENGER)
    client.set_registered_model_alias(NAME, CHAMPION, str(version.version))


def _version_of(client: MlflowClient, digest: str) -> ModelVersion | None:
    """The version of the policy with this md5."""
    query = f"name = '{NAME}' AND tags.md5 = '{digest}'"
    return next(iter(client.search_model_versions(query)), None) if digest else None


def _tag(client: MlflowClient, version: ModelVersion, tags: Mapping[str, str]) -> None:
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


def promote_by_hand(client: MlflowClient, version: int, by: str, reason: str) -> None:
    """Make a version champion of this folder's rounds; `by` and `reason` become its tags.

    Raises:
        BadInput: there is no reason or no such version, it is the champion already, or its files
            are not in this folder.
    """
    check_reason(reason, "won the comparison on our own prompts")
    known = {int(one.version): one for one in client.search_model_versions(f"name = '{NAME}'")}
    if version not in known:
        versions = ", ".join(map(str, sorted(known))) or "none"
        raise BadInput(f"{NAME} has no version {version}; versions: {versions}")
    champion = versions_by_alias(client).get(CHAMPION)
    if champion and int(champion.version) == version:
        raise BadInput(f"version {version} of {NAME} is the champion already")
    _choose(client, known[version], by, reason)
    _tag_decision(client, known[version], "promoted", by, reason)


def roll_back(client: MlflowClient, by: str, reason: str) -> None:
    """Swap champion and previous; `by` and `reason` become tags of the former champion.

    A second call undoes the first one; it does not go back to older versions.

    Raises:
        BadInput: there is no reason, no champion, or no champion before it in this folder.
    """
    check_reason(reason, "one ending for all prompts, found by reading samples")
    by_alias = versions_by_alias(client)
    champion, previous = _champion_of(by_alias), by_alias.get(PREVIOUS)
    if previous is None or previous.version == champion.version:
        raise BadInput(
            f"nothing to roll back to: version {champion.version} of {NAME} is the only champion "
            "so far; train a better policy instead"
        )
    _choose(client, previous, by, reason)
    _tag_decision(client, champion, "rollback", by, reason)


def _tag_decision(
    client: MlflowClient, version: ModelVersion, verb: str, by: str, reason: str
) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    _tag(client, version, {f"{verb}.at": now, f"{verb}.by": by, f"{verb}.reason": reason})


def _choose(client: MlflowClient, version: ModelVersion, by: str, reason: str) -> None:
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
    else:
        hashes = {path: file_hash(Path(path)) for path in paths}
        choice = Rollback(
            by=by,
            reason=reason,
            policy=file_hash(policies[last]),
            champion=ChampionRecord(round=round_, hashes=hashes),
        )
        write_json(rollback_path(last), choice.model_dump(exclude_defaults=True))
    _make_champion(client, version)


def _champion_of(by_alias: Mapping[str, ModelVersion]) -> ModelVersion:
    """
    Raises:
        BadInput: there is no champion.
    """
    if CHAMPION not in by_alias:
        raise BadInput(
            f"MLflow has no champion of {NAME}: a policy becomes champion when its promotion gate "
            "passes in `rondo run`, or when a person approves it (gates.promote.policy `ask`, "
            "`rondo approve promote ROUND`); `warn` is not enough"
        )
    return by_alias[CHAMPION]


def describe(client: MlflowClient) -> str:
    """Champion, previous and challenger with their evidence, as text for a terminal.

    Raises:
        BadInput: there is no champion.
    """
    by_alias = versions_by_alias(client)
    champion = _champion_of(by_alias)
    lines = [line for alias, version in by_alias.items() for line in _lines(alias, version)]
    if challenger := by_alias.get(CHALLENGER):
        reason = NOT_CHOSEN
        if challenger.tags.get("passed_or_approved") == str(True):
            reason = obstacle(challenger.tags, champion) or NOT_CHOSEN
        lines.append(
            f"  not champion: {reason}; "
            f"`rondo promote {challenger.version} --reason ...` makes it champion"
        )
    return "\n".join(lines)


def _lines(alias: str, version: ModelVersion) -> list[str]:
    tags = version.tags
    names = ("round", "gate_ended", "path", "md5", "revision", "seed")
    round_, ended, path, md5, revision, seed = (tags.get(name, "-") for name in names)
    result = "not promoted" if alias == CHALLENGER else "promoted"
    lines = [
        f"{alias}: version {version.version}, {round_}, {result} {ended:.16}",
        f"  win rate against SFT {_win_rate(tags, 'win_rate')}",
        f"  win rate against the champion before {_win_rate(tags, 'win_rate_champion')}",
        f"  {path}, md5 {md5}, git {revision}, seed {seed}",
    ]
    if "approval.reason" in tags:
        lines.append(f"  approved by {tags['approval.by']}: {tags['approval.reason']}")
    for tag, verb in (("promoted", "promoted"), ("rollback", "rolled back")):
        if f"{tag}.reason" in tags:
            time, by, reason = (tags[f"{tag}.{key}"] for key in ("at", "by", "reason"))
            lines.append(f"  {verb} {time:.16} by {by}: {reason}")
    return lines


def _about(tags: Mapping[str, str]) -> str:
    """The description of a version in MLflow."""
    preset = f", preset {tags['preset']}" if "preset" in tags else ""
    return (
        f"Policy of {tags['round']}, seed {tags.get('seed', '-')}{preset}. Win rate against SFT "
        f"{_win_rate(tags, 'win_rate')}, against the champion before it "
        f"{_win_rate(tags, 'win_rate_champion')}. Weights: `{tags['path']}`, md5 {tags['md5']}."
    )


def _win_rate(tags: Mapping[str, str], name: str) -> str:
    mean, low, high = (
        json.loads(tags.get(f"evaluate.{name}{end}", "null")) for end in ("", "_low", "_high")
    )
    return "not measured" if mean is None else interval(mean, low, high)
