"""Names of shapes, one letter per axis: T tokens, B rows, N rollouts, G groups, V vocabulary, H hidden.

A packed step is flat: every row of every rollout lies end to end in one `[T]`, and ids say what belongs
together.
"""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

PerToken = Annotated[Tensor, "T"]
"""One entry per token of the packed step."""

PerRow = Annotated[Tensor, "B"]
"""One entry per training row; a rollout whose history was rewritten has several."""

PerRollout = Annotated[Tensor, "N"]
"""One entry per rollout: what reward and baseline are about."""

Hidden = Annotated[Tensor, "T H"]
"""The last hidden state of every token."""

Head = Annotated[Tensor, "V H"]
"""The weight of the output layer."""
