// Atomic read-modify-write of device memory, which all programs of a grid and other threads share.
#pragma once

#include "arithmetic.h"

namespace npu_triton {

template <unsigned Size>
struct WordOf;
template <>
struct WordOf<1> {
  using type = uint8_t;
};
template <>
struct WordOf<2> {
  using type = uint16_t;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <>
struct WordOf<8> {
  using type = uint64_t;
};
template <class T>
using Word = typename WordOf<sizeof(T)>::type;

template <class T>
NPU_INLINE T atomic_exch(T* address, T value) {
  return bits<T>(__atomic_exchange_n(reinterpret_cast<Word<T>*>(address), bits<Word<T>>(value), __ATOMIC_ACQ_REL));
}

// Floats compare by their bits, as the instruction of GPUs does.
template <class T>
NPU_INLINE T atomic_cas(T* address, T compared, T value) {
  Word<T> expected = bits<Word<T>>(compared);
  __atomic_compare_exchange_n(reinterpret_cast<Word<T>*>(address), &expected, bits<Word<T>>(value), false,
                              __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return bits<T>(expected);
}

template <class T, class Change>
NPU_INLINE T atomic_change(T* address, Change change) {
  auto* word = reinterpret_cast<Word<T>*>(address);
  Word<T> before = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &before, bits<Word<T>>(change(bits<T>(before))), true, __ATOMIC_ACQ_REL,
                                      __ATOMIC_RELAXED)) {
  }
  return bits<T>(before);
}

template <class T>
NPU_INLINE T atomic_add(T* address, T value) {
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
template <class T>
NPU_INLINE T atomic_and(T* address, T value) {
  return __atomic_fetch_and(address, value, __ATOMIC_ACQ_REL);
}
template <class T>
NPU_INLINE T atomic_or(T* address, T value) {
  return __atomic_fetch_or(address, value, __ATOMIC_ACQ_REL);
}
template <class T>
NPU_INLINE T atomic_xor(T* address, T value) {
  return __atomic_fetch_xor(address, value, __ATOMIC_ACQ_REL);
}
#define NPU_ATOMIC(name, function)                                            \
  template <class T>                                                          \
  NPU_INLINE T atomic_##name(T* address, T value) {                           \
    return atomic_change(address, [=](T old) { return function<T>(old, value); }); \
  }
NPU_ATOMIC(fadd, addf)
NPU_ATOMIC(max, maxsi)
NPU_ATOMIC(min, minsi)
NPU_ATOMIC(umax, maxui)
NPU_ATOMIC(umin, minui)
#undef NPU_ATOMIC

}  // namespace npu_triton
