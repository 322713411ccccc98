"""Cross-entropy between logits and integer targets.

Invariant: logits are never gathered and no probability is stored; a split vocabulary costs one maximum and
one sum of three numbers a row.
"""

from __future__ import annotations

from ..dims import require
from ..errors import DimensionError, DtypeError
from ..graph.operation import NO_GRADIENT, OperationDef, Space, build, register
from ..graph.tensor import Tensor
from ..spmd.local import LocalTensor
from ..spmd.value import Value


class _CrossEntropy(OperationDef):
    """Loss of each row; the logarithm of the sum of exponentials stays for the gradient."""

    kind = "cross_entropy"
    output_names = ("loss", "lse")

    def infer(self, inputs, attributes):
        """The targets' shape, twice."""
        logits, targets = inputs
        return [(targets.shape, logits.dtype)] * 2

    def vjp(self, op, douts):
        """Softmax less the smoothed target, times the gradient of the loss."""
        if douts[0] is None:
            return [None, None]
        return [build("cross_entropy_grad", [*op.inputs, op.outputs[1], douts[0]], **op.attributes)[0], None]

    def space(self, op):
        """Return the logits' dimensions."""
        return Space(op.inputs[0].shape)

    def lower(self, op, inputs, b):
        """One fused kernel if the vocabulary is whole; else maximum, sums, and a kernel that finishes."""
        (logits, targets), attributes = inputs, op.attributes
        vocab = attributes["vocab_dim"]
        matrix, names = b.rows(logits, vocab)
        ids = b.vector(targets, names)
        loss, lse = (b.new([targets.dims[targets.index[n]] for n in names], targets.placement, logits.value.dtype) for _ in "ab")
        results = [b.vector(loss, names), b.vector(lse, names)]
        axes = logits.placement.axes_of(vocab)
        if not axes:
            b.emit("cross_entropy", results, [matrix, ids], **_params(attributes))
            return [loss, lse]
        part = {"offset": b.start(logits.dims[logits.index[vocab]], axes), "vocab": attributes["n_valid"]}
        m = LocalTensor(Value(results[0].shape, matrix.dtype), (), targets.placement)
        b.emit("cross_entropy_max", [m], [matrix], **part)
        m_all = Value(m.value.shape, matrix.dtype)
        b.collective("allreduce", m_all, m.value, axes, reduce="max")
        s, s_all = Value((3, *m_all.shape), matrix.dtype), Value((3, *m_all.shape), matrix.dtype)
        b.emit("cross_entropy_sums", [s], [matrix, ids, m_all], **part)
        b.collective("allreduce", s_all, s, axes, reduce="sum")
        b.emit("cross_entropy_finish", results, [m_all, s_all, ids], **_params(attributes))
        return [loss, lse]


class _CrossEntropyGrad(OperationDef):
    """Gradient of the loss with respect to the logits, written over them where nobody needs them any more."""

    kind = "cross_entropy_grad"
    vjp = NO_GRADIENT  # second derivatives are not taken

    def infer(self, inputs, attributes):
        """The logits' shape."""
        return [(inputs[0].shape, inputs[0].dtype)]

    def space(self, op):
        """Return the logits' dimensions."""
        return Space(op.inputs[0].shape)

    def lower(self, op, inputs, b):
        """One kernel on the slice of the vocabulary; no communication."""
        (logits, *rows), vocab = inputs, op.attributes["vocab_dim"]
        matrix, names = b.rows(logits, vocab)
        out = b.new([logits.dims[logits.index[n]] for n in (*names, vocab)], logits.placement, logits.value.dtype)
        offset = b.start(logits.dims[logits.index[vocab]], logits.placement.axes_of(vocab))
        b.emit(self.kind, [out.value.reshaped(matrix.shape)], [matrix, *(b.vector(x, names) for x in rows)], **_params(op.attributes), offset=offset)
        return [out]


def _params(attributes) -> dict:
    return {"vocab": attributes["n_valid"], **{k: attributes[k] for k in ("label_smoothing", "z_loss", "ignore")}}


register(_CrossEntropy())
register(_CrossEntropyGrad())


def cross_entropy(logits: Tensor, targets: Tensor, vocab_dim, n_valid: int | None = None, label_smoothing: float = 0.0,
                  z_loss: float = 0.0, ignore: int | None = None) -> Tensor:
    """Cross-entropy of each target, 0 where the target is negative or equals ``ignore``.

    ``n_valid`` is the true size of a padded vocabulary: columns from there on take no part. With smoothing ls a
    target has probability 1 - ls + ls/n_valid and every other column ls/n_valid; ``z_loss`` adds z_loss * lse**2.

    Shape   logits [..., vocab_dim], targets [...] of integers -> [...].
    Comm    none if ``vocab_dim`` is whole; else allreduce(max) of one and allreduce(sum) of three numbers a row.
    Grad    of the logits: no communication; of the targets: none.
    Raises  DimensionError if the dimensions of logits and targets do not fit or ``n_valid`` exceeds the vocabulary;
            DtypeError if the logits are not floating or the targets are not integers.
    """
    vocab = require(logits.shape, vocab_dim, "cross_entropy")
    rows = logits.shape.without([vocab.name])
    if set(rows.dims) != set(targets.shape.dims):
        raise DimensionError(f"cross_entropy: logits {logits!r} less {vocab} have the dimensions {rows}, targets {targets!r} have {targets.shape}. "
                             "Give one target for each row of logits.")
    if not logits.dtype.startswith("float") or targets.dtype not in ("int32", "int64"):
        raise DtypeError(f"cross_entropy: logits are of {logits.dtype} and targets of {targets.dtype}. Logits are floating, targets int32 or int64.")
    n_valid = vocab.size if n_valid is None else int(n_valid)
    if not 1 <= n_valid <= vocab.size:
        raise DimensionError(f"cross_entropy: n_valid={n_valid} columns of {vocab}. Give a number from 1 to {vocab.size}.")
    return build("cross_entropy", [logits, targets], vocab_dim=vocab.name, n_valid=n_valid, label_smoothing=float(label_smoothing),
                 z_loss=float(z_loss), ignore=None if ignore is None else int(ignore))[0]
