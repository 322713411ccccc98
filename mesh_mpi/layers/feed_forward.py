"""The feed-forward of a Transformer layer.

Invariant: inside, the sequence is called ``ffn_length``, so that the residual stream's ``length`` may be split otherwise.
"""

from __future__ import annotations

from ..dims import Dimension
from ..errors import DimensionError, nearest
from ..graph.tensor import Tensor
from ..ops import FUNCTIONS
from .dense import Dense
from .dropout import Dropout, Masks
from .layer import Layer, renamed

ACTIVATIONS = {**{name: FUNCTIONS[name] for name in ("relu", "gelu", "silu", "sigmoid", "tanh")},
               "swish": FUNCTIONS["silu"], "linear": lambda x: x}


class FeedForward(Layer):
    """From ``d_model`` to ``d_ff`` and back: the product of activated projections (one, or several as in gated units), dropped out, projected.

    ``activations`` names one function a projection: ``("relu",)``, ``("gelu", "linear")``. Variables ``<name>/in/weight`` [d_model, d_ff]
    (``in_0``, ``in_1``, ... if there are several) and ``<name>/out/weight`` [d_ff, d_model], scaled by fan-in; with ``bias`` also a bias each.

    Shape   x [batch, length, d_model] -> [batch, length, d_model].
    Comm    d_ff split: one reduction of the result forward, one of the input's gradient backward.
    Raises  DimensionError for an unknown activation, or if ``x`` lacks ``d_model``; DtypeError if its element type is another.
    """

    def __init__(self, d_model: Dimension, d_ff: Dimension, activations=("relu",), name: str = "feed_forward", dropout: float = 0.0,
                 bias: bool = False, length: str = "length", dtype: str = "float32"):
        super().__init__(name, dtype)
        self.d_model, self.length = d_model, length
        self.activations = (activations,) if isinstance(activations, str) else tuple(activations)
        for word in self.activations:
            if word not in ACTIVATIONS:
                raise DimensionError(f"{self!r}: there is no activation {word!r}.{nearest(word, ACTIVATIONS)}")
        names = ["in"] if len(self.activations) == 1 else [f"in_{i}" for i in range(len(self.activations))]
        with self.inside():
            self.into = [Dense(d_model, d_ff, n, bias, None, dtype) for n in names]
            self.dropout = Dropout(dropout, "hidden_dropout", ("ffn_length",), dtype=dtype)
            self.out = Dense(d_ff, d_model, "out", bias, None, dtype)

    def __call__(self, x: Tensor, masks: Masks | None = None) -> Tensor:
        """Apply the layer; shapes and communication as the class says."""
        self.require(x, [self.d_model])
        with self.inside():
            x = renamed(x, self.length, "ffn_length")
            hidden = None
            for word, dense in zip(self.activations, self.into):
                y = ACTIVATIONS[word](dense(x))
                hidden = y if hidden is None else hidden * y
            return renamed(self.out(self.dropout(hidden, masks)), "ffn_length", self.length)
