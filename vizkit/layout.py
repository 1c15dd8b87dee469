"""How a model's training is laid out on ranks: how many along each axis, and what each of them shards."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from vizkit.errors import InvalidInputError
from vizkit.memory.states import Precision, precision_of, zero_stage_of
from vizkit.mesh import Mesh
from vizkit.schedules.catalogue import recipe
from vizkit.schedules.recipe import Recipe
from vizkit.sizes import divides, whole_number, yes_or_no
from vizkit.transformer import Recompute, Transformer, check_model

CONTEXT_WAYS = ("ring", "ulysses")
"""How attention sees the whole sequence: keys and values go round (Liu et al., 2023, arXiv:2310.01889), or heads are
exchanged for tokens (Jacobs et al., 2023, arXiv:2309.14509)."""
_COUNTS = ("dp", "tp", "pp", "cp", "ep", "microbatch", "num_microbatches")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """dp · cp · tp · pp ranks that train one model together; an axis of size 1 is fine.

    - `dp` replicas, each with its own samples; ZeRO's `zero_stage` (0 to 3) shards their states, over dp · cp ranks.
    - `tp` ranks share each matrix, with `sequence_parallel` also the activations in between.
    - `cp` ranks share each sequence; their attention speaks as `context_by` says, "ring" or "ulysses".
    - `pp` ranks have `stages_per_rank` stages each (None: as many as the `schedule` is made for), and pass on
      `num_microbatches` microbatches of `microbatch` samples a step.
    - `ep` ranks among the dp · cp share a layer's experts, of which there are dp · cp / ep replicas.

    `recompute` is "none", "selective" or "full", `precision` a name of `vk.memory.PRECISIONS` or a `Precision`. Raises
    `InvalidInputError`, for an unknown name with the nearest, for sizes that do not fit with those that do.

    >>> layout = Layout(dp=2, tp=4, pp=2, num_microbatches=8, sequence_parallel=True, recompute="selective")
    >>> layout.mesh, layout.world_size, layout.global_batch
    (Mesh(pp=2, dp=2, cp=1, tp=4), 16, 16)
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    context_by: str = "ring"
    microbatch: int = 1
    num_microbatches: int = 1
    schedule: str = "1F1B"
    stages_per_rank: int | None = None
    recompute: str | Recompute = Recompute.NONE
    precision: str | Precision = "mixed_adam"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if type(value := getattr(self, name)) is not int or value < 1:
                object.__setattr__(self, name, whole_number(name, value))
        if type(self.zero_stage) is not int or not 0 <= self.zero_stage <= 3:
            object.__setattr__(self, "zero_stage", zero_stage_of(self.zero_stage))
        if type(self.sequence_parallel) is not bool:
            object.__setattr__(self, "sequence_parallel", yes_or_no("sequence_parallel", self.sequence_parallel))
        if not isinstance(self.context_by, str) or self.context_by not in CONTEXT_WAYS:
            raise InvalidInputError.unknown("context_by", self.context_by, "is no way to see all keys", CONTEXT_WAYS)
        object.__setattr__(self, "recompute", Recompute.parse(self.recompute))
        precision_of(self.precision)
        plan = (_recipe if isinstance(self.schedule, str) else _recipe.__wrapped__)(self.schedule)  # a list has no hash
        if plan.name == "ForwardOnly":
            raise InvalidInputError.because("schedule", self.schedule, "has no backward to train with", "use 1F1B")
        object.__setattr__(self, "schedule", plan.name)
        *_, stages = plan.check(self.pp, self.num_microbatches, self.stages_per_rank, ranks_name="pp")
        if self.stages_per_rank is not None:
            object.__setattr__(self, "stages_per_rank", stages)
        divides("dp × cp", self.dp * self.cp, "ep", self.ep)

    @property
    def mesh(self) -> Mesh:
        """The ranks' mesh, tensor parallelism innermost, where links are fastest (Narayanan et al., SC'21)."""
        return Mesh(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp)

    @property
    def expert_mesh(self) -> Mesh:
        """The same ranks as experts see them: `ep` neighbours share a layer's experts, ranks along dp hold alike.

        >>> Layout(dp=4, ep=2).expert_mesh
        Mesh(pp=1, dp=2, ep=2, tp=1)
        """
        return Mesh(pp=self.pp, dp=self.expert_replicas, ep=self.ep, tp=self.tp)

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def global_batch(self) -> int:
        """Samples in one step of training."""
        return self.dp * self.microbatch * self.num_microbatches

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters, which ZeRO shards: dp · cp."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts: dp · cp / ep."""
        return self.dp * self.cp // self.ep

    @functools.cached_property
    def local_stages(self) -> int:
        """Pipeline stages on one rank."""
        return self.stages_per_rank or _recipe(self.schedule).stages_per_rank

    @functools.cached_property
    def num_stages(self) -> int:
        """Into how many stages the layers are cut; DualPipe's two pipelines cut them alike."""
        return self.pp * self.local_stages // _recipe(self.schedule).num_pipelines

    def check(self, model: Transformer) -> None:
        """Raises `InvalidInputError` where these ranks cannot share this model, with the nearest sizes that can.

        tp divides heads, heads of keys and values, and the feed-forward width; cp the sequence, and tp what is left of
        it under sequence parallelism; the stages divide the layers; ep the experts. A vocabulary may be uneven: each of
        tp ranks has room for ⌈V/tp⌉ tokens.

        >>> Layout(tp=3).check(Transformer(num_layers=2, hidden=64, heads=4, vocab=100, seq=32))
        Traceback (most recent call last):
        vizkit.errors.InvalidInputError: tp=3: does not divide heads=4; use tp=2 or tp=4
        """
        check_model(model)
        tp, seq = self.tp, model.seq
        if tp > 1:
            divides("heads", model.heads, "tp", tp)
            divides("kv_heads", model.key_value_heads, "tp", tp)
            divides("ffn_hidden", model.expert_width, "tp", tp)
        if self.cp > 1:
            divides("seq", seq, "cp", self.cp)
            if self.context_by == "ulysses":
                shared_heads = model.key_value_heads // tp
                divides("kv_heads / tp" if tp > 1 else "kv_heads", shared_heads, "cp", self.cp)
        if tp > 1 and self.sequence_parallel:
            divides("seq / cp" if self.cp > 1 else "seq", seq // self.cp, "tp", tp)
        self._check_stages(model)
        if self.ep > 1 and model.experts is None:
            raise InvalidInputError.because("ep", self.ep, "the model has no experts", "use ep=1")
        if self.ep > 1 and model.experts is not None:
            divides("experts", model.experts.count, "ep", self.ep)

    def _check_stages(self, model: Transformer) -> None:
        stages = self.num_stages
        if not model.num_layers % stages:
            return
        per_rank = stages // self.pp
        if model.num_layers % per_rank == 0:
            divides(
                "num_layers" if per_rank == 1 else "num_layers / stages_per_rank",
                model.num_layers // per_rank,
                "pp",
                self.pp,
            )
        fits = math.ceil(model.num_layers / stages) * stages
        raise InvalidInputError.because(
            "num_layers",
            model.num_layers,
            f"{self.pp} ranks of {per_rank} stages need equal shares",
            f"use {' or '.join(f'num_layers={n}' for n in (fits - stages, fits) if n)}",
        )


@functools.lru_cache(maxsize=256)
def _recipe(name: str) -> Recipe:
    return recipe(name, "schedule")
