"""TPUs on GKE: a JobSet with a Job for each slice and a Pod for each host, and the coordinator's service.

    python -m launch.gke --name gpt2 --image IMAGE --accelerator tpu-v6e-slice --topology 4x4 -- train gpt:gpt2 ...

The image holds ctx_jax and jax[tpu]; the run's folder is on storage that outlives the pods (`--bucket` mounts one at
/data). A pod that is evicted, or exits with 75, restarts the whole set without counting; what fails otherwise,
`--restarts` times. The cluster needs the JobSet controller (https://jobset.sigs.k8s.io).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctx_jax.signals import REQUEUE
from launch.command import output_of, parsed, program, run

SLICE = "slice"
"""The name of the replicated job, and of its container."""

PORT = 8476
"""Where process 0 is found by the others."""


@dataclass(frozen=True)
class Gke:
    """Run a command on TPU slices of a GKE cluster."""

    name: str
    """of the JobSet"""
    image: str
    """the container's"""
    accelerator: str
    """as GKE names it: tpu-v4-podslice, tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice"""
    topology: str
    """chips of a slice, as 4x4 or 2x2x4"""
    chips: int = 4
    """chips of each host"""
    slices: int = 1
    """how many, over the data center's network"""
    spot: bool = False
    """cheaper, and may be taken back at any time"""
    restarts: int = 10
    """how often the set is restarted after a failure; evictions do not count"""
    grace: int = 120
    """seconds in which a pod that is evicted can save"""
    bucket: str | None = None
    """a Cloud Storage bucket to be mounted at /data"""
    service_account: str | None = None
    """of Kubernetes; the bucket needs one that may write to it"""
    python: str = "python"
    """the image's interpreter"""
    namespace: str = "default"
    dry_run: bool = False
    """print the manifest, for kubectl apply -f -"""

    def __post_init__(self) -> None:
        longest = 63 - len(f"-{SLICE}-{self.slices}-{10**4}-xxxxx")
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", self.name) or len(self.name) > longest:
            raise ValueError(f"--name {self.name!r}: choose lower-case letters, digits and dashes, {longest} at most")
        if not re.fullmatch(r"\d+x\d+(x\d+)?", self.topology):
            raise ValueError(f"--topology {self.topology!r}: write the chips of each side, as 4x4 or 2x2x4")
        for name, least in (("chips", 1), ("slices", 1), ("restarts", 0), ("grace", 0)):
            if (number := getattr(self, name)) < least:
                raise ValueError(f"--{name} {number}: choose {least} or more")
        count = math.prod(map(int, self.topology.split("x")))
        if count % self.chips or not count:
            raise ValueError(
                f"--topology {self.topology} has {count} chips, no multiple of --chips {self.chips} of a host"
            )

    @property
    def hosts(self) -> int:
        """Of each slice."""
        return math.prod(map(int, self.topology.split("x"))) // self.chips


def manifest(options: Gke, words: Sequence[str]) -> dict[str, Any]:
    """The JobSet (jobset.x-k8s.io/v1alpha2)."""
    job = {
        "parallelism": options.hosts,
        "completions": options.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": SLICE, "operator": "In", "values": [REQUEUE]},
                },
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": pod(options, words),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": options.name,
            "namespace": options.namespace,
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": options.name},
            "coordinator": {"replicatedJob": SLICE, "jobIndex": 0, "podIndex": 0},
            "successPolicy": {"operator": "All"},
            "failurePolicy": {
                "maxRestarts": options.restarts,
                "rules": [
                    {
                        "name": "preempted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [{"name": SLICE, "replicas": options.slices, "template": {"spec": job}}],
        },
    }


def pod(options: Gke, words: Sequence[str]) -> dict[str, Any]:
    """The template of one host's Pod."""
    # Kubernetes cannot add; the command's words are arguments of bash, which reads them no second time.
    line = f'export JAX_PROCESS_ID=$((JOB_INDEX * {options.hosts} + JOB_COMPLETION_INDEX)); exec "$@"'
    index = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/job-index']"}}
    container: dict[str, Any] = {
        "name": SLICE,
        "image": options.image,
        "command": [escaped(word) for word in ("bash", "-c", line, "bash", *program(words, options.python))],
        "env": [
            {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{options.name}-{SLICE}-0-0.{options.name}:{PORT}"},
            {"name": "JAX_NUM_PROCESSES", "value": str(options.slices * options.hosts)},
            {"name": "JOB_INDEX", "valueFrom": index},
        ],
        "ports": [{"containerPort": PORT}],
        "resources": {side: {"google.com/tpu": options.chips} for side in ("requests", "limits")},
    }
    selector = {
        "cloud.google.com/gke-tpu-accelerator": options.accelerator,
        "cloud.google.com/gke-tpu-topology": options.topology,
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace,
        "nodeSelector": selector,
        "containers": [container],
    }
    template: dict[str, Any] = {"spec": spec}
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if options.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        spec["tolerations"] = [
            {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        ]
    if options.bucket:
        template["metadata"] = {"annotations": {"gke-gcsfuse/volumes": "true"}}
        container["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
        driver = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": {"bucketName": options.bucket}}
        spec["volumes"] = [{"name": "data", "csi": driver}]
    return template


def escaped(word: str) -> str:
    """Kubernetes puts variables in place of $(NAME) in a command, and one dollar in place of two."""
    return word.replace("$", "$$")


def main(arguments: list[str]) -> int:
    options, words = parsed(Gke, arguments, "launch.gke")
    text = json.dumps(manifest(options, words), indent=2)
    apply = ["kubectl", "apply", f"--namespace={options.namespace}", "--filename=-"]
    if options.dry_run:
        print(text)
        return 0
    print(output_of(apply, text))
    return 0


if __name__ == "__main__":
    run(main)
