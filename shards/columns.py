"""Arrays that grow at the end while readers hold on to what they have."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

Scalar = TypeVar("Scalar", bound=np.generic)

_CAPACITY_MIN = 2  # there are as many columns as metadata keys


class Column(Generic[Scalar]):
    """A one-dimensional array with amortised appends.

    `view()` is a window on the same memory: later appends do not show in it, and a column that
    outgrows its memory moves to new memory, so a view stays valid for ever. Changes made in place
    through `view()` do show in every window; who needs them hidden copies under the shard's lock.
    """

    __slots__ = ("_data", "_size")

    def __init__(self, dtype: DTypeLike) -> None:
        self._data: NDArray[Any] = np.empty(_CAPACITY_MIN, dtype=dtype)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def view(self) -> NDArray[Scalar]:
        """Return the filled part, shape (len,)."""
        return self._data[: self._size]

    def append(self, value: object) -> None:
        """Add one value."""
        self._reserve(1)
        self._data[self._size] = value
        self._size += 1

    def extend(self, values: NDArray[Any]) -> None:
        """Add all `values`, in order."""
        self._reserve(len(values))
        self._data[self._size : self._size + len(values)] = values
        self._size += len(values)

    def pad(self, size: int) -> None:
        """Add zeros until there are `size` values; not fewer than there are."""
        self._reserve(size - self._size)
        self._data[self._size : size] = 0
        self._size = size

    def replace(self, values: NDArray[Any]) -> None:
        """Become exactly `values`, in memory of its own."""
        self._data = np.array(values, dtype=self._data.dtype)
        self._size = len(values)

    def _reserve(self, more: int) -> None:
        need = self._size + more
        if need > len(self._data):
            grown: NDArray[Any] = np.empty(
                max(need, 2 * len(self._data), _CAPACITY_MIN), dtype=self._data.dtype
            )
            grown[: self._size] = self._data[: self._size]
            self._data = grown
