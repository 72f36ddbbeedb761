"""The manifests that the launch scripts send to Kubernetes, as the golden files have them."""

import functools
import os
from pathlib import Path

import pytest
import yaml

from tests.fakes.launch import CASES, GOLDENS, ROOT


def manifests(name):
    """The manifests of a golden file: what lies between its commands."""
    text = (GOLDENS / f"{name}.txt").read_text()
    blocks = "\n".join(line if line.startswith(" ") else "\0" for line in text.splitlines()).split("\0")
    return [yaml.safe_load(block) for block in blocks if block.strip()]


KUBE_CASES = [name for name in CASES if name.startswith(("gke", "ray")) and "delete" not in name]


@pytest.mark.parametrize("name", KUBE_CASES)
def test_manifests_have_the_fields_of_the_published_apis(name):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema, of tests/requirements.txt, is not installed")
    schemas = yaml.safe_load((ROOT / "tests/data/launch_schemas.yaml").read_text())
    for manifest in manifests(name):
        kind = f"{manifest['apiVersion']} {manifest['kind']}"
        schema = (
            published(os.environ["DORA_CRDS"])[kind]
            if "DORA_CRDS" in os.environ
            else {
                "$defs": schemas["$defs"],
                "additionalProperties": False,
                "properties": {
                    "apiVersion": {},
                    "kind": {},
                    "metadata": {"$ref": "#/$defs/metadata"},
                    "spec": schemas[kind],
                },
            }
        )
        jsonschema.Draft202012Validator(schema).validate(manifest)


@functools.cache
def published(folder):
    """Kind -> schema of the custom resource definitions in a folder, made strict: what they do not name is refused."""
    found = {}
    for file in Path(folder).glob("*.yaml"):
        definition = yaml.load(file.read_text(), yaml.CSafeLoader)["spec"]
        for version in definition["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            found[f"{definition['group']}/{version['name']} {definition['names']['kind']}"] = schema
    return found


def strict(schema):
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(part) for key, part in schema.items()}
    if isinstance(made.get("properties"), dict) and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made


@pytest.mark.parametrize("name, kinds", [("gke_queue", ["JobSet"] * 3), ("ray_queue", ["RayJob"])])
def test_each_object_names_the_kueue_queue_it_waits_in(name, kinds):
    found = manifests(name)
    assert [manifest["kind"] for manifest in found] == kinds
    assert all(each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a" for each in found)


def pods(tree):
    """Every pod template in a manifest, with the labels it gives."""
    if isinstance(tree, dict):
        if "containers" in tree.get("spec", {}):
            yield tree
        tree = list(tree.values())
    for part in tree if isinstance(tree, list) else ():
        yield from pods(part)


@pytest.mark.parametrize("name", KUBE_CASES)
def test_no_two_roles_share_a_world_and_no_secret_is_spelt_out(name):
    roles = [pod["metadata"]["labels"]["dora-role"] for manifest in manifests(name) for pod in pods(manifest)]
    assert sorted(roles) == ["controller", "rollout", "trainer"]  # one Job or group each, so one TPU_NAME each
    text = (GOLDENS / f"{name}.txt").read_text()
    assert "MEGASCALE" not in text and "JAX_COORDINATOR" not in text
    for manifest in manifests(name):
        for pod in pods(manifest):
            for container in pod["spec"]["containers"]:
                assert {entry["name"] for entry in container.get("env", [])} <= {
                    "DORA_MODULE",
                    "DORA_TOKEN_FILE",
                    "TPU_NAME",
                }


def test_a_role_has_the_slice_that_was_asked_for():
    chips = {
        pod["metadata"]["labels"]["dora-role"]: pod["spec"]["containers"][0]["resources"]
        .get("limits", {})
        .get("google.com/tpu")
        for manifest in manifests("gke")
        for pod in pods(manifest)
    }
    assert chips == {"controller": None, "trainer": "4", "rollout": "8"}
    workers = {
        group["groupName"]: group
        for manifest in manifests("ray")
        for group in manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    }
    assert {role: (group["replicas"], group["numOfHosts"]) for role, group in workers.items()} == {
        "trainer": (1, 2),
        "rollout": (2, 4),
    }


def test_ray_is_the_same_everywhere():
    pin = (ROOT / "launch/ray/requirements.txt").read_text().partition("==")[2].split()[0]
    assert manifests("ray")[0]["spec"]["rayClusterSpec"]["rayVersion"] == pin
    assert f"\nray=={pin} " in (ROOT / "tests/requirements.txt").read_text()
