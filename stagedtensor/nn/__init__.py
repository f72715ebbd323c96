"""Blocks of networks, each a few lines of the public language.

A call of a block makes its parameters, named by path, and returns a function of tensors: ``layer = nn.dense(64);
y = layer(x)``. Sizes of inputs are inferred. Layers that act differently in training take ``training=``; applying one
layer both ways shares its parameters. Nothing here runs or compiles.
"""

from __future__ import annotations

from .attention import learned_positions, multi_head_attention, sinusoidal_positions
from .dense import dense, dropout, embedding, mlp
from .images import (
    avg_pool2d,
    conv2d,
    depthwise_separable_conv2d,
    global_avg_pool2d,
    lenet,
    max_pool2d,
    resnet_block,
)
from .layer import Activation, Layer
from .norms import batch_norm, group_norm, layer_norm, rms_norm, update_running
from .transformer import decoder_block, encoder_block, feed_forward, gpt

__all__ = [
    "Activation",
    "Layer",
    "avg_pool2d",
    "batch_norm",
    "conv2d",
    "decoder_block",
    "dense",
    "depthwise_separable_conv2d",
    "dropout",
    "embedding",
    "encoder_block",
    "feed_forward",
    "global_avg_pool2d",
    "gpt",
    "group_norm",
    "layer_norm",
    "learned_positions",
    "lenet",
    "max_pool2d",
    "mlp",
    "multi_head_attention",
    "resnet_block",
    "rms_norm",
    "sinusoidal_positions",
    "update_running",
]
