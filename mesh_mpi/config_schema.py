"""What a configuration may say: one frozen class a section, with types, bounds and defaults.

Invariant: a value of these classes is legal by type and bound; what several values must satisfy
together is checked in ``config.py``. A field without a default must be given.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from .errors import ConfigError
from .layout import Rules
from .mesh import Mesh

Count = Annotated[int, Meta(ge=1)]
Number = Annotated[int, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]

ACTIVATIONS = ("relu", "gelu", "silu", "swish", "sigmoid", "tanh", "linear")
BATCH_FORMS = ("tokens_per_batch", "sequences_per_batch", "tokens_per_replica", "sequences_per_replica")


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: frozen, by keyword, and closed to unknown keys."""


class Model(Section):
    """``model:`` the Transformer, in global sizes."""

    d_model: Count  # width of the residual stream
    d_ff: Count  # width of the feed-forward's inside
    heads: Count  # of the attention
    d_kv: Count  # width of one head's queries, keys and values
    layers: Count  # each an attention and a feed-forward
    vocab_size: Count  # symbols that exist
    length: Count  # positions in a sequence
    vocab_multiple: Count = 128  # the table is padded to a multiple of this, whatever the mesh
    norm: Literal["layer", "rms"] = "rms"  # layer: mean removed, scale and bias; rms: scale only
    norm_eps: Positive = 1e-6  # added to the variance
    activation: str = "relu"  # or a product of activated projections, "gelu,linear"
    biases: bool = False  # biases in the projections
    tied_embedding: bool = True  # one table for the input and the softmax
    embedding_stddev: Positive | None = None  # of the initial table and positions; null: 1/sqrt(d_model) if tied, else 1
    scale_logits: bool = False  # multiply the softmax's input by 1/sqrt(d_model), as Mesh-TensorFlow does with a tied table of N(0, 1)
    dropout: Fraction = 0.0  # of the residual branches and inside the feed-forward
    attention_dropout: Fraction | None = None  # of the attention's weights; null: as dropout
    positions: Literal["learned"] = "learned"  # one vector a position
    label_smoothing: Fraction = 0.0  # probability spread evenly over all symbols, in training only
    z_loss: NonNegative = 0.0  # coefficient of log(Z) squared, in training only
    loss_denominator: Literal["targets", "all"] = "targets"  # all: padding counts in the denominator, as in Mesh-TensorFlow

    @property
    def padded_vocab_size(self) -> int:
        """The rows of the embedding: ``vocab_size`` rounded up to a multiple of ``vocab_multiple``."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def activations(self) -> tuple[str, ...]:
        """The activations whose projections are multiplied, in order; one for an ordinary feed-forward."""
        return tuple(word.strip() for word in self.activation.split(","))

    @property
    def attention_dropout_rate(self) -> float:
        """The dropout of the attention's weights, with its default resolved."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout


class Sgd(Section, tag="sgd", tag_field="name"):
    """``optimizer: {name: sgd}``: v = momentum * v + g;  w -= rate * v."""

    name: ClassVar[str] = "sgd"
    momentum: Fraction = 0.0  # share of the last update in the next
    weight_decay: NonNegative = 0.0  # added to the gradient: g + weight_decay * w; not for biases and variables of one dimension
    clip_norm: Positive | None = None  # bound of the global norm of the gradient; null: none


class Adam(Section, tag="adam", tag_field="name"):
    """``optimizer: {name: adam}``: textbook Adam with bias correction; decoupled decay makes it AdamW."""

    name: ClassVar[str] = "adam"
    beta1: Fraction = 0.9  # decay of the first moment
    beta2: Fraction = 0.999  # decay of the second moment
    eps: Positive = 1e-8  # outside the square root
    weight_decay: NonNegative = 0.0  # of the weights a step, times the rate
    clip_norm: Positive | None = None  # bound of the global norm of the gradient; null: none


class Adafactor(Section, tag="adafactor", tag_field="name"):
    """``optimizer: {name: adafactor}``: Adafactor with its paper's defaults; every size is global."""

    name: ClassVar[str] = "adafactor"
    beta1: Fraction = 0.0  # 0: no first moment is kept
    decay_exponent: Positive = 0.8  # second moment's decay: 1 - (step + 1) ** -decay_exponent
    clipping_threshold: Positive | None = 1.0  # of the root mean square of an update; null: none
    factored: bool = True  # second moments of matrices are kept as rows and columns
    min_dim_size_to_factor: Count = 128  # only where both dimensions are at least so large
    multiply_by_parameter_scale: bool = True  # the rate is relative to the size of a variable
    epsilon1: Positive = 1e-30  # added to the squared gradient
    epsilon2: Positive = 1e-3  # least parameter scale
    weight_decay: NonNegative = 0.0  # of the weights a step, times the rate
    clip_norm: Positive | None = None  # bound of the global norm of the gradient; null: none


class Constant(Section, tag="constant", tag_field="name"):
    """``learning_rate`` at every step."""

    name: ClassVar[str] = "constant"
    learning_rate: NonNegative = 1e-3  # the factor of the formula


class LinearWarmup(Section, tag="linear_warmup", tag_field="name"):
    """learning_rate * min(1, step / warmup_steps)."""

    name: ClassVar[str] = "linear_warmup"
    learning_rate: NonNegative = 1e-3  # the highest, reached at step warmup_steps and kept
    warmup_steps: Count = 10_000  # steps in which the rate rises


class Noam(Section, tag="noam", tag_field="name"):
    """learning_rate * rsqrt(max(step, warmup_steps)) * min(1, (T - step) / (decay_fraction * T)), T = train.steps."""

    name: ClassVar[str] = "noam"
    learning_rate: NonNegative = 1.0  # the factor of the formula
    warmup_steps: Count = 10_000  # steps until the rate falls
    decay_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.1  # the last part of the run, in which the rate goes to 0


class TruncatedRsqrt(Section, tag="truncated_rsqrt", tag_field="name"):
    """learning_rate * rsqrt(max(step, warmup_steps))."""

    name: ClassVar[str] = "truncated_rsqrt"
    learning_rate: NonNegative = 1.0  # the factor of the formula
    warmup_steps: Count = 10_000  # steps until the rate falls


class LinearDecay(Section, tag="linear_decay", tag_field="name"):
    """learning_rate * clip((T - step) / decay_steps, 0, 1), T = train.steps; null decay_steps: over the whole run."""

    name: ClassVar[str] = "linear_decay"
    learning_rate: NonNegative = 1e-3  # the factor of the formula
    decay_steps: Count | None = None  # the last steps, in which the rate goes to 0


class SlantedTriangular(Section, tag="slanted_triangular", tag_field="name"):
    """Up to ``learning_rate`` over the first ``cut_fraction`` of train.steps, then down; least rate: learning_rate / ratio."""

    name: ClassVar[str] = "slanted_triangular"
    learning_rate: NonNegative = 0.01  # the highest
    cut_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.1  # of the run, in which the rate rises
    ratio: Annotated[float, Meta(ge=1)] = 32.0  # of the highest rate to the lowest


class WarmupRsqrtDecay(Section, tag="warmup_rsqrt_decay", tag_field="name"):
    """learning_rate * min(1, step / warmup_steps) * rsqrt(max(step, warmup_steps)) * clip((T - step) / decay_steps, 0, 1).

    The Mesh-TensorFlow paper's schedule; T = train.steps, and a null ``decay_steps`` means no decay at the end.
    """

    name: ClassVar[str] = "warmup_rsqrt_decay"
    learning_rate: NonNegative = 1.0  # the factor of the formula
    warmup_steps: Count = 10_000  # steps until the rate falls
    decay_steps: Count | None = None  # the last steps, in which the rate goes to 0


Optimizer = Sgd | Adam | Adafactor
Schedule = Constant | LinearWarmup | Noam | TruncatedRsqrt | LinearDecay | SlantedTriangular | WarmupRsqrtDecay


class Train(Section):
    """``train:`` how long, and what happens how often; a 0 means never."""

    steps: Count = 1000  # of the whole run, T in the schedules
    microbatches: Count = 1  # the step's batch is taken in so many pieces
    tokens_per_microbatch_per_replica: Count | None = None  # or: in as few pieces as give a replica no more tokens at once
    checkpoint_every: Number = 0  # steps between checkpoints; the last step is saved in any case
    evaluate_every: Number = 0  # steps between evaluations on data.valid
    evaluate_batches: Number = 0  # batches of the held-out rows in an evaluation; 0: all of them
    log_every: Number = 10  # steps between lines of the log
    keep_last: Count = 3  # so many newest checkpoints are kept
    keep_every: Number = 0  # and those whose step is a multiple of this
    tensorboard: bool = False  # figures also as event files in run_dir/tensorboard (the extra tensorboard)
    max_bad_steps: Number = 10  # the run ends after so many steps in a row whose gradient is not finite; 0: it goes on


class Data(Section):
    """``data:`` where the sequences come from: a token file (``mesh-mpi prepare``), ``bundled:sotu``, or ``synthetic`` (numbers from the seed)."""

    train: str = "synthetic"  # the path of a token file; bundled:sotu: the text that comes with the package, without its held-out tenth
    valid: str | None = None  # held-out rows, for evaluation: a token file, or bundled:sotu (its held-out tenth); null: none
    shuffle: bool = True  # the rows of train in an order drawn anew for each epoch; false: as they stand in the file
    prefetch: Number = 2  # steps whose rows are read ahead on a thread; 0: none

    @property
    def is_packed(self) -> bool:
        """Whether rows come with segments and positions, and padding that does not count."""
        return self.train != "synthetic"


class Bench(Section):
    """``bench:`` how many steps are timed, after how many that are not."""

    steps: Count = 8  # that are timed
    warmup: Number = 2  # that come before and are not


class Config(Section):
    """One run, whole. Exactly one of the four forms of the batch is given; ``n_sequences`` resolves it."""

    model: Model
    mesh_shape: str = ""  # axes and their sizes, "data:2;model:2"; empty: one rank
    layout: str = ""  # which dimension is split over which axis, "batch:data;d_ff:model;heads:model;vocab:model"
    storage: dict[str, str] = {}  # class (parameters, optimizer) to rules; a class without them lies as layout says
    strict_layout: bool = False  # a ruled dimension that must be whole is an error, not an allgather
    seed: Seed = 0  # of the initial values, the dropout and the order of the data
    run_dir: str | None = None  # the folder of the run's files; null: none are written (mesh-mpi train: runs/NAME, by the file's name)
    float_type: Literal["float32", "float64"] = "float32"  # of variables and computation
    resume: str = "auto"  # auto: from run_dir's newest checkpoint if there is one; never; or a path
    init_from: str | None = None  # a checkpoint whose variables are the initial values
    tokens_per_batch: Count | None = None  # of a step, over all ranks
    sequences_per_batch: Count | None = None  # of a step, over all ranks
    tokens_per_replica: Count | None = None  # a replica is a slice of the batch that the layout makes
    sequences_per_replica: Count | None = None  # as tokens_per_replica
    optimizer: Optimizer = Adam()
    schedule: Schedule = Constant()
    train: Train = Train()
    data: Data = Data()
    bench: Bench = Bench()

    @property
    def n_replicas(self) -> int:
        """Into how many slices mesh and layout split the dimension ``batch``."""
        return Mesh(self.mesh_shape).extent(Rules(self.layout).axes_of("batch"))

    @property
    def n_sequences(self) -> int:
        """The sequences of one step's batch over all ranks; ConfigError if the batch does not come out whole."""
        form, given = next((form, value) for form in BATCH_FORMS if (value := getattr(self, form)) is not None)
        replicas, length = self.n_replicas, self.model.length
        n, rest = divmod(given, length) if form.startswith("tokens") else (given, 0)
        if rest or not n:
            raise ConfigError(f"{form}: {given} tokens are no whole number of sequences of length {length}. "
                              f"Choose a multiple of {length}.")
        n *= replicas if form.endswith("replica") else 1
        if n % (replicas * self.train.microbatches):
            pieces = f" into {self.train.microbatches} microbatches" if self.train.microbatches > 1 else ""
            raise ConfigError(f"{form}: {n} sequences do not divide{pieces} over {replicas} slices of the batch. "
                              f"Choose a multiple of {replicas * self.train.microbatches} sequences.")
        return n

    @property
    def n_microbatches(self) -> int:
        """Into how many equal pieces a step's batch is cut; ConfigError if both ways of saying so are used.

        A piece holds at least one sequence a replica.
        """
        most_tokens = self.train.tokens_per_microbatch_per_replica
        if most_tokens is None:
            return self.train.microbatches
        if self.train.microbatches != 1:
            raise ConfigError(f"train: microbatches is {self.train.microbatches} and tokens_per_microbatch_per_replica {most_tokens}. Give one of the two.")
        per_replica, most = self.n_sequences // self.n_replicas, max(1, most_tokens // self.model.length)
        return min(k for k in range(1, per_replica + 1) if per_replica % k == 0 and per_replica // k <= most)

    @property
    def n_tokens(self) -> int:
        """The positions of one step's batch over all ranks."""
        return self.n_sequences * self.model.length
