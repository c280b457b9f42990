"""What one call of an operator computes and moves, from the shapes and types of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import msgspec
from msgspec.structs import replace

from tracedoc.timeline.operator_calls import Call, Tensor, call_of
from tracedoc.trace.columns import Shapes

EIGHT_BIT_RESULT = 2
"""Bytes of an element that a product of 8-bit inputs writes: 16-bit, unless a script asks for more."""


ALIGNED = 8
"""Rows of 16-bit matrices of a multiple of this are loaded 16 bytes at once (NVIDIA, Matrix Multiplication
Background, requirements of tensor cores; cuBLAS documentation, Tensor Core Usage)."""


class Work(msgspec.Struct, frozen=True):
    """Floating-point operations of a call, and the bytes that pass if each tensor is read and written once.

    ``nbytes`` is ``None`` where a type is not known. ``is_matrix`` marks products, convolutions and
    attention, of which 2 M N K operations count: a multiplication and an addition. A causal mask does not
    lessen those of attention. All else counts one operation for each arithmetic step and element, a function
    (exp, rsqrt) as one. A product is a ``misfit`` where rows of its matrices in 16 bits, as they lie in
    memory, are no multiple of 8 long or apart: tensor cores load 16 bytes at once. Without strides any size
    that is none counts. ``moved`` is how many elements pass, of lists of tensors alone: the profiler records
    no types of these, but their kernels are named after them. A copy ``reorders`` where both tensors have
    elements of one size, and their dimensions lie in memory in different orders.
    """

    flops: float
    nbytes: float | None
    is_matrix: bool = False
    misfit: bool = False
    moved: float = 0.0
    reorders: bool = False


def _moved(*parts: tuple[float, int | None]) -> float | None:
    """The bytes of some numbers of elements of some sizes."""
    total = 0.0
    for elements, size in parts:
        if size is None:
            return None
        total += elements * size
    return total


def _all_of(tensors: Sequence[Tensor]) -> list[tuple[float, int | None]]:
    return [(one.stored, one.size) for one in tensors]


Formula = Callable[[Call], Work | None]


def _product(left: int, right: int, rank: int) -> Formula:
    """Counts a product of the arguments at two positions, to which one before them is added."""

    def count(call: Call) -> Work | None:
        a, b = call.tensor(left), call.tensor(right)
        if a is None or b is None or len(a.extents) != rank or len(b.extents) != rank:
            return None
        if a.extents[-1] != b.extents[-2] or a.extents[:-2] != b.extents[:-2]:
            return None
        return _multiplied(a, b, b.extents[-1], call.tensor(0) if left else None)

    return count


def _multiplied(a: Tensor, b: Tensor, width: int | None, added: Tensor | None) -> Work:
    """A product whose result has rows of a width; ``None`` of one that is a vector."""
    steps = float(a.elements) * (1 if width is None else width)
    written = steps / max(a.extents[-1], 1)
    size = EIGHT_BIT_RESULT if a.size == 1 else a.size
    moved = _moved(*_all_of([a, b, *([added] if added else [])]), (written, size))
    lengths = (width or 0, *_rows_in_memory(a), *_rows_in_memory(b))
    return Work(2.0 * steps, moved, True, a.size == 2 and any(length % ALIGNED for length in lengths))


def _rows_in_memory(matrix: Tensor) -> tuple[int, ...]:
    """How long the rows of a matrix, or of the last two dimensions, are, and how far apart.

    Rows of its transpose, where that is what lies in memory. Without strides both sizes: either may be a row.
    """
    if len(matrix.strides) < 2:
        return matrix.extents[-2:]
    (rows, length), (apart, within) = matrix.extents[-2:], matrix.strides[-2:]
    if apart == 1 < within:
        rows, length, apart = length, rows, within
    return (length, apart) if rows > 1 else (length,)


def _linear(call: Call) -> Work | None:
    """A layer ``x W^T + b``; its weight may be listed transposed."""
    x, weight = call.tensor(0), call.tensor(1)
    if x is None or weight is None or not x.extents or len(weight.extents) != 2:
        return None
    if x.extents[-1] not in weight.extents:
        return None
    out = weight.extents[0 if weight.extents[1] == x.extents[-1] else 1]
    return _multiplied(x, weight, out, call.tensor(2))


def _with_vector(left: int) -> Formula:
    """Counts a product of a matrix with a vector, or of two vectors."""

    def count(call: Call) -> Work | None:
        a, b = call.tensor(left), call.tensor(left + 1)
        if a is None or b is None or len(b.extents) != 1 or not a.extents or a.extents[-1] != b.elements:
            return None
        return _multiplied(a, b, None, call.tensor(0) if left else None)

    return count


def _grouped(call: Call) -> Work | None:
    """Rows of one matrix, each times the matrix of its group: M K and G K N; or M K and K N, cut along K.

    The second is the gradient of the first one's matrices: a matrix M N for each group.
    """
    a, b, ends = (call.tensor(place) for place in range(3))
    if a is None or b is None or len(a.extents) != 2 or len(b.extents) not in (2, 3):
        return None
    if a.extents[1] != b.extents[-2]:
        return None
    one = _multiplied(a, b, b.extents[-1], None)
    if len(b.extents) == 3:
        return one
    if ends is None or one.nbytes is None or a.size is None:
        return None
    size = EIGHT_BIT_RESULT if a.size == 1 else a.size
    return replace(one, nbytes=one.nbytes + (ends.elements - 1.0) * a.extents[0] * b.extents[1] * size)


def _attention(first: int, *, backward: bool = False, heads_inside: bool = True) -> Formula:
    """Counts attention whose query stands at ``first``, and key and value behind it.

    Two products forward, five backward. Tensors are [B, H, S, D] where ``heads_inside``, else [B, S, H, D].
    """

    def count(call: Call) -> Work | None:
        query, key = call.tensor(first), call.tensor(first + 1)
        value = call.tensor(first + 2) or key
        if query is None or key is None or value is None or {4} != {len(query.extents), len(key.extents)}:
            return None
        if len(value.extents) != 4:
            return None
        sequence = 2 if heads_inside else 1
        rows = query.elements // max(query.extents[-1], 1)
        depth, width = query.extents[-1], value.extents[-1]
        steps = float(rows) * key.extents[sequence]
        written = float(rows) * width
        once = [*_all_of([query, key, value]), (written, query.size)]
        if not backward:
            return Work(2.0 * steps * (depth + width), _moved(*once), True)
        # Read are the gradient, query, key, value and output; written the gradients of the first three.
        moved = _moved(*once, (written, query.size), *_all_of([query, key, value]))
        return Work(2.0 * steps * (3 * depth + 2 * width), moved, True)

    return count


def _convolution(call: Call) -> Work | None:
    x, weight = call.tensor(0), call.tensor(1)
    if x is None or weight is None or len(x.extents) != len(weight.extents) or len(x.extents) < 3:
        return None
    settings = [call.numbers(position) for position in (3, 4, 5, 6, 7, 8)]
    if any(one is None for one in settings):
        return None
    rank = len(x.extents) - 2
    stride, padding, dilation, transposed, extra, groups = (one or () for one in settings)
    stride, padding, dilation, extra = (_for_each(one, rank) for one in (stride, padding, dilation, extra))
    if transposed[0]:
        out = tuple(
            (size - 1) * s - 2 * p + d * (k - 1) + e + 1
            for size, k, s, p, d, e in zip(
                x.extents[2:], weight.extents[2:], stride, padding, dilation, extra, strict=True
            )
        )
        channels, steps = weight.extents[1] * groups[0], prod(x.extents[2:])
    else:
        out = tuple(
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, k, s, p, d in zip(
                x.extents[2:], weight.extents[2:], stride, padding, dilation, strict=True
            )
        )
        channels, steps = weight.extents[0], prod(out)
    written = float(x.extents[0]) * channels * prod(out)
    flops = 2.0 * x.extents[0] * steps * weight.elements
    return Work(flops, _moved(*_all_of([x, weight]), (written, x.size)), True)


def _for_each(listed: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return listed if len(listed) == rank else tuple(listed[:1]) * rank


def _convolution_backward(call: Call) -> Work | None:
    """The gradients of input and weight, each a convolution of its own, as far as they are asked for."""
    gradient, x, weight = (call.tensor(position) for position in range(3))
    if gradient is None or x is None or weight is None or len(gradient.extents) < 3:
        return None
    transposed = (call.numbers(7) or (0,))[0]
    asked = (call.numbers(10) or (1, 1))[:2]
    steps = prod((x if transposed else gradient).extents[2:])
    one = 2.0 * gradient.extents[0] * steps * weight.elements
    parts: list[Tensor] = []
    for wanted in asked:
        parts += [gradient, x, weight] if wanted else []
    return Work(one * sum(map(bool, asked)), _moved(*_all_of(parts)), True)


def _broadcast(tensors: Sequence[Tensor]) -> int:
    rank = max(len(one.extents) for one in tensors)
    aligned = [(1,) * (rank - len(one.extents)) + one.extents for one in tensors]
    return prod(max(extents) if 0 not in extents else 0 for extents in zip(*aligned, strict=True))


def _pointwise(steps: float = 1.0, result: int | None = None) -> Formula:
    """Counts what reads its tensors and writes one of their common shape, of ``result`` bytes an element.

    Tensors without dimensions do not change the type of others.
    """

    def count(call: Call) -> Work | None:
        tensors = call.tensors
        if not tensors:
            return None
        out = _broadcast(tensors)
        sizes = [one.size for one in tensors if one.extents] or [one.size for one in tensors]
        size = result or (None if None in sizes else max(size or 0 for size in sizes))
        return Work(steps * out, _moved(*_all_of(tensors), (out, size)))

    return count


def _streamed(steps: float, like: int = 0, *, writes: bool = True, mask: bool = False) -> Formula:
    """Counts what reads all its tensors and writes one like that at ``like``, and perhaps a mask."""

    def count(call: Call) -> Work | None:
        one = call.tensor(like)
        if one is None:
            return None
        written = [(one.elements, one.size)] if writes else []
        written += [(one.elements, 1)] if mask else []
        return Work(steps * one.elements, _moved(*_all_of(call.tensors), *written))

    return count


def _copy(call: Call) -> Work | None:
    to, source = call.tensor(0), call.tensor(1)
    if to is None or source is None:
        return None
    reorders = to.size == source.size and len(to.order) == len(source.order) and to.order != source.order
    return Work(0.0, _moved(*_all_of([to, source])), reorders=reorders)


def _fill(call: Call) -> Work | None:
    one = call.tensor(0)
    return None if one is None else Work(0.0, _moved((one.elements, one.size)))


def _rows_of(index: int) -> Formula:
    """Counts rows of the first tensor that an index takes: it is read, the rows are read and written."""

    def count(call: Call) -> Work | None:
        rows, numbers = call.tensor(0), call.tensor(index)
        if rows is None or numbers is None or not rows.extents:
            return None
        taken = float(numbers.elements) * rows.elements / max(rows.extents[0], 1)
        return Work(0.0, _moved((numbers.elements, numbers.size), (2 * taken, rows.size)))

    return count


def _bags(call: Call) -> Work | None:
    """The rows of a table that an index takes, summed for each bag."""
    rows, numbers, bags = (call.tensor(place) for place in range(3))
    if rows is None or numbers is None or bags is None or len(rows.extents) != 2:
        return None
    width = rows.extents[1]
    passed = (float(numbers.elements) + bags.elements) * width
    index = [(one.elements, one.size) for one in (numbers, bags)]
    return Work(float(numbers.elements) * width, _moved(*index, (passed, rows.size)))


def _scattered(steps: float, source: int) -> Formula:
    """Counts elements that are read by an index and written elsewhere, or added to what is there."""

    def count(call: Call) -> Work | None:
        numbers, values = call.tensor(2), call.tensor(source)
        if numbers is None or values is None:
            return None
        moved = _moved((numbers.elements, numbers.size), (2 * numbers.elements, values.size))
        return Work(steps * numbers.elements, moved)

    return count


def _loss(*, backward: bool) -> Formula:
    """Counts a loss that picks one value of each row: forward reads them, backward writes whole rows."""

    def count(call: Call) -> Work | None:
        scores, target = (call.tensor(place) for place in ((1, 2) if backward else (0, 1)))
        if scores is None or target is None:
            return None
        rows = (target.elements, target.size)
        moved = (scores.elements, scores.size) if backward else (target.elements, scores.size)
        return Work(float(target.elements), _moved(rows, moved))

    return count


def _lists(steps: float, reads: int | None, writes: int) -> Formula:
    """Counts what is done to each element of lists, of which so many are read (``None``: all) and written."""

    def count(call: Call) -> Work | None:
        first = call.arguments[0] if call.arguments else None
        if not isinstance(first, tuple) or not first:
            return None
        elements = float(sum(one.elements for one in first))
        given = sum(isinstance(one, tuple) for one in call.arguments)
        moved = elements * ((given if reads is None else reads) + writes)
        return Work(steps * elements, _moved((moved, first[0].size)), moved=moved)

    return count


def _joined(call: Call) -> Work | None:
    tensors = call.tensors
    return Work(0.0, _moved(*_all_of([*tensors, *tensors]))) if tensors else None


def _compiled(call: Call) -> Work | None:
    """A kernel of Inductor: its arguments are all that it reads and writes; what it computes is not known."""
    return Work(0.0, _moved(*_all_of(call.tensors))) if call.tensors else None


def _named(names: str, formula: Formula) -> dict[str, Formula]:
    return dict.fromkeys(names.split(), formula)


_FORMULAS: dict[str, Formula] = {
    "mm": _product(0, 1, 2),
    "addmm": _product(1, 2, 2),
    "bmm": _product(0, 1, 3),
    "baddbmm": _product(1, 2, 3),
    "_scaled_mm": _product(0, 1, 2),
    "linear": _linear,
    "_addmm_activation": _product(1, 2, 2),
    **_named("mv dot vdot", _with_vector(0)),
    "addmv": _with_vector(1),
    **_named("_grouped_mm _scaled_grouped_mm", _grouped),
    **_named(
        "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math "
        "_scaled_dot_product_fused_attention_overrideable",
        _attention(0),
    ),
    **_named(
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_cudnn_attention_backward "
        "_scaled_dot_product_fused_attention_overrideable_backward",
        _attention(1, backward=True),
    ),
    **_named("_flash_attention_forward _efficient_attention_forward", _attention(0, heads_inside=False)),
    **_named(
        "_flash_attention_backward _efficient_attention_backward",
        _attention(1, backward=True, heads_inside=False),
    ),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **_named("native_layer_norm native_group_norm native_batch_norm", _streamed(7)),
    **_named("cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit", _streamed(7)),
    **_named("native_layer_norm_backward native_group_norm_backward", _streamed(13)),
    **_named("native_batch_norm_backward cudnn_batch_norm_backward", _streamed(13)),
    **_named("miopen_batch_norm_backward batch_norm_backward", _streamed(13)),
    "_fused_rms_norm": _streamed(4),
    "_fused_rms_norm_backward": _streamed(9),
    **_named("_softmax _log_softmax _safe_softmax", _streamed(5)),
    **_named("_softmax_backward_data _log_softmax_backward_data", _streamed(4)),
    **_named("nll_loss_forward nll_loss2d_forward", _loss(backward=False)),
    **_named("nll_loss_backward nll_loss2d_backward", _loss(backward=True)),
    **_named("mse_loss l1_loss smooth_l1_loss binary_cross_entropy", _streamed(3, writes=False)),
    **_named("mse_loss_backward smooth_l1_loss_backward", _streamed(3, 1)),
    "embedding": _rows_of(1),
    "_embedding_bag": _bags,
    "index_select": _rows_of(2),
    "embedding_dense_backward": _streamed(1),
    "gather": _scattered(0, 0),
    "scatter": _scattered(0, 3),
    **_named("scatter_add index_add", _scattered(1, 3)),
    **_named(
        "relu neg exp exp2 log log2 log1p sqrt rsqrt sigmoid tanh gelu silu hardswish hardsigmoid hardtanh "
        "leaky_relu elu softplus mish abs sin cos tan erf pow reciprocal square sign round floor ceil clamp "
        "clamp_min clamp_max bitwise_not add sub rsub mul div remainder fmod maximum minimum atan2 lerp "
        "bitwise_and bitwise_or bitwise_xor masked_fill where threshold_backward sigmoid_backward "
        "tanh_backward gelu_backward silu_backward hardtanh_backward leaky_relu_backward elu_backward "
        "hardswish_backward mish_backward native_dropout_backward",
        _pointwise(),
    ),
    **_named(
        "eq ne lt gt le ge isnan isinf isfinite logical_and logical_or logical_not", _pointwise(result=1)
    ),
    **_named("addcmul addcdiv", _pointwise(2)),
    **_named("native_dropout _fused_dropout", _streamed(2, mask=True)),
    **_named(
        "sum mean max min amax amin argmax argmin prod any all norm linalg_vector_norm",
        _streamed(1, writes=False),
    ),
    **_named("var var_mean std logsumexp", _streamed(3, writes=False)),
    **_named("cumsum cumprod", _streamed(1)),
    "copy_": _copy,
    **_named("fill zero bernoulli uniform normal", _fill),
    **_named("cat stack", _joined),
    **_named("max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d", _streamed(1, writes=False)),
    **_named("max_pool2d_with_indices_backward avg_pool2d_backward", _streamed(1, 1)),
    "_adaptive_avg_pool2d_backward": _streamed(1, 1),
    **_named("_foreach_add _foreach_sub _foreach_mul _foreach_div", _lists(1, None, 1)),
    **_named("_foreach_lerp _foreach_maximum", _lists(1, None, 1)),
    **_named("_foreach_sqrt _foreach_neg _foreach_reciprocal", _lists(1, 1, 1)),
    **_named("_foreach_addcmul _foreach_addcdiv", _lists(2, None, 1)),
    "_foreach_norm": _lists(1, 1, 0),
    "_foreach_zero": _lists(0, 0, 1),
    "_foreach_copy": _lists(0, 1, 1),
    # Adam reads a parameter, its gradient and two moments, and writes all but the gradient.
    **_named("_fused_adam _fused_adamw", _lists(15, 4, 3)),
    "_fused_sgd": _lists(4, 3, 2),
    "_fused_adagrad": _lists(6, 3, 2),
    "_amp_foreach_non_finite_check_and_unscale": _lists(1, 1, 1),
}
"""Formulas by the names of aten's operators, without the underscore of those that write in place."""


def formula_of(name: str) -> Formula | None:
    """How the work of calls of an operator is counted, ``None`` where that is not known.

    Only operators that launch kernels themselves are known, and ``aten::linear``, which holds the operator
    that does, for captures that show no shapes of that one.
    """
    if name.startswith("triton_"):
        return _compiled
    library, _, operator = name.partition("::")
    if library.startswith("flash_attn") and "varlen" not in name:
        return (
            _attention(1, backward=True, heads_inside=False)
            if "backward" in name or operator == "bwd"
            else _attention(0, heads_inside=False)
        )
    if library != "aten":
        return None
    return _FORMULAS.get(operator) or _FORMULAS.get(operator.removesuffix(".out").removesuffix("_"))


def work_of(name: str, shapes: Shapes) -> Work | None:
    """What a call of an operator computes and moves, ``None`` where its name or shapes do not tell."""
    formula = formula_of(name)
    return None if formula is None else formula(call_of(shapes))
