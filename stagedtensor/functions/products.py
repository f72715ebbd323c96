"""Products of matrices under other names than ``@``."""

from __future__ import annotations

from stagedtensor.tensor import Tensor, TensorLike, lift, matmul


def matmul_nt(x: TensorLike, weight: TensorLike) -> Tensor:
    """Return ``x`` times the transpose of ``weight`` (input -> output, memory ``(out, in)``): ``weight @ x``.

    Rows of ``x`` are batch axes or none. Accepts encoded weights, which are decoded in the loop that reads them.

    >>> import numpy as np, stagedtensor as st
    >>> weight = st.constant(np.eye(2, 3, dtype=np.float32), output=1, input=1)
    >>> x = st.placeholder("x", batch=[5], output=[3])
    >>> str(st.matmul_nt(x, weight).shape)
    '5 | -> 2'
    """
    return matmul(lift(weight), lift(x))
