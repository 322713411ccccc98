"""Optimizers, schedules of the learning rate, and the clipping of gradients.

Invariant: sizes, norms and means are global, and each logical element counts once, whatever the layout.
"""

from .adafactor import Adafactor as Adafactor
from .adam import Adam as Adam
from .clip import Clipped as Clipped
from .clip import clip as clip
from .make import make_optimizer as make_optimizer
from .schedules import make_schedule as make_schedule
from .sgd import Sgd as Sgd
from .update import UpdateInputs as UpdateInputs
