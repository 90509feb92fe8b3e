// feature_fusion: a block's tap rows to the drafter's context feature, and that to keys and values of all its layers.
// Computes  feature = RMSNorm([tap 1 | .. | tap L] fc^T), and K = RoPE(RMSNorm(feature wk^T)), V = feature wv^T
//           fusion_product makes either product, fusion_norm and fusion_keys_values what follows it
// Arrays    tap0..tap7 [M, E] T, the last one again where there are fewer | product [M, N] float | feature [M, N] T
//           w [N, L E] T, or [N, L E BITS / 32] uint and scales, biases [N, L E / GROUP] T: w = scale * q + bias, the
//           first q in the low bits | gain [N] T, of the norm | gains [layers, D] T, of the key norms
//           rows of the stacked w: per layer all heads of K, then all of V | keys, values [layers, Hk, M, D] T
//           frequencies [D / 2] float, radians per position | all row-contiguous
// Scalars   first (position of row 0), eps (added to the mean square)
// Constants T float, half or bfloat; W the type of w; BITS in {0 (w is T), 4, 8}; GROUP in {32, 64, 128}, divides E
//           M <= 16; L <= 8; D even
//           ROW_TILES = 2, COLUMN_TILES = 4, SLICES = 8: all rows and 32 columns share one threadgroup, so that each
//           weight is loaded once
// Law       Group g of the inputs belongs to slice g mod SLICES; a slice adds its groups in order, and slices are
//           added in order. No bit of a row depends on M or on the other rows.
// Grid      fusion_product: threadgroups (N / 32) of (32 SLICES): one simdgroup per slice | fusion_norm: threadgroups
//           (1, M) of 256 | fusion_keys_values: threads (32, 2 layers Hk, M), one simdgroup per row and head
// Memory    threadgroup 8 KiB, 32 bytes, 0 | fusion_product reads w, scales, biases once, the taps once per threadgroup
//           product 4 M N bytes written once; read twice by fusion_norm and for K, once for V
// Edges     N need not be a multiple of 32; a slice may have no group; a row of zeros gives zeros
// Twin      dflash_mlx/kernels/feature_fusion.py::feature_fusion_ops and context_rows_ops,
//           tests/kernels/test_feature_fusion.py
// Source    RMSNorm, Zhang and Sennrich 2019; RoPE, Su et al. 2021

// ==== helpers
constexpr int LANES = 32;
constexpr int TILE = 8;          // rows and columns of a matrix
constexpr int ROW_TILES = 2;     // of inputs
constexpr int COLUMN_TILES = 4;  // of outputs, per threadgroup
constexpr int SLICES = 8;        // of a sum, one simdgroup each

// A weight where it stands in its word: times 2^(BITS * place). No shift; the inputs are scaled down by as much.
template <int BITS, typename W> inline float in_place(W word, int place) {
  return BITS == 0 ? float(word) : float(uint(word) & (((1u << BITS) - 1u) << (BITS * place)));
}

// 2^-exponent, exact.
inline float power(int exponent) { return as_type<float>(uint(127 - exponent) << 23); }

// ==== kernel fusion_product(tap0, tap1, tap2, tap3, tap4, tap5, tap6, tap7, w, scales, biases) -> product
constexpr int STEP = GROUP < 64 ? GROUP : 64;  // inputs per turn
constexpr int PER = STEP / TILE;               // inputs per matrix column: neighbours in memory, so that loads are long
constexpr int WORD = BITS == 0 ? 1 : 32 / BITS;  // weights per element of w
constexpr int HELD = 2 * PER / WORD;             // elements of w per lane and tile

// This lane's place in every 8x8 matrix: one row, two neighbouring columns. Weights (output, input) are the left
// matrix, inputs (input, row) the right one.
const int lane = int(thread_index_in_simdgroup);
const int lane_row = (lane >> 4) * 4 + ((lane >> 1) & 3);
const int lane_column = ((lane >> 3) & 1) * 4 + (lane & 1) * 2;
const int slice = int(simdgroup_index_in_threadgroup);

const int rows = tap0_shape[0];
const int width = tap0_shape[1];
const int columns = w_shape[0];
const int row_words = w_shape[1];
const int taps = row_words * WORD / width;
const int tap_groups = width / GROUP;
const int row_tiles = (rows + TILE - 1) / TILE;
const int first_column = int(threadgroup_position_in_grid.x) * COLUMN_TILES * TILE;

float sums[ROW_TILES][COLUMN_TILES][2];
for (int r = 0; r < ROW_TILES; r++) {
  for (int t = 0; t < COLUMN_TILES; t++) sums[r][t][0] = sums[r][t][1] = 0.0f;
}

for (int tap = 0; tap < taps; tap++) {
  const device T* x = tap == 0 ? tap0 : tap == 1 ? tap1 : tap == 2 ? tap2 : tap == 3 ? tap3
                    : tap == 4 ? tap4 : tap == 5 ? tap5 : tap == 6 ? tap6 : tap7;
  // The groups of all taps are dealt out in turn; this is the slice's first one in this tap.
  const int dealt = tap * tap_groups;
  for (int group = (slice + SLICES - dealt % SLICES) % SLICES; group < tap_groups; group += SLICES) {
    simdgroup_matrix<float, TILE, TILE> dots[ROW_TILES][COLUMN_TILES];
    float totals[ROW_TILES][2];
    for (int r = 0; r < ROW_TILES; r++) {
      totals[r][0] = totals[r][1] = 0.0f;
      for (int t = 0; t < COLUMN_TILES; t++) dots[r][t] = simdgroup_matrix<float, TILE, TILE>(0.0f);
    }

    for (int at = group * GROUP; at < (group + 1) * GROUP; at += STEP) {
      // This lane's weights: its row in each tile, and the inputs of its two columns.
      W held[COLUMN_TILES][HELD];
#pragma clang loop unroll(full)
      for (int t = 0; t < COLUMN_TILES; t++) {
        const int column = min(first_column + t * TILE + lane_row, columns - 1);
        const device W* own = w + size_t(column) * row_words + (tap * width + at + lane_column * PER) / WORD;
#pragma clang loop unroll(full)
        for (int i = 0; i < HELD; i++) held[t][i] = own[i];
      }

      // Its inputs: two rows, and the inputs of one column.
      float inputs[ROW_TILES][2][PER];
#pragma clang loop unroll(full)
      for (int r = 0; r < ROW_TILES; r++) {
        if (r >= row_tiles) continue;
        for (int c = 0; c < 2; c++) {
          const device T* own = x + size_t(min(r * TILE + lane_column + c, rows - 1)) * width + at + lane_row * PER;
#pragma clang loop unroll(full)
          for (int i = 0; i < PER; i++) {
            const float value = float(own[i]);
            if (BITS != 0) totals[r][c] += value;
            inputs[r][c][i] = value * power(BITS * ((lane_row * PER + i) % WORD));
          }
        }
      }

#pragma clang loop unroll(full)
      for (int i = 0; i < PER; i++) {
        simdgroup_matrix<float, TILE, TILE> weights[COLUMN_TILES];
#pragma clang loop unroll(full)
        for (int t = 0; t < COLUMN_TILES; t++) {
          weights[t].thread_elements()[0] = in_place<BITS>(held[t][i / WORD], i % WORD);
          weights[t].thread_elements()[1] = in_place<BITS>(held[t][(PER + i) / WORD], (PER + i) % WORD);
        }
#pragma clang loop unroll(full)
        for (int r = 0; r < ROW_TILES; r++) {
          if (r >= row_tiles) continue;
          simdgroup_matrix<float, TILE, TILE> chosen;
          chosen.thread_elements()[0] = inputs[r][0][i];
          chosen.thread_elements()[1] = inputs[r][1][i];
          for (int t = 0; t < COLUMN_TILES; t++) {
            simdgroup_multiply_accumulate(dots[r][t], weights[t], chosen, dots[r][t]);
          }
        }
      }
    }

    // The group's part of the sums: scale * (q . x) + bias * (sum of x), whose parts lie in a column's 8 lanes.
    if (BITS != 0) {
#pragma clang loop unroll(full)
      for (int r = 0; r < ROW_TILES; r++) {
        if (r >= row_tiles) continue;
        for (int c = 0; c < 2; c++) {
          totals[r][c] += simd_shuffle_xor(totals[r][c], ushort(2));
          totals[r][c] += simd_shuffle_xor(totals[r][c], ushort(4));
          totals[r][c] += simd_shuffle_xor(totals[r][c], ushort(16));
        }
      }
    }
#pragma clang loop unroll(full)
    for (int t = 0; t < COLUMN_TILES; t++) {
      float scale = 1.0f;
      float bias = 0.0f;
      if (BITS != 0) {
        const int column = min(first_column + t * TILE + lane_row, columns - 1);
        const size_t of = size_t(column) * (taps * tap_groups) + dealt + group;
        scale = float(scales[of]);
        bias = float(biases[of]);
      }
#pragma clang loop unroll(full)
      for (int r = 0; r < ROW_TILES; r++) {
        for (int c = 0; c < 2; c++) {
          sums[r][t][c] = fma(scale, dots[r][t].thread_elements()[c], sums[r][t][c]);
          if (BITS != 0) sums[r][t][c] = fma(bias, totals[r][c], sums[r][t][c]);
        }
      }
    }
  }
}

// The slices' sums are added in order, one output per thread.
threadgroup float parts[SLICES * COLUMN_TILES * TILE * TILE];
static_assert(COLUMN_TILES * TILE * TILE == SLICES * LANES, "one output per thread");
const int thread_index = int(thread_index_in_threadgroup);
const int out_row = thread_index / (COLUMN_TILES * TILE);
const int out_column = thread_index % (COLUMN_TILES * TILE);
#pragma clang loop unroll(full)
for (int r = 0; r < ROW_TILES; r++) {
  if (r >= row_tiles) continue;
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the first tile's parts have been read
  for (int t = 0; t < COLUMN_TILES; t++) {
    for (int c = 0; c < 2; c++) {
      parts[((slice * COLUMN_TILES + t) * TILE + lane_row) * TILE + lane_column + c] = sums[r][t][c];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // all slices' parts are there
  float sum = 0.0f;
  for (int s = 0; s < SLICES; s++) sum += parts[(s * COLUMN_TILES * TILE + out_column) * TILE + out_row];
  if (r * TILE + out_row < rows && first_column + out_column < columns) {
    product[size_t(r * TILE + out_row) * columns + first_column + out_column] = sum;
  }
}

// ==== kernel fusion_norm(product, gain, eps) -> feature
constexpr int SIMDGROUPS = 8;
const int thread_index = int(thread_index_in_threadgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int width = product_shape[1];
const size_t row = size_t(threadgroup_position_in_grid.y) * width;

float squares = 0.0f;
for (int n = thread_index; n < width; n += SIMDGROUPS * LANES) {
  squares = fma(product[row + n], product[row + n], squares);
}
squares = simd_sum(squares);
threadgroup float parts[SIMDGROUPS];
if (thread_index_in_simdgroup == 0) parts[simdgroup] = squares;
threadgroup_barrier(mem_flags::mem_threadgroup);  // all parts are there
float total = 0.0f;
for (int s = 0; s < SIMDGROUPS; s++) total += parts[s];

const float inverse = rsqrt(total / float(width) + eps);
for (int n = thread_index; n < width; n += SIMDGROUPS * LANES) {
  feature[row + n] = T(product[row + n] * inverse * float(gain[n]));
}

// ==== kernel fusion_keys_values(product, gains, frequencies, first, eps) -> keys, values
const int lane = int(thread_index_in_simdgroup);
const int head = int(thread_position_in_grid.y);  // of all layers' K and V
const int row = int(thread_position_in_grid.z);
const int rows = product_shape[0];
const int size = gains_shape[1];
const int kv_heads = product_shape[1] / (2 * gains_shape[0] * size);
const int layer = head / (2 * kv_heads);
const size_t from = size_t(row) * product_shape[1] + head * size;
const size_t to = (size_t(layer * kv_heads + head % kv_heads) * rows + row) * size;

if (head / kv_heads % 2 == 1) {
  for (int d = lane; d < size; d += LANES) values[to + d] = T(product[from + d]);
  return;
}

float squares = 0.0f;
for (int d = lane; d < size; d += LANES) squares = fma(product[from + d], product[from + d], squares);
const float inverse = rsqrt(simd_sum(squares) / float(size) + eps);

// Each lane turns pairs of the two halves of the head.
const int pairs = size / 2;
for (int d = lane; d < pairs; d += LANES) {
  const float low = product[from + d] * inverse * float(gains[layer * size + d]);
  const float high = product[from + pairs + d] * inverse * float(gains[layer * size + pairs + d]);
  const float angle = float(first + row) * frequencies[d];
  const float cosine = precise::cos(angle);
  const float sine = precise::sin(angle);
  keys[to + d] = T(fma(low, cosine, -(high * sine)));
  keys[to + pairs + d] = T(fma(high, cosine, low * sine));
}
