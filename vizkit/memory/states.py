"""Bytes of parameters, gradients and optimizer state on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from vizkit.errors import InvalidInputError
from vizkit.sizes import is_whole, not_negative, whole_number
from vizkit.units import bytes_text


@dataclass(frozen=True)
class Precision:
    """Bytes for one parameter of each model state; what an optimizer keeps beside its moments, such as a master copy,
    counts as optimizer state. Raises `InvalidInputError` for bytes below 0.

    The members of `PRECISIONS` say who uses which. Sources disagree by convention, not by fact: 16, 18 and 20 bytes a
    parameter are the same Adam with gradients in 2, 4 and 2 + 4 bytes.
    """

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float

    def __post_init__(self) -> None:
        for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
            object.__setattr__(self, name, not_negative(name, getattr(self, name), "use 2 for 16 bits, 0 for none"))

    @property
    def total_bytes(self) -> float:
        """Bytes for one parameter, all states together.

        >>> [PRECISIONS[name].total_bytes for name in ("mixed_adam", "mixed_adam_fp32_gradients", "fp32_adam")]
        [16, 18, 16]
        """
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


PRECISIONS = {
    "mixed_adam": Precision(2, 2, 12),
    "mixed_adam_fp32_gradients": Precision(2, 4, 12),
    "mixed_adam_both_gradients": Precision(2, 2, 16),
    "fp32_adam": Precision(4, 4, 8),
    "mixed_adam_8bit": Precision(2, 2, 6),
    "fp32_sgd": Precision(4, 4, 0),
    "fp32_sgd_momentum": Precision(4, 4, 4),
    "inference_16bit": Precision(2, 0, 0),
}
"""By name: ZeRO's 16 bytes (K = 12: a master copy and two moments of 4); Megatron with bf16 parameters and fp32
gradients, 18; Megatron with fp16 gradients and a copy of them in fp32 that lives with the optimizer, 20; all in fp32,
16; a master copy of 4 and two moments of 1; plain and momentum SGD; parameters alone."""


@dataclass(frozen=True)
class ModelStates:
    """Bytes on one rank.

    >>> print(model_states(7_500_000_000, zero_stage=3, dp=64))
    1.88 GB: parameters 234 MB, gradients 234 MB, optimizer 1.41 GB
    """

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    def __str__(self) -> str:
        parts = ("parameters", "gradients", "optimizer")
        said = ", ".join(f"{part} {bytes_text(getattr(self, f'{part}_bytes'))}" for part in parts)
        return f"{bytes_text(self.total_bytes)}: {said}"


def model_states(
    num_params: float, zero_stage: int = 0, dp: int = 1, precision: str | Precision = "mixed_adam"
) -> ModelStates:
    """Bytes of model states on one of `dp` data-parallel ranks (Rajbhandari et al., 2020, arXiv:1910.02054, Table 1).

    `num_params` are the parameters that a replica's rank holds before sharding (divide by tp and pp first). ZeRO stage
    1 shards the optimizer state over the replicas, 2 the gradients too, 3 the parameters too. `precision` is a name of
    `PRECISIONS` or a `Precision` of your own. GB are 1e9 bytes, GiB 2³⁰. Raises `InvalidInputError`.

    >>> [model_states(7.5e9, stage, dp=16).total_bytes / 1e9 for stage in (0, 1, 2, 3)]
    [120.0, 35.625, 21.5625, 7.5]
    """
    num_params = not_negative("num_params", num_params, "use 7.5e9 or such")
    dp, zero_stage = whole_number("dp", dp), zero_stage_of(zero_stage)
    per = precision_of(precision)
    return ModelStates(
        parameters_bytes=num_params * per.parameter_bytes / (dp if zero_stage >= 3 else 1),
        gradients_bytes=num_params * per.gradient_bytes / (dp if zero_stage >= 2 else 1),
        optimizer_bytes=num_params * per.optimizer_bytes / (dp if zero_stage >= 1 else 1),
    )


def zero_stage_of(zero_stage: int) -> int:
    """The stage as an int; raises `InvalidInputError` for what is no stage of ZeRO."""
    if not is_whole(zero_stage) or zero_stage not in (0, 1, 2, 3):
        raise InvalidInputError.because("zero_stage", zero_stage, "must be 0, 1, 2 or 3", "use 0 for plain replicas")
    return int(zero_stage)


def precision_of(precision: str | Precision) -> Precision:
    """The `Precision` itself or the one of this name; raises `InvalidInputError` with the known names."""
    if isinstance(precision, Precision):
        return precision
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise InvalidInputError.unknown("precision", precision, "is not a known precision", PRECISIONS)
    return PRECISIONS[precision]


OFFLOAD_BYTES = {"none": 18.0, "optimizer": 2.0, "all": 0.0}
"""Bytes a parameter that stay on GPUs, shared by the ranks: everything (fp32 gradients), fp16 parameters, nothing."""


def zero3_estimate(num_params: float, largest_layer_params: float, dp: int, offload: str = "none") -> float:
    """Bytes on each GPU under ZeRO-3, as DeepSpeed's estimator counts them (`estimate_zero3_model_states_mem_needs`).

    A rank's share of the states that stay on GPUs, and the largest layer gathered: 2 bytes for its parameters and 2 for
    its gradients. `offload` to the CPU: "none", "optimizer", or "all" (parameters too). Raises `InvalidInputError`.

    >>> [round(zero3_estimate(2851e6, 32e6, 8, offload) / 2**30, 2) for offload in OFFLOAD_BYTES]
    [6.09, 0.78, 0.12]
    """
    if not isinstance(offload, str) or offload not in OFFLOAD_BYTES:
        raise InvalidInputError.unknown("offload", offload, "is not a way to offload", OFFLOAD_BYTES)
    largest = not_negative("largest_layer_params", largest_layer_params, "use 32e6 or such")
    per = Precision(OFFLOAD_BYTES[offload], 0, 0)
    return 4 * largest + model_states(num_params, zero_stage=3, dp=dp, precision=per).total_bytes
