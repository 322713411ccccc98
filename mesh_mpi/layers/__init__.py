"""Layers: objects that make their variables once and may be called many times.

Invariant: a layer speaks of named dimensions and global sizes only; it neither knows a mesh nor a rank.
"""

from .attention import KeysValues as KeysValues
from .attention import SelfAttention as SelfAttention
from .dense import Dense as Dense
from .dropout import Dropout as Dropout
from .dropout import Masks as Masks
from .embedding import Embedding as Embedding
from .embedding import LearnedPositions as LearnedPositions
from .feed_forward import FeedForward as FeedForward
from .norm import LayerNorm as LayerNorm
from .norm import RMSNorm as RMSNorm
from .residual import residual as residual
