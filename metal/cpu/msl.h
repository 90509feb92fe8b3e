// The part of the Metal Shading Language that our kernels use, for clang on a processor: types, vectors, mathematics.
// Written from the language's description. MSL_TYPECHECK gives the address spaces types of their own, so that the
// front end refuses what Metal refuses; without it the text can be run.
//
// Not here, so a kernel that uses it does not compile: atomics, textures, double, exceptions, allocation, and the
// vector forms that plain clang vectors lack (`float4 v(a, b, c, d)`; write `float4 v = float4(a, b, c, d)`).
#pragma once
#include "interface.h"

using uchar = unsigned char; using ushort = unsigned short; using uint = unsigned int; using ulong = unsigned long;
using int8_t = signed char; using uint8_t = unsigned char; using int16_t = short; using uint16_t = unsigned short;
using int32_t = int; using uint32_t = unsigned int; using int64_t = long; using uint64_t = unsigned long;
using size_t = unsigned long; using ptrdiff_t = long;
using half = _Float16; using bfloat = __bf16; using float16_t = half; using bfloat16_t = bfloat;

#ifdef MSL_TYPECHECK
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#endif
#define thread
#define kernel
#define METAL_FUNC inline __attribute__((always_inline))

// SHIM functions vanish into the kernel: their accesses are checked, and reported at the kernel's own line (no debug
// information means that of the call). OUTSIDE functions stay apart and are not checked: they read what lanes exchange.
#define SHIM inline __attribute__((always_inline, nodebug, disable_sanitizer_instrumentation))
#ifdef MSL_PRIVATE  // their results count as set
#define OUTSIDE __attribute__((noinline, nodebug, no_sanitize("kernel-memory")))
#else
#define OUTSIDE __attribute__((noinline, nodebug, disable_sanitizer_instrumentation))
#endif

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f

#pragma clang diagnostic ignored "-Wuser-defined-literals"
#pragma clang diagnostic ignored "-Wduplicate-decl-specifier"
SHIM constexpr half operator""h(long double value) { return half(value); }

namespace metal {

// ---- types -----------------------------------------------------------------------------------------------------
template <class A, class B> struct is_same { static constexpr bool value = false; };
template <class A> struct is_same<A, A> { static constexpr bool value = true; };
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
template <bool C, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <bool C, class A, class B> using conditional_t = typename conditional<C, A, B>::type;

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
#define MSL_VECTORS(T) using T##2 = vec<T, 2>; using T##3 = vec<T, 3>; using T##4 = vec<T, 4>;
MSL_VECTORS(float) MSL_VECTORS(half) MSL_VECTORS(bfloat) MSL_VECTORS(int) MSL_VECTORS(uint) MSL_VECTORS(short)
MSL_VECTORS(ushort) MSL_VECTORS(char) MSL_VECTORS(uchar) MSL_VECTORS(long) MSL_VECTORS(ulong)
using bool2 = vec<bool, 2>; using bool4 = vec<bool, 4>;

template <class V> struct vector_of { using element = V; static constexpr int size = 1; };
template <class T, int N> struct vector_of<T __attribute__((ext_vector_type(N)))> {
  using element = T; static constexpr int size = N;
};
template <class V> using element_of = typename vector_of<V>::element;

template <class T, int N, class A> SHIM void append(vec<T, N>& result, int& at, A part) {
  if constexpr (vector_of<A>::size == 1) result[at++] = T(part);
  else for (int i = 0; i < vector_of<A>::size; i++) result[at++] = T(part[i]);
}
template <class T, int N, class... A> SHIM vec<T, N> make_vector(A... parts) {
  constexpr int given = (0 + ... + vector_of<A>::size);
  static_assert(given == N || (sizeof...(A) == 1 && given == 1), "MSL: wrong number of components");
  vec<T, N> result = {};
  if constexpr (given == 1) result = (vec<T, N>)(T(parts), ...);
  else { int at = 0; (append<T, N>(result, at, parts), ...); }
  return result;
}
template <class To, class From> SHIM To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "MSL: as_type between types of unequal size");
  return __builtin_bit_cast(To, value);
}

// ---- mathematics -----------------------------------------------------------------------------------------------
#define MSL_FUNCTION(name, builtin)                                                                              \
  template <class T> SHIM T name(T x) {                                                                          \
    static_assert(!__is_integral(element_of<T>), "MSL: " #name " of an integer is ambiguous");                   \
    if constexpr (is_same_v<T, bfloat>) return bfloat(builtin(float(x))); else return builtin(x);                \
  }
#define MSL_TRANSCENDENTAL                                                                                       \
  MSL_FUNCTION(exp, __builtin_elementwise_exp) MSL_FUNCTION(exp2, __builtin_elementwise_exp2)                    \
  MSL_FUNCTION(log, __builtin_elementwise_log) MSL_FUNCTION(log2, __builtin_elementwise_log2)                    \
  MSL_FUNCTION(sqrt, __builtin_elementwise_sqrt) MSL_FUNCTION(sin, __builtin_elementwise_sin)                    \
  MSL_FUNCTION(cos, __builtin_elementwise_cos) MSL_FUNCTION(tanh, __builtin_elementwise_tanh)                    \
  template <class T> SHIM T rsqrt(T x) { return T(1) / sqrt(x); }
MSL_TRANSCENDENTAL
namespace fast { MSL_TRANSCENDENTAL }
namespace precise { MSL_TRANSCENDENTAL }
MSL_FUNCTION(floor, __builtin_elementwise_floor) MSL_FUNCTION(ceil, __builtin_elementwise_ceil)
MSL_FUNCTION(rint, __builtin_elementwise_rint) MSL_FUNCTION(trunc, __builtin_elementwise_trunc)

// One type for all arguments, as in Metal, where a mixture is ambiguous.
template <class T> SHIM T max(T a, T b) {
  if constexpr (is_same_v<T, bfloat>) return a > b ? a : b; else return __builtin_elementwise_max(a, b);
}
template <class T> SHIM T min(T a, T b) {
  if constexpr (is_same_v<T, bfloat>) return a < b ? a : b; else return __builtin_elementwise_min(a, b);
}
template <class T> SHIM T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T> SHIM T abs(T x) {
  if constexpr (is_same_v<T, bfloat>) return bfloat(__builtin_fabsf(float(x)));
  else return __builtin_elementwise_abs(x);
}
template <class T> SHIM T fabs(T x) { return abs(x); }
template <class T> SHIM T fma(T a, T b, T c) { return __builtin_elementwise_fma(a, b, c); }
template <class T> SHIM T select(T a, T b, bool second) { return second ? b : a; }
template <class T> SHIM bool isnan(T x) { return x != x; }
template <class V> SHIM element_of<V> dot(V a, V b) {
  element_of<V> sum = a[0] * b[0];
  for (int i = 1; i < vector_of<V>::size; i++) sum += a[i] * b[i];
  return sum;
}

}  // namespace metal

#include "simdgroup.h"

// `float4(a, b, c, d)`: a macro with arguments leaves the type's name alone.
#define float2(...) ::metal::make_vector<float, 2>(__VA_ARGS__)
#define float3(...) ::metal::make_vector<float, 3>(__VA_ARGS__)
#define float4(...) ::metal::make_vector<float, 4>(__VA_ARGS__)
#define half2(...) ::metal::make_vector<half, 2>(__VA_ARGS__)
#define half4(...) ::metal::make_vector<half, 4>(__VA_ARGS__)
#define bfloat4(...) ::metal::make_vector<bfloat, 4>(__VA_ARGS__)
#define int2(...) ::metal::make_vector<int, 2>(__VA_ARGS__)
#define int4(...) ::metal::make_vector<int, 4>(__VA_ARGS__)
#define uint2(...) ::metal::make_vector<uint, 2>(__VA_ARGS__)
#define uint3(...) ::metal::make_vector<uint, 3>(__VA_ARGS__)
#define uint4(...) ::metal::make_vector<uint, 4>(__VA_ARGS__)
#define ulong2(...) ::metal::make_vector<ulong, 2>(__VA_ARGS__)
#pragma GCC poison double throw try new delete typeid dynamic_cast virtual malloc printf
