"""What a core looks at in the token ids of a prompt. Apart from `octavo_core.wire`, because a frontend has no NumPy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np


def id_range(ids: Sequence[int]) -> tuple[int, int]:
    """The least and the greatest of the ids of a prompt, of which there is at least one."""
    if isinstance(ids, array):  # a thousand times as fast as one object after another
        values = np.frombuffer(ids, np.intc)
        return int(values.min()), int(values.max())
    return min(ids), max(ids)
