"""Files that start a module's function on a cluster: a batch script for Slurm, a PyTorchJob for Kubernetes."""

from __future__ import annotations

import json
import re
import shlex
import string
from collections.abc import Sequence
from pathlib import Path

from vizkit.errors import InvalidInputError
from vizkit.sizes import is_whole, whole_number

__all__ = ["pytorch_job", "slurm"]

_HERE = Path(__file__).parent
_TIME = re.compile(r"(\d+-)?\d+:[0-5]\d:[0-5]\d", re.ASCII)
_FILLED_IN = re.compile(r"\$(?=[$(])")
"""A dollar that Kubernetes takes for the start of $(NAME), or for one of two that stand for one."""
_RENDEZVOUS_PORT = 29500


class _Template(string.Template):
    """With @ in the place of $, which the shell needs."""

    delimiter = "@"


def slurm(
    target: str,
    *,
    nodes: int = 2,
    ranks_per_node: int = 8,
    gpus_per_node: int | None = None,
    cpus_per_rank: int = 4,
    min_nodes: int | None = None,
    max_restarts: int = 3,
    time_limit: str = "01:00:00",
    trace: str = "traces",
    arguments: Sequence[str] = (),
) -> str:
    """A batch script for `sbatch` that runs `module:function` with torchrun on each of `nodes` nodes.

    `gpus_per_node` is one a rank unless it is given; 0 runs on the CPU with gloo. With `min_nodes` below `nodes` the
    run goes on without a node that has died. Each rank leaves its trace in `trace`/job number, two minutes before
    `time_limit` (hours:minutes:seconds) at the latest. `arguments` are words for the function, as after `--` of
    `python -m vizkit run`. Partition and account depend on the cluster: give them to sbatch, or add their lines.
    Raises `InvalidInputError` for what cannot be a job.

    >>> print(slurm("train:main", nodes=2, arguments=["lr=0.1"]).splitlines()[-1].strip())
    -m vizkit run train:main --device cuda --trace traces/"$SLURM_JOB_ID" -- lr=0.1
    """
    least = _shape(target, nodes, ranks_per_node, min_nodes, max_restarts)
    gpus = _gpus(gpus_per_node, ranks_per_node)
    if not _TIME.fullmatch(_word("time_limit", time_limit)):
        raise InvalidInputError.because(
            "time_limit", time_limit, "is no time that sbatch takes", "write hours:minutes:seconds, such as 01:00:00"
        )
    words = _words(arguments)
    is_elastic = least < nodes
    return _filled(
        "slurm.sbatch",
        target=target,
        command_target=shlex.quote(target),
        name=_name(target),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        cpus_per_node=whole_number("cpus_per_rank", cpus_per_rank) * ranks_per_node,
        gpus=f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
        time_limit=time_limit,
        no_kill="#SBATCH --no-kill\n" if is_elastic else "",
        srun_options="--no-kill " if is_elastic else "",
        node_range=f"{least}:{nodes}" if is_elastic else nodes,
        port=_RENDEZVOUS_PORT,
        max_restarts=int(max_restarts),
        device="cuda" if gpus else "cpu",
        trace=shlex.quote(_folder(trace)),
        arguments=f" -- {shlex.join(words)}" if words else "",
    )


def pytorch_job(
    target: str,
    *,
    image: str,
    nodes: int = 2,
    ranks_per_node: int = 8,
    gpus_per_node: int | None = None,
    min_nodes: int | None = None,
    max_restarts: int = 3,
    trace: str = "/traces",
    volume_claim: str = "traces",
    arguments: Sequence[str] = (),
) -> str:
    """A PyTorchJob (Kubeflow's training operator, `kubeflow.org/v1`) that runs `module:function` in `nodes` pods.

    `image` holds torch, vizkit and the module, in its working folder. Each rank leaves its trace under `trace`, where
    the claim `volume_claim` is mounted; all pods share it, so it has to allow ReadWriteMany. The rest is as in `slurm`.

    >>> print(pytorch_job("train:main", image="registry/train:1").splitlines()[7].strip())
    nprocPerNode: "8"
    """
    least = _shape(target, nodes, ranks_per_node, min_nodes, max_restarts)
    gpus = _gpus(gpus_per_node, ranks_per_node)
    if re.search(r"\s", _word("image", image)) or not image:
        raise InvalidInputError.because(
            "image", image, "is no container image", "name one that holds torch, vizkit and the module: --image NAME"
        )
    if not _folder(trace).startswith("/"):
        trace = f"/{trace}"  # where a volume is mounted is absolute
    name, words = _name(target), _words(arguments)
    command = ["torchrun", "-m", "vizkit", "run", target, "--device", "cuda" if gpus else "cpu"]
    command += ["--trace", f"{trace}/{name}", *(["--", *words] if words else [])]
    return _filled(
        "pytorch_job.yaml",
        target=target,
        name=name,
        nodes=nodes,
        min_nodes=least,
        ranks_per_node=ranks_per_node,
        max_restarts=int(max_restarts),
        image=_quoted(image),
        command=_quoted([_FILLED_IN.sub("$$", word) for word in command]),
        limits=json.dumps({"nvidia.com/gpu": gpus} if gpus else {"cpu": ranks_per_node}),
        trace=_quoted(trace),
        volume_claim=_quoted(_folder(volume_claim, "volume_claim")),
    )


def _shape(target: str, nodes: int, ranks_per_node: int, min_nodes: int | None, max_restarts: int) -> int:
    """The fewest nodes with which the run goes on."""
    module, _, function = _word("target", target).partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *function.split("."))):
        raise InvalidInputError.because("target", target, "is no module:function", "write for instance train:main")
    whole_number("nodes", nodes)
    whole_number("ranks_per_node", ranks_per_node)
    _from_zero("max_restarts", max_restarts)
    least = nodes if min_nodes is None else whole_number("min_nodes", min_nodes)
    if least > nodes:
        raise InvalidInputError.because("min_nodes", least, f"there are {nodes} nodes", f"use {nodes} or fewer")
    return least


def _gpus(gpus_per_node: int | None, ranks_per_node: int) -> int:
    gpus = ranks_per_node if gpus_per_node is None else _from_zero("gpus_per_node", gpus_per_node)
    if 0 < gpus < ranks_per_node:
        raise InvalidInputError.because(
            "gpus_per_node",
            gpus,
            f"NCCL wants a GPU for each of the {ranks_per_node} ranks",
            f"use {ranks_per_node}, or 0 for the CPU",
        )
    return gpus


def _from_zero(name: str, value: int) -> int:
    return 0 if is_whole(value) and value == 0 else whole_number(name, value)


def _word(name: str, value: object) -> str:
    """A text that both kinds of file can hold."""
    if isinstance(value, str) and all(letter.isprintable() or letter in "\n\t" for letter in value):
        return value
    raise InvalidInputError.because(name, value, "must be a text that can be printed", f"use {name}='…'")


def _words(arguments: object) -> list[str]:
    if isinstance(arguments, str) or not isinstance(arguments, Sequence):
        raise InvalidInputError.because("arguments", arguments, "must be words in a list", "use arguments=['lr=0.1']")
    return [_word(f"arguments[{index}]", word) for index, word in enumerate(arguments)]


def _folder(value: object, name: str = "trace") -> str:
    if not (text := _word(name, value)) or text.startswith("-"):
        raise InvalidInputError.because(name, value, "is no name", f"use {name}='traces'")
    return text


def _quoted(value: object) -> str:
    """As YAML reads it: JSON, but for characters over 16 bits, of which JSON makes two.

    >>> _quoted(["a b", "\N{GRINNING FACE}"]).isascii()
    False
    """
    return json.dumps(value, ensure_ascii=False)


def _name(target: str) -> str:
    """A name that both schedulers take.

    >>> _name("lessons.train_digits:main")
    'lessons-train-digits-main'
    """
    return re.sub(r"[^a-z0-9]+", "-", target.lower()).strip("-")[:50].strip("-") or "vizkit"


def _filled(template: str, **values: object) -> str:
    return _Template((_HERE / template).read_text(encoding="utf-8")).substitute(values)
