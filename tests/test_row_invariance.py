"""The ground that bit equality stands on: on MLX's CPU device a row's bits do not depend on the rows beside it.

Every operation of the models is probed alone. Where one of these fails, equality of tokens is a matter of luck: the
tests of rounds pin this device, and what holds on it is measured here and nowhere assumed.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from dealt import dealt

ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 33, 64)
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
HEADS = [(4, 2, 16), (6, 1, 32), (8, 8, 64), (16, 1, 128)]  # of queries, of keys and values, and their size
SIZES = [(61, 48), (97, 131), (256, 515), (1024, 67)]


def normal(*shape, dtype=mx.float32, seed=0):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def bits(x):
    return np.array(x.astype(mx.float32))


def probe(function, x, axis=0):
    """`function` of the first n rows has the bits that it has for all rows, and so have rows in the middle."""
    whole = bits(function(x, 0))
    rows = x.shape[axis]
    for count in ROWS:
        for begin in {0, rows - count, (rows - count) // 2}:
            part = x[begin : begin + count] if axis == 0 else x[:, :, begin : begin + count]
            expected = whole[begin : begin + count] if axis == 0 else whole[:, :, begin : begin + count]
            assert (bits(function(part, begin)) == expected).all(), f"{count} rows from {begin} on"
    assert np.isfinite(whole).all()
    assert len({row.tobytes() for row in whole.reshape(-1, whole.shape[-1])}) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "outer"), SIZES)
def test_a_matrix_product_is_the_same_whatever_the_number_of_rows(inner, outer, dtype):
    weight = normal(outer, inner, dtype=DTYPES[dtype], seed=1)
    probe(lambda x, begin: x @ weight.T, normal(64, inner, dtype=DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("width", [4, 6, 8])
def test_a_quantised_product_is_the_same_whatever_the_number_of_rows(width, group, dtype):
    packed = mx.quantize(normal(131, 192, dtype=DTYPES[dtype], seed=1), group_size=group, bits=width)
    x = normal(64, 192, dtype=DTYPES[dtype])
    probe(lambda x, begin: mx.quantized_matmul(x, *packed, transpose=True, group_size=group, bits=width), x)


@pytest.mark.parametrize(("heads", "dtype", "buffer"), dealt(HEADS, tuple(DTYPES), (128, 256, 515)), ids=str)
def test_attention_is_the_same_whatever_the_rows_and_the_length_of_the_buffer(heads, dtype, buffer):
    """A mask of any shape; hidden keys past the last row, as many as a cut or a whole buffer has."""
    kind, first, (heads, kv_heads, size) = DTYPES[dtype], 40, heads
    x = normal(1, heads, 64, size, dtype=kind)
    keys, values = (normal(1, kv_heads, buffer, size, dtype=kind, seed=seed) for seed in (1, 2))
    position = mx.arange(first, first + 64)
    near = (position[:, None] >= mx.arange(buffer)) & (position[:, None] - mx.arange(buffer) < 37)

    def attend(queries, begin, held=buffer):
        mask = near[begin : begin + queries.shape[2], :held]
        k, v = keys[:, :, :held], values[:, :, :held]
        return mx.fast.scaled_dot_product_attention(queries, k, v, scale=size**-0.5, mask=mask)

    probe(attend, x, axis=2)
    whole = bits(attend(x, 0))
    for begin, count in ((0, 1), (3, 5), (17, 16), (40, 1)):
        shortest = first + begin + count
        for held in sorted({shortest, -(-shortest // 64) * 64, buffer}):
            if shortest <= held <= buffer:
                found = bits(attend(x[:, :, begin : begin + count], begin, held))
                assert (found == whole[:, :, begin : begin + count]).all(), (begin, count, held)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [130, 700, 1900])
def test_causal_attention_is_the_same_for_one_row_and_for_many(length, dtype):
    """A full layer: one row sees all keys without a mask, many rows see as many through the causal one."""
    kind, heads, size = DTYPES[dtype], 6, 32
    queries = normal(1, heads, length, size, dtype=kind)
    keys, values = (normal(1, 2, length, size, dtype=kind, seed=seed) for seed in (1, 2))

    def attend(begin, end):
        mask = "causal" if end - begin > 1 else None
        k, v = keys[:, :, :end], values[:, :, :end]
        return bits(mx.fast.scaled_dot_product_attention(queries[:, :, begin:end], k, v, scale=0.2, mask=mask))

    for count in (2, 8, 16, 40):
        together = attend(length - count, length)
        for row in {0, 1, count // 2, count - 1}:
            position = length - count + row
            assert (attend(position, position + 1)[:, :, 0] == together[:, :, row]).all(), (count, row)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [13, 48, 67, 256])
def test_norms_rotation_and_elementwise_functions_keep_a_rows_bits(size, dtype):
    kind = DTYPES[dtype]
    x, weight = normal(64, size, dtype=kind), normal(size, dtype=mx.float32, seed=1)
    functions = {
        "rms norm": lambda x, begin: mx.fast.rms_norm(x, None, 1e-5),
        "rms norm with a weight": lambda x, begin: mx.fast.rms_norm(x, weight, 1e-5),
        "soft cap": lambda x, begin: 20 * mx.tanh(x.astype(mx.float32) * 0.03),
        "silu": lambda x, begin: x * mx.sigmoid(x),
        "logsumexp": lambda x, begin: x - mx.logsumexp(x.astype(mx.float32), axis=-1, keepdims=True),
        "exp": lambda x, begin: mx.exp(x),
    }
    for name, function in functions.items():
        try:
            probe(function, x)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_depends_on_the_position_and_not_on_where_the_rows_begin(dtype):
    def rotate(x, begin):
        return mx.fast.rope(x, 32, traditional=False, base=5e5, scale=1.0, offset=1000 + begin)

    probe(rotate, normal(1, 3, 64, 32, dtype=DTYPES[dtype]), axis=2)


def test_the_probe_can_fail():
    """A function that looks at its neighbours does not pass it."""
    with pytest.raises(AssertionError, match="rows from"):
        probe(lambda x, begin: x + mx.mean(x, axis=0, keepdims=True), normal(64, 16))
