"""Modal's sandbox where Modal, or the container, is at fault; what is asked of Modal; a whole trial through it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from needs import has, needs_modal

from system.sandbox import SandboxError, choose_sandbox, open_sandbox, removal
from system.sandbox.modal import ModalSettings, token_fault
from system.sandbox.probe import answer

pytestmark = needs_modal
if has("modal"):
    from fake_modal import FakeModal
    from grpclib import Status
    from modal_proto import api_pb2 as api

from system.fleet.local import LocalFleet  # noqa: E402 - after what decides whether this file is run at all

Trial = Callable[..., dict[str, Any]]
EVERYTHING = ["hear", "freeze", "close"]
SDK_TRIES = 20
"""More often than the client itself asks again."""


@pytest.fixture(scope="module")
def modal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeModal]:
    with FakeModal(tmp_path_factory.mktemp("modal")) as modal:
        yield modal


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a run") / "scratch"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    world = tmp_path_factory.mktemp("world")
    (world / "a.txt").write_text("a")
    (world / "link").symlink_to("a.txt")
    return world


@pytest.fixture(scope="module")
def fleet(scratch: Path, modal: FakeModal) -> Iterator[LocalFleet]:
    warm = (f"system.sandbox.service:load={modal.config}",)
    with LocalFleet(scratch, target="modal_trials:run", warm=warm, grace_s=0.5) as fleet:
        yield fleet


@pytest.fixture
def trial(fleet: LocalFleet, modal: FakeModal, scratch: Path, world: Path) -> Iterator[Trial]:
    """Runs the steps of modal_trials.py; the service is as it was before."""
    modal.calls.clear()
    modal.images.clear()

    def run(*steps: str, limits: Any = (), settings: Any = (), **spec: Any) -> dict[str, Any]:
        spec["limits"] = {"start_s": 60.0, "stop_s": 30.0, **dict(limits)}
        spec["modal"] = {"image": "python:3.11", "config": str(modal.config), **dict(settings)}
        spec |= {"world": f"{world}", "scratch": f"{scratch}", "steps": list(steps)}
        fleet.start({"trial_id": "step 3, task/7", "deadline_s": 100.0, **spec})
        results = fleet.poll(180)
        assert len(results) == 1
        outcome = results[0].get("outcome")
        assert outcome is None, f"{outcome}\n{fleet.log.read_text()[-3000:]}"
        return results[0]

    yield run
    modal.faults.clear()
    modal.exits.clear()
    modal.answers.clear()
    removal.reap_remote(scratch, settle_s=0.0)
    assert modal.running() == [] and os.listdir(scratch) == ["fleet.log"]


def settled(result: dict[str, Any], modal: FakeModal) -> bool:
    """Whether nothing is left, here and there."""
    return result["left"] == [] and modal.running() == []


def asked(modal: FakeModal) -> Any:
    return modal.asked("SandboxCreateV2")[-1]


def tags_of(request: Any) -> dict[str, str]:
    return {tag.tag_name: tag.tag_value for tag in request.tags}


# What is asked of Modal


def test_a_container_has_a_name_tags_limits_no_network_and_the_trials_lifetime(
    trial: Trial, modal: FakeModal
) -> None:
    settings = {"cpu": 0.5, "memory_mib": 2000, "region": "eu", "idle_s": 50, "grace_s": 40.0}
    result = trial(*EVERYTHING, settings=settings)
    assert result["hear"] == "1" and result["freeze"] == ["link", "probe"] and result["close"] is None
    assert settled(result, modal)
    request, wanted = asked(modal), asked(modal).definition
    assert wanted.timeout_secs == 60 + 100 + 2 * 30 + 40 and wanted.idle_timeout_secs == 50
    assert wanted.network_access.network_access_type == api.NetworkAccess.BLOCKED
    assert list(wanted.scheduler_placement.regions) == ["eu"]
    resources = wanted.resources
    assert (resources.milli_cpu, resources.milli_cpu_max) == (500, 500)
    assert (resources.memory_mb, resources.memory_mb_max) == (2000, 2000)
    tags = tags_of(request)
    run, place, unique = wanted.name.rsplit(".", 2)
    assert run == tags["run"] and place == tags["trial"] == "step-3--task-7" and tags["attempt"] == "1"
    assert tags["bartleby"].endswith(unique) and len(wanted.name) < 64
    assert not wanted.secret_ids and not request.secret_sources


def test_memory_is_what_the_limits_add_up_to_and_the_network_is_there_if_it_is_asked_for(
    trial: Trial, modal: FakeModal
) -> None:
    limits = {"memory_bytes": 100 << 20, "world_bytes": 20 << 20, "tmp_bytes": 30 << 20}
    assert settled(trial("close", limits=limits, settings={"network": True}), modal)
    wanted = asked(modal).definition
    assert wanted.resources.memory_mb == wanted.resources.memory_mb_max == 662
    assert wanted.network_access.network_access_type == api.NetworkAccess.OPEN


@pytest.mark.parametrize(
    ("image", "secret", "auth"),
    [
        ("000000000000.dkr.ecr.eu-west-1.amazonaws.com/office:3", "registry", "REGISTRY_AUTH_TYPE_AWS"),
        ("python:3.11", "", "REGISTRY_AUTH_TYPE_UNSPECIFIED"),
    ],
)
def test_an_image_comes_from_any_registry_and_ecr_is_opened_by_a_named_secret(
    trial: Trial, modal: FakeModal, image: str, secret: str, auth: str
) -> None:
    assert settled(trial("close", settings={"image": image, "secret": secret}), modal)
    assert f"FROM {image}" in list(modal.images[-1].dockerfile_commands)
    registry = modal.images[-1].image_registry_config
    assert registry.registry_auth_type == getattr(api, auth) and bool(registry.secret_id) == bool(secret)
    assert [one.deployment_name for one in modal.asked("SecretGetOrCreate")] == ([secret] if secret else [])


# Modal at fault


def test_a_service_that_is_away_for_a_moment_is_asked_again(trial: Trial, modal: FakeModal) -> None:
    modal.inject("SandboxCreateV2", Status.UNAVAILABLE, Status.RESOURCE_EXHAUSTED, Status.RESOURCE_EXHAUSTED)
    result = trial(*EVERYTHING)
    assert result["hear"] == "1" and settled(result, modal)
    assert tags_of(asked(modal))["attempt"] == "3" and len(modal.containers) >= 1


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (
            "UNAVAILABLE",
            "start: Modal is not available (UNAVAILABLE) after 2 attempts: ServiceError: injected",
        ),
        (
            "RESOURCE_EXHAUSTED",
            "start: Modal has no room or no quota left (RESOURCE_EXHAUSTED) after 2 attempts: Resource",
        ),
        (
            "PERMISSION_DENIED",
            "start: Modal refuses the token after 1 attempt: PermissionDeniedError: injected",
        ),
        ("INVALID_ARGUMENT", "start: Modal refuses this after 1 attempt: InvalidError: injected"),
    ],
)
def test_a_create_that_goes_on_failing_is_one_line_that_says_how(
    trial: Trial, modal: FakeModal, status: str, cause: str
) -> None:
    modal.inject("SandboxCreateV2", *[Status[status]] * SDK_TRIES)
    result = trial(*EVERYTHING, settings={"attempts": 2})
    assert result["start"].startswith(cause) and "\n" not in result["start"], result["start"]
    assert modal.running() == []
    left_in_doubt = status == "UNAVAILABLE"
    assert bool(result["left"]) == left_in_doubt


@pytest.mark.parametrize("when", ["SandboxCreateV2", "SandboxCreateV2 made"])
def test_a_create_that_hangs_ends_at_the_deadline_and_what_it_made_is_ended(
    trial: Trial, modal: FakeModal, when: str
) -> None:
    modal.inject(when, "hang")
    result = trial(*EVERYTHING, limits={"start_s": 6.0})
    assert result["start"] == "start: create: no answer from Modal within the 6 s of the start"
    assert modal.running() == [] and result["seconds"] < 60
    assert bool(result["left"]) == (when == "SandboxCreateV2")


def test_a_container_that_was_made_without_an_answer_is_the_one_that_is_used(
    trial: Trial, modal: FakeModal
) -> None:
    before = len(modal.containers)
    modal.inject("SandboxCreateV2 made", *[Status.PERMISSION_DENIED] * 0, *[Status.UNAVAILABLE] * 4)
    result = trial(*EVERYTHING)
    assert result["hear"] == "1" and settled(result, modal)
    assert len(modal.containers) == before + 1


def test_a_token_that_is_refused_or_missing_is_one_line(modal: FakeModal, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(modal.config.read_text().replace("as-test", "as-else"))
    with pytest.raises(
        SandboxError, match="^start: image: Modal refuses the token: AuthError: no such token$"
    ):
        choose_sandbox("modal", {"image": "python:3.11", "config": str(other)})
    assert token_fault(str(tmp_path / "none.toml")) == (
        f"sandbox modal needs a token in {tmp_path}/none.toml (No such file or directory): "
        "run `modal token new` or `modal token set`"
    )
    other.write_text("[default]\nactive = true\n")
    assert token_fault(str(other)).startswith(f"sandbox modal needs a token, got none in {other}: run ")
    other.write_text("[default\n")
    assert token_fault(str(other)).startswith(f"sandbox modal needs a token in {other} (")


def test_a_client_that_has_read_another_token_is_not_used_with_this_one(trial: Trial, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text('[default]\ntoken_id = "ak-x"\ntoken_secret = "as-x"\n')
    said = trial(settings={"config": str(other)})["start"]
    assert said.startswith("start: config must be ") and said.endswith(f"has read, got {other}")


def test_a_secret_that_modal_does_not_have_is_told(trial: Trial) -> None:
    image = "000000000000.dkr.ecr.eu-west-1.amazonaws.com/office:3"
    said = trial(settings={"image": image, "secret": "nobody"})["start"]
    assert said.startswith("start: Modal refuses this after 1 attempt: NotFoundError: ") and "nobody" in said


# The container at fault


def test_a_command_that_hangs_ends_at_the_deadline(trial: Trial, modal: FakeModal) -> None:
    modal.inject("TaskExecStart", "hang")
    result = trial(*EVERYTHING, limits={"start_s": 8.0})
    assert result["start"].startswith("start: unpacking: no end within ") and settled(result, modal)


@pytest.mark.parametrize(
    ("word", "step", "cause"),
    [
        ("arrive", "start", "start: unpacking: exit 137 (killed, as when memory is short)"),
        ("serve", "start", "start: tool server exit 137 (killed, as when memory is short)"),
        ("freeze", "freeze", "freeze: killing: exit 137 (killed, as when memory is short)"),
    ],
)
def test_a_program_killed_for_memory_is_told_as_that(
    trial: Trial, modal: FakeModal, word: str, step: str, cause: str
) -> None:
    modal.exit_next(word, 137)
    result = trial(*EVERYTHING)
    assert result[step] == cause and settled(result, modal)


def test_a_container_that_vanishes_is_told_and_leaves_nothing(
    trial: Trial, modal: FakeModal, fleet: LocalFleet
) -> None:
    async def vanish(modal: FakeModal, request: Any) -> None:
        del request
        for one in list(modal.containers.values()):
            await modal.end(one, api.GenericResult.GENERIC_STATUS_TERMINATED)

    modal.inject("TaskExecWait", lambda modal, request: _nothing(), vanish)
    result = trial("until_dead", "freeze", "close")
    assert result["until_dead"].startswith("tool server lost, container gone (exit 137): NotFoundError"), (
        result
    )
    assert result["freeze"].startswith("freeze: killing: Modal refuses this: ") and result["close"] is None
    assert settled(result, modal)


async def _nothing() -> None:
    return None


def test_an_end_that_fails_once_is_asked_for_again(trial: Trial, modal: FakeModal) -> None:
    modal.inject("SandboxTerminateV2", Status.PERMISSION_DENIED)
    result = trial(*EVERYTHING)
    assert result["close"] is None and settled(result, modal)
    assert len(modal.asked("SandboxTerminateV2")) == 2


def test_an_end_that_cannot_be_confirmed_is_an_error_and_left_to_the_next_run(
    trial: Trial, modal: FakeModal, scratch: Path
) -> None:
    modal.inject("SandboxTerminateV2", *["hang"] * SDK_TRIES)
    result = trial("hear", "close", limits={"stop_s": 3.0})
    assert result["close"] == "close: Modal did not confirm the end within 3 s"
    assert len(modal.running()) == 1 and len(result["left"]) >= 1
    modal.faults.clear()
    assert removal.reap_remote(scratch) == {} and modal.running() == []


@pytest.mark.parametrize(
    ("said", "zeros", "cause"),
    [
        ({"left": ["7"]}, 0, "processes in the container do not die: ['7']"),
        ([["../x", "file", 1, ""]], 1 << 20, "world: entry must be a path inside"),
        ([["x", "file", 5, ""]], 0, "world: parcel must hold what its listing says"),
    ],
)
def test_what_comes_back_is_not_trusted(
    trial: Trial, modal: FakeModal, said: Any, zeros: int, cause: str
) -> None:
    lines = [said] if isinstance(said, dict) else [{"left": []}, said]
    modal.answer_next(
        "freeze", b"".join(json.dumps(line).encode() + b"\n" for line in lines), then_zeros=zeros
    )
    result = trial("freeze", "close")
    assert result["freeze"].startswith(f"freeze: {cause}") and "\n" not in result["freeze"], result
    assert result["close"] is None and settled(result, modal)


@pytest.mark.parametrize(
    ("listing", "zeros"),
    [([], 400 << 20), ([["x", "file", 400 << 20, ""]], 0)],
    ids=["sent", "told"],
)
def test_a_world_beyond_what_was_given_is_graded_as_it_was(
    trial: Trial, modal: FakeModal, world: Path, listing: Any, zeros: int
) -> None:
    """No fault of the system: filling the disk would be a way to be tried again."""
    lines = [{"left": []}, listing]
    modal.answer_next(
        "freeze", b"".join(json.dumps(each).encode() + b"\n" for each in lines), then_zeros=zeros
    )
    result = trial("freeze", "close")
    assert result["freeze"] == [], result
    assert result["close"] is None and settled(result, modal)


def test_an_image_of_another_protocol_is_refused(trial: Trial, modal: FakeModal) -> None:
    for version in ("1.9.4", ""):
        modal.answer_next("arrive", json.dumps({"processes": {}, "mcp": version, "uid": 0}).encode())
        wanted = ".".join(metadata.version("mcp").split(".")[:2])
        said = trial(*EVERYTHING)["start"]
        assert said == f"start: image must have mcp {wanted}, got {version or 'none'}"


# What a dead trial leaves


def test_a_trial_that_the_fleet_kills_leaves_no_container(
    trial: Trial, modal: FakeModal, fleet: LocalFleet, scratch: Path, world: Path
) -> None:
    del trial
    settings = {"image": "python:3.11", "config": str(modal.config)}
    spec = {"world": f"{world}", "scratch": f"{scratch}", "steps": ["linger"], "modal": settings}
    spec |= {"limits": {"start_s": 60.0, "stop_s": 30.0}, "deadline_s": 300.0}
    fleet.start({"trial_id": "lingers", **spec})
    _until(lambda: len(modal.asked("TaskExecStart")) == 2)
    assert len(modal.running()) == 1
    fleet.cancel("lingers")
    (result,) = fleet.poll(60)
    assert result["outcome"]["kind"] == "cancelled"
    _until(lambda: modal.running() == [] and os.listdir(scratch) == ["fleet.log"])


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# The doors


def test_choose_sandbox_fetches_the_image_and_says_what_it_promises(modal: FakeModal, tmp_path: Path) -> None:
    settings = asdict(ModalSettings(image="python:3.11", config=str(modal.config)))
    kind, line = choose_sandbox("modal", settings)
    assert kind == "modal" and "no network" in line and "\n" not in line
    assert modal.asked("ImageGetOrCreate")
    with pytest.raises(SandboxError, match=r"sandbox modal needs a token in .*none.toml"):
        choose_sandbox("modal", {**settings, "config": str(tmp_path / "none.toml")})
    modal.inject("ImageGetOrCreate", Status.INVALID_ARGUMENT)
    with pytest.raises(SandboxError, match="start: image: Modal refuses this: InvalidError: injected"):
        choose_sandbox("modal", settings)


def test_settings_are_json_and_say_what_is_wrong_with_them(tmp_path: Path) -> None:
    settings = ModalSettings(image="python:3.11")
    assert ModalSettings(**json.loads(json.dumps(asdict(settings)))) == settings
    assert os.path.isabs(settings.config)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"image": ""}, "image must name an image of a registry, got nothing"),
        ({"image": "x", "cpu": 0}, "cpu must be positive, got 0"),
        ({"image": "x", "idle_s": -1}, "idle_s must not be negative, got -1"),
    ]
    for given, cause in wrong:
        with pytest.raises(ValueError, match=cause):
            ModalSettings(**given)
    with pytest.raises(ValueError, match="modal must be settings with an image, got none"):
        open_sandbox("modal", tmp_path, tmp_path, answer, agent_s=1.0)
    with pytest.raises(ValueError, match="agent_s must be positive and finite, got inf"):
        open_sandbox("modal", tmp_path, tmp_path, answer, modal={"image": "x"})
    with pytest.raises(SandboxError, match="the tool server must have an order or be a function of a module"):
        open_sandbox("modal", tmp_path, tmp_path, lambda fd, root: None, agent_s=1.0, modal={"image": "x"})
