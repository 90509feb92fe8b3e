// block_attention: the rows of a block against a ring (or a growing buffer) of keys and values.
// Computes  out = softmax(scale * q k^T) v over the visible positions, in two passes: chunks of keys, then their merge
// Arrays    q, out [B, H, M, D] T | k, v [B, Hk, R, D] T, the block's own rows written, RoPE applied | all row-contiguous
//           position p sits in row p mod R (a growing buffer: R is its capacity, more than any position)
//           partial [B Hk, chunks, H/Hk M, D] and state [B Hk, chunks, H/Hk M, 2] (maximum, sum), float
// Scalars   dims [B, 8] int, per batch entry: first (position of row 0), start (oldest valid position), span, causal,
//           first chunk, keys per chunk; a row at q sees p with |q - p| < span, p >= start, p <= q if causal, and no p
//           past the block's last row | scale, of the scores before softmax (not times log2)
// Constants T float, half or bfloat; D in {16, 32, 64, 128}; M <= 16; R and the keys per chunk multiples of KEYS = 16
//           GROUP_TILES = 16: eight rows of 16 heads share one threadgroup, and so one read of K and V
// Law       Chunks and steps of KEYS start at multiples of their size in absolute position, and all sums follow that
//           order. No bit of a row depends on M, on the other rows, on the simdgroups, or on where the ring wraps.
// Grid      chunks: threadgroups (Hk row groups, 1, B chunks) of (32, simdgroups, 1): a simdgroup takes tiles of 8 rows
//           (head, row) in turn | merge: threads (32, H/Hk M, B Hk), one simdgroup per row
// Memory    threadgroup 0 bytes | per threadgroup K and V 2 D sizeof(T) per visible position, rounded out to KEYS
//           partial and state 4 (D + 2) bytes per row and chunk, written once, read once
// Edges     a chunk without a visible key leaves sum 0 and is left out of the merge; a row that sees nothing gives 0
//           masked keys get weight 0, and 0 times NaN is NaN: rows that were never written must be finite (zeros)
// Twin      dflash_mlx/kernels/block_attention.py::block_attention_ops, tests/kernels/test_block_attention.py
// Source    online softmax, Milakov and Gimelshein 2018; split keys, Dao et al. 2023 ("Flash-Decoding")

// ==== kernel block_attention_chunks(q, k, v, dims, scale) -> partial, state
constexpr int TILE = 8;          // rows and columns of a matrix
constexpr int KEYS = 16;         // keys per step
constexpr int GROUP_TILES = 16;  // tiles of rows per threadgroup
constexpr int STRIPES = D / TILE;
constexpr float NONE = -1e30f;  // a maximum below all scores, and finite: NONE - NONE is 0

// This lane's place in every 8x8 matrix: one row, two neighbouring columns.
const int lane = int(thread_index_in_simdgroup);
const int lane_row = (lane >> 4) * 4 + ((lane >> 1) & 3);
const int lane_column = ((lane >> 3) & 1) * 4 + (lane & 1) * 2;

const int block_rows = q_shape[2];
const int kv_heads = k_shape[1];
const int capacity = k_shape[2];
const int rows = q_shape[1] / kv_heads * block_rows;  // of one KV head, its heads one after the other
const int row_tiles = (rows + TILE - 1) / TILE;
const int row_groups = (row_tiles + GROUP_TILES - 1) / GROUP_TILES;
const int chunks = int(threadgroups_per_grid.z) / q_shape[0];
const int batch = int(threadgroup_position_in_grid.z) / chunks;
const int chunk = int(threadgroup_position_in_grid.z) % chunks;
const int kv_head = batch * kv_heads + int(threadgroup_position_in_grid.x) / row_groups;
const int row_group = int(threadgroup_position_in_grid.x) % row_groups;

const int first = dims[batch * 8];
const int start = dims[batch * 8 + 1];
const int span = dims[batch * 8 + 2];
const bool causal = dims[batch * 8 + 3] != 0;
const int chunk_keys = dims[batch * 8 + 5];
const int chunk_begin = (dims[batch * 8 + 4] + chunk) * chunk_keys;
const int last = first + block_rows - 1;
const float scale_log2 = scale * M_LOG2E_F;

// What no row of the block sees is not read; what some rows do not see is masked.
const int oldest = max(start, first - span + 1);
const int begin = max(chunk_begin, oldest / KEYS * KEYS);
const int end = min(chunk_begin + chunk_keys, last + 1);

const int tile_end = min((row_group + 1) * GROUP_TILES, row_tiles);
for (int tile = row_group * GROUP_TILES + int(simdgroup_index_in_threadgroup); tile < tile_end;
     tile += int(simdgroups_per_threadgroup)) {
  const int row = min(tile * TILE + lane_row, rows - 1);
  const int position = first + row % block_rows;
  const int low = max(start, position - span + 1);
  const int high = causal ? position : min(last, position + span - 1);

  // The tile's queries stay in registers, as do the sums.
  simdgroup_matrix<T, TILE, TILE> query[STRIPES];
  simdgroup_matrix<float, TILE, TILE> sums[STRIPES];
  const device T* own = q + (size_t(kv_head) * rows + row) * D + lane_column;
  for (int i = 0; i < STRIPES; i++) {
    query[i].thread_elements()[0] = own[i * TILE];
    query[i].thread_elements()[1] = own[i * TILE + 1];
    sums[i] = simdgroup_matrix<float, TILE, TILE>(0.0f);
  }
  float top = NONE;
  float total = 0.0f;

  for (int key = begin; key < end; key += KEYS) {
    const size_t at = (size_t(kv_head) * capacity + key % capacity) * D;

    // Scores of 8 rows and 16 keys, in units of log2.
    float score[4];
    for (int half_step = 0; half_step < 2; half_step++) {
      simdgroup_matrix<float, TILE, TILE> dots = simdgroup_matrix<float, TILE, TILE>(0.0f);
      const device T* keys = k + at + half_step * TILE * D;
      for (int i = 0; i < STRIPES; i++) {
        simdgroup_matrix<T, TILE, TILE> stripe;
        simdgroup_load(stripe, keys + i * TILE, D, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(dots, query[i], stripe, dots);
      }
      for (int c = 0; c < 2; c++) {
        const int p = key + half_step * TILE + lane_column + c;
        score[half_step * 2 + c] = p < low || p > high ? -INFINITY : dots.thread_elements()[c] * scale_log2;
      }
    }

    // The row's new maximum: its 16 scores lie in the 4 lanes whose numbers differ in bits 0 and 3.
    float best = max(max(score[0], score[1]), max(score[2], score[3]));
    best = max(best, simd_shuffle_xor(best, ushort(1)));
    best = max(best, simd_shuffle_xor(best, ushort(8)));
    const float next = max(top, best);
    const float fade = exp2(top - next);
    top = next;

    // Weights, and their sum.
    for (int j = 0; j < 4; j++) score[j] = exp2(score[j] - next);
    float sum = (score[0] + score[1]) + (score[2] + score[3]);
    sum += simd_shuffle_xor(sum, ushort(1));
    sum += simd_shuffle_xor(sum, ushort(8));
    total = fma(total, fade, sum);

    // Weighted values, added to what was there before.
    simdgroup_matrix<T, TILE, TILE> weights[2];
    for (int j = 0; j < 4; j++) weights[j / 2].thread_elements()[j % 2] = T(score[j]);
    for (int i = 0; i < STRIPES; i++) {
      sums[i].thread_elements()[0] *= fade;
      sums[i].thread_elements()[1] *= fade;
      for (int half_step = 0; half_step < 2; half_step++) {
        simdgroup_matrix<T, TILE, TILE> stripe;
        simdgroup_load(stripe, v + at + half_step * TILE * D + i * TILE, D);
        simdgroup_multiply_accumulate(sums[i], weights[half_step], stripe, sums[i]);
      }
    }
  }

  // The last tile may have fewer rows than 8.
  if (tile * TILE + lane_row < rows) {
    const size_t slot = (size_t(kv_head) * chunks + chunk) * rows + row;
    for (int i = 0; i < STRIPES; i++) {
      partial[slot * D + i * TILE + lane_column] = sums[i].thread_elements()[0];
      partial[slot * D + i * TILE + lane_column + 1] = sums[i].thread_elements()[1];
    }
    if (lane_column == 0) {
      state[slot * 2] = top;
      state[slot * 2 + 1] = total;
    }
  }
}

// ==== kernel block_attention_merge(partial, state) -> out
constexpr int LANES = 32;
constexpr int PER_LANE = (D + LANES - 1) / LANES;  // elements of a row per lane

const int lane = int(thread_index_in_simdgroup);
const int row = int(thread_position_in_grid.y);
const int kv_head = int(thread_position_in_grid.z);
const int chunks = partial_shape[1];
const int rows = partial_shape[2];

float top = -1e30f;
for (int chunk = 0; chunk < chunks; chunk++) {
  const size_t slot = (size_t(kv_head) * chunks + chunk) * rows + row;
  top = max(top, state[slot * 2]);
}

float sums[PER_LANE];
for (int i = 0; i < PER_LANE; i++) sums[i] = 0.0f;
float total = 0.0f;
for (int chunk = 0; chunk < chunks; chunk++) {
  const size_t slot = (size_t(kv_head) * chunks + chunk) * rows + row;
  if (state[slot * 2 + 1] == 0.0f) continue;  // nothing visible there: a call with fewer rows has no such chunk
  const float weight = exp2(state[slot * 2] - top);
  total = fma(weight, state[slot * 2 + 1], total);
  for (int i = 0; i < PER_LANE; i++) {
    const int d = i * LANES + lane;
    if (d < D) sums[i] = fma(weight, partial[slot * D + d], sums[i]);
  }
}

for (int i = 0; i < PER_LANE; i++) {
  const int d = i * LANES + lane;
  if (d < D) out[(size_t(kv_head) * rows + row) * D + d] = T(total > 0.0f ? sums[i] / total : 0.0f);
}
