// Barriers, and what the 32 lanes of a simdgroup do together: reductions, shuffles, 8x8 matrices. Part of msl.h.
//
// House rule: all live lanes of a simdgroup reach each operation. Metal would let the active lanes go on alone.
#pragma once

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
SHIM constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
SHIM void threadgroup_barrier(mem_flags flags) { gpu_threadgroup_barrier(int(flags)); }
SHIM void simdgroup_barrier(mem_flags flags) { gpu_simdgroup_barrier(int(flags)); }

// ---- reductions and shuffles -------------------------------------------------------------------------------------
enum Collective {
  SUM, PRODUCT, MAX, MIN, AND, OR, ANY, ALL, BROADCAST, FIRST, SHUFFLE, SHUFFLE_XOR, SHUFFLE_DOWN, SHUFFLE_UP,
  INCLUSIVE_SUM, EXCLUSIVE_SUM, MATRIX_LOAD, MATRIX_STORE, MATRIX_MULTIPLY
};

template <class T> struct Lanes {
  const char* slots; uint mask;
  SHIM T get(int lane) const { T value; __builtin_memcpy(&value, slots + 64 * lane, sizeof value); return value; }
  SHIM bool active(int lane) const { return mask >> lane & 1; }
  OUTSIDE T from(int lane, T fallback) const {
    if (lane < 0 || lane > 31) gpu_bad_lane("lane outside the simdgroup");
    else if (!active(lane)) gpu_bad_lane("lane that is not active");
    else return get(lane);
    return fallback;
  }
};
template <class T> SHIM Lanes<T> exchange(Collective operation, T value) {
  static_assert(sizeof(T) <= 64);
  Lanes<T> lanes = {nullptr, 0};
  lanes.slots = gpu_exchange(operation, &value, sizeof value, &lanes.mask);
  return lanes;
}

// In the order of a butterfly: halves are folded onto each other; lanes that took no part are left out.
template <class T, class F> OUTSIDE T fold(const Lanes<T>& lanes, F join) {
  T values[32];
  bool there[32];
  for (int i = 0; i < 32; i++) there[i] = lanes.active(i), values[i] = lanes.get(i);
  for (int width = 16; width; width /= 2)
    for (int i = 0; i < width; i++) {
      if (there[i] && there[i + width]) values[i] = join(values[i], values[i + width]);
      else if (there[i + width]) values[i] = values[i + width];
      there[i] = there[i] || there[i + width];
    }
  return values[0];
}
#define MSL_REDUCTION(name, operation, expression)                                                       \
  template <class T> OUTSIDE T name##_of(const Lanes<T>& lanes) {                                        \
    return fold(lanes, [](T a, T b) { return T(expression); });                                          \
  }                                                                                                      \
  template <class T> SHIM T name(T value) { return name##_of(exchange(operation, value)); }
MSL_REDUCTION(simd_sum, SUM, a + b)
MSL_REDUCTION(simd_product, PRODUCT, a * b)
MSL_REDUCTION(simd_max, MAX, a > b || b != b ? a : b)
MSL_REDUCTION(simd_min, MIN, a < b || b != b ? a : b)
MSL_REDUCTION(simd_and, AND, a & b)
MSL_REDUCTION(simd_or, OR, a | b)
MSL_REDUCTION(simd_any_lane, ANY, a || b)
MSL_REDUCTION(simd_all_lanes, ALL, a && b)
SHIM bool simd_any(bool value) { return simd_any_lane(value); }
SHIM bool simd_all(bool value) { return simd_all_lanes(value); }

SHIM int my_lane() { return int(gpu_self()->lane); }
template <class T> SHIM T simd_broadcast(T v, ushort lane) { return exchange(BROADCAST, v).from(lane, v); }
template <class T> SHIM T simd_broadcast_first(T v) {
  const Lanes<T> lanes = exchange(FIRST, v);
  return lanes.from(__builtin_ctz(lanes.mask), v);
}
template <class T> SHIM T simd_shuffle(T v, ushort lane) { return exchange(SHUFFLE, v).from(lane, v); }
template <class T> SHIM T simd_shuffle_xor(T v, ushort mask) { return exchange(SHUFFLE_XOR, v).from(my_lane() ^ mask, v); }
template <class T> SHIM T simd_shuffle_down(T v, ushort by) {
  const Lanes<T> lanes = exchange(SHUFFLE_DOWN, v);
  return my_lane() + by < 32 ? lanes.from(my_lane() + by, v) : v;
}
template <class T> SHIM T simd_shuffle_up(T v, ushort by) {
  const Lanes<T> lanes = exchange(SHUFFLE_UP, v);
  return my_lane() >= by ? lanes.from(my_lane() - by, v) : v;
}
template <class T> OUTSIDE T sum_before(const Lanes<T>& lanes, int end) {
  T sum = T(0);
  for (int i = 0; i < end; i++) if (lanes.active(i)) sum = T(sum + lanes.get(i));
  return sum;
}
template <class T> SHIM T simd_prefix_inclusive_sum(T v) { return sum_before(exchange(INCLUSIVE_SUM, v), my_lane() + 1); }
template <class T> SHIM T simd_prefix_exclusive_sum(T v) { return sum_before(exchange(EXCLUSIVE_SUM, v), my_lane()); }

// ---- matrices ----------------------------------------------------------------------------------------------------
// A lane holds two neighbours of a row. Read as bits, lane l = 16 r2 + 8 c2 + 2 (r1 r0) + c1 holds row 4 r2 + (r1 r0)
// and the columns 4 c2 + 2 c1 and one more: the layout that thread_elements() shows on Apple's GPUs.
SHIM int matrix_row(int lane) { return (lane >> 4) * 4 + (lane >> 1 & 3); }
SHIM int matrix_column(int lane) { return (lane >> 3 & 1) * 4 + (lane & 1) * 2; }
SHIM int matrix_lane(int row, int column) {
  return (row >> 2) << 4 | (column >> 2) << 3 | (row & 3) << 1 | (column >> 1 & 1);
}

template <class T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "MSL: matrices are 8 by 8");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  SHIM explicit simdgroup_matrix(T diagonal) {
    const int row = matrix_row(my_lane()), column = matrix_column(my_lane());
    elements[0] = row == column ? diagonal : T(0);
    elements[1] = row == column + 1 ? diagonal : T(0);
  }
  SHIM vec<T, 2>& thread_elements() { return elements; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int R, int C> SHIM simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, R, C> result;
  result.elements = (vec<T, 2>)value;
  return result;
}

SHIM void whole_simdgroup(Collective operation) {  // matrices need all 32 lanes
  const Lanes<char> lanes = exchange(operation, char(0));
  if (lanes.mask != 0xffffffffu) gpu_bad_lane("matrix operation without all 32 lanes");
}
#define MSL_MATRIX_MEMORY(SPACE)                                                                              \
  template <class T>                                                                                          \
  SHIM void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const SPACE T* from, ulong row_elements = 8,    \
                           ulong2 origin = (ulong2)0ul, bool transpose = false) {                             \
    whole_simdgroup(MATRIX_LOAD);                                                                             \
    const ulong row = ulong(matrix_row(my_lane())), column = ulong(matrix_column(my_lane()));                 \
    from += origin.y * row_elements + origin.x;                                                               \
    for (ulong i = 0; i < 2; i++)                                                                             \
      matrix.elements[i] = transpose ? from[(column + i) * row_elements + row] : from[row * row_elements + column + i]; \
  }                                                                                                           \
  template <class T>                                                                                          \
  SHIM void simdgroup_store(simdgroup_matrix<T, 8, 8> matrix, SPACE T* to, ulong row_elements = 8,            \
                            ulong2 origin = (ulong2)0ul, bool transpose = false) {                            \
    whole_simdgroup(MATRIX_STORE);                                                                            \
    const ulong row = ulong(matrix_row(my_lane())), column = ulong(matrix_column(my_lane()));                 \
    to += origin.y * row_elements + origin.x;                                                                 \
    for (ulong i = 0; i < 2; i++)                                                                             \
      (transpose ? to[(column + i) * row_elements + row] : to[row * row_elements + column + i]) = matrix.elements[i]; \
  }
#ifdef MSL_TYPECHECK
MSL_MATRIX_MEMORY(device)
MSL_MATRIX_MEMORY(threadgroup)
#else
MSL_MATRIX_MEMORY()
#endif

template <class A, class B> struct Factors { vec<A, 2> a; vec<B, 2> b; };
template <class A, class B> OUTSIDE float row_times_column(const Lanes<Factors<A, B>>& lanes, int row, int column,
                                                           float sum) {
  for (int i = 0; i < 8; i++)  // a chain of fused multiply-adds in the order of the inner index
    sum = __builtin_fmaf(float(lanes.get(matrix_lane(row, i)).a[i & 1]),
                         float(lanes.get(matrix_lane(i, column)).b[column & 1]), sum);
  return sum;
}
template <class D, class A, class B, class C>
SHIM void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                        simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  const Lanes<Factors<A, B>> lanes = exchange(MATRIX_MULTIPLY, Factors<A, B>{a.elements, b.elements});
  if (lanes.mask != 0xffffffffu) gpu_bad_lane("matrix operation without all 32 lanes");
  const int row = matrix_row(my_lane()), column = matrix_column(my_lane());
  for (int i = 0; i < 2; i++) d.elements[i] = D(row_times_column(lanes, row, column + i, float(c.elements[i])));
}
template <class D, class A, class B>
SHIM void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, simdgroup_matrix<D, 8, 8>(D(0)));
}

}  // namespace metal
