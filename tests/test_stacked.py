"""Queries and keys come from one stacked matrix: the same bits, nothing held twice, and a replaced weight counts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import dflash_mlx
from dflash_mlx.cache import Part, TargetCache
from dflash_mlx.config import TargetConfig
from dflash_mlx.fingerprint import fingerprint
from dflash_mlx.models.muse_glimmer import MuseGlimmer

CONFIG = {
    "model_type": "muse_glimmer_text", "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 97, "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "layer_rope_theta": [10000.0, 10000.0, 0, 10000.0], "rms_norm_eps": 1e-5, "post_norm_eps": 1e-8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "qk_scale_factor": 3.87,
    "output_multiplier": 0.5, "final_logit_softcapping": 20.0, "max_position_embeddings": 512,
}  # fmt: skip


def model(bits: Sequence[int] = ()) -> MuseGlimmer:
    """A random target; `bits` quantises queries' and keys' matrices of all layers, 0 for as they are."""
    mx.random.seed(3)
    made = MuseGlimmer(TargetConfig.from_dict({"model_type": "muse_glimmer", "text_config": CONFIG}))
    made.load_weights([(name, mx.random.normal(array.shape) * 0.2) for name, array in flat(made)])
    for layer in made.layers:
        for name, width in zip(("q_proj", "k_proj"), bits, strict=False):
            if width:
                layer.self_attn[name] = nn.QuantizedLinear.from_linear(layer.self_attn[name], 32, width)
    return made


def flat(made: MuseGlimmer) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    return tree_flatten(made.parameters())


def logits(made: MuseGlimmer, steps: Sequence[int] = (1, 9, 5, 1)) -> np.ndarray:
    """Of steps of several sizes, one after the other."""
    cache, found = TargetCache(made.config, mx.float32, 64), []
    for rows in steps:
        tokens = mx.array([(7 * at + 3) % 97 for at in range(cache.offset, cache.offset + rows)], mx.uint32)
        found.append(np.array(made(tokens, [Part(cache, rows, rows)]).logits))
        cache.advance(rows)
    return np.concatenate(found)


@pytest.mark.parametrize("bits", [(), (4, 4), (8, 8)], ids=["float32", "4 bits", "8 bits"])
def test_one_product_of_a_stack_gives_the_bits_of_two(bits):
    apart, together = model(bits), model(bits)
    together.stack()
    assert all(len(layer.self_attn.queries_keys) == 1 for layer in together.layers)
    assert (logits(apart) == logits(together)).all()


@pytest.mark.parametrize("bits", [(4, 8), (4, 0)], ids=["4 and 8 bits", "4 bits and float32"])
def test_matrices_of_two_formats_stay_apart(bits):
    apart, together = model(bits), model(bits)
    together.stack()
    assert all(len(layer.self_attn.queries_keys) == 2 for layer in together.layers)
    assert (logits(apart) == logits(together)).all()


@pytest.mark.parametrize("bits", [(), (4, 4)], ids=["float32", "4 bits"])
def test_a_stack_holds_nothing_twice(bits):
    limit = mx.set_cache_limit(0)  # a buffer that is used again may be longer than asked for
    try:
        made = model(bits)
        mx.eval(made.parameters())
        before = mx.get_active_memory()
        made.stack()
        mx.eval(made.parameters(), [layer.self_attn.queries_keys[0] for layer in made.layers])
        assert mx.get_active_memory() <= before
    finally:
        mx.set_cache_limit(limit)


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_a_weight_that_is_replaced_after_stacking_is_used(name):
    plain, stacked = model(), model()
    stacked.stack()
    logits(stacked)
    for made in (plain, stacked):
        linear = made.layers[1].self_attn[name]
        linear.weight = linear.weight * 2
    assert (logits(plain) == logits(stacked)).all()
    assert (logits(stacked) != logits(model())).any()


def test_scales_that_are_cast_after_stacking_are_used():
    """`set_dtype` casts scales and biases and leaves the packed weights as they are."""
    plain, stacked = model((4, 4)), model((4, 4))
    stacked.stack()
    before = logits(stacked)
    for made in (plain, stacked):
        made.set_dtype(mx.float16)
    assert (logits(plain) == logits(stacked)).all()
    assert (logits(stacked) != before).any()


def test_a_stack_whose_weights_were_replaced_is_let_go():
    limit = mx.set_cache_limit(0)
    try:
        plain, stacked = model(), model()
        stacked.stack()
        held = []
        for made in (plain, stacked):
            logits(made)
            before = mx.get_active_memory()
            nn.quantize(made, 32, 4, class_predicate=lambda path, _: path.endswith(("q_proj", "k_proj")))
            logits(made)
            held.append(mx.get_active_memory() - before)
        assert held[1] == held[0] < 0
    finally:
        mx.set_cache_limit(limit)


def test_all_weights_of_a_loaded_pair_can_be_read_in_another_thread():
    """An array that is not evaluated belongs to the thread that made it."""
    pair = dflash_mlx.load("pocket")
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(fingerprint, pair).result() == fingerprint(pair)


def test_row_counts_that_were_not_traced_get_the_same_bits_as_without_compiling():
    """The functions around attention are traced once, here with one row, for all row counts."""
    made = model()
    compiled = logits(made, (1, 17, 2))
    mx.disable_compile()
    try:
        assert (logits(made, (18, 1, 1)) == compiled).all()
    finally:
        mx.enable_compile()
