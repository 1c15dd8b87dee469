"""The files for Slurm and Kubernetes: their syntax is checked by those who read them, as far as they are here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

import vizkit as vk
from vizkit.cli import main
from vizkit.cluster_files import pytorch_job, slurm

# Long options of sbatch (Slurm 24.05, sbatch --help); those with = take a value.
SBATCH_OPTIONS = (
    "account= array= batch= bb= bbf= begin= chdir= cluster-constraint= clusters= comment= constraint= container= "
    "container-id= contiguous core-spec= cores-per-socket= cpu-freq= cpus-per-gpu= cpus-per-task= deadline= delay- "
    "boot= dependency= distribution= error= exclude= exclusive export= export-file= extra= extra-node-info= get-user- "
    "env= gid= gpu-bind= gpu-freq= gpus= gpus-per-node= gpus-per-socket= gpus-per-task= gres= gres-flags= hint= hold "
    "ignore-pbs input= job-name= kill-on-invalid-dep= licenses= mail-type= mail-user= mcs-label= mem= mem-bind= mem- "
    "per-cpu= mem-per-gpu= mincpus= network= nice= no-kill no-requeue nodefile= nodelist= nodes= ntasks= ntasks-per- "
    "core= ntasks-per-gpu= ntasks-per-node= ntasks-per-socket= open-mode= output= overcommit oversubscribe parsable "
    "partition= power= prefer= priority= profile= propagate= qos= quiet reboot requeue reservation= signal= sockets- "
    "per-node= spread-job switches= test-only thread-spec= threads-per-core= time= time-min= tmp= tres-bind= tres- "
    "per-task= uid= usage use-min-nodes verbose wait wait-all-nodes= wckey= wrap= "
)

WHOLE = {"type": "integer", "minimum": 0}
TEXT = {"type": "string", "minLength": 1}


def thing(required: str, **properties: object) -> dict[str, object]:
    """A schema of an object with these fields and no other."""
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


# Fields of kubeflow.org/v1 PyTorchJob (training operator 1.7 to 1.9), and of the pod where the job's file uses them.
CONTAINER = thing(
    "name image command",
    name={"const": "pytorch"},  # the operator looks for this one
    image=TEXT,
    command={"type": "array", "items": {"type": "string"}, "minItems": 1},
    env={"type": "array", "items": thing("name value", name=TEXT, value=TEXT)},
    resources=thing("limits", limits={"type": "object", "additionalProperties": {"type": ["integer", "string"]}}),
    volumeMounts={"type": "array", "items": thing("name mountPath", name=TEXT, mountPath={"pattern": "^/"})},
)
POD = thing(
    "containers",
    containers={"type": "array", "items": CONTAINER, "minItems": 1},
    terminationGracePeriodSeconds=WHOLE,
    volumes={
        "type": "array",
        "items": thing(
            "name",
            name=TEXT,
            persistentVolumeClaim=thing("claimName", claimName=TEXT),
            emptyDir=thing("", medium={"enum": ["", "Memory"]}),
        ),
    },
)
REPLICAS = thing(
    "replicas template",
    replicas=WHOLE,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=thing("spec", spec=POD),
)
JOB = thing(
    "apiVersion kind metadata spec",
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata=thing("name", name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}),
    spec=thing(
        "pytorchReplicaSpecs",
        nprocPerNode=TEXT,
        runPolicy=thing(
            "",
            activeDeadlineSeconds=WHOLE,
            backoffLimit=WHOLE,
            cleanPodPolicy={"enum": ["All", "Running", "None"]},
            schedulingPolicy={"type": "object"},
            suspend={"type": "boolean"},
            ttlSecondsAfterFinished=WHOLE,
        ),
        elasticPolicy=thing(
            "",
            maxReplicas=WHOLE,
            maxRestarts=WHOLE,
            minReplicas=WHOLE,
            rdzvBackend={"enum": ["c10d", "etcd", "etcd-v2"]},
            rdzvConf={"type": "array"},
            rdzvHost=TEXT,
            rdzvId=TEXT,
            rdzvPort=WHOLE,
            standalone={"type": "boolean"},
        ),
        pytorchReplicaSpecs=thing("Worker", Master=REPLICAS, Worker=REPLICAS),
    ),
)

SHAPES = [
    {},
    {"nodes": 1, "ranks_per_node": 1, "gpus_per_node": 0},
    {"nodes": 16, "min_nodes": 12, "max_restarts": 0, "arguments": ["3", 'note=it\'s "here"; $HOME', "x=[1, 2]"]},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_batch_script_is_a_shell_script_with_options_of_sbatch(shape: dict, tmp_path: Path):
    """`bash -n` reads it; every #SBATCH line stands before the first command and is an option that sbatch has."""
    path = tmp_path / "job.sbatch"
    path.write_text(slurm("train:main", **shape))
    checked = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert options == [line for line in lines[:first_command] if line.startswith("#SBATCH")]
    for line in options:
        name, equals, value = re.fullmatch(r"#SBATCH --([a-z-]+)(=?)(\S*)", line).groups()
        assert f" {name}{equals} " in f" {SBATCH_OPTIONS}"
        assert bool(value) == bool(equals)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_batch_script_starts_is_understood(shape: dict, tmp_path: Path):
    """Run by bash with a node list of its own: torchrun's parser takes the command, words arrive as they were given."""
    from torch.distributed.run import get_args_parser

    path = tmp_path / "job.sbatch"
    path.write_text(slurm("train:main", trace="my traces", **shape))
    for name, body in {"scontrol": "printf 'node7\\nnode8\\n'", "srun": "printf '%s\\0' \"$@\""}.items():
        stub = tmp_path / name
        stub.write_text(f"#!/bin/bash\n{body}\n")
        stub.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "123",
    }
    done = subprocess.run(["bash", path], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    words = [word for word in done.stdout.split("\0")[:-1] if word != "--no-kill"]
    assert words[0] == "torchrun"
    understood = get_args_parser().parse_args(words[1:])
    nodes, least = shape.get("nodes", 2), shape.get("min_nodes")
    assert understood.nnodes == (f"{least}:{nodes}" if least else str(nodes))
    assert (understood.rdzv_id, understood.rdzv_endpoint, understood.module) == ("123", "node7:29500", True)
    device = "cpu" if shape.get("gpus_per_node") == 0 else "cuda"
    given = shape.get("arguments")
    assert understood.training_script == "vizkit"
    assert understood.training_script_args == [
        *("run", "train:main", "--device", device, "--trace", "my traces/123"),
        *(["--", *given] if given else []),
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_job_is_a_pytorch_job(shape: dict):
    """YAML with the fields of the operator's schema and no other; the words of the command as they were given."""
    job = yaml.safe_load(pytorch_job("lessons.train_digits:main", image="registry/train:1", **shape))
    jsonschema.validate(job, JOB)
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == job["spec"]["elasticPolicy"]["maxReplicas"] == shape.get("nodes", 2)
    assert job["spec"]["elasticPolicy"]["minReplicas"] == shape.get("min_nodes", shape.get("nodes", 2))
    container = worker["template"]["spec"]["containers"][0]
    assert container["command"][:5] == ["torchrun", "-m", "vizkit", "run", "lessons.train_digits:main"]
    given = shape.get("arguments", [])
    assert container["command"][5:] == [
        *("--device", "cpu" if shape.get("gpus_per_node") == 0 else "cuda"),
        *("--trace", "/traces/lessons-train-digits-main"),
        *(["--", *given] if given else []),
    ]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in worker["template"]["spec"]["volumes"]}


def test_kubectl_reads_the_job(tmp_path: Path):
    """The client decodes it without a cluster; only a server with the operator could say more."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    path = tmp_path / "job.yaml"
    path.write_text(pytorch_job("train:main", image="registry/train:1"))
    wanted = "jsonpath={.kind} {.metadata.labels.checked}"
    command = ["kubectl", "label", "--local", "-f", str(path), "checked=yes", "-o", wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "PyTorchJob yes"), done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "train"}, "target='train': is no module:function; write for instance train:main"),
        ({"nodes": 0}, "nodes=0: must be a whole number, at least 1; use nodes=1"),
        ({"ranks_per_node": 2.5}, "ranks_per_node=2.5: must be a whole number, at least 1; use ranks_per_node=2"),
        ({"min_nodes": 3}, "min_nodes=3: there are 2 nodes; use 2 or fewer"),
        ({"gpus_per_node": 4}, "gpus_per_node=4: NCCL wants a GPU for each of the 8 ranks; use 8, or 0 for the CPU"),
        ({"time_limit": "1 hour"}, "time_limit='1 hour': is no time that sbatch takes; write hours:minutes:seconds"),
    ],
)
def test_what_cannot_be_a_job_is_refused(changes: dict, message: str):
    """Before a file is written."""
    with pytest.raises(vk.InvalidInputError) as refused:
        slurm(**{"target": "train:main", **changes})
    assert str(refused.value).startswith(message)


def test_a_job_without_an_image_is_refused():
    """A pod has to run something."""
    with pytest.raises(vk.InvalidInputError, match=r"image='': is no container image; name one that holds torch"):
        pytorch_job("train:main", image="")


def test_the_command_line_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Options and the words after -- go into the file; nothing runs."""
    job, script = tmp_path / "job.yaml", tmp_path / "job.sbatch"
    words = ["run", "train:main", "--nodes", "4", "--ranks", "2", "--slurm", str(script), "--pytorch-job", str(job)]
    assert main([*words, "--image", "registry/train:1", "--", "lr=0.1"]) == 0
    assert script.read_text() == slurm("train:main", nodes=4, ranks_per_node=2, arguments=["lr=0.1"])
    assert job.read_text() == pytorch_job(
        "train:main", image="registry/train:1", nodes=4, ranks_per_node=2, arguments=["lr=0.1"]
    )
    assert f"submit it with sbatch {script}" in capsys.readouterr().out


def test_a_node_that_comes_back_is_let_in() -> None:
    """torch 2.13 shares the meeting point's store with the ranks, and an agent that joins later waits in vain."""
    texts = slurm("train:main"), pytorch_job("train:main", image="registry/train:1")
    assert all("TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in text for text in texts)
