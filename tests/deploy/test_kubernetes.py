"""deploy/kubernetes: valid, and of one mind with the worker about ports, streams, pages and the time to stop."""

import asyncio
import http.client
import importlib.util
from contextlib import closing
from functools import cache
from typing import Any

import pytest

from gllm.keys import GROUP, PRIORITIES, Keys
from tests.deploy.files import DEPLOY, VARIABLES, dockerfile, documents
from worker.bridge import STOP_SECONDS
from worker.config import Settings, resolve
from worker.health import Health, serve
from worker.metrics import Metrics
from worker.running import LAST_WORDS_SECONDS

FOLDER = DEPLOY / "kubernetes"
FILES = sorted(path for path in FOLDER.rglob("*.yaml") if path.name != "kustomization.yaml")
VERSIONS = ("1.27.0", "1.37.0")  # the oldest with everything that stands here, and the newest that the schemas know


@cache
def objects(variant: str = "cpu") -> dict[str, dict[str, Any]]:
    """A variant's objects by kind, the GPU variant's patch put onto the CPU variant."""
    found = [document for path in sorted((FOLDER / "cpu").glob("*.yaml")) for document in documents(path)]
    by_kind = {document["kind"]: document for document in found if document["kind"] != "Kustomization"}
    if variant == "gpu":
        (patch,) = documents(FOLDER / "gpu" / "worker.yaml")
        by_kind["Deployment"] = patched(by_kind["Deployment"], patch)
    return by_kind


def patched(base: Any, patch: Any) -> Any:
    """As kustomize does it, as far as our patch goes: tables are merged, and lists by the names of their entries."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {name: patched(base.get(name), patch.get(name)) for name in {**base, **patch}}
    if isinstance(base, list) and isinstance(patch, list):
        entries = [{entry["name"]: entry for entry in entries} for entries in (base, patch)]
        return list(patched(*entries).values())
    return base if patch is None else patch


def pod(variant: str = "cpu") -> dict[str, Any]:
    return objects(variant)["Deployment"]["spec"]["template"]


def container(variant: str = "cpu") -> dict[str, Any]:
    (only,) = pod(variant)["spec"]["containers"]
    return only


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_manifests_keep_to_the_published_schemas(variant: str, version: str) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate, which brings the schemas of Kubernetes, is not installed")
    import kubernetes_validate

    checked = [document for document in objects(variant).values() if not document["apiVersion"].startswith("keda.sh/")]
    assert len(checked) == 3  # of KEDA the package has no schemas: test_scaling_… look closely
    for document in checked:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_kustomization_names_every_file(variant: str) -> None:
    (kustomization,) = documents(FOLDER / variant / "kustomization.yaml")
    named = {name for name in kustomization["resources"] if name.endswith(".yaml")}
    named |= {patch["path"] for patch in kustomization.get("patches", [])}
    assert named == {path.name for path in FILES if path.parent.name == variant}
    assert [image["name"] for image in kustomization["images"]] == [container()["image"]]


def test_everything_means_the_same_pods() -> None:
    labels, found = pod()["metadata"]["labels"], objects()
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    (spread,) = pod()["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == labels
    assert found["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]


def environment(variant: str = "cpu") -> dict[str, str]:
    """What the worker is told in plain text. Its threads are the number of CPUs that it may use."""
    worker = container(variant)
    told = {entry["name"]: entry.get("value", "") for entry in worker["env"]}
    return told | {"GLLM_THREADS": worker["resources"]["limits"]["cpu"]}


def test_worker_understands_what_its_pod_tells_it() -> None:
    assert set(environment("gpu")) <= VARIABLES
    cpu, gpu = (resolve({}, environment(variant)).settings for variant in ("cpu", "gpu"))
    assert (cpu.model, cpu.device, cpu.threads, cpu.kv_memory) == ("smollm2", "auto", 4, 2**30)
    assert (gpu.model, gpu.device, gpu.kv_memory) == ("/models/model", "cuda", None)
    assert pod()["spec"]["enableServiceLinks"] is False


def test_pod_gives_the_worker_the_time_it_needs_to_stop() -> None:
    name, before = container()["lifecycle"]["preStop"]["exec"]["command"]
    grace = resolve({}, environment()).settings.grace
    assert name == "sleep"
    assert pod()["spec"]["terminationGracePeriodSeconds"] >= int(before) + grace + LAST_WORDS_SECONDS + STOP_SECONDS


async def test_probes_ask_for_pages_that_the_worker_has() -> None:
    (port,) = container()["ports"]
    assert port["containerPort"] == Settings().metrics_port
    probes = {name: container()[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    async with serve("127.0.0.1", 0, Health(), Metrics()) as address:  # of a worker that has just started
        pages = {name: await asyncio.to_thread(status, address.port, probe["path"]) for name, probe in probes.items()}
    assert pages == {"startupProbe": 200, "livenessProbe": 200, "readinessProbe": 503}


def status(port: int, path: str) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


def test_pod_may_do_nothing_that_it_need_not() -> None:
    user = dict(dockerfile())["USER"].split(":")
    context = pod()["spec"]["securityContext"]
    assert [str(context["runAsUser"]), str(context["runAsGroup"])] == user
    assert context["runAsNonRoot"] is True
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert [mount["mountPath"] for mount in container()["volumeMounts"]] == ["/tmp"]
    assert pod()["spec"]["automountServiceAccountToken"] is False


def test_network_is_open_for_metrics_redis_and_names_only() -> None:
    policy = objects()["NetworkPolicy"]["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert [port["port"] for rule in policy["ingress"] for port in rule["ports"]] == ["metrics"]
    assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == [53, 53, 6379]


def triggers() -> list[dict[str, str]]:
    found = objects()["ScaledObject"]["spec"]["triggers"]
    assert {trigger["type"] for trigger in found} == {"redis-streams"}
    return [trigger["metadata"] for trigger in found]


def test_scaling_looks_at_the_streams_of_the_queue_that_is_served() -> None:
    queue = environment()["GLLM_QUEUE"]
    lag = [trigger["stream"] for trigger in triggers() if "lagCount" in trigger]
    length = [trigger["stream"] for trigger in triggers() if "streamLength" in trigger]
    assert lag == length == Keys(queue).streams(1)
    assert len(triggers()) == 2 * len(PRIORITIES)


def test_scaling_by_lag_names_the_group_and_by_length_does_not() -> None:
    """KEDA looks at the length only when no group is named, and wants an activation where lag is meant."""
    for trigger in triggers():
        assert ("lagCount" in trigger) == (trigger.get("consumerGroup") == GROUP) == ("activationLagCount" in trigger)
        assert all(isinstance(value, str) for value in trigger.values())
        assert int(trigger.get("streamLength", 1)) <= Settings().max_sequences


def test_scaling_keeps_a_worker_and_knows_the_password() -> None:
    scaled = objects()["ScaledObject"]["spec"]
    assert 1 <= scaled["minReplicaCount"] < scaled["maxReplicaCount"]
    secret = next(entry["valueFrom"]["secretKeyRef"] for entry in container()["env"] if entry["name"] == "GLLM_REDIS")
    login = objects()["TriggerAuthentication"]
    assert {trigger["authenticationRef"]["name"] for trigger in scaled["triggers"]} == {login["metadata"]["name"]}
    assert login["spec"]["secretTargetRef"] == [{"parameter": "password", "name": secret["name"], "key": "password"}]
