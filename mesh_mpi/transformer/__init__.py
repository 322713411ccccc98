"""Transformers, in the language of named dimensions.

Invariant: nothing here knows a mesh; every dimension that a layout may want to split has a name of its own.
"""

from .decoding import Decoder as Decoder
from .language_model import LanguageModel as LanguageModel
from .language_model import LossParts as LossParts
