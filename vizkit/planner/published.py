"""Training runs that others published, as inputs: model, layout, program, and what was measured to compare with.

All ran on NVIDIA's Selene (`vk.hardware.dgx_a100`). What was chosen by looking at them, once, for all rows alike:

- the A100's `matrix_ceiling`, 0.75, from the ten rows of `SC21_TABLE_1` together;
- what a card between nodes, and a message between stages, gets, 12.6 and 4.65 GB/s (`SEND_SHARE`), from SC'21's text,
  section 5.9. nccl-tests' 22.7 GB/s had been tried before; the ranks of tp × pp and `KORTHIKANTI_530B_DP8`, whose
  gradients take 1.32 s, spoke for the text's;
- that ZeRO-3 hid nothing in 2021 (`DEEPSPEED_2021`), from `SC21_ZERO_3`, whose rows thus test only how it scales.

All else is from data sheets, nccl-tests inside a node, and what the papers say of their programs; `SC21_TABLE_2` and
`KORTHIKANTI_TABLE_5` chose nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from vizkit.hardware.cluster import Cluster
from vizkit.hardware.presets import dgx_a100
from vizkit.layout import Layout
from vizkit.planner.choices import Plan
from vizkit.planner.prediction import Prediction, predict
from vizkit.planner.program import Program
from vizkit.planner.search import plan
from vizkit.transformer import Transformer

if TYPE_CHECKING:
    import pandas as pd

SEND_SHARE = 0.37
"""SC'21, section 5.9, on the bisection bandwidth of the 1T run: 892 GB/s of messages between stages, which 48 rings of
stages cross twice in both directions, 4.65 GB/s each; 12.9 TB/s of all-reduces, which 512 rings cross twice, 12.6 GB/s
each."""
MEGATRON_2021 = Program(
    overlap_gradients=False,
    overlap_parameters=False,
    overlap_tensor=False,
    asynchronous_sends=False,
    send_share=SEND_SHARE,
    fused_attention=False,
    regather=False,
)
"""Narayanan et al., SC'21, sections 2 and 4: fused element by element kernels, scatter and gather, no overlap."""
MEGATRON_2022 = Program(
    overlap_gradients=False,
    overlap_parameters=False,
    asynchronous_sends=False,
    send_share=SEND_SHARE,
    fused_attention=False,
)
"""Korthikanti et al., 2022, sections 6.2 and 6.3: a backward's all-reduces overlap with the weights' gradients; no
others."""
DEEPSPEED_2021 = Program(
    overlap_gradients=False,
    overlap_parameters=False,
    overlap_tensor=False,
    asynchronous_sends=False,
    send_share=SEND_SHARE,
    fused_attention=False,
    regather=False,
    calls_per_layer=12,
)
"""ZeRO-3 that gathers each of a layer's 12 tensors by itself and hides nothing."""


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One row of a published table; None stands for what the source does not say.

    `tflops_per_device` counts recomputation (SC'21, eq. 3), `step_s` are seconds of an iteration; a row has one of the
    two.
    """

    source: str
    model: Transformer
    num_devices: int
    tp: int
    pp: int
    global_batch: int
    microbatch: int | None = None
    stages_per_rank: int | None = None
    zero_stage: int = 0
    recompute: str = "full"
    sequence_parallel: bool = False
    program: Program = MEGATRON_2021
    precision: str = "mixed_adam_both_gradients"
    tflops_per_device: float | None = None
    step_s: float | None = None

    @property
    def cluster(self) -> Cluster:
        return dgx_a100().of(self.num_devices)

    @property
    def name(self) -> str:
        """Billions of parameters, devices, and the way to recompute.

        >>> SC21_TABLE_1[0].name
        '1.7B on 32, full'
        """
        with_sequence = "+SP" if self.sequence_parallel else ""
        zero = f", ZeRO-{self.zero_stage}" if self.zero_stage else ""
        return f"{self.model.num_params() / 1e9:.1f}B on {self.num_devices}, {self.recompute}{with_sequence}{zero}"

    def plan(self, tp: Sequence[int] | None = None, pp: Sequence[int] | None = None) -> Plan:
        """What the program could do, with these sizes of tp and pp or with all of them."""
        return plan(
            self.model,
            self.cluster,
            self.global_batch,
            schedules=("1F1B", "Interleaved1F1B"),
            zero_stages=[self.zero_stage],
            recompute=[self.recompute],
            sequence_parallel=[self.sequence_parallel],
            tp=tp,
            pp=pp,
            cp=[1],
            microbatches=None if self.microbatch is None else [self.microbatch],
            stages_per_rank=None if self.stages_per_rank is None else [self.stages_per_rank],
            precision=self.precision,
            program=self.program,
        )

    @cached_property
    def prediction(self) -> Prediction:
        """Of the published tp and pp; microbatch and stages a rank, where the source does not say them, are the fastest
        that fit. What the source does say is predicted whether or not it fits: it ran."""
        if self.microbatch is None:
            return self.plan([self.tp], [self.pp]).best.prediction
        replicas, stages = self.num_devices // (self.tp * self.pp), self.stages_per_rank or 1
        layout = Layout(
            dp=replicas,
            tp=self.tp,
            pp=self.pp,
            zero_stage=self.zero_stage,
            sequence_parallel=self.sequence_parallel,
            microbatch=self.microbatch,
            num_microbatches=self.global_batch // replicas // self.microbatch,
            schedule="1F1B" if stages == 1 else "Interleaved1F1B",
            stages_per_rank=stages,
            recompute=self.recompute,
            precision=self.precision,
        )
        return predict(self.model, layout, self.cluster, program=self.program)

    def rank(self, same_replicas: bool = False) -> int | None:
        """Where the published tp × pp stands in the plan of all sizes, from 1 on; None where it is not.

        With `same_replicas`, among those that leave as many replicas as the published.
        """
        table = self.plan().table
        if same_replicas:
            table = table[table.tp * table.pp == self.tp * self.pp].reset_index()
        at = table.index[(table.tp == self.tp) & (table.pp == self.pp)]
        return int(at[0]) + 1 if len(at) else None

    @property
    def measured(self) -> float:
        """TFLOP/s a device, or seconds a step: what the source says."""
        value = self.tflops_per_device if self.step_s is None else self.step_s
        assert value is not None
        return value

    @property
    def predicted(self) -> float:
        """The same, predicted."""
        return self.prediction.achieved_flops_per_s / 1e12 if self.step_s is None else self.prediction.step_s

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def compare(runs: Iterable[PublishedRun]) -> pd.DataFrame:
    """Measured and predicted, and shares of the predicted step: a row for each run.

    From `matrix` to `optimizer` the columns are shares, which add up to 1; `m` are microbatches, `v` stages a rank, and
    `error` is predicted over measured, less 1.
    """
    import pandas as pd

    rows = []
    for run in runs:
        found = run.prediction
        layout, step_s = found.layout, found.step_s
        rows.append(
            {
                "run": run.name,
                "tp": layout.tp,
                "pp": layout.pp,
                "dp": layout.dp,
                "microbatch": layout.microbatch,
                "m": layout.num_microbatches,
                "v": layout.local_stages,
                "unit": "TFLOP/s" if run.step_s is None else "s",
                "measured": run.measured,
                "predicted": run.predicted,
                "error": run.error,
                "step_s": step_s,
                "matrix": found.matrix_s / step_s,
                "elementwise": found.elementwise_s / step_s,
                **{f"exposed_{axis}": found.exposed_s[axis] / step_s for axis in ("tp", "pp", "dp")},
                "bubble": found.bubble_share,
                "optimizer": found.optimizer_s / step_s,
                "memory_GB": found.memory_bytes / 1e9,
            }
        )
    return pd.DataFrame(rows)


def gpt(heads: int, hidden: int, layers: int) -> Transformer:
    """The papers' models: V = 51,200, s = 2,048."""
    return Transformer(num_layers=layers, hidden=hidden, heads=heads, vocab=51200, seq=2048)


_SC21 = "Narayanan et al., SC'21, arXiv:2104.04473"
_K22 = "Korthikanti et al., 2022, arXiv:2205.05198"

SC21_TABLE_1 = tuple(
    PublishedRun(
        source=f"{_SC21}, table 1",
        model=gpt(heads, hidden, layers),
        tp=tp,
        pp=pp,
        num_devices=devices,
        global_batch=batch,
        tflops_per_device=tflops,
    )
    for heads, hidden, layers, tp, pp, devices, batch, tflops in (
        (24, 2304, 24, 1, 1, 32, 512, 137),
        (32, 3072, 30, 2, 1, 64, 512, 138),
        (32, 4096, 36, 4, 1, 128, 512, 142),
        (48, 6144, 40, 8, 1, 256, 1024, 135),
        (64, 8192, 48, 8, 2, 512, 1536, 138),
        (80, 10240, 60, 8, 4, 1024, 1792, 140),
        (96, 12288, 80, 8, 8, 1536, 2304, 148),
        (128, 16384, 96, 8, 16, 1920, 2160, 155),
        (128, 20480, 105, 8, 35, 2520, 2520, 163),
        (160, 25600, 128, 8, 64, 3072, 3072, 163),
    )
)
"""Interleaved 1F1B with scatter and gather (section 5.1); its microbatches and stages a rank are not given."""

SC21_TABLE_2 = tuple(
    PublishedRun(
        source=f"{_SC21}, table 2, PTD parallelism",
        model=model,
        tp=8,
        pp=pp,
        num_devices=devices,
        global_batch=batch,
        microbatch=1,
        stages_per_rank=1,
        tflops_per_device=tflops,
    )
    for model, pp, batch, rows in (
        (gpt(96, 12288, 96), 12, 1536, ((384, 153), (768, 149), (1536, 141))),
        (gpt(128, 20480, 105), 35, 2240, ((560, 171), (1120, 167), (2240, 159))),
    )
    for devices, tflops in rows
)
"""Model-parallel sizes of 96 and 280, taken as 8 × 12 and 8 × 35. The source does not say whether it interleaves; the
rows fall with (p−1)/m, as without."""

SC21_ZERO_3 = tuple(
    PublishedRun(
        source=f"{_SC21}, table 2, ZeRO-3 without model parallelism",
        model=model,
        tp=1,
        pp=1,
        num_devices=devices,
        global_batch=batch,
        microbatch=microbatch,
        zero_stage=3,
        program=DEEPSPEED_2021,
        tflops_per_device=tflops,
    )
    for model, rows in (
        (gpt(96, 12288, 96), ((384, 1536, 4, 144), (768, 1536, 2, 88), (1536, 1536, 1, 44))),
        (gpt(128, 20480, 105), ((640, 2560, 4, 138), (1120, 2240, 2, 98), (2240, 2240, 1, 48))),
    )
    for devices, batch, microbatch, tflops in rows
)

KORTHIKANTI_TABLE_5 = tuple(
    PublishedRun(
        source=f"{_K22}, table 5",
        model=model,
        tp=8,
        pp=pp,
        num_devices=devices,
        global_batch=batch,
        microbatch=microbatch,
        stages_per_rank=stages,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        program=MEGATRON_2022,
        precision="mixed_adam_fp32_gradients",
        step_s=seconds,
    )
    for model, devices, pp, stages, batch, microbatch, times in (
        (gpt(64, 6144, 48), 8, 1, 1, 4, 4, (1.42, 1.10)),
        (gpt(96, 12288, 96), 64, 8, 3, 64, 1, (18.13, 13.75)),
        (gpt(128, 20480, 105), 280, 35, 3, 280, 1, (49.05, 37.83)),
        (gpt(160, 25600, 128), 512, 64, 1, 512, 1, (94.42, 71.49)),
    )
    for (recompute, sequence_parallel), seconds in zip((("full", False), ("selective", True)), times, strict=True)
)

KORTHIKANTI_530B_DP8 = PublishedRun(
    source=f"{_K22}, section 6.3",
    model=gpt(128, 20480, 105),
    tp=8,
    pp=35,
    num_devices=2240,
    global_batch=2240,
    microbatch=1,
    stages_per_rank=3,
    recompute="selective",
    sequence_parallel=True,
    program=MEGATRON_2022,
    precision="mixed_adam_fp32_gradients",
    step_s=39.15,
)
"""The 530B row with 8 replicas, whose gradients nothing hides: 1.32 s more."""
