"""One entry of a pipeline schedule: which pass of which microbatch on which stage."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vizkit.errors import InvalidInputError
from vizkit.trace import SpanKind

ACTION_KINDS = (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.BACKWARD_INPUT, SpanKind.BACKWARD_WEIGHT)
"""F forward, B full backward, I backward for the inputs, W backward for the weights."""
INPUT_GRADIENT_KINDS = (SpanKind.BACKWARD, SpanKind.BACKWARD_INPUT)
"""What hands a gradient to the stage before."""
WEIGHT_GRADIENT_KINDS = (SpanKind.BACKWARD, SpanKind.BACKWARD_WEIGHT)
"""What completes a microbatch's gradient of the stage's weights, and frees its activations."""

_PATTERN = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One pass of one microbatch on one stage, written as `torch.distributed.pipelining` writes it: `2F0`.

    >>> action = Action.parse("2F0"); (action.stage, action.kind.value, action.microbatch), str(action)
    ((2, 'F', 0), '2F0')
    """

    stage: int
    kind: SpanKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str | Action) -> Action:
        """The action that `text` writes: stage, one letter of F, B, I, W, microbatch; raises `InvalidInputError`."""
        written = str(text) if isinstance(text, cls) else text
        match = _PATTERN.fullmatch(written.strip()) if isinstance(written, str) else None
        if not match:
            raise InvalidInputError.because(
                "action", written, "is not stage, letter (F, B, I or W), microbatch", "write it like 2F0"
            )
        return cls(int(match[1]), SpanKind(match[2]), int(match[3]))


Cell = tuple[Action, ...]
"""What a rank does at once: one action, or a forward and a backward that overlap."""
