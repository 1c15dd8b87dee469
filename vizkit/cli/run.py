"""`python -m vizkit run`: one function on many ranks, on this machine or under torchrun."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import vizkit as vk
from vizkit.cli.arguments import call_arguments, load, positive, seconds

_DESCRIPTION = """\
Calls a function on many ranks, each a process with a torch.distributed process group ready, and records what they do.

Alone, it starts the ranks on this machine, as vk.launch does. Under torchrun it is one rank of the run:

  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id job7 \\
      -m vizkit run train:main --trace traces -- 10 lr=0.1

What follows -- goes to the function: JSON, or text where it is no JSON; name=value is a keyword. Lines that it prints
begin with their rank. With --trace each rank writes rank00003-attempt00.jsonl.gz into the folder (one folder for all
nodes, or one a node, copied together later), also when it fails or is ended by SIGTERM; a restart is the next attempt,
and overwrites nothing. `python -m vizkit report traces` shows the whole. In a notebook, vk.export(main, "train.py")
writes the module.

Exit status: 0 when all is well, 1 where a rank failed, 2 where the input cannot work.
"""


def run(arguments: argparse.Namespace) -> int:
    """Be a rank where torchrun started this process, else start the ranks, or write a cluster's file."""
    from vizkit.runtime import torchrun

    if arguments.slurm or arguments.pytorch_job:
        return write_cluster_files(arguments)
    positional, keywords = call_arguments(arguments.words)
    here = torchrun.place_here()
    if here is None:
        return run_here(arguments, positional, keywords)
    torchrun.prepare()
    settings = torchrun.Settings(
        trace=arguments.trace,
        device=arguments.device,
        timeout_s=arguments.timeout,
        seed=arguments.seed,
        sample_memory=arguments.sample_memory,
        target=arguments.target,
    )
    torchrun.run_rank(load(arguments.target), positional, keywords, here, settings)
    if arguments.trace is not None and here.rank == 0:
        print(f"{arguments.trace} holds a file for each rank of this node; {_show(arguments.trace)}")
    return 0


def run_here(arguments: argparse.Namespace, positional: list[Any], keywords: dict[str, Any]) -> int:
    from vizkit.runtime.saving import checked_folder, save_run

    function = load(arguments.target)
    if arguments.trace is not None:
        checked_folder(arguments.trace)
    done = vk.launch(
        function,
        *positional,
        world_size=arguments.ranks,
        device=arguments.device,
        timeout_s=arguments.timeout,
        seed=arguments.seed,
        sample_memory=arguments.sample_memory,
        **keywords,
    )
    print(done)
    if arguments.trace is not None:
        save_run(done, arguments.trace, target=arguments.target)
        print(f"{arguments.trace} holds a file for each rank; {_show(arguments.trace)}")
    return 0


def _show(trace: Path) -> str:
    return f"python -m vizkit report {trace} shows them"


def write_cluster_files(arguments: argparse.Namespace) -> int:
    from vizkit import cluster_files

    shape = {"nodes": arguments.nodes, "ranks_per_node": arguments.ranks, "arguments": arguments.words}
    shape |= {} if arguments.trace is None else {"trace": str(arguments.trace)}
    if arguments.slurm:
        text = cluster_files.slurm(arguments.target, **shape)
        print(f"{write_text(arguments.slurm, text)}: submit it with sbatch {arguments.slurm}")
    if arguments.pytorch_job:
        text = cluster_files.pytorch_job(arguments.target, image=arguments.image, **shape)
        path = write_text(arguments.pytorch_job, text)
        print(f"{path}: submit it with kubectl create -f {path}")
    return 0


def write_text(path: Path, text: str) -> Path:
    if not path.absolute().parent.is_dir():
        raise vk.InvalidInputError.because(
            "file", str(path), "its folder does not exist", f"make {path.absolute().parent} first"
        )
    path.write_text(text, encoding="utf-8")
    return path


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    command = commands.add_parser(
        "run",
        help="call a function on many ranks, here or under torchrun, and record them",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("target", metavar="module:function", help="the function; file.py:function does too")
    command.add_argument("--trace", type=Path, metavar="FOLDER", help="where each rank writes what it did")
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                         help="auto (default): one GPU a rank with NCCL if there are enough, else gloo")  # fmt: skip
    command.add_argument("--timeout", type=seconds, default=600.0, metavar="S",
                         help="seconds that a communication may take (default: 600)")  # fmt: skip
    command.add_argument("--seed", type=int, default=0, help="of torch, numpy and random, on each rank (default: 0)")
    command.add_argument("--sample-memory", action="store_true", help="add memory over time to the traces")
    alone = command.add_argument_group("without torchrun")
    alone.add_argument("--ranks", type=positive, default=4, metavar="N",
                       help="ranks on this machine; in a cluster's file: ranks a node (default: 4)")  # fmt: skip
    files = command.add_argument_group("write a file for a cluster and run nothing")
    files.add_argument("--slurm", type=Path, metavar="FILE", help="a batch script for sbatch")
    files.add_argument("--pytorch-job", type=Path, metavar="FILE", help="a PyTorchJob for kubectl create")
    files.add_argument("--nodes", type=positive, default=2, metavar="N", help="how many nodes (default: 2)")
    files.add_argument(
        "--image", default="", help="container image of the PyTorchJob, with the module and vizkit in it"
    )
    command.set_defaults(run=run)
