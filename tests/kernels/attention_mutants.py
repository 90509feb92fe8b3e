"""The deliberate faults in block_attention.metal, and the cases that must notice them."""

from __future__ import annotations

import attention_cases as cases
from mutants import Subject

from dflash_mlx.kernels import block_attention as launcher

BY_HAND = {
    "ring is not wrapped": ("key % capacity", "key", 0),
    "ring wraps a row late": ("key % capacity", "key % (capacity + 1)", 0),
    "mask reads the ring's row": ("const int p = key +", "const int p = key % capacity +", 0),
    "window one wider": ("position - span + 1);", "position - span);", 0),
    "window one narrower": ("position - span + 1);", "position - span + 2);", 0),
    "window from the block's start": ("max(start, position - span + 1)", "max(start, first - span + 1)", 0),
    "oldest position ignored": ("const int low = max(start, position", "const int low = max(0, position", 0),
    "always causal": ("dims[batch * 8 + 3] != 0", "true", 0),
    "never causal": ("const bool causal = dims[batch * 8 + 3] != 0;", "const bool causal = false;", 0),
    "causal one too far": ("causal ? position :", "causal ? position + 1 :", 0),
    "causal one too near": ("causal ? position :", "causal ? position - 1 :", 0),
    "sight past the block": ("min(last, position + span - 1)", "(position + span - 1)", 0),
    "positions by head": ("first + row % block_rows", "first + row / block_rows", 0),
    "first session's position for all": ("const int first = dims[batch * 8];", "const int first = dims[0];", 0),
    "first session's chunk for all": ("dims[batch * 8 + 4] + chunk", "dims[4] + chunk", 0),
    "first session's keys for all": (
        "const int kv_head = batch * kv_heads + int", "const int kv_head = int", 0),
    "first head's keys for all": ("size_t(kv_head) * capacity", "size_t(batch * kv_heads) * capacity", 0),
    "first head's queries for all": ("(size_t(kv_head) * rows + row) * D +", "(size_t(batch) * rows + row) * D +", 0),
    "keys not turned": ("ulong2(0, 0), true)", "ulong2(0, 0), false)", 0),
    "second half of the step is the first": ("k + at + half_step * TILE * D", "k + at", 0),
    "values' second half is the first": ("v + at + half_step * TILE * D + i", "v + at + i", 0),
    "values of one stripe": ("half_step * TILE * D + i * TILE, D)", "half_step * TILE * D, D)", 0),
    "keys of one stripe": ("keys + i * TILE, D", "keys, D", 0),
    "values from the keys": ("simdgroup_load(stripe, v +", "simdgroup_load(stripe, k +", 0),
    "weights of the halves swapped": ("weights[half_step], stripe", "weights[1 - half_step], stripe", 0),
    "two columns swapped": ("thread_elements()[j % 2]", "thread_elements()[1 - j % 2]", 0),
    "queries' columns swapped": ("= own[i * TILE];", "= own[i * TILE + 1];", 0),
    "lane's row wrong": ("(lane >> 4) * 4 + ((lane >> 1) & 3)", "(lane >> 3) * 2 + ((lane >> 1) & 1)", 0),
    "lane's column wrong": ("((lane >> 3) & 1) * 4 + (lane & 1) * 2", "(lane & 3) * 2", 0),
    "scores from the last step kept": ("dots = simdgroup_matrix<float, TILE, TILE>(0.0f)", "dots = sums[0]", 0),
    "sums not faded": ("thread_elements()[1] *= fade", "thread_elements()[1] *= 1.0f", 0),
    "total not faded": ("fma(total, fade, sum)", "total + sum", 0),
    "old maximum in the weights": ("exp2(score[j] - next)", "exp2(score[j] - top * 0.5f)", 0),
    "maximum of half the lanes": ("  best = max(best, simd_shuffle_xor(best, ushort(8)));\n", "\n", 0),
    "sum of half the lanes": ("    sum += simd_shuffle_xor(sum, ushort(1));\n", "\n", 0),
    "scale without log2": ("scale * M_LOG2E_F", "scale", 0),
    "scale left out": ("thread_elements()[c] * scale_log2", "thread_elements()[c] * M_LOG2E_F", 0),
    "mask is zero and not minus infinity": ("? -INFINITY :", "? 0.0f :", 0),
    "last tile writes too much": ("if (tile * TILE + lane_row < rows) {", "if (true) {", 0),
    "first tile of a simdgroup only": ("tile += int(simdgroups_per_threadgroup)", "tile += GROUP_TILES", 0),
    "groups overlap": ("min((row_group + 1) * GROUP_TILES, row_tiles)", "row_tiles", 0),
    "second group is the first": ("int tile = row_group * GROUP_TILES +", "int tile =", 0),
    "chunks overlap": ("min(chunk_begin + chunk_keys, last + 1)", "last + 1", 0),
    "chunks start at the oldest key": ("max(chunk_begin, oldest / KEYS * KEYS)", "(oldest / KEYS * KEYS)", 0),
    "steps from the oldest key": ("oldest / KEYS * KEYS", "oldest", 0),
    "chunk's partial in its neighbour": ("chunks + chunk) * rows + row;\n    for", "chunks) * rows + row;\n    for", 0),
    "maximum and total swapped": ("state[slot * 2] = top;", "state[slot * 2] = total;", 0),
    "state by another lane": ("if (lane_column == 0)", "if (lane_column == 2)", 0),
    "an element past a stripe": ("+ i * TILE + lane_column + 1] =", "+ i * TILE + lane_column + 2] =", 0),
    "merge without the weight": ("fma(weight, state[slot * 2 + 1], total)", "total + state[slot * 2 + 1]", 0),
    "merge without the maximum": ("exp2(state[slot * 2] - top)", "exp2(state[slot * 2])", 0),
    "merge of one chunk less": ("chunk < chunks;", "chunk < chunks - 1;", 1),
    "merge not divided": ("sums[i] / total", "sums[i]", 0),
    "total in the arrays' type": ("sums[i] / total", "sums[i] / float(T(total))", 0),
    "rounded before the merge": ("= sums[i].thread_elements()[0];", "= float(T(sums[i].thread_elements()[0]));", 0),
    "stale rows read": ("causal ? position : min(last, position + span - 1);", "position + 15;", 0),
}  # fmt: skip
GUARDED = "more turns than a row has elements; each further one is stopped by d < D"
EQUIVALENT = {
    "state by another lane": "the four lanes of a row hold the same maximum and total",
    "for (int i = 0; i < PER_LANE; i++) { : < becomes <=": GUARDED,
    "for (int i = 0; i < PER_LANE; i++) { : < becomes <=, place 2": GUARDED,
    "constexpr int PER_LANE = (D + LANES - 1) / LANES;  // elements of a row per lane : - 1 becomes nothing": GUARDED,
    "constexpr int PER_LANE = (D + LANES - 1) / LANES;  // elements of a row per lane : / becomes %": GUARDED,
}
# Most cases are of one type and size, to save time; the rules do not touch what depends on them.
TYPE, SIZE = "f32", 32


def killers() -> list[cases.Case]:
    """Small cases, one per situation, with 3 to 16 rows and both numbers of heads; one type and size to save time."""
    rows = (8, 3, 16, 5, 9, 1, 11, 7)
    return [
        cases.Case(TYPE, SIZE, cases.GROUPS[number % 2], rows[number % len(rows)], name, number)
        for number, name in enumerate(cases.SITUATIONS)
        if name != "real chunk"
    ] + [cases.Case("bf16", 16, 16, 12, "target, ring wrapped", 4)]


def broken() -> str:
    """Run the cases; gives the first wrong result. What needs kernels of other types and sizes compiled comes last."""
    for case in killers():
        rows = (0, case.rows - 1) if case.rows > 1 else (0,)
        if found := cases.broken_promise(case, rows, mistrust=True):
            return f"{case}: {found}"
    return cases.blind_row() or cases.lost_precision()


SUBJECT = Subject(launcher, BY_HAND, EQUIVALENT, broken)
