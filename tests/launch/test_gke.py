"""The JobSet, field by field against the documented API (jobset.sigs.k8s.io, kubernetes.io), and how it is applied."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from launch import gke
from launch.gke import Gke, manifest

# Each object's fields with the type of each; "!" marks those that must be there. Strings name other objects, a list
# holds many, a dict is a map from strings, a tuple is a choice.
API: dict[str, dict[str, Any]] = {
    "JobSet": {
        "apiVersion!": ("jobset.x-k8s.io/v1alpha2",),
        "kind!": ("JobSet",),
        "metadata!": "ObjectMeta",
        "spec!": "JobSetSpec",
    },
    "ObjectMeta": {"name": str, "namespace": str, "annotations": {"": str}, "labels": {"": str}},
    "JobSetSpec": {
        "replicatedJobs": ["ReplicatedJob"],
        "network": "Network",
        "successPolicy": "SuccessPolicy",
        "failurePolicy": "FailurePolicy",
        "suspend": bool,
        "coordinator": "Coordinator",
        "managedBy": str,
        "ttlSecondsAfterFinished": int,
    },
    "Network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
    "SuccessPolicy": {"operator!": ("All", "Any"), "targetReplicatedJobs": [str]},
    "FailurePolicy": {
        "maxRestarts": int,
        "restartStrategy": ("Recreate", "BlockingRecreate", "InPlaceRestart"),
        "rules": ["FailurePolicyRule"],
    },
    "FailurePolicyRule": {
        "name!": str,
        "action!": ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
        "onJobFailureReasons": [("BackoffLimitExceeded", "DeadlineExceeded", "PodFailurePolicy")],
        "targetReplicatedJobs": [str],
    },
    "Coordinator": {"replicatedJob!": str, "jobIndex": int, "podIndex": int},
    "ReplicatedJob": {"name!": str, "template!": "JobTemplateSpec", "replicas": int, "groupName": str},
    "JobTemplateSpec": {"metadata": "ObjectMeta", "spec": "JobSpec"},
    "JobSpec": {
        "parallelism": int,
        "completions": int,
        "completionMode": ("Indexed", "NonIndexed"),
        "backoffLimit": int,
        "podFailurePolicy": "PodFailurePolicy",
        "template!": "PodTemplateSpec",
    },
    "PodFailurePolicy": {"rules!": ["PodFailurePolicyRule"]},
    "PodFailurePolicyRule": {
        "action!": ("Count", "FailIndex", "FailJob", "Ignore"),
        "onExitCodes": "OnExitCodes",
        "onPodConditions": ["OnPodCondition"],
    },
    "OnExitCodes": {"containerName": str, "operator!": ("In", "NotIn"), "values!": [int]},
    "OnPodCondition": {"type!": str, "status!": ("True", "False", "Unknown")},
    "PodTemplateSpec": {"metadata": "ObjectMeta", "spec": "PodSpec"},
    "PodSpec": {
        "containers!": ["Container"],
        "restartPolicy": ("Always", "Never", "OnFailure"),
        "terminationGracePeriodSeconds": int,
        "nodeSelector": {"": str},
        "serviceAccountName": str,
        "tolerations": ["Toleration"],
        "volumes": ["Volume"],
    },
    "Toleration": {
        "key": str,
        "operator": ("Equal", "Exists"),
        "value": str,
        "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
    },
    "Volume": {"name!": str, "csi": "CSIVolumeSource"},
    "CSIVolumeSource": {"driver!": str, "volumeAttributes": {"": str}, "readOnly": bool},
    "Container": {
        "name!": str,
        "image": str,
        "command": [str],
        "env": ["EnvVar"],
        "ports": ["ContainerPort"],
        "resources": "ResourceRequirements",
        "volumeMounts": ["VolumeMount"],
    },
    "EnvVar": {"name!": str, "value": str, "valueFrom": "EnvVarSource"},
    "EnvVarSource": {"fieldRef": "ObjectFieldSelector"},
    "ObjectFieldSelector": {"fieldPath!": str, "apiVersion": str},
    "ContainerPort": {"containerPort!": int, "name": str, "protocol": str},
    "ResourceRequirements": {"requests": {"": int}, "limits": {"": int}},
    "VolumeMount": {"name!": str, "mountPath!": str, "readOnly": bool},
}


def check(value: Any, kind: Any, where: str) -> None:
    """Asserts that the value is what the API has there."""
    if isinstance(kind, tuple):
        assert value in kind, where
    elif isinstance(kind, list):
        assert isinstance(value, list) and value, where
        for index, item in enumerate(value):
            check(item, kind[0], f"{where}[{index}]")
    elif isinstance(kind, dict):
        for key, item in value.items():
            assert re.fullmatch(r"([a-z0-9.-]+/)?[A-Za-z0-9._-]{1,63}", key), f"{where}.{key}"
            check(item, kind[""], f"{where}.{key}")
    elif isinstance(kind, str):
        fields = {name.rstrip("!"): of for name, of in API[kind].items()}
        assert value.keys() <= fields.keys(), f"{where}: {value.keys() - fields.keys()}"
        assert {name[:-1] for name in API[kind] if name.endswith("!")} <= value.keys(), where
        for name, item in value.items():
            check(item, fields[name], f"{where}.{name}")
    else:
        assert type(value) is kind, where


SMALL = Gke(name="run-1", image="image", accelerator="tpu-v6e-slice", topology="4x4")
LARGE = Gke(
    name="run-2",
    image="image",
    accelerator="tpu-v5p-slice",
    topology="2x4x4",
    slices=3,
    spot=True,
    restarts=2,
    grace=300,
    bucket="our-bucket",
    service_account="trainer",
    namespace="team",
)


@pytest.mark.parametrize("options", [SMALL, LARGE], ids=lambda options: options.name)
def test_every_field_is_one_of_the_api(options, nasty):
    check(manifest(options, nasty), "JobSet", "JobSet")


def test_the_set_has_a_job_for_each_slice_and_a_pod_for_each_host():
    made = manifest(LARGE, ["doctor"])
    assert made["metadata"]["name"] == "run-2" and made["metadata"]["namespace"] == "team"
    # One slice a node pool: https://jobset.sigs.k8s.io/docs/concepts (exclusive placement).
    placement = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    assert made["metadata"]["annotations"] == placement
    (replicated,) = made["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert replicated["replicas"] == 3 and job["parallelism"] == job["completions"] == 32 // 4
    assert job["completionMode"] == "Indexed" and job["backoffLimit"] == 0
    spec = job["template"]["spec"]
    assert spec["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "2x4x4",
        "cloud.google.com/gke-spot": "true",
    }
    (container,) = spec["containers"]
    assert container["resources"] == {"requests": {"google.com/tpu": 4}, "limits": {"google.com/tpu": 4}}
    assert spec["terminationGracePeriodSeconds"] == 300 and spec["serviceAccountName"] == "trainer"
    assert container["volumeMounts"][0]["name"] == spec["volumes"][0]["name"]
    assert spec["volumes"][0]["csi"]["volumeAttributes"] == {"bucketName": "our-bucket"}
    assert job["template"]["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}


def test_the_coordinator_is_the_first_pod_by_the_name_of_its_service():
    """A pod is <set>-<job>-<job index>-<pod index>.<subdomain>, as `Network.enableDNSHostnames` documents."""
    made = manifest(LARGE, ["doctor"])["spec"]
    (replicated,) = made["replicatedJobs"]
    assert made["coordinator"] == {"replicatedJob": replicated["name"], "jobIndex": 0, "podIndex": 0}
    assert made["network"] == {"enableDNSHostnames": True, "subdomain": "run-2"}
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    variables = {variable["name"]: variable for variable in container["env"]}
    address = variables["JAX_COORDINATOR_ADDRESS"]["value"]
    assert address == f"run-2-{replicated['name']}-0-0.run-2:8476"
    assert container["ports"] == [{"containerPort": 8476}]
    assert variables["JAX_NUM_PROCESSES"]["value"] == "24"
    field = variables["JOB_INDEX"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "metadata.labels['jobset.sigs.k8s.io/job-index']"


def test_what_is_preempted_restarts_the_set_and_what_fails_does_so_a_few_times():
    made = manifest(LARGE, ["doctor"])["spec"]
    assert made["failurePolicy"]["maxRestarts"] == 2
    (rule,) = made["failurePolicy"]["rules"]
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule.pop("name"))
    assert rule == {"action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["PodFailurePolicy"]}
    job = made["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    codes, conditions = job["podFailurePolicy"]["rules"]
    assert codes["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [75]}
    assert conditions["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # a pod failure policy needs it


def test_the_words_arrive_as_they_are_with_the_number_of_the_process(tmp_path, nasty):
    words = [*nasty, "$(HOME)", "$$(HOME)", "$$", "a$"]
    (container,) = manifest(LARGE, words)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ]
    # Kubernetes reads $$ as $, and puts variables in place of $(NAME).
    command = [re.sub(r"\$\$|\$\(\w+\)", lambda found: "$" if found[0] == "$$" else "/root", word)
               for word in container["command"]]  # fmt: skip
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([os.environ['JAX_PROCESS_ID'], *sys.argv[1:]]))\n"
    )
    program.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_INDEX": "2", "JOB_COMPLETION_INDEX": "5", "HOME": "/root"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["21", "-m", "ctx_jax", *words]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"restarts": -1}, "--restarts -1: choose 0 or more"),
        ({"grace": -5}, "--grace -5: choose 0 or more"),
        ({"slices": 0}, "--slices 0: choose 1 or more"),
    ],
)
def test_numbers_that_are_none(option, message):
    with pytest.raises(ValueError, match=message):
        replace(LARGE, **option)


def test_it_is_applied_or_printed(programs, capsys, nasty):
    programs.add("kubectl", "print('jobset.jobset.x-k8s.io/run-1 created')")
    arguments = "--name run-1 --image image --accelerator tpu-v6e-slice --topology 4x4 --namespace team".split()
    assert gke.main([*arguments, "--dry-run", "--", *nasty]) == 0
    printed = capsys.readouterr().out
    assert programs.calls == []
    assert gke.main([*arguments, "--", *nasty]) == 0
    assert capsys.readouterr().out == "jobset.jobset.x-k8s.io/run-1 created\n"
    (call,) = programs.calls
    assert call["argv"] == ["kubectl", "apply", "--namespace=team", "--filename=-"]
    assert json.loads(call["stdin"]) == json.loads(printed)
