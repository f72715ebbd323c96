"""What model texts may call by name: declares the functions, precisions and constants of the language as its words.

Nothing here reads files or runs other code than building graphs. Importing the module fills the word list of
``language`` and gives that package on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from . import language as language, losses, nn
from .functions import (
    attention,
    convolution,
    convolution_nd,
    dropout,
    einsum as einsums,
    indexing,
    layout,
    normalised,
    pointwise,
    products,
    reductions,
)
from .language.words import declare
from .precision import bf16, bool_, f8e4m3, f8e5m2, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64
from .precision_requests import specify
from .program import comment, forward, sequence
from .tensor import Tensor, TensorLike, cast, place
from .terminals import (
    constant,
    dynamic,
    host_scalar,
    index,
    kaiming,
    normal,
    param,
    placeholder,
    range_,
    uniform,
    xavier,
)
from .train import grad_update


def _einsum(spec: str, *tensors: TensorLike, sizes: Any = None, **options: Any) -> Any:
    """``einsum`` with sizes as a list of pairs: ``~sizes:[("h", 8)]``."""
    pairs = sizes if sizes is None or isinstance(sizes, Mapping) else dict(sizes)
    return einsums.einsum(spec, *tensors, sizes=pairs, **options)


def _concat(tensors: Sequence[TensorLike], axis: Any = ("output", -1)) -> Tensor:
    return indexing.concat(tensors, axis)


def _not(x: Any) -> Any:
    """Negate a truth value of configuration, or the cells of a tensor."""
    return not x if isinstance(x, bool) else pointwise.logical_not(x)


_PRECISIONS = (bf16, f8e4m3, f8e5m2, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64)
_FUNCTIONS = (
    attention.attention, attention.rope,
    convolution.avg_pool2d, convolution.conv2d, convolution.global_avg_pool2d, convolution.max_pool2d,
    convolution_nd.conv1d, convolution_nd.conv3d, convolution_nd.conv_transpose1d,
    dropout.dropout, products.matmul_nt,
    indexing.gather, indexing.narrow, indexing.one_hot, indexing.permute, indexing.positions,
    indexing.reshape, indexing.transpose,
    layout.flatten, layout.index_select, layout.pad2d, layout.split, layout.squeeze, layout.tril, layout.unfold,
    layout.unsqueeze, layout.upsample2d,
    losses.binary_cross_entropy, losses.binary_cross_entropy_with_logits, losses.cross_entropy, losses.hinge,
    losses.huber, losses.mae, losses.mse,
    normalised.layer_norm, normalised.log_softmax, normalised.logsumexp, normalised.rms_norm, normalised.softmax,
    pointwise.abs_, pointwise.ceil, pointwise.clamp, pointwise.cos, pointwise.elu, pointwise.erf, pointwise.erfc,
    pointwise.exp, pointwise.exp2, pointwise.expm1, pointwise.floor, pointwise.fma, pointwise.gelu, pointwise.leaky_relu,
    pointwise.log, pointwise.log10, pointwise.log2,
    pointwise.logical_and, pointwise.logical_not, pointwise.logical_or, pointwise.maximum, pointwise.minimum,
    pointwise.nan_to_num, pointwise.power, pointwise.recip, pointwise.relu, pointwise.round_, pointwise.rsqrt,
    pointwise.sigmoid, pointwise.sign, pointwise.silu, pointwise.sin, pointwise.softplus, pointwise.sqrt,
    pointwise.stop_gradient, pointwise.tanh, pointwise.trunc, pointwise.where,
    reductions.argmax, reductions.argmin, reductions.max_, reductions.mean, reductions.min_, reductions.norm,
    reductions.prod, reductions.sum_, reductions.var,
    cast, comment, constant, dynamic, forward, grad_update, host_scalar, index, kaiming, normal, param, place, placeholder,
    range_, sequence, specify, uniform, xavier,
)  # fmt: skip

declare({function.__name__.strip("_"): function for function in _FUNCTIONS})
declare({str(prec): prec for prec in _PRECISIONS})
declare({"bool": bool_, "concat": _concat, "einsum": _einsum, "not": _not})
declare({"nn": MappingProxyType({name: getattr(nn, name) for name in nn.__all__})})
declare({"inf": math.inf, "nan": math.nan, "none": None})
