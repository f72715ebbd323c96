"""What Python's syntax does with a tensor: operators are names of ops, and what needs values says how to get them.

``Arithmetic`` is what tensors and captured sizes have in common, ``Operators`` all that Python calls by symbols on a
tensor. Both build nothing themselves: their users say how an op is applied pointwise, how two tensors are contracted,
how one is indexed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from .tensor import Tensor

TensorLike: TypeAlias = Any
"""A Tensor, a Python or NumPy number, a nested list or an array."""


class Arithmetic:
    """Arithmetic by symbols."""

    __slots__ = ()
    __array_priority__ = 1000
    __array_ufunc__ = None  # numpy defers to our reflected operators

    if TYPE_CHECKING:

        def _pointwise(self, op: str, *values: TensorLike) -> Tensor: ...

    def __add__(self, other: TensorLike) -> Tensor:
        return self._pointwise("add", self, other)

    def __radd__(self, other: TensorLike) -> Tensor:
        return self._pointwise("add", other, self)

    def __sub__(self, other: TensorLike) -> Tensor:
        return self._pointwise("sub", self, other)

    def __rsub__(self, other: TensorLike) -> Tensor:
        return self._pointwise("sub", other, self)

    def __mul__(self, other: TensorLike) -> Tensor:
        return self._pointwise("mul", self, other)

    def __rmul__(self, other: TensorLike) -> Tensor:
        return self._pointwise("mul", other, self)

    def __truediv__(self, other: TensorLike) -> Tensor:
        return self._pointwise("div", self, other)

    def __rtruediv__(self, other: TensorLike) -> Tensor:
        return self._pointwise("div", other, self)

    def __floordiv__(self, other: TensorLike) -> Tensor:
        return self._pointwise("floordiv", self, other)

    def __rfloordiv__(self, other: TensorLike) -> Tensor:
        return self._pointwise("floordiv", other, self)

    def __mod__(self, other: TensorLike) -> Tensor:
        return self._pointwise("mod", self, other)

    def __rmod__(self, other: TensorLike) -> Tensor:
        return self._pointwise("mod", other, self)

    def __pow__(self, other: TensorLike) -> Tensor:
        return self._pointwise("pow", self, other)

    def __rpow__(self, other: TensorLike) -> Tensor:
        return self._pointwise("pow", other, self)

    def __neg__(self) -> Tensor:
        return self._pointwise("neg", self)

    def __abs__(self) -> Tensor:
        return self._pointwise("abs", self)


class Operators(Arithmetic):
    """Arithmetic, comparisons and indexing by symbols; truth, length and conversion are refused with advice."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def label(self) -> str:
            """The name shown in errors."""
            ...

        def _contracted(self, left: TensorLike, right: TensorLike) -> Tensor: ...

        def _at(self, key: Any) -> Tensor: ...

    def __matmul__(self, other: TensorLike) -> Tensor:
        return self._contracted(self, other)

    def __rmatmul__(self, other: TensorLike) -> Tensor:
        return self._contracted(other, self)

    def __lt__(self, other: TensorLike) -> Tensor:
        return self._pointwise("lt", self, other)

    def __le__(self, other: TensorLike) -> Tensor:
        return self._pointwise("le", self, other)

    def __gt__(self, other: TensorLike) -> Tensor:
        return self._pointwise("gt", self, other)

    def __ge__(self, other: TensorLike) -> Tensor:
        return self._pointwise("ge", self, other)

    def __eq__(self, other: TensorLike) -> Tensor:  # type: ignore[override]
        return self._pointwise("eq", self, other)

    def __ne__(self, other: TensorLike) -> Tensor:  # type: ignore[override]
        return self._pointwise("ne", self, other)

    __hash__ = object.__hash__

    def __getitem__(self, key: Any) -> Tensor:
        return self._at(key)

    def __bool__(self) -> bool:
        raise TypeError(
            f"the truth of tensor {self.label!r} is not known while the program is built; use st.where, "
            "or read it with ctx.get_values after a run"
        )

    def __float__(self) -> float:
        raise TypeError(f"tensor {self.label!r} is no number; read it with ctx.get_values after a run")

    def __array__(self, *_: Any, **__: Any) -> Any:
        # without this NumPy makes an array of one object, and np.dot an array of tensors
        raise TypeError(f"tensor {self.label!r} is no array; read it with ctx.get_values after a run")

    def __len__(self) -> int:
        raise TypeError(f"tensor {self.label!r} has no len(); see .shape")

    def __iter__(self) -> Iterator[Tensor]:
        raise TypeError(f"tensor {self.label!r} is not iterable; index it (x[i]) or read it with ctx.get_values")
