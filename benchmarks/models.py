"""Shapes of the gradients of known networks, in the order of their parameters, without a framework."""

from __future__ import annotations

from typing import Tuple

Shape = Tuple[int, ...]


def resnet50() -> list[Shape]:
    """The 193 trainable parameters (25.6 M) of mxnet.gluon.model_zoo.vision.resnet50_v1, 1000 classes."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels_in = 64
    for blocks, channels in zip((3, 4, 6, 3), (256, 512, 1024, 2048)):
        for block in range(blocks):
            inner = channels // 4
            # The convolutions of 1 x 1 have a bias there; each is followed by gamma and beta of a batch normalization.
            shapes += [(inner, channels_in, 1, 1), (inner,), (inner,), (inner,)]
            shapes += [(inner, inner, 3, 3), (inner,), (inner,)]
            shapes += [(channels, inner, 1, 1), (channels,), (channels,), (channels,)]
            if block == 0:
                shapes += [(channels, channels_in, 1, 1), (channels,), (channels,)]
            channels_in = channels
    return [*shapes, (1000, 2048), (1000,)]


def resnet18() -> list[Shape]:
    """The 62 trainable parameters (11.7 M) of mxnet.gluon.model_zoo.vision.resnet18_v1, 1000 classes."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels_in = 64
    for channels in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(channels, channels_in, 3, 3), (channels,), (channels,)]
            shapes += [(channels, channels, 3, 3), (channels,), (channels,)]
            if block == 0 and channels != channels_in:
                shapes += [(channels, channels_in, 1, 1), (channels,), (channels,)]
            channels_in = channels
    return [*shapes, (1000, 512), (1000,)]


def bert_base() -> list[Shape]:
    """The 199 parameters (109.5 M) of BERT-base, uncased (Devlin et al. 2018), with its pooler and without heads."""
    width, inner = 768, 3072
    shapes: list[Shape] = [(30522, width), (512, width), (2, width), (width,), (width,)]
    for _ in range(12):
        for _projection in ("query", "key", "value", "output"):
            shapes += [(width, width), (width,)]
        shapes += [(width,), (width,), (inner, width), (inner,), (width, inner), (width,), (width,), (width,)]
    return [*shapes, (width, width), (width,)]


def equal_arrays(count: int, nbytes: int) -> list[Shape]:
    """`count` arrays of `nbytes` bytes of float32."""
    return [(nbytes // 4,)] * count


def shapes_of(model: str) -> list[Shape]:
    """Shapes by name: 'resnet50', 'resnet18', 'bert', or 'COUNTxBYTES' for equal arrays."""
    known = {"resnet50": resnet50, "resnet18": resnet18, "bert": bert_base}
    if model in known:
        return known[model]()
    count, _, nbytes = model.partition("x")
    return equal_arrays(int(count), int(nbytes))
