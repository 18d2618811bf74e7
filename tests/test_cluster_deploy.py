"""The files of `examples/cluster/`, as far as they can be checked without a cluster."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from eventful import __version__
from eventful.remote import session
from eventful.surgery.libraries import folder

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "examples" / "cluster"
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "ENTRYPOINT", "CMD"}


def instructions(text: str) -> list[tuple[str, str]]:
    """Lines of a container file, joined where they go on."""
    joined = re.sub(r"\\\n", " ", "\n".join(x for x in text.splitlines() if x[:1] != "#"))
    lines = [line.strip() for line in joined.splitlines() if line.strip()]
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines]


def test_the_container_file_is_sound() -> None:
    """What linters refuse: tags left out, root, caches kept, forms that a shell would split."""
    made = instructions((FILES / "Containerfile").read_text())
    assert {name for name, _ in made} <= INSTRUCTIONS
    assert made[0][0] == "FROM"
    tag = made[0][1].rpartition(":")[2]
    assert tag not in ("", "latest", made[0][1])
    for name, rest in made:
        if name == "RUN":
            assert shlex.split(rest)
            assert "sudo" not in rest
            if "apt-get install" in rest:
                assert all(
                    part in rest for part in ("--no-install-recommends", "rm -rf /var/lib/apt")
                )
            if "pip install" in rest:
                assert "--no-cache-dir" in rest
                assert "--constraint" in rest
        if name in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(rest), list)
        if name == "ENV":
            assert all("=" in part for part in shlex.split(rest))
        if name == "COPY":
            for source in shlex.split(rest)[:-1]:
                assert source.startswith("dist/") or (ROOT / source).is_file()
    users = [rest for name, rest in made if name == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    names = [name for name, _ in made]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    extras = re.search(r"\[([a-z,]+)\]", next(r for n, r in made if "pip install" in r))
    assert extras is not None
    assert {"cluster", "parquet"} <= set(extras[1].split(","))  # results = "parquet", too


def test_the_file_of_ray_up_fits_rays_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    session.imported()
    schema = json.loads((folder("ray") / "autoscaler" / "ray-schema.json").read_text())
    given = yaml.safe_load((FILES / "ray-up.yaml").read_text())
    jsonschema.validate(given, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**given, "no_such_field": 1}, schema)
    assert len(given["provider"]["worker_ips"]) == given["max_workers"]
    starts = [*given["head_start_ray_commands"], *given["worker_start_ray_commands"]]
    for command in (text for text in starts if "ray start" in text):
        assert "RAY_AUTH_MODE=token" in command
        assert "--disable-usage-stats" in command


def test_options_of_ray_start_exist() -> None:
    session.imported()
    text = (folder("ray") / "scripts" / "scripts.py").read_text()
    known = set(re.findall(r'"(--[a-z-]+)"', text))
    given = yaml.safe_load((FILES / "ray-up.yaml").read_text())
    starts = [*given["head_start_ray_commands"], *given["worker_start_ray_commands"]]
    used = {option for text in starts for option in re.findall(r"--[a-z-]+", text)}
    manifest = documents()["RayCluster"]["spec"]
    groups = [manifest["headGroupSpec"], *manifest["workerGroupSpecs"]]
    used |= {f"--{name}" for group in groups for name in group["rayStartParams"]}
    assert used
    assert used <= known


def documents() -> dict[str, Any]:
    loaded = yaml.safe_load_all((FILES / "raycluster.yaml").read_text())
    return {document["kind"]: document for document in loaded}


def test_the_manifest_has_the_fields_of_a_ray_cluster() -> None:
    """Field names are those of KubeRay's reference, written down here; no server checked them."""
    made = documents()["RayCluster"]
    assert made["apiVersion"] == "ray.io/v1"
    spec = made["spec"]
    assert set(spec) <= {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    assert spec["authOptions"] == {"mode": "token"}
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert spec["rayVersion"] == pinned[1]
    assert set(spec["headGroupSpec"]) <= {"serviceType", "rayStartParams", "template"}
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"  # not open to the outside
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        mounted = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container["image"] == f"eventful-ray:{__version__}"
            assert container["resources"]["requests"] == container["resources"]["limits"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= mounted
    for group in spec["workerGroupSpecs"]:
        fields = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams"}
        assert set(group) == fields | {"template"}
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_only_the_cluster_itself_reaches_rays_ports() -> None:
    policy, cluster = documents()["NetworkPolicy"]["spec"], documents()["RayCluster"]
    own = {"ray.io/cluster": cluster["metadata"]["name"]}
    assert policy["podSelector"]["matchLabels"] == own
    for rule in policy["ingress"]:
        inside = [peer.get("podSelector", {}).get("matchLabels") == own for peer in rule["from"]]
        assert rule["from"]
        assert all(inside) or {port["port"] for port in rule["ports"]} <= {6379, 8080, 9464}


def expressions() -> list[str]:
    groups = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def test_alerts_name_metrics_of_a_run() -> None:
    used = {name for text in expressions() for name in re.findall(r"\beventful_\w+", text)}
    text = (ROOT / "src" / "eventful" / "cluster" / "status.py").read_text()
    assert len(used) >= 5
    for name in used:
        assert re.search(rf'["_]{name.removeprefix("eventful_cluster_")}\b', text), name


def test_prometheus_reaches_the_port_of_a_run() -> None:
    named = {port["port"] for rule in documents()["NetworkPolicy"]["spec"]["ingress"]
             for port in rule.get("ports", ())}  # fmt: skip
    page = (ROOT / "docs" / "cluster-deploy.md").read_text()
    assert set(map(int, re.findall(r"--metrics 0\.0\.0\.0:(\d+)", page))) <= named


def test_alerts_name_metrics_of_ray() -> None:
    session.imported()
    used = {name for text in expressions() for name in re.findall(r"\bray_\w+", text)}
    sources = [folder("ray") / "dashboard" / "modules" / "reporter" / "reporter_agent.py"]
    sources += (folder("ray") / "dashboard" / "modules" / "metrics").rglob("*.py")
    text = "".join(path.read_text() for path in sources)
    assert used
    for name in used:
        assert name.removeprefix("ray_") in text
