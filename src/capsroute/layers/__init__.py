"""Capsule layers as modules: primary capsules, routed layers, the stack that runs a schedule."""

from capsroute.layers.dynamic import DynamicConvCaps, DynamicLinearCaps
from capsroute.layers.em import EMClassCaps, EMConvCaps, EMPrimaryCaps
from capsroute.layers.heads import SharedClassifier
from capsroute.layers.inverted import ConvCaps, LinearCaps
from capsroute.layers.primary import PrimaryCaps
from capsroute.layers.stack import CapsuleStack

__all__ = [
    "CapsuleStack",
    "ConvCaps",
    "DynamicConvCaps",
    "DynamicLinearCaps",
    "EMClassCaps",
    "EMConvCaps",
    "EMPrimaryCaps",
    "LinearCaps",
    "PrimaryCaps",
    "SharedClassifier",
]
