#include "distributed/reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <type_traits>

namespace npu {
namespace {

using RedOp = c10d::ReduceOp;

constexpr int64_t kBlock = 512;  // elements whose accumulators stay in the first level cache

// What a dtype is accumulated in: integers wrap around, so without a sign.
template <class T>
struct AccumulatorOf {
  using type = T;
};
template <class T>
  requires std::is_integral_v<T>
struct AccumulatorOf<T> {
  using type = std::conditional_t<sizeof(T) < 4, uint32_t, std::make_unsigned_t<T>>;
};
template <>
struct AccumulatorOf<c10::BFloat16> {
  using type = float;
};
template <>
struct AccumulatorOf<c10::Half> {
  using type = float;
};

template <class T>
inline T to_element(typename AccumulatorOf<T>::type value) {
  return static_cast<T>(value);
}
// c10's rounding, without its branch: the loop becomes vector code.
template <>
inline c10::BFloat16 to_element<c10::BFloat16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return c10::BFloat16(uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded), c10::BFloat16::from_bits());
}

struct Sum {
  template <class T>
  static T apply(T a, T b) { return a + b; }
};
struct Product {
  template <class T>
  static T apply(T a, T b) { return a * b; }
};
struct Min {
  template <class T>
  static T apply(T a, T b) { return b < a ? b : a; }
};
struct Max {
  template <class T>
  static T apply(T a, T b) { return a < b ? b : a; }
};
struct And {
  template <class T>
  static T apply(T a, T b) { return a & b; }
};
struct Or {
  template <class T>
  static T apply(T a, T b) { return a | b; }
};
struct Xor {
  template <class T>
  static T apply(T a, T b) { return a ^ b; }
};

// c10's rounding, to the upper half of a word.
inline uint32_t rounded(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return value != value ? 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1u);
}

// Two bfloat16 lie in a word: each becomes a float where it is, so that no vector is widened or narrowed.
template <class Op, bool divides>
[[gnu::always_inline]] inline void reduce_words(const c10::BFloat16* one, const c10::BFloat16* other, c10::BFloat16* output, int64_t words,
                                                float divisor) {
  typedef uint32_t Word __attribute__((aligned(2), may_alias));
  constexpr uint32_t kUpper = 0xffff0000u;
  const auto* left = reinterpret_cast<const Word*>(one);
  const auto* right = reinterpret_cast<const Word*>(other);
  auto* out = reinterpret_cast<Word*>(output);
  auto apply = [divisor](uint32_t a, uint32_t b) {
    const float result = Op::template apply<float>(std::bit_cast<float>(a), std::bit_cast<float>(b));
    return rounded(divides ? result / divisor : result);
  };
#pragma GCC ivdep
  for (int64_t i = 0; i < words; ++i) {
    const uint32_t a = left[i], b = right[i];
    out[i] = (apply(a << 16, b << 16) >> 16) | (apply(a & kUpper, b & kUpper) & kUpper);
  }
}

// A is what T is accumulated in. The output may be one of the inputs.
template <class T, class A, class Op>
[[gnu::always_inline]] inline void reduce_pair(const T* one, const T* other, T* output, int64_t count, A divisor) {
  if (divisor != A(1)) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      output[i] = to_element<T>(Op::template apply<A>(static_cast<A>(one[i]), static_cast<A>(other[i])) / divisor);
    }
    return;
  }
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    output[i] = to_element<T>(Op::template apply<A>(static_cast<A>(one[i]), static_cast<A>(other[i])));
  }
}

template <class T, class A, class Op>
[[gnu::always_inline]] inline void reduce_blocks(c10::ArrayRef<const void*> inputs, void* output, int64_t count, A divisor) {
  if (inputs.size() == 2) {
    const T* one = static_cast<const T*>(inputs[0]);
    const T* other = static_cast<const T*>(inputs[1]);
    T* out = static_cast<T*>(output);
    int64_t done = 0;
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      done = count & ~int64_t(1);
      divisor == 1.0f ? reduce_words<Op, false>(one, other, out, count / 2, divisor) : reduce_words<Op, true>(one, other, out, count / 2, divisor);
    }
    return reduce_pair<T, A, Op>(one + done, other + done, out + done, count - done, divisor);
  }
  A total[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    const T* first = static_cast<const T*>(inputs[0]) + begin;
    for (int64_t i = 0; i < n; ++i) total[i] = static_cast<A>(first[i]);
    for (size_t rank = 1; rank < inputs.size(); ++rank) {
      const T* next = static_cast<const T*>(inputs[rank]) + begin;
      for (int64_t i = 0; i < n; ++i) total[i] = Op::template apply<A>(total[i], static_cast<A>(next[i]));
    }
    if (divisor != A(1)) {
      for (int64_t i = 0; i < n; ++i) total[i] = total[i] / divisor;
    }
    T* out = static_cast<T*>(output) + begin;
    for (int64_t i = 0; i < n; ++i) out[i] = to_element<T>(total[i]);
  }
}

// The same source for three instruction sets. None contracts a product and a sum, so their bits are the same.
#if defined(__x86_64__)
template <class T, class A, class Op>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")]] void reduce_avx512(
    c10::ArrayRef<const void*> inputs, void* output, int64_t count, A divisor) {
  reduce_blocks<T, A, Op>(inputs, output, count, divisor);
}
template <class T, class A, class Op>
[[gnu::target("avx2")]] void reduce_avx2(c10::ArrayRef<const void*> inputs, void* output, int64_t count, A divisor) {
  reduce_blocks<T, A, Op>(inputs, output, count, divisor);
}
bool has_avx512() {
  static const bool has = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return has;
}
bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}
#endif

#if defined(__x86_64__)
bool has_bfloat16() {
  static const bool has = has_avx512() && __builtin_cpu_supports("avx512bf16");
  return has;
}

// Sums as reduce_words makes them, rounded by the processor, which knows no subnormal numbers and other NaNs: words with
// one of these are left to reduce_words. Returns how many words are done.
[[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]] int64_t sum_words(const c10::BFloat16* one, const c10::BFloat16* other,
                                                                                  c10::BFloat16* output, int64_t words) {
  constexpr int kRare = 0x01 | 0x20 | 0x80;  // quiet NaN, subnormal, signalling NaN
  constexpr int64_t kWords = 16;
  alignas(64) static constexpr uint16_t kInTurn[] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i in_turn = _mm512_load_si512(kInTurn), upper = _mm512_set1_epi32(int(0xffff0000u));
  int64_t word = 0;
  for (; word + kWords <= words; word += kWords) {
    const __m512i a = _mm512_loadu_si512(one + 2 * word), b = _mm512_loadu_si512(other + 2 * word);
    const __m512 first = _mm512_add_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)));
    const __m512 second = _mm512_add_ps(_mm512_castsi512_ps(_mm512_and_si512(a, upper)), _mm512_castsi512_ps(_mm512_and_si512(b, upper)));
    if (_mm512_fpclass_ps_mask(first, kRare) | _mm512_fpclass_ps_mask(second, kRare)) {
      reduce_words<Sum, false>(one + 2 * word, other + 2 * word, output + 2 * word, kWords, 1.0f);
      continue;
    }
    const __m512i firsts = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(first));
    const __m512i seconds = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(second));
    _mm512_storeu_si512(output + 2 * word, _mm512_permutex2var_epi16(firsts, in_turn, seconds));
  }
  return word;
}
#endif

template <class T, class A, class Op>
void reduce_typed(c10::ArrayRef<const void*> inputs, void* output, int64_t count, A divisor) {
#if defined(__x86_64__)
  if constexpr (std::is_same_v<T, c10::BFloat16> && std::is_same_v<Op, Sum>) {
    if (inputs.size() == 2 && divisor == 1.0f && has_bfloat16()) {
      auto at = [](auto* tensor, int64_t element) { return static_cast<const T*>(tensor) + element; };
      const int64_t done = 2 * sum_words(at(inputs[0], 0), at(inputs[1], 0), static_cast<T*>(output), count / 2);
      const void* rest[] = {at(inputs[0], done), at(inputs[1], done)};
      return reduce_avx512<T, A, Op>(rest, static_cast<T*>(output) + done, count - done, divisor);
    }
  }
  if (has_avx512()) return reduce_avx512<T, A, Op>(inputs, output, count, divisor);
  if (has_avx2()) return reduce_avx2<T, A, Op>(inputs, output, count, divisor);
#endif
  reduce_blocks<T, A, Op>(inputs, output, count, divisor);
}

template <class T>
void reduce_dtype(RedOp::RedOpType op, c10::ArrayRef<const void*> inputs, void* output, int64_t count) {
  using A = typename AccumulatorOf<T>::type;
  // Orders compare the elements themselves: unsigned accumulators would not know the sign.
  using Ordered = std::conditional_t<std::is_integral_v<T>, T, A>;
  switch (op) {
    case RedOp::SUM:
      return reduce_typed<T, A, Sum>(inputs, output, count, A(1));
    case RedOp::PRODUCT:
      return reduce_typed<T, A, Product>(inputs, output, count, A(1));
    case RedOp::MIN:
      return reduce_typed<T, Ordered, Min>(inputs, output, count, Ordered(1));
    case RedOp::MAX:
      return reduce_typed<T, Ordered, Max>(inputs, output, count, Ordered(1));
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == RedOp::BAND) return reduce_typed<T, A, And>(inputs, output, count, A(1));
    if (op == RedOp::BOR) return reduce_typed<T, A, Or>(inputs, output, count, A(1));
    if (op == RedOp::BXOR) return reduce_typed<T, A, Xor>(inputs, output, count, A(1));
  } else {
    if (op == RedOp::AVG) return reduce_typed<T, A, Sum>(inputs, output, count, A(float(inputs.size())));
  }
  TORCH_INTERNAL_ASSERT(false, "check_reduction() refuses what is not here");
}

}  // namespace

RedOp::RedOpType op_of(c10::ScalarType dtype, RedOp::RedOpType op) {
  if (dtype != c10::ScalarType::Bool) return op;
  if (op == RedOp::SUM) return RedOp::MAX;
  if (op == RedOp::PRODUCT) return RedOp::MIN;
  return op;
}

void check_reduction(const char* collective, c10::ScalarType dtype, RedOp::RedOpType op) {
  using c10::ScalarType;
  switch (dtype) {
    case ScalarType::Float:
    case ScalarType::Double:
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::Char:
    case ScalarType::Byte:
    case ScalarType::Bool:
    case ScalarType::Int:
    case ScalarType::Long:
      break;
    default:
      TORCH_CHECK_VALUE(false, "npuccl: ", collective, " cannot reduce ", dtype,
                        "; convert it to float32, float64, float16, bfloat16, int8, uint8, bool, int32 or int64 first.");
  }
  const bool bitwise = op == RedOp::BAND || op == RedOp::BOR || op == RedOp::BXOR;
  TORCH_CHECK_VALUE(!bitwise || !c10::isFloatingType(dtype), "npuccl: ", collective, " cannot combine the bits of ", dtype,
                    "; bitwise ops are for integers.");
  TORCH_CHECK_VALUE(op != RedOp::AVG || c10::isFloatingType(dtype), "npuccl: ", collective, " cannot average ", dtype,
                    "; use ReduceOp.SUM and divide.");
  TORCH_CHECK_VALUE(op <= RedOp::BXOR, "npuccl: ", collective,
                    " does not know ReduceOp.PREMUL_SUM; multiply before, and use ReduceOp.SUM.");
}

void reduce(c10::ScalarType dtype, RedOp::RedOpType op, c10::ArrayRef<const void*> inputs, void* output, int64_t count) {
  using c10::ScalarType;
  switch (dtype) {
    case ScalarType::Float:
      return reduce_dtype<float>(op, inputs, output, count);
    case ScalarType::Double:
      return reduce_dtype<double>(op, inputs, output, count);
    case ScalarType::Half:
      return reduce_dtype<c10::Half>(op, inputs, output, count);
    case ScalarType::BFloat16:
      return reduce_dtype<c10::BFloat16>(op, inputs, output, count);
    case ScalarType::Char:
      return reduce_dtype<int8_t>(op, inputs, output, count);
    case ScalarType::Byte:
    case ScalarType::Bool:
      return reduce_dtype<uint8_t>(op, inputs, output, count);
    case ScalarType::Int:
      return reduce_dtype<int32_t>(op, inputs, output, count);
    case ScalarType::Long:
      return reduce_dtype<int64_t>(op, inputs, output, count);
    default:
      TORCH_INTERNAL_ASSERT(false, "check_reduction() refuses what is not here");
  }
}

}  // namespace npu
