"""The files in deploy/: they say what their readers expect, and the commands in them run."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.support import forked, pipes
from tests.support.coordinators import free_port
from tests.support.jobs import LAUNCHERS, Job, finish_all, new_job
from tests.support.waiting import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAGES = 9100
"""The port of the pages in containers."""
KUBERNETES = ("1.28", "1.33")
"""The oldest and the newest version against whose published schemas the manifests are checked."""
SRUN = """#!/bin/sh
# Starts as many tasks as the job has, with the variables that Slurm documents.
while [ "${1#--}" != "$1" ]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=here
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" &
SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; first=$?
wait $!; second=$?
exit $((first ? first : second))
"""


@pytest.fixture
def job() -> Iterator[Job]:
    with new_job() as made:
        yield made


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def environment(job: Job, **more: object) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    clean |= {
        "PYTHONPATH": str(ROOT / "src"),
        "TMPDIR": str(job.temp),
        "XDG_RUNTIME_DIR": str(job.temp),
        "COVEY_HOME": str(job.home),
    }
    return clean | {name: str(value) for name, value in more.items()}


def local(command: list[str]) -> list[str]:
    """Return a command of a container as this machine can run it."""
    here = [part.replace("/opt/covey/examples", str(ROOT / "examples")) for part in command]
    programs = {"python": [sys.executable], "covey": [sys.executable, "-m", "covey"]}
    return [*programs.get(here[0], here[:1]), *here[1:]]


def begin(job: Job, command: list[str], **env: object) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = forked.Popen(command, env=environment(job, **env), text=True, start_new_session=True, **pipes)
    job.processes.append(process)
    return process


@pytest.mark.thorough
def test_the_image_is_as_the_linter_wants_it() -> None:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert linter is not None
    checked = subprocess.run([linter, "--no-color", DEPLOY / "docker/Dockerfile"], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "")


@pytest.mark.thorough
def test_manifests_fit_the_published_schemas() -> None:
    import kubernetes_validate

    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for document in documents(f"kubernetes/{file.name}"):
            for version in KUBERNETES:
                kubernetes_validate.validate(document, version, strict=True)


def test_the_parts_of_the_manifests_name_each_other() -> None:
    service, work = documents("kubernetes/job.yaml")  # and no budget: one that Jobs can have may block drains
    container = work["spec"]["template"]["spec"]["containers"][0]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert {work["spec"]["completions"], work["spec"]["parallelism"], int(env["WORLD_SIZE"])} == {4}
    names = (service["metadata"]["name"], work["spec"]["template"]["spec"]["subdomain"])
    assert env["MASTER_ADDR"] == f"{work['metadata']['name']}-0.{names[0]}"
    assert names[0] == names[1]
    assert service["spec"]["ports"][0]["port"] == container["ports"][0]["containerPort"] == 29501
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    for probe, page in (("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        asked = container[probe]["httpGet"]
        assert (asked["path"], ports[asked["port"]]) == (page, PAGES)


def test_the_containers_of_compose_run_as_the_user_who_made_the_secret() -> None:
    [composed] = documents("docker/compose.yaml")
    node, user = composed["services"]["node"], "${NODE_UID:-1000}"
    assert node["user"] == user
    assert f"/home/covey:uid={user},mode=0700" in node["tmpfs"]
    commands = [line.removeprefix("#     ") for line in (DEPLOY / "docker/compose.yaml").read_text().splitlines()]
    assert "(umask 077; openssl rand -hex 32 > deploy/docker/secret)" in commands
    assert "NODE_UID=$(id -u) docker compose -f deploy/docker/compose.yaml up --build" in commands
    assert "HEALTHCHECK --" not in (DEPLOY / "docker/Dockerfile").read_text()  # an image does not know its command


def page(port: int, path: str) -> int:
    """Return the status of a page, once it is served."""

    def asked() -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    wait_until(asked)
    return asked()


def test_what_the_containers_run_trains_a_model_and_tells_of_its_health(job: Job) -> None:
    [composed] = documents("docker/compose.yaml")
    secret = job.folder / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(32))
    node = composed["services"]["node"]
    number, size = node["deploy"]["replicas"], 2
    ports = iter([free_port() for _ in range(number + size)])

    def here(command: list[str], port: int) -> list[str]:
        assert any(str(PAGES) in part for part in command)
        return local([part.replace(str(PAGES), str(port)) for part in command])

    known = {"COVEY_SECRET_FILE": secret, "COVEY_INTERFACES": "lo"}
    assert node["command"][0] == "run"
    nodes = [begin(job, here(["covey", *node["command"]], first := next(ports)), **known)]
    assert page(first, "/healthz") == 200  # it waits for the others, and is healthy
    kind, *check = node["healthcheck"]["test"]
    assert kind == "CMD"
    assert subprocess.run(here(check, first), timeout=DEADLINE).returncode == 0
    assert subprocess.run(here(check, free_port()), stderr=subprocess.DEVNULL, timeout=DEADLINE).returncode == 1
    nodes += [begin(job, here(["covey", *node["command"]], next(ports)), **known) for _ in range(number - 1)]
    _, work = documents("kubernetes/job.yaml")
    pod = work["spec"]["template"]["spec"]["containers"][0]
    pods = []
    for rank in range(size):
        env = {"JOB_COMPLETION_INDEX": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
        pods.append(begin(job, here(pod["command"], port := next(ports)), **env))
        if rank == 0:
            assert page(port, pod["livenessProbe"]["httpGet"]["path"]) == 200
            assert page(port, pod["readinessProbe"]["httpGet"]["path"]) == 503  # it is in no run yet
    for processes in (nodes, pods):
        ended = finish_all(processes)
        assert [each.code for each in ended] == [0] * len(processes), "\n".join(each.err for each in ended)
        assert f"{len(processes)} ranks found [1." in "".join(each.out for each in ended)


def test_the_coordinator_of_the_manifest_becomes_ready(job: Job) -> None:
    service, kept = documents("kubernetes/coordinator.yaml")
    container = kept["spec"]["template"]["spec"]["containers"][0]
    assert service["spec"]["selector"] == kept["spec"]["template"]["metadata"]["labels"]
    assert service["metadata"]["name"] == kept["spec"]["serviceName"]
    ports = {service["spec"]["ports"][0]["port"], container["ports"][0]["containerPort"]}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def here(command: list[str]) -> list[str]:
        """Return a command with a port and folders of this test; on loopback, but with the secret all the same."""
        assert any(f":{each}" in part for part in command for each in ports)
        replaced = [part.replace(":29300", f":{port}").replace("0.0.0.0", "127.0.0.1") for part in command[1:]]
        return [sys.executable, "-m", "covey", *(part.replace("/state", str(job.folder)) for part in replaced)]

    secret = job.folder / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(32))
    coordinator = begin(job, here(container["command"]), COVEY_SECRET_FILE=secret)
    assert "with the secret of the cluster" in pipes.stdout(coordinator).readline()
    probe = begin(job, here(container["readinessProbe"]["exec"]["command"]), COVEY_SECRET_FILE=secret)
    assert finish_all([probe])[0].out == "No worker has registered yet.\n"
    coordinator.terminate()
    assert finish_all([coordinator])[0].code == 0


@pytest.mark.thorough
def test_a_slurm_job_is_queued_again_when_a_rank_fails(job: Job) -> None:
    programs = job.folder / "bin"
    programs.mkdir()
    said = job.folder / "said"
    for name, text in (("srun", SRUN), ("scontrol", f'#!/bin/sh\necho "$@" >> {said}\n')):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    failing = job.folder / "failing.py"
    failing.write_text(
        "import covey\nwith covey.join() as group:\n    group.barrier()\n    assert group.rank\n    group.barrier()"
    )
    script, works = str(DEPLOY / "slurm/train.sbatch"), str(ROOT / "examples/data_parallel.py")
    path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    jobs = [
        begin(job, ["bash", script, program], PATH=path, SLURM_JOB_ID=number, SLURM_RESTART_COUNT=restarts)
        for number, program, restarts in ((7, works, 0), (8, str(failing), 2), (9, str(failing), 3))
    ]
    good, failed, exhausted = finish_all(jobs)
    assert (good.code, failed.code, exhausted.code) == (0, 1, 1), good.err
    assert "2 ranks found [1." in good.out
    assert said.read_text() == "requeue 8\n"
